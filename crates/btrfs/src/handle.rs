//! An open volume, as its user holds it.

use std::ops::Deref;
use std::sync::Arc;

use offshoot_btrfs_format::TreeId;
use offshoot_device::BlockDevice;
use offshoot_vfs::{FileSystem, FileSystemMut, Result, Trimmed, VolumeVersion};
use tracing::info;

use crate::engine::{Engine, OpenOptions};
use crate::events::OPEN;
use crate::filesystem::Filesystem;
use crate::upkeep::Committer;
use crate::{SubvolumeId, inode, log};

/// An open btrfs volume: an [`Engine`], and the thread that commits its changes.
///
/// Dropping the last share of it, including [`Filesystem`]s, ends the thread and closes the
/// devices.
pub struct Volume {
    /// Dropped before the engine, so the thread ends first.
    _committer: Option<Committer>,
    engine: Arc<Engine>,
}

impl Deref for Volume {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

impl Drop for Volume {
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

impl Volume {
    /// Opens the volume with the members `devices`, in any order, for reading. A pending tree log
    /// is replayed in memory, unless the options ignore it. The devices are not written.
    ///
    /// # Errors
    /// [`Error::Posix`](offshoot_vfs::Error::Posix) when the devices do not make up one volume, or
    /// when one is missing without `degraded`;
    /// [`Error::Unsupported`](offshoot_vfs::Error::Unsupported) when the volume needs a feature
    /// that the engine does not have; [`Error::Corrupt`](offshoot_vfs::Error::Corrupt) when its
    /// chunk tree or root tree cannot be read.
    pub fn open(devices: Vec<Arc<dyn BlockDevice>>, options: &OpenOptions) -> Result<Arc<Self>> {
        let engine = Arc::new(log::open(devices, options)?);
        opened(&engine, false);
        Ok(Arc::new(Self { _committer: None, engine }))
    }

    /// Opens the volume with the members `devices` for reading and writing. The devices must be
    /// writable, and no other program may use them. A pending tree log is replayed first, with a
    /// commit.
    ///
    /// # Errors
    /// As [`Volume::open`], and [`Error::Unsupported`](offshoot_vfs::Error::Unsupported) for a
    /// volume that can only be read.
    pub fn open_writable(
        devices: Vec<Arc<dyn BlockDevice>>,
        options: &OpenOptions,
    ) -> Result<Arc<Self>> {
        let engine = Arc::new(log::open_writable(devices, options)?);
        opened(&engine, true);
        let interval = options.commit_interval;
        let committer = interval.map(|interval| Committer::start(&engine, interval)).transpose()?;
        Ok(Arc::new(Self { _committer: committer, engine }))
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

impl offshoot_vfs::Volume for Volume {
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

    fn trim(&self) -> Result<Trimmed> {
        self.engine.trim()
    }
}
