//! Checksums of data: which of them must be there, and which must not.
//!
//! ```text
//! extents     |-- data --|      |-- data -----|
//! files       |==|  |====|      |=====|              data with checksums (=), and without
//! checksums   +++++++++++       +++   +++++++ ++     a + behind all extents is wrong,
//!                                  ^ missing         one in a part that no file uses is not
//! ```
//!
//! All three ascend, so they are compared as streams.

use std::ops::Range;

use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::Result;

use super::super::finding::{BtrfsFindingCode, BtrfsFindingPlace, BtrfsFindings};
use super::super::reference::DataUse;
use super::super::sort::SortedRecords;
use super::super::volume::{CheckedVolume, KeyRange};
use super::stream::ItemStream;
use super::verify::BadData;
use crate::tree::TreeRoot;

/// Goes through the checksums of a partition.
pub(super) struct ChecksumCheck<'v> {
    findings: &'v BtrfsFindings,
    stream: ItemStream<'v>,
    checksum_len: u64,
    sector: u64,
    bounds: Range<u64>,
    /// What is left of the current run of checksums.
    run: Range<u64>,
    /// The end of the checksums that were read.
    end: u64,
    /// The end of the extents so far.
    at: u64,
    /// Checksums that no extent has: the range that was found last and may go on.
    extra: Range<u64>,
    uses: UseCheck<'v>,
}

/// The stream of checksums of the addresses in `bounds`. It may begin with an item in front of
/// them.
pub(super) fn stream<'v>(
    volume: &'v CheckedVolume<'v>,
    checksums: TreeRoot,
    bounds: &Range<u64>,
) -> ItemStream<'v> {
    let key = |at| Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, at);
    let range = KeyRange { first: key(bounds.start), last: key(bounds.end.saturating_sub(1)) };
    ItemStream::from_floor(volume, checksums, range)
}

impl<'v> ChecksumCheck<'v> {
    pub(super) fn new(
        volume: &'v CheckedVolume<'v>,
        checksums: TreeRoot,
        bounds: Range<u64>,
        uses: UseCheck<'v>,
    ) -> Self {
        Self {
            findings: &volume.findings,
            stream: stream(volume, checksums, &bounds),
            checksum_len: volume.superblock().checksum.len() as u64,
            sector: volume.sector_size(),
            run: 0..0,
            end: bounds.start,
            at: bounds.start,
            extra: 0..0,
            bounds,
            uses,
        }
    }

    /// Adds an extent of data. Their starts ascend.
    ///
    /// # Errors
    /// When a file of records cannot be read.
    pub(super) fn add_extent(&mut self, range: Range<u64>) -> Result<()> {
        self.pass(range.start, false)?;
        self.pass(range.end, true)
    }

    /// Ends the partition.
    ///
    /// # Errors
    /// When a file of records cannot be read.
    pub(super) fn finish(&mut self) -> Result<()> {
        self.pass(self.bounds.end, false)?;
        self.tell_extra();
        self.uses.advance(self.bounds.end, Coverage::Bare, false)?;
        self.uses.finish();
        Ok(())
    }

    /// Takes the checksums before `to`.
    fn pass(&mut self, to: u64, is_extent: bool) -> Result<()> {
        let to = to.min(self.bounds.end);
        while self.at < to {
            if self.run.is_empty() && !self.next_run() {
                self.uses.advance(to, Coverage::Bare, is_extent)?;
                break;
            }
            if self.run.start > self.at {
                let end = self.run.start.min(to);
                self.uses.advance(end, Coverage::Bare, is_extent)?;
                self.at = end;
                continue;
            }
            let end = self.run.end.min(to);
            if !is_extent {
                self.note_extra(self.run.start..end);
            }
            self.uses.advance(end, Coverage::Checksums, is_extent)?;
            self.run.start = end;
            self.at = self.at.max(end);
        }
        self.at = self.at.max(to);
        Ok(())
    }

    /// Goes to the next run of checksums. Returns whether there is one.
    fn next_run(&mut self) -> bool {
        while let Some((key, data)) = self.stream.item() {
            let len = data.len() as u64 / self.checksum_len * self.sector;
            let start = key.offset;
            let is_right_kind =
                key.objectid == objectid::EXTENT_CSUM && key.item_type == ItemType::EXTENT_CSUM;
            let range = start..start.saturating_add(len);
            if let Some(gap) = self.stream.gap() {
                self.uses.unknown = gap.first.offset..start;
            }
            self.stream.advance();
            if !is_right_kind {
                continue;
            }
            let is_double = range.start < self.end && range.start >= self.bounds.start;
            if is_double {
                let place = BtrfsFindingPlace::Item { tree: TreeId::CSUM, key };
                let problem = format!("checksums before it go to {}", self.end);
                self.findings.add(BtrfsFindingCode::ExtraChecksum, place, problem);
            }
            let start = range.start.max(self.end);
            self.run = start..range.end.min(self.bounds.end);
            self.end = self.end.max(self.run.end);
            if !self.run.is_empty() {
                return true;
            }
        }
        if let Some(gap) = self.stream.gap() {
            let is_checksum = gap.first.objectid == objectid::EXTENT_CSUM;
            let start = if is_checksum { gap.first.offset } else { 0 };
            self.uses.unknown = start..u64::MAX;
        }
        false
    }

    fn note_extra(&mut self, range: Range<u64>) {
        if self.extra.end == range.start {
            self.extra.end = range.end;
            return;
        }
        self.tell_extra();
        self.extra = range;
    }

