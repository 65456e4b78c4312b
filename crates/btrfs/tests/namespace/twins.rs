//! Twins: we and the kernel do the same on two volumes, and both volumes show the same.

mod dedupes;
mod shares;

use std::cell::RefCell;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

use offshoot_btrfs::{EngineOptions, Filesystem, SubvolumeId};
use offshoot_btrfs_format::TreeId;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::{judges, sharing};
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::run::run;
use offshoot_vfs::acl::{ACCESS, DEFAULT};
use offshoot_vfs::{
    Errno, FileFlags, FileId, FileSystem, FileSystemMut, FileType, NewFile, NewNode, Rename,
    SetAttr, SetTime, XattrMode,
};
use rustix::fs::{AtFlags, CWD, IFlags, Mode, OFlags, RenameFlags};

use crate::common::{AT, NEW, at, check, open_read_only, open_with, place};

/// The kernel runs `theirs` in the root of its volume, and `ours` does the same on ours.
fn twins(theirs: impl FnOnce(&Path), ours: impl FnOnce(&Filesystem)) {
    twins_that_share(0, theirs, ours);
}

/// As [`twins`]. Afterwards at least `shared` files share space with others, and the same ones on
/// both volumes.
fn twins_that_share(shared: usize, theirs: impl FnOnce(&Path), ours: impl FnOnce(&Filesystem)) {
    let compare = Compare::default().without(Aspect::Ids).without(Aspect::StoredTimes);
    twins_with(&EngineOptions::default(), "rw,noatime", &compare, shared, theirs, ours);
}

/// As [`twins_that_share`], with these options for our volume and this mount of the kernel's.
/// Returns both volumes, ours first.
pub(crate) fn twins_with(
    options: &EngineOptions,
    mount: &str,
    compare: &Compare,
    shared: usize,
    theirs: impl FnOnce(&Path),
    ours: impl FnOnce(&Filesystem),
) -> Option<[Disks; 2]> {
    let judges = judges::require()?;
    let [disks, kernel] = [(); 2].map(|()| Disks::create(&judges, 1, 256));
    kernel.mkfs(&[]);
    disks.mkfs(&[]);
    let kernel_mount = kernel.mount(mount);
    theirs(kernel_mount.path());
    let fs = open_with(&disks, options).filesystem(SubvolumeId::FS).expect("every volume has one");
    ours(&fs);
    fs.sync().expect("a commit");
    drop(fs);
    check(&disks);
    let judge = HostFilesystem::new(kernel_mount.path()).expect("the mounted directory opens");
    compare.clone().run_filesystems(&open_read_only(&disks), &judge).assert_same(3);
    // The kernel reads from our volume what we read.
    let mount = disks.mount("ro,noatime");
    let of_ours = HostFilesystem::new(mount.path()).expect("the mounted directory opens");
    compare.clone().run_filesystems(&of_ours, &judge).assert_same(3);
    sharing::assert_alike(mount.path(), kernel_mount.path(), shared);
    drop((judge, of_ours, mount, kernel_mount));
    Some([disks, kernel])
}

pub(crate) fn shell(path: &Path, script: &str) {
    let script = format!("set -e; cd '{}'; {script}", path.display());
    run("sh", &["-c", &script]);
}

/// Sets all times to [`AT`].
pub(crate) const TOUCH: &str = "find . -exec touch -h -d '2020-09-13 12:26:40.123456789 UTC' {} +";

pub(crate) fn mkdir(fs: &Filesystem, dir: FileId, name: &str, new: &NewFile) -> FileId {
    let made = fs.mkdir(place(dir, name), new).expect("a directory");
    let parent = SetAttr { mtime: Some(SetTime::To(AT)), ..SetAttr::default() };
    fs.set_attr(dir, &parent, AT).expect("a directory has times");
    made
}

/// A list of entries: tag, permissions, id.
fn list(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut value = vec![2, 0, 0, 0];
    for (tag, permissions, id) in entries {
        value.extend_from_slice(&tag.to_le_bytes());
        value.extend_from_slice(&permissions.to_le_bytes());
        value.extend_from_slice(&id.to_le_bytes());
    }
    value
}

const NONE: u32 = u32::MAX;

