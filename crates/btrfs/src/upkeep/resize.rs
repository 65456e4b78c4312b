//! Making a member larger or smaller.
//!
//! A device becomes longer before its member grows, and shorter after its member has shrunk. So at
//! any time the device is as long as the volume says, or longer.
//!
//! To shrink, first no new chunk may reach behind the new end. Then each block group with a stripe
//! there is emptied and removed, the last one first, and a commit stores the new size. If there is
//! no place for what moves, the groups before the end become shorter (`compact`).

use std::cmp::Ordering;
use std::io::ErrorKind;
use std::sync::Arc;

use offshoot_btrfs_format::DeviceId;
use offshoot_btrfs_format::chunk::Chunk;
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE};
use offshoot_kit::device_size::lengthen;
use offshoot_vfs::{Errno, Error, Result};
use tracing::info;

use super::Keeper;
use super::compact::Compactor;
use super::relocate::Relocator;
use crate::events::RELOCATE;
use crate::inode::Rooms;
use crate::space::{BlockGroup, Claim, RESERVED_BYTES};

/// The items that a new size changes: that of the device.
const SIZE_ITEMS: u64 = 2;

/// What a member has become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resized {
    /// Its size before, in bytes.
    pub before: u64,
    /// Its size now, in bytes.
    pub after: u64,
    /// The size of its device now, in bytes.
    pub device_bytes: u64,
}

/// As [`Engine::resize`](crate::Engine::resize).
pub(crate) fn resize(volume: &Rooms, keeper: &Keeper, id: DeviceId, bytes: u64) -> Result<Resized> {
    let _alone = alone(volume)?;
    resize_alone(volume, keeper, id, bytes)
}

/// The same for the thread that holds the lock.
fn resize_alone(volume: &Rooms, keeper: &Keeper, id: DeviceId, bytes: u64) -> Result<Resized> {
    let index = index_of(volume, id)?;
    let after = in_sectors(volume, bytes);
    let before = volume.members()[index].total_bytes();
    match after.cmp(&before) {
        Ordering::Greater => {
            lengthen_device(volume, index, after)?;
            store_size(volume, index, after)?;
        }
        Ordering::Less => {
            shrink(volume, keeper, index, after)?;
            cut_device(volume, index, before, after)?;
        }
        Ordering::Equal => {}
    }
    info!(target: RELOCATE, device = id.0, before, after, "resized");
    Ok(resized(volume, index, before))
}

/// As [`Engine::resize_to_minimum`](crate::Engine::resize_to_minimum).
pub(crate) fn resize_to_minimum(
    volume: &Rooms,
    keeper: &Keeper,
    id: DeviceId,
    slack: u64,
) -> Result<Resized> {
    let _alone = alone(volume)?;
    let index = index_of(volume, id)?;
    let before = volume.members()[index].total_bytes();
    let compactor = Compactor::new(Relocator::new(volume, keeper)?, index)?;
    limit(volume, index, Some(before))?;
    let lowered = lower(volume, &compactor, index, slack);
    limit(volume, index, None)?;
    drop(compactor);
    let after = lowered?;
    match after.cmp(&before) {
        Ordering::Less => cut_device(volume, index, before, after)?,
        Ordering::Greater => return resize_alone(volume, keeper, id, after),
        Ordering::Equal => {}
    }
    info!(target: RELOCATE, device = id.0, before, after, "resized to the smallest size");
    Ok(resized(volume, index, before))
}

/// How often other threads may allocate a chunk behind the end that was found.
const MOST_TRIES: u32 = 16;

/// Lowers the end of a member as far as it goes, and stores that and `slack` as its size if it is
/// less than before. Returns the size.
fn lower(volume: &Rooms, compactor: &Compactor<'_, '_>, index: usize, slack: u64) -> Result<u64> {
    let before = volume.members()[index].total_bytes();
    let mut tries = 0;
    loop {
        let end = compactor.lower_to(0)?;
        let after = in_sectors(volume, end.saturating_add(slack));
        if after >= before {
            return Ok(after);
        }
        limit(volume, index, Some(after))?;
        match store_size(volume, index, after) {
            Err(Error::Posix { errno: Errno::BUSY, .. }) if tries < MOST_TRIES => tries += 1,
            stored => return stored.map(|()| after),
        }
        limit(volume, index, Some(before))?;
    }
}

