//! Which writes of one epoch a power cut leaves, and how.
//!
//! Nothing here knows the bytes of a write: an epoch is the list of the ranges that its writes
//! cover. [`EpochChoices`] goes through the choices in the order of the table in the parent module,
//! and keeps only those of one subset in memory.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;

use super::CrashPlan;
use super::random::CrashRandom;
use crate::SECTOR_BYTES;

/// Larger epochs have more than 65536 subsets, too many to check.
const MOST_EXHAUSTIVE: usize = 16;

/// Up to this many overlapping writes of a subset are put into every order.
const MOST_PERMUTED: usize = 4;

/// When a subset has more overlapping writes, this many random orders of them are tried.
const SAMPLED_ORDERS: usize = 24;

/// One way in which the writes of an epoch survive a cut.
#[derive(Clone, Debug)]
pub(super) struct SurvivingWrites {
    /// The medium has this many first writes of the epoch, whole and in log order.
    pub(super) prefix: usize,
    /// The writes on top of the prefix, in the order in which they reached the medium.
    pub(super) parts: Vec<SurvivingWrite>,
}

/// A write that reached the medium.
#[derive(Clone, Debug)]
pub(super) struct SurvivingWrite {
    /// The index of the write in its epoch.
    pub(super) index: usize,
    /// The bytes of the device that the write reached, or `None` if it reached its whole range.
    pub(super) torn: Option<Vec<Range<u64>>>,
}

/// The device and the bytes that a write covers.
#[derive(Clone, Debug)]
pub(super) struct WriteRange {
    pub(super) device: usize,
    pub(super) range: Range<u64>,
    /// The write may be torn.
    pub(super) is_tearable: bool,
}

/// All choices of one epoch that a plan asks for.
#[derive(Debug)]
pub(super) struct EpochChoices {
    plan: CrashPlan,
    places: Vec<WriteRange>,
    /// Another epoch follows. The choice with all writes is left out then, because it is the same
    /// state as the choice with nothing of the next epoch.
    is_followed: bool,
    stage: ChoiceStage,
    ready: VecDeque<SurvivingWrites>,
}

/// The choice that comes next: the prefix of this length, the subset with these bits, or the random
/// sample with this number.
#[derive(Debug)]
enum ChoiceStage {
    Prefix(usize),
    Subset(u64),
    Sample(usize),
}

impl EpochChoices {
    /// The choices of an epoch whose writes cover `places`.
    pub(super) fn new(plan: &CrashPlan, places: Vec<WriteRange>, is_followed: bool) -> Self {
        let (stage, ready) = (ChoiceStage::Prefix(0), VecDeque::new());
        Self { plan: *plan, places, is_followed, stage, ready }
    }

    pub(super) fn next(&mut self, random: &mut CrashRandom) -> Option<SurvivingWrites> {
        let writes = self.places.len();
        loop {
            if let Some(choice) = self.ready.pop_front() {
                return Some(choice);
            }
            match self.stage {
                ChoiceStage::Prefix(len) if len <= writes => {
                    self.stage = ChoiceStage::Prefix(len + 1);
                    self.prefix(len, random);
                }
                ChoiceStage::Prefix(_)
                    if writes <= self.plan.exhaustive_limit.min(MOST_EXHAUSTIVE) =>
                {
                    self.stage = ChoiceStage::Subset(1);
                }
                ChoiceStage::Prefix(_) => self.stage = ChoiceStage::Sample(0),
                ChoiceStage::Subset(set) if set < 1 << writes => {
                    self.stage = ChoiceStage::Subset(set + 1);
                    self.subset(set, random);
                }
                ChoiceStage::Sample(number) if number < self.plan.samples_per_epoch => {
                    self.stage = ChoiceStage::Sample(number + 1);
                    let sample = self.sample(random);
                    self.ready.push_back(sample);
                }
                ChoiceStage::Subset(_) | ChoiceStage::Sample(_) => return None,
            }
        }
    }

    /// Adds the first `len` writes alone, and with the write behind them torn.
    fn prefix(&mut self, len: usize, random: &mut CrashRandom) {
        if len < self.places.len() || !self.is_followed {
            self.ready.push_back(SurvivingWrites { prefix: len, parts: Vec::new() });
        }
        if let Some(next) = self.places.get(len).filter(|_| self.plan.tears)
            && let Some(torn) = tear(next, random)
        {
            let parts = vec![SurvivingWrite { index: len, torn: Some(torn) }];
            self.ready.push_back(SurvivingWrites { prefix: len, parts });
        }
    }

