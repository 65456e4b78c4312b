//! Putting data into files: a new extent, a place that is overwritten, or the extent item itself.
//!
//! Data is on its devices before anything refers to it. It becomes durable with the commit, whose
//! barrier comes after it.

use std::io::IoSlice;
use std::ops::Range;

use offshoot_btrfs_format::file_extent::{FileExtentHead, FileExtentTail, extent_type};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::superblock::Incompat;
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::{FileId, Result};
use zerocopy::IntoBytes;

use super::buffer::Run;
use super::drop::{drop_range, overlaps};
use super::insert_checksums;
use crate::transaction::{ExtentKind, Handle, Owner};

/// Whole sectors that lie one behind the other in a file.
#[derive(Clone, Copy)]
pub(crate) struct Sectors<'r> {
    runs: &'r [Run],
    pub(crate) start: u64,
    pub(crate) len: u64,
}

impl<'r> Sectors<'r> {
    /// All of `runs`, which lie one behind the other.
    pub(crate) fn new(runs: &'r [Run]) -> Self {
        let start = runs.first().map_or(0, |(start, _)| *start);
        let len = runs.iter().map(|(_, run)| run.len() as u64).sum();
        Self { runs, start, len }
    }

    /// The first `len` bytes of them.
    pub(crate) fn first(self, len: u64) -> Self {
        Self { len: len.min(self.len), ..self }
    }

    /// Where in the file they are.
    pub(crate) fn range(self) -> Range<u64> {
        self.start..self.start + self.len
    }

    /// The memory in which `part` of them is, which counts from their beginning.
    fn slices(self, part: Range<u64>) -> impl Iterator<Item = &'r [u8]> {
        let wanted = self.start + part.start..self.start + part.end.min(self.len);
        self.runs.iter().filter_map(move |(at, run)| {
            let from = wanted.start.max(*at);
            let to = wanted.end.min(at + run.len() as u64);
            (from < to).then(|| {
                let index = |at: u64| usize::try_from(at).expect("in memory");
                &run[index(from - at)..index(to - at)]
            })
        })
    }
}

/// Writes `data` at `logical`, and makes that the extent of its place in `file`, instead of what is there. Gives
/// by how many bytes the data of the file became more or less.
///
/// # Errors
/// When a device fails.
pub(crate) fn store(
    handle: &Handle<'_>,
    file: FileId,
    inode: &InodeItem,
    data: Sectors<'_>,
    logical: Logical,
) -> Result<i64> {
    write_data(handle, logical, data)?;
    if inode.flags.get() & inode_flags::NODATASUM == 0 {
        insert_checksums(handle, logical, data.slices(0..data.len))?;
    }
    let _changing = handle.volume().buffers.changing(file);
    let dropped = drop_range(handle, file, data.range())?;
    let owner = Owner::File { root: TreeId(file.dev), ino: file.ino, offset: data.start };
    handle.refer_new(logical, data.len, ExtentKind::Data, owner);
    let item = encode(handle, data.len, logical, data.len);
    insert(handle, file, data.start, &item)?;
    Ok(data.len.cast_signed() - dropped.cast_signed())
}

/// Makes the first `len` bytes of `data` all that `file` holds, in the extent item. Gives as [`store`].
pub(crate) fn store_inline(
    handle: &Handle<'_>,
    file: FileId,
    data: Sectors<'_>,
    len: u64,
) -> Result<i64> {
    let _changing = handle.volume().buffers.changing(file);
    let dropped = drop_range(handle, file, data.range())?;
    let head = head(handle, len, extent_type::INLINE);
    let mut item = head.as_bytes().to_vec();
    data.slices(0..len).for_each(|part| item.extend_from_slice(part));
    insert(handle, file, 0, &item)?;
    Ok(len.cast_signed() - dropped.cast_signed())
}

/// Writes every copy of `data`. What cannot be written ends all writing.
pub(crate) fn write_data(handle: &Handle<'_>, logical: Logical, data: Sectors<'_>) -> Result<()> {
    handle.whole(|| {
        let volume = handle.volume();
        for (member, physical, part) in volume.write_places(logical, data.len)? {
            let slices: Vec<_> = data.slices(part).map(IoSlice::new).collect();
            volume.write_member(member, physical.0, &slices)?;
        }
        Ok(())
    })
}

/// Makes `range` of the file, which lies behind its end, a hole. Volumes with NO_HOLES say that by saying nothing.
/// Space that was preallocated there stays.
pub(crate) fn insert_hole(handle: &Handle<'_>, file: FileId, range: Range<u64>) -> Result<()> {
    if range.is_empty() || handle.volume().superblock().incompat.has(Incompat::NO_HOLES) {
        return Ok(());
    }
    let insert_one = |hole: Range<u64>| {
        if hole.is_empty() {
            return Ok(());
        }
        insert(handle, file, hole.start, &encode(handle, hole.end - hole.start, Logical(0), 0))
    };
    let mut at = range.start;
    while let Some(extent) = overlaps(handle, file, at..range.end, 1)?.first() {
        insert_one(at..extent.key.offset.max(at))?;
        at = extent.end;
    }
    insert_one(at..range.end.max(at))
}

fn insert(handle: &Handle<'_>, file: FileId, at: u64, item: &[u8]) -> Result<()> {
    let key = Key::new(file.ino, ItemType::EXTENT_DATA, at);
    handle.change(TreeId(file.dev), |tree| tree.insert(key, item))
}

fn head(handle: &Handle<'_>, len: u64, extent_type: u8) -> FileExtentHead {
    FileExtentHead {
        generation: handle.generation().0.into(),
        ram_bytes: len.into(),
        compression: 0,
        encryption: 0,
        other_encoding: 0.into(),
        extent_type,
    }
}

fn encode(handle: &Handle<'_>, len: u64, logical: Logical, disk_num_bytes: u64) -> Vec<u8> {
    let tail = FileExtentTail {
        disk_bytenr: logical.0.into(),
        disk_num_bytes: disk_num_bytes.into(),
        offset: 0.into(),
        num_bytes: len.into(),
    };
    [head(handle, len, extent_type::REG).as_bytes(), tail.as_bytes()].concat()
}
