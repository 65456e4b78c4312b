//! A group with a file on a device: its headers and trees, changed as a transaction would.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_testkit::random::Random;
use offshoot_vfs::Result;
use offshoot_xfs_format::btree::{XfsBtreeBlock, XfsForkRoot, XfsSearchKey, XfsTree, seal};
use offshoot_xfs_format::group::{Agf, Agfl};
use offshoot_xfs_format::inode::XfsInodeCore;
use offshoot_xfs_format::record::{
    XfsExtent, XfsExtentItem, XfsFreeExtent, XfsOwner, XfsReverseFlags, XfsReverseMap,
};
use offshoot_xfs_format::superblock::{XfsSuperblock, XfsSuperblockFields};
use offshoot_xfs_format::{AgBlock, AgNumber, FileBlock, FsBlock, Ino, XfsGeometry};
use zerocopy::IntoBytes;
use zerocopy::big_endian::U32;

use super::super::super::{XfsEditRoot, XfsTreeBlocks, XfsTreeEdit};
use crate::btree::XfsTreeCursor;
use crate::buffer::XfsBuffers;

/// The free list has at least so many blocks before a change, and at most.
const LISTED: Range<u32> = 20..40;

/// The group of a file.
pub(super) struct JudgedGroup {
    geometry: XfsGeometry,
    superblock: XfsSuperblockFields,
    device: Arc<dyn BlockDevice>,
    ag: AgNumber,
    agf: Agf,
    agfl: Agfl,
    ino: Ino,
    root: XfsForkRoot,
    room: usize,
    /// The blocks of the tree of extents.
    tree_blocks: u64,
    /// The extents of the file of more than one block, which stay.
    longer: (u64, u64),
    /// Where the blocks of the file are, by their place in the file.
    pub(super) file: BTreeMap<u64, AgBlock>,
    blocks: HashMap<u64, Vec<u8>>,
    changed: BTreeSet<u64>,
    /// How many blocks each tree has got, and given back.
    pub(super) counted: BTreeMap<String, (u32, u32)>,
}

/// One tree of the group, or the tree of extents.
struct JudgedTree<'a> {
    group: &'a mut JudgedGroup,
    tree: XfsTree,
}

fn read(device: &dyn BlockDevice, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    device.read_at(at, &mut bytes).unwrap();
    bytes
}

fn free_extent(start: u32, count: u32) -> XfsFreeExtent {
    XfsFreeExtent { start: start.into(), count: count.into() }
}

fn ends_of(extent: XfsFreeExtent) -> (u32, u32) {
    (extent.start.get(), extent.start.get() + extent.count.get())
}

impl JudgedGroup {
    pub(super) fn open(device: Arc<dyn BlockDevice>, ino: u64) -> Self {
        let sector = read(&*device, 0, 512);
        let superblock = XfsSuperblock::parse(&sector).unwrap();
        let (geometry, fields) = (superblock.geometry, superblock.fields);
        let ino = Ino(ino);
        let (ag, ..) = geometry.locate(ino).unwrap();
        let agf = read(&*device, Agf::offset(&geometry, ag), 512);
        let agfl = read(&*device, Agfl::offset(&geometry, ag), 512);
        let at = geometry.inode_offset(ino).unwrap();
        let inode = read(&*device, at, geometry.inode_size());
        let core = XfsInodeCore::view(&inode).unwrap();
        let fork = core.fork_room(&geometry).unwrap().data;
        let root = XfsForkRoot::parse(&inode[fork.clone()], &geometry).unwrap();
        let mut group = Self {
            superblock: fields,
            ag,
            agf: *Agf::parse(&agf, &geometry, ag).unwrap(),
            agfl: Agfl::parse(&agfl, &geometry, ag).unwrap(),
            ino,
            root,
            room: XfsForkRoot::capacity(fork.len()),
            tree_blocks: 0,
            longer: (0, 0),
            file: BTreeMap::new(),
            blocks: HashMap::new(),
            changed: BTreeSet::new(),
            counted: BTreeMap::new(),
            device,
            geometry,
        };
        group.read_file(core.nblocks.get());
        group
    }

