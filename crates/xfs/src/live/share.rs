//! Ranges of files that share blocks: clones, deduplication, copies.
//!
//! A copy shares whole blocks where both ranges lie alike in their blocks, and copies bytes
//! elsewhere. Holes stay holes:
//!
//! ```text
//! from    | .ddd | dddd | hole | dddd | dd.. |
//! to      | .ccc | ssss | hole | ssss | cc.. |     c: copied     s: shared
//! ```

use std::ops::Range;

use offshoot_vfs::{Dedupe, Errno, Error, FilePosition, Result, Timestamp};
use offshoot_xfs_format::FileBlock;
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::inode::XfsInodeFlags;

use super::contents::{DataRun, LiveContents};
use super::inodes::LockedFiles;
use super::{FIXED, XfsLive, ino_of, refuse_flags};
use crate::buffered::SettledFile;
use crate::file::{XfsCloneRange, index, require_bytes};

/// The most bytes that are compared or copied in one step.
const PIECE_BYTES: u64 = 1 << 20;

/// The smallest hole that a copy punches into data, in bytes. Zeros take the place of the data
/// where a hole is smaller.
const LEAST_PUNCHED: u64 = 64 << 10;

/// Two ranges of files, which are locked.
struct LivePair<'l> {
    live: &'l XfsLive,
    from: FilePosition,
    to: FilePosition,
    source: LiveContents<'l>,
    target: LiveContents<'l>,
    from_size: u64,
    to_size: u64,
}

impl XfsLive {
    /// Locks two files, of which that of `to` must have none of the flags `refused`.
    fn pair(
        &self,
        from: FilePosition,
        to: FilePosition,
        refused: XfsInodeFlags,
    ) -> Result<(LockedFiles<'_>, LivePair<'_>)> {
        let locked = self.inodes.write([from.file, to.file].map(ino_of));
        let (source, target) = (self.contents(from.file)?, self.contents(to.file)?);
        let (from_size, to_size) = (source.size(), target.size());
        refuse_flags(&*self.inode(to.file)?, refused)?;
        Ok((locked, LivePair { live: self, from, to, source, target, from_size, to_size }))
    }

    /// Lets a range share the blocks of another one; 0 bytes mean up to the end of the file.
    pub(crate) fn clone_range(
        &self,
        from: FilePosition,
        to: FilePosition,
        len: u64,
        at: Timestamp,
    ) -> Result<()> {
        let _call = self.enter()?;
        let (_locked, pair) = self.pair(from, to, FIXED)?;
        pair.require_sharing()?;
        let rest = pair.from_size.checked_sub(from.offset).filter(|rest| len <= *rest);
        let rest = rest.ok_or_else(|| pair.wrong("which the file does not have"))?;
        let len = if len == 0 { rest } else { len };
        let end = require_bytes(to.file, to.offset, len)?.end;
        // As in the kernel, a clone of no bytes succeeds at any offset.
        if len == 0 {
            return Ok(());
        }
        // The last block may be a part only if neither file has data behind the range.
        pair.require_blocks(len, len == rest && end >= pair.to_size)?;
        let before = pair.target.marks();
        let outcome = pair.share(0..len, Some(end));
        let is_changed = pair.target.marks() != before;
        self.touch_changed(ino_of(to.file), at, outcome, is_changed)?;
        self.keep_synchronous(&*self.inode(to.file)?)
    }

    /// Lets two ranges share blocks if their bytes are the same.
    pub(crate) fn dedupe_range(
        &self,
        from: FilePosition,
        to: FilePosition,
        len: u64,
    ) -> Result<Dedupe> {
        let _call = self.enter()?;
        let (_locked, pair) = self.pair(from, to, XfsInodeFlags::IMMUTABLE)?;
        pair.require_sharing()?;
        if len == 0 {
            return Ok(Dedupe::Same { len });
        }
        let rests = [(pair.from_size, from), (pair.to_size, to)]
            .map(|(size, at)| size.checked_sub(at.offset));
        if rests.iter().any(|rest| rest.is_none_or(|rest| rest < len)) {
            return Err(pair.wrong("which the files do not have"));
        }
        let block = self.block_bytes();
        let len = if rests == [Some(len); 2] { len } else { len / block * block };
        pair.require_blocks(len, true)?;
        if len > 0 {
            if !pair.is_same(len)? {
                return Ok(Dedupe::Differs);
            }
            pair.share(0..len, None)?;
        }
        Ok(Dedupe::Same { len })
    }

