//! One block group.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use offshoot_btrfs_format::Logical;
use offshoot_btrfs_format::chunk::BlockGroupFlags;
use offshoot_vfs::{Error, Result, Structure};
use parking_lot::Mutex;

use super::Roots;
use super::free_space::{Fit, FreeSpace};
use super::groups::{GroupFacts, GroupKind, GroupSums};
use super::load::load_free_space;
use crate::counter::below_zero;
use crate::report::VolumeReport;

/// A block group as its item has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoredGroup {
    pub(crate) start: Logical,
    pub(crate) len: u64,
    pub(crate) flags: BlockGroupFlags,
    /// The bytes of its extents.
    pub(crate) used: u64,
}

/// A block group: a range of the logical space for data or metadata.
#[derive(Debug)]
pub(crate) struct BlockGroup {
    pub(crate) start: Logical,
    pub(crate) len: u64,
    pub(crate) flags: BlockGroupFlags,
    /// The groups with the same flags, this one included once it is listed.
    kind: Arc<GroupKind>,
    /// It is being emptied: no thread takes space here, and its free space counts for no ledger.
    /// Changed under the lock of the state.
    is_draining: AtomicBool,
    state: Mutex<GroupState>,
}

#[derive(Debug)]
struct GroupState {
    /// The bytes of its extents.
    used: u64,
    /// The value of `used` in the block group item.
    stored_used: u64,
    /// The bytes that are taken and not used yet, or pinned. They are not free, and `used` does not
    /// count them.
    between: u64,
    /// The free ranges, once they are loaded. Of 100,000 groups few ever are, so those take a
    /// pointer.
    free: Option<Box<FreeSpace>>,
    /// The free range that is being discarded; empty for none. No thread may take it meanwhile.
    out: Range<u64>,
    /// It is being removed.
    is_retired: bool,
    /// It is one of the groups of a volume, and its kind counts it.
    is_listed: bool,
}

impl BlockGroup {
    /// A group of the kind `kind`, which does not list it yet.
    pub(super) fn new(stored: StoredGroup, kind: Arc<GroupKind>) -> Self {
        let StoredGroup { start, len, flags, used } = stored;
        let state = GroupState {
            used,
            stored_used: used,
            between: 0,
            free: None,
            out: 0..0,
            is_retired: false,
            is_listed: false,
        };
        let is_draining = AtomicBool::new(false);
        Self { start, len, flags, kind, is_draining, state: Mutex::new(state) }
    }

    /// Adds the group to its kind, or takes it away.
    pub(super) fn set_listed(&self, is_listed: bool) {
        self.change(|state| state.is_listed = is_listed);
    }

    /// Changes the state, and tells the kind what changed.
    fn change<T>(&self, change: impl FnOnce(&mut GroupState) -> T) -> T {
        let mut state = self.state.lock();
        let before = self.facts_of(&state);
        let result = change(&mut state);
        self.kind.note(self.start, &before, &self.facts_of(&state));
        result
    }

    fn facts_of(&self, state: &GroupState) -> GroupFacts {
        if !state.is_listed {
            return GroupFacts::default();
        }
        let free = self.free_in(state);
        let is_loaded = state.free.is_some();
        let best_rank = state.free.as_ref().map_or(0, |free| free.best_rank());
        GroupFacts {
            sums: GroupSums {
                groups: 1,
                len: self.len,
                used: state.used,
                between: state.between,
                free,
                unknown: if is_loaded { 0 } else { free },
            },
            best_rank: if state.is_retired || self.is_draining() { 0 } else { best_rank },
            may_load: !is_loaded && !state.is_retired && !self.is_draining(),
            is_empty: state.is_empty() && !state.is_retired,
            is_changed: state.used != state.stored_used,
        }
    }

