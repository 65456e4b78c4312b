//! All workloads of one and of two operations, by number.
//!
//! They follow ACE (Mohan et al., CrashMonkey, OSDI 2018). The namespace has six files in three
//! directories. Each workload does one operation on it, with one choice of arguments, and then
//! reaches one point of persistence that concerns the operation: `fsync` or `fdatasync` of the
//! file, or of a directory in which a name changed, or `sync`. In a workload of two operations, the
//! first one may have no point of persistence.
//!
//! The generator adds what an operation needs before it: in the set-up if the first operation
//! leaves it in place, otherwise as further steps. [`ops`] lists the operations; [`PathTree`]
//! tracks which files exist.

pub mod long;
pub mod mixed;
mod ops;
mod tree;

use super::workload::{Workload, WorkloadOp, WorkloadStep};
use ops::{CandidateOp, ops};
use tree::PathTree;

/// All workloads of one and two operations.
#[derive(Debug)]
pub struct Generator {
    candidates: Vec<CandidateOp>,
    /// Candidate and point of persistence of each workload of one operation, as indexes.
    ones: Vec<(usize, usize)>,
    /// Candidate and point of persistence of each possible first operation of two, as indexes;
    /// `None` for no point.
    beginnings: Vec<(usize, Option<usize>)>,
}

impl Default for Generator {
    fn default() -> Self {
        let candidates = ops();
        let points = |c: usize| 0..candidates[c].points.len();
        let ones: Vec<_> =
            (0..candidates.len()).flat_map(|c| points(c).map(move |p| (c, p))).collect();
        let none = (0..candidates.len()).map(|c| (c, None));
        let beginnings = none.chain(ones.iter().map(|&(c, p)| (c, Some(p)))).collect();
        Self { candidates, ones, beginnings }
    }
}

impl Generator {
    /// How many workloads of one operation there are.
    #[must_use]
    pub fn ones(&self) -> usize {
        self.ones.len()
    }

    /// How many workloads of two operations there are.
    #[must_use]
    pub fn twos(&self) -> usize {
        self.beginnings.len() * self.ones.len()
    }

    /// The workload of one operation with this number.
    #[must_use]
    pub fn one(&self, number: usize) -> Workload {
        let (candidate, point) = self.ones[number];
        let candidate = &self.candidates[candidate];
        let setup = PathTree::default().ensure(&candidate.needs);
        let steps = vec![WorkloadStep::Do(candidate.op.clone()), candidate.points[point].clone()];
        workload(format!("one:{number}"), setup, steps)
    }

    /// The workload of two operations with this number.
    #[must_use]
    pub fn two(&self, number: usize) -> Workload {
        let (first, first_point) = self.beginnings[number / self.ones.len()];
        let (second, second_point) = self.ones[number % self.ones.len()];
        let (first, second) = (&self.candidates[first], &self.candidates[second]);
        let mut tree = PathTree::default();
        let mut setup = tree.ensure(&second.needs);
        // A file that the first operation removes could not be opened by a later step.
        setup.retain(|op| !matches!(op, WorkloadOp::Open(_)));
        setup.extend(tree.ensure(&first.needs));
        let mut steps = vec![WorkloadStep::Do(first.op.clone())];
        tree.note(&first.op);
        steps.extend(first_point.map(|point| first.points[point].clone()));
        steps.extend(tree.ensure(&second.needs).into_iter().map(WorkloadStep::Do));
        steps.push(WorkloadStep::Do(second.op.clone()));
        steps.push(second.points[second_point].clone());
        workload(format!("two:{number}"), setup, steps)
    }

    /// The operations of the workloads of one operation with these numbers, one after the other.
    /// Each number comes with whether its point of persistence follows it. The name tells them:
    /// `many:5,17s,300` is operations 5, 17 and 300, of which the second is made durable.
    #[must_use]
    pub fn many(&self, parts: &[(usize, bool)]) -> Workload {
        let mut tree = PathTree::default();
        let mut steps = Vec::new();
        for (number, is_synced) in parts {
            let (candidate, point) = self.ones[*number];
            let candidate = &self.candidates[candidate];
            steps.extend(tree.ensure(&candidate.needs).into_iter().map(WorkloadStep::Do));
            steps.push(WorkloadStep::Do(candidate.op.clone()));
            tree.note(&candidate.op);
            steps.extend(is_synced.then(|| candidate.points[point].clone()));
        }
        let name = |(number, is_synced): &(usize, bool)| {
            format!("{number}{}", if *is_synced { "s" } else { "" })
        };
        let names: Vec<_> = parts.iter().map(name).collect();
        Workload { name: format!("many:{}", names.join(",")), setup: Vec::new(), steps }
    }

    /// The parts of the workload of many operations with this name, without `many:`.
    fn parts(&self, names: &str) -> Option<Vec<(usize, bool)>> {
        let part = |name: &str| {
            let number = name.trim_end_matches('s');
            let known = number.parse().ok().filter(|number| *number < self.ones());
            known.map(|known| (known, number != name))
        };
        names.split(',').map(part).collect()
    }

