//! The numbered workloads of the crash explorer, done by the kernel.
//!
//! Each workload has a subvolume of its own, and several share a volume. When the kernel commits
//! instead of writing a log, the test judges the logs of the earlier workloads as they were before
//! that commit, and the next workloads start from it.
//!
//! The kernel must keep the same promises that the explorer demands of us, except times, which the
//! kernel takes from its own clock. So these promises are not only ours.

use std::collections::BTreeSet;
use std::ops::Range;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, SubvolumeId};
use offshoot_testkit::btrfs::disks::{Disks, MountedMembers};
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::compare::Aspect;
use offshoot_testkit::crash::calls::DirectoryCalls;
use offshoot_testkit::crash::generate::Generator;
use offshoot_testkit::crash::{Promised, Workload, WorkloadOp, WorkloadStep};
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::{Fallocate, FileSystem};

use crate::cut::{LogShape, SHAPES, at_commit, compare, judge_by, logs, make, mount_options, top};
use crate::subvolume_calls::OurSubvolumes;

/// How many workloads share one volume.
const TOGETHER: usize = 24;

/// Counts the results of workloads.
#[derive(Debug, Default)]
pub(crate) struct WorkloadCounts {
    pub(crate) workloads: usize,
    /// Workloads that ended with a commit.
    pub(crate) committed: usize,
    judged: usize,
    pub(crate) logs: usize,
    /// Promises that were broken.
    broken: Vec<String>,
}

impl WorkloadCounts {
    /// Prints the counts, and fails when a promise was broken.
    #[track_caller]
    pub(crate) fn tell(&self) {
        let Self { workloads, committed, judged, logs, broken } = self;
        println!(
            "{workloads} workloads, {committed} committed, {judged} volumes judged, {logs} logs"
        );
        assert!(broken.is_empty(), "{}", broken.join("\n"));
    }
}

/// A workload, and what it promises.
pub(crate) struct WorkloadTask<'w> {
    pub(crate) workload: &'w Workload,
    pub(crate) promised: Promised,
}

/// Does the steps of one workload.
pub(crate) type StepDoer<'d> = Box<dyn FnMut(&WorkloadStep) + 'd>;

/// A cut volume, and the workloads that are judged in it.
pub(crate) type CutVolume = (Disks, Range<usize>);

fn generation(disks: &Disks) -> u64 {
    at_commit(disks.devices()).superblock().generation.0
}

