//! How often operations take the locks that all threads share.
//!
//! On many cores these locks are the limit, and a machine with few cores does not show it. So this
//! counts them. A change that takes one more of them in an operation fails here, and so does one
//! that takes one less, which then lowers the number. A lock that is spread over lanes or files is
//! not here, unless a thread takes all of it. The lock of a root is that of one tree.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{EntryPlace, FileId, FileSystem as _, FileSystemMut as _, NewFile, Timestamp};

use crate::shared::taken_by;
use crate::test_volumes::bare;
use crate::{BtrfsVolume, EngineOptions, Filesystem, SubvolumeId};

const AT: Timestamp = Timestamp { secs: 1, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };

/// So many files make a tree of three levels in nodes of 4 KiB.
const FILES: usize = 2000;

/// The data of each file: one extent.
const FILE_BYTES: usize = 8192;

/// What operations take.
const TAKEN: &str = "\
lookup: root 2
getattr: root 2
read 4 KiB: chunks 1, root 6
fsync of nothing: root 3, superblock 1
first write of a file: line 2, root 4
second write: line 2, root 4
fsync: chunks 3, groups 8, line 4, log changing 15, log writing 1, root 54, superblock 2
create: line 1, root 3
unlink: groups 3, line 1, root 17
insert with copies: groups 3, root 4
insert: root 1
";

/// The rows of [`TAKEN`], as they are counted.
#[derive(Default)]
struct LockTable(String);

impl LockTable {
    fn count<T>(&mut self, operation: &str, work: impl FnOnce() -> T) -> T {
        let (taken, result): (BTreeMap<_, _>, T) = taken_by(work);
        let row: Vec<_> = taken.iter().map(|(name, count)| format!("{name} {count}")).collect();
        writeln!(self.0, "{operation}: {}", row.join(", ")).expect("a string takes it");
        result
    }
}

fn name(number: usize) -> String {
    format!("file-{number}")
}

fn top<'n>(fs: &Filesystem, name: &'n str) -> EntryPlace<'n> {
    EntryPlace { dir: fs.root(), name: name.as_bytes() }
}

/// A committed volume whose top level has files in a tree of three levels.
fn filled() -> (Filesystem, Vec<FileId>) {
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(vec![bare(4096)], &options).expect("it opens");
    let fs = volume.filesystem(SubvolumeId::FS).expect("it has a top level");
    let make = |number| {
        let file = fs.create(top(&fs, &name(number)), &NEW).expect("there is room");
        fs.write(file, 0, &[7; FILE_BYTES], AT).expect("there is room");
        file
    };
    let files = (0..FILES).map(make).collect();
    // Twice, so that all blocks are committed ones and in the cache.
    for _ in 0..2 {
        fs.sync().expect("a commit");
        fs.unlink(top(&fs, &name(0)), AT).expect("it is there");
        fs.create(top(&fs, &name(0)), &NEW).expect("there is room");
    }
    fs.sync().expect("a commit");
    assert_eq!(volume.tree(TreeId::FS).expect("the tree").level, 2);
    (fs, files)
}

#[test]
fn operations_take_shared_locks_this_often() {
    let (fs, files) = filled();
    let (volume, mut table) = (fs.volume().clone(), LockTable::default());
    let middle = files[FILES / 2];
    let mut buf = vec![0; 4096];
    let read = |buf: &mut Vec<u8>| fs.read(middle, 0, buf).expect("it reads");
    read(&mut buf);
    let row = "lookup";
    table.count(row, || fs.lookup(fs.root(), name(FILES / 2).as_bytes()).expect("it is there"));
    table.count("getattr", || fs.attr(middle).expect("it is there"));
    table.count("read 4 KiB", || read(&mut buf));
    fs.write(files[9], 0, &buf, AT).expect("there is room");
    table.count("fsync of nothing", || fs.fsync(middle).expect("nothing to do"));
    table.count("first write of a file", || fs.write(middle, 0, &buf, AT).expect("there is room"));
    table.count("second write", || fs.write(middle, 4096, &buf, AT).expect("there is room"));
    table.count("fsync", || fs.fsync(middle).expect("it is logged"));
    fs.sync().expect("a commit");
    fs.create(top(&fs, "first"), &NEW).expect("there is room");
    table.count("create", || fs.create(top(&fs, "second"), &NEW).expect("there is room"));
    table.count("unlink", || fs.unlink(top(&fs, &name(7)), AT).expect("it is there"));
    fs.sync().expect("a commit");
    let key = |number: usize| {
        Key::new(files[number].ino, ItemType::XATTR_ITEM, u64::try_from(number).expect("small"))
    };
    let handle = volume.join().expect("it is writable");
    let insert = |number| {
        handle.change(TreeId::FS, |tree| tree.insert(key(number), &[1])).expect("it goes through");
    };
    insert(100);
    // The root is a copy of this transaction now. The node and the leaf are not.
    table.count("insert with copies", || insert(FILES - 100));
    table.count("insert", || insert(FILES - 100 + 1));
    assert_eq!(table.0, TAKEN, "\n{}", table.0);
}