    /// The workload of this name: `one:N`, `two:N`, `many:N,Ns` or `mixed:SEED:COUNT:SHARING`.
    #[must_use]
    pub fn by_name(&self, name: &str) -> Option<Workload> {
        let (kind, number) = name.split_once(':')?;
        if kind == "many" {
            return self.parts(number).map(|parts| self.many(&parts));
        }
        if kind == "mixed" {
            let [seed, count, has_sharing] = number.split(':').collect::<Vec<_>>()[..] else {
                return None;
            };
            let (count, has_sharing) = (count.parse().ok()?, has_sharing.parse().ok()?);
            return Some(mixed::mixed(seed.parse().ok()?, count, has_sharing));
        }
        let number = number.parse().ok()?;
        match kind {
            "one" if number < self.ones() => Some(self.one(number)),
            "two" if number < self.twos() => Some(self.two(number)),
            _ => None,
        }
    }
}

/// Builds a workload. The set-up ends before the steps begin, and with it every open file, so the
/// steps open the files instead.
fn workload(name: String, setup: Vec<WorkloadOp>, steps: Vec<WorkloadStep>) -> Workload {
    let (opens, setup) =
        setup.into_iter().partition::<Vec<_>, _>(|op| matches!(op, WorkloadOp::Open(_)));
    let steps = opens.into_iter().map(WorkloadStep::Do).chain(steps).collect();
    Workload { name, setup, steps }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use offshoot_vfs::Timestamp;

    use super::{Generator, Workload, WorkloadOp, WorkloadStep, mixed};
    use crate::crash::manners::EngineManners;
    use crate::crash::picture::{self, Picture};
    use crate::crash::workload::Runner;
    use crate::model::Model;
    use crate::random::Random;

    /// Runs a workload on the model alone.
    fn run(workload: &Workload) {
        let model = Model::made_at(Timestamp::default());
        let mut runner = Runner::new(&model, 1).with_subvolumes(&model);
        for op in &workload.setup {
            runner.run(op).unwrap_or_else(|error| panic!("{workload}: {op}: {error}"));
        }
        for step in &workload.steps {
            runner.run_step(step).unwrap_or_else(|error| panic!("{workload}: {step}: {error}"));
        }
    }

    /// What the model shows after the set-up, without times.
    fn shown(model: &Model) -> Picture {
        let mut picture =
            picture::take(model, model, EngineManners::default()).expect("the model is in order");
        picture.forget_times();
        picture
    }

    /// An operation that changes nothing tests nothing.
    #[test]
    fn all_of_one_operation_do_something() {
        let generator = Generator::default();
        for number in 0..generator.ones() {
            let workload = generator.one(number);
            let model = Model::made_at(Timestamp::default());
            let mut runner = Runner::new(&model, 1).with_subvolumes(&model);
            let setup: Vec<_> = workload.setup.iter().cloned().map(WorkloadStep::Do).collect();
            runner.run_steps(&setup).expect("it can be done");
            let before = shown(&model);
            runner.run_steps(&workload.steps).expect("it can be done");
            // The model does not show which files share space.
            let is_seen = !workload.has(|op| matches!(op, WorkloadOp::Dedupe(_)));
            assert_eq!(shown(&model) != before, is_seen, "{workload}");
        }
    }

    /// What an operation needs exists, whatever operation comes before it.
    #[test]
    fn all_can_be_done() {
        let generator = Generator::default();
        (0..generator.ones()).for_each(|number| run(&generator.one(number)));
        let seed = crate::random::seed_of_run();
        let mut random = Random::new(seed);
        for _ in 0..20_000 {
            let number = random.below(generator.twos() as u64);
            run(&generator.two(usize::try_from(number).expect("an index")));
        }
        for seed in 0..20 {
            run(&mixed::mixed(seed, 200, true));
        }
        // A subvolume in one that has become read-only is deleted.
        let nested = "many:1365,682s,1363s,94,1409,544,842,1080s,1103,749";
        run(&generator.by_name(nested).expect("it has numbers of this generator"));
        for _ in 0..500 {
            let mut part = |_| {
                let number = usize::try_from(random.below(generator.ones() as u64));
                (number.expect("an index"), random.below(3) == 0)
            };
            run(&generator.many(&(0..20).map(&mut part).collect::<Vec<_>>()));
        }
    }

    #[test]
    fn all_of_one_operation_are_different() {
        let generator = Generator::default();
        let show = |number| {
            let text = generator.one(number).to_string();
            text.split_once(' ').expect("a name in front").1.to_owned()
        };
        let all: BTreeSet<String> = (0..generator.ones()).map(show).collect();
        assert_eq!(all.len(), generator.ones());
        assert!((1000..2000).contains(&all.len()), "{} workloads", all.len());
        assert!(generator.twos() > 2_000_000, "{} workloads", generator.twos());
    }

    #[test]
    fn what_is_shown_can_be_parsed() {
        let generator = Generator::default();
        for number in 0..generator.ones() {
            let workload = generator.one(number);
            let shown = workload.to_string();
            let (name, rest) = shown.split_once(" [").expect("a name and a set-up");
            let (setup, steps) = rest.split_once("] ").expect("steps behind the set-up");
            assert_eq!(Workload::parse(name, setup, steps).as_ref(), Ok(&workload), "{shown}");
        }
        for wrong in ["create", "write a 5", "chmod a 9", "truncate a", "fly a", "link a"] {
            assert!(Workload::parse("wrong", "", wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_name_leads_to_its_workload() {
        let generator = Generator::default();
        for workload in [
            generator.one(17),
            generator.two(123_456),
            generator.many(&[(5, false), (17, true)]),
            mixed::mixed(3, 9, false),
        ] {
            assert_eq!(generator.by_name(&workload.name), Some(workload));
        }
        assert_eq!(generator.by_name("one:999999"), None);
        assert_eq!(generator.by_name("three:1"), None);
    }
}
