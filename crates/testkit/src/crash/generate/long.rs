//! Workloads that are longer than the numbered ones.

use crate::crash::workload::{Op, Step, Workload};

fn workload(name: &str, steps: Vec<Step>) -> Workload {
    Workload { name: name.to_owned(), setup: Vec::new(), steps }
}

/// Each round makes a file with data, writes over another one, moves a third, and syncs.
#[must_use]
pub fn rounds(count: usize) -> Workload {
    let write = |path: String, len| Op::Write { path, offset: 0, len };
    let mut steps =
        vec![Step::Do(Op::Create("count".into())), Step::Do(Op::Create("passing0".into()))];
    for round in 0..count {
        let [file, count] = [format!("file{round}"), "count".into()];
        let [from, to] = [round, round + 1].map(|number| format!("passing{number}"));
        let ops = [
            Op::Create(file.clone()),
            write(file, 1 + round * 2500),
            write(count, 8),
            Op::Rename(from, to),
        ];
        steps.extend(ops.map(Step::Do));
        steps.push(Step::Sync);
    }
    workload("rounds", steps)
}

/// Writes `count` files of `len` bytes, each synced, and takes them away again two by two: space is
/// allocated to them and given back.
#[must_use]
pub fn tides(count: usize, len: usize) -> Workload {
    let path = |number| format!("file{number}");
    let mut steps = Vec::new();
    for number in 0..count {
        steps.push(Step::Do(Op::Create(path(number))));
        steps.push(Step::Do(Op::Write { path: path(number), offset: 0, len }));
        steps.push(Step::Sync);
    }
    for number in 0..count {
        steps.push(Step::Do(Op::Unlink(path(number))));
        if number % 2 == 1 {
            steps.push(Step::Sync);
        }
    }
    // What became empty is given back by the commit after the one that emptied it.
    steps.push(Step::Do(Op::Mkdir("last".into())));
    steps.push(Step::Sync);
    workload("tides", steps)
}
