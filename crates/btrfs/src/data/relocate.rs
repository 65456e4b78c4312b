//! Copying the bytes of extents to other addresses.
//!
//! Bytes stay as they are stored: compressed data is not decompressed. What has checksums is
//! verified by them when it is read, so a bad copy is never spread.

use std::ops::Range;
use std::sync::Arc;

use offshoot_btrfs_format::Logical;
use offshoot_vfs::Result;

use super::checksums::{insert_sums, stored_sums};
use super::store::{DataChecksums, Sectors, write_places};
use super::{AlignedBytes, index};
use crate::transaction::{Base, DataMove, TransactionHandle};

/// The most bytes that are read and written at once.
const PIECE_BYTES: u64 = 4 << 20;

/// The checksums of consecutive sectors, with the address of the first one.
pub(crate) type MovedSums = Vec<(Logical, Vec<u8>)>;

/// Copies the data of `moves`, which ascend, to their new places. Nothing refers to these yet.
/// Returns the checksums for the new places.
///
/// # Errors
/// When data cannot be read, its checksum is wrong, or no copy could be written.
pub(crate) fn copy_extents(volume: &Base, moves: &[DataMove]) -> Result<MovedSums> {
    let mut sums = Vec::new();
    let written: Vec<_> = moves.iter().filter(|one| one.is_written).copied().collect();
    let follows = |one: &DataMove, next: &DataMove| {
        let ends = [one.from, one.to].map(|at| at.0 + one.len);
        ends == [next.from.0, next.to.0]
    };
    for run in written.chunk_by(follows) {
        let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
        let from = first.from.0..last.from.0 + last.len;
        copy_run(volume, from, first.to, &mut sums)?;
    }
    Ok(sums)
}

/// Stores the checksums for the new places.
pub(crate) fn store_moved_sums(handle: &TransactionHandle<'_>, sums: &MovedSums) -> Result<()> {
    sums.iter().try_for_each(|(at, sums)| insert_sums(handle, *at, sums))
}

/// Copies `from` to the address `to`.
fn copy_run(volume: &Base, from: Range<u64>, to: Logical, sums: &mut MovedSums) -> Result<()> {
    let mut at = from.start;
    while at < from.end {
        let piece = at..from.end.min(at + PIECE_BYTES);
        let to = Logical(to.0 + (at - from.start));
        copy_piece(volume, &piece, to, sums)?;
        at = piece.end;
    }
    Ok(())
}

fn copy_piece(volume: &Base, from: &Range<u64>, to: Logical, moved: &mut MovedSums) -> Result<()> {
    let superblock = volume.superblock();
    let (sector, sum_len) = (u64::from(superblock.sector_size), superblock.checksum.len());
    let mut bytes = vec![0; index(from.end - from.start)];
    let stored = stored_sums(volume, from)?;
    let mut rest = &mut bytes[..];
    let mut at = from.start;
    let mut are_all_summed = true;
    for (start, sums) in stored {
        let (before, behind) = rest.split_at_mut(index(start.saturating_sub(at)));
        if !before.is_empty() {
            are_all_summed = false;
            volume.read_data(Logical(at), before, None)?;
        }
        let len = (sums.len() / sum_len) as u64 * sector;
        let (own, behind) = behind.split_at_mut(index(len));
        volume.read_data(Logical(start), own, Some(&sums))?;
        (rest, at) = (behind, start + len);
        let start = Logical(to.0 + (start - from.start));
        match moved.last_mut() {
            Some((last, joined))
                if last.0 + (joined.len() / sum_len) as u64 * sector == start.0 =>
            {
                joined.extend_from_slice(&sums);
            }
            _ => moved.push((start, sums)),
        }
    }
    if !rest.is_empty() {
        are_all_summed = false;
        volume.read_data(Logical(at), rest, None)?;
    }
    let runs = [(0, Arc::new(AlignedBytes::of(&[&bytes])))];
    let sums = if are_all_summed { DataChecksums::Has } else { DataChecksums::HasNone };
    write_places(volume, to, Sectors::new(&runs), sums)
}
