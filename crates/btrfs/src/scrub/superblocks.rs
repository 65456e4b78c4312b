//! Checks the superblocks: the primary and the copies on each member.
//!
//! All superblocks of a member must have the generation of the last commit. There is one exception:
//! after a power cut between the superblocks of two members, and until the next write, those of a
//! member may all be of the commit before. The first look takes no lock. A wrong superblock is
//! checked again while no thread writes superblocks, and overwritten with the contents of another
//! one on the same member.

use std::io::IoSlice;

use offshoot_btrfs_format::encode::sealed_superblock;
use offshoot_btrfs_format::superblock::{
    SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock, is_kept_superblock,
};
use offshoot_btrfs_format::{Generation, Physical};
use offshoot_vfs::{Error, Result};
use uuid::Uuid;

use super::look::ScrubBuffer;
use super::{ScrubFinding, ScrubOutcome, ScrubRun};

/// The offset of a superblock, and the superblock or the problem with it.
type ReadSuperblock = (u64, Result<Superblock, String>);

/// Checks the superblocks of all members, and repairs them.
///
/// # Errors
/// `EROFS` when the volume has stopped writing; the error of a device that fails to flush.
pub(super) fn scrub(run: &ScrubRun<'_>) -> Result<()> {
    let mut pages = ScrubBuffer::default();
    for (index, member) in run.volume.members().iter().enumerate() {
        if member.device.is_none() || member.is_seed || member.has_failed() || run.is_over() {
            continue;
        }
        if superblocks(run, index, &mut pages).iter().all(|(_, found)| found.is_ok()) {
            continue;
        }
        let again = || Ok(mend(run, index, &mut pages));
        for finding in run.volume.with_superblocks_at_rest(again)? {
            run.found(&finding);
        }
    }
    Ok(())
}

/// All superblocks of a member.
fn superblocks(run: &ScrubRun<'_>, index: usize, pages: &mut ScrubBuffer) -> Vec<ReadSuperblock> {
    let member = &run.volume.members()[index];
    let newest = match run.volume.live_part() {
        Some(live) => Generation(live.last_superblock().generation.get()),
        None => run.volume.superblock().generation,
    };
    // A member that was behind when the volume was opened catches up with the first commit.
    let oldest = Generation(newest.0 - member.missed().min(newest.0));
    let is_there = |offset: &u64| is_kept_superblock(*offset, member.total_bytes());
    let mut read = |offset: u64| -> Result<Superblock, String> {
        let buf = pages.of(SUPERBLOCK_SIZE);
        let read = run.volume.storage.read_medium(index, Physical(offset), buf);
        read.map_err(|error| error.to_string())?;
        let found =
            Superblock::parse(buf, offset).map_err(|malformed| malformed.problem.into_owned())?;
        if Uuid::from_bytes(found.item.dev_item.uuid) != member.uuid {
            return Err("it is of another device".to_owned());
        }
        Ok(found)
    };
    let offsets = SUPERBLOCK_OFFSETS.into_iter().filter(is_there);
    let mut all: Vec<ReadSuperblock> = offsets.map(|offset| (offset, read(offset))).collect();
    let generations = all.iter().filter_map(|(_, found)| Some(found.as_ref().ok()?.generation));
    let current = generations.filter(|generation| (oldest..=newest).contains(generation));
    let expected = current.max().unwrap_or(newest);
    for (_, found) in &mut all {
        if let Ok(Superblock { generation, .. }) = found
            && *generation != expected
        {
            *found = Err(format!("generation {expected} expected, {generation} found"));
        }
    }
    all
}

/// Checks and repairs the superblocks of a member while no other thread writes superblocks.
fn mend(run: &ScrubRun<'_>, index: usize, pages: &mut ScrubBuffer) -> Vec<ScrubFinding> {
    let (volume, member) = (run.volume, &run.volume.members()[index]);
    let all = superblocks(run, index, pages);
    let good = all.iter().find_map(|(_, found)| found.as_ref().ok());
    let mut findings = Vec::new();
    for (offset, found) in &all {
        let Err(problem) = found else { continue };
        let outcome = match good {
            None => ScrubOutcome::Uncorrectable,
            Some(_) if run.options.is_read_only => ScrubOutcome::NotWritten,
            Some(good) => {
                let checksum = volume.superblock().checksum;
                let bytes = sealed_superblock(&good.item, Physical(*offset), checksum);
                let written =
                    volume.storage.write_member(index, *offset, &[IoSlice::new(&bytes[..])]);
                let buf = pages.of(SUPERBLOCK_SIZE);
                let is_there = |()| -> Result<(), Error> {
                    volume.storage.read_medium(index, Physical(*offset), buf)
                };
                if written.and_then(is_there).is_ok() && buf[..] == bytes[..] {
                    ScrubOutcome::Corrected
                } else {
                    ScrubOutcome::Uncorrectable
                }
            }
        };
        run.count_superblock(outcome);
        findings.push(ScrubFinding {
            structure: "superblock",
            logical: None,
            len_bytes: SUPERBLOCK_SIZE as u64,
            device: member.name(),
            physical: Physical(*offset),
            problem: problem.clone(),
            outcome,
            owners: Vec::new(),
        });
    }
    findings
}
