//! What names are refused for, where inodes lie, and how many links they have.

use std::collections::BTreeSet;

use super::*;
use crate::trans::XfsTransactionKind as Kind;

fn errno<T>(result: Result<T, Error>) -> Option<Errno> {
    result.err().map(|error| error.errno())
}

#[test]
fn what_cannot_be_a_name_or_a_file_is_refused() {
    let Some(bench) = NameBench::make(1 << 10, "") else { return };
    let (names, dir) = (bench.names(), bench.root());
    let create =
        |name: &[u8], kind| errno(names.create(NamePlace { dir, name }, kind, &new_file(0, 1)));
    let long = vec![b'x'; 256];
    for (name, wanted) in [
        (&b"."[..], Errno::INVAL),
        (b"..", Errno::INVAL),
        (b"", Errno::INVAL),
        (b"a/b", Errno::INVAL),
        (b"a\0b", Errno::INVAL),
        (&long, Errno::NAMETOOLONG),
    ] {
        assert_eq!(create(name, XfsNewKind::Regular), Some(wanted));
        let place = NamePlace { dir, name };
        assert_eq!(errno(names.unlink(place, at(1))), Some(wanted));
        assert_eq!(errno(names.rename(place, place, Rename::Replace, at(1))), Some(wanted));
    }
    let target = vec![b'x'; 1024];
    for (kind, wanted) in [
        (XfsNewKind::Symlink(b""), Errno::NOENT),
        (XfsNewKind::Symlink(&target), Errno::NAMETOOLONG),
        (XfsNewKind::Symlink(b"a\0b"), Errno::INVAL),
        (XfsNewKind::Node(FileType::Directory, (0, 0)), Errno::INVAL),
        (XfsNewKind::Node(FileType::BlockDevice, (1 << 14, 0)), Errno::INVAL),
        (XfsNewKind::Node(FileType::Fifo, (1, 0)), Errno::INVAL),
    ] {
        assert_eq!(create(b"name", kind), Some(wanted));
    }
    assert_eq!(create(b"file", XfsNewKind::Regular), None);
    let file = names.find(NamePlace { dir, name: b"file" }).unwrap().0;
    let place = NamePlace { dir: file, name: b"below" };
    assert_eq!(
        errno(names.create(place, XfsNewKind::Regular, &new_file(0, 1))),
        Some(Errno::NOTDIR)
    );
    assert_eq!(errno(names.unlink(place, at(1))), Some(Errno::NOTDIR));
    // A directory that is removed, and still open.
    let gone = NamePlace { dir, name: b"gone" };
    let ino = names.create(gone, XfsNewKind::Directory, &new_file(0, 1)).unwrap();
    assert_eq!(names.rmdir(gone, at(1)).unwrap(), ino);
    let place = NamePlace { dir: ino, name: b"below" };
    assert_eq!(
        errno(names.create(place, XfsNewKind::Regular, &new_file(0, 1))),
        Some(Errno::NOENT)
    );
    assert_eq!(errno(names.link(file, place, at(1))), Some(Errno::NOENT));
    let file_place = NamePlace { dir, name: b"file" };
    assert_eq!(errno(names.rename(file_place, place, Rename::Replace, at(1))), Some(Errno::NOENT));
    names.inactivate(ino).unwrap();
    let tree = bench.tree();
    drop(bench.assert_unmounts(&tree));
}

