//! Discarding: telling the devices which ranges hold nothing.
//!
//! | who | what | when |
//! |---|---|---|
//! | [`Engine::trim`] | free ranges of block groups, and what belongs to no chunk | when it is asked for |
//! | [`Engine::discard_step`] | of what commits have freed, and of removed chunks, what is still free | with [`OpenOptions::discard`], soon after the commit |
//!
//! What is free (`space`) is not needed by the last commit, by its log or by the running
//! transaction: anybody may write over it, and so it may be discarded. Nobody does both at a time:
//!
//! 1. A piece of free space is *out* while it is being discarded. It counts as free, so whatever
//!    was promised of it is kept, but nobody takes it: who finds no other place waits for it, with
//!    whatever he has locked. Who discards needs no lock meanwhile, so that wait ends.
//! 2. One piece is out at a time, of [`PIECE_BYTES`] at the most. So somebody waits for one request
//!    to each device, or for a few.
//! 3. A block group of which a piece is out is not removed.
//! 4. While something that belongs to no chunk is discarded the chunk lock is held, so no chunk is
//!    made of it. That is no longer than a piece either, and without a handle: a commit waits for
//!    one piece at the most, when it notes what the next chunk would hold.
//!
//! What commits have freed is gathered in [`Freed`] and given away before it is discarded: most of
//! what trees have given up is soon written again, and needs no discard then. The thread of the
//! volume goes through it; in a volume without one whoever commits does, when that is done. What
//! goes wrong then is reported once, and nothing is discarded any more: nobody depends on it.
//! Closing a volume discards what is left, [`MOST_FREED`] ranges at the most.
//!
//! [`OpenOptions::discard`]: crate::OpenOptions::discard

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::ops::Range;
use std::sync::Arc;

use offshoot_btrfs_format::Logical;
use offshoot_btrfs_format::chunk::Chunk;
use offshoot_vfs::{Error, Result, Trimmed};
use parking_lot::{Condvar, Mutex};

use super::{BlockGroup, Purpose, Space};
use crate::engine::Engine;
use crate::report::Report;
use crate::transaction::{Handle, Live};

/// The most that is discarded at once, in bytes of the logical space or of a member.
const PIECE_BYTES: u64 = 64 << 20;

/// How many ranges are remembered to be discarded. A volume that frees more of them before they are
/// is trimmed one day.
const MOST_FREED: usize = 1 << 16;

/// How many of them one step discards.
const STEP_RANGES: usize = 16;

/// The block group of which a piece is out, and who waits for it.
#[derive(Debug, Default)]
pub(super) struct Outside {
    group: Mutex<Option<Arc<BlockGroup>>>,
    back: Condvar,
}

/// A piece that is out, until this is dropped.
struct Out<'s> {
    space: &'s Space,
    piece: Range<u64>,
}

