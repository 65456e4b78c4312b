//! Power cuts and failing devices.
//!
//! | test | what is explored |
//! |---|---|
//! | `one_operation` | every workload of one operation, and a third of them without tree logs |
//! | `two_operations` | a sample of those of two |
//! | `compressed` | some of these with an engine that compresses everything |
//! | `several_members` | some of these on several members, which lose their caches one by one |
//! | `small_nodes` | some of these where trees have more levels |
//! | `commits_by_itself` | some of these with an engine that commits more often than the caller asks |
//! | `discarding` | some of these with an engine that trims, and discards what commits free; the device leaves garbage there |
//! | `moving` | some of these with an engine that moves everything to another place, and makes a member smaller and larger |
//! | `quotas` | some of these on volumes with quotas, which `btrfs check` counts |
//! | `rounds` | many commits one after the other |
//! | `tides` | space that is allocated to chunks and given back |
//! | `brink`, `brink_of_mixed_groups` | a volume that is full, with what is done to make room |
//! | `subvolumes` | pairs of operations on subvolumes, with drops of deleted ones; a drop, cut between its steps |
//! | `faults` | an error, a short write, silent corruption at every request of some of these |
//! | `campaign` | as much as the caller asks for: `cargo xtask campaign crash` |
//! | `members` | writes and flushes that fail on members of every profile, for each kind of write; power cuts after that; members that come back |
//! | `superblocks`, `truncation`, `sharing` | faults that the explorer found in our engine |
//! | `in_images` | volumes in a qcow2, whose file is cut |
//! | `synchronous` | every call on synchronous files and directories, without a sync |
//! | `sabotage` | engines that are broken on purpose: the explorer must find each fault |

mod accounts;
mod campaign;
mod engine;
mod images;
mod judge;
mod members;
mod sabotage;
mod sharing;
#[path = "../shared/shown.rs"]
mod shown;
#[path = "../shared/subvolume_calls.rs"]
mod subvolume_calls;
mod subvolumes;
mod superblocks;
mod synchronous;
mod truncation;

use std::fmt::Display;
use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, SubvolumeId};
use offshoot_btrfs_format::chunk::Profile;
use offshoot_device::{CrashDevice, CrashEntry, CrashPlan, MemoryDevice};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::crash::explore::{StateExplorer, StateJudge};
use offshoot_testkit::crash::faults::{FaultCounts, Inflicter};
use offshoot_testkit::crash::generate::{Generator, long};
use offshoot_testkit::crash::workload::Runner;
use offshoot_testkit::crash::{
    MemberDevices, TestedEngine, Workload, WorkloadOp, WorkloadStep, report,
};
use offshoot_testkit::random::{Random, seed_of_run};

use engine::{
    ALL_TWICE, DISCARDING, EAGER, MOVING, ONE, OURS, OurEngine, PACKING, SETS, SMALL, SMALL_NODES,
    TINY, VolumeShape, WITHOUT_LOGS, made_by_progs, volume,
};
use judge::OutsideJudges;

/// How many workloads of two operations a test run explores.
const TWOS: usize = 120;

/// A test run inflicts faults on one workload of so many of one operation.
const FAULTY: usize = 100;

/// How many more workloads a run takes for each of [`KINDS`].
const OF_A_KIND: usize = 8;

/// Workloads with operations that a random sample may leave out.
const KINDS: [fn(&Workload) -> bool; 18] = [
    |workload| does(workload, |op| matches!(op, WorkloadOp::Fallocate { .. })),
    |workload| does(workload, |op| matches!(op, WorkloadOp::Copy(..))),
    |workload| does(workload, |op| matches!(op, WorkloadOp::Clone(_))),
    |workload| does(workload, |op| matches!(op, WorkloadOp::Dedupe(_))),
    |workload| does(workload, |op| matches!(op, WorkloadOp::WriteDirect { .. })),
    |workload| workload.writes_in_place(),
    |workload| does(workload, |op| matches!(op, WorkloadOp::SetFlags(..))),
    |workload| does(workload, |op| matches!(op, WorkloadOp::SetAcl { .. })),
    |workload| does(workload, |op| matches!(op, WorkloadOp::SetCompression(..))),
    |workload| does(workload, |op| matches!(op, WorkloadOp::RenameNoReplace(..))),
    |workload| does(workload, |op| matches!(op, WorkloadOp::Fifo(_) | WorkloadOp::Device(_))),
    |workload| {
        does(workload, |op| matches!(op, WorkloadOp::SetReadOnly(..) | WorkloadOp::SetDefault(_)))
    },
    |workload| does(workload, |op| matches!(op, WorkloadOp::Subvolume(_))),
    |workload| does(workload, |op| matches!(op, WorkloadOp::Snapshot { .. })),
    |workload| does(workload, |op| matches!(op, WorkloadOp::DeleteSubvolume(_))),
    |workload| does(workload, |op| matches!(op, WorkloadOp::DropDeleted)),
    |workload| {
        workload.has_step_on_subvolume(
            |op, path| matches!(op, WorkloadOp::Rename(from, _) if from == path),
        )
    },
    |workload| {
        workload.has_step_on_subvolume(
            |op, path| matches!(op, WorkloadOp::Exchange(one, _) if one == path),
        )
    },
];

