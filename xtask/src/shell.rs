//! Commands: printed, run, and the end of the task when they fail.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;

/// The outcome of a task: the reason of a failure is printed once, by `main`.
pub(crate) type Result<T = ()> = std::result::Result<T, String>;

/// Runs `program` from the root of the repository with its output on the terminal.
pub(crate) fn run<S: AsRef<OsStr>>(program: &str, args: &[S]) -> Result {
    run_with(&[], program, args)
}

/// As [`run`], with variables in the environment.
fn run_with<S: AsRef<OsStr>>(variables: &[(&str, &str)], program: &str, args: &[S]) -> Result {
    let set = variables.iter().map(|(name, value)| format!("{name}={value} "));
    let line = set.collect::<String>() + &show(program, args);
    println!("$ {line}");
    let status = Command::new(program)
        .args(args)
        .envs(variables.iter().copied())
        .current_dir(offshoot_testkit::fixture::repository())
        .status()
        .map_err(|error| format!("`{line}` cannot be started: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("`{line}` ended with {status}")) }
}

/// The `cargo` that runs this program.
pub(crate) fn cargo(args: &[&str]) -> Result {
    cargo_with(&[], args)
}

/// As [`cargo`], with variables in the environment.
pub(crate) fn cargo_with(variables: &[(&str, &str)], args: &[&str]) -> Result {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    run_with(variables, &cargo, args)
}

/// What a program prints, or nothing when it fails or is not there.
pub(crate) fn output(program: &str, args: &[&str]) -> Option<String> {
    offshoot_testkit::run::try_run(program, args).ok()
}

/// Where cargo builds: beside the program that runs now.
pub(crate) fn target_dir() -> PathBuf {
    let own = std::env::current_exe().ok();
    let dir = own.as_deref().and_then(|exe| exe.ancestors().nth(2));
    dir.map_or_else(|| offshoot_testkit::fixture::repository().join("target"), PathBuf::from)
}

fn show<S: AsRef<OsStr>>(program: &str, args: &[S]) -> String {
    let program = program.rsplit('/').next().unwrap_or(program);
    let args = args.iter().map(|arg| arg.as_ref().to_string_lossy());
    let quoted = args.map(|arg| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+%@".contains(c);
        if arg.chars().all(plain) && !arg.is_empty() {
            arg.into_owned()
        } else {
            format!("'{arg}'")
        }
    });
    std::iter::once(program.to_owned()).chain(quoted).collect::<Vec<_>>().join(" ")
}