impl Space {
    /// Takes out the first free piece of `group` in `within`. Waits while another one is out.
    fn take_out(&self, group: &Arc<BlockGroup>, within: &Range<u64>) -> Option<Out<'_>> {
        let mut out = self.outside.group.lock();
        while out.is_some() {
            self.outside.back.wait(&mut out);
        }
        let piece = group.take_out(within, PIECE_BYTES)?;
        *out = Some(group.clone());
        Some(Out { space: self, piece })
    }

    /// Takes `len` bytes for `purpose` in one piece, of what is known to be free, and waits for the
    /// piece that is out if it may be there alone.
    pub(super) fn take_or_wait(&self, purpose: Purpose, len: u64) -> Option<Logical> {
        // Nothing goes out or comes back while this is held.
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

/// What was freed and is to be discarded, if it is still free.
#[derive(Debug, Default)]
pub(crate) struct Freed {
    /// Ranges of the logical space that do not touch, by their start.
    ranges: BTreeMap<u64, u64>,
    /// Of members, by their index.
    on_members: Vec<(usize, Range<u64>)>,
}

impl Freed {
    /// Adds a range, and joins it with those that it touches.
    pub(crate) fn add(&mut self, mut range: Range<u64>) {
        let touched = |all: &BTreeMap<u64, u64>, range: &Range<u64>| {
            let last = all.range(..=range.end).next_back().map(|(&start, &end)| start..end);
            last.filter(|last| last.end >= range.start)
        };
        while let Some(other) = touched(&self.ranges, &range) {
            self.ranges.remove(&other.start);
            range = other.start.min(range.start)..other.end.max(range.end);
        }
        if self.ranges.len() < MOST_FREED {
            self.ranges.insert(range.start, range.end);
        }
    }

    /// The next piece, and of which member it is; `None` for the logical space.
    fn next(&mut self) -> Option<(Option<usize>, Range<u64>)> {
        if let Some((member, range)) = self.on_members.pop() {
            return Some((Some(member), range));
        }
        let (start, end) = self.ranges.pop_first()?;
        let rest = start.saturating_add(PIECE_BYTES);
        if rest < end {
            self.ranges.insert(rest, end);
        }
        Some((None, start..end.min(rest)))
    }
}

impl Live {
    /// Notes that a transaction has freed `ranges`, which may be written again now.
    pub(crate) fn note_freed(&self, ranges: impl IntoIterator<Item = Range<u64>>) {
        if let Some(freed) = &mut *self.freed.lock() {
            for range in ranges {
                freed.add(range);
            }
        }
    }
}

impl Handle<'_> {
    /// Notes that a chunk belongs to nobody any more.
    pub(super) fn note_removed(&self, chunk: &Chunk) {
        if let Some(freed) = &mut *self.live().freed.lock()
            && freed.on_members.len() < MOST_FREED
        {
            let members = self.volume().members();
            freed.on_members.extend(chunk.stripes.iter().filter_map(|stripe| {
                let member = members.iter().position(|one| one.uuid == stripe.device_uuid)?;
                let start = stripe.physical.0;
                Some((member, start..start + chunk.stripe_bytes()))
            }));
        }
    }
}

impl Engine {
    /// Tells all devices which ranges of them hold nothing: what is free in block groups, and what
    /// belongs to none. Others may change the volume meanwhile. What deleted subvolumes hold, and
    /// what was freed and is in no commit yet, is not free.
    ///
    /// # Errors
    /// `EROFS` when the volume was opened for reading or nothing is written any more;
    /// [`Error::Unsupported`] when no device can be told; what the devices fail with, and what
    /// reading the trees does.
    pub fn trim(&self) -> Result<Trimmed> {
        let space = &self.live()?.space;
        let mut trimmed = Trimmed::default();
        let groups: Vec<_> = space.groups.read().values().cloned().collect();
        for group in groups {
            {
                // The trees are read under a handle, and those of a group that is removed meanwhile
                // have nothing of it.
                let _handle = self.enter()?;
                let _chunks = space.chunk_lock.lock();
                if group.is_retired() {
                    continue;
                }
                space.load(self, &group)?;
            }
            self.discard_in_group(&group, &(group.start.0..group.end()), &mut trimmed)?;
        }
        for member in 0..self.members().len() {
            self.discard_unallocated(member, &(0..u64::MAX), &mut trimmed)?;
        }
        require_some(trimmed)
    }

    /// Discards some of what was freed and is still free; whether there is more.
    pub(crate) fn discard_step(&self) -> bool {
        let Some(live) = self.live_part().filter(|live| live.require_whole().is_ok()) else {
            return false;
        };
        for _ in 0..STEP_RANGES {
            let next = || live.freed.lock().as_mut()?.next();
            let Some((member, range)) = next() else { return false };
            if let Err(error) = self.discard_freed(live, member, &range) {
                *live.freed.lock() = None;
                self.report(&Report::DiscardFailed { problem: error.to_string() });
                return false;
            }
        }
        true
    }

    /// Discards what is still free of a range of a member, or of the logical space.
    fn discard_freed(&self, live: &Live, member: Option<usize>, range: &Range<u64>) -> Result<()> {
        let mut trimmed = Trimmed::default();
        if let Some(member) = member {
            self.discard_unallocated(member, range, &mut trimmed)?;
        } else {
            // Without the map: who makes a chunk waits for it, and behind him who looks for the
            // piece that is out.
            let groups: Vec<_> = {
                let groups = live.space.groups.read();
                let below = groups.range(..range.end).rev().map(|(_, group)| group);
                below.take_while(|group| group.end() > range.start).cloned().collect()
            };
            for group in groups {
                let within = range.start.max(group.start.0)..range.end.min(group.end());
                self.discard_in_group(&group, &within, &mut trimmed)?;
            }
        }
        require_some(trimmed).map(drop)
    }

