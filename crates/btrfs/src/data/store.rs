//! Storing data of files: in a new extent, in place, or inline in the extent item.
//!
//! Data is on its devices before any item refers to it. It becomes durable with the commit, whose
//! barrier comes after it.

use std::borrow::Cow;
use std::io::IoSlice;
use std::mem::offset_of;
use std::ops::Range;
use std::sync::Arc;

use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::file_extent::{FileExtentHead, FileExtentTail, extent_type};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::superblock::Incompat;
use offshoot_btrfs_format::{ItemType, Key, Logical, Physical, TreeId};
use offshoot_vfs::{FileId, Result};
use zerocopy::IntoBytes;

use super::AlignedBytes;
use super::buffer::{BufferRun, Buffers, index};
use super::checksums::remove_stale_checksums;
use super::drop::{drop_range, overlaps};
use super::insert_checksums;
use super::pack::CompressionChunk;
use super::prealloc::mark_written;
use crate::storage::{MemberWrite, WrittenCopy};
use crate::transaction::{Base, ExtentKind, RefOwner, TransactionHandle};

/// Consecutive whole sectors of a file.
#[derive(Clone, Copy)]
pub(crate) struct Sectors<'r> {
    runs: &'r [BufferRun],
    pub(crate) start: u64,
    pub(crate) len: u64,
}

impl<'r> Sectors<'r> {
    /// All sectors of `runs`, which are consecutive.
    pub(crate) fn new(runs: &'r [BufferRun]) -> Self {
        let start = runs.first().map_or(0, |(start, _)| *start);
        let len = runs.iter().map(|(_, run)| run.len() as u64).sum();
        Self { runs, start, len }
    }

    /// The first `len` bytes of them.
    pub(crate) fn first(self, len: u64) -> Self {
        Self { len: len.min(self.len), ..self }
    }

    /// Their range in the file.
    pub(crate) fn range(self) -> Range<u64> {
        self.start..self.start + self.len
    }

    /// The bytes of `part` of the file, which must lie within them.
    pub(crate) fn contents(self, part: &Range<u64>) -> Cow<'r, [u8]> {
        let mut slices = self.slices(part.start - self.start..part.end - self.start);
        let first = slices.next().unwrap_or_default();
        match slices.next() {
            None => Cow::Borrowed(first),
            Some(second) => {
                let all = [first, second].into_iter().chain(slices);
                Cow::Owned(all.flatten().copied().collect())
            }
        }
    }

    /// The runs that have bytes of `part` of the file, which must lie within them.
    pub(crate) fn runs_of(self, part: &Range<u64>) -> Vec<BufferRun> {
        let overlaps =
            |(at, run): &&BufferRun| *at < part.end && part.start < at + run.len() as u64;
        self.runs.iter().filter(overlaps).cloned().collect()
    }

    /// The slices of memory that hold `part`, which counts from their beginning.
    pub(super) fn slices(self, part: Range<u64>) -> impl Iterator<Item = &'r [u8]> {
        self.ranges(part).map(|(run, range)| &run[range])
    }

    /// As [`slices`](Self::slices), with a share in the memory.
    fn shared(self, part: Range<u64>) -> impl Iterator<Item = SharedSlice> {
        self.ranges(part).map(|(run, range)| SharedSlice { run: run.clone(), range })
    }

    fn ranges(
        self,
        part: Range<u64>,
    ) -> impl Iterator<Item = (&'r Arc<AlignedBytes>, Range<usize>)> {
        let wanted = self.start + part.start..self.start + part.end.min(self.len);
        self.runs.iter().filter_map(move |(at, run)| {
            let from = wanted.start.max(*at);
            let to = wanted.end.min(at + run.len() as u64);
            (from < to).then(|| {
                let index = |at: u64| usize::try_from(at).expect("in memory");
                (run, index(from - at)..index(to - at))
            })
        })
    }
}

/// Makes `data`, which was written at `logical`, an extent of `file`, and replaces the extents in
/// its range. Returns the change of the bytes of data that the inode counts.
///
/// # Errors
/// When a tree cannot be read.
pub(crate) fn refer_to(
    handle: &TransactionHandle<'_>,
    buffers: &Buffers,
    file: FileId,
    inode: &InodeItem,
    data: Sectors<'_>,
    logical: Logical,
) -> Result<i64> {
    note_checksums(handle, inode, data, logical)?;
    let _changing = buffers.changing(file);
    let dropped = drop_range(handle, file, data.range())?;
    let owner = RefOwner::File { root: TreeId(file.dev), ino: file.ino, offset: data.start };
    handle.refer_new(logical, data.len, ExtentKind::Data, owner);
    let item = encode(handle, data.len, logical, data.len, extent_type::REG);
    insert(handle, file, data.start, &item)?;
    Ok(data.len.cast_signed() - dropped.cast_signed())
}

