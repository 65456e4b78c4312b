//! The states themselves, built one after the other.
//!
//! Two devices go along with the iteration: `durable`, which has all epochs before the
//! present one, and `prefix`, which has the first writes of it as well. Every state is a
//! snapshot of one of them with a few writes on top, so that it costs what these writes cost
//! and never what the image holds.

use std::fmt::Write as _;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::choice::{Choice, Choices};
use super::random::Random;
use super::{CrashEntry, CrashLog, CrashPlan};
use crate::{BlockDevice, MemoryDevice};

/// What a power cut could leave.
#[derive(Debug)]
pub struct CrashState {
    /// Its place among the states of its log and plan, from 0.
    pub number: usize,
    /// What is there, in words: for the message of a test.
    pub description: String,
    /// The medium after the cut.
    pub device: MemoryDevice,
    marks: Arc<[Arc<str>]>,
    earliest: usize,
    latest: usize,
}

impl CrashState {
    /// The marks before the latest cut that could have left this state, in their order: whatever
    /// these acknowledged has to be there.
    #[must_use]
    pub fn marks(&self) -> &[Arc<str>] {
        &self.marks[..self.latest]
    }

    /// How many of [`marks`](Self::marks) are also before the earliest such cut. A cut
    /// may have come after any number of marks from this one to all of them.
    #[must_use]
    pub fn marks_before_earliest_cut(&self) -> usize {
        self.earliest
    }
}

/// The states of a log, in an order that log and plan decide. The last item is an error
/// when the base image could not be read.
#[derive(Debug)]
pub struct CrashStates {
    log: CrashLog,
    plan: CrashPlan,
    random: Random,
    marks: Arc<[Arc<str>]>,
    epochs: Vec<Epoch>,
    /// Which of them is the present one, and what is left to build of it.
    epoch: usize,
    choices: Choices,
    /// The base with every epoch before the present one.
    durable: MemoryDevice,
    /// `durable` with the first `prefix_len` writes of the present epoch.
    prefix: MemoryDevice,
    prefix_len: usize,
    number: usize,
    failed: bool,
}

/// The writes between two barriers.
#[derive(Debug)]
struct Epoch {
    writes: Vec<Pending>,
    /// How many marks precede the last write of the epochs before.
    marks_of_nothing: usize,
    /// How many marks precede the barrier behind it.
    marks_at_end: usize,
}

/// A write of an epoch.
#[derive(Debug)]
struct Pending {
    /// Where it is in the log.
    entry: usize,
    range: Range<u64>,
    /// How many marks precede it.
    marks: usize,
}

impl CrashStates {
    pub(super) fn new(log: CrashLog, plan: &CrashPlan) -> Self {
        let marks = log.entries.iter().filter_map(|entry| match entry {
            CrashEntry::Mark(tag) => Some(tag.clone()),
            _ => None,
        });
        let durable = MemoryDevice::over(log.base.clone());
        let epochs = epochs(&log.entries);
        Self {
            marks: marks.collect(),
            choices: choices(&epochs, 0, plan),
            epochs,
            epoch: 0,
            plan: *plan,
            random: Random::new(plan.seed),
            prefix: durable.snapshot(),
            prefix_len: 0,
            durable,
            number: 0,
            failed: false,
            log,
        }
    }

    /// Goes on to the next epoch: everything of the present one is durable there.
    fn pass_barrier(&mut self) -> io::Result<()> {
        self.grow_prefix(self.epochs[self.epoch].writes.len())?;
        self.durable = self.prefix.snapshot();
        self.prefix_len = 0;
        self.epoch += 1;
        self.choices = choices(&self.epochs, self.epoch, &self.plan);
        Ok(())
    }

    fn grow_prefix(&mut self, len: usize) -> io::Result<()> {
        let writes = &self.epochs[self.epoch].writes;
        for write in &writes[self.prefix_len.min(len)..len] {
            apply(&self.prefix, &self.log.entries[write.entry], &write.range)?;
        }
        self.prefix_len = self.prefix_len.max(len);
        Ok(())
    }

