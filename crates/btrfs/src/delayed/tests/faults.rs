//! Flushes that fail or panic.

use std::panic::AssertUnwindSafe;

use offshoot_device::{Fault, FaultDevice};
use offshoot_testkit::btrfs::checked::CheckedDevice;

use super::bounds::fall_asleep;
use super::*;
use crate::VolumeReport;
use crate::transaction::LiveVolume;
use crate::tree::Blocks;

/// The device of a volume with so many committed files in its root.
fn with_files(files: u64) -> Arc<CheckedDevice> {
    let device = in_memory(4096);
    let fs = open(device.clone(), &quiet());
    for number in 0..files {
        create(&fs, fs.root(), &format!("{number}"));
    }
    fs.sync().expect("a commit");
    device
}

/// Requires that the device holds exactly what was committed, and that the volume can be changed.
fn assert_holds(device: Arc<CheckedDevice>, files: u64) {
    let fs = open(device, &quiet());
    let mut there: Vec<u64> =
        names(&fs, fs.root()).iter().map(|name| name.parse().expect("a number")).collect();
    there.sort_unstable();
    assert!(there.into_iter().eq(0..files));
    for number in 0..files {
        let file = fs.lookup(fs.root(), number.to_string().as_bytes()).expect("it is there");
        assert_eq!(fs.attr(file).expect("it is there").nlink, 1);
    }
    create(&fs, fs.root(), "later");
    fs.sync().expect("a commit");
}

/// A flush cannot read a leaf. The flushing thread gets the error, all writing ends, and the queued
/// items can still be read.
#[test]
fn a_flush_that_fails_ends_all_writing() {
    const FILES: u64 = 3000;
    type Flush = fn(&Filesystem) -> Result<()>;
    let flushes: [Flush; 3] = [
        |fs| fs.volume().delayed.flush(&fs.volume().base, u64::MAX).map(drop),
        |fs| fs.sync(),
        |fs| {
            // Files are made until an operation finds too much queued. Some fail before, because
            // their name belongs to the leaf.
            let make = |number| fs.create(place(fs.root(), &format!("more-{number}")), &NEW);
            let is_broken = || fs.volume().live().and_then(LiveVolume::require_writing).is_err();
            let mut outcomes = (0..).map(make);
            outcomes.find(|outcome| outcome.is_err() && is_broken()).expect("no end").map(drop)
        },
    ];
    for flush in flushes {
        let memory = with_files(FILES);
        let device = Arc::new(FaultDevice::new(memory.clone()));
        let options = EngineOptions { cache_bytes: 0, dirty_bytes: 8 << 20, ..quiet() };
        let fs = open(device.clone(), &options);
        // Entries by hash go to all leaves of the directory.
        for number in 0..500 {
            create(&fs, fs.root(), &format!("new-{number}"));
        }
        for physical in places_of_hashes(fs.volume()) {
            device.add(physical..physical + 4096, Fault::Error);
        }
        let error = flush(&fs).expect_err("a leaf does not read");
        assert!(matches!(error, Error::Io { .. } | Error::Corrupt(_)), "{error}");
        let refused = fs.create(place(fs.root(), "late"), &NEW).expect_err("nothing is written");
        assert_eq!(refused.errno(), Errno::ROFS);
        assert_eq!(fs.sync().expect_err("nothing is written").errno(), Errno::ROFS);
        for number in 0..500 {
            let name = format!("new-{number}");
            match fs.lookup(fs.root(), name.as_bytes()) {
                Ok(file) => assert_eq!(fs.attr(file).expect("it is queued").nlink, 1),
                Err(error) => assert_ne!(error.errno(), Errno::NOENT, "{name}"),
            }
        }
        drop(fs);
        assert_holds(memory, FILES);
    }
}

/// The device fails while a commit writes flushed blocks.
#[test]
fn a_commit_that_fails_leaves_the_last_one() {
    const FILES: u64 = 300;
    let memory = with_files(FILES);
    let device = Arc::new(FaultDevice::new(memory.clone()));
    let fs = open(device.clone(), &quiet());
    for number in 0..200 {
        create(&fs, fs.root(), &format!("new-{number}"));
        fs.unlink(place(fs.root(), &number.to_string()), AT).expect("it is there");
    }
    device.add(0..memory.size_bytes(), Fault::Error);
    assert!(matches!(fs.sync(), Err(Error::Io { .. })));
    assert_eq!(fs.sync().expect_err("nothing is written").errno(), Errno::ROFS);
    drop(fs);
    assert_holds(memory, FILES);
}

