//! Ranges of files that share extents: clones, deduplication, copies.
//!
//! An operation locks both files and writes their buffered data back. Then the target gets
//! references to the extents of the source, item by item. A long range takes several transactions,
//! so after a crash only its beginning may be done. Inline data is copied.

use std::ops::Range;

use offshoot_btrfs_format::TreeId;
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_vfs::{Dedupe, Errno, Error, FilePosition, Result, Timestamp};

use super::allocate::{AllocationWork, leave_item};
use super::changes::{refuse_flags, timespec};
use super::in_use::Locks;
use super::subvolume::{shareable, writable};
use super::write::{
    MAX_SIZE, buffer, current_length, grow, keep_synchronous, length_of, regular, write_locked,
};
use super::write_back::{self, MOST_REPLACED, Patience, hole_items, items_of, until_replaced};
use crate::data::timestamp;
use crate::data::{FileData, drop_range, index, insert_hole, next_data, overlaps, read_at, share};
use crate::inode::Rooms;
use crate::space::Claim;
use crate::storage::malformed;

/// The most extent items that are shared in one step.
const MOST_SHARED: usize = 64;

/// The most bytes that are compared or copied in one step.
const PIECE_BYTES: u64 = 1 << 20;

/// The smallest hole that a copy punches into data, in bytes. Punching takes a transaction, so
/// zeros replace the data where a hole is smaller.
const LEAST_PUNCHED: u64 = 64 << 10;

/// Clones `len` bytes of `from` to `to`; 0 means up to the end of the file.
pub(crate) fn clone_range(
    volume: &Rooms,
    from: FilePosition,
    to: FilePosition,
    len: u64,
    at: Timestamp,
) -> Result<()> {
    let subvolume = writable(volume, to.file)?;
    let _buffering = subvolume.buffering()?;
    let (_locks, mut pair) = ClonePair::lock(volume, from, to, FIXED)?;
    timespec(at)?;
    pair.work.at = at;
    let rest = pair.from_size.checked_sub(from.offset).filter(|&rest| len <= rest);
    let rest = rest.ok_or_else(|| pair.wrong("which the file does not have"))?;
    let len = if len == 0 { rest } else { len };
    let end = to.offset.checked_add(len).filter(|&end| end <= MAX_SIZE);
    let end = end.ok_or_else(|| Error::posix(Errno::FBIG, to.file.to_string()))?;
    pair.require_alike()?;
    // As in the kernel, a clone of zero bytes succeeds at any offset.
    if len == 0 {
        return Ok(());
    }
    // The last sector may be a part only if neither file has data behind the range.
    pair.require_sectors(len, len == rest && end >= pair.to_size)?;
    pair.settle(0)?;
    pair.share_all(0..len, InlineTreatment::Copied)?;
    pair.work.note_time()?;
    keep_synchronous(volume, to.file, &pair.to_item)
}

/// Lets two files share `len` bytes if they are the same in both.
pub(crate) fn dedupe_range(
    volume: &Rooms,
    from: FilePosition,
    to: FilePosition,
    len: u64,
) -> Result<Dedupe> {
    let subvolume = shareable(volume, to.file)?;
    let _sharing = subvolume.sharing()?;
    let (_locks, pair) = ClonePair::lock(volume, from, to, inode_flags::IMMUTABLE)?;
    pair.require_alike()?;
    if len == 0 {
        return Ok(Dedupe::Same { len });
    }
    let rests =
        [(pair.from_size, from), (pair.to_size, to)].map(|(size, at)| size.checked_sub(at.offset));
    if rests.iter().any(|rest| rest.is_none_or(|rest| rest < len)) {
        return Err(pair.wrong("which the files do not have"));
    }
    // The last sector may be a part only if neither file has data behind the range.
    let sector = pair.work.sector;
    let len = if rests == [Some(len); 2] { len } else { len / sector * sector };
    pair.require_sectors(len, true)?;
    if len > 0 {
        pair.settle(0)?;
        if !pair.is_same(len)? {
            return Ok(Dedupe::Differs);
        }
        pair.share_all(0..len, InlineTreatment::Left)?;
    }
    Ok(Dedupe::Same { len })
}

