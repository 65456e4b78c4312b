//! What the kernel writes into an XFS volume before we read it.
//!
//! [`everything`] fills a mounted volume with all the shapes that a reader has to understand. Each
//! family of shapes has a directory: those of [`fill`](crate::fill), and these:
//!
//! | directory | holds |
//! |---|---|
//! | `collisions` | names of one hash, more than a block of hashes holds |
//! | `directories` | short, block, leaf and node forms, before and after removals |
//! | `attributes` | short, leaf, node and btree forms, values in blocks of their own |
//! | `extents` | files with thousands of extents: written, unwritten, shared |
//! | `inodes` | flags, project ids, extent size hints, freed inodes |
//! | `sizes` | sizes up to the largest |
//! | `sparse` | free space in which no whole chunk of inodes fits |

use std::ffi::OsStr;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{CWD, FallocateFlags, FileType, IFlags, Mode, XattrFlags, fallocate, makedev};
use rustix::io::Errno;

use crate::fill::shapes::{create, put};
use crate::fill::{data, directory, names, shapes, special, sync, write, xattrs};
use crate::random::Random;
use crate::xfs::disk::XfsDisk;

/// The least number of names that [`everything`] makes.
pub const EVERYTHING_AT_LEAST: u64 = 16_000;

/// The least number of names that [`some`] makes.
pub const SOME_AT_LEAST: u64 = 4000;

/// What decides how a volume stores things.
#[derive(Clone, Debug)]
pub struct XfsFillShape {
    /// The size of a block in bytes.
    pub block_bytes: u64,
    /// The size of an inode in bytes.
    pub inode_bytes: u64,
    /// The features that `xfs_db` names.
    pub features: String,
}

impl XfsFillShape {
    /// That of a volume.
    #[must_use]
    pub fn of(disk: &XfsDisk) -> Self {
        Self {
            block_bytes: disk.field(&["sb 0"], "blocksize"),
            inode_bytes: disk.field(&["sb 0"], "inodesize"),
            features: disk.xfs_db(&["version"]),
        }
    }

    /// Whether the volume has the feature with this name, such as `REFLINK`.
    #[must_use]
    pub fn has(&self, feature: &str) -> bool {
        self.features.trim().rsplit([',', ' ']).any(|name| name == feature)
    }
}

/// Fills the volume of `disk`, which is mounted at `root`, with one of everything.
pub fn everything(root: &Path, disk: &XfsDisk, shape: &XfsFillShape, seed: u64) {
    let mut random = Random::new(seed);
    names::fill(&directory(root, "names"));
    names::hard_links(&directory(root, "links"));
    data::files(&directory(root, "data"));
    shapes::unshared(&directory(root, "shapes"));
    if shape.has("REFLINK") {
        shapes::clones(&directory(root, "clones"));
    }
    special::fill(&directory(root, "special"));
    special::times(&directory(root, "times"));
    xattrs::fill(&directory(root, "xattrs"));
    names::deep(&directory(root, "deep"));
    collisions(&directory(root, "collisions"));
    directories(&directory(root, "directories"), &DIRECTORY_SIZES, &mut random);
    attributes(&directory(root, "attributes"), shape, &mut random);
    extents(&directory(root, "extents"), shape, &mut random);
    inodes(&directory(root, "inodes"), disk, shape);
    sizes(&directory(root, "sizes"));
    sparse(&directory(root, "sparse"), shape);
    sync(root);
}

