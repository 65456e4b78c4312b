//! What tests and tasks of offshoot need to know of the machine: programs, rights, switches.
//!
//! `cargo xtask` must be compiled before it can check anything, so this crate has no dependencies.
//! The testkit has many, and uses this crate too, so both get the same answers.

pub mod run;
pub mod xfsprogs;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The oldest `btrfs-progs`, as (major, minor), that can make and check everything the tests need.
pub const PROGS_AT_LEAST: (u32, u32) = (6, 14);

/// The environment variable that names the file of skipped tests. A test that is skipped adds a
/// line: its program, a tab and its name. The test command counts the lines.
pub const SKIPPED_FILE: &str = "OFFSHOOT_TEST_SKIPPED";

/// The kernel's switch for FUSE over io_uring.
pub const IO_URING_SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// The root of the repository that built this crate.
#[must_use]
pub fn repository() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_owned()
}

/// The target directory of cargo, which holds the program that runs now.
#[must_use]
pub fn target_dir() -> PathBuf {
    let own = std::env::current_exe().ok();
    // `target/debug/xtask`, `target/debug/deps/test-0123`
    let folder = own.as_deref().and_then(Path::parent);
    let is_below = |folder: &&Path| folder.ends_with("deps") || folder.ends_with("examples");
    let above = folder.map_or(1, |folder| 1 + usize::from(is_below(&folder)));
    let dir = folder.and_then(|folder| folder.ancestors().nth(above));
    dir.map_or_else(|| repository().join("target"), PathBuf::from)
}

/// Prints that this test ends without having tested anything, and why.
///
/// # Panics
/// When the skipped test must be counted and cannot be.
pub fn skip(reason: &str) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("a test");
    // `eprintln!` is no use here: the test runner shows its output only for tests that fail.
    let _ = writeln!(std::io::stderr(), "skipped: {name}: {reason}");
    let Some(file) = std::env::var_os(SKIPPED_FILE) else { return };
    let program = std::env::current_exe().unwrap_or_default();
    // One write per line keeps the lines of several programs apart.
    let line = format!("{}\t{name}\n", program.display());
    File::options()
        .create(true)
        .append(true)
        .open(file)
        .and_then(|mut file| file.write_all(line.as_bytes()))
        .expect("a test that is skipped is counted");
}

/// Whether this process may mount a loop device. If it may, a missing judge fails the tests; if
/// not, tests that need the kernel are skipped.
///
/// # Errors
/// The reason why it may not.
pub fn may_mount() -> Result<(), String> {
    const CAP_SYS_ADMIN: u32 = 21;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let capabilities = status_field(&status, "CapEff:")
        .and_then(|hex| u64::from_str_radix(hex, 16).ok())
        .unwrap_or(0);
    if !is_root() || capabilities >> CAP_SYS_ADMIN & 1 == 0 {
        return Err("the kernel judges only for root with the right to mount".to_owned());
    }
    File::options()
        .read(true)
        .write(true)
        .open("/dev/loop-control")
        .map(drop)
        .map_err(|error| format!("no loop devices: /dev/loop-control: {error}"))
}

/// Whether this process has the effective user id 0.
#[must_use]
pub fn is_root() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    // The ids are the real, the effective, the saved and the filesystem one.
    status_field(&status, "Uid:").and_then(|ids| ids.split_whitespace().nth(1)) == Some("0")
}

/// The value of the line `name` of `/proc/self/status`.
fn status_field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// Checks that FUSE over io_uring is switched on, or that this process may switch it on.
///
/// # Errors
/// The reason why it may not.
pub fn may_switch_io_uring_on() -> Result<(), String> {
    let state = std::fs::read_to_string(IO_URING_SWITCH)
        .map_err(|error| format!("no FUSE over io_uring: {IO_URING_SWITCH}: {error}"))?;
    if state.trim() != "Y" {
        let switch = File::options().write(true).open(IO_URING_SWITCH);
        switch.map_err(|error| format!("FUSE over io_uring is off: {IO_URING_SWITCH}: {error}"))?;
    }
    Ok(())
}

/// The version in the output of `btrfs --version`, as (major, minor): the first word that looks
/// like `v6.14`.
#[must_use]
pub fn progs_version(output: &str) -> Option<(u32, u32)> {
    let version = output.split_whitespace().find_map(|word| word.strip_prefix('v'))?;
    let mut parts = version.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_btrfs_prints_them() {
        assert_eq!(progs_version("btrfs-progs v6.14\n-EXPERIMENTAL"), Some((6, 14)));
        assert_eq!(progs_version("btrfs-progs v6.2"), Some((6, 2)));
        assert_eq!(progs_version("btrfs-progs v6.16.1 "), Some((6, 16)));
        assert_eq!(progs_version("something else"), None);
        // Version numbers of distribution packages.
        assert_eq!(progs_version("v6.14-1~bpo12+1"), Some((6, 14)));
        assert!(progs_version("v6.6.3-1.1build2") < Some((6, 14)));
    }

    #[test]
    fn the_effective_id_decides() {
        let status = "Name:\tx\nUid:\t1000\t0\t1000\t1000\nCapEff:\t000001ffffffffff\n";
        assert_eq!(status_field(status, "Uid:"), Some("1000\t0\t1000\t1000"));
        assert_eq!(status_field(status, "CapEff:"), Some("000001ffffffffff"));
        assert_eq!(status_field(status, "Gid:"), None);
    }
}
