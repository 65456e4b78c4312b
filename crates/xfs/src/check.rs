//! The check of a volume: everything that its structures say about each other.
//!
//! A check stands on what reads superblock, log, buffers, trees, groups and inodes, and not on an
//! open volume, so it works on one that does not open. It writes nothing. A log that is not empty
//! is replayed in memory first, as opening does; if that fails, that is a finding, and the check
//! goes on without it.
//!
//! ```text
//! groups   each on its own: headers, trees of inodes
//! inodes   in passes over all of them, each for a range of groups: forks, directories, attributes
//! space    at the end of a pass, for the groups of its range: trees of free space, free list,
//!          owners of all blocks, links
//! ```
//!
//! All of it runs on all cores. Memory is bounded by these, besides the cache of blocks:
//!
//! | what | bytes |
//! |---|---|
//! | chunks of inodes, all the time | 16 for 64 inodes, 4 for a block of a tree of them |
//! | links of the inodes of the range ([`tally`]) | 16 for an inode |
//! | mappings of files into the range ([`space`]) | 24 for an extent |
//! | the same and free space while a group is compared | 32 for an extent |
//! | records of a group that is compared | 8 to 24 for each |
//! | names of a directory with one hash, on each core | 30 for each |
//!
//! A range has as many groups as 256 MiB of links and 256 MiB of mappings have room for, but at
//! least one. A volume of 16 million inodes and 11 million extents needs one pass.

mod attributes;
mod directory;
mod duplicates;
mod finding;
mod group;
mod hashes;
mod inode;
mod space;
mod tally;
#[cfg(test)]
mod tests;
mod tree;
mod whole;

use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_kit::cores;
use offshoot_kit::sync::Mutex;
use offshoot_kit::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use offshoot_vfs::{Code, Error, Result};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::record::XfsInodeChunk;
use offshoot_xfs_format::{AgNumber, Lsn, XfsGeometry};

use crate::options::XfsOptions;
use crate::volume::{self as opening, OpenedXfs, XfsLogState};
use finding::Findings;
pub use finding::{XfsFinding, XfsFindingCode, XfsFindingPlace};
use group::{GroupCounts, GroupInodes, SummedCounts};
use inode::{InodePass, KnownParts};
use space::SpaceGather;
use tally::LinkTally;
use whole::VolumeCheck;

/// What a check found.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct XfsCheckResult {
    /// The first 10,000 findings, by code and place.
    pub findings: Vec<XfsFinding>,
    /// Whether there are more.
    pub are_more: bool,
    /// What the log held before the check.
    pub log: XfsLogState,
    /// The inodes that are in use.
    pub inodes: u64,
    /// The passes over all inodes.
    pub passes: u32,
}

/// How much a pass may hold.
#[derive(Clone, Copy, Debug)]
struct PassBudget {
    inodes: usize,
    runs: usize,
}

impl PassBudget {
    /// That of a check.
    const WHOLE: Self = Self { inodes: LinkTally::MOST_INODES, runs: SpaceGather::MOST_RUNS };
}

/// The groups of a volume of 1 EiB.
const MOST_GROUPS: u32 = 1 << 20;

/// The chunks that a thread checks at a time.
const CHUNKS_A_TURN: usize = 16;

/// Checks the volume that begins with the first byte of `device`.
///
/// # Errors
/// As for [`XfsVolume::open`](crate::XfsVolume::open), but for a damaged log or superblock, which
/// are findings.
pub fn check_xfs(device: &Arc<dyn BlockDevice>, options: &XfsOptions) -> Result<XfsCheckResult> {
    check_within(device, options, PassBudget::WHOLE)
}

fn check_within(
    device: &Arc<dyn BlockDevice>,
    options: &XfsOptions,
    budget: PassBudget,
) -> Result<XfsCheckResult> {
    let findings = Findings::default();
    let Some(opened) = open(device, options, &findings)? else {
        let (findings, are_more) = findings.into_list();
        let log = XfsLogState::Unreadable("the superblock is damaged".to_owned());
        return Ok(XfsCheckResult { findings, are_more, log, inodes: 0, passes: 0 });
    };
    let check = VolumeCheck::of(device, &opened, &findings);
    let (inodes, passes) = check_all(&check, opened.log == XfsLogState::Empty, budget);
    let in_use = |chunk: &XfsInodeChunk| u64::from(chunk.in_use().count_ones());
    let inodes = inodes.iter().flat_map(|group| &group.chunks).map(in_use).sum();
    let (findings, are_more) = findings.into_list();
    Ok(XfsCheckResult { findings, are_more, log: opened.log, inodes, passes })
}

