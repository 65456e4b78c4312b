//! Discarding: telling the devices which ranges hold no data.
//!
//! | call | what it discards | when |
//! |---|---|---|
//! | [`trim`] | free ranges of block groups, and all space that belongs to no chunk | when the user asks for it |
//! | [`discard_step`] | ranges that commits have freed and chunks that were removed, as far as they are still free | with [`EngineOptions::is_discarding`], soon after the commit |
//!
//! The last commit, its log and the running transaction do not need a free range (`space`). So any
//! thread may write over it, and any thread may discard it. These rules keep both from happening at
//! the same time:
//!
//! 1. A piece of free space is *out* while it is being discarded. It still counts as free, so all
//!    claims stay backed, but no thread takes it. A thread that finds no other place waits for the
//!    piece, with all locks that it holds. The discarding thread needs no lock meanwhile, so that
//!    wait ends.
//! 2. One piece is out at a time, of at most [`PIECE_BYTES`]. So a thread waits for one request to
//!    each device, or for a few.
//! 3. A block group is not removed while a piece of it is out.
//! 4. While a thread discards space that belongs to no chunk, it holds the chunk lock, so that
//!    space cannot become a chunk. It discards at most one piece at a time, and holds no handle. So
//!    a commit that needs the lock, to compute the size of the next chunk, waits for one piece at
//!    most.
//!
//! Ranges that commits have freed are gathered (`space/discard`), and most of them are soon written
//! again: trees give up blocks and take new ones all the time. So the allocator may use a range
//! before it is discarded, and such a range needs no discard. The background thread of the volume
//! goes through the gathered ranges. In a volume without that thread, the committing thread does,
//! after its commit. After the first error, the engine reports it once and stops discarding,
//! because nothing depends on discards. Closing a volume discards the ranges that are left.
//!
//! [`EngineOptions::is_discarding`]: crate::EngineOptions::is_discarding

use std::io::ErrorKind;
use std::ops::Range;
use std::sync::Arc;

use offshoot_btrfs_format::Logical;
use offshoot_btrfs_format::chunk::STRIPE_LEN;
use offshoot_vfs::{Code, Error, Result, Trimmed};
use tracing::{debug, info};

use crate::events::DISCARD;
use crate::inode::Rooms;
use crate::report::VolumeReport;
use crate::space::chunk_plan::MemberSpace;
use crate::space::{BlockGroup, PIECE_BYTES};
use crate::transaction::LiveVolume;

/// How many gathered ranges one step discards.
const STEP_RANGES: usize = 16;

/// As [`trim`](crate::Engine::trim).
pub(crate) fn trim(volume: &Rooms, range: &Range<u64>) -> Result<Trimmed> {
    let space = &volume.live()?.space;
    let mut trimmed = Trimmed::default();
    for group in space.groups_in(range) {
        let within = aligned(range, &group);
        if within.is_empty() {
            continue;
        }
        {
            // The handle keeps the trees readable. The trees have no items of a group that is
            // being removed, so it is skipped.
            let _handle = volume.enter()?;
            let _chunks = space.chunk_lock.lock();
            if group.is_retired() {
                continue;
            }
            space.load(&volume.base, &group)?;
        }
        discard_in_group(volume, &group, &within, &mut trimmed)?;
    }
    for member in 0..volume.members().len() {
        discard_unallocated(volume, member, &(0..u64::MAX), &mut trimmed)?;
    }
    info!(target: DISCARD, bytes = trimmed.bytes, "trimmed");
    require_some(trimmed)
}

/// The whole units of `group` in `range`. Other threads allocate beside the piece that is out, and
/// what they get starts where the piece ends. So a range that a user chose must not cut a unit.
///
/// Of a group at 1 MiB, the range from 1 MiB + 1 has the units from 1 MiB + 64 KiB on.
fn aligned(range: &Range<u64>, group: &BlockGroup) -> Range<u64> {
    let (first, last) = (group.start.0, group.end());
    let start = first + range.start.saturating_sub(first).next_multiple_of(STRIPE_LEN);
    let cut = if range.end < last { range.end.saturating_sub(first) % STRIPE_LEN } else { 0 };
    start..range.end.min(last) - cut
}

