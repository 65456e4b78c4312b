//! Files that are written in place after another file gave up what they shared.

use offshoot_testkit::crash::explore::Explorer;
use offshoot_testkit::crash::{Op, Step, Workload};
use offshoot_vfs::{Fallocate, FileFlags};

use crate::engine::{ONE, OURS, volume};
use crate::plan;

/// Regression: two files shared extents. As soon as the first gave them up, the second was written
/// in place. A crash before the commit brought the first file back, with the bytes of the second.
#[test]
fn what_a_crash_may_bring_back_is_not_written_over() {
    const LEN: usize = 20_000;
    let [one, other] = ["one", "other"].map(str::to_owned);
    let write = |path: &String| Op::Write { path: path.clone(), offset: 0, len: LEN };
    let punch = Op::Fallocate {
        path: one.clone(),
        what: Fallocate::PunchHole,
        offset: 0,
        len: LEN as u64 / 4096 * 4096,
    };
    let gives_up = [Op::Unlink(one.clone()), Op::Truncate(one.clone(), 0), punch, write(&one)];
    for (number, gives_up) in (1..).zip(gives_up) {
        let make = |path: &String| {
            [Op::Create(path.clone()), Op::SetFlags(path.clone(), FileFlags::NODATACOW)]
        };
        let share = [write(&one), Op::Copy(one.clone(), other.clone())];
        let setup = [make(&one), make(&other), share].concat();
        // The engine writes back what the first file gives up, before the second file is written.
        let then = if let Op::Unlink(_) = gives_up {
            Step::Do(Op::Mkdir("directory".into()))
        } else {
            Step::Fsync(one.clone())
        };
        let steps = vec![Step::Do(gives_up), Step::Do(write(&other)), then, Step::Sync];
        let workload = Workload { name: format!("sharing {number}"), setup, steps };
        let image = volume(number, ONE);
        let explorer = Explorer { engine: &OURS, image, plan: plan(number), judge: None };
        explorer.explore(&workload).unwrap_or_else(|problem| panic!("{workload}: {problem}"));
    }
}