#[test]
fn access_control_lists() {
    let script = "umask 027; chmod 755 .; \
        mkdir lists plain; \
        setfacl -d -m u::rwx,u:1000:rwx,g::rx,g:100:rx,m::rwx,o::- lists; \
        : > lists/file; mkdir lists/dir; : > lists/dir/file; ln -s target lists/link; \
        mkfifo lists/pipe; : > lists/cut; chmod 604 lists/cut; : > lists/bare; setfacl -b lists/bare; \
        mkdir base; setfacl -d -m u::rwx,g::x,o::r base; : > base/file; mkdir base/dir; \
        : > plain/file; mkdir plain/dir; \
        : > plain/list; setfacl -m u:7:rw,m::r plain/list; \
        : > plain/same; setfacl --set u::rwx,g::r,o::x plain/same; \
        : > plain/masked; setfacl -m g:7:rwx plain/masked; chmod 4711 plain/masked;";
    let theirs = |path: &Path| shell(path, &format!("{script} {TOUCH}"));
    twins(theirs, |fs| {
        let root = fs.root();
        let file = NewFile { permissions: 0o666, umask: Some(0o027), ..NEW };
        let dir = NewFile { permissions: 0o777, ..file };
        let [lists, plain, base] =
            ["lists", "plain", "base"].map(|name| mkdir(fs, root, name, &dir));
        let set = |file: FileId, name: &[u8], entries: &[(u16, u16, u32)]| {
            fs.set_xattr(file, name, &list(entries), XattrMode::Set, AT).expect("a list");
        };
        let create = |dir, name: &str| fs.create(place(dir, name), &file).expect("a file");
        let chmod = |file, permissions| {
            let permissions = Some(permissions);
            let set = SetAttr { permissions, ..SetAttr::default() };
            fs.set_attr(file, &set, AT).expect("permissions");
        };
        let entries =
            [(1, 7, NONE), (2, 7, 1000), (4, 5, NONE), (8, 5, 100), (16, 7, NONE), (32, 0, NONE)];
        set(lists, DEFAULT, &entries);
        create(lists, "file");
        let below = mkdir(fs, lists, "dir", &dir);
        create(below, "file");
        fs.symlink(place(lists, "link"), b"target", &file).expect("a link");
        let pipe = NewNode { file_type: FileType::Fifo, rdev: (0, 0) };
        fs.mknod(place(lists, "pipe"), pipe, &file).expect("a pipe");
        chmod(create(lists, "cut"), 0o604);
        let stripped = create(lists, "bare");
        fs.remove_xattr(stripped, ACCESS, AT).expect("it has a list");
        // `setfacl` does this too: the group gets its own permissions back.
        chmod(stripped, 0o640);
        set(base, DEFAULT, &[(1, 7, NONE), (4, 1, NONE), (32, 4, NONE)]);
        create(base, "file");
        mkdir(fs, base, "dir", &dir);
        create(plain, "file");
        mkdir(fs, plain, "dir", &dir);
        let entries = [(1, 6, NONE), (2, 6, 7), (4, 4, NONE), (16, 4, NONE), (32, 0, NONE)];
        set(create(plain, "list"), ACCESS, &entries);
        set(create(plain, "same"), ACCESS, &[(1, 7, NONE), (4, 4, NONE), (32, 1, NONE)]);
        let masked = create(plain, "masked");
        let entries = [(1, 6, NONE), (4, 4, NONE), (8, 7, 7), (16, 7, NONE), (32, 0, NONE)];
        set(masked, ACCESS, &entries);
        chmod(masked, 0o4711);
        for bad in [&b"\x02\0\0\0x"[..], &list(&[(1, 7, NONE)]), &list(&[(1, 9, NONE)])] {
            let refused = fs.set_xattr(plain, ACCESS, bad, XattrMode::Set, AT);
            assert_eq!(refused.expect_err("no list").errno(), Errno::INVAL);
        }
        let on_file = fs.set_xattr(masked, DEFAULT, &list(&entries), XattrMode::Set, AT);
        assert_eq!(on_file.expect_err("no directory").errno(), Errno::ACCESS);
        // A new list takes effect, although the engine had noted that the directory has none.
        let late = mkdir(fs, root, "late", &dir);
        create(late, "before");
        set(late, DEFAULT, &entries);
        let after = create(late, "after");
        assert!(fs.xattr(after, ACCESS).is_ok(), "it has the list of its directory");
        for name in ["before", "after"] {
            fs.unlink(place(late, name), AT).expect("it is there");
        }
        fs.rmdir(place(root, "late"), AT).expect("it is empty");
    });
}

