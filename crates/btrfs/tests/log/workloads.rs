//! The numbered workloads of the crash explorer, done by the kernel.
//!
//! Each is done in a subvolume of its own, several in one volume. When the kernel commits instead of writing a log, what was logged before is judged, and
//! those behind go on from there.
//!
//! A file that was synced holds what it held then, and a directory has the names that it had then: the promise is looked up in the mounted volume when the
//! fsync has returned.

use std::collections::BTreeSet;

use offshoot_testkit::crash::generate::Generator;
use offshoot_testkit::crash::{Op, Step, Workload, seed};
use offshoot_testkit::disks::{Disks, Mount};
use offshoot_testkit::judges::{self, Judges};
use offshoot_testkit::random::Random;

use crate::calls::{Calls, Promise};
use crate::cut::{SHAPES, Shape, at_commit, judge, logs, make, mount_options, read_only};

/// Workloads in one volume.
const TOGETHER: usize = 24;

/// What became of workloads.
#[derive(Debug, Default)]
struct Tally {
    workloads: usize,
    committed: usize,
    judged: usize,
    logs: usize,
}

fn generation(disks: &Disks) -> u64 {
    at_commit(disks.devices()).superblock().generation.0
}

/// Does the workloads, and judges what they leave.
fn run_together(judges: &Judges, shape: Shape, workloads: &[Workload], tally: &mut Tally) {
    let disks = make(judges, shape);
    let mount = disks.mount(&mount_options(shape));
    let mut all: Vec<_> = workloads.iter().map(|workload| begin(&mount, workload)).collect();
    mount.sync();
    let mut cuts = Vec::new();
    let mut last: Option<(Disks, Vec<Done<'_>>)> = None;
    let mut committed = generation(&disks);
    for (workload, calls) in workloads.iter().zip(&mut all) {
        workload.steps.iter().for_each(|step| calls.step(step));
        tally.workloads += 1;
        let now = generation(&disks);
        if now != committed {
            committed = now;
            tally.committed += 1;
            cuts.extend(last.take());
            continue;
        }
        let mut done = last.take().map_or_else(Vec::new, |(_, done)| done);
        done.push(Done { workload, promise: calls.last_promise() });
        last = Some((disks.copy(judges), done));
    }
    cuts.extend(last);
    drop(all);
    drop(mount);
    for (cut, done) in cuts {
        tally.judged += 1;
        tally.logs += logs(&cut);
        let fs = read_only(cut.devices());
        for Done { workload, promise } in
            done.iter().filter(|done| !moves_directories(done.workload))
        {
            let root = directory(workload);
            assert_eq!(promise.found_in(&fs, &root), *promise, "{shape:?} {workload}");
        }
        let names: Vec<_> = done.iter().map(|done| format!("\n  {}", done.workload)).collect();
        judge(judges, &cut, &format!("{shape:?} {}", names.concat()), 1);
    }
}

/// A workload that was done, and what its last fsync promised.
struct Done<'w> {
    workload: &'w Workload,
    promise: Promise,
}

/// Whether a workload exchanges names: then a directory above a file may be elsewhere, and an fsync of the file does not promise that this lasts.
fn moves_directories(workload: &Workload) -> bool {
    workload.steps.iter().any(|step| matches!(step, Step::Do(Op::Exchange(..))))
}

/// The subvolume in which a workload is done.
fn directory(workload: &Workload) -> String {
    workload.name.replace(':', "-")
}

fn begin(mount: &Mount, workload: &Workload) -> Calls {
    let root = mount.path().join(directory(workload));
    offshoot_testkit::run::run(
        "btrfs",
        &["-q".as_ref(), "subvolume".as_ref(), "create".as_ref(), root.as_os_str()],
    );
    let mut calls = Calls::new(root);
    workload.setup.iter().for_each(|op| calls.run(op));
    calls
}

/// Does all of `workloads`, each chunk on another shape of volumes.
fn run(workloads: &[Workload], shapes: &[Shape]) {
    let Some(judges) = judges::require() else { return };
    let mut tally = Tally::default();
    for (part, shape) in workloads.chunks(TOGETHER).zip(shapes.iter().cycle()) {
        run_together(&judges, *shape, part, &mut tally);
    }
    println!("{tally:?}");
    // The kernel commits instead where a log would not be enough: for half of those of two operations.
    assert!(tally.logs * 4 > tally.workloads, "{tally:?}: too few logs");
}

/// Those that end with an fsync: a sync leaves no log.
fn ends_with_fsync(workload: &Workload) -> bool {
    matches!(workload.steps.last(), Some(Step::Fsync(_)))
}

#[test]
fn every_workload_of_one_operation() {
    let generator = Generator::default();
    let workloads: Vec<_> =
        (0..generator.ones()).map(|number| generator.one(number)).filter(ends_with_fsync).collect();
    run(&workloads, &SHAPES);
}

#[test]
fn some_workloads_of_two_operations() {
    let (generator, seed) = (Generator::default(), seed());
    let mut random = Random::new(seed);
    let count = std::env::var("OFFSHOOT_SWEEP").map_or(144, |n| n.parse().expect("a number"));
    let numbers: BTreeSet<_> =
        (0..2 * count).map(|_| random.below(generator.twos() as u64)).collect();
    let two = |number| generator.two(usize::try_from(number).expect("small"));
    let workloads: Vec<_> = numbers.into_iter().map(two).filter(ends_with_fsync).collect();
    run(&workloads, &SHAPES);
}
