//! Our mount shows and does what the kernel's btrfs shows and does.

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;

use offshoot_testkit::btrfs::fill;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::run::run;

use super::disk::MountDisk;
use super::format::is_xfs;
use super::{ServedMount, assert_alike, calls, does, on_both, require, touch_all, twins};

/// One of everything that the kernel made, seen through both mounts at once.
#[test]
fn both_mounts_show_the_same() {
    let Some(judges) = require() else { return };
    let disks = Recipe::new().fill(fill::everything).make(&judges);
    let theirs = disks.mount("ro,noatime");
    let ours = ServedMount::new(&disks.images()[0], "ro");
    let shown = HostFilesystem::new(ours.path()).expect("the mount opens");
    // Our inode numbers are unique in the mount, and the kernel's only in each subvolume.
    let compare = Compare::default().without(Aspect::Ids);
    compare.run(&shown, theirs.path()).assert_same(fill::EVERYTHING_AT_LEAST);
    drop(shown);
    ours.unmount();
}

/// The same system calls on a volume of ours and on one of the kernel have the same results, and
/// leave the same.
fn calls_do_the_same() {
    let Some(judges) = require() else { return };
    let (ours, theirs) = twins(&judges, 512);
    let mounted = ServedMount::new(&ours.images()[0], "allow_other");
    let kernel = theirs.mount("noatime");
    let (said, expected) = (calls::make(mounted.path()), calls::make(kernel.path()));
    assert_alike(&comparable(&said), &comparable(&expected));
    assert!(said.len() > 100, "only {} calls", said.len());
    // The clock differs too.
    for root in [mounted.path(), kernel.path()] {
        touch_all(root);
    }
    // The kernel's XFS gives zeroed ranges and what it wrote at once other extents.
    let compare = || match Compare::of_copies() {
        copies if is_xfs() => copies.without(Aspect::Holes),
        copies => copies,
    };
    // On XFS it shows the lists as they are stored too.
    let of_ours = if is_xfs() { compare().without(Aspect::StoredAcls) } else { compare() };
    let shown = HostFilesystem::new(mounted.path()).expect("the mount opens");
    of_ours.run(&shown, kernel.path()).assert_same(20);
    drop(shown);
    // The log of btrfs reports that there was no space for one attribute, and nothing else.
    let said = mounted.log();
    let is_told = said.lines().count() == 1 && said.contains("xattr `user.65536`");
    assert!(if is_xfs() { said.is_empty() } else { is_told }, "{said}");
    does(&["unmount".as_ref(), mounted.path().as_os_str()]);
    drop(mounted);
    ours.assert_checks();
    // And as the kernel finds it.
    let found = ours.mount("noatime");
    let shown = HostFilesystem::new(found.path()).expect("the mount opens");
    compare().run(&shown, kernel.path()).assert_same(20);
}

/// Lines without what the kernel's XFS does in its own way: it gives a file that grows room behind
/// its end, counts the inodes that a volume can have, and may list a file twice that is moved
/// meanwhile.
fn comparable(said: &[String]) -> Vec<String> {
    let own = ["statvfs: ", "shown while they were moved "];
    let without = |line: &String| match line.split_once(" blocks ") {
        Some((before, after)) if before.starts_with("stat data/file: ") => {
            [before, after.split_once(' ').map_or("", |(_, rest)| rest)].join(" ")
        }
        _ => own
            .iter()
            .find(|own| line.starts_with(**own))
            .map_or(line.as_str(), |own| *own)
            .to_owned(),
    };
    said.iter().map(|line| if is_xfs() { without(line) } else { line.clone() }).collect()
}