/// Fills a directory with what a list of `mkfs.xfs` can name: names, contents, links. No file has
/// two names.
pub fn some(root: &Path, seed: u64) {
    let mut random = Random::new(seed);
    data::files(&directory(root, "data"));
    for (number, len) in [1, 40, 80, 200, 500, 1023].into_iter().enumerate() {
        let link = root.join(format!("symlink-{number}"));
        std::os::unix::fs::symlink("t".repeat(len), link).expect("a symbolic link");
    }
    let nodes = [
        ("fifo", FileType::Fifo, 0),
        ("char", FileType::CharacterDevice, makedev(1, 3)),
        ("block", FileType::BlockDevice, makedev(300, 70_000)),
    ];
    for (name, file_type, device) in nodes {
        let mode = Mode::from_raw_mode(0o640);
        rustix::fs::mknodat(CWD, root.join(name), file_type, mode, device).expect("a node");
    }
    let dir = directory(root, "directories");
    for entries in [0, 3, 20, 60, 300, 4000] {
        let dir = directory(&dir, &format!("of-{entries}"));
        for number in 0..entries {
            write(&dir.join(name(number, &mut random)), b"");
        }
    }
    let dir = directory(root, "attributes");
    for (count, len) in [(1, 5), (4, 10), (40, 60)] {
        let file = dir.join(format!("of-{count}"));
        write(&file, b"attributes");
        (0..count).for_each(|number| {
            set(&file, &format!("user.number.{number}"), &vec![b'v'; len]);
        });
    }
    sync(root);
}

fn set(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::lsetxattr(path, name, value, XattrFlags::empty())
        .unwrap_or_else(|error| panic!("{name} of {}: {error}", path.display()));
}

/// `count` names of `len` bytes with one hash.
///
/// The hash takes four bytes a step: `a << 21 ^ b << 14 ^ c << 7 ^ d`. So bit 0 of `c` and bit 7 of
/// `d` both change bit 7 of the hash, and changing both changes nothing.
#[must_use]
pub fn colliding(len: usize, count: usize) -> Vec<Vec<u8>> {
    let groups = len / 4;
    assert!(count <= 1 << groups.min(20), "{len} bytes have too few names of one hash");
    let name = |number: usize| {
        let mut name: Vec<u8> = (0..len).map(|at| b"abcd"[at % 4]).collect();
        for group in (0..groups).filter(|group| number >> group & 1 == 1) {
            name[group * 4 + 2] ^= 1;
            name[group * 4 + 3] ^= 0x80;
        }
        name
    };
    (0..count).map(name).collect()
}

fn collisions(dir: &Path) {
    for (len, count) in [(8, 4), (24, 60), (40, 700), (255, 50)] {
        let dir = directory(dir, &format!("of-{len}"));
        let file = dir.join("file");
        write(&file, b"one hash");
        for name in colliding(len, count) {
            std::fs::hard_link(&file, dir.join(OsStr::from_bytes(&name))).expect("a hard link");
        }
    }
    let file = dir.join("attributes");
    write(&file, b"");
    for (number, name) in colliding(40, 80).iter().enumerate() {
        let name = [b"user.", name.as_slice()].concat();
        let len = if number % 7 == 0 { 3000 } else { 20 };
        rustix::fs::lsetxattr(&file, name, &vec![b'c'; len], XattrFlags::empty())
            .expect("an attribute");
    }
}

/// How many entries directories have. Whatever the size of blocks, they take each form.
const DIRECTORY_SIZES: [u32; 10] = [0, 1, 4, 20, 60, 150, 700, 2500, 12_000, 1600];

/// A name of up to 60 bytes.
fn name(number: u32, random: &mut Random) -> String {
    let pad = usize::try_from(random.below(50)).expect("small");
    format!("{number:06}{}", "n".repeat(pad))
}

fn directories(dir: &Path, sizes: &[u32], random: &mut Random) {
    for (index, &entries) in sizes.iter().enumerate() {
        let dir = directory(dir, &format!("of-{entries}"));
        let file = dir.join("file");
        write(&file, b"one of many names");
        let mut made = Vec::new();
        for number in 0..entries {
            let path = dir.join(name(number, random));
            match number % 32 {
                7 => std::fs::create_dir(&path).expect("a directory"),
                13 => std::os::unix::fs::symlink("nowhere", &path).expect("a symbolic link"),
                _ => std::fs::hard_link(&file, &path).expect("a hard link"),
            }
            if number % 32 != 7 {
                made.push(path);
            }
        }
        // Every other directory has gaps, and some whole blocks are free again.
        if index % 2 == 1 {
            let middle = made.len() / 4..made.len() / 2;
            let is_removed = |&(at, _): &(usize, _)| at % 3 == 0 || middle.contains(&at);
            for (_, path) in made.iter().enumerate().filter(is_removed) {
                std::fs::remove_file(path).expect("a name goes");
            }
        }
    }
}

