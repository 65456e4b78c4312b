//! Members that fail: which errors of writing a volume survives, and what becomes of the member.
//!
//! # What is survived
//!
//! A write or a barrier that fails on one member does not end all writing as long as redundancy
//! covers it:
//!
//! | what fails on a member | every chunk can do without the member | some chunk cannot |
//! |---|---|---|
//! | a copy of a tree block, of a log or of a commit | the member has failed | the copy stays bad, if another one was written |
//! | a copy of data with checksums | the member has failed | the copy stays bad, if another one was written |
//! | a copy of data without checksums | the member has failed | all writing ends |
//! | a superblock, primary or copy | the member has failed | all writing ends |
//! | a barrier | the member has failed: nothing proves what it holds since the last barrier | all writing ends |
//!
//! A chunk can do without members as its profile says, and never without the last good one:
//!
//! | profile | members that it can do without |
//! |---|---|
//! | single, DUP, RAID0 | none |
//! | RAID1, RAID1C3, RAID1C4 | all but one of those that it is on |
//! | RAID10 | one of each pair |
//!
//! So on two members with RAID1 for everything either may fail, and then the other one may not.
//! With RAID1 for metadata and single for data neither may: a tree block of which one copy was
//! written is survived, and the barrier is not. The second copy of DUP is on the same member, so it
//! is survived in the same way.
//!
//! A copy that stays bad is found by its checksum. One thing would pass for it: a block that a
//! crashed transaction of the same number left there. So what is there is looked at, and then all
//! writing ends.
//!
//! # What becomes of a member that has failed
//!
//! Nothing is written to it until the volume is opened again: no data, no block, no superblock, no
//! new chunk. Reads try it last, and never for what has no checksum, as those of a member that
//! missed commits. When the volume is opened again it is one that missed commits. Then it is left
//! out from the beginning, and a scrub of the volume, while nothing else uses that, brings it up to
//! date (`scrub/renew`).
//!
//! # Why a crash finds that it has failed
//!
//! The superblock of the member stays as old as it is. One generation less does not say enough: a
//! power cut between the superblocks of two members leaves that behind, too, on a member that has
//! everything (`newest`). So the next commit notes it in the chunk tree: in the device item of the
//! member, whose `generation` is the one that its superblock has to have at least. Nothing else
//! uses that field, and the kernel leaves it alone. Then:
//!
//! 1. From the failure of a member on no superblock is written whose transaction does not note it.
//!    A transaction that was finished before is *postponed*: its blocks are written, and what it
//!    did becomes durable with the next one.
//! 2. As long as there is no such superblock, nothing is acknowledged as durable: an fsync makes a
//!    commit, and a commit is followed by another one.
//!
//! ```text
//!                                superblock of the others   of the member   its device item
//!   before                                              7               7                 0
//!   the barrier of 8 fails                              7               7                 0   8 is postponed
//!   the commit returns                                  9               7                 9
//! ```
//!
//! A power cut between the superblocks of the others finds some of them at 7, too, whose device
//! items say 0. These have everything: 7 is the commit before 9, as the roots say that the
//! superblock remembers of earlier ones.
//!
//! A member that fails between its barrier and its superblock has all of that commit, and may keep
//! being taken for complete until there is the next one, which notes the failure.
//!
//! # Counters
//!
//! Errors are counted for each member as the kernel does, in the item `DEV_STATS` of the device
//! tree, which `btrfs device stats` shows. They are stored by the next commit
//! (`transaction/device_stats`).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use offshoot_btrfs_format::chunk::Profile;
use offshoot_vfs::{Errno, Error, Result};

use super::chunk_map::MappedChunk;
use super::{Member, Storage, Trees};
use crate::report::Report;

/// The kinds of errors of a device that are counted, in the order of the item that has the
/// counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceError {
    /// A write failed.
    Write,
    /// A read failed.
    Read,
    /// A barrier failed.
    Flush,
    /// What was read is not what was written.
    Corruption,
}

impl DeviceError {
    /// How many counters there are. The last one is of generations that differ, which counts as
    /// corruption here.
    pub(crate) const COUNTERS: usize = 5;

    fn index(self) -> usize {
        self as usize
    }
}

/// What is known of a member beside what it was when the volume was opened.
#[derive(Debug, Default)]
pub(super) struct Condition {
    /// Nothing is written to it any more.
    has_failed: AtomicBool,
    /// That it failed is noted in the chunk tree, or need not be: it was seen when the volume was
    /// opened.
    is_noted: AtomicBool,
    /// A copy of something could not be written, and the member did not fail for it.
    has_bad_copies: AtomicBool,
    /// Whether one that is a generation behind has what the newest commit wrote, once somebody
    /// needs to know.
    has_newest: OnceLock<bool>,
    /// Errors that are not stored yet.
    errors: [AtomicU64; DeviceError::COUNTERS],
}

impl Condition {
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    pub(super) fn has_errors(&self) -> bool {
        self.errors.iter().any(|errors| errors.load(Ordering::Relaxed) > 0)
    }
}

/// How far the failures of members can be seen on the devices.
#[derive(Debug, Default)]
pub(super) struct Failing {
    /// How many members failed since the volume was opened.
    failed: u64,
    /// How many of these the running transaction or one before notes.
    noted: u64,
    /// How many of these the superblocks lead to.
    shown: u64,
}

