//! Forks with many extents, hints, and limits.

use std::os::unix::fs::FileExt;

use offshoot_testkit::random::seed_of_run;
use offshoot_testkit::xfs::disk::XfsDisk;
use offshoot_vfs::Errno;
use offshoot_xfs_format::inode::{XfsInodeFlags, XfsInodeFlags2};
use offshoot_xfs_format::{FileBlock, Ino};

use rustix::fs::{FallocateFlags, fallocate};

use super::{ModelVolume, engine};
use crate::file::share::XfsCloneRange;
use crate::file::{FORK, XfsFileChanges, require_extents, require_file};
use crate::inode::change::{end, next_mapped};
use crate::trans::{ChangedFork, XfsTransactionKind as Kind, XfsTransactions};

/// The extents of a file: offset, blocks, and whether they are unwritten.
fn extents(engine: &XfsTransactions, ino: Ino) -> Vec<(u64, u32, bool)> {
    let mut t = engine.begin(Kind::ChangeTimes, 0).unwrap();
    let (mut all, mut at) = (Vec::new(), 0);
    while let Some(extent) = next_mapped(&mut t, ino, FORK, FileBlock(at)).unwrap() {
        all.push((extent.offset.0, extent.count, extent.is_unwritten));
        at = end(&extent);
    }
    all
}

/// Every second block is written: the extents become a tree of several levels.
#[test]
fn files_with_thousands_of_extents_are_changed() {
    let Some(mut volume) = ModelVolume::make(1 << 10, "-b size=1024", seed_of_run()) else {
        return;
    };
    let engine = engine(&volume.disk);
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    let (block, blocks) = (1024, 1500);
    let ino = volume.model.files[0].ino;
    volume.model.truncate(changes, 0, blocks * block);
    changes.allocate(ino, 0..blocks).unwrap();
    assert_eq!(extents(&engine, ino), [(0, 1500, true)]);
    for at in (0..blocks).step_by(2) {
        volume.model.write(changes, 0, at * block..(at + 1) * block, false);
    }
    assert_eq!(extents(&engine, ino).len(), 1500);
    volume.model.insert(changes, 0, &(700 * block..703 * block));
    volume.model.collapse(changes, 0, &(200 * block..260 * block));
    volume.model.share(changes, (0, 0), (1, 5), 1443);
    assert!(extents(&engine, volume.model.files[1].ino).len() > 700);
    volume.assert_cut_recovers(&engine);
    // What is written a second time becomes one extent, and the tree a list.
    volume.model.write(changes, 0, 3 * block..1400 * block, false);
    volume.model.punch(changes, 1, &(10 * block..1440 * block + 9), true);
    assert!(extents(&engine, volume.model.files[1].ino).len() < 12);
    for file in 0..2 {
        volume.model.truncate(changes, file, 100);
        let mut t = engine.begin(Kind::ChangeTimes, 0).unwrap();
        let fork = t.inode(volume.model.files[file].ino).unwrap().fork(FORK).cloned();
        assert!(matches!(fork, Some(ChangedFork::Extents(_))));
    }
    volume.assert_unmounts(engine);
}

