//! Write-back: from the buffered data of a file to its extents.
//!
//! Write-back holds the lock of the file. While long runs are on their way to the devices it
//! releases the lock, and others may write the file (`ahead`). Write-back happens
//!
//! - when the volume is synced, which its thread does at every interval;
//! - when half of [`EngineOptions::dirty_bytes`](crate::EngineOptions::dirty_bytes) are buffered,
//!   by the thread of the volume;
//! - when all of `dirty_bytes` are buffered, by the writing thread;
//! - when a file replaces another one;
//! - when more metadata is promised than is left for others;
//! - when a thread needs room.
//!
//! Each step puts one run of sectors in its place under one handle. After a crash the file has the
//! run with its checksums and the new length, or none of them.
//!
//! # Reservations
//!
//! Buffered data has its data space reserved byte for byte, and the growth of trees promised. A
//! step also copies tree blocks, and their old places are free again after a commit. So steps take
//! these copies from the reserve for making room, one after the other, as removals do. Write-back
//! therefore works even when other operations find no room (`space/reserve`). [`Patience`] says
//! whether a step may wait.
//!
//! Adjacent items are in few leaves, so a step reserves for leaves, not for items.
//!
//! Where many small new files wait, one step stores several of them (`together`).

pub(super) mod ahead;
mod step;
#[cfg(test)]
mod tests;
mod together;

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Instant;

use offshoot_btrfs_format::edit::{ITEM_SIZE, leaf_capacity};
use offshoot_btrfs_format::file_extent::{FileExtentHead, FileExtentTail};
use offshoot_btrfs_format::inode::InodeItem;
use offshoot_btrfs_format::{Generation, TreeId};
use offshoot_vfs::{Errno, FileId, Result, Timestamp};
use tracing::debug;

use super::changes::{Changes, timespec};
use super::subvolume::is_deleted;
use super::{compression, inode_item, tree_of};
use crate::data::timestamp;
use crate::data::{CompressionChunks, DirtyFile, FileBuffer, Sectors, chunks_of, insert_hole};
use crate::events::{WRITEBACK, clock, micros};
use crate::inode::{Rooms, RoomsHandle};
use crate::space::{Claim, Promise, growth_bytes};
pub(super) use step::{MOST_REPLACED, hole_items, until_replaced};
use step::{OutgoingData, WriteBackStep};

/// The leaves that a step changes beside those of checksums and of the many extents that it may
/// replace: two of extents, that of the checksums which it continues, and that of the inode.
const OTHER_ITEMS: u64 = 4;

/// What a file adds to its tree beside runs of sectors and inline data, in bytes: the extent item
/// of that data, or a hole.
const FILE_BYTES: u64 = (size_of::<FileExtentHead>() + ITEM_SIZE) as u64;

/// What a run of sectors adds to the tree of the file, in bytes: an extent, and the parts before
/// and behind it of an extent that it splits.
const RUN_BYTES: u64 = 3 * 78;

/// What a run adds to the trees of a commit, beside the checksums themselves: an extent with its
/// owner, a free range, an item of checksums.
const RUN_BYTES_OF_COMMITS: u64 = 78 + 9 + 25 + 25;

/// The largest file that can be inline with this node size, in bytes. A leaf has room for three
/// such items. With the smallest nodes the limit is 2048, the default of the kernel.
pub(crate) const fn most_inline(node_size: u32) -> u64 {
    let third = leaf_capacity(node_size) as u64 / 3;
    if third < 2048 { 2048 } else { third }
}

/// The most commits for one write-back of a file that can only be written in place. After each
/// commit other threads may move extents and write a log, which makes another commit necessary.
const MOST_COMMITS: u32 = 8;

/// The most files that a writer stores before its own, so that it does not wait for longer than a
/// few milliseconds.
const MOST_BEFORE: usize = 8 * together::MOST_FILES;

/// The most that one step writes, in bytes.
const STEP_BYTES: u64 = 32 << 20;

/// Whether write-back may wait for metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// It waits until there is room. A thread that makes room must not wait.
    Waits,
    /// It does not wait, and leaves the rest buffered.
    Tries,
}

