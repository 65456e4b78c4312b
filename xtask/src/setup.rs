//! `cargo xtask setup`: what the tests need besides a Rust toolchain.
//!
//! The judges are `btrfs-progs`, `xfsprogs` and a few tools, beside the kernel. On Debian and
//! Ubuntu setup installs them for root; elsewhere it says what is missing. Setup prints what it
//! will change before it changes anything. No other task changes the machine: [`ready`] only says
//! what is missing. On a machine that cannot mount, the judged tests skip themselves, so [`ready`]
//! does not ask for their tools.

use std::fmt;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use offshoot_machine::xfsprogs::XFSPROGS_AT_LEAST;
use offshoot_machine::{PROGS_AT_LEAST, is_root, may_mount, progs_version};

use crate::shell::{Result, cargo_seen, output, target_dir};
use crate::{apt, beside};

/// Something that the tests need and the machine does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Missing {
    /// A component of the Rust toolchain.
    Component(&'static str),
    /// A suite for file systems, with its version.
    Suite(&'static str, &'static str),
    /// The right of users to open `/dev/fuse`.
    FuseForUsers,
    /// The list of mounts, without which `fusermount3` unmounts nothing for users.
    ListOfMounts,
    /// A tool, with its package.
    Tool(&'static str, &'static str),
    /// A new enough version of `btrfs-progs`.
    Progs,
    /// A new enough version of `xfsprogs`.
    XfsProgs,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Component(name) => write!(f, "{name} (of the Rust toolchain)"),
            Self::Suite(name, version) => write!(f, "{name} {version} (a test suite)"),
            Self::FuseForUsers => f.write_str("the right of users to open /dev/fuse"),
            Self::ListOfMounts => f.write_str(MTAB),
            Self::Tool(tool, package) => write!(f, "{tool} (package {package})"),
            Self::Progs => {
                let (major, minor) = PROGS_AT_LEAST;
                write!(f, "btrfs-progs {major}.{minor} or newer")
            }
            Self::XfsProgs => {
                let (major, minor) = XFSPROGS_AT_LEAST;
                write!(f, "xfsprogs {major}.{minor} or newer")
            }
        }
    }
}

/// Says what it will change, and changes it.
pub(crate) fn setup() -> Result {
    let missing = missing(true, true);
    if missing.is_empty() {
        println!("everything is there");
        return Ok(());
    }
    println!("missing: {}", listed(&missing));
    let packages = packages(&missing);
    let needs_apt = !packages.is_empty() || missing.contains(&Missing::Progs);
    let has_apt = output("apt-get", &["--version"]).is_some();
    if needs_apt && !is_root() {
        // Only root can let the kernel judge. Without root the tests skip that, so this is no
        // failure.
        println!("as root: cargo xtask setup");
        if has_apt {
            println!("or:      {}", apt::by_hand(&packages));
        }
        return Ok(());
    }
    if (needs_apt || missing.contains(&Missing::XfsProgs)) && !has_apt {
        return Err(format!("please install {}", listed(&missing)));
    }
    println!("this will:");
    for change in changes(&missing) {
        println!("  {change}");
    }
    println!();
    change(&missing)?;
    match &self::missing(true, true)[..] {
        [] => Ok(()),
        still => Err(format!("still missing: {}", listed(still))),
    }
}

/// Checks that the machine has everything that the tests need.
///
/// # Errors
/// What is missing, and how to get it.
pub(crate) fn ready() -> Result {
    // Where nothing can be mounted, the judged tests skip themselves.
    let missing = missing(unstyled().is_none(), may_mount().is_ok());
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!(
        "the tests need what is not here: {}\n`cargo xtask setup` says what it will change, and \
         installs it",
        listed(&missing)
    ))
}

fn listed(missing: &[Missing]) -> String {
    missing.iter().map(Missing::to_string).collect::<Vec<_>>().join(", ")
}

/// Everything that is missing. `is_styled` includes the components that check the style, and
/// `is_judged` the judges.
fn missing(is_styled: bool, is_judged: bool) -> Vec<Missing> {
    let mut missing = Vec::new();
    if is_styled {
        let components = [("fmt", "rustfmt"), ("clippy", "clippy")].into_iter();
        let absent =
            components.filter(|(command, _)| output("cargo", &[command, "--version"]).is_none());
        missing.extend(absent.map(|(_, name)| Missing::Component(name)));
    }
    if !is_judged {
        return missing;
    }
    // Some of the tools have no `--version`, so this only checks that they exist.
    let absent = |tool: &str| output("sh", &["-c", &format!("command -v {tool}")]).is_none();
    let tools = TOOLS.into_iter().filter(|(tool, _)| absent(tool));
    missing.extend(tools.map(|(tool, package)| Missing::Tool(tool, package)));
    let progs = output("btrfs", &["--version"]).and_then(|text| progs_version(&text));
    if progs.is_none_or(|version| version < PROGS_AT_LEAST) {
        missing.push(Missing::Progs);
    }
    if beside::are_xfsprogs_missing() {
        if beside::are_keys_missing() {
            missing.push(Missing::Tool("Debian's key ring", "debian-archive-keyring"));
        }
        missing.push(Missing::XfsProgs);
    }
    let programs = target_dir().join("tools/bin");
    let suites = SUITES.into_iter().filter(|(name, _)| !programs.join(name).exists());
    missing.extend(suites.map(|(name, version)| Missing::Suite(name, version)));
    // udev gives that right, but it does not run everywhere.
    let fuse = Path::new(FUSE).metadata();
    if fuse.is_ok_and(|fuse| fuse.permissions().mode() & 0o6 != 0o6) {
        missing.push(Missing::FuseForUsers);
    }
    if Path::new(MTAB).symlink_metadata().is_err() {
        missing.push(Missing::ListOfMounts);
    }
    missing
}