    /// What its kind has of this group.
    #[cfg(test)]
    pub(super) fn facts(&self) -> GroupFacts {
        self.facts_of(&self.state.lock())
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

    /// Takes `len` bytes in one piece. Returns them, and by how much the usable bytes decreased.
    /// `None` when no known piece fits.
    pub(super) fn take(&self, len: u64, fit: Fit) -> Option<(Range<u64>, u64)> {
        let whole = |start| start..start + len;
        self.take_by(|free| free.take(len, fit).map(whole))
    }

    /// As [`take`](Self::take), but takes the longest free range, or as much of it as `most`, in
    /// whole `unit`s.
    pub(super) fn take_longest(&self, most: u64, unit: u64) -> Option<(Range<u64>, u64)> {
        self.take_by(|free| free.take_longest(most, unit))
    }

    /// Takes a free range. Returns it, and by how much the usable bytes decreased.
    fn take_by(
        &self,
        take: impl FnOnce(&mut FreeSpace) -> Option<Range<u64>>,
    ) -> Option<(Range<u64>, u64)> {
        self.change(|state| {
            if state.is_retired || self.is_draining() {
                return None;
            }
            let before = state.known_usable();
            let taken = take(state.free.as_deref_mut()?)?;
            state.between += taken.end - taken.start;
            Some((taken, before - state.known_usable()))
        })
    }

    /// Takes exactly this range, if all of it is known to be free. Returns by how much the usable
    /// bytes decreased.
    pub(super) fn take_range(&self, logical: Logical, len: u64) -> Option<u64> {
        let range = logical.0..logical.0.checked_add(len)?;
        self.take_by(|free| free.take_range(range.start, range.end).then_some(range))
            .map(|(_, less)| less)
    }

    /// Takes out the first free piece in `within`, of at most `most` bytes. No thread can take it
    /// until it is back. No other piece may be out.
    pub(super) fn take_out(&self, within: &Range<u64>, most: u64) -> Option<Range<u64>> {
        self.change(|state| {
            if state.is_retired {
                return None;
            }
            let piece = state.free.as_mut()?.take_first(within, most)?;
            state.out = piece.clone();
            Some(piece)
        })
    }

    /// Brings back the piece that was taken out.
    pub(super) fn bring_back(&self) {
        self.change(|state| {
            let out = std::mem::take(&mut state.out);
            if let Some(free) = &mut state.free {
                free.add(out.start, out.end);
            }
        });
    }

    /// Whether `len` bytes in one piece will be free when the piece that is out is back.
    pub(super) fn awaits(&self, len: u64, fit: Fit) -> bool {
        let state = self.state.lock();
        let with = |free: &FreeSpace| free.fits_with(&state.out, len, fit);
        !state.out.is_empty() && state.free.as_deref().is_some_and(with)
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
        let wrong = self.change(|state| {
            if state.free.is_some() || state.is_retired {
                // Some items of a group that is being removed may be gone already.
                return Ok(None);
            }
            let (free, wrong) = loaded?;
            state.free = Some(Box::new(free));
            count(state.known_usable());
            Ok::<_, Error>(Some(wrong))
        })?;
        if let Some(Some(what)) = &wrong {
            let problem = format!("{what}; what may be in use is left alone");
            volume.storage().report(&VolumeReport::WrongFreeSpace { group: self.start, problem });
        }
        Ok(wrong.is_some())
    }

    /// Whether nothing in it is used, taken, pinned or being discarded.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.state.lock().is_empty()
    }

