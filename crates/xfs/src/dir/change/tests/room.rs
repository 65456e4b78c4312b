//! Volumes with little room, or with room only in pieces; and how much a change reads and logs.

use std::fs::File;

use rustix::fs::{FallocateFlags, fallocate};

use super::*;
use crate::trans::LogReservations;

/// Lets the kernel take all blocks of a volume, and give every second piece of this many bytes of
/// some back.
fn leave_pieces(volume: &NamedVolume, block: u64, pieces: u64) {
    let mount = volume.disk.mount("", &volume.kernel_says);
    volume.disk.xfs_io(mount.path(), &["resblks 0"]);
    let create = |name: &str| File::create(mount.path().join(name)).unwrap();
    let [large, small] = ["large", "small"].map(create);
    let allocate = |file: &File, piece: u64| {
        let mut at = 0;
        while fallocate(file, FallocateFlags::empty(), at, piece).is_ok() {
            at += piece;
        }
        at
    };
    let len = allocate(&large, 1 << 20);
    allocate(&small, 4096);
    assert!(len >= 2 * pieces * block, "{len}");
    for piece in 0..pieces {
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&large, punch, 2 * piece * block, block).unwrap();
    }
}

const SMALL: &str = "--unsupported -m rmapbt=0,reflink=0,finobt=0,inobtcount=0";

/// No two free blocks are in a row, and directory blocks have four.
#[test]
fn directory_blocks_are_put_together_from_pieces() {
    let options = format!("{SMALL} -n size=16384");
    let Some(mut volume) = NamedVolume::make(128, &options, 2, seed_of_run()) else { return };
    leave_pieces(&volume, 4096, 2000);
    let engine = engine(&volume.disk);
    let directory = |number: usize| usize::from(number.is_multiple_of(4));
    for number in 0..3000 {
        let name = format!("the name with number {number}");
        volume.add(&engine, directory(number), name.as_bytes());
    }
    assert_eq!(volume.form(&engine, 0), Some(DaKind::DirNode));
    let mut t = engine.begin(Kind::ChangeInode, 0).unwrap();
    let core = t.inode(volume.directories[0].ino).unwrap().core();
    let (extents, blocks) = (core.extent_counts().0, core.nblocks.get());
    assert!(2 * extents > blocks, "{blocks} blocks are in {extents} extents");
    drop(t);
    volume.assert_we_find(&engine);
    engine.log().push_tail().unwrap();
    volume.assert_we_find(&engine);
    for number in 0..2900 {
        let name = format!("the name with number {number}");
        volume.remove(&engine, directory(number), name.as_bytes());
    }
    volume.assert_we_find(&engine);
    let copy = volume.disk.copy();
    // The kernel would prove a piece in the log as if it were a whole block. We do not.
    let recovered = XfsVolume::recover(&copy.writable_device(), &XfsOptions::default()).unwrap();
    assert!(recovered.is_some());
    copy.assert_checks();
    volume.assert_kernel_finds(copy.mount("nouuid", &[]).path());
    volume.assert_unmounts(engine);
}

/// A change that finds no block leaves the directory as it was.
#[test]
fn a_change_without_space_leaves_the_directory() {
    let Some(mut volume) = NamedVolume::make(128, SMALL, 1, seed_of_run()) else { return };
    leave_pieces(&volume, 4096, 60);
    let engine = engine(&volume.disk);
    let name = |number: usize| format!("{number:0200}").into_bytes();
    let mut refused = 0;
    let mut number = 0;
    while refused < 20 {
        let free = engine.counters().counts().free_blocks;
        // More than there are, so that the change fails in its middle.
        let mut t = engine.begin(Kind::Link, 0).unwrap();
        let change = XfsNameChange::Add(3);
        match volume.perform(&mut t, 0, &name(number), change) {
            Ok(work) => {
                let mut chain = DeferredChain::new(&volume.ids);
                chain.defer(&mut t, work);
                chain.finish(t, &[]).unwrap();
                volume.directories[0].names.insert(name(number), 3);
            }
            Err(error) => {
                assert_eq!(error.errno(), Errno::NOSPC, "{error}");
                refused += 1;
                drop(t);
                assert_eq!(engine.counters().counts().free_blocks, free);
            }
        }
        number += 1;
    }
    assert!(number > 300, "{number}");
    volume.assert_we_find(&engine);
    volume.remove_all(&engine, 0);
    volume.assert_unmounts(engine);
}

/// One change in a directory of 100,000 names reads few blocks, and logs parts of few.
#[test]
fn a_change_in_a_large_directory_touches_few_blocks() {
    let Some(mut volume) = NamedVolume::make(1 << 10, "", 1, seed_of_run()) else { return };
    let name = |number: usize| format!("a name of the kernel {number}").into_bytes();
    volume.let_kernel_add((0..100_000).map(name).collect());
    let engine = engine(&volume.disk);
    let (mut held, mut most_held, changes) = (0, 0, 900);
    let logged = engine.log().statistics().bytes;
    for step in 0..changes {
        let (change, number) = match step % 3 {
            0 => (XfsNameChange::Add(4), 200_000 + step),
            1 => (XfsNameChange::Remove, step * 101),
            _ => (XfsNameChange::Replace(4), step * 101),
        };
        let name = name(number);
        let mut t = NamedVolume::begin(&engine, change).unwrap();
        let work = volume.perform(&mut t, 0, &name, change).unwrap();
        let blocks = t.held_buffers().len();
        (held, most_held) = (held + blocks, most_held.max(blocks));
        let mut chain = DeferredChain::new(&volume.ids);
        chain.defer(&mut t, work);
        chain.finish(t, &[]).unwrap();
        engine.log().force_all().unwrap();
        let names = &mut volume.directories[0].names;
        match change {
            XfsNameChange::Remove => names.remove(&name),
            XfsNameChange::Add(file) | XfsNameChange::Replace(file) => names.insert(name, file),
        };
    }
    let logged = engine.log().statistics().bytes - logged;
    // A node, a leaf, a data block and an index block, and what a split and space for it take.
    assert!(held < changes * 7, "{held} blocks in {changes} changes");
    assert!(most_held < 24, "{most_held} blocks");
    assert!(logged < changes as u64 * 12_288, "{logged} bytes in {changes} changes");
    engine.unmount().unwrap();
    volume.disk.assert_checks();
    volume.assert_reader_finds(
        &XfsVolume::open(volume.disk.device(), &XfsOptions::default()).unwrap(),
    );
}

