//! An open volume, as its user holds it.

use std::ops::{Deref, Range};
use std::sync::Arc;

use offshoot_btrfs_format::TreeId;
use offshoot_device::BlockDevice;
use offshoot_vfs::{FileSystem, FileSystemMut, Result, Trimmed, VolumeVersion};
use tracing::info;

use super::Filesystem;
use crate::engine::Engine;
use crate::events::OPEN;
use crate::options::EngineOptions;
use crate::scrub::{self, ScrubCounts, ScrubOptions, ScrubWatch};
use crate::upkeep::Committer;
use crate::{SubvolumeId, inode};

/// An open btrfs volume: an [`Engine`], and the thread that commits its changes.
///
/// Dropping the last share of it, including [`Filesystem`]s, ends the thread and closes the
/// devices.
pub struct BtrfsVolume {
    /// Dropped before the engine, so the thread ends first.
    _committer: Option<Committer>,
    engine: Arc<Engine>,
}

impl Deref for BtrfsVolume {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

impl Drop for BtrfsVolume {
    fn drop(&mut self) {
        info!(target: OPEN, fsid = %self.superblock().fsid, "closing");
    }
}

fn opened(engine: &Engine, is_writable: bool) {
    let superblock = engine.superblock();
    info!(
        target: OPEN,
        fsid = %superblock.fsid,
        generation = superblock.generation.0,
        members = engine.members().len(),
        is_writable,
        "opened",
    );
}

impl BtrfsVolume {
    /// Opens the volume with the members `devices`, in any order, for reading. A pending tree log
    /// is replayed in memory, unless the options ignore it. The devices are not written.
    ///
    /// # Errors
    /// [`Error::Posix`](offshoot_vfs::Error::Posix) when the devices do not make up one volume, or
    /// when one is missing without `degraded`;
    /// [`Error::Unsupported`](offshoot_vfs::Error::Unsupported) when the volume needs a feature
    /// that the engine does not have; [`Error::Corrupt`](offshoot_vfs::Error::Corrupt) when its
    /// chunk tree or root tree cannot be read.
    pub fn open(devices: Vec<Arc<dyn BlockDevice>>, options: &EngineOptions) -> Result<Arc<Self>> {
        let engine = Arc::new(Engine::open(devices, options)?);
        opened(&engine, false);
        Ok(Arc::new(Self { _committer: None, engine }))
    }

    /// Opens the volume with the members `devices` for reading and writing. The devices must be
    /// writable, and no other program may use them. A pending tree log is replayed first, with a
    /// commit.
    ///
    /// # Errors
    /// As [`BtrfsVolume::open`], and [`Error::Unsupported`](offshoot_vfs::Error::Unsupported) for a
    /// volume that can only be read.
    pub fn open_writable(
        devices: Vec<Arc<dyn BlockDevice>>,
        options: &EngineOptions,
    ) -> Result<Arc<Self>> {
        let engine = Arc::new(Engine::open_writable(devices, options)?);
        opened(&engine, true);
        let interval = options.commit_interval;
        let committer = interval
            .map(|interval| Committer::start(&engine, engine.subvolumes.clone(), interval))
            .transpose()?;
        Ok(Arc::new(Self { _committer: committer, engine }))
    }

    /// Reads every copy of everything that is allocated, verifies it where possible, and repairs
    /// bad copies from good ones.
    ///
    /// While a volume that was opened for writing is scrubbed, other threads may change it. A
    /// volume that was opened for reading is repaired too, unless the options forbid it; nothing
    /// else on it changes. Then its devices must be writable, no other program may use them, and it
    /// must have been opened with [`EngineOptions::is_log_ignored`]. Chunks with RAID5 or RAID6 are
    /// only read, and so are seeds.
    ///
    /// Members that missed commits are brought up to date. Everything on them that differs is
    /// overwritten, and if no error remains, they get the superblock of the last commit. That needs
    /// a volume that was opened for reading and has no pending log. Otherwise such members are only
    /// read.
    ///
    /// # Errors
    /// [`Error::Unsupported`](offshoot_vfs::Error::Unsupported) for volumes with a RAID stripe
    /// tree, which places copies elsewhere, and for the repair of zoned volumes. `EINTR` after
    /// `watch` broke it off. `EROFS` when the volume has stopped writing. The error of a device
    /// that fails to flush. Bad places are not errors here: they are counted.
    pub fn scrub(&self, options: &ScrubOptions, watch: &ScrubWatch<'_>) -> Result<ScrubCounts> {
        scrub::scrub(self, *options, watch)
    }

    /// The filesystem with the subvolume `root` as its root directory.
    ///
    /// # Errors
    /// `ENOENT` when there is no such subvolume.
    pub fn filesystem(self: &Arc<Self>, root: SubvolumeId) -> Result<Filesystem> {
        let filesystem = Filesystem::new(self.clone(), root);
        inode::attr(self, filesystem.root())?;
        if let Some(live) = self.live_part() {
            live.tree(self, root)?.require_name()?;
            inode::subvolume::prepare(self, root)?;
        }
        Ok(filesystem)
    }
}

impl offshoot_vfs::Volume for BtrfsVolume {
    fn files(self: Arc<Self>, dev: u64) -> Result<Box<dyn FileSystemMut>> {
        Ok(Box::new(self.filesystem(TreeId(dev))?))
    }

    fn version(&self) -> VolumeVersion {
        let superblock = self.superblock();
        let (generation, log) = (superblock.generation, superblock.item.log_root);
        VolumeVersion {
            volume: superblock.fsid.to_string(),
            state: format!("generation {generation}, log {log}"),
        }
    }

    fn block_size(&self) -> u32 {
        self.superblock().sector_size
    }

    fn label(&self) -> Vec<u8> {
        self.engine.label()
    }

    fn set_label(&self, label: &[u8]) -> Result<()> {
        self.engine.set_label(label)
    }

    fn trim(&self, within: Range<u64>) -> Result<Trimmed> {
        self.engine.trim(within)
    }

    fn shut_down(&self) -> Result<()> {
        self.engine.shut_down()
    }
}
