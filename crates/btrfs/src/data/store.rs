//! Putting data into files: extents that are written at once, with their checksums.
//!
//! The data is on its devices before anything refers to it. It becomes durable with the commit, whose
//! barrier comes after it.

use std::io::IoSlice;
use std::ops::Range;

use offshoot_btrfs_format::file_extent::{FileExtentHead, FileExtentTail, extent_type};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::superblock::Incompat;
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::{FileId, Result};
use zerocopy::IntoBytes;

use super::drop::drop_range;
use super::insert_checksums;
use crate::space::Reservation;
use crate::transaction::{ExtentKind, Handle, Owner};

/// The largest extent, in bytes.
const MAX_EXTENT: u64 = 128 << 20;

/// Replaces what is in `file` from `start` on, the beginning of a sector, by `data`, whole sectors, for which
/// `room` is reserved. Gives by how many bytes the data of the file became more or less.
///
/// # Errors
/// When a device fails.
pub(crate) fn store(
    handle: &Handle<'_>,
    room: &mut Reservation<'_>,
    file: FileId,
    inode: &InodeItem,
    start: u64,
    data: &[u8],
) -> Result<i64> {
    let mut change = 0;
    let mut done = 0;
    while done < data.len() {
        let want = (data.len() - done) as u64;
        let (logical, len) = room.take(handle.volume(), want.min(MAX_EXTENT))?;
        let len_bytes = usize::try_from(len).expect("a part of a buffer");
        let part = &data[done..done + len_bytes];
        write(handle, logical, part).inspect_err(|_| handle.break_off())?;
        if inode.flags.get() & inode_flags::NODATASUM == 0 {
            insert_checksums(handle, logical, part)?;
        }
        let at = start + done as u64;
        change -= drop_range(handle, file, at..at + len)?.cast_signed();
        insert_extent(handle, file, at, logical, len)?;
        change += len.cast_signed();
        done += len_bytes;
    }
    Ok(change)
}

/// Writes every copy of `data`.
fn write(handle: &Handle<'_>, logical: Logical, data: &[u8]) -> Result<()> {
    let volume = handle.volume();
    for (member, physical, part) in volume.write_places(logical, data.len() as u64)? {
        let Range { start, end } = part;
        let [start, end] = [start, end].map(|at| usize::try_from(at).expect("in the buffer"));
        volume.write_member(member, physical.0, &[IoSlice::new(&data[start..end])])?;
    }
    Ok(())
}

/// Puts a new extent into the file, where nothing is.
fn insert_extent(
    handle: &Handle<'_>,
    file: FileId,
    at: u64,
    logical: Logical,
    len: u64,
) -> Result<()> {
    let root = TreeId(file.dev);
    handle.refer_new(
        logical,
        len,
        ExtentKind::Data,
        Owner::File { root, ino: file.ino, offset: at },
    );
    let key = Key::new(file.ino, ItemType::EXTENT_DATA, at);
    let item = encode(handle, len, logical, len, extent_type::REG);
    handle.change(root, |tree| tree.insert(key, &item))
}

/// Makes `range` of the file a hole. Volumes with NO_HOLES say that by saying nothing.
pub(crate) fn insert_hole(handle: &Handle<'_>, file: FileId, range: Range<u64>) -> Result<()> {
    let has_items = !handle.volume().superblock().incompat.has(Incompat::NO_HOLES);
    if range.is_empty() || !has_items {
        return Ok(());
    }
    let key = Key::new(file.ino, ItemType::EXTENT_DATA, range.start);
    let len = range.end - range.start;
    let item = encode(handle, len, Logical(0), 0, extent_type::REG);
    handle.change(TreeId(file.dev), |tree| tree.insert(key, &item))
}

fn encode(
    handle: &Handle<'_>,
    len: u64,
    logical: Logical,
    disk_num_bytes: u64,
    extent_type: u8,
) -> Vec<u8> {
    let head = FileExtentHead {
        generation: handle.generation().0.into(),
        ram_bytes: len.into(),
        compression: 0,
        encryption: 0,
        other_encoding: 0.into(),
        extent_type,
    };
    let tail = FileExtentTail {
        disk_bytenr: logical.0.into(),
        disk_num_bytes: disk_num_bytes.into(),
        offset: 0.into(),
        num_bytes: len.into(),
    };
    [head.as_bytes(), tail.as_bytes()].concat()
}
