//! Opening: from devices to an [`Engine`].

use std::sync::Arc;
use std::time::Duration;

use offshoot_btrfs_format::chunk::{Chunk, DevItem};
use offshoot_btrfs_format::superblock::Incompat;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::BlockDevice;
use offshoot_vfs::{Error, Result};

use super::Engine;
use crate::cores;
use crate::delayed::Delayed;
use crate::log::RunningLog;
use crate::report::Reporter;
use crate::storage::{Storage, malformed};
use crate::subvolume::State;
use crate::transaction::{Base, chunk_tree_root};
use crate::tree::{Cursor, Latching};

/// How a volume is opened.
#[derive(Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub struct OpenOptions {
    /// Open it although members are missing.
    pub degraded: bool,
    /// Leave a pending tree log alone: the volume is read as the last commit left it, without what
    /// was fsynced since. It cannot be written then.
    pub ignore_log: bool,
    /// What replaying a pending log may take of memory, in bytes: the tree blocks that it changes,
    /// and once more those that a volume which is opened for reading keeps instead of writing them.
    pub replay_bytes: u64,
    /// What the cache of tree blocks may hold, in bytes. In a volume that is written, the names
    /// that are remembered of new directories may take half as much beside it.
    pub cache_bytes: u64,
    /// Who is told of what was survived.
    pub reporter: Option<Reporter>,
    /// What may be changed and not on the devices yet, in bytes: of data, and of tree blocks. A
    /// volume that is written begins to write at half of it, and lets nobody change more at all of
    /// it.
    pub dirty_bytes: u64,
    /// How the data of files is compressed that do not say so themselves; `None` for not at all.
    pub compress: Option<crate::inode::compression::Compress>,
    /// How the data of new files is stored.
    pub new_files: crate::inode::create::NewFiles,
    /// The largest file that is kept in its extent item, in bytes; 0 for none. More than there is
    /// room for in an item counts as that.
    pub max_inline: u64,
    /// Whether fsync writes the tree log where that is possible, instead of committing. The mount
    /// option `notreelog` of the kernel is the opposite of it.
    pub tree_log: bool,
    /// Whether the devices are told what commits have freed, as with the mount option `discard` of
    /// the kernel. It is done soon after the commit, by the thread of the volume; in one that does
    /// not commit by itself, by whoever commits.
    pub discard: bool,
    /// Whether files are written back before each commit, whatever it is made for, as with the
    /// mount option `flushoncommit` of the kernel. One that is made for want of room, or because of
    /// dirty blocks by who changes them, leaves out the files that somebody is changing then.
    pub flush_on_commit: bool,
    /// How often a volume that is written commits by itself; `None` for never. A thread of
    /// its own does that. It waits a millisecond at least, whatever less is asked for.
    pub commit_interval: Option<Duration>,
    /// Whether items of the namespace are gathered in memory and put into the tree many at a time.
    /// To be measured, not to be changed otherwise.
    pub delayed_items: bool,
    /// Whether every delayed item keeps all the space that was reserved for it; else new items of a
    /// directory share that of a leaf. To be measured, not to be changed otherwise.
    pub reserve_by_item: bool,
    /// Whether a log gets every item of a directory by itself, also where a commit is cheaper; else
    /// those that are side by side in the subvolume go together, with one copy of their data. To be
    /// measured, not to be changed otherwise.
    pub log_by_item: bool,
    /// How many commits one cycle of making room may have before an operation is told that there is
    /// no space: one, or two; to be measured, not to be changed otherwise.
    pub commits_per_cycle: u32,
    /// How writers latch what is above a leaf; to be measured, not to be changed otherwise.
    pub latching: Latching,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            degraded: false,
            ignore_log: false,
            replay_bytes: 1 << 30,
            cache_bytes: 64 << 20,
            reporter: None,
            dirty_bytes: 64 << 20,
            compress: None,
            new_files: crate::inode::create::NewFiles::default(),
            max_inline: 2048,
            tree_log: true,
            discard: false,
            flush_on_commit: false,
            commit_interval: Some(Duration::from_secs(30)),
            delayed_items: true,
            reserve_by_item: false,
            log_by_item: false,
            commits_per_cycle: 1,
            latching: Latching::default(),
        }
    }
}

impl Engine {
    pub(crate) fn open_engine(
        devices: Vec<Arc<dyn BlockDevice>>,
        options: &OpenOptions,
    ) -> Result<Self> {
        cores::learn();
        let (storage, found) =
            Storage::open(devices, options.reporter.clone(), options.ignore_log)?;
        let mut volume = Self::over(storage, options);
        let (devices, chunks) = volume.read_chunk_tree()?;
        volume.base.storage.learn(&devices, chunks, &found, options.degraded)?;
        volume.base.csum_tree = match volume.tree(TreeId::CSUM) {
            Ok(root) => Some(root),
            Err(Error::Posix { .. }) => None,
            Err(e) => return Err(e),
        };
        if volume.superblock().incompat.has(Incompat::RAID_STRIPE_TREE) {
            volume.base.stripe_tree =
                Some(volume.tree(TreeId::RAID_STRIPE).map_err(|e| match e {
                    Error::Posix { .. } => Error::corrupt(
                        "root tree",
                        "the feature RAID_STRIPE_TREE without such a tree",
                    ),
                    e => e,
                })?);
        }
        Ok(volume)
    }

    /// Opens the volume again, without the reports that opening it has made before.
    pub(crate) fn open_again(
        devices: Vec<Arc<dyn BlockDevice>>,
        options: &OpenOptions,
    ) -> Result<Self> {
        let quiet = OpenOptions { reporter: None, ..options.clone() };
        let mut volume = Self::open_engine(devices, &quiet)?;
        volume.base.storage.set_reporter(options.reporter.clone());
        Ok(volume)
    }

    /// An engine over `storage` that knows no tree but the root tree yet.
    fn over(storage: Storage, options: &OpenOptions) -> Self {
        Self {
            delayed: Delayed::off(storage.superblock().node_size),
            log: RunningLog::default(),
            subvolumes: State::default(),
            options: options.clone(),
            inodes: crate::inode::Inodes::new(options.cache_bytes / 2),
            buffers: crate::data::Buffers::new(&Arc::default()),
            read_ahead: crate::data::ReadAhead::default(),
            base: Base::new(storage, options.cache_bytes),
        }
    }

    /// All devices and chunks that the chunk tree has.
    fn read_chunk_tree(&self) -> Result<(Vec<DevItem>, Vec<Chunk>)> {
        let root = chunk_tree_root(self);
        let sector_size = self.superblock().sector_size;
        let (mut devices, mut chunks) = (Vec::new(), Vec::new());
        let mut cursor = Cursor::seek(self, root, Key::MIN)?;
        while let Some((key, data)) = cursor.item() {
            let parsed = match key.item_type {
                ItemType::DEV_ITEM => DevItem::view(data).map(|item| devices.push(*item)),
                ItemType::CHUNK_ITEM => {
                    Chunk::parse_prefix(key, data, sector_size).map(|(chunk, _)| chunks.push(chunk))
                }
                _ => Ok(()),
            };
            parsed.map_err(malformed)?;
            cursor.advance()?;
        }
        Ok((devices, chunks))
    }
}
