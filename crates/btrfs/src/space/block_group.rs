//! One block group.

use std::ops::Range;

use offshoot_btrfs_format::Logical;
use offshoot_btrfs_format::chunk::BlockGroupFlags;
use offshoot_vfs::{Error, Result, Structure};
use parking_lot::Mutex;

use super::Roots;
use super::free_space::{Fit, FreeSpace};
use super::load::load_free_space;
use crate::counter::below_zero;
use crate::report::VolumeReport;

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
    /// The bytes of its extents.
    used: u64,
    /// The value of `used` in the block group item.
    stored_used: u64,
    /// The bytes that are taken and not used yet, or pinned. They are not free, and `used` does not
    /// count them.
    between: u64,
    /// The free ranges, once they are loaded.
    free: Option<FreeSpace>,
    /// The free range that is being discarded; empty for none. No thread may take it meanwhile.
    out: Range<u64>,
    /// It is being removed.
    is_retired: bool,
}

/// The use of a block group, in bytes.
pub(super) struct Usage {
    pub(super) used: u64,
    /// Taken and not used yet, or pinned.
    pub(super) between: u64,
    /// The free ranges are loaded.
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

    pub(super) fn contains(&self, logical: Logical) -> bool {
        (self.start.0..self.end()).contains(&logical.0)
    }

    /// Whether space with these type flags may be allocated here.
    pub(crate) fn serves(&self, flags: u64) -> bool {
        self.flags.0 & flags == flags
    }

    /// Takes `len` bytes in one piece. Returns the address, and by how much the usable bytes
    /// decreased. `None` when no known piece fits.
    pub(super) fn take(&self, len: u64, fit: Fit) -> Option<(Logical, u64)> {
        let mut state = self.state.lock();
        if state.is_retired {
            return None;
        }
        let before = state.known_usable();
        let logical = state.free.as_mut()?.take(len, fit)?;
        state.between += len;
        Some((Logical(logical), before - state.known_usable()))
    }

    /// Takes exactly this range, if all of it is known to be free. Returns by how much the usable
    /// bytes decreased.
    pub(super) fn take_range(&self, logical: Logical, len: u64) -> Option<u64> {
        let mut state = self.state.lock();
        let end = logical.0.checked_add(len)?;
        let before = state.known_usable();
        if !state.free.as_mut()?.take_range(logical.0, end) {
            return None;
        }
        state.between += len;
        Some(before - state.known_usable())
    }

    /// Takes out the first free piece in `within`, of at most `most` bytes. No thread can take it
    /// until it is back. No other piece may be out.
    pub(super) fn take_out(&self, within: &Range<u64>, most: u64) -> Option<Range<u64>> {
        let mut state = self.state.lock();
        if state.is_retired {
            return None;
        }
        let piece = state.free.as_mut()?.take_first(within, most)?;
        state.out = piece.clone();
        Some(piece)
    }

    /// Brings back the piece that was taken out.
    pub(super) fn bring_back(&self) {
        let mut state = self.state.lock();
        let out = std::mem::take(&mut state.out);
        if let Some(free) = &mut state.free {
            free.add(out.start, out.end);
        }
    }

    /// Whether `len` bytes in one piece will be free when the piece that is out is back.
    pub(super) fn awaits(&self, len: u64, fit: Fit) -> bool {
        let state = self.state.lock();
        let with = |free: &FreeSpace| free.fits_with(&state.out, len, fit);
        !state.out.is_empty() && state.free.as_ref().is_some_and(with)
    }

    /// Whether the free ranges are loaded.
    pub(super) fn is_loaded(&self) -> bool {
        self.state.lock().free.is_some()
    }