    fn build(&mut self, choice: &Choice) -> io::Result<CrashState> {
        let device = if choice.prefix == 0 {
            self.durable.snapshot()
        } else {
            assert!(choice.prefix >= self.prefix_len, "prefixes come in growing order");
            self.grow_prefix(choice.prefix)?;
            self.prefix.snapshot()
        };
        let epoch = &self.epochs[self.epoch];
        for part in &choice.parts {
            let write = &epoch.writes[part.index];
            let reached = part.torn.as_deref().unwrap_or(std::slice::from_ref(&write.range));
            for range in reached {
                apply(&device, &self.log.entries[write.entry], range)?;
            }
        }
        let last = choice.parts.iter().map(|part| part.index + 1).max().unwrap_or(0);
        let present = last.max(choice.prefix);
        self.number += 1;
        Ok(CrashState {
            number: self.number - 1,
            description: self.describe(choice),
            device,
            marks: self.marks.clone(),
            earliest: match present {
                0 => epoch.marks_of_nothing,
                _ => epoch.writes[present - 1].marks,
            },
            latest: epoch.marks_at_end,
        })
    }

    fn describe(&self, choice: &Choice) -> String {
        const LISTED: usize = 16;
        let writes = self.epochs[self.epoch].writes.len();
        let there = choice.prefix + choice.parts.len();
        let mut text = format!("epoch {}, {there} of {writes} writes", self.epoch);
        if choice.prefix > 0 {
            let _ = write!(text, ", the first {}", choice.prefix);
        }
        for (place, part) in choice.parts.iter().enumerate() {
            let torn = part.torn.as_ref();
            if place < LISTED || torn.is_some() {
                let _ = write!(text, ", {}", part.index);
            } else if place == LISTED {
                text.push_str(", ...");
            }
            if let Some(ranges) = torn {
                let _ = write!(text, " torn to {ranges:?}");
            }
        }
        text
    }
}

impl Iterator for CrashStates {
    type Item = io::Result<CrashState>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut outcome = Ok(());
        while !self.failed && outcome.is_ok() {
            if let Some(choice) = self.choices.next(&mut self.random) {
                let built = self.build(&choice);
                self.failed = built.is_err();
                return Some(built);
            }
            if self.epoch + 1 == self.epochs.len() {
                return None;
            }
            outcome = self.pass_barrier();
            self.failed = outcome.is_err();
        }
        outcome.err().map(Err)
    }
}

fn choices(epochs: &[Epoch], at: usize, plan: &CrashPlan) -> Choices {
    let ranges = epochs[at].writes.iter().map(|write| write.range.clone()).collect();
    Choices::new(plan, ranges, at + 1 < epochs.len())
}

/// The log cut at its barriers. There is always one epoch behind the last barrier.
fn epochs(entries: &[CrashEntry]) -> Vec<Epoch> {
    let mut epochs = Vec::new();
    let (mut writes, mut marks) = (Vec::new(), 0);
    let (mut marks_of_nothing, mut marks_of_last) = (0, 0);
    for (entry, what) in entries.iter().chain([&CrashEntry::Barrier]).enumerate() {
        let (offset, len) = match what {
            CrashEntry::Write { offset, data } => (*offset, data.len() as u64),
            CrashEntry::Discard { offset, len } => (*offset, *len),
            CrashEntry::Mark(_) => {
                marks += 1;
                continue;
            }
            CrashEntry::Barrier => {
                let writes = std::mem::take(&mut writes);
                epochs.push(Epoch { writes, marks_of_nothing, marks_at_end: marks });
                marks_of_nothing = marks_of_last;
                continue;
            }
        };
        writes.push(Pending { entry, range: offset..offset + len, marks });
        marks_of_last = marks;
    }
    epochs
}

/// Does the part of a write or discard that is inside `range`.
fn apply(device: &MemoryDevice, entry: &CrashEntry, range: &Range<u64>) -> io::Result<()> {
    match entry {
        CrashEntry::Write { offset, data } => {
            let inside = |at: u64| usize::try_from(at - offset).expect("inside the data");
            device.write_at(range.start, &data[inside(range.start)..inside(range.end)])
        }
        CrashEntry::Discard { .. } => device.discard(range.start, range.end - range.start),
        CrashEntry::Barrier | CrashEntry::Mark(_) => {
            unreachable!("an epoch lists writes and discards")
        }
    }
}
