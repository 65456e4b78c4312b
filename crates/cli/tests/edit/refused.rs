//! Operations that must be refused, and what they leave.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use offshoot_device::FileDevice;
use offshoot_testkit::btrfs::disks::MountedMembers;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::scratch_dir;

use super::program::copy_program;
use super::{check, does, fails, offshoot, on_both, volume, words};

/// Each verb that changes a volume. The volume has a file `a` and a directory `d`.
const CHANGES: [&str; 8] = [
    "mkdir v.img:/new",
    "rm v.img:/a",
    "rm -r v.img:/d",
    "mv v.img:/a v.img:/b",
    "ln v.img:/a v.img:/b",
    "ln -s a v.img:/b",
    "cp file v.img:/",
    "cp -r v.img:/d v.img:/e",
];

/// A directory with a file and a volume. The volume has a file and a directory.
fn start() -> tempfile::TempDir {
    let dir = scratch_dir();
    fs::write(dir.path().join("file"), "of the host").expect("a file");
    volume(dir.path(), "v.img", 128);
    does(dir.path(), "mkdir v.img:/d");
    does(dir.path(), "cp file v.img:/a");
    dir
}

#[test]
fn a_volume_in_use_is_not_changed() {
    let dir = start();
    let image = dir.path().join("v.img");
    let before = fs::read(&image).expect("an image");
    {
        let _holder = FileDevice::open_writable(&image).expect("no other program has it");
        for change in CHANGES {
            assert!(fails(dir.path(), change, 1).contains("v.img"));
        }
        // Reading is still allowed.
        does(dir.path(), "cp -r v.img:/d out");
    }
    if let Some(_judges) = judges::require() {
        let _mount = MountedMembers::try_new(std::slice::from_ref(&image), "ro")
            .expect("the kernel mounts it");
        for change in CHANGES {
            assert!(fails(dir.path(), change, 1).contains("v.img"));
        }
    }
    assert!(fs::read(&image).expect("an image") == before, "it was changed");
    for change in CHANGES {
        // Each change is allowed, but an earlier one may have taken its file.
        let _ = offshoot(dir.path(), &words(change));
    }
    assert!(fs::read(&image).expect("an image") != before, "nothing was changed");
}

#[test]
fn wrong_usage_is_2_and_changes_nothing() {
    let dir = start();
    let path = dir.path();
    fs::copy(path.join("v.img"), path.join("w.img")).expect("a second volume");
    let before = fs::read(path.join("v.img")).expect("an image");
    for line in [
        "cp file",
        "cp file other",
        "cp v.img:/a file v.img",
        "cp file v.img:etc",
        "cp v.img:/a out v.img:x",
        "cp - file v.img:/",
        "cp --no-preserve nothing file v.img:/",
        "cp --device w.img v.img:/a w.img:/b",
        "mkdir",
        "mkdir -m 999 v.img:/x",
        "rm",
        "mv v.img:/a",
        "mv v.img:/a w.img:/a",
        "ln v.img:/a w.img:/a",
        "ln v.img:/a",
    ] {
        fails(path, line, 2);
    }
    assert!(fs::read(path.join("v.img")).expect("an image") == before, "it was changed");
    let mut names: Vec<_> = fs::read_dir(path).expect("listed").flatten().collect();
    names.retain(|entry| {
        !["file", "v.img", "w.img"].contains(&&*entry.file_name().to_string_lossy())
    });
    assert!(names.is_empty(), "{names:?}");
}

/// A masked unit of systemd is a link to `/dev/null`. An image may contain one.
fn a_device_that_a_link_leads_to_stays() {
    let dir = start();
    let path = dir.path();
    does(path, "mkdir v.img:/dev");
    does(path, "mknod v.img:/dev/null c 1 3");
    does(path, "ln -s /dev/null v.img:/d/file");
    let shown = does(path, "ls -l v.img:/dev");
    for line in ["cp file v.img:/d", "cp file v.img:/d/", "cp file v.img:/d/file"] {
        assert!(fails(path, line, 1).contains("no regular file"), "{line}");
    }
    assert_eq!(does(path, "ls -l v.img:/dev"), shown);
    check(&path.join("v.img"));
}