/// Promises the growth of trees by storing `gaps`, which are about to be buffered for `file`.
/// `buffer` holds the data that is buffered already. Its promise counts towards the sum, since
/// adjacent runs may have become one and now need less.
pub(super) fn promise<'v>(
    volume: &'v Rooms,
    file: FileId,
    buffer: Option<&FileBuffer>,
    gaps: &[Range<u64>],
) -> Result<Promise<'v>> {
    volume.limit_dirty_blocks()?;
    let (mut amount, promised) = buffer.map_or_else(Default::default, |buffer| {
        let dirty = buffer.read();
        (WrittenAmount::of(&dirty), dirty.promised())
    });
    for gap in gaps {
        amount.add(gap);
    }
    volume.promise(growth(volume, file, amount)?.saturating_sub(promised))
}

/// The amount of data that is written back of a file.
#[derive(Clone, Copy, Default)]
struct WrittenAmount {
    /// Runs of sectors.
    runs: u64,
    /// The extents that the runs may become, because compression cuts them into chunks.
    extents: u64,
    bytes: u64,
}

impl WrittenAmount {
    fn of(dirty: &DirtyFile) -> Self {
        Self { runs: dirty.run_count(), extents: dirty.extent_count(), bytes: dirty.bytes() }
    }

    fn add(&mut self, gap: &Range<u64>) {
        self.runs += 1;
        self.extents += chunks_of(gap);
        self.bytes += gap.end - gap.start;
    }
}

/// The growth of trees when this amount of `file` is written back, in bytes of metadata.
fn growth(volume: &Rooms, file: FileId, amount: WrittenAmount) -> Result<u64> {
    let (superblock, live) = (volume.superblock(), volume.live()?);
    let WrittenAmount { runs, extents, bytes } = amount;
    let sectors = bytes / u64::from(superblock.sector_size);
    let sums = sectors * superblock.checksum.len() as u64;
    let items = growth_bytes(
        volume.options.max_inline + FILE_BYTES + extents * RUN_BYTES,
        extents * RUN_BYTES_OF_COMMITS + sums,
    );
    // One place is that of the inode. A run may replace one extent for each of its sectors.
    let places = 1 + runs;
    let leaves = places + leaves_of(volume, sectors);
    let tree = live.tree(volume, TreeId(file.dev))?;
    let used = tree.used.load(Ordering::Relaxed);
    let has_snapshots = tree.last_snapshot() != Generation(0);
    Ok(items + live.space.lasting_bytes(used, has_snapshots, places, leaves))
}

/// Releases the reservation of `data` bytes that are no longer buffered, and the part of the
/// promise that the rest does not need.
pub(super) fn release(volume: &Rooms, buffer: &FileBuffer, data: u64) {
    let _given_up = {
        let mut dirty = buffer.write();
        // For a deleted subvolume this fails, and all is forgotten soon.
        let needed = growth(volume, dirty.file, WrittenAmount::of(&dirty));
        let more = dirty.promised().saturating_sub(needed.unwrap_or(u64::MAX));
        dirty.give_up(data, more)
    };
}

/// Removes `range` from the buffer, and releases its reservation.
fn forget_data(volume: &Rooms, buffer: &FileBuffer, range: &Range<u64>) {
    release(volume, buffer, volume.buffers.remove(buffer, range));
}

/// Forgets the buffer of a file that was removed or stored.
pub(super) fn discard(volume: &Rooms, file: FileId) {
    if let Some(buffer) = volume.buffers.take(file) {
        ahead::forget(volume, &buffer);
        forget_data(volume, &buffer, &(0..u64::MAX));
        let _given_up = buffer.write().give_up(0, u64::MAX);
    }
}

/// A pass of write-back over many files, for its events.
struct WriteBackPass<'v> {
    volume: &'v Rooms,
    since: Option<Instant>,
}

impl<'v> WriteBackPass<'v> {
    fn begin(volume: &'v Rooms, why: &str) -> Self {
        debug!(target: WRITEBACK, why, buffered = volume.buffers.bytes(), "write-back begins");
        Self { volume, since: clock!(WRITEBACK, DEBUG) }
    }
}