/// Writes consecutive compressed chunks of a file, each to its own one of `places`, and stores
/// their items as [`refer_to`] does.
pub(crate) fn store_packed(
    handle: &TransactionHandle<'_>,
    buffers: &Buffers,
    file: FileId,
    inode: &InodeItem,
    chunks: &[CompressionChunk],
    compression: Compression,
    places: &[Logical],
) -> Result<i64> {
    let extents: Vec<PackedExtent<'_>> = chunks
        .iter()
        .zip(places)
        .filter_map(|(CompressionChunk { range, packed }, &logical)| {
            packed.as_ref().map(|packed| PackedExtent { range, packed, logical })
        })
        .collect();
    for row in extents.chunk_by(|one, next| one.end() == next.logical) {
        let mut at = 0;
        let runs = row.iter().map(|extent| {
            let run = (at, extent.packed.clone());
            at += extent.packed.len() as u64;
            run
        });
        write_new(handle, inode, Sectors::new(&runs.collect::<Vec<_>>()), row[0].logical)?;
    }
    note_use(handle, compression);
    let _changing = buffers.changing(file);
    let start = extents.first().map_or(0, |extent| extent.range.start);
    let end = extents.last().map_or(start, |extent| extent.range.end);
    let dropped = drop_range(handle, file, start..end)?;
    let items: Vec<_> = extents
        .into_iter()
        .map(|PackedExtent { range, packed, logical }| {
            let disk_len = packed.len() as u64;
            let owner =
                RefOwner::File { root: TreeId(file.dev), ino: file.ino, offset: range.start };
            handle.refer_new(logical, disk_len, ExtentKind::Data, owner);
            let len = range.end - range.start;
            let mut item = encode(handle, len, logical, disk_len, extent_type::REG);
            item[offset_of!(FileExtentHead, compression)] = compression as u8;
            (Key::new(file.ino, ItemType::EXTENT_DATA, range.start), item)
        })
        .collect();
    let items: Vec<_> = items.iter().map(|(key, item)| (*key, &item[..])).collect();
    handle.change(TreeId(file.dev), |tree| tree.insert_batch(&items))?;
    Ok((end - start).cast_signed() - dropped.cast_signed())
}

/// A compressed chunk and its place.
struct PackedExtent<'c> {
    range: &'c Range<u64>,
    packed: &'c Arc<AlignedBytes>,
    logical: Logical,
}

impl PackedExtent<'_> {
    fn end(&self) -> Logical {
        Logical(self.logical.0 + self.packed.len() as u64)
    }
}

/// Sets the feature of the volume that says that this compression was used.
pub(crate) fn note_use(handle: &TransactionHandle<'_>, compression: Compression) {
    match compression {
        Compression::Lzo => handle.needs(Incompat::COMPRESS_LZO),
        Compression::Zstd => handle.needs(Incompat::COMPRESS_ZSTD),
        Compression::None | Compression::Zlib => {}
    }
}

/// Writes `data` at `logical`, with checksums if the file has them.
fn write_new(
    handle: &TransactionHandle<'_>,
    inode: &InodeItem,
    data: Sectors<'_>,
    logical: Logical,
) -> Result<()> {
    write_data(handle, logical, data, DataChecksums::of(inode))?;
    note_checksums(handle, inode, data, logical)
}

/// Stores the checksums of `data` at `logical`, if the file has them, and otherwise removes stale
/// ones.
fn note_checksums(
    handle: &TransactionHandle<'_>,
    inode: &InodeItem,
    data: Sectors<'_>,
    logical: Logical,
) -> Result<()> {
    match DataChecksums::of(inode) {
        DataChecksums::Has => insert_checksums(handle, logical, data),
        DataChecksums::HasNone => remove_stale_checksums(handle, logical, data.len),
    }
}

/// Writes `data` at `logical`, which is its preallocated place in `file`.
///
/// # Errors
/// When a device fails.
pub(crate) fn store_preallocated(
    handle: &TransactionHandle<'_>,
    buffers: &Buffers,
    file: FileId,
    inode: &InodeItem,
    data: Sectors<'_>,
    logical: Logical,
) -> Result<()> {
    write_new(handle, inode, data, logical)?;
    let _changing = buffers.changing(file);
    mark_written(handle, file, &data.range())
}

/// Inline data.
pub(crate) struct InlineData<'d> {
    /// The length before compression, in bytes.
    pub(crate) len: u64,
    pub(crate) compression: Compression,
    pub(crate) bytes: Cow<'d, [u8]>,
}

