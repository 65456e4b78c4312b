//! fsync when other threads are in its way, or when a read fails.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use offshoot_btrfs_format::TreeId;
use offshoot_device::BlockDevice;
use offshoot_testkit::btrfs::checked::CheckedDevice;
use offshoot_vfs::{
    EntryPlace, Errno, FileId, FileSystem, FileSystemMut, NewFile, Result, Timestamp,
};

use super::fsync::{committed_root, log_into};
use crate::test_volumes::{edit_root, in_memory};
use crate::transaction::Obstacle;
use crate::{BtrfsVolume, EngineOptions, Filesystem};

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };

/// Opens a volume that caches nothing but its own changes, and commits only when the test asks.
fn open(device: &Arc<CheckedDevice>) -> Filesystem {
    let options =
        EngineOptions { commit_interval: None, cache_bytes: 0, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(vec![device.clone() as Arc<dyn BlockDevice>], &options);
    volume.and_then(|volume| volume.filesystem(TreeId::FS)).expect("it opens")
}

fn place(dir: FileId, name: &str) -> EntryPlace<'_> {
    EntryPlace { dir, name: name.as_bytes() }
}

/// A block that fsync reads only for the log cannot be read. The commit does not need it, so both
/// fsync and fdatasync succeed.
#[test]
fn what_cannot_be_read_to_be_logged_is_committed() {
    for fsync in [Filesystem::fsync, Filesystem::fdatasync] {
        let device = in_memory(16384);
        let fs = open(&device);
        fs.create(place(fs.root(), "x"), &NEW).expect("a file");
        fs.sync().expect("a commit");
        drop(fs);
        let fs = open(&device);
        let volume = fs.volume();
        let committed = volume.tree(TreeId::FS).expect("it is there");
        fs.rename(place(fs.root(), "x"), place(fs.root(), "y"), AT).expect("a rename");
        volume.delayed.flush(&volume.base, u64::MAX).expect("a flush");
        assert_ne!(volume.tree(TreeId::FS).expect("it is there"), committed);
        edit_root(&device, volume, committed, |bytes| bytes[5000] ^= 1);
        let file = fs.lookup(fs.root(), b"y").expect("it is there");
        fsync(&fs, file).expect("a commit");
        assert_eq!((volume.stats().fsyncs_failed, volume.stats().commits_for_fsync), (1, 1));
        drop(fs);
        let fs = open(&device);
        fs.lookup(fs.root(), b"y").expect("it is there");
    }
}

/// The log reads attributes of a new file only while no thread changes them: otherwise it could
/// have half of a change. For a single file, and among so many that they go to the log in runs.
#[test]
fn a_new_file_that_others_change_is_not_logged_with_its_directory() {
    for count in [1, 100] {
        let fs = open(&in_memory(16384));
        let create = |number| {
            let name = format!("x{number}");
            fs.create(place(fs.root(), &name), &NEW).expect("a file")
        };
        let files: Vec<_> = (0..count).map(create).collect();
        let changing = fs.volume().inodes.lock(&files[count / 2..=count / 2]);
        std::thread::scope(|scope| {
            scope.spawn(|| fs.fsync(fs.root()).expect("a commit"));
        });
        drop(changing);
        let stats = fs.volume().stats();
        assert_eq!((stats.fsyncs_contended, stats.fsyncs_logged), (1, 0), "{count} files");
        assert_eq!(stats.log_runs > 0, count > 1, "{stats:?}");
    }
}

/// A thread that has a file locked, and waits to log it, does not keep its directory from being
/// logged.
#[test]
fn a_new_file_that_others_are_about_to_log_is_logged_with_its_directory() {
    for count in [1, 100] {
        let fs = open(&in_memory(16384));
        let (volume, root) = (fs.volume(), fs.root());
        let create = |number| fs.create(place(root, &format!("x{number}")), &NEW).expect("a file");
        let files: Vec<_> = (0..count).map(create).collect();
        let file = files[count - 1];
        let handle = volume.enter().expect("it is writable");
        let mut trees = volume.log.trees();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| fs.fsync(file));
            while !volume.log.is_waiting(file) {
                std::thread::yield_now();
            }
            let live = volume.live().expect("it is writable");
            let committed = committed_root(live, &handle, TreeId::FS).expect("it is there");
            let committed = committed.expect("it is there");
            let _locked = volume.inodes.lock(&[root]);
            let logged = log_into(&volume.log, &mut trees, live, &handle, root, committed, true);
            assert!(logged.is_ok(), "{count} files");
            drop(trees);
            other.join().expect("it ends").expect("an fsync");
        });
        drop(handle);
        let stats = volume.stats();
        assert_eq!((stats.fsyncs_contended, stats.fsyncs_logged), (0, 1), "{count} files");
    }
}

/// A panic while logging leaves a half-done log: nothing more is logged, and later syncs commit.
#[test]
fn a_panic_while_something_is_logged() {
    let fs = open(&in_memory(16384));
    let file = fs.create(place(fs.root(), "x"), &NEW).expect("a file");
    let volume = fs.volume();
    let panics = AssertUnwindSafe(|| {
        let handle = volume.enter().expect("it is writable");
        super::fsync::begun(handle.log(), || -> Result<(), super::record::LoggingStop> {
            panic!("in the middle of it")
        })
        .is_ok()
    });
    catch_unwind(panics).expect_err("it panics");
    fs.fsync(file).expect("a commit");
    let stats = volume.stats();
    assert_eq!((stats.fsyncs_failed, stats.fsyncs_logged, stats.commits_for_fsync), (1, 0, 1));
}

/// A transaction of a volume that has stopped writing never ends: threads that wait for it get an
/// error.
#[test]
fn who_waits_for_a_commit_is_told_that_it_panicked() {
    let fs = open(&in_memory(16384));
    let file = fs.create(place(fs.root(), "x"), &NEW).expect("a file");
    let volume = fs.volume();
    let panics = AssertUnwindSafe(|| {
        let live = volume.live().expect("it is writable");
        let tree = live.tree(volume, TreeId::FS).expect("it is there");
        let begins = Box::new(|_| panic!("when the next one has begun"));
        volume.upkeep.at_rest(volume, &tree, begins)
    });
    let outcome: Result<Result<()>, _> = catch_unwind(panics);
    outcome.expect_err("it panics");
    let refused = fs.fsync(file).expect_err("it will never be stored");
    assert_eq!(refused.errno(), Errno::ROFS);
    assert_eq!(fs.sync().expect_err("nothing is written").errno(), Errno::ROFS);
}

/// The first obstacle counts, and it stays.
#[test]
fn an_obstacle_stays() {
    let log = crate::transaction::LogState::new(true);
    assert_eq!(log.obstacle(), None);
    log.obstruct(Obstacle::NewChunk);
    log.obstruct(Obstacle::Clones);
    assert_eq!(log.obstacle(), Some(Obstacle::NewChunk));
}