    /// Copies at most `len` bytes, and returns how many.
    pub(crate) fn copy_range(
        &self,
        from: FilePosition,
        to: FilePosition,
        len: u64,
        at: Timestamp,
    ) -> Result<u64> {
        let _call = self.enter()?;
        let (_locked, pair) = self.pair(from, to, FIXED)?;
        let rest = pair.from_size.saturating_sub(from.offset);
        let len = len.min(rest);
        let end = require_bytes(to.file, to.offset, len)?.end;
        if pair.overlaps(len) {
            return Err(pair.wrong("which overlap in the file"));
        }
        if len == 0 {
            return Ok(0);
        }
        let block = self.block_bytes();
        let head = from.offset.next_multiple_of(block) - from.offset;
        let is_whole = len == rest && end >= pair.to_size;
        let tail = if is_whole { 0 } else { (from.offset + len) % block };
        let lies_alike = from.offset % block == to.offset % block && pair.require_sharing().is_ok();
        let before = pair.target.marks();
        let outcome = if lies_alike && head + tail < len {
            let middle = head..len - tail;
            pair.copy(0..head)
                .and_then(|()| pair.share(middle, Some(to.offset + len - tail)))
                .and_then(|()| pair.copy(len - tail..len))
        } else {
            pair.copy(0..len)
        };
        let is_changed = pair.target.marks() != before;
        self.touch_changed(ino_of(to.file), at, outcome, is_changed)?;
        self.keep_synchronous(&*self.inode(to.file)?)?;
        Ok(len)
    }
}