/// The addresses on the device of the first leaf with entries by hash below the root of the top
/// level.
fn places_of_hashes(volume: &BtrfsVolume) -> Vec<u64> {
    let mut block = volume.block(&volume.tree(TreeId::FS).unwrap().expected()).unwrap();
    while block.header().level > 0 {
        let slot = block.floor(Key::new(256, ItemType::DIR_ITEM, 0x7000_0000)).unwrap();
        if block.header().level == 1 {
            let logical = block.pointers()[slot].logical();
            let places = volume.storage.write_places(logical, 4096).unwrap();
            return places.iter().map(|(_, physical, _)| physical.0).collect();
        }
        block = volume.block(&block.child_expected(slot, TreeId::FS)).unwrap();
    }
    panic!("the tree has no leaves below its root");
}

/// A panic inside a flush once left the items in their node, where no later flush took them, and
/// the next commit completed without them.
#[test]
fn a_flush_that_panics_ends_all_writing() {
    const FILES: u64 = 3000;
    let memory = with_files(FILES);
    let device = Arc::new(FaultDevice::new(memory.clone()));
    let reporter = Arc::new(|report: &VolumeReport| panic!("whoever is told panics: {report}"));
    let options = EngineOptions { cache_bytes: 0, reporter: Some(reporter), ..quiet() };
    let fs = open(device.clone(), &options);
    for number in 0..500 {
        create(&fs, fs.root(), &format!("new-{number}"));
    }
    let first = places_of_hashes(fs.volume())[0];
    device.add(first..first + 4096, Fault::Error);
    let flush = || fs.volume().delayed.flush(&fs.volume().base, u64::MAX);
    std::thread::scope(|scope| scope.spawn(flush).join()).expect_err("a panic");
    assert_eq!(fs.sync().expect_err("nothing is written").errno(), Errno::ROFS);
    let refused = fs.create(place(fs.root(), "late"), &NEW).expect_err("nothing is written");
    assert_eq!(refused.errno(), Errno::ROFS);
    drop(fs);
    assert_holds(memory, FILES);
}

/// Writers that waited for a flush were once not woken when it ended in a panic.
#[test]
fn who_waits_is_told_that_a_flush_panicked() {
    let options = EngineOptions { dirty_bytes: 4 << 20, ..quiet() };
    let fs = open(in_memory(16384), &options);
    let volume = fs.volume();
    create(&fs, fs.root(), "first");
    let id = NodeId { tree: TreeId::FS, first: 256, kind: DelayedNodeKind::Hashes };
    std::thread::scope(|scope| {
        let handle = volume.enter().expect("it is writable");
        let frozen = volume.delayed.freeze(id).expect("it has an entry");
        // More entries by hash are queued, and no thread can flush them, until a writer waits.
        let make = |number| fs.create(place(fs.root(), &format!("more-{number}")), &NEW);
        let waiter = scope.spawn(move || (0..).find_map(|number| make(number).err()));
        let mut flushed = None;
        while !waiter.is_finished()
            && (volume.delayed.backlog.waiting() == 0
                || flushed != Some(volume.stats().flushes_by_writers))
        {
            flushed = Some(volume.stats().flushes_by_writers);
            fall_asleep();
        }
        let flush = AssertUnwindSafe(|| {
            let _frozen = frozen;
            handle.all_or_stop(|| -> Result<()> { panic!("in the middle of a flush") })
        });
        drop(std::panic::catch_unwind(flush).expect_err("it panics"));
        let error = waiter.join().expect("no panic").expect("no end");
        assert_eq!(error.errno(), Errno::ROFS);
    });
}

/// Only debug builds once checked that everything is flushed when a commit finishes.
#[test]
fn no_commit_goes_on_without_what_is_queued() {
    let memory = with_files(10);
    let fs = open(memory.clone(), &quiet());
    create(&fs, fs.root(), "new");
    let delayed = &fs.volume().delayed;
    let id = NodeId { tree: TreeId::FS, first: 256, kind: DelayedNodeKind::Indexes };
    {
        // This simulates a flushing thread that is gone.
        let mut shard = delayed.shard(id).write();
        let node = shard.get_mut(&id).expect("the directory has a new entry");
        node.flushing = Some(Arc::new(std::mem::take(&mut node.active)));
    }
    let error = fs.sync().expect_err("an item is not in the tree");
    assert!(matches!(error, Error::Corrupt(_)), "{error}");
    assert_eq!(fs.sync().expect_err("nothing is written").errno(), Errno::ROFS);
    drop(fs);
    assert_holds(memory, 10);
}