/// Keeps other threads from resizing the volume, from emptying groups of it, and from checking it.
///
/// # Errors
/// `EBUSY` when one does.
pub(crate) fn alone(volume: &Rooms) -> Result<parking_lot::MutexGuard<'_, ()>> {
    volume.live()?.space.resizing.try_lock().ok_or_else(|| {
        Error::posix(Errno::BUSY, "the volume, which is being resized or checked: try again later")
    })
}

/// What a member has become.
fn resized(volume: &Rooms, index: usize, before: u64) -> Resized {
    let member = &volume.members()[index];
    let device_bytes = member.device.as_ref().map_or(0, |device| device.size_bytes());
    Resized { before, after: member.total_bytes(), device_bytes }
}

/// Rounds down to whole sectors.
fn in_sectors(volume: &Rooms, bytes: u64) -> u64 {
    let sector = u64::from(volume.superblock().sector_size);
    bytes / sector * sector
}

/// Makes the device of a member at least `bytes` bytes long.
fn lengthen_device(volume: &Rooms, index: usize, bytes: u64) -> Result<()> {
    let member = &volume.members()[index];
    match &member.device {
        Some(device) => lengthen(&**device, bytes),
        None => Err(Error::posix(Errno::NODEV, member.name())),
    }
}

/// Cuts the device of a member that has shrunk off behind its new end. A device that ended behind
/// the old end holds something else there, and stays as long as it is. So does one whose size is
/// fixed. Copies of the superblock behind the new end go, because they would lead to an old state.
fn cut_device(volume: &Rooms, index: usize, before: u64, after: u64) -> Result<()> {
    let Some(device) = &volume.members()[index].device else { return Ok(()) };
    for offset in SUPERBLOCK_OFFSETS {
        let end = offset + SUPERBLOCK_SIZE as u64;
        if end > after && end <= before.min(device.size_bytes()) {
            let wiped = device.write_at(offset, &[0; SUPERBLOCK_SIZE]);
            wiped.and_then(|()| device.flush()).map_err(|error| {
                let what = format!("{}: removing a copy of the superblock", device.name());
                Error::io(what, error)
            })?;
        }
    }
    let rest = device.size_bytes().saturating_sub(before);
    if rest >= u64::from(volume.superblock().sector_size) {
        return Ok(());
    }
    match device.resize(after) {
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(()),
        // In the sandbox of a mount, the host lets us free the space and keep the length.
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            let behind = device.size_bytes().saturating_sub(after);
            match device.discard(after, behind) {
                Err(error) if error.kind() != ErrorKind::Unsupported => {
                    let what = format!("{}: freeing what is behind its end", device.name());
                    Err(Error::io(what, error))
                }
                _ => Ok(()),
            }
        }
        cut => cut
            .and_then(|()| device.flush())
            .map_err(|error| Error::io(format!("{}: cutting off its end", device.name()), error)),
    }
}

/// The index of the member `id`.
fn index_of(volume: &Rooms, id: DeviceId) -> Result<usize> {
    let found = volume.members().iter().position(|member| member.id == id);
    found.ok_or_else(|| Error::posix(Errno::NODEV, format!("device {id}")))
}

/// Stores the size of a member, and commits.
fn store_size(volume: &Rooms, index: usize, bytes: u64) -> Result<()> {
    {
        let handle = volume.join_for(SIZE_ITEMS, Claim::LastResort)?;
        let _chunks = handle.space().chunk_lock.lock();
        if last_behind(volume, index, bytes)?.is_some() {
            let what = format!("the end of {}", volume.members()[index].name());
            return Err(Error::posix(Errno::BUSY, what));
        }
        if !handle.has_system_space()? {
            return Err(Error::posix(Errno::NOSPC, "room for the chunk tree"));
        }
        handle.set_member_size(index, bytes)?;
    }
    volume.sync()
}

/// Makes a member smaller.
fn shrink(volume: &Rooms, keeper: &Keeper, index: usize, bytes: u64) -> Result<()> {
    let least = least_bytes(volume, index)?;
    if bytes < least {
        return Err(too_small(volume, index, bytes, least));
    }
    limit(volume, index, Some(bytes))?;
    let outcome = shrink_limited(volume, keeper, index, bytes);
    limit(volume, index, None)?;
    outcome.map_err(|error| match error {
        Error::Posix { errno: Errno::NOSPC, .. } => too_small(volume, index, bytes, least),
        error => error,
    })
}

