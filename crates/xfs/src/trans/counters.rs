//! The counters of the superblock. They live in memory while the volume is written, and go to the
//! superblock at its end.

use std::sync::Arc;

use offshoot_kit::counter::{WriteStop, below_zero};
use offshoot_kit::sync::Mutex;
use offshoot_vfs::{Errno, Error, Result};
use offshoot_xfs_format::AgNumber;

use super::tree_rooms::TreeRooms;

/// What the superblock counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct VolumeCounts {
    /// The inodes that are allocated.
    pub(crate) inodes: u64,
    /// Those of them that no file has.
    pub(crate) free_inodes: u64,
    /// The free blocks, with those of the trees of free space and of the free lists.
    pub(crate) free_blocks: u64,
}

/// What a transaction adds to each counter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CountChanges {
    pub(crate) inodes: i64,
    pub(crate) free_inodes: i64,
    pub(crate) free_blocks: i64,
    /// The free blocks that no file gets: fewer when a tree has taken one of those that are held
    /// back for it.
    pub(crate) held_back: i64,
    /// The blocks of trees of free inodes.
    pub(crate) free_inode_trees: Vec<(AgNumber, i64)>,
}

/// Which free blocks a transaction may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SpaceClaim {
    /// Those that files may have.
    Files,
    /// Also those of the reserve: it makes data visible that is written, or it removes something.
    Reserve,
    /// Also those that groups hold back for their trees, when there are no others: it ends with
    /// more free blocks than it began with.
    All,
}

/// The space of a volume when it begins to be written.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpaceAtStart {
    pub(crate) counts: VolumeCounts,
    /// The free blocks that no file gets: what the trees of groups may need, or have already.
    pub(crate) held_back: u64,
    /// The blocks of the tree of free inodes of each group.
    pub(crate) free_inode_trees: Vec<u64>,
}

/// The blocks of the reserve at most, and the part of all blocks that it is at most. As in the
/// kernel: 4 of 80 blocks, and 8,192 from 163,840 on.
const MOST_RESERVED: u64 = 8192;
const RESERVED_PART: u64 = 20;

/// The counters of a volume that is written.
///
/// ```text
/// free blocks    | promised | for files | reserve | held back by groups |
/// files             have it    may take
/// the reserve                  may take  may take
/// ```
#[derive(Debug)]
pub(crate) struct VolumeCounters {
    state: Mutex<CountersState>,
    tree_rooms: TreeRooms,
    stop: Arc<WriteStop>,
}

#[derive(Debug)]
struct CountersState {
    counts: VolumeCounts,
    /// The free blocks that open transactions may still take.
    promised: u64,
    /// The free blocks that no file gets: what the trees of groups may need, so that a removal
    /// never fails for want of a block.
    held_back: u64,
    /// The free blocks besides that only changes take which must not fail.
    reserve: u64,
    /// The blocks of the tree of free inodes of each group. Not all volumes have a header that
    /// counts them.
    free_inode_trees: Vec<u64>,
}

impl CountersState {
    /// The free blocks that are not promised, and that a transaction may take.
    fn free(&self, claim: SpaceClaim) -> u64 {
        let kept = match claim {
            SpaceClaim::Files => self.held_back.saturating_add(self.reserve),
            SpaceClaim::Reserve => self.held_back,
            SpaceClaim::All => 0,
        };
        self.counts.free_blocks.saturating_sub(self.promised).saturating_sub(kept)
    }
}

impl VolumeCounters {
    /// Counters of a volume of so many blocks.
    pub(crate) fn new(start: SpaceAtStart, blocks: u64, stop: &Arc<WriteStop>) -> Self {
        let SpaceAtStart { counts, held_back, free_inode_trees } = start;
        let reserve = (blocks / RESERVED_PART).min(MOST_RESERVED);
        let state = CountersState { counts, promised: 0, held_back, reserve, free_inode_trees };
        let tree_rooms = TreeRooms::default();
        Self { state: Mutex::new(state), tree_rooms, stop: stop.clone() }
    }

    /// The counters now.
    pub(crate) fn counts(&self) -> VolumeCounts {
        self.state.lock().counts
    }

