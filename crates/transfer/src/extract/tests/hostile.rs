//! Trees that lie.

use std::os::unix::fs::MetadataExt;

use offshoot_testkit::memory::{MemoryFilesystem, ROOT};
use offshoot_vfs::FileType;

use super::*;

#[test]
fn names_do_not_lead_outside() {
    let mut fs = MemoryFilesystem::new();
    let bad: [&[u8]; 9] = [
        b"..",
        b".",
        b"",
        b"/",
        b"../outside",
        b"/outside",
        b"a/../../outside",
        b"x\0y",
        &[b'n'; 300],
    ];
    for (ino, name) in (300..).zip(bad) {
        fs.file(ROOT, name, ino, b"overwritten");
        fs.add(ROOT, name, ino + 50, FileType::Directory);
        fs.add(ROOT, name, ino + 100, FileType::Symlink).target = b"..".to_vec();
    }
    fs.file(ROOT, b"good", 999, b"");
    let sandbox = ExtractSandbox::new();
    let (outcome, status) = sandbox.extract(&fs);
    assert_eq!(status, Some(Worst::Corrupt));
    assert_eq!(outcome.errors, 27);
    assert_eq!(sandbox.names(), ["good"]);
}

#[test]
fn symlinks_do_not_lead_outside() {
    let mut fs = MemoryFilesystem::new();
    // Each of these would be written through if a link were followed anywhere.
    fs.add(ROOT, b"a", 300, FileType::Symlink).target = b"..".to_vec();
    fs.add(ROOT, b"a", 301, FileType::Directory);
    fs.file(301, b"outside", 302, b"overwritten");
    fs.add(ROOT, b"b", 303, FileType::Symlink).target = b"../outside".to_vec();
    fs.file(ROOT, b"b", 304, b"overwritten").attr.permissions = 0o777;
    fs.add(ROOT, b"c", 305, FileType::Symlink).target = b"../new".to_vec();
    fs.file(ROOT, b"c", 306, b"made");
    let several = fs.file(ROOT, b"d", 307, b"made");
    several.attr.nlink = 2;
    fs.enter(ROOT, b"c", 307);
    let sandbox = ExtractSandbox::new();
    let before = sandbox.temp.path().join("outside").metadata().unwrap();
    let (outcome, status) = sandbox.extract(&fs);
    assert_eq!(status, Some(Worst::Failed));
    assert!(outcome.errors >= 3, "{outcome:?}");
    let after = sandbox.temp.path().join("outside").metadata().unwrap();
    assert_eq!((before.mode(), before.mtime()), (after.mode(), after.mtime()));
}

#[test]
fn cycles_and_second_ways_are_not_entered() {
    let mut fs = MemoryFilesystem::new();
    fs.add(ROOT, b"a", 300, FileType::Directory);
    fs.add(300, b"b", 301, FileType::Directory);
    fs.file(301, b"f", 302, b"x");
    // To itself, to the top, to the one above, and the same again under another name.
    fs.enter(301, b"self", 301);
    fs.enter(301, b"top", ROOT);
    fs.enter(301, b"up", 300);
    fs.enter(ROOT, b"again", 301);
    fs.enter(300, b"twin", 301);
    fs.enter(300, b"b", 301);
    let sandbox = ExtractSandbox::new();
    let (outcome, status) = sandbox.extract(&fs);
    assert_eq!((status, outcome.errors), (Some(Worst::Corrupt), 6));
    assert_eq!(sandbox.names(), ["a"]);
    assert_eq!(names(&sandbox.out().join("a/b")), ["f"]);
}

#[test]
fn a_tree_that_doubles_on_every_level_stays_small() {
    let mut fs = MemoryFilesystem::new();
    for level in 0..60 {
        let parent = if level == 0 { ROOT } else { 300 + level - 1 };
        fs.add(parent, b"l", 300 + level, FileType::Directory);
        fs.enter(parent, b"r", 300 + level);
    }
    let (outcome, _) = ExtractSandbox::new().extract(&fs);
    assert_eq!((outcome.directories, outcome.errors), (61, 60));
}

#[test]
fn an_endless_directory_ends() {
    let mut fs = MemoryFilesystem::new();
    fs.file(ROOT, b"f", 300, b"x");
    fs.file(ROOT, b"g", 301, b"x");
    fs.node(ROOT, FileType::Directory).is_endless = true;
    let sandbox = ExtractSandbox::new();
    let (_, status) = sandbox.extract(&fs);
    assert_eq!(status, Some(Worst::Corrupt));
    assert_eq!(sandbox.names(), ["f", "g"]);
}