    /// Discards what is free of `group` in `within`, if that is known.
    fn discard_in_group(
        &self,
        group: &Arc<BlockGroup>,
        within: &Range<u64>,
        trimmed: &mut Trimmed,
    ) -> Result<()> {
        let space = &self.live()?.space;
        let mut at = within.start;
        while at < within.end
            && let Some(out) = space.take_out(group, &(at..within.end))
        {
            at = out.piece.end;
            let places =
                self.storage.write_places(Logical(out.piece.start), at - out.piece.start)?;
            let len = |part: Range<u64>| part.end - part.start;
            let mut places: Vec<_> =
                places.into_iter().map(|(member, at, part)| (member, at.0, len(part))).collect();
            // Units of a striped profile that are neighbours on a member are one request.
            places.sort_unstable();
            let mut places = places.into_iter().peekable();
            while let Some((member, start, mut len)) = places.next() {
                let joins =
                    |next: &(usize, u64, u64), len| (next.0, next.1) == (member, start + len);
                while let Some((_, _, more)) = places.next_if(|next| joins(next, len)) {
                    len += more;
                }
                self.discard_on(member, &(start..start + len), trimmed)?;
            }
        }
        Ok(())
    }

    /// Discards what of a member is in `within` and belongs to no chunk.
    fn discard_unallocated(
        &self,
        member: usize,
        within: &Range<u64>,
        trimmed: &mut Trimmed,
    ) -> Result<()> {
        let space = &self.live()?.space;
        let mut at = within.start;
        while at < within.end {
            let handle = self.enter()?;
            let _chunks = space.chunk_lock.lock();
            let members = self.member_spaces()?;
            drop(handle);
            let piece = members[member].unused(&(at..within.end), PIECE_BYTES);
            let Some(piece) = piece else { break };
            at = piece.end;
            self.discard_on(member, &piece, trimmed)?;
        }
        Ok(())
    }

    fn discard_on(&self, member: usize, range: &Range<u64>, trimmed: &mut Trimmed) -> Result<()> {
        let own = &self.members()[member];
        let Some(device) = own.device.as_ref().filter(|_| !own.has_failed()) else { return Ok(()) };
        let len = range.end - range.start;
        match device.discard(range.start, len) {
            Ok(()) => {
                trimmed.bytes += len;
                self.live()?.stats.discarded(usize::try_from(len).unwrap_or(usize::MAX));
            }
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                trimmed.unable.insert(device.name().to_owned());
            }
            Err(error) => {
                let what = format!("{}: discarding at {}", device.name(), range.start);
                return Err(Error::io(what, error));
            }
        }
        Ok(())
    }
}

/// Refuses what no device could be told.
fn require_some(trimmed: Trimmed) -> Result<Trimmed> {
    if trimmed.bytes == 0 && !trimmed.unable.is_empty() {
        let names: Vec<_> = trimmed.unable.into_iter().collect();
        return Err(Error::Unsupported(format!("discarding on {}", names.join(", "))));
    }
    Ok(trimmed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::Fit;
    use crate::test_volumes::in_memory_of;
    use crate::{OpenOptions, Volume};

    /// The group could go, and its place become another's, while something in it was about to be
    /// discarded.
    #[test]
    fn a_block_group_stays_while_a_piece_is_out() {
        let device = in_memory_of(16384, 256 << 20);
        let volume = Volume::open_writable(vec![device], &OpenOptions::default()).unwrap();
        let space = &volume.live().unwrap().space;
        let group = space.empty_groups().into_iter().find(|group| group.flags.has_data()).unwrap();
        space.load(&volume, &group).unwrap();
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
        assert_eq!(freed.ranges.iter().collect::<Vec<_>>(), [(&0, &5), (&10, &30), (&35, &50)]);
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