/// Flags and projects that the kernel has set.
#[test]
fn flags_and_projects_refuse_names() {
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 1 << 10);
    disk.mkfs("");
    let mount = disk.mount("", &[]);
    let dirs = ["immutable", "append", "project", "plain"].map(|name| {
        let dir = mount.path().join(name);
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("file"), b"").unwrap();
        Ino(XfsDisk::ino(&dir))
    });
    let root = mount.path();
    std::fs::write(root.join("fixed"), b"").unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, root.join("fifo"), 0o600.into()).unwrap();
    let of = |name: &str| Ino(XfsDisk::ino(&root.join(name)));
    let (fixed, fifo, file) = (of("fixed"), of("fifo"), of("plain/file"));
    disk.xfs_io(&root.join("immutable"), &["chattr +i"]);
    disk.xfs_io(&root.join("append"), &["chattr +a"]);
    disk.xfs_io(&root.join("project"), &["chproj 42", "chattr +P"]);
    disk.xfs_io(&root.join("fixed"), &["chattr +a"]);
    drop(mount);
    let bench = NameBench::on(disk, "");
    let names = bench.names();
    let [immutable, append, project, plain] = dirs;
    let place = |dir, name: &'static str| NamePlace { dir, name: name.as_bytes() };
    let create = |place| errno(names.create(place, XfsNewKind::Regular, &new_file(0o600, 1)));
    let rename = |from, to| errno(names.rename(from, to, Rename::Replace, at(1)));
    assert_eq!(create(place(immutable, "new")), Some(Errno::PERM));
    assert_eq!(errno(names.unlink(place(immutable, "file"), at(1))), Some(Errno::PERM));
    assert_eq!(create(place(append, "new")), None);
    assert_eq!(errno(names.unlink(place(append, "file"), at(1))), Some(Errno::PERM));
    assert_eq!(rename(place(append, "file"), place(plain, "moved")), Some(Errno::PERM));
    assert_eq!(errno(names.unlink(place(bench.root(), "fixed"), at(1))), Some(Errno::PERM));
    assert_eq!(errno(names.link(fixed, place(plain, "fixed"), at(1))), Some(Errno::PERM));
    assert_eq!(rename(place(plain, "file"), place(bench.root(), "fixed")), Some(Errno::PERM));
    assert_eq!(errno(names.link(file, place(project, "link"), at(1))), Some(Errno::XDEV));
    assert_eq!(rename(place(plain, "file"), place(project, "moved")), Some(Errno::XDEV));
    assert_eq!(errno(names.link(fifo, place(project, "fifo"), at(1))), None);
    assert_eq!(create(place(project, "new")), None);
    assert_eq!(rename(place(project, "new"), place(plain, "from the project")), None);
    let tree = bench.tree();
    drop(bench.assert_unmounts(&tree));
}

#[test]
fn a_file_has_more_links_than_sixteen_bits_count() {
    let Some(bench) = NameBench::make(1 << 10, "") else { return };
    let names = bench.names();
    let place = NamePlace { dir: bench.root(), name: b"file" };
    let ino = names.create(place, XfsNewKind::Regular, &new_file(0o600, 1)).unwrap();
    for number in 0..66_000 {
        let name = format!("{number}").into_bytes();
        names.link(ino, NamePlace { dir: bench.root(), name: &name }, at(1)).unwrap();
    }
    let set = |links: u32| {
        let mut t = bench.engine.begin(Kind::ChangeInode, 0).unwrap();
        t.inode(ino).unwrap().core_mut().nlink = links.into();
        t.commit().unwrap();
    };
    set(i32::MAX.cast_unsigned());
    let one_more = NamePlace { dir: bench.root(), name: b"one more" };
    assert_eq!(errno(names.link(ino, one_more, at(1))), Some(Errno::MLINK));
    set(66_001);
    let tree = bench.tree();
    assert_eq!(tree.nodes[&ino].links, 66_001);
    drop(bench.assert_unmounts(&tree));
}

#[test]
fn directories_go_around_the_groups_and_files_stay_with_them() {
    let Some(bench) = NameBench::make(1 << 10, "") else { return };
    let names = bench.names();
    let group = |ino: Ino| bench.engine.geometry().split_ino(ino).unwrap().0.0;
    let mut groups = BTreeSet::new();
    for number in 0..4 {
        let name = format!("{number}").into_bytes();
        let place = NamePlace { dir: bench.root(), name: &name };
        let dir = names.create(place, XfsNewKind::Directory, &new_file(0o700, 1)).unwrap();
        groups.insert(group(dir));
        for number in 0..130 {
            let name = format!("{number}").into_bytes();
            let place = NamePlace { dir, name: &name };
            let ino = names.create(place, XfsNewKind::Regular, &new_file(0, 1)).unwrap();
            assert_eq!(group(ino), group(dir));
        }
    }
    assert_eq!(groups.len(), 4);
    // Freed and taken again, a number has another generation.
    let place = NamePlace { dir: bench.root(), name: b"again" };
    let mut seen = BTreeSet::new();
    for _ in 0..300 {
        let ino = names.create(place, XfsNewKind::Regular, &new_file(0, 1)).unwrap();
        let mut t = bench.engine.begin(Kind::ChangeTimes, 0).unwrap();
        let generation = t.inode(ino).unwrap().core().generation.get();
        drop(t);
        assert!(seen.insert((ino, generation)));
        names.inactivate(names.unlink(place, at(1)).unwrap().unwrap()).unwrap();
    }
    let tree = bench.tree();
    drop(bench.assert_unmounts(&tree));
}
