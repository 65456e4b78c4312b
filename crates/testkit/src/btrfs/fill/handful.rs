//! A little of everything: about two hundred names, a volume so small that a test can damage and
//! judge it thousands of times.

use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::Path;

use rustix::fs::{FallocateFlags, XattrFlags, fallocate};
use rustix::io::Errno;

use super::data::{set_compression, set_nocow};
use super::subvolumes::{create, snapshot};
use super::{directory, sync, write};
use crate::fill::shapes::{create as new_file, put};
use crate::names::colliding;
use crate::random::Random;

const KIB: u64 = 1024;

/// How often one file refers to one extent: more often than the extent item has room for.
const REFERENCES: u64 = 60;

/// How many names one file has: more than one item has room for, whatever the node size.
const LINKS: u32 = 70;

/// Fills the volume mounted at `root`.
pub fn fill(root: &Path) {
    names(&directory(root, "names"));
    links(&directory(root, "links"));
    extents(&directory(root, "extents"));
    for method in ["zlib", "zstd"] {
        let dir = directory(root, method);
        set_compression(&dir, method);
        extents(&dir);
    }
    let dir = directory(root, "in-place");
    set_nocow(&dir);
    extents(&dir);
    clones(&directory(root, "clones"));
    subvolumes(&directory(root, "volumes"));
    sync(root);
}

fn names(dir: &Path) {
    for number in 0..30 {
        write(&dir.join(format!("small-{number}")), format!("the file {number}\n").as_bytes());
    }
    for name in colliding(b"collision", 24, 3) {
        write(&dir.join(std::ffi::OsStr::from_bytes(&name)), &name);
    }
    symlink("small-0", dir.join("symlink")).expect("a symbolic link");
    let with = dir.join("attributes");
    write(&with, b"extended attributes");
    for (name, len) in [("user.short", 10), ("user.long", 1500), ("trusted.other", 100)] {
        rustix::fs::setxattr(&with, name, &vec![b'v'; len], XattrFlags::empty())
            .expect("an extended attribute");
    }
    let deep = directory(&directory(dir, "a"), "b");
    write(&deep.join("file"), b"three directories down");
    let _ = directory(&deep, "empty");
}

fn links(dir: &Path) {
    let file = dir.join("file");
    write(&file, b"a file of many names");
    let other = directory(dir, "other");
    std::fs::hard_link(&file, other.join("second")).expect("a second name");
    for number in 0..LINKS {
        match std::fs::hard_link(&file, dir.join(format!("{number:0>255}"))) {
            Ok(()) => {}
            // Without the feature `extref`, the names of a file in a directory must fit into one
            // item.
            Err(e) if e.raw_os_error() == Some(Errno::MLINK.raw_os_error()) => break,
            Err(e) => panic!("a hard link: {e}"),
        }
    }
}

fn extents(dir: &Path) {
    let mut random = Random::new(0x4a4d);
    put(&new_file(dir, "text"), 0, &random.text(100_000));
    put(&new_file(dir, "noise"), 0, &random.bytes(50_000));
    let file = new_file(dir, "pieces");
    for piece in 0..8 {
        put(&file, piece * 16 * KIB, &random.text(9000));
        sync(dir);
    }
    put(&file, 20_000, &random.text(30_000));
    let file = new_file(dir, "punched");
    put(&file, 0, &random.text(120_000));
    sync(dir);
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&file, punch, 32 * KIB, 16 * KIB).expect("a hole");
    let file = new_file(dir, "preallocated");
    fallocate(&file, FallocateFlags::empty(), 0, 128 * KIB).expect("space ahead");
    sync(dir);
    put(&file, 40_000, &random.text(10_000));
    put(&new_file(dir, "sparse"), 1 << 24, b"one piece far away");
}

fn clones(dir: &Path) {
    let mut random = Random::new(0xc104e);
    let original = new_file(dir, "original");
    put(&original, 0, &random.text(64 << 10));
    sync(dir);
    for name in ["clone", "changed"] {
        rustix::fs::ioctl_ficlone(new_file(dir, name), &original).expect("a clone");
    }
    put(&File::options().write(true).open(dir.join("changed")).expect("it opens"), 8192, b"new");
    let many = new_file(dir, "many");
    for number in 0..REFERENCES {
        // Each range begins elsewhere in the extent. Otherwise the kernel would merge neighbours.
        let mut from = number % 8 * 8 * KIB;
        let mut to = number * 16 * KIB;
        rustix::fs::copy_file_range(&original, Some(&mut from), &many, Some(&mut to), 8 << 10)
            .expect("a range of a clone");
    }
}

fn subvolumes(dir: &Path) {
    let source = dir.join("source");
    create(&source);
    for number in 0..20 {
        write(&source.join(format!("file-{number}")), &vec![b'a' + number; 300]);
    }
    write(&source.join("large"), &Random::new(0x50).bytes(40_000));
    create(&source.join("nested"));
    write(&source.join("nested/file"), b"in the nested subvolume");
    sync(dir);
    snapshot(&source, &dir.join("snapshot"), false);
    snapshot(&source, &dir.join("read-only"), true);
    write(&dir.join("snapshot/file-3"), b"changed in the snapshot");
    std::fs::remove_file(dir.join("snapshot/file-4")).expect("a file of a snapshot goes");
    write(&source.join("file-5"), b"changed in the source");
    std::fs::remove_file(source.join("file-6")).expect("a file of the source goes");
    // These are deleted, but the volume is damaged before their contents are dropped.
    snapshot(&source, &dir.join("to-delete"), false);
    write(&dir.join("to-delete/own"), &Random::new(0x51).bytes(20_000));
}
