//! Groups that are full, locked, damaged, or of large blocks, and clusters of inodes on their way
//! home.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_testkit::random::seed_of_run;
use offshoot_testkit::xfs::disk::LARGE_BLOCKS;
use offshoot_vfs::{Errno, Error};
use offshoot_xfs_format::log::items::XfsReverseOp;
use offshoot_xfs_format::record::{XfsExtent, XfsExtentItem};
use offshoot_xfs_format::{AgBlock, AgIno, AgNumber, FileBlock};
use parking_lot::Mutex;

use super::{
    UnnamedChurn, UnnamedChurnPlan, assert_closes_clean, churn, engine_on, map_extent, volume,
};
use crate::buffer::{BufferRole, DiskRun};
use crate::group::{self, ExtentWish, ReverseOwner};
use crate::inode::{XfsInodes, file_id};
use crate::trans::{ChangedFork, ForkName, XfsTransactionKind as Kind};
use crate::{XfsOptions, XfsVolume};

/// The blocks that a mapping of a test takes at most.
const MOST_TAKEN: u32 = 1 << 16;

impl UnnamedChurn<'_> {
    /// Adds an extent of a group to a file. Returns false when the group has none.
    fn take_from(&mut self, index: usize, ag: u32, most: u32) -> Result<bool, Error> {
        let (ag, fork) = (AgNumber(ag), ForkName::Data);
        let mut t = self.engine.begin(Kind::Write, 64)?;
        let wish = ExtentWish { least: 1, ..ExtentWish::blocks(most) };
        let Some(found) = group::allocate(&mut t, ag, &wish)? else { return Ok(false) };
        let file = &mut self.files[index];
        // Never joined with the extent before it.
        let offset = FileBlock(file.end + 1);
        let record = ReverseOwner::file(file.ino, fork, offset, false).over(found);
        group::change_reverse(&mut t, ag, XfsReverseOp::Map, &record)?;
        let start = self.engine.geometry().fs_block(ag, found.start);
        let extent = XfsExtent { offset, start, count: found.count, is_unwritten: false };
        let step = map_extent(&mut t, file.ino, fork, &extent)?;
        assert!(step.tree_blocks.is_empty());
        t.commit()?;
        file.end = offset.0 + u64::from(found.count);
        Ok(true)
    }

    /// Takes from a group what files may have.
    fn drain(&mut self, index: usize, ag: u32) {
        while self.take_from(index, ag, MOST_TAKEN).unwrap() {}
    }

    fn free_all(&mut self) {
        while !self.files.is_empty() {
            self.free(0);
        }
    }
}

/// One block has the inodes of two chunks.
#[test]
fn judges_find_blocks_of_64_kib_clean() {
    churn(&UnnamedChurnPlan {
        mib: 4 << 10,
        kernel_says: &[LARGE_BLOCKS],
        ..UnnamedChurnPlan::of_run("-b size=65536 -m rmapbt=1")
    });
}

/// A removal from a group that is full makes its trees grow.
#[test]
fn a_full_group_has_blocks_for_its_trees() {
    let Some((disk, engine)) = volume(1 << 10, "") else { return };
    let mut churn = UnnamedChurn::new(&engine, seed_of_run(), 0..1);
    churn.make();
    churn.drain(0, 1);
    let kept = group::held_back(engine.buffers(), engine.superblock(), AgNumber(1)).unwrap();
    let free = group::free_blocks(engine.buffers(), AgNumber(1)).unwrap();
    assert!(kept.rest() > 1000 && free >= kept.rest(), "{free} blocks, {kept:?}");
    assert!(free < kept.rest() + 100, "{free} blocks, {kept:?}");
    let mut t = engine.begin(Kind::CreateUnnamed, 64).unwrap();
    assert!(!group::make_chunk(&mut t, AgNumber(1), 1).unwrap());
    assert!(t.commit().unwrap().is_none(), "a full group was changed");
    for at in 1..1500 {
        churn.cut(0, at * 2, at * 2 + 1);
    }
    churn.free_all();
    assert_closes_clean(&disk, engine, &[]);
}