/// Checks everything. Returns the inodes of the groups, and the number of passes over them.
fn check_all(
    check: &VolumeCheck<'_>,
    is_log_empty: bool,
    budget: PassBudget,
) -> (Vec<GroupInodes>, u32) {
    check.check_superblocks();
    let counts = SummedCounts::new();
    let inodes = check_groups(check, &counts);
    let passes = check_inodes(check, &inodes, budget, &counts);
    // The log does not always bring the counters of the superblock up to date.
    if let Some(counts) = counts.into_sum().filter(|_| is_log_empty && check.has_all_groups()) {
        check.check_counters(&counts);
    }
    (inodes, passes)
}

/// The newest change of all that can be read of the volume on `device`, whose log is ignored.
pub(crate) fn newest_lsn(device: &Arc<dyn BlockDevice>, options: &XfsOptions) -> Result<Lsn> {
    let opened = opening::open(device.clone(), options)?;
    let findings = Findings::default();
    let check = VolumeCheck::of(device, &opened, &findings);
    check_all(&check, false, PassBudget::WHOLE);
    Ok(Lsn(check.newest.load(Ordering::Relaxed)))
}

impl<'a> VolumeCheck<'a> {
    fn of(device: &Arc<dyn BlockDevice>, opened: &'a OpenedXfs, findings: &'a Findings) -> Self {
        Self {
            buffers: &opened.buffers,
            superblock: &opened.superblock,
            head: opened.head,
            newest: AtomicU64::new(0),
            findings,
            group_count: known_groups(device, opened.buffers.geometry(), findings),
        }
    }
}

/// The groups that are checked: those on the device, and not more than any volume needs.
fn known_groups(device: &Arc<dyn BlockDevice>, geometry: &XfsGeometry, findings: &Findings) -> u32 {
    let group_bytes = u64::from(geometry.ag_blocks) << geometry.block_log;
    let on_device = device.size_bytes().div_ceil(group_bytes);
    let on_device = u32::try_from(on_device).unwrap_or(u32::MAX);
    let known = geometry.ag_count.min(on_device).min(MOST_GROUPS);
    if known < geometry.ag_count {
        let problem = format!("groups from {known} on are not checked");
        findings.add(XfsFindingCode::NotRead, XfsFindingPlace::Volume, problem);
    }
    known
}

/// Opens the volume, if need be without its log. `None` when it has no superblock.
fn open(
    device: &Arc<dyn BlockDevice>,
    options: &XfsOptions,
    findings: &Findings,
) -> Result<Option<OpenedXfs>> {
    let error = match opening::open(device.clone(), options) {
        Ok(opened) => {
            if !opened.is_superblock_first {
                let problem = "it is damaged; that of another group is used";
                findings.add(XfsFindingCode::Superblock, XfsFindingPlace::Volume, problem);
            }
            return Ok(Some(opened));
        }
        Err(error) => error,
    };
    if !matches!(error, Error::Corrupt(_)) {
        return Err(error);
    }
    if error.code() == Code::Superblock {
        findings.add_error(XfsFindingCode::Superblock, XfsFindingPlace::Volume, &error);
        return Ok(None);
    }
    findings.add_error(XfsFindingCode::Log, XfsFindingPlace::Volume, &error);
    let options = XfsOptions { is_log_ignored: true, ..options.clone() };
    opening::open(device.clone(), &options).map(Some)
}

