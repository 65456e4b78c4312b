//! Workloads that are longer than the numbered ones.

use crate::crash::workload::{Workload, WorkloadOp, WorkloadStep};

fn workload(name: &str, steps: Vec<WorkloadStep>) -> Workload {
    Workload { name: name.to_owned(), setup: Vec::new(), steps }
}

/// Each round makes a file with data, overwrites another one, renames a third, and syncs.
#[must_use]
pub fn rounds(count: usize) -> Workload {
    let write = |path: String, len| WorkloadOp::Write { path, offset: 0, len };
    let mut steps = vec![
        WorkloadStep::Do(WorkloadOp::Create("count".into())),
        WorkloadStep::Do(WorkloadOp::Create("passing0".into())),
    ];
    for round in 0..count {
        let [file, count] = [format!("file{round}"), "count".into()];
        let [from, to] = [round, round + 1].map(|number| format!("passing{number}"));
        let ops = [
            WorkloadOp::Create(file.clone()),
            write(file, 1 + round * 2500),
            write(count, 8),
            WorkloadOp::Rename(from, to),
        ];
        steps.extend(ops.map(WorkloadStep::Do));
        steps.push(WorkloadStep::Sync);
    }
    workload("rounds", steps)
}

/// Writes `count` files of `len` bytes, each synced, and then removes them two by two, so that the
/// engine allocates space and frees it again.
#[must_use]
pub fn tides(count: usize, len: usize) -> Workload {
    let path = |number| format!("file{number}");
    let mut steps = Vec::new();
    for number in 0..count {
        steps.push(WorkloadStep::Do(WorkloadOp::Create(path(number))));
        steps.push(WorkloadStep::Do(WorkloadOp::Write { path: path(number), offset: 0, len }));
        steps.push(WorkloadStep::Sync);
    }
    for number in 0..count {
        steps.push(WorkloadStep::Do(WorkloadOp::Unlink(path(number))));
        if number % 2 == 1 {
            steps.push(WorkloadStep::Sync);
        }
    }
    // The commit after the one that emptied a block group removes it.
    steps.push(WorkloadStep::Do(WorkloadOp::Mkdir("last".into())));
    steps.push(WorkloadStep::Sync);
    workload("tides", steps)
}

/// For a volume that has room for less than 56 files of `large` bytes. The set-up makes files until
/// the volume is full, however many that takes. Then, in each of `count` rounds, files are removed,
/// made and renamed. Each round takes as much space as the one before freed, and more.
#[must_use]
pub fn brink(count: usize, large: usize) -> Workload {
    const FILES: usize = 56;
    let write = |path: String, len| WorkloadStep::Try(WorkloadOp::Write { path, offset: 0, len });
    let make = |path: &str| WorkloadStep::Try(WorkloadOp::Create(path.to_owned()));
    let name = |number| format!("large{number}");
    let mut setup = Vec::new();
    for number in 0..FILES {
        setup.push(WorkloadOp::Create(name(number)));
    }
    let mut steps: Vec<WorkloadStep> =
        (0..FILES).map(|number| write(name(number), large)).collect();
    for round in 0..count {
        steps.push(WorkloadStep::Do(WorkloadOp::Unlink(name(round))));
        for number in 0..5 {
            let (path, moved) =
                (format!("small{round}-{number}"), format!("moved{round}-{number}"));
            steps.push(make(&path));
            steps.push(write(path.clone(), [0, 300, 5000, 30_000, 0][number]));
            steps.push(WorkloadStep::Try(WorkloadOp::Rename(path, moved)));
        }
        // This file takes the space of the removed one, and more.
        steps.push(make(&name(FILES + round)));
        steps.push(write(name(FILES + round), large));
        if round % 3 == 2 {
            steps.push(WorkloadStep::Sync);
        }
    }
    // Removing many files empties a block group, which the engine then removes.
    steps.extend((count..FILES).map(|number| WorkloadStep::Do(WorkloadOp::Unlink(name(number)))));
    steps.extend([
        WorkloadStep::Sync,
        WorkloadStep::Do(WorkloadOp::Mkdir("last".into())),
        WorkloadStep::Sync,
    ]);
    Workload { setup, ..workload("brink", steps) }
}