/// Copies at most `len` bytes, and returns how many. Whole sectors are shared where source and
/// target have the same offset within a sector. Otherwise bytes are copied; then small holes become
/// zeros where the target has data, and all others stay holes.
pub(crate) fn copy_range(
    volume: &Rooms,
    from: FilePosition,
    to: FilePosition,
    len: u64,
    at: Timestamp,
) -> Result<u64> {
    let subvolume = writable(volume, to.file)?;
    let _buffering = subvolume.buffering()?;
    let (_locks, mut pair) = ClonePair::lock(volume, from, to, FIXED)?;
    timespec(at)?;
    pair.work.at = at;
    let rest = pair.from_size.saturating_sub(from.offset);
    let len = len.min(rest);
    let end = to.offset.checked_add(len).filter(|&end| end <= MAX_SIZE);
    let end = end.ok_or_else(|| Error::posix(Errno::FBIG, to.file.to_string()))?;
    if pair.overlaps(len) {
        return Err(pair.wrong("which overlap in the file"));
    }
    if len == 0 {
        return Ok(0);
    }
    let sector = pair.work.sector;
    let head = from.offset.next_multiple_of(sector) - from.offset;
    let is_whole = len == rest && end >= pair.to_size;
    let tail = if is_whole { 0 } else { (from.offset + len) % sector };
    let lies_alike = from.offset % sector == to.offset % sector && pair.require_alike().is_ok();
    if !lies_alike || head + tail >= len {
        pair.copy(0..len)?;
    } else {
        pair.copy(0..head)?;
        pair.settle(head)?;
        pair.share_all(head..len - tail, InlineTreatment::Copied)?;
        pair.copy(len - tail..len)?;
    }
    // Copied data has set the times, but shared extents and holes have not.
    match volume.buffers.get(to.file) {
        Some(buffer) => buffer.write().written(0, at),
        None => pair.work.note_time()?,
    }
    keep_synchronous(volume, to.file, &pair.to_item)?;
    Ok(len)
}

/// Flags of files whose data must not be replaced.
const FIXED: u64 = inode_flags::IMMUTABLE | inode_flags::APPEND;

/// How inline data is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InlineTreatment {
    Copied,
    /// It stays as it is, because it is the same in both files.
    Left,
}

/// A range of a file that is read one run of data after the other.
struct CopyEnd {
    begin: FilePosition,
    /// The end of the range, as an offset in the file.
    end: u64,
    /// The file as the last search found it; `None` before the first one.
    data: Option<FileData>,
    /// The run of data that the last search found. Between the offset of that search and this run
    /// is a hole.
    run: Range<u64>,
}

impl CopyEnd {
    /// The first `len` bytes from `begin` on.
    fn new(begin: FilePosition, len: u64) -> Self {
        Self { begin, end: begin.offset + len, data: None, run: 0..0 }
    }

    /// The offset of the first data of the range that ends behind `at`. Both count from `begin`.
    fn data_from(&mut self, volume: &Rooms, at: u64) -> Result<u64> {
        let offset = self.begin.offset + at;
        if self.run.end <= offset {
            // A copy within the file may have buffered a sector since.
            let data = self.data.insert(FileData::open(volume, self.begin.file)?);
            let next = next_data(volume, data, offset..self.end)?;
            self.run = next.unwrap_or(u64::MAX..u64::MAX);
        }
        Ok(self.run.start.saturating_sub(self.begin.offset).max(at))
    }

    /// Fills `bytes` from `at` on, which counts from `begin`. A search comes before the first read.
    fn read(&self, volume: &Rooms, at: u64, bytes: &mut [u8]) -> Result<()> {
        let data = self.data.as_ref().expect("a search comes before each read");
        read_at(volume, data, self.begin.offset + at, bytes).map(drop)
    }
}

/// A source and a target, in files whose locks are held.
struct ClonePair<'v> {
    from: FilePosition,
    from_item: InodeItem,
    from_size: u64,
    to: FilePosition,
    to_item: InodeItem,
    to_size: u64,
    /// The work on the target file.
    work: AllocationWork<'v>,
}

impl<'v> ClonePair<'v> {
    /// Locks both files. The file of `to` must have none of the flags `refused`.
    fn lock(
        volume: &'v Rooms,
        from: FilePosition,
        to: FilePosition,
        refused: u64,
    ) -> Result<(Locks, Self)> {
        let locks = volume.inodes.lock(&[from.file, to.file]);
        let (from_item, to_item) = (regular(volume, from.file)?, regular(volume, to.file)?);
        refuse_flags(&to_item, refused, to.file)?;
        let from_size = length_of(volume, from.file, &from_item);
        let to_size = length_of(volume, to.file, &to_item);
        let work = AllocationWork::new(volume, to.file, timestamp(&to_item.ctime));
        Ok((locks, Self { from, from_item, from_size, to, to_item, to_size, work }))
    }

    fn wrong(&self, why: &str) -> Error {
        let Self { from, to, .. } = self;
        let what = format!(
            "bytes at {} of {} and at {} of {}, {why}",
            from.offset, from.file, to.offset, to.file
        );
        Error::posix(Errno::INVAL, what)
    }

