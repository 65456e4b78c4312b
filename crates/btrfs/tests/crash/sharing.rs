//! Files that are written in place after another file gave up what they shared.

use offshoot_testkit::crash::explore::StateExplorer;
use offshoot_testkit::crash::{Workload, WorkloadOp, WorkloadStep};
use offshoot_vfs::{Fallocate, FileFlags};

use crate::engine::{ONE, OURS, volume};
use crate::plan;

/// Regression: two files shared extents. As soon as the first gave them up, the second was written
/// in place. A crash before the commit brought the first file back, with the bytes of the second.
#[test]
fn what_a_crash_may_bring_back_is_not_written_over() {
    const LEN: usize = 20_000;
    let [one, other] = ["one", "other"].map(str::to_owned);
    let write = |path: &String| WorkloadOp::Write { path: path.clone(), offset: 0, len: LEN };
    let punch = WorkloadOp::Fallocate {
        path: one.clone(),
        what: Fallocate::PunchHole,
        offset: 0,
        len: LEN as u64 / 4096 * 4096,
    };
    let gives_up =
        [WorkloadOp::Unlink(one.clone()), WorkloadOp::Truncate(one.clone(), 0), punch, write(&one)];
    for (number, gives_up) in (1..).zip(gives_up) {
        let make = |path: &String| {
            [
                WorkloadOp::Create(path.clone()),
                WorkloadOp::SetFlags(path.clone(), FileFlags::NODATACOW),
            ]
        };
        let share = [write(&one), WorkloadOp::Copy(one.clone(), other.clone())];
        let setup = [make(&one), make(&other), share].concat();
        // The engine writes back what the first file gives up, before the second file is written.
        let then = if let WorkloadOp::Unlink(_) = gives_up {
            WorkloadStep::Do(WorkloadOp::Mkdir("directory".into()))
        } else {
            WorkloadStep::Fsync(one.clone())
        };
        let steps = vec![
            WorkloadStep::Do(gives_up),
            WorkloadStep::Do(write(&other)),
            then,
            WorkloadStep::Sync,
        ];
        let workload = Workload { name: format!("sharing {number}"), setup, steps };
        let image = volume(number, ONE);
        let explorer = StateExplorer { engine: &OURS, image, plan: plan(number), judge: None };
        explorer.explore(&workload).unwrap_or_else(|problem| panic!("{workload}: {problem}"));
    }
}
