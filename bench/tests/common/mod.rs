//! The program of the benchmarks, as a test runs it.

use std::process::{Command, Output};

/// Runs it with these words.
pub(crate) fn bench(line: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_offshoot-bench"))
        .args(line.split_whitespace())
        .output()
        .expect("the program starts")
}

/// It takes none of these, and says how it is used.
#[track_caller]
pub(crate) fn assert_refuses(lines: &[&str]) {
    for line in lines {
        let output = bench(line);
        assert_eq!(output.status.code(), Some(2), "{line}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("Usage"), "{line}");
    }
}
