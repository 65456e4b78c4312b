//! The second look: finds the errors that remain while nothing can be freed, and repairs them.
//!
//! It holds the last commit ([`CommittedTrees`]). So space that this commit refers to is neither
//! freed nor reused, and data with checksums is not written in place. An error that it finds is a
//! real one, and the good contents that it writes belong there.

use std::io::IoSlice;

use offshoot_btrfs_format::chunk::{Chunk, Profile, STRIPE_LEN};
use offshoot_btrfs_format::{Logical, Physical};
use offshoot_vfs::Result;

use super::gather::{CommittedTrees, ScrubContent, ScrubPiece, ScrubbedBlock};
use super::look::ScrubBuffer;
use super::owners::ExtentOwners;
use super::{ScrubFinding, ScrubOutcome, ScrubRun};
use crate::storage::CopyPart;

/// The error in a sector, or in a whole block.
#[derive(Clone, Debug, PartialEq, Eq)]
enum SectorFault {
    /// It cannot be read.
    Read(String),
    /// The checksum of data differs.
    Sum,
    /// The tree block fails verification.
    Block(String),
}

impl SectorFault {
    fn problem(&self) -> String {
        match self {
            Self::Read(problem) | Self::Block(problem) => problem.clone(),
            Self::Sum => "the checksum differs".to_owned(),
        }
    }
}

/// A bad place. It is reported after the commit is released.
struct BadPart {
    part: CopyPart,
    structure: &'static str,
    fault: SectorFault,
    outcome: ScrubOutcome,
    owners: ExtentOwners,
}

/// A second look at one copy.
struct SecondLook<'r, 'v> {
    run: &'r ScrubRun<'v>,
    committed: &'r CommittedTrees<'v>,
    may_repair: bool,
    bad: Vec<BadPart>,
}

/// Looks again at copy `copy` of the unit `unit` of `chunk`, counts errors, and repairs them.
///
/// # Errors
/// When the trees cannot be read; `EROFS` when the volume has stopped writing.
pub(super) fn settle(
    run: &ScrubRun<'_>,
    chunk: &Chunk,
    unit: u64,
    copy: usize,
    pages: &mut ScrubBuffer,
) -> Result<()> {
    let start = chunk.start.0 + unit * STRIPE_LEN;
    let range = start..(start + STRIPE_LEN).min(chunk.end().0);
    let bad = {
        let committed = CommittedTrees::of(run.volume)?;
        let has_parity = matches!(chunk.profile, Profile::Raid5 | Profile::Raid6);
        let may_repair = !run.options.is_read_only && !has_parity;
        let mut settling = SecondLook { run, committed: &committed, may_repair, bad: Vec::new() };
        for piece in &committed.window(range.clone())?.pieces {
            let parts = run.volume.storage.copies_of(&piece.range)?;
            let own: Vec<_> = parts.into_iter().filter(|part| part.copy == copy).collect();
            match &piece.content {
                // A block belongs to the unit that it begins in.
                ScrubContent::Block(_) if piece.range.start < range.start => {}
                ScrubContent::Block(block) => settling.block(piece, *block, &own, pages),
                ScrubContent::Summed(_) | ScrubContent::Plain => {
                    own.iter().try_for_each(|part| settling.data(piece, part, pages))?;
                }
            }
        }
        settling.bad
    };
    for BadPart { part, structure, fault, outcome, owners } in bad {
        run.found(&ScrubFinding {
            structure,
            logical: Some(Logical(part.range.start)),
            len_bytes: part.range.end - part.range.start,
            device: run.volume.members()[part.member].name(),
            physical: part.physical,
            problem: fault.problem(),
            outcome,
            owners: owners.named(run.volume),
        });
    }
    Ok(())
}

