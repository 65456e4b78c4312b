//! What only the room itself sees: the table of inodes, and what a sync writes.

mod races;
mod refused;

use std::sync::atomic::{AtomicBool, Ordering};

use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::xfs::disk::XfsDisk;
use offshoot_testkit::xfs::judges;
use offshoot_vfs::{EntryPlace, Fallocate, FileId, FileType, NewFile, NewNode, Rename, Timestamp};
use offshoot_xfs_format::Ino;
use uuid::Uuid;

use super::*;
use crate::mkfs::{XfsMkfsOptions, mkfs_xfs};
use crate::options::XfsOptions;
use crate::volume;

const AT: Timestamp = Timestamp { secs: 1_700_000_000, nanos: 5 };

fn live(disk: &XfsDisk) -> (Arc<XfsLive>, FileId) {
    live_on(disk.writable_device())
}

fn live_on(device: Arc<dyn BlockDevice>) -> (Arc<XfsLive>, FileId) {
    let options = XfsOptions::default();
    let (opened, log) = volume::open_writable(device, &options).unwrap();
    let root = opened.superblock.fields.root().unwrap();
    let live = open_live(&opened, &log, Arc::new(XfsInodes::new(1 << 20)), &options).unwrap();
    (live, crate::inode::file_id(root))
}

fn make(live: &XfsLive, dir: FileId, name: &str) -> FileId {
    let new = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };
    let node = NewNode { file_type: FileType::Regular, rdev: (0, 0) };
    live.mknod(EntryPlace { dir, name: name.as_bytes() }, node, &new).unwrap()
}

fn disk() -> Option<XfsDisk> {
    let disk = XfsDisk::create(&judges::require()?, 64);
    disk.mkfs("--unsupported");
    Some(disk)
}

/// What commits cost, for each of 10,000 new names in one directory: nothing grows with it.
#[test]
fn a_create_is_one_commit_that_copies_what_it_changes() {
    const FILES: u64 = 10_000;
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::sparse(1 << 30));
    mkfs_xfs(&*device, &XfsMkfsOptions::new(Uuid::from_u128(7), AT)).unwrap();
    let (live, root) = live_on(device);
    let new = NewFile { permissions: 0o755, uid: 0, gid: 0, umask: None, at: AT };
    let dir = live.mkdir(EntryPlace { dir: root, name: b"dir" }, &new).unwrap();
    let value = |name: &str| {
        let counters = live.counters();
        counters.iter().find(|counter| counter.name == name).unwrap().value
    };
    let names = [
        "commit_commits",
        "commit_buffers",
        "commit_inodes",
        "commit_proofs",
        "log_formats",
        "log_patches",
        "log_shadow_allocations",
    ];
    let before = names.map(value);
    for number in 0..FILES {
        make(&live, dir, &format!("{:016x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    }
    let mut counts = names.map(value);
    counts.iter_mut().zip(before).for_each(|(count, before)| *count -= before);
    let [commits, buffers, inodes, proofs, formats, patches, allocations] = counts;
    // In hundredths of a count for each file. Each 64 files need a chunk of inodes.
    let each = |count: u64| 100 * count / FILES;
    assert!((100..=102).contains(&each(commits)), "{counts:?}");
    assert!((200..=202).contains(&each(inodes)), "its directory, and itself: {counts:?}");
    // Three blocks of the directory, the AGI, and both trees of inodes.
    assert!(each(buffers) <= 615, "{counts:?}");
    assert!(formats <= buffers + inodes + FILES / 20, "{counts:?}");
    assert!(each(patches) >= 600, "nearly all buffers: {counts:?}");
    assert!(each(allocations) <= 105, "its own vector: {counts:?}");
    assert_eq!(proofs, 0, "nothing was pushed: {counts:?}");
    live.shut_down().unwrap();
    let [proofs, seals] = ["commit_proofs", "commit_seals"].map(value);
    assert!(each(proofs) <= 5, "each block once: {proofs}");
    assert!(each(seals) <= 110, "each inode once, and each block: {seals}");
}

#[test]
fn only_open_and_nameless_inodes_stay_in_the_table() {
    let Some(disk) = disk() else { return };
    let (live, root) = live(&disk);
    for number in 0..500 {
        let file = make(&live, root, &number.to_string());
        live.write(file, 0, b"content", AT).unwrap();
        live.fsync(file).unwrap();
        let name = number.to_string();
        let place = EntryPlace { dir: root, name: name.as_bytes() };
        if number % 50 == 0 {
            live.open(file).unwrap();
        }
        if number % 3 == 0 {
            live.unlink(place, AT).unwrap();
        }
    }
    assert_eq!(live.inodes.len(), 10);
    assert_eq!(live.inodes.nameless().len(), 4, "of 0, 150, 300, 450");
    live.shut_down().unwrap();
    disk.assert_checks();
}

/// A write in place changes only times, which `fdatasync` leaves out.
#[test]
fn a_data_sync_of_a_write_in_place_writes_no_record() {
    let Some(disk) = disk() else { return };
    let (live, root) = live(&disk);
    let (file, other) = (make(&live, root, "file"), make(&live, root, "other"));
    let ino = Ino(file.ino);
    let durable = || live.transactions.log().durable();
    let later = |by: u8| Timestamp { secs: AT.secs + i64::from(by), ..AT };
    // What is known of times is forgotten with a file that is not open.
    live.open(file).unwrap();
    live.write(file, 0, &[1; 10_000], AT).unwrap();
    live.fsync(file).unwrap();
    let before = durable();
    for byte in 2..5 {
        live.write(file, 3, &[byte; 100], later(byte)).unwrap();
        live.fdatasync(file).unwrap();
        assert_eq!(durable(), before);
    }
    // More than times, in the context of the times.
    live.set_xattr(file, b"user.a", b"b", offshoot_vfs::XattrMode::Set, AT).unwrap();
    live.write(file, 3, &[7; 100], later(7)).unwrap();
    live.fdatasync(file).unwrap();
    assert!(durable() > before);
    // A file that did not change needs nothing of what others did.
    live.fsync(file).unwrap();
    let before = durable();
    live.write(other, 0, b"content", AT).unwrap();
    live.fsync(file).unwrap();
    assert_eq!(durable(), before);
    assert!(live.transactions.last_commit(ino).is_some());
    live.shut_down().unwrap();
    disk.assert_checks();
}

/// A rename waits for the inode while another thread sets its times, and commits it next.
#[test]
fn a_commit_of_an_inode_is_not_taken_for_the_next_one() {
    let Some(disk) = disk() else { return };
    let (live, root) = live(&disk);
    let ino = Ino(make(&live, root, "file").ino);
    let change = || {
        let mut t = live.transactions.begin(Kind::ChangeTimes, 0).unwrap();
        touch(t.inode(ino).unwrap().core_mut(), AT);
        t
    };
    for _ in 0..100 {
        let first = change();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| {
                let second = change();
                let before = live.transactions.last_commit(ino);
                second.commit().unwrap();
                before
            });
            std::thread::sleep(std::time::Duration::from_millis(1));
            let commit = first.commit_inode(ino).unwrap();
            assert_eq!(second.join().unwrap(), commit);
            assert_ne!(live.transactions.last_commit(ino), commit);
        });
    }
    live.shut_down().unwrap();
    disk.assert_checks();
}

