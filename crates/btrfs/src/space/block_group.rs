//! One block group.

use std::ops::Range;

use offshoot_btrfs_format::Logical;
use offshoot_btrfs_format::chunk::BlockGroupFlags;
use offshoot_vfs::{Error, Result};
use parking_lot::Mutex;

use super::Roots;
use super::free_space::{Fit, FreeSpace};
use super::load::load_free_space;
use crate::counter::below_zero;
use crate::report::Report;

/// A block group: a range of the logical space for data or metadata.
#[derive(Debug)]
pub(crate) struct BlockGroup {
    pub(crate) start: Logical,
    pub(crate) len: u64,
    pub(crate) flags: BlockGroupFlags,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// What extents take.
    used: u64,
    /// `used` as the block group item says it.
    stored_used: u64,
    /// Taken and not used yet, or pinned: neither free nor counted by `used`.
    between: u64,
    /// Free ranges, once they were loaded.
    free: Option<FreeSpace>,
    /// The free range that is being discarded, which nobody may take until it is not; empty for
    /// none.
    out: Range<u64>,
    /// It is being removed.
    is_retired: bool,
}

/// What is in use of a block group, in bytes.
pub(super) struct Usage {
    pub(super) used: u64,
    /// Taken and not used yet, or pinned.
    pub(super) between: u64,
    /// What is free is known.
    pub(super) is_known: bool,
}

impl BlockGroup {
    pub(crate) fn new(start: Logical, len: u64, flags: BlockGroupFlags, used: u64) -> Self {
        let state =
            State { used, stored_used: used, between: 0, free: None, out: 0..0, is_retired: false };
        Self { start, len, flags, state: Mutex::new(state) }
    }

    pub(crate) fn end(&self) -> u64 {
        self.start.0 + self.len
    }

    pub(crate) fn contains(&self, logical: Logical) -> bool {
        (self.start.0..self.end()).contains(&logical.0)
    }

    /// Whether space with these type flags may be allocated here.
    pub(crate) fn serves(&self, flags: u64) -> bool {
        self.flags.0 & flags == flags
    }

    /// Takes `len` bytes in one piece: where, and by how much less can be taken now. `None` when no
    /// such piece is known.
    pub(crate) fn take(&self, len: u64, fit: Fit) -> Option<(Logical, u64)> {
        let mut state = self.state.lock();
        if state.is_retired {
            return None;
        }
        let before = state.known_usable();
        let logical = state.free.as_mut()?.take(len, fit)?;
        state.between += len;
        Some((Logical(logical), before - state.known_usable()))
    }

    /// Takes exactly this range, if it is known that all of it is free: by how much less can be
    /// taken now.
    pub(crate) fn take_range(&self, logical: Logical, len: u64) -> Option<u64> {
        let mut state = self.state.lock();
        let end = logical.0.checked_add(len)?;
        let before = state.known_usable();
        if !state.free.as_mut()?.take_range(logical.0, end) {
            return None;
        }
        state.between += len;
        Some(before - state.known_usable())
    }

    /// Takes out the first piece in `within` that is free, of at most so many bytes: nobody takes
    /// it until it is back. There must be none out.
    pub(super) fn take_out(&self, within: &Range<u64>, most: u64) -> Option<Range<u64>> {
        let mut state = self.state.lock();
        if state.is_retired {
            return None;
        }
        let piece = state.free.as_mut()?.take_first(within, most)?;
        state.out = piece.clone();
        Some(piece)
    }

    /// Brings back what was taken out.
    pub(super) fn bring_back(&self) {
        let mut state = self.state.lock();
        let out = std::mem::take(&mut state.out);
        if let Some(free) = &mut state.free {
            free.add(out.start, out.end);
        }
    }

    /// Whether `len` bytes in one piece will be free when the piece is back that is out.
    pub(super) fn awaits(&self, len: u64, fit: Fit) -> bool {
        let state = self.state.lock();
        let with = |free: &FreeSpace| free.fits_with(&state.out, len, fit);
        !state.out.is_empty() && state.free.as_ref().is_some_and(with)
    }

    /// Whether it is known what is free here.
    pub(crate) fn is_loaded(&self) -> bool {
        self.state.lock().free.is_some()
    }