    fn read_file(&mut self, blocks: u64) {
        let buffers = self.buffers();
        let root = self.root(XfsTree::Extents);
        let mut cursor = XfsTreeCursor::new(&buffers, root.view());
        cursor.seek(XfsSearchKey([0; 3])).unwrap();
        let mut data = 0;
        while let Some(item) = cursor.record::<XfsExtentItem>() {
            let extent = item.get();
            data += u64::from(extent.count);
            let (ag, start) = self.geometry.split(extent.start).unwrap();
            assert_eq!(ag, self.ag);
            if extent.count == 1 {
                self.file.insert(extent.offset.0, start);
            } else {
                self.longer.0 += 1;
                self.longer.1 += u64::from(extent.count);
            }
            cursor.advance().unwrap();
        }
        self.tree_blocks = blocks - data;
    }

    fn buffers(&self) -> XfsBuffers {
        XfsBuffers::new(self.device.clone(), self.geometry.clone(), 1 << 20)
    }

    /// The levels of the trees: by block, by size, reverse map, extents.
    pub(super) fn levels(&self) -> [u32; 4] {
        let [block, size, reverse] = self.agf.levels.map(U32::get);
        [block, size, reverse, u32::from(self.root.level) + 1]
    }

    fn root(&self, tree: XfsTree) -> XfsEditRoot {
        let Some(index) = index_of(tree) else {
            return XfsEditRoot::Fork { root: self.root.clone(), owner: self.ino, room: self.room };
        };
        let (block, levels) = (AgBlock(self.agf.roots[index].get()), self.agf.levels[index].get());
        XfsEditRoot::Group { tree, ag: self.ag, block, levels }
    }

