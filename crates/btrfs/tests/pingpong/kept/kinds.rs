//! The kinds of files that the kernel makes.

use std::fs::File;
use std::io::{ErrorKind, Result};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use offshoot_testkit::random::Random;
use rustix::fs::{
    FallocateFlags, IFlags, XattrFlags, copy_file_range, fallocate, fsetxattr, ioctl_getflags,
    ioctl_setflags, setxattr,
};
use rustix::io::Errno;

use super::{KIB, PROPERTY, access_list};

/// A kind of file: its name, the directory in which it is made (and from which it inherits), and
/// how the kernel makes it. The same function changes an existing file.
pub(super) struct KernelFileKind {
    pub(super) name: &'static str,
    pub(super) dir: &'static str,
    pub(super) make: fn(&Path, &File),
}

const fn kind(name: &'static str, make: fn(&Path, &File)) -> KernelFileKind {
    KernelFileKind { name, dir: ".", make }
}

const fn inherited(name: &'static str, dir: &'static str) -> KernelFileKind {
    KernelFileKind { name, dir, make: |_, file| write(file, 0, &text(90_000)) }
}

/// A directory: its name, and how the kernel prepares it.
type Dir = (&'static str, fn(&Path));

/// The directories that new files inherit from.
pub(super) const DIRS: [Dir; 4] = [
    ("with-list", |dir| {
        let set = setxattr(dir, "system.posix_acl_default", &access_list(), XattrFlags::empty());
        set.expect("a default list");
    }),
    ("with-property", |dir| {
        setxattr(dir, PROPERTY, b"lzo", XattrFlags::empty()).expect("a property");
    }),
    ("without-cow", |dir| {
        let dir = File::open(dir).expect("a directory");
        ioctl_setflags(dir, IFlags::NOCOW).expect("chattr +C");
    }),
    ("with-flags", |dir| {
        let dir = File::open(dir).expect("a directory");
        let flags = IFlags::COMPRESSED | IFlags::NOATIME | IFlags::DIRSYNC | IFlags::NODUMP;
        ioctl_setflags(dir, flags).expect("chattr +cADd");
    }),
];

/// The kernel makes them with a mount that compresses what is worth it and keeps up to a sector
/// inline.
pub(super) const KINDS: [KernelFileKind; 29] = [
    kind("empty", |_, _| {}),
    kind("inline", |_, file| write(file, 0, &bytes(100))),
    kind("inline_compressed", |_, file| write(file, 0, &text(3000))),
    kind("inline_before_others", |_, file| {
        write(file, 0, &bytes(46));
        file.sync_all().expect("sync");
        write(file, 200 * KIB, &bytes(9000));
    }),
    kind("plain", |_, file| write(file, 0, &bytes(100_000))),
    kind("several", |_, file| {
        for piece in 0..20 {
            write(file, piece * 7000, &bytes(7000));
            file.sync_all().expect("sync");
        }
    }),
    kind("compressed", |_, file| write(file, 0, &text(300_001))),
    kind("compressed_overwritten", |_, file| {
        write(file, 0, &text(300_000));
        file.sync_all().expect("sync");
        write(file, 40_000, &bytes(10_000));
    }),
    kind("compressed_cut", |_, file| {
        write(file, 0, &text(300_000));
        file.sync_all().expect("sync");
        file.set_len(70_001).expect("a shorter file");
    }),
    kind("without_cow", |_, file| {
        unless_contradicted(file, ioctl_setflags(file, IFlags::NOCOW));
        write(file, 0, &text(100_001));
    }),
    kind("preallocated", |_, file| allocate(file, FallocateFlags::empty(), 0, 256 * KIB)),
    kind("preallocated_in_part", |_, file| {
        allocate(file, FallocateFlags::empty(), 0, 256 * KIB);
        write(file, 8 * KIB, &bytes(30_000));
        write(file, 200_000, &bytes(10));
    }),
    kind("preallocated_behind", |_, file| {
        write(file, 0, &bytes(5000));
        allocate(file, FallocateFlags::KEEP_SIZE, 0, 1024 * KIB);
    }),
    kind("islands_behind", |_, file| {
        write(file, 0, &bytes(5000));
        for island in 1..10 {
            allocate(file, FallocateFlags::KEEP_SIZE, island * 100 * KIB, island * 4 * KIB);
        }
    }),
    // The bytes that were cut off are still in the extent.
    kind("cut_within_a_sector", |_, file| {
        write(file, 0, &bytes(4207));
        file.sync_all().expect("sync");
        file.set_len(500).expect("a shorter file");
    }),
    kind("punched", |_, file| {
        write(file, 0, &bytes(200_000));
        file.sync_all().expect("sync");
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        allocate(file, punch, 10_001, 50_000);
        allocate(file, punch, 16 * KIB * 5, 4 * KIB);
    }),
    kind("cloned_to_itself", |_, file| {
        write(file, 0, &bytes(64 << 10));
        clone(file, 16 * KIB, 4 * KIB, 100 * KIB);
        clone(file, 16 * KIB, 20 * KIB, 200 * KIB);
        clone(file, 8 * KIB, 8 * KIB, 0);
    }),
    kind("compressed_and_cloned", |_, file| {
        write(file, 0, &text(256 << 10));
        file.sync_all().expect("sync");
        clone(file, 16 * KIB, 36 * KIB, 300 * KIB);
        clone(file, 130 * KIB, 0, 400 * KIB);
    }),
    kind("with_attributes", |_, file| {
        write(file, 0, &bytes(6000));
        let set = |name, value: &[u8]| fsetxattr(file, name, value, XattrFlags::empty());
        set("user.short", b"of the kernel").expect("an attribute");
        set("user.long", &bytes(1500)).expect("an attribute");
        set("system.posix_acl_access", &access_list()).expect("a list");
    }),
    kind("with_attributes_of_root", |_, file| {
        write(file, 0, &text(6000));
        let set = |name, value: &[u8]| fsetxattr(file, name, value, XattrFlags::empty());
        set("security.kind", b"of the kernel").expect("an attribute");
        set("trusted.kind", &bytes(900)).expect("an attribute");
    }),
    kind("with_many_links", link_often),
    kind("compressed_by_flag", |_, file| {
        unless_contradicted(file, ioctl_setflags(file, IFlags::COMPRESSED));
        write(file, 0, &text(90_000));
    }),
    kind("compressed_by_property", |_, file| {
        unless_contradicted(file, fsetxattr(file, PROPERTY, b"lzo", XattrFlags::empty()));
        write(file, 4 * KIB, &text(90_000));
    }),
    kind("append_only", |_, file| {
        write(file, 0, &text(10_000));
        ioctl_setflags(file, IFlags::APPEND | IFlags::NODUMP).expect("chattr +ad");
    }),
    kind("immutable", |_, file| {
        write(file, 0, &bytes(50_000));
        ioctl_setflags(file, IFlags::IMMUTABLE).expect("chattr +i");
    }),
    inherited("list_of_its_directory", "with-list"),
    inherited("property_of_its_directory", "with-property"),
    inherited("without_cow_by_its_directory", "without-cow"),
    inherited("flags_of_its_directory", "with-flags"),
];

pub(super) fn bytes(len: usize) -> Vec<u8> {
    Random::new(len as u64).bytes(len)
}

pub(super) fn text(len: usize) -> Vec<u8> {
    Random::new(len as u64).text(len)
}

fn write(file: &File, offset: u64, data: &[u8]) {
    file.write_all_at(data, offset).expect("there is room");
}

fn allocate(file: &File, flags: FallocateFlags, offset: u64, len: u64) {
    fallocate(file, flags, offset, len).expect("fallocate");
}

fn clone(file: &File, len: u64, mut from: u64, mut to: u64) {
    let len = usize::try_from(len).expect("small");
    copy_file_range(file, Some(&mut from), file, Some(&mut to), len).expect("a clone");
}

/// Ignores the kernel's refusal of a flag that contradicts the file: a file that is written in
/// place or has no checksums cannot be compressed.
fn unless_contradicted(file: &File, done: rustix::io::Result<()>) {
    match done {
        Ok(()) | Err(Errno::INVAL) => {}
        Err(error) => panic!("{file:?}: {error}"),
    }
}

/// Gives a new file more names than a reference item holds, if there are extended ones, and any
/// other file a few more.
fn link_often(path: &Path, file: &File) {
    let attr = file.metadata().expect("its attributes");
    write(file, 0, &text(5000));
    let dir = path.parent().expect("it is in a directory").join("links");
    match std::fs::create_dir(&dir) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => panic!("{error}"),
        _ => {}
    }
    let name = |number: u32| dir.join(format!("{}-{number:0>240}", attr.ino()));
    let link = |number| -> Result<()> { std::fs::hard_link(path, name(number)) };
    for number in 0..if attr.len() == 0 { 70 } else { 5 } {
        match link(number) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) if error.kind() == ErrorKind::TooManyLinks => {
                // Room for one more name must stay.
                std::fs::remove_file(name(number - 1)).expect("it was made");
                return;
            }
            Err(error) => panic!("{}: {error}", path.display()),
        }
    }
}

/// Clears the flags that forbid changes.
pub(super) fn unlock(path: &Path) {
    let file = File::open(path).expect("it is there");
    let flags = ioctl_getflags(&file).expect("its flags");
    let locks = IFlags::APPEND | IFlags::IMMUTABLE;
    if flags.intersects(locks) {
        ioctl_setflags(&file, flags - locks).expect("chattr -ai");
    }
}
