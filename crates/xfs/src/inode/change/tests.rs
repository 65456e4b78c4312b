//! Files without names on volumes of `mkfs.xfs`: they are made, get extents, share them, lose them,
//! and are freed, by transactions. The judges find the volume clean at its end, and when the log
//! was cut.

mod groups;

use std::ops::Range;
use std::thread;

use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::disk::{RECOVERY, XfsDisk};
use offshoot_testkit::xfs::judges;
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::group::UNLINKED_LISTS;
use offshoot_xfs_format::inode::XfsInodeFlags2;
use offshoot_xfs_format::log::items::{XfsCountOp, XfsReverseOp};
use offshoot_xfs_format::record::XfsExtent;
use offshoot_xfs_format::{AgBlock, AgIno, AgNumber, FileBlock, FsBlock, Ino};

use super::{map_extent, unmap_extents};
use crate::group::{self, ExtentWish, FreedFrom, ReverseOwner};
use crate::test_volumes::engine_on;
use crate::trans::{
    AgExtent, ChangedFork, ForkName, XfsTransaction, XfsTransactionKind as Kind, XfsTransactions,
};
use crate::{XfsOptions, check_xfs};

/// A file, and the block behind its last one.
pub(crate) struct UnnamedFile {
    ino: Ino,
    end: u64,
    extents: Vec<XfsExtent>,
}

/// What the test does.
pub(crate) struct UnnamedChurn<'e> {
    engine: &'e XfsTransactions,
    random: Random,
    pub(crate) files: Vec<UnnamedFile>,
    /// The groups whose inodes and blocks it takes.
    groups: Range<u32>,
    /// How rarely it forces the log.
    calm: u64,
}

impl<'e> UnnamedChurn<'e> {
    pub(crate) fn new(engine: &'e XfsTransactions, seed: u64, groups: Range<u32>) -> Self {
        Self { engine, random: Random::new(seed), files: Vec::new(), groups, calm: 8 }
    }

    fn has(&self, layout: XfsLayout) -> bool {
        self.engine.geometry().layout.contains(layout)
    }

    fn group(&mut self) -> AgNumber {
        let count = self.random.below(self.groups.len() as u64);
        AgNumber(self.groups.start + u32::try_from(count).unwrap())
    }

    fn make(&mut self) {
        let ag = self.group();
        let generation = u32::try_from(self.random.below(1 << 32)).unwrap();
        let mut t = self.engine.begin(Kind::CreateUnnamed, 64).unwrap();
        let ino = loop {
            match group::take_inode(&mut t, ag, AgIno(0)).unwrap() {
                Some(ino) => break ino,
                None => assert!(group::make_chunk(&mut t, ag, generation).unwrap()),
            }
        };
        let has_wide_counts = self.has(XfsLayout::WIDE_COUNTS);
        let inode = t.inode(ino).unwrap();
        inode.set_fork(ForkName::Data, ChangedFork::Extents(Vec::new()));
        let core = inode.core_mut();
        core.mode = 0o100_600.into();
        core.size = (1 << 40).into();
        let flags = if has_wide_counts { XfsInodeFlags2::NREXT64.bits() } else { 0 };
        core.flags2 = flags.into();
        group::enter_unlinked(&mut t, ino).unwrap();
        t.commit().unwrap();
        let core = self.engine.committed_core(ino);
        assert!(core.is_none_or(|core| core.mode.get() == 0o100_600));
        self.files.push(UnnamedFile { ino, end: 0, extents: Vec::new() });
    }

    fn grow(&mut self, index: usize) {
        let ag = self.group();
        let fork = ForkName::Data;
        let mut t = self.engine.begin(Kind::Write, 64).unwrap();
        for _ in 0..=self.random.below(3) {
            let most = 1 + u32::try_from(self.random.below(12)).unwrap();
            let near = AgBlock(u32::try_from(self.random.below(60_000)).unwrap());
            let wish = ExtentWish {
                near: (self.random.below(2) == 0).then_some(near),
                least: 1,
                ..ExtentWish::blocks(most)
            };
            let Some(found) = group::allocate(&mut t, ag, &wish).unwrap() else { break };
            let Some(file) = self.files.get_mut(index) else { break };
            file.end += self.random.below(2) * 3;
            let offset = FileBlock(file.end);
            file.end += u64::from(found.count);
            let record = ReverseOwner::file(file.ino, fork, offset, false).over(found);
            group::change_reverse(&mut t, ag, XfsReverseOp::Map, &record).unwrap();
            let start = self.engine.geometry().fs_block(ag, found.start);
            let extent = XfsExtent { offset, start, count: found.count, is_unwritten: false };
            let step = map_extent(&mut t, file.ino, fork, &extent).unwrap();
            free_tree_blocks(&mut t, file.ino, step.tree_blocks);
            file.extents.push(extent);
        }
        t.commit().unwrap();
    }

