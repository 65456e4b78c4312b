//! Which parts of a file may be written in place.
//!
//! Preallocated space, and data of NODATACOW files, may be written in place if the extent has no
//! other reference: from another file, another place of this file, or a snapshot. A snapshot may
//! share the leaf with the reference instead of having one of its own. So an extent that is not
//! newer than the last snapshot of the subvolume counts as shared.

use std::ops::Range;

use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::{Logical, TreeId};
use offshoot_vfs::{FileId, Result};

use super::checksums::has_checksums;
use super::drop::{OverlappingItem, overlaps};
use crate::storage::malformed;
use crate::transaction::{RefOwner, TransactionHandle};

/// The number of extent items that are read at once.
const BATCH: usize = 16;

/// Where the first part of a range is written, and the length of that part in bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum WriteTarget {
    /// Over the existing data.
    InPlace {
        /// The address of the part.
        logical: Logical,
        /// The length of the part.
        len: u64,
        /// Whether the place was never written.
        is_preallocated: bool,
    },
    /// To a new extent of so many bytes.
    New(u64),
}

/// Where the beginning of `range` of the file is written.
pub(crate) fn target(
    handle: &TransactionHandle<'_>,
    file: FileId,
    inode: &InodeItem,
    range: &Range<u64>,
) -> Result<WriteTarget> {
    let all = range.end - range.start;
    if inode.flags.get() & (inode_flags::NODATACOW | inode_flags::PREALLOC) == 0 {
        return Ok(WriteTarget::New(all));
    }
    let mut at = range.start;
    loop {
        let found = overlaps(handle.volume(), file, at..range.end, BATCH)?;
        for overlap in &found {
            let part = overlap.key.offset.max(range.start)..overlap.end.min(range.end);
            let Some(target) = in_place(handle, file, inode, overlap, &part)? else { continue };
            return Ok(match part.start - range.start {
                0 => target,
                before => WriteTarget::New(before),
            });
        }
        match found.last() {
            Some(last) if last.end < range.end => at = last.end,
            _ => return Ok(WriteTarget::New(all)),
        }
    }
}

/// Whether all of `range` of the file may be written in place.
pub(crate) fn is_in_place(
    handle: &TransactionHandle<'_>,
    file: FileId,
    inode: &InodeItem,
    range: &Range<u64>,
) -> Result<bool> {
    let mut at = range.start;
    while at < range.end {
        match target(handle, file, inode, &(at..range.end))? {
            WriteTarget::InPlace { len, .. } => at += len,
            WriteTarget::New(_) => return Ok(false),
        }
    }
    Ok(true)
}

/// The place of `part` of the file, which lies in one item, if it may be written in place.
fn in_place(
    handle: &TransactionHandle<'_>,
    file: FileId,
    inode: &InodeItem,
    OverlappingItem { key, data, .. }: &OverlappingItem,
    part: &Range<u64>,
) -> Result<Option<WriteTarget>> {
    let extent = FileExtent::parse(data).map_err(malformed)?;
    let FileExtentBody::Extent { disk_bytenr, disk_num_bytes, offset, is_preallocated, .. } =
        extent.body
    else {
        return Ok(None);
    };
    if !is_preallocated && inode.flags.get() & inode_flags::NODATACOW == 0 {
        return Ok(None);
    }
    let (root, len) = (TreeId(file.dev), part.end - part.start);
    let owner = RefOwner::File { root, ino: file.ino, offset: key.offset.wrapping_sub(offset) };
    let into = offset.saturating_add(part.start - key.offset);
    let logical = Logical(disk_bytenr.0.saturating_add(into));
    let is_alone = extent.compression == Compression::None
        && !handle.is_as_old_as_a_snapshot(root, extent.generation)?
        && handle.is_only_of(disk_bytenr, disk_num_bytes, owner)?
        && !has_checksums(handle.volume(), logical, len)?;
    let target = WriteTarget::InPlace { logical, len, is_preallocated };
    Ok(is_alone.then_some(target))
}