#[test]
fn a_file_is_allocated_in_as_few_extents_as_the_groups_allow() {
    let Some(volume) = ModelVolume::make(1 << 10, "", seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    let ino = volume.model.files[0].ino;
    // A group has 65,536 blocks, and the third one the log.
    changes.allocate(ino, 0..150_000).unwrap();
    let found = extents(&engine, ino);
    assert!(found.len() <= 6, "{found:?}");
    changes.allocate(ino, 150_000..150_010).unwrap();
    assert!(extents(&engine, ino).len() <= found.len() + 1);
    volume.assert_unmounts(engine);
}

/// Blocks 20 and 21 with a hint of 16 are 16..32, and do not go over what is there.
#[test]
fn a_hint_makes_allocations_larger() {
    let Some(mut volume) = ModelVolume::make(1 << 10, "", seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    let ino = volume.model.files[0].ino;
    let mut t = engine.begin(Kind::ChangeInode, 0).unwrap();
    let core = t.inode(ino).unwrap().core_mut();
    core.extsize = 16.into();
    core.flags = (core.flags() | XfsInodeFlags::EXTSIZE).bits().into();
    t.commit().unwrap();
    volume.model.write(changes, 0, 20 * 4096..22 * 4096, false);
    assert_eq!(extents(&engine, ino), [(16, 4, true), (20, 2, false), (22, 10, true)]);
    changes.allocate(ino, 35..36).unwrap();
    volume.model.punch(changes, 0, &(32 * 4096..33 * 4096), true);
    volume.model.punch(changes, 0, &(40 * 4096..48 * 4096), true);
    volume.model.write(changes, 0, 32 * 4096..47 * 4096, false);
    // Blocks that were just freed are not taken again, so it is more than one extent.
    let mut found = extents(&engine, ino).split_off(3);
    assert_eq!(found.pop(), Some((47, 1, true)));
    let written: Vec<_> =
        found.iter().flat_map(|&(at, count, _)| at..at + u64::from(count)).collect();
    assert!(found.iter().all(|found| !found.2) && written.into_iter().eq(32..47), "{found:?}");
    volume.assert_cut_recovers(&engine);
    volume.assert_unmounts(engine);
}

/// Zeros in holes, in data and in unwritten blocks, which begin and end in blocks or between them.
#[test]
fn zeros_are_where_the_kernel_has_them() {
    let Some(volume) = ModelVolume::make(300, "", seed_of_run()) else { return };
    let ranges =
        [5..4096, 8190..12_290, 16_384..24_576, 30_000..30_001, 40_000..90_007, 200_000..200_100];
    let mount = volume.disk.mount("", &[]);
    for (file, ino) in volume.model.files[..2].iter().zip(0..) {
        let file = std::fs::File::options().write(true).open(mount.path().join(file.name)).unwrap();
        file.write_all_at(&[7; 4096], 4096).unwrap();
        file.write_all_at(&[7; 5000], 50_000).unwrap();
        file.set_len(150_000).unwrap();
        fallocate(&file, FallocateFlags::KEEP_SIZE, 70_000, 9000).unwrap();
        for range in ranges.clone().into_iter().filter(|_| ino == 0) {
            let (flags, len) =
                (FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE, range.end - range.start);
            fallocate(&file, flags, range.start, len).unwrap();
        }
    }
    drop(mount);
    let engine = engine(&volume.disk);
    let [theirs, ours] = [0, 1].map(|file| volume.model.files[file].ino);
    for range in ranges {
        XfsFileChanges::new(&engine, &volume.ids).zero(ours, &range).unwrap();
    }
    // One extent may be two on the device.
    let blocks = |ino| {
        let all = extents(&engine, ino).into_iter();
        let of = |(at, count, is_unwritten)| {
            (at..at + u64::from(count)).map(move |at| (at, is_unwritten))
        };
        all.flat_map(of).collect::<Vec<_>>()
    };
    assert_eq!(blocks(ours), blocks(theirs));
    engine.unmount().unwrap();
    volume.disk.assert_checks();
    let mount = volume.disk.mount("", &[]);
    let [theirs, ours] = ["one", "two"].map(|name| std::fs::read(mount.path().join(name)).unwrap());
    assert!(ours == theirs);
}

/// A stripe of 64 KiB is 16 blocks.
#[test]
fn the_front_of_a_file_begins_at_a_stripe() {
    let Some(volume) = ModelVolume::make(1 << 10, "-d su=64k,sw=4", seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    for file in &volume.model.files {
        changes.allocate(file.ino, 0..37).unwrap();
        let mut t = engine.begin(Kind::ChangeTimes, 0).unwrap();
        let first = next_mapped(&mut t, file.ino, FORK, FileBlock(0)).unwrap().unwrap();
        let (_, start) = engine.geometry().split(first.start).unwrap();
        assert!(first.count == 37 && start.0.is_multiple_of(16), "{first:?}");
    }
    volume.assert_unmounts(engine);
}

#[test]
fn an_inode_that_can_count_no_more_extents_is_left_as_it_is() {
    let Some(volume) = ModelVolume::make(1 << 10, "-i nrext64=0", seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let ino = volume.model.files[0].ino;
    let mut t = engine.begin(Kind::ChangeInode, 0).unwrap();
    require_extents(&mut t, ino, 2).unwrap();
    t.inode(ino).unwrap().set_extent_count(FORK, i32::MAX as u64 - 1).unwrap();
    require_extents(&mut t, ino, 1).unwrap();
    assert_eq!(require_extents(&mut t, ino, 2).unwrap_err().errno(), Errno::FBIG);
    let core = t.inode(ino).unwrap().core_mut();
    core.flags2 = (core.flags2() | XfsInodeFlags2::NREXT64).bits().into();
    t.inode(ino).unwrap().set_extent_count(FORK, (1 << 48) - 2).unwrap();
    require_extents(&mut t, ino, 1).unwrap();
    assert_eq!(require_extents(&mut t, ino, 2).unwrap_err().errno(), Errno::FBIG);
    drop(t);
    volume.assert_unmounts(engine);
}

#[test]
fn what_cannot_be_changed_is_refused() {
    let Some(volume) = ModelVolume::make(1 << 10, "-m reflink=0", seed_of_run()) else { return };
    let mount = volume.disk.mount("", &[]);
    let directory = mount.path().join("directory");
    std::fs::create_dir(&directory).unwrap();
    let directory = Ino(XfsDisk::ino(&directory));
    drop(mount);
    let engine = engine(&volume.disk);
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    let ino = volume.model.files[0].ino;
    let errno = |outcome: offshoot_vfs::Result<()>| outcome.unwrap_err().errno();
    assert_eq!(errno(changes.truncate(directory, 0)), Errno::INVAL);
    assert_eq!(errno(changes.truncate(ino, 1 << 63)), Errno::FBIG);
    assert_eq!(errno(changes.allocate(ino, (1 << 54) - 1..(1 << 54) + 1)), Errno::FBIG);
    assert_eq!(errno(changes.collapse(ino, &(0..100))), Errno::INVAL);
    let range = XfsCloneRange {
        from: (ino, FileBlock(0)),
        to: (volume.model.files[1].ino, FileBlock(0)),
        blocks: 1,
    };
    assert_eq!(errno(changes.clone_range(&range, None)), Errno::OPNOTSUPP);
    assert_eq!(errno(changes.insert(ino, 0, 4096)), Errno::INVAL);
    changes.truncate(ino, (1 << 63) - 4096).unwrap();
    assert_eq!(errno(changes.insert(ino, 0, 4096)), Errno::FBIG);
    changes.truncate(ino, 0).unwrap();
    let mut t = engine.begin(Kind::ChangeInode, 0).unwrap();
    let core = t.inode(ino).unwrap().core_mut();
    core.flags = XfsInodeFlags::REALTIME.bits().into();
    let error = require_file(&mut t, ino).unwrap_err();
    assert!(error.to_string().contains("realtime"), "{error}");
    drop(t);
    volume.assert_unmounts(engine);
}
