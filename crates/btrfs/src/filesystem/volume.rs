//! An open volume, as its user holds it.

use std::ops::{ControlFlow, Deref, Range};
use std::sync::Arc;

use offshoot_btrfs_format::encode::sealed_superblock;
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, Superblock};
use offshoot_btrfs_format::{Physical, TreeId};
use offshoot_device::BlockDevice;
use offshoot_vfs::{Errno, Error, FileSystem, FileSystemMut, Result, Trimmed, VolumeVersion};
use tracing::info;

use super::Filesystem;
use crate::check::{CheckEvent, CheckOptions, CheckOutcome, CheckWatch, check_at, check_btrfs};
use crate::engine::Engine;
use crate::events::OPEN;
use crate::options::EngineOptions;
use crate::scrub::{self, ScrubCounts, ScrubOptions, ScrubWatch};
use crate::storage::malformed;
use crate::upkeep::{self, Committer};
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

    /// Compares everything that the structures of the volume say about each other.
    ///
    /// A volume that was opened for writing commits first, and that commit is checked while other
    /// threads go on. What they free becomes free when the check ends, and the volume keeps its
    /// size and its block groups until then.
    ///
    /// # Errors
    /// As for [`check_btrfs`](crate::check_btrfs). `EBUSY` while the volume is resized or checked.
    /// `ENOSPC` when writers need the space that the check keeps: then the check ends.
    pub fn check(&self, options: &CheckOptions, watch: &CheckWatch<'_>) -> Result<CheckOutcome> {
        let devices = self.members().iter().filter_map(|member| member.device.clone()).collect();
        let options =
            CheckOptions { is_degraded: self.rooms.options.is_degraded, ..options.clone() };
        let Some(live) = self.live_part() else {
            return check_btrfs(devices, &options, watch);
        };
        let _alone = upkeep::alone(self)?;
        let _groups = live.space.keep_empty_groups();
        self.commit()?;
        let kept = live.keep_commit();
        let place = SUPERBLOCK_OFFSETS[0];
        let checksum = self.superblock().checksum;
        let bytes = sealed_superblock(kept.superblock(), Physical(place), checksum);
        let superblock = Superblock::parse(&bytes[..], place).map_err(malformed)?;
        let watch = |event: &CheckEvent| {
            if kept.is_whole() { watch(event) } else { ControlFlow::Break(()) }
        };
        let outcome = check_at(devices, Some(superblock), &options, &watch);
        if !kept.is_whole() {
            let what = "a check beside what is written: the volume got full; free some space, or \
                        check it when it is not mounted";
            return Err(Error::posix(Errno::NOSPC, what));
        }
        outcome
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
