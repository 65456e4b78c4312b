//! Space on volumes that `mkfs.btrfs` made: chunks that are allocated when metadata is full,
//! volumes without any free space, and chunks that are removed when they are empty. `btrfs check`
//! and the kernel judge the result.
//!
//! Volumes are filled with extended attributes of the root directory, whose names have different
//! hashes: they differ in four bytes.

use std::sync::Arc;

use offshoot_btrfs_format::space::{FREE_SPACE_USING_BITMAPS, FreeSpaceInfo};
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_testkit::btrfs::disks::{Disks, OLD_CACHE, UUID_TREE};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::is_in_run;
use offshoot_vfs::{Errno, Error, Result};
use zerocopy::{FromZeros, IntoBytes};

use super::tickets::Demand;
use super::{Claim, Purpose};
use crate::test_volumes::{check, in_memory_of, open, xattr};
use crate::tree::ItemEdit;
use crate::{BtrfsVolume, EngineOptions};

fn item(number: u32, len: usize) -> (Key, Vec<u8>) {
    let digit = |place: u32| b'0' + u8::try_from(number / 64u32.pow(place) % 64).unwrap();
    let name = [b"user.n-", &[digit(3), digit(2), digit(1), digit(0)][..]].concat();
    xattr(&name, &vec![digit(0); len])
}

fn insert(volume: &BtrfsVolume, number: u32, len: usize) -> Result<()> {
    let handle = volume.join_for(1, Claim::Work)?;
    let (key, data) = item(number, len);
    handle.change(TreeId::FS, |tree| tree.insert(key, &data))
}

fn remove(volume: &BtrfsVolume, number: u32) {
    let handle = volume.join_to_remove().expect("removing works on a full volume");
    let (key, _) = item(number, 0);
    assert!(handle.change(TreeId::FS, |tree| tree.remove(key)).unwrap(), "{number}");
}

fn is_full(error: &Error) -> bool {
    matches!(error, Error::Posix { errno, .. } if *errno == Errno::NOSPC)
}

fn chunks(volume: &BtrfsVolume) -> usize {
    volume.chunks().len()
}

/// How many chunks there are after a few commits. The background thread of the volume commits and
/// allocates meanwhile.
fn chunks_when_empty(volume: &BtrfsVolume, disks: &Disks) -> usize {
    let after_a_commit = || {
        volume.commit().unwrap();
        chunks(volume)
    };
    let least = (0..5).map(|_| after_a_commit()).min().expect("there were some");
    check(disks);
    least
}

/// Fills a volume until it is full, in commits, and empties it again.
fn fill_and_empty(count: usize, mib: u64, mkfs: &[&str], len: usize) {
    let Some(judges) = judges::require() else { return };
    if !is_in_run(&format!("fill and empty {mkfs:?}")) {
        return;
    }
    let disks = Disks::create(&judges, count, mib);
    disks.mkfs(mkfs);
    let volume = open(&disks);
    let before = chunks(&volume);
    let mut number = 0;
    let error = loop {
        match insert(&volume, number, len) {
            Ok(()) => number += 1,
            Err(error) => break error,
        }
        if number % 8000 == 0 {
            volume.commit().unwrap();
            check(&disks);
        }
    };
    assert!(is_full(&error), "{error}");
    volume.commit().unwrap();
    let most = chunks(&volume);
    eprintln!("{mkfs:?}: {number} items, {before} chunks, {most} when full");
    assert!(most > before, "chunks were allocated");
    drop(volume);
    check(&disks);

    let volume = open(&disks);
    (0..number).for_each(|number| remove(&volume, number));
    // The few remaining blocks may lie in all chunks. Then filling some again moves these blocks.
    let mut left = chunks_when_empty(&volume, &disks);
    for _ in 0..5 {
        if left < most {
            break;
        }
        (0..number / 4).for_each(|number| insert(&volume, number, len).expect("all of it is free"));
        (0..number / 4).for_each(|number| remove(&volume, number));
        left = chunks_when_empty(&volume, &disks);
    }
    eprintln!("{left} chunks when empty");
    assert!(left < most, "chunks were removed");
    for number in 0..number / 2 {
        insert(&volume, number, len).expect("what was free before is free again");
    }
    volume.commit().unwrap();
    drop(volume);
    check(&disks);
    kernel_writes(&disks, 0);
    let volume = open(&disks);
    for number in 0..number / 2 {
        remove(&volume, number);
    }
    volume.commit().unwrap();
    drop(volume);
    check(&disks);
}

