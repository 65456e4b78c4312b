//! Logs with right checksums and impossible contents: opening gives an error, and writes nothing.

use std::cell::Cell;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem};
use offshoot_device::BlockDevice;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_vfs::{Error, FileSystem};

use crate::cut::{LogShape, PLAIN, at_commit, cut, logs, read_only, replay, shell, top};
use crate::damage::{LogBlock, in_memory, log_blocks, number, shared};

const INODE_REF: u8 = 12;
const DIR_INDEX: u8 = 96;
const EXTENT_DATA: u8 = 108;
const EXTENT_CSUM: u8 = 128;

/// An item of a leaf of a log.
struct LogItem<'a> {
    leaf: &'a mut [u8],
    header: usize,
}

impl LogItem<'_> {
    fn set(&mut self, at: usize, value: u64) {
        self.leaf[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }

    /// The inode, the type, and the offset of the key.
    fn key(&self) -> (u64, u8, u64) {
        let at = self.header;
        (number(self.leaf, at), self.leaf[at + 8], number(self.leaf, at + 9))
    }

    fn set_inode(&mut self, ino: u64) {
        self.set(self.header, ino);
    }

    fn set_offset(&mut self, offset: u64) {
        self.set(self.header + 9, offset);
    }

    fn data(&self) -> Range<usize> {
        let field = |at: usize| {
            u32::from_le_bytes(self.leaf[at..at + 4].try_into().expect("4 bytes")) as usize
        };
        let start = 101 + field(self.header + 17);
        start..start + field(self.header + 21)
    }

    /// Makes an entry lead to another inode.
    fn set_location(&mut self, ino: u64) {
        self.set(self.data().start, ino);
    }
}

