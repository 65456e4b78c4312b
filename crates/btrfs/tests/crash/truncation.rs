//! A truncation with a commit in the middle of it. The explorer found the fault.

use offshoot_testkit::crash::explore::StateExplorer;
use offshoot_testkit::crash::{Workload, WorkloadOp, WorkloadStep};

use crate::engine::{EAGER, ONE, volume};
use crate::plan;

/// Regression: we stored the last sector of the shorter file, with zeros behind the new end, before
/// we cut the rest. After a crash in between, the file had its old length and zeros in its data.
#[test]
fn a_file_that_is_cut_half_way_has_no_zeros_in_it() {
    let path = "file".to_owned();
    for (len, size) in [(10_000, 5000), (10_000, 110), (30_000, 8192), (5000, 4097), (5000, 1)] {
        let write = WorkloadOp::Write { path: path.clone(), offset: 0, len };
        let setup = vec![WorkloadOp::Create(path.clone()), write];
        let steps = vec![
            WorkloadStep::Do(WorkloadOp::Truncate(path.clone(), size)),
            // This operation commits what was done so far before it begins.
            WorkloadStep::Do(WorkloadOp::Mkdir("directory".into())),
            WorkloadStep::Sync,
        ];
        let workload = Workload { name: format!("{len} to {size}"), setup, steps };
        let image = volume(size, ONE);
        let explorer = StateExplorer { engine: &EAGER, image, plan: plan(size), judge: None };
        explorer.explore(&workload).unwrap_or_else(|problem| panic!("{workload}: {problem}"));
    }
}