/// The kernel fills a file, and removes what it wrote in the round before.
fn kernel_writes(disks: &Disks, round: u8) {
    let kernel = disks.mount_watched("rw,noatime", &[UUID_TREE, OLD_CACHE]);
    for file in 0..20u8 {
        let bytes = vec![round; 100_000];
        std::fs::write(kernel.path().join(format!("file-{round}-{file}")), bytes).unwrap();
        if round > 0 {
            let old = format!("file-{}-{file}", round - 1);
            let bytes = std::fs::read(kernel.path().join(&old)).unwrap();
            assert!(bytes.len() == 100_000 && bytes.iter().all(|&byte| byte == round - 1));
            std::fs::remove_file(kernel.path().join(&old)).unwrap();
        }
    }
    drop(kernel);
    check(disks);
}

#[test]
fn single() {
    fill_and_empty(1, 144, &["-m", "single"], 6000);
}

#[test]
fn dup_of_small_nodes_without_block_group_tree() {
    fill_and_empty(1, 160, &["-m", "dup", "-n", "4k", "-O", "^block-group-tree"], 1500);
}

#[test]
fn raid0_with_block_group_tree() {
    fill_and_empty(2, 128, &["-m", "raid0", "-O", "block-group-tree"], 6000);
}

#[test]
fn raid1_without_free_space_tree() {
    fill_and_empty(2, 160, &["-m", "raid1", "-O", "^free-space-tree,^block-group-tree"], 6000);
}

#[test]
fn raid1c3_of_large_nodes() {
    fill_and_empty(4, 200, &["-m", "raid1c3", "-n", "64k"], 9000);
}

#[test]
fn raid1c4() {
    fill_and_empty(4, 160, &["-m", "raid1c4"], 6000);
}

#[test]
fn raid10() {
    fill_and_empty(4, 128, &["-m", "raid10", "-d", "raid10"], 6000);
}

#[test]
fn mixed() {
    fill_and_empty(1, 64, &["--mixed"], 1500);
}

/// Three rounds in which the kernel and the engine write one volume, on which chunks are added and
/// removed.
#[test]
fn ping_pong() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 2, 300);
    disks.mkfs(&["-m", "raid1", "-d", "raid0"]);
    for round in 0..3u8 {
        let volume = open(&disks);
        for number in 0..12_000 {
            insert(&volume, number, 3000).unwrap();
        }
        volume.commit().unwrap();
        drop(volume);
        check(&disks);
        kernel_writes(&disks, round);
        let volume = open(&disks);
        for number in 0..12_000 {
            remove(&volume, number);
        }
        volume.commit().unwrap();
        drop(volume);
        check(&disks);
    }
}

/// Reserves data until none is left, from chunks that are allocated for it.
#[test]
fn data_is_reserved_until_it_is_full() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&[]);
    let volume = open(&disks);
    let mut all = Vec::new();
    let error = loop {
        match volume.reserve_data(5 << 20) {
            Ok(reservation) => all.push(reservation.keep()),
            Err(error) => break error,
        }
    };
    assert!(is_full(&error), "{error}");
    assert!(all.len() > 10, "{} reservations", all.len());
    let space = &volume.live().unwrap().space;
    let (logical, len) = space.take_data(&volume.base, &all[0], 1 << 20).unwrap();
    assert!(len > 0 && len <= 1 << 20);
    volume.live().unwrap().space.give_back(logical, len).unwrap();
    drop(all);
    assert_eq!(volume.live().unwrap().space.ledger(Purpose::Data).reserved(), 0);
    volume.commit().unwrap();
    drop(volume);
    check(&disks);
    kernel_writes(&disks, 0);
}

