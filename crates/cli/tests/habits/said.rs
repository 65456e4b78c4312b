//! Output: messages that name the volume, patterns, sizes, JSON.

use offshoot_testkit::scratch_dir;
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps};

use super::{does, fails, offshoot};

#[test]
fn messages_name_the_volume() {
    let dir = scratch_dir();
    let dir = dir.path();
    does(dir, "mkfs A.img --size 128M");
    does(dir, "mkdir A.img:/d");
    does(dir, "touch A.img:/f");
    for (line, message) in [
        ("cat A.img:/x", "A.img:/x: no such file"),
        ("stat A.img:/x", "A.img:/x: no such file"),
        ("find A.img:/x", "A.img:/x: no such file"),
        ("du A.img:/x", "A.img:/x: no such file"),
        ("tree A.img:/x", "A.img:/x: no such file"),
        ("getfattr A.img:/x", "A.img:/x: no such file"),
        ("lsattr A.img:/x", "A.img:/x: no such file"),
        ("rm A.img:/x", "A.img:/x: no such file"),
        ("rm A.img:/d", "A.img:/d: is a directory"),
        ("rmdir A.img:/f", "A.img:/f: not a directory"),
        ("mkdir A.img:/d", "A.img:/d: exists already"),
        ("mv A.img:/x A.img:/y", "A.img:/x: no such file"),
        ("mv A.img:/x A.img:/d A.img:/y", "A.img:/y: no such file"),
        ("ln A.img:/x A.img:/y", "A.img:/x: no such file"),
        ("chmod 600 A.img:/x", "A.img:/x: no such file"),
        ("chown 0 A.img:/x", "A.img:/x: no such file"),
        ("touch A.img:/x/y", "A.img:/x/y: no such file"),
        ("mknod A.img:/f p", "A.img:/f: exists already"),
        ("truncate -s1 A.img:/x/y", "A.img:/x/y: no such file"),
        ("cp A.img:/x A.img:/y", "A.img:/x: no such file"),
        ("cp A.img:/x .", "A.img:/x: no such file"),
        ("cp A.img:/d .", "A.img:/d, not copied without -r: is a directory"),
        ("extract A.img:/x out", "A.img:/x: no such file"),
    ] {
        let said = fails(dir, line, 1);
        assert!(said.starts_with(&format!("offshoot: {message}")), "{line}: {said}");
    }
    for (line, message) in
        [("ls A.img:/x", "A.img:/x: no such file"), ("ls 'A.img:/*.c'", "A.img:/*.c: no such file")]
    {
        let said = fails(dir, line, 2);
        assert!(said.starts_with(&format!("offshoot: {message}")), "{line}: {said}");
    }
    // The message says what the user may have meant.
    let said = fails(dir, "ls A.img/d", 2);
    assert!(said.contains("write A.img:/d"), "{said}");
    let said = fails(dir, "ln -s A.img:/f A.img:/d/link", 2);
    assert!(said.contains("the text that the link will hold: write /f"), "{said}");
    let said = fails(dir, "mv A.img:/f .", 2);
    assert!(said.contains("are two; copy with `offshoot cp` and remove"), "{said}");
    for line in ["rm -rf A.img:/", "rm -r A.img", "rmdir A.img:/", "mv A.img:/ A.img:/d"] {
        let said = fails(dir, line, 1);
        assert!(said.starts_with("offshoot: A.img:/ is the root of the volume, which stays"));
    }
    let said = fails(dir, "cp -Z A.img:/f .", 2);
    assert!(said.contains("unexpected argument '-Z'") && !said.contains("as a value"), "{said}");
    let said = fails(dir, "mknod A.img:/n c 1", 2);
    assert!(said.contains("MAJOR and MINOR"), "{said}");
}

/// A transfer says what happened, and the program says what that means on its command line.
#[test]
fn a_transfer_speaks_in_the_words_of_the_program() {
    let dir = scratch_dir();
    let dir = dir.path();
    does(dir, "mkfs A.img --size 128M");
    does(dir, "mkdir A.img:/d A.img:/e A.img:/to");
    does(dir, "touch A.img:/d/f A.img:/e/f A.img:/.offshoot-extract");
    std::fs::create_dir(dir.join("to")).expect("a directory");
    let just_made = "f: another source of this command has just gone there";
    for (line, message) in [
        ("cp A.img:/d A.img:/to", "A.img:/d: not copied without -r: is a directory\n"),
        ("cp to A.img:/to", "to: not copied without -r: is a directory\n"),
        ("cp A.img:/d/f A.img:/e/f to", just_made),
        ("cp A.img:/d/f A.img:/e/f A.img:/to", just_made),
        ("mv A.img:/d/f A.img:/e/f A.img:/to", just_made),
        ("extract A.img:/ out", "write an archive (--tar FILE), or copy it (offshoot cp -a)\n"),
    ] {
        let said = fails(dir, line, 1);
        assert!(said.contains(message), "{line}: {said}");
    }
}

#[test]
fn patterns_stand_for_what_is_in_the_volume() {
    let dir = scratch_dir();
    let dir = dir.path();
    does(dir, "mkfs v.img --size 128M");
    does(dir, "mkdir v.img:/od v.img:/to");
    does(dir, "touch v.img:/od/a.c v.img:/od/b.c v.img:/od/c.h v.img:/od/.x v.img:/od/lit*");
    assert_eq!(does(dir, "ls -d v.img:/od/*"), "/od/a.c\n/od/b.c\n/od/c.h\n/od/lit*\n");
    assert_eq!(does(dir, "ls v.img:/od/lit*"), "/od/lit*\n");
    does(dir, "chmod 600 v.img:/od/[ab].c");
    assert_eq!(does(dir, "stat -c %a v.img:/od/?.?"), "600\n600\n644\n");
    does(dir, "mv v.img:/od/*.c v.img:/to");
    assert_eq!(does(dir, "ls v.img:/to"), "a.c\nb.c\n");
    does(dir, "cp v.img:/to/* v.img:/od");
    does(dir, "cp v.img:/to/* .");
    assert!(dir.join("a.c").exists() && dir.join("b.c").exists());
    does(dir, "rm v.img:/od/*.?");
    assert_eq!(does(dir, "ls -A v.img:/od"), ".x\nlit*\n");
}

