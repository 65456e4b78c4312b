//! Runs programs of the host.
//!
//! The judges are programs. Each runs with the administrator's directories on its `PATH` (the shell
//! of an ordinary user lacks them) and in the `C` locale. The message of a failure shows its
//! standard error.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

/// A command for `program`, which may also be in the administrator's directories.
#[must_use]
pub fn command(program: &str) -> Command {
    let mut path = std::env::var("PATH").unwrap_or_default();
    for dir in ["/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"] {
        path.push(':');
        path.push_str(dir);
    }
    // With a plain name and a `PATH` of its own, `Command` forks, which copies the whole memory map
    // of a test; a path is started without that. Programs call themselves by the plain name.
    let mut files = std::env::split_paths(&path).map(|dir| dir.join(program));
    let found = files.find(|file| file.is_file());
    let mut command = Command::new(found.unwrap_or_else(|| program.into()));
    command.arg0(program).env("PATH", path).env("LC_ALL", "C");
    command
}

/// Runs `program` and returns what it printed, or the reason why it failed.
///
/// # Errors
/// When the program cannot be started, or ends with a status other than 0.
pub fn try_run<S: AsRef<OsStr>>(program: &str, args: &[S]) -> Result<String, String> {
    let output = command(program)
        .args(args)
        .output()
        .map_err(|error| format!("{program} cannot be started: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(describe(program, args, &output))
}

/// Runs `program`, which must succeed, and returns what it printed.
pub fn run<S: AsRef<OsStr>>(program: &str, args: &[S]) -> String {
    try_run(program, args).unwrap_or_else(|reason| panic!("{reason}"))
}

fn describe<S: AsRef<OsStr>>(program: &str, args: &[S], output: &Output) -> String {
    let args: Vec<_> = args.iter().map(|arg| arg.as_ref().to_string_lossy()).collect();
    format!(
        "`{program} {}` ended with {}\n{}{}",
        args.join(" "),
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}
