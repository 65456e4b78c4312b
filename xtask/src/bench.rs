//! `cargo xtask bench WHAT`: builds the program and the benchmarks, and runs one of them.

use std::ffi::OsString;

use crate::shell::{Result, cargo, run, target_dir};

/// Runs the benchmark `what` with `options`.
pub(crate) fn bench(what: &str, options: &[&str]) -> Result {
    let packages = ["--package", "offshoot-cli", "--package", "offshoot-bench"];
    let features = ["--features", "offshoot-cli/measure"];
    cargo(&[&["build", "--quiet", "--release"], &packages[..], &features].concat())?;
    let target = target_dir();
    let release = target.join("release");
    let mut args: Vec<OsString> = vec![what.into()];
    args.extend(["--offshoot".into(), release.join("offshoot").into()]);
    args.extend(["--dir".into(), target.join("bench").into()]);
    args.extend(options.iter().map(OsString::from));
    run(&release.join("offshoot-bench").display().to_string(), &args)
}
