//! Writing data ahead of its items: while the data is on its way to the devices, others may write
//! the file (`data/ordered`).
//!
//! This is for long runs of plain data that get new extents. Data that is short, compressed, inline
//! or written in place is written back under the lock. So is all data where space is short, because
//! the place of data that is written ahead counts twice until its items are stored or the place is
//! given back. For the same reason no thread waits for room while it holds such a place, and where
//! space is short a writer first settles the place of its file.
//!
//! Items are stored from the beginning of the buffered data on, so the stored length never includes
//! data that is not stored. If a file was written in front of the data on its way, that data is
//! written back under the lock.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use offshoot_btrfs_format::Logical;
use offshoot_vfs::{Errno, FileId, Result};
use tracing::{debug, trace};

use super::super::subvolume::is_deleted;
use super::super::{compression, inode_item, tree_of};
use super::step::{OutgoingData, WriteBackStep};
use super::{Patience, STEP_BYTES, discard};
use crate::data::{
    CompressionChunks, DataChecksums, FileBuffer, OrderedExtent, Sectors, WriteTarget, lend,
    take_until_next_leaf, target, until_next_leaf_of_stale,
};
use crate::events::WRITEBACK;
use crate::inode::Rooms;

/// The least that is written ahead, in bytes.
const LEAST_BYTES: u64 = 1 << 20;

/// A place to which data was written, as far as no extent item refers to it yet.
pub(super) struct UnreferencedSpace {
    logical: Logical,
    len: u64,
}

impl UnreferencedSpace {
    /// The whole place of `extent`.
    fn of(extent: &OrderedExtent) -> Self {
        Self { logical: extent.logical, len: extent.data().len }
    }

    /// How much of the first `len` bytes one step can store, which removes one leaf of stale
    /// checksums.
    pub(super) fn until_next_leaf(&self, volume: &Rooms, len: u64) -> Result<u64> {
        until_next_leaf_of_stale(&volume.base, self.logical, len)
    }

    /// Takes the first `len` bytes.
    pub(super) fn take(&mut self, len: u64) -> Logical {
        let logical = self.logical;
        (self.logical, self.len) = (Logical(logical.0 + len), self.len - len);
        logical
    }

    /// Gives the rest back.
    fn give_back(self, volume: &Rooms) -> Result<()> {
        let live = volume.live()?;
        if self.len > 0 {
            live.space.give_back(self.logical, self.len)?;
            live.space.note_freed(std::iter::once(self.logical.0..self.logical.0 + self.len));
            live.space.serve_all();
        }
        Ok(())
    }
}

/// Writes back the buffered data of `file` that can be written ahead. Returns whether there was
/// any.
pub(super) fn write_ahead(volume: &Rooms, file: FileId) -> Result<bool> {
    let buffered = || volume.buffers.get(file).map_or(0, |buffer| buffer.read().bytes());
    let (all, mut written) = (buffered(), 0);
    while written < all {
        match write_one(volume, file)? {
            0 => break,
            len => written += len,
        }
    }
    Ok(written > 0)
}

/// Writes back the beginning of the buffered data of `file`, or waits for the thread that does.
/// Returns how many bytes were written back.
pub(super) fn write_one(volume: &Rooms, file: FileId) -> Result<u64> {
    volume.limit_dirty_blocks()?;
    let Some((extent, is_new)) = begin(volume, file)? else { return Ok(0) };
    if !is_new {
        debug!(target: WRITEBACK, inode = file.ino, "waiting for data on its way");
        extent.wait();
        end(volume, file, &extent)?;
        return Ok(extent.data().len);
    }
    trace!(target: WRITEBACK, inode = file.ino, bytes = extent.data().len, "writing ahead");
    write(volume, &extent)?;
    end(volume, file, &extent)
}

/// Writes `extent`.
fn write(volume: &Rooms, extent: &OrderedExtent) -> Result<()> {
    let is_forgotten = extent.write(volume);
    if is_forgotten { UnreferencedSpace::of(extent).give_back(volume) } else { Ok(()) }
}