#[test]
fn flags() {
    let letters = ["dA", "SD", "c", "m", "C"];
    let theirs = |path: &Path| {
        let mut script = String::from("umask 022; chmod 755 .; ");
        for (at, letters) in letters.iter().enumerate() {
            let line = format!(
                "mkdir d{at}; chattr +{letters} d{at}; : > d{at}/f; mkdir d{at}/s; echo text > d{at}/x; \
                 : > f{at}; {}; echo text > x{at}; chattr +{letters} x{at}; ",
                if letters == &"SD" { ":".into() } else { format!("chattr +{letters} f{at}") },
            );
            script += &line;
        }
        script += "mkdir plain; : > fixed; : > log; : > kept; chattr +d kept; chattr -d kept; ";
        shell(path, &format!("{script} {TOUCH}; chattr +i fixed plain; chattr +a log"));
    };
    twins(theirs, |fs| {
        let root = fs.root();
        let all = |letters: &str| letters.chars().filter_map(FileFlags::of_letter).collect();
        let dir = NewFile { permissions: 0o755, ..NEW };
        let set = |file, flags| fs.set_flags(file, flags, AT).expect("flags");
        let text = |dir, name: &str| {
            let file = fs.create(place(dir, name), &NEW).expect("a file");
            fs.write(file, 0, b"text\n", AT).expect("data");
            file
        };
        for (at, letters) in letters.iter().enumerate() {
            let made = mkdir(fs, root, &format!("d{at}"), &dir);
            set(made, all(letters));
            fs.create(place(made, "f"), &NEW).expect("a file");
            mkdir(fs, made, "s", &dir);
            text(made, "x");
            let file = fs.create(place(root, &format!("f{at}")), &NEW).expect("a file");
            if letters != &"SD" {
                set(file, all(letters));
            }
            set(text(root, &format!("x{at}")), all(letters));
        }
        let plain = mkdir(fs, root, "plain", &dir);
        let [fixed, log, kept] = ["fixed", "log", "kept"]
            .map(|name| fs.create(place(root, name), &NEW).expect("a file"));
        set(kept, FileFlags::NODUMP);
        set(kept, FileFlags::empty());
        set(fixed, FileFlags::IMMUTABLE);
        set(plain, FileFlags::IMMUTABLE);
        set(log, FileFlags::APPEND);
        let refused = |result: offshoot_vfs::Result<()>, errno: Errno| {
            assert_eq!(result.expect_err("it is not allowed").errno(), errno);
        };
        let both = FileFlags::COMPRESS | FileFlags::NOCOMPRESS;
        refused(fs.set_flags(kept, both, AT), Errno::INVAL);
        let both = FileFlags::COMPRESS | FileFlags::NODATACOW;
        refused(fs.set_flags(kept, both, AT), Errno::INVAL);
        let unknown = FileFlags::from_bits_retain(0x4000_0000);
        refused(fs.set_flags(kept, unknown, AT), Errno::OPNOTSUPP);
        refused(fs.write(fixed, 0, b"x", AT), Errno::PERM);
        refused(fs.create(place(plain, "x"), &NEW).map(drop), Errno::PERM);
        refused(fs.link(fixed, place(root, "x"), AT), Errno::PERM);
        refused(fs.rename(place(root, "fixed"), place(root, "x"), AT), Errno::PERM);
        let exchange =
            |one, other| fs.rename_with(place(root, one), place(root, other), Rename::Exchange, AT);
        refused(exchange("kept", "fixed"), Errno::PERM);
        refused(exchange("log", "kept"), Errno::PERM);
        refused(fs.unlink(place(root, "log"), AT), Errno::PERM);
        refused(
            fs.set_attr(log, &SetAttr { size: Some(0), ..SetAttr::default() }, AT),
            Errno::PERM,
        );
        // The current time is allowed where the same time as a given value is not.
        fs.set_attr(log, &SetAttr::TOUCH, AT).expect("it is touched");
        let given = SetAttr { atime: Some(SetTime::To(AT)), ..SetAttr::TOUCH };
        let one = SetAttr { atime: None, ..SetAttr::TOUCH };
        for set in [given, one] {
            refused(fs.set_attr(log, &set, AT), Errno::PERM);
        }
        refused(fs.set_attr(fixed, &SetAttr::TOUCH, AT), Errno::PERM);
        refused(exchange("kept", "none"), Errno::NOENT);
    });
}

