//! What ours wrote: the workloads of the crash explorer, and stories, done by us and cut behind an
//! fsync.
//!
//! The volume is cut without being closed. The kernel replays one copy and we another, as with its
//! own logs, and both have to show the same, and what was promised, to the nanosecond: the times
//! are ours. In the end everything is synced, and the volume is judged once more.
//!
//! An fsync may always commit. But most of the workloads leave a log: otherwise nothing would be
//! proved of logs.

use std::sync::Arc;

use offshoot_btrfs::{Compress, Filesystem, OpenOptions, Volume};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::crash::generate::Generator;
use offshoot_testkit::crash::workload::Runner;
use offshoot_testkit::crash::{Op, Promised, Step, Workload};
use offshoot_vfs::{FileSystem, FileSystemMut, NewFile, Place, Timestamp};

use crate::cut::{SHAPES, Shape, make, top};
use crate::subvolume_calls::Ours;
use crate::workloads::{Doer, Tally, Task, cut_behind, directory, judge_cuts, twos};

/// Workloads in one volume.
const TOGETHER: usize = 24;

/// The shapes that ours writes to.
pub(crate) fn shapes() -> impl Iterator<Item = Shape> {
    SHAPES.into_iter().filter(|shape| !shape.mkfs.contains("^free-space-tree"))
}

/// Opens a volume to write it. It commits when it is asked to, and not by the clock.
pub(crate) fn open(disks: &Disks, shape: Shape) -> Arc<Volume> {
    let method = |option: &'static str, forced| {
        let method = shape.mount.strip_prefix(option)?;
        Some(Compress { method: method.parse().expect("a method"), forced })
    };
    let compress = method(",compress-force=", true).or_else(|| method(",compress=", false));
    let options =
        OpenOptions { commit_interval: None, tree_log: true, compress, ..OpenOptions::default() };
    Volume::open_writable(disks.writable_devices(), &options).expect("it opens")
}

/// What new directories and subvolumes begin with.
pub(crate) fn new_file() -> NewFile {
    let at = Timestamp { secs: 1_500_000_000, nanos: 7 };
    NewFile { permissions: 0o755, uid: 0, gid: 0, umask: None, at }
}

/// A new subvolume in the top one.
pub(crate) fn subvolume(volume: &Arc<Volume>, name: &str) -> Filesystem {
    let top = top(volume);
    let place = Place { dir: top.root(), name: name.as_bytes() };
    let id = top.create_subvolume(place, &new_file()).expect("a subvolume");
    volume.filesystem(id).expect("it is there")
}

/// Does the workloads in one volume, and judges what is left when it is cut.
pub(crate) fn run_together(
    judges: &Judges,
    shape: Shape,
    workloads: &[Workload],
    tally: &mut Tally,
) {
    let disks = make(judges, shape);
    let volume = open(&disks, shape);
    let subvolume = |workload| Ours(subvolume(&volume, &directory(workload)));
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

/// Does the set-up, and gives who does the rest.
fn begin<'w, 'f>(workload: &'w Workload, ours: &'f Ours) -> (Task<'w>, Doer<'f>) {
    let fs = &ours.0;
    let root = fs.attr(fs.root()).expect("the root");
    let promised = Promised::by(workload, &root).expect("it can be done");
    let mut runner = Runner::new(fs, 1).with_subvolumes(ours);
    let setup: Vec<_> = workload.setup.iter().cloned().map(Step::Do).collect();
    runner.run_steps(&setup).unwrap_or_else(|e| panic!("{workload}: {e}"));
    let name = workload.to_string();
    let step = move |step: &Step| {
        let done = runner.run_steps(std::slice::from_ref(step));
        done.map_or_else(|e| panic!("{name}: {step}: {e}"), drop);
    };
    (Task { workload, promised }, Box::new(step))
}

/// Does all of `workloads`, each chunk on another shape of volumes.
fn run(workloads: &[Workload]) {
    let Some(judges) = judges::require() else { return };
    let mut tally = Tally::default();
    let all: Vec<_> = shapes().collect();
    for (part, shape) in workloads.chunks(TOGETHER).zip(all.into_iter().cycle()) {
        run_together(&judges, shape, part, &mut tally);
    }
    tally.tell();
    // More than half of them, as it is.
    let is_sample = tally.workloads >= TOGETHER;
    assert!(!is_sample || tally.logs * 5 > tally.workloads * 2, "{tally:?}: too few logs");
}

/// Whether it can be done beside others: a volume has one default subvolume.
fn can_share_a_volume(workload: &Workload) -> bool {
    !workload.has(|op| matches!(op, Op::SetDefault(_)))
}

#[test]
fn every_workload_of_one_operation() {
    let generator = Generator::default();
    let ones = (0..generator.ones()).map(|number| generator.one(number));
    run(&ones.filter(can_share_a_volume).collect::<Vec<_>>());
}

#[test]
fn some_workloads_of_two_operations() {
    run(&twos().into_iter().filter(can_share_a_volume).collect::<Vec<_>>());
}
