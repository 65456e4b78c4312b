//! Twins: we and the kernel do the same on two volumes, and both volumes show the same.

use std::cell::RefCell;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use offshoot_btrfs::{Filesystem, OpenOptions, SubvolumeId};
use offshoot_btrfs_format::TreeId;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::random::Random;
use offshoot_testkit::run::run;
use offshoot_testkit::sharing;
use offshoot_vfs::acl::{ACCESS, DEFAULT};
use offshoot_vfs::{
    Dedupe, Errno, Fallocate, FileFlags, FileId, FileSystem, FileSystemMut, FileType, NewFile,
    Node, Position, Rename, SetAttr, SetTime, XattrMode,
};
use rustix::fs::{AtFlags, CWD, FallocateFlags, IFlags, Mode, OFlags, RenameFlags};

use crate::common::{AT, NEW, at, check, open_read_only, open_with, place};

/// The kernel runs `theirs` in the root of its volume, and `ours` does the same on ours.
fn twins(theirs: impl FnOnce(&Path), ours: impl FnOnce(&Filesystem)) {
    twins_that_share(0, theirs, ours);
}

/// As [`twins`]. Afterwards at least `shared` files share space with others, and the same ones on
/// both volumes.
fn twins_that_share(shared: usize, theirs: impl FnOnce(&Path), ours: impl FnOnce(&Filesystem)) {
    let compare = Compare::default().without(Aspect::Ids).without(Aspect::StoredTimes);
    twins_with(&OpenOptions::default(), "rw,noatime", &compare, shared, theirs, ours);
}

