//! Logs that the kernel left behind the numbered workloads, in every state that a cut before the
//! end of the unmount may leave of them. We recover them, and find what the workload promised.
//!
//! The kernel makes a file and gives it its owner in two operations, so only states behind the last
//! sync are judged: it makes durable what came before.

use offshoot_device::{CrashDevice, CrashLog};
use offshoot_testkit::crash::calls::DirectoryCalls;
use offshoot_testkit::crash::manners::NoSubvolumes;
use offshoot_testkit::crash::{Promised, TestedEngine, WorkloadStep};
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::xfs::disk::XfsDisk;
use offshoot_vfs::{Fallocate, FileSystem};

use super::*;
use crate::engine::{OurXfs, XFS_MANNERS};
use crate::served::ServedDevices;

/// The mark behind the last step.
const END: &str = "end";

/// Whether the last step makes all operations durable, and a program can do them.
fn can_be_judged(workload: &Workload, shape: XfsShape) -> bool {
    let is_left_out = |op: &WorkloadOp| match op {
        // The kernel applies default lists to new files, and the operations of workloads do not.
        WorkloadOp::SetAcl { is_default, .. } => *is_default,
        WorkloadOp::Fallocate { what, .. } => {
            matches!(what, Fallocate::Collapse | Fallocate::Insert)
        }
        // The file keeps its time, or its bytes: the sync has nothing to do.
        WorkloadOp::Exchange(..) | WorkloadOp::Dedupe(_) => true,
        _ => false,
    };
    let is_sync = |step: &WorkloadStep| *step == WorkloadStep::Sync;
    let ends = workload.ends_with_fsync() || workload.steps.last().is_some_and(is_sync);
    can_be_done(workload, shape) && !workload.has(is_left_out) && ends
}

/// Has the kernel do a workload on a copy of `empty`. Returns what it wrote from the first step on,
/// and what it promised.
fn record(
    judges: &XfsJudges,
    served: &ServedDevices,
    empty: &XfsDisk,
    workload: &Workload,
) -> (CrashLog, Promised) {
    let disk = empty.copy();
    let mount = disk.mount("rw,noatime", &[]);
    let host = HostFilesystem::new(mount.path()).unwrap();
    let root = host.attr(host.root()).unwrap();
    drop(host);
    let mut calls = DirectoryCalls::new(mount.path().to_owned());
    workload.setup.iter().for_each(|op| calls.run(op));
    drop(mount);
    let device = Arc::new(CrashDevice::new(disk.device()));
    let shown = served.show(device.clone());
    let mount = XfsDisk::served(judges, shown.path()).mount("rw,noatime", &[]);
    let mut calls = calls.moved_to(mount.path().to_owned());
    workload.steps.iter().for_each(|step| calls.step(step));
    device.mark(END);
    drop(calls);
    drop(mount);
    let promised = Promised::with_manners(workload, &root, XFS_MANNERS);
    (device.log(), promised.expect("the model can do it").of_the_kernel())
}

/// Recovers what the kernel left of a workload. Returns the number of states.
fn judge_workload(
    judges: &XfsJudges,
    served: &ServedDevices,
    (empty, engine): (&XfsDisk, &OurXfs),
    workload: &Workload,
    plan: CrashPlan,
) -> Result<usize, String> {
    let (log, promised) = record(judges, served, empty, workload);
    let is_tearable = |offset, bytes: &[u8]| engine.bears_torn(offset, bytes);
    let mut states = 0;
    for state in log.states_torn_where(&plan, &is_tearable) {
        let state = state.map_err(|error| error.to_string())?;
        if !state.marks().iter().any(|mark| **mark == *END) {
            continue;
        }
        let of = |problem: &dyn std::fmt::Display| {
            format!("{workload}: state {} ({}): {problem}", state.number, state.description)
        };
        let copy = || Arc::new(state.devices[0].snapshot());
        engine.check(vec![copy()]).map_err(|error| of(&error))?;
        if states == 0 {
            OutsideXfsJudges::new(judges).judge(&[copy()]).map_err(|problem| of(&problem))?;
        }
        let opened = engine.open_writable(vec![copy()]).map_err(|error| of(&error))?;
        let root = opened.root();
        let broken = promised.judge(&*opened, &NoSubvolumes { root }).map_err(|p| of(&p))?;
        if !broken.is_empty() {
            return Err(of(&broken.join("\n  ")));
        }
        states += 1;
    }
    Ok(states)
}

/// Has the kernel do `count` workloads of each shape.
pub(crate) fn run(shapes: &[XfsShape], count: usize, plan: CrashPlan) {
    let (mut random, generator) = (Random::new(plan.seed), Generator::default());
    let (mut states, mut broken) = (0, Vec::new());
    for shape in shapes {
        let Some(judges) = judges::require() else { return };
        let empty = XfsDisk::create(&judges, shape.mib);
        empty.mkfs(shape.mkfs);
        let engine = XfsUnderTest::of(&empty).engine;
        let served = ServedDevices::start();
        let twos = std::iter::repeat_with(|| generator.two(index(&mut random, generator.twos())));
        for workload in twos.filter(|workload| can_be_judged(workload, *shape)).take(count) {
            match judge_workload(&judges, &served, (&empty, &engine), &workload, plan) {
                Ok(count) => states += count,
                Err(problem) => broken.push(format!("{}: {problem}", shape.name)),
            }
        }
    }
    report(format_args!("{states} states of {count} workloads on each shape"));
    assert!(broken.is_empty(), "{}", broken.join("\n\n"));
    assert!(states > 0, "nothing was judged");
}

#[test]
fn logs_that_the_kernel_left() {
    let mut random = Random::new(seed_of_run());
    let shape = SHAPES[index(&mut random, SHAPES.len())];
    run(&[shape], 2, plan(random.number()));
}