/// Every change from some flags of compression and in-place writing to others, for directories,
/// empty files and files with data: what is refused, and which flags remain.
#[test]
fn flags_that_contradict_each_other() {
    let sets = ["", "c", "m", "C", "mC", "cC", "cm"];
    let steps: Vec<_> = ["dir", "empty", "full"]
        .into_iter()
        .flat_map(|kind| sets.map(|old| sets.map(|new| (kind, old, new))))
        .flatten()
        .collect();
    let name = |number: usize| format!("file{number}");
    let expected = RefCell::new(Vec::new());
    let theirs = |path: &Path| {
        for (number, (kind, old, new)) in steps.iter().enumerate() {
            let path = path.join(name(number));
            if *kind == "dir" {
                std::fs::create_dir(&path).expect("a directory");
            } else {
                File::create(&path).expect("a file");
            }
            let set = |letters: &str| {
                let flags: FileFlags = letters.chars().filter_map(FileFlags::of_letter).collect();
                let file = File::open(&path).expect("it opens");
                rustix::fs::ioctl_setflags(file, IFlags::from_bits_retain(flags.bits())).err()
            };
            let first = set(old);
            if *kind == "full" {
                std::fs::write(&path, [1; 5000]).expect("there is room");
                File::open(&path).and_then(|file| file.sync_all()).expect("it is stored");
            }
            expected.borrow_mut().push((first, set(new)));
        }
        shell(path, &format!("chmod -R u=rwX,g=rX,o=rX .; {TOUCH}"));
    };
    twins(theirs, |fs| {
        let dir = NewFile { permissions: 0o755, ..NEW };
        let mut found = Vec::new();
        for (number, (kind, old, new)) in steps.iter().enumerate() {
            let file = match *kind {
                "dir" => mkdir(fs, fs.root(), &name(number), &dir),
                _ => fs.create(place(fs.root(), &name(number)), &NEW).expect("a file"),
            };
            let set = |letters: &str| {
                let flags = letters.chars().filter_map(FileFlags::of_letter).collect();
                fs.set_flags(file, flags, AT).err().map(|error| error.errno())
            };
            let first = set(old);
            if *kind == "full" {
                fs.write(file, 0, &[1; 5000], AT).expect("there is room");
                fs.fsync(file).expect("it is stored");
            }
            found.push((first, set(new)));
        }
        for ((step, found), expected) in steps.iter().zip(found).zip(expected.take()) {
            assert_eq!(found, expected, "{step:?}");
        }
    });
}

#[test]
fn exchanges() {
    let theirs = |path: &Path| {
        shell(
            path,
            "umask 022; mkdir -p one/deep two; echo 1 > one/file; echo 2 > two/other; \
            : > top; ln top two/top; ln -s x two/link; mkdir two/below",
        );
        let [from, to] = [["one/file", "two/other"], ["one/deep", "two/link"]]
            .into_iter()
            .map(|pair| pair.map(|name| path.join(name)))
            .fold([Vec::new(), Vec::new()], |[mut a, mut b], [one, other]| {
                a.push(one);
                b.push(other);
                [a, b]
            });
        for (one, other) in from.iter().zip(&to) {
            rustix::fs::renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)
                .expect("an exchange");
        }
        let exchange = |one: &str, other: &str, flags| {
            rustix::fs::renameat_with(CWD, path.join(one), CWD, path.join(other), flags)
        };
        exchange("top", "two/top", RenameFlags::EXCHANGE).expect("two names of one file");
        exchange("one", "top", RenameFlags::EXCHANGE).expect("a directory and a file");
        for (result, errno) in [
            (exchange("two", "two/below", RenameFlags::EXCHANGE), Errno::INVAL),
            (exchange("two/below", "two", RenameFlags::EXCHANGE), Errno::INVAL),
            (exchange("top", "two/top", RenameFlags::NOREPLACE), Errno::EXIST),
            (exchange("top", "none", RenameFlags::EXCHANGE), Errno::NOENT),
        ] {
            assert_eq!(result, Err(errno));
        }
        exchange("two/other", "moved", RenameFlags::NOREPLACE).expect("a new name");
        shell(path, TOUCH);
    };
    twins(theirs, |fs| {
        let root = fs.root();
        let dir = NewFile { permissions: 0o755, ..NEW };
        let [one, two] = ["one", "two"].map(|name| mkdir(fs, root, name, &dir));
        mkdir(fs, one, "deep", &dir);
        for (dir, name, text) in [(one, "file", b"1\n"), (two, "other", b"2\n")] {
            let file = fs.create(place(dir, name), &NEW).expect("a file");
            fs.write(file, 0, text, AT).expect("data");
        }
        let top = fs.create(place(root, "top"), &NEW).expect("a file");
        fs.link(top, place(two, "top"), AT).expect("a second name");
        fs.symlink(place(two, "link"), b"x", &NEW).expect("a link");
        mkdir(fs, two, "below", &dir);
        let rename = |from: (FileId, &str), to: (FileId, &str), how| {
            fs.rename_with(place(from.0, from.1), place(to.0, to.1), how, AT)
        };
        for (from, to) in [
            ((one, "file"), (two, "other")),
            ((one, "deep"), (two, "link")),
            ((root, "top"), (two, "top")),
            ((root, "one"), (root, "top")),
        ] {
            rename(from, to, Rename::Exchange).expect("an exchange");
        }
        assert_eq!(at(fs, "top"), one);
        for (from, to, how, errno) in [
            ((root, "two"), (two, "below"), Rename::Exchange, Errno::INVAL),
            ((two, "below"), (root, "two"), Rename::Exchange, Errno::INVAL),
            ((root, "top"), (two, "top"), Rename::NoReplace, Errno::EXIST),
            ((root, "top"), (root, "none"), Rename::Exchange, Errno::NOENT),
        ] {
            assert_eq!(rename(from, to, how).expect_err("refused").errno(), errno);
        }
        rename((two, "other"), (root, "moved"), Rename::NoReplace).expect("a new name");
    });
}

