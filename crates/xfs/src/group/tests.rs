use offshoot_testkit::xfs::disk::XfsDisk;
use offshoot_testkit::xfs::judges;
use offshoot_vfs::Errno;
use offshoot_xfs_format::btree::{XfsSearchKey, XfsTree};
use offshoot_xfs_format::log::items::{XfsCountOp, XfsReverseOp};
use offshoot_xfs_format::record::{XfsReverseMap, XfsSharedExtent};
use offshoot_xfs_format::superblock::XfsSuperblock;
use offshoot_xfs_format::{AgBlock, AgIno, AgNumber};

use super::allocate::KeptBlocks;
use super::{
    ExtentWish, FreedFrom, HeldBack, allocate, allocate_anywhere, change_references,
    change_reverse, enter_unlinked, first_unlinked, free_extent, free_inode_trees, free_list,
    headers, held_back, held_back_of_all, leave_unlinked, make_chunk, require_tree_room,
    take_inode, tree,
};
use crate::buffer::{XfsBuffers, sector_at};
use crate::test_volumes::engine;
use crate::trans::{AgExtent, XfsTransaction, XfsTransactionKind as Kind, XfsTransactions};

#[test]
fn what_groups_keep_is_what_the_kernel_keeps() {
    let Some(judges) = judges::require() else { return };
    for options in [
        "",
        "-b size=1024",
        "-b size=16384",
        "-b size=65536",
        "-m rmapbt=0",
        "-m reflink=0,rmapbt=0",
        "-i size=2048",
        "-m inobtcount=0",
    ] {
        let disk = XfsDisk::create(&judges, 1 << 10);
        disk.mkfs(options);
        let bytes = sector_at(&*disk.device(), 0).unwrap();
        let XfsSuperblock { fields, geometry } = XfsSuperblock::parse(&bytes).unwrap();
        let groups = geometry.ag_count;
        let buffers = XfsBuffers::new(disk.device(), geometry, 1 << 20);
        let shown = disk.xfs_db(&["agresv"]);
        for (ag, line) in (0..groups).zip(shown.lines()) {
            let words: Vec<_> = line.split_whitespace().collect();
            let number = |name| {
                let at = words.iter().position(|word| *word == name).unwrap();
                words[at + 1].parse::<u64>().unwrap()
            };
            let theirs = HeldBack { reserved: number("reserved:"), used: number("used:") };
            let ours = held_back(&buffers, &fields, AgNumber(ag)).unwrap();
            assert_eq!(ours, theirs, "{options}: group {ag}");
        }
    }
}

/// A volume without owners of blocks, in which blocks may be taken that nothing has then.
fn made(options: &str) -> Option<(XfsDisk, XfsTransactions)> {
    let disk = XfsDisk::create(&judges::require()?, 600);
    disk.mkfs(&format!("-m rmapbt=0,reflink=0 {options}"));
    let engine = engine(&disk);
    Some((disk, engine))
}

/// Its free list misses a block, which the allocation would fill first.
#[test]
fn an_allocation_that_finds_nothing_changes_nothing() {
    let Some((_disk, engine)) = made("") else { return };
    let ag = AgNumber(0);
    let mut t = engine.begin(Kind::Write, 0).unwrap();
    free_list::take(&mut t, ag).unwrap();
    t.commit().unwrap();
    let mut t = engine.begin(Kind::Write, 0).unwrap();
    let agf = headers::agf(&mut t, ag).unwrap();
    let longer = agf.longest.get() + 1;
    assert!(agf.freeblks.get() > longer, "in more pieces than one");
    let wish = ExtentWish { kept: KeptBlocks::None, ..ExtentWish::blocks(longer) };
    assert_eq!(allocate(&mut t, ag, &wish).unwrap(), None);
    assert!(t.commit().unwrap().is_none());
}

