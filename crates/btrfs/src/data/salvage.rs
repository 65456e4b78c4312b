//! Reading around bad data: what no copy gives becomes zeros, and is reported.
//!
//! A piece is read as a whole first. When that fails, a plain one is read sector by sector, so only
//! the bad sectors become zeros. A compressed one cannot be decoded without all of its sectors, so
//! it becomes zeros as a whole. Data whose checksum cannot be read is taken as it is. A range
//! without extents is a hole, unless the items that say so may be in a block that cannot be read.

use std::ops::Range;

use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::{Error, Result};

use super::checksums::checksums;
use super::pieces::{PieceSource, ReadPiece, extent_len};
use super::scratch::with_scratch;
use super::sink::Sink;
use super::{FileData, FileVolume, give, index, tree_of};
use crate::report::VolumeReport;
use crate::storage::malformed;
use crate::tree::Cursor;

/// Gives the data in `range` to `sink`, with zeros for what cannot be read.
pub(super) fn read_salvaged(
    volume: &impl FileVolume,
    data: &FileData,
    range: Range<u64>,
    sink: &mut dyn Sink,
) -> Result<()> {
    let mut pieces = data.pieces(volume, range.clone())?;
    let mut batch = Vec::new();
    let mut at = range.start;
    loop {
        if let Err(error) = pieces.fill(&mut batch) {
            require_damage(&error)?;
            report_zeros(volume, data, at..range.end, &error.to_string());
            return Ok(());
        }
        if batch.is_empty() {
            break;
        }
        for piece in batch.drain(..) {
            report_gap(volume, data, at..piece.start)?;
            at = piece.end;
            read_piece(volume, data, &piece, sink)?;
        }
    }
    report_gap(volume, data, at..range.end)
}

/// Passes an error on that says nothing about damage.
fn require_damage(error: &Error) -> Result<()> {
    match error {
        Error::Corrupt(_) | Error::Io { .. } => Ok(()),
        other => Err(Error::posix(other.errno(), other.to_string())),
    }
}

/// Reports a range without extents whose items may be lost.
fn report_gap(volume: &impl FileVolume, data: &FileData, gap: Range<u64>) -> Result<()> {
    if gap.is_empty() {
        return Ok(());
    }
    let Some(around) = &volume.base().around else { return Ok(()) };
    let key = |at| Key::new(data.file.ino, ItemType::EXTENT_DATA, at);
    // The item of a hole is at its beginning, and that of an extent may be before the gap.
    let lost = around.lost_between(TreeId(data.file.dev), key(gap.start), key(gap.end - 1));
    // Where something stands in for a lost node, most items are there.
    let is_lost = lost.iter().any(|items| items.found_blocks == 0)
        || !lost.is_empty() && lacks_extents(volume, data)?;
    if is_lost {
        report_zeros(volume, data, gap, "the items of its extents cannot be read");
    }
    Ok(())
}

/// Whether the extents of the file are less than its inode counts.
fn lacks_extents(volume: &impl FileVolume, data: &FileData) -> Result<bool> {
    let base = volume.base();
    let first = Key::new(data.file.ino, ItemType::EXTENT_DATA, 0);
    let mut cursor = Cursor::seek(base, tree_of(base, data.file)?, first)?;
    let mut sum = 0u64;
    while let Some((_, item)) = cursor.item_of(data.file.ino, ItemType::EXTENT_DATA) {
        let extent = FileExtent::parse(item).map_err(malformed)?;
        if !matches!(extent.body, FileExtentBody::Hole { .. }) {
            sum = sum.saturating_add(extent_len(&extent));
        }
        cursor.advance()?;
    }
    Ok(sum < data.inode.nbytes.get())
}

fn report_zeros(volume: &impl FileVolume, data: &FileData, range: Range<u64>, problem: &str) {
    if range.is_empty() {
        return;
    }
    volume.base().report(&VolumeReport::ReplacedData {
        file: data.file,
        offset: range.start,
        len: range.end - range.start,
        problem: problem.to_owned(),
    });
}

