//! Space that files share.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use offshoot_btrfs::Filesystem;
use offshoot_btrfs_format::TreeId;
use offshoot_testkit::random::Random;
use offshoot_testkit::sharing;
use offshoot_vfs::{
    Dedupe, Fallocate, FileFlags, FilePosition, FileSystem, FileSystemMut, NewFile, SetAttr,
};
use rustix::fs::FallocateFlags;

use super::{TOUCH, shell, twins_that_share};
use crate::common::{AT, NEW, at, place};

const SECTOR: u64 = 4096;

/// The bytes of a file of [`shared_space`]: random bytes that compression makes larger, or text.
fn bytes_of(name: &str) -> Vec<u8> {
    let mut random = Random::new(7);
    match name {
        "small" => random.text(1000),
        "text" | "same-text" => random.text(300_001),
        _ => random.bytes(300_001),
    }
}

/// An operation that shares space between files of both volumes: two names, two offsets and a
/// length. They are in sectors, and for a copy in bytes.
#[derive(Clone, Copy, Debug)]
enum ShareOp {
    Clone(&'static str, u64, &'static str, u64, u64),
    Dedupe(&'static str, u64, &'static str, u64, u64),
    Copy(&'static str, u64, &'static str, u64, u64),
    Write(&'static str, u64, u64),
    Punch(&'static str, u64, u64),
    Cut(&'static str, u64),
    Snapshot(&'static str, bool),
}

use ShareOp::{Clone as Cloned, Copy as Copied, Cut, Dedupe as Deduped, Punch, Snapshot, Write};

/// A length of 0 means up to the end.
const SHARES: &[ShareOp] = &[
    Cloned("live/data", 0, "whole", 0, 0),
    Cloned("live/data", 3, "parts", 0, 20),
    Cloned("live/data", 3, "parts", 40, 20),
    Cloned("text", 0, "whole-text", 0, 0),
    Cloned("text", 10, "parts", 70, 30),
    Cloned("live/room", 0, "parts", 120, 20),
    Cloned("small", 0, "whole-small", 0, 0),
    Cloned("nocow", 2, "nocow-clone", 5, 30),
    Copied("live/data", 8 * SECTOR, "copied", 0, 16 * SECTOR),
    Copied("text", 0, "copied", 32 * SECTOR, 32 * SECTOR),
    // Whole sectors are shared. A range that begins within a sector shares nothing. (If both ranges
    // begin at the same offset in a sector, we share the sectors behind it, and the kernel does
    // not.)
    Copied("live/data", 3 * SECTOR, "copied-parts", 0, 100_001),
    Copied("text", 2 * SECTOR, "copied-parts", 40 * SECTOR, 5 * SECTOR + 1),
    Copied("live/data", 10, "copied-parts", 50 * SECTOR, 9 * SECTOR),
    Copied("live/data", SECTOR, "copied-parts", 60 * SECTOR + 10, 70_000),
    Copied("live/data", 70 * SECTOR, "copied-end", 0, 300_001 - 70 * SECTOR),
    Copied("small", 0, "copied-end", 5 * SECTOR, 1000),
    Deduped("live/data", 0, "live/same", 0, 16),
    Deduped("live/data", 30, "live/same", 30, 20),
    Deduped("text", 0, "same-text", 0, 0),
    Snapshot("snapshot", false),
    Snapshot("kept", true),
    Write("live/data", 20, 3),
    Write("live/room", 12, 4),
    Write("snapshot/room", 15, 2),
    Cloned("kept/same", 10, "snapshot/data", 40, 10),
    Punch("whole", 5, 10),
    Punch("snapshot/same", 16, 4),
    Cut("whole-text", 33),
    Cut("nocow-clone", 20),
    Write("nocow", 0, 4),
    Write("nocow", 40, 4),
    Snapshot("last", true),
    Write("nocow", 60, 2),
];

fn share_by_kernel(mount: &Path, share: ShareOp) {
    let open = |name: &str| {
        File::options().write(true).read(true).open(mount.join(name)).expect("it opens")
    };
    let place = |name: &str| mount.join(name);
    match share {
        Cloned(from, at, to, to_at, len) => {
            let (from, to) = (place(from), place(to));
            sharing::clone_range((&from, at * SECTOR), (&to, to_at * SECTOR), len * SECTOR)
                .unwrap_or_else(|errno| panic!("{share:?}: error {errno}"));
        }
        Deduped(from, at, to, to_at, len) => {
            let (from, to) = (place(from), place(to));
            let rest = from.metadata().expect("it is there").len() - at * SECTOR;
            let len = if len == 0 { rest } else { len * SECTOR };
            let same = sharing::dedupe_range((&from, at * SECTOR), (&to, to_at * SECTOR), len);
            assert_eq!(same, Ok(true), "{share:?}");
        }
        Copied(from, at, to, to_at, len) => {
            let (mut at, mut to_at, mut left) = (at, to_at, usize::try_from(len).expect("small"));
            while left > 0 {
                // The first call shares what it can, and leaves the rest to the next call.
                let (source, target) = (Some(&mut at), Some(&mut to_at));
                let done = rustix::fs::copy_file_range(open(from), source, open(to), target, left);
                left -= done.ok().filter(|&done| done > 0).unwrap_or_else(|| panic!("{share:?}"));
            }
        }
        Write(name, at, len) => {
            let bytes = vec![1; usize::try_from(len * SECTOR).expect("small")];
            open(name).write_all_at(&bytes, at * SECTOR).expect("it writes");
        }
        Punch(name, at, len) => {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(open(name), flags, at * SECTOR, len * SECTOR).expect("a hole");
        }
        Cut(name, len) => open(name).set_len(len * SECTOR).expect("it is cut"),
        Snapshot(name, is_read_only) => {
            let option = if is_read_only { "-r" } else { "" };
            let touch = TOUCH.replace("find .", "find live");
            shell(mount, &format!("{touch}; btrfs -q subvolume snapshot {option} live {name}"));
        }
    }
}

fn share_by_ours(fs: &Filesystem, share: ShareOp) {
    let position =
        |name: &str, sector: u64| FilePosition { file: at(fs, name), offset: sector * SECTOR };
    let size = |name: &str| fs.attr(at(fs, name)).expect("attributes").size;
    let done = match share {
        Cloned(from, at, to, to_at, len) => {
            fs.clone_range(position(from, at), position(to, to_at), len * SECTOR, AT)
        }
        Deduped(from, at, to, to_at, len) => {
            let len = if len == 0 { size(from) - at * SECTOR } else { len * SECTOR };
            let found = fs.dedupe_range(position(from, at), position(to, to_at), len);
            found.map(|found| assert_eq!(found, Dedupe::Same { len }, "{share:?}"))
        }
        Copied(from, offset, to, to_at, len) => {
            let position = |name: &str, offset| FilePosition { file: at(fs, name), offset };
            let done = fs.copy_range(position(from, offset), position(to, to_at), len, AT);
            done.map(|done| assert_eq!(done, len, "{share:?}"))
        }
        Write(name, sector, len) => {
            let bytes = vec![1; usize::try_from(len * SECTOR).expect("small")];
            fs.write(at(fs, name), sector * SECTOR, &bytes, AT)
        }
        Punch(name, sector, len) => {
            fs.fallocate(at(fs, name), Fallocate::PunchHole, sector * SECTOR, len * SECTOR, AT)
        }
        Cut(name, len) => {
            let set = SetAttr { size: Some(len * SECTOR), ..SetAttr::default() };
            fs.set_attr(at(fs, name), &set, AT)
        }
        Snapshot(name, is_read_only) => {
            let live = TreeId(at(fs, "live").dev);
            fs.snapshot(live, place(fs.root(), name), is_read_only, AT).map(drop)
        }
    };
    done.unwrap_or_else(|error| panic!("{share:?}: {error}"));
}

const SOURCES: [&str; 6] = ["live/data", "live/same", "text", "same-text", "small", "nocow"];
const TARGETS: [&str; 8] = [
    "whole",
    "parts",
    "whole-text",
    "whole-small",
    "nocow-clone",
    "copied",
    "copied-parts",
    "copied-end",
];

/// Clones, dedupes, copies and snapshots, and then writes, holes and truncations. On both volumes
/// the kernel reports the same shared ranges of the same files.
#[test]
fn shared_space() {
    let theirs = |path: &Path| {
        shell(path, "umask 022; btrfs -q subvolume create live; chmod 755 live");
        for name in TARGETS.iter().chain(&["nocow"]) {
            File::create(path.join(name)).expect("a file");
        }
        shell(path, "chattr +C nocow nocow-clone; : > text; chattr +c text");
        for name in SOURCES {
            std::fs::write(path.join(name), bytes_of(name)).expect("data");
        }
        shell(
            path,
            "chattr -c text; printf start > live/room; truncate -s 8192 live/room; \
             fallocate -o 40960 -l 80000 live/room",
        );
        shell(path, TOUCH);
        for &share in SHARES {
            rustix::fs::syncfs(File::open(path).expect("the root")).expect("a sync");
            share_by_kernel(path, share);
        }
        shell(path, &format!("{TOUCH} || :"));
    };
    twins_that_share(14, theirs, |fs| {
        let new = NewFile { permissions: 0o755, ..NEW };
        fs.create_subvolume(place(fs.root(), "live"), &new).expect("a subvolume");
        let live = at(fs, "live");
        let create = |dir, name: &str| fs.create(place(dir, name), &NEW).expect("a file");
        for name in TARGETS.iter().chain(&["nocow"]) {
            let file = create(fs.root(), name);
            if name.starts_with("nocow") {
                fs.set_flags(file, FileFlags::NODATACOW, AT).expect("it is empty");
            }
        }
        for name in SOURCES {
            let file = match name.strip_prefix("live/") {
                Some(below) => create(live, below),
                None if name == "nocow" => at(fs, name),
                None => create(fs.root(), name),
            };
            if name == "text" {
                fs.set_flags(file, FileFlags::COMPRESS, AT).expect("flags");
            }
            fs.write(file, 0, &bytes_of(name), AT).expect("data");
        }
        fs.sync().expect("a commit");
        fs.set_flags(at(fs, "text"), FileFlags::empty(), AT).expect("flags");
        let room = create(live, "room");
        fs.write(room, 0, b"start", AT).expect("data");
        let set = SetAttr { size: Some(8192), ..SetAttr::default() };
        fs.set_attr(room, &set, AT).expect("a longer file");
        let what = Fallocate::Allocate { keeps_size: false };
        fs.fallocate(room, what, 40_960, 80_000, AT).expect("room");
        for &share in SHARES {
            fs.sync().expect("a commit");
            share_by_ours(fs, share);
        }
    });
}