/// Frees parts of an extent that nothing has, of `count` blocks each.
fn free_parts(engine: &XfsTransactions, ag: AgNumber, starts: &[u32], count: u32) {
    for some in starts.chunks(20) {
        let mut t = engine.begin_step(Kind::Truncate, 0).unwrap();
        for &start in some {
            let part = AgExtent { start: AgBlock(start), count };
            free_extent(&mut t, ag, part, FreedFrom::Nobody).unwrap();
        }
        t.commit().unwrap();
    }
    engine.log().force_all().unwrap();
}

/// A group of 65,540 blocks has 4 behind its last chunk of 8.
#[test]
fn a_part_of_a_chunk_is_not_behind_the_last_whole_one() {
    let Some((_disk, engine)) = made("-d agsize=268451840") else { return };
    let ag = AgNumber(1);
    assert_eq!(engine.geometry().ag_len(ag), 65_540);
    let mut t = engine.begin(Kind::Write, 0).unwrap();
    let most = headers::agf(&mut t, ag).unwrap().longest.get();
    let wish = ExtentWish { kept: KeptBlocks::None, ..ExtentWish::blocks(most) };
    let taken = allocate(&mut t, ag, &wish).unwrap().unwrap();
    t.commit().unwrap();
    assert_eq!(taken.end(), 65_540);
    let singles: Vec<_> = (0..1000).map(|number| 30_000 + number * 2).collect();
    free_parts(&engine, ag, &singles, 1);
    free_parts(&engine, ag, &[65_536], 4);
    let make = || {
        let mut t = engine.begin(Kind::CreateUnnamed, 16).unwrap();
        let is_made = make_chunk(&mut t, ag, 1).unwrap();
        (is_made, t.commit().unwrap().is_some())
    };
    assert_eq!(make(), (false, false), "the last blocks are no part of a chunk");
    free_parts(&engine, ag, &[40_004], 4);
    assert_eq!(make(), (true, true));
}

/// A record of reference counts.
fn counted(engine: &XfsTransactions, start: u32) -> Option<(u32, u32)> {
    let mut t = engine.begin(Kind::Truncate, 0).unwrap();
    let key = XfsSearchKey([start.into(), 0, 0]);
    let found = tree::edit(&mut t, AgNumber(0), XfsTree::ReferenceCounts, |tree| {
        tree.exact::<XfsSharedExtent>(key)
    });
    found.unwrap().map(|record| (record.count.get(), record.references.get()))
}

/// Eight records of one block, with 2 and 3 references in turn, and behind them one with 4. When
/// all eight get one more, the last has 4 too.
#[test]
fn the_last_record_of_a_step_is_joined_with_the_one_behind_it() {
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 600);
    disk.mkfs("");
    let engine = engine(&disk);
    let first = 20_000;
    let more = |start, count| {
        let mut t = engine.begin(Kind::Truncate, 0).unwrap();
        let (ag, extent) = (AgNumber(0), AgExtent::new(start, count));
        let step = change_references(&mut t, ag, extent, XfsCountOp::Increase).unwrap();
        t.commit().unwrap();
        step.done
    };
    for at in 0..8 {
        (0..=at % 2).for_each(|_| assert_eq!(more(first + at, 1), 1));
    }
    (0..3).for_each(|_| assert_eq!(more(first + 8, 1), 1));
    assert_eq!(counted(&engine, first + 7), Some((1, 3)));
    assert_eq!(more(first, 8), 8);
    assert_eq!(counted(&engine, first + 6), Some((1, 3)));
    assert_eq!(counted(&engine, first + 7), Some((2, 4)));
    assert_eq!(counted(&engine, first + 8), None);
}

