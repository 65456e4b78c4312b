//! Runs the program of the benchmarks.

use std::process::{Command, Output};

/// Runs the program with the words of `line`.
pub(crate) fn bench(line: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_offshoot-bench"))
        .args(line.split_whitespace())
        .output()
        .expect("the program starts")
}

/// Checks that the program refuses each of these lines, and prints its usage.
#[track_caller]
pub(crate) fn assert_refuses(lines: &[&str]) {
    for line in lines {
        let output = bench(line);
        assert_eq!(output.status.code(), Some(2), "{line}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("Usage"), "{line}");
    }
}
