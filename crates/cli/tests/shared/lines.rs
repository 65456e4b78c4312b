//! Command lines of the program, as the tests write them.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Runs the program in `dir`.
pub(crate) fn offshoot<S: AsRef<OsStr>>(dir: &Path, args: &[S]) -> Output {
    program(dir).args(args).output().expect("the program starts")
}

/// The program, ready to run in `dir`.
pub(crate) fn program(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_offshoot"));
    command.current_dir(dir).stdin(Stdio::null()).env_remove("LS_COLORS");
    command
}

/// The words of a command line. A part in single quotes is one word.
pub(crate) fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    for (at, part) in line.split('\'').enumerate() {
        if at % 2 == 1 {
            words.last_mut().expect("one at least").push_str(part);
            continue;
        }
        for (at, word) in part.split(' ').enumerate() {
            if at > 0 {
                words.push(String::new());
            }
            words.last_mut().expect("one at least").push_str(word);
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// Runs a line that must succeed without messages, and returns its output.
#[track_caller]
pub(crate) fn does(dir: &Path, line: &str) -> String {
    let output = offshoot(dir, &words(line));
    let said = String::from_utf8_lossy(&output.stderr);
    let is_silent = output.status.success() && said.is_empty();
    assert!(is_silent, "offshoot {line}: {}\n{said}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs a line that must fail with `code`, and returns its messages.
#[track_caller]
pub(crate) fn fails(dir: &Path, line: &str, code: i32) -> String {
    let output = offshoot(dir, &words(line));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "offshoot {line}: {said}");
    let form = if line.contains("--json") { "{\"kind\":" } else { "offshoot: " };
    assert!(said.starts_with(form), "offshoot {line}: {said:?}");
    said
}