impl Drop for WriteBackPass<'_> {
    fn drop(&mut self) {
        debug!(
            target: WRITEBACK,
            buffered = self.volume.buffers.bytes(),
            us = micros(self.since),
            "write-back has ended",
        );
    }
}

/// Whether more is buffered than `dirty_bytes`.
pub(super) fn is_over_limit(volume: &Rooms) -> bool {
    volume.buffers.bytes() > volume.options.dirty_bytes
}

/// Writes back until half of `dirty_bytes` is buffered, if more than all of it is. From half on it
/// asks the thread of the volume to write back.
pub(super) fn limit(volume: &Rooms) -> Result<()> {
    let live = volume.live()?;
    if volume.buffers.bytes() > volume.options.dirty_bytes / 2 {
        live.pressure.press();
    }
    if is_over_limit(volume) { relieve(volume) } else { Ok(()) }
}

/// Writes `file` back, whose lock is held, if space is short: the promises and reservations of
/// buffered data exceed what is left for others, and no chunk is likely. That releases the promise,
/// and also the data space of a file that becomes inline. So no thread has to wait for them. The
/// thread of the volume does the same for files that are no longer written.
///
/// Small files that were made just before a small one go first. In the order of their inodes new
/// items fill each leaf; items of an inode below others that are stored already leave two leaves
/// half full.
pub(super) fn keep_room(volume: &Rooms, file: FileId) -> Result<()> {
    let space = &volume.live()?.space;
    if !space.is_roomy() {
        let is_small = is_small(volume, file);
        if space.is_tight() || is_small && space.has_little_data(0) {
            if is_small {
                store_idle(volume, &small_before(volume, file), || true)?;
            }
            write_back(volume, file, Patience::Tries)?;
        }
    }
    if space.is_tight() {
        volume.live()?.pressure.press();
    }
    Ok(())
}

/// Whether `file` is buffered and short enough to be inline.
fn is_small(volume: &Rooms, file: FileId) -> bool {
    let buffer = volume.buffers.get(file);
    buffer.is_some_and(|buffer| buffer.read().size <= volume.options.max_inline)
}

/// The small files that are buffered and have the inode numbers just before `file`, in order.
fn small_before(volume: &Rooms, file: FileId) -> Vec<FileId> {
    let before = (0..file.ino).rev().map(|ino| FileId { ino, ..file });
    let small = before.take_while(|&before| is_small(volume, before));
    let mut files: Vec<_> = small.take(MOST_BEFORE).collect();
    files.reverse();
    files
}

/// Writes back until half of `dirty_bytes` is buffered. A file that cannot be written back stays
/// buffered, and its own sync reports why.
fn relieve(volume: &Rooms) -> Result<()> {
    let half = volume.options.dirty_bytes / 2;
    let _event = WriteBackPass::begin(volume, "until less is buffered");
    let is_enough = || volume.buffers.bytes() <= half;
    for files in in_steps(&volume.buffers.files()) {
        if is_enough() {
            break;
        }
        let _ = store_together(volume, files);
        for &file in files {
            while !is_enough() && matches!(ahead::write_one(volume, file), Ok(1..)) {}
            if is_enough() {
                break;
            }
            let _ = sync_file(volume, file);
        }
    }
    volume.live()?.require_writing()
}

/// Writes back the buffered data of `file`.
pub(crate) fn sync_file(volume: &Rooms, file: FileId) -> Result<()> {
    let _locks = volume.inodes.lock(&[file]);
    write_back(volume, file, Patience::Waits)
}

/// The sorted `files` in groups that may be stored together.
fn in_steps(files: &[FileId]) -> impl Iterator<Item = &[FileId]> {
    let subvolumes = files.chunk_by(|one, next| one.dev == next.dev);
    subvolumes.flat_map(|files| files.chunks(together::MOST_FILES))
}

/// Stores those of `files` that go together. The caller may commit.
fn store_together(volume: &Rooms, files: &[FileId]) -> Result<()> {
    volume.limit_dirty_blocks()?;
    together::store(volume, files)
}