/// In each group others have freed 100 blocks, and the transaction 100.
#[test]
fn an_allocation_forces_the_log_once() {
    let Some((_disk, engine)) = made("-d agcount=4") else { return };
    let groups = || (0..4).map(AgNumber);
    let take = |near| {
        let mut t = engine.begin(Kind::Write, 0).unwrap();
        for ag in groups() {
            let wish =
                ExtentWish { near: Some(AgBlock(near)), is_exact: true, ..ExtentWish::blocks(100) };
            allocate(&mut t, ag, &wish).unwrap().unwrap();
        }
        t.commit().unwrap();
    };
    let release = |t: &mut XfsTransaction<'_>, start| {
        for ag in groups() {
            free_extent(t, ag, AgExtent::new(start, 100), FreedFrom::Nobody).unwrap();
        }
    };
    let (theirs, own) = (30_000, 31_000);
    take(theirs);
    take(own);
    let mut t = engine.begin_step(Kind::Truncate, 0).unwrap();
    release(&mut t, theirs);
    t.commit().unwrap();
    let mut t = engine.begin_step(Kind::Truncate, 0).unwrap();
    release(&mut t, own);
    let forces = || engine.log().statistics().forces;
    let before = forces();
    let mut find = |start| {
        let wish = ExtentWish { bounds: (start, start + 100), ..ExtentWish::blocks(100) };
        allocate_anywhere(&mut t, None, &wish).unwrap()
    };
    assert_eq!(find(own), None);
    assert_eq!(forces() - before, 1);
    assert_eq!(find(theirs), Some((AgNumber(0), AgExtent::new(theirs, 100))));
    assert_eq!(find(own), None);
    assert_eq!(forces() - before, 1);
}

/// Two transactions that look for inodes in the same groups, one from the back, do not wait for
/// each other.
#[test]
fn a_search_for_inodes_waits_for_no_lower_group_and_keeps_none_without_room() {
    let Some((_disk, engine)) = made("") else { return };
    let (low, high) = (AgNumber(1), AgNumber(2));
    let mut t = engine.begin(Kind::CreateUnnamed, 64).unwrap();
    headers::agf(&mut t, high).unwrap();
    let mut other = engine.begin(Kind::CreateUnnamed, 64).unwrap();
    headers::agi(&mut other, low).unwrap();
    let errors = [
        first_unlinked(&mut t, low, 0).unwrap_err(),
        take_inode(&mut t, low, AgIno(0)).unwrap_err(),
        make_chunk(&mut t, low, 1).unwrap_err(),
    ];
    assert!(errors.iter().all(|error| error.errno() == Errno::AGAIN), "{errors:?}");
    drop(other);
    assert_eq!(take_inode(&mut t, low, AgIno(0)).unwrap(), None);
    drop(t);

    let mut t = engine.begin(Kind::Write, 0).unwrap();
    let wish = ExtentWish { least: 1, ..ExtentWish::blocks(1 << 20) };
    while allocate(&mut t, low, &wish).unwrap().is_some() {}
    t.commit().unwrap();
    let mut t = engine.begin(Kind::CreateUnnamed, 64).unwrap();
    assert_eq!(take_inode(&mut t, low, AgIno(0)).unwrap(), None);
    assert!(!make_chunk(&mut t, low, 1).unwrap());
    assert!(t.held_buffers().is_empty());
}

/// The headers of such a volume do not say how many blocks the tree of free inodes has.
#[test]
fn the_blocks_of_a_tree_that_no_header_counts_are_counted() {
    let Some((disk, engine)) = made("-b size=1024 -m inobtcount=0") else { return };
    let ag = AgNumber(0);
    for _ in 0..150 {
        let mut t = engine.begin(Kind::CreateUnnamed, 64).unwrap();
        assert!(make_chunk(&mut t, ag, 1).unwrap());
        let with_own = t.free_inode_tree(ag);
        t.commit().unwrap();
        assert_eq!(engine.counters().free_inode_tree(ag), with_own);
    }
    let found = free_inode_trees(engine.buffers(), engine.superblock()).unwrap();
    let counted = |ag| engine.counters().free_inode_tree(AgNumber(ag));
    assert_eq!((0..engine.geometry().ag_count).map(counted).collect::<Vec<_>>(), found);
    assert!(found[0] > 3, "{found:?}");
    let kept = held_back_of_all(engine.buffers(), engine.superblock()).unwrap();
    assert_eq!(engine.counters().held_back(), kept);
    engine.unmount().unwrap();
    disk.assert_checks();
}

