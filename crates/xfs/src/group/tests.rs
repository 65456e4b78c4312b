use offshoot_testkit::xfs::disk::XfsDisk;
use offshoot_testkit::xfs::judges;
use offshoot_xfs_format::superblock::XfsSuperblock;
use offshoot_xfs_format::{AgBlock, AgNumber};

use super::allocate::KeptBlocks;
use super::{
    ExtentWish, FreedFrom, HeldBack, allocate, free_extent, free_list, headers, held_back,
    make_chunk,
};
use crate::buffer::{XfsBuffers, sector_at};
use crate::test_volumes::engine;
use crate::trans::{AgExtent, XfsTransactionKind as Kind, XfsTransactions};

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
