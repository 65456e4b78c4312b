//! Calls about a whole volume that is not open: its check, and its recovery.

use std::path::Path;
use std::sync::Arc;

use offshoot_device::{BlockDevice, VolumeFormat};
use offshoot_vfs::{Code, Error, Result};
use offshoot_xfs::{XfsCheckResult, XfsRecovery, XfsVolume, check_xfs};

use crate::OpenOptions;
use crate::find::find;

impl OpenOptions {
    /// Compares everything that the structures of the volume at `path` say about each other. XFS
    /// only. Nothing is written: a log that is not empty is replayed in memory.
    ///
    /// ```no_run
    /// # fn main() -> offshoot::Result<()> {
    /// let result = offshoot::OpenOptions::new().check("server.img")?;
    /// result.findings.iter().for_each(|finding| println!("{finding}"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`open`](Self::open), but for a damaged log or superblock, which are findings.
    pub fn check(&self, path: impl AsRef<Path>) -> Result<XfsCheckResult> {
        let refused = "a check of a btrfs volume: that is for XFS so far; open it, and read all of \
                       it";
        let device = self.clone().write(false).xfs_at(path.as_ref(), refused)?;
        check_xfs(&device, &self.for_xfs()?)
    }

    /// Brings what the log of the volume at `path` holds to disk, as the kernel does when it mounts
    /// the volume after a crash. XFS only: a btrfs volume is recovered when it is opened for
    /// writing. `None` when the log was empty; nothing is written then.
    ///
    /// ```no_run
    /// # fn main() -> offshoot::Result<()> {
    /// if let Some(done) = offshoot::OpenOptions::new().recover("server.img")? {
    ///     println!("{} transactions replayed, up to {}", done.transactions, done.to);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`open`](Self::open), and for volumes whose log cannot be replayed. Everything is proved
    /// before the first byte is written.
    pub fn recover(&self, path: impl AsRef<Path>) -> Result<Option<XfsRecovery>> {
        let refused = "recovering a btrfs volume: opening it for writing does that";
        let device = self.clone().write(true).xfs_at(path.as_ref(), refused)?;
        XfsVolume::recover(&device, &self.for_xfs()?)
    }

    /// The device of the XFS volume at `path`; `refused` of a btrfs volume.
    fn xfs_at(&self, path: &Path, refused: &str) -> Result<Arc<dyn BlockDevice>> {
        let device = find(path, self.partition, self)?;
        match VolumeFormat::on(&*device) {
            VolumeFormat::Xfs => Ok(device),
            VolumeFormat::Btrfs => Err(Error::unsupported(Code::NotInFormat, refused)),
        }
    }
}