#[test]
fn a_volume_gets_no_more_inodes_than_its_percentage() {
    let Some((disk, engine)) = made("-i maxpct=1") else { return };
    let mut groups = (0..engine.geometry().ag_count).map(AgNumber).collect::<Vec<_>>();
    while !groups.is_empty() {
        groups.retain(|ag| {
            let mut t = engine.begin(Kind::CreateUnnamed, 16).unwrap();
            let is_made = make_chunk(&mut t, *ag, 1).unwrap();
            is_made && t.commit().unwrap().is_some()
        });
    }
    let inodes = engine.counters().counts().inodes;
    engine.unmount().unwrap();
    disk.assert_checks();
    let mount = disk.mount("", &[]);
    assert_eq!(rustix::fs::statvfs(mount.path()).unwrap().f_files, inodes);
}

/// Inodes of long lists leave them, the oldest ones first. Each changes the cluster before it, and
/// its own.
#[test]
fn an_inode_leaves_its_list_whatever_the_length() {
    let Some((disk, engine)) = made("") else { return };
    let ag = AgNumber(0);
    let mut all = Vec::new();
    while all.len() < 2000 {
        let mut t = engine.begin(Kind::CreateUnnamed, 16).unwrap();
        let Some(ino) = take_inode(&mut t, ag, AgIno(0)).unwrap() else {
            assert!(make_chunk(&mut t, ag, 1).unwrap());
            t.commit().unwrap();
            continue;
        };
        enter_unlinked(&mut t, ino).unwrap();
        t.commit().unwrap();
        all.push(ino);
    }
    let leave = |engine: &XfsTransactions, ino| {
        let mut t = engine.begin(Kind::Link, 0).unwrap();
        leave_unlinked(&mut t, ino).unwrap();
        let held = t.held_buffers().len();
        t.commit().unwrap();
        held
    };
    // The header, and at most three clusters.
    for ino in all.drain(..1000) {
        assert!(leave(&engine, ino) <= 4);
    }
    engine.unmount().unwrap();
    // Nothing is known about the lists of a volume that is opened.
    let engine = crate::test_volumes::engine(&disk);
    for ino in all {
        assert!(leave(&engine, ino) <= 4);
    }
    let mut t = engine.begin(Kind::Link, 0).unwrap();
    assert!((0..64).all(|list| first_unlinked(&mut t, ag, list).unwrap().is_none()));
}

/// The last blocks of a group are for the trees of one chain at a time.
#[test]
fn two_chains_do_not_rely_on_the_same_blocks() {
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 600);
    disk.mkfs("");
    let engine = engine(&disk);
    let ag = AgNumber(0);
    let mut t = engine.begin_step(Kind::Truncate, 0).unwrap();
    let agf = headers::agf(&mut t, ag).unwrap();
    let needed = u32::try_from(held_back::tree_room(&t, &agf)).unwrap();
    let all = agf.freeblks.get() - needed * 3 / 2;
    let wish = ExtentWish { least: 1, kept: KeptBlocks::None, ..ExtentWish::blocks(all) };
    let mut taken = 0;
    while taken < all {
        let wish = ExtentWish { most: all - taken, ..wish };
        taken += allocate(&mut t, ag, &wish).unwrap().unwrap().count;
    }
    t.commit().unwrap();
    let begin = || engine.begin(Kind::Write, 0).unwrap();
    let groups = [ag].into();
    let (mut first, mut second) = (begin(), begin());
    require_tree_room(&mut first, &groups).unwrap();
    require_tree_room(&mut first, &groups).unwrap();
    let refused = require_tree_room(&mut second, &groups).unwrap_err();
    assert_eq!(refused.errno(), Errno::AGAIN);
    first.roll(&[]).unwrap();
    require_tree_room(&mut second, &groups).unwrap_err();
    drop(first);
    require_tree_room(&mut second, &groups).unwrap();
}