    /// How many free blocks no file gets.
    #[cfg(test)]
    pub(crate) fn held_back(&self) -> u64 {
        self.state.lock().held_back
    }

    /// How many free blocks are promised.
    #[cfg(test)]
    pub(crate) fn promised(&self) -> u64 {
        self.state.lock().promised
    }

    /// The free blocks that files may have.
    pub(crate) fn free_for_files(&self) -> u64 {
        self.state.lock().free(SpaceClaim::Files)
    }

    /// Sets the blocks that only changes take which must not fail.
    #[cfg(test)]
    pub(crate) fn set_reserve(&self, blocks: u64) {
        self.state.lock().reserve = blocks;
    }

    /// The blocks of the tree of free inodes of a group.
    pub(crate) fn free_inode_tree(&self, ag: AgNumber) -> u64 {
        let index = usize::try_from(ag.0).unwrap_or(usize::MAX);
        self.state.lock().free_inode_trees.get(index).copied().unwrap_or(0)
    }

    /// The blocks of groups that chains may still need for trees that grow, and are held back.
    pub(crate) fn tree_rooms(&self) -> &TreeRooms {
        &self.tree_rooms
    }

    /// Promises free blocks to a transaction.
    ///
    /// # Errors
    /// `ENOSPC` when there are too few.
    pub(super) fn promise(&self, blocks: u64, claim: SpaceClaim) -> Result<()> {
        let mut state = self.state.lock();
        let free = state.free(claim);
        if free < blocks {
            let what = format!("{blocks} blocks of {free} free ones for {claim:?}");
            return Err(Error::posix(Errno::NOSPC, what));
        }
        state.promised += blocks;
        Ok(())
    }

    /// Promises as many of these free blocks as there are. Returns how many.
    pub(super) fn promise_most(&self, blocks: u64, claim: SpaceClaim) -> u64 {
        let mut state = self.state.lock();
        let blocks = blocks.min(state.free(claim));
        state.promised += blocks;
        blocks
    }

    /// Ends a promise, or what is left of it.
    pub(super) fn release(&self, blocks: u64) {
        self.lower_promise(&mut self.state.lock(), blocks);
    }

    fn lower_promise(&self, state: &mut CountersState, blocks: u64) {
        match state.promised.checked_sub(blocks) {
            Some(rest) => state.promised = rest,
            None => self.fail("promised blocks", state.promised, blocks),
        }
    }

    /// Adds what a transaction has changed, which has the promise `promised`. Blocks that it took
    /// are not free any more, so they leave the promise: a chain of 10 steps, to which 100 blocks
    /// were promised, holds 90 when its first step has taken 10. Blocks that were held back for
    /// trees of groups were never promised.
    pub(super) fn apply(&self, changes: &CountChanges, promised: &mut u64) {
        let mut state = self.state.lock();
        let own = changes.free_blocks.saturating_sub(changes.held_back);
        let taken = own.min(0).unsigned_abs().min(*promised);
        *promised -= taken;
        self.lower_promise(&mut state, taken);
        // A tree may have more blocks than are ever held back for it.
        state.held_back = state.held_back.saturating_add_signed(changes.held_back);
        for (ag, change) in &changes.free_inode_trees {
            let index = usize::try_from(ag.0).unwrap_or(usize::MAX);
            if let Some(count) = state.free_inode_trees.get_mut(index) {
                *count = count.saturating_add_signed(*change);
            }
        }
        let counts = &mut state.counts;
        let all = [
            ("inodes", &mut counts.inodes, changes.inodes),
            ("free inodes", &mut counts.free_inodes, changes.free_inodes),
            ("free blocks", &mut counts.free_blocks, changes.free_blocks),
        ];
        for (name, count, change) in all {
            match count.checked_add_signed(change) {
                Some(sum) => *count = sum,
                None => self.fail(name, *count, change.unsigned_abs()),
            }
        }
    }

    /// Ends all writing.
    pub(super) fn stop(&self, problem: &str) {
        self.stop.set(problem);
    }

    /// Ends all writing: what is free is not known any more.
    fn fail(&self, name: &str, value: u64, by: u64) {
        self.stop.set(&below_zero(name, value, by).to_string());
    }
}
