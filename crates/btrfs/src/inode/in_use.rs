//! Inodes in use: who changes which one now, and which are open.
//!
//! An operation that changes names or attributes holds the lock of every inode that it
//! changes and that others can reach. A lock lives in a table while somebody uses it or
//! the inode is open, so the table is as large as what is going on, whatever the volume holds.
//!
//! # Lock order
//!
//! | | lock | who takes it |
//! |---|---|---|
//! | 1 | a subvolume, while it is looked up for the first time | every operation, first thing; let go at once |
//! | 2 | the rename lock of the subvolume | a move of a directory to another one |
//! | 3 | inodes, ascending by id, all in one call | every operation |
//! | 4 | a transaction handle | every operation; those of data several, one after the other |
//! | 5 | shards of the table, the cache of indexes | leaves: nothing is locked under them |
//!
//! Which inodes a name leads to is known only after a look at the directory, and may change until the
//! locks are held. So an operation looks first, locks, and looks again: when others were faster
//! it begins anew. With one ascending order for all inodes there is no way to a deadlock, and no order between
//! parents and children to keep; each new beginning means that another operation came through.
//! Debug builds assert that a thread locks once at a time.
//!
//! The rename lock keeps the shape of the tree still while somebody looks for a directory
//! among the ancestors of another: nobody else can move a directory meanwhile.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;

use offshoot_btrfs_format::TreeId;
use offshoot_vfs::{FileId, Result};
use parking_lot::lock_api::ArcMutexGuard;
use parking_lot::{Mutex, RawMutex};
use quick_cache::sync::Cache;

use super::subvolume::Subvolume;

/// Shards of a table of inodes, a power of two.
pub(crate) const SHARDS: usize = 16;

/// The shard that `file` is in.
pub(crate) fn shard_of(file: FileId) -> usize {
    let spread = (file.ino ^ file.dev).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    spread as usize & (SHARDS - 1)
}

/// Of how many directories the next index is remembered.
const REMEMBERED_INDEXES: usize = 4096;

/// What is known of an inode in use.
#[derive(Debug, Default)]
struct State {
    /// How often it is open.
    opens: u64,
}

type Slot = Arc<Mutex<State>>;

/// A subvolume, once it was looked up.
type SubvolumePlace = Arc<Mutex<Option<Arc<Subvolume>>>>;

/// All inodes in use, and the subvolumes that are changed.
pub(crate) struct Inodes {
    shards: [Mutex<HashMap<FileId, Slot>>; SHARDS],
    subvolumes: Mutex<HashMap<TreeId, SubvolumePlace>>,
    /// The index that the next entry of a directory gets; used under the lock of the directory.
    pub(super) next_index: Cache<FileId, u64>,
}

impl Default for Inodes {
    fn default() -> Self {
        Self {
            shards: Default::default(),
            subvolumes: Mutex::default(),
            next_index: Cache::new(REMEMBERED_INDEXES),
        }
    }
}

thread_local! {
    /// Whether this thread holds locks of inodes.
    static HOLDS: Cell<bool> = const { Cell::new(false) };
}

impl Inodes {
    fn shard(&self, file: FileId) -> &Mutex<HashMap<FileId, Slot>> {
        &self.shards[shard_of(file)]
    }

    /// Locks `files`, which may name one several times.
    pub(super) fn lock(&self, files: &[FileId]) -> Locks<'_> {
        debug_assert!(!HOLDS.replace(true), "a thread locks inodes once at a time");
        let mut ordered = files.to_vec();
        ordered.sort_unstable();
        ordered.dedup();
        let held = ordered
            .into_iter()
            .map(|file| {
                let slot = self.shard(file).lock().entry(file).or_default().clone();
                let state = Mutex::lock_arc(&slot);
                Held { file, slot, state }
            })
            .collect();
        Locks { table: self, held, is_aside: false }
    }

    /// Locks `file` if nobody has it locked, beside what the thread has locked already.
    pub(super) fn try_lock(&self, file: FileId) -> Option<Locks<'_>> {
        let slot = self.shard(file).lock().entry(file).or_default().clone();
        let Some(state) = Mutex::try_lock_arc(&slot) else {
            drop(slot);
            self.forget_unused(file);
            return None;
        };
        Some(Locks { table: self, held: vec![Held { file, slot, state }], is_aside: true })
    }

    /// Takes `file` out of the table when nobody uses it.
    fn forget_unused(&self, file: FileId) {
        let mut shard = self.shard(file).lock();
        // What only the table knows others come to know under the shard's lock.
        let is_unused = |slot: &Slot| Arc::strong_count(slot) == 1 && slot.lock().opens == 0;
        if shard.get(&file).is_some_and(is_unused) {
            shard.remove(&file);
        }
    }

    /// The subvolume `id`, which `load` gets ready when it is used for the first time.
    pub(super) fn subvolume(
        &self,
        id: TreeId,
        load: impl FnOnce() -> Result<Subvolume>,
    ) -> Result<Arc<Subvolume>> {
        let place = self.subvolumes.lock().entry(id).or_default().clone();
        let mut place = place.lock();
        if let Some(subvolume) = &*place {
            return Ok(subvolume.clone());
        }
        let subvolume = Arc::new(load()?);
        *place = Some(subvolume.clone());
        Ok(subvolume)
    }

    /// How many inodes are in the table.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().len()).sum()
    }
}

struct Held {
    file: FileId,
    slot: Slot,
    state: ArcMutexGuard<RawMutex, State>,
}

/// Locks of inodes, held by one operation.
pub(super) struct Locks<'t> {
    table: &'t Inodes,
    held: Vec<Held>,
    /// It was there for the taking: the thread may have locked others before.
    is_aside: bool,
}

impl Locks<'_> {
    /// How often `file`, whose lock is held, is open.
    pub(super) fn opens(&mut self, file: FileId) -> &mut u64 {
        let held = self.held.iter_mut().find(|held| held.file == file);
        &mut held.expect("an operation asks for what it has locked").state.opens
    }

    /// Lets go of all locks but that of `file`.
    pub(super) fn keep_only(&mut self, file: FileId) {
        for held in self.held.extract_if(.., |held| held.file != file) {
            held.let_go(self.table);
        }
    }
}

impl Held {
    /// Gives the lock back, and removes it from the table when nobody else uses it.
    fn let_go(self, table: &Inodes) {
        let Self { file, slot, state } = self;
        drop(state);
        drop(slot);
        table.forget_unused(file);
    }
}

impl Drop for Locks<'_> {
    fn drop(&mut self) {
        for held in self.held.drain(..) {
            held.let_go(self.table);
        }
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
    fn only_what_is_open_or_locked_is_in_the_table() {
        let table = Inodes::default();
        let mut locks = table.lock(&[file(2), file(1), file(2)]);
        assert_eq!(table.len(), 2);
        *locks.opens(file(1)) += 1;
        locks.keep_only(file(1));
        assert_eq!(table.len(), 1);
        drop(locks);
        assert_eq!(table.len(), 1);
        *table.lock(&[file(1)]).opens(file(1)) -= 1;
        assert_eq!(table.len(), 0);
    }

    /// Each thread counts up under locks in an order of its own: nobody waits for ever, no
    /// count is lost with an entry that was removed too early, and the table is empty at last.
    #[test]
    fn locks_exclude_each_other_whatever_the_order() {
        const ROUNDS: u64 = 20_000;
        let table = Inodes::default();
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
        assert_eq!(table.len(), 0);
    }
}
