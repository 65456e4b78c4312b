//! Inodes in use: their locks, how often they are open, and the cache of directories.
//!
//! An operation that changes names or attributes locks every inode that it changes, except new
//! inodes that no other thread can reach. A table holds the lock while a thread uses it or the
//! inode is open, and for some time longer. When a shard of the table is full it forgets unused
//! inodes; recently used directories go last. So the size of the table is bounded by the inodes in
//! use and a fixed size, not by the size of the volume.
//!
//! # Lock order
//!
//! | | lock | which operation takes it |
//! |---|---|---|
//! | 1 | a subvolume, while it is loaded for the first time | every operation first; released at once |
//! | 2 | the rename lock of the subvolume | a move of a directory |
//! | 3 | inodes, ascending by id, all in one call; a removal locks the directory first, and then the file if its id is higher | every operation |
//! | 4 | a transaction handle | every operation; operations on data several, one after the other |
//! | 5 | shards of the table, the cache of a directory | leaves: no lock is taken under them |
//!
//! An operation learns which inode a name leads to only by looking into the directory, and that may
//! change before it holds the locks. So an operation looks up the name, locks, and looks again. If
//! the answer has changed it begins anew; each new beginning means that another operation has
//! finished. A removal locks the directory before it looks, and need not look again if the file has
//! the higher id. Since all locks ascend by id, no deadlock is possible, and parents and children
//! need no order between them. Debug builds assert that a thread makes one such call at a time.
//!
//! The rename lock keeps the shape of the tree still while an operation searches the ancestors of a
//! directory: no other thread can move a directory meanwhile.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use foldhash::fast::RandomState;
use offshoot_btrfs_format::TreeId;
use offshoot_kit::shards::{SHARDS, shard_of};
use offshoot_vfs::{FileId, Result};
use parking_lot::lock_api::ArcMutexGuard;
use parking_lot::{Mutex, RawMutex};
use smallvec::SmallVec;

use super::directories::{Budget, DirectoryFacts};
use super::subvolume::Subvolume;
use crate::shared::Padded;
use crate::spread::SpreadRwLock;

/// The number of inodes in a shard at which it forgets unused ones.
const SHARD_INODES: usize = 512;

/// The state of an inode in use.
#[derive(Debug, Default)]
struct InodeUse {
    /// The number of times that it is open.
    opens: u64,
    /// Whether the inode was made without a name, and may get one.
    is_linkable: bool,
}

/// An inode in the table.
#[derive(Default)]
struct InodeEntry {
    lock: Arc<Mutex<InodeUse>>,
    /// Locked for a moment only, usually by the holder of the directory's lock.
    directory: Option<Arc<Mutex<DirectoryFacts>>>,
    /// Whether it was used since the shard was last full.
    is_recent: bool,
}

impl InodeEntry {
    /// Whether a thread holds the lock or waits for it, or the inode is open. Threads get the lock
    /// from the table under the lock of the shard, so the answer holds while that is held.
    fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.lock) > 1 || self.lock.lock().opens > 0
    }
}

/// Inodes in use, or in use not long ago.
struct InodeShard {
    entries: HashMap<FileId, InodeEntry, RandomState>,
    /// The number of entries at which unused ones are forgotten.
    most: usize,
}

impl Default for InodeShard {
    fn default() -> Self {
        Self { entries: HashMap::default(), most: SHARD_INODES }
    }
}

impl InodeShard {
    fn entry(&mut self, file: FileId) -> &mut InodeEntry {
        if self.entries.len() >= self.most && !self.entries.contains_key(&file) {
            self.forget_unused();
        }
        self.entries.entry(file).or_default()
    }

    fn forget_unused(&mut self) {
        self.entries.retain(|_, entry| {
            let is_recent = std::mem::take(&mut entry.is_recent);
            is_recent && entry.directory.is_some() || entry.is_in_use()
        });
        if self.entries.len() > SHARD_INODES / 2 {
            self.entries.retain(|_, entry| entry.is_in_use());
        }
        self.most = SHARD_INODES.max(2 * self.entries.len());
    }
}