    /// Whether the group is being emptied.
    pub(crate) fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Acquire)
    }

    /// Keeps all threads from taking space here, until [`undrain`](Self::undrain). Returns the
    /// bytes that were usable until then; `None` when it was so already.
    pub(super) fn drain(&self) -> Option<u64> {
        self.change(|state| {
            let was_draining = self.is_draining.swap(true, Ordering::AcqRel);
            (!was_draining && !state.is_retired).then(|| state.known_usable())
        })
    }

    /// Allows threads to take space here again. `count` gets the usable bytes, under the lock.
    pub(super) fn undrain(&self, count: impl FnOnce(u64)) {
        self.change(|state| {
            if self.is_draining.swap(false, Ordering::AcqRel) && !state.is_retired {
                count(state.known_usable());
            }
        });
    }

    /// Keeps all threads from taking space behind `end`. Returns by how much the usable bytes
    /// decreased; `None` when the free ranges are not loaded.
    pub(super) fn limit(&self, end: u64) -> Option<u64> {
        self.change(|state| {
            let before = state.known_usable();
            state.free.as_deref_mut()?.limit(end);
            Some(before - state.known_usable())
        })
    }

    /// Lifts the limit. `count` gets the increase of the usable bytes, under the lock.
    pub(super) fn lift_limit(&self, count: impl FnOnce(u64)) {
        self.change(|state| {
            let before = state.known_usable();
            if let Some(free) = state.free.as_deref_mut() {
                free.lift_limit();
            }
            count(state.known_usable() - before);
        });
    }

    /// Whether nothing behind the limit is in use.
    pub(crate) fn is_free_behind_limit(&self) -> bool {
        let state = self.state.lock();
        let is_free = |free: &FreeSpace| free.is_free_behind_limit(self.end());
        state.out.is_empty() && state.free.as_deref().is_some_and(is_free)
    }

    /// The same group with `len` bytes, which ends at the limit. This one is retired, and not
    /// listed any more.
    pub(super) fn shortened(&self, len: u64) -> Self {
        let mut state = self.change(|state| {
            let left = GroupState {
                used: 0,
                stored_used: 0,
                between: 0,
                free: None,
                out: 0..0,
                is_retired: true,
                is_listed: false,
            };
            let mut own = std::mem::replace(state, left);
            own.is_listed = false;
            own
        });
        if let Some(free) = state.free.as_deref_mut() {
            free.end_at_limit();
        }
        let is_draining = AtomicBool::new(self.is_draining());
        let (start, flags, kind) = (self.start, self.flags, self.kind.clone());
        Self { start, len, flags, kind, is_draining, state: Mutex::new(state) }
    }

    /// Whether an extent is in it, or space of it is taken or pinned.
    pub(crate) fn is_in_use(&self) -> bool {
        !self.state.lock().is_empty()
    }

    /// Whether the group is retired: no thread may take space here.
    pub(crate) fn is_retired(&self) -> bool {
        self.state.lock().is_retired
    }

    /// Retires the group, if it is empty: no thread may take space here from now on. Returns the
    /// bytes that were usable until then.
    pub(super) fn retire(&self) -> Option<u64> {
        self.change(|state| {
            if !state.is_empty() || state.is_retired {
                return None;
            }
            state.is_retired = true;
            Some(state.known_usable())
        })
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
    /// When fewer bytes are taken and pinned, or when a part of the range is free already: two
    /// extents of a damaged volume may overlap.
    pub(super) fn give_back(
        &self,
        logical: Logical,
        len: u64,
        count: impl FnOnce(u64),
    ) -> Result<()> {
        let range = logical.0..logical.0 + len;
        self.change(|state| {
            let is_out = state.out.start < range.end && state.out.end > range.start;
            let is_free =
                state.free.as_ref().is_some_and(|free| free.overlaps(range.start, range.end));
            if is_out || is_free {
                let problem = format!("{range:#x?} is freed, and a part of it is free");
                return Err(Error::corrupt_at(Structure::ExtentTree, logical.0, problem));
            }
            state.leave_between(len)?;
            let before = state.known_usable();
            if let Some(free) = &mut state.free {
                free.add(range.start, range.end);
                count(state.known_usable() - before);
            }
            Ok(())
        })
    }

    /// Counts an extent of `len` bytes: a new one was taken and is used now, an old one was used
    /// and is pinned now.
    ///
    /// # Errors
    /// When the block group item counts fewer bytes than the extents have, or fewer were taken.
    pub(super) fn count_used(&self, len: u64, is_new: bool) -> Result<()> {
        self.change(|state| {
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
        })
    }

    /// The value of `used`, which the caller stores in the item now.
    pub(crate) fn used_to_store(&self) -> u64 {
        self.change(|state| {
            state.stored_used = state.used;
            state.used
        })
    }

    /// The used bytes.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.state.lock().used
    }

    #[cfg(test)]
    pub(super) fn free_bytes(&self) -> u64 {
        self.free_in(&self.state.lock())
    }

    /// The bytes that are neither used nor taken nor pinned.
    fn free_in(&self, state: &GroupState) -> u64 {
        match &state.free {
            Some(_) => state.known_free(),
            None => self.len.saturating_sub(state.used).saturating_sub(state.between),
        }
    }
}

impl GroupState {
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
        self.free.as_ref().map_or(0, |free| free.total()) + out
    }

    /// The free bytes that can be taken.
    fn known_usable(&self) -> u64 {
        self.free.as_ref().map_or(0, |free| free.usable_with(&self.out))
    }
}
