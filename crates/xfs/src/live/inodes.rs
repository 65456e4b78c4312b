//! Inodes in use: their locks, and how often they are open.
//!
//! An inode is in the table while a thread uses it, and as long as it is open or waits to be freed.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Deref;
use std::sync::Arc;

use offshoot_kit::shards::{SHARDS, scatter};
use offshoot_kit::sync::{ArcReadGuard, ArcWriteGuard, Mutex, RwLock};
use offshoot_xfs_format::Ino;

use crate::buffered::BufferedFile;
use crate::log::LogSequence;
use crate::trans::XfsInodeCommit;

/// What is known of an inode beside its locks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LiveInodeState {
    /// How often it is open.
    pub(super) opens: u64,
    /// The openings that do not know yet whether the file is there.
    pub(super) openings: u64,
    /// Whether it has no name, so that it is freed when it is not open.
    pub(super) is_nameless: bool,
    /// Whether it was made without a name, and may get one.
    pub(super) is_linkable: bool,
    /// Whether it could not be freed, which was told. The idle thread tries it again.
    pub(super) has_failed: bool,
    /// The last commit of it that changed only times, and the last one before that changed more.
    pub(super) times: Option<TimesCommit>,
}

/// A commit that changed only the times of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TimesCommit {
    pub(super) commit: XfsInodeCommit,
    /// The context of the last commit before it that changed more; `None` when that was durable.
    pub(super) before: Option<LogSequence>,
}

impl LiveInodeState {
    /// Whether the table has to keep it.
    fn is_pending(&self) -> bool {
        self.opens > 0 || self.openings > 0 || self.is_nameless
    }

    /// Whether it has to be freed.
    pub(super) fn is_unused(&self) -> bool {
        self.is_nameless && self.opens == 0 && self.openings == 0
    }

    /// The state of the next file with the number. Openings go on.
    pub(super) fn renewed(&self) -> Self {
        Self { opens: self.opens, openings: self.openings, ..Self::default() }
    }
}

/// An inode in use.
#[derive(Debug)]
pub(super) struct LiveInode {
    pub(super) ino: Ino,
    lock: Arc<RwLock<()>>,
    /// The buffer of the file, once it was used. A file that is freed has none.
    pub(super) buffer: Mutex<Option<Arc<BufferedFile>>>,
    pub(super) state: Mutex<LiveInodeState>,
}

/// An inode of the table, and how many threads use it.
#[derive(Debug)]
struct LiveInodeEntry {
    inode: Arc<LiveInode>,
    users: usize,
}

/// A part of the table. Users are counted under its lock, so the last one takes the inode out.
type LiveInodeShard = Mutex<HashMap<Ino, LiveInodeEntry>>;

/// The shards of the table.
type LiveInodeShards = [LiveInodeShard; SHARDS];

/// The inodes in use of a volume.
#[derive(Debug, Default)]
pub(super) struct LiveInodes {
    shards: LiveInodeShards,
}

impl LiveInodes {
    fn shard(&self, ino: Ino) -> Option<&LiveInodeShard> {
        self.shards.get(scatter(ino.0) & (SHARDS - 1))
    }

    /// An inode. It stays in the table at least until the result is dropped.
    pub(super) fn get(&self, ino: Ino) -> UsedInode<'_> {
        let new = || {
            let (lock, buffer, state) = (Arc::default(), Mutex::default(), Mutex::default());
            Arc::new(LiveInode { ino, lock, buffer, state })
        };
        let inode = match self.shard(ino) {
            Some(shard) => {
                let mut shard = shard.lock();
                let entry = shard.entry(ino);
                let entry = entry.or_insert_with(|| LiveInodeEntry { inode: new(), users: 0 });
                entry.users += 1;
                entry.inode.clone()
            }
            None => new(),
        };
        UsedInode { table: self, inode }
    }

    /// Locks an inode against changes of its data.
    pub(super) fn read(&self, ino: Ino) -> ReadInode<'_> {
        let used = self.get(ino);
        ReadInode { _guard: RwLock::read_arc(&used.lock), _used: used }
    }

    /// Locks inodes for changes. The caller has no such lock.
    pub(super) fn write(&self, inodes: impl IntoIterator<Item = Ino>) -> LockedFiles<'_> {
        let mut inodes: Vec<_> = inodes.into_iter().collect();
        inodes.sort_unstable();
        inodes.dedup();
        let used: Vec<_> = inodes.into_iter().map(|ino| self.get(ino)).collect();
        let guards = used.iter().map(|used| RwLock::write_arc(&used.lock)).collect();
        LockedFiles { _guards: guards, used }
    }

    /// The inodes that have no name: they are open, or could not be freed.
    pub(super) fn nameless(&self) -> Vec<Ino> {
        self.with(|state| state.is_nameless)
    }

    /// Those that could not be freed.
    pub(super) fn not_freed(&self) -> Vec<Ino> {
        self.with(|state| state.has_failed)
    }

    /// The inodes whose state is such.
    fn with(&self, is_wanted: impl Fn(&LiveInodeState) -> bool) -> Vec<Ino> {
        let of_shard = |shard: &LiveInodeShard| {
            let shard = shard.lock();
            let wanted = shard.values().filter(|entry| is_wanted(&entry.inode.state.lock()));
            wanted.map(|entry| entry.inode.ino).collect::<Vec<_>>()
        };
        self.shards.iter().flat_map(of_shard).collect()
    }

    /// How many inodes are in the table.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().len()).sum()
    }
}

/// An inode that a thread uses.
#[derive(Debug)]
pub(super) struct UsedInode<'l> {
    table: &'l LiveInodes,
    inode: Arc<LiveInode>,
}

impl Deref for UsedInode<'_> {
    type Target = LiveInode;

    fn deref(&self) -> &LiveInode {
        &self.inode
    }
}

impl Drop for UsedInode<'_> {
    fn drop(&mut self) {
        let Some(shard) = self.table.shard(self.inode.ino) else { return };
        let mut shard = shard.lock();
        if let Entry::Occupied(mut entry) = shard.entry(self.inode.ino) {
            let users = &mut entry.get_mut().users;
            *users = users.saturating_sub(1);
            if *users == 0 && !self.inode.state.lock().is_pending() {
                entry.remove();
            }
        }
    }
}

/// An inode whose data no thread changes.
#[derive(Debug)]
pub(super) struct ReadInode<'l> {
    // Dropped first.
    _guard: ArcReadGuard<()>,
    _used: UsedInode<'l>,
}

/// Inodes that are locked for changes.
#[derive(Debug)]
pub(super) struct LockedFiles<'l> {
    // Dropped first.
    _guards: Vec<ArcWriteGuard<()>>,
    used: Vec<UsedInode<'l>>,
}

impl LockedFiles<'_> {
    /// Forgets the buffer of one of them, which is freed.
    pub(super) fn forget_buffer(&self, ino: Ino) {
        if let Some(used) = self.used.iter().find(|used| used.ino == ino) {
            *used.buffer.lock() = None;
        }
    }

    /// Changes the state of one of them.
    pub(super) fn with_state<T>(
        &self,
        ino: Ino,
        change: impl FnOnce(&mut LiveInodeState) -> T,
    ) -> Option<T> {
        let used = self.used.iter().find(|used| used.ino == ino)?;
        Some(change(&mut used.state.lock()))
    }
}
