//! Power cuts while we write: every state that a cut may leave opens, is sound, and holds what was
//! promised. Half of the volumes were cut before, so that their opening is a recovery, which is cut
//! too; so is the unmount.
//!
//! | test | what is explored |
//! |---|---|
//! | `one_operation` | some workloads of one operation, on each shape of volume |
//! | `many_operations` | random operations one after the other, some of them synced |
//! | `a_log_that_goes_around` | large structures that change, past the end of the log |
//! | `a_full_volume` | a volume that is full, with what is done then |
//! | `faults` | an error at every request of some workloads |
//! | `kernel` | logs that the kernel left behind the same workloads |
//! | `campaign` | as much as the caller asks for: `cargo xtask campaign xfs-crash` |
//! | `sabotage` | devices that are broken on purpose: the explorer must find each fault |

mod campaign;
mod engine;
mod judge;
mod kernel;
mod sabotage;
#[path = "../recovery/served.rs"]
mod served;

use std::sync::Arc;

use offshoot_device::{CrashPlan, MemoryDevice};
use offshoot_testkit::crash::explore::{ExplorationCounts, StateExplorer, StateJudge};
use offshoot_testkit::crash::faults::{FaultCounts, Inflicter};
use offshoot_testkit::crash::generate::mixed::mixed;
use offshoot_testkit::crash::generate::{Generator, long};
use offshoot_testkit::crash::{Workload, WorkloadOp, report};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::MISSING_FLAGS;
use offshoot_testkit::xfs::judges::{self, XfsJudges};

use engine::{SHAPES, USUAL, XfsShape, XfsUnderTest};
use judge::OutsideXfsJudges;

/// Whether the format and the volume can do all operations of a workload.
fn can_be_done(workload: &Workload, shape: XfsShape) -> bool {
    !workload.has(|op| match op {
        WorkloadOp::SetFlags(_, flags) => flags.intersects(MISSING_FLAGS),
        WorkloadOp::Clone(_) | WorkloadOp::Dedupe(_) => !shape.has_sharing,
        WorkloadOp::Exchange(..) => shape.has_parents,
        WorkloadOp::SetCompression(..)
        | WorkloadOp::Subvolume(_)
        | WorkloadOp::Snapshot { .. }
        | WorkloadOp::DeleteSubvolume(_)
        | WorkloadOp::DropDeleted
        | WorkloadOp::SetReadOnly(..)
        | WorkloadOp::SetDefault(_) => true,
        _ => false,
    })
}

/// The numbers of the workloads of one operation that can be done.
fn ones(generator: &Generator, shape: XfsShape) -> Vec<usize> {
    let all = 0..generator.ones();
    all.filter(|number| can_be_done(&generator.one(*number), shape)).collect()
}

fn index(random: &mut Random, bound: usize) -> usize {
    usize::try_from(random.below(bound as u64)).expect("small")
}

/// A workload of `count` random operations, of which about a third is followed by its sync.
fn many(generator: &Generator, numbers: &[usize], count: usize, random: &mut Random) -> Workload {
    let part = |_| (numbers[index(random, numbers.len())], random.below(3) == 0);
    generator.many(&(0..count).map(part).collect::<Vec<_>>())
}

fn plan(seed: u64) -> CrashPlan {
    CrashPlan { exhaustive_limit: 3, samples_per_epoch: 3, seed, tears: true }
}

