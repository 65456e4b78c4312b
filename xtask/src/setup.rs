//! `cargo xtask setup`: what the tests need besides a Rust toolchain.
//!
//! The judges are `btrfs-progs` and a few tools beside the kernel. On Debian and Ubuntu they are installed
//! for root; elsewhere the task says what is missing. Where nothing can be mounted the
//! judged tests skip themselves, so `cargo xtask test` does not ask for them there.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use offshoot_testkit::judges::{PROGS_AT_LEAST, may_mount};

use crate::apt;
use crate::shell::{Result, cargo, output, target_dir};

/// Installs what is missing, or says how to.
pub(crate) fn setup() -> Result {
    toolchain()?;
    if may_mount().is_ok() {
        suites()?;
    }
    device_for_all()?;
    let missing = missing();
    if missing.is_empty() {
        println!("everything is there");
        return Ok(());
    }
    if output("apt-get", &["--version"]).is_none() {
        return Err(format!("please install {}", missing.join(" and ")));
    }
    if !is_root() {
        println!("missing: {}", missing.join(" and "));
        println!("as root: cargo xtask setup");
        println!("or:      {}", apt::by_hand(&packages_of_tools()));
        return Ok(());
    }
    apt::install(&packages_of_tools(), !has_progs())?;
    let still = self::missing();
    if still.is_empty() { Ok(()) } else { Err(format!("still missing: {}", still.join(" and "))) }
}

/// The set-up if the tests would fail without it.
pub(crate) fn ready() -> Result {
    toolchain()?;
    if may_mount().is_err() {
        return Ok(());
    }
    if !missing().is_empty() {
        return setup();
    }
    device_for_all()?;
    suites()
}

/// Lets users open `/dev/fuse`, as the rules of udev do, which do not run everywhere. What is to be mounted still is for `fusermount3` to decide.
fn device_for_all() -> Result {
    let device = Path::new("/dev/fuse");
    match device.metadata() {
        Ok(metadata) if is_root() && metadata.permissions().mode() & 0o6 != 0o6 => {
            println!("letting users open /dev/fuse");
            let permissions = Permissions::from_mode(0o666);
            std::fs::set_permissions(device, permissions).map_err(|e| format!("/dev/fuse: {e}"))
        }
        _ => Ok(()),
    }
}

/// The parts of the toolchain that not every installation has.
fn toolchain() -> Result {
    for (command, component) in [("fmt", "rustfmt"), ("clippy", "clippy")] {
        if output("cargo", &[command, "--version"]).is_none() {
            println!("$ rustup component add {component}");
            if output("rustup", &["component", "add", component]).is_none() {
                return Err(format!(
                    "`cargo {command}` is missing: `rustup component add {component}`, or the \
                     package of your distribution"
                ));
            }
        }
    }
    cargo(&["--version"])
}

/// Suites for file systems, each with its version. They are built from source into a place of their own.
const SUITES: [(&str, &str); 2] = [("pjdfstest", "0.2.2"), ("fsx", "0.3.2")];

/// Installs the suites that are not there.
fn suites() -> Result {
    let root = target_dir().join("tools");
    let place = root.display().to_string();
    for (name, version) in SUITES {
        if !root.join("bin").join(name).exists() {
            cargo(&["install", "--locked", "--root", &place, "--version", version, name])?;
        }
    }
    Ok(())
}

fn is_root() -> bool {
    output("id", &["-u"]).is_some_and(|id| id.trim() == "0")
}

/// Tools that the tests call beside `btrfs-progs`, each with its package in Debian and Ubuntu.
const TOOLS: [(&str, &str); 18] = [
    ("losetup", "mount"),
    ("fallocate", "util-linux"),
    ("filefrag", "e2fsprogs"),
    ("setfacl", "acl"),
    ("setfattr", "attr"),
    ("mkfs.xfs", "xfsprogs"),
    ("fusermount3", "fuse3"),
    ("git", "git"),
    ("sqlite3", "sqlite3"),
    ("rsync", "rsync"),
    ("dpkg-deb", "dpkg"),
    ("fio", "fio"),
    ("cc", "gcc"),
    ("make", "make"),
    ("sfdisk", "fdisk"),
    ("qemu-img", "qemu-utils"),
    ("xz", "xz-utils"),
    ("zstd", "zstd"),
];

/// The tools that are not there, with their packages.
fn missing_tools() -> impl Iterator<Item = (&'static str, &'static str)> {
    // Some of them know no `--version`, so being there is all that is asked for.
    TOOLS
        .into_iter()
        .filter(|(tool, _)| output("sh", &["-c", &format!("command -v {tool}")]).is_none())
}

fn packages_of_tools() -> Vec<&'static str> {
    missing_tools().map(|(_, package)| package).collect()
}

fn has_progs() -> bool {
    let version = output("btrfs", &["--version"]).and_then(|text| apt::version(&text));
    version.is_some_and(|version| version >= PROGS_AT_LEAST)
}

/// The judges that are not there, in words.
fn missing() -> Vec<String> {
    let mut missing: Vec<_> =
        missing_tools().map(|(tool, package)| format!("{tool} ({package})")).collect();
    if !has_progs() {
        let (major, minor) = PROGS_AT_LEAST;
        missing.push(format!("btrfs-progs {major}.{minor} or newer"));
    }
    missing
}