/// A fork whose group is full takes blocks of the groups below it, but does not wait for them
/// while it has a higher one.
#[test]
fn a_fork_takes_blocks_of_lower_groups_and_waits_for_none() {
    let Some((disk, engine)) = volume(1 << 10, "") else { return };
    let mut churn = UnnamedChurn::new(&engine, seed_of_run(), 0..1);
    for _ in 0..2 {
        churn.make();
    }
    // As many extents as fit in the inode, and then one more.
    let ino = churn.files[0].ino;
    let mut t = engine.begin(Kind::ClearUnlinked, 0).unwrap();
    let bytes = t.inode(ino).unwrap().room(ForkName::Data, engine.geometry()).unwrap();
    drop(t);
    for _ in 0..bytes / size_of::<XfsExtentItem>() {
        assert!(churn.take_from(0, 3, 1).unwrap());
    }
    churn.drain(1, 3);
    let hold = |ag| {
        let mut t = engine.begin(Kind::Write, 64).unwrap();
        group::allocate(&mut t, AgNumber(ag), &ExtentWish::blocks(1)).unwrap().unwrap();
        t
    };
    let mut t = engine.begin(Kind::Write, 64).unwrap();
    let wish = ExtentWish::blocks(1);
    assert_eq!(group::allocate(&mut t, AgNumber(3), &wish).unwrap(), None);
    assert!(t.may_wait_for(BufferRole::FreeSpace(AgNumber(3))));
    assert!(!t.may_wait_for(BufferRole::FreeSpace(AgNumber(2))));
    let start = engine.geometry().fs_block(AgNumber(0), AgBlock(60_000));
    let extent = XfsExtent { offset: FileBlock(1 << 30), start, count: 1, is_unwritten: false };
    let mut group_of_tree = |others| {
        let _held: Vec<_> = Range::map(others, hold).collect();
        map_extent(&mut t, ino, ForkName::Data, &extent)?;
        let fork = t.inode(ino).unwrap().fork(ForkName::Data).cloned();
        let Some(ChangedFork::Btree(root)) = fork else { panic!("{fork:?}") };
        Ok::<_, Error>(engine.geometry().split(root.children[0].1).unwrap().0.0)
    };
    let error = group_of_tree(0..3).unwrap_err();
    assert!(matches!(error, Error::Posix { errno: Errno::AGAIN, .. }), "{error}");
    assert_eq!(group_of_tree(0..2).unwrap(), 2);
    drop(t);
    churn.free_all();
    assert_closes_clean(&disk, engine, &[]);
}

#[test]
fn trees_of_inodes_that_contradict_each_other_are_damage() {
    let Some((disk, engine)) = volume(1 << 10, "") else { return };
    engine.unmount().unwrap();
    // Of the chunk of the root three inodes are in use; the other tree says that four are.
    let counts = "write -d recs[1].freecount 60";
    let mask = "write -d recs[1].free 0x7ffffffffffffff8";
    disk.change_with_xfs_db(&["agi 0", "addr free_root", counts, mask]);
    let engine = engine_on(disk.writable_device());
    let mut t = engine.begin(Kind::CreateUnnamed, 64).unwrap();
    let error = group::take_inode(&mut t, AgNumber(0), AgIno(0)).unwrap_err();
    assert!(error.to_string().contains("group 0, inode 128"), "{error}");
    drop(t);
}

/// How often each place is written.
#[derive(Debug)]
struct CountingDevice {
    inner: Arc<dyn BlockDevice>,
    writes: Mutex<BTreeMap<u64, usize>>,
}

impl offshoot_device::Delegate for CountingDevice {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        *self.writes.lock().entry(offset).or_default() += 1;
        self.inner.write_at(offset, bytes)
    }
}