/// Makes `data` the inline data of `file`, and replaces the extents in `range`. Returns as
/// [`refer_to`].
pub(crate) fn store_inline(
    handle: &TransactionHandle<'_>,
    buffers: &Buffers,
    file: FileId,
    range: Range<u64>,
    data: &InlineData<'_>,
) -> Result<i64> {
    note_use(handle, data.compression);
    let _changing = buffers.changing(file);
    let dropped = drop_range(handle, file, range)?;
    let mut head = head(handle, data.len, extent_type::INLINE);
    head.compression = data.compression as u8;
    insert(handle, file, 0, &[head.as_bytes(), &data.bytes].concat())?;
    Ok(data.len.cast_signed() - dropped.cast_signed())
}

/// The first data of a file.
#[derive(Clone, Copy)]
pub(crate) struct FirstData<'d> {
    pub(crate) file: FileId,
    /// All data of the file, in whole sectors.
    pub(crate) data: &'d Arc<AlignedBytes>,
    /// The length of the file in bytes, if the data is stored inline.
    pub(crate) inline: Option<u64>,
}

impl FirstData<'_> {
    /// The data space that it takes, in bytes.
    pub(crate) fn extent_bytes(&self) -> u64 {
        if self.inline.is_some() { 0 } else { self.data.len() as u64 }
    }

    /// The bytes of data that the inode counts for it.
    pub(crate) fn stored_bytes(&self) -> i64 {
        self.inline.unwrap_or(self.data.len() as u64).cast_signed()
    }
}

/// Stores the first data of several files of one subvolume, which are sorted. Data that is not
/// inline goes to consecutive addresses from `logical` on. No extent is replaced, so a reader sees
/// the new extents or none.
///
/// # Errors
/// When a device fails.
pub(crate) fn store_first(
    handle: &TransactionHandle<'_>,
    files: &[FirstData<'_>],
    logical: Logical,
) -> Result<()> {
    let mut len = 0;
    let runs = files.iter().filter(|file| file.inline.is_none()).map(|file| {
        let run = (len, file.data.clone());
        len += file.extent_bytes();
        run
    });
    let runs: Vec<_> = runs.collect();
    if len > 0 {
        let data = Sectors::new(&runs);
        write_data(handle, logical, data, DataChecksums::Has)?;
        insert_checksums(handle, logical, data)?;
    }
    let mut at = logical;
    let items: Vec<_> = files
        .iter()
        .map(|first| {
            let (file, len) = (first.file, first.data.len() as u64);
            handle.log().note_extents(file, 0..len);
            let item = if let Some(size) = first.inline {
                let bytes = &first.data[..index(size)];
                [head(handle, size, extent_type::INLINE).as_bytes(), bytes].concat()
            } else {
                let owner = RefOwner::File { root: TreeId(file.dev), ino: file.ino, offset: 0 };
                handle.refer_new(at, len, ExtentKind::Data, owner);
                encode(handle, len, at, len, extent_type::REG)
            };
            at.0 += first.extent_bytes();
            (Key::new(file.ino, ItemType::EXTENT_DATA, 0), item)
        })
        .collect();
    let items: Vec<_> = items.iter().map(|(key, item)| (*key, &item[..])).collect();
    let tree = files.first().map_or(TreeId::FS, |first| TreeId(first.file.dev));
    handle.change(tree, |tree| tree.insert_batch(&items))
}

/// Whether data has checksums. They reveal a copy that could not be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DataChecksums {
    Has,
    HasNone,
}

impl DataChecksums {
    /// Whether the data of this inode has checksums.
    pub(crate) fn of(inode: &InodeItem) -> Self {
        if inode.flags.get() & inode_flags::NODATASUM == 0 { Self::Has } else { Self::HasNone }
    }
}

/// Writes every copy of `data`. If a part could not be written to any member, all writing ends.
pub(crate) fn write_data(
    handle: &TransactionHandle<'_>,
    logical: Logical,
    data: Sectors<'_>,
    sums: DataChecksums,
) -> Result<()> {
    handle.all_or_stop(|| write_places(handle.volume(), logical, data, sums))
}

/// Writes every copy of `data`.
///
/// # Errors
/// When a part has no written copy, or when a copy of data without checksums stays bad on a member
/// that is still trusted.
pub(super) fn write_places(
    volume: &Base,
    logical: Logical,
    data: Sectors<'_>,
    sums: DataChecksums,
) -> Result<()> {
    let mut copies = Vec::with_capacity(2);
    let mut cause = None;
    let mut take = |member, part, written| {
        let is_written = match written {
            Ok(is_written) => is_written,
            Err(error) if sums == DataChecksums::Has => {
                cause.get_or_insert(error);
                false
            }
            Err(error) => return Err(error),
        };
        copies.push(WrittenCopy { member, part: (0, part), is_written });
        Ok(())
    };
    let places = volume.storage.write_places(logical, data.len)?;
    if places.iter().all(|(member, ..)| *member == places[0].0) {
        for (member, physical, part) in places {
            let slices: Vec<_> = data.slices(part.clone()).map(IoSlice::new).collect();
            take(member, part, volume.write_copy(member, physical.0, &slices))?;
        }
    } else {
        for (member, part, written) in write_members(volume, places, data)? {
            take(member, part, written)?;
        }
    }
    if copies.iter().all(|copy| copy.is_written) {
        return Ok(());
    }
    volume.storage.require_copies(&copies, cause)
}

