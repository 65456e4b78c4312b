//! Reads all data that has checksums.
//!
//! The data chunks are cut into slices. A thread takes a slice, goes through its checksums, and
//! reads what they are of in large pieces. It tells the devices of the next pieces before it
//! verifies one, so they read meanwhile. Threads take slices in ascending order, so a disk is
//! read nearly in sequence. Of mirrored data every copy is read. A piece that does not verify in
//! any way is read once more by the sector. Bad sectors that follow each other are one range.
//! Parity is not compared; where data is bad, it is used.

use std::collections::VecDeque;
use std::ops::Range;

use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::superblock::Incompat;
use offshoot_btrfs_format::{ItemType, Logical, TreeId};
use offshoot_kit::cores;
use offshoot_vfs::{Error, Result, Structure};
use parking_lot::Mutex;

use super::super::finding::{BtrfsFindingCode, BtrfsFindingPlace};
use super::super::volume::CheckedVolume;
use super::checksums;
use crate::storage::{BadSectors, MappedChunk, ReadSegment, StorageTrees};
use crate::tree::{TreeRoot, recorded_segment};

/// The longest read, in bytes.
const READ_BYTES: u64 = 1 << 20;

/// How many pieces the devices are told of before the first one of them is read.
const PIECES_AHEAD: usize = 4;

/// The length of a slice, in bytes, if there are not too many of them.
const SLICE_BYTES: u64 = 32 << 20;

/// About how many slices there are at most.
const MOST_SLICES: u64 = 1 << 16;

/// The most bad ranges that are kept: more than the findings that are kept.
const MOST_BAD: usize = 20_000;

/// Data that differs from its checksums or cannot be read: ranges that ascend and are apart, each
/// with what is wrong with its first sector.
#[derive(Debug, Default)]
pub(crate) struct BadData {
    ranges: Vec<(Range<u64>, String)>,
    /// The bytes that were read.
    pub(crate) bytes: u64,
}

impl BadData {
    /// The bad ranges; `None` when there may be more than are kept.
    pub(crate) fn all_ranges(&self) -> Option<Vec<Range<u64>>> {
        let ranges = self.ranges.iter().map(|(range, _)| range.clone()).collect();
        (self.ranges.len() < MOST_BAD).then_some(ranges)
    }

    /// The bad ranges that have bytes of `range`.
    pub(super) fn within(&self, range: &Range<u64>) -> impl Iterator<Item = (&Range<u64>, &str)> {
        let end = range.end.max(range.start);
        let first = self.ranges.partition_point(|(bad, _)| bad.end <= range.start);
        let rest = self.ranges.get(first..).unwrap_or_default().iter();
        let own = rest.take_while(move |(bad, _)| bad.start < end);
        own.map(|(bad, problem)| (bad, problem.as_str()))
    }

    fn add(&mut self, range: Range<u64>, problem: String) {
        if let Some((last, _)) = self.ranges.last_mut()
            && last.end == range.start
        {
            last.end = range.end;
        } else if self.ranges.len() < MOST_BAD {
            self.ranges.push((range, problem));
        }
    }
}

/// Reads all data that `checksums` has checksums of.
///
/// # Errors
/// When the caller has ended the check.
pub(super) fn bad_data(volume: &CheckedVolume<'_>, checksums: TreeRoot) -> Result<BadData> {
    let slices = slices(volume);
    let found = Mutex::new(BadData::default());
    cores::for_each(slices.len(), &|index| {
        let Some(slice) = slices.get(index) else { return };
        let mut own = BadData::default();
        SliceReader::new(volume).read(checksums, slice, &mut own);
        let mut found = found.lock();
        found.bytes += own.bytes;
        let room = MOST_BAD.saturating_sub(found.ranges.len());
        found.ranges.extend(own.ranges.into_iter().take(room));
    });
    volume.require_going_on()?;
    let mut found = found.into_inner();
    found.ranges.sort_unstable_by_key(|(range, _)| range.start);
    Ok(found)
}

