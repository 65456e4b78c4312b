//! How many tests passed, failed and were skipped.
//!
//! The test runner prints one line of sums for each test program. It counts a test that skips
//! itself as passed. Such a test adds a line to a file that the environment names.

use std::collections::BTreeSet;
use std::fmt;

/// The sums of the test programs so far.
#[derive(Default)]
pub(crate) struct TestCounts {
    passed: u64,
    failed: u64,
    /// The beginning of a line whose end has not come yet.
    line: Vec<u8>,
}

/// The most bytes of a line to keep. A line of sums is shorter.
const LINE_BYTES_MAX: usize = 512;

impl TestCounts {
    /// Takes a piece of the output of `cargo test`.
    pub(crate) fn see(&mut self, piece: &[u8]) {
        for &byte in piece {
            if byte == b'\n' {
                let line = std::mem::take(&mut self.line);
                self.see_line(&String::from_utf8_lossy(&line));
            } else if self.line.len() < LINE_BYTES_MAX {
                self.line.push(byte);
            }
        }
    }

    /// `test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; ...`
    fn see_line(&mut self, line: &str) {
        // If a test prints text without a line break, the sums follow on the same line.
        let Some((_, sums)) = line.split_once("test result: ") else { return };
        let Some((_, sums)) = sums.split_once(". ") else { return };
        for sum in sums.split("; ") {
            let Some((count, what)) = sum.split_once(' ') else { continue };
            let Ok(count) = count.parse::<u64>() else { continue };
            match what {
                "passed" => self.passed += count,
                "failed" => self.failed += count,
                _ => {}
            }
        }
    }

    /// The sums, given the lines of the file in which tests say that they skipped themselves.
    pub(crate) fn with_skipped(&self, skipped: &str) -> TestSums {
        // A test that asks for its judges twice writes its line twice.
        let skipped: BTreeSet<&str> = skipped.lines().filter(|line| !line.is_empty()).collect();
        let skipped = skipped.len() as u64;
        TestSums { passed: self.passed.saturating_sub(skipped), failed: self.failed, skipped }
    }
}

/// The last line of `cargo xtask test`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TestSums {
    passed: u64,
    failed: u64,
    skipped: u64,
}

impl fmt::Display for TestSums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { passed, failed, skipped } = self;
        write!(f, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_all_programs_are_added() {
        let output = "\nrunning 3 tests\n...\ntest result: ok. 3 passed; 0 failed; 1 ignored; \
                      0 measured; 9 filtered out; finished in 0.01s\n\nrunning 4 tests\nF...\n\
                      test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured; 0 filtered \
                      out; finished in 1.00s\n";
        for len in [1, 7, output.len()] {
            let mut counts = TestCounts::default();
            output.as_bytes().chunks(len).for_each(|piece| counts.see(piece));
            assert_eq!(counts.with_skipped("").to_string(), "6 passed, 1 failed, 0 skipped");
            let skipped = "/t/a\tone\n/t/a\ttwo\n/t/a\tone\n";
            assert_eq!(counts.with_skipped(skipped).to_string(), "4 passed, 1 failed, 2 skipped");
        }
    }

    #[test]
    fn other_lines_count_nothing() {
        let mut counts = TestCounts::default();
        counts.see(b"5 passed\ntest result\n test result: \n12 passed; 3 failed\n");
        assert_eq!(counts.with_skipped(""), TestSums { passed: 0, failed: 0, skipped: 0 });
    }
}