fn attributes(dir: &Path, shape: &XfsFillShape, random: &mut Random) {
    for count in [1, 3, 12, 60, 400, 3000] {
        let file = dir.join(format!("of-{count}"));
        write(&file, b"attributes");
        for number in 0..count {
            let len = usize::try_from(random.below(100)).expect("small");
            let namespace = ["user", "trusted", "security"][number % 3];
            set(&file, &format!("{namespace}.number.{number}"), &random.bytes(len));
        }
        for number in (0..count).filter(|number| count > 3 && number % 5 == 0) {
            let namespace = ["user", "trusted", "security"][number % 3];
            let name = format!("{namespace}.number.{number}");
            rustix::fs::lremovexattr(&file, name).expect("an attribute goes");
        }
    }
    for len in [0, 1, 200, 255, 256, 700, 1500, 3000, 4096, 9000, 40_000, 65_536] {
        let file = dir.join(format!("value-{len}"));
        write(&file, b"a value");
        set(&file, "user.value", &random.bytes(len));
        set(&file, "user.small", b"small");
    }
    // Two files whose values lie between each other, so that neither has long extents.
    let len = usize::try_from((shape.block_bytes * 2 + 100).min(60_000)).expect("small");
    let both = ["fragmented", "also-fragmented"].map(|name| dir.join(name));
    for file in &both {
        write(file, b"");
    }
    for number in 0..120 {
        for file in &both {
            set(file, &format!("user.number.{number}"), &random.bytes(len));
        }
    }
}

/// The most bytes that the extents of one file take.
const SCATTERED_BYTES: u64 = 40 << 20;

fn extents(dir: &Path, shape: &XfsFillShape, random: &mut Random) {
    let block = shape.block_bytes;
    let count = (SCATTERED_BYTES / block).min(5000);
    let bytes = random.bytes(usize::try_from(block).expect("a block fits memory"));
    let scattered = create(dir, "scattered");
    for number in 0..count {
        // The number in each block keeps extents apart from each other.
        let text = [&number.to_be_bytes(), &bytes[8..]].concat();
        put(&scattered, number * 2 * block, &text);
    }
    // Written and unwritten extents by turns.
    let unwritten = create(dir, "unwritten");
    fallocate(&unwritten, FallocateFlags::empty(), 0, count * 2 * block).expect("room");
    sync(dir);
    for number in 0..count {
        let len = usize::try_from(1 + number % block).expect("at most a block");
        put(&unwritten, number * 2 * block, &bytes[..len]);
    }
    for few in 1..30 {
        let file = create(dir, &format!("few-{few}"));
        (0..few).for_each(|number| put(&file, number * 2 * block, &bytes[..10]));
    }
    sync(dir);
    if shape.has("REFLINK") {
        for name in ["shared", "shared-and-written"] {
            rustix::fs::ioctl_ficlone(create(dir, name), &scattered).expect("a clone");
        }
        sync(dir);
        let written = File::options().write(true).open(dir.join("shared-and-written"));
        let written = written.expect("it opens");
        for number in (0..count).step_by(3) {
            put(&written, number * 2 * block, &bytes[..100]);
        }
        sync(dir);
    }
}