    /// Lets a file share an extent of another.
    fn share(&mut self, from: usize, to: usize) {
        let Some(extent) = self.files.get(from).and_then(|file| file.extents.last().copied())
        else {
            return;
        };
        let mut t = self.engine.begin(Kind::Write, 64).unwrap();
        let source = self.files.get(from).unwrap().ino;
        let Some(file) = self.files.get_mut(to) else { return };
        for ino in [source, file.ino] {
            let core = t.inode(ino).unwrap().core_mut();
            core.flags2 = (core.flags2.get() | XfsInodeFlags2::REFLINK.bits()).into();
        }
        let (ag, block) = self.engine.geometry().split(extent.start).unwrap();
        let mut rest = AgExtent { start: block, count: extent.count };
        let offset = FileBlock(file.end + 1);
        let record = ReverseOwner::file(file.ino, ForkName::Data, offset, false).over(rest);
        while rest.count > 0 {
            let step = group::change_references(&mut t, ag, rest, XfsCountOp::Increase).unwrap();
            rest = AgExtent::new(rest.start.0 + step.done, rest.count - step.done);
        }
        group::change_reverse(&mut t, ag, XfsReverseOp::MapShared, &record).unwrap();
        let shared = XfsExtent { offset, ..extent };
        let step = map_extent(&mut t, file.ino, ForkName::Data, &shared).unwrap();
        free_tree_blocks(&mut t, file.ino, step.tree_blocks);
        file.end = offset.0 + u64::from(extent.count);
        t.commit().unwrap();
    }

    /// Unmaps a range of a file, and frees what no other file has. Returns whether all is gone.
    fn cut(&mut self, index: usize, start: u64, end: u64) -> bool {
        let Some(file) = self.files.get_mut(index) else { return true };
        file.extents.clear();
        let ino = file.ino;
        let mut t = self.engine.begin_step(Kind::Truncate, 0).unwrap();
        let is_done = cut_step(&mut t, ino, start..end);
        t.commit().unwrap();
        is_done
    }

    pub(crate) fn free(&mut self, index: usize) {
        while !self.cut(index, 0, u64::MAX) {}
        let ino = self.files.swap_remove(index).ino;
        let mut t = self.engine.begin_step(Kind::FreeInode, 0).unwrap();
        group::leave_unlinked(&mut t, ino).unwrap();
        group::free_inode(&mut t, ino).unwrap();
        t.commit().unwrap();
    }

    pub(crate) fn step(&mut self) {
        let count = self.files.len() as u64;
        let index = usize::try_from(self.random.below(count.max(1))).unwrap();
        match self.random.below(20) {
            0..3 if count < 200 => self.make(),
            0 => self.free(index),
            1..4 if count > 0 => {
                let start = self.random.below(400);
                let end = start + self.random.below(60);
                self.cut(index, start, end);
            }
            4 if count > 0 && self.random.below(4) == 0 => self.free(index),
            5..8 if self.has(XfsLayout::SHARED_BLOCKS) && count > 1 => {
                let to = usize::try_from(self.random.below(count)).unwrap();
                if to != index {
                    self.share(index, to);
                }
            }
            8 if self.random.below(self.calm) == 0 => self.engine.log().force_all().unwrap(),
            9 if self.random.below(20) == 0 => self.engine.log().push_tail().unwrap(),
            _ if count > 0 => self.grow(index),
            _ => self.make(),
        }
    }
}

/// Unmaps two extents of a range of a file, frees what no other file has, and begins the next step
/// of the transaction. Returns whether all is gone.
fn cut_step(t: &mut XfsTransaction<'_>, ino: Ino, range: Range<u64>) -> bool {
    let step = unmap_extents(t, ino, ForkName::Data, range, 2).unwrap();
    for extent in &step.extents {
        release(t, ino, extent);
    }
    free_tree_blocks(t, ino, step.tree_blocks);
    t.roll(&[ino]).unwrap();
    step.is_done
}

/// Frees the blocks that a tree of extents has no longer.
fn free_tree_blocks(t: &mut XfsTransaction<'_>, ino: Ino, blocks: Vec<FsBlock>) {
    for block in blocks {
        let (ag, block) = t.geometry().split(block).unwrap();
        let known = FreedFrom::Owner(ReverseOwner::tree_block(ino, ForkName::Data));
        let owner = if ino.0.is_multiple_of(2) { known } else { FreedFrom::Anyone };
        group::free_extent(t, ag, AgExtent { start: block, count: 1 }, owner).unwrap();
    }
}

