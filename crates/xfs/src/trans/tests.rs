use std::sync::Arc;

use offshoot_testkit::xfs::disk::XfsDisk;
use offshoot_testkit::xfs::judges;
use offshoot_xfs_format::log::XfsLogVector;
use offshoot_xfs_format::superblock::XfsSuperblock;
use offshoot_xfs_format::{BasicBlock, FileBlock, Ino};

use super::buffer_item::{BufferChange, LoggedBuffer};
use super::chunks::DirtyChunks;
use super::inode_item::XfsLoggedInode;
use super::{
    ChangedFork, ForkName, LogReservations, XfsLogReservation, XfsTransactionKind as Kind,
};
use crate::buffer::{BufferRole, DiskRun, XfsBuffer, sector_at};
use crate::log::LoggedItem;
use crate::test_volumes::engine;

/// The kinds with the numbers that `xfs_db -c logres` prints for them.
const NUMBERS: [(Kind, u64); 18] = [
    (Kind::Write, 0),
    (Kind::Truncate, 1),
    (Kind::Rename, 2),
    (Kind::Link, 3),
    (Kind::Remove, 4),
    (Kind::Symlink, 5),
    (Kind::Create, 6),
    (Kind::CreateUnnamed, 7),
    (Kind::Mkdir, 8),
    (Kind::FreeInode, 9),
    (Kind::ChangeInode, 10),
    (Kind::AddAttributeFork, 12),
    (Kind::DropAttributes, 14),
    (Kind::SetAttribute, 15),
    (Kind::RemoveAttribute, 17),
    (Kind::ClearUnlinked, 18),
    (Kind::Superblock, 24),
    (Kind::ChangeTimes, 25),
];

#[test]
fn reservations_are_those_of_the_kernel() {
    let Some(judges) = judges::require() else { return };
    let mut wrong = Vec::new();
    for (mib, options) in [
        (1 << 10, ""),
        (1 << 10, "-b size=1024"),
        (1 << 10, "-m rmapbt=0"),
        (1 << 10, "-m rmapbt=0,reflink=0"),
        (1 << 10, "-m reflink=0"),
        (1 << 10, "-m finobt=0,rmapbt=0,reflink=0,inobtcount=0"),
        (1 << 10, "-s size=4096"),
        (1 << 10, "-i size=2048"),
        (1 << 10, "-n size=16384"),
        (1 << 10, "-n parent=1"),
        (1 << 10, "-i nrext64=0,size=1024"),
        (4 << 10, "-b size=65536"),
        (200 << 10, "-b size=2048 -n size=65536"),
    ] {
        let disk = XfsDisk::create(&judges, mib);
        disk.mkfs(options);
        let bytes = sector_at(&*disk.device(), 0).unwrap();
        let ours = LogReservations::of(&XfsSuperblock::parse(&bytes).unwrap().geometry);
        let shown = disk.xfs_db(&["logres"]);
        for (kind, number) in NUMBERS {
            let line = shown.lines().find(|line| line.starts_with(&format!("type {number} ")));
            let words: Vec<_> = line.unwrap_or_default().split_whitespace().collect();
            let field = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok());
            let (bytes, count) = field(3).zip(field(5)).unwrap();
            let theirs = XfsLogReservation { bytes, count: count.max(1) };
            if ours.get(kind) != theirs {
                wrong.push(format!("{options}: {kind:?} {:?} {theirs:?}", ours.get(kind)));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Also while the next context has the block already. A commit in a debug build would refuse it.
#[test]
fn a_block_is_proved_as_its_context_has_it() {
    const LEN: usize = 4096;
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 1 << 10);
    disk.mkfs("");
    let engine = engine(&disk);
    let run = DiskRun { at: BasicBlock(8000), bytes: LEN };
    let item = LoggedBuffer::new(run.into(), &engine.shared);
    let unsound = || {
        let role = BufferRole::Directory(Ino(128), FileBlock(0));
        let buffer = Arc::new(XfsBuffer::changed(role, run.at, [1; LEN].into()));
        let mut dirty = DirtyChunks::new(LEN);
        dirty.add(0..LEN);
        BufferChange::Bytes(buffer, dirty)
    };
    let commit = |change, is_new| {
        item.commit(change);
        if is_new {
            item.pin();
        }
        item.format(&mut XfsLogVector::default());
    };
    commit(unsound(), true);
    commit(unsound(), false);
    item.prove().unwrap_err();
    item.prove().expect("once a context");
    commit(unsound(), true);
    commit(BufferChange::Cancelled, true);
    item.prove().unwrap_err();
    item.prove().expect("it is free in the next context");
    commit(unsound(), true);
    commit(BufferChange::Cancelled, false);
    item.prove().expect("it is free in the same context");
    assert_eq!(engine.statistics().proofs, 2);
}

/// A write of an inode ends while a commit has it whose transaction has freed its chunk: the commit
/// formats the fields that its size was taken for. They go when nothing has the inode.
#[test]
fn a_freed_inode_keeps_its_fields_while_a_commit_has_it() {
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 512);
    disk.mkfs("");
    let engine = engine(&disk);
    let root = engine.superblock().root().unwrap();
    let mut t = engine.begin(Kind::ChangeInode, 0).unwrap();
    let inode = t.inode(root).unwrap();
    let Some(ChangedFork::Local(names)) = inode.fork(ForkName::Data).cloned() else {
        panic!("the root has blocks");
    };
    inode.set_fork(ForkName::Data, ChangedFork::Local(names));
    let change = inode.change(engine.geometry()).unwrap().unwrap();
    let item = XfsLoggedInode::new(inode.place(), &engine.shared);
    item.commit(change);
    let (size, without_fields) = (item.size(), 2);
    assert!(size.regions > without_fields);
    item.lock().make_stale();
    item.written(false);
    assert_eq!(item.size(), size);
    item.committed(None);
    item.written(true);
    assert_eq!(item.size().regions, without_fields);
    drop(t);
    engine.unmount().unwrap();
}

/// A reader that has seen a chunk in use, in the moment before the commit that frees it, finds no
/// older inode in the cluster.
#[test]
fn an_inode_stays_with_readers_until_they_see_that_its_chunk_is_free() {
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 512);
    disk.mkfs("");
    let engine = engine(&disk);
    let root = engine.superblock().root().unwrap();
    let mut t = engine.begin(Kind::ChangeInode, 0).unwrap();
    let cluster = t.inode(root).unwrap().place().cluster;
    t.commit_inode(root).unwrap().unwrap();
    let is_found = || engine.buffers().committed_inode(root).is_some();
    engine.shared.free_cluster(cluster);
    assert!(is_found(), "its AGI is not published");
    engine.shared.forget_freed_cluster(cluster);
    assert!(!is_found());
    engine.unmount().unwrap();
}
