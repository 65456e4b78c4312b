//! `cargo xtask test`: everything that has to pass.

use std::process::ExitCode;
use std::time::Instant;

use offshoot_testkit::disks::scratch_dir;
use offshoot_testkit::io_uring;
use offshoot_testkit::judges::SKIPPED_FILE;

use crate::counts::{Counts, Sums};
use crate::shell::{Result, cargo, cargo_seen, output};
use crate::{licences, setup};

/// The judges, the format, the lints, the tests and the licences, in this order. The last line
/// that it writes counts the tests, also when something failed.
pub(crate) fn test() -> ExitCode {
    let mut tests = Tests::default();
    let result = run(&mut tests);
    if let Err(reason) = &result {
        eprintln!("xtask: {reason}");
    }
    println!("{}", tests.sums());
    if result.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(tests: &mut Tests) -> Result {
    let started = Instant::now();
    setup::ready()?;
    style()?;
    // The development profile compiles the engine with little and the checksums and
    // decompressors with full optimisation, which is the fastest way through both.
    tests.run(None, &["test", "--workspace", "--quiet", "--no-fail-fast"])?;
    match offshoot_testkit::judges::may_mount().and_then(|()| io_uring::can_be_had()) {
        Ok(()) => {
            let over_ring = ("OFFSHOOT_TEST_TRANSPORT", "io_uring");
            let mounts =
                ["test", "--quiet", "--no-fail-fast", "--package", "offshoot", "--test", "mount"];
            tests.run(Some(over_ring), &mounts)?;
        }
        Err(reason) => println!("mounts over io_uring: skipped: {reason}"),
    }
    // The latches of trees under the model checker, which has locks of its own.
    let checked = ["--package", "offshoot-btrfs", "--features", "shuttle"];
    tests.run(None, &[&["test", "--quiet", "--lib"], &checked[..], &["model::"]].concat())?;
    licences::check()?;
    println!("everything passed in {} s", started.elapsed().as_secs());
    Ok(())
}

/// Runs of `cargo test`, counted.
#[derive(Default)]
struct Tests {
    counts: Counts,
    /// What tests wrote that skipped themselves, of each run.
    skipped: String,
}

impl Tests {
    fn run(&mut self, variable: Option<(&str, &str)>, args: &[&str]) -> Result {
        let dir = scratch_dir();
        let file = dir.path().join("skipped");
        let path = file.to_str().ok_or("the path of temporary files is not UTF-8")?;
        std::fs::write(&file, "").map_err(|error| format!("{path}: {error}"))?;
        let variables: Vec<_> = variable.into_iter().chain([(SKIPPED_FILE, path)]).collect();
        let result = cargo_seen(&variables, args, &mut |piece| self.counts.see(piece));
        let skipped = std::fs::read_to_string(&file);
        let skipped = skipped.map_err(|error| format!("{path}: {error}"))?;
        // The same test in another run is another one.
        let run = args.join(" ") + variable.map_or("", |(_, value)| value);
        self.skipped.extend(skipped.lines().map(|line| format!("{run}\t{line}\n")));
        result
    }

    fn sums(&self) -> Sums {
        self.counts.with_skipped(&self.skipped)
    }
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