impl LivePair<'_> {
    fn wrong(&self, why: &str) -> Error {
        let Self { from, to, .. } = self;
        let what = format!(
            "bytes at {} of {} and at {} of {}, {why}",
            from.offset, from.file, to.offset, to.file
        );
        Error::posix(Errno::INVAL, what)
    }

    /// `EOPNOTSUPP` on a volume without shared blocks.
    fn require_sharing(&self) -> Result<()> {
        let layout = self.live.transactions.geometry().layout;
        if layout.contains(XfsLayout::SHARED_BLOCKS) {
            return Ok(());
        }
        Err(Error::posix(Errno::OPNOTSUPP, "sharing blocks, on a volume without the feature"))
    }

    fn overlaps(&self, len: u64) -> bool {
        self.from.file == self.to.file && self.from.offset.abs_diff(self.to.offset) < len
    }

    /// `EINVAL` unless both ranges are whole blocks and do not overlap. With `may_be_cut` the last
    /// block may be a part.
    fn require_blocks(&self, len: u64, may_be_cut: bool) -> Result<()> {
        let block = self.live.block_bytes();
        let is_whole = |at: u64| at.is_multiple_of(block);
        let are_whole = is_whole(self.from.offset) && is_whole(self.to.offset);
        if !are_whole || !(is_whole(len) || may_be_cut) {
            return Err(self.wrong("which are not whole blocks"));
        }
        if self.overlaps(len.next_multiple_of(block)) {
            return Err(self.wrong("which overlap"));
        }
        Ok(())
    }

    /// Shares a range that counts from the start of both, and begins and ends between blocks or
    /// ends with the file.
    fn share(&self, range: Range<u64>, size: Option<u64>) -> Result<()> {
        let block = self.live.block_bytes();
        let place =
            |at: FilePosition| (ino_of(at.file), FileBlock((at.offset + range.start) / block));
        let blocks = (range.end - range.start).div_ceil(block);
        let clone = XfsCloneRange { from: place(self.from), to: place(self.to), blocks };
        self.live.data().with_space(|| {
            let (target, _source) = self.settle_both(&range)?;
            self.target.change_settled(&target, |changes| changes.clone_range(&clone, size))
        })
    }

    /// Settles a range that counts from the start of both: that of the target, and that of the
    /// source unless it is the same file.
    fn settle_both(
        &self,
        range: &Range<u64>,
    ) -> Result<(SettledFile<'_>, Option<SettledFile<'_>>)> {
        let [from, to] =
            [self.from, self.to].map(|at| at.offset + range.start..at.offset + range.end);
        let (source, target) = (&self.source.buffer, &self.target.buffer);
        let settle = |file, bytes: &Range<u64>| self.live.data().settle(file, bytes);
        if source.ino() == target.ino() {
            let both = from.start.min(to.start)..from.end.max(to.end);
            return Ok((settle(target, &both)?, None));
        }
        if source.ino() < target.ino() {
            let source = settle(source, &from)?;
            return Ok((settle(target, &to)?, Some(source)));
        }
        let target = settle(target, &to)?;
        Ok((target, Some(settle(source, &from)?)))
    }

    /// Whether the first `len` bytes of both are the same.
    fn is_same(&self, len: u64) -> Result<bool> {
        let (mut source, mut target) = (0..0, 0..0);
        let mut room = [(); 2].map(|()| vec![0; index(len.min(PIECE_BYTES))]);
        let mut at = 0;
        loop {
            // Common holes are passed over: they may be up to 8 EiB long.
            let next =
                [(&self.source, self.from, &mut source), (&self.target, self.to, &mut target)]
                    .map(|(contents, place, run)| data_from(contents, place, at, run));
            let [first, second] = next;
            at = first?.min(second?);
            if at >= len {
                return Ok(true);
            }
            let count = index((len - at).min(PIECE_BYTES));
            let both = [(&self.source, self.from), (&self.target, self.to)];
            for ((contents, place), bytes) in both.into_iter().zip(&mut room) {
                bytes.resize(count, 0);
                contents.read(place.offset + at, bytes)?;
            }
            if room[0] != room[1] {
                return Ok(false);
            }
            at += count as u64;
        }
    }

    /// Copies the bytes of a range that counts from the start of both. Holes stay holes, as far as
    /// they are whole blocks of the target; small ones become zeros where the target has data.
    fn copy(&self, range: Range<u64>) -> Result<()> {
        let target = &self.target;
        let mut run = 0..0;
        let mut bytes = vec![0; index((range.end - range.start).min(PIECE_BYTES))];
        let mut done = range.start;
        while done < range.end {
            let start = data_from(&self.source, self.from, done, &mut run)?.min(range.end);
            self.make_hole(done..start)?;
            let behind = run.end.saturating_sub(self.from.offset);
            let end = behind.min(range.end).min(start + PIECE_BYTES).max(start);
            bytes.resize(index(end - start), 0);
            if start < end {
                self.source.read(self.from.offset + start, &mut bytes)?;
                target.write(self.to.offset + start, &bytes)?;
            }
            done = end;
        }
        let end = self.to.offset + range.end;
        if !range.is_empty() && target.size() < end { target.truncate(end) } else { Ok(()) }
    }

    /// Makes zeros of a part of the target, which counts from its start.
    fn make_hole(&self, part: Range<u64>) -> Result<()> {
        if part.is_empty() {
            return Ok(());
        }
        let (target, mut run) = (&self.target, 0..0);
        let mut at = data_from(target, self.to, part.start, &mut run)?;
        if at >= part.end {
            return Ok(());
        }
        if part.end - part.start >= LEAST_PUNCHED {
            let (start, end) = (self.to.offset + part.start, self.to.offset + part.end);
            // The block of the end of the file has nothing behind it.
            let size = target.size();
            let end = if end < size { end } else { size.next_multiple_of(self.live.block_bytes()) };
            return target.punch(&(start..end.max(start)));
        }
        while at < part.end {
            let end = part.end.min(run.end - self.to.offset);
            target.write(self.to.offset + at, &vec![0; index(end - at)])?;
            at = data_from(target, self.to, end, &mut run)?;
        }
        Ok(())
    }
}

/// Where the next data of a file begins. `at` and the result count from `place`.
fn data_from(
    contents: &LiveContents<'_>,
    place: FilePosition,
    at: u64,
    run: &mut DataRun,
) -> Result<u64> {
    Ok(contents.data_from(place.offset + at, run)? - place.offset)
}