/// Checks the inode trees of all groups. Returns their inodes.
fn check_groups(check: &VolumeCheck<'_>, counts: &SummedCounts) -> Vec<GroupInodes> {
    let groups = check.groups().count();
    let found: Vec<_> = (0..groups).map(|_| Mutex::new(GroupInodes::UNKNOWN)).collect();
    cores::for_each(groups, &|index| {
        let ag = AgNumber(u32::try_from(index).unwrap_or(u32::MAX));
        let Some(headers) = check.headers(ag) else { return counts.add(None) };
        let mut of_group = GroupCounts::default();
        let inodes = check.check_inode_trees(ag, &headers, &mut of_group);
        counts.add(inodes.is_whole().then_some(&of_group));
        if let Some(slot) = found.get(index) {
            *slot.lock() = inodes;
        }
    });
    found.into_iter().map(Mutex::into_inner).collect()
}

/// Checks all inodes, and the space and the links of all groups. Returns the number of passes.
fn check_inodes(
    check: &VolumeCheck<'_>,
    inodes: &[GroupInodes],
    budget: PassBudget,
    counts: &SummedCounts,
) -> u32 {
    let mut turns = Vec::new();
    for (ag, group) in check.groups().zip(inodes) {
        turns.extend(group.chunks.chunks(CHUNKS_A_TURN).map(|chunks| (ag, chunks)));
    }
    let are_chunks_known = check.has_all_groups() && inodes.iter().all(GroupInodes::is_whole);
    let known = KnownParts {
        mappings: AtomicBool::new(are_chunks_known),
        links: AtomicBool::new(are_chunks_known),
    };
    let (mut first, mut passes) = (0, 0);
    while (first as usize) < inodes.len() {
        let tally = LinkTally::new(inodes, first as usize, budget.inodes);
        let gather = SpaceGather::new(first, tally.end(), budget.runs);
        let without_links: Vec<_> = inodes.iter().map(|_| AtomicU64::new(0)).collect();
        let pass = InodePass {
            check,
            gather: &gather,
            tally: &tally,
            without_links: &without_links,
            known: &known,
            blocks_left: AtomicU64::new(check.geometry().blocks),
        };
        cores::for_each(turns.len(), &|turn| {
            if let Some((ag, chunks)) = turns.get(turn) {
                chunks.iter().for_each(|chunk| pass.chunk(*ag, chunk));
            }
        });
        if passes == 0 {
            check_unlinked(check, inodes, &without_links);
        }
        let end = gather.end().max(first + 1);
        cores::for_each((end - first) as usize, &|index| {
            let ag = AgNumber(first + u32::try_from(index).unwrap_or(0));
            if let Some(inodes) = inodes.get(ag.0 as usize) {
                finish_group(&pass, ag, inodes, counts);
            }
        });
        passes += 1;
        first = end;
    }
    passes
}

/// Checks the space and the links of a group when all inodes were visited.
fn finish_group(pass: &InodePass<'_>, ag: AgNumber, inodes: &GroupInodes, counts: &SummedCounts) {
    let check = pass.check;
    let has_parents = check.geometry().layout.contains(XfsLayout::PARENTS);
    if pass.known.links.load(Ordering::Relaxed) {
        pass.tally.check(check, ag, has_parents);
    }
    let Some(headers) = check.headers(ag) else { return };
    let mut of_group = GroupCounts::default();
    let mut space = check.check_free_space(ag, &headers, &mut of_group);
    counts.add(space.is_whole.then_some(&of_group));
    check.push_inodes(&mut space.owned, inodes);
    let are_mappings_known = pass.known.mappings.load(Ordering::Relaxed);
    check.check_space(ag, space, pass.gather.take(ag), are_mappings_known);
}

/// Compares the lists of unlinked inodes with the inodes that no directory has.
fn check_unlinked(check: &VolumeCheck<'_>, inodes: &[GroupInodes], without_links: &[AtomicU64]) {
    cores::for_each(inodes.len(), &|index| {
        let ag = AgNumber(u32::try_from(index).unwrap_or(u32::MAX));
        let (Some(inodes), Some(found)) = (inodes.get(index), without_links.get(index)) else {
            return;
        };
        let Some(headers) = check.headers(ag).filter(|_| inodes.is_whole()) else { return };
        let listed = check.check_unlinked(ag, &headers.agi, inodes);
        let found = found.load(Ordering::Relaxed);
        if listed != found {
            let problem = format!("{found} inodes have no links, {listed} are listed");
            check.findings.add(XfsFindingCode::Unlinked, ag, problem);
        }
    });
}