/// A link must not replace the file that it leads to: only the link would be left.
fn no_link_takes_the_place_of_what_it_leads_to() {
    let dir = start();
    let path = dir.path();
    does(path, "ln -s a v.img:/l");
    does(path, "ln -s ../a v.img:/d/l");
    symlink("a", path.join("a")).expect("a link");
    for line in [
        "ln -sf a v.img:/a",
        "ln -sf /a v.img:/a",
        "ln -sf ./d/../a v.img:/",
        "mv v.img:/l v.img:/a",
        "mv -f v.img:/d/l v.img:/a",
        "cp -P v.img:/l v.img:/a",
        "cp -P a v.img:/",
    ] {
        fails(path, line, 1);
        assert_eq!(does(path, "cat v.img:/a"), "of the host", "{line}");
    }
    does(path, "mv v.img:/a v.img:/l");
    assert_eq!(does(path, "cat v.img:/l"), "of the host");
}

/// Like `rm` and `rmdir`, `find -delete` does not remove a directory that is named by a dot.
fn find_removes_no_directory_by_a_dot() {
    let dir = start();
    let path = dir.path();
    does(path, "cp file v.img:/d/file");
    does(path, "find v.img:/d/. -delete");
    assert_eq!(does(path, "ls -A v.img:/"), "a\nd\n");
    assert_eq!(does(path, "ls -A v.img:/d"), "");
}

fn a_volume_is_never_copied_over_or_into_itself() {
    let dir = start();
    let path = dir.path();
    let before = path.join("v.img").metadata().expect("an image");
    for line in ["cp v.img:/a v.img", "cp v.img v.img:/", "cp -rT v.img:/d v.img"] {
        fails(path, line, 1);
    }
    fs::write(path.join("w"), "x").expect("a file");
    does(path, "cp w v.img:/v.img");
    fails(path, "cp v.img:/v.img .", 1);
    assert!(fails(path, "cp -r . v.img:/d", 1).contains("device of a volume"));
    let after = path.join("v.img").metadata().expect("an image");
    assert_eq!((before.ino(), before.size()), (after.ino(), after.size()));
    check(&path.join("v.img"));
    assert_eq!(does(path, "cat v.img:/d/file"), "of the host");
}

/// A full volume keeps the files that fit, reports the others, and frees their space.
#[test]
fn no_space() {
    let dir = start();
    let path = dir.path();
    fs::create_dir(path.join("many")).expect("a directory");
    let data = vec![7; 8 << 20];
    for number in 0..40 {
        fs::write(path.join(format!("many/{number}")), &data).expect("a file");
    }
    let said = fails(path, "cp -r many v.img:/", 1);
    assert!(said.contains("No space left on device"), "{said}");
    check(&path.join("v.img"));
    let listed = does(path, "ls -l v.img:/many");
    let (_total, listed) = listed.split_once('\n').expect("the line with the sum");
    assert!(listed.lines().count() > 2, "{listed}");
    assert!(listed.lines().all(|line| line.contains(" 8388608 ")), "a part of a file: {listed}");
    does(path, "rm -r v.img:/many");
    does(path, "cp file v.img:/after");
    check(&path.join("v.img"));
}

