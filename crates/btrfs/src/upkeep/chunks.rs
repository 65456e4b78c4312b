//! When chunks are allocated and when block groups are removed.
//!
//! Chunks are allocated for the tickets that wait in line, and ahead of them. After each commit the
//! committing thread removes empty block groups, except those that will be needed again soon.

use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Result};

use crate::inode::{Rooms, RoomsHandle};
use crate::space::{BlockGroup, Claim, Purpose};
use crate::tree::with_item;

/// A request of at most so many bytes gets a chunk even if that chunk alone cannot grant it: later
/// commits give back the rest.
const LITTLE_BYTES: u64 = 16 << 20;

/// Allocates chunks for the first ticket in line of this kind of space, until it is granted. The
/// first attempt uses the unallocated space of the devices. If that is not enough, the second
/// attempt removes empty block groups and uses their space too. The caller leads the line and must
/// hold no handle.
pub(super) fn grow(volume: &Rooms, purpose: Purpose) -> Result<()> {
    if grow_for_first(volume, purpose)? {
        return Ok(());
    }
    let space = &volume.live()?.space;
    let is_data = !space.counts_as_metadata(purpose);
    remove_empty(volume, is_data)?;
    if grow_for_first(volume, purpose)? || !is_data || !space.is_roomy() {
        return Ok(());
    }
    // Promises may count on the next chunk of metadata, so that chunk is allocated before one
    // for data.
    let is_awaited = || space.ledger(purpose).is_awaited();
    if is_met_by_chunks(volume, purpose)? && try_grow(volume, Purpose::Metadata, is_awaited)? {
        grow_for_first(volume, purpose)?;
    }
    Ok(())
}

/// Allocates chunks until the first ticket in line is granted, if the devices have room for that
/// many. If they have not, a ticket of at most [`LITTLE_BYTES`] still gets one chunk. Returns
/// whether a chunk was allocated.
fn grow_for_first(volume: &Rooms, purpose: Purpose) -> Result<bool> {
    let space = &volume.live()?.space;
    let is_awaited = || space.ledger(purpose).is_awaited();
    let would_do = is_met_by_chunks(volume, purpose)?;
    let wants_little = || space.first_in_line(purpose).is_some_and(|d| d.bytes <= LITTLE_BYTES);
    if !would_do && !wants_little() {
        return Ok(false);
    }
    let granted = || space.ledger(purpose).line().granted();
    let (before, mut has_grown) = (granted(), false);
    while is_awaited() && try_grow(volume, purpose, is_awaited)? {
        has_grown = true;
        space.serve(purpose);
        // The next ticket may want more than all chunks together could hold.
        if !would_do || granted() != before {
            break;
        }
    }
    Ok(has_grown)
}

/// Whether the first ticket in line would be granted if the members were filled with chunks. The
/// caller must hold no handle.
fn is_met_by_chunks(volume: &Rooms, purpose: Purpose) -> Result<bool> {
    let space = &volume.live()?.space;
    let Some(first) = space.first_in_line(purpose) else { return Ok(false) };
    let handle = volume.enter()?;
    let _chunks = space.chunk_lock.lock();
    let (mut members, mut more) = (volume.with_member_spaces(|all| all.to_vec())?, 0u64);
    while !space.would_fit(purpose, first, more) {
        let Some(plan) = handle.chunk_plan(purpose, &members)? else { return Ok(false) };
        more = more.saturating_add(plan.bytes);
        plan.take_from(&mut members);
    }
    Ok(true)
}

/// Allocates a chunk, if `is_wanted` still holds under the chunk lock and a device has room that no
/// promise counts on. Returns whether it did.
pub(crate) fn try_grow(
    volume: &Rooms,
    purpose: Purpose,
    is_wanted: impl Fn() -> bool,
) -> Result<bool> {
    let live = volume.live()?;
    let items = live.space.chunk_items();
    // A thread that needs data may be the first one to change this volume: the ledger then
    // knows of no free metadata yet.
    let needed = || live.space.cost(items) + live.space.commit_cost();
    let metadata = live.space.ledger(Purpose::Metadata);
    look_around(volume, Purpose::Metadata, || metadata.free() < metadata.reserved() + needed())?;
    let Some(handle) = join_for_chunk(volume, purpose, items)? else { return Ok(false) };
    let _chunks = live.space.chunk_lock.lock();
    Ok(is_wanted() && handle.has_system_space()? && handle.allocate_chunk(purpose)?)
}