/// Discards some gathered ranges, as far as they are still free. Returns whether there are more.
pub(crate) fn discard_step(volume: &Rooms) -> bool {
    let Some(live) = volume.live_part().filter(|live| live.require_writing().is_ok()) else {
        return false;
    };
    for _ in 0..STEP_RANGES {
        let Some((member, range)) = live.space.next_freed() else { return false };
        if let Err(error) = discard_freed(volume, live, member, &range) {
            live.space.forget_freed();
            if live.require_writing().is_err() {
                return false;
            }
            volume.report(&VolumeReport::DiscardFailed { problem: error.to_string() });
            return false;
        }
    }
    true
}

/// Discards the parts of a range that are still free, on a member or in the logical space.
fn discard_freed(
    volume: &Rooms,
    live: &LiveVolume,
    member: Option<usize>,
    range: &Range<u64>,
) -> Result<()> {
    let mut trimmed = Trimmed::default();
    if let Some(member) = member {
        discard_unallocated(volume, member, range, &mut trimmed)?;
    } else {
        // The map of block groups must not be locked here. Otherwise a thread that allocates a
        // chunk would wait for the map, and behind it a thread that waits for the piece that is
        // out.
        for group in live.space.groups_in(range) {
            let within = range.start.max(group.start.0)..range.end.min(group.end());
            discard_in_group(volume, &group, &within, &mut trimmed)?;
        }
    }
    require_some(trimmed).map(drop)
}

/// Discards the free parts of `group` in `within`, if the free ranges are loaded.
fn discard_in_group(
    volume: &Rooms,
    group: &Arc<BlockGroup>,
    within: &Range<u64>,
    trimmed: &mut Trimmed,
) -> Result<()> {
    let live = volume.live()?;
    let mut at = within.start;
    while at < within.end
        && let Some(out) = live.space.take_out(group, &(at..within.end))
    {
        // A shutdown waits for this piece if it has not ended writing yet.
        live.require_writing()?;
        at = out.piece.end;
        let places = volume.storage.write_places(Logical(out.piece.start), at - out.piece.start)?;
        let len = |part: Range<u64>| part.end - part.start;
        let mut places: Vec<_> =
            places.into_iter().map(|(member, at, part)| (member, at.0, len(part))).collect();
        // Striped units that are neighbours on a member become one request.
        places.sort_unstable();
        let mut places = places.into_iter().peekable();
        while let Some((member, start, mut len)) = places.next() {
            let joins = |next: &(usize, u64, u64), len| (next.0, next.1) == (member, start + len);
            while let Some((_, _, more)) = places.next_if(|next| joins(next, len)) {
                len += more;
            }
            discard_on(volume, member, &(start..start + len), trimmed)?;
        }
    }
    Ok(())
}

/// Discards the parts of a member in `within` that belong to no chunk.
fn discard_unallocated(
    volume: &Rooms,
    member: usize,
    within: &Range<u64>,
    trimmed: &mut Trimmed,
) -> Result<()> {
    let space = &volume.live()?.space;
    let mut at = within.start;
    while at < within.end {
        let handle = volume.enter()?;
        let _chunks = space.chunk_lock.lock();
        let unused = |all: &mut [MemberSpace]| all[member].unused(&(at..within.end), PIECE_BYTES);
        let piece = volume.with_member_spaces(unused)?;
        // A shutdown waits for the handle first, and then for the chunk lock.
        drop(handle);
        let Some(piece) = piece else { break };
        at = piece.end;
        discard_on(volume, member, &piece, trimmed)?;
    }
    Ok(())
}

fn discard_on(
    volume: &Rooms,
    member: usize,
    range: &Range<u64>,
    trimmed: &mut Trimmed,
) -> Result<()> {
    let own = &volume.members()[member];
    let Some(device) = own.device.as_ref().filter(|_| !own.has_failed()) else { return Ok(()) };
    let len = range.end - range.start;
    debug!(target: DISCARD, device = device.name(), ?range, "discarding");
    match device.discard(range.start, len) {
        Ok(()) => {
            trimmed.bytes += len;
            volume.live()?.stats.discarded(usize::try_from(len).unwrap_or(usize::MAX));
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

/// Returns [`Error::Unsupported`] when no device could discard.
fn require_some(trimmed: Trimmed) -> Result<Trimmed> {
    if trimmed.bytes == 0 && !trimmed.unable.is_empty() {
        let names: Vec<_> = trimmed.unable.into_iter().collect();
        return Err(Error::unsupported(
            Code::Discard,
            format!("discarding on {}", names.join(", ")),
        ));
    }
    Ok(trimmed)
}
