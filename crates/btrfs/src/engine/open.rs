//! Opening: from devices to an [`Engine`].

use std::sync::Arc;
use std::time::Duration;

use offshoot_btrfs_format::chunk::{Chunk, DevItem};
use offshoot_btrfs_format::superblock::Incompat;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::BlockDevice;
use offshoot_vfs::{Error, Result, Structure};

use super::{Engine, Mechanisms};
use crate::cores;
use crate::delayed::Delayed;
use crate::log::RunningLog;
use crate::report::Reporter;
use crate::storage::{Storage, malformed};
use crate::subvolume::State;
use crate::transaction::{Base, chunk_tree_root};
use crate::tree::Cursor;

/// How a volume is opened.
#[derive(Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub struct OpenOptions {
    /// Whether the volume opens although members are missing.
    pub degraded: bool,
    /// Whether a pending tree log is ignored. The volume is then read as of the last commit,
    /// without data that was fsynced after it, and cannot be written.
    pub ignore_log: bool,
    /// The memory that replaying a pending log may take, in bytes. It holds the tree blocks that
    /// replay changes. A volume opened for reading may take as much again, because it keeps the
    /// result in memory instead of writing it.
    pub replay_bytes: u64,
    /// The size of the cache of tree blocks, in bytes. A volume that is open for writing may take
    /// half as much again to remember the names in new directories.
    pub cache_bytes: u64,
    /// The callback that gets a [`Report`](crate::Report) of each problem that did not fail a call.
    pub reporter: Option<Reporter>,
    /// How much may be dirty, in bytes: so much of data, and as much of tree blocks. The volume
    /// starts to write at half of it. At all of it, a thread that wants to change more writes
    /// first.
    pub dirty_bytes: u64,
    /// How files without a compression setting of their own are compressed; `None` for not at all.
    pub compress: Option<crate::inode::compression::Compress>,
    /// How the data of new files is stored.
    pub new_files: crate::inode::create::NewFiles,
    /// The largest file that is stored inline in its extent item, in bytes; 0 for none. A value
    /// larger than an item can hold counts as the largest possible.
    pub max_inline: u64,
    /// Whether fsync writes the tree log where that is possible, instead of committing. The mount
    /// option `notreelog` of the kernel is the opposite of it.
    pub tree_log: bool,
    /// Whether freed space is discarded, as with the mount option `discard` of the kernel. The
    /// thread of the volume does so soon after the commit. Without a `commit_interval` there is no
    /// thread, and the committing thread does it.
    pub discard: bool,
    /// Whether files are written back before each commit, as with the mount option `flushoncommit`
    /// of the kernel. A commit for want of room, or because a thread has changed too many tree
    /// blocks, leaves out files that another thread is changing.
    pub flush_on_commit: bool,
    /// How often a thread of the volume commits by itself; `None` for never, and without a thread.
    /// An interval below 1 ms counts as 1 ms.
    pub commit_interval: Option<Duration>,
    /// What is switched off or done in another way, to be measured.
    #[doc(hidden)]
    pub mechanisms: Mechanisms,
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
            mechanisms: Mechanisms::default(),
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
                        Structure::RootTree,
                        "the feature RAID_STRIPE_TREE without such a tree",
                    ),
                    e => e,
                })?);
        }
        Ok(volume)
    }

    /// Opens the volume again, without repeating the reports of the first opening.
    pub(crate) fn open_again(
        devices: Vec<Arc<dyn BlockDevice>>,
        options: &OpenOptions,
    ) -> Result<Self> {
        let quiet = OpenOptions { reporter: None, ..options.clone() };
        let mut volume = Self::open_engine(devices, &quiet)?;
        volume.base.storage.set_reporter(options.reporter.clone());
        Ok(volume)
    }

    /// An engine over `storage` that knows only the root tree so far.
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

    /// All devices and chunks in the chunk tree.
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
