//! `extract` judged by the kernel.
//!
//! The kernel fills a volume with one of everything and mounts it. `offshoot extract` extracts the
//! same image to another mounted btrfs, which can hold all of it. The kernel must show both the
//! same, except for what no copy can keep: inode numbers, times of change and birth, the order of
//! directories, and the space that compression saves.

use std::ffi::OsStr;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::fill;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::compare::Compare;
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::run::{run, try_run};

/// An empty btrfs to extract to.
fn destination(judges: &Judges) -> Disks {
    let disks = Disks::create(judges, 1, 1024);
    disks.mkfs(&[]);
    disks
}

fn extract(args: &[&Path]) {
    let output = Command::new(env!("CARGO_BIN_EXE_offshoot"))
        .arg("extract")
        .args(args)
        .output()
        .expect("the program starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "extract ended with {}: {said}", output.status);
}

#[test]
fn a_directory_is_what_the_kernel_shows() {
    let Some(judges) = judges::require() else { return };
    for recipe in [
        Recipe::new(),
        Recipe::new().mount("compress-force=zstd"),
        Recipe::new().mkfs("-n 4k -O ^no-holes"),
    ] {
        let disks = recipe.make(&judges);
        let empty = destination(&judges);
        let to = empty.mount("rw,noatime");
        let out = to.path().join("out");
        extract(&[&disks.images()[0], &out]);
        let mount = disks.mount("ro,noatime");
        let ours = HostFilesystem::new(&out).expect("the destination opens");
        Compare::of_copies().run(&ours, mount.path()).assert_same(fill::EVERYTHING_AT_LEAST);
    }
}

/// A stream that GNU `tar` unpacks.
#[test]
fn a_stream_is_what_the_kernel_shows() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().fill(what_tar_holds).make(&judges);
    let empty = destination(&judges);
    let to = empty.mount("rw,noatime");
    let out = fill::directory(to.path(), "out");
    let stream = to.path().join("stream.tar");
    extract(&[&disks.images()[0], Path::new("--tar"), &stream]);
    unpack("tar", &[&XATTRS[..], &["--numeric-owner"]].concat(), &stream, &out);
    let mount = disks.mount("ro,noatime");
    let ours = HostFilesystem::new(&out).expect("the destination opens");
    Compare::of_copies().run(&ours, mount.path()).assert_same(fill::EVERYTHING_AT_LEAST);
}

/// One of everything without sockets, which the format cannot hold, and without paths longer than
/// the kernel takes at once, on which `tar` fails.
fn what_tar_holds(root: &Path) {
    fill::everything(root);
    std::fs::remove_dir_all(root.join("deep")).expect("the deep directories go");
    std::fs::remove_file(root.join("special/socket")).expect("the socket goes");
}

/// The options with which GNU `tar` restores extended attributes.
const XATTRS: [&str; 2] = ["--xattrs", "--xattrs-include=*"];

fn unpack(tar: &str, options: &[&str], stream: &Path, to: &Path) {
    let mut args: Vec<&OsStr> = options.iter().map(AsRef::as_ref).collect();
    args.extend(["-xpf".as_ref(), stream.as_os_str(), "-C".as_ref(), to.as_os_str()]);
    run(tar, &args);
}

/// Unpacking restores access control lists from each form that a program can use: raw, as text, or
/// both. The ids need no user or group on this host.
#[test]
fn access_control_lists_come_back_from_a_stream() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().fill(lists).make(&judges);
    let empty = destination(&judges);
    let to = empty.mount("rw,noatime");
    let stream = to.path().join("stream.tar");
    extract(&[&disks.images()[0], Path::new("--tar"), &stream]);
    let mount = disks.mount("ro,noatime");
    let both = [&["--acls"], &XATTRS[..]].concat();
    let mut ways = vec![("tar", &XATTRS[..]), ("tar", &["--acls"][..]), ("tar", &both)];
    if try_run("bsdtar", &["--version"]).is_ok() {
        ways.extend([("bsdtar", &["--acls", "--no-xattrs"][..]), ("bsdtar", &["--acls"])]);
    } else {
        // Not `eprintln!`: the test runner shows that only for tests that fail.
        let _ = writeln!(std::io::stderr(), "skipped: bsdtar (Debian package libarchive-tools)");
    }
    for (number, (tar, options)) in ways.into_iter().enumerate() {
        let out = fill::directory(to.path(), &number.to_string());
        unpack(tar, options, &stream, &out);
        // bsdtar does not set the times of the directory that it unpacks into.
        let ours = HostFilesystem::new(&out.join("lists")).expect("the destination opens");
        let outcome = Compare::of_copies().run(&ours, &mount.path().join("lists"));
        let is_same = outcome.differences.is_empty() && outcome.xattrs >= 6;
        assert!(is_same, "{tar} {options:?}: {outcome}");
    }
}

/// Directories and files with access control lists, and nothing that only some programs restore.
fn lists(root: &Path) {
    fill::xattrs::access_control_lists(&fill::directory(root, "lists"));
}
