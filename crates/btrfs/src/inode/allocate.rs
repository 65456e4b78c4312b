//! Space of files: preallocating, punching holes, zeroing, and moving extents.
//!
//! Every operation first writes buffered data of the file back, so that all data is in extents.
//! Sectors that the range covers in part are zeroed through the buffer, if they hold data. Whole
//! sectors are changed item by item. A long range takes several transactions, so after a crash only
//! its beginning may be done. Moving extents takes one transaction.

use std::ops::Range;

use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_vfs::{Code, Errno, Error, Fallocate, FileId, Result, Timestamp};

use super::changes::{Changes, refuse_flags, timespec};
use super::subvolume::writable;
use super::write::{self, MAX_SIZE, buffer, has_stored, is_inline, regular};
use super::write_back::{self, MOST_REPLACED, Patience, items_of, until_replaced};
use crate::data::{
    OverlappingItem, drop_range, first_gap, insert_hole, overlaps, preallocate, shift,
    take_until_next_leaf,
};
use crate::inode::{Rooms, RoomsHandle};
use crate::space::{Claim, Kept};
use crate::storage::malformed;

/// The longest preallocated extent, in bytes; the kernel has the same limit.
const MOST_PREALLOCATED: u64 = 256 << 20;

/// The most extent items that are punched in one step.
const MOST_PUNCHED: usize = 16;

/// The most extent items that one operation moves, because it moves all in one transaction.
const MOST_MOVED: usize = 1 << 14;

/// Applies `what` to the `len` bytes of `file` from `offset` on.
pub(crate) fn fallocate(
    volume: &Rooms,
    file: FileId,
    what: Fallocate,
    offset: u64,
    len: u64,
    at: Timestamp,
) -> Result<()> {
    let subvolume = writable(volume, file)?;
    let _buffering = subvolume.buffering()?;
    let _locks = volume.inodes.lock(&[file]);
    let item = regular(volume, file)?;
    refuse_flags(&item, inode_flags::IMMUTABLE, file)?;
    if !matches!(what, Fallocate::Allocate { .. }) {
        refuse_flags(&item, inode_flags::APPEND, file)?;
    }
    let refuse = |errno| Error::posix(errno, format!("{len} bytes at {offset} of {file}"));
    if len == 0 {
        return Err(refuse(Errno::INVAL));
    }
    let end = offset.checked_add(len).filter(|&end| end <= MAX_SIZE);
    let range = offset..end.ok_or_else(|| refuse(Errno::FBIG))?;
    timespec(at)?;
    write_back::write_back(volume, file, Patience::Waits)?;
    let work = AllocationWork::new(volume, file, at);
    match what {
        Fallocate::Allocate { keeps_size } => work.allocate(&range, keeps_size)?,
        Fallocate::PunchHole => work.punch(&range)?,
        Fallocate::Zero { keeps_size } => work.zero(&range, keeps_size)?,
        Fallocate::Collapse => work.collapse(&range)?,
        Fallocate::Insert => work.insert(&range)?,
    }
    write::keep_synchronous(volume, file, &item)
}

/// Moves inline data of `file` from the extent item to an extent, because other data is about to be
/// stored beside it. Nothing of the file may be buffered.
pub(super) fn leave_item(volume: &Rooms, file: FileId, at: Timestamp) -> Result<()> {
    if !is_inline(volume, file)? {
        return Ok(());
    }
    buffer(volume, file, 0, &[], at)?;
    if let Some(buffer) = volume.buffers.get(file) {
        buffer.write().is_beside = true;
    }
    write_back::write_back(volume, file, Patience::Waits)
}

/// The work on one file, whose lock is held and of which nothing is buffered.
pub(super) struct AllocationWork<'v> {
    pub(super) volume: &'v Rooms,
    file: FileId,
    /// The size of a sector, in bytes.
    pub(super) sector: u64,
    /// The time that the file gets as its change time.
    pub(super) at: Timestamp,
}

impl<'v> AllocationWork<'v> {
    pub(super) fn new(volume: &'v Rooms, file: FileId, at: Timestamp) -> Self {
        Self { volume, file, sector: u64::from(volume.superblock().sector_size), at }
    }

    fn size(&self) -> Result<u64> {
        Ok(regular(self.volume, self.file)?.size.get())
    }

    /// The sectors that `range` touches.
    fn touched(&self, range: &Range<u64>) -> Range<u64> {
        range.start / self.sector * self.sector..range.end.next_multiple_of(self.sector)
    }

    fn allocate(&self, range: &Range<u64>, keeps_size: bool) -> Result<()> {
        let touched = self.touched(range);
        if touched.end > self.sector {
            leave_item(self.volume, self.file, self.at)?;
        }
        let is_there =
            |extent: &FileExtent<'_>| !matches!(extent.body, FileExtentBody::Hole { .. });
        self.fill(&touched, is_there)?;
        self.finish(range.end, keeps_size)
    }

