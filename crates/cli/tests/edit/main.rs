//! The verbs that change volumes, as a user runs them.
//!
//! | module | judge |
//! |---|---|
//! | `coreutils` | the core utilities of the host, which do the same beside it |
//! | `onto` | the core utilities again: what `cp` does with a file of the host that is there |
//! | `judged` | `btrfs check`, and the kernel, which mounts what was made |
//! | `refused` | what must not be done: volumes in use, no space, no rights |
//! | `properties` | `btrfs property`, `getfattr`, `fallocate`, `filefrag` on the mount of the kernel |
//! | `subvolume` | `btrfs check`, and the list of the kernel |
//! | `scrub` | known damage, `btrfs check` |
//! | `trim` | the blocks that an image has, `btrfs check` |

mod coreutils;
mod judged;
mod onto;
mod properties;
mod refused;
mod scrub;
mod subvolume;
mod trim;

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use offshoot_testkit::run::{run, try_run};

/// Runs the program in `dir`.
fn offshoot<S: AsRef<OsStr>>(dir: &Path, args: &[S]) -> Output {
    program(dir).args(args).output().expect("the program starts")
}

fn program(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_offshoot"));
    command.current_dir(dir).stdin(Stdio::null());
    command
}

/// The words of a command line without quotes.
fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// Runs what must succeed in silence, and gives what it wrote.
#[track_caller]
fn does(dir: &Path, line: &str) -> String {
    let output = offshoot(dir, &words(line));
    let said = String::from_utf8_lossy(&output.stderr);
    let is_silent = output.status.success() && said.is_empty();
    assert!(is_silent, "offshoot {line}: {}\n{said}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs what must fail with `code`, and gives its messages.
#[track_caller]
fn fails(dir: &Path, line: &str, code: i32) -> String {
    let output = offshoot(dir, &words(line));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "offshoot {line}: {said}");
    let form = if line.contains("--json") { "{\"kind\":" } else { "offshoot: " };
    assert!(said.starts_with(form), "offshoot {line}: {said:?}");
    said
}

/// A new volume `name` of `mib` MiB in `dir`.
fn volume(dir: &Path, name: &str, mib: u64) {
    does(dir, &format!("mkfs {name} --size {mib}M"));
}

/// Lets `btrfs check` look at a volume, where there is one.
#[track_caller]
fn check(image: &Path) {
    if try_run("btrfs", &["--version"]).is_ok() {
        run("btrfs", &["check".as_ref(), "--readonly".as_ref(), image.as_os_str()]);
    }
}
