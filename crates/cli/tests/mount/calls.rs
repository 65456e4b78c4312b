//! System calls, made in the same way on two mounts. Each result is a line, so that the lines can
//! be compared.
//!
//! Inode numbers, sizes of volumes and the clock are left out, because they differ. The files that
//! the calls leave are compared as a tree.

use std::ffi::OsStr;
use std::fmt::Debug;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Mode, OFlags, RenameFlags, SeekFrom, Timespec,
    Timestamps, XattrFlags,
};
use rustix::io::Errno;

/// Makes the calls in `root`, and returns their results.
pub(super) fn make(root: &Path) -> Vec<String> {
    let mut calls = MountCalls { root, said: Vec::new() };
    calls.names();
    calls.moves();
    calls.links();
    calls.attributes();
    calls.set_id();
    calls.capabilities();
    calls.xattrs();
    calls.access_lists();
    calls.data();
    calls.space();
    calls.copies();
    calls.unlinked();
    calls.unnamed();
    calls.special();
    calls.listings();
    calls.flags();
    calls.said
}

struct MountCalls<'a> {
    root: &'a Path,
    said: Vec<String>,
}

fn mode(bits: u32) -> Mode {
    Mode::from_raw_mode(bits)
}

impl MountCalls<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Records the result of a call.
    fn note<T: Debug>(&mut self, call: &str, result: Result<T, Errno>) {
        self.said.push(match result {
            Ok(value) => format!("{call}: {value:?}"),
            Err(errno) => format!("{call}: {errno}"),
        });
    }

    fn note_io<T: Debug>(&mut self, call: &str, result: std::io::Result<T>) {
        let result = result
            .map_err(|error| Errno::from_raw_os_error(error.raw_os_error().unwrap_or_default()));
        self.note(call, result);
    }

    /// Records the attributes of a file.
    fn stat(&mut self, name: &str) {
        let stat = rustix::fs::lstat(self.path(name)).map(|stat| {
            let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
            let blocks = if is_directory { 0 } else { stat.st_blocks };
            let (mode, links) = (stat.st_mode, stat.st_nlink);
            format!(
                "{mode:o} {links} links {}:{} size {} blocks {blocks} device {:x}",
                stat.st_uid, stat.st_gid, stat.st_size, stat.st_rdev
            )
        });
        self.note(&format!("stat {name}"), stat);
    }

    fn mkdir(&mut self, name: &str, bits: u32) {
        let made = rustix::fs::mkdir(self.path(name), mode(bits));
        self.note(&format!("mkdir {name}"), made);
    }

    fn write(&mut self, name: &str, bytes: &[u8]) {
        let written = fs::write(self.path(name), bytes);
        self.note_io(&format!("write {name}"), written);
    }

    fn names(&mut self) {
        self.mkdir("names", 0o777);
        self.stat("names");
        self.mkdir("names", 0o777);
        for len in [254, 255, 256, 1000, 4000] {
            let name = format!("names/{}", "n".repeat(len));
            let made = rustix::fs::mkdir(self.path(&name), mode(0o700));
            self.note(&format!("mkdir of {len} bytes"), made);
            let found = rustix::fs::lstat(self.path(&name)).map(drop);
            self.note(&format!("stat of {len} bytes"), found);
        }
        let every: Vec<u8> = (1..=255).filter(|&byte| byte != b'/').collect();
        let path = self.path("names").join(OsStr::from_bytes(&every));
        let written = fs::write(&path, b"every byte");
        self.note_io("a name of every byte", written);
        let below = fs::write(path.join("below"), b"");
        self.note_io("a name below a file", below);
        self.write("names/none/file", b"");
        self.write("names", b"");
        let removed = rustix::fs::unlink(self.path("names"));
        self.note("unlink of a directory", removed);
        let removed = rustix::fs::rmdir(self.path("names"));
        self.note("rmdir of a directory that is not empty", removed);
        let removed = rustix::fs::rmdir(&path);
        self.note("rmdir of a file", removed);
        let removed = rustix::fs::unlink(self.path("names/none"));
        self.note("unlink of nothing", removed);
        let removed = rustix::fs::rmdir(self.path("names").join("n".repeat(254)));
        self.note("rmdir", removed);
        self.stat("names");
        // A name that did not exist is found after it was made.
        self.stat("names/later");
        self.write("names/later", b"now");
        self.stat("names/later");
    }

    fn rename(&mut self, from: &str, to: &str, flags: RenameFlags) {
        let (old, new) = (self.path(from), self.path(to));
        let moved = rustix::fs::renameat_with(CWD, old, CWD, new, flags);
        self.note(&format!("rename {from} {to} {flags:?}"), moved);
    }

    fn moves(&mut self) {
        self.mkdir("moves", 0o755);
        for name in ["moves/a", "moves/b", "moves/c"] {
            self.write(name, name.as_bytes());
        }
        for name in ["moves/d", "moves/d/e", "moves/f", "moves/g"] {
            self.mkdir(name, 0o755);
        }
        let none = RenameFlags::empty();
        self.rename("moves/a", "moves/b", none);
        self.rename("moves/b", "moves/c", RenameFlags::NOREPLACE);
        self.rename("moves/b", "moves/new", RenameFlags::NOREPLACE);
        self.rename("moves/new", "moves/d", RenameFlags::EXCHANGE);
        self.rename("moves/new", "moves/none", RenameFlags::EXCHANGE);
        self.rename("moves/new", "moves/c", RenameFlags::EXCHANGE | RenameFlags::NOREPLACE);
        self.rename("moves/new", "moves/new/e/below", none);
        self.rename("moves/f", "moves/g", none);
        self.rename("moves/g", "moves/new", none);
        self.rename("moves/g", "moves/c", none);
        self.rename("moves/c", "moves/g", none);
        self.rename("moves/none", "moves/c", none);
        self.rename("moves/c", "moves/c", none);
        let whiteout = RenameFlags::WHITEOUT;
        self.rename("moves/g", "moves/h", whiteout);
        self.stat("moves/g");
        self.rename("moves/h", "moves/g", whiteout | RenameFlags::NOREPLACE);
        self.rename("moves/h", "moves/g", whiteout | RenameFlags::EXCHANGE);
        self.rename("moves/h", "moves/g", whiteout);
        self.rename("moves/g", "names/g", none);
        self.stat("names/g");
        self.stat("moves");
    }

    fn links(&mut self) {
        self.mkdir("links", 0o755);
        self.write("links/a", b"linked");
        for (from, to) in [("a", "b"), ("a", "b"), ("none", "c"), (".", "c"), ("b", "c")] {
            let (from, to) = (format!("links/{from}"), format!("links/{to}"));
            let linked = rustix::fs::link(self.path(&from), self.path(&to));
            self.note(&format!("link {from} {to}"), linked);
        }
        self.stat("links/a");
        // Two names of one file: the rename does nothing.
        self.rename("links/a", "links/b", RenameFlags::empty());
        let removed = fs::remove_file(self.path("links/c"));
        self.note_io("unlink links/c", removed);
        self.stat("links/b");
        for (target, name) in [("a", "s"), ("nowhere", "t"), ("a", "s"), ("../links", "u")] {
            let name = format!("links/{name}");
            let linked = rustix::fs::symlink(target, self.path(&name));
            self.note(&format!("symlink {name}"), linked);
            self.stat(&name);
        }
        for len in [4000, 4094, 4095] {
            let linked = rustix::fs::symlink("t".repeat(len), self.path(&format!("links/{len}")));
            self.note(&format!("symlink of {len} bytes"), linked);
        }
        for name in ["s", "t", "u", "a", "none"] {
            let read = rustix::fs::readlink(self.path(&format!("links/{name}")), Vec::new());
            self.note(&format!("readlink {name}"), read);
        }
        let read = fs::read(self.path("links/u/s"));
        self.note_io("through links", read);
    }

    fn attributes(&mut self) {
        self.mkdir("attributes", 0o755);
        let name = "attributes/file";
        self.write(name, b"some");
        for bits in [0, 0o777, 0o4711, 0o2755, 0o1644, 0o600] {
            let changed = rustix::fs::chmod(self.path(name), mode(bits));
            self.note(&format!("chmod {bits:o}"), changed);
            self.stat(name);
        }
        let time = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
        for (sec, nsec) in [(0, 0), (-1, 999_999_999), (1 << 33, 1), (-(1 << 33), 5)] {
            let times =
                Timestamps { last_access: time(sec, nsec), last_modification: time(sec + 7, nsec) };
            let changed = rustix::fs::utimensat(CWD, self.path(name), &times, AtFlags::empty());
            self.note(&format!("utimens {sec}"), changed);
            let read = rustix::fs::stat(self.path(name));
            let read = read.map(|s| (s.st_atime, s.st_atime_nsec, s.st_mtime, s.st_mtime_nsec));
            self.note("its times", read);
        }
        let birth = rustix::fs::StatxFlags::BTIME | rustix::fs::StatxFlags::BASIC_STATS;
        let stat = rustix::fs::statx(CWD, self.path(name), AtFlags::empty(), birth);
        self.note(
            "it has a birth",
            stat.map(|s| (s.stx_mask & birth.bits(), s.stx_btime.tv_sec > 0)),
        );
        for (user, group) in [(Some(1), None), (None, Some(2)), (Some(3), Some(4)), (None, None)] {
            let changed = std::os::unix::fs::chown(self.path(name), user, group);
            self.note_io(&format!("chown {user:?} {group:?}"), changed);
            self.stat(name);
        }
        for len in [100_000, 5, 5, 0, 4096, (1 << 40) + 1] {
            let file = OpenOptions::new().write(true).open(self.path(name)).expect("it opens");
            let changed = file.set_len(len);
            self.note_io(&format!("truncate {len}"), changed);
            self.stat(name);
        }
        let changed = OpenOptions::new().write(true).open(self.path("attributes"));
        self.note_io("open of a directory for writing", changed.map(drop));
        let opened = OpenOptions::new().write(true).truncate(true).open(self.path(name));
        self.note_io("open with O_TRUNC", opened.map(drop));
        self.stat(name);
        let opened = OpenOptions::new().write(true).create_new(true).open(self.path(name));
        self.note_io("open with O_EXCL", opened.map(drop));
    }

    /// Set-id bits are cleared by changes of users who may not keep them, and by a change of the
    /// owner. Without execution by the group, members of the group keep its bit.
    fn set_id(&mut self) {
        self.mkdir("setid", 0o2777);
        let changed = rustix::fs::chmod(self.path("setid"), mode(0o2777));
        self.note("chmod of the directory", changed);
        let changed = std::os::unix::fs::chown(self.path("setid"), Some(5), Some(6));
        self.note_io("chown of the directory", changed);
        self.stat("setid");
        self.mkdir("setid/dir", 0o755);
        self.stat("setid/dir");
        self.write("setid/file", b"data");
        self.stat("setid/file");
        for bits in [0o6755, 0o6745, 0o6777, 0o6766, 0o2766] {
            // The third number is that of the user that changes the file, and of its group.
            for (owner, group, user) in [
                (0, 0, 0),
                (1000, 1000, 1000),
                (0, 0, 1000),
                (0, 1000, 1000),
                (1000, 0, 1000),
                (1000, 1000, 0),
            ] {
                let owned =
                    std::os::unix::fs::chown(self.path("setid/file"), Some(owner), Some(group));
                self.note_io(&format!("chown {owner}:{group}"), owned);
                self.stat("setid/file");
                // On the kernel's btrfs, punching a hole changes nothing. So the punch comes while
                // there is data.
                for what in ["write", "punch", "zero", "allocate", "copy", "truncate", "open"] {
                    let changed = rustix::fs::chmod(self.path("setid/file"), mode(bits));
                    self.note(&format!("chmod {bits:o}"), changed);
                    self.as_user(user, "setid/file", what);
                    self.stat("setid/file");
                }
            }
        }
    }

    /// Every change of the data clears capabilities, whether or not the kernel has just looked for
    /// them.
    fn capabilities(&mut self) {
        self.mkdir("capabilities", 0o755);
        self.write("capabilities/file", b"data");
        // Version 2, CAP_NET_RAW, effective.
        let value = [[1, 0, 0, 2], [0, 0x20, 0, 0], [0; 4], [0; 4], [0; 4]].concat();
        let name = "security.capability";
        for what in ["write", "write", "truncate", "copy", "open", "allocate"] {
            self.setxattr("capabilities/file", name, &value, XattrFlags::empty());
            self.getxattr("capabilities/file", name, 100);
            self.as_user(0, "capabilities/file", what);
            self.getxattr("capabilities/file", name, 100);
        }
    }

    /// Has a shell change a file as the user `user`.
    fn as_user(&mut self, user: u32, name: &str, what: &str) {
        use std::os::unix::process::CommandExt;
        if what == "copy" {
            return self.copy_as_user(user, name);
        }
        let script = match what {
            "write" => "printf x >>\"$0\"",
            "truncate" => "truncate -s 2 \"$0\"",
            "punch" => "fallocate -p -o 0 -l 1 \"$0\"",
            "zero" => "fallocate -z -o 0 -l 1 \"$0\"",
            "allocate" => "fallocate -o 0 -l 9000 \"$0\"",
            _ => ": >\"$0\"",
        };
        let mut command = std::process::Command::new("sh");
        command.args(["-c", script]).arg(self.path(name)).uid(user).gid(user);
        let status = command.stderr(std::process::Stdio::null()).status().expect("a shell");
        self.said.push(format!("{what} of {name} by {user}: {status}"));
    }

    /// Copies a part of a file into itself as the user `user`. A shell cannot do that.
    fn copy_as_user(&mut self, user: u32, name: &str) {
        let path = self.path(name);
        let copied = super::as_user(user, || {
            let file = rustix::fs::open(path, OFlags::RDWR, Mode::empty())?;
            rustix::fs::copy_file_range(&file, Some(&mut 0), &file, Some(&mut 8), 1)
        });
        self.note(&format!("copy within {name} by {user}"), copied);
    }

    fn setxattr(&mut self, name: &str, attribute: &str, value: &[u8], flags: XattrFlags) {
        let set = rustix::fs::lsetxattr(self.path(name), attribute, value, flags);
        self.note(&format!("setxattr {name} {attribute} {} {flags:?}", value.len()), set);
    }

    fn getxattr(&mut self, name: &str, attribute: &str, room: usize) {
        let mut value = vec![0; room];
        let got = rustix::fs::lgetxattr(self.path(name), attribute, &mut value[..]);
        value.truncate(*got.as_ref().unwrap_or(&0));
        self.note(&format!("getxattr {name} {attribute} {room}"), got.map(|len| (len, value)));
    }

    fn xattrs(&mut self) {
        self.mkdir("xattrs", 0o755);
        self.write("xattrs/file", b"");
        let linked = rustix::fs::symlink("file", self.path("xattrs/link"));
        self.note("symlink", linked);
        let any = XattrFlags::empty();
        for name in ["xattrs", "xattrs/file", "xattrs/link"] {
            for attribute in ["user.a", "trusted.b", "security.c", "system.d", "nothing.e", "user."]
            {
                self.setxattr(name, attribute, attribute.as_bytes(), any);
                self.getxattr(name, attribute, 100);
            }
            self.setxattr(name, "user.a", b"new", XattrFlags::CREATE);
            self.setxattr(name, "user.a", b"newer", XattrFlags::REPLACE);
            self.setxattr(name, "user.z", b"", XattrFlags::REPLACE);
            self.setxattr(name, "user.empty", b"", XattrFlags::CREATE);
            self.getxattr(name, "user.a", 0);
            self.getxattr(name, "user.a", 4);
            self.getxattr(name, "user.empty", 4);
            self.getxattr(name, "user.none", 4);
            let mut list = vec![0; 1000];
            let listed = rustix::fs::llistxattr(self.path(name), &mut list[..]);
            let mut names: Vec<_> = list.split(|&byte| byte == 0).map(<[u8]>::to_vec).collect();
            names.sort();
            self.note(&format!("listxattr {name}"), listed.map(|_| names));
            let mut little = [0; 3];
            let listed = rustix::fs::llistxattr(self.path(name), &mut little[..]);
            self.note("listxattr without room", listed);
            for attribute in ["user.a", "user.a", "trusted.b"] {
                let removed = rustix::fs::lremovexattr(self.path(name), attribute);
                self.note(&format!("removexattr {name} {attribute}"), removed);
            }
        }
        for len in [3000, 15_000, 65_536] {
            self.setxattr("xattrs/file", &format!("user.{len}"), &vec![b'v'; len], any);
        }
        let long = format!("user.{}", "n".repeat(250));
        self.setxattr("xattrs/file", &long, b"v", any);
        self.setxattr("xattrs/file", &format!("{long}n"), b"v", any);
    }

    fn access_lists(&mut self) {
        let list = |entries: &[(u16, u16, u32)]| {
            let mut value = 2_u32.to_le_bytes().to_vec();
            for (tag, permissions, id) in entries {
                value.extend(tag.to_le_bytes());
                value.extend(permissions.to_le_bytes());
                value.extend(id.to_le_bytes());
            }
            value
        };
        let none = u32::MAX;
        let extended =
            list(&[(1, 7, none), (2, 5, 1000), (4, 7, none), (0x10, 6, none), (0x20, 1, none)]);
        let plain = list(&[(1, 6, none), (4, 4, none), (0x20, 0, none)]);
        let (access, default) = ("system.posix_acl_access", "system.posix_acl_default");
        let any = XattrFlags::empty();
        self.mkdir("lists", 0o755);
        self.setxattr("lists", access, &extended, any);
        self.setxattr("lists", default, &extended, any);
        self.setxattr("lists", access, b"no list", any);
        self.stat("lists");
        self.mkdir("lists/dir", 0o777);
        self.write("lists/file", b"");
        let made =
            rustix::fs::mknodat(CWD, self.path("lists/fifo"), FileType::Fifo, mode(0o666), 0);
        self.note("mknod", made);
        for name in ["lists/dir", "lists/file", "lists/fifo"] {
            self.stat(name);
            self.getxattr(name, access, 100);
            self.getxattr(name, default, 100);
        }
        let changed = rustix::fs::chmod(self.path("lists/file"), mode(0o640));
        self.note("chmod", changed);
        self.getxattr("lists/file", access, 100);
        self.setxattr("lists/file", access, &plain, any);
        self.stat("lists/file");
        self.getxattr("lists/file", access, 100);
        self.setxattr("lists/file", default, &plain, any);
        let removed = rustix::fs::removexattr(self.path("lists"), default);
        self.note("removexattr", removed);
        self.write("lists/later", b"");
        self.stat("lists/later");
    }

    fn data(&mut self) {
        self.mkdir("data", 0o755);
        let file =
            OpenOptions::new().read(true).write(true).create_new(true).open(self.path("data/file"));
        let file = file.expect("a new file");
        for (at, byte, len) in [(0, 1, 10), (5, 2, 5000), (100_000, 3, 1), (1 << 32, 4, 70_000)] {
            let written = file.write_all_at(&vec![byte; len], at);
            self.note_io(&format!("write at {at}"), written);
        }
        self.stat("data/file");
        for (at, len) in [(0, 6000), (90_000, 20_000), (1 << 32, 100_000), (1 << 40, 5)] {
            let mut bytes = vec![9; len];
            let read = file.read_at(&mut bytes, at);
            let sum = bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>();
            self.note_io(&format!("read at {at}"), read.map(|read| (read, sum)));
        }
        self.note_io("fsync", file.sync_all());
        self.note_io("fdatasync", file.sync_data());
        // While the file may be mapped for writing, our side reports all of it as data.
        drop(file);
        let file = File::open(self.path("data/file")).expect("it is there");
        // The release of the file may reach us a moment after the next request.
        for _ in 0..500 {
            match rustix::fs::seek(&file, SeekFrom::Hole(0)) {
                Ok(hole) if hole > 1 << 32 => std::thread::sleep(Duration::from_millis(10)),
                _ => break,
            }
        }
        for at in [0, 8192, 100_001, 1 << 32, (1 << 32) + 70_000, 1 << 50] {
            let data = rustix::fs::seek(&file, SeekFrom::Data(at));
            self.note(&format!("data after {at}"), data);
            let hole = rustix::fs::seek(&file, SeekFrom::Hole(at));
            self.note(&format!("hole after {at}"), hole);
        }
        let file = OpenOptions::new().write(true).open(self.path("data/file"));
        let file = file.expect("it is there");
        let written = file.write_at(b"x", i64::MAX.cast_unsigned() - 1);
        self.note_io("write at the end of all", written);
        // There the kernel reports an offset behind it.
        let cut = file.set_len(1 << 33);
        self.note_io("truncate", cut);
        self.largest();
        let mut appended = OpenOptions::new()
            .append(true)
            .create(true)
            .open(self.path("data/log"))
            .expect("a file");
        for _ in 0..3 {
            let written = appended.write_all(b"line\n");
            self.note_io("append", written);
        }
        let read = fs::read(self.path("data/log"));
        self.note_io("what was appended", read);
        self.direct();
        let dir = File::open(self.path("data")).and_then(|dir| dir.sync_all());
        self.note_io("fsync of a directory", dir);
        let synced = rustix::fs::syncfs(file.as_fd());
        self.note("syncfs", synced);
    }

    /// Past the page cache, in whole sectors.
    fn direct(&mut self) {
        let flags = i32::try_from(OFlags::DIRECT.bits()).expect("a flag");
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true).custom_flags(flags);
        let file = options.open(self.path("data/direct"));
        let Ok(file) = file else { return self.note_io("open with O_DIRECT", file) };
        let mut space = vec![5_u8; 5 * 4096];
        let start = space.as_ptr().align_offset(4096);
        let sectors = &mut space[start..start + 4 * 4096];
        let written = file.write_all_at(sectors, 0);
        self.note_io("direct write", written);
        let written = file.write_all_at(&sectors[..4096], 1 << 20);
        self.note_io("direct write behind the end", written);
        sectors.fill(0);
        let read = file.read_at(sectors, 4096);
        let read =
            read.map(|read| (read, sectors.iter().map(|&byte| u64::from(byte)).sum::<u64>()));
        self.note_io("direct read", read);
        self.stat("data/direct");
    }

    /// A file as long as any can be is opened for writing.
    fn largest(&mut self) {
        let path = self.path("data/largest");
        let made = File::create(&path).and_then(|file| file.set_len(i64::MAX.cast_unsigned()));
        self.note_io("the largest file", made);
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let Ok(file) = file else { return self.note_io("open of the largest file", file) };
        let written = file.write_at(b"x", 5);
        self.note_io("write", written);
        let appended = OpenOptions::new().append(true).open(&path);
        self.note_io("append", appended.and_then(|mut file| file.write(b"x")));
        self.note_io("truncate", file.set_len(100));
    }

    fn space(&mut self) {
        self.mkdir("space", 0o755);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(self.path("space/file"));
        let file = file.expect("a new file");
        let written = file.write_all_at(&vec![1; 100_000], 0);
        self.note_io("write", written);
        file.sync_all().expect("a sync");
        let keep = FallocateFlags::KEEP_SIZE;
        for (flags, at, len) in [
            (FallocateFlags::empty(), 200_000, 50_000),
            (keep, 1 << 20, 4096),
            (keep | FallocateFlags::PUNCH_HOLE, 10_000, 30_000),
            (FallocateFlags::ZERO_RANGE, 50_000, 10_000),
            (FallocateFlags::ZERO_RANGE, 240_000, 100_000),
            (keep | FallocateFlags::ZERO_RANGE, 300_000, 100_000),
            (FallocateFlags::PUNCH_HOLE, 0, 4096),
            (FallocateFlags::empty(), 0, 0),
            (keep, u64::MAX >> 1, 4096),
        ] {
            let allocated = rustix::fs::fallocate(&file, flags, at, len);
            self.note(&format!("fallocate {flags:?} {at} {len}"), allocated);
            // Before a sync, its allocated size is an estimate.
            file.sync_all().expect("a sync");
            self.stat("space/file");
        }
        let mut bytes = vec![0; 400_000];
        let read = file.read_at(&mut bytes, 0);
        let sum = bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>();
        self.note_io("what is read", read.map(|read| (read, sum)));
        let sizes = rustix::fs::statvfs(self.root);
        self.note("statvfs", sizes.map(|s| (s.f_bsize, s.f_frsize, s.f_namemax, s.f_files)));
    }

    fn copies(&mut self) {
        self.mkdir("copies", 0o755);
        let bytes: Vec<u8> = (0..300_000_u32).map(|n| n.to_le_bytes()[1]).collect();
        self.write("copies/from", &bytes);
        let from = File::open(self.path("copies/from")).expect("it opens");
        let to =
            OpenOptions::new().read(true).write(true).create_new(true).open(self.path("copies/to"));
        let to = to.expect("a new file");
        for (at, into, len) in
            [(0, 0, 300_000), (5, 400_000, 100), (299_000, 8192, 5000), (1 << 30, 0, 5)]
        {
            let (mut at, mut into) = (at, into);
            let copied =
                rustix::fs::copy_file_range(&from, Some(&mut at), &to, Some(&mut into), len);
            self.note(&format!("copy_file_range {at} {into} {len}"), copied);
        }
        let (mut at, mut into) = (0, 100);
        let copied = rustix::fs::copy_file_range(&to, Some(&mut at), &to, Some(&mut into), 1000);
        self.note("copy_file_range onto itself", copied);
        let read = fs::read(self.path("copies/to"));
        self.note_io(
            "the copy",
            read.map(|read| (read.len(), read.iter().map(|&b| u64::from(b)).sum::<u64>())),
        );
    }

    /// Files that have lost their last name and are still open.
    fn unlinked(&mut self) {
        self.mkdir("unlinked", 0o755);
        for (name, how) in [("file", "open"), ("replaced", "replaced"), ("path", "O_PATH")] {
            let name = format!("unlinked/{name}");
            self.write(&name, b"of before");
            let flags = if how == "O_PATH" { OFlags::PATH } else { OFlags::RDWR };
            let file = rustix::fs::open(self.path(&name), flags, Mode::empty()).expect("it opens");
            if how == "replaced" {
                self.write("unlinked/new", b"of after");
                self.rename("unlinked/new", &name, RenameFlags::empty());
            } else {
                let removed = fs::remove_file(self.path(&name));
                self.note_io("unlink", removed);
            }
            let stat = rustix::fs::fstat(&file).map(|stat| (stat.st_nlink, stat.st_size));
            self.note(&format!("fstat of what is {how}"), stat);
            let mut bytes = [0; 100];
            let read = rustix::io::pread(&file, &mut bytes, 0);
            self.note("read", read.map(|len| bytes[..len].to_vec()));
            let written = rustix::io::pwrite(&file, b"more", 5);
            self.note("write", written);
            let changed = rustix::fs::fchmod(&file, mode(0o604));
            self.note("fchmod", changed);
            let stat = rustix::fs::fstat(&file).map(|stat| (stat.st_mode, stat.st_size));
            self.note("fstat", stat);
        }
        self.mkdir("unlinked/dir", 0o755);
        let dir = File::open(self.path("unlinked/dir")).expect("it opens");
        let removed = fs::remove_dir(self.path("unlinked/dir"));
        self.note_io("rmdir", removed);
        let stat = rustix::fs::fstat(&dir).map(|stat| (stat.st_mode, stat.st_size));
        self.note("fstat of a directory", stat);
        let made = rustix::fs::mkdirat(&dir, "below", mode(0o755));
        self.note("mkdirat in it", made);
        let listed = rustix::fs::Dir::read_from(&dir).map(|listing| listing.flatten().count());
        self.note("its entries", listed);
        let made =
            rustix::fs::mknodat(CWD, self.path("unlinked/fifo"), FileType::Fifo, mode(0o600), 0);
        self.note("mknod", made);
        let fifo = rustix::fs::open(self.path("unlinked/fifo"), OFlags::RDWR, Mode::empty())
            .expect("it opens");
        let removed = fs::remove_file(self.path("unlinked/fifo"));
        self.note_io("unlink", removed);
        let changed = rustix::fs::fchmod(&fifo, mode(0o640));
        self.note("fchmod of a fifo", changed);
        let stat = rustix::fs::fstat(&fifo).map(|stat| (stat.st_mode, stat.st_nlink));
        self.note("fstat of a fifo", stat);
    }

    fn unnamed(&mut self) {
        self.mkdir("unnamed", 0o755);
        for (flags, name) in [(OFlags::empty(), "one"), (OFlags::EXCL, "other")] {
            let flags = OFlags::TMPFILE | OFlags::RDWR | flags;
            let file = rustix::fs::open(self.path("unnamed"), flags, mode(0o640));
            let Ok(file) = file else { return self.note("open with O_TMPFILE", file) };
            let written = rustix::io::pwrite(&file, b"contents", 0);
            self.note("write", written);
            let stat =
                rustix::fs::fstat(&file).map(|stat| (stat.st_mode, stat.st_nlink, stat.st_size));
            self.note("fstat", stat);
            let path = self.path(&format!("unnamed/{name}"));
            let linked = rustix::fs::linkat(&file, "", CWD, &path, AtFlags::EMPTY_PATH);
            self.note(&format!("linkat {name}"), linked);
            let stat = rustix::fs::fstat(&file).map(|stat| stat.st_nlink);
            self.note("fstat", stat);
        }
    }

    fn special(&mut self) {
        self.mkdir("special", 0o755);
        for (name, file_type, device) in [
            ("fifo", FileType::Fifo, 0),
            ("socket", FileType::Socket, 0),
            ("char", FileType::CharacterDevice, rustix::fs::makedev(1, 3)),
            ("block", FileType::BlockDevice, rustix::fs::makedev(259, 70_000)),
            ("file", FileType::RegularFile, 0),
        ] {
            let name = format!("special/{name}");
            let made = rustix::fs::mknodat(CWD, self.path(&name), file_type, mode(0o640), device);
            self.note(&format!("mknod {name}"), made);
            self.stat(&name);
        }
        let listener = std::os::unix::net::UnixListener::bind(self.path("special/bound"));
        self.note_io("bind", listener.map(drop));
        self.stat("special/bound");
    }

    fn listings(&mut self) {
        self.mkdir("listings", 0o755);
        for number in 0..3000 {
            File::create(self.path(&format!("listings/file-with-a-name-{number}")))
                .expect("a file");
        }
        let count = |path: PathBuf| fs::read_dir(path).map(Iterator::count);
        let listed = count(self.path("listings"));
        self.note_io("entries", listed);
        // The directory shrinks while it is read: each remaining entry is shown once.
        let mut shown = Vec::new();
        for entry in fs::read_dir(self.path("listings")).expect("it is listed") {
            let entry = entry.expect("an entry");
            shown.push(entry.file_name());
            fs::remove_file(entry.path()).expect("it is there");
        }
        self.said.push(format!("shown {}", shown.len()));
        shown.sort();
        shown.dedup();
        self.said.push(format!("of them different {}", shown.len()));
        let listed = count(self.path("listings"));
        self.note_io("entries left", listed);
        // Each entry is moved away and back while the directory is read, and is shown once.
        for number in 0..2000 {
            File::create(self.path(&format!("listings/{number}"))).expect("a file");
        }
        let mut shown = Vec::new();
        for entry in fs::read_dir(self.path("listings")).expect("it is listed").take(10_000) {
            let entry = entry.expect("an entry");
            let (name, away) = (entry.path(), self.path("listings/away"));
            fs::rename(&name, &away).and_then(|()| fs::rename(&away, &name)).expect("it is there");
            shown.push(entry.file_name());
        }
        self.said.push(format!("shown while they were moved {}", shown.len()));
        shown.sort();
        shown.dedup();
        self.said.push(format!("of them different {}", shown.len()));
        // `..` is the parent.
        let up = self.path("listings/..").metadata().map(|m| m.ino());
        let root = self.root.metadata().map(|m| m.ino());
        let is_root = up.ok() == root.ok();
        self.said.push(format!("the parent is the root: {is_root}"));
    }

    /// Sets times to the current time and to given times.
    fn touch(&mut self, name: &str) {
        use rustix::fs::{UTIME_NOW, UTIME_OMIT};
        const EARLY: i64 = 1_000_000_000;
        let time = |tv_nsec| Timespec { tv_sec: EARLY, tv_nsec };
        for [accessed, modified] in [
            [7, 8],
            [UTIME_NOW, UTIME_NOW],
            [UTIME_NOW, UTIME_OMIT],
            [UTIME_OMIT, UTIME_NOW],
            [7, UTIME_NOW],
        ] {
            let times =
                Timestamps { last_access: time(accessed), last_modification: time(modified) };
            let changed = rustix::fs::utimensat(CWD, self.path(name), &times, AtFlags::empty());
            self.note(&format!("utimens {accessed} {modified}"), changed);
            let stat = rustix::fs::lstat(self.path(name));
            self.note("new times", stat.map(|s| (s.st_atime > EARLY, s.st_mtime > EARLY)));
        }
        let changed = rustix::fs::chmod(self.path(name), mode(0o644));
        self.note("chmod", changed);
        self.note_io(
            "truncate",
            OpenOptions::new().write(true).truncate(true).open(self.path(name)).map(drop),
        );
    }

    fn flags(&mut self) {
        use rustix::fs::IFlags;
        self.mkdir("flags", 0o755);
        self.write("flags/file", b"data");
        for flags in
            [IFlags::NOATIME | IFlags::NODUMP, IFlags::APPEND, IFlags::IMMUTABLE, IFlags::empty()]
        {
            let file = File::open(self.path("flags/file")).expect("it opens");
            // The kernel caches the change time, and its own clock has steps of 10 ms at most.
            let since = fs::metadata(self.path("flags/file")).expect("it is there");
            std::thread::sleep(Duration::from_millis(20));
            let set = rustix::fs::ioctl_setflags(&file, flags);
            self.note(&format!("setflags {flags:?}"), set);
            let now = fs::metadata(self.path("flags/file")).expect("it is there");
            let [since, now] = [since, now].map(|stat| (stat.ctime(), stat.ctime_nsec()));
            self.note_io("a later change time", Ok(now > since));
            let got = rustix::fs::ioctl_getflags(&file);
            self.note("getflags", got);
            self.touch("flags/file");
            for append in [false, true] {
                let opened =
                    OpenOptions::new().write(true).append(append).open(self.path("flags/file"));
                self.note_io(&format!("open for writing, appending: {append}"), opened.map(drop));
            }
        }
    }
}