    /// Loads the free ranges, unless they are loaded or the group is being removed. Returns whether
    /// it did. `count` gets the usable bytes.
    ///
    /// `count` is called under the lock. Otherwise the group could be retired in between, and
    /// subtract bytes that were never added.
    pub(super) fn load(&self, volume: &dyn Roots, count: impl FnOnce(u64)) -> Result<bool> {
        if self.is_loaded() {
            return Ok(false);
        }
        // The trees are read without the lock, because other threads take it while they change
        // trees. Nothing is taken here before the free ranges are loaded, so all threads that read
        // the trees find the same.
        let loaded = load_free_space(volume, self);
        let wrong = {
            let mut state = self.state.lock();
            if state.free.is_some() || state.is_retired {
                // Some items of a group that is being removed may be gone already.
                return Ok(false);
            }
            let (free, wrong) = loaded?;
            state.free = Some(free);
            count(state.known_usable());
            wrong
        };
        if let Some(what) = wrong {
            let problem = format!("{what}; what may be in use is left alone");
            volume.storage().report(&VolumeReport::WrongFreeSpace { group: self.start, problem });
        }
        Ok(true)
    }

    /// Whether nothing in it is used, taken, pinned or being discarded.
    pub(super) fn is_empty(&self) -> bool {
        self.state.lock().is_empty()
    }

    /// Whether the group is retired: no thread may take space here.
    pub(crate) fn is_retired(&self) -> bool {
        self.state.lock().is_retired
    }

    /// Retires the group, if it is empty: no thread may take space here from now on. Returns the
    /// bytes that were usable until then.
    pub(super) fn retire(&self) -> Option<u64> {
        let mut state = self.state.lock();
        if !state.is_empty() || state.is_retired {
            return None;
        }
        state.is_retired = true;
        Some(state.known_usable())
    }

    /// The bytes that are known to be free.
    #[cfg(test)]
    pub(super) fn known_free(&self) -> u64 {
        self.state.lock().known_free()
    }

    /// The known free bytes that can be taken.
    pub(super) fn known_usable(&self) -> u64 {
        self.state.lock().known_usable()
    }

    /// Frees a range that was taken or pinned. When the free ranges are loaded, `count` gets the
    /// increase of the usable bytes, under the lock.
    ///
    /// # Errors
    /// When fewer bytes are taken and pinned.
    pub(super) fn give_back(
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

    /// Counts an extent of `len` bytes: a new one was taken and is used now, an old one was used
    /// and is pinned now.
    ///
    /// # Errors
    /// When the block group item counts fewer bytes than the extents have, or fewer were taken.
    pub(super) fn count_used(&self, len: u64, is_new: bool) -> Result<()> {
        let mut state = self.state.lock();
        if is_new {
            state.leave_between(len)?;
            state.used += len;
        } else {
            state.used = state.used.checked_sub(len).ok_or_else(|| {
                let problem = "it counts less than its extents take";
                Error::corrupt_at(Structure::BlockGroupItem, self.start.0, problem)
            })?;
            state.between += len;
        }
        Ok(())
    }

    /// Whether the item has an old value of `used`.
    pub(super) fn is_changed(&self) -> bool {
        let state = self.state.lock();
        state.used != state.stored_used
    }

    /// The value of `used`, which the caller stores in the item now.
    pub(crate) fn used_to_store(&self) -> u64 {
        let mut state = self.state.lock();
        state.stored_used = state.used;
        state.used
    }

    /// The used bytes, the taken or pinned ones, and whether the free ranges are loaded.
    pub(super) fn usage(&self) -> Usage {
        let state = self.state.lock();
        Usage { used: state.used, between: state.between, is_known: state.free.is_some() }
    }

    /// The bytes that are neither used nor taken nor pinned.
    pub(crate) fn free_bytes(&self) -> u64 {
        let state = self.state.lock();
        match &state.free {
            Some(_) => state.known_free(),
            None => self.len.saturating_sub(state.used).saturating_sub(state.between),
        }
    }
}

impl State {
    /// Subtracts `len` bytes that became free or used.
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

    /// The free bytes that can be taken.
    fn known_usable(&self) -> u64 {
        self.free.as_ref().map_or(0, |free| free.usable_with(&self.out))
    }
}