    /// Adds the writes whose bits are in `set`, in every order that makes a difference, and with
    /// one of them torn.
    fn subset(&mut self, set: u64, random: &mut CrashRandom) {
        let members: Vec<usize> = (0..self.places.len()).filter(|i| set >> i & 1 == 1).collect();
        let whole = |order: &[usize]| SurvivingWrites {
            prefix: 0,
            parts: order.iter().map(|&index| SurvivingWrite { index, torn: None }).collect(),
        };
        let is_prefix = set & (set + 1) == 0;
        if !is_prefix {
            self.ready.push_back(whole(&members));
        }
        for order in self.other_orders(&members, random) {
            self.ready.push_back(whole(&order));
        }
        if self.plan.tears {
            let mut choice = whole(&members);
            let victim = random.index(members.len());
            choice.parts[victim].torn = tear(&self.places[members[victim]], random);
            if choice.parts[victim].torn.is_some() {
                self.ready.push_back(choice);
            }
        }
    }

    /// The orders of `members` that leave other bytes than log order does. Two orders leave the
    /// same bytes when every overlapping pair has the same order in both.
    fn other_orders(&self, members: &[usize], random: &mut CrashRandom) -> Vec<Vec<usize>> {
        let overlap = |a: usize, b: usize| {
            let (a, b) = (&self.places[a], &self.places[b]);
            let (from, to) = (a.range.start.max(b.range.start), a.range.end.min(b.range.end));
            a.device == b.device && from < to
        };
        let meets_another = |&a: &usize| members.iter().any(|&b| a != b && overlap(a, b));
        let (mut moved, mut order): (Vec<usize>, Vec<usize>) =
            members.iter().copied().partition(meets_another);
        let swapped_pairs = |moved: &[usize]| -> Vec<(usize, usize)> {
            let mut pairs: Vec<_> = (0..moved.len())
                .flat_map(|second| (0..second).map(move |first| (moved[first], moved[second])))
                .filter(|&(first, second)| first > second && overlap(first, second))
                .collect();
            pairs.sort_unstable();
            pairs
        };
        let mut seen = HashSet::from([Vec::new()]);
        let mut orders = Vec::new();
        let fixed = order.len();
        let all = moved.len() <= MOST_PERMUTED;
        let mut tried = 0;
        while if all { next_permutation(&mut moved) } else { tried < SAMPLED_ORDERS } {
            tried += 1;
            if !all {
                random.shuffle(&mut moved);
            }
            if seen.insert(swapped_pairs(&moved)) {
                order.truncate(fixed);
                order.extend_from_slice(&moved);
                orders.push(order.clone());
            }
        }
        orders
    }

    /// A random choice: all writes but one, or few, half or most of them.
    fn sample(&self, random: &mut CrashRandom) -> SurvivingWrites {
        let writes = self.places.len();
        let mut members: Vec<usize> = match random.below(4) {
            0 => {
                let missing = random.index(writes);
                (0..writes).filter(|&index| index != missing).collect()
            }
            density => {
                let chance = [1, 4, 7][usize::try_from(density - 1).expect("below 3")];
                (0..writes).filter(|_| random.chance(chance, 8)).collect()
            }
        };
        if random.chance(1, 2) {
            random.shuffle(&mut members);
        }
        let tears = self.plan.tears && random.chance(1, 2);
        let part = |index: usize| {
            let torn = (tears && random.chance(1, 4)).then(|| tear(&self.places[index], random));
            SurvivingWrite { index, torn: torn.flatten() }
        };
        SurvivingWrites { prefix: 0, parts: members.into_iter().map(part).collect() }
    }
}

/// Some but not all sectors of a write: its beginning, its end, or a random selection. `None` when
/// the write lies in a single sector, or is never torn.
fn tear(place: &WriteRange, random: &mut CrashRandom) -> Option<Vec<Range<u64>>> {
    let write = &place.range;
    let first = write.start / SECTOR_BYTES;
    let sectors = write.end.div_ceil(SECTOR_BYTES) - first;
    if sectors < 2 || !place.is_tearable {
        return None;
    }
    let bytes = |from: u64, to: u64| {
        let start = ((first + from) * SECTOR_BYTES).max(write.start);
        start..((first + to) * SECTOR_BYTES).min(write.end)
    };
    let middle = 1 + random.below(sectors - 1);
    Some(match random.below(4) {
        0 | 1 => vec![bytes(0, middle)],
        2 => vec![bytes(middle, sectors)],
        // The sector before the middle is there and the one behind it is not.
        _ => (0..sectors)
            .filter(|&at| at + 1 == middle || at != middle && random.chance(1, 2))
            .map(|at| bytes(at, at + 1))
            .collect(),
    })
}

/// Turns `items` into its next permutation in lexicographic order. Returns `false` and changes
/// nothing when `items` is the last one.
fn next_permutation(items: &mut [usize]) -> bool {
    let Some(pivot) = (1..items.len()).rev().find(|&at| items[at - 1] < items[at]) else {
        return false;
    };
    let larger = (pivot..items.len()).rev().find(|&at| items[at] > items[pivot - 1]);
    items.swap(pivot - 1, larger.expect("the one at the pivot is larger"));
    items[pivot..].reverse();
    true
}