/// Does one workload after the other, and cuts the volume after each. When a workload commits, this
/// keeps the cut before it, if that has a log. It keeps the last cut too.
pub(crate) fn cut_behind(
    judges: &Judges,
    disks: &Disks,
    tasks: &[WorkloadTask<'_>],
    doers: &mut [StepDoer<'_>],
    tally: &mut WorkloadCounts,
) -> Vec<CutVolume> {
    let mut cuts = Vec::new();
    let mut last: Option<CutVolume> = None;
    let mut committed = generation(disks);
    for (number, (task, step)) in tasks.iter().zip(doers).enumerate() {
        task.workload.steps.iter().for_each(step);
        tally.workloads += 1;
        let now = generation(disks);
        if now != committed {
            committed = now;
            tally.committed += 1;
            // A log is judged before the commit replaces it. Committed data can be judged at any
            // time.
            cuts.extend(last.take_if(|(cut, _)| logs(cut) > 0));
        }
        let first = last.as_ref().map_or(number, |(_, done)| done.start);
        last = Some((disks.copy(judges), first..number + 1));
    }
    cuts.extend(last);
    cuts
}

/// Judges the workloads that are in cut volumes.
#[track_caller]
pub(crate) fn judge_cuts(
    judges: &Judges,
    shape: LogShape,
    cuts: &[CutVolume],
    tasks: &[WorkloadTask<'_>],
    tally: &mut WorkloadCounts,
) {
    let shares = tasks.iter().any(|task| shares_preallocated(task.workload));
    let compare = if shares { compare().without(Aspect::Holes) } else { compare() };
    for (cut, done) in cuts {
        let tasks = &tasks[done.clone()];
        tally.judged += 1;
        tally.logs += logs(cut);
        let names: Vec<_> = tasks.iter().map(|task| format!("\n  {}", task.workload)).collect();
        judge_by(judges, cut, &compare, &format!("{shape:?} {}", names.concat()), 1);
        for task in tasks {
            let problems = broken_promises(cut, task);
            if !problems.is_empty() {
                let problems = problems.join("\n  ");
                tally.broken.push(format!("{shape:?} {}:\n  {problems}", task.workload));
            }
        }
    }
}

/// The promises of a workload that a cut volume breaks.
fn broken_promises(cut: &Disks, task: &WorkloadTask<'_>) -> Vec<String> {
    let volume =
        BtrfsVolume::open(cut.devices(), &EngineOptions::default()).expect("the volume opens");
    let fs = top(&volume);
    let root = fs.lookup(fs.root(), directory(task.workload).as_bytes()).expect("the subvolume");
    let fs = volume.filesystem(SubvolumeId { 0: root.dev }).expect("the subvolume");
    task.promised.judge(&fs, &OurSubvolumes::new(fs.clone())).unwrap_or_else(|error| vec![error])
}

/// The subvolume in which a workload is done.
pub(crate) fn directory(workload: &Workload) -> String {
    workload.name.replace(':', "-")
}

/// Has the kernel do the set-up, and returns the calls that do the other steps.
fn begin<'w>(mount: &MountedMembers, workload: &'w Workload) -> (WorkloadTask<'w>, DirectoryCalls) {
    let root = mount.path().join(directory(workload));
    offshoot_testkit::run::run(
        "btrfs",
        &["-q".as_ref(), "subvolume".as_ref(), "create".as_ref(), root.as_os_str()],
    );
    let attr = HostFilesystem::new(&root).and_then(|host| host.attr(host.root()));
    let promised = Promised::by(workload, &attr.expect("a directory")).expect("it can be done");
    let mut calls = DirectoryCalls::new(root);
    workload.setup.iter().for_each(|op| calls.run(op));
    (WorkloadTask { workload, promised: promised.of_the_kernel() }, calls)
}

fn run_together(
    judges: &Judges,
    shape: LogShape,
    workloads: &[Workload],
    tally: &mut WorkloadCounts,
) {
    let disks = make(judges, shape);
    let mount = disks.mount(&mount_options(shape));
    let (tasks, calls): (Vec<_>, Vec<_>) =
        workloads.iter().map(|workload| begin(&mount, workload)).unzip();
    mount.sync();
    let doer = |mut calls: DirectoryCalls| {
        Box::new(move |step: &WorkloadStep| calls.step(step)) as StepDoer<'_>
    };
    let mut doers: Vec<_> = calls.into_iter().map(doer).collect();
    let cuts = cut_behind(judges, &disks, &tasks, &mut doers, tally);
    drop(doers);
    drop(mount);
    judge_cuts(judges, shape, &cuts, &tasks, tally);
}

/// Does all of `workloads`, each chunk on another shape of volumes.
fn run(workloads: &[Workload], shapes: &[LogShape]) {
    let Some(judges) = judges::require() else { return };
    let mut tally = WorkloadCounts::default();
    for (part, shape) in workloads.chunks(TOGETHER).zip(shapes.iter().cycle()) {
        run_together(&judges, *shape, part, &mut tally);
    }
    tally.tell();
    // The kernel commits where a log would not be enough: for half of the workloads of two
    // operations.
    let is_sample = tally.workloads >= TOGETHER;
    assert!(!is_sample || tally.logs * 4 > tally.workloads, "{tally:?}: too few logs");
}

/// Whether a step syncs a file whose other name was taken over by a rename. The kernel logs what it
/// knows of the file: both names, or the removal of the taken one, which then leads nowhere.
fn syncs_what_was_replaced(workload: &Workload) -> bool {
    let steps = workload.steps.iter().filter_map(|step| match step {
        WorkloadStep::Do(op) => Some(op),
        _ => None,
    });
    let ops: Vec<_> = workload.setup.iter().chain(steps).collect();
    let is_synced = |name: &String| {
        workload.steps.iter().any(|step| match step {
            WorkloadStep::Fsync(synced) | WorkloadStep::Fdatasync(synced) => synced == name,
            _ => false,
        })
    };
    let is_taken =
        |name: &String| ops.iter().any(|op| matches!(op, WorkloadOp::Rename(_, to) if to == name));
    ops.iter().any(|op| match op {
        WorkloadOp::Link(one, other) => {
            (is_synced(one) && is_taken(other)) || (is_synced(other) && is_taken(one))
        }
        _ => false,
    })
}

/// Whether the kernel can do this workload and leave a log. It must end with an fsync, because a
/// sync leaves no log. The kernel moves no data within these files. It makes subvolumes at a time
/// of its own, so the test could not recognise them.
fn can_be_logged(workload: &Workload) -> bool {
    let moves = |step: &WorkloadStep| match step {
        WorkloadStep::Do(WorkloadOp::Fallocate { what, .. }) => {
            matches!(what, Fallocate::Collapse | Fallocate::Insert)
        }
        _ => false,
    };
    workload.ends_with_fsync()
        && !workload.has_subvolumes()
        && !inherits_list(workload)
        && !workload.steps.iter().any(moves)
        && !syncs_what_was_replaced(workload)
}

/// Whether a workload may share preallocated space. If such a file has no hole there, the kernel
/// takes that space for data when it looks for the next hole.
fn shares_preallocated(workload: &Workload) -> bool {
    let is_share = |op: &WorkloadOp| {
        matches!(op, WorkloadOp::Clone(_) | WorkloadOp::Copy(..) | WorkloadOp::Dedupe(_))
    };
    workload.has(|op| matches!(op, WorkloadOp::Fallocate { .. })) && workload.has(is_share)
}

/// Whether a workload makes something in a directory with a default access control list. The kernel
/// applies the list to new files, and the operations of workloads do not.
fn inherits_list(workload: &Workload) -> bool {
    let is_default = |op: &WorkloadOp| matches!(op, WorkloadOp::SetAcl { is_default: true, .. });
    let changes = workload.steps.iter().filter(|step| matches!(step, WorkloadStep::Do(_)));
    workload.has(is_default) && changes.count() > 1
}

fn ones() -> Vec<Workload> {
    let generator = Generator::default();
    (0..generator.ones()).map(|number| generator.one(number)).filter(can_be_logged).collect()
}

#[test]
fn every_workload_of_one_operation() {
    run(&ones(), &SHAPES);
}

/// Workloads of two operations: those that the variable `OFFSHOOT_WORKLOADS` names, as a failure
/// prints them, or as many as `OFFSHOOT_SWEEP` says. Those that may share preallocated space come
/// together, because the test does not compare holes there.
pub(crate) fn twos() -> Vec<Workload> {
    let generator = Generator::default();
    if let Ok(names) = std::env::var("OFFSHOOT_WORKLOADS") {
        let named = |name| generator.by_name(name).expect("the name of a workload");
        return names.split(',').map(named).collect();
    }
    let mut random = Random::new(seed_of_run());
    let count = std::env::var("OFFSHOOT_SWEEP").map_or(72, |n| n.parse().expect("a number"));
    let all = generator.twos() as u64;
    let numbers: BTreeSet<_> = (0..count).map(|_| random.below(all)).collect();
    let two = |number| generator.two(usize::try_from(number).expect("small"));
    let mut twos: Vec<_> = numbers.into_iter().map(two).collect();
    twos.sort_by_key(shares_preallocated);
    twos
}

#[test]
fn some_workloads_of_two_operations() {
    let some: Vec<_> = twos().into_iter().filter(can_be_logged).collect();
    run(&some, &SHAPES);
}

/// An oracle that finds nothing proves nothing: without the fsync, the test must find a broken
/// promise.
#[test]
fn an_fsync_that_was_left_out_is_found() {
    let Some(judges) = judges::require() else { return };
    // An fsync promises nothing of names in other directories. A file after a deduplication holds
    // the same bytes as before.
    let is_promised = |workload: &Workload| {
        let Some(WorkloadStep::Fsync(synced) | WorkloadStep::Fdatasync(synced)) =
            workload.steps.last()
        else {
            return false;
        };
        let is_elsewhere = |step: &WorkloadStep| match step {
            WorkloadStep::Do(WorkloadOp::Dedupe(_)) => true,
            WorkloadStep::Do(
                WorkloadOp::Rename(from, to) | WorkloadOp::RenameNoReplace(from, to),
            ) => ![from, to].iter().any(|path| path.starts_with(synced)),
            _ => false,
        };
        !workload.steps.iter().any(is_elsewhere)
    };
    let some: Vec<_> = ones().into_iter().filter(is_promised).step_by(9).collect();
    let disks = make(&judges, SHAPES[0]);
    let mount = disks.mount(&mount_options(SHAPES[0]));
    let mut all: Vec<_> = some.iter().map(|workload| begin(&mount, workload)).collect();
    mount.sync();
    for (task, calls) in &mut all {
        let (_, steps) = task.workload.steps.split_last().expect("an fsync");
        for step in steps {
            calls.step(step);
        }
    }
    let cut = disks.copy(&judges);
    let tasks: Vec<_> = all.into_iter().map(|(task, _)| task).collect();
    drop(mount);
    let is_missed = |task: &&WorkloadTask<'_>| broken_promises(&cut, task).is_empty();
    let missed = tasks.iter().filter(is_missed).map(|task| task.workload.to_string());
    let missed: Vec<_> = missed.collect();
    println!("{} of {} were missed", missed.len(), some.len());
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}
