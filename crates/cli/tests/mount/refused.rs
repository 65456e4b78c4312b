//! Mounts that are refused, and the messages.

use std::ffi::OsStr;

use offshoot_testkit::scratch_dir;

use super::{ServedMount, offshoot, require, volume};

/// Runs the program, which must fail with `code`, and returns its messages.
#[track_caller]
fn fails(args: &[&OsStr], code: i32) -> String {
    let output = offshoot(args);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "offshoot {args:?}: {said}");
    said
}

#[test]
fn options_that_are_not_done() {
    let dir = scratch_dir();
    let mount = |options: &str, code| {
        let args = ["mount", "-o", options, "no.img"].map(OsStr::new);
        fails(&[&args[..], &[dir.path().as_os_str()]].concat(), code)
    };
    assert!(mount("rw,sync", 4).contains("not supported: the mount option sync"));
    let said = mount("rw,autodefrag,thread_pool=4", 1);
    assert!(said.contains("wish: autodefrag, thread_pool=4\n"), "{said}");
    assert!(said.contains("no.img: No such file or directory"), "{said}");
    assert!(mount("max_inline=x", 2).contains("max_inline=x"));
    assert!(mount("writeback", 4).contains("not supported: the mount option writeback"));
    assert!(mount("bogus", 2).contains("the mount option bogus is not known"));
    assert!(mount("remount,ro", 1).contains("no volume is mounted there"));
    assert!(mount("ro", 1).contains("no.img: No such file or directory"));
}

#[test]
fn places_that_are_none() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let image = disks.images()[0].as_os_str();
    let [mount, unmount] = ["mount", "unmount"].map(OsStr::new);
    let none = OsStr::new("/no/such/directory");
    assert!(fails(&[mount, image, none], 1).contains("No such file or directory"));
    assert!(fails(&[unmount, none], 1).contains("no volume is mounted there"));
    let dir = scratch_dir();
    assert!(fails(&[unmount, dir.path().as_os_str()], 1).contains("no volume is mounted there"));
    let zeros = dir.path().join("zeros");
    std::fs::write(&zeros, vec![0; 1 << 20]).expect("a file");
    fails(&[mount, zeros.as_os_str(), dir.path().as_os_str()], 1);
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    // A writer keeps out all verbs, and any other process that would serve the volume too.
    let serve = ["mount", "--in-background"].map(OsStr::new);
    let said = fails(&[&serve[..], &[image, dir.path().as_os_str()]].concat(), 1);
    assert!(said.contains("in use by"), "{said}");
    assert_eq!(std::fs::read_dir(dir.path()).expect("it is not mounted over").count(), 1);
    mounted.unmount();
}

/// A remount as read-only stores everything.
#[test]
fn remounting_stores() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    std::fs::write(mounted.path().join("file"), "x").expect("a file");
    let args = ["mount", "-o", "remount,ro", "any"].map(OsStr::new);
    super::does(&[&args[..], &[mounted.path().as_os_str()]].concat());
    mounted.signal(rustix::process::Signal::KILL);
    drop(mounted);
    let read = std::fs::read_to_string(disks.mount("ro").path().join("file"));
    assert_eq!(read.ok().as_deref(), Some("x"));
}

/// A mount becomes read-only and back. A mount of a read-only volume refuses all changes.
#[test]
fn read_only() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    let file = mounted.path().join("file");
    let written = || std::fs::write(&file, "x").map_err(|error| error.kind());
    let remount = |options: &str| {
        let args = ["mount", "-o", options, "any"].map(OsStr::new);
        // A slash at the end does not change the directory.
        super::does(&[&args[..], &[mounted.path().join("").as_os_str()]].concat());
    };
    assert_eq!(written(), Ok(()));
    remount("remount,ro");
    assert_eq!(written(), Err(std::io::ErrorKind::ReadOnlyFilesystem));
    remount("remount,rw");
    assert_eq!(written(), Ok(()));
    mounted.unmount();
    let mounted = ServedMount::new(&disks.images()[0], "ro");
    let file = mounted.path().join("file");
    let refused = std::fs::remove_file(&file).map_err(|error| error.kind());
    assert_eq!(refused, Err(std::io::ErrorKind::ReadOnlyFilesystem));
    assert_eq!(std::fs::read_to_string(&file).ok().as_deref(), Some("x"));
    mounted.unmount();
}