    fn zero(&self, range: &Range<u64>, keeps_size: bool) -> Result<()> {
        let touched = self.touched(range);
        // A sector that the range covers in part keeps its extent if it has data.
        let kept = |at: u64| -> Result<u64> {
            let is_kept =
                !at.is_multiple_of(self.sector) && has_stored(self.volume, self.file, at)?;
            Ok(if is_kept { self.sector } else { 0 })
        };
        let whole = touched.start + kept(range.start)?..touched.end - kept(range.end)?;
        if whole.end > self.sector {
            leave_item(self.volume, self.file, self.at)?;
        }
        self.zero_edges(range)?;
        if whole.start < whole.end {
            let is_preallocated = |extent: &FileExtent<'_>| {
                matches!(extent.body, FileExtentBody::Extent { is_preallocated: true, .. })
            };
            self.fill(&whole, is_preallocated)?;
        }
        self.finish(range.end, keeps_size)
    }

    /// Makes `range` a hole, and zeros the parts of sectors at its ends.
    pub(super) fn punch(&self, range: &Range<u64>) -> Result<()> {
        self.zero_edges(range)?;
        let mut at = range.start.next_multiple_of(self.sector);
        let end = range.end / self.sector * self.sector;
        while at < end {
            at = self.punch_some(at..end)?;
        }
        self.finish(0, true)
    }

    /// Punches the beginning of `range`, which is whole sectors, and returns where the hole ends.
    fn punch_some(&self, range: Range<u64>) -> Result<u64> {
        let items = overlaps(self.volume, self.file, range.clone(), MOST_PUNCHED)?;
        let end = match items.last() {
            Some(last) if items.len() == MOST_PUNCHED => last.end.min(range.end),
            _ => range.end,
        };
        let part = range.start..end;
        let mut held = 0;
        let mut is_freed = false;
        for OverlappingItem { key, data, end } in &items {
            let body = FileExtent::parse(data).map_err(malformed)?.body;
            if !matches!(body, FileExtentBody::Hole { .. }) {
                held += 1;
                is_freed |= part.start <= key.offset && *end <= part.end;
            }
        }
        if held == 0 {
            return Ok(end);
        }
        // Taking the middle out of an extent makes one more item.
        let claim = if is_freed { Claim::MakesRoom } else { Claim::Work };
        let count = 2 * items.len() as u64 + 2;
        let handle = self.volume.join_for(items_of(self.volume, count), claim)?;
        let shown = self.size()?.next_multiple_of(self.sector);
        self.change(&handle, |item| {
            let dropped = drop_range(&handle, self.file, part.clone())?;
            insert_hole(&handle, self.file, part.start..part.end.min(shown).max(part.start))?;
            item.nbytes = item.nbytes.get().saturating_sub(dropped).into();
            Ok(())
        })?;
        Ok(end)
    }

    /// Zeros the parts of `range` that are not whole sectors, if they hold data.
    fn zero_edges(&self, range: &Range<u64>) -> Result<()> {
        let (first, last) =
            (range.start.next_multiple_of(self.sector), range.end / self.sector * self.sector);
        let edges = if first > last {
            [range.clone(), range.end..range.end]
        } else {
            [range.start..first, last..range.end]
        };
        let size = self.size()?;
        for edge in edges.map(|edge| edge.start..edge.end.min(size)) {
            if !edge.is_empty() && has_stored(self.volume, self.file, edge.start)? {
                let zeros = vec![0; usize::try_from(edge.end - edge.start).expect("in a sector")];
                buffer(self.volume, self.file, edge.start, &zeros, self.at)?;
            }
        }
        Ok(())
    }

    /// Preallocates the parts of `range`, which is whole sectors, that no extent covers for which
    /// `is_there` holds.
    fn fill(&self, range: &Range<u64>, is_there: impl Fn(&FileExtent<'_>) -> bool) -> Result<()> {
        let next = |at: u64| first_gap(self.volume, self.file, at..range.end, &is_there);
        let (mut at, mut missing) = (range.start, 0);
        while let Some(gap) = next(at)? {
            missing += gap.end - gap.start;
            at = gap.end;
        }
        if missing == 0 {
            return Ok(());
        }
        // A thread that waits for metadata must hold no reservation.
        let mut room = self.volume.reserve_data(missing)?.keep();
        let mut at = range.start;
        while let Some(gap) = next(at)? {
            at = self.fill_some(&mut room, gap)?;
        }
        Ok(())
    }

    /// Preallocates the beginning of `gap` from the reservation `room`, and returns where that
    /// ends.
    fn fill_some(&self, room: &mut Kept, gap: Range<u64>) -> Result<u64> {
        let gap = gap.start..gap.end.min(gap.start + MOST_PREALLOCATED);
        let (count, len) = until_replaced(self.volume, self.file, &gap, MOST_REPLACED)?;
        let handle = self.volume.join_for(items_of(self.volume, count), Claim::Work)?;
        let begun = self.begin(&handle)?;
        let (logical, len) = take_until_next_leaf(&handle, room, len.min(room.bytes()))?;
        self.apply(&handle, begun, |item| {
            let change = preallocate(&handle, self.file, gap.start, logical, len)?;
            item.nbytes = item.nbytes.get().saturating_add_signed(change).into();
            item.flags |= inode_flags::PREALLOC;
            Ok(())
        })?;
        drop(room.split(len));
        Ok(gap.start + len)
    }

    /// Changes extents of the file and its inode item. Readers of the extents wait meanwhile.
    pub(super) fn change(
        &self,
        handle: &RoomsHandle<'_>,
        change: impl FnOnce(&mut InodeItem) -> Result<()>,
    ) -> Result<()> {
        self.apply(handle, self.begin(handle)?, change)
    }

    /// Reads what a change needs. The subvolume does not become read-only before the change is
    /// done. A change that files do not show may happen in a read-only subvolume.
    fn begin<'h, 'w>(&self, handle: &'h RoomsHandle<'w>) -> Result<(Changes<'h, 'w>, InodeItem)> {
        let mut changes = Changes::accepted(handle, self.file)?;
        let item = changes.inode(self.file)?;
        changes.before_data(self.file)?;
        Ok((changes, item))
    }

    fn apply(
        &self,
        handle: &RoomsHandle<'_>,
        (mut changes, mut item): (Changes<'_, '_>, InodeItem),
        change: impl FnOnce(&mut InodeItem) -> Result<()>,
    ) -> Result<()> {
        handle.all_or_stop(|| {
            let _changing = self.volume.buffers.changing(self.file);
            change(&mut item)?;
            let (size, nbytes, flags) = (item.size, item.nbytes, item.flags);
            changes.adjust_inode(self.file, |item| {
                (item.size, item.nbytes, item.flags) = (size, nbytes, flags);
            })?;
            changes.apply()
        })
    }

    /// Updates the times of the file, and makes it at least `end` bytes long unless `keeps_size`.
    fn finish(&self, end: u64, keeps_size: bool) -> Result<()> {
        let size = self.size()?;
        if !keeps_size && size < end {
            return write::grow(self.volume, self.file, size, end, self.at);
        }
        self.note_time()
    }

    /// Updates the times of the file.
    pub(super) fn note_time(&self) -> Result<()> {
        let handle = self.volume.join_to_remove()?;
        let mut changes = Changes::new(&handle, self.file)?;
        let mtime = timespec(self.at)?;
        changes.change_inode(self.file, self.at, |item| item.mtime = mtime)?;
        changes.apply()
    }

    /// `EINVAL` unless `range` is whole sectors.
    fn require_whole(&self, range: &Range<u64>) -> Result<()> {
        if range.start.is_multiple_of(self.sector) && range.end.is_multiple_of(self.sector) {
            return Ok(());
        }
        let what = format!("{range:?} of {}, which are not whole sectors", self.file);
        Err(Error::posix(Errno::INVAL, what))
    }

    fn collapse(&self, range: &Range<u64>) -> Result<()> {
        self.require_whole(range)?;
        let size = self.size()?;
        if range.end >= size {
            let what = format!("{range:?} of {}, which reaches its end", self.file);
            return Err(Error::posix(Errno::INVAL, what));
        }
        self.shift(range.end, range.start, size - (range.end - range.start))
    }

    fn insert(&self, range: &Range<u64>) -> Result<()> {
        self.require_whole(range)?;
        let size = self.size()?;
        if range.start >= size {
            let what = format!("a hole at {} behind the end of {}", range.start, self.file);
            return Err(Error::posix(Errno::INVAL, what));
        }
        leave_item(self.volume, self.file, self.at)?;
        let grown = size.checked_add(range.end - range.start).filter(|&size| size <= MAX_SIZE);
        let grown = grown.ok_or_else(|| Error::posix(Errno::FBIG, self.file.to_string()))?;
        self.shift(range.start, range.end, grown)
    }

    /// Moves all extents from `from` on to `to`, including preallocated space beyond the end. The
    /// file is then `size` bytes long. The range between is removed if extents move down, and is a
    /// hole if they move up.
    fn shift(&self, from: u64, to: u64, size: u64) -> Result<()> {
        let (volume, file, start) = (self.volume, self.file, to.min(from));
        let touched = overlaps(volume, file, start..u64::MAX, MOST_MOVED + 1)?;
        if touched.len() > MOST_MOVED {
            let what = format!("moving more than {MOST_MOVED} extents of {file} at once");
            return Err(Error::unsupported(Code::MovedExtents, what));
        }
        let handle = volume.join_for(items_of(volume, 2 * touched.len() as u64), Claim::Work)?;
        self.change(&handle, |item| {
            let mut dropped = drop_range(&handle, file, start..from)?;
            if from < to {
                // Preallocated space that would move beyond the largest length of a file.
                let most = MAX_SIZE.next_multiple_of(self.sector) - (to - from);
                dropped += drop_range(&handle, file, most..u64::MAX)?;
            }
            item.nbytes = item.nbytes.get().saturating_sub(dropped).into();
            let items = overlaps(volume, file, from..u64::MAX, usize::MAX)?;
            shift(&handle, file, &items, from, to)?;
            if from < to {
                insert_hole(&handle, file, from..to)?;
            }
            item.size = size.into();
            Ok(())
        })?;
        drop(handle);
        self.note_time()
    }
}
