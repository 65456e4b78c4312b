//! The workloads that are too many for a test run: `cargo xtask campaign crash`.
//!
//! The variable `OFFSHOOT_WORKLOADS` chooses them: `one`, `two`, `long`, `brinks`, `faults` or
//! `subvolumes`; a number, for a sample of so many workloads of two operations; or the name of one
//! workload, as a failure prints it. With `OFFSHOOT_JUDGED_EVERY=100` the outside judges look at
//! one state of 100.

use offshoot_device::CrashPlan;
use offshoot_testkit::crash::Workload;
use offshoot_testkit::crash::generate::{Generator, long};
use offshoot_testkit::random::seed_of_run;

use crate::engine::{
    DISCARDING, EAGER, ONE, OURS, OurEngine, PACKING, SETS, SMALL, SMALL_NODES, TINY, VolumeShape,
    WITHOUT_LOGS,
};
use crate::{brink_plan, explore, inflict, some_twos, subvolumes};

/// How many workloads are explored before their tally is printed.
const BATCH: usize = 1000;

/// One workload of so many is explored on [`ALSO`] as well.
const ELSEWHERE: usize = 20;

/// The outside judges look at one state of so many, unless the variable says otherwise.
const JUDGED: usize = 3000;

/// The engines and volumes that all workloads run on.
const EVERYWHERE: [(&OurEngine, VolumeShape); 2] = [(&OURS, ONE), (&EAGER, ONE)];

/// The engines and volumes that some of the workloads run on.
const ALSO: [(&OurEngine, VolumeShape); 10] = [
    (&WITHOUT_LOGS, ONE),
    (&PACKING, ONE),
    (&DISCARDING, SMALL),
    (&DISCARDING, SETS[1]),
    (&OURS, SMALL),
    (&OURS, SMALL_NODES),
    (&OURS, SETS[0]),
    (&OURS, SETS[1]),
    (&OURS, SETS[2]),
    (&OURS, SETS[3]),
];

/// The outside judges look at one state of this many.
fn judged_every() -> usize {
    let every = std::env::var("OFFSHOOT_JUDGED_EVERY")
        .map_or(JUDGED, |every| every.parse().expect("OFFSHOOT_JUDGED_EVERY is a number"));
    assert!(every > 0, "of no states none can be judged");
    every
}

#[test]
#[ignore = "takes as long as one likes; cargo xtask campaign crash runs it"]
fn campaign() {
    let generator = Generator::default();
    let seed = seed_of_run();
    let plan = CrashPlan { exhaustive_limit: 6, samples_per_epoch: 40, seed, tears: true };
    let what = std::env::var("OFFSHOOT_WORKLOADS").unwrap_or_else(|_| "one".to_owned());
    let ones = || (0..generator.ones()).map(|number| generator.one(number));
    match &what[..] {
        "one" => in_batches(plan, ones()),
        "two" => in_batches(plan, (0..generator.twos()).map(|number| generator.two(number))),
        "faults" => inflict(seed, || ones().collect()),
        "subvolumes" => subvolumes::campaign(plan, judged_every()),
        "long" => {
            // The states of these are large, and without sampling there are many.
            let plan = CrashPlan { exhaustive_limit: 2, samples_per_epoch: 4, ..plan };
            for (engine, shape) in EVERYWHERE.into_iter().chain(ALSO) {
                // All files of the tides together take a quarter of a member.
                let len = usize::try_from(shape.bytes / 24).expect("small");
                let longer = [long::rounds(40), long::tides(6, len)];
                explore_at(engine, shape, plan, &longer);
            }
        }
        "brinks" => {
            let full =
                [(&OURS, TINY, 256 << 10), (&EAGER, TINY, 256 << 10), (&OURS, SMALL, 512 << 10)];
            for (engine, shape, large) in full {
                let brink = std::iter::once(long::brink(40, large));
                explore(engine, shape, brink_plan(seed), judged_every(), brink);
            }
        }
        _ => match (what.parse(), generator.by_name(&what)) {
            (Ok(count), _) => in_batches(plan, some_twos(&generator, count, seed)),
            (_, Some(workload)) => {
                println!("{workload}");
                let one = std::slice::from_ref(&workload);
                everywhere(plan, one, one);
                inflict(seed, || one.to_vec());
            }
            _ => panic!("OFFSHOOT_WORKLOADS={what} is no workload"),
        },
    }
}

fn in_batches(plan: CrashPlan, mut workloads: impl Iterator<Item = Workload>) {
    loop {
        let batch: Vec<Workload> = workloads.by_ref().take(BATCH).collect();
        let Some(last) = batch.last() else { return };
        println!("up to {}:", last.name);
        let some: Vec<Workload> = batch.iter().step_by(ELSEWHERE).cloned().collect();
        everywhere(plan, &batch, &some);
    }
}

/// Explores `all` on [`EVERYWHERE`], and `some` on [`ALSO`].
fn everywhere(plan: CrashPlan, all: &[Workload], some: &[Workload]) {
    let all = EVERYWHERE.into_iter().map(|place| (place, all));
    for ((engine, shape), workloads) in all.chain(ALSO.map(|place| (place, some))) {
        explore_at(engine, shape, plan, workloads);
    }
}

fn explore_at(engine: &OurEngine, shape: VolumeShape, plan: CrashPlan, workloads: &[Workload]) {
    // A small member has no copy of its superblock, so a torn one would be the end of the volume.
    let plan = CrashPlan { tears: plan.tears && shape.has_copies_of_superblock(), ..plan };
    explore(engine, shape, plan, judged_every(), workloads.iter().cloned());
}