/// As [`twins_that_share`], with these options for our volume and this mount of the kernel's.
/// Returns both volumes, ours first.
pub(crate) fn twins_with(
    options: &OpenOptions,
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
        let pipe = Node { file_type: FileType::Fifo, rdev: (0, 0) };
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
enum Share {
    Clone(&'static str, u64, &'static str, u64, u64),
    Dedupe(&'static str, u64, &'static str, u64, u64),
    Copy(&'static str, u64, &'static str, u64, u64),
    Write(&'static str, u64, u64),
    Punch(&'static str, u64, u64),
    Cut(&'static str, u64),
    Snapshot(&'static str, bool),
}

use Share::{Clone as Cloned, Copy as Copied, Cut, Dedupe as Deduped, Punch, Snapshot, Write};

/// A length of 0 means up to the end.
const SHARES: &[Share] = &[
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

fn share_by_kernel(mount: &Path, share: Share) {
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

fn share_by_ours(fs: &Filesystem, share: Share) {
    let position =
        |name: &str, sector: u64| Position { file: at(fs, name), offset: sector * SECTOR };
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
            let position = |name: &str, offset| Position { file: at(fs, name), offset };
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
            "chattr -c text; printf start > live/room; truncate -s 8192 live/room; fallocate -o 40960 -l 80000 live/room",
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
        let what = Fallocate::Allocate { keep_size: false };
        fs.fallocate(room, what, 40_960, 80_000, AT).expect("room");
        for &share in SHARES {
            fs.sync().expect("a commit");
            share_by_ours(fs, share);
        }
    });
}

/// The other file of one of [`DEDUPES`].
#[derive(Clone, Copy, Debug)]
enum Other {
    /// The file with this name, which both volumes have.
    Named(&'static str),
    /// A file of its own, with the first bytes of "base".
    First(usize),
    /// With all of "base", and this many bytes behind it.
    Longer(usize),
    /// With all of "base", except for this byte.
    Changed(usize),
    /// As `First` and `Changed`, for "large".
    FirstOfLarge(usize),
    ChangedOfLarge(usize),
    /// This many zeros.
    Zeros(usize),
}

use Other::{Changed, ChangedOfLarge, First, FirstOfLarge, Longer, Named, Zeros};

/// The result of a dedupe: that the bytes are the same, and how many of them are shared; or an
/// error.
type Found = Result<Dedupe, Errno>;

const fn same(len: u64) -> Dedupe {
    Dedupe::Same { len }
}

const DIFFERS: Found = Ok(Dedupe::Differs);
const INVALID: Found = Err(Errno::INVAL);
const BASE: usize = 300_001;
const LARGE: usize = 20 << 20;

/// The file and its offset, the other file and its offset, the length, and the expected result.
const DEDUPES: &[(&str, u64, Other, u64, u64, Found)] = &[
    // Ends within a sector.
    ("base", 0, First(BASE), 0, 300_001, Ok(same(300_001))),
    ("base", 0, Longer(4), 0, 300_001, Ok(same(299_008))),
    ("base", 0, First(200_001), 0, 200_001, Ok(same(196_608))),
    ("base", 0, First(BASE), 0, 100_001, Ok(same(98_304))),
    ("base", 0, First(BASE), 0, 100, Ok(same(0))),
    ("base", 0, Changed(8195), 0, 8200, Ok(same(8192))),
    ("base", 0, Changed(300_000), 0, 300_001, DIFFERS),
    ("base", 0, Changed(300_000), 0, 300_000, Ok(same(299_008))),
    ("base", 0, Changed(150_000), 0, 300_001, DIFFERS),
    ("base", 8192, First(BASE), 8192, 40_000, Ok(same(36_864))),
    ("base", 8192, First(BASE), 4096, 4096, DIFFERS),
    // Behind the end, or unaligned.
    ("base", 0, Longer(10_000), 0, 300_002, INVALID),
    ("base", 0, First(4096), 0, 8192, INVALID),
    ("base", 303_104, Longer(10_000), 303_104, 4096, INVALID),
    ("base", 5, First(BASE), 0, 4096, INVALID),
    ("base", 0, First(BASE), 5, 4096, INVALID),
    ("base", 5, First(BASE), 5, 100, INVALID),
    ("base", 0, First(BASE), 0, 0, Ok(same(0))),
    ("base", 5, First(BASE), 7, 0, Ok(same(0))),
    ("base", 0, First(BASE), 1 << 31, 0, Ok(same(0))),
    ("base", 4096, First(BASE), 0, i64::MAX.cast_unsigned(), INVALID),
    ("base", 0, First(BASE), 0, u64::MAX, INVALID),
    // Twice the same file.
    ("zeros1", 0, Named("zeros1"), 40_960, 40_960, Ok(same(40_960))),
    ("zeros2", 0, Named("zeros2"), 36_864, 40_960, INVALID),
    ("zeros3", 0, Named("zeros3"), 36_864, 36_869, Ok(same(36_864))),
    ("zeros4", 0, Named("zeros4"), 0, 8192, INVALID),
    ("zeros4", 0, Named("zeros4"), 0, 100, Ok(same(0))),
    ("zeros5", 0, Named("zeros5"), 0, 163_940, INVALID),
    ("zeros5", 0, Named("zeros5"), 159_744, 4196, Ok(same(4096))),
    // More than the kernel shares in one piece.
    ("large", 0, FirstOfLarge(LARGE), 0, 20 << 20, Ok(same(20 << 20))),
    ("large", 0, FirstOfLarge(LARGE), 0, (20 << 20) - 1, Ok(same((20 << 20) - 4096))),
    ("large", 0, ChangedOfLarge(18 << 20), 0, 20 << 20, DIFFERS),
    ("large", 0, ChangedOfLarge(18 << 20), 0, (16 << 20) + 4096, Ok(same((16 << 20) + 4096))),
    // A file that must not be changed, and what is not a file.
    ("base", 0, Named("fixed"), 0, 4096, Err(Errno::PERM)),
    ("base", 0, Named("log"), 0, 8192, Ok(same(8192))),
    ("base", 0, Named("kept/base"), 0, 4096, Ok(same(4096))),
    ("base", 1, Named("kept/base"), 0, 4096, INVALID),
    ("kept/base", 4096, First(BASE), 4096, 8192, Ok(same(8192))),
    ("base", 0, Named("dir"), 0, 4096, Err(Errno::ISDIR)),
    ("base", 0, Named("dir"), 0, 0, Err(Errno::ISDIR)),
    ("nocow", 0, First(BASE), 0, 4096, INVALID),
    ("base", 0, Named("nocow"), 0, 4096, INVALID),
    // Inline data, and holes.
    ("small", 0, First(100), 0, 100, Ok(same(100))),
    ("small", 0, First(BASE), 0, 100, Ok(same(0))),
    ("base", 0, First(100), 0, 100, Ok(same(0))),
    ("hole", 0, Zeros(1 << 20), 0, 1 << 20, Ok(same(1 << 20))),
    ("hole", 0, Named("other-hole"), 0, 1 << 20, Ok(same(1 << 20))),
    ("zeros4", 0, Named("last-hole"), 0, 81_920, Ok(same(81_920))),
];

/// The named files, and their contents. Files that are holes have the same length.
fn named_files() -> Vec<(&'static str, Vec<u8>)> {
    let (base, large) = (Random::new(8).bytes(BASE), Random::new(9).bytes(LARGE));
    let zeros = |name| (name, vec![0; 40 * 4096]);
    let mut files = vec![("large", large)];
    files.extend(["base", "live/base", "fixed", "log", "nocow"].map(|name| (name, base.clone())));
    files.push(("small", base[..100].to_vec()));
    files.extend(["zeros1", "zeros2", "zeros3", "zeros4"].map(zeros));
    files.push(("zeros5", vec![0; 40 * 4096 + 100]));
    files
}

const HOLES: [(&str, u64); 3] = [("hole", 1 << 20), ("other-hole", 1 << 20), ("last-hole", 81_920)];

/// The contents of the other files of [`DEDUPES`], by name.
fn other_files() -> Vec<(String, Vec<u8>)> {
    let (base, large) = (Random::new(8).bytes(BASE), Random::new(9).bytes(LARGE));
    let changed = |bytes: &[u8], at: usize| {
        let mut bytes = bytes.to_vec();
        bytes[at] ^= 1;
        bytes
    };
    let held = |other| match other {
        Named(_) => None,
        First(len) => Some(base[..len].to_vec()),
        Longer(len) => Some([&base[..], &vec![1; len]].concat()),
        Changed(at) => Some(changed(&base, at)),
        FirstOfLarge(len) => Some(large[..len].to_vec()),
        ChangedOfLarge(at) => Some(changed(&large, at)),
        Zeros(len) => Some(vec![0; len]),
    };
    let all = DEDUPES.iter().enumerate();
    all.filter_map(|(number, one)| Some((other_name(number, one.2), held(one.2)?))).collect()
}

fn other_name(number: usize, other: Other) -> String {
    if let Named(name) = other { name.to_owned() } else { format!("other{number}") }
}

/// Ranges that are compared and shared: both volumes share the same ones, and refuse the others for
/// the same reason.
#[test]
fn dedupes() {
    let theirs = |path: &Path| {
        shell(
            path,
            "umask 022; btrfs -q subvolume create live; chmod 755 live; mkdir dir; : > nocow; chattr +C nocow",
        );
        let write = |name: &str, bytes: &[u8]| {
            std::fs::write(path.join(name), bytes).expect("there is room");
        };
        for (name, bytes) in &named_files() {
            write(name, bytes);
        }
        for (name, bytes) in &other_files() {
            write(name, bytes);
        }
        for (name, len) in HOLES {
            File::create(path.join(name)).and_then(|file| file.set_len(len)).expect("a hole");
        }
        shell(
            path,
            &format!(
                "{TOUCH}; btrfs -q subvolume snapshot -r live kept; touch -d '2020-09-13 12:26:40.123456789 UTC' .; \
                sync -f .; chattr +i fixed; chattr +a log"
            ),
        );
        for (number, dedupe) in DEDUPES.iter().enumerate() {
            let &(from, at, other, other_at, len, found) = dedupe;
            let (from, other) = (path.join(from), path.join(other_name(number, other)));
            let kernel = sharing::dedupe_range((&from, at), (&other, other_at), len);
            let expected = found.map(|found| found != Dedupe::Differs);
            assert_eq!(kernel, expected.map_err(Errno::raw_os_error), "{dedupe:?}");
        }
    };
    twins_that_share(18, theirs, |fs| {
        let new = NewFile { permissions: 0o755, ..NEW };
        fs.create_subvolume(place(fs.root(), "live"), &new).expect("a subvolume");
        mkdir(fs, fs.root(), "dir", &new);
        let nocow = fs.create(place(fs.root(), "nocow"), &NEW).expect("a file");
        fs.set_flags(nocow, FileFlags::NODATACOW, AT).expect("it is empty");
        let create = |name: &str| match name.strip_prefix("live/") {
            Some(below) => fs.create(place(at(fs, "live"), below), &NEW).expect("a file"),
            None => fs.create(place(fs.root(), name), &NEW).expect("a file"),
        };
        let write = |name: &str, bytes: &[u8]| {
            let file = if name == "nocow" { nocow } else { create(name) };
            fs.write(file, 0, bytes, AT).expect("there is room");
        };
        for (name, bytes) in &named_files() {
            write(name, bytes);
        }
        for (name, bytes) in &other_files() {
            write(name, bytes);
        }
        for (name, len) in HOLES {
            let set = SetAttr { size: Some(len), ..SetAttr::default() };
            fs.set_attr(create(name), &set, AT).expect("a hole");
        }
        let live = TreeId(at(fs, "live").dev);
        fs.snapshot(live, place(fs.root(), "kept"), true, AT).expect("a snapshot");
        fs.sync().expect("a commit");
        for (name, flag) in [("fixed", FileFlags::IMMUTABLE), ("log", FileFlags::APPEND)] {
            fs.set_flags(at(fs, name), flag, AT).expect("a flag");
        }
        for (number, dedupe) in DEDUPES.iter().enumerate() {
            let &(from, offset, other, other_at, len, expected) = dedupe;
            let place = |name: &str, offset| Position { file: at(fs, name), offset };
            let to = place(&other_name(number, other), other_at);
            let found = fs.dedupe_range(place(from, offset), to, len);
            assert_eq!(found.map_err(|error| error.errno()), expected, "{dedupe:?}");
        }
    });
}

/// Moves of subvolumes and onto subvolumes, and the kernel's answer to each.
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