impl SecondLook<'_, '_> {
    /// Checks a copy of a block, which has a part on each stripe that it touches.
    fn block(
        &mut self,
        piece: &ScrubPiece,
        block: ScrubbedBlock,
        parts: &[CopyPart],
        pages: &mut ScrubBuffer,
    ) {
        let volume = self.run.volume;
        let (logical, sector) = (Logical(piece.range.start), self.sector());
        let mut bytes = Vec::with_capacity(volume.superblock().node_size as usize);
        let (mut unreadable, mut fault) = (0, None);
        for part in parts {
            let buf = pages.of(len_of(part));
            if let Err(error) = volume.storage.read_medium(part.member, part.physical, buf) {
                let of_sector = |at: usize| Physical(part.physical.0 + at as u64);
                let sectors = (0..len_of(part)).step_by(sector).map(of_sector);
                let fails = |at: &Physical| {
                    volume.storage.read_medium(part.member, *at, &mut pages.of(sector)[..]).is_err()
                };
                unreadable += sectors.filter(fails).count() as u64;
                fault = Some(SectorFault::Read(error.to_string()));
            } else {
                bytes.extend_from_slice(buf);
            }
        }
        let is_whole = parts.iter().map(len_of).sum::<usize>() == piece_len(piece);
        if !is_whole {
            // A part of it is on a missing member.
            return;
        }
        let sectors = piece_len(piece).div_ceil(sector) as u64;
        let fault = match fault {
            Some(fault) => {
                // The read of the part failed, but now each sector can be read: the block still
                // counts as bad, with one sector.
                unreadable = unreadable.max(1);
                self.run.counts.lock().read_errors += unreadable;
                fault
            }
            None => match block.verify(volume, logical, &bytes) {
                Ok(()) => return,
                Err(malformed) => {
                    unreadable = sectors;
                    self.run.counts.lock().verify_errors += sectors;
                    SectorFault::Block(malformed.problem.into_owned())
                }
            },
        };
        let found =
            volume.storage.find_block(logical, |bytes| block.verify(volume, logical, bytes));
        let outcome = match found {
            Err(_) => ScrubOutcome::Uncorrectable,
            Ok(_) if !self.may_write(parts) => ScrubOutcome::NotWritten,
            Ok(good) => {
                let part_of = |part: &CopyPart| {
                    let from = usize::try_from(part.range.start - logical.0).expect("in a block");
                    &good[from..from + len_of(part)]
                };
                let mut written = parts.iter().map(|part| (part, part_of(part)));
                after(written.all(|(part, good)| self.write(part, good, pages)))
            }
        };
        self.run.count_outcome(outcome, unreadable);
        let is_told = outcome != ScrubOutcome::Corrected;
        let owners = if is_told { ExtentOwners::of_block(&block) } else { ExtentOwners::default() };
        let part = CopyPart { range: piece.range.clone(), ..parts[0].clone() };
        self.bad.push(BadPart { part, structure: "tree block", fault, outcome, owners });
    }

    /// Checks a part of a copy of data.
    fn data(&mut self, piece: &ScrubPiece, part: &CopyPart, pages: &mut ScrubBuffer) -> Result<()> {
        let (volume, sector) = (self.run.volume, self.sector());
        let mut bytes = vec![0; len_of(part)];
        let buf = pages.of(bytes.len());
        let read = volume.storage.read_medium(part.member, part.physical, buf);
        bytes.copy_from_slice(buf);
        let first_new = self.bad.len();
        for (number, bytes) in bytes.chunks_mut(sector).enumerate() {
            let into = (number * sector) as u64;
            let at = part.range.start + into;
            let own = CopyPart {
                physical: Physical(part.physical.0 + into),
                range: at..at + bytes.len() as u64,
                ..part.clone()
            };
            let again = if read.is_err() {
                let buf = pages.of(bytes.len());
                let read = volume.storage.read_medium(part.member, own.physical, buf);
                bytes.copy_from_slice(buf);
                read
            } else {
                Ok(())
            };
            let sum = piece.sum_of(volume, at);
            let fault = match again {
                Err(error) => SectorFault::Read(error.to_string()),
                Ok(()) if volume.storage.verify_sector(bytes, sum).is_err() => SectorFault::Sum,
                Ok(()) => continue,
            };
            {
                let mut counts = self.run.counts.lock();
                match fault {
                    SectorFault::Sum => counts.csum_errors += 1,
                    _ => counts.read_errors += 1,
                }
            }
            let outcome = self.mend(&own, sum, bytes, pages);
            self.run.count_outcome(outcome, 1);
            self.tell(first_new, piece, own, fault, outcome)?;
        }
        Ok(())
    }

