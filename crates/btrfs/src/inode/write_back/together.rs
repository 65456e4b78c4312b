//! Small new files, stored many at a time.
//!
//! A small file by itself costs a handle, a search in each of three trees, and a request of a few
//! KiB to the devices. Where many small files wait, one step stores as many as it can: their data
//! goes to one place, with one request and one run of checksums, and their items go to the tree in
//! one batch.
//!
//! A step takes files of one subvolume if all their data is buffered and short, and if they have no
//! stored data, so that nothing is replaced. All other files are stored one by one. So are these,
//! if there is no room for so large a step, no free piece for all their data, or no room to queue
//! their inodes. The step waits for no file: the thread that holds the lock of one may be waiting
//! for room that the others in the step would release.

use std::sync::Arc;

use offshoot_btrfs_format::inode::inode_flags;
use offshoot_btrfs_format::{Logical, TreeId};
use offshoot_vfs::{Errno, FileId, Result};
use tracing::trace;

use super::super::changes::Changes;
use super::super::{Locks, compression, inode_item, tree_of};
use super::{change_inode, discard};
use crate::data::{
    AlignedBytes, FileBuffer, FirstData, checksum_items, lend, overlaps, store_first,
    take_until_next_leaf,
};
use crate::events::WRITEBACK;
use crate::inode::{Rooms, RoomsHandle};
use crate::space::{Claim, Kept};

/// The most files that one step stores.
pub(super) const MOST_FILES: usize = 64;

/// The longest file that is stored together with others, in bytes.
const SMALL_BYTES: u64 = 64 << 10;

/// The approximate memory of a queued inode, in bytes.
const QUEUED_BYTES: u64 = 256;

/// The places in trees that a file changes: its inode twice, since it is queued and then flushed,
/// and its extent.
const FILE_ITEMS: u64 = 3;

/// A file that can be stored together with others, with its lock.
struct SmallFile {
    file: FileId,
    buffer: FileBuffer,
    size: u64,
    data: Arc<AlignedBytes>,
    is_inline: bool,
    _lock: Locks,
}

impl SmallFile {
    /// `file`, if it is such a file and its lock is free.
    fn find(volume: &Rooms, file: FileId) -> Result<Option<Self>> {
        let Some(lock) = volume.inodes.try_lock(file) else { return Ok(None) };
        let Some(buffer) = volume.buffers.get(file) else { return Ok(None) };
        let sector = u64::from(volume.superblock().sector_size);
        let (size, is_beside, data) = {
            let dirty = buffer.read();
            (dirty.size, dirty.is_beside, dirty.all_in_one_run(sector))
        };
        // The step would have to wait for data on its way.
        let is_settled = buffer.read().ordered.is_none();
        let Some(data) = data.filter(|_| is_settled && size <= SMALL_BYTES) else {
            return Ok(None);
        };
        let item = inode_item(volume, tree_of(volume, file)?, file)?;
        let apart = inode_flags::NODATACOW | inode_flags::NODATASUM | inode_flags::PREALLOC;
        let is_new = item.size.get() == 0 && overlaps(volume, file, 0..u64::MAX, 1)?.is_empty();
        if !is_new
            || item.flags.get() & apart != 0
            || compression::choose(volume, file, &item)?.is_some()
        {
            return Ok(None);
        }
        let is_inline = !is_beside && size <= volume.options.max_inline.min(sector - 1);
        Ok(Some(Self { file, buffer, size, data, is_inline, _lock: lock }))
    }

    fn first_data(&self) -> FirstData<'_> {
        FirstData { file: self.file, data: &self.data, inline: self.is_inline.then_some(self.size) }
    }
}

/// Stores those of `files` that can be stored together. All are sorted and of one subvolume. The
/// others stay buffered. The caller holds no handle. A caller that may commit limits the dirty
/// blocks before; a commit that first writes files back comes here too.
///
/// # Errors
/// When a tree cannot be read, or when a device fails. This ends all writing.
pub(super) fn store(volume: &Rooms, files: &[FileId]) -> Result<()> {
    volume.delayed.limit(&volume.base)?;
    let delayed = &volume.delayed;
    if delayed.bytes() + files.len() as u64 * QUEUED_BYTES > delayed.most_bytes() {
        return Ok(());
    }
    // A file that cannot be read reports its error when it is stored by itself.
    let find = |&file: &FileId| SmallFile::find(volume, file).ok().flatten();
    let small: Vec<SmallFile> = files.iter().filter_map(find).collect();
    let [first, _, ..] = &small[..] else { return Ok(()) };
    let all: Vec<_> = small.iter().map(SmallFile::first_data).collect();
    let bytes = all.iter().map(FirstData::extent_bytes).sum();
    let items = FILE_ITEMS * small.len() as u64 + 1 + checksum_items(volume, bytes);
    let Some(handle) = volume.try_join(volume.live()?, items, Claim::Work)? else { return Ok(()) };
    // The subvolume may have been deleted meanwhile, together with the buffered data.
    let Ok(mut changes) = Changes::accepted(&handle, first.file) else { return Ok(()) };
    for (small, data) in small.iter().zip(&all) {
        change_inode(&mut changes, small.file, &small.buffer, small.size, data.stored_bytes())?;
    }
    let lenders = small.iter().zip(&all).map(|(small, data)| (&small.buffer, data.extent_bytes()));
    let lenders: Vec<_> = lenders.filter(|(_, bytes)| *bytes > 0).collect();
    let taken = lend(handle.space(), &lenders, |claim| take(&handle, claim, bytes))?;
    let Some(place) = taken else { return Ok(()) };
    handle.all_or_stop(|| {
        changes.apply()?;
        delayed.flush_inodes(
            &handle,
            TreeId(first.file.dev),
            small.iter().map(|small| small.file.ino),
        )?;
        store_first(&handle, &all, place)
    })?;
    trace!(target: WRITEBACK, files = small.len(), bytes, "stored together");
    handle.stats().stored_together(small.len());
    drop(handle);
    for small in &small {
        discard(volume, small.file);
    }
    Ok(())
}

/// Allocates so many bytes of data space in one piece, if there is one whose stale checksums are in
/// one leaf.
fn take(handle: &RoomsHandle<'_>, claim: &Kept, bytes: u64) -> Result<Option<Logical>> {
    if bytes == 0 {
        return Ok(Some(Logical(0)));
    }
    let (place, len) = match take_until_next_leaf(handle, claim, bytes) {
        Err(error) if error.errno() == Errno::NOSPC => return Ok(None),
        taken => taken?,
    };
    if len < bytes {
        handle.space().give_back(place, len)?;
    }
    Ok((len == bytes).then_some(place))
}
