//! The tools of QEMU.
//!
//! No user calls all of them.

#![allow(dead_code, reason = "each user calls a part of it")]

use std::path::Path;
use std::process::Command;

/// Makes an image and returns its bytes: an empty one of `size`, or, if `size` is empty, one of 3
/// MiB with some data in its middle.
pub(crate) fn made(dir: &Path, format: &str, size: &str, options: &str) -> Vec<u8> {
    let path = dir.join("made");
    let _ = std::fs::remove_file(&path);
    let plain = dir.join("plain");
    let mut bytes = vec![0; 3 << 20];
    bytes[1 << 20..(1 << 20) + 9000].fill(0xab);
    std::fs::write(&plain, &bytes).expect("a file");
    let mut command = Command::new("qemu-img");
    match size {
        "" => command.args(["convert", "-O", format]),
        _ => command.args(["create", "-q", "-f", format]),
    };
    command.args(options.split_whitespace());
    match size {
        "" => command.args([&plain, &path]),
        size => command.arg(&path).arg(size),
    };
    let output = command.output().expect("qemu-img runs; `cargo xtask setup` installs it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::read(&path).expect("an image")
}

/// Runs commands of `qemu-io` on the image at `path`.
pub(crate) fn qemu_io(path: &Path, format: &str, commands: &[String]) {
    let mut command = Command::new("qemu-io");
    command.args(["-f", format]).args(commands.iter().flat_map(|one| ["-c", one])).arg(path);
    let output = command.output().expect("qemu-io runs; `cargo xtask setup` installs it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// Runs `qemu-img` in `dir`.
#[track_caller]
pub(crate) fn qemu_img(dir: &Path, words: &[&str]) {
    let output = Command::new("qemu-img").args(words).current_dir(dir).output();
    let output = output.expect("qemu-img runs; `cargo xtask setup` installs it");
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&said));
}