/// Inode numbers stay the same, whichever subvolume is mounted, and no two files have the same one.
#[test]
fn numbers_are_stable_and_unique() {
    let Some(judges) = require() else { return };
    let disks = Recipe::new().fill(fill::everything).make(&judges);
    let image = &disks.images()[0];
    let numbers = |mounted: &ServedMount| {
        let mut found = Vec::new();
        let mut dirs = vec![mounted.path().to_path_buf()];
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(dir).expect("it is listed") {
                let entry = entry.expect("an entry");
                let path = entry.path();
                // Deeper than a path can express.
                if path.as_os_str().len() > 3000 {
                    continue;
                }
                let metadata = path.symlink_metadata().expect("it is there");
                assert_eq!(entry_number(&entry), metadata.ino(), "{}", path.display());
                if metadata.is_dir() {
                    dirs.push(path.clone());
                }
                // All names of a file show the same number.
                let key = if metadata.is_dir() { 0 } else { metadata.nlink() };
                let name = path.strip_prefix(mounted.path()).expect("below").to_path_buf();
                found.push((metadata.ino(), key, name));
            }
        }
        found.sort();
        found
    };
    let mounted = ServedMount::new(image, "ro");
    let first = numbers(&mounted);
    let root = mounted.path().metadata().expect("it is there").ino();
    let top = first.iter().filter(|(number, ..)| u32::try_from(*number).is_ok()).count();
    mounted.unmount();
    // In the top-level subvolume they are those of the kernel, and 32-bit programs can use them.
    let theirs = disks.mount("ro");
    for (number, _, name) in &first {
        let kernel = theirs.path().join(name).symlink_metadata().expect("it is there");
        let is_top = kernel.dev() == theirs.path().metadata().expect("it is there").dev();
        assert_eq!(is_top, *number == kernel.ino(), "{}", name.display());
    }
    assert!(top > 100 && root == 256, "{top} of {} numbers are small", first.len());
    drop(theirs);
    assert!(first.iter().all(|(number, ..)| *number != root));
    for pair in first.windows(2) {
        assert!(pair[0].0 != pair[1].0 || pair[0].1 > 1, "{pair:?}");
    }
    let mounted = ServedMount::new(image, "ro");
    assert!(numbers(&mounted) == first);
    mounted.unmount();
}

/// With the same options, new files get the same flags as in the kernel, and the same files are
/// inline.
#[test]
fn options_store_the_same() {
    let Some(judges) = require() else { return };
    for options in [
        "rw",
        "nodatacow",
        "nodatasum",
        "compress=zstd,nodatacow",
        "nodatacow,datacow",
        "nodatacow,compress-force=zlib",
        "max_inline=0",
        "max_inline=4095,nodatasum",
        "max_inline=1k",
    ] {
        let (ours, theirs) = twins(&judges, 256);
        let mounted = ServedMount::new(&ours.images()[0], options);
        let kernel = theirs.mount(options);
        for root in [mounted.path(), kernel.path()] {
            std::fs::create_dir(root.join("dir")).expect("a directory");
            for len in [0, 1, 1024, 1025, 2048, 2049, 4094, 4095, 4096, 4097, 20_000] {
                let name = root.join(format!("dir/{len}"));
                std::fs::write(name, vec![b'x'; len]).expect("a file");
            }
        }
        drop(kernel);
        mounted.unmount();
        assert_eq!(how_stored(&ours), how_stored(&theirs), "with {options}");
        ours.assert_checks();
    }
}

/// With `discard`, an image keeps no more blocks of removed files than the kernel leaves with the
/// same option.
#[test]
fn what_is_removed_is_discarded() {
    let Some(judges) = require() else { return };
    let (ours, theirs) = twins(&judges, 512);
    let mounted = ServedMount::new(&ours.images()[0], "discard,flushoncommit");
    let kernel = theirs.mount("discard=sync,flushoncommit");
    for root in [mounted.path(), kernel.path()] {
        let write = |name: &str, len| {
            let file = std::fs::File::create(root.join(name)).expect("a file");
            std::io::Write::write_all(&mut &file, &vec![b'x'; len]).expect("room");
            file.sync_all().expect("it is stored");
        };
        write("kept", 1 << 20);
        write("large", 60 << 20);
        std::fs::remove_file(root.join("large")).expect("it is there");
    }
    drop(kernel);
    mounted.unmount();
    let [left, theirs] = [&ours, &theirs].map(|disks| {
        let image = disks.images()[0].metadata().expect("an image");
        std::os::unix::fs::MetadataExt::blocks(&image) * 512
    });
    println!("{left} bytes of the host, of the kernel's {theirs}");
    assert!(left < theirs + (8 << 20), "{left} bytes of the host, of the kernel's {theirs}");
    ours.assert_checks();
}

/// The flags of inodes, and the kinds of extents, in the order of the tree.
fn how_stored(disks: &MountDisk) -> Vec<String> {
    let image = disks.images()[0].as_os_str();
    let dump = ["inspect-internal", "dump-tree", "-t", "5"].map(OsStr::new);
    let said = run("btrfs", &[&dump[..], &[image]].concat());
    let of_line = |line: &str| {
        let found = ["flags 0x", "type 0 (inline)", "type 1 (regular)"].map(|word| line.find(word));
        found.into_iter().flatten().next().map(|at| line[at..].to_owned())
    };
    // The tree block has flags of its own, and they differ between the two programs.
    let lines = said.lines().filter(|line| !line.contains("WRITTEN"));
    lines.filter_map(of_line).collect()
}

fn entry_number(entry: &std::fs::DirEntry) -> u64 {
    use std::os::unix::fs::DirEntryExt;
    entry.ino()
}

on_both! {
    calls_do_the_same,
}