/// Writes the sorted `files` back, group by group: first those that go together, and then each of
/// the others with `store`.
fn in_turn(
    volume: &Rooms,
    files: &[FileId],
    store: impl Fn(FileId) -> Result<()>,
) -> impl Iterator<Item = Result<()>> {
    in_steps(files).map(move |files| {
        let stored = store_together(volume, files);
        files.iter().map(|&file| store(file)).fold(stored, Result::and)
    })
}

/// Writes back all buffered data of the sorted `files`.
fn sync_files(volume: &Rooms, files: &[FileId]) -> impl Iterator<Item = Result<()>> {
    in_turn(volume, files, |file| ahead::write_ahead(volume, file).and(sync_file(volume, file)))
}

/// Writes back everything that is buffered now.
///
/// # Errors
/// The first error, after all files were tried.
pub(crate) fn sync_all(volume: &Rooms) -> Result<()> {
    let _event = WriteBackPass::begin(volume, "of all files");
    sync_files(volume, &volume.buffers.files()).fold(Ok(()), Result::and)
}

/// Writes back the data that is buffered now, because it is much. Files can be written meanwhile
/// where write-back ahead is possible, and new data then stays buffered.
///
/// # Errors
/// As [`sync_all`].
pub(crate) fn ease(volume: &Rooms) -> Result<()> {
    let _event = WriteBackPass::begin(volume, "because much is buffered");
    let store = |file| match ahead::write_ahead(volume, file) {
        Ok(false) => sync_file(volume, file),
        written => written.map(drop),
    };
    in_turn(volume, &volume.buffers.files(), store).fold(Ok(()), Result::and)
}

/// With `flush_on_commit`, writes back everything that is buffered before a commit that one file
/// asked for. A file that cannot be written back stays buffered, and its own sync reports why.
pub(crate) fn sync_others(volume: &Rooms) -> Result<()> {
    if volume.options.flushes_on_commit {
        let _ = sync_all(volume);
    }
    volume.live()?.require_writing()
}

/// Writes back the buffered data of the files of the subvolume `id`.
///
/// # Errors
/// The first error.
pub(crate) fn sync_subvolume(volume: &Rooms, id: TreeId) -> Result<()> {
    let mut files = volume.buffers.files();
    files.retain(|file| file.dev == id.0);
    sync_files(volume, &files).collect()
}

/// Writes files back while `is_wanted` holds, without waiting for a lock of an inode or for space.
/// The caller makes room and may hold locks of inodes. A file that cannot be written back stays
/// buffered, and its own sync reports why.
pub(crate) fn make_room(volume: &Rooms, is_wanted: impl Fn() -> bool) -> Result<()> {
    let _event = WriteBackPass::begin(volume, "to make room");
    store_idle(volume, &volume.buffers.files(), is_wanted)
}

/// As [`make_room`], from the sorted `files`.
fn store_idle(volume: &Rooms, files: &[FileId], is_wanted: impl Fn() -> bool) -> Result<()> {
    for files in in_steps(files) {
        if is_wanted() {
            let _ = together::store(volume, files);
        }
        for &file in files {
            if !is_wanted() {
                return volume.live()?.require_writing();
            }
            if let Some(_locks) = volume.inodes.try_lock(file) {
                let _ = write_back(volume, file, Patience::Tries);
            }
        }
    }
    volume.live()?.require_writing()
}

