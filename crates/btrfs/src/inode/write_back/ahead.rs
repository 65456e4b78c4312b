//! Writing data ahead of its items: while it is on its way to the devices others may write the file (`data/ordered`).
//!
//! This is for long runs of plain data that get new extents. What is compressed, written in place or kept in an item, and what is
//! short, is written back under the lock, and so is all where space is short: what was taken for data that was
//! written over meanwhile counts twice until it is given back.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use offshoot_btrfs_format::Logical;
use offshoot_vfs::{Errno, FileId, Result};

use super::super::subvolume::is_deleted;
use super::super::{compression, inode_item, tree_of};
use super::step::{Outgoing, Step};
use super::{Patience, STEP_BYTES, discard};
use crate::data::{Chunks, FileBuffer, OrderedExtent, Sectors, Target, target};
use crate::space::{Purpose, Reservation};
use crate::volume::Engine;

/// The least that is written ahead, in bytes.
const LEAST_BYTES: u64 = 1 << 20;

/// Space that data was written to, as far as nothing refers to it yet.
pub(super) struct Place {
    logical: Logical,
    len: u64,
}

impl Place {
    /// Takes the first `len` bytes.
    pub(super) fn take(&mut self, len: u64) -> Logical {
        let logical = self.logical;
        (self.logical, self.len) = (Logical(logical.0 + len), self.len - len);
        logical
    }

    /// Gives the rest back.
    fn give_back(self, volume: &Engine) -> Result<()> {
        let space = &volume.live()?.space;
        if self.len > 0 {
            space.give_back(self.logical, self.len)?;
            space.serve_all();
        }
        Ok(())
    }
}

/// Writes back what is buffered of `file` now, as far as others may write the file meanwhile; whether there was any.
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

/// Writes back the beginning of what is buffered of `file`, or waits for who does; how many bytes that is.
pub(super) fn write_one(volume: &Engine, file: FileId) -> Result<u64> {
    let Some((extent, is_new)) = begin(volume, file)? else { return Ok(0) };
    if is_new {
        extent.write(volume);
    } else {
        extent.wait();
    }
    end(volume, file, &extent)?;
    Ok(extent.data().len)
}

/// Puts `extent`, which is written, in its place, if nobody has done that.
fn end(volume: &Engine, file: FileId, extent: &Arc<OrderedExtent>) -> Result<()> {
    let _locks = volume.inodes.lock(&[file]);
    if let Some(buffer) = volume.buffers.get(file)
        && buffer.read().ordered.as_ref().is_some_and(|ordered| Arc::ptr_eq(ordered, extent))
    {
        if is_deleted(volume, file)? {
            discard(volume, file);
        } else {
            settle(volume, file, &buffer, Patience::Waits)?;
        }
    }
    Ok(())
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
        || live.space.has_little_data()
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
    let room = Reservation::resume(&live.space, Purpose::Data, data.len);
    let taken = room.take(volume, data.len);
    room.keep();
    let (logical, len) = match taken {
        Err(error) if error.errno() == Errno::NOSPC => return Ok(None),
        taken => taken?,
    };
    if len < data.len {
        // It becomes several extents.
        Place { logical, len }.give_back(volume)?;
        return Ok(None);
    }
    let extent = Arc::new(OrderedExtent::new(runs, logical));
    buffer.write().ordered = Some(extent.clone());
    Ok(Some((extent, true)))
}

/// Puts what was written ahead of `file`, whose lock is held, in its place, as far as it did not change since; whether there was room for that. What
/// is left of it is still buffered.
pub(super) fn settle(
    volume: &Engine,
    file: FileId,
    buffer: &FileBuffer,
    patience: Patience,
) -> Result<bool> {
    let Some(extent) = buffer.write().ordered.take() else { return Ok(true) };
    let mut place = Place { logical: extent.logical, len: extent.data().len };
    let stored = store_unchanged(volume, file, buffer, &extent, &mut place, patience);
    let given_back = place.give_back(volume);
    stored.and_then(|is_stored| given_back.map(|()| is_stored))
}

fn store_unchanged(
    volume: &Engine,
    file: FileId,
    buffer: &FileBuffer,
    extent: &OrderedExtent,
    place: &mut Place,
    patience: Patience,
) -> Result<bool> {
    if let Err(error) = extent.finish() {
        // As where it is written under a handle.
        return volume.enter()?.whole(|| Err(error));
    }
    let data = extent.data().first(buffer.read().unchanged(extent.runs()));
    if data.len == 0 {
        return Ok(true);
    }
    if patience == Patience::Waits {
        volume.limit_dirty_blocks()?;
    }
    let outgoing = Outgoing { data, chunks: &Chunks::default(), chosen: None };
    match Step::begin(volume, file, buffer, outgoing, patience)? {
        Some(step) => step.store(Some(place)).map(|()| true),
        None => Ok(false),
    }
}

/// Gives back what was taken for data of a file that is forgotten.
pub(super) fn forget(volume: &Engine, buffer: &FileBuffer) {
    if let Some(extent) = buffer.write().ordered.take() {
        extent.wait();
        let place = Place { logical: extent.logical, len: extent.data().len };
        place.give_back(volume).expect("a block group stays as long as space of it is taken");
    }
}
