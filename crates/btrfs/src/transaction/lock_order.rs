//! The order of latches, checked in debug builds.
//!
//! A thread notes which blocks it has latched for writing. A block that others can reach may
//! be latched when every block that the thread has
//!
//! 1. belongs to the same tree and is above it, or
//! 2. is its sibling, and their parent is latched too, or
//! 3. belongs to a tree that comes earlier.
//!
//! The trees are ordered as `tree::write` says.

use std::cell::RefCell;

use offshoot_btrfs_format::{Logical, TreeId};

use crate::block::TreeBlock;
use crate::sync::thread_local;

thread_local! {
    static HELD: RefCell<Vec<Note>> = const { RefCell::new(Vec::new()) };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Note {
    tree: TreeId,
    level: u8,
    logical: Logical,
}

/// That the thread has a latch. Latches do not move between threads.
#[derive(Debug)]
pub(super) struct Noted(Note);

/// The place of a tree in the order of trees; those of subvolumes are one.
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

impl Note {
    fn of(block: &TreeBlock) -> Self {
        let header = block.header();
        Self { tree: header.owner(), level: header.level, logical: Logical(header.bytenr.get()) }
    }
}

impl Noted {
    /// The thread is about to latch `block`, which others can reach.
    ///
    /// # Panics
    /// When that is out of order.
    pub(super) fn in_order(block: &TreeBlock) -> Self {
        let new = Note::of(block);
        HELD.with(|held| {
            let held = held.borrow();
            for other in &*held {
                let has_parent =
                    held.iter().any(|h| h.tree == new.tree && h.level == new.level + 1);
                let fits = if other.tree == new.tree {
                    other.level > new.level || (other.level == new.level && has_parent)
                } else {
                    rank(other.tree) < rank(new.tree)
                };
                assert!(fits, "latching {new:?} while {other:?} is held, of {held:?}");
            }
        });
        Self::fresh(block)
    }

    /// The thread has latched `block`, which it just made: nobody can wait for it.
    pub(super) fn fresh(block: &TreeBlock) -> Self {
        let note = Note::of(block);
        HELD.with(|held| held.borrow_mut().push(note));
        Self(note)
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        HELD.with(|held| {
            let mut held = held.borrow_mut();
            if let Some(at) = held.iter().rposition(|note| *note == self.0) {
                held.swap_remove(at);
            }
        });
    }
}