/// Which failures of members the superblock that is written leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tells {
    /// Those that its own transaction notes: it is the superblock of a commit.
    WhatIsNoted,
    /// Those of the last commit, whose superblock it is once more, with a log.
    WhatIsShown,
}

/// Where a copy of something goes, and whether it is there.
#[derive(Clone, Debug)]
pub(crate) struct WrittenCopy {
    /// The index of the member.
    pub(crate) member: usize,
    /// What of the whole it is: the copies of one thing have the same.
    pub(crate) part: (usize, Range<u64>),
    /// Whether it was written.
    pub(crate) is_written: bool,
}

impl Storage {
    /// How many commits a member is behind. A transaction that was postponed leaves out a
    /// generation: then the roots of earlier commits that the superblock remembers tell that there
    /// was no commit between.
    fn commits_behind(&self, member: &Member) -> u64 {
        let (own, newest) = (member.generation().0, self.superblock.generation.0);
        let backups = self.superblock.item.super_roots.iter();
        let known: Vec<_> = backups.map(|backup| backup.tree_root_gen.get()).collect();
        let is_between = |generation: &u64| (own + 1..newest).contains(generation);
        let is_last_but_one = known.contains(&own) && !known.iter().any(is_between);
        if is_last_but_one && own < newest { 1 } else { member.missed() }
    }

    /// Whether the member `index` has all that the newest commit wrote: its superblock says so, or
    /// a power cut left that a generation behind.
    ///
    /// # Errors
    /// When a block of the newest commit cannot be read.
    pub(crate) fn is_current(&self, trees: &impl Trees, index: usize) -> Result<bool> {
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

    /// Writes nothing to the member `index` from the beginning; whether the volume can do without
    /// it.
    pub(crate) fn leave_out(&self, index: usize) -> bool {
        let can = self.can_do_without(index);
        if can {
            let condition = &self.members()[index].condition;
            condition.is_noted.store(true, Ordering::Release);
            condition.has_failed.store(true, Ordering::Release);
        }
        can
    }

    /// Whether each chunk has all it holds on other members that are good.
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

    /// Takes note that a write to the member `index`, or its barrier, failed with `error`.
    ///
    /// # Errors
    /// `error`, when the volume cannot do without the member.
    pub(crate) fn bear(&self, index: usize, kind: DeviceError, error: Error) -> Result<()> {
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
        self.report(&Report::MemberFailed { device: member.name(), problem: error.to_string() });
        Ok(())
    }

    /// Counts an error of the member `index`.
    pub(crate) fn count_error(&self, index: usize, kind: DeviceError) {
        let errors = &self.members()[index].condition.errors;
        errors[kind.index()].fetch_add(1, Ordering::Relaxed);
    }

    /// Whether a write or a barrier of a member failed that is not stored yet: a commit is made for
    /// that if need be.
    pub(crate) fn has_errors_of_writing(&self) -> bool {
        let kinds = [DeviceError::Write, DeviceError::Flush];
        let of_member = |member: &Member| {
            let count =
                |kind: &DeviceError| member.condition.errors[kind.index()].load(Ordering::Relaxed);
            kinds.iter().any(|kind| count(kind) > 0)
        };
        self.members().iter().any(of_member)
    }

    /// Takes the errors of the member `index` that are not stored yet.
    pub(crate) fn take_errors(&self, index: usize) -> [u64; DeviceError::COUNTERS] {
        let errors = &self.members()[index].condition.errors;
        std::array::from_fn(|kind| errors[kind].swap(0, Ordering::Relaxed))
    }

    /// Whether a member has failed of which the superblocks do not tell yet: nothing may be
    /// acknowledged as durable.
    pub(crate) fn hides_failures(&self) -> bool {
        let failing = self.failing.lock();
        failing.failed > failing.shown
    }

    /// The members that failed and are not noted yet.
    pub(crate) fn failures_to_note(&self) -> Vec<usize> {
        let is_due = |member: &Member| {
            member.has_failed() && !member.condition.is_noted.load(Ordering::Acquire)
        };
        let members = self.members().iter().enumerate();
        members.filter(|(_, member)| is_due(member)).map(|(index, _)| index).collect()
    }

    /// The running transaction notes that the member `index` failed.
    pub(crate) fn failure_is_noted(&self, index: usize) {
        self.members()[index].condition.is_noted.store(true, Ordering::Release);
        self.failing.lock().noted += 1;
    }

    /// Begins to write superblocks, behind the barrier of all that they lead to: how many failures
    /// they tell of. `None` when a member has failed that they do not tell of.
    pub(crate) fn begin_superblocks(&self, tells: Tells) -> Option<u64> {
        let failing = self.failing.lock();
        let told = match tells {
            Tells::WhatIsNoted => failing.noted,
            Tells::WhatIsShown => failing.shown,
        };
        (failing.failed == told).then_some(told)
    }

    /// Superblocks are on the devices that tell of the first `failed` failures.
    pub(crate) fn end_superblocks(&self, failed: u64) {
        self.failing.lock().shown = failed;
    }

    /// Requires that of each part one copy was written to a member that has not failed. What stays
    /// bad on others that have not is reported.
    ///
    /// # Errors
    /// `error`, or another one, when nothing of a part was written.
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
            self.report(&Report::BadWrite { device: member.name(), problem });
        }
        Ok(())
    }
}
