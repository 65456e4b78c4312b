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
//! What commits have freed is gathered (`space/discard`) and given away before it is discarded: most of
//! what trees have given up is soon written again, and needs no discard then. The thread of the
//! volume goes through it; in a volume without one whoever commits does, when that is done. What
//! goes wrong then is reported once, and nothing is discarded any more: nobody depends on it.
//! Closing a volume discards what is left, no more ranges than are remembered.
//!
//! [`OpenOptions::discard`]: crate::OpenOptions::discard

use std::io::ErrorKind;
use std::ops::Range;
use std::sync::Arc;

use offshoot_btrfs_format::Logical;
use offshoot_vfs::{Error, Result, Trimmed};

use crate::engine::Engine;
use crate::report::Report;
use crate::space::{BlockGroup, PIECE_BYTES};
use crate::transaction::Live;

/// How many of them one step discards.
const STEP_RANGES: usize = 16;

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
        for group in space.groups() {
            {
                // The trees are read under a handle, and those of a group that is removed meanwhile
                // have nothing of it.
                let _handle = self.enter()?;
                let _chunks = space.chunk_lock.lock();
                if group.is_retired() {
                    continue;
                }
                space.load(&self.base, &group)?;
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
            let Some((member, range)) = live.space.next_freed() else { return false };
            if let Err(error) = self.discard_freed(live, member, &range) {
                live.space.forget_freed();
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
            for group in live.space.groups_in(range) {
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