/// Another transaction has all groups that are full, and does not release them.
#[test]
fn a_search_passes_over_full_groups_without_their_locks() {
    let Some((_disk, engine)) = made("") else { return };
    let last = engine.geometry().ag_count - 1;
    for ag in (0..last).map(AgNumber) {
        let mut t = engine.begin_step(Kind::Truncate, 0).unwrap();
        let wish = ExtentWish { least: 1, kept: KeptBlocks::None, ..ExtentWish::blocks(1 << 20) };
        while allocate(&mut t, ag, &wish).unwrap().is_some() {}
        t.commit().unwrap();
    }
    let mut other = engine.begin(Kind::Write, 0).unwrap();
    for ag in (0..last).map(AgNumber) {
        headers::agf(&mut other, ag).unwrap();
    }
    let mut t = engine.begin(Kind::Write, 10).unwrap();
    let near = Some((AgNumber(0), AgBlock(100)));
    let found = allocate_anywhere(&mut t, near, &ExtentWish::blocks(10)).unwrap();
    assert_eq!(found.unwrap().0, AgNumber(last));
}

/// Many files share the blocks of a group, so its reverse map outgrows what is held back for it.
/// The blocks that it has above count as free, and no file gets them.
#[test]
fn a_reverse_map_above_its_reservation_is_promised_to_no_file() {
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 600);
    disk.mkfs("-d agcount=8");
    let engine = engine(&disk);
    let ag = AgNumber(1);
    let kept = || held_back_of_all(engine.buffers(), engine.superblock()).unwrap();
    let (first, mut number) = (kept(), 0_u64);
    let mut is_above = || {
        let mut t = engine.begin_step(Kind::Truncate, 0).unwrap();
        for _ in 0..500 {
            let record = XfsReverseMap {
                start: u32::try_from(1000 + number % 15_000).unwrap().into(),
                count: 1.into(),
                owner: (300 + number / 15_000).into(),
                offset: (2 * number).into(),
            };
            change_reverse(&mut t, ag, XfsReverseOp::MapShared, &record).unwrap();
            number += 1;
        }
        t.commit().unwrap();
        engine.log().force_all().unwrap();
        assert_eq!(engine.counters().held_back(), kept());
        kept() > first + 20
    };
    assert!((0..200).any(|_| is_above()), "{} and {first} blocks", kept());
}

/// Another transaction has freed the only blocks, and commits them while a search waits.
#[test]
fn a_search_finds_what_a_commit_frees_meanwhile() {
    let Some((_disk, engine)) = made("") else { return };
    for ag in (0..engine.geometry().ag_count).map(AgNumber) {
        let mut t = engine.begin_step(Kind::Truncate, 0).unwrap();
        let wish = ExtentWish { least: 1, kept: KeptBlocks::None, ..ExtentWish::blocks(1 << 20) };
        while allocate(&mut t, ag, &wish).unwrap().is_some() {}
        t.commit().unwrap();
    }
    let search = || {
        let mut t = engine.begin_step(Kind::Truncate, 0).unwrap();
        let wish = ExtentWish { may_be_busy: true, ..ExtentWish::blocks(10) };
        allocate_anywhere(&mut t, None, &wish).unwrap()
    };
    assert_eq!(search(), None);
    let mut other = engine.begin_step(Kind::Truncate, 0).unwrap();
    let extent = AgExtent::new(5000, 4000);
    free_extent(&mut other, AgNumber(3), extent, FreedFrom::Nobody).unwrap();
    std::thread::scope(|scope| {
        let found = scope.spawn(search);
        std::thread::sleep(std::time::Duration::from_millis(50));
        other.commit().unwrap();
        assert_eq!(found.join().unwrap().unwrap().0, AgNumber(3));
    });
}