/// What setup will change, in words.
fn changes(missing: &[Missing]) -> Vec<String> {
    let mut changes = Vec::new();
    let packages = packages(missing);
    if !packages.is_empty() {
        changes.push(format!("install packages: {}", packages.join(" ")));
    }
    for one in missing {
        match one {
            Missing::Tool(..) => {}
            Missing::Progs => changes.push(apt::progs_change()),
            Missing::XfsProgs => changes.push(beside::xfsprogs_change()),
            Missing::Component(name) => changes.push(format!("run: rustup component add {name}")),
            Missing::Suite(name, version) => changes.push(format!(
                "build {name} {version} from its source into {}",
                target_dir().join("tools").display()
            )),
            Missing::ListOfMounts => changes.push(format!("link {MTAB} to {MOUNTS}")),
            Missing::FuseForUsers => changes.push(format!("let users open {FUSE} (mode 666)")),
        }
    }
    changes
}

fn change(missing: &[Missing]) -> Result {
    let packages = packages(missing);
    let is_progs_missing = missing.contains(&Missing::Progs);
    if !packages.is_empty() || is_progs_missing {
        apt::install(&packages, is_progs_missing)?;
    }
    for one in missing {
        match one {
            Missing::Tool(..) | Missing::Progs => {}
            Missing::XfsProgs => beside::keep_xfsprogs()?,
            Missing::Component(name) => {
                println!("$ rustup component add {name}");
                output("rustup", &["component", "add", name]).ok_or_else(|| {
                    format!("{name} is missing: install the package of your distribution")
                })?;
            }
            Missing::Suite(name, version) => {
                let root = target_dir().join("tools").display().to_string();
                let install = ["install", "--locked", "--root", &root, "--version", version, name];
                cargo_seen(&[], &install, &mut |_| {})?;
            }
            Missing::ListOfMounts => std::os::unix::fs::symlink(MOUNTS, MTAB)
                .map_err(|error| format!("{MTAB}: {error}"))?,
            // `fusermount3` still decides what users may mount.
            Missing::FuseForUsers => std::fs::set_permissions(FUSE, Permissions::from_mode(0o666))
                .map_err(|error| format!("{FUSE}: {error}"))?,
        }
    }
    Ok(())
}

/// The packages of the tools that are missing.
fn packages(missing: &[Missing]) -> Vec<&'static str> {
    let packages = missing.iter().filter_map(|one| match one {
        Missing::Tool(_, package) => Some(*package),
        _ => None,
    });
    packages.collect()
}

/// The version of Rust whose formatter and lints the code passes.
const STYLED_WITH: &str = "1.95.";

/// Why format and lints are not checked; `None` where they are.
pub(crate) fn unstyled() -> Option<String> {
    // `rustc 1.95.0 (59807616e 2026-04-14)`
    let version = output("rustc", &["--version"]).unwrap_or_default();
    let version = version.split_whitespace().nth(1).unwrap_or("unknown");
    let is_same = version.starts_with(STYLED_WITH);
    (!is_same).then(|| format!("they are checked with Rust {STYLED_WITH}x, and this is {version}"))
}

const FUSE: &str = "/dev/fuse";
const MTAB: &str = "/etc/mtab";
const MOUNTS: &str = "/proc/self/mounts";

/// Test suites for file systems, each with its version. Setup builds them from source into `tools`
/// below the target directory.
const SUITES: [(&str, &str); 2] = [("pjdfstest", "0.2.2"), ("fsx", "0.3.2")];

/// Tools that the tests call beside `btrfs-progs`, each with its package in Debian and Ubuntu.
const TOOLS: [(&str, &str); 24] = [
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
    ("bsdtar", "libarchive-tools"),
    ("mtree", "mtree-netbsd"),
    ("fsverity", "fsverity"),
    ("matchpathcon", "selinux-utils"),
    ("fio", "fio"),
    ("cc", "gcc"),
    ("make", "make"),
    ("sfdisk", "fdisk"),
    ("qemu-img", "qemu-utils"),
    ("xz", "xz-utils"),
    ("zstd", "zstd"),
    ("bsdtar", "libarchive-tools"),
    ("fakeroot", "fakeroot"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_is_said_before_it_is_made() {
        let missing = [
            Missing::Component("clippy"),
            Missing::Tool("cc", "gcc"),
            Missing::Tool("fio", "fio"),
            Missing::Progs,
            Missing::XfsProgs,
            Missing::Suite("fsx", "0.3.2"),
            Missing::FuseForUsers,
            Missing::ListOfMounts,
        ];
        let said = changes(&missing).join("\n");
        for word in [
            "rustup component add clippy",
            "packages: gcc fio",
            "btrfs-progs",
            "xfsprogs of Debian's suite",
            "fsx 0.3.2",
            FUSE,
            MTAB,
        ] {
            assert!(said.contains(word), "{word}: {said}");
        }
        assert_eq!(changes(&[]), [""; 0]);
    }
}