/// A directory block of 64 KiB comes in four pieces of 16 KiB, and not in more. The log space of a
/// transaction is enough for any number of such blocks that one change takes.
#[test]
fn large_directory_blocks_come_in_few_pieces() {
    let options = format!("{SMALL} -n size=65536");
    let Some(mut volume) = NamedVolume::make(160, &options, 1, seed_of_run()) else { return };
    leave_pieces(&volume, 16 << 10, 1500);
    let engine = engine(&volume.disk);
    let reserved = |kind| LogReservations::of(engine.geometry()).get(kind).bytes;
    let (mut most, mut name) = (0, 0);
    while volume.form(&engine, 0) != Some(DaKind::DirNode) || name < 14_000 {
        engine.log().force_all().unwrap();
        let before = engine.log().statistics().bytes;
        volume.add(&engine, 0, format!("{name:0200}").as_bytes());
        engine.log().force_all().unwrap();
        most = most.max(engine.log().statistics().bytes - before);
        name += 1;
    }
    // With a margin: the bytes of all steps of one addition.
    assert!(2 * most < reserved(Kind::Link), "{most} of {}", reserved(Kind::Link));
    let mut t = engine.begin(Kind::ChangeInode, 0).unwrap();
    let core = t.inode(volume.directories[0].ino).unwrap().core();
    let (extents, blocks) = (core.extent_counts().0, core.nblocks.get());
    assert!(extents * 5 > blocks, "{blocks} blocks are in {extents} extents");
    drop(t);
    volume.assert_we_find(&engine);
    engine.unmount().unwrap();
    volume.disk.assert_checks();
}

/// Where all free pieces are smaller, there is no room for such a block.
#[test]
fn a_large_directory_block_does_not_come_in_many_pieces() {
    let options = format!("{SMALL} -n size=65536");
    let Some(mut volume) = NamedVolume::make(128, &options, 1, seed_of_run()) else { return };
    leave_pieces(&volume, 8 << 10, 1000);
    let engine = engine(&volume.disk);
    let mut added = 0;
    let error = loop {
        let name = format!("a name {added}").into_bytes();
        if let Err(error) = volume.try_change(&engine, 0, &name, XfsNameChange::Add(3)) {
            break error;
        }
        added += 1;
    };
    assert_eq!(error.errno(), Errno::NOSPC, "{error}");
    let mut t = engine.begin(Kind::ChangeInode, 0).unwrap();
    let core = t.inode(volume.directories[0].ino).unwrap().core();
    let (extents, blocks) = (core.extent_counts().0, core.nblocks.get());
    assert!(extents * 4 <= blocks, "{blocks} blocks are in {extents} extents");
    drop(t);
    volume.assert_we_find(&engine);
    volume.remove_all(&engine, 0);
    volume.assert_unmounts(engine);
}

/// Names go at random places of a directory with 9 blocks of the index, and then in the first of
/// these, and others come: they go where room is, and each change touches few blocks.
#[test]
fn a_large_directory_does_not_grow_when_its_names_change() {
    let Some(mut volume) = NamedVolume::make(1 << 10, "", 1, seed_of_run()) else { return };
    let name = |number: usize| format!("{number:0255}");
    let mut names: Vec<_> = (0..228_000).map(name).collect();
    volume.let_kernel_add(names.iter().map(|name| name.clone().into_bytes()).collect());
    let engine = engine(&volume.disk);
    let dir = volume.directories[0].ino;
    let blocks = |engine: &XfsTransactions| {
        let mut t = engine.begin(Kind::ChangeInode, 0).unwrap();
        t.inode(dir).unwrap().core().size.get() / 4096
    };
    let before = blocks(&engine);
    assert!(before > 8 * 2016, "{before}");
    let (mut most_held, mut added) = (0, 300_000);
    for places in [200_000, 200_000, 20_000] {
        let gone: Vec<_> = (0..1000).map(|_| names.remove(volume.below(places))).collect();
        for name in &gone {
            volume.remove_quickly(&engine, name.as_bytes());
        }
        for _ in 0..1000 {
            let (name, change) = (name(added).into_bytes(), XfsNameChange::Add(3));
            let mut t = NamedVolume::begin(&engine, change).unwrap();
            let work = volume.perform(&mut t, 0, &name, change).unwrap();
            most_held = most_held.max(t.held_buffers().len());
            let mut chain = DeferredChain::new(&volume.ids);
            chain.defer(&mut t, work);
            chain.finish(t, &[]).unwrap();
            volume.directories[0].names.insert(name, 3);
            added += 1;
        }
    }
    // 3,000 names are 210 blocks.
    let after = blocks(&engine);
    assert!(after < before + 40, "{before} blocks have become {after}");
    assert!(most_held < 40, "{most_held} blocks");
    engine.unmount().unwrap();
    volume.disk.assert_checks();
}
