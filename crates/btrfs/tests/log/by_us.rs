//! Logs that we wrote: the workloads of the crash explorer, and stories, cut after an fsync.
//!
//! We cut the volume without closing it. The kernel replays one copy and we replay another, as with
//! the kernel's own logs. Both must show the same, and everything that was promised. Times must be
//! equal to the nanosecond, because here we set them. At the end everything is synced, and the
//! judges look once more.
//!
//! An fsync may always commit. But most of the workloads must leave a log: otherwise the tests
//! would prove nothing about logs.

use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, Compress, EngineOptions, Filesystem};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::crash::generate::Generator;
use offshoot_testkit::crash::workload::Runner;
use offshoot_testkit::crash::{Promised, Workload, WorkloadOp, WorkloadStep};
use offshoot_testkit::random::seed_of_run;
use offshoot_vfs::{EntryPlace, FileSystem, FileSystemMut, NewFile, Timestamp};

use crate::cut::{LogShape, SHAPES, make, top};
use crate::subvolume_calls::OurSubvolumes;
use crate::workloads::{
    StepDoer, WorkloadCounts, WorkloadTask, cut_behind, directory, judge_cuts, twos,
};

/// How many workloads share one volume.
const TOGETHER: usize = 24;

/// The shapes that we can write to.
pub(crate) fn shapes() -> impl Iterator<Item = LogShape> {
    SHAPES.into_iter().filter(|shape| !shape.mkfs.contains("^free-space-tree"))
}

/// Opens a volume for writing. It commits when the caller asks for it, and not by the clock.
pub(crate) fn open(disks: &Disks, shape: LogShape) -> Arc<BtrfsVolume> {
    let method = |option: &'static str, forced| {
        let method = shape.mount.strip_prefix(option)?;
        Some(Compress { method: method.parse().expect("a method"), is_forced: forced })
    };
    let compress = method(",compress-force=", true).or_else(|| method(",compress=", false));
    let options = EngineOptions {
        commit_interval: None,
        has_tree_log: true,
        compress,
        ..EngineOptions::default()
    };
    BtrfsVolume::open_writable(disks.writable_devices(), &options).expect("it opens")
}

/// The attributes of new directories and subvolumes.
pub(crate) fn new_file() -> NewFile {
    let at = Timestamp { secs: 1_500_000_000, nanos: 7 };
    NewFile { permissions: 0o755, uid: 0, gid: 0, umask: None, at }
}

/// A new subvolume below the top one.
pub(crate) fn subvolume(volume: &Arc<BtrfsVolume>, name: &str) -> Filesystem {
    let top = top(volume);
    let place = EntryPlace { dir: top.root(), name: name.as_bytes() };
    let id = top.create_subvolume(place, &new_file()).expect("a subvolume");
    volume.filesystem(id).expect("it is there")
}

/// Does the workloads in one volume, cuts it, and judges what is there.
pub(crate) fn run_together(
    judges: &Judges,
    shape: LogShape,
    workloads: &[Workload],
    tally: &mut WorkloadCounts,
) {
    let disks = make(judges, shape);
    let volume = open(&disks, shape);
    let subvolume = |workload| OurSubvolumes::new(subvolume(&volume, &directory(workload)));
    let subvolumes: Vec<_> = workloads.iter().map(subvolume).collect();
    let (tasks, mut doers): (Vec<_>, Vec<_>) =
        workloads.iter().zip(&subvolumes).map(|(workload, fs)| begin(workload, fs)).unzip();
    top(&volume).sync().expect("a commit");
    let mut cuts = cut_behind(judges, &disks, &tasks, &mut doers, tally);
    drop(doers);
    top(&volume).sync().expect("a commit");
    drop(subvolumes);
    drop(volume);
    disks.assert_checks();
    cuts.push((disks, 0..tasks.len()));
    judge_cuts(judges, shape, &cuts, &tasks, tally);
}

/// Does the set-up, and returns a function that does the other steps.
fn begin<'w, 'f>(
    workload: &'w Workload,
    ours: &'f OurSubvolumes,
) -> (WorkloadTask<'w>, StepDoer<'f>) {
    let fs = &ours.fs;
    let root = fs.attr(fs.root()).expect("the root");
    let promised = Promised::by(workload, &root).expect("it can be done");
    let mut runner = Runner::new(fs, 1).with_subvolumes(ours);
    let setup: Vec<_> = workload.setup.iter().cloned().map(WorkloadStep::Do).collect();
    runner.run_steps(&setup).unwrap_or_else(|e| panic!("{workload}: {e}"));
    let name = workload.to_string();
    let step = move |step: &WorkloadStep| {
        let done = runner.run_steps(std::slice::from_ref(step));
        done.map_or_else(|e| panic!("{name}: {step}: {e}"), drop);
    };
    (WorkloadTask { workload, promised }, Box::new(step))
}

/// Does all of `workloads`, each chunk on another shape of volumes.
fn run(workloads: &[Workload]) {
    let Some(judges) = judges::require() else { return };
    let mut tally = WorkloadCounts::default();
    let all: Vec<_> = shapes().collect();
    for (part, shape) in workloads.chunks(TOGETHER).zip(all.into_iter().cycle()) {
        run_together(&judges, shape, part, &mut tally);
    }
    tally.tell();
    // At present more than half of them leave a log.
    let is_sample = tally.workloads >= TOGETHER;
    assert!(!is_sample || tally.logs * 5 > tally.workloads * 2, "{tally:?}: too few logs");
}

/// Whether this workload can share a volume with others. One that sets the default subvolume
/// cannot, because a volume has only one.
fn can_share_a_volume(workload: &Workload) -> bool {
    !workload.has(|op| matches!(op, WorkloadOp::SetDefault(_)))
}

#[test]
fn every_other_workload_of_one_operation() {
    let generator = Generator::default();
    let first = usize::try_from(seed_of_run() % 2).expect("a small number");
    let ones = (first..generator.ones()).step_by(2).map(|number| generator.one(number));
    run(&ones.filter(can_share_a_volume).collect::<Vec<_>>());
}

#[test]
fn some_workloads_of_two_operations() {
    run(&twos().into_iter().filter(can_share_a_volume).collect::<Vec<_>>());
}
