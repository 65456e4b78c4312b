//! More than fits into a test run: `cargo xtask campaign crash`.
//!
//! The variable `OFFSHOOT_WORKLOADS` says what is explored: `one`, `two`, `long`, `faults`, `subvolumes`, the number of a
//! sample of those of two operations, or the name of one workload that a failure has told. What
//! a campaign does not find in one hour the next seed may find in a minute.

use offshoot_device::CrashPlan;
use offshoot_testkit::crash::faults::{Inflicted, Inflicter};
use offshoot_testkit::crash::generate::{Generator, long};
use offshoot_testkit::crash::{Workload, seed};

use crate::engine::{EAGER, ONE, OURS, SETS, SMALL_NODES, TINY, volume};
use crate::{brink_plan, explore, some_twos, subvolumes};

/// How many workloads are explored before their tally is printed.
const BATCH: usize = 1000;

/// Of so many workloads one is explored on each other shape as well.
const ELSEWHERE: usize = 20;

/// So many states go by before one is judged from outside.
const JUDGED: usize = 3000;

#[test]
#[ignore = "takes as long as one likes; cargo xtask campaign crash runs it"]
fn campaign() {
    let generator = Generator::default();
    let seed = seed();
    let plan = CrashPlan { exhaustive_limit: 6, samples_per_epoch: 40, seed, torn: true };
    let what = std::env::var("OFFSHOOT_WORKLOADS").unwrap_or_else(|_| "one".to_owned());
    let ones = || (0..generator.ones()).map(|number| generator.one(number));
    match &what[..] {
        "one" => in_batches(plan, ones()),
        "two" => in_batches(plan, (0..generator.twos()).map(|number| generator.two(number))),
        "faults" => faults(seed, ones()),
        "subvolumes" => subvolumes::campaign(plan, JUDGED),
        "long" => {
            // Their states are large, and many without a sample.
            let plan = CrashPlan { exhaustive_limit: 2, samples_per_epoch: 4, ..plan };
            let longer = [long::rounds(40), long::tides(6, 7 << 20)];
            everywhere(plan, &longer, &longer);
            let full = || std::iter::once(long::brink(40, 256 << 10));
            explore(&OURS, TINY, brink_plan(seed), JUDGED, full());
            explore(&EAGER, TINY, brink_plan(seed), JUDGED, full());
        }
        _ => match (what.parse(), generator.by_name(&what)) {
            (Ok(count), _) => in_batches(plan, some_twos(&generator, count, seed)),
            (_, Some(workload)) => {
                println!("{workload}");
                let one = std::slice::from_ref(&workload);
                everywhere(plan, one, one);
                faults(seed, std::iter::once(workload));
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

/// Explores `all` on one member, also with the eager engine, and `some` on every other shape.
fn everywhere(plan: CrashPlan, all: &[Workload], some: &[Workload]) {
    explore(&OURS, ONE, plan, JUDGED, all.iter().cloned());
    explore(&EAGER, ONE, plan, JUDGED, all.iter().cloned());
    for shape in [SMALL_NODES].into_iter().chain(SETS) {
        explore(&OURS, shape, plan, JUDGED, some.iter().cloned());
    }
}

fn faults(seed: u64, workloads: impl Iterator<Item = Workload>) {
    let image = volume(seed, ONE);
    let inflicter = Inflicter { engine: &OURS, image, has_copies: false };
    let mut all = Inflicted::default();
    for workload in workloads {
        all += inflicter.inflict(&workload).unwrap_or_else(|e| panic!("{workload}: {e}"));
    }
    println!("{all}");
}