fn does(workload: &Workload, is_of_kind: fn(&WorkloadOp) -> bool) -> bool {
    workload.steps.iter().any(|step| matches!(step, WorkloadStep::Do(op) if is_of_kind(op)))
}

fn plan(seed: u64) -> CrashPlan {
    CrashPlan { exhaustive_limit: 4, samples_per_epoch: 8, seed, tears: true }
}

/// Explores workloads on a volume of this shape. The outside judges look at one state of
/// `judged_every`. Prints how many states there were.
fn explore(
    engine: &OurEngine,
    shape: VolumeShape,
    plan: CrashPlan,
    judged_every: usize,
    workloads: impl Iterator<Item = Workload> + Send,
) {
    explore_on(engine, volume(plan.seed, shape), shape, plan, judged_every, workloads);
}

/// The same on this volume. Messages call it `name`.
fn explore_on(
    engine: &OurEngine,
    image: MemberDevices,
    name: impl Display,
    plan: CrashPlan,
    judged_every: usize,
    workloads: impl Iterator<Item = Workload> + Send,
) {
    let started = std::time::Instant::now();
    let outside = OutsideJudges::new();
    let judge = |devices: &[Arc<MemoryDevice>]| match &outside {
        Some(outside) => outside.judge(devices),
        None => Ok(()),
    };
    let judge = outside.is_some().then_some((&judge as &StateJudge<'_>, judged_every));
    let explorer = StateExplorer { engine, image, plan, judge };
    let tally = explorer.explore_all(workloads);
    report(format_args!("{name}: {tally}, in {} ms", started.elapsed().as_millis()));
    assert!(tally.states > 0, "nothing was explored");
    assert!(judge.is_none() || tally.judged > 0, "nothing was judged from outside");
}

/// Workloads of two operations that `seed` chooses.
fn some_twos(generator: &Generator, count: usize, seed: u64) -> impl Iterator<Item = Workload> {
    let mut random = Random::new(seed);
    let all = generator.twos() as u64;
    let mut number = move || usize::try_from(random.below(all)).expect("an index");
    (0..count).map(move |_| generator.two(number()))
}

#[test]
fn one_operation() {
    let (seed, generator) = (seed_of_run(), Generator::default());
    let all = (0..generator.ones()).map(|number| generator.one(number));
    explore(&OURS, ONE, plan(seed), 1000, all);
}

#[test]
fn two_operations() {
    let (seed, generator) = (seed_of_run(), Generator::default());
    let of_kinds = (1..).zip(KINDS).flat_map(|(number, is_of_kind)| {
        let all = some_twos(&generator, usize::MAX, seed.wrapping_add(number));
        all.filter(is_of_kind).take(OF_A_KIND)
    });
    explore(&OURS, ONE, plan(seed), 1000, some_twos(&generator, TWOS, seed).chain(of_kinds));
}

#[test]
fn one_operation_without_logs() {
    let (seed, generator) = (seed_of_run(), Generator::default());
    let third = usize::try_from(seed % 3).expect("a small number");
    let some = (third..generator.ones()).step_by(3).map(|number| generator.one(number));
    explore(&WITHOUT_LOGS, ONE, plan(seed), 1000, some);
}

#[test]
fn two_operations_without_logs() {
    let (seed, generator) = (seed_of_run(), Generator::default());
    explore(&WITHOUT_LOGS, ONE, plan(seed), 1000, some_twos(&generator, TWOS, seed));
}

#[test]
fn compressed() {
    let (seed, generator) = (seed_of_run(), Generator::default());
    let twos = some_twos(&generator, 30, seed);
    explore(&PACKING, ONE, plan(seed), 250, twos.chain([long::rounds(6)]));
}

#[test]
fn several_members() {
    let (seed, generator) = (seed_of_run(), Generator::default());
    for (number, shape) in (1..).zip(SETS) {
        explore(&OURS, shape, plan(seed), 250, some_twos(&generator, 8, seed.wrapping_add(number)));
    }
}

#[test]
fn commits_by_itself() {
    let (seed, generator) = (seed_of_run(), Generator::default());
    assert_commits_by_itself(&volume(seed, ONE));
    let twos = some_twos(&generator, 30, seed);
    explore(&EAGER, ONE, plan(seed), 1000, twos.chain([long::rounds(4)]));
}

/// Requires that the eager engine commits although no caller asks for it.
fn assert_commits_by_itself(devices: &MemberDevices) {
    let crash = Arc::new(CrashDevice::new(devices[0].clone()));
    let fs = EAGER.open_writable(vec![crash.clone()]).expect("it opens");
    let steps = long::rounds(4).steps;
    let steps: Vec<WorkloadStep> =
        steps.into_iter().filter(|step| *step != WorkloadStep::Sync).collect();
    Runner::new(&*fs, 1).run_steps(&steps).expect("there is room");
    let log = crash.log();
    let barriers = log.entries().iter().filter(|one| matches!(one, CrashEntry::Barrier { .. }));
    assert!(barriers.count() > 10, "it waits to be asked: {log:?}");
}

#[test]
fn discarding() {
    let (seed, generator) = (seed_of_run(), Generator::default());
    assert_discards(&volume(seed, SMALL));
    let twos = some_twos(&generator, 80, seed);
    let whole = CrashPlan { tears: false, ..plan(seed) };
    explore(&DISCARDING, SMALL, whole, 1000, twos.chain([long::rounds(6)]));
    explore(&DISCARDING, SETS[1], plan(seed), 250, some_twos(&generator, 3, seed));
    let plan = CrashPlan { exhaustive_limit: 2, samples_per_epoch: 4, ..plan(seed) };
    explore(&DISCARDING, ONE, plan, 100, std::iter::once(long::tides(2, 5 << 20)));
}

/// The engine moves everything when it opens a volume, so cuts fall among the moves. It does so
/// again where a workload drops deleted subvolumes, between other changes.
#[test]
fn moving() {
    let (seed, generator) = (seed_of_run(), Generator::default());
    let plan = CrashPlan { exhaustive_limit: 2, samples_per_epoch: 3, ..plan(seed) };
    let twos = |number| some_twos(&generator, 2, seed.wrapping_add(number));
    let drops = some_twos(&generator, usize::MAX, seed.wrapping_add(1))
        .filter(|workload| does(workload, |op| matches!(op, WorkloadOp::DropDeleted)))
        .take(2);
    explore(&MOVING, ONE, plan, 200, twos(2).chain(drops).chain([long::rounds(2)]));
    explore(&MOVING, SMALL_NODES, plan, 200, twos(3));
    explore(&MOVING, SETS[0], plan, 200, twos(4).take(1));
}

/// Requires that the discarding engine discards after it has opened a volume, and after commits.
fn assert_discards(devices: &MemberDevices) {
    let crash = Arc::new(CrashDevice::new(devices[0].clone()));
    let discards = || {
        let log = crash.log();
        log.entries().iter().filter(|one| matches!(one, CrashEntry::Discard { .. })).count()
    };
    let fs = DISCARDING.open_writable(vec![crash.clone()]).expect("it opens");
    let at_first = discards();
    Runner::new(&*fs, 1).run_steps(&long::rounds(4).steps).expect("there is room");
    assert!(at_first > 0 && discards() > at_first + 4, "{at_first} discards, then {}", discards());
}

/// In every state the quotas are as before, marked as inconsistent, or right.
#[test]
fn quotas() {
    let Some(judges) = judges::require() else { return };
    let (seed, generator) = (seed_of_run(), Generator::default());
    for options in ["-O bgt,quota", "-O bgt,squota", "-O bgt,squota -n 4096"] {
        let image = made_by_progs(&judges, options);
        let twos = some_twos(&generator, 10, seed);
        let with_subvolumes = some_twos(&generator, usize::MAX, seed.wrapping_add(1))
            .filter(|workload| does(workload, is_about_subvolumes))
            .take(20);
        let all = twos.chain(with_subvolumes).chain([long::rounds(4)]);
        explore_on(&OURS, image, options, plan(seed), 100, all);
    }
}

fn is_about_subvolumes(op: &WorkloadOp) -> bool {
    matches!(
        op,
        WorkloadOp::Subvolume(_)
            | WorkloadOp::Snapshot { .. }
            | WorkloadOp::DeleteSubvolume(_)
            | WorkloadOp::DropDeleted
    )
}

#[test]
fn rounds() {
    let plan = CrashPlan { samples_per_epoch: 12, ..plan(seed_of_run()) };
    for shape in [ONE, SMALL_NODES] {
        explore(&OURS, shape, plan, 200, std::iter::once(long::rounds(12)));
    }
}

#[test]
fn small_nodes() {
    let (seed, generator) = (seed_of_run(), Generator::default());
    explore(&OURS, SMALL_NODES, plan(seed), 1000, some_twos(&generator, 50, seed));
}

#[test]
fn tides() {
    let (seed, workload) = (seed_of_run(), long::tides(4, 5 << 20));
    assert_moves_chunks(&workload, &volume(seed, ONE));
    let plan = CrashPlan { exhaustive_limit: 2, samples_per_epoch: 4, ..plan(seed) };
    explore(&OURS, ONE, plan, 100, std::iter::once(workload));
}

/// Requires that the workload allocates chunks until it begins to remove, and then frees as many.
fn assert_moves_chunks(workload: &Workload, devices: &MemberDevices) {
    let chunks = || {
        let volume =
            BtrfsVolume::open(devices.clone(), &EngineOptions::default()).expect("it opens");
        volume.chunks().len()
    };
    let is_removal = |step: &WorkloadStep| matches!(step, WorkloadStep::Do(WorkloadOp::Unlink(_)));
    let setup = workload.setup.iter().cloned().map(WorkloadStep::Do);
    let steps: Vec<WorkloadStep> = setup.chain(workload.steps.iter().cloned()).collect();
    let ebb = steps.iter().position(is_removal).expect("it removes");
    let before = chunks();
    let fs = OURS.open_writable(devices.clone()).expect("it opens");
    let mut runner = Runner::new(&*fs, 1);
    runner.run_steps(&steps[..ebb]).expect("there is room");
    let at_flood = chunks();
    runner.run_steps(&steps[ebb..]).expect("they can be removed");
    assert!(at_flood > before, "{before} chunks, then {at_flood}");
    assert!(chunks() < at_flood, "{at_flood} chunks, then {}", chunks());
}

/// A plan without torn writes. The outside judges need a whole superblock, and on a full volume we
/// must not change the state to give them one.
fn brink_plan(seed: u64) -> CrashPlan {
    CrashPlan { exhaustive_limit: 2, samples_per_epoch: 4, seed, tears: false }
}

#[test]
fn brink() {
    let (seed, workload) = (seed_of_run(), long::brink(3, 512 << 10));
    assert_makes_room(&workload, &volume(seed, SMALL));
    assert_moves_chunks(&workload, &volume(seed, SMALL));
    explore(&OURS, SMALL, brink_plan(seed), 100, std::iter::once(workload));
}

#[test]
fn brink_of_mixed_groups() {
    let (seed, workload) = (seed_of_run(), long::brink(2, 256 << 10));
    assert_makes_room(&workload, &volume(seed, TINY));
    explore(&OURS, TINY, brink_plan(seed), 100, std::iter::once(workload));
}

/// Requires that the volume becomes full, and that the engine makes room in all ways that it has.
fn assert_makes_room(workload: &Workload, devices: &MemberDevices) {
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(devices.clone(), &options).expect("it opens");
    let fs = volume.filesystem(SubvolumeId::FS).expect("every volume has one");
    let setup: Vec<WorkloadStep> = workload.setup.iter().cloned().map(WorkloadStep::Do).collect();
    let mut runner = Runner::new(&fs, 1);
    let mut run =
        |steps: &[WorkloadStep]| runner.run_steps(steps).expect("nothing else goes wrong");
    let refused = run(&[&setup[..], &workload.steps[..]].concat());
    let space = volume.space_stats();
    report(format_args!(
        "{refused} steps were refused, {} commits: {:?}",
        volume.stats().commits,
        space.flushes
    ));
    assert!(refused > 0, "it is not full: {space:#?}");
    assert!(space.flushes.iter().all(|flush| flush.entered > 0), "{space:#?}");
    assert!(volume.stats().commits_for_space > 0, "{space:#?}");
}

/// The engines and volumes that get faults, and whether the volume has several copies of data.
const BEARERS: [(&OurEngine, VolumeShape, bool); 5] = [
    (&OURS, ONE, false),
    (&OURS, ALL_TWICE, true),
    (&OURS, SETS[0], true),
    (&PACKING, ONE, false),
    (&PACKING, ALL_TWICE, true),
];

/// Inflicts every fault while each of [`BEARERS`] does these workloads.
fn inflict(seed: u64, workloads: impl Fn() -> Vec<Workload>) {
    for (engine, shape, has_copies) in BEARERS {
        // Here, a volume of several members can do without any one of them.
        let spares_members = shape.members > 1;
        let inflicter =
            Inflicter { engine, image: volume(seed, shape), has_copies, spares_members };
        let mut all = FaultCounts::default();
        for workload in workloads() {
            all += inflicter.inflict(&workload).unwrap_or_else(|e| panic!("{workload}: {e}"));
        }
        report(format_args!("{shape}: {all}"));
        assert!(all.faults > 0, "there were no requests");
        assert!(all.survived > 0 || shape.profiles[0] == Profile::Single, "{shape}: {all}");
    }
}

#[test]
fn faults() {
    let (seed, generator) = (seed_of_run(), Generator::default());
    inflict(seed, || {
        let ones = (0..generator.ones()).step_by(FAULTY).map(|number| generator.one(number));
        ones.chain(some_twos(&generator, 5, seed)).chain([long::rounds(3)]).collect()
    });
}
