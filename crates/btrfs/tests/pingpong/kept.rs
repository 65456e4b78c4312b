//! Files of every kind that the kernel makes, each changed by us in every way, and by the kernel again.
//!
//! The kernel makes a file for each pair of a kind and a change, and a snapshot that shares all of them. We do the
//! change; what the file must hold then is the model's to say. Then the kernel does to it what made the next kind, and we
//! the next change, for some rounds. In each both make a snapshot as well and delete the last one of the other; what it holds is dropped by whoever
//! comes to it. The first snapshot of each stays, and has to stay as it is.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use offshoot_testkit::disks::Disks;
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::judges;
use offshoot_testkit::model::Model;
use offshoot_testkit::model::subvolumes::Subvolumes;
use offshoot_testkit::random::Random;
use offshoot_testkit::run::run;
use offshoot_vfs::{FileId, FileSystemMut, Place, SetAttr, Timestamp, XattrMode};
use rustix::fs::{
    FallocateFlags, IFlags, XattrFlags, copy_file_range, fallocate, fsetxattr, ioctl_setflags,
};

use crate::rounds::{assert_kernel_shows, assert_shows};
use crate::subvolume_calls::Ours;
use crate::volume::{Layout, Maker, open, open_read_only};

/// A kind of file: its name, and how the kernel makes it.
type Kind = (&'static str, fn(&File));

/// A change: its name, and how it is done to a file of this size.
type Change = (&'static str, fn(&dyn FileSystemMut, FileId, u64));

const KIB: u64 = 1 << 10;

/// Made when the volume is mounted to compress what is worth it, and to keep up to a sector inline.
const KINDS: [Kind; 19] = [
    ("empty", |_| {}),
    ("inline", |file| write(file, 0, &bytes(100))),
    ("inline_compressed", |file| write(file, 0, &text(3000))),
    ("inline_before_others", |file| {
        write(file, 0, &bytes(46));
        file.sync_all().expect("sync");
        write(file, 200 * KIB, &bytes(9000));
    }),
    ("plain", |file| write(file, 0, &bytes(100_000))),
    ("several", |file| {
        for piece in 0..20 {
            write(file, piece * 7000, &bytes(7000));
            file.sync_all().expect("sync");
        }
    }),
    ("compressed", |file| write(file, 0, &text(300_001))),
    ("compressed_overwritten", |file| {
        write(file, 0, &text(300_000));
        file.sync_all().expect("sync");
        write(file, 40_000, &bytes(10_000));
    }),
    ("compressed_cut", |file| {
        write(file, 0, &text(300_000));
        file.sync_all().expect("sync");
        file.set_len(70_001).expect("a shorter file");
    }),
    ("without_cow", |file| {
        ioctl_setflags(file, IFlags::NOCOW).expect("chattr +C");
        write(file, 0, &text(100_001));
    }),
    ("preallocated", |file| allocate(file, FallocateFlags::empty(), 0, 256 * KIB)),
    ("preallocated_in_part", |file| {
        allocate(file, FallocateFlags::empty(), 0, 256 * KIB);
        write(file, 8 * KIB, &bytes(30_000));
        write(file, 200_000, &bytes(10));
    }),
    ("preallocated_behind", |file| {
        write(file, 0, &bytes(5000));
        allocate(file, FallocateFlags::KEEP_SIZE, 0, 1024 * KIB);
    }),
    ("islands_behind", |file| {
        write(file, 0, &bytes(5000));
        for island in 1..10 {
            allocate(file, FallocateFlags::KEEP_SIZE, island * 100 * KIB, island * 4 * KIB);
        }
    }),
    // The bytes that were cut off are still in the extent.
    ("cut_within_a_sector", |file| {
        write(file, 0, &bytes(4207));
        file.sync_all().expect("sync");
        file.set_len(500).expect("a shorter file");
    }),
    ("punched", |file| {
        write(file, 0, &bytes(200_000));
        file.sync_all().expect("sync");
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        allocate(file, punch, 10_001, 50_000);
        allocate(file, punch, 16 * KIB * 5, 4 * KIB);
    }),
    ("cloned_to_itself", |file| {
        write(file, 0, &bytes(64 << 10));
        clone(file, 16 * KIB, 4 * KIB, 100 * KIB);
        clone(file, 16 * KIB, 20 * KIB, 200 * KIB);
        clone(file, 8 * KIB, 8 * KIB, 0);
    }),
    ("compressed_and_cloned", |file| {
        write(file, 0, &text(256 << 10));
        file.sync_all().expect("sync");
        clone(file, 16 * KIB, 36 * KIB, 300 * KIB);
        clone(file, 130 * KIB, 0, 400 * KIB);
    }),
    ("with_attributes", |file| {
        write(file, 0, &bytes(6000));
        let set = |name, value: &[u8]| fsetxattr(file, name, value, XattrFlags::empty());
        set("user.short", b"of the kernel").expect("an attribute");
        set("user.long", &bytes(1500)).expect("an attribute");
        set("system.posix_acl_access", &access_list()).expect("a list");
    }),
];

const CHANGES: [Change; 15] = [
    ("first_byte", |fs, file, _| ours(fs, file, 0, 1)),
    ("within_the_first_sector", |fs, file, _| ours(fs, file, 600, 50)),
    ("within", |fs, file, _| ours(fs, file, 10_123, 5000)),
    ("over_the_middle", |fs, file, _| ours(fs, file, 50_000, 200_000)),
    ("a_sector", |fs, file, _| ours(fs, file, 12 * KIB, 4096)),
    ("all", |fs, file, size| ours(fs, file, 0, size.max(1))),
    ("append", |fs, file, size| ours(fs, file, size, 3)),
    ("far_behind", |fs, file, _| ours(fs, file, 2048 * KIB + 7, 10_000)),
    ("between_islands", |fs, file, _| ours(fs, file, 350 * KIB + 1, 100)),
    ("cut_to_nothing", |fs, file, _| resize(fs, file, 0)),
    ("cut_to_ten", |fs, file, _| resize(fs, file, 10)),
    ("cut_to_a_sector", |fs, file, _| resize(fs, file, 4096)),
    ("cut_to_half", |fs, file, size| resize(fs, file, size / 2)),
    ("grow", |fs, file, _| resize(fs, file, 1024 * KIB + 3)),
    ("attributes", |fs, file, _| {
        let set = |name: &[u8], value: &[u8]| fs.set_xattr(file, name, value, XattrMode::Set, at());
        set(b"user.short", &bytes(700)).expect("an attribute");
        set(b"user.ours", b"ours").expect("an attribute");
        let owner = SetAttr { uid: Some(1234), gid: Some(5), ..SetAttr::default() };
        fs.set_attr(file, &owner, at()).expect("an owner");
    }),
];

/// A list that gives one user more than the others, as the kernel has it.
fn access_list() -> Vec<u8> {
    let entry = |tag: u16, may: u16, id: u32| {
        [&tag.to_le_bytes()[..], &may.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let none = u32::MAX;
    let of_all = [(1, 6, none), (2, 7, 1000), (4, 4, none), (16, 7, none), (32, 4, none)];
    let entries = of_all.map(|(tag, may, id)| entry(tag, may, id)).concat();
    [&2u32.to_le_bytes()[..], &entries].concat()
}

fn bytes(len: usize) -> Vec<u8> {
    Random::new(len as u64).bytes(len)
}

fn text(len: usize) -> Vec<u8> {
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

fn at() -> Timestamp {
    Timestamp { secs: 1_900_000_000, nanos: 1 }
}

fn ours(fs: &dyn FileSystemMut, file: FileId, offset: u64, len: u64) {
    let data = Random::new(offset).bytes(usize::try_from(len).expect("small"));
    fs.write(file, offset, &data, at()).expect("there is room");
}

fn resize(fs: &dyn FileSystemMut, file: FileId, size: u64) {
    let set = SetAttr { size: Some(size), ..SetAttr::default() };
    fs.set_attr(file, &set, at()).expect("another length");
}

/// All pairs, by the name of the file.
fn pairs() -> impl Iterator<Item = (String, &'static Kind, usize)> {
    KINDS.iter().flat_map(|kind| {
        (0..CHANGES.len())
            .map(move |change| (format!("{}-{}", kind.0, CHANGES[change].0), kind, change))
    })
}

fn subvolume(words: &[&str], paths: &[&Path]) {
    let words = ["-q", "subvolume"].iter().chain(words).map(OsStr::new);
    run("btrfs", &words.chain(paths.iter().map(|path| path.as_os_str())).collect::<Vec<_>>());
}

/// The kernel makes all files, and a snapshot of them.
fn make(path: &Path) {
    let live = path.join("live");
    subvolume(&["create"], &[&live]);
    for (name, kind, _) in pairs() {
        (kind.1)(&File::create_new(live.join(name)).expect("a new file"));
    }
    for name in ["of-the-kernel", "theirs-0"] {
        subvolume(&["snapshot"], &[&live, &path.join(name)]);
    }
}

/// Does to every file the change that is `round` behind its own; beside that a snapshot comes and one of the kernel's goes. Every second
/// time it is dropped to the end.
fn change(fs: &dyn FileSystemMut, subvolumes: &dyn Subvolumes, round: usize) {
    let live = fs.lookup(fs.root(), b"live").expect("the subvolume");
    for (name, _, first) in pairs() {
        let file = fs.lookup(live, name.as_bytes()).expect("the kernel made it");
        let size = fs.attr(file).expect("its attributes").size;
        (CHANGES[(first + round) % CHANGES.len()].1)(fs, file, size);
    }
    let snapshot = |name: &str, is_read_only| {
        let place = Place { dir: fs.root(), name: name.as_bytes() };
        subvolumes.snapshot(live, place, is_read_only, at()).expect("a snapshot");
    };
    if round == 0 {
        snapshot("of-ours", true);
    }
    snapshot(&format!("ours-{round}"), round == 1);
    let theirs = format!("theirs-{round}");
    let place = Place { dir: fs.root(), name: theirs.as_bytes() };
    subvolumes.delete_subvolume(place, at()).expect("it is deleted");
    if round % 2 == 1 {
        subvolumes.drop_deleted().expect("everything reads");
    }
}

/// The kernel does to every file what makes the kind that is behind its own by one more than `round`; beside that a snapshot comes and one of ours
/// goes. Every second time it waits until that is dropped.
fn change_by_kernel(path: &Path, round: usize) {
    let (live, ours) = (path.join("live"), path.join(format!("ours-{round}")));
    for (number, (name, ..)) in pairs().enumerate() {
        let kind = &KINDS[(number / CHANGES.len() + round + 1) % KINDS.len()];
        let file = File::options().read(true).write(true).open(live.join(&name));
        (kind.1)(&file.expect("it is there"));
    }
    subvolume(&["snapshot"], &[&live, &path.join(format!("theirs-{}", round + 1))]);
    subvolume(&["delete"], &[&ours]);
    if round.is_multiple_of(2) {
        // This wakes the cleaner, which otherwise sleeps for half a minute.
        run("btrfs", &["filesystem".as_ref(), "sync".as_ref(), path.as_os_str()]);
        subvolume(&["sync"], &[path]);
    }
}

/// What the kernel shows of the volume.
fn shown(disks: &Disks) -> Model {
    let mount = disks.mount("ro,noatime");
    let host = HostFilesystem::new(mount.path()).expect("the mounted directory opens");
    Model::copy(&host).expect("the kernel shows its own volume")
}

fn play(devices: usize, options: &'static str, maker: Maker, mount: &str) {
    const ROUNDS: usize = 3;
    let Some(judges) = judges::require() else { return };
    let disks = Layout { devices, mib: 512, options }.make(&judges, maker);
    let mount = format!("rw,noatime,{mount}");
    make(disks.mount(&mount).path());
    for round in 0..ROUNDS {
        let model = shown(&disks);
        let fs = open(&disks, ["zstd:1", "lzo", "zlib"].get(round).copied().filter(|_| round > 0));
        change(&fs, &Ours(fs.clone()), round);
        change(&model, &model, round);
        assert_shows(&fs, &model);
        fs.sync().expect("a commit");
        drop(fs);
        verdict(&disks, &model);
        change_by_kernel(disks.mount(&mount).path(), round);
        disks.assert_checks();
        assert_shows(&open_read_only(&disks), &shown(&disks));
    }
    // Nothing is left of what was deleted, and what stays is sound.
    let (model, fs) = (shown(&disks), open(&disks, None));
    Ours(fs.clone()).drop_deleted().expect("everything reads");
    fs.sync().expect("a commit");
    drop(fs);
    verdict(&disks, &model);
}

fn verdict(disks: &Disks, model: &Model) {
    disks.assert_checks();
    assert_shows(&open_read_only(disks), model);
    assert_kernel_shows(disks.mount("ro,noatime").path(), model);
}

#[test]
fn defaults() {
    play(1, "", Maker::Progs, "compress=zstd,max_inline=4095");
}

#[test]
fn block_group_tree_lzo() {
    play(1, "-O block-group-tree", Maker::Ours, "compress=lzo");
}

#[test]
fn explicit_holes_small_nodes() {
    let options = "-n 4096 -O ^block-group-tree,^no-holes";
    play(1, options, Maker::Ours, "compress=zlib,max_inline=2000");
}

#[test]
fn old_references_mixed() {
    let options = "-n 4096 -d single -m single -O mixed-bg,^no-holes,^skinny-metadata,^extref";
    play(1, options, Maker::Progs, "compress=zlib");
}

#[test]
fn without_checksums() {
    play(1, "", Maker::Ours, "nodatasum");
}

#[test]
fn without_cow() {
    play(1, "--csum xxhash", Maker::Progs, "nodatacow");
}

#[test]
fn two_copies_all_compressed() {
    play(1, "-d dup -m dup --csum sha256", Maker::Progs, "compress-force=zstd:3");
}

#[test]
fn two_members_large_nodes() {
    let options = "-d raid1 -m raid1 -n 65536 --csum blake2";
    play(2, options, Maker::Progs, "compress-force=lzo,max_inline=0");
}

/// The kernel keeps free space in files, which ours does not trust, and leaves invalid.
#[test]
fn free_space_in_files() {
    let options = "-O ^block-group-tree,^free-space-tree";
    play(1, options, Maker::Progs, "space_cache=v1,compress=zstd");
}