/// Removes one mapping, and frees the blocks if it was the last one.
fn release(t: &mut XfsTransaction<'_>, ino: Ino, extent: &XfsExtent) {
    let geometry = t.geometry();
    let (ag, block) = geometry.split(extent.start).unwrap();
    let all = AgExtent { start: block, count: extent.count };
    let record = ReverseOwner::file(ino, ForkName::Data, extent.offset, false).over(all);
    let is_shared = group::shared_part(t, ag, all).unwrap().is_some();
    let op = if is_shared { XfsReverseOp::UnmapShared } else { XfsReverseOp::Unmap };
    group::change_reverse(t, ag, op, &record).unwrap();
    let mut freed = vec![all];
    if geometry.layout.contains(XfsLayout::SHARED_BLOCKS) {
        freed.clear();
        let mut rest = all;
        while rest.count > 0 {
            let step = group::change_references(t, ag, rest, XfsCountOp::Decrease).unwrap();
            freed.extend(step.freed);
            rest = AgExtent::new(rest.start.0 + step.done, rest.count - step.done);
        }
    }
    for extent in freed {
        group::free_extent(t, ag, extent, FreedFrom::Nobody).unwrap();
    }
}

/// Checks that no file and no staged extent is left.
fn assert_nothing_is_left(engine: &XfsTransactions) {
    for ag in (0..engine.geometry().ag_count).map(AgNumber) {
        let mut t = engine.begin(Kind::ClearUnlinked, 0).unwrap();
        for list in 0..UNLINKED_LISTS {
            assert_eq!(group::first_unlinked(&mut t, ag, list).unwrap(), None);
        }
        assert!(group::staged(&mut t, ag, 10).unwrap().is_empty());
        group::clear_unlinked(&mut t, ag, 0).unwrap();
        assert!(t.commit().unwrap().is_none(), "an empty list was emptied");
    }
}

/// What a test does.
struct UnnamedChurnPlan {
    /// The options of `mkfs.xfs`.
    options: &'static str,
    seed: u64,
    /// The steps of each thread.
    steps: usize,
    calm: u64,
    /// For each thread the first group that it takes inodes and blocks from, and their number.
    threads: Vec<(u32, u32)>,
    /// The bytes that the log has to have carried at least.
    logged: u64,
    /// The size of the volume.
    mib: u64,
    /// What the kernel complains of when it mounts the volume.
    kernel_says: &'static [&'static str],
}

impl UnnamedChurnPlan {
    /// One thread in two groups.
    fn of_run(options: &'static str) -> Self {
        let threads = vec![(0, 2)];
        Self {
            options,
            seed: seed_of_run(),
            steps: 1_500,
            calm: 8,
            threads,
            logged: 0,
            mib: 1 << 10,
            kernel_says: &[],
        }
    }
}

/// A volume and its engine.
pub(crate) fn volume(mib: u64, options: &str) -> Option<(XfsDisk, XfsTransactions)> {
    let disk = XfsDisk::create(&judges::require()?, mib);
    disk.mkfs(options);
    let engine = engine_on(disk.writable_device());
    Some((disk, engine))
}

fn churn(plan: &UnnamedChurnPlan) {
    let Some((disk, engine)) = volume(plan.mib, plan.options) else { return };
    let churn = |(seed, &(first, count)): (u64, &(u32, u32))| UnnamedChurn {
        calm: plan.calm,
        ..UnnamedChurn::new(&engine, seed, first..first + count)
    };
    let mut churns: Vec<_> = (plan.seed..).zip(&plan.threads).map(churn).collect();
    thread::scope(|scope| {
        for churn in &mut churns {
            scope.spawn(|| (0..plan.steps).for_each(|_| churn.step()));
        }
    });
    assert_cut_recovers(&disk, &engine, plan.kernel_says);
    let logged = engine.log().statistics().bytes;
    assert!(logged >= plan.logged, "the log has carried {logged} bytes");
    for mut churn in churns {
        while !churn.files.is_empty() {
            churn.free(0);
        }
    }
    assert_closes_clean(&disk, engine, plan.kernel_says);
}

