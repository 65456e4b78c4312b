//! Write-back: from what is buffered of a file to its extents.
//!
//! Whoever writes back a file holds its lock, so nobody writes it meanwhile. It is done when the volume is synced, which
//! it does by itself every so often; when half of [`OpenOptions::dirty_bytes`](crate::OpenOptions::dirty_bytes) are
//! buffered, by the thread of the volume, and at all of it by whoever writes; when a file takes the place of another;
//! when more is promised than is left for others; and when somebody needs room.
//!
//! Each step puts one run of sectors in its place under one handle: a crash finds it there with its
//! checksums and the length that goes with it, or not at all.
//!
//! # Reservations
//!
//! What is buffered has its data reserved byte for byte, and each file that has something buffered a *claim*: it is promised the
//! metadata for one step. So write-back goes on when nothing else can. Further steps take what is kept for making room,
//! as removals do: what they copy is free again after a commit, and what the trees grow by is promised for each run of sectors.
//! [`Patience`] says whether a step may wait.
//!
//! What lies side by side in a tree is in few leaves: a step counts leaves, not items.

mod step;
#[cfg(test)]
mod tests;

use offshoot_btrfs_format::TreeId;
use offshoot_btrfs_format::edit::{ITEM_SIZE, leaf_capacity};
use offshoot_btrfs_format::file_extent::{FileExtentHead, FileExtentTail};
use offshoot_btrfs_format::inode::InodeItem;
use offshoot_vfs::{FileId, Result, Timestamp};

use super::changes::{Changes, timespec};
use super::subvolume::is_deleted;
use super::{inode_item, tree_of};
use crate::data::{FileBuffer, Sectors, checksum_items, insert_hole};
use crate::space::{Claim, Promise, Purpose, Reservation};
use crate::subvolume::timestamp;
use crate::transaction::Handle;
use crate::volume::Engine;
use step::{Step, hole_items};

/// Leaves that a step changes beside those of checksums and of many extents that it replaces: two of extents, that of the
/// checksums which it continues, and that of the inode.
const OTHER_ITEMS: u64 = 4;

/// Items of replaced extents that a claim covers.
const CLAIMED_REPLACED: u64 = 4;

/// The data of a step that a claim covers, in bytes.
const CLAIMED_BYTES: u64 = 1 << 20;

/// What a run of sectors adds to trees, in bytes: an extent with what is before and behind it, its item in the extent tree, a free
/// range and checksums, in leaves that are a third full.
const RUN_BYTES: u64 = 3 * (3 * 78 + 78 + 25 + 50);

/// The most that one step writes, in bytes.
const STEP_BYTES: u64 = 32 << 20;

/// Whether write-back may wait for metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// It waits until there is room. Nobody who makes room may do that.
    Waits,
    /// It leaves the rest buffered.
    Tries,
}

/// What is promised to a file that is buffered.
pub(super) struct FileClaim<'v> {
    /// The metadata that write-back begins with, unless the file has that.
    step: Option<Promise<'v>>,
    /// What runs of sectors add to trees.
    growth: Option<Promise<'v>>,
}

impl FileClaim<'_> {
    /// Keeps it with what is buffered.
    pub(super) fn keep(self, buffer: &FileBuffer) {
        let mut dirty = buffer.write();
        dirty.claim += self.step.map_or(0, Promise::keep);
        dirty.growth += self.growth.map_or(0, Promise::keep);
    }
}

/// Has promised what the write-back of so many more runs of sectors takes.
pub(super) fn claim<'v>(
    volume: &'v Engine,
    buffer: Option<&FileBuffer>,
    runs: usize,
) -> Result<FileClaim<'v>> {
    volume.limit_dirty_blocks()?;
    let has_claim = buffer.is_some_and(|buffer| buffer.read().claim > 0);
    let items = claimed_items(volume);
    let step = (!has_claim).then(|| volume.promise(items)).transpose()?;
    let growth = runs as u64 * RUN_BYTES;
    let growth = (growth > 0).then(|| volume.promise_bytes(growth)).transpose()?;
    Ok(FileClaim { step, growth })
}

/// The items of a step that a claim covers.
fn claimed_items(volume: &Engine) -> u64 {
    OTHER_ITEMS + checksum_items(volume, CLAIMED_BYTES)
}

