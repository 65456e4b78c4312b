//! The kernel does the same on a volume of its own, and both show the same.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use offshoot_btrfs::Filesystem;
use offshoot_btrfs_format::TreeId;
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::disks::Disks;
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::judges;
use offshoot_testkit::random::Random;
use offshoot_testkit::run::run;
use offshoot_testkit::sharing;
use offshoot_vfs::acl::{ACCESS, DEFAULT};
use offshoot_vfs::{
    Errno, Fallocate, FileFlags, FileId, FileSystem, FileSystemMut, FileType, NewFile, Node,
    Position, Rename, SetAttr, SetTime, XattrMode,
};
use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags, RenameFlags};

use crate::common::{AT, NEW, at, check, open_read_only, open_top, place};

/// The kernel runs this in the root of its volume, and `ours` does the same to ours.
fn twins(theirs: impl FnOnce(&Path), ours: impl FnOnce(&Filesystem)) {
    twins_that_share(0, theirs, ours);
}

/// As [`twins`], and so many files or more share space with others then, the same on both volumes.
fn twins_that_share(shared: usize, theirs: impl FnOnce(&Path), ours: impl FnOnce(&Filesystem)) {
    let Some(judges) = judges::require() else { return };
    let [kernel, disks] = [(); 2].map(|()| Disks::create(&judges, 1, 256));
    kernel.mkfs(&[]);
    disks.mkfs(&[]);
    let kernel = kernel.mount("rw,noatime");
    theirs(kernel.path());
    let fs = open_top(&disks);
    ours(&fs);
    fs.sync().expect("a commit");
    drop(fs);
    check(&disks);
    let compare = Compare::default().without(Aspect::Ids).without(Aspect::StoredTimes);
    let judge = HostFilesystem::new(kernel.path()).expect("the mounted directory opens");
    compare.clone().run_filesystems(&open_read_only(&disks), &judge).assert_same(3);
    // The kernel reads from ours what we read.
    let mount = disks.mount("ro,noatime");
    let of_ours = HostFilesystem::new(mount.path()).expect("the mounted directory opens");
    compare.run_filesystems(&of_ours, &judge).assert_same(3);
    sharing::assert_alike(mount.path(), kernel.path(), shared);
}

fn shell(path: &Path, script: &str) {
    let script = format!("set -e; cd '{}'; {script}", path.display());
    run("sh", &["-c", &script]);
}

/// Makes all times those of [`AT`].
const TOUCH: &str = "find . -exec touch -h -d '2020-09-13 12:26:40.123456789 UTC' {} +";

fn mkdir(fs: &Filesystem, dir: FileId, name: &str, new: &NewFile) -> FileId {
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
        // What `setfacl` does beside: the group gets its own permissions back.
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
        // A new list takes effect, though the directory was known to have none.
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
        // Now is allowed where the same moment given is not.
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
        // Who lost the last name gets no new one, however the file began.
        let lost = fs.create_unnamed(dir, true, &NEW).expect("a file");
        fs.link(lost, place(dir, "lost"), AT).expect("a first name");
        fs.unlink(place(dir, "lost"), AT).expect("it is there");
        let refused = fs.link(lost, place(dir, "again"), AT);
        assert_eq!(refused.expect_err("it lost its name").errno(), Errno::NOENT);
        // It is still open: what a crash leaves of it goes when the volume is changed again.
        fs.sync().expect("a commit");
    });
}

const SECTOR: u64 = 4096;

/// The bytes of a file of [`shared_space`]: some that are larger when they are compressed, or text.
fn bytes_of(name: &str) -> Vec<u8> {
    let mut random = Random::new(7);
    match name {
        "small" => random.text(1000),
        "text" | "same-text" => random.text(300_001),
        _ => random.bytes(300_001),
    }
}

/// What is done to files of both volumes: two names, and offsets and a length in sectors.
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

use Share::{Clone as Cloned, Copy as Copied, Cut, Dedupe, Punch, Snapshot, Write};

/// Lengths of 0 go up to the end.
const SHARES: &[Share] = &[
    Cloned("live/data", 0, "whole", 0, 0),
    Cloned("live/data", 3, "parts", 0, 20),
    Cloned("live/data", 3, "parts", 40, 20),
    Cloned("text", 0, "whole-text", 0, 0),
    Cloned("text", 10, "parts", 70, 30),
    Cloned("live/room", 0, "parts", 120, 20),
    Cloned("small", 0, "whole-small", 0, 0),
    Cloned("nocow", 2, "nocow-clone", 5, 30),
    Copied("live/data", 8, "copied", 0, 16),
    Copied("text", 0, "copied", 32, 32),
    Dedupe("live/data", 0, "live/same", 0, 16),
    Dedupe("live/data", 30, "live/same", 30, 20),
    Dedupe("text", 0, "same-text", 0, 0),
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
        Dedupe(from, at, to, to_at, len) => {
            let (from, to) = (place(from), place(to));
            let rest = from.metadata().expect("it is there").len() - at * SECTOR;
            let len = if len == 0 { rest } else { len * SECTOR };
            assert!(
                sharing::dedupe_range((&from, at * SECTOR), (&to, to_at * SECTOR), len),
                "{share:?}: the bytes differ"
            );
        }
        Copied(from, at, to, to_at, len) => {
            let (mut at, mut to_at) = (at * SECTOR, to_at * SECTOR);
            let len = usize::try_from(len * SECTOR).expect("small");
            let done = rustix::fs::copy_file_range(
                open(from),
                Some(&mut at),
                open(to),
                Some(&mut to_at),
                len,
            );
            assert_eq!(done, Ok(len), "{share:?}");
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
        Dedupe(from, at, to, to_at, len) => {
            let len = if len == 0 { size(from) - at * SECTOR } else { len * SECTOR };
            let same = fs.dedupe_range(position(from, at), position(to, to_at), len);
            same.map(|same| assert!(same, "{share:?}: the bytes differ"))
        }
        Copied(from, at, to, to_at, len) => {
            let len = len * SECTOR;
            let done = fs.copy_range(position(from, at), position(to, to_at), len, AT);
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
const TARGETS: [&str; 6] = ["whole", "parts", "whole-text", "whole-small", "nocow-clone", "copied"];

/// Clones, dedupes, copies and snapshots, and what is written, punched and cut after them: the kernel tells of both volumes that the same
/// ranges of the same files are shared.
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

/// Moves of subvolumes, and onto them, and what the kernel makes of each.
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
    // In `all` the places of `sub` and `void` are empty directories.
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
        // Its times are those of the moment at which it is looked at.
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
