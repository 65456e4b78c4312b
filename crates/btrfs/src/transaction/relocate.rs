//! Relocation: extents move to other places, and everything that refers to them follows.
//!
//! A [`Relocation`] is what one commit moves. It is planned and applied at the end of a
//! transaction, when no other thread has a handle and all delayed references are in the extent
//! tree. So the extent tree is exact, and no block of a subvolume changes meanwhile.
//!
//! # Blocks of subvolumes, and data
//!
//! A block that several snapshots share must stay shared. So a moved block is not copied for each
//! tree that reaches it, as a writer would do. Instead the block, and all blocks on all ways to it,
//! move together:
//!
//! ```text
//!   root A   root B          root A'  root B'
//!       \    /      moves        \    /        Each block has one copy, with the same items. Only
//!        node       ----->        node'        addresses differ: its own, and those of the blocks
//!       /    \                   /    \        and data that move too. Both roots share the node
//!   leaf      leaf           leaf'     leaf    again, and the right leaf is the one it was.
//! ```
//!
//! The copies keep the generation of the original. So they count as shared exactly where the
//! originals did, incremental streams between snapshots stay small, and the generations of a
//! read-only subvolume do not change. A copy is written to free space at once, before anything
//! refers to it, and never changes. It is a committed block as far as readers are concerned.
//!
//! The extent item of a moved extent moves with all its references. A reference of a block or leaf
//! that moves gets the new address of that. What a moved block with full back references points to
//! gets its reference changed too. So the extent tree has the same references as before, and quotas
//! count the same bytes.
//!
//! The kernel relocates with a copy of each tree, which it merges subvolume by subvolume over
//! several transactions, and it must finish that after a crash. Here each transaction ends with a
//! volume that lacks nothing. A power cut leads to the volume before or after one of them.
//!
//! # Blocks of other trees
//!
//! No other tree shares blocks. The writer *touches* the block: it stores an item below it anew,
//! and the ordinary copying of the way to that item moves the block.
//!
//! # What proves it
//!
//! Before anything refers to the copies, the pointers that lead to each moved extent are counted.
//! They must be as many as the extent tree counts. If they are not, nothing has changed, and the
//! relocation ends with an error.
//!
//! # Memory
//!
//! The plan has about a hundred bytes for each block and each reference. The caller bounds the
//! number of blocks. A single extent may have more references than that; then the plan is as large
//! as that extent needs.

mod apply;
mod parents;
mod patch;
mod plan;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use offshoot_btrfs_format::{Generation, Key, Logical, TreeId};
use offshoot_vfs::{Code, Error};

use super::TransactionHandle;
use super::extent_tree::KnownReferences;

/// What one commit may move: it has reserved room for that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RelocationLimits {
    /// Blocks that are written.
    pub(crate) blocks: u64,
    /// Bytes of data.
    pub(crate) data_bytes: u64,
}

/// What one commit moves out of a range of the logical space.
pub(crate) struct Relocation<'h, 'v> {
    handle: &'h TransactionHandle<'v>,
    /// The first extent in the range.
    first: Logical,
    /// Blocks of subvolumes that move, by their address.
    blocks: BTreeMap<u64, MovingBlock>,
    /// Data that moves, by its address.
    data: BTreeMap<u64, MovingData>,
    /// Blocks of the running transaction that lead to what moves. They change where they are.
    own: BTreeSet<u64>,
    /// The trees whose root moves, with the address of that.
    roots: BTreeMap<TreeId, u64>,
    /// Blocks of other trees.
    touched: Vec<TouchedBlock>,
    /// The blocks that all this writes at most.
    cost: u64,
}

/// A block of a subvolume that moves.
struct MovingBlock {
    level: u8,
    generation: Generation,
    references: KnownReferences,
    /// Its new address, once it has one.
    to: Logical,
}

/// An extent of data that moves.
struct MovingData {
    len: u64,
    references: KnownReferences,
    /// Whether a file may have data in it. If not, it is preallocated, and no byte of it counts.
    is_written: bool,
    /// Its new address, once it has one.
    to: Logical,
}

/// A block of a tree that shares none.
struct TouchedBlock {
    tree: TreeId,
    /// The first key of the block; `None` when it has no items.
    key: Option<Key>,
}

/// Data that was given a new place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DataMove {
    pub(crate) from: Logical,
    pub(crate) to: Logical,
    pub(crate) len: u64,
    /// Whether its bytes count.
    pub(crate) is_written: bool,
}

/// What planning found.
pub(crate) enum PlannedRelocation<'h, 'v> {
    /// No extent is left in the range.
    Empty,
    /// What can be moved.
    Moves(Relocation<'h, 'v>),
    /// The next extent takes so much, which is more than the limits.
    NeedsRoom(RelocationLimits),
}

impl Relocation<'_, '_> {
    /// What moves: the number of extents, and their bytes.
    pub(crate) fn extents(&self) -> usize {
        self.blocks.len() + self.data.len() + self.touched.len()
    }

    /// The address of the first extent in the range.
    pub(crate) fn first(&self) -> Logical {
        self.first
    }

    /// The blocks that it writes at most.
    pub(crate) fn cost(&self) -> u64 {
        self.cost
    }

    /// The data that moves, by its old address.
    pub(crate) fn data_moves(&self) -> Vec<DataMove> {
        let moved = |(&from, data): (&u64, &MovingData)| DataMove {
            from: Logical(from),
            to: data.to,
            len: data.len,
            is_written: data.is_written,
        };
        self.data.iter().map(moved).collect()
    }

    fn node_size(&self) -> u64 {
        u64::from(self.handle.volume().superblock().node_size)
    }
}

/// The range of an extent.
fn range_of(at: u64, len: u64) -> Range<u64> {
    at..at.saturating_add(len)
}

/// The error for data that is in a file of a tree that is no subvolume.
fn in_another_tree(root: TreeId) -> Error {
    let what = format!("relocating data of a file in {root}");
    Error::unsupported(Code::Relocation, what)
}
