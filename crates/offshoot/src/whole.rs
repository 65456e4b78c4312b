//! Calls about a whole volume that is not open: its check, and its recovery.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use offshoot_btrfs::{CheckOptions, CheckOutcome, check_btrfs};
use offshoot_device::{BlockDevice, VolumeFormat};
use offshoot_vfs::{Code, Error, Result};
use offshoot_xfs::{XfsCheckResult, XfsRecovery, XfsVolume, check_xfs};

use crate::OpenOptions;
use crate::find::find;

/// What the check of a volume found.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum VolumeFindings {
    /// Of a btrfs volume.
    Btrfs(CheckOutcome),
    /// Of an XFS volume.
    Xfs(XfsCheckResult),
}

impl VolumeFindings {
    /// Whether nothing was found.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        match self {
            Self::Btrfs(outcome) => outcome.findings.is_empty(),
            Self::Xfs(result) => result.findings.is_empty(),
        }
    }

    /// The findings in words.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        let (btrfs, xfs) = match self {
            Self::Btrfs(outcome) => (&outcome.findings[..], &[][..]),
            Self::Xfs(result) => (&[][..], &result.findings[..]),
        };
        let btrfs = btrfs.iter().map(ToString::to_string);
        btrfs.chain(xfs.iter().map(ToString::to_string))
    }
}

impl OpenOptions {
    /// Compares everything that the structures of the volume at `path` say about each other.
    /// Nothing is written. Of XFS a log that is not empty is replayed in memory; of btrfs the last
    /// commit is checked. No program may write the volume meanwhile.
    ///
    /// ```no_run
    /// # fn main() -> offshoot::Result<()> {
    /// let found = offshoot::OpenOptions::new().check("server.img")?;
    /// found.lines().for_each(|finding| println!("{finding}"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// For the data, progress and bounds see [`check_btrfs`].
    ///
    /// # Errors
    /// As [`open`](Self::open), but for what is damaged, which are findings.
    pub fn check(&self, path: impl AsRef<Path>) -> Result<VolumeFindings> {
        let reading = self.clone().write(false);
        let devices = reading.devices_at(path.as_ref())?;
        if let [device] = &devices[..]
            && VolumeFormat::on(&**device) == VolumeFormat::Xfs
        {
            return check_xfs(device, &self.for_xfs()?).map(VolumeFindings::Xfs);
        }
        let is_degraded = self.engine.is_degraded;
        let options = CheckOptions { is_degraded, ..CheckOptions::default() };
        let checked = check_btrfs(devices, &options, &|_| ControlFlow::Continue(()))?;
        Ok(VolumeFindings::Btrfs(checked))
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

    /// The devices of the volume at `path`.
    pub(crate) fn devices_at(&self, path: &Path) -> Result<Vec<Arc<dyn BlockDevice>>> {
        let mut devices = vec![find(path, self.partition, self)?];
        for further in &self.members {
            devices.push(find(further, None, self)?);
        }
        Ok(devices)
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