/// Many threads run out of space at once. All files can still be removed: by all threads together
/// when the volume is full for all, or by each thread as soon as it is refused something.
fn threads_run_out(mib: u64, mkfs: &[&str], threads: u32, len: usize, together: bool) {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, mib);
    disks.mkfs(mkfs);
    let volume = open(&disks);
    let numbers = |thread: u32| (thread..).step_by(threads as usize);
    let fill = |thread| {
        let refused = |number: &u32| {
            let inserted = insert(&volume, *number, len);
            inserted.inspect_err(|e| assert!(is_full(e), "{e}")).is_err()
        };
        (thread, numbers(thread).find(refused))
    };
    let empty = |(thread, refused)| {
        for number in numbers(thread).take_while(|&number| Some(number) != refused) {
            remove(&volume, number);
        }
    };
    std::thread::scope(|scope| {
        if together {
            let fillers: Vec<_> =
                (0..threads).map(|thread| scope.spawn(move || fill(thread))).collect();
            let filled: Vec<_> =
                fillers.into_iter().map(|one| one.join().expect("it fills")).collect();
            for one in filled {
                scope.spawn(move || empty(one));
            }
        } else {
            for thread in 0..threads {
                scope.spawn(move || empty(fill(thread)));
            }
        }
    });
    let stats = volume.space_stats();
    eprintln!("{mkfs:?}: {stats:#?}");
    assert_eq!(stats.tickets_refused, threads.into(), "each thread was refused one thing");
    let promised = stats.kinds.iter().map(|kind| kind.reserved_bytes + kind.promised_bytes);
    assert_eq!(promised.sum::<u64>(), 0);
    volume.commit().unwrap();
    drop(volume);
    check(&disks);
    drop(disks.mount_watched("rw,noatime", &[UUID_TREE]));
    check(&disks);
}

#[test]
fn threads_run_out_of_space() {
    threads_run_out(160, &["-m", "single"], 4, 3000, false);
}

#[test]
fn many_threads_run_out_of_space() {
    threads_run_out(128, &["-m", "single"], 64, 3000, true);
}

#[test]
fn threads_run_out_of_space_of_small_nodes() {
    threads_run_out(128, &["-m", "single", "-n", "4k"], 16, 1500, true);
}

#[test]
fn threads_run_out_of_mixed_space() {
    threads_run_out(64, &["--mixed"], 16, 1500, false);
}

/// Before the mend, a thread that found the same empty block group a moment after another thread
/// reported that the volume was damaged.
#[test]
fn empty_groups_are_removed_by_several_threads() {
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let device = in_memory_of(16384, 8 << 30);
    let volume = BtrfsVolume::open_writable(vec![device as Arc<_>], &options).expect("it opens");
    for _ in 0..30 {
        for _ in 0..4 {
            assert!(
                crate::upkeep::try_grow(&volume, Purpose::Data, || true).expect("no device fails")
            );
        }
        std::thread::scope(|scope| {
            let remove = || crate::upkeep::remove_empty_groups(&volume).expect("no device fails");
            (0..3).for_each(|_| drop(scope.spawn(remove)));
        });
    }
    volume.sync().expect("a commit");
}

