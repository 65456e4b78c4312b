//! What of a NODATACOW file may be overwritten where it is.
//!
//! That is data in an extent that nobody else refers to: no other file, no other part of this one, and no
//! snapshot, which may share the leaf with the reference instead of having one of its own. What is as old as
//! the last snapshot of the subvolume counts as shared.

use std::ops::Range;

use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::{Logical, TreeId};
use offshoot_vfs::{FileId, Result};

use super::checksums::has_checksums;
use super::drop::overlaps;
use crate::subvolume::malformed;
use crate::transaction::Handle;

/// Where the first part of a range goes, and how long that part is, in bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// Over what is there.
    InPlace(Logical, u64),
    /// To a new extent.
    New(u64),
}

/// Where the beginning of `range` of the file goes.
pub(crate) fn target(
    handle: &Handle<'_>,
    file: FileId,
    inode: &InodeItem,
    range: &Range<u64>,
) -> Result<Target> {
    let all = range.end - range.start;
    if inode.flags.get() & inode_flags::NODATACOW == 0 {
        return Ok(Target::New(all));
    }
    let found = overlaps(handle, file, range.clone(), 1)?;
    let Some(found) = found.first() else { return Ok(Target::New(all)) };
    if found.key.offset > range.start {
        return Ok(Target::New(found.key.offset - range.start));
    }
    let len = found.end.min(range.end) - range.start;
    let extent = FileExtent::parse(&found.data).map_err(malformed)?;
    Ok(match alone(handle, file, &extent, range.start - found.key.offset, len)? {
        Some(logical) => Target::InPlace(logical, len),
        None => Target::New(len),
    })
}

/// Where the byte `into` of the item is, if nothing but the item refers to the extent and `len` bytes from there
/// on may be overwritten.
fn alone(
    handle: &Handle<'_>,
    file: FileId,
    extent: &FileExtent<'_>,
    into: u64,
    len: u64,
) -> Result<Option<Logical>> {
    let FileExtentBody::Extent { disk_bytenr, offset, preallocated: false, .. } = extent.body
    else {
        return Ok(None);
    };
    let logical = Logical(disk_bytenr.0.saturating_add(offset).saturating_add(into));
    let is_alone = extent.compression == Compression::None
        && !handle.is_as_old_as_a_snapshot(TreeId(file.dev), extent.generation)?
        && handle.references_to(disk_bytenr)? == 1
        && !has_checksums(handle.volume(), logical, len)?;
    Ok(is_alone.then_some(logical))
}
