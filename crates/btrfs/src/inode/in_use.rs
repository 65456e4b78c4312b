//! Inodes in use: who changes which one now, which are open, and what is remembered of directories.
//!
//! An operation that changes names or attributes holds the lock of every inode that it changes and
//! that others can reach. A lock lives in a table while somebody uses it or the inode is open, and
//! some time longer: when a shard of the table is full, what nobody uses is forgotten, last of all
//! the directories that were in use not long ago. So the table is as large as what is going on, or
//! as its bound, whatever the volume holds.
//!
//! # Lock order
//!
//! | | lock | who takes it |
//! |---|---|---|
//! | 1 | a subvolume, while it is looked up for the first time | every operation, first thing; let go at once |
//! | 2 | the rename lock of the subvolume | a move of a directory to another one |
//! | 3 | inodes, ascending by id, all in one call; who removes a name locks the directory first, and then what comes behind it | every operation |
//! | 4 | a transaction handle | every operation; those of data several, one after the other |
//! | 5 | shards of the table, what is remembered of a directory | leaves: nothing is locked under them |
//!
//! Which inodes a name leads to is known only after a look at the directory, and may change until
//! the locks are held. So an operation looks first, locks, and looks again: when others were faster
//! it begins anew. Who removes a name locks the directory before it looks, and need not look again
//! when the file comes behind. With one ascending order for all inodes there is no way to a
//! deadlock, and no order between parents and children to keep; each new beginning means that
//! another operation came through. Debug builds assert that a thread locks once at a time.
//!
//! The rename lock keeps the shape of the tree still while somebody looks for a directory
//! among the ancestors of another: nobody else can move a directory meanwhile.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use foldhash::fast::RandomState;
use offshoot_btrfs_format::TreeId;
use offshoot_vfs::{FileId, Result};
use parking_lot::lock_api::ArcMutexGuard;
use parking_lot::{Mutex, RawMutex, RwLock};
use smallvec::SmallVec;

use super::directories::{Budget, Directory};
use super::subvolume::Subvolume;
use crate::data::{SHARDS, shard_of};

/// The inodes that a shard has before it forgets what nobody uses.
const SHARD_INODES: usize = 512;

/// What is known of an inode in use.
#[derive(Debug, Default)]
struct State {
    /// How often it is open.
    opens: u64,
    /// It was made without a name, and may get one.
    is_linkable: bool,
}

/// An inode in the table.
#[derive(Default)]
struct Entry {
    lock: Arc<Mutex<State>>,
    /// Taken for a moment, by who holds the lock of the directory.
    directory: Option<Arc<Mutex<Directory>>>,
    /// It was used since the shard was full the last time.
    is_recent: bool,
}

impl Entry {
    /// Whether somebody has the lock or waits for it, or the inode is open. What only the table
    /// knows others come to know under the shard's lock.
    fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.lock) > 1 || self.lock.lock().opens > 0
    }
}

/// Inodes in use, or in use not long ago.
struct Shard {
    entries: HashMap<FileId, Entry, RandomState>,
    /// How many there are before those that nobody uses are forgotten.
    most: usize,
}

impl Default for Shard {
    fn default() -> Self {
        Self { entries: HashMap::default(), most: SHARD_INODES }
    }
}