/// Stores the items of `extent`, which is written, unless another thread has done so. Returns how
/// many bytes are no longer buffered.
fn end(volume: &Rooms, file: FileId, extent: &Arc<OrderedExtent>) -> Result<u64> {
    let _locks = volume.inodes.lock(&[file]);
    let Some(buffer) = volume.buffers.get(file) else { return Ok(0) };
    let before = buffer.read().bytes();
    if buffer.read().ordered.as_ref().is_some_and(|ordered| Arc::ptr_eq(ordered, extent)) {
        if is_deleted(volume, file)? {
            discard(volume, file);
        } else {
            settle(volume, file, &buffer)?;
        }
    }
    Ok(before - buffer.read().bytes())
}

/// The extent of `file` that is on its way, or a new one, and whether it is new.
fn begin(volume: &Rooms, file: FileId) -> Result<Option<(Arc<OrderedExtent>, bool)>> {
    let _locks = volume.inodes.lock(&[file]);
    let Some(buffer) = volume.buffers.get(file) else { return Ok(None) };
    if let Some(ordered) = &buffer.read().ordered {
        return Ok(Some((ordered.clone(), false)));
    }
    let live = volume.live()?;
    live.require_writing()?;
    let runs = buffer.read().first_whole_runs(STEP_BYTES);
    let data = Sectors::new(&runs);
    if data.len < LEAST_BYTES
        || buffer.read().is_in_place
        || live.space.has_little_data(data.len)
        || is_deleted(volume, file)?
    {
        return Ok(None);
    }
    let item = inode_item(volume, tree_of(volume, file)?, file)?;
    if compression::choose(volume, file, &item)?.is_some() {
        return Ok(None);
    }
    let handle = volume.enter()?;
    let written = target(&handle, file, &item, &data.range())?;
    if !matches!(written, WriteTarget::New(len) if len == data.len) {
        return Ok(None);
    }
    let taken = lend(&live.space, &[(&buffer, data.len)], |claim| {
        take_until_next_leaf(&handle, claim, data.len)
    });
    let (logical, len) = match taken {
        Err(error) if error.errno() == Errno::NOSPC => return Ok(None),
        taken => taken?,
    };
    if len < data.len {
        // The free space is in pieces, or has many stale checksums, so the data would become
        // several extents.
        UnreferencedSpace { logical, len }.give_back(volume)?;
        return Ok(None);
    }
    let extent = Arc::new(OrderedExtent::new(runs, logical, DataChecksums::of(&item)));
    buffer.write().ordered = Some(extent.clone());
    Ok(Some((extent, true)))
}

/// Stores the items of data that was written ahead for `file`, whose lock is held, as far as the
/// data has not changed since and there is room at once. The rest stays buffered.
pub(in crate::inode) fn settle(volume: &Rooms, file: FileId, buffer: &FileBuffer) -> Result<()> {
    let Some(extent) = buffer.write().ordered.take() else { return Ok(()) };
    let mut place = UnreferencedSpace::of(&extent);
    let stored = store_unchanged(volume, file, buffer, &extent, &mut place);
    stored.and(place.give_back(volume))
}

/// Settles `file`, whose lock is held, if space is short and more of it is about to be buffered.
pub(in crate::inode) fn settle_if_short(
    volume: &Rooms,
    file: FileId,
    buffer: &FileBuffer,
) -> Result<()> {
    let is_under_way = buffer.read().ordered.is_some();
    if is_under_way && volume.live()?.space.has_little_data(0) {
        settle(volume, file, buffer)?;
    }
    Ok(())
}

fn store_unchanged(
    volume: &Rooms,
    file: FileId,
    buffer: &FileBuffer,
    extent: &OrderedExtent,
    place: &mut UnreferencedSpace,
) -> Result<()> {
    volume.live()?.all_or_stop(|| extent.finish())?;
    let data = extent.data().first(buffer.read().unchanged(extent.runs()));
    if data.len == 0 {
        return Ok(());
    }
    let outgoing = OutgoingData { data, chunks: &CompressionChunks::default(), chosen: None };
    match WriteBackStep::begin(volume, file, buffer, outgoing, Patience::Tries)? {
        Some(step) => step.store(Some(place)),
        None => Ok(()),
    }
}

/// Gives back the place of data whose file is forgotten.
pub(super) fn forget(volume: &Rooms, buffer: &FileBuffer) {
    if let Some(extent) = buffer.write().ordered.take() {
        // This does not wait for the device, because everything that waits for our handle would
        // wait too.
        if extent.forget() {
            let given_back = UnreferencedSpace::of(&extent).give_back(volume);
            given_back.expect("a block group stays as long as space of it is taken");
        }
    }
}