/// Writes back the buffered data of `file`, whose lock is held.
pub(crate) fn write_back(volume: &Rooms, file: FileId, patience: Patience) -> Result<()> {
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

/// Stores everything that is buffered. Returns whether there was room for all of it.
fn store_all(
    volume: &Rooms,
    file: FileId,
    buffer: &FileBuffer,
    patience: Patience,
) -> Result<bool> {
    ahead::settle(volume, file, buffer)?;
    let (mut chunks, mut commits) = (CompressionChunks::default(), 0);
    loop {
        if patience == Patience::Waits {
            volume.limit_dirty_blocks()?;
        }
        let runs = buffer.read().first_runs(STEP_BYTES);
        if runs.is_empty() {
            return Ok(true);
        }
        let data = Sectors::new(&runs);
        let item = inode_item(volume, tree_of(volume, file)?, file)?;
        let chosen = compression::choose(volume, file, &item)?;
        if let Some(chosen) = chosen {
            chunks.prepare(chosen.packing, data);
        }
        let outgoing = OutgoingData { data, chunks: &chunks, chosen };
        let Some(step) = WriteBackStep::begin(volume, file, buffer, outgoing, patience)? else {
            return Ok(false);
        };
        match step.store(None) {
            // The file has no space except its present place, and must not be written there while a
            // log may name that place elsewhere.
            Err(error) if error.errno() == Errno::NOSPC && buffer.read().is_in_place => {
                if patience == Patience::Tries {
                    return Ok(false);
                }
                if commits == MOST_COMMITS || !volume.forget_moved_extents()? {
                    return Err(error);
                }
                commits += 1;
            }
            stored => stored?,
        }
    }
}

/// Stores the length and the times of the file in its inode. Returns whether there was room for
/// that.
fn finish(volume: &Rooms, file: FileId, buffer: &FileBuffer, patience: Patience) -> Result<bool> {
    let item = inode_item(volume, tree_of(volume, file)?, file)?;
    let size = buffer.read().size;
    if item.size.get() == size && FileTimes::of(buffer).are_in(&item) {
        return Ok(true);
    }
    let sector = u64::from(volume.superblock().sector_size);
    let hole = item.size.get().next_multiple_of(sector)..size.next_multiple_of(sector);
    let items = OTHER_ITEMS + leaves_of(volume, hole_items(volume, file, hole.end)?);
    let Some(handle) = join(volume, items, patience)? else { return Ok(false) };
    let mut changes = Changes::accepted(&handle, file)?;
    changes.inode(file)?;
    handle.all_or_stop(|| {
        insert_hole(&handle, file, hole)?;
        change_inode(&mut changes, file, buffer, size, 0)?;
        changes.apply()
    })?;
    Ok(true)
}

/// The times of the last change of a file.
struct FileTimes {
    mtime: Option<Timestamp>,
    ctime: Timestamp,
}

impl FileTimes {
    fn of(buffer: &FileBuffer) -> Self {
        let dirty = buffer.read();
        Self { mtime: dirty.mtime, ctime: dirty.ctime }
    }

    fn are_in(&self, item: &InodeItem) -> bool {
        let has_mtime = self.mtime.is_none_or(|mtime| mtime == timestamp(&item.mtime));
        has_mtime && self.ctime <= timestamp(&item.ctime)
    }
}

/// Stores length and times, and adds `change` to the bytes of data that the inode counts.
fn change_inode(
    changes: &mut Changes<'_, '_>,
    file: FileId,
    buffer: &FileBuffer,
    size: u64,
    change: i64,
) -> Result<()> {
    let times = FileTimes::of(buffer);
    let ctime = times.ctime.max(timestamp(&changes.inode(file)?.ctime));
    let mtime = times.mtime.map(timespec).transpose()?;
    changes.change_inode(file, ctime, |item| {
        item.size = size.into();
        item.nbytes = item.nbytes.get().saturating_add_signed(change).into();
        item.mtime = mtime.unwrap_or(item.mtime);
    })
}

/// Joins with room for `items`. The reserve for making room is enough for them, except on volumes
/// without NO_HOLES where many holes become one.
fn join(volume: &Rooms, items: u64, patience: Patience) -> Result<Option<RoomsHandle<'_>>> {
    match patience {
        Patience::Waits => volume.join_for(items, Claim::WritesBack).map(Some),
        Patience::Tries => {
            volume.delayed.limit(&volume.base)?;
            volume.try_join(volume.live()?, items, Claim::WritesBack)
        }
    }
}

/// The items to reserve for a change of so many adjacent extent items of a file, and of its inode.
pub(super) fn items_of(volume: &Rooms, extents: u64) -> u64 {
    OTHER_ITEMS + leaves_of(volume, extents)
}

/// The number of leaves that so many adjacent extent items fill, if leaves are a third full, beside
/// the two at the ends.
fn leaves_of(volume: &Rooms, extents: u64) -> u64 {
    let item = size_of::<FileExtentHead>() + size_of::<FileExtentTail>() + ITEM_SIZE;
    extents / (leaf_capacity(volume.superblock().node_size) / 3 / item) as u64
}
