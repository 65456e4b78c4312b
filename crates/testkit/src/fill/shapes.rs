//! Shapes of files: holes, preallocation, clones, extents cut by later writes.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, OFlags, fallocate};

use super::{sync, write};
use crate::random::Random;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

/// Makes all families of shapes but clones.
pub fn unshared(dir: &Path) {
    holes(dir);
    overwritten(dir);
    preallocated(dir);
    direct(dir);
}

/// Makes a new file for reading and writing.
#[must_use]
pub fn create(dir: &Path, name: &str) -> File {
    File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(dir.join(name))
        .unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Writes all of `bytes`.
pub fn put(file: &File, offset: u64, bytes: &[u8]) {
    file.write_all_at(bytes, offset).expect("a write into a new volume");
}

pub(crate) fn alloc(file: &File, flags: FallocateFlags, offset: u64, len: u64) {
    fallocate(file, flags, offset, len).expect("fallocate in a new volume");
}

fn holes(dir: &Path) {
    let mut random = Random::new(0x401e);
    create(dir, "all-hole").set_len(3 * MIB + 5).expect("a length");
    let file = create(dir, "hole-first");
    put(&file, 300 * KIB, &random.text(50_000));
    let file = create(dir, "hole-last");
    put(&file, 0, &random.text(50_000));
    file.set_len(MIB + 77).expect("a length");
    let file = create(dir, "holes-between");
    for part in 0..20 {
        put(&file, part * 64 * KIB + part * 100, &random.text(3000));
    }
    let file = create(dir, "far-away");
    put(&file, 1 << 40, b"one byte far away");
    let file = create(dir, "punched");
    put(&file, 0, &random.text(600_000));
    sync(dir);
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    alloc(&file, punch, 100 * KIB + 10, 150 * KIB);
    alloc(&file, punch, 400 * KIB, 4 * KIB);
    alloc(&file, FallocateFlags::ZERO_RANGE, 500 * KIB, 20 * KIB);
    // Inline data that is extended, and a file that is truncated to a size that fits inline.
    let file = create(dir, "inline-extended");
    put(&file, 0, &random.text(500));
    sync(dir);
    file.set_len(20_000).expect("a length");
    let file = create(dir, "cut-to-inline-size");
    put(&file, 0, &random.text(50_000));
    sync(dir);
    file.set_len(700).expect("a length");
}

/// Extents that later writes and truncations cut.
pub fn overwritten(dir: &Path) {
    let mut random = Random::new(0x0e4);
    let file = create(dir, "overwritten");
    put(&file, 0, &random.text(1_000_000));
    sync(dir);
    for part in 0..12 {
        put(&file, 17 + part * 80_000, &random.bytes(5000));
        if part % 4 == 3 {
            sync(dir);
        }
    }
    let file = create(dir, "truncated");
    put(&file, 0, &random.text(400_000));
    sync(dir);
    file.set_len(200_123).expect("a length");
    sync(dir);
    file.set_len(300_000).expect("a length");
    let file = create(dir, "truncated-and-appended");
    put(&file, 0, &random.text(200_000));
    sync(dir);
    file.set_len(100_001).expect("a length");
    put(&file, 100_001, &random.text(90_000));
    let file = create(dir, "appended");
    let mut at = 0;
    for len in [1, 10, 3000, 100, 5000, 4096, 130_000, 77] {
        put(&file, at, &random.text(len));
        at += len as u64;
        sync(dir);
    }
}

/// Files that share extents with others and with themselves.
pub fn clones(dir: &Path) {
    let mut random = Random::new(0xc10e);
    write(&dir.join("original"), &random.text(700_000));
    write(&dir.join("small"), &random.text(300));
    sync(dir);
    let original = File::open(dir.join("original")).expect("it opens");
    let small = File::open(dir.join("small")).expect("it opens");
    rustix::fs::ioctl_ficlone(create(dir, "clone"), &original).expect("a clone");
    rustix::fs::ioctl_ficlone(create(dir, "clone-of-inline"), &small).expect("a clone");
    // Inside one filesystem, the kernel shares the aligned part of a range that it copies.
    let file = create(dir, "ranges");
    file.set_len(2 * MIB).expect("a length");
    for (from, to, len) in [(64, 0, 64), (0, 256, 100), (332, 8, 4), (128, 1024, 400)] {
        let (mut from, mut to) = (from * KIB, to * KIB);
        let len = usize::try_from(len * KIB).expect("a length");
        rustix::fs::copy_file_range(&original, Some(&mut from), &file, Some(&mut to), len)
            .expect("a range of a clone");
    }
    let file = create(dir, "clone-then-written");
    rustix::fs::ioctl_ficlone(&file, &original).expect("a clone");
    sync(dir);
    put(&file, 200_000, &random.text(10_000));
    // A file that clones a range of itself, so that it refers to one extent twice.
    let file = create(dir, "of-itself");
    put(&file, 0, &random.text(256 << 10));
    sync(dir);
    let (mut from, mut to) = (0, 512 * KIB);
    rustix::fs::copy_file_range(&file, Some(&mut from), &file, Some(&mut to), 128 << 10)
        .expect("a clone inside one file");
}

/// Extents that are reserved, and written in part.
pub fn preallocated(dir: &Path) {
    let mut random = Random::new(0x9e);
    let none = FallocateFlags::empty();
    let file = create(dir, "preallocated");
    alloc(&file, none, 0, MIB);
    let file = create(dir, "preallocated-and-written");
    alloc(&file, none, 0, MIB);
    sync(dir);
    put(&file, 0, &random.text(4096));
    put(&file, 300_000, &random.text(30_000));
    put(&file, MIB - 1, b"z");
    let file = create(dir, "preallocated-behind-the-end");
    put(&file, 0, &random.text(10_000));
    alloc(&file, FallocateFlags::KEEP_SIZE, 0, MIB);
    let file = create(dir, "preallocated-hole-preallocated");
    alloc(&file, none, 0, 64 * KIB);
    alloc(&file, none, 256 * KIB, 64 * KIB);
    sync(dir);
    put(&file, 260 * KIB, &random.text(8192));
    let file = create(dir, "preallocated-over-data");
    put(&file, 50_000, &random.text(20_000));
    alloc(&file, none, 0, 200_000);
}

/// Makes direct writes in blocks, which get extents of their own.
fn direct(dir: &Path) {
    let flags = i32::try_from(OFlags::DIRECT.bits()).expect("a flag");
    let file = File::options()
        .write(true)
        .create_new(true)
        .custom_flags(flags)
        .open(dir.join("direct"))
        .expect("a file for direct writes");
    let bytes = Random::new(0xd1ec7).text(256 * 1024 + 4096);
    let start = bytes.as_ptr().align_offset(4096);
    for part in [0_u64, 2, 1, 5] {
        let from = start + usize::try_from(part).expect("small") * 32_768;
        put(&file, part * 32_768, &bytes[from..from + 32_768]);
    }
}