/// Explores workloads on a volume. The outside judges look at one state of `judged_every`.
fn explore(
    judges: &XfsJudges,
    tested: &XfsUnderTest,
    plan: CrashPlan,
    judged_every: usize,
    workloads: impl Iterator<Item = Workload> + Send,
) -> ExplorationCounts {
    let outside = OutsideXfsJudges::new(judges);
    let judge = |devices: &[Arc<MemoryDevice>]| outside.judge(devices);
    let judge = Some((&judge as &StateJudge<'_>, judged_every));
    let image = vec![tested.image.clone()];
    let explorer = StateExplorer { engine: &tested.engine, image, plan, judge };
    explorer.explore_all(workloads)
}

/// The same, and prints how many states there were.
fn explore_and_tell(
    judges: &XfsJudges,
    (name, tested): (&str, &XfsUnderTest),
    plan: CrashPlan,
    judged_every: usize,
    workloads: impl Iterator<Item = Workload> + Send,
) {
    let started = std::time::Instant::now();
    let counts = explore(judges, tested, plan, judged_every, workloads);
    report(format_args!("{name}: {counts}, in {} ms", started.elapsed().as_millis()));
    assert!(counts.states > 0, "nothing was explored");
}

#[test]
fn one_operation() {
    let Some(judges) = judges::require() else { return };
    let (mut random, generator) = (Random::new(seed_of_run()), Generator::default());
    for shape in SHAPES {
        let numbers = ones(&generator, shape);
        let some: Vec<_> =
            (0..4).map(|_| generator.one(numbers[index(&mut random, numbers.len())])).collect();
        let tested = XfsUnderTest::new(&judges, shape);
        let plan = plan(random.number());
        explore_and_tell(&judges, (shape.name, &tested), plan, 60, some.into_iter());
    }
}

#[test]
fn many_operations() {
    let Some(judges) = judges::require() else { return };
    let (mut random, generator) = (Random::new(seed_of_run()), Generator::default());
    let shape = SHAPES[index(&mut random, SHAPES.len())];
    let numbers = ones(&generator, shape);
    let some: Vec<_> = (0..2).map(|_| many(&generator, &numbers, 12, &mut random)).collect();
    let tested = XfsUnderTest::new(&judges, shape);
    let plan = plan(random.number());
    explore_and_tell(&judges, (shape.name, &tested), plan, 60, some.into_iter());
}

/// Structures that grow and shrink, in a log that goes around.
#[test]
fn a_log_that_goes_around() {
    let Some(judges) = judges::require() else { return };
    let mut random = Random::new(seed_of_run());
    let shape = SHAPES[index(&mut random, SHAPES.len())];
    let tested = XfsUnderTest::near_the_end_of_the_log(&judges, shape);
    let plan = CrashPlan { exhaustive_limit: 1, samples_per_epoch: 1, ..plan(random.number()) };
    let workload = std::iter::once(mixed(random.number(), 40, shape.has_sharing));
    explore_and_tell(&judges, (shape.name, &tested), plan, 60, workload);
}

#[test]
fn a_full_volume() {
    let Some(judges) = judges::require() else { return };
    let tested = XfsUnderTest::new(&judges, USUAL);
    let plan = CrashPlan { exhaustive_limit: 1, samples_per_epoch: 1, ..plan(seed_of_run()) };
    let workload = std::iter::once(long::brink(2, 1 << 20));
    explore_and_tell(&judges, (USUAL.name, &tested), plan, 100, workload);
}

/// Inflicts an error on each request while the volume does these workloads.
fn inflict(tested: &XfsUnderTest, workloads: impl Iterator<Item = Workload>) -> FaultCounts {
    let image = vec![tested.image.clone()];
    let (engine, has_copies, spares_members) = (&tested.engine, false, false);
    let inflicter = Inflicter { engine, image, has_copies, spares_members };
    let mut all = FaultCounts::default();
    for workload in workloads {
        all += inflicter.inflict(&workload).unwrap_or_else(|e| panic!("{workload}: {e}"));
    }
    all
}

#[test]
fn faults() {
    let Some(judges) = judges::require() else { return };
    let (mut random, generator) = (Random::new(seed_of_run()), Generator::default());
    let numbers = ones(&generator, USUAL);
    let some: Vec<_> =
        (0..2).map(|_| generator.one(numbers[index(&mut random, numbers.len())])).collect();
    let counts = inflict(&XfsUnderTest::new(&judges, USUAL), some.into_iter());
    report(counts);
    assert!(counts.faults > 0, "there were no requests");
}