    fn edit<T>(&mut self, tree: XfsTree, change: impl FnOnce(&mut XfsTreeEdit<'_>) -> T) -> T {
        let (geometry, root) = (self.geometry.clone(), self.root(tree));
        let mut blocks = JudgedTree { group: self, tree };
        change(&mut XfsTreeEdit::new(&geometry, root, &mut blocks))
    }

    /// Replaces free extents that `old` and `new` list by their ends.
    fn replace_free(&mut self, old: &[XfsFreeExtent], new: &[(u32, u32)]) {
        for tree in [XfsTree::FreeByBlock, XfsTree::FreeBySize] {
            for extent in old {
                self.edit(tree, |edit| {
                    let key = tree.low_key(extent.as_bytes());
                    assert_eq!(edit.exact::<XfsFreeExtent>(key).unwrap(), Some(*extent));
                    edit.remove().unwrap();
                });
            }
            for &(start, end) in new.iter().filter(|(start, end)| start < end) {
                let record = free_extent(start, end - start);
                self.edit(tree, |edit| edit.insert(&record).unwrap());
            }
        }
        let count = |ends: &[(u32, u32)]| ends.iter().map(|(start, end)| end - start).sum::<u32>();
        let old: Vec<_> = old.iter().copied().map(ends_of).collect();
        let free = self.agf.freeblks.get() + count(new) - count(&old);
        self.agf.freeblks = free.into();
    }

    /// Takes any free block for block `at` of the file, but none that continues an extent of the
    /// file: `xfs_repair` wants one record for both, and the test has one for each block.
    pub(super) fn take_any(&mut self, at: u64, random: &mut Random) -> AgBlock {
        loop {
            self.fill_list(random.number());
            let block = self.take_near(random.number());
            let left = self.file.get(&at.wrapping_sub(1)).map(|left| left.0 + 1);
            let right = self.file.get(&(at + 1)).map(|right| right.0 - 1);
            if ![left, right].contains(&Some(block.0)) {
                return block;
            }
            self.give(block);
        }
    }

    fn take_near(&mut self, number: u64) -> AgBlock {
        let any = number % u64::from(self.geometry.ag_len(self.ag));
        let key = XfsSearchKey([any, u64::MAX, 0]);
        let found = self.edit(XfsTree::FreeByBlock, |edit| {
            let found = edit.at_most::<XfsFreeExtent>(key).unwrap();
            found.or_else(|| edit.at_least(XfsSearchKey([0; 3])).unwrap())
        });
        let found = found.expect("the group is full");
        let (start, end) = ends_of(found);
        let block = start + u32::try_from(any % u64::from(end - start)).unwrap();
        self.replace_free(&[found], &[(start, block), (block + 1, end)]);
        AgBlock(block)
    }

    fn give(&mut self, block: AgBlock) {
        let (mut start, mut end) = (block.0, block.0 + 1);
        let (left, right) = self.edit(XfsTree::FreeByBlock, |edit| {
            let key = XfsSearchKey([start.into(), u64::MAX, 0]);
            let left = edit.at_most::<XfsFreeExtent>(key).unwrap();
            (left, edit.at_least::<XfsFreeExtent>(key).unwrap())
        });
        let left = left.filter(|left| ends_of(*left).1 == start);
        let right = right.filter(|right| ends_of(*right).0 == end);
        start = left.map_or(start, |left| ends_of(left).0);
        end = right.map_or(end, |right| ends_of(right).1);
        let old: Vec<_> = [left, right].into_iter().flatten().collect();
        self.replace_free(&old, &[(start, end)]);
    }

    /// Keeps enough blocks in the free list, and not too many.
    fn fill_list(&mut self, number: u64) {
        let mut number = number;
        while self.agf.flcount.get() < LISTED.start {
            let block = self.take_near(number);
            self.own(block, XfsOwner::FreeTrees, 0);
            self.push(block);
            number = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        while self.agf.flcount.get() >= LISTED.end {
            let block = self.pop();
            self.disown(block, XfsOwner::FreeTrees, 0);
            self.give(block);
        }
    }

    fn list_size(&self) -> u32 {
        u32::try_from(Agfl::size(&self.geometry)).unwrap()
    }

    fn pop(&mut self) -> AgBlock {
        let (first, size) = (self.agf.flfirst.get(), self.list_size());
        assert!(self.agf.flcount.get() > 0);
        self.agf.flfirst = ((first + 1) % size).into();
        self.agf.flcount -= 1;
        self.agfl.blocks[first as usize]
    }

    fn push(&mut self, block: AgBlock) {
        let size = self.list_size();
        let last = (self.agf.fllast.get() + 1) % size;
        self.agf.fllast = last.into();
        self.agf.flcount += 1;
        self.agfl.blocks[last as usize] = block;
    }

    /// Whether the reverse map stores no offsets in a file for it.
    fn is_plain(owner: XfsOwner, offset: u64) -> bool {
        let tree_block = XfsReverseFlags::TREE_BLOCK.bits();
        !matches!(owner, XfsOwner::File(_)) || offset == tree_block
    }

    /// Adds an owner. Blocks of one owner without offsets are one record.
    fn own(&mut self, block: AgBlock, owner: XfsOwner, offset: u64) {
        let (mut start, mut end) = (block.0, block.0 + 1);
        let is_plain = Self::is_plain(owner, offset);
        self.edit(XfsTree::ReverseMap, |edit| {
            let mut joined = Vec::new();
            let around = (AgBlock(block.0 - 1), AgBlock(block.0 + 1));
            edit.overlapping(around, &mut |map: &XfsReverseMap| {
                if is_plain && map.owner() == Some(owner) && map.offset.get() == offset {
                    joined.push(*map);
                }
                ControlFlow::Continue(())
            })
            .unwrap();
            for map in joined {
                start = start.min(map.start.get());
                end = end.max(map.start.get() + map.count.get());
                let key = XfsTree::ReverseMap.low_key(map.as_bytes());
                edit.exact::<XfsReverseMap>(key).unwrap().unwrap();
                edit.remove().unwrap();
            }
            edit.insert(&reverse_map(start, end, owner, offset)).unwrap();
        });
    }

    fn disown(&mut self, block: AgBlock, owner: XfsOwner, offset: u64) {
        let key = XfsSearchKey([block.0.into(), owner.number(), offset]);
        self.edit(XfsTree::ReverseMap, |edit| {
            let map = edit.at_most::<XfsReverseMap>(key).unwrap().unwrap();
            assert_eq!((map.owner(), map.offset.get()), (Some(owner), offset), "{block}");
            let (start, end) = (map.start.get(), map.start.get() + map.count.get());
            assert!((start..end).contains(&block.0));
            if start < block.0 {
                edit.replace(&reverse_map(start, block.0, owner, offset)).unwrap();
            } else {
                edit.remove().unwrap();
            }
            if block.0 + 1 < end {
                edit.insert(&reverse_map(block.0 + 1, end, owner, offset)).unwrap();
            }
        });
    }

    fn item(&self, at: u64, block: AgBlock) -> XfsExtentItem {
        let start = self.geometry.fs_block(self.ag, block);
        XfsExtent { offset: FileBlock(at), start, count: 1, is_unwritten: false }.into()
    }

    /// Maps a block that was taken into the file.
    pub(super) fn map(&mut self, at: u64, block: AgBlock) {
        let item = self.item(at, block);
        self.edit(XfsTree::Extents, |edit| edit.insert(&item).unwrap());
        self.own(block, XfsOwner::File(self.ino), at);
        self.file.insert(at, block);
    }

    /// Moves a block of the file to one that was taken.
    pub(super) fn remap(&mut self, at: u64, old: AgBlock, new: AgBlock) {
        let item = self.item(at, new);
        self.edit(XfsTree::Extents, |edit| {
            edit.exact::<XfsExtentItem>(XfsSearchKey([at, 0, 0])).unwrap().unwrap();
            edit.replace(&item).unwrap();
        });
        self.disown(old, XfsOwner::File(self.ino), at);
        self.give(old);
        self.own(new, XfsOwner::File(self.ino), at);
        self.file.insert(at, new);
    }

    /// Removes a block of the file.
    pub(super) fn unmap(&mut self, at: u64) {
        self.fill_list(at);
        let block = self.file.remove(&at).unwrap();
        self.edit(XfsTree::Extents, |edit| {
            edit.exact::<XfsExtentItem>(XfsSearchKey([at, 0, 0])).unwrap().unwrap();
            edit.remove().unwrap();
        });
        self.disown(block, XfsOwner::File(self.ino), at);
        self.give(block);
    }

    /// Writes everything home.
    pub(super) fn write_back(&mut self) {
        for at in std::mem::take(&mut self.changed) {
            let Some(bytes) = self.blocks.get_mut(&at) else { continue };
            let tree = XfsTree::of_block(bytes, &self.geometry).unwrap();
            seal(bytes, &self.geometry, tree);
            let owner = tree.is_long().then_some(self.ino);
            XfsBtreeBlock::verify(bytes, &self.geometry, tree, FsBlock(at), owner).unwrap();
            let place = self.geometry.place_of(FsBlock(at)).unwrap().bytes();
            self.device.write_at(place, bytes).unwrap();
        }
        let longest = self.edit(XfsTree::FreeBySize, |edit| {
            edit.at_most::<XfsFreeExtent>(XfsSearchKey([u64::MAX; 3])).unwrap()
        });
        self.agf.longest = longest.map_or(0.into(), |extent| extent.count);
        let (geometry, device) = (&self.geometry, &*self.device);
        let agf_at = Agf::offset(geometry, self.ag);
        let mut sector = read(device, agf_at, 512);
        let free = |agf: &Agf| {
            [agf.freeblks, agf.flcount, agf.btreeblks]
                .map(|n| u64::from(n.get()))
                .iter()
                .sum::<u64>()
        };
        let before = free(Agf::view(&sector).unwrap());
        self.agf.write(&mut sector, geometry);
        device.write_at(agf_at, &sector).unwrap();
        let list = self.agfl.encode(geometry, self.ag);
        device.write_at(Agfl::offset(geometry, self.ag), &list).unwrap();
        self.superblock.fdblocks =
            (self.superblock.fdblocks.get() + free(&self.agf) - before).into();
        device.write_at(0, &self.superblock.encode()).unwrap();

        let at = geometry.inode_offset(self.ino).unwrap();
        let mut inode = read(device, at, geometry.inode_size());
        let mut core = *XfsInodeCore::view(&inode).unwrap();
        let (extents, blocks) = (self.file.len() as u64, self.tree_blocks);
        let (_, attributes) = core.extent_counts();
        assert!(core.set_extent_counts(extents + self.longer.0, attributes));
        core.nblocks = (extents + blocks + self.longer.1).into();
        let fork = core.fork_room(geometry).unwrap().data;
        assert!(self.root.write(&mut inode[fork]));
        core.write(&mut inode, geometry);
        device.write_at(at, &inode).unwrap();
    }
}

fn reverse_map(start: u32, end: u32, owner: XfsOwner, offset: u64) -> XfsReverseMap {
    XfsReverseMap {
        start: start.into(),
        count: (end - start).into(),
        owner: owner.number().into(),
        offset: offset.into(),
    }
}

/// Where the AGF has the root of a tree.
fn index_of(tree: XfsTree) -> Option<usize> {
    let trees = [XfsTree::FreeByBlock, XfsTree::FreeBySize, XfsTree::ReverseMap];
    trees.iter().position(|&found| found == tree)
}

impl XfsTreeBlocks for JudgedTree<'_> {
    fn read(&mut self, at: FsBlock) -> Result<&[u8]> {
        let group = &mut *self.group;
        if !group.blocks.contains_key(&at.0) {
            let role = group.root(self.tree).view().role(at);
            let buffer = group.buffers().block(at, role)?;
            group.blocks.insert(at.0, buffer.bytes().to_vec());
        }
        Ok(&group.blocks[&at.0])
    }

    fn change(&mut self, at: FsBlock, range: Range<usize>) -> Result<&mut [u8]> {
        self.group.changed.insert(at.0);
        Ok(&mut self.group.blocks.get_mut(&at.0).unwrap()[range])
    }

    fn allocate(&mut self, near: FsBlock) -> Result<FsBlock> {
        let (tree, group) = (self.tree, &mut *self.group);
        group.counted.entry(format!("{tree:?}")).or_default().0 += 1;
        let block = if tree == XfsTree::Extents {
            group.fill_list(near.0);
            let block = group.take_near(near.0);
            group.own(block, XfsOwner::File(group.ino), XfsReverseFlags::TREE_BLOCK.bits());
            group.tree_blocks += 1;
            block
        } else {
            group.agf.btreeblks += 1;
            group.agf.rmap_blocks += u32::from(tree == XfsTree::ReverseMap);
            group.pop()
        };
        let at = group.geometry.fs_block(group.ag, block);
        group.blocks.insert(at.0, vec![0; group.geometry.block_size()]);
        Ok(at)
    }

    fn free(&mut self, at: FsBlock) -> Result<()> {
        let (tree, group) = (self.tree, &mut *self.group);
        group.counted.entry(format!("{tree:?}")).or_default().1 += 1;
        let (_, block) = group.geometry.split(at).unwrap();
        group.blocks.remove(&at.0);
        group.changed.remove(&at.0);
        if tree == XfsTree::Extents {
            group.disown(block, XfsOwner::File(group.ino), XfsReverseFlags::TREE_BLOCK.bits());
            group.give(block);
            group.tree_blocks -= 1;
        } else {
            group.agf.btreeblks -= 1;
            group.agf.rmap_blocks -= u32::from(tree == XfsTree::ReverseMap);
            group.push(block);
        }
        Ok(())
    }

    fn set_root(&mut self, root: &XfsEditRoot) -> Result<()> {
        let agf = &mut self.group.agf;
        match root {
            XfsEditRoot::Group { tree, block, levels, .. } => {
                let index = index_of(*tree).unwrap();
                agf.roots[index] = block.0.into();
                agf.levels[index] = (*levels).into();
            }
            XfsEditRoot::Fork { root, .. } => self.group.root = root.clone(),
        }
        Ok(())
    }
}
