//! The blocks of one tree over a device, and the proof that they are a tree.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_vfs::{Errno, Error, Result};
use offshoot_xfs_format::btree::{
    XfsBtreeBlock, XfsBtreeBuilder, XfsForkRoot, XfsSearchKey, XfsTree, seal,
};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::{AgBlock, AgIno, AgNumber, FsBlock, Ino, XfsGeometry};
use uuid::Uuid;

use super::super::{XfsEditRoot, XfsTreeBlocks};
use crate::btree::file_key;
use crate::buffer::XfsBuffers;

/// The group with the tree, or with the blocks of the tree of the file.
const AG: AgNumber = AgNumber(1);

const AG_BLOCKS: u32 = 1 << 22;

/// Blocks of trees come from here on; records name blocks below it.
const TREE_BLOCKS: u32 = 1 << 21;

/// The children that fit in the root in an inode of the tests.
const ROOM: usize = 9;

/// One tree on a device.
pub(super) struct TestImage {
    pub(super) geometry: XfsGeometry,
    pub(super) root: XfsEditRoot,
    device: Arc<MemoryDevice>,
    /// All blocks that were read or changed.
    blocks: HashMap<u64, Vec<u8>>,
    /// The chunks of 128 bytes that were changed since the last write, by block.
    pub(super) changed: BTreeMap<u64, BTreeSet<usize>>,
    /// The blocks that the tree has.
    allocated: BTreeSet<u64>,
    next: u32,
    /// The calls that are still answered, when not all are.
    pub(super) calls_left: Option<u64>,
}

impl TestImage {
    pub(super) fn new(tree: XfsTree, block_log: u8) -> Self {
        let mut layout = XfsLayout::all() - XfsLayout::REALTIME - XfsLayout::METADATA_TREE;
        if block_log == 9 {
            layout = XfsLayout::empty();
        }
        let geometry = XfsGeometry {
            layout,
            block_log,
            sector_log: 9,
            inode_log: block_log.min(9) - u8::from(block_log == 9),
            cluster_blocks: 1,
            dir_block_log: 0,
            ag_block_log: 22,
            ag_blocks: AG_BLOCKS,
            ag_count: 2,
            blocks: u64::from(AG_BLOCKS) * 2,
            log_start: FsBlock(64),
            log_blocks: 1 << 14,
            uuid: Uuid::from_u128(0x0f5),
        };
        let size = geometry.blocks << block_log;
        let root = if tree == XfsTree::Extents {
            let root = XfsForkRoot { level: 1, children: Vec::new() };
            XfsEditRoot::Fork { root, owner: geometry.ino(AG, AgIno(128)), room: ROOM }
        } else {
            XfsEditRoot::Group { tree, ag: AG, block: AgBlock(TREE_BLOCKS), levels: 1 }
        };
        let mut image = Self {
            geometry,
            root,
            device: Arc::new(MemoryDevice::sparse(size)),
            blocks: HashMap::new(),
            changed: BTreeMap::new(),
            allocated: BTreeSet::new(),
            next: TREE_BLOCKS,
            calls_left: None,
        };
        if tree != XfsTree::Extents {
            image.add_root(tree);
        }
        image
    }

    fn add_root(&mut self, tree: XfsTree) {
        let at = self.allocate(FsBlock(0)).unwrap();
        let builder = XfsBtreeBuilder::new(&self.geometry, tree, at, Ino::NULL, 0).unwrap();
        self.blocks.insert(at.0, builder.into_bytes());
    }

    /// A copy to which the same can be done again.
    pub(super) fn fork(&self) -> Self {
        Self {
            geometry: self.geometry.clone(),
            root: self.root.clone(),
            device: Arc::new(self.device.snapshot()),
            blocks: self.blocks.clone(),
            changed: BTreeMap::new(),
            allocated: self.allocated.clone(),
            next: self.next,
            calls_left: None,
        }
    }

    pub(super) fn blocks(&mut self) -> &mut HashMap<u64, Vec<u8>> {
        &mut self.blocks
    }

    /// Counts a call, which may be one too many.
    fn call(&mut self) -> Result<()> {
        if let Some(left) = &mut self.calls_left {
            *left = left.checked_sub(1).ok_or_else(|| Error::posix(Errno::NOSPC, "enough"))?;
        }
        Ok(())
    }

    /// Writes what was changed to the device, each block with a checksum and proved by itself.
    pub(super) fn write_back(&mut self) {
        let (tree, owner) = (self.root.tree(), self.owner());
        for (at, _) in std::mem::take(&mut self.changed) {
            let Some(bytes) = self.blocks.get_mut(&at) else { continue };
            seal(bytes, &self.geometry, tree);
            let at = FsBlock(at);
            XfsBtreeBlock::verify(bytes, &self.geometry, tree, at, owner).unwrap();
            let place = self.geometry.place_of(at).unwrap().bytes();
            let bytes = self.blocks.get(&at.0).unwrap();
            self.device.write_at(place, bytes).unwrap();
        }
    }

    fn owner(&self) -> Option<Ino> {
        match self.root {
            XfsEditRoot::Group { .. } => None,
            XfsEditRoot::Fork { owner, .. } => Some(owner),
        }
    }