    /// Repairs a bad sector of data, if possible. `bytes` is a buffer for the sector.
    fn mend(
        &self,
        part: &CopyPart,
        sum: Option<&[u8]>,
        bytes: &mut [u8],
        pages: &mut ScrubBuffer,
    ) -> ScrubOutcome {
        let volume = self.run.volume;
        if volume.storage.find_sector(&volume.base, Logical(part.range.start), bytes, sum).is_err()
        {
            return ScrubOutcome::Uncorrectable;
        }
        // On a volume that is open for writing, another thread may be writing data without a
        // checksum in place right now.
        let is_still = sum.is_some() || volume.live_part().is_none();
        if !is_still || !self.may_write(std::slice::from_ref(part)) {
            return ScrubOutcome::NotWritten;
        }
        after(self.write(part, bytes, pages))
    }

    /// Notes a bad sector of data. Joins it with the one before it if fault and outcome are the
    /// same.
    fn tell(
        &mut self,
        first_new: usize,
        piece: &ScrubPiece,
        part: CopyPart,
        fault: SectorFault,
        outcome: ScrubOutcome,
    ) -> Result<()> {
        if let Some(last) = self.bad[first_new..].last_mut()
            && last.part.range.end == part.range.start
            && last.outcome == outcome
            && std::mem::discriminant(&last.fault) == std::mem::discriminant(&fault)
        {
            last.part.range.end = part.range.end;
            return Ok(());
        }
        let is_told = outcome != ScrubOutcome::Corrected;
        let owners = if is_told {
            ExtentOwners::of_data(self.committed, piece.extent)?
        } else {
            ExtentOwners::default()
        };
        self.bad.push(BadPart { part, structure: "data", fault, outcome, owners });
        Ok(())
    }

    /// Whether these places may be overwritten. A member that missed commits, and that this scrub
    /// does not bring up to date, is not written: with new tree blocks on it, it would be taken for
    /// complete, and trusted for data without checksums. On a volume that is open for writing, such
    /// a member has caught up, or has failed.
    fn may_write(&self, parts: &[CopyPart]) -> bool {
        let volume = self.run.volume;
        let is_complete = |part: &CopyPart| {
            let member = &volume.members()[part.member];
            let is_behind = match volume.live_part() {
                Some(_) => member.has_failed(),
                None => member.is_stale() && !self.run.renewed.contains(&part.member),
            };
            !member.is_seed && !is_behind
        };
        self.may_repair && parts.iter().all(is_complete)
    }

    /// Writes the good contents, and reads them back. Returns whether they are there.
    fn write(&self, part: &CopyPart, good: &[u8], pages: &mut ScrubBuffer) -> bool {
        let volume = self.run.volume;
        let written =
            volume.storage.write_member(part.member, part.physical.0, &[IoSlice::new(good)]);
        let buf = pages.of(good.len());
        let is_there = |()| volume.storage.read_medium(part.member, part.physical, buf);
        written.and_then(is_there).is_ok() && *buf == *good
    }

    fn sector(&self) -> usize {
        self.run.volume.superblock().sector_size as usize
    }
}

/// The outcome for a place that was written.
pub(super) fn after(is_there: bool) -> ScrubOutcome {
    if is_there { ScrubOutcome::Corrected } else { ScrubOutcome::Uncorrectable }
}

fn len_of(part: &CopyPart) -> usize {
    usize::try_from(part.range.end - part.range.start).expect("no more than a unit")
}

fn piece_len(piece: &ScrubPiece) -> usize {
    usize::try_from(piece.range.end - piece.range.start).expect("no more than a unit")
}