    /// `EINVAL` when only one of the files has checksums: all data of an extent has them, or none.
    fn require_alike(&self) -> Result<()> {
        let [from, to] =
            [&self.from_item, &self.to_item].map(|item| item.flags.get() & inode_flags::NODATASUM);
        if from == to { Ok(()) } else { Err(self.wrong("of which one has no checksums")) }
    }

    fn overlaps(&self, len: u64) -> bool {
        self.from.file == self.to.file && self.from.offset.abs_diff(self.to.offset) < len
    }

    /// `EINVAL` unless both ranges are whole sectors and do not overlap. With `may_be_cut` the last
    /// sector may be a part.
    fn require_sectors(&self, len: u64, may_be_cut: bool) -> Result<()> {
        let is_whole = |at: u64| at.is_multiple_of(self.work.sector);
        let are_whole = is_whole(self.from.offset) && is_whole(self.to.offset);
        if !are_whole || !(is_whole(len) || may_be_cut) {
            return Err(self.wrong("which are not whole sectors"));
        }
        if self.overlaps(len.next_multiple_of(self.work.sector)) {
            return Err(self.wrong("which overlap"));
        }
        Ok(())
    }

    /// Writes both files back. If the target will have data beside its inline data, moves that to
    /// an extent. Sharing starts `begin` bytes behind the start of both ranges.
    fn settle(&self, begin: u64) -> Result<()> {
        let AllocationWork { volume, at, .. } = self.work;
        write_back::write_back(volume, self.from.file, Patience::Waits)?;
        let size = current_length(volume, self.to.file)?;
        if size < self.to.offset && !size.is_multiple_of(self.work.sector) {
            // As in the kernel, the part of a sector at the old end becomes data, also in a hole or
            // in preallocated space.
            buffer(volume, self.to.file, size, &[], at)?;
        }
        write_back::write_back(volume, self.to.file, Patience::Waits)?;
        if self.to.offset + begin >= self.work.sector {
            leave_item(volume, self.to.file, at)?;
        }
        Ok(())
    }

    /// Whether the first `len` bytes of both are the same.
    fn is_same(&self, len: u64) -> Result<bool> {
        let volume = self.work.volume;
        let mut from = CopyEnd::new(self.from, len);
        let mut to = CopyEnd::new(self.to, len);
        let mut room = [(); 2].map(|()| vec![0; index(len.min(PIECE_BYTES))]);
        let mut at = 0;
        loop {
            // Common holes are skipped, because they may be up to 8 EiB long.
            at = from.data_from(volume, at)?.min(to.data_from(volume, at)?);
            if at >= len {
                return Ok(true);
            }
            let end = len.min(at + PIECE_BYTES);
            let mut bytes = room.each_mut().map(|bytes| &mut bytes[..index(end - at)]);
            for (file, bytes) in [&from, &to].into_iter().zip(&mut bytes) {
                file.read(volume, at, bytes)?;
            }
            if bytes[0] != bytes[1] {
                return Ok(false);
            }
            at = end;
        }
    }

    /// Copies `range`, which counts from the start of both ranges. Holes stay holes, as far as they
    /// are whole sectors of the target. Smaller ones than [`LEAST_PUNCHED`] become zeros where the
    /// target has data.
    fn copy(&self, range: Range<u64>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let AllocationWork { volume, at, .. } = self.work;
        let file = self.to.file;
        let mut from = CopyEnd::new(self.from, range.end);
        let mut to = CopyEnd::new(self.to, range.end);
        let mut room = vec![0; index((range.end - range.start).min(PIECE_BYTES))];
        let size = || current_length(volume, file);
        let mut done = range.start;
        while done < range.end {
            let start = from.data_from(volume, done)?.min(range.end);
            let is_clear = done == start || to.data_from(volume, done)? >= start;
            if !is_clear && start - done < LEAST_PUNCHED {
                self.zero(&mut to, done..start, size()?)?;
            } else if !is_clear {
                self.clear(done..start, size()?)?;
            }
            let run_end = from.run.end.saturating_sub(self.from.offset);
            let end = run_end.min(range.end).min(start + PIECE_BYTES).max(start);
            if start < end {
                let bytes = &mut room[..index(end - start)];
                from.read(volume, start, bytes)?;
                write_locked(volume, file, size()?, self.to.offset + start, bytes, at)?;
                if write_back::is_over_limit(volume) {
                    write_back::write_back(volume, file, Patience::Waits)?;
                }
            }
            done = end;
        }
        let (old, end) = (size()?, self.to.offset + range.end);
        if old < end { grow(volume, file, old, end, at) } else { Ok(()) }
    }