    /// Finds out what is free here, unless that is known or the group is being removed; whether it
    /// did. `count` is told how much of it can be taken.
    ///
    /// `count` is called under the lock: a group that is retired in between would take away what
    /// was never counted.
    pub(crate) fn load(&self, volume: &dyn Roots, count: impl FnOnce(u64)) -> Result<bool> {
        if self.is_loaded() {
            return Ok(false);
        }
        // The trees are read without the lock, which others take while they change them. Until free
        // ranges are known nothing is taken here, so all who read find the same.
        let loaded = load_free_space(volume, self);
        let wrong = {
            let mut state = self.state.lock();
            if state.free.is_some() || state.is_retired {
                // The items of a group that is being removed may be gone in part.
                return Ok(false);
            }
            let (free, wrong) = loaded?;
            state.free = Some(free);
            count(state.known_usable());
            wrong
        };
        if let Some(what) = wrong {
            let problem = format!("{what}; what may be in use is left alone");
            volume.storage().report(&Report::WrongFreeSpace { group: self.start, problem });
        }
        Ok(true)
    }

    /// Whether nothing in it is used, taken, pinned or being discarded.
    pub(crate) fn is_empty(&self) -> bool {
        self.state.lock().is_empty()
    }

    /// Whether nobody may take space here any more.
    pub(crate) fn is_retired(&self) -> bool {
        self.state.lock().is_retired
    }

    /// Lets nobody take space here any more, if it is empty; what of it could be taken until then.
    pub(crate) fn retire(&self) -> Option<u64> {
        let mut state = self.state.lock();
        if !state.is_empty() || state.is_retired {
            return None;
        }
        state.is_retired = true;
        Some(state.known_usable())
    }

    /// What is known to be free here, in bytes.
    #[cfg(test)]
    pub(crate) fn known_free(&self) -> u64 {
        self.state.lock().known_free()
    }

    /// What can be taken of what is known to be free here, in bytes.
    pub(crate) fn known_usable(&self) -> u64 {
        self.state.lock().known_usable()
    }

    /// Makes a range free that was taken, or pinned. Where it is known what is free here, `count`
    /// is told under the lock how much more can be taken now.
    ///
    /// # Errors
    /// When less is taken and pinned.
    pub(crate) fn give_back(
        &self,
        logical: Logical,
        len: u64,
        count: impl FnOnce(u64),
    ) -> Result<()> {
        let mut state = self.state.lock();
        state.leave_between(len)?;
        let before = state.known_usable();
        if let Some(free) = &mut state.free {
            free.add(logical.0, logical.0 + len);
            count(state.known_usable() - before);
        }
        Ok(())
    }

    /// An extent of `len` bytes was taken and is used now, or was used and is pinned now.
    ///
    /// # Errors
    /// When the block group item said that less is used than its extents take, or less was taken.
    pub(crate) fn count_used(&self, len: u64, is_new: bool) -> Result<()> {
        let mut state = self.state.lock();
        if is_new {
            state.leave_between(len)?;
            state.used += len;
        } else {
            state.used = state.used.checked_sub(len).ok_or_else(|| {
                let problem = "it counts less than its extents take";
                Error::corrupt_at("block group item", self.start.0, problem)
            })?;
            state.between += len;
        }
        Ok(())
    }

    /// Whether the item does not say what is used.
    pub(crate) fn is_changed(&self) -> bool {
        let state = self.state.lock();
        state.used != state.stored_used
    }

    /// What is used, to be stored in the item now.
    pub(crate) fn used_to_store(&self) -> u64 {
        let mut state = self.state.lock();
        state.stored_used = state.used;
        state.used
    }

    /// What is in use here, and what is known of the rest.
    pub(super) fn usage(&self) -> Usage {
        let state = self.state.lock();
        Usage { used: state.used, between: state.between, is_known: state.free.is_some() }
    }

    /// What is neither used nor taken nor pinned, in bytes.
    pub(crate) fn free_bytes(&self) -> u64 {
        let state = self.state.lock();
        match &state.free {
            Some(_) => state.known_free(),
            None => self.len.saturating_sub(state.used).saturating_sub(state.between),
        }
    }
}

impl State {
    /// So many bytes are not between free and used any more.
    fn leave_between(&mut self, len: u64) -> Result<()> {
        const NAME: &str = "taken or pinned of a block group";
        let left = self.between.checked_sub(len);
        self.between = left.ok_or_else(|| below_zero(NAME, self.between, len))?;
        Ok(())
    }

    fn is_empty(&self) -> bool {
        self.used == 0 && self.between == 0 && self.stored_used == 0 && self.out.is_empty()
    }

    fn known_free(&self) -> u64 {
        let out = self.out.end - self.out.start;
        self.free.as_ref().map_or(0, FreeSpace::total) + out
    }

    /// What of that can be taken.
    fn known_usable(&self) -> u64 {
        self.free.as_ref().map_or(0, |free| free.usable_with(&self.out))
    }
}