/// The program does not need root: a volume takes all owners, and on the host, files belong to the
/// user who runs the program.
#[test]
fn without_root() {
    const NOBODY: u32 = 65_534;
    let dir = start();
    let path = dir.path();
    let is_root = rustix::process::geteuid().is_root();
    let mode = |name: &str, mode| {
        fs::set_permissions(path.join(name), fs::Permissions::from_mode(mode)).expect("a mode");
    };
    fs::create_dir(path.join("tree")).expect("a directory");
    for name in ["tree/secret", "tree/read", "tree/zz"] {
        fs::write(path.join(name), name).expect("a file");
    }
    mode("tree/secret", 0);
    mode("tree/read", 0o4755);
    mode("", 0o777);
    mode("v.img", 0o666);
    let own_program = copy_program(path);
    let run = |line: &str| {
        let mut command = Command::new(&own_program);
        command.current_dir(path).stdin(Stdio::null());
        if is_root {
            command.uid(NOBODY).gid(NOBODY);
        }
        let output = command.args(words(line)).output().expect("the program starts");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = run("cp -r tree v.img:/");
    assert_eq!(code, Some(1), "{said}");
    assert_eq!(said, "offshoot: tree/secret: opening it: Permission denied\n");
    assert_eq!(does(path, "ls v.img:/tree"), "read\nzz\n");
    let read: serde_json::Value =
        serde_json::from_str(&does(path, "stat --json v.img:/tree/read")).expect("JSON");
    assert_eq!(
        (&read["uid"], &read["mode"]),
        (&rustix::process::geteuid().as_raw().into(), &"4755".into())
    );
    let (code, said) = run("cp -r v.img:/tree out");
    assert_eq!(code, Some(0), "{said}");
    let out = path.join("out/read").metadata().expect("it is there");
    if is_root {
        assert!(said.contains("owner or group") && said.contains("set-id"), "{said}");
        assert_eq!((out.uid(), out.mode() & 0o7777), (NOBODY, 0o755));
    } else {
        assert_eq!((said.as_str(), out.mode() & 0o7777), ("", 0o4755));
    }
    let (code, said) = run("mkdir v.img:/mine");
    assert_eq!(code, Some(0), "{said}");
}

/// Existing links on the host may lead elsewhere. The program does not follow them.
fn links_of_the_host_lead_nowhere() {
    let dir = start();
    let path = dir.path();
    let outside = path.join("outside");
    fs::create_dir(&outside).expect("a directory");
    fs::write(outside.join("file"), "untouched").expect("a file");
    for name in ["sub", "file", "hard", "dangling"] {
        fs::create_dir_all(path.join("in/sub")).expect("a directory");
        fs::write(path.join("in").join(name), "new").unwrap_or(());
    }
    does(path, "cp -r in v.img:/");
    let out = path.join("out/in");
    fs::create_dir_all(&out).expect("a directory");
    symlink(&outside, out.join("sub")).expect("a link");
    symlink(outside.join("file"), out.join("file")).expect("a link");
    symlink(outside.join("new"), out.join("dangling")).expect("a link");
    fs::hard_link(outside.join("file"), out.join("hard")).expect("a hard link");
    let said = fails(path, "cp -r v.img:/in out", 1);
    assert!(said.contains("/in/sub") && said.lines().count() == 1, "{said}");
    let left: Vec<_> = fs::read_dir(&outside).expect("listed").flatten().collect();
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(fs::read(outside.join("file")).expect("it is there"), b"untouched");
    for name in ["file", "hard", "dangling"] {
        let stat = out.join(name).symlink_metadata().expect("it is there");
        assert!(stat.is_file() && stat.nlink() == 1, "{name}");
        assert_eq!(fs::read(out.join(name)).expect("it is read"), b"new");
    }
}

/// A directory with a set-group-id bit and a default access control list passes neither on to a
/// copy.
fn a_directory_of_the_host_gives_nothing_to_copies() {
    let dir = start();
    let path = dir.path();
    let out = path.join("out");
    fs::create_dir(&out).expect("a directory");
    if rustix::process::geteuid().is_root() {
        chown(&out, None, Some(4242)).expect("a group");
    }
    fs::set_permissions(&out, fs::Permissions::from_mode(0o2777)).expect("a mode");
    let entry = |tag: u16, permissions: u16, id: u32| {
        [&tag.to_le_bytes()[..], &permissions.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let none = u32::MAX;
    let list = [
        2_u32.to_le_bytes().to_vec(),
        entry(1, 7, none),
        entry(2, 7, 1234),
        entry(4, 7, none),
        entry(16, 7, none),
        entry(32, 7, none),
    ];
    let name = "system.posix_acl_default";
    let has_lists =
        rustix::fs::setxattr(&out, name, &list.concat(), rustix::fs::XattrFlags::empty()).is_ok();
    does(path, "cp v.img:/a v.img:/b");
    does(path, "cp v.img:/a v.img:/d/below");
    does(path, "cp -r v.img:/a v.img:/b v.img:/d out");
    let theirs = |place: &str| -> serde_json::Value {
        serde_json::from_str(&does(path, &format!("stat --json {place}"))).expect("JSON")
    };
    for name in ["a", "b", "d", "d/below"] {
        let (stat, expected) =
            (out.join(name).metadata().expect("there"), theirs(&format!("v.img:/{name}")));
        assert_eq!(format!("{:04o}", stat.mode() & 0o7777), expected["mode"], "{name}");
        assert_eq!(stat.gid(), expected["gid"], "{name}");
        for list in ["system.posix_acl_access", "system.posix_acl_default"] {
            let found = rustix::fs::getxattr(out.join(name), list, &mut [0; 200][..]);
            assert!(found.is_err() || !has_lists, "{name} has a list");
        }
    }
}

fn a_directory_is_not_copied_into_itself() {
    let dir = start();
    let path = dir.path();
    does(path, "mkdir v.img:/d/sub");
    for (line, why) in [
        ("cp -r v.img:/d v.img:/d/sub", "into itself"),
        ("cp -r v.img:/ v.img:/d", "into itself"),
        ("cp -r v.img:/d v.img:/", "are the same file"),
    ] {
        assert!(fails(path, line, 1).contains(why), "{line}");
    }
    assert_eq!(does(path, "ls -R v.img:/d"), "/d:\nsub\n\n/d/sub:\n");
}

fn the_root_and_what_is_above_stay() {
    let dir = start();
    for line in [
        "rm -r v.img:/",
        "rm -rf v.img:/d/..",
        "mv v.img:/ v.img:/d",
        "mv v.img:/d/.. v.img:/x",
        "mkdir v.img:/",
        "ln -fT v.img:/a v.img:/",
        "ln -sT x v.img:/d/..",
    ] {
        fails(dir.path(), line, 1);
    }
    // Without -T, the target is the directory in which the link is made.
    does(dir.path(), "ln -s x v.img:/d/..");
    assert_eq!(does(dir.path(), "ls v.img"), "a\nd\nx\n");
    check(&dir.path().join("v.img"));
}

/// Regression: `cp` truncated the source before it read it, if the destination was another name of
/// the source.
fn a_file_is_never_copied_onto_another_name_of_it() {
    let dir = scratch_dir();
    let path = dir.path();
    volume(path, "v.img", 128);
    let bytes = vec![7; 100_000];
    fs::write(path.join("x"), &bytes).expect("a file");
    does(path, "mkdir -p v.img:/a/d/e v.img:/b/d/e");
    for name in ["top", "d/e/deep"] {
        does(path, &format!("cp x v.img:/a/{name}"));
        does(path, &format!("ln v.img:/a/{name} v.img:/b/{name}"));
    }
    // A file with two names in the source. Only the first of them may be copied.
    does(path, "cp x v.img:/a/d/1");
    does(path, "ln v.img:/a/d/1 v.img:/a/d/2");
    does(path, "ln v.img:/a/d/1 v.img:/b/d/2");
    does(path, "ln -s top v.img:/a/link");
    for when in ["auto", "always", "never"] {
        let line = format!("cp -r --reflink={when} v.img:/a/. v.img:/b");
        let said = fails(path, &line, 1);
        for name in ["top", "d/e/deep", "d/2"] {
            let told = said.lines().find(|line| line.contains(&format!("/a/{name}:")));
            assert!(told.is_some_and(|told| told.contains("are the same file")), "{line}: {said}");
        }
        for (from, to) in [
            ("a/top", "b/top"),
            ("a/top", "b"),
            ("a/top", "a/top"),
            ("a/top", "a/link"),
            ("a/link", "a/top"),
            ("a/link", "b/top"),
        ] {
            let line = format!("cp --reflink={when} v.img:/{from} v.img:/{to}");
            assert!(fails(path, &line, 1).contains("are the same file"), "{line}");
        }
        for name in ["a/top", "b/top", "a/d/e/deep", "b/d/e/deep", "a/d/2", "b/d/1", "b/d/2"] {
            does(path, &format!("cp v.img:/{name} out"));
            assert!(fs::read(path.join("out")).expect("it came back") == bytes, "{name}");
        }
        assert!(does(path, "stat v.img:/b/d/2").contains("Links: 3"), "it is still the same file");
        check(&path.join("v.img"));
    }
}

/// Regression: `cp --reflink=always` emptied the target before it knew that nothing could be
/// shared.
#[test]
fn what_cannot_be_shared_leaves_what_is_there() {
    let dir = scratch_dir();
    let path = dir.path();
    for (name, what) in [("new", b'n'), ("old", b'o')] {
        fs::write(path.join(name), vec![what; 100_000]).expect("a file");
    }
    for name in ["v.img", "w.img"] {
        volume(path, name, 128);
        does(path, &format!("cp new {name}:/src"));
    }
    // Files in `plain` have no checksums, and those in `summed` have some.
    does(path, "mkdir v.img:/plain v.img:/summed v.img:/tree v.img:/tree/plain");
    does(path, "chattr +C v.img:/plain");
    for place in ["plain/dst", "summed/dst", "keep"] {
        does(path, &format!("cp old v.img:/{place}"));
    }
    does(path, "cp new v.img:/plain/src");
    does(path, "ln v.img:/keep v.img:/kept");
    does(path, "ln -s ../keep v.img:/plain/link");
    does(path, "cp new v.img:/tree/plain/link");
    let before = does(path, "ls -lR v.img");
    for line in [
        "new v.img:/keep",
        "w.img:/src v.img:/keep",
        "v.img:/src v.img:/plain/dst",
        "v.img:/plain/src v.img:/summed/dst",
        "-r v.img:/tree/plain/. v.img:/plain",
        "new v.img:/none",
        "v.img:/src v.img:/plain/none",
    ] {
        let said = fails(path, &format!("cp --reflink=always {line}"), 1);
        assert!(said.contains("sharing its data"), "{line}: {said}");
    }
    let list = does(path, "ls -lR v.img");
    assert!(list == before, "{before}\n{list}");
    for place in ["plain/dst", "summed/dst", "keep", "kept"] {
        does(path, &format!("cp v.img:/{place} out"));
        assert!(
            fs::read(path.join("out")).expect("it came back") == vec![b'o'; 100_000],
            "{place}"
        );
    }
    assert!(does(path, "stat v.img:/plain/link").contains("../keep"));
    check(&path.join("v.img"));
    // Where sharing works, copies replace files as usual.
    does(path, "cp --reflink=always v.img:/src v.img:/keep");
    does(path, "cp v.img:/kept out");
    assert!(fs::read(path.join("out")).expect("it came back") == vec![b'n'; 100_000]);
    does(path, "chattr -C v.img:/plain");
    does(path, "cp -r --reflink=always v.img:/tree/plain/. v.img:/plain");
    assert!(!does(path, "stat v.img:/plain/link").contains("../keep"));
    check(&path.join("v.img"));
}

on_both! {
    a_device_that_a_link_leads_to_stays,
    no_link_takes_the_place_of_what_it_leads_to,
    find_removes_no_directory_by_a_dot,
    a_volume_is_never_copied_over_or_into_itself,
    links_of_the_host_lead_nowhere,
    a_directory_of_the_host_gives_nothing_to_copies,
    a_directory_is_not_copied_into_itself,
    the_root_and_what_is_above_stay,
    a_file_is_never_copied_onto_another_name_of_it,
}