/// Reads the data of `range` that `checksums` has checksums of.
pub(crate) fn bad_data_in(
    volume: &CheckedVolume<'_>,
    checksums: TreeRoot,
    range: &Range<u64>,
) -> BadData {
    let mut bad = BadData::default();
    SliceReader::new(volume).read(checksums, range, &mut bad);
    bad
}

/// The parts of the chunks for data.
fn slices(volume: &CheckedVolume<'_>) -> Vec<Range<u64>> {
    let chunks: Vec<_> = volume.storage.chunks().filter(|chunk| chunk.flags.has_data()).collect();
    let all = chunks.iter().fold(0u64, |all, chunk| all.saturating_add(chunk.length));
    let step = SLICE_BYTES.max((all / MOST_SLICES).next_multiple_of(READ_BYTES));
    let mut slices = Vec::new();
    for chunk in &chunks {
        let (mut at, end) = (chunk.start.0, chunk.end().0);
        while at < end {
            let slice_end = at.saturating_add(step).min(end);
            slices.push(at..slice_end);
            at = slice_end;
        }
    }
    slices
}

/// Data that is read at once.
#[derive(Default)]
struct ChecksummedPiece {
    start: u64,
    /// The checksums of its sectors.
    sums: Vec<u8>,
}

/// Reads the data of a slice, in pieces.
struct SliceReader<'v> {
    volume: &'v CheckedVolume<'v>,
    sector: u64,
    sum_len: usize,
    buf: Vec<u8>,
    /// The pieces that the devices were told of.
    ahead: VecDeque<ChecksummedPiece>,
}

impl<'v> SliceReader<'v> {
    fn new(volume: &'v CheckedVolume<'v>) -> Self {
        let sum_len = volume.superblock().checksum.len();
        let sector = volume.sector_size();
        Self { volume, sector, sum_len, buf: Vec::new(), ahead: VecDeque::new() }
    }

    fn read(&mut self, checksums: TreeRoot, slice: &Range<u64>, bad: &mut BadData) {
        let sum_len = self.sum_len;
        let most = usize::try_from(READ_BYTES / self.sector).unwrap_or(1).max(1) * sum_len;
        let mut stream = checksums::stream(self.volume, checksums, slice);
        let mut piece = ChecksummedPiece::default();
        while let Some((key, data)) = stream.item() {
            let is_checksums =
                key.objectid == objectid::EXTENT_CSUM && key.item_type == ItemType::EXTENT_CSUM;
            let skipped = slice.start.saturating_sub(key.offset).div_ceil(self.sector);
            let mut at = key.offset.saturating_add(skipped * self.sector);
            let skipped = usize::try_from(skipped).unwrap_or(usize::MAX).saturating_mul(sum_len);
            let mut sums = data.get(skipped..).filter(|_| is_checksums).unwrap_or_default();
            let left = slice.end.saturating_sub(at).div_ceil(self.sector);
            let left = usize::try_from(left).unwrap_or(usize::MAX).saturating_mul(sum_len);
            sums = sums.get(..left).unwrap_or(sums);
            while sums.len() >= sum_len {
                if piece.sums.len() >= most || self.end(&piece) != at {
                    self.announce(std::mem::take(&mut piece), bad);
                    piece.start = at;
                }
                let count = sums.len().min(most - piece.sums.len()) / sum_len;
                let (these, rest) = sums.split_at(count * sum_len);
                piece.sums.extend_from_slice(these);
                sums = rest;
                at = at.saturating_add(count as u64 * self.sector);
            }
            stream.advance();
            if self.volume.is_over() {
                return;
            }
        }
        self.announce(piece, bad);
        while let Some(piece) = self.ahead.pop_front() {
            self.read_piece(&piece, bad);
        }
    }

    /// The end of a piece.
    fn end(&self, piece: &ChecksummedPiece) -> u64 {
        let count = piece.sums.len() / self.sum_len;
        piece.start.saturating_add(count as u64 * self.sector)
    }

    /// Tells the devices of a piece, and reads an earlier one if they know of enough.
    fn announce(&mut self, piece: ChecksummedPiece, bad: &mut BadData) {
        if piece.sums.is_empty() {
            return;
        }
        let len = self.end(&piece) - piece.start;
        self.volume.storage.prefetch_copies(self.volume, Logical(piece.start), len);
        self.ahead.push_back(piece);
        if self.ahead.len() > PIECES_AHEAD
            && let Some(piece) = self.ahead.pop_front()
        {
            self.read_piece(&piece, bad);
        }
    }

