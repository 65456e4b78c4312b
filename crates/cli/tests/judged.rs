//! `extract` before the kernel.
//!
//! The kernel fills a volume with one of everything and mounts it; `offshoot extract` takes
//! the same image out onto another mounted btrfs, which can hold all of it. What the
//! kernel shows of both must be the same, but for what no copy can keep: numbers of
//! inodes, times of change and birth, the order of directories, and the space that
//! compression saves.

use std::path::Path;
use std::process::Command;

use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::disks::Disks;
use offshoot_testkit::fill;
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::judges::{self, Judges};
use offshoot_testkit::recipe::Recipe;
use offshoot_testkit::run::run;

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

/// What two copies of one tree have in common.
fn as_copies() -> Compare {
    Compare::default()
        .without(Aspect::Ids)
        .without(Aspect::Order)
        .without(Aspect::StoredTimes)
        .without(Aspect::Allocation)
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
        as_copies().run(&ours, mount.path()).assert_same(fill::EVERYTHING_AT_LEAST);
    }
}

/// The stream, unpacked by GNU `tar`.
#[test]
fn a_stream_is_what_the_kernel_shows() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().fill(what_tar_holds).make(&judges);
    let empty = destination(&judges);
    let to = empty.mount("rw,noatime");
    let out = fill::directory(to.path(), "out");
    let stream = to.path().join("stream.tar");
    extract(&[&disks.images()[0], Path::new("--tar"), &stream]);
    unpack(&stream, &out);
    let mount = disks.mount("ro,noatime");
    let ours = HostFilesystem::new(&out).expect("the destination opens");
    as_copies().run(&ours, mount.path()).assert_same(fill::EVERYTHING_AT_LEAST);
}

/// One of everything but sockets, which the format has not, and paths that are longer
/// than the kernel takes at once, on which `tar` fails.
fn what_tar_holds(root: &Path) {
    fill::everything(root);
    std::fs::remove_dir_all(root.join("deep")).expect("the deep directories go");
    std::fs::remove_file(root.join("special/socket")).expect("the socket goes");
}

fn unpack(stream: &Path, to: &Path) {
    let attributes = ["--xattrs", "--xattrs-include=*", "--numeric-owner"];
    let mut args: Vec<&std::ffi::OsStr> = attributes.iter().map(AsRef::as_ref).collect();
    args.extend(["-xpf".as_ref(), stream.as_os_str(), "-C".as_ref(), to.as_os_str()]);
    run("tar", &args);
}