#[test]
fn files_without_names() {
    let theirs = |path: &Path| {
        shell(path, "umask 022; mkdir dir");
        let open = |flags| {
            let flags = OFlags::TMPFILE | OFlags::RDWR | flags;
            File::from(
                rustix::fs::open(path.join("dir"), flags, Mode::from(0o644)).expect("unnamed"),
            )
        };
        let named = open(OFlags::empty());
        std::io::Write::write_all(&mut &named, b"text").expect("data");
        let link = |file: &File, name: &str| {
            let proc = format!("/proc/self/fd/{}", file.as_raw_fd());
            rustix::fs::linkat(CWD, proc, CWD, path.join(name), AtFlags::SYMLINK_FOLLOW)
        };
        link(&named, "dir/first").expect("a first name");
        link(&named, "second").expect("a second name");
        assert_eq!(link(&open(OFlags::EXCL), "never"), Err(Errno::NOENT));
        drop(open(OFlags::empty()));
        shell(path, TOUCH);
    };
    twins(theirs, |fs| {
        let dir = mkdir(fs, fs.root(), "dir", &NewFile { permissions: 0o755, ..NEW });
        let named = fs.create_unnamed(dir, true, &NEW).expect("a file");
        assert_eq!(fs.attr(named).expect("it is open").nlink, 0);
        fs.write(named, 0, b"text", AT).expect("data");
        fs.link(named, place(dir, "first"), AT).expect("a first name");
        fs.link(named, place(fs.root(), "second"), AT).expect("a second name");
        fs.release(named).expect("it was open");
        let never = fs.create_unnamed(dir, false, &NEW).expect("a file");
        let refused = fs.link(never, place(dir, "never"), AT);
        assert_eq!(refused.expect_err("it may have no name").errno(), Errno::NOENT);
        let gone = fs.create_unnamed(dir, true, &NEW).expect("a file");
        fs.release(gone).expect("it was open");
        assert_eq!(fs.attr(gone).expect_err("it is gone").errno(), Errno::NOENT);
        // A file that lost its last name gets no new one, however it began.
        let lost = fs.create_unnamed(dir, true, &NEW).expect("a file");
        fs.link(lost, place(dir, "lost"), AT).expect("a first name");
        fs.unlink(place(dir, "lost"), AT).expect("it is there");
        let refused = fs.link(lost, place(dir, "again"), AT);
        assert_eq!(refused.expect_err("it lost its name").errno(), Errno::NOENT);
        // The file is still open. A crash would leave it, and the next writer of the volume removes
        // it.
        fs.sync().expect("a commit");
    });
}

/// A move that leaves a whiteout of root.
const WHITEOUT: Rename =
    Rename::Whiteout { new: NewFile { permissions: 0, ..NEW }, replaces: true };
const WHITEOUT_NO_REPLACE: Rename =
    Rename::Whiteout { new: NewFile { permissions: 0, ..NEW }, replaces: false };