fn read_piece(
    volume: &impl FileVolume,
    data: &FileData,
    piece: &ReadPiece,
    sink: &mut dyn Sink,
) -> Result<()> {
    let sector = u64::from(volume.base().superblock().sector_size);
    let (from, len) = piece.disk_range(sector).unwrap_or_default();
    with_scratch(index(len), |stored| {
        let mut reading = SectorReading::default();
        reading.read(volume, data, from, stored);
        if reading.has_unverified && reading.bad.is_empty() {
            volume.base().report(&VolumeReport::UnverifiedData {
                file: data.file,
                offset: piece.start,
                len: piece.end - piece.start,
            });
        }
        if matches!(piece.source, PieceSource::Plain { .. }) {
            for (bad, problem) in &reading.bad {
                // The first sector may begin before the piece, and the last one end behind it.
                let place = |logical: u64| {
                    let into = logical.saturating_sub(plain_start(piece).unwrap_or(from.0));
                    piece.start.saturating_add(into).min(piece.end)
                };
                report_zeros(volume, data, place(bad.start)..place(bad.end), problem);
            }
            return give(volume, piece, piece.stored(from, stored), sink);
        }
        let problem = if let Some((_, problem)) = reading.bad.first() {
            problem.clone()
        } else {
            let mut kept = KeptPiece::default();
            match give(volume, piece, piece.stored(from, stored), &mut kept) {
                Ok(()) => return sink.take(piece.start, &kept.bytes),
                Err(error) => {
                    require_damage(&error)?;
                    error.to_string()
                }
            }
        };
        report_zeros(volume, data, piece.start..piece.end, &problem);
        sink.take(piece.start, &vec![0; index(piece.end - piece.start)])
    })
}

/// The address of the first byte of a plain piece.
fn plain_start(piece: &ReadPiece) -> Option<u64> {
    match piece.source {
        PieceSource::Plain { logical } => Some(logical.0),
        _ => None,
    }
}

/// A decoded piece that reaches the caller only when it was decoded without an error.
#[derive(Default)]
struct KeptPiece {
    bytes: Vec<u8>,
}

impl Sink for KeptPiece {
    fn take(&mut self, _: u64, bytes: &[u8]) -> Result<()> {
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn room(&mut self, _: u64, _: usize) -> Option<&mut [u8]> {
        None
    }

    fn took(&mut self, _: usize) {}
}

/// How reading some sectors went.
#[derive(Default)]
struct SectorReading {
    /// The logical addresses that are zeros now, each with the first problem.
    bad: Vec<(Range<u64>, String)>,
    /// Whether some sector was taken without its checksum.
    has_unverified: bool,
}

impl SectorReading {
    /// Fills `buf` with the sectors from `from` on.
    fn read(&mut self, volume: &impl FileVolume, data: &FileData, from: Logical, buf: &mut [u8]) {
        if buf.is_empty() || super::read_verified(volume, data, from, buf).is_ok() {
            return;
        }
        let sector = volume.base().superblock().sector_size as usize;
        let mut at = from.0;
        for bytes in buf.chunks_mut(sector) {
            if let Err(error) = self.read_sector(volume, data, Logical(at), bytes) {
                bytes.fill(0);
                let end = at.saturating_add(bytes.len() as u64);
                match self.bad.last_mut() {
                    Some((bad, _)) if bad.end == at => bad.end = end,
                    _ => self.bad.push((at..end, error.to_string())),
                }
            }
            at = at.saturating_add(bytes.len() as u64);
        }
    }

    fn read_sector(
        &mut self,
        volume: &impl FileVolume,
        data: &FileData,
        at: Logical,
        bytes: &mut [u8],
    ) -> Result<()> {
        let base = volume.base();
        if !data.is_verified(volume) {
            return base.read_data(at, bytes, None);
        }
        let Ok(sums) = checksums(base, at, bytes.len() as u64) else {
            self.has_unverified = true;
            return base.read_data(at, bytes, None);
        };
        base.read_data(at, bytes, Some(&sums))
    }
}