/// A subvolume that is being looked up.
type SubvolumePlace = Arc<Mutex<Option<Arc<Subvolume>>>>;

/// All inodes in use, and the subvolumes that are being changed.
pub(crate) struct Inodes {
    shards: [Padded<Mutex<InodeShard>>; SHARDS],
    subvolumes: SpreadRwLock<HashMap<TreeId, Arc<Subvolume>, RandomState>>,
    loading: Mutex<HashMap<TreeId, SubvolumePlace>>,
    /// The budget of the sets of names.
    names: Arc<Budget>,
}

thread_local! {
    /// Whether this thread holds locks of inodes.
    static HOLDS: Cell<bool> = const { Cell::new(false) };
}

impl Inodes {
    /// An empty table, with at most `name_bytes` for the sets of names.
    pub(crate) fn new(name_bytes: u64) -> Self {
        Self {
            shards: Default::default(),
            subvolumes: SpreadRwLock::with_few_copies("subvolumes", HashMap::default),
            loading: Mutex::default(),
            names: Arc::new(Budget::new(name_bytes)),
        }
    }

    fn shard(&self, file: FileId) -> &Mutex<InodeShard> {
        &self.shards[shard_of(file)]
    }

    /// Locks `files`, which may contain a file several times.
    pub(crate) fn lock(&self, files: &[FileId]) -> Locks {
        debug_assert!(!HOLDS.replace(true), "a thread locks inodes once at a time");
        let mut ordered: SmallVec<[FileId; 4]> = SmallVec::from_slice(files);
        ordered.sort_unstable();
        ordered.dedup();
        let held =
            ordered.into_iter().map(|file| HeldInodeLock { file, state: self.lock_one(file) });
        Locks { held: held.collect(), is_aside: false }
    }

    fn lock_one(&self, file: FileId) -> ArcMutexGuard<RawMutex, InodeUse> {
        let lock = {
            let mut shard = self.shard(file).lock();
            let entry = shard.entry(file);
            entry.is_recent = true;
            match Mutex::try_lock_arc(&entry.lock) {
                Some(state) => return state,
                None => entry.lock.clone(),
            }
        };
        Mutex::lock_arc(&lock)
    }

    /// Locks `file` too, if its id is higher than all in `locks`. Returns whether it is.
    pub(super) fn lock_behind(&self, locks: &mut Locks, file: FileId) -> bool {
        let is_behind = locks.held.iter().all(|held| held.file < file);
        if is_behind {
            locks.held.push(HeldInodeLock { file, state: self.lock_one(file) });
        }
        is_behind
    }

    /// Locks `file` if it is free. The thread may hold other locks already.
    pub(crate) fn try_lock(&self, file: FileId) -> Option<Locks> {
        let state = Mutex::try_lock_arc(&self.shard(file).lock().entry(file).lock)?;
        Some(Locks { held: SmallVec::from_iter([HeldInodeLock { file, state }]), is_aside: true })
    }

    /// Locks `file` if it becomes free within `patience`. The thread may hold other locks, and the
    /// holder of this one may wait for them, so the caller must be able to do without.
    pub(crate) fn lock_within(&self, file: FileId, patience: Duration) -> Option<Locks> {
        let lock = self.shard(file).lock().entry(file).lock.clone();
        let state = Mutex::try_lock_arc_for(&lock, patience)?;
        Some(Locks { held: SmallVec::from_iter([HeldInodeLock { file, state }]), is_aside: true })
    }

    /// Calls `look` with the cache of the directory `dir`, whose lock the caller holds.
    pub(super) fn with_directory<T>(
        &self,
        dir: FileId,
        look: impl FnOnce(&mut DirectoryFacts) -> T,
    ) -> T {
        let directory = self.shard(dir).lock().entry(dir).directory.get_or_insert_default().clone();
        look(&mut directory.lock())
    }