    fn tell_extra(&mut self) {
        if !self.extra.is_empty() {
            let place = BtrfsFindingPlace::Logical(Logical(self.extra.start));
            let len = self.extra.end - self.extra.start;
            let problem = format!("checksums for {len} bytes that no extent of data has");
            self.findings.add(BtrfsFindingCode::ExtraChecksum, place, problem);
            self.extra = 0..0;
        }
    }
}

/// Whether a range has checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Coverage {
    Bare,
    Checksums,
}

/// Goes through the ranges of data that files use.
pub(super) struct UseCheck<'v> {
    findings: &'v BtrfsFindings,
    records: SortedRecords<DataUse>,
    /// Whether data may have users that could not be read.
    are_some_hidden: bool,
    /// Data that differs from its checksums.
    bad: &'v BadData,
    at: u64,
    /// Of the uses so far that must have checksums, the one that goes on longest.
    summed: Option<DataUse>,
    /// Of the uses so far that must not have checksums, the one that goes on longest.
    plain: Option<DataUse>,
    /// The addresses whose checksums may be in blocks that cannot be used.
    unknown: Range<u64>,
    /// The difference that was found last and may go on.
    open: Option<(BtrfsFindingCode, BtrfsFindingPlace, Range<u64>)>,
}

impl<'v> UseCheck<'v> {
    pub(super) fn new(
        findings: &'v BtrfsFindings,
        records: SortedRecords<DataUse>,
        start: u64,
        are_some_hidden: bool,
        bad: &'v BadData,
    ) -> Self {
        Self {
            findings,
            records,
            are_some_hidden,
            bad,
            at: start,
            summed: None,
            plain: None,
            unknown: 0..0,
            open: None,
        }
    }

    /// Goes on to `to`. The range up to there has checksums or not.
    fn advance(&mut self, to: u64, coverage: Coverage, is_extent: bool) -> Result<()> {
        while self.at < to {
            while let Some(&one) = self.records.peek().filter(|one| one.start <= self.at) {
                self.records.next()?;
                self.begin(one);
            }
            let next = self.records.peek().map_or(u64::MAX, |one| one.start).min(to);
            let summed_end = end_of(self.summed.as_ref()).clamp(self.at, next);
            match coverage {
                Coverage::Bare => {
                    self.note(BtrfsFindingCode::MissingChecksum, self.summed, self.at..summed_end);
                }
                Coverage::Checksums => {
                    let plain_end = end_of(self.plain.as_ref()).clamp(summed_end, next);
                    if !self.are_some_hidden {
                        let range = summed_end..plain_end;
                        self.note(BtrfsFindingCode::ExtraChecksum, self.plain, range);
                    }
                    if is_extent {
                        self.tell_unused_bad(plain_end..next);
                    }
                }
            }
            self.at = next;
        }
        Ok(())
    }

    fn begin(&mut self, one: DataUse) {
        // The kernel writes relocated data with the checksums that it had, if it had any.
        if TreeId(one.subvolume) == TreeId::DATA_RELOC {
            return;
        }
        let longest = if one.has_checksums() { &mut self.summed } else { &mut self.plain };
        if longest.is_none_or(|other| end_of(Some(&other)) < end_of(Some(&one))) {
            *longest = Some(one);
        }
        if one.has_checksums() {
            let range = one.start..end_of(Some(&one));
            for (bad, problem) in self.bad.within(&range) {
                let place = place_of(&one);
                let part = bad.start.max(range.start)..bad.end.min(range.end);
                self.findings.add(BtrfsFindingCode::Data, place, bad_problem(&part, problem));
            }
        }
    }

    /// Reports bad data in a range that no file uses.
    fn tell_unused_bad(&mut self, range: Range<u64>) {
        for (bad, problem) in self.bad.within(&range) {
            let part = bad.start.max(range.start)..bad.end.min(range.end);
            let place = BtrfsFindingPlace::Logical(Logical(part.start));
            self.findings.add(BtrfsFindingCode::Data, place, bad_problem(&part, problem));
        }
    }

    fn note(&mut self, code: BtrfsFindingCode, by: Option<DataUse>, range: Range<u64>) {
        let Some(by) = by.filter(|_| !range.is_empty()) else { return };
        if code == BtrfsFindingCode::MissingChecksum && !self.unknown.is_empty() {
            let unknown = self.unknown.clone();
            self.open_part(code, &by, range.start..range.end.min(unknown.start));
            return self.open_part(code, &by, range.start.max(unknown.end)..range.end);
        }
        self.open_part(code, &by, range);
    }

    fn open_part(&mut self, code: BtrfsFindingCode, by: &DataUse, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let place = place_of(by);
        if let Some((open, at, before)) = &mut self.open
            && (*open, *at, before.end) == (code, place, range.start)
        {
            before.end = range.end;
            return;
        }
        self.finish();
        self.open = Some((code, place, range));
    }

    /// Reports what is not reported yet.
    fn finish(&mut self) {
        let Some((code, place, range)) = self.open.take() else { return };
        let (start, len) = (range.start, range.end - range.start);
        let problem = if code == BtrfsFindingCode::MissingChecksum {
            format!("{len} bytes of data at {start} have no checksums")
        } else {
            format!("{len} bytes of data at {start} must not have checksums")
        };
        self.findings.add(code, place, problem);
    }
}

fn bad_problem(range: &Range<u64>, problem: &str) -> String {
    format!("{} bytes at {}: {problem}", range.end - range.start, range.start)
}

fn place_of(one: &DataUse) -> BtrfsFindingPlace {
    BtrfsFindingPlace::Inode { subvolume: TreeId(one.subvolume), ino: one.ino }
}

fn end_of(one: Option<&DataUse>) -> u64 {
    one.map_or(0, |one| one.start.saturating_add(one.len))
}
