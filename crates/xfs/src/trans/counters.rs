//! The counters of the superblock. They live in memory while the volume is written, and go to the
//! superblock at its end.

use std::sync::Arc;

use offshoot_kit::counter::{WriteStop, below_zero};
use offshoot_kit::sync::Mutex;
use offshoot_vfs::{Errno, Error, Result};

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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CountChanges {
    pub(crate) inodes: i64,
    pub(crate) free_inodes: i64,
    pub(crate) free_blocks: i64,
    /// The free blocks that no file gets: fewer when a tree has taken one of those that are held
    /// back for it.
    pub(crate) held_back: i64,
}

/// The counters of a volume that is written.
#[derive(Debug)]
pub(crate) struct VolumeCounters {
    state: Mutex<CountersState>,
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
}

impl VolumeCounters {
    /// Counters that begin with these, and with how many free blocks no file gets.
    pub(crate) fn new((counts, held_back): (VolumeCounts, u64), stop: &Arc<WriteStop>) -> Self {
        let state = CountersState { counts, promised: 0, held_back };
        Self { state: Mutex::new(state), stop: stop.clone() }
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

    /// Sets how many free blocks no file gets, in place of what the groups hold back.
    #[cfg(test)]
    pub(crate) fn hold_back(&self, blocks: u64) {
        self.state.lock().held_back = blocks;
    }

    /// Promises free blocks to a transaction; one that frees space may take those that are held
    /// back.
    ///
    /// # Errors
    /// `ENOSPC` when there are too few.
    pub(super) fn promise(&self, blocks: u64, may_take_all: bool) -> Result<()> {
        let mut state = self.state.lock();
        let held_back = if may_take_all { 0 } else { state.held_back };
        let free = state.counts.free_blocks.saturating_sub(state.promised);
        if free.saturating_sub(held_back) < blocks {
            let what =
                format!("{blocks} blocks of {free} free ones, of which {held_back} are kept");
            return Err(Error::posix(Errno::NOSPC, what));
        }
        state.promised += blocks;
        Ok(())
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
    /// were promised, holds 90 when its first step has taken 10.
    pub(super) fn apply(&self, changes: CountChanges, promised: &mut u64) {
        let mut state = self.state.lock();
        let taken = changes.free_blocks.min(0).unsigned_abs().min(*promised);
        *promised -= taken;
        self.lower_promise(&mut state, taken);
        // A tree may have more blocks than are ever held back for it.
        state.held_back = state.held_back.saturating_add_signed(changes.held_back);
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