impl Shard {
    fn entry(&mut self, file: FileId) -> &mut Entry {
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

/// All inodes in use, and the subvolumes that are changed.
pub(crate) struct Inodes {
    shards: [Mutex<Shard>; SHARDS],
    subvolumes: RwLock<HashMap<TreeId, Arc<Subvolume>, RandomState>>,
    loading: Mutex<HashMap<TreeId, SubvolumePlace>>,
    /// What the names that are remembered of directories may take.
    names: Arc<Budget>,
}

thread_local! {
    /// Whether this thread holds locks of inodes.
    static HOLDS: Cell<bool> = const { Cell::new(false) };
}

impl Inodes {
    /// Nothing in use, and at most `name_bytes` for the names of directories.
    pub(crate) fn new(name_bytes: u64) -> Self {
        Self {
            shards: Default::default(),
            subvolumes: RwLock::default(),
            loading: Mutex::default(),
            names: Arc::new(Budget::new(name_bytes)),
        }
    }

    fn shard(&self, file: FileId) -> &Mutex<Shard> {
        &self.shards[shard_of(file)]
    }

    /// Locks `files`, which may name one several times.
    pub(crate) fn lock(&self, files: &[FileId]) -> Locks {
        debug_assert!(!HOLDS.replace(true), "a thread locks inodes once at a time");
        let mut ordered: SmallVec<[FileId; 4]> = SmallVec::from_slice(files);
        ordered.sort_unstable();
        ordered.dedup();
        let held = ordered.into_iter().map(|file| Held { file, state: self.lock_one(file) });
        Locks { held: held.collect(), is_aside: false }
    }

    fn lock_one(&self, file: FileId) -> ArcMutexGuard<RawMutex, State> {
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

    /// Locks `file` too, if it comes behind all that `locks` has; whether it does.
    pub(super) fn lock_behind(&self, locks: &mut Locks, file: FileId) -> bool {
        let is_behind = locks.held.iter().all(|held| held.file < file);
        if is_behind {
            locks.held.push(Held { file, state: self.lock_one(file) });
        }
        is_behind
    }

    /// Locks `file` if nobody has it locked, beside what the thread has locked already.
    pub(crate) fn try_lock(&self, file: FileId) -> Option<Locks> {
        let state = Mutex::try_lock_arc(&self.shard(file).lock().entry(file).lock)?;
        Some(Locks { held: SmallVec::from_iter([Held { file, state }]), is_aside: true })
    }

    /// Locks `file` beside what the thread has locked already, if whoever has it lets go of it
    /// within so long. They may wait for what the thread has, so it must have another way out.
    pub(crate) fn lock_within(&self, file: FileId, patience: Duration) -> Option<Locks> {
        let lock = self.shard(file).lock().entry(file).lock.clone();
        let state = Mutex::try_lock_arc_for(&lock, patience)?;
        Some(Locks { held: SmallVec::from_iter([Held { file, state }]), is_aside: true })
    }

    /// Looks at what is remembered of the directory `dir`, whose lock the caller holds.
    pub(super) fn with_directory<T>(
        &self,
        dir: FileId,
        look: impl FnOnce(&mut Directory) -> T,
    ) -> T {
        let directory = self.shard(dir).lock().entry(dir).directory.get_or_insert_default().clone();
        look(&mut directory.lock())
    }

    /// Whether the directory `dir` has no name with this hash, as far as that is remembered.
    /// Nothing has to be locked.
    pub(super) fn lacks_name(&self, dir: FileId, hash: u64) -> bool {
        let shard = self.shard(dir).lock();
        let directory = shard.entries.get(&dir).and_then(|entry| entry.directory.clone());
        drop(shard);
        directory.is_some_and(|directory| directory.lock().lacks_name(hash))
    }

    /// The directory `dir` was just made, and nobody else knows it yet.
    pub(super) fn directory_made(&self, dir: FileId) {
        self.with_directory(dir, |directory| directory.made(&self.names));
    }

    /// The directory `dir` is no more.
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

    /// The subvolume `id`, if it is known already.
    pub(crate) fn known_subvolume(&self, id: TreeId) -> Option<Arc<Subvolume>> {
        self.subvolumes.read().get(&id).cloned()
    }

    /// The subvolume `id`, which `load` gets ready when it is used for the first time.
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
        self.subvolumes.write().insert(id, subvolume.clone());
        Ok(subvolume)
    }

    /// The subvolume `id` is no more.
    pub(crate) fn forget_subvolume(&self, id: TreeId) {
        self.loading.lock().remove(&id);
        self.subvolumes.write().remove(&id);
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

struct Held {
    file: FileId,
    state: ArcMutexGuard<RawMutex, State>,
}

/// Locks of inodes, held by one operation.
pub(crate) struct Locks {
    held: SmallVec<[Held; 2]>,
    /// It was there for the taking: the thread may have locked others before.
    is_aside: bool,
}

impl Locks {
    /// How often `file`, whose lock is held, is open.
    pub(crate) fn opens(&mut self, file: FileId) -> &mut u64 {
        &mut self.state(file).opens
    }

    fn state(&mut self, file: FileId) -> &mut State {
        let held = self.held.iter_mut().find(|held| held.file == file);
        &mut held.expect("an operation asks for what it has locked").state
    }

    /// Whether `file`, whose lock is held, may get a first name. It is known while the file is
    /// open.
    pub(super) fn is_linkable(&mut self, file: FileId) -> &mut bool {
        &mut self.state(file).is_linkable
    }

    /// Lets go of all locks but that of `file`.
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

    /// However many inodes come and go, the table has what is in use, and of the rest no more than
    /// its bound.
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

    /// What is used all the time is remembered while other inodes come and go.
    #[test]
    fn a_directory_in_use_is_remembered() {
        let table = Inodes::new(0);
        table.with_directory(file(1), |dir| dir.set_next_index(7));
        for ino in 2..100_000 {
            drop(table.lock(&[file(1), file(ino)]));
        }
        assert_eq!(table.with_directory(file(1), Directory::take_index), Some(7));
    }

    /// Each thread counts up under locks in an order of its own: nobody waits for ever, no
    /// count is lost with an entry that was removed too early, and none is in use at last.
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
