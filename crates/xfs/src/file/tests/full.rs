//! Volumes that are full: what needs blocks fails before it changes anything, and removals work.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::{Errno, Error, Result, Timestamp, Volume};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::record::XfsOwner;
use offshoot_xfs_format::{AgNumber, FileBlock, Ino};

use super::{ModelVolume, assert_nothing_is_staged, engine, index, store};
use crate::file::share::XfsCloneRange;
use crate::file::write::XfsWriteKind;
use crate::file::{FORK, XfsFileChanges, retry};
use crate::group::{self, ExtentWish, FreedFrom, KeptBlocks, ReverseOwner};
use crate::inode::change::next_mapped;
use crate::names::{NamePlace, XfsNameState, XfsNames};
use crate::trans::{AgExtent, XfsTransactionKind as Kind, XfsTransactions};
use crate::{XfsOptions, XfsReport, XfsVolume};

const AT: Timestamp = Timestamp { secs: 1_700_000_000, nanos: 5 };

/// Gives a file all blocks, of which it does not use any.
fn fill(volume: &ModelVolume, engine: &XfsTransactions, file: usize) {
    let changes = XfsFileChanges::new(engine, &volume.ids);
    let (ino, mut at, mut piece) = (volume.model.files[file].ino, 1 << 20, 1 << 14);
    while piece > 0 {
        match changes.allocate(ino, at..at + piece) {
            Ok(()) => at += piece,
            Err(error) => {
                assert_eq!(error.errno(), Errno::NOSPC, "{error}");
                piece /= 2;
            }
        }
    }
}

