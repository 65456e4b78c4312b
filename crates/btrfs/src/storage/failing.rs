//! Members that fail: which write errors a volume survives, and what happens to the member.
//!
//! # Which errors the volume survives
//!
//! When a write or a barrier fails on one member, the volume continues to write as long as
//! redundancy covers the loss:
//!
//! | what fails on a member | every chunk can do without the member | some chunk cannot |
//! |---|---|---|
//! | a copy of a tree block, of a log or of a commit | the member has failed | the copy stays bad, if another one was written |
//! | a copy of data with checksums | the member has failed | the copy stays bad, if another one was written |
//! | a copy of data without checksums | the member has failed | all writing ends |
//! | a superblock, primary or copy | the member has failed | all writing ends |
//! | a barrier | the member has failed: nothing proves what it holds since the last barrier | all writing ends |
//!
//! The profile of a chunk says how many members it can do without. It always needs one good member:
//!
//! | profile | members that it can do without |
//! |---|---|
//! | single, DUP, RAID0 | none |
//! | RAID1, RAID1C3, RAID1C4 | all but one of those that it is on |
//! | RAID10 | one of each pair |
//!
//! For example, on two members with RAID1 for everything either member may fail; after that the
//! other one may not. With RAID1 for metadata and single for data, no member may fail: the volume
//! survives a tree block of which one copy was written, but not a barrier that fails. With DUP both
//! copies are on one member, so the volume survives one bad copy there too.
//!
//! A reader recognises a bad copy by its checksum, with one exception: a transaction that crashed
//! may have left a block of the same generation in that place, which looks valid. So the writer
//! looks at what is in the place, and if it finds such a block, all writing ends.
//!
//! # What happens to a member that has failed
//!
//! The volume writes nothing to it until it is opened again: no data, no block, no superblock, no
//! new chunk, except what was handed to it at once with the request that failed. As with a member
//! that missed commits, reads try it last, and never for data without a checksum. When the volume
//! is opened again, the member is one that missed commits. Then the volume leaves it out from the
//! beginning, until a scrub that has the volume for itself brings it up to date (`scrub/renew`).
//!
//! # How the failure is found after a crash
//!
//! The superblock of the member keeps its old generation. A generation that is one lower proves too
//! little, because a power cut between the superblocks of two members leaves the same on a member
//! that has everything (`newest`). So the next commit notes the failure in the chunk tree, in the
//! device item of the member: its field `generation` becomes the lowest generation that the
//! superblock of the member may have. Nothing else uses that field, and the kernel does not change
//! it. Two rules follow:
//!
//! 1. After a member has failed, a superblock is written only if its transaction notes the failure.
//!    A transaction that was finished before the failure is *postponed*: its blocks are written,
//!    and its changes become durable with the next transaction.
//! 2. Until such a superblock is written, nothing is acknowledged as durable: an fsync commits, and
//!    another commit follows that one.
//!
//! ```text
//!                                superblock of the others   of the member   its device item
//!   before                                              7               7                 0
//!   the barrier of 8 fails                              7               7                 0   8 is postponed
//!   the commit returns                                  9               7                 9
//! ```
//!
//! A power cut between the superblocks of the other members leaves some of those at 7, too. Their
//! device items say 0, so they are complete. The superblock of 9 remembers the roots of earlier
//! commits, and they show that 7 is the commit before 9.
//!
//! A member that fails between its barrier and its superblock has all of that commit. It may count
//! as complete until the next commit notes the failure.
//!
//! # Counters
//!
//! Errors are counted for each member as the kernel counts them, in the item `DEV_STATS` of the
//! device tree, which `btrfs device stats` shows. The next commit stores the counters
//! (`transaction/device_stats`).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use offshoot_btrfs_format::chunk::Profile;
use offshoot_vfs::{Errno, Error, Result};

use super::chunk_map::MappedChunk;
use super::mirrors::ReadUnderWay;
use super::{Member, Storage, StorageTrees};
use crate::report::VolumeReport;
use crate::shared::Padded;

/// The kinds of errors of a device that are counted, in the order of the counters in `DEV_STATS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceError {
    /// A write failed.
    Write,
    /// A read failed.
    Read,
    /// A barrier failed.
    Flush,
    /// The bytes that were read are not those that were written.
    Corruption,
}

impl DeviceError {
    /// The number of counters. The last one is for wrong generations, which this engine counts as
    /// corruption.
    pub(crate) const COUNTERS: usize = 5;

    fn index(self) -> usize {
        self as usize
    }
}

/// What happened to a member since the volume was opened.
#[derive(Debug, Default)]
pub(super) struct MemberCondition {
    /// Nothing is written to it any more.
    has_failed: AtomicBool,
    /// The chunk tree notes the failure, or need not: the volume saw it when it was opened.
    is_noted: AtomicBool,
    /// A copy could not be written, and the member did not fail because of that.
    has_bad_copies: AtomicBool,
    /// Whether a member that is one generation behind has what the newest commit wrote. Empty until
    /// a reader asks.
    has_newest: OnceLock<bool>,
    /// Errors that no commit has stored yet.
    errors: [AtomicU64; DeviceError::COUNTERS],
    /// A read failed since the volume was opened.
    has_bad_reads: AtomicBool,
    /// Reads that it has not answered yet. Each read changes it, and looks at `has_failed` as
    /// often.
    reading: Padded<AtomicUsize>,
}