/// Gives up what was reserved for data that is not buffered any more.
pub(super) fn release_data(volume: &Engine, bytes: u64) {
    if let Some(live) = volume.live_part() {
        Reservation::give_up(&live.space, Purpose::Data, bytes);
    }
}

/// Forgets what is buffered of a file that is removed.
pub(super) fn discard(volume: &Engine, file: FileId) {
    if let Some(buffer) = volume.buffers.take(file) {
        let (data, promised) = {
            let mut dirty = buffer.write();
            let promised = std::mem::take(&mut dirty.claim) + std::mem::take(&mut dirty.growth);
            (dirty.bytes(), promised)
        };
        release_data(volume, data);
        if let Some(live) = volume.live_part() {
            drop(Promise::resume(&live.space, promised));
        }
    }
}

/// Whether more is buffered than may be.
pub(super) fn is_over_limit(volume: &Engine) -> Result<bool> {
    Ok(volume.buffers.bytes() > volume.live()?.dirty_bytes)
}

/// Writes back until half of what may be buffered is, when there is too much.
pub(super) fn limit(volume: &Engine) -> Result<()> {
    let live = volume.live()?;
    if volume.buffers.bytes() > live.dirty_bytes / 2 {
        live.pressure.press();
    }
    if is_over_limit(volume)? { relieve(volume) } else { Ok(()) }
}

/// Where more is promised than is left for others, and no chunk comes, writes back `file`, whose lock is held: what was promised for it comes back,
/// and nobody waits for that. The thread of the volume does it for files that are not written any more.
pub(super) fn keep_room(volume: &Engine, file: FileId) -> Result<()> {
    let live = volume.live()?;
    if live.space.is_tight() && !live.space.is_roomy() {
        write_back(volume, file, Patience::Tries)?;
    }
    if live.space.is_tight() {
        live.pressure.press();
    }
    Ok(())
}

/// Writes back until half of what may be buffered is. What cannot be written back stays: its own sync tells why.
fn relieve(volume: &Engine) -> Result<()> {
    let half = volume.live()?.dirty_bytes / 2;
    for file in volume.buffers.files() {
        if volume.buffers.bytes() <= half {
            break;
        }
        let _ = sync_file(volume, file);
    }
    volume.live()?.require_whole()
}

/// Writes back what is buffered of `file`.
pub(crate) fn sync_file(volume: &Engine, file: FileId) -> Result<()> {
    let _locks = volume.inodes.lock(&[file]);
    write_back(volume, file, Patience::Waits)
}

/// Writes back everything that is buffered now.
///
/// # Errors
/// The first, when the others have been tried too.
pub(crate) fn sync_all(volume: &Engine) -> Result<()> {
    let files = volume.buffers.files();
    files.into_iter().map(|file| sync_file(volume, file)).fold(Ok(()), Result::and)
}

/// Writes back what is buffered of the files of the subvolume `id`.
///
/// # Errors
/// The first.
pub(crate) fn sync_subvolume(volume: &Engine, id: TreeId) -> Result<()> {
    let files = volume.buffers.files().into_iter().filter(|file| file.dev == id.0);
    files.into_iter().try_for_each(|file| sync_file(volume, file))
}

/// Writes back what can be without waiting for a lock of an inode or in line, as long as room is wanted, for who makes it and may hold locks of
/// inodes. What cannot be written back stays: its own sync tells why.
pub(crate) fn make_room(volume: &Engine, is_wanted: impl Fn() -> bool) -> Result<()> {
    for file in volume.buffers.files() {
        if !is_wanted() {
            break;
        }
        if let Some(_locks) = volume.inodes.try_lock(file) {
            let _ = write_back(volume, file, Patience::Tries);
        }
    }
    volume.live()?.require_whole()
}

/// Writes back what is buffered of `file`, whose lock is held.
pub(crate) fn write_back(volume: &Engine, file: FileId, patience: Patience) -> Result<()> {
    let Some(buffer) = volume.buffers.get(file) else { return Ok(()) };
    if is_deleted(volume, file)? {
        discard(volume, file);
        return Ok(());
    }
    if store_all(volume, file, &buffer, patience)? && finish(volume, file, &buffer, patience)? {
        discard(volume, file);
    }
    Ok(())
}