    /// Writes zeros where `to`, the target of `size` bytes, has data in `part`. `part` counts from
    /// the start of both ranges.
    fn zero(&self, to: &mut CopyEnd, part: Range<u64>, size: u64) -> Result<()> {
        let AllocationWork { volume, at: time, .. } = self.work;
        let mut at = to.data_from(volume, part.start)?;
        while at < part.end {
            let end = part.end.min(to.run.end - self.to.offset);
            let zeros = vec![0; index(end - at)];
            write_locked(volume, self.to.file, size, self.to.offset + at, &zeros, time)?;
            at = to.data_from(volume, end)?;
        }
        Ok(())
    }

    /// Makes `part` of the target, which counts from the start of both ranges and is `size` bytes
    /// long, a hole.
    fn clear(&self, part: Range<u64>, size: u64) -> Result<()> {
        let (start, end) = (self.to.offset + part.start, self.to.offset + part.end);
        // The sector of the end of the file has nothing behind it.
        let end = if end < size { end } else { size.next_multiple_of(self.work.sector) };
        write_back::write_back(self.work.volume, self.to.file, Patience::Waits)?;
        self.work.punch(&(start..end))
    }

    /// Shares `range`, which counts from the start of both ranges. It is whole sectors, or goes to
    /// the end of the file.
    fn share_all(&self, range: Range<u64>, inline: InlineTreatment) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            at = self.share_some(at..range.end, inline)?;
        }
        Ok(())
    }

    /// Shares the beginning of `range`, and returns where that ends.
    fn share_some(&self, range: Range<u64>, inline: InlineTreatment) -> Result<u64> {
        let (sector, volume, to) = (self.work.sector, self.work.volume, self.to);
        let whole =
            range.start..(self.from.offset + range.end).next_multiple_of(sector) - self.from.offset;
        let of = |position: FilePosition, part: &Range<u64>| {
            position.offset + part.start..position.offset + part.end
        };
        let items = overlaps(volume, self.from.file, of(self.from, &whole), MOST_SHARED)?;
        if let Some(first) = items.first()
            && let FileExtentBody::Inline(_) =
                FileExtent::parse(&first.data).map_err(malformed)?.body
        {
            let first = range.start..range.end.min(first.end - self.from.offset);
            if inline == InlineTreatment::Copied {
                self.copy_inline(&first, first.end < range.end)?;
            }
            return Ok(first.end);
        }
        let end = match items.last() {
            Some(last) if items.len() == MOST_SHARED => {
                (last.end - self.from.offset).min(whole.end)
            }
            _ => whole.end,
        };
        let part = whole.start..end;
        let (replaced, len) = until_replaced(volume, to.file, &of(to, &part), MOST_REPLACED)?;
        let part = part.start..part.start + len;
        let target = of(to, &part);
        // Without the feature NO_HOLES a hole item is between any two extents.
        let before = hole_items(volume, to.file, target.start)?;
        let count = replaced + before + 2 * items.len() as u64 + 2;
        let handle = volume.join_for(items_of(volume, count), Claim::Work)?;
        // If the source subvolume was deleted and dropped meanwhile, its extents are gone.
        handle.tree(TreeId(self.from.file.dev))?.require_alive()?;
        self.work.change(&handle, |item| {
            let dropped = drop_range(&handle, to.file, target.clone())?;
            let shared = share(&handle, &items, &of(self.from, &part), to.file, target.start)?;
            let shown = item.size.get().next_multiple_of(sector);
            insert_hole(&handle, to.file, shown.min(target.start)..target.end)?;
            item.nbytes =
                item.nbytes.get().saturating_sub(dropped).saturating_add(shared.bytes).into();
            item.size = item.size.get().max(to.offset + part.end.min(range.end)).into();
            if shared.is_preallocated {
                item.flags |= inode_flags::PREALLOC;
            }
            Ok(())
        })?;
        Ok(part.end.min(range.end))
    }

    /// Copies inline data. `follows` says whether more data will be stored beside it.
    fn copy_inline(&self, range: &Range<u64>, follows: bool) -> Result<()> {
        let AllocationWork { volume, at, .. } = self.work;
        let mut bytes = vec![0; index(range.end - range.start)];
        let from = FileData::open(volume, self.from.file)?;
        read_at(volume, &from, self.from.offset + range.start, &mut bytes)?;
        buffer(volume, self.to.file, self.to.offset + range.start, &bytes, at)?;
        if let Some(buffer) = volume.buffers.get(self.to.file).filter(|_| follows) {
            buffer.write().is_beside = true;
        }
        write_back::write_back(volume, self.to.file, Patience::Waits)
    }
}
