//! The ranges that are to be discarded (`upkeep/discard`), and the piece of free space that is
//! being discarded.

use std::ops::Range;
use std::sync::Arc;

use offshoot_btrfs_format::Logical;
use offshoot_btrfs_format::chunk::Chunk;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::{BlockGroup, Purpose, Space};
use crate::ranges::Ranges;
use crate::storage::Member;

/// The most that one request discards, in bytes of the logical space or of a member.
pub(crate) const PIECE_BYTES: u64 = 64 << 20;

/// The most ranges that are gathered. When a volume frees more of them before they are discarded,
/// it forgets the rest, and only a trim discards these.
const MOST_FREED: usize = 1 << 16;

/// The block group of which a piece is out, and the threads that wait for it.
#[derive(Debug, Default)]
pub(super) struct Outside {
    group: Mutex<Option<Arc<BlockGroup>>>,
    back: Condvar,
}

/// A piece that is out, until this is dropped.
pub(crate) struct Out<'s> {
    space: &'s Space,
    pub(crate) piece: Range<u64>,
}

impl Space {
    /// Takes out the first free piece of `group` in `within`. Waits while another piece is out.
    pub(crate) fn take_out(&self, group: &Arc<BlockGroup>, within: &Range<u64>) -> Option<Out<'_>> {
        let mut out = self.without_piece();
        let piece = group.take_out(within, PIECE_BYTES)?;
        *out = Some(group.clone());
        Some(Out { space: self, piece })
    }

    /// Waits until the piece that is out is back. No thread takes out another piece while the
    /// caller holds the guard.
    pub(crate) fn without_piece(&self) -> MutexGuard<'_, Option<Arc<BlockGroup>>> {
        let mut out = self.outside.group.lock();
        while out.is_some() {
            self.outside.back.wait(&mut out);
        }
        out
    }

    /// Takes `len` bytes for `purpose` in one piece of known free space. Waits for the piece that
    /// is out if only that one may have room.
    pub(super) fn take_or_wait(&self, purpose: Purpose, len: u64) -> Option<Logical> {
        // No piece goes out or comes back while this lock is held.
        let mut out = self.outside.group.lock();
        loop {
            if let Some(logical) = self.take_known(purpose, len) {
                return Some(logical);
            }
            let fits = purpose.fits();
            let may_come = |group: &Arc<BlockGroup>| {
                self.may_take(purpose, group) && fits.iter().any(|&fit| group.awaits(len, fit))
            };
            if !out.as_ref().is_some_and(may_come) {
                return None;
            }
            self.outside.back.wait(&mut out);
        }
    }
}

impl Drop for Out<'_> {
    fn drop(&mut self) {
        let outside = &self.space.outside;
        if let Some(group) = outside.group.lock().take() {
            group.bring_back();
        }
        outside.back.notify_all();
    }
}

/// Ranges that were freed, and are discarded if they are still free.
#[derive(Debug, Default)]
pub(super) struct Freed {
    /// Ranges of the logical space.
    ranges: Ranges,
    /// Ranges of members, with the index of the member.
    on_members: Vec<(usize, Range<u64>)>,
}

impl Freed {
    /// Adds a range, unless there are many that it does not touch.
    fn add(&mut self, range: Range<u64>) {
        if self.ranges.len() < MOST_FREED || self.ranges.touches(&range) {
            self.ranges.insert(range);
        }
    }

    /// The next piece, with its member, or `None` for the logical space.
    fn next(&mut self) -> Option<(Option<usize>, Range<u64>)> {
        if let Some((member, range)) = self.on_members.pop() {
            return Some((Some(member), range));
        }
        Some((None, self.ranges.pop_first(PIECE_BYTES)?))
    }
}

impl Space {
    /// Notes that a transaction has freed `ranges`, which other threads may write again now.
    pub(crate) fn note_freed(&self, ranges: impl IntoIterator<Item = Range<u64>>) {
        if let Some(freed) = &mut *self.freed.lock() {
            for range in ranges {
                freed.add(range);
            }
        }
    }

    /// Notes that a chunk was removed.
    pub(crate) fn note_removed(&self, chunk: &Chunk, members: &[Member]) {
        if let Some(freed) = &mut *self.freed.lock()
            && freed.on_members.len() < MOST_FREED
        {
            freed.on_members.extend(chunk.stripes.iter().filter_map(|stripe| {
                let member = members.iter().position(|one| one.uuid == stripe.device_uuid)?;
                let start = stripe.physical.0;
                Some((member, start..start + chunk.stripe_bytes()))
            }));
        }
    }

    /// The next piece to discard if it is still free, with its member, or `None` for the logical
    /// space.
    pub(crate) fn next_freed(&self) -> Option<(Option<usize>, Range<u64>)> {
        self.freed.lock().as_mut()?.next()
    }

    /// Whether freed ranges are noted.
    pub(crate) fn notes_freed(&self) -> bool {
        self.freed.lock().is_some()
    }

    /// Stops noting freed ranges, and forgets those that were noted.
    pub(crate) fn forget_freed(&self) {
        *self.freed.lock() = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::Fit;
    use crate::test_volumes::in_memory_of;
    use crate::{BtrfsVolume, EngineOptions};

    /// Before the mend, a group could be removed, and its place become part of another, while a
    /// piece of it was about to be discarded.
    #[test]
    fn a_block_group_stays_while_a_piece_is_out() {
        let device = in_memory_of(16384, 256 << 20);
        let volume = BtrfsVolume::open_writable(vec![device], &EngineOptions::default()).unwrap();
        let space = &volume.live().unwrap().space;
        let group = space.empty_groups().into_iter().find(|group| group.flags.has_data()).unwrap();
        space.load(&volume.base, &group).unwrap();
        let (free, all) = (group.known_free(), group.start.0..group.end());
        let out = space.take_out(&group, &all).unwrap();
        assert_eq!((group.known_free(), group.free_bytes(), group.retire()), (free, free, None));
        assert!(!group.is_empty() && group.awaits(PIECE_BYTES.min(free), Fit::Anywhere));
        assert!(group.take_range(Logical(out.piece.start), 4096).is_none(), "it is out");
        drop(out);
        assert!(group.is_empty() && !group.awaits(1, Fit::Anywhere));
        assert_eq!(group.retire(), Some(free));
        assert!(space.take_out(&group, &all).is_none(), "it is gone");
    }

    #[test]
    fn what_was_freed_is_joined_and_cut_into_pieces() {
        let mut freed = Freed::default();
        for range in [10..20, 40..50, 20..30, 35..45, 0..5, 12..18] {
            freed.add(range);
        }
        assert_eq!(freed.ranges.iter().collect::<Vec<_>>(), [0..5, 10..30, 35..50]);
        freed.add(4..60);
        freed.on_members.push((1, 7..9));
        assert_eq!(freed.next(), Some((Some(1), 7..9)));
        assert_eq!(freed.next(), Some((None, 0..60)));
        assert_eq!(freed.next(), None);
        freed.add(0..PIECE_BYTES + 1);
        assert_eq!(freed.next(), Some((None, 0..PIECE_BYTES)));
        assert_eq!(freed.next(), Some((None, PIECE_BYTES..PIECE_BYTES + 1)));
    }
}
