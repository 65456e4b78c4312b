//! Builds the states one after the other.
//!
//! The iteration keeps two sets of devices: `durable` has every write that the barriers so far made
//! durable, and `prefix` has the first pending writes as well. A state is a snapshot of one set
//! with a few writes on top. So it costs as much as these writes, however large the image is.

use std::fmt::Write as _;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::choice::{EpochChoices, SurvivingWrites, WriteRange};
use super::random::CrashRandom;
use super::{CrashEntry, CrashLog, CrashPlan};
use crate::{BlockDevice, MemoryDevice};

/// A state of the media that a power cut could leave.
#[derive(Debug)]
pub struct CrashState {
    /// Its number among the states of its log and plan, from 0.
    pub number: usize,
    /// Which writes reached the media, for the message of a test.
    pub description: String,
    /// The media after the cut, in the order of the set.
    pub devices: Vec<MemoryDevice>,
    /// The ranges of the writes that are torn.
    pub torn: Vec<Range<u64>>,
    marks: Arc<[Arc<str>]>,
    earliest: usize,
    latest: usize,
}

impl CrashState {
    /// The marks before the latest cut that could have left this state, in log order. The state
    /// must have whatever they acknowledged as durable.
    #[must_use]
    pub fn marks(&self) -> &[Arc<str>] {
        &self.marks[..self.latest]
    }

    /// How many of [`marks`](Self::marks) are also before the earliest such cut. Example: with 5
    /// marks and a value of 3, the cut came after 3, 4 or 5 marks.
    #[must_use]
    pub fn marks_before_earliest_cut(&self) -> usize {
        self.earliest
    }
}

/// The states of a log, in an order that depends only on the log and the plan. The last item is an
/// error when the base image could not be read.
#[derive(Debug)]
pub struct CrashStates {
    log: CrashLog,
    plan: CrashPlan,
    random: CrashRandom,
    marks: Arc<[Arc<str>]>,
    epochs: Vec<PendingEpoch>,
    /// The index of the current epoch, and the choices of it that are not built yet.
    epoch: usize,
    choices: EpochChoices,
    /// The bases with everything that is durable before the current epoch.
    durable: Vec<MemoryDevice>,
    /// `durable` with the first `prefix_len` writes of the current epoch.
    prefix: Vec<MemoryDevice>,
    prefix_len: usize,
    number: usize,
    has_failed: bool,
}

/// The writes that are pending before a barrier.
#[derive(Debug)]
struct PendingEpoch {
    writes: Vec<PendingWrite>,
    /// The device whose barrier ends it.
    flushed: usize,
    /// How many marks precede the last write that is durable. The state with nothing of this epoch
    /// was possible from that write on.
    marks_of_nothing: usize,
    /// How many marks precede the barrier that ends the epoch.
    marks_at_end: usize,
}

/// A write of an epoch.
#[derive(Clone, Debug)]
struct PendingWrite {
    /// Its index in the log.
    entry: usize,
    place: WriteRange,
    /// How many marks precede it.
    marks: usize,
}

impl CrashStates {
    pub(super) fn new(
        log: CrashLog,
        plan: &CrashPlan,
        is_tearable: &dyn Fn(u64, &[u8]) -> bool,
    ) -> Self {
        let marks = log.entries.iter().filter_map(|entry| match entry {
            CrashEntry::Mark(tag) => Some(tag.clone()),
            _ => None,
        });
        let durable: Vec<_> = log.bases.iter().cloned().map(MemoryDevice::over).collect();
        let epochs = epochs(&log.entries, is_tearable);
        Self {
            marks: marks.collect(),
            choices: choices(&epochs, 0, plan),
            epochs,
            epoch: 0,
            plan: *plan,
            random: CrashRandom::new(plan.seed),
            prefix: snapshots(&durable),
            prefix_len: 0,
            durable,
            number: 0,
            has_failed: false,
            log,
        }
    }

    /// Moves on to the next epoch: every pending write to the flushed device becomes durable.
    fn pass_barrier(&mut self) -> io::Result<()> {
        let PendingEpoch { writes, flushed, .. } = &self.epochs[self.epoch];
        for write in writes.iter().filter(|write| write.place.device == *flushed) {
            self.apply(&self.durable, write, &write.place.range)?;
        }
        self.prefix = snapshots(&self.durable);
        self.prefix_len = 0;
        self.epoch += 1;
        self.choices = choices(&self.epochs, self.epoch, &self.plan);
        Ok(())
    }

    fn grow_prefix(&mut self, len: usize) -> io::Result<()> {
        let writes = &self.epochs[self.epoch].writes;
        for write in &writes[self.prefix_len.min(len)..len] {
            self.apply(&self.prefix, write, &write.place.range)?;
        }
        self.prefix_len = self.prefix_len.max(len);
        Ok(())
    }