/// The number of a file that is freed is that of the next one, which keeps its own state.
#[test]
fn a_file_without_a_name_keeps_its_state_while_its_number_is_freed() {
    let Some(disk) = disk() else { return };
    let (live, root) = live(&disk);
    let new = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };
    let is_ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_ended.load(Ordering::Relaxed) {
                make(&live, root, "named");
                live.unlink(EntryPlace { dir: root, name: b"named" }, AT).unwrap();
            }
        });
        for _ in 0..1000 {
            let file = live.create_unnamed(root, true, &new).unwrap();
            live.write(file, 0, b"content", AT).unwrap();
            live.release(file).unwrap();
        }
        is_ended.store(true, Ordering::Relaxed);
    });
    assert_eq!(live.inodes.len(), 0);
    live.shut_down().unwrap();
    disk.assert_checks();
}

/// Zeros in a part of a block are written in place, and only the times are committed.
#[test]
fn a_data_sync_keeps_zeros_in_a_part_of_a_block() {
    let Some(disk) = disk() else { return };
    let (live, root) = live(&disk);
    let file = make(&live, root, "file");
    live.open(file).unwrap();
    live.write(file, 0, &[1; 10_000], AT).unwrap();
    live.fsync(file).unwrap();
    for what in [Fallocate::PunchHole, Fallocate::Zero { keeps_size: false }] {
        let before = live.durable_state();
        live.fallocate(file, what, 5000, 50, AT).unwrap();
        live.fdatasync(file).unwrap();
        assert_ne!(live.durable_state(), before, "{what:?} is not durable");
    }
    live.shut_down().unwrap();
    disk.assert_checks();
}

/// Writes within a tick of the clock leave the times, but not when somebody has seen these.
#[test]
fn a_write_behind_a_look_at_the_times_changes_them() {
    let Some(disk) = disk() else { return };
    let (live, root) = live(&disk);
    let file = make(&live, root, "file");
    let later = |nanos| Timestamp { nanos: AT.nanos + nanos, ..AT };
    live.write(file, 0, b"one", later(100)).unwrap();
    live.write(file, 0, b"two", later(200)).unwrap();
    assert_eq!(live.attr(file).unwrap().mtime, AT, "that of the new file");
    live.write(file, 0, b"three", later(300)).unwrap();
    live.write(file, 0, b"four", later(400)).unwrap();
    assert_eq!(live.attr(file).unwrap().mtime, later(300));
    live.write(file, 0, b"five", later(5_000_000)).unwrap();
    assert_eq!(live.attr(file).unwrap().mtime, later(5_000_000));
    live.shut_down().unwrap();
    disk.assert_checks();
}

#[test]
fn a_file_that_replaces_another_one_is_written_back_before() {
    let Some(disk) = disk() else { return };
    let (live, root) = live(&disk);
    let rename = |from: &str, to: &str| {
        let [from, to] = [from, to].map(|name| EntryPlace { dir: root, name: name.as_bytes() });
        live.rename(from, to, Rename::Replace, AT).unwrap();
    };
    for name in ["old", "new"] {
        let file = make(&live, root, name);
        live.write(file, 0, &[1; 10_000], AT).unwrap();
    }
    let both = live.buffered.bytes();
    rename("new", "newer");
    assert_eq!(live.buffered.bytes(), both);
    rename("newer", "old");
    assert_eq!(live.buffered.bytes(), 0, "what was replaced is never written");
    live.shut_down().unwrap();
    disk.assert_checks();
}
