//! The program for other users.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Copies the program into `dir`, for users who may not enter the folder where it was built.
pub(crate) fn copy_program(dir: &Path) -> PathBuf {
    let program = dir.join("offshoot");
    // Another process copies it. If this process had it open for writing, processes that other
    // tests start would inherit that, and the program could not run until they end.
    let mut copy = Command::new("cp");
    let copied = copy.arg(env!("CARGO_BIN_EXE_offshoot")).arg(&program).status();
    assert!(copied.expect("it starts").success(), "the program is copied");
    program
}