/// The message says what a mount point is if it is not a directory. The volume is not opened.
#[test]
fn what_is_no_directory_is_not_mounted_over() {
    let dir = scratch_dir();
    let path = |name: &str| dir.path().join(name);
    let image = path("v.img");
    super::does(&["mkfs".as_ref(), image.as_os_str(), "--size=128M".as_ref()]);
    std::fs::write(path("text"), "text").expect("a file");
    std::os::unix::fs::symlink("v.img", path("link")).expect("a link");
    let fifo = rustix::fs::FileType::Fifo;
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, path("fifo"), fifo, mode, 0).expect("a FIFO");
    let before = std::fs::read(&image).expect("an image");
    for (name, what) in [
        ("v.img", "not a directory, but a file that holds btrfs"),
        ("link", "not a directory, but a file that holds btrfs"),
        ("text", "not a directory, but a file;"),
        ("fifo", "not a directory, but a FIFO"),
        ("/dev/null", "not a directory, but a character device"),
        ("none", "No such file or directory"),
    ] {
        for way in ["--foreground", "--log=log"] {
            let place = path(name);
            let words = ["mount".as_ref(), OsStr::new(way), image.as_os_str(), place.as_os_str()];
            let said = fails(&words, 1);
            assert!(said.contains(what) && said.lines().count() == 1, "{name} {way}: {said}");
        }
    }
    assert!(std::fs::read(&image).expect("an image") == before, "it was written");
}

/// A name without an inode is listed, and opening it gives an error that says that it is damaged.
#[test]
fn a_name_without_an_inode_is_an_error() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let image = &disks.images()[0];
    let mounted = ServedMount::new(image, "rw");
    for name in ["before", "gone-file", "later"] {
        std::fs::write(mounted.path().join(name), name).expect("a file");
    }
    mounted.unmount();
    let ino = offshoot_testkit::btrfs::damage::lead_nowhere(image, "gone-file");
    let names = |root: &std::path::Path| {
        let entries = std::fs::read_dir(root).expect("a directory");
        let mut names: Vec<_> = entries.map(|entry| entry.expect("an entry").file_name()).collect();
        names.sort();
        names
    };
    let kernel = disks.mount("ro");
    let expected = names(kernel.path());
    assert!(kernel.path().join("gone-file").metadata().is_err());
    drop(kernel);
    let mounted = ServedMount::new(image, "rw");
    let root = mounted.path();
    assert_eq!(names(root), expected);
    let gone = root.join("gone-file");
    let errno = |error: std::io::Error| error.raw_os_error();
    let io = Some(rustix::io::Errno::IO.raw_os_error());
    assert_eq!(gone.symlink_metadata().map_err(errno).err(), Some(io));
    assert_eq!(std::fs::read(&gone).map_err(errno).err(), Some(io));
    assert_eq!(std::fs::remove_file(&gone).map_err(errno).err(), Some(io));
    assert_eq!(std::fs::rename(root.join("later"), &gone).map_err(errno).err(), Some(io));
    for name in ["before", "later"] {
        assert_eq!(std::fs::read_to_string(root.join(name)).expect("a file"), name);
    }
    assert_eq!(names(root), expected, "nothing was lost");
    let log = mounted.log();
    assert!(log.contains("gone-file") && log.contains(&format!("inode {ino} ")), "{log}");
    let unmounted = super::unmount(&[mounted.path().as_os_str()]);
    assert!(unmounted.status.success(), "{unmounted:?}");
}
