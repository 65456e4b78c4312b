//! Writing data ahead of its items: while it is on its way to the devices others may write the file
//! (`data/ordered`).
//!
//! This is for long runs of plain data that get new extents. What is compressed, written in place
//! or kept in an item, and what is short, is written back under the lock, and so is all where space
//! is short: what was taken counts twice until the items are there, or until it is given back. So
//! nobody waits for room with such a place in hand, and who writes a file that has one settles that
//! first where space is short.
//!
//! Items are put from the beginning of what is buffered on, so that the length that is stored never
//! runs ahead of data. A file of which something was written before what is on its way is written
//! back under the lock.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use offshoot_btrfs_format::Logical;
use offshoot_vfs::{Errno, FileId, Result};

use super::super::subvolume::is_deleted;
use super::super::{compression, inode_item, tree_of};
use super::step::{Outgoing, Step};
use super::{Patience, STEP_BYTES, discard};
use crate::data::{Chunks, FileBuffer, OrderedExtent, Sectors, Sums, Target, target};
use crate::engine::Engine;

/// The least that is written ahead, in bytes.
const LEAST_BYTES: u64 = 1 << 20;

/// Space that data was written to, as far as nothing refers to it yet.
pub(super) struct Place {
    logical: Logical,
    len: u64,
}

impl Place {
    /// All of that of `extent`.
    fn of(extent: &OrderedExtent) -> Self {
        Self { logical: extent.logical, len: extent.data().len }
    }

    /// Takes the first `len` bytes.
    pub(super) fn take(&mut self, len: u64) -> Logical {
        let logical = self.logical;
        (self.logical, self.len) = (Logical(logical.0 + len), self.len - len);
        logical
    }

    /// Gives the rest back.
    fn give_back(self, volume: &Engine) -> Result<()> {
        let live = volume.live()?;
        if self.len > 0 {
            live.space.give_back(self.logical, self.len)?;
            live.space.note_freed(std::iter::once(self.logical.0..self.logical.0 + self.len));
            live.space.serve_all();
        }
        Ok(())
    }
}

/// Writes back what is buffered of `file` now, as far as others may write the file meanwhile;
/// whether there was any.
pub(super) fn write_ahead(volume: &Engine, file: FileId) -> Result<bool> {
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

/// Writes back the beginning of what is buffered of `file`, or waits for who does; how many bytes
/// of it were.
pub(super) fn write_one(volume: &Engine, file: FileId) -> Result<u64> {
    volume.limit_dirty_blocks()?;
    let Some((extent, is_new)) = begin(volume, file)? else { return Ok(0) };
    if !is_new {
        extent.wait();
        end(volume, file, &extent)?;
        return Ok(extent.data().len);
    }
    write(volume, &extent)?;
    end(volume, file, &extent)
}

/// Writes `extent`.
fn write(volume: &Engine, extent: &OrderedExtent) -> Result<()> {
    let is_forgotten = extent.write(volume);
    if is_forgotten { Place::of(extent).give_back(volume) } else { Ok(()) }
}

/// Puts `extent`, which is written, in its place, if nobody has done that; how many bytes are not
/// buffered any more.
fn end(volume: &Engine, file: FileId, extent: &Arc<OrderedExtent>) -> Result<u64> {
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

/// The extent of `file` that is on its way, or a new one, and whether it is that.
fn begin(volume: &Engine, file: FileId) -> Result<Option<(Arc<OrderedExtent>, bool)>> {
    let _locks = volume.inodes.lock(&[file]);
    let Some(buffer) = volume.buffers.get(file) else { return Ok(None) };
    if let Some(ordered) = &buffer.read().ordered {
        return Ok(Some((ordered.clone(), false)));
    }
    let live = volume.live()?;
    live.require_whole()?;
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
    if !matches!(target(&handle, file, &item, &data.range())?, Target::New(len) if len == data.len)
    {
        return Ok(None);
    }
    let (logical, len) = match live.space.take_data(&volume.base, data.len) {
        Err(error) if error.errno() == Errno::NOSPC => return Ok(None),
        taken => taken?,
    };
    if len < data.len {
        // It becomes several extents.
        Place { logical, len }.give_back(volume)?;
        return Ok(None);
    }
    let extent = Arc::new(OrderedExtent::new(runs, logical, Sums::of(&item)));
    buffer.write().ordered = Some(extent.clone());
    Ok(Some((extent, true)))
}

/// Puts what was written ahead of `file`, whose lock is held, in its place, as far as it did not
/// change since and there is room for that at once. What is left of it is still buffered.
pub(in crate::inode) fn settle(volume: &Engine, file: FileId, buffer: &FileBuffer) -> Result<()> {
    let Some(extent) = buffer.write().ordered.take() else { return Ok(()) };
    let mut place = Place::of(&extent);
    let stored = store_unchanged(volume, file, buffer, &extent, &mut place);
    stored.and(place.give_back(volume))
}

/// Settles `file`, whose lock is held, before more of it is buffered where space is short.
pub(in crate::inode) fn settle_if_short(
    volume: &Engine,
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
    volume: &Engine,
    file: FileId,
    buffer: &FileBuffer,
    extent: &OrderedExtent,
    place: &mut Place,
) -> Result<()> {
    volume.live()?.whole(|| extent.finish())?;
    let data = extent.data().first(buffer.read().unchanged(extent.runs()));
    if data.len == 0 {
        return Ok(());
    }
    let outgoing = Outgoing { data, chunks: &Chunks::default(), chosen: None };
    match Step::begin(volume, file, buffer, outgoing, Patience::Tries)? {
        Some(step) => step.store(Some(place)),
        None => Ok(()),
    }
}

/// Gives back what was taken for data of a file that is forgotten.
pub(super) fn forget(volume: &Engine, buffer: &FileBuffer) {
    if let Some(extent) = buffer.write().ordered.take() {
        // Nobody waits for a device: all that waits for this handle would.
        if extent.forget() {
            let given_back = Place::of(&extent).give_back(volume);
            given_back.expect("a block group stays as long as space of it is taken");
        }
    }
}