#[test]
fn a_cluster_goes_home_once_with_all_its_inodes() {
    let Some((disk, engine)) = volume(1 << 10, "") else { return };
    engine.unmount().unwrap();
    let inner = disk.writable_device();
    let device = Arc::new(CountingDevice { inner, writes: Mutex::default() });
    let engine = engine_on(device.clone());
    let mut churn = UnnamedChurn::new(&engine, seed_of_run(), 0..1);
    for round in 0..2 {
        for _ in 0..100 {
            churn.make();
        }
        device.writes.lock().clear();
        engine.log().push_tail().unwrap();
        let geometry = engine.geometry();
        let mut clusters = BTreeMap::new();
        for file in &churn.files[round * 100..] {
            let (ag, block, _) = geometry.locate(file.ino).unwrap();
            let run = DiskRun::cluster(geometry, ag, block);
            let writes = device.writes.lock().get(&run.at.bytes()).copied();
            clusters.insert(run.at, writes);
        }
        assert!(clusters.len() > 2 && clusters.values().all(|writes| *writes == Some(1)));
    }
    churn.free_all();
    assert_closes_clean(&disk, engine, &[]);
}

/// A reader that has an inode in its cache sees the next commit, before it is in its cluster and
/// behind that, also where clusters are larger or smaller than usual.
#[test]
fn readers_see_inodes_that_are_committed_and_not_home() {
    for options in ["", "-i size=2048", "-m rmapbt=0,reflink=0 -i sparse=0 -b size=1024"] {
        let Some((disk, engine)) = volume(1 << 10, options) else { return };
        let mut churn = UnnamedChurn::new(&engine, seed_of_run(), 0..1);
        for _ in 0..80 {
            churn.make();
        }
        let kept = XfsInodes::new(1 << 20);
        let inos: Vec<_> = churn.files.iter().map(|file| file.ino).step_by(7).collect();
        for (&ino, size) in inos.iter().zip(1_u64..) {
            let size_in = |inodes: &XfsInodes| {
                let inode = inodes.get(engine.buffers(), file_id(ino)).unwrap();
                inode.core.size.get()
            };
            assert_ne!(size_in(&kept), size);
            for size in [size, size + 1] {
                let mut t = engine.begin(Kind::ChangeInode, 0).unwrap();
                let before = size_in(&kept);
                t.inode(ino).unwrap().core_mut().size = size.into();
                assert_eq!(size_in(&kept), before, "it is not committed");
                t.commit().unwrap();
                assert_eq!(size_in(&kept), size);
                assert_eq!(size_in(&XfsInodes::new(1 << 20)), size);
                engine.log().push_tail().unwrap();
                assert!(engine.buffers().committed_inode(ino).is_none(), "it is home");
                assert_eq!((size_in(&kept), size_in(&XfsInodes::new(1 << 20))), (size, size));
            }
        }
        churn.free_all();
        assert_closes_clean(&disk, engine, &[]);
    }
}

/// The kernel shuts the volume down in its recovery. Nothing is done by ours, which says why.
#[test]
fn an_unlinked_inode_that_miscounts_its_extents_is_named() {
    let Some((disk, engine)) = volume(1 << 10, "") else { return };
    let mut churn = UnnamedChurn::new(&engine, seed_of_run(), 0..2);
    for index in 0..3 {
        churn.make();
        (0..60).for_each(|_| churn.grow(index));
    }
    let ino = churn.files[1].ino;
    let mut t = engine.begin(Kind::ClearUnlinked, 0).unwrap();
    let count = t.inode(ino).unwrap().extent_count(ForkName::Data);
    drop(t);
    // At home, and not in the log any more, which would write over the change: a record tells the
    // tail as it was before it.
    engine.log().push_tail().unwrap();
    (0..2).for_each(|_| engine.write_counters().unwrap());
    drop(churn);
    // The image is free again, also with changes that are not home.
    drop(engine);
    let change = format!("write -d core.nextents {}", count + 1);
    disk.change_with_xfs_db(&[&format!("inode {ino}"), &change]);
    let problem = format!("inode {ino}: Data: {count} extents, and {} are counted", count + 1);
    let before = XfsVolume::open(disk.device(), &XfsOptions::default());
    drop(before.expect("readers do without"));
    let device = disk.writable_device();
    for _ in 0..2 {
        let error = XfsVolume::recover(&device, &XfsOptions::default()).unwrap_err();
        assert!(error.to_string().contains(&problem), "{error}");
    }
}
