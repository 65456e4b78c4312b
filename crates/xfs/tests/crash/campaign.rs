//! The workloads that are too many for a test run: `cargo xtask campaign xfs-crash`.
//!
//! The variable `OFFSHOOT_WORKLOADS` chooses them: `one`, `two`, `long`, `mixed`, `faults`,
//! `kernel`; a number, for so many workloads of random operations; or the name of one workload, as
//! a failure prints it. `OFFSHOOT_SHAPES=1k` chooses volumes by their names, separated by commas.
//! With `OFFSHOOT_JUDGED_EVERY=100` the outside judges look at one state of 100.

use super::*;

/// How many workloads are explored before their counts are printed.
const BATCH: usize = 50;

/// How many workloads that are mixed, each with the processors for itself.
const MIXED: usize = 100;

/// How many workloads the kernel does.
const KERNELS: usize = 100;

/// How many operations a random workload has at most.
const MOST_OPERATIONS: usize = 24;

fn variable(name: &str, otherwise: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| otherwise.to_owned())
}

#[test]
#[ignore = "takes as long as one likes; cargo xtask campaign xfs-crash runs it"]
fn campaign() {
    let seed = seed_of_run();
    let what = variable("OFFSHOOT_WORKLOADS", "one");
    let names = variable("OFFSHOOT_SHAPES", "");
    let every = variable("OFFSHOOT_JUDGED_EVERY", "500").parse().expect("a number");
    let is_wanted =
        |shape: &XfsShape| names.is_empty() || names.split(',').any(|n| n == shape.name);
    let plan = CrashPlan { exhaustive_limit: 4, samples_per_epoch: 12, seed, tears: true };
    for shape in SHAPES.into_iter().filter(is_wanted) {
        let Some(judges) = judges::require() else { return };
        run(&judges, shape, plan, every, &what);
    }
}

fn run(judges: &XfsJudges, shape: XfsShape, plan: CrashPlan, every: usize, what: &str) {
    let generator = Generator::default();
    let numbers = ones(&generator, shape);
    let mut random = Random::new(plan.seed);
    let tested = XfsUnderTest::new(judges, shape);
    let in_batches = |workloads: &mut dyn Iterator<Item = Workload>| loop {
        let batch: Vec<_> = workloads.take(BATCH).collect();
        if batch.is_empty() {
            return;
        }
        explore_and_tell(judges, (shape.name, &tested), plan, every, batch.into_iter());
    };
    match (what, what.parse::<usize>(), generator.by_name(what)) {
        ("one", ..) => in_batches(&mut numbers.iter().map(|number| generator.one(*number))),
        ("two", ..) => {
            let mut all = (0..generator.twos()).map(|number| generator.two(number));
            in_batches(&mut all.by_ref().filter(|workload| can_be_done(workload, shape)));
        }
        ("long", ..) => {
            let tested = XfsUnderTest::near_the_end_of_the_log(judges, shape);
            let plan = CrashPlan { exhaustive_limit: 2, samples_per_epoch: 4, ..plan };
            let long = [long::rounds(40), long::tides(6, 3 << 20), long::brink(12, 1 << 20)];
            explore_and_tell(judges, (shape.name, &tested), plan, every, long.into_iter());
        }
        ("kernel", ..) => kernel::run(&[shape], KERNELS, plan),
        ("faults", ..) => {
            let all = numbers.iter().map(|number| generator.one(*number));
            report(inflict(&tested, all));
        }
        ("mixed", ..) => {
            let tested = XfsUnderTest::near_the_end_of_the_log(judges, shape);
            let plan = CrashPlan { exhaustive_limit: 2, samples_per_epoch: 3, ..plan };
            for _ in 0..MIXED {
                let count = 10 + index(&mut random, 150);
                let workload = std::iter::once(mixed(random.number(), count, shape.has_sharing));
                explore_and_tell(judges, (shape.name, &tested), plan, every, workload);
            }
        }
        (_, Ok(count), _) => {
            let one = |_| {
                let operations = 2 + index(&mut random, MOST_OPERATIONS - 1);
                many(&generator, &numbers, operations, &mut random)
            };
            in_batches(&mut (0..count).map(one));
        }
        (_, _, Some(workload)) if can_be_done(&workload, shape) => {
            println!("{workload}");
            in_batches(&mut std::iter::once(workload));
        }
        (_, _, Some(_)) => println!("{what} cannot be done on {}", shape.name),
        _ => panic!("OFFSHOOT_WORKLOADS={what} is no workload"),
    }
}