/// Moves of subvolumes and onto subvolumes, and moves that leave whiteouts, and the kernel's answer
/// to each.
const MOVES: &[(&str, &str, Rename, Option<Errno>)] = &[
    ("sub", "file", Rename::Replace, Some(Errno::NOTDIR)),
    ("sub", "full", Rename::Replace, Some(Errno::NOTEMPTY)),
    ("sub", "void", Rename::Replace, Some(Errno::NOTEMPTY)),
    ("full", "void", Rename::Replace, Some(Errno::NOTEMPTY)),
    ("file", "void", Rename::Replace, Some(Errno::ISDIR)),
    ("file", "sub/file", Rename::Replace, Some(Errno::XDEV)),
    ("full", "sub/new", Rename::Replace, Some(Errno::XDEV)),
    ("file", "sub/new", Rename::Exchange, Some(Errno::NOENT)),
    ("file", "sub/file", Rename::NoReplace, Some(Errno::EXIST)),
    ("sub", "sub/new", Rename::Replace, Some(Errno::INVAL)),
    ("sub", "bare", Rename::NoReplace, Some(Errno::EXIST)),
    ("sub", "none", Rename::Exchange, Some(Errno::NOENT)),
    // In `all`, which is a snapshot, the places of `sub` and `void` are empty directories.
    ("all/sub", "all/new", Rename::Replace, Some(Errno::NOTEMPTY)),
    ("all/file", "all/sub", Rename::Replace, Some(Errno::ISDIR)),
    ("all/full", "all/sub", Rename::Replace, None),
    ("sub", "sub", Rename::Replace, None),
    ("sub", "bare/sub", Rename::NoReplace, None),
    ("bare/sub", "all/moved", Rename::Replace, None),
    ("file", "full", WHITEOUT, Some(Errno::ISDIR)),
    ("file", "full/file", WHITEOUT_NO_REPLACE, Some(Errno::EXIST)),
    ("full/none", "file", WHITEOUT, Some(Errno::NOENT)),
    ("file", "full/file", WHITEOUT, None),
    ("full", "elsewhere", WHITEOUT_NO_REPLACE, None),
    ("elsewhere", "bare/full", WHITEOUT, None),
    ("bare/full/file", "bare/full/file", WHITEOUT, None),
    ("all/moved", "all/moved/below", WHITEOUT, Some(Errno::INVAL)),
    ("all/moved", "bare/sub", WHITEOUT, None),
];

#[test]
fn moves_of_subvolumes() {
    let theirs = |path: &Path| {
        shell(
            path,
            "umask 022; btrfs -q subvolume create sub void; chmod 755 sub void; : > file; : > sub/file; \
            mkdir full bare; : > full/file; btrfs -q subvolume snapshot . all",
        );
        for &(from, to, how, errno) in MOVES {
            let flags = match how {
                Rename::Replace => RenameFlags::empty(),
                Rename::NoReplace => RenameFlags::NOREPLACE,
                Rename::Exchange => RenameFlags::EXCHANGE,
                Rename::Whiteout { replaces: true, .. } => RenameFlags::WHITEOUT,
                Rename::Whiteout { .. } => RenameFlags::WHITEOUT | RenameFlags::NOREPLACE,
            };
            let done = rustix::fs::renameat_with(CWD, path.join(from), CWD, path.join(to), flags);
            assert_eq!(done.err(), errno, "{from} to {to}");
        }
        // The kernel shows the place of a subvolume with the current time, so `all/void` is
        // removed.
        shell(path, &format!("rmdir all/void; {TOUCH}"));
    };
    twins(theirs, |fs| {
        let root = fs.root();
        let new = NewFile { permissions: 0o755, ..NEW };
        for name in ["sub", "void"] {
            fs.create_subvolume(place(root, name), &new).expect("a subvolume");
        }
        let create = |dir| fs.create(place(dir, "file"), &NEW).expect("a file");
        create(root);
        let [full, _] = ["full", "bare"].map(|name| mkdir(fs, root, name, &new));
        for dir in [at(fs, "sub"), full] {
            create(dir);
        }
        fs.snapshot(TreeId(root.dev), place(root, "all"), false, AT).expect("a snapshot");
        for &(from, to, how, errno) in MOVES {
            let split = |path: &'static str| {
                let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
                let dir = if dir.is_empty() { root } else { at(fs, dir) };
                place(dir, name)
            };
            let done = fs.rename_with(split(from), split(to), how, AT);
            assert_eq!(done.err().map(|error| error.errno()), errno, "{from} to {to}");
        }
        fs.rmdir(place(at(fs, "all"), "void"), AT).expect("nothing is there");
    });
}