/// The volume in memory, with a log in which `lie` changed `count` items.
fn lied(
    cut: &Disks,
    count: usize,
    lie: impl Fn(&mut LogItem<'_>) -> bool,
) -> Vec<Arc<dyn BlockDevice>> {
    let superblock = at_commit(cut.devices()).superblock().clone();
    let members = in_memory(cut);
    let mut lies = 0;
    for LogBlock { mut bytes, places, .. } in log_blocks(cut, superblock.node_size as usize) {
        if bytes[100] > 0 {
            continue;
        }
        let items = u32::from_le_bytes(bytes[96..100].try_into().expect("4 bytes")) as usize;
        for slot in 0..items {
            let mut item = LogItem { leaf: &mut bytes, header: 101 + 25 * slot };
            let before = item.key();
            if lie(&mut item) {
                println!("{before:?} became {:?}", item.key());
                lies += 1;
            }
        }
        offshoot_btrfs_format::encode::seal_block(&mut bytes, superblock.checksum);
        for place in places {
            members[0].write_at(place, &bytes).expect("memory");
        }
    }
    assert_eq!(lies, count, "the log has what is to be changed");
    shared(&members)
}

/// The errors of opening the volume, in memory and on the devices, with a log in which `lie`
/// changed `count` items.
fn with_lies(
    cut: &Disks,
    count: usize,
    lie: impl Fn(&mut LogItem<'_>) -> bool,
) -> [Option<Error>; 2] {
    let devices = lied(cut, count, lie);
    let generation = at_commit(cut.devices()).superblock().generation;
    [BtrfsVolume::open, BtrfsVolume::open_writable].map(|open| {
        let error = open(devices.clone(), &EngineOptions::default()).err();
        if error.is_some() {
            let found = at_commit(devices.clone()).superblock().clone();
            assert!(found.has_pending_log() && found.generation == generation);
        }
        error
    })
}

#[track_caller]
fn assert_corrupt(errors: [Option<Error>; 2], problem: &str) {
    for error in errors {
        let is_it = matches!(&error, Some(Error::Corrupt(_)))
            && error.as_ref().is_some_and(|error| error.to_string().contains(problem));
        assert!(is_it, "`{problem}` expected: {error:?}");
    }
}

fn of(judges: &Judges, mkfs: &'static str, before: &str, after: &str) -> Disks {
    let script = |script: String| move |path: &Path| shell(path, &script);
    let shape = LogShape { mkfs, ..PLAIN };
    let cut = cut(judges, shape, script(before.to_owned()), script(after.to_owned()));
    assert_eq!(logs(&cut), 1);
    cut
}

/// A name in a regular file: a replay would add a directory item to the file, and would count the
/// name into its length.
#[test]
fn a_name_in_a_regular_file() {
    let Some(judges) = judges::require() else { return };
    // Inodes: d is 257, f is 258, g is 259.
    let cut = of(&judges, "", "mkdir d; echo 1 > f; echo 2 > g", "ln g d/n; sync d");
    let is_entry = |(ino, item_type, _): (u64, u8, u64)| ino == 257 && item_type == DIR_INDEX;
    let errors = with_lies(&cut, 1, |item| {
        let is_it = is_entry(item.key());
        if is_it {
            item.set_inode(258);
        }
        is_it
    });
    assert_corrupt(errors, "a name in what is no directory");

    let cut = of(&judges, "", "mkdir d; echo 1 > f", "echo 2 > d/g; sync d/g");
    let errors = with_lies(&cut, 1, |item| {
        let is_it = item.key() == (259, INODE_REF, 257);
        if is_it {
            item.set_offset(258);
        }
        is_it
    });
    assert_corrupt(errors, "a name in what is no directory");
}

/// A directory that moves into its own child: neither could be reached any more.
#[test]
fn a_directory_below_itself() {
    let Some(judges) = judges::require() else { return };
    // Inodes: d is 257, e is 258.
    let cut = of(&judges, "", "mkdir d d/e", "mv d x; sync .");
    let errors = with_lies(&cut, 2, |item| match item.key() {
        (256, DIR_INDEX, _) => {
            item.set_location(9999);
            true
        }
        (257, INODE_REF, 256) => {
            item.set_offset(258);
            true
        }
        _ => false,
    });
    assert_corrupt(errors, "the directory is below itself");
}

/// A log without the checksums of an extent. The item before the place of these checksums claims to
/// reach to the largest address.
#[test]
fn an_item_at_the_end_of_all_numbers_before_the_checksums() {
    let Some(judges) = judges::require() else { return };
    let cut = of(
        &judges,
        "-O ^no-holes",
        "touch n h; chattr +C n",
        "head -c 8192 /dev/zero > n; sync n; truncate -s 4096 h; sync h",
    );
    let errors = with_lies(&cut, 1, |item| {
        let is_it = item.key() == (258, EXTENT_DATA, 0);
        if is_it {
            item.set_offset(0xffff_ffff_ffff_e000);
        }
        is_it
    });
    assert!(errors.iter().all(Option::is_none), "a hole that far is no harm: {errors:?}");
}

/// Old kernels wrote logs in which one checksum item begins within another. The replay loses no
/// checksum of either.
#[test]
fn checksums_within_others() {
    let Some(judges) = judges::require() else { return };
    let cut = of(
        &judges,
        "",
        "touch f g",
        "head -c 65536 /dev/zero > f; sync f; head -c 8192 /dev/zero > g; sync g; fallocate -p -l 32768 f; sync f",
    );
    // All data is zeros, so the checksums of g fit any of it.
    let first = Cell::new(None);
    let devices = lied(&cut, 1, |item| {
        let (_, item_type, at) = item.key();
        let is_small = item.data().len() == 8;
        if item_type == EXTENT_CSUM && !is_small {
            first.set(Some(at));
        }
        let is_it = item_type == EXTENT_CSUM && is_small;
        if is_it {
            item.set_offset(first.get().expect("those of f come first") + 8192);
        }
        is_it
    });
    let kept = |fs: &Filesystem| {
        let f = fs.lookup(fs.root(), b"f").expect("it was synced");
        let mut bytes = vec![1; 65536];
        let len = fs.read(f, 0, &mut bytes).expect("it has all checksums");
        len == 65536 && bytes.iter().all(|&byte| byte == 0)
    };
    assert!(kept(&read_only(devices.clone())));
    replay(devices.clone());
    assert!(kept(&top(&at_commit(devices))));
}
