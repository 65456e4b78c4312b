//! What files get from their directory: the same as from the kernel.

use std::fs::{DirBuilder, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};

use rustix::fs::{XattrFlags, getxattr, setxattr};

use super::*;

const LISTS: [&str; 4] = [
    "system.posix_acl_access",
    "system.posix_acl_default",
    "trusted.SGI_ACL_FILE",
    "trusted.SGI_ACL_DEFAULT",
];

/// A default list that names so many users, in the form of system calls.
fn default_list(users: u32) -> Vec<u8> {
    let none = u32::MAX;
    let mut entries = vec![(1_u16, 7_u16, none)];
    entries.extend((0..users).map(|user| (2, 5, 1000 + user)));
    entries.extend([(4, 7, none), (16, 5, none), (32, 1, none)]);
    let mut value = vec![2, 0, 0, 0];
    for (tag, permissions, id) in entries {
        value.extend(tag.to_le_bytes());
        value.extend(permissions.to_le_bytes());
        value.extend(id.to_le_bytes());
    }
    value
}

fn value(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut bytes = vec![0; 4096];
    let len = getxattr(path, name, &mut bytes).ok()?;
    bytes.truncate(len);
    Some(bytes)
}

fn lists(options: &str) {
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 1 << 10);
    disk.mkfs(options);
    let mount = disk.mount("", &[]);
    let cases = [("short", 1), ("two", 2), ("several", 9), ("long", 60)];
    let mut dirs = Vec::new();
    for (name, users) in cases {
        let dir = mount.path().join(name);
        std::fs::create_dir(&dir).unwrap();
        setxattr(&dir, LISTS[1], &default_list(users), XattrFlags::empty()).unwrap();
        OpenOptions::new().create_new(true).write(true).mode(0o664).open(dir.join("file")).unwrap();
        DirBuilder::new().mode(0o2775).create(dir.join("dir")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, dir.join("fifo"), 0o666.into()).unwrap();
        dirs.push(Ino(XfsDisk::ino(&dir)));
    }
    drop(mount);
    let bench = NameBench::on(disk, options);
    let fifo = XfsNewKind::Node(FileType::Fifo, (0, 0));
    let kinds = [
        ("our file", XfsNewKind::Regular, 0o664),
        ("our dir", XfsNewKind::Directory, 0o2775),
        ("our fifo", fifo, 0o666),
    ];
    for dir in &dirs {
        for (name, kind, permissions) in kinds {
            let new = NewFile { umask: Some(0o027), ..new_file(permissions, 9) };
            let place = NamePlace { dir: *dir, name: name.as_bytes() };
            bench.names().create(place, kind, &new).unwrap();
            let taken = bench.names().create(place, kind, &new).unwrap_err();
            assert_eq!(taken.errno(), Errno::EXIST);
        }
        let new = NewFile { umask: Some(0o027), ..new_file(0o664, 9) };
        let ino = bench.names().create_unnamed(*dir, XfsNewKind::Regular, &new).unwrap();
        let place = NamePlace { dir: *dir, name: b"our file later" };
        bench.names().link_unnamed(ino, place, at(9)).unwrap();
    }
    // Without a default list, the umask counts.
    let new = NewFile { umask: Some(0o027), ..new_file(0o666, 9) };
    let place = NamePlace { dir: bench.root(), name: b"plain" };
    bench.names().create(place, XfsNewKind::Regular, &new).unwrap();
    let tree = bench.tree();
    bench.assert_cut_recovers(&tree);
    let disk = bench.assert_unmounts(&tree);
    let mount = disk.mount("", &[]);
    let mode = |path: &Path| path.symlink_metadata().unwrap().mode();
    assert_eq!(mode(&mount.path().join("plain")) & 0o7777, 0o640);
    for (name, _) in cases {
        let dir = mount.path().join(name);
        for (theirs, ours) in [
            ("file", "our file"),
            ("dir", "our dir"),
            ("fifo", "our fifo"),
            ("file", "our file later"),
        ] {
            let (theirs, ours) = (dir.join(theirs), dir.join(ours));
            assert_eq!(mode(&theirs) & 0o777, mode(&ours) & 0o777, "{ours:?}");
            for list in LISTS {
                assert_eq!(value(&theirs, list), value(&ours, list), "{list} of {ours:?}");
            }
        }
    }
}

#[test]
fn files_get_the_lists_that_the_kernel_gives() {
    lists("");
}

#[test]
fn files_get_the_lists_that_the_kernel_gives_with_parent_pointers() {
    lists("-n parent=1 -b size=1024");
}

#[test]
fn files_get_the_flags_that_the_kernel_gives() {
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 1 << 10);
    disk.mkfs("");
    let mount = disk.mount("", &[]);
    let commands: [&[&str]; 4] = [
        &["chattr +AdfS"],
        &["chproj 70000", "chattr +P", "extsize 65536"],
        &["cowextsize 131072", "chattr +s"],
        &["chproj 5", "extsize 8192", "chattr +n"],
    ];
    let names = ["file", "dir", "link", "fifo"];
    let mut dirs = Vec::new();
    for (number, commands) in commands.iter().enumerate() {
        let dir = mount.path().join(format!("{number}"));
        std::fs::create_dir(&dir).unwrap();
        disk.xfs_io(&dir, commands);
        OpenOptions::new().create_new(true).write(true).open(dir.join("file")).unwrap();
        DirBuilder::new().create(dir.join("dir")).unwrap();
        let _ = std::os::unix::fs::symlink("x", dir.join("link"));
        rustix::fs::mkfifoat(rustix::fs::CWD, dir.join("fifo"), 0o666.into()).unwrap();
        let ino = |name: &str| dir.join(name).symlink_metadata().ok().map(|found| found.ino());
        dirs.push((Ino(XfsDisk::ino(&dir)), names.map(ino)));
    }
    drop(mount);
    let bench = NameBench::on(disk, "");
    let kinds = [
        XfsNewKind::Regular,
        XfsNewKind::Directory,
        XfsNewKind::Symlink(b"x"),
        XfsNewKind::Node(FileType::Fifo, (0, 0)),
    ];
    let mut pairs = Vec::new();
    for (dir, theirs) in dirs {
        for (kind, theirs) in kinds.into_iter().zip(theirs) {
            let name = format!("our {:?}", kind.file_type()).into_bytes();
            let made = bench.names().create(NamePlace { dir, name: &name }, kind, &new_file(0, 1));
            match theirs {
                Some(theirs) => pairs.push((theirs, made.unwrap().0)),
                None => assert_eq!(made.unwrap_err().errno(), Errno::PERM),
            }
        }
    }
    let tree = bench.tree();
    let disk = bench.assert_unmounts(&tree);
    for (theirs, ours) in pairs {
        for field in [
            "core.flags",
            "core.extsize",
            "core.projid_lo",
            "core.projid_hi",
            "core.forkoff",
            "core.format",
            "v3.flags2",
            "v3.cowextsize",
        ] {
            let of = |ino: u64| disk.field(&[&format!("inode {ino}")], field);
            assert_eq!(of(theirs), of(ours), "{field} of {theirs} and {ours}");
        }
    }
}
