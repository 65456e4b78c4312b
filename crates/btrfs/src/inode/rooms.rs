//! The rooms that files need, and the work that they ask of the room above.

use std::ops::Deref;
use std::sync::Arc;

use offshoot_btrfs_format::check::ExpectedBlock;
use offshoot_btrfs_format::{Generation, Key, TreeId};
use offshoot_kit::read_ahead::ReadAhead;
use offshoot_vfs::{Error, Result};

use super::subvolume::SubvolumeMoves;
use super::{Inodes, RoomsHandle};
use crate::block::{HeldBlock, TreeBlock};
use crate::data::{Buffers, DecodedExtents, FileVolume};
use crate::delayed::{Delayed, Queues};
use crate::options::EngineOptions;
use crate::space::{Purpose, Waiter};
use crate::transaction::{Base, ChangingTree, CommitCause};
use crate::tree::{Blocks, LostSubtree};

/// The rooms of an open volume that files need: the state of `inode` and of all rooms below it.
pub struct Rooms {
    pub(crate) base: Base,
    /// How the volume was opened.
    pub(crate) options: EngineOptions,
    /// Delayed items of the trees of subvolumes.
    pub(crate) delayed: Delayed,
    /// Inodes that are being changed or are open.
    pub(crate) inodes: Inodes,
    /// Data that was written and waits for write-back.
    pub(crate) buffers: Buffers,
    pub(crate) read_ahead: ReadAhead,
    pub(crate) decoded: DecodedExtents,
    pub(crate) moves: SubvolumeMoves,
    pub(crate) upkeep: Box<dyn Upkeep>,
}

/// The room above that commits and makes room.
pub(crate) trait Upkeep: Send + Sync {
    /// Makes room until the ticket of `own`, the leader of the line for this kind of space, has
    /// ended.
    fn lead(&self, volume: &Rooms, purpose: Purpose, own: &Waiter) -> Result<()>;

    /// Allocates chunks of metadata while less than `bytes` are free and the members have place for
    /// one. The caller must hold no handle.
    fn look_for_room(&self, volume: &Rooms, bytes: u64) -> Result<()>;

    /// Commits if more than `dirty_bytes` of tree blocks are dirty.
    fn commit_over(&self, volume: &Rooms, dirty_bytes: u64, cause: CommitCause) -> Result<()>;

    /// Commits the transaction `generation`, unless it was committed already.
    fn commit_one(&self, volume: &Rooms, generation: Generation, cause: CommitCause) -> Result<()>;

    /// Calls `work` while no other thread has a handle, with a handle of a transaction in which
    /// `tree` is not changed yet. The caller must hold no handle.
    fn at_rest<'v>(
        &self,
        volume: &'v Rooms,
        tree: &ChangingTree,
        work: AtRest<'_, 'v>,
    ) -> Result<()>;
}

/// The work of a call of [`Upkeep::at_rest`].
pub(crate) type AtRest<'w, 'v> = Box<dyn FnOnce(RoomsHandle<'v>) -> Result<()> + 'w>;

impl Deref for Rooms {
    type Target = Base;

    fn deref(&self) -> &Base {
        &self.base
    }
}

impl Queues for Rooms {
    fn delayed(&self) -> &Delayed {
        &self.delayed
    }
}

impl FileVolume for Rooms {
    fn base(&self) -> &Base {
        &self.base
    }

    fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    fn read_ahead(&self) -> &ReadAhead {
        &self.read_ahead
    }

    fn decoded(&self) -> &DecodedExtents {
        &self.decoded
    }
}

impl Blocks for Rooms {
    fn is_changing(&self) -> bool {
        self.base.is_changing()
    }

    fn epoch(&self) -> u64 {
        self.base.epoch()
    }

    fn block(&self, expected: &ExpectedBlock) -> Result<Arc<TreeBlock>> {
        self.base.block(expected)
    }

    fn child(&self, node: &TreeBlock, slot: usize, owner: TreeId) -> Result<Arc<TreeBlock>> {
        self.base.child(node, slot, owner)
    }

    fn instead(&self, lost: &LostSubtree, error: Error) -> Result<Option<Arc<TreeBlock>>> {
        self.base.instead(lost, error)
    }

    fn may_have_lost(&self, tree: TreeId, key: Key) -> bool {
        self.base.may_have_lost(tree, key)
    }

    fn hold_root(&self, id: TreeId) -> Result<HeldBlock> {
        self.base.hold_root(id)
    }

    fn hold(&self, expected: &ExpectedBlock) -> Result<HeldBlock> {
        self.base.hold(expected)
    }
}