/// Puts everything that is buffered in its place; whether there was room for all of it.
fn store_all(
    volume: &Engine,
    file: FileId,
    buffer: &FileBuffer,
    patience: Patience,
) -> Result<bool> {
    loop {
        if patience == Patience::Waits {
            volume.limit_dirty_blocks()?;
        }
        let runs = buffer.read().first_runs(STEP_BYTES);
        if runs.is_empty() {
            return Ok(true);
        }
        let Some(step) = Step::begin(volume, file, buffer, Sectors::new(&runs), patience)? else {
            return Ok(false);
        };
        step.store()?;
    }
}

/// Gives the inode the length and the times of the file; whether there was room for that.
fn finish(volume: &Engine, file: FileId, buffer: &FileBuffer, patience: Patience) -> Result<bool> {
    let item = inode_item(volume, tree_of(volume, file)?, file)?;
    let size = buffer.read().size;
    if item.size.get() == size && Times::of(buffer).are_in(&item) {
        return Ok(true);
    }
    let sector = u64::from(volume.superblock().sector_size);
    let hole = item.size.get().next_multiple_of(sector)..size.next_multiple_of(sector);
    let items = OTHER_ITEMS + leaves_of(volume, hole_items(volume, file, hole.end)?);
    let Some(handle) = join(volume, buffer, items, patience)? else { return Ok(false) };
    let mut changes = Changes::accepted(&handle, file)?;
    changes.inode(file)?;
    handle.whole(|| {
        insert_hole(&handle, file, hole)?;
        change_inode(&mut changes, file, buffer, size, 0)?;
        changes.apply()
    })?;
    Ok(true)
}

/// When a file was written.
struct Times {
    mtime: Option<Timestamp>,
    ctime: Timestamp,
}

impl Times {
    fn of(buffer: &FileBuffer) -> Self {
        let dirty = buffer.read();
        Self { mtime: dirty.mtime, ctime: dirty.ctime }
    }

    fn are_in(&self, item: &InodeItem) -> bool {
        let has_mtime = self.mtime.is_none_or(|mtime| mtime == timestamp(&item.mtime));
        has_mtime && self.ctime <= timestamp(&item.ctime)
    }
}

/// Stores length, times, and by how much the data became more or less.
fn change_inode(
    changes: &mut Changes<'_, '_>,
    file: FileId,
    buffer: &FileBuffer,
    size: u64,
    change: i64,
) -> Result<()> {
    let times = Times::of(buffer);
    let ctime = times.ctime.max(timestamp(&changes.inode(file)?.ctime));
    let mtime = times.mtime.map(timespec).transpose()?;
    changes.change_inode(file, ctime, |item| {
        item.size = size.into();
        item.nbytes = item.nbytes.get().saturating_add_signed(change).into();
        item.mtime = mtime.unwrap_or(item.mtime);
    })
}

/// Joins with room for `items`: on the claim of the file when that is enough.
fn join<'v>(
    volume: &'v Engine,
    buffer: &FileBuffer,
    items: u64,
    patience: Patience,
) -> Result<Option<Handle<'v>>> {
    let live = volume.live()?;
    volume.limit_delayed()?;
    if buffer.read().claim > 0 && items <= claimed_items(volume) {
        let claim = std::mem::take(&mut buffer.write().claim);
        let promise = Promise::resume(&live.space, claim);
        let reservation = match patience {
            Patience::Waits => volume.redeem(promise)?,
            Patience::Tries => match volume.try_redeem(promise)? {
                Ok(reservation) => reservation,
                Err(promise) => {
                    buffer.write().claim = promise.keep();
                    return Ok(None);
                }
            },
        };
        return Ok(Some(volume.enter()?.with_reservation(reservation, claimed_items(volume))));
    }
    match volume.try_join(live, items, Claim::Work)? {
        Some(handle) => Ok(Some(handle)),
        // What is buffered was accepted.
        None if patience == Patience::Waits => volume.join_for(items, Claim::MakesRoom).map(Some),
        None => Ok(None),
    }
}

/// How many more leaves than the two that it begins and ends in a run of extent items is in, where each is a third full.
fn leaves_of(volume: &Engine, extents: u64) -> u64 {
    let item = size_of::<FileExtentHead>() + size_of::<FileExtentTail>() + ITEM_SIZE;
    extents / (leaf_capacity(volume.superblock().node_size) / 3 / item) as u64
}
