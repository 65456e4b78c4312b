//! `cargo xtask campaign mount`: suites and real programs for a long time, on both formats, with
//! every way of storing data.

use std::time::Duration;

use offshoot_device::VolumeFormat;

use super::format::on;
use super::suites::{PASSED, PASSED_READ_ONLY, run_fsx_in_all_ways, run_pjdfstest, ways};
use super::work::{LONG, run_all};
use super::{power, require};

/// The parts of the campaign. `OFFSHOOT_PART` chooses one of them.
const PARTS: [&str; 4] = ["pjdfstest", "programs", "power", "fsx"];

/// How long `fsx` runs in each way, in seconds. All ways run at once.
const SECONDS: u64 = 300;

#[test]
#[ignore = "minutes: `cargo xtask campaign mount`"]
fn campaign() {
    let judges = require().expect("root, loop devices and FUSE");
    let seconds = std::env::var("OFFSHOOT_SECONDS").ok();
    let seconds =
        seconds.map_or(SECONDS, |text| text.parse().expect("OFFSHOOT_SECONDS is a number"));
    let only = std::env::var("OFFSHOOT_PART").ok();
    let is_chosen = |part: &str| only.as_deref().is_none_or(|only| only == part);
    assert!(PARTS.into_iter().any(is_chosen), "OFFSHOOT_PART={only:?}, the parts are {PARTS:?}");
    for format in [VolumeFormat::Btrfs, VolumeFormat::Xfs] {
        on(format, || {
            for way in ways() {
                if is_chosen("pjdfstest") {
                    run_pjdfstest(&judges, way, &[], PASSED);
                    run_pjdfstest(&judges, way, &["erofs"], PASSED_READ_ONLY);
                    println!("pjdfstest with {way} on {format:?}: passed");
                }
                if is_chosen("programs") {
                    run_all(&judges, way, LONG);
                    println!("real programs with {way} on {format:?}: passed");
                }
            }
            if is_chosen("fsx") {
                run_fsx_in_all_ways(&judges, Duration::from_secs(seconds));
            }
        });
    }
    if is_chosen("power") {
        power::cut_under_a_database(&judges, 200);
    }
}
