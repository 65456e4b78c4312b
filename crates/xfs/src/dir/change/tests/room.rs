//! Volumes with little room, or with room only in pieces; and how much a change reads and logs.

use std::fs::File;

use rustix::fs::{FallocateFlags, fallocate};

use super::*;

/// Lets the kernel take all blocks of a volume, and give every second one of some back.
fn leave_single_blocks(volume: &NamedVolume, block: u64, pieces: u64) {
    let mount = volume.disk.mount("", &volume.kernel_says);
    volume.disk.xfs_io(mount.path(), &["resblks 0"]);
    let allocate = |name: &str, piece: u64| {
        let file = File::create(mount.path().join(name)).unwrap();
        let mut at = 0;
        while fallocate(&file, FallocateFlags::empty(), at, piece).is_ok() {
            at += piece;
        }
        (file, at)
    };
    let (file, len) = allocate("large", 1 << 20);
    let _small = allocate("small", block);
    assert!(len >= 2 * pieces * block, "{len}");
    for piece in 0..pieces {
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&file, punch, 2 * piece * block, block).unwrap();
    }
}

const SMALL: &str = "--unsupported -m rmapbt=0,reflink=0,finobt=0,inobtcount=0";

/// No two free blocks are in a row, and directory blocks have four.
#[test]
fn directory_blocks_are_put_together_from_pieces() {
    let options = format!("{SMALL} -n size=16384");
    let Some(mut volume) = NamedVolume::make(128, &options, 2, seed_of_run()) else { return };
    leave_single_blocks(&volume, 4096, 2000);
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
    leave_single_blocks(&volume, 4096, 60);
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
