//! The order of latches, checked in debug builds.
//!
//! A thread notes which blocks it has latched exclusively. It may latch a block that other threads
//! can reach, even for a moment, if each block that it has latched
//!
//! 1. belongs to the same tree and is above it, or
//! 2. is its sibling, and their parent is latched for writing too, or
//! 3. belongs to a tree that comes earlier, or
//! 4. is of a later transaction. Then the new block does not change any more, and other threads
//!    hold it only for a moment.
//!
//! The trees are ordered as `tree::write` says.
//!
//! A thread has at most one transaction handle, and none when it commits: a commit waits for all
//! handles, and blocks new ones meanwhile.
//!
//! No thread takes a latch while it holds the lock of a shard of delayed items.

use std::cell::{Cell, RefCell};

use offshoot_btrfs_format::{Generation, Logical, TreeId};
#[cfg(feature = "shuttle")]
use shuttle::thread_local;

use super::TreeBlock;

thread_local! {
    static HELD: RefCell<Vec<LatchNote>> = const { RefCell::new(Vec::new()) };
    static HAS_HANDLE: Cell<bool> = const { Cell::new(false) };
    static LOOKS: Cell<bool> = const { Cell::new(false) };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LatchNote {
    tree: TreeId,
    level: u8,
    logical: Logical,
    generation: Generation,
}

/// Notes that the thread holds a latch. Latches do not move between threads.
#[derive(Debug)]
pub(super) struct NotedLatch(LatchNote);

/// The rank of a tree in the order of trees. All subvolumes have one rank.
fn rank(tree: TreeId) -> u8 {
    match tree {
        TreeId::CSUM => 1,
        TreeId::ROOT => 2,
        TreeId::CHUNK => 3,
        TreeId::DEV => 4,
        TreeId::EXTENT => 5,
        TreeId::BLOCK_GROUP => 6,
        TreeId::FREE_SPACE => 7,
        _ => 0,
    }
}

impl LatchNote {
    fn of(block: &TreeBlock) -> Self {
        let header = block.header();
        Self {
            tree: header.owner(),
            level: header.level,
            logical: Logical(header.bytenr.get()),
            generation: Generation(header.generation.get()),
        }
    }
}

/// Checks that the thread may latch `block`, which other threads can reach.
///
/// # Panics
/// When that is out of order.
pub(crate) fn require_order(block: &TreeBlock) {
    assert!(!LOOKS.with(Cell::get), "a latch is taken under a lock of delayed items");
    let new = LatchNote::of(block);
    HELD.with(|held| {
        let held = held.borrow();
        for other in held.iter().filter(|other| other.generation <= new.generation) {
            let has_parent = held.iter().any(|h| h.tree == new.tree && h.level == new.level + 1);
            let fits = if other.tree == new.tree {
                other.level > new.level || (other.level == new.level && has_parent)
            } else {
                rank(other.tree) < rank(new.tree)
            };
            assert!(fits, "latching {new:?} while {other:?} is held, of {held:?}");
        }
    });
}

impl NotedLatch {
    /// Checks the order and notes that the thread latches `block`, which other threads can reach.
    ///
    /// # Panics
    /// When that is out of order.
    pub(super) fn in_order(block: &TreeBlock) -> Self {
        require_order(block);
        Self::fresh(block)
    }

    /// Notes that the thread has latched `block`, which it just made. No other thread can wait for
    /// it, so any order is allowed.
    pub(super) fn fresh(block: &TreeBlock) -> Self {
        let note = LatchNote::of(block);
        HELD.with(|held| held.borrow_mut().push(note));
        Self(note)
    }
}

impl Drop for NotedLatch {
    fn drop(&mut self) {
        HELD.with(|held| {
            let mut held = held.borrow_mut();
            if let Some(at) = held.iter().rposition(|note| *note == self.0) {
                held.swap_remove(at);
            }
        });
    }
}

/// Notes that the thread has locked a shard of delayed items.
#[derive(Debug)]
pub(crate) struct NotedDelayedLock(());

impl NotedDelayedLock {
    /// The thread locks a shard.
    pub(crate) fn begin() -> Self {
        LOOKS.with(|looks| looks.set(true));
        Self(())
    }
}

impl Drop for NotedDelayedLock {
    fn drop(&mut self) {
        LOOKS.with(|looks| looks.set(false));
    }
}

/// Notes that the thread has a transaction handle. Handles do not move between threads.
#[derive(Debug)]
pub(crate) struct NotedHandle(());

impl NotedHandle {
    /// The thread is about to join.
    ///
    /// # Panics
    /// When it has a handle already.
    pub(crate) fn first() -> Self {
        require_no_handle();
        HAS_HANDLE.with(|has| has.set(true));
        Self(())
    }
}

impl Drop for NotedHandle {
    fn drop(&mut self) {
        HAS_HANDLE.with(|has| has.set(false));
    }
}

/// # Panics
/// When the thread has a transaction handle.
pub(crate) fn require_no_handle() {
    let has = HAS_HANDLE.with(Cell::get);
    assert!(!has, "a thread that holds a transaction handle joins again, or commits");
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use offshoot_btrfs_format::encode::{BlockIdentity, new_block};
    use uuid::Uuid;

    use super::*;
    use crate::test_volumes::in_memory;
    use crate::{BtrfsVolume, EngineOptions};

    const SUBVOLUME: TreeId = TreeId(256);

    /// A block of `tree` on this level, the only one of its kind with this number.
    fn block(tree: TreeId, level: u8, number: u64) -> TreeBlock {
        let identity = BlockIdentity {
            metadata_uuid: Uuid::from_u128(7),
            chunk_tree_uuid: Uuid::from_u128(8),
            logical: Logical(number << 14),
            generation: Generation(9),
            owner: tree,
            level,
        };
        TreeBlock::verified(new_block(16384, &identity))
    }

    /// Latches blocks that other threads can reach, one after the other, and holds them all.
    fn latch(blocks: &[(TreeId, u8)]) -> Vec<NotedLatch> {
        (1..)
            .zip(blocks)
            .map(|(n, &(tree, level))| NotedLatch::in_order(&block(tree, level, n)))
            .collect()
    }

    #[test]
    fn trees_are_latched_in_their_order_and_from_the_root_down() {
        let order = [
            SUBVOLUME,
            TreeId::CSUM,
            TreeId::ROOT,
            TreeId::CHUNK,
            TreeId::DEV,
            TreeId::EXTENT,
            TreeId::BLOCK_GROUP,
            TreeId::FREE_SPACE,
        ];
        let blocks: Vec<_> =
            order.into_iter().flat_map(|tree| [(tree, 3), (tree, 1), (tree, 0)]).collect();
        drop(latch(&blocks));
        // Released latches do not count any more.
        drop(latch(&[(TreeId::FREE_SPACE, 0)]));
        drop(latch(&[(SUBVOLUME, 1)]));
    }

    #[test]
    #[should_panic(expected = "is held")]
    fn an_earlier_tree_is_not_latched_under_a_later_one() {
        latch(&[(TreeId::FREE_SPACE, 0), (TreeId::EXTENT, 0)]);
    }

    #[test]
    #[should_panic(expected = "is held")]
    fn subvolumes_are_not_latched_under_each_other() {
        latch(&[(SUBVOLUME, 0), (TreeId::FS, 0)]);
    }

    #[test]
    #[should_panic(expected = "is held")]
    fn a_block_is_not_latched_under_one_below_it() {
        latch(&[(SUBVOLUME, 0), (SUBVOLUME, 1)]);
    }

    #[test]
    #[should_panic(expected = "is held")]
    fn a_sibling_is_not_latched_without_the_parent() {
        latch(&[(SUBVOLUME, 0), (SUBVOLUME, 0)]);
    }

    #[test]
    #[should_panic(expected = "is held")]
    fn a_block_higher_up_is_no_parent_of_siblings() {
        latch(&[(SUBVOLUME, 2), (SUBVOLUME, 0), (SUBVOLUME, 0)]);
    }

    #[test]
    #[should_panic(expected = "is held")]
    fn a_block_of_another_tree_is_no_parent_of_siblings() {
        latch(&[(SUBVOLUME, 1), (TreeId::EXTENT, 0), (TreeId::EXTENT, 0)]);
    }

    #[test]
    fn a_sibling_is_latched_with_the_parent() {
        drop(latch(&[(SUBVOLUME, 2), (SUBVOLUME, 1), (SUBVOLUME, 0), (SUBVOLUME, 0)]));
    }

    /// No other thread can wait for a block that was just made. Here it becomes the parent of the
    /// block that is latched after it.
    #[test]
    fn a_new_block_may_come_anywhere() {
        let _leaf = NotedLatch::in_order(&block(SUBVOLUME, 0, 1));
        let _new = NotedLatch::fresh(&block(SUBVOLUME, 1, 2));
        let _sibling = NotedLatch::in_order(&block(SUBVOLUME, 0, 3));
    }

    #[test]
    #[should_panic(expected = "is held")]
    fn a_new_block_counts_for_what_is_latched_after_it() {
        let _new = NotedLatch::fresh(&block(TreeId::FREE_SPACE, 0, 1));
        latch(&[(TreeId::EXTENT, 0)]);
    }

    #[test]
    #[should_panic(expected = "under a lock of delayed items")]
    fn no_latch_is_taken_under_a_lock_of_delayed_items() {
        let _looking = NotedDelayedLock::begin();
        latch(&[(SUBVOLUME, 0)]);
    }

    #[test]
    fn latches_are_taken_after_a_lock_of_delayed_items() {
        drop(NotedDelayedLock::begin());
        drop(latch(&[(SUBVOLUME, 0)]));
    }

    fn volume() -> Arc<BtrfsVolume> {
        BtrfsVolume::open_writable(vec![in_memory(16384)], &EngineOptions::default())
            .expect("it opens")
    }

    #[test]
    #[should_panic(expected = "joins again")]
    fn a_thread_has_one_handle() {
        let volume = volume();
        let _one = volume.join().expect("it is writable");
        let _ = volume.join();
    }

    #[test]
    #[should_panic(expected = "or commits")]
    fn a_thread_with_a_handle_does_not_commit() {
        let volume = volume();
        let _one = volume.join().expect("it is writable");
        let _ = volume.commit();
    }
}