    /// Applies the part of a write or discard that is inside `range`.
    fn apply(
        &self,
        devices: &[MemoryDevice],
        write: &PendingWrite,
        range: &Range<u64>,
    ) -> io::Result<()> {
        let device = &devices[write.place.device];
        match &self.log.entries[write.entry] {
            CrashEntry::Write { offset, data, .. } => {
                let inside = |at: u64| usize::try_from(at - offset).expect("inside the data");
                device.write_at(range.start, &data[inside(range.start)..inside(range.end)])
            }
            CrashEntry::Discard { .. } => device.spoil(range.start, range.end - range.start),
            CrashEntry::Barrier { .. } | CrashEntry::Mark(_) => {
                unreachable!("an epoch lists writes and discards")
            }
        }
    }

    fn build(&mut self, choice: &SurvivingWrites) -> io::Result<CrashState> {
        let devices = if choice.prefix == 0 {
            snapshots(&self.durable)
        } else {
            assert!(choice.prefix >= self.prefix_len, "prefixes come in growing order");
            self.grow_prefix(choice.prefix)?;
            snapshots(&self.prefix)
        };
        let epoch = &self.epochs[self.epoch];
        for part in &choice.parts {
            let write = &epoch.writes[part.index];
            let reached = part.torn.as_deref().unwrap_or(std::slice::from_ref(&write.place.range));
            for range in reached {
                self.apply(&devices, write, range)?;
            }
        }
        let torn = choice.parts.iter().filter(|part| part.torn.is_some());
        let torn = torn.map(|part| epoch.writes[part.index].place.range.clone());
        let last = choice.parts.iter().map(|part| part.index + 1).max().unwrap_or(0);
        let present = last.max(choice.prefix);
        let marks_of_present = present.checked_sub(1).map_or(0, |last| epoch.writes[last].marks);
        self.number += 1;
        Ok(CrashState {
            number: self.number - 1,
            description: self.describe(choice),
            devices,
            torn: torn.collect(),
            marks: self.marks.clone(),
            earliest: marks_of_present.max(epoch.marks_of_nothing),
            latest: epoch.marks_at_end,
        })
    }

    fn describe(&self, choice: &SurvivingWrites) -> String {
        const LISTED: usize = 16;
        let writes = &self.epochs[self.epoch].writes;
        let there = choice.prefix + choice.parts.len();
        let mut text = format!("epoch {}, {there} of {} writes", self.epoch, writes.len());
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
        while !self.has_failed && outcome.is_ok() {
            if let Some(choice) = self.choices.next(&mut self.random) {
                let built = self.build(&choice);
                self.has_failed = built.is_err();
                return Some(built);
            }
            if self.epoch + 1 == self.epochs.len() {
                return None;
            }
            outcome = self.pass_barrier();
            self.has_failed = outcome.is_err();
        }
        outcome.err().map(Err)
    }
}

fn choices(epochs: &[PendingEpoch], at: usize, plan: &CrashPlan) -> EpochChoices {
    let places = epochs[at].writes.iter().map(|write| write.place.clone()).collect();
    EpochChoices::new(plan, places, at + 1 < epochs.len())
}

fn snapshots(devices: &[MemoryDevice]) -> Vec<MemoryDevice> {
    devices.iter().map(MemoryDevice::snapshot).collect()
}

/// Cuts the log at its barriers. There is always one more epoch, behind the last barrier.
fn epochs(entries: &[CrashEntry], is_tearable: &dyn Fn(u64, &[u8]) -> bool) -> Vec<PendingEpoch> {
    let mut epochs = Vec::new();
    let mut pending: Vec<PendingWrite> = Vec::new();
    let (mut marks, mut marks_of_durable) = (0, 0);
    for (entry, what) in entries.iter().chain([&CrashEntry::Barrier { device: 0 }]).enumerate() {
        let (device, offset, len, is_tearable) = match what {
            CrashEntry::Write { device, offset, data } => {
                (*device, *offset, data.len() as u64, is_tearable(*offset, data))
            }
            CrashEntry::Discard { device, offset, len } => (*device, *offset, *len, true),
            CrashEntry::Mark(_) => {
                marks += 1;
                continue;
            }
            CrashEntry::Barrier { device } => {
                let (marks_of_nothing, marks_at_end) = (marks_of_durable, marks);
                let writes = pending.clone();
                epochs.push(PendingEpoch {
                    writes,
                    flushed: *device,
                    marks_of_nothing,
                    marks_at_end,
                });
                let is_flushed = |write: &PendingWrite| write.place.device == *device;
                let last = pending.iter().rfind(|write| is_flushed(write));
                marks_of_durable = marks_of_durable.max(last.map_or(0, |write| write.marks));
                pending.retain(|write| !is_flushed(write));
                continue;
            }
        };
        let place = WriteRange { device, range: offset..offset + len, is_tearable };
        pending.push(PendingWrite { entry, place, marks });
    }
    epochs
}