    fn read_piece(&mut self, piece: &ChecksummedPiece, bad: &mut BadData) {
        let len = self.end(piece) - piece.start;
        let Ok(bytes) = usize::try_from(len) else { return };
        if self.buf.len() < bytes {
            self.buf.resize(bytes, 0);
        }
        let volume = self.volume;
        let buf = self.buf.get_mut(..bytes).unwrap_or_default();
        let start = Logical(piece.start);
        if volume.storage.has_copies(volume, start, len) {
            self.read_copies(piece, bytes, bad);
        } else if volume.storage.read_data(volume, start, buf, Some(&piece.sums)).is_err() {
            let sector = usize::try_from(self.sector).unwrap_or(usize::MAX);
            let mut at = piece.start;
            for (buf, sum) in buf.chunks_mut(sector).zip(piece.sums.chunks(self.sum_len)) {
                let end = at.saturating_add(self.sector);
                if let Err(error) = volume.storage.find_sector(volume, Logical(at), buf, Some(sum))
                {
                    bad.add(at..end, problem_of(&error));
                }
                at = end;
            }
        }
        bad.bytes += len;
        volume.progress(len);
    }

    /// Reads all copies of a piece, `bytes` long.
    fn read_copies(&mut self, piece: &ChecksummedPiece, bytes: usize, bad: &mut BadData) {
        let (volume, start) = (self.volume, Logical(piece.start));
        let buf = self.buf.get_mut(..bytes).unwrap_or_default();
        let verified =
            volume.storage.verify_copies(volume, start, (buf, &piece.sums), &mut |sectors| {
                let BadSectors { logical, len_bytes, source, problem } = sectors;
                let place = BtrfsFindingPlace::Logical(logical);
                let problem = format!(
                    "{len_bytes} bytes of a copy of data ({source}): {problem}; another one is \
                     good, and a scrub repairs it"
                );
                volume.findings.add(BtrfsFindingCode::BadCopy, place, problem);
            });
        let lost = match verified {
            Ok(lost) => lost,
            Err(error) => {
                return bad.add(start.0..start.0 + bytes as u64, problem_of(&error));
            }
        };
        let sector = usize::try_from(self.sector).unwrap_or(usize::MAX);
        for offset in lost {
            let at = Logical(start.0 + offset);
            let number = usize::try_from(offset / self.sector).unwrap_or(usize::MAX);
            let sum = piece.sums.chunks(self.sum_len).nth(number);
            let Some(buf) = self.buf.get_mut(..sector) else { return };
            if let Err(error) = volume.storage.find_sector(volume, at, buf, sum) {
                bad.add(at.0..at.0 + self.sector, problem_of(&error));
            }
        }
    }
}

/// What is wrong with a sector.
fn problem_of(error: &Error) -> String {
    match error {
        Error::Corrupt(corrupt) => corrupt.problem.clone(),
        other => other.to_string(),
    }
}

impl StorageTrees for CheckedVolume<'_> {
    fn recorded_segment(
        &self,
        mapped: &MappedChunk,
        logical: Logical,
        len: u64,
    ) -> Result<Option<ReadSegment>> {
        let has_tree = self.superblock().incompat.has(Incompat::RAID_STRIPE_TREE);
        if !has_tree || !mapped.chunk.flags.is_in_stripe_tree() {
            return Ok(None);
        }
        let tree = *self.stripe_tree.get_or_init(|| self.tree(TreeId::RAID_STRIPE));
        let tree = tree.ok_or_else(|| {
            Error::corrupt(Structure::RootTree, "there is no RAID stripe tree".to_owned())
        })?;
        recorded_segment(self, tree, mapped, logical, len).map(Some)
    }

    /// The check does not compare the blocks of a member with those of others: such a member
    /// counts as outdated.
    fn has_newest_commit(&self, _index: usize) -> Result<bool> {
        Ok(false)
    }
}
