//! Names: every byte value, the longest ones, collisions, hard links, deep paths.

use std::ffi::OsStr;
use std::fs::{DirBuilder, File};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use super::{directory, write};
use crate::names::colliding;

/// Names of all kinds.
pub fn fill(dir: &Path) {
    let bytes = directory(dir, "bytes");
    for byte in (1..=255).filter(|byte| *byte != b'/') {
        if byte != b'.' {
            write(&bytes.join(OsStr::from_bytes(&[byte])), &[byte]);
        }
        write(&bytes.join(OsStr::from_bytes(&[b'n', byte, b'n'])), b"");
    }
    let every: Vec<u8> = (1..=255).filter(|byte| *byte != b'/').collect();
    write(&bytes.join(OsStr::from_bytes(&every)), b"every byte but two in one name");

    let long = directory(dir, "long");
    for fill in [b'x', 0xff, b' '] {
        let name = [fill; 255];
        write(&long.join(OsStr::from_bytes(&name)), b"long");
        std::fs::create_dir(long.join(OsStr::from_bytes(&name[..254]))).expect("a long name");
    }
    write(&long.join("..."), b"three dots");

    // Several types of entries with one hash, and gaps because some of them are removed.
    let collisions = directory(dir, "collisions");
    for (index, name) in colliding(b"c", 24, 12).iter().enumerate() {
        let path = collisions.join(OsStr::from_bytes(name));
        match index % 4 {
            0 => std::fs::create_dir(path).expect("a directory"),
            1 => std::os::unix::fs::symlink("nowhere", path).expect("a symbolic link"),
            _ => write(&path, name),
        }
    }
    for name in &colliding(b"c", 24, 12)[2..4] {
        std::fs::remove_file(collisions.join(OsStr::from_bytes(name))).expect("a file goes");
    }
    for name in colliding(b"", 255, 3) {
        write(&collisions.join(OsStr::from_bytes(&name)), b"long collision");
    }
}

/// Makes one file with more names than the reference item of a node of any size can hold. The other
/// names become extended references, and some of these collide.
pub fn hard_links(dir: &Path) {
    let file = dir.join("file");
    write(&file, b"a file of many names");
    for number in 0..300 {
        let name = format!("{number:0>255}");
        std::fs::hard_link(&file, dir.join(name)).expect("a hard link");
    }
    for name in colliding(b"link", 200, 5) {
        std::fs::hard_link(&file, dir.join(OsStr::from_bytes(&name))).expect("a hard link");
    }
    let other = directory(dir, "other");
    std::fs::hard_link(&file, other.join("file")).expect("a hard link in another directory");
    std::os::unix::fs::symlink("target", dir.join("symlink")).expect("a symbolic link");
    std::fs::hard_link(dir.join("symlink"), other.join("symlink")).expect("a link to a link");
}

/// Makes directories whose path is longer than the kernel accepts in one call.
pub fn deep(dir: &Path) {
    let name = "d".repeat(120);
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut at = rustix::fs::open(dir, flags, Mode::empty()).expect("a directory opens");
    for _ in 0..45 {
        rustix::fs::mkdirat(&at, name.as_str(), Mode::from_raw_mode(0o755)).expect("a directory");
        at = rustix::fs::openat(&at, name.as_str(), flags, Mode::empty()).expect("it opens");
    }
    let create = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&at, "bottom", create, Mode::from_raw_mode(0o644));
    drop(File::from(file.expect("a file at the bottom")));
    DirBuilder::new().create(dir.join("empty")).expect("a directory");
}