impl MemberCondition {
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    /// Counts a read as under way until the result is dropped.
    pub(super) fn begin_read(&self) -> ReadUnderWay<'_> {
        ReadUnderWay::new(&self.reading)
    }

    pub(super) fn reads_under_way(&self) -> usize {
        self.reading.load(Ordering::Relaxed)
    }

    /// Whether a read failed since the volume was opened.
    pub(super) fn has_bad_reads(&self) -> bool {
        self.has_bad_reads.load(Ordering::Relaxed)
    }

    #[cfg(test)]
    pub(super) fn fail_reads(&self) {
        self.has_bad_reads.store(true, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(super) fn fail(&self) {
        self.has_failed.store(true, Ordering::Release);
    }

    pub(super) fn has_errors(&self) -> bool {
        self.errors.iter().any(|errors| errors.load(Ordering::Relaxed) > 0)
    }
}

/// How many failures of members the superblocks on the devices lead to.
#[derive(Debug, Default)]
pub(super) struct FailureCounts {
    /// How many members failed since the volume was opened.
    failed: u64,
    /// How many of these failures the running transaction or an earlier one notes.
    noted: u64,
    /// How many of these failures the superblocks on the devices lead to.
    shown: u64,
}

/// Which failures of members a superblock leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordedFailures {
    /// The failures that its own transaction notes: it is the superblock of a commit.
    WhatIsNoted,
    /// The failures that the last commit notes: its superblock is written once more, with a log.
    WhatIsShown,
}

/// A copy that was to be written to a member, and whether it was.
#[derive(Clone, Debug)]
pub(crate) struct WrittenCopy {
    /// The index of the member.
    pub(crate) member: usize,
    /// Which part of the whole it is. All copies of a part have the same value.
    pub(crate) part: (usize, Range<u64>),
    /// Whether it was written.
    pub(crate) is_written: bool,
}

impl Storage {
    /// How many commits a member is behind. A postponed transaction leaves out a generation. Then
    /// the roots of earlier commits in the superblock show that there was no commit between: with 7
    /// and 9, the member is one commit behind.
    fn commits_behind(&self, member: &Member) -> u64 {
        let (own, newest) = (member.generation().0, self.superblock.generation.0);
        let backups = self.superblock.item.super_roots.iter();
        let known: Vec<_> = backups.map(|backup| backup.tree_root_gen.get()).collect();
        let is_between = |generation: &u64| (own + 1..newest).contains(generation);
        let is_last_but_one = known.contains(&own) && !known.iter().any(is_between);
        if is_last_but_one && own < newest { 1 } else { member.missed() }
    }

    /// Whether the member `index` has all that the newest commit wrote: either its superblock says
    /// so, or a power cut left only the superblock one commit behind.
    ///
    /// # Errors
    /// When a block of the newest commit cannot be read.
    pub(crate) fn is_current(&self, trees: &impl StorageTrees, index: usize) -> Result<bool> {
        let member = &self.members()[index];
        match self.commits_behind(member) {
            0 => Ok(true),
            1 if !member.is_noted_as_failed() => {
                let known = &member.condition.has_newest;
                match known.get() {
                    Some(has_newest) => Ok(*has_newest),
                    None => {
                        trees.has_newest_commit(index).map(|found| *known.get_or_init(|| found))
                    }
                }
            }
            _ => Ok(false),
        }
    }

    /// Writes nothing to the member `index` from the opening of the volume on. Returns false, and
    /// changes nothing, when the volume needs the member.
    pub(crate) fn leave_out(&self, index: usize) -> bool {
        let can = self.can_do_without(index);
        if can {
            let condition = &self.members()[index].condition;
            condition.is_noted.store(true, Ordering::Release);
            condition.has_failed.store(true, Ordering::Release);
        }
        can
    }

    /// Whether other good members have all the data of each chunk of the member `index`.
    fn can_do_without(&self, index: usize) -> bool {
        let is_good = |member: &Option<usize>| {
            member.is_some_and(|member| {
                let condition = &self.members()[member].condition;
                let is_bad = condition.has_bad_copies.load(Ordering::Acquire);
                member != index && !condition.has_failed() && !is_bad
            })
        };
        let survives = |mapped: &MappedChunk| match mapped.chunk.profile {
            Profile::Raid10 => mapped.members.chunks(2).all(|pair| pair.iter().any(is_good)),
            Profile::Single
            | Profile::Dup
            | Profile::Raid1
            | Profile::Raid1c3
            | Profile::Raid1c4 => mapped.members.iter().any(is_good),
            Profile::Raid0 | Profile::Raid5 | Profile::Raid6 => mapped.members.iter().all(is_good),
        };
        let chunks = self.chunk_map();
        let mut own = chunks.mapped().filter(|mapped| mapped.members.contains(&Some(index)));
        own.all(|mapped| survives(mapped))
    }

