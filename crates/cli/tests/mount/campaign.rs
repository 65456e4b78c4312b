//! `cargo xtask campaign mount`: suites and real programs for a long time, with every way of
//! storing data.

use std::time::Duration;

use super::suites::{PASSED, PASSED_READ_ONLY, WAYS, run_fsx_in_all_ways, run_pjdfstest};
use super::work::{LONG, run_all};
use super::{power, require};

/// How long `fsx` runs in each way, in seconds. All ways run at once.
const SECONDS: u64 = 300;

#[test]
#[ignore = "minutes: `cargo xtask campaign mount`"]
fn campaign() {
    let judges = require().expect("root, loop devices and FUSE");
    let seconds = std::env::var("OFFSHOOT_SECONDS").ok();
    let seconds =
        seconds.map_or(SECONDS, |text| text.parse().expect("OFFSHOOT_SECONDS is a number"));
    for way in WAYS {
        run_pjdfstest(&judges, way, &[], PASSED);
        run_pjdfstest(&judges, way, &["erofs"], PASSED_READ_ONLY);
        println!("pjdfstest with {way}: passed");
        run_all(&judges, way, LONG);
        println!("real programs with {way}: passed");
    }
    power::cut_under_a_database(&judges, 200);
    run_fsx_in_all_ways(&judges, Duration::from_secs(seconds));
}