    /// The blocks of the volume, as a reader has them who opens it now.
    pub(super) fn buffers(&self) -> XfsBuffers {
        XfsBuffers::new(self.device.clone(), self.geometry.clone(), 1 << 20)
    }

    pub(super) fn levels(&self) -> u32 {
        match &self.root {
            XfsEditRoot::Group { levels, .. } => *levels,
            XfsEditRoot::Fork { root, .. } => u32::from(root.level) + 1,
        }
    }

    /// Proves that all blocks of the tree, and no others, are in it; that they are full enough,
    /// name their siblings, and have the keys that their parents say. Returns the records.
    pub(super) fn prove(&self) -> Vec<Vec<u8>> {
        let mut proof = TreeProof::default();
        match &self.root {
            XfsEditRoot::Group { ag, block, levels, .. } => {
                let at = self.geometry.fs_block(*ag, *block);
                self.prove_block(&mut proof, at, levels - 1, None);
            }
            XfsEditRoot::Fork { root, room, .. } => {
                assert!(root.children.len() <= *room, "{root:?}");
                let is_alone = root.children.len() == 1;
                for (first, at) in &root.children {
                    let keys = Some((file_key(*first), None, is_alone));
                    self.prove_block(&mut proof, *at, u32::from(root.level) - 1, keys);
                }
            }
        }
        for (_, right) in proof.ends.values() {
            assert_eq!(*right, None, "a sibling behind the last block");
        }
        assert_eq!(proof.blocks, self.allocated, "blocks are lost, or in the tree but free");
        proof.records
    }

    fn prove_block(
        &self,
        proof: &mut TreeProof,
        at: FsBlock,
        level: u32,
        keys: Option<(XfsSearchKey, Option<XfsSearchKey>, bool)>,
    ) {
        let tree = self.root.tree();
        let bytes = &self.blocks[&at.0];
        let block = XfsBtreeBlock::view(bytes, &self.geometry, tree);
        assert_eq!(u32::from(block.header.level), level);
        assert!(proof.blocks.insert(at.0), "block {at} is in the tree twice");
        let own = if tree.is_long() { at.0 } else { self.geometry.split(at).unwrap().1.0.into() };
        let before = proof.ends.insert(level, (own, block.header.right));
        assert_eq!(block.header.left, before.map(|(left, _)| left), "left of {at}");
        assert!(before.is_none_or(|(_, right)| right == Some(own)), "right in front of {at}");
        if let Some((low, high, is_alone)) = keys {
            let least = tree.capacity(&self.geometry, block.header.level) / 2;
            assert!(is_alone || block.len() >= least, "{} of {least} in {at}", block.len());
            assert!(block.is_empty() || block.key(0) == Some(low), "key of {at}");
            let found = (0..block.len()).filter_map(|index| block.high_key(index)).max();
            assert!(high.is_none() || found == high, "high key of {at}");
        } else {
            assert!(level == 0 || block.len() > 1, "a root with one child");
        }
        for index in 0..block.len() {
            if let Some(record) = block.record(index) {
                proof.records.push(record.to_vec());
                continue;
            }
            let child = self.root.view().block_of(&self.geometry, block.pointer(index).unwrap());
            let high = tree.child_high_key(block.stored_key(index).unwrap());
            let keys = Some((block.key(index).unwrap(), high, false));
            self.prove_block(proof, child, level - 1, keys);
        }
    }
}

/// What a proof has seen.
#[derive(Default)]
struct TreeProof {
    blocks: BTreeSet<u64>,
    /// The last block of each level, and its right sibling.
    ends: BTreeMap<u32, (u64, Option<u64>)>,
    records: Vec<Vec<u8>>,
}

impl XfsTreeBlocks for TestImage {
    fn read(&mut self, at: FsBlock) -> Result<&[u8]> {
        self.call()?;
        if !self.blocks.contains_key(&at.0) {
            let buffer = self.buffers().block(at, self.root.view().role(at))?;
            self.blocks.insert(at.0, buffer.bytes().to_vec());
        }
        Ok(&self.blocks[&at.0])
    }

    fn change(&mut self, at: FsBlock, range: Range<usize>) -> Result<&mut [u8]> {
        self.call()?;
        let chunks = range.start / 128..range.end.div_ceil(128);
        self.changed.entry(at.0).or_default().extend(chunks);
        Ok(&mut self.blocks.get_mut(&at.0).expect("it was read before")[range])
    }

    fn allocate(&mut self, _near: FsBlock) -> Result<FsBlock> {
        self.call()?;
        let at = self.geometry.fs_block(AG, AgBlock(self.next));
        self.next += 1;
        self.allocated.insert(at.0);
        self.blocks.insert(at.0, vec![0; self.geometry.block_size()]);
        Ok(at)
    }

    fn free(&mut self, at: FsBlock) -> Result<()> {
        self.call()?;
        assert!(self.allocated.remove(&at.0) || self.calls_left.is_some(), "{at} is free");
        self.blocks.remove(&at.0);
        self.changed.remove(&at.0);
        Ok(())
    }

    fn set_root(&mut self, root: &XfsEditRoot) -> Result<()> {
        self.call()?;
        self.root = root.clone();
        Ok(())
    }
}