    /// Whether the cache knows that the directory `dir` has no name with this hash. The caller
    /// needs no lock.
    pub(super) fn lacks_name(&self, dir: FileId, hash: u64) -> bool {
        let shard = self.shard(dir).lock();
        let directory = shard.entries.get(&dir).and_then(|entry| entry.directory.clone());
        drop(shard);
        directory.is_some_and(|directory| directory.lock().lacks_name(hash))
    }

    /// Notes that the directory `dir` was just made. No other thread knows it yet.
    pub(super) fn directory_made(&self, dir: FileId) {
        self.with_directory(dir, |directory| directory.made(&self.names));
    }

    /// Forgets the cache of the directory `dir`, which is removed.
    pub(super) fn forget_directory(&self, dir: FileId) {
        self.shard(dir).lock().entry(dir).directory = None;
    }

    /// A number for a new file in `dir`, whose lock the caller holds.
    ///
    /// # Errors
    /// `ENOSPC` when no number is left.
    pub(super) fn take_number(&self, dir: FileId, subvolume: &Subvolume) -> Result<u64> {
        self.with_directory(dir, |directory| {
            if let Some(number) = directory.take_number() {
                return Ok(number);
            }
            let mut numbers = subvolume.take_numbers()?;
            let first = numbers.next().expect("a group has numbers");
            directory.set_numbers(numbers);
            Ok(first)
        })
    }

    /// The subvolume `id`, if it is loaded already.
    pub(crate) fn known_subvolume(&self, id: TreeId) -> Option<Arc<Subvolume>> {
        self.subvolumes.read().get(&id).cloned()
    }

    /// The subvolume `id`. The first call loads it with `load`.
    pub(super) fn subvolume(
        &self,
        id: TreeId,
        load: impl FnOnce() -> Result<Subvolume>,
    ) -> Result<Arc<Subvolume>> {
        let place = self.loading.lock().entry(id).or_default().clone();
        let mut place = place.lock();
        if let Some(subvolume) = &*place {
            return Ok(subvolume.clone());
        }
        let subvolume = Arc::new(load()?);
        *place = Some(subvolume.clone());
        self.subvolumes.write().change(|all| drop(all.insert(id, subvolume.clone())));
        Ok(subvolume)
    }

    /// Forgets the subvolume `id`, which is deleted.
    pub(crate) fn forget_subvolume(&self, id: TreeId) {
        self.loading.lock().remove(&id);
        self.subvolumes.write().change(|all| drop(all.remove(&id)));
    }

    /// How many inodes are in the table, and how many of them are in use.
    #[cfg(test)]
    fn len(&self) -> (usize, usize) {
        self.shards.iter().fold((0, 0), |(all, used), shard| {
            let shard = shard.lock();
            let in_use = shard.entries.values().filter(|entry| entry.is_in_use()).count();
            (all + shard.entries.len(), used + in_use)
        })
    }
}

struct HeldInodeLock {
    file: FileId,
    state: ArcMutexGuard<RawMutex, InodeUse>,
}

/// Locks of inodes, held by one operation.
pub(crate) struct Locks {
    held: SmallVec<[HeldInodeLock; 2]>,
    /// These locks came from `try_lock` or `lock_within`, and the thread may hold others.
    is_aside: bool,
}

impl Locks {
    /// How often `file`, whose lock is held, is open.
    pub(crate) fn opens(&mut self, file: FileId) -> &mut u64 {
        &mut self.state(file).opens
    }

    fn state(&mut self, file: FileId) -> &mut InodeUse {
        let held = self.held.iter_mut().find(|held| held.file == file);
        &mut held.expect("an operation asks for what it has locked").state
    }

    /// Whether `file`, whose lock is held, may get a first name. The answer is kept while the file
    /// is open.
    pub(super) fn is_linkable(&mut self, file: FileId) -> &mut bool {
        &mut self.state(file).is_linkable
    }

