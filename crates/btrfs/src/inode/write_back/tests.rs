//! Regression tests for buffered data, on volumes in memory.

use std::sync::Arc;

use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::{BlockDevice, Fault, FaultDevice, RequestKind};
use offshoot_testkit::btrfs::checked::CheckedDevice;
use offshoot_testkit::random::Random;
use offshoot_vfs::{
    EntryPlace, Errno, Error, FileId, FileSystem, FileSystemMut, NewFile, Result, SetAttr,
    Timestamp,
};
use zerocopy::IntoBytes;

use crate::data::lend;
use crate::space::Purpose;
use crate::test_volumes::{in_memory, in_memory_of};
use crate::tree::{Blocks, with_item};
use crate::{BtrfsVolume, Compress, EngineOptions, Filesystem};

const AT: Timestamp = Timestamp { secs: 1_000_000, nanos: 7 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 1, gid: 2, umask: None, at: AT };
const NODE_SIZE: u32 = 16384;

/// Opens the volume for writing without a thread of its own.
fn open(device: &Arc<CheckedDevice>, dirty_bytes: u64) -> (Arc<BtrfsVolume>, Filesystem) {
    let options = EngineOptions { commit_interval: None, dirty_bytes, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(vec![device.clone()], &options).expect("it opens");
    let fs = volume.filesystem(TreeId::FS).expect("the top level");
    (volume, fs)
}

fn create(fs: &Filesystem, name: &str) -> FileId {
    fs.create(EntryPlace { dir: fs.root(), name: name.as_bytes() }, &NEW).expect("a file")
}

/// Changes an item of the top level subvolume directly.
fn change(volume: &BtrfsVolume, key: Key, room: usize, change: impl Fn(&[u8]) -> Vec<u8>) {
    let handle = volume.join().expect("room");
    let edit = |data: Option<&[u8]>| Ok(change(data.expect("the item")));
    handle.change(TreeId::FS, |tree| tree.modify(key, room, edit)).expect("a change");
}

fn change_inode(volume: &BtrfsVolume, file: FileId, edit: impl Fn(&mut InodeItem)) {
    change(volume, Key::new(file.ino, ItemType::INODE_ITEM, 0), 0, |data| {
        let mut item = *InodeItem::view(data).expect("an inode item");
        edit(&mut item);
        item.as_bytes().to_vec()
    });
}

/// Old kernels stored small files inline with NODATACOW too. Their data is shorter than a sector,
/// and space is allocated only in sectors.
#[test]
fn inline_data_of_a_nodatacow_file_is_replaced() {
    let device = in_memory(NODE_SIZE);
    let (volume, fs) = open(&device, 64 << 20);
    let file = create(&fs, "one");
    fs.write(file, 0, &[7; 101], AT).expect("there is room");
    fs.sync().expect("a commit");
    change_inode(&volume, file, |item| {
        let flags = inode_flags::NODATACOW | inode_flags::NODATASUM;
        item.flags = (item.flags.get() | flags).into();
    });
    fs.write(file, 0, &[8; 1], AT).expect("there is room");
    fs.sync().expect("a commit");
    let mut found = [0; 102];
    assert_eq!(fs.read(file, 0, &mut found).expect("it reads"), 101);
    assert!(found[0] == 8 && found[1..101] == [7; 100]);
}

/// Such data can be read. A write to it is refused before anything is buffered, and other files are
/// not affected.
#[test]
fn a_file_with_inline_data_beyond_a_sector_is_refused_alone() {
    let device = in_memory(NODE_SIZE);
    device.leave_unchecked("an extent is made by hand, and its size in no inode");
    let (volume, fs) = open(&device, 64 << 20);
    let file = create(&fs, "one");
    fs.write(file, 0, &[7; 101], AT).expect("there is room");
    fs.sync().expect("a commit");
    change(&volume, Key::new(file.ino, ItemType::EXTENT_DATA, 0), 8000, |data| {
        let mut data = data[..21].to_vec();
        data[8..16].copy_from_slice(&6000u64.to_le_bytes());
        data.resize(21 + 6000, 5);
        data
    });
    change_inode(&volume, file, |item| item.size = 6000.into());
    fs.sync().expect("a commit");
    fs.write(file, 0, &[8; 1], AT).expect_err("this file cannot be written");
    create(&fs, "other");
    fs.sync().expect("the rest can");
}

/// On a full volume a file of many extents can be cut, and the removed data never comes back.
#[test]
fn a_file_of_many_extents_is_cut_on_a_full_volume() {
    let device = in_memory_of(NODE_SIZE, 256 << 20);
    let (_volume, fs) = open(&device, 64 << 20);
    let file = create(&fs, "one");
    for i in 0..600u64 {
        fs.write(file, i * 8192, &[7; 4096], AT).expect("there is room");
        if i % 100 == 99 {
            fs.sync().expect("a commit");
        }
    }
    let filler = create(&fs, "filler");
    let mut at = 0;
    for len in [1usize << 20, 65536, 4096] {
        let data = vec![3; len];
        while fs.write(filler, at, &data, AT).is_ok() {
            at += len as u64;
        }
    }
    fs.sync().expect("what was accepted can be stored");
    let set = |size| SetAttr { size: Some(size), ..SetAttr::default() };
    fs.set_attr(file, &set(0), AT).expect("a full volume lets go of data");
    fs.sync().expect("a commit");
    assert_eq!(fs.attr(file).expect("attributes").allocated_bytes, 0);
    fs.unlink(EntryPlace { dir: fs.root(), name: b"filler" }, AT).expect("it goes");
    fs.set_attr(file, &set(5 << 20), AT).expect("there is room");
    let mut found = vec![1; 8192];
    fs.read(file, 0, &mut found).expect("it reads");
    assert!(found.iter().all(|&byte| byte == 0), "what was cut off came back");
}

/// After a crash a file that replaced another has its data, or the other file is still there.
#[test]
fn what_replaces_a_file_by_rename_has_its_data() {
    let device = in_memory(NODE_SIZE);
    let (volume, fs) = open(&device, 64 << 20);
    let dir = fs.root();
    let old = create(&fs, "config");
    fs.write(old, 0, &[7; 8192], AT).expect("there is room");
    fs.sync().expect("a commit");
    let new = create(&fs, "config.tmp");
    fs.write(new, 0, &[8; 8192], AT).expect("there is room");
    let [from, to] = [&b"config.tmp"[..], b"config"].map(|name| EntryPlace { dir, name });
    fs.rename(from, to, AT).expect("it takes the place");
    volume.commit().expect("a commit that writes nothing back");
    let devices: Vec<Arc<dyn BlockDevice>> = vec![Arc::new(device.snapshot())];
    let crashed = BtrfsVolume::open(devices, &EngineOptions::default()).expect("it opens");
    let fs = crashed.filesystem(TreeId::FS).expect("the top level");
    let file = fs.lookup(fs.root(), b"config").expect("it is there");
    let mut found = vec![0; 8193];
    assert_eq!(fs.read(file, 0, &mut found).expect("it reads"), 8192);
    assert!(found[..8192].iter().all(|&byte| byte == 8));
}

/// Write-back of scattered sectors changes more bytes of tree blocks than of data, and commits in
/// between.
#[test]
fn write_back_keeps_the_bound_on_dirty_blocks() {
    let device = in_memory(NODE_SIZE);
    let (volume, fs) = open(&device, 64 << 20);
    let file = create(&fs, "file");
    for i in 0..30_000u64 {
        fs.write(file, i * 8192, &[7; 4096], AT).expect("there is room");
    }
    fs.sync().expect("a commit");
    drop((fs, volume));
    let limit = 1 << 20;
    let (volume, fs) = open(&device, limit);
    for i in 0..256u64 {
        fs.write(file, i * 117 * 8192, &[8; 4096], AT).expect("there is room");
    }
    super::sync_all(&volume).expect("all of it is stored");
    let dirty = volume.dirty_tree_bytes().expect("it is writable");
    assert!(dirty < limit + (1 << 20) / 4, "{dirty} bytes of {limit}");
}

/// A file whose extents cannot be read does not prevent others from being written.
#[test]
fn a_file_that_cannot_be_written_back_stops_nobody_else() {
    let device = in_memory(NODE_SIZE);
    let (volume, fs) = open(&device, 64 << 20);
    let other = create(&fs, "other");
    let bad = create(&fs, "bad");
    for i in 0..2000u64 {
        fs.write(bad, i * 8192, &[7; 4096], AT).expect("there is room");
    }
    fs.sync().expect("a commit");
    let root = volume.tree(TreeId::FS).expect("the tree");
    let block = volume.block(&root.expected()).expect("its root");
    let slot = block.len() / 2;
    let (at, leaf) = (block.key(slot).offset, block.pointers()[slot].logical());
    for (_, physical, _) in volume.storage.write_places(leaf, u64::from(NODE_SIZE)).expect("places")
    {
        device.leave_unchecked("a leaf is damaged");
        device.write_at(physical.0, &[0xaa; 16384]).expect("it is written");
    }
    drop((fs, volume));
    let (volume, fs) = open(&device, 2 << 20);
    let _ = fs.write(bad, at, &vec![1; 3 << 20], AT);
    assert!(volume.buffers.bytes() > 2 << 20, "the test is about too much that is buffered");
    fs.write(other, 0, &[1; 4096], AT).expect("others are written");
    fs.sync().expect_err("and it is told");
}

/// Making room for a piece of a small file once wrote the beginning of the file back as inline
/// data, and then put the piece beside it.
#[test]
fn what_is_written_back_for_room_is_not_inline_beside_extents() {
    const SECTOR: usize = 4096;
    let device = in_memory_of(NODE_SIZE, 128 << 20);
    let (volume, fs) = open(&device, 64 << 20);
    let (filler, small) = (create(&fs, "filler"), create(&fs, "small"));
    for name in ["first", "second"] {
        fs.write(create(&fs, name), 0, &[1; SECTOR], AT).expect("there is room");
    }
    fs.sync().expect("a commit");
    let mut size = 0;
    for len in [1 << 20, SECTOR] {
        while fs.write(filler, size, &vec![1; len], AT).is_ok() {
            size += len as u64;
        }
        fs.sync().expect("a commit");
    }
    for name in ["first", "second"] {
        fs.unlink(EntryPlace { dir: fs.root(), name: name.as_bytes() }, AT).expect("it is there");
    }
    fs.sync().expect("a commit");
    fs.write(small, 0, &[7; 100], AT).expect("there are two sectors");
    let written = fs.write(small, 2 * SECTOR as u64, &[8; 2 * SECTOR], AT);
    fs.sync().expect("a commit");
    let key = Key::new(small.ino, ItemType::EXTENT_DATA, 0);
    let is_inline =
        with_item(&volume.rooms, volume.tree(TreeId::FS).expect("a tree"), key, |data| {
            Ok(matches!(
                FileExtent::parse(data).expect("an extent").body,
                FileExtentBody::Inline(_)
            ))
        });
    let is_inline = is_inline.expect("it reads").expect("it has data");
    assert_eq!(is_inline, written.is_err(), "{written:?}");
    assert_eq!(fs.attr(small).expect("it is there").size, if is_inline { 100 } else { 16384 });
}

/// For each buffered file as much was once promised as a step of its write-back copies, so a few
/// files took all metadata.
#[test]
fn files_that_are_buffered_leave_metadata_to_others() {
    const FILES: u64 = 64;
    let device = in_memory_of(NODE_SIZE, 128 << 20);
    let (volume, fs) = open(&device, 64 << 20);
    let files: Vec<_> = (0..FILES).map(|number| create(&fs, &number.to_string())).collect();
    for &file in &files {
        fs.write(file, 0, &[7; 4096], AT).expect("there is room");
    }
    assert_eq!(volume.buffers.bytes(), FILES * 4096, "none had to be written back for others");
    let promised = promised(&volume);
    assert!((FILES * 256..FILES << 16).contains(&promised), "{promised} bytes");
    super::sync_all(&volume).expect("all of it is stored");
    assert_eq!(self::promised(&volume), 0);
}

/// The promised metadata, in bytes.
fn promised(volume: &BtrfsVolume) -> u64 {
    volume.space_stats().kinds.iter().map(|kind| kind.promised_bytes).sum()
}

/// Each small write once got the promise for a run of its own, though adjacent writes become one
/// run.
#[test]
fn small_writes_one_after_the_other_are_promised_what_a_large_one_is() {
    const LEN: usize = 1 << 20;
    const SECTOR: usize = 4096;
    let device = in_memory(NODE_SIZE);
    let (volume, fs) = open(&device, 64 << 20);
    fs.write(create(&fs, "large"), 0, &vec![7; LEN], AT).expect("there is room");
    let large = promised(&volume);
    let small = create(&fs, "small");
    for at in (0..LEN).step_by(SECTOR) {
        fs.write(small, at as u64, &[7; SECTOR], AT).expect("there is room");
    }
    let small = promised(&volume) - large;
    assert!(small < 2 * large, "{small} bytes, and not {large}");
}

/// Writes a compressible file and stores it, with a fault at the data write with this number.
/// Returns the outcome, the number of data writes, and the length and the allocated bytes of the
/// file after the volume is opened again.
fn store_compressed(
    base: &Arc<CheckedDevice>,
    data: &[u8],
    fault: Option<u64>,
) -> (Result<()>, u64, (u64, u64)) {
    let memory = Arc::new(CheckedDevice::over(base.clone()));
    let device = Arc::new(FaultDevice::new(memory.clone()));
    let compress = Some(Compress { method: "zstd:1".parse().expect("a method"), is_forced: true });
    let options = EngineOptions { commit_interval: None, compress, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(vec![device.clone()], &options).expect("it opens");
    let fs = volume.filesystem(TreeId::FS).expect("the top level");
    let file = create(&fs, "file");
    fs.sync().expect("a commit");
    fs.write(file, 0, data, AT).expect("there is room");
    let before = device.count(RequestKind::Writes);
    if let Some(number) = fault {
        device.strike(RequestKind::Writes, before + number, Fault::Error);
    }
    let stored = super::sync_all(&volume);
    let writes = device.count(RequestKind::Writes) - before;
    let mut found = vec![0; data.len()];
    assert_eq!(fs.read(file, 0, &mut found).expect("it reads"), data.len());
    assert!(found == data, "other data behind a fault at write {fault:?}");
    let synced = fs.sync();
    let is_refused = synced.is_err_and(|error| error.errno() == Errno::ROFS);
    assert_eq!(is_refused, stored.is_err(), "whether writing ended, {stored:?}");
    drop((fs, volume));
    let left = open(&memory, 64 << 20).1.attr(file).expect("its name was synced");
    (stored, writes, (left.size, left.allocated_bytes))
}

/// Several extents are compressed and written at once. When the write of one fails, the caller gets
/// the error and all writing ends. The buffered data can still be read, and after the volume is
/// opened again none of the written data is there.
#[test]
fn compressed_data_whose_write_fails_is_told_and_not_there() {
    const LEN: usize = 24 << 20;
    let base = in_memory(NODE_SIZE);
    let data = Random::new(5).text(LEN);
    let (stored, writes, left) = store_compressed(&base, &data, None);
    stored.expect("nothing fails");
    assert_eq!(left, (LEN as u64, LEN as u64));
    assert!(writes > 2, "{writes} writes of data");
    for number in 0..writes {
        let (stored, _, left) = store_compressed(&base, &data, Some(number));
        assert!(matches!(stored, Err(Error::Io { .. })), "write {number} of {writes}: {stored:?}");
        assert_eq!(left, (0, 0), "write {number} of {writes}");
    }
}

/// What the buffers of two files lend is one claim, nothing of it is given up, and each gets its
/// part back.
#[test]
fn what_buffers_lend_comes_back() {
    let device = in_memory(NODE_SIZE);
    let (volume, fs) = open(&device, 64 << 20);
    let buffers = ["one", "two"].map(|name| {
        let file = create(&fs, name);
        fs.write(file, 0, &[7; 8192], AT).expect("there is room");
        volume.buffers.get(file).expect("its data is buffered")
    });
    let space = &volume.live().expect("it is writable").space;
    let reserved = || space.ledger(Purpose::Data).reserved();
    for _ in 0..2 {
        lend(space, &[(&buffers[0], 8192), (&buffers[1], 4096)], |claim| {
            assert_eq!((claim.bytes(), reserved()), (12288, 16384));
        });
    }
    super::sync_all(&volume).expect("all of it is stored");
    assert_eq!(reserved(), 0);
}