/// Joins with room for a chunk. The leader of the line of data waits in the line of metadata if the
/// members have place for a chunk, because others may have reserved all metadata for a moment. The
/// leader of the line of metadata cannot wait in its own line.
fn join_for_chunk(volume: &Rooms, purpose: Purpose, items: u64) -> Result<Option<RoomsHandle<'_>>> {
    let live = volume.live()?;
    let joined = volume.try_join(live, items, Claim::LastResort)?;
    let may_wait = !live.space.counts_as_metadata(purpose);
    if joined.is_some() || !may_wait || !has_place(volume, purpose)? {
        return Ok(joined);
    }
    match volume.join_for(items, Claim::LastResort) {
        Err(error) if error.errno() == Errno::NOSPC => Ok(None),
        joined => joined.map(Some),
    }
}

/// Whether the members have place for a chunk.
fn has_place(volume: &Rooms, purpose: Purpose) -> Result<bool> {
    let handle = volume.enter()?;
    let _chunks = handle.space().chunk_lock.lock();
    let next = volume.with_member_spaces(|members| handle.next_chunk(purpose, members))?;
    Ok(next?.is_some())
}

/// Finds out what the next chunk of metadata would hold. Then loads the free space of block groups
/// for `purpose`, one group at a time, while `is_wanted` holds. The caller must hold no handle.
pub(crate) fn look_around(
    volume: &Rooms,
    purpose: Purpose,
    is_wanted: impl Fn() -> bool,
) -> Result<()> {
    note_next_chunk(volume)?;
    let space = &volume.live()?.space;
    // The handle keeps a commit from changing the trees meanwhile.
    let _handle = volume.enter()?;
    while is_wanted() && space.load_one(&volume.base, purpose)? {
        space.serve(purpose);
    }
    Ok(())
}

/// Loads the free space of all block groups of metadata, and allocates chunks while less than
/// `bytes` are free and the members have place for one. The caller must hold no handle.
pub(crate) fn look_for_room(volume: &Rooms, bytes: u64) -> Result<()> {
    let metadata = volume.live()?.space.ledger(Purpose::Metadata);
    let is_wanted = || metadata.free() < bytes;
    look_around(volume, Purpose::Metadata, || true)?;
    while is_wanted() && try_grow(volume, Purpose::Metadata, is_wanted)? {}
    if is_wanted() {
        remove_empty(volume, false)?;
        while is_wanted() && try_grow(volume, Purpose::Metadata, is_wanted)? {}
    }
    Ok(())
}

/// Finds out what the next chunk of metadata would hold, if the last answer was nothing. A thread
/// that allocates or removes a chunk notes it anew. But where the chunk tree had no room, a commit
/// may have made some since. The caller must hold no handle.
pub(crate) fn note_next_chunk(volume: &Rooms) -> Result<()> {
    let space = &volume.live()?.space;
    if space.is_roomy() || !space.allocated.has_much_room(0) {
        return Ok(());
    }
    let handle = volume.enter()?;
    let _chunks = space.chunk_lock.lock();
    handle.note_next_chunk()
}

/// Removes empty block groups, except one of each kind and those that will be needed again soon.
pub(crate) fn remove_empty_groups(volume: &Rooms) -> Result<()> {
    remove_empty(volume, false)
}

/// As [`remove_empty_groups`]. With `data_wants_room` it also removes block groups of metadata that
/// are not needed now but would be kept for later.
fn remove_empty(volume: &Rooms, data_wants_room: bool) -> Result<()> {
    let live = volume.live()?;
    if live.space.keeps_empty_groups() {
        return Ok(());
    }
    for group in live.space.empty_groups() {
        let items = live.space.chunk_items() + bitmap_leaves(volume, &group);
        let Some(handle) = volume.try_join(live, items, Claim::LastResort)? else {
            return Ok(());
        };
        let _chunks = live.space.chunk_lock.lock();
        if group.is_retired() {
            // Another thread removed it meanwhile.
            continue;
        }
        let chunk = volume.storage.chunk_at(group.start)?;
        let taken = chunk.stripe_bytes() * chunk.stripes.len() as u64;
        let keep = live.space.spare_bytes(taken, data_wants_room);
        if has_cache_file(volume, &group)? || !handle.has_system_space()? {
            continue;
        }
        if live.space.retire(&group, keep) {
            handle.remove_group(&group)?;
        }
    }
    Ok(())
}

/// Leaves that the bitmaps of a block group may fill.
pub(super) fn bitmap_leaves(volume: &Rooms, group: &BlockGroup) -> u64 {
    let sector = u64::from(volume.superblock().sector_size);
    let bitmap_bytes = group.len / sector / 8;
    2 + 4 * bitmap_bytes / u64::from(volume.superblock().node_size)
}

/// Whether the root tree names a file with the version 1 free space cache of the block group. Such
/// a group is kept, because removing it would leave that file behind.
fn has_cache_file(volume: &Rooms, group: &BlockGroup) -> Result<bool> {
    let key = Key::new(objectid::FREE_SPACE, ItemType(0), group.start.0);
    Ok(with_item(volume, volume.tree(TreeId::ROOT)?, key, |_| Ok(()))?.is_some())
}
