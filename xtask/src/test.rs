//! `cargo xtask test`: everything that has to pass.

use std::process::ExitCode;
use std::time::Instant;

use offshoot_machine::{SKIPPED_FILE, may_mount, may_switch_io_uring_on};

use crate::counts::{TestCounts, TestSums};
use crate::shell::{Result, cargo, cargo_seen, target_dir};
use crate::{columns, floors, licences, names, setup};

/// The features that switch mechanisms of the engine off for benchmarks.
const MEASURED: &str = "offshoot-cli/measure,offshoot-bench/measure";

/// Checks, in this order, the tools, the format, the lints, comments and pages, floors, names,
/// tests and licences. The last line of output counts the tests, also after a failure.
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
    let over_ring = may_mount().and_then(|()| may_switch_io_uring_on());
    for (what, may) in [("judged tests", &may_mount()), ("mounts over io_uring", &over_ring)] {
        if let Err(reason) = may {
            println!("{what} will be skipped: {reason}");
        }
    }
    style()?;
    columns::check()?;
    floors::check()?;
    names::check()?;
    // The development profile compiles the engine with little optimisation, and the checksums and
    // decompressors with full. In this way building and running together take the least time.
    tests.run(None, &["test", "--workspace", "--no-fail-fast", "--", "--quiet"])?;
    // Options that switch mechanisms off for benchmarks are not in the program that others get.
    let measured = ["test", "--workspace", "--no-fail-fast", "--features", MEASURED];
    let switches = ["--test", "bench", "--test", "fsync", "--", "--quiet"];
    tests.run(None, &[&measured[..], &switches[..], &OF_SWITCHES[..]].concat())?;
    if over_ring.is_ok() {
        let over_ring = ("OFFSHOOT_TEST_TRANSPORT", "io_uring");
        // With `--package`, features of dependencies differ, and all engines are built again.
        let mounts = ["test", "--workspace", "--no-fail-fast", "--test", "mount"];
        let quietly = ["--", "--quiet"];
        tests.run(Some(over_ring), &[&mounts[..], &quietly, &OF_ONE_TRANSPORT[..]].concat())?;
    }
    // The latches of trees, the spread lock, and contexts of the log of XFS under the model checker
    // shuttle, which needs its own locks.
    let checked = [&MODELLED[..], &["--features", "shuttle"]].concat();
    let model = ["test", "--lib", "model::", "--", "--quiet"];
    tests.run(None, &[&model[..2], &checked, &model[2..]].concat())?;
    licences::check()?;
    println!("everything passed in {} s", started.elapsed().as_secs());
    Ok(())
}

/// The tests that need the switches. The others of their programs have run without.
const OF_SWITCHES: [&str; 2] =
    ["every_mechanism_can_be_switched_off", "a_large_directory_is_measured"];

/// The tests of mounts that choose their transport themselves, or are about no request.
const OF_ONE_TRANSPORT: [&str; 12] = [
    "--skip",
    "power::",
    "--skip",
    "transports::",
    "--skip",
    "refused::",
    "--skip",
    "block::",
    "--skip",
    "every_load_is_measured",
    "--skip",
    "wrong_options_are",
];

/// The packages with tests under the model checker.
const MODELLED: [&str; 6] =
    ["--package", "offshoot-btrfs", "--package", "offshoot-kit", "--package", "offshoot-xfs"];

/// Runs of `cargo test`, counted.
#[derive(Default)]
struct Tests {
    counts: TestCounts,
    /// A line for each test that skipped itself, with the run before it.
    skipped: String,
}

impl Tests {
    fn run(&mut self, variable: Option<(&str, &str)>, args: &[&str]) -> Result {
        let file = target_dir().join(format!("skipped-{}", std::process::id()));
        let path = file.to_str().ok_or("the path of the target directory is not UTF-8")?;
        std::fs::write(&file, "").map_err(|error| format!("{path}: {error}"))?;
        let variables: Vec<_> = variable.into_iter().chain([(SKIPPED_FILE, path)]).collect();
        let result = cargo_seen(&variables, args, &mut |piece| self.counts.see(piece));
        let skipped = std::fs::read_to_string(&file);
        let skipped = skipped.map_err(|error| format!("{path}: {error}"))?;
        std::fs::remove_file(&file).map_err(|error| format!("{path}: {error}"))?;
        // A test that skips itself in two runs counts twice.
        let run = args.join(" ") + variable.map_or("", |(_, value)| value);
        self.skipped.extend(skipped.lines().map(|line| format!("{run}\t{line}\n")));
        result
    }

    fn sums(&self) -> TestSums {
        self.counts.with_skipped(&self.skipped)
    }
}

/// Checks format and lints. Another toolchain formats differently and has other lints, so they are
/// skipped there.
fn style() -> Result {
    if let Some(version) = setup::unstyled() {
        println!("format and lints are skipped: {version}");
        return Ok(());
    }
    cargo(&["fmt", "--all", "--check"])?;
    let deny = ["--", "-D", "warnings"];
    let lint =
        |what: &[&str]| cargo_seen(&[], &[&["clippy"], what, &deny[..]].concat(), &mut |_| {});
    lint(&["--workspace", "--all-targets"])?;
    lint(&["--workspace", "--all-targets", "--features", MEASURED])?;
    // The models are unit tests.
    let models = ["--lib", "--profile", "test", "--features", "shuttle"];
    lint(&[&MODELLED[..], &models].concat())
}