fn inodes(dir: &Path, disk: &XfsDisk, shape: &XfsFillShape) {
    let hints = |name: &str, commands: &[&str]| {
        let path = dir.join(name);
        write(&path, b"hints");
        disk.xfs_io(&path, commands);
    };
    hints("project", &["chproj 7"]);
    hints("project-large", &["chproj 4000000000"]);
    hints("extent-size", &["truncate 0", "extsize 128k", "pwrite -q 0 10k"]);
    if shape.has("REFLINK") {
        hints("cow-extent-size", &["cowextsize 128k"]);
    }
    let inherits = directory(dir, "inherits");
    disk.xfs_io(&inherits, &["chproj 70000", "chattr +P", "extsize 128k"]);
    write(&inherits.join("file"), b"inherits");
    std::fs::create_dir(inherits.join("directory")).expect("a directory");
    let flags = [
        ("no-dump", IFlags::NODUMP),
        ("no-atime", IFlags::NOATIME),
        ("sync", IFlags::SYNC),
        ("append-only", IFlags::APPEND),
        ("immutable", IFlags::IMMUTABLE),
    ];
    for (name, flag) in flags {
        let path = dir.join(name);
        write(&path, b"flags");
        let file = File::open(&path).expect("it opens");
        let before = rustix::fs::ioctl_getflags(&file).expect("flags");
        rustix::fs::ioctl_setflags(&file, before | flag).expect("the flag is taken");
    }
    let freed = directory(dir, "freed");
    let path = |number: u32| freed.join(format!("file-{number}"));
    (0..600).for_each(|number| write(&path(number), b"freed"));
    sync(dir);
    for number in (0..600).filter(|number| number % 64 > 1 && number % 5 != 0 || *number < 200) {
        std::fs::remove_file(path(number)).expect("a file goes");
    }
}

fn sizes(dir: &Path) {
    for bits in [31, 32, 40, 53, 62] {
        let file = create(dir, &format!("two-to-{bits}"));
        put(&file, 0, b"start");
        put(&file, (1 << bits) - 3000, &[7; 4000]);
    }
    create(dir, "largest").set_len(i64::MAX.unsigned_abs()).expect("a size");
}

/// The most free space that [`sparse`] cuts to pieces, in bytes.
const CUT_BYTES: u64 = 2 << 30;

/// Takes all free space and gives it back in pieces that are one block smaller than a chunk of
/// inodes. Then it makes files, which take parts of chunks, until the kernel finds no piece: it
/// needs a whole one without sparse inodes, and a few blocks more if it has to fill the AGFL too.
fn sparse(dir: &Path, shape: &XfsFillShape) {
    let free = rustix::fs::statvfs(dir).expect("the volume says what is free");
    if free.f_bavail * free.f_frsize > CUT_BYTES {
        return;
    }
    let file = create(dir, "filler");
    let mut at = 0;
    let mut step = 64 << 20;
    while step >= shape.block_bytes {
        match fallocate(&file, FallocateFlags::empty(), at, step) {
            Ok(()) => at += step,
            Err(Errno::NOSPC) => step /= 2,
            Err(error) => panic!("a filler: {error}"),
        }
    }
    let chunk = (64 * shape.inode_bytes).max(2 * shape.block_bytes);
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for hole in (0..at - chunk).step_by(usize::try_from(2 * chunk).expect("small")) {
        let punched = || fallocate(&file, punch, hole, chunk - shape.block_bytes);
        // A hole may take a block for the tree of extents, and freed blocks can be taken only when
        // the log has them.
        let hole = punched().or_else(|error| match error {
            Errno::NOSPC => {
                sync(dir);
                punched()
            }
            other => Err(other),
        });
        hole.expect("a hole");
    }
    sync(dir);
    // The kernel holds back up to 8 % of the volume. That space is in one piece, and could be taken
    // now that other space is free.
    let rest = create(dir, "rest");
    for at in (0..at / 8).step_by(usize::try_from(chunk).expect("small")) {
        fallocate(&rest, FallocateFlags::empty(), at, chunk).expect("the pieces are free");
    }
    for number in 0..1500 {
        match File::create_new(dir.join(format!("file-{number}"))) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::StorageFull => return,
            Err(error) => panic!("file-{number}: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The hash of a name whose length is a multiple of four.
    fn hash(name: &[u8]) -> u32 {
        name.chunks_exact(4).fold(0, |hash, bytes| {
            let [a, b, c, d] = [0, 1, 2, 3].map(|at| u32::from(bytes[at]));
            a << 21 ^ b << 14 ^ c << 7 ^ d ^ hash.rotate_left(28)
        })
    }

    #[test]
    fn colliding_names_differ() {
        let names: std::collections::HashSet<_> = colliding(40, 700).into_iter().collect();
        assert_eq!(names.len(), 700);
        for name in &names {
            assert!(!name.contains(&b'/') && !name.contains(&0));
            assert_eq!(hash(name), hash(&colliding(40, 1)[0]));
        }
    }
}