/// `find -delete` removes nothing when it does not know the user, or when `-prune` would have no
/// effect. `cp -u` keeps a newer file behind a link.
#[test]
fn nothing_goes_that_was_not_meant() {
    let dir = scratch_dir();
    let dir = dir.path();
    does(dir, "mkfs v.img --size 128M");
    does(dir, "mkdir v.img:/keep");
    does(dir, "touch v.img:/keep/a v.img:/b");
    let said = fails(dir, "find v.img:/ ! -user alice -delete", 1);
    assert!(said.contains("no user is called alice in /etc of the volume"), "{said}");
    let said = fails(dir, "find v.img:/ -path /keep -prune -o -type f -delete", 2);
    assert!(said.contains("-prune does nothing with -delete"), "{said}");
    assert_eq!(does(dir, "find v.img:/ -type f").lines().count(), 2);
    does(dir, "touch -d 2015-01-01 v.img:/b");
    std::fs::write(dir.join("data"), "new").expect("a file");
    std::os::unix::fs::symlink("data", dir.join("link")).expect("a link");
    let old = Timespec { tv_sec: 1_300_000_000, tv_nsec: 0 };
    let times = Timestamps { last_access: old, last_modification: old };
    rustix::fs::utimensat(CWD, dir.join("link"), &times, AtFlags::SYMLINK_NOFOLLOW)
        .expect("the link is old");
    does(dir, "cp -u v.img:/b link");
    assert_eq!(std::fs::read(dir.join("data")).expect("it is there"), b"new");
}

#[test]
fn sizes_are_as_people_write_them() {
    let dir = scratch_dir();
    let dir = dir.path();
    does(dir, "mkfs v.img --size 0.125GiB");
    assert_eq!(std::fs::metadata(dir.join("v.img")).expect("an image").len(), 128 << 20);
    for (size, bytes) in [("1.5K", 1536), ("2KB", 2000), ("1MiB", 1 << 20), ("3kB", 3000)] {
        does(dir, &format!("truncate -s {size} v.img:/f"));
        assert_eq!(does(dir, "stat -c %s v.img:/f").trim(), bytes.to_string(), "{size}");
    }
    assert!(fails(dir, "truncate -s 1.5 v.img:/f", 2).contains("whole number"));
}

/// With `--json`, every verb that changes files reports the result of each place, and errors are
/// JSON too.
#[test]
fn changes_and_errors_are_json_where_that_is_asked_for() {
    let dir = scratch_dir();
    let dir = dir.path();
    does(dir, "mkfs v.img --size 128M");
    for (line, path) in [
        ("mkdir v.img:/d", "/d"),
        ("touch v.img:/f", "/f"),
        ("chmod 600 v.img:/f", "/f"),
        ("chown 0:0 v.img:/f", "/f"),
        ("truncate -s 1M v.img:/f", "/f"),
        ("fallocate -l 1M v.img:/f", "/f"),
        ("setfattr -n user.a -v b v.img:/f", "/f"),
        ("chattr +d v.img:/f", "/f"),
        ("property set v.img:/f compression zstd", "/f"),
        ("ln v.img:/f v.img:/g", "/g"),
        ("mv v.img:/g v.img:/h", "/g"),
        ("mknod v.img:/n p", "/n"),
        ("subvolume create v.img:/s", "/s"),
        ("subvolume snapshot v.img:/s v.img:/t", "/t"),
        ("subvolume delete v.img:/t", "/t"),
        ("rm v.img:/f", "/f"),
        ("rmdir v.img:/d", "/d"),
    ] {
        let said = does(dir, &format!("{line} --json"));
        let expected = format!("{{\"volume\":\"v.img\",\"path\":\"{path}\",\"done\":true}}\n");
        assert_eq!(said, expected, "{line}");
    }
    let output = offshoot(dir, &["rm", "--json", "v.img:/none", "v.img:/h"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "{\"volume\":\"v.img\",\"path\":\"/none\",\"done\":false}\n\
         {\"volume\":\"v.img\",\"path\":\"/h\",\"done\":true}\n"
    );
    let error = "{\"kind\":\"error\",\"status\":\"failed\",\
                 \"message\":\"v.img:/none: no such file\"}\n";
    assert_eq!(String::from_utf8_lossy(&output.stderr), error);
    let rescued = does(dir, "rescue zero-log --json v.img");
    assert_eq!(rescued, "{\"pending\":false,\"thrown_away\":[],\"problem\":null}\n");
    let cat = fails(dir, "cat --json v.img:/h", 2);
    assert!(cat.contains("`stat --json` describes files"), "{cat}");
    assert!(fails(dir, "getfattr -m '(' v.img:/", 2).contains("-m (: "));
    assert!(fails(dir, "sync --json .", 2).starts_with("{\"kind\":\"error\","));
    assert!(fails(dir, "unmount --json .", 1).starts_with("{\"kind\":\"error\","));
    let usage = fails(dir, "mkdir --json", 2);
    assert!(usage.starts_with("{\"kind\":\"error\",\"status\":\"usage\","), "{usage}");
    let absent = fails(dir, "ls --json none.img", 1);
    assert!(absent.contains("\"message\":\"none.img: "), "{absent}");
}