/// Extents of a damaged volume may overlap. Freeing both must not make the index of free ranges
/// wrong, so it ends all writing.
#[test]
fn a_range_that_is_free_is_not_freed_again() {
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let device = in_memory_of(16384, 1 << 30);
    let volume = BtrfsVolume::open_writable(vec![device as Arc<_>], &options).expect("it opens");
    let live = volume.live().unwrap();
    let take = || live.space.take(&volume.base, Purpose::Data, 8192).expect("there is room");
    let (freed, _other) = (take(), take());
    live.space.give_back(freed, 8192).expect("it was taken");
    let again = live.space.give_back(Logical(freed.0 + 4096), 4096).expect_err("it is free");
    assert!(again.to_string().contains("is freed, and a part of it is free"), "{again}");
    live.require_writing().expect_err("writing has ended");
}

/// Before the mend, an image with a range that is free twice ended the program.
#[test]
fn space_that_is_free_twice_is_damage() {
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let device = in_memory_of(16384, 1 << 30);
    let volume = BtrfsVolume::open_writable(vec![device as Arc<_>], &options).expect("it opens");
    let group = volume.live().unwrap().space.groups_in(&(0..u64::MAX)).pop().unwrap();
    let find = || super::free_space_tree::for_each_free_range(&volume.base, &group, |_| {});
    find().expect("a new volume is sound");
    let again = Key::new(group.end() - 4096, ItemType::FREE_SPACE_EXTENT, 4096);
    let handle = volume.join_for(1, Claim::Work).expect("there is room");
    handle.change(TreeId::FREE_SPACE, |tree| tree.insert(again, &[])).expect("nothing fails");
    drop(handle);
    assert!(matches!(find(), Err(Error::Corrupt(_))), "{:?}", find());
}

/// `btrfs check` accepts a bitmap that is a sector too short. Before the mend, it complained when
/// the group was written anew.
#[test]
fn bitmaps_that_leave_space_out_are_damage() {
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let device = in_memory_of(16384, 1 << 30);
    let volume = BtrfsVolume::open_writable(vec![device as Arc<_>], &options).expect("it opens");
    let group = volume.live().unwrap().space.groups_in(&(0..u64::MAX)).pop().unwrap();
    let find = || super::free_space_tree::for_each_free_range(&volume.base, &group, |_| {});
    let start = group.start.0;
    let mut info = FreeSpaceInfo::new_zeroed();
    info.flags = FREE_SPACE_USING_BITMAPS.into();
    let mut extents = Vec::new();
    super::free_space_tree::for_each_free_range(&volume.base, &group, |range| {
        let len = range.end - range.start;
        extents.push(Key::new(range.start, ItemType::FREE_SPACE_EXTENT, len));
    })
    .expect("a new volume is sound");
    let whole = Key::new(start, ItemType::FREE_SPACE_BITMAP, group.len);
    let short = Key { offset: group.len - 4096, ..whole };
    let late = Key { objectid: start + 4096, ..short };
    let bits = vec![0; usize::try_from(group.len / 4096 / 8).expect("small")];
    let change = |edits: &mut [ItemEdit<'_>]| {
        edits.sort_unstable_by_key(|edit| edit.0);
        let handle = volume.join_for(1, Claim::Work).expect("there is room");
        handle.change(TreeId::FREE_SPACE, |tree| tree.apply_batch(edits)).expect("nothing fails");
    };
    let mut edits: Vec<_> = extents.iter().map(|&key| (key, None)).collect();
    edits.push((Key::new(start, ItemType::FREE_SPACE_INFO, group.len), Some(info.as_bytes())));
    edits.push((whole, Some(&bits)));
    change(&mut edits);
    find().expect("one bitmap of the whole group is sound");
    change(&mut [(whole, None), (short, Some(&bits))]);
    assert!(matches!(find(), Err(Error::Corrupt(_))), "{:?}", find());
    change(&mut [(short, None), (late, Some(&bits))]);
    assert!(matches!(find(), Err(Error::Corrupt(_))), "{:?}", find());
}