#[test]
fn lying_sizes_leave_no_file() {
    let mut fs = MemoryFilesystem::new();
    // More data than the file is long.
    fs.file(ROOT, b"short", 300, b"hello").attr.size = 3;
    // No data is inside of this one.
    fs.file(ROOT, b"none", 301, b"hello").attr.size = 0;
    let large = fs.file(ROOT, b"large", 302, b"hello");
    large.attr.size = 40 << 20;
    large.pieces.push(((40 << 20) - 2, b"hello".to_vec()));
    // Longer than any file can be.
    fs.file(ROOT, b"huge", 303, b"hello").attr.size = u64::MAX;
    fs.file(ROOT, b"good", 304, b"hello");
    let sandbox = ExtractSandbox::new();
    let (outcome, status) = sandbox.extract(&fs);
    assert_eq!((status, outcome.errors), (Some(Worst::Corrupt), 3));
    assert_eq!(sandbox.names(), ["good", "none"]);
}

#[test]
fn what_cannot_be_read_is_removed_under_all_of_its_names() {
    let mut fs = MemoryFilesystem::new();
    fs.file(ROOT, b"alone", 300, b"half").is_damaged = true;
    fs.add(ROOT, b"dir", 301, FileType::Directory).attr.permissions = 0o500;
    let node = fs.file(301, b"first", 302, b"half");
    node.is_damaged = true;
    node.attr.nlink = 300;
    for n in 0..200 {
        fs.enter(301, format!("n{n}").as_bytes(), 302);
    }
    for n in 0..99 {
        fs.enter(ROOT, format!("n{n}").as_bytes(), 302);
    }
    let large = fs.file(ROOT, b"large", 303, b"half");
    large.attr.size = 50 << 20;
    large.is_damaged = true;
    fs.file(ROOT, b"good", 304, b"whole");
    let sandbox = ExtractSandbox::new();
    let (_, status) = sandbox.extract(&fs);
    assert_eq!(status, Some(Worst::Corrupt));
    assert_eq!(sandbox.names(), ["dir", "good"]);
    assert_eq!(names(&sandbox.out().join("dir")), [""; 0]);
}

#[test]
fn a_tree_deeper_than_any_path_is_made() {
    let mut fs = MemoryFilesystem::new();
    let depth = 3000;
    let name = [b'd'; 200];
    for level in 0..depth {
        let parent = if level == 0 { ROOT } else { 300 + level - 1 };
        fs.add(parent, &name, 300 + level, FileType::Directory);
    }
    let file = fs.file(300 + depth - 1, b"deep", 100_000, b"x");
    file.attr.nlink = 2;
    fs.enter(ROOT, b"top", 100_000);
    let sandbox = ExtractSandbox::new();
    let (outcome, status) = sandbox.extract(&fs);
    assert_eq!((status, outcome.directories), (None, depth + 1), "{outcome:?}");
    assert_eq!(sandbox.out().join("top").metadata().unwrap().nlink(), 2);
}

#[test]
fn a_tree_deeper_than_the_limit_is_an_error() {
    let mut fs = MemoryFilesystem::new();
    for level in 0..9_000 {
        let parent = if level == 0 { ROOT } else { 1000 + level - 1 };
        fs.add(parent, b"d", 1000 + level, FileType::Directory);
    }
    let (outcome, status) = ExtractSandbox::new().extract(&fs);
    assert_eq!(outcome.errors, 1);
    assert_eq!(status, Some(Worst::Unsupported));
}

#[test]
fn a_set_id_bit_goes_with_its_owner_only() {
    let mut fs = MemoryFilesystem::new();
    let node = fs.file(ROOT, b"f", 300, b"x");
    // An owner that no system call can set.
    (node.attr.uid, node.attr.permissions) = (u32::MAX, 0o4755);
    let sandbox = ExtractSandbox::new();
    let (outcome, status) = sandbox.extract(&fs);
    assert_eq!(status, None);
    let kinds: Vec<&str> = outcome.not_applied.iter().map(|count| count.kind).collect();
    assert_eq!(kinds, ["owner", "set_id"]);
    assert_eq!(sandbox.out().join("f").metadata().unwrap().mode(), 0o100_755);
}