/// The index of a member, an offset on it, and the part of the data that goes there.
type DataPlace = (usize, Physical, Range<u64>);

/// The index of a member, a part of the data, and what became of writing it there.
type DataOutcome = (usize, Range<u64>, Result<bool>);

/// Writes parts of `data` to their places on several members at a time. Parts that are neighbours
/// on a member go out in one request.
fn write_members(
    volume: &Base,
    mut places: Vec<DataPlace>,
    data: Sectors<'_>,
) -> Result<Vec<DataOutcome>> {
    places.sort_by_key(|(member, physical, _)| (*member, physical.0));
    let is_next_to = |(_, at, part): &DataPlace, (_, behind, _): &DataPlace| {
        at.0 + (part.end - part.start) == behind.0
    };
    let own = places.chunk_by(|(one, ..), (next, ..)| one == next);
    let requests: Vec<Vec<_>> = own.map(|own| own.chunk_by(is_next_to).collect()).collect();
    let share = |requests: &Vec<&[DataPlace]>| {
        let write = |request: &&[DataPlace]| MemberWrite {
            offset: request[0].1.0,
            bytes: request.iter().flat_map(|(.., part)| data.shared(part.clone())).collect(),
        };
        volume.storage.writes_to(requests[0][0].0, requests.iter().map(write))
    };
    let shares = requests.iter().map(share).collect::<Result<Vec<_>>>()?;
    let mut outcomes = Vec::with_capacity(places.len());
    volume.write_copies(&shares, |share, write, written| {
        let is_written = matches!(written, Ok(true));
        let mut first = Some(written);
        for (member, _, part) in requests[share][write] {
            let written = first.take().unwrap_or(Ok(is_written));
            outcomes.push((*member, part.clone(), written));
        }
    });
    Ok(outcomes)
}

/// A part of a buffered run, with a share in its memory.
struct SharedSlice {
    run: Arc<AlignedBytes>,
    range: Range<usize>,
}

impl AsRef<[u8]> for SharedSlice {
    fn as_ref(&self) -> &[u8] {
        &self.run[self.range.clone()]
    }
}

/// Makes `range` of the file, which lies behind its end, a hole. Volumes with NO_HOLES store
/// nothing for that. Preallocated space in the range stays.
pub(crate) fn insert_hole(
    handle: &TransactionHandle<'_>,
    file: FileId,
    range: Range<u64>,
) -> Result<()> {
    if range.is_empty() || handle.volume().superblock().incompat.has(Incompat::NO_HOLES) {
        return Ok(());
    }
    let insert_one = |hole: Range<u64>| {
        if hole.is_empty() {
            return Ok(());
        }
        handle.log().note_extents(file, hole.clone());
        insert(handle, file, hole.start, &hole_item(handle, hole.end - hole.start))
    };
    let mut at = range.start;
    while let Some(extent) = overlaps(handle.volume(), file, at..range.end, 1)?.first() {
        insert_one(at..extent.key.offset.max(at))?;
        at = extent.end;
    }
    insert_one(at..range.end.max(at))
}

/// The item of a hole.
pub(crate) fn hole_item(handle: &TransactionHandle<'_>, len: u64) -> Vec<u8> {
    encode(handle, len, Logical(0), 0, extent_type::REG)
}

pub(super) fn insert(
    handle: &TransactionHandle<'_>,
    file: FileId,
    at: u64,
    item: &[u8],
) -> Result<()> {
    let key = Key::new(file.ino, ItemType::EXTENT_DATA, at);
    handle.change(TreeId(file.dev), |tree| tree.insert(key, item))
}

fn head(handle: &TransactionHandle<'_>, len: u64, extent_type: u8) -> FileExtentHead {
    FileExtentHead {
        generation: handle.generation().0.into(),
        ram_bytes: len.into(),
        compression: 0,
        encryption: 0,
        other_encoding: 0.into(),
        extent_type,
    }
}

/// The item of an extent, or of a hole, whose address is 0.
pub(super) fn encode(
    handle: &TransactionHandle<'_>,
    len: u64,
    logical: Logical,
    disk_num_bytes: u64,
    extent_type: u8,
) -> Vec<u8> {
    let tail = FileExtentTail {
        disk_bytenr: logical.0.into(),
        disk_num_bytes: disk_num_bytes.into(),
        offset: 0.into(),
        num_bytes: len.into(),
    };
    [head(handle, len, extent_type).as_bytes(), tail.as_bytes()].concat()
}