fn full(options: &str) {
    let Some(mut volume) = ModelVolume::make(300, options, seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    let block = engine.geometry().block_size() as u64;
    let first = engine.counters().free_for_files();
    volume.model.write(changes, 0, 0..60 * block, false);
    if engine.geometry().layout.contains(XfsLayout::SHARED_BLOCKS) {
        volume.model.share(changes, (0, 0), (1, 0), 40);
    }
    fill(&volume, &engine, 2);
    assert!(
        engine.counters().free_for_files() < 200,
        "{} free blocks",
        engine.counters().free_for_files()
    );
    let ino = volume.model.files[1].ino;

    // In place, nothing is needed. Shared blocks, and holes, cannot be written.
    volume.model.write(changes, 0, 45 * block..50 * block, false);
    let left = engine.counters().free_for_files();
    for wanted in [0..20, 0..200] {
        let outcome = changes.prepare_write(ino, wanted.clone());
        if left < wanted.end {
            assert_eq!(outcome.unwrap_err().errno(), Errno::NOSPC);
        } else {
            changes.abandon_write(ino, &outcome.unwrap()).unwrap();
        }
    }
    assert_nothing_is_staged(&engine);
    // A clone is done, or changes nothing.
    let (from, to) = ((volume.model.files[0].ino, FileBlock(50)), (ino, FileBlock(50)));
    match changes.clone_range(&XfsCloneRange { from, to, blocks: 1 }, Some(51 * block)) {
        Ok(()) => {
            let copied = volume.model.files[0].bytes[index(50 * block)..index(51 * block)].to_vec();
            volume.model.files[1].bytes.resize(index(50 * block), 0);
            volume.model.files[1].bytes.extend(copied);
        }
        Err(error) => {
            let is_full = engine.geometry().layout.contains(XfsLayout::SHARED_BLOCKS);
            let wanted = if is_full { Errno::NOSPC } else { Errno::OPNOTSUPP };
            assert_eq!(error.errno(), wanted, "{error}");
        }
    }

    // Holes and truncations need none, also where they cut extents, and blocks that are shared.
    for at in 0..12 {
        let file = index(at % 2);
        let start = at * 3 * block + at;
        volume.model.punch(changes, file, &(start..start + block + 7), true);
        volume.model.truncate(changes, file, 60 * block - at * 2 * block - 5);
    }
    volume.assert_cut_recovers(&engine);
    let unwritten = volume.model.files[2].ino;
    for at in 0..300 {
        let start = ((1 << 20) + 5 * at) * block;
        changes.punch(unwritten, &(start..start + block)).unwrap();
    }
    for file in 0..3 {
        volume.model.truncate(changes, file, 0);
    }
    engine.log().force_all().unwrap();
    let left = engine.counters().free_for_files();
    assert!(first.abs_diff(left) < 40, "{first} blocks were free, and {left} are");
    volume.model.write(changes, 3, 0..100 * block, false);
    volume.assert_unmounts(engine);
}

#[test]
fn a_full_volume_loses_nothing() {
    full("");
}

#[test]
fn a_full_volume_without_reverse_map_and_shared_blocks_loses_nothing() {
    full("-m rmapbt=0,reflink=0");
}

/// What was staged before the volume was full is committed.
#[test]
fn written_data_becomes_visible_on_a_full_volume() {
    let Some(mut volume) = ModelVolume::make(300, "", seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    let block = engine.geometry().block_size() as u64;
    volume.model.write(changes, 0, 0..60 * block, false);
    volume.model.share(changes, (0, 0), (1, 0), 60);
    let ino = volume.model.files[1].ino;
    let mut places = Vec::new();
    for at in 0..30 {
        places.extend(changes.prepare_write(ino, 2 * at..2 * at + 1).unwrap());
    }
    places.extend(changes.prepare_write(ino, 60..62).unwrap());
    assert!(places.iter().any(|place| place.kind == XfsWriteKind::Staged));
    fill(&volume, &engine, 2);
    let content = volume.model.random.bytes(index(62 * block));
    for at in (0..60).step_by(2) {
        let bytes = index(at * block)..index((at + 1) * block);
        volume.model.files[1].bytes[bytes.clone()].copy_from_slice(&content[bytes]);
    }
    volume.model.files[1].bytes.extend_from_slice(&content[index(60 * block)..]);
    store(&engine, &volume.model.files[1].bytes, &places);
    let size = Some(62 * block);
    changes.commit_write(ino, &places, size).unwrap();
    volume.assert_cut_recovers(&engine);
    volume.assert_unmounts(engine);
}

/// What is free for files is what the kernel says, on an empty volume and with files.
#[test]
fn files_may_have_the_blocks_that_the_kernel_gives_them() {
    for (mib, options) in [
        (1 << 10, ""),
        (300, ""),
        (600, "-d agcount=8"),
        (1 << 10, "-b size=1024"),
        (1 << 10, "-m rmapbt=0"),
        (300, "-m rmapbt=0,reflink=0,inobtcount=0"),
    ] {
        let Some(mut volume) = ModelVolume::make(mib, options, seed_of_run()) else { return };
        for rounds in [0, 60] {
            let engine = engine(&volume.disk);
            let changes = XfsFileChanges::new(&engine, &volume.ids);
            (0..rounds).for_each(|_| volume.model.step(changes));
            let ours = engine.counters().free_for_files();
            engine.unmount().unwrap();
            let mount = volume.disk.mount("", &[]);
            let theirs = rustix::fs::statvfs(mount.path()).unwrap().f_bavail;
            assert_eq!(ours, theirs, "{options}, after {rounds} changes");
        }
    }
}

/// No group has fewer free blocks than it holds back for its trees.
fn assert_groups_keep_theirs(engine: &XfsTransactions) {
    for ag in (0..engine.geometry().ag_count).map(AgNumber) {
        let kept = group::held_back(engine.buffers(), engine.superblock(), ag).unwrap();
        let free = group::free_blocks(engine.buffers(), ag).unwrap();
        assert!(free >= kept.rest(), "{ag}: {free} free blocks of {kept:?}");
    }
}

/// Zeros in a part of a block that files share take a block each, also of a full volume: of the
/// reserve, and not of what groups hold back.
#[test]
fn what_must_not_fail_takes_blocks_of_the_reserve() {
    let Some(mut volume) = ModelVolume::make(300, "", seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    let (block, blocks) = (4096, 1500);
    volume.model.write(changes, 0, 0..blocks * block, false);
    for other in [1, 3] {
        volume.model.share(changes, (0, 0), (other, 0), blocks);
    }
    fill(&volume, &engine, 2);
    for at in 0..blocks {
        volume.model.punch(changes, 1, &(at * block + 5..at * block + 9), at % 2 == 0);
    }
    assert_groups_keep_theirs(&engine);
    // Without a reserve only blocks are left that groups hold back, and these stay.
    engine.counters().set_reserve(0);
    fill(&volume, &engine, 2);
    let mut is_full = false;
    for at in 0..blocks {
        let outcome = changes.punch(volume.model.files[0].ino, &(at * block + 5..at * block + 9));
        is_full |= outcome.is_err_and(|error| error.errno() == Errno::NOSPC);
    }
    assert!(is_full);
    assert_groups_keep_theirs(&engine);
    engine.unmount().unwrap();
    volume.disk.assert_checks();
}

/// Takes all free blocks of a group, also those that it holds back.
fn drain(engine: &XfsTransactions, ag: AgNumber) -> Vec<AgExtent> {
    drain_but(engine, ag, 0)
}

/// The same, but for so many.
fn drain_but(engine: &XfsTransactions, ag: AgNumber, left: u64) -> Vec<AgExtent> {
    let (mut t, mut taken) = (engine.begin_step(Kind::Truncate, 0).unwrap(), Vec::new());
    let owner = Some(ReverseOwner::special(XfsOwner::Inodes));
    let kept = KeptBlocks::None;
    let wish = ExtentWish { least: 1, owner, kept, left, ..ExtentWish::blocks(1 << 20) };
    while let Some(extent) = group::allocate(&mut t, ag, &wish).unwrap() {
        taken.push(extent);
    }
    t.commit().unwrap();
    taken
}

/// The old blocks of a file are shared, in a group without free blocks: what a change would give up
/// there stays allocated, and the trees may have to grow.
#[test]
fn a_chain_does_not_begin_where_trees_cannot_grow() {
    let Some(mut volume) = ModelVolume::make(300, "", seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    volume.model.write(changes, 0, 0..20 * 4096, false);
    volume.model.share(changes, (0, 0), (1, 0), 20);
    let [first, second, third] = [0, 1, 2].map(|file| volume.model.files[file].ino);
    let group_of = |ino| {
        let mut t = engine.begin(Kind::ChangeTimes, 0).unwrap();
        let extent = next_mapped(&mut t, ino, FORK, FileBlock(0)).unwrap().unwrap();
        engine.geometry().split(extent.start).unwrap().0
    };
    let full = group_of(first);
    let staged = changes.prepare_write(second, 2..5).unwrap();
    let taken = drain(&engine, full);
    volume.model.write(changes, 2, 0..20 * 4096, false);
    assert_ne!(group_of(third), full);
    let range =
        |from, to| XfsCloneRange { from: (from, FileBlock(2)), to: (to, FileBlock(2)), blocks: 3 };
    let outcomes = [
        changes.clone_range(&range(third, second), None),
        changes.clone_range(&range(first, third), None),
        changes.punch(second, &(2 * 4096..5 * 4096)),
        changes.commit_write(second, &staged, None),
    ];
    let is_full =
        |outcome: &Result<()>| outcome.as_ref().is_err_and(|error| error.errno() == Errno::NOSPC);
    assert!(outcomes.iter().all(is_full), "{outcomes:?}");
    let mut t = engine.begin_step(Kind::Truncate, 0).unwrap();
    for extent in taken {
        let owner = ReverseOwner::special(XfsOwner::Inodes);
        group::free_extent(&mut t, full, extent, FreedFrom::Owner(owner)).unwrap();
    }
    t.commit().unwrap();
    // Nor did the chain begin that gives staged blocks back.
    changes.abandon_write(second, &staged).unwrap();
    volume.model.share(changes, (2, 2), (1, 2), 3);
    volume.assert_unmounts(engine);
}

/// Changes a file at random. Only blocks may be missing. Returns whether they were.
fn crowd(changes: XfsFileChanges<'_>, ino: Ino, random: &mut Random) -> bool {
    let (at, len) = (random.below(150), 1 + random.below(9));
    let blocks = at..at + len;
    let bytes = at * 4096 + random.below(4096)..(at + len) * 4096;
    let outcome = match random.below(10) {
        0..5 => changes
            .prepare_write(ino, blocks)
            .and_then(|places| changes.commit_write(ino, &places, Some(bytes.end))),
        5 => changes.punch(ino, &bytes),
        6 => changes.zero(ino, &bytes),
        7 => changes.truncate(ino, bytes.start),
        _ => {
            let to = (at + len + random.below(100)).min(200);
            let (from, to) = ((ino, FileBlock(at)), (ino, FileBlock(to)));
            changes.clone_range(&XfsCloneRange { from, to, blocks: len }, None)
        }
    };
    let errno = outcome.map_err(|error| error.errno());
    assert!(matches!(errno, Ok(()) | Err(Errno::NOSPC)), "{errno:?}");
    errno.is_err()
}

/// Three threads change files that share blocks, on a full volume of eight groups. In three
/// of these nothing is left but what one chain may need for its trees.
#[test]
fn no_chain_fails_on_a_full_volume_of_many_groups() {
    let options = "-d agcount=8";
    let Some(mut volume) = ModelVolume::make(600, options, seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    volume.model.write(changes, 0, 0..150 * 4096, false);
    for file in 1..4 {
        volume.model.share(changes, (0, 0), (file, 0), 150);
    }
    fill(&volume, &engine, 3);
    // The blocks of the reserve lie in the other groups.
    let drained: Vec<_> = [0, 3, 6]
        .map(AgNumber)
        .into_iter()
        .flat_map(|ag| drain_but(&engine, ag, 40).into_iter().map(move |one| (ag, one)))
        .collect();
    // The last one keeps the volume full.
    let files: Vec<_> = volume.model.files.iter().take(3).map(|file| file.ino).collect();
    let seeds: Vec<_> = files.iter().map(|_| volume.model.random.number()).collect();
    let refused: Vec<_> = thread::scope(|scope| {
        let spawn = |(ino, seed): (&Ino, _)| {
            let (ino, mut random) = (*ino, Random::new(seed));
            scope.spawn(move || (0..300).filter(|_| crowd(changes, ino, &mut random)).count())
        };
        let threads: Vec<_> = files.iter().zip(seeds).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    // Both happen to all of them.
    assert!(refused.iter().all(|refused| (5..300).contains(refused)), "{refused:?} of 300");
    for some in drained.chunks(4) {
        let mut t = engine.begin_step(Kind::Truncate, 0).unwrap();
        for (ag, extent) in some {
            let owner = ReverseOwner::special(XfsOwner::Inodes);
            group::free_extent(&mut t, *ag, *extent, FreedFrom::Owner(owner)).unwrap();
        }
        t.commit().unwrap();
    }
    engine.unmount().unwrap();
    volume.disk.assert_checks();
    drop(volume.disk.mount("", &[]));
}

/// All that is free is promised to another transaction, and the extents have no room for one more
/// in their list.
#[test]
fn a_conversion_takes_no_block_of_others() {
    let Some(volume) = ModelVolume::make(300, "", seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    let ino = volume.model.files[0].ino;
    changes.truncate(ino, 0).unwrap();
    let places: Vec<_> = (0..12)
        .map(|piece| {
            changes.allocate(ino, piece * 10..piece * 10 + 3).unwrap();
            changes.prepare_write(ino, piece * 10 + 1..piece * 10 + 2).unwrap()
        })
        .collect();
    engine.counters().set_reserve(0);
    let all = engine.counters().free_for_files();
    let other = engine.begin(Kind::Write, all).unwrap();
    let outcomes: Vec<_> =
        places.iter().map(|places| changes.commit_write(ino, places, None)).collect();
    let refused = outcomes.iter().filter(|outcome| outcome.is_err()).count();
    let errno = |outcome: &Result<()>| outcome.as_ref().err().map(Error::errno);
    assert!(outcomes.iter().all(|outcome| matches!(errno(outcome), None | Some(Errno::NOSPC))));
    assert!(refused > 0);
    assert_eq!(changes.punch(ino, &(4096..2 * 4096)).unwrap_err().errno(), Errno::NOSPC);
    drop(other);
    for places in &places {
        changes.commit_write(ino, places, None).unwrap();
    }
    engine.unmount().unwrap();
    volume.disk.assert_checks();
}

/// Data that goes in place would show in a clone that was made meanwhile.
#[test]
fn a_clone_between_the_places_and_their_commit_is_found() {
    let Some(mut volume) = ModelVolume::make(300, "", seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    volume.model.write(changes, 0, 0..10 * 4096, false);
    let ino = volume.model.files[0].ino;
    let places = changes.prepare_write(ino, 2..5).unwrap();
    changes.commit_write(ino, &places, None).unwrap();
    volume.model.share(changes, (0, 0), (1, 0), 10);
    assert_eq!(changes.commit_write(ino, &places, None).unwrap_err().errno(), Errno::IO);
    volume.assert_unmounts(engine);
}

/// A removed file shares blocks in a group without free ones. It stays in its list, the volume is
/// opened for writing, and the file goes when there is room.
#[test]
fn a_file_that_a_full_group_keeps_is_freed_later() {
    let Some(mut volume) = ModelVolume::make(300, "", seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    volume.model.write(changes, 0, 0..20 * 4096, false);
    volume.model.share(changes, (0, 0), (1, 0), 20);
    let ino = volume.model.files[1].ino;
    let mut t = engine.begin(Kind::ChangeTimes, 0).unwrap();
    let extent = next_mapped(&mut t, ino, FORK, FileBlock(0)).unwrap().unwrap();
    let full = engine.geometry().split(extent.start).unwrap().0;
    drop(t);
    let state = XfsNameState::default();
    let names = XfsNames::new(&engine, &volume.ids, &state);
    let place = NamePlace { dir: engine.superblock().root().unwrap(), name: b"two" };
    assert_eq!(names.unlink(place, AT).unwrap(), Some(ino));
    let taken = drain(&engine, full);
    let refused = names.inactivate(ino).unwrap_err();
    assert_eq!(refused.errno(), Errno::NOSPC, "{refused}");
    engine.unmount().unwrap();

    let told = Arc::new(Mutex::new(Vec::new()));
    let telling = told.clone();
    let options = XfsOptions {
        reporter: Some(Arc::new(move |report| telling.lock().unwrap().push(report.clone()))),
        ..XfsOptions::default()
    };
    let opened = XfsVolume::open_writable(volume.disk.writable_device(), &options).unwrap();
    opened.shut_down().unwrap();
    drop(opened);
    let reports = std::mem::take(&mut *told.lock().unwrap());
    let is_ours = |report: &XfsReport| matches!(report, XfsReport::NotFreed { ino: left, .. } if *left == ino.0);
    assert!(matches!(&reports[..], [report] if is_ours(report)), "{reports:?}");
    let engine = crate::test_volumes::engine(&volume.disk);
    let mut t = engine.begin_step(Kind::Truncate, 0).unwrap();
    for extent in taken {
        let owner = ReverseOwner::special(XfsOwner::Inodes);
        group::free_extent(&mut t, full, extent, FreedFrom::Owner(owner)).unwrap();
    }
    t.commit().unwrap();
    engine.unmount().unwrap();
    drop(XfsVolume::open_writable(volume.disk.writable_device(), &options).unwrap());
    assert_eq!(*told.lock().unwrap(), []);
    volume.disk.assert_checks();
}

/// Other threads lock a lower group one after the other, so it is never free. A write that has a
/// higher group, and needs that one, gets it in its turn.
#[test]
fn a_write_gets_a_group_that_is_never_free() {
    const THREADS: usize = 3;
    let Some(mut volume) = ModelVolume::make(300, "", seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    volume.model.write(changes, 0, 0..20 * 4096, false);
    let is_ended = AtomicBool::new(false);
    let low = AgNumber(0);
    let started = Barrier::new(THREADS + 1);
    let tries = thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                started.wait();
                while !is_ended.load(Ordering::Relaxed) {
                    let mut t = engine.begin(Kind::ChangeTimes, 0).unwrap();
                    group::free_extents(&mut t, low, 0, 1).unwrap();
                    thread::sleep(Duration::from_millis(2));
                }
            });
        }
        started.wait();
        thread::sleep(Duration::from_millis(10));
        let mut tries = Vec::new();
        for _ in 0..20 {
            let mut count = 0;
            retry(&engine, |missed| {
                count += 1;
                let mut t = engine.begin(Kind::Write, 0)?;
                t.try_again(Some(missed));
                group::free_extents(&mut t, AgNumber(2), 0, 1)?;
                group::free_extents(&mut t, low, 0, 1).map(drop)
            })
            .unwrap();
            tries.push(count);
        }
        is_ended.store(true, Ordering::Relaxed);
        tries
    });
    assert!(tries.iter().all(|count| *count <= 2), "{tries:?}");
    volume.assert_unmounts(engine);
}