/// Space that was never reserved is given back. Before the mend, the counter wrapped to a huge
/// value, and no demand was refused any more.
#[test]
fn a_release_of_what_was_not_reserved_ends_writing() {
    let told = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let telling = told.clone();
    let reporter =
        Arc::new(move |report: &crate::VolumeReport| telling.lock().push(report.to_string()));
    let options = EngineOptions {
        commit_interval: None,
        reporter: Some(reporter),
        ..EngineOptions::default()
    };
    let device = crate::test_volumes::in_memory(16384);
    let volume = crate::BtrfsVolume::open_writable(vec![device], &options).unwrap();
    let space = &volume.live().unwrap().space;
    let before = space.ledger(Purpose::Data).reserved();
    space.ledger(Purpose::Data).take_back(Demand::new(Claim::Work, before + 4096));
    assert_eq!(space.ledger(Purpose::Data).reserved(), before, "it stays");
    let refused = volume.join().err().expect("nothing is written any more");
    assert_eq!(refused.errno(), Errno::ROFS);
    assert!(refused.to_string().contains("reserved data"), "{refused}");
    let reports = told.lock();
    assert!(reports.len() == 1 && reports[0].contains("reserved data"), "{reports:?}");
}

/// A claim that is kept outlives its reservation, and each part of it gives itself back.
#[test]
fn what_is_kept_is_given_back_when_it_is_dropped() {
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let device = crate::test_volumes::in_memory(16384);
    let volume = crate::BtrfsVolume::open_writable(vec![device], &options).unwrap();
    let space = &volume.live().unwrap().space;
    let reserved = || space.ledger(Purpose::Data).reserved();
    let promised = || space.ledger(Purpose::Metadata).promised();
    let reservation = volume.reserve_data(1 << 20).unwrap();
    let mut kept = reservation.keep();
    drop(reservation);
    assert_eq!((reserved(), kept.bytes()), (1 << 20, 1 << 20));
    let more = volume.reserve_data(1 << 20).unwrap();
    assert_eq!(kept.take_over(&more, 4096), 4096);
    drop(more);
    assert_eq!(reserved(), (1 << 20) + 4096);
    let mut other = kept.split(1 << 20);
    other.pass(&mut kept, 4096);
    drop(other);
    assert_eq!((reserved(), kept.bytes()), (8192, 8192));
    drop(kept);
    assert_eq!(reserved(), 0);
    let mut later = volume.promise(1 << 20).unwrap().keep();
    later.add(volume.promise(4096).unwrap());
    assert_eq!(promised(), (1 << 20) + 4096);
    drop(later);
    assert_eq!(promised(), 0);
}

/// An owner that gives up more than it has counted wrong: all writing ends.
#[test]
fn a_claim_gives_up_no_more_than_it_has() {
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let device = crate::test_volumes::in_memory(16384);
    let volume = crate::BtrfsVolume::open_writable(vec![device], &options).unwrap();
    let mut kept = volume.reserve_data(4096).unwrap().keep();
    assert_eq!(kept.split(8192).bytes(), 4096, "there is no more");
    let error = volume.sync().expect_err("the accounts are wrong");
    assert!(error.to_string().contains("8192 should be taken from it"), "{error}");
}

/// Data is taken only under a claim that covers it. Otherwise nothing is taken, and all writing
/// ends.
#[test]
fn no_data_is_taken_without_a_claim_to_it() {
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let device = crate::test_volumes::in_memory(16384);
    let volume = crate::BtrfsVolume::open_writable(vec![device], &options).unwrap();
    let space = &volume.live().unwrap().space;
    let claim = volume.reserve_data(4096).unwrap().keep();
    space.take_data(&volume.base, &claim, 4096).expect("it is reserved");
    let free = space.ledger(Purpose::Data).free();
    space.take_data(&volume.base, &claim, 8192).expect_err("half of it is not reserved");
    assert_eq!(space.ledger(Purpose::Data).free(), free, "nothing is taken");
    let error = volume.sync().expect_err("the accounts are wrong");
    assert!(error.to_string().contains("8192 should be taken from it"), "{error}");
}