    /// Notes that a write to the member `index`, or its barrier, failed with `error`.
    ///
    /// # Errors
    /// `error`, when the volume needs the member, or is not being written.
    pub(crate) fn survive_failure(
        &self,
        index: usize,
        kind: DeviceError,
        error: Error,
    ) -> Result<()> {
        let member = &self.members()[index];
        self.count_error(index, kind);
        if !self.geometry.is_written {
            return Err(error);
        }
        {
            let mut failing = self.failing.lock();
            if member.has_failed() {
                return Ok(());
            }
            if !self.can_do_without(index) {
                return Err(error);
            }
            member.condition.has_failed.store(true, Ordering::Release);
            failing.failed += 1;
        }
        self.report(&VolumeReport::MemberFailed {
            device: member.name(),
            problem: error.to_string(),
        });
        Ok(())
    }

    /// Counts an error of the member `index`.
    pub(crate) fn count_error(&self, index: usize, kind: DeviceError) {
        let condition = &self.members()[index].condition;
        condition.errors[kind.index()].fetch_add(1, Ordering::Relaxed);
        if kind == DeviceError::Read {
            condition.has_bad_reads.store(true, Ordering::Relaxed);
        }
    }

    /// Whether a member had an error of a write or a barrier that no commit has stored yet. If so,
    /// a sync commits even when nothing else changed.
    pub(crate) fn has_errors_of_writing(&self) -> bool {
        let kinds = [DeviceError::Write, DeviceError::Flush];
        let of_member = |member: &Member| {
            let count =
                |kind: &DeviceError| member.condition.errors[kind.index()].load(Ordering::Relaxed);
            kinds.iter().any(|kind| count(kind) > 0)
        };
        self.members().iter().any(of_member)
    }

    /// Takes the errors of the member `index` that no commit has stored yet, and sets the counters
    /// to zero.
    pub(crate) fn take_errors(&self, index: usize) -> [u64; DeviceError::COUNTERS] {
        let errors = &self.members()[index].condition.errors;
        std::array::from_fn(|kind| errors[kind].swap(0, Ordering::Relaxed))
    }

    /// Whether a member has failed and the superblocks on the devices do not lead to that yet.
    /// While this is so, nothing may be acknowledged as durable.
    pub(crate) fn hides_failures(&self) -> bool {
        let failing = self.failing.lock();
        failing.failed > failing.shown
    }

    /// The indexes of the members that failed and that no transaction has noted yet.
    pub(crate) fn failures_to_note(&self) -> Vec<usize> {
        let is_due = |member: &Member| {
            member.has_failed() && !member.condition.is_noted.load(Ordering::Acquire)
        };
        let members = self.members().iter().enumerate();
        members.filter(|(_, member)| is_due(member)).map(|(index, _)| index).collect()
    }

    /// Notes that the running transaction stores the failure of the member `index`.
    pub(crate) fn failure_is_noted(&self, index: usize) {
        self.members()[index].condition.is_noted.store(true, Ordering::Release);
        self.failing.lock().noted += 1;
    }

    /// To be called before superblocks are written, after the barrier of all that they lead to.
    /// Returns how many failures they lead to; `None` when a member has failed that they do not
    /// lead to.
    pub(crate) fn begin_superblocks(&self, tells: RecordedFailures) -> Option<u64> {
        let failing = self.failing.lock();
        let told = match tells {
            RecordedFailures::WhatIsNoted => failing.noted,
            RecordedFailures::WhatIsShown => failing.shown,
        };
        (failing.failed == told).then_some(told)
    }

    /// Notes that superblocks are on the devices which lead to the first `failed` failures.
    pub(crate) fn end_superblocks(&self, failed: u64) {
        self.failing.lock().shown = failed;
    }

    /// Requires that each part was written to at least one member that has not failed. Reports bad
    /// copies that remain on such members.
    ///
    /// # Errors
    /// When no copy of a part was written: `error`, or an I/O error without it.
    pub(crate) fn require_copies(
        &self,
        copies: &[WrittenCopy],
        error: Option<Error>,
    ) -> Result<()> {
        let has_failed = |copy: &WrittenCopy| self.members()[copy.member].has_failed();
        let mut parts: BTreeMap<(usize, u64), bool> = BTreeMap::new();
        for copy in copies {
            let is_there = copy.is_written && !has_failed(copy);
            *parts.entry((copy.part.0, copy.part.1.start)).or_default() |= is_there;
        }
        if parts.values().any(|is_there| !is_there) {
            let none = || Error::io("writing to members that have all failed", Errno::IO);
            return Err(error.unwrap_or_else(none));
        }
        let bad = copies.iter().filter(|copy| !copy.is_written && !has_failed(copy));
        let mut bad: Vec<_> = bad.map(|copy| copy.member).collect();
        bad.sort_unstable();
        bad.dedup();
        for member in bad {
            let member = &self.members()[member];
            member.condition.has_bad_copies.store(true, Ordering::Release);
            let problem = error.as_ref().map(ToString::to_string).unwrap_or_default();
            self.report(&VolumeReport::BadWrite { device: member.name(), problem });
        }
        Ok(())
    }
}
