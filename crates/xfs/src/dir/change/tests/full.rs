//! Removals on a volume without a free block: names go, and a block stays that cannot be given up.

use offshoot_xfs_format::FileBlock;
use offshoot_xfs_format::dir::data::DirData;
use offshoot_xfs_format::record::XfsExtent;

use super::*;
use crate::group::{ExtentWish, ReverseOwner, allocate_anywhere};
use crate::inode::change::map_extent;
use crate::trans::{AgExtent, ForkName};

const FORK: ForkName = ForkName::Data;

/// A file that takes every free block.
struct GreedyFile {
    ino: Ino,
    end: u64,
}

impl GreedyFile {
    /// Takes up to `most` free blocks in a row. Returns whether there were any.
    fn take(&mut self, engine: &XfsTransactions, most: u32) -> bool {
        let mut t = engine.begin(Kind::Write, 0).unwrap();
        let at = FileBlock(self.end);
        let owner = Some(ReverseOwner::file(self.ino, FORK, at, false));
        let wish = ExtentWish { owner, least: 1, ..ExtentWish::blocks(most) };
        let found = allocate_anywhere(&mut t, None, &wish).unwrap();
        let Some((ag, AgExtent { start, count })) = found else { return false };
        let start = engine.geometry().fs_block(ag, start);
        let extent = XfsExtent { offset: at, start, count, is_unwritten: false };
        map_extent(&mut t, self.ino, FORK, &extent).unwrap();
        // With a hole between, so that each extent has a record.
        self.end += u64::from(count) + 1;
        t.inode(self.ino).unwrap().core_mut().size = (1_u64 << 40).into();
        t.commit().unwrap();
        true
    }
}

/// The data blocks of the first directory that have no entries.
fn empty_blocks(volume: &NamedVolume, engine: &XfsTransactions) -> usize {
    let mut t = engine.begin(Kind::ChangeInode, 0).unwrap();
    let mut directory = ChangedDirectory::new(&mut t, volume.directories[0].ino).unwrap();
    if !matches!(directory.form().unwrap(), DirectoryForm::Tree) {
        return 0;
    }
    let geometry = engine.geometry();
    let room = directory.room_of_data();
    let mut is_empty = |number: usize| {
        let block = directory.blocks.find_held(FileBlock(number as u64)).unwrap();
        block.is_some_and(|place| {
            let bytes = directory.blocks.bytes(place).unwrap();
            DirData::view(geometry, bytes).unwrap().longest() == room
        })
    };
    (0..200).filter(|number| is_empty(*number)).count()
}

/// Every second data block goes first. A list of 12 extents has no room for so many pieces, and
/// there is no block for a tree.
#[test]
fn a_removal_without_a_free_block_leaves_an_empty_block() {
    let options = "--unsupported -m rmapbt=0,reflink=0,finobt=0,inobtcount=0";
    let Some(mut volume) = NamedVolume::make(64, options, 1, seed_of_run()) else { return };
    let name = |number: usize| format!("{number:0250}").into_bytes();
    volume.let_kernel_add((0..480).map(name).collect());
    let engine = engine(&volume.disk);
    let mut greedy = GreedyFile { ino: volume.files[3].ino, end: 0 };
    // It gets a tree with room for more.
    (0..260).for_each(|_| assert!(greedy.take(&engine, 1)));
    let mut numbers: Vec<_> = (0..480).collect();
    numbers.sort_by_key(|number| (number / 15 % 2 != 1, *number));
    let mut most_left = 0;
    for number in numbers {
        while greedy.take(&engine, 1 << 16) {}
        volume.remove(&engine, 0, &name(number));
        most_left = most_left.max(empty_blocks(&volume, &engine));
    }
    assert!(most_left > 2, "{most_left}");
    assert_eq!(volume.form(&engine, 0), None);
    volume.assert_we_find(&engine);
    engine.unmount().unwrap();
    volume.disk.assert_checks();
    let found = check_xfs(&volume.disk.device(), &XfsOptions::default()).unwrap();
    assert!(found.findings.is_empty(), "{:#?}", found.findings);
}