/// Limits new chunks on a member to its first `bytes` bytes, or no longer.
///
/// # Errors
/// `ENOSPC` when buffered data counts on a chunk behind that. There is no limit then.
fn limit(volume: &Rooms, index: usize, bytes: Option<u64>) -> Result<()> {
    if bytes.is_some() {
        // So that little is promised.
        volume.sync()?;
    }
    let space = &volume.live()?.space;
    let handle = volume.enter()?;
    let _chunks = space.chunk_lock.lock();
    space.limit_member(index, bytes);
    if bytes.is_some() && handle.may_lose_next_chunk()? {
        return Ok(());
    }
    space.limit_member(index, None);
    handle.note_next_chunk()?;
    if bytes.is_some() {
        return Err(Error::posix(Errno::NOSPC, "room that buffered data counts on"));
    }
    Ok(())
}

fn shrink_limited(volume: &Rooms, keeper: &Keeper, index: usize, bytes: u64) -> Result<()> {
    if last_behind(volume, index, bytes)?.is_some() {
        let relocator = Relocator::new(volume, keeper)?;
        match relocate_behind(&relocator, index, bytes) {
            // What is before the end may have to become shorter.
            Err(error) if error.errno() == Errno::NOSPC && is_alone(volume) => {
                if Compactor::new(relocator, index)?.lower_to(bytes)? > bytes {
                    return Err(error);
                }
            }
            moved => moved?,
        }
    }
    store_size(volume, index, bytes)
}

/// Empties and removes all groups with a stripe behind the first `bytes` bytes of a member.
fn relocate_behind(relocator: &Relocator<'_, '_>, index: usize, bytes: u64) -> Result<()> {
    while let Some(group) = last_behind(relocator.volume, index, bytes)? {
        relocator.relocate(&group)?;
    }
    Ok(())
}

/// Whether the volume has one member, with all copies of each chunk on it.
fn is_alone(volume: &Rooms) -> bool {
    volume.members().len() == 1
}

/// Where the last stripe of a chunk on a member ends; `None` when it has none there.
pub(super) fn end_on(volume: &Rooms, chunk: &Chunk, index: usize) -> Option<u64> {
    let id = volume.members().get(index)?.id;
    let own = chunk.stripes.iter().filter(|stripe| stripe.device == id);
    own.map(|stripe| stripe.physical.0.saturating_add(chunk.stripe_bytes())).max()
}

/// The block group with the last stripe of a member behind its first `bytes` bytes.
pub(super) fn last_behind(
    volume: &Rooms,
    index: usize,
    bytes: u64,
) -> Result<Option<Arc<BlockGroup>>> {
    let behind = volume.chunks().filter_map(|chunk| Some((end_on(volume, &chunk, index)?, chunk)));
    let last = behind.filter(|(end, _)| *end > bytes).max_by_key(|(end, _)| *end);
    last.map(|(_, chunk)| volume.live()?.space.group_of(chunk.start)).transpose()
}

/// A size that the member needs at least: what is used of the chunks on it.
fn least_bytes(volume: &Rooms, index: usize) -> Result<u64> {
    let space = &volume.live()?.space;
    let others = volume.members().len() > 1;
    let mut sum = RESERVED_BYTES;
    for chunk in volume.chunks() {
        // Other members may take what is on this one.
        if others || chunk.length == 0 {
            continue;
        }
        let used = space.group_of(chunk.start)?.used_bytes();
        let id = volume.members()[index].id;
        let copies = chunk.stripes.iter().filter(|stripe| stripe.device == id).count() as u64;
        sum = sum.saturating_add(used.saturating_mul(copies));
    }
    Ok(sum)
}

fn too_small(volume: &Rooms, index: usize, bytes: u64, least: u64) -> Error {
    let name = volume.members()[index].name();
    let what = format!(
        "what is on {name} does not fit in {bytes} bytes: more than {least} are needed; \
         `minimal` finds the smallest size"
    );
    Error::posix(Errno::NOSPC, what)
}