/// Cuts the log. The kernel recovers it, and frees the files, which have no names.
fn assert_cut_recovers(disk: &XfsDisk, engine: &XfsTransactions, says: &[&'static str]) {
    engine.log().force_all().unwrap();
    let cut = disk.copy();
    drop(cut.mount("nouuid", &[says, &[RECOVERY]].concat()));
    cut.assert_checks();
}

/// Unmounts a volume of which all files were freed. What was held back in the end is what the next
/// one to write it holds back.
pub(crate) fn assert_closes_clean(disk: &XfsDisk, engine: XfsTransactions, says: &[&'static str]) {
    assert_nothing_is_left(&engine);
    let kept = group::held_back_of_all(engine.buffers(), engine.superblock()).unwrap();
    assert_eq!(engine.counters().held_back(), kept);
    engine.unmount().unwrap();
    disk.assert_checks();
    let found = check_xfs(&disk.device(), &XfsOptions::default()).unwrap();
    assert!(found.findings.is_empty(), "{:#?}", found.findings);
    drop(disk.mount("", says));
}

#[test]
fn judges_find_a_volume_of_today_clean() {
    churn(&UnnamedChurnPlan { steps: 3_000, ..UnnamedChurnPlan::of_run("") });
}

#[test]
fn judges_find_small_blocks_clean() {
    churn(&UnnamedChurnPlan { steps: 3_000, ..UnnamedChurnPlan::of_run("-b size=1024") });
}

#[test]
fn judges_find_a_volume_without_reverse_map_clean() {
    churn(&UnnamedChurnPlan::of_run("-m rmapbt=0"));
}

#[test]
fn judges_find_a_volume_without_shared_blocks_clean() {
    churn(&UnnamedChurnPlan::of_run("-m reflink=0,rmapbt=0"));
}

#[test]
fn judges_find_large_sectors_clean() {
    churn(&UnnamedChurnPlan::of_run("-s size=4096"));
}

#[test]
fn judges_find_a_volume_clean_whose_log_has_wrapped() {
    let logged = 70 << 20;
    churn(&UnnamedChurnPlan { steps: 18_000, calm: 1, logged, ..UnnamedChurnPlan::of_run("") });
}

#[test]
fn judges_find_a_volume_clean_that_threads_changed_in_groups_of_their_own() {
    churn(&UnnamedChurnPlan {
        threads: vec![(0, 1), (1, 1), (3, 1)],
        ..UnnamedChurnPlan::of_run("")
    });
}

#[test]
fn judges_find_a_volume_clean_that_threads_changed_in_one_group() {
    churn(&UnnamedChurnPlan { threads: vec![(0, 1), (0, 1)], ..UnnamedChurnPlan::of_run("") });
}

/// With this seed an empty range in the middle of an extent was unmapped: it cut the extent in two,
/// and the file did not count the second part.
#[test]
fn judges_find_a_volume_clean_after_an_empty_range_was_unmapped() {
    churn(&UnnamedChurnPlan { seed: 770_497_576, steps: 3_000, ..UnnamedChurnPlan::of_run("") });
}

#[test]
fn unmapping_an_empty_range_changes_nothing() {
    let Some((disk, engine)) = volume(1 << 10, "") else { return };
    let mut churn = UnnamedChurn::new(&engine, seed_of_run(), 0..2);
    churn.make();
    while churn.files.iter().any(|file| file.extents.iter().all(|extent| extent.count < 2)) {
        churn.grow(0);
    }
    let ino = churn.files.first().unwrap().ino;
    let mut t = engine.begin_step(Kind::Truncate, 0).unwrap();
    let before = t.inode(ino).unwrap().fork(ForkName::Data).cloned();
    for at in 0..churn.files.first().unwrap().end {
        let step = unmap_extents(&mut t, ino, ForkName::Data, at..at, 2).unwrap();
        assert!(step.is_done && step.extents.is_empty());
    }
    assert_eq!(t.inode(ino).unwrap().fork(ForkName::Data), before.as_ref());
    assert!(t.commit().unwrap().is_none());
    churn.free(0);
    assert_closes_clean(&disk, engine, &[]);
}

#[test]
fn one_transaction_of_hundreds_of_steps_frees_a_file() {
    let Some((disk, engine)) = volume(1 << 10, "") else { return };
    let mut churn = UnnamedChurn::new(&engine, seed_of_run(), 0..2);
    churn.make();
    (0..400).for_each(|_| churn.grow(0));
    let ino = churn.files.first().unwrap().ino;
    let mut t = engine.begin_step(Kind::Truncate, 0).unwrap();
    let mut steps = 0;
    while !cut_step(&mut t, ino, 0..u64::MAX) {
        steps += 1;
        if steps == 100 {
            assert_cut_recovers(&disk, &engine, &[]);
        }
    }
    assert!(steps > 200, "{steps}");
    t.commit().unwrap();
    churn.free(0);
    assert_closes_clean(&disk, engine, &[]);
}