    /// Releases all locks except that of `file`.
    pub(super) fn keep_only(&mut self, file: FileId) {
        self.held.retain(|held| held.file == file);
    }
}

impl Drop for Locks {
    fn drop(&mut self) {
        if !self.is_aside {
            HOLDS.set(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(ino: u64) -> FileId {
        FileId { dev: 5, ino }
    }

    #[test]
    fn only_what_is_open_or_locked_is_in_use() {
        let table = Inodes::new(0);
        let mut locks = table.lock(&[file(2), file(1), file(2)]);
        assert_eq!(table.len(), (2, 2));
        *locks.opens(file(1)) += 1;
        locks.keep_only(file(1));
        assert_eq!(table.len(), (2, 1));
        drop(locks);
        assert_eq!(table.len(), (2, 1));
        *table.lock(&[file(1)]).opens(file(1)) -= 1;
        assert_eq!(table.len(), (2, 0));
    }

    #[test]
    fn what_comes_before_is_not_locked_behind() {
        let table = Inodes::new(0);
        let mut locks = table.lock(&[file(2)]);
        assert!(table.lock_behind(&mut locks, file(3)));
        assert!(!table.lock_behind(&mut locks, file(3)) && !table.lock_behind(&mut locks, file(1)));
        assert_eq!(*locks.opens(file(3)), 0);
        assert!(table.try_lock(file(3)).is_none() && table.try_lock(file(1)).is_some());
    }

    /// However many inodes come and go, the table holds those in use and a bounded number of
    /// others.
    #[test]
    fn the_table_has_a_bound() {
        let table = Inodes::new(0);
        for ino in 0..10_000 {
            *table.lock(&[file(ino)]).opens(file(ino)) += 1;
        }
        assert_eq!(table.len(), (10_000, 10_000));
        for ino in 0..10_000 {
            *table.lock(&[file(ino)]).opens(file(ino)) -= 1;
        }
        for ino in 10_000..100_000 {
            drop(table.lock(&[file(ino)]));
            table.with_directory(file(ino), |dir| dir.set_next_index(ino));
        }
        let (all, in_use) = table.len();
        assert!(all <= SHARDS * SHARD_INODES && in_use == 0, "{all}, {in_use} in use");
    }

    /// A directory that is used all the time is remembered while other inodes come and go.
    #[test]
    fn a_directory_in_use_is_remembered() {
        let table = Inodes::new(0);
        table.with_directory(file(1), |dir| dir.set_next_index(7));
        for ino in 2..100_000 {
            drop(table.lock(&[file(1), file(ino)]));
        }
        assert_eq!(table.with_directory(file(1), DirectoryFacts::take_index), Some(7));
    }

    /// Each thread counts up under locks in its own order. No thread waits for ever, no count is
    /// lost because an entry was removed too early, and at the end no entry is in use.
    #[test]
    fn locks_exclude_each_other_whatever_the_order() {
        const ROUNDS: u64 = 20_000;
        let table = Inodes::new(0);
        let counts = [const { std::sync::atomic::AtomicU64::new(0) }; 4];
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (table, counts) = (&table, &counts);
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let (one, other) = ((thread + round) % 4, (3 * thread + round / 4) % 4);
                        let _locks = table.lock(&[file(one), file(other)]);
                        // A read and a write, which would lose counts without the lock.
                        for i in [one, other] {
                            let count = &counts[usize::try_from(i).expect("below 4")];
                            let seen = count.load(std::sync::atomic::Ordering::Relaxed);
                            count.store(seen + 1, std::sync::atomic::Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        let sum: u64 = counts.into_iter().map(std::sync::atomic::AtomicU64::into_inner).sum();
        assert_eq!(sum, 4 * ROUNDS * 2);
        assert_eq!(table.len(), (4, 0));
    }
}
