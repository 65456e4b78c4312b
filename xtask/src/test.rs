//! `cargo xtask test`: everything that has to pass.

use std::time::Instant;

use offshoot_testkit::io_uring;

use crate::shell::{Result, cargo, cargo_with, output};
use crate::{licences, setup};

/// The judges, the format, the lints, the tests and the licences, in this order.
pub(crate) fn test() -> Result {
    let started = Instant::now();
    setup::ready()?;
    style()?;
    // The development profile compiles the engine with little and the checksums and
    // decompressors with full optimisation, which is the fastest way through both.
    cargo(&["test", "--workspace", "--quiet", "--no-fail-fast"])?;
    match offshoot_testkit::judges::may_mount().and_then(|()| io_uring::can_be_had()) {
        Ok(()) => {
            let over_ring = [("OFFSHOOT_TEST_TRANSPORT", "io_uring")];
            let mounts =
                ["test", "--quiet", "--no-fail-fast", "--package", "offshoot", "--test", "mount"];
            cargo_with(&over_ring, &mounts)?;
        }
        Err(reason) => println!("mounts over io_uring: skipped: {reason}"),
    }
    // The latches of trees under the model checker, which has locks of its own.
    let checked = ["--package", "offshoot-btrfs", "--features", "shuttle"];
    cargo(&[&["test", "--quiet", "--lib"], &checked[..], &["model::"]].concat())?;
    licences::check()?;
    println!("everything passed in {} s", started.elapsed().as_secs());
    Ok(())
}

/// The toolchain whose formatter and lints the code is kept clean with.
const STYLED_WITH: &str = "1.95.";

/// Format and lints. Another toolchain formats otherwise and has other lints, which says nothing of the
/// code: there they are left out.
fn style() -> Result {
    // `rustc 1.95.0 (59807616e 2026-04-14)`
    let version = output("rustc", &["--version"]).unwrap_or_default();
    let version = version.split_whitespace().nth(1).unwrap_or("unknown").to_owned();
    if !version.starts_with(STYLED_WITH) {
        println!(
            "format and lints are checked with Rust {STYLED_WITH}x; this is {version}: skipped"
        );
        return Ok(());
    }
    cargo(&["fmt", "--all", "--check"])?;
    let deny = ["--all-targets", "--quiet", "--", "-D", "warnings"];
    cargo(&[&["clippy", "--workspace"], &deny[..]].concat())?;
    let checked = ["clippy", "--package", "offshoot-btrfs", "--features", "shuttle"];
    cargo(&[&checked[..], &deny[..]].concat())
}
