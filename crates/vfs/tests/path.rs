//! Paths, resolved in a filesystem in memory.

use offshoot_testkit::memory::{MemoryFilesystem, ROOT, id};
use offshoot_vfs::path::{LastLink, bare, climb, last_name, prefix, resolve, resolve_end};
use offshoot_vfs::{Errno, FileType};

fn volume() -> MemoryFilesystem {
    let mut fs = MemoryFilesystem::new();
    fs.add(ROOT, b"etc", 300, FileType::Directory);
    fs.file(300, b"fstab", 301, b"x");
    fs.add(ROOT, b"a", 302, FileType::Directory);
    fs.add(302, b"abs", 303, FileType::Symlink).target = b"/etc/./fstab".to_vec();
    fs.add(302, b"up", 304, FileType::Symlink).target = b"../../../etc".to_vec();
    fs.add(302, b"loop", 305, FileType::Symlink).target = b"loop".to_vec();
    fs.add(302, b"file", 306, FileType::Symlink).target = b"/etc/fstab/".to_vec();
    for n in 0..50 {
        let target = if n == 0 { "/etc".into() } else { format!("l{}", n - 1) };
        fs.add(ROOT, format!("l{n}").as_bytes(), 400 + n, FileType::Symlink).target =
            target.into_bytes();
    }
    fs
}

#[test]
fn paths_as_in_a_mount() {
    let fs = volume();
    let keep = |path: &str| resolve(&fs, path.as_bytes(), LastLink::Keep);
    let follow = |path: &str| resolve(&fs, path.as_bytes(), LastLink::Follow);
    for (path, ino) in [
        ("/", ROOT),
        ("", ROOT),
        ("/..", ROOT),
        ("/etc/fstab", 301),
        ("//etc/./../etc//fstab", 301),
        ("/a/abs", 303),
        ("/a/up/fstab", 301),
        ("/a/up/", 300),
        ("/a/up/..", ROOT),
        ("/l30/fstab", 301),
    ] {
        assert_eq!(keep(path).unwrap(), id(ino), "{path}");
    }
    assert_eq!(follow("/a/abs").unwrap(), id(301));
    assert_eq!(follow("/l39").unwrap(), id(300));
    for (path, errno) in [
        ("/no", Errno::NOENT),
        ("/etc/no/x", Errno::NOENT),
        ("/etc/fstab/", Errno::NOTDIR),
        ("/etc/fstab/x", Errno::NOTDIR),
        ("/a/file", Errno::NOTDIR),
        ("/a/loop", Errno::LOOP),
        ("/l40", Errno::LOOP),
    ] {
        assert_eq!(follow(path).unwrap_err().errno(), errno, "{path}");
    }
    let long = format!("/{}", "n".repeat(256));
    assert_eq!(follow(&long).unwrap_err().errno(), Errno::NAMETOOLONG);
}

#[test]
fn the_last_name_need_not_exist() {
    let fs = volume();
    let end = |path: &str, last| {
        let end = resolve_end(&fs, path.as_bytes(), last).unwrap();
        let place = end.place.map(|(dir, name)| (dir.ino, String::from_utf8(name).unwrap()));
        (place, end.file.map(|file| file.ino), end.must_be_directory)
    };
    let place = |dir, name: &str| Some((dir, name.to_owned()));
    assert_eq!(end("/new/", LastLink::Keep), (place(ROOT, "new"), None, true));
    assert_eq!(end("/a/up/new", LastLink::Keep), (place(300, "new"), None, false));
    assert_eq!(end("/a/abs", LastLink::Keep), (place(302, "abs"), Some(303), false));
    assert_eq!(end("/a/abs", LastLink::Follow), (place(300, "fstab"), Some(301), false));
    assert_eq!(end("/etc/..", LastLink::Keep), (None, Some(ROOT), false));
    assert_eq!(end("/", LastLink::Keep), (None, Some(ROOT), true));
    assert!(resolve_end(&fs, b"/no/new", LastLink::Keep).is_err());
}

#[test]
fn ends_of_paths() {
    for (path, without, in_front) in
        [("/", "", ""), ("a//", "a", "a"), ("a/./", "a/.", "a"), ("/.", "/.", ""), (".", ".", ".")]
    {
        assert_eq!(bare(path.as_bytes()), without.as_bytes(), "{path}");
        assert_eq!(prefix(path.as_bytes()), in_front.as_bytes(), "{path}");
    }
}

#[test]
fn last_names() {
    for (path, name) in
        [("/a/b", Some("b")), ("b//", Some("b")), ("/", None), ("a/.", None), ("..", None)]
    {
        assert_eq!(last_name(path.as_bytes()), name.map(str::as_bytes), "{path}");
    }
}

#[test]
fn climbing_ends() {
    let mut fs = volume();
    assert_eq!(climb(&fs, id(ROOT), id(300), 99).unwrap().as_deref(), Some(&b"etc"[..]));
    assert_eq!(climb(&fs, id(300), id(302), 99).unwrap(), None);
    fs.node(500, FileType::Directory).parent = Some((500, b"self".to_vec()));
    assert_eq!(climb(&fs, id(ROOT), id(500), 4096).unwrap(), None);
}
