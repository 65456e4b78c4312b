//! A program that believes in a number of processors.

use std::fs;
use std::path::Path;
use std::process::Command;

use offshoot_testkit::run::command;

/// Tells the program a number of processors. It counts them as the standard library does.
const SHOWN_PROCESSORS: &str = r#"
#define _GNU_SOURCE
#include <sched.h>
#include <stdlib.h>
int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set) {
    CPU_ZERO_S(size, set);
    for (int at = 0; at < atoi(getenv("SHOWN_PROCESSORS")); at++) CPU_SET_S(at, size, set);
    return 0;
}
"#;

/// Makes the library in `dir` that shows a number of processors.
pub(crate) fn library(dir: &Path) {
    fs::write(dir.join("shown.c"), SHOWN_PROCESSORS).expect("a file");
    let words = ["-shared", "-fPIC", "-o", "shown.so", "shown.c"];
    let made = command("cc").args(words).current_dir(dir).status();
    assert!(made.expect("cc starts").success());
}

/// The program, which sees a number of processors and is on those of `bound`, with the library in
/// `dir`.
pub(crate) fn shown(dir: &Path, processors: u32, bound: &str) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", bound]).arg(env!("CARGO_BIN_EXE_offshoot"));
    command.env("LD_PRELOAD", dir.join("shown.so"));
    command.env("SHOWN_PROCESSORS", processors.to_string());
    command
}
