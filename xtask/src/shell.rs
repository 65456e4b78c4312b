//! Runs commands: prints each one first, and ends the task when it fails.

use std::ffi::OsStr;
use std::io::{self, IsTerminal};
use std::process::{Command, ExitStatus};

pub(crate) use offshoot_machine::target_dir;
use offshoot_machine::{repository, run::try_run};

use crate::speak;

/// The outcome of a task. `main` prints the reason of a failure once.
pub(crate) type Result<T = ()> = std::result::Result<T, String>;

/// Runs `program` from the root of the repository with its output on the terminal.
pub(crate) fn run<S: AsRef<OsStr>>(program: &str, args: &[S]) -> Result {
    run_with(&[], program, args)
}

/// As [`run`], with variables in the environment.
fn run_with<S: AsRef<OsStr>>(variables: &[(&str, &str)], program: &str, args: &[S]) -> Result {
    let line = announce(variables, program, args);
    let status = command(variables, program, args).status();
    ended(&line, status.map_err(|error| not_started(&line, &error))?)
}

fn command<S: AsRef<OsStr>>(variables: &[(&str, &str)], program: &str, args: &[S]) -> Command {
    let mut command = Command::new(program);
    command.args(args).envs(variables.iter().copied());
    command.current_dir(repository());
    command
}

/// Prints the command as a person would type it.
fn announce<S: AsRef<OsStr>>(variables: &[(&str, &str)], program: &str, args: &[S]) -> String {
    let set = variables.iter().map(|(name, value)| format!("{name}={value} "));
    let line = set.collect::<String>() + &show(program, args);
    println!("$ {line}");
    line
}

fn not_started(line: &str, error: &io::Error) -> String {
    format!("`{line}` cannot be started: {error}")
}

fn ended(line: &str, status: ExitStatus) -> Result {
    if status.success() { Ok(()) } else { Err(format!("`{line}` ended with {status}")) }
}

/// Runs the `cargo` that runs this program.
pub(crate) fn cargo(args: &[&str]) -> Result {
    cargo_with(&[], args)
}

/// As [`cargo`], with variables in the environment.
pub(crate) fn cargo_with(variables: &[(&str, &str)], args: &[&str]) -> Result {
    run_with(variables, &cargo_program(), args)
}

fn cargo_program() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned())
}

/// As [`cargo_with`], for a command that may take long. It is never silent for long, and passes its
/// standard output to `see` too, as it comes.
pub(crate) fn cargo_seen(
    variables: &[(&str, &str)],
    args: &[&str],
    see: &mut dyn FnMut(&[u8]),
) -> Result {
    let program = cargo_program();
    let line = announce(variables, &program, args);
    let mut command = command(variables, &program, args);
    if io::stderr().is_terminal() && std::env::var_os("CARGO_TERM_COLOR").is_none() {
        command.env("CARGO_TERM_COLOR", "always");
    }
    let what = format!("still at cargo {}", args.first().unwrap_or(&""));
    let status = speak::run(&mut command, &what, see);
    ended(&line, status.map_err(|error| format!("`{line}`: {error}"))?)
}

/// The output of a program, or `None` when it fails or does not exist.
pub(crate) fn output(program: &str, args: &[&str]) -> Option<String> {
    try_run(program, args).ok()
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
