//! The walk through all trees. It looks at each tree block once.
//!
//! Snapshots share blocks, so most blocks of most subvolumes are reached several times. What a
//! block points to is gathered when the walk first comes to the block ([`Walk::visited`]). What its
//! inodes say of themselves is kept as a [`SubtreeSummary`] for each node above leaves, and joined
//! for each subvolume that has the node.
//!
//! ```text
//! subvolume 5                  node        the walk goes down to the nodes above leaves,
//!                  /             |         and gathers them as units
//! units      unit 1   unit 2   unit 3      all cores: read the leaves of a unit, summarize
//!             |  |     |  |     |  |
//! leaves      o  o     o  o     o  o       then, in order: join the summaries of a subvolume
//! ```
//!
//! A subtree of several gigabytes has one unit for some 8 MiB of leaves, so only units are kept.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use offshoot_btrfs_format::block::HEADER_RELOC;
use offshoot_btrfs_format::check::ExpectedBlock;
use offshoot_btrfs_format::extent::RefOwner;
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_kit::cores;
use offshoot_vfs::Result;
use parking_lot::Mutex;
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use super::addresses::AddressSet;
use super::inodes::{self, SubtreeSummary};
use super::marks::BlockMarks;
use super::quota::OwnedBlocks;
use super::reference::{DataUse, ReferenceRecord, ReferenceTarget};
use super::root_blocks::RootBlocks;
use super::sort::Sorter;
use super::volume::{CheckedVolume, KeyRange, root_of};
use crate::block::TreeBlock;
use crate::tree::TreeRoot;

/// The records that a thread gathers before it passes them on.
const RECORDS_AT_ONCE: usize = 4096;

/// A tree that is walked.
#[derive(Clone, Debug)]
pub(super) struct WalkedTree {
    pub(super) root: TreeRoot,
    /// The progress of the removal of a deleted subvolume: all pointers in front of this key, in
    /// nodes of at least this level, were given up.
    pub(super) dropped: Option<(Key, u8)>,
    /// Whether its items are those of a subvolume that was not deleted, so that they are judged.
    pub(super) has_inodes: bool,
}

impl WalkedTree {
    /// Whether none of its pointers was given up, so that items can be looked up in it.
    pub(super) fn is_complete(&self) -> bool {
        self.dropped.is_none()
    }
}

/// The walk through the trees of a volume.
pub(super) struct Walk<'w, 'c> {
    pub(super) volume: &'w CheckedVolume<'c>,
    pub(super) marks: BlockMarks,
    /// The blocks that were used.
    pub(super) visited: AddressSet,
    blocks: AtomicU64,
    pub(super) references: Sorter<ReferenceRecord>,
    pub(super) uses: Sorter<DataUse>,
    pub(super) owned: OwnedBlocks,
    /// The root blocks of subvolumes, as soon as they are known.
    root_blocks: OnceLock<RootBlocks>,
    summaries: Cache<u64, Arc<SubtreeSummary>, SummaryWeight>,
    /// How many units are gathered before they are looked at.
    units_at_once: usize,
    /// The error that ended the walk.
    failure: Mutex<Option<offshoot_vfs::Error>>,
    /// Trees with a block that could not be used.
    damaged: Mutex<BTreeSet<TreeId>>,
}

/// Weighs a summary by its bytes.
#[derive(Clone)]
struct SummaryWeight;

impl Weighter<u64, Arc<SubtreeSummary>> for SummaryWeight {
    fn weight(&self, _logical: &u64, summary: &Arc<SubtreeSummary>) -> u64 {
        summary.bytes()
    }
}

/// Records that one thread gathers.
#[derive(Default)]
pub(super) struct GatheredRecords {
    pub(super) references: Vec<ReferenceRecord>,
    pub(super) uses: Vec<DataUse>,
}

/// A block for one thread to look at: a leaf that is a root, or a node above leaves.
struct Unit {
    /// The number of its tree.
    tree: usize,
    /// `None` for a subtree that cannot be used.
    block: Option<Arc<TreeBlock>>,
    /// The keys in it are below this key.
    upper: Option<Key>,
}

/// What the walk found.
#[derive(Debug)]
pub(super) struct WalkedVolume {
    /// All trees that the root tree leads to, and the chunk tree.
    pub(super) trees: Vec<WalkedTree>,
    pub(super) blocks: u64,
    pub(super) inodes: u64,
    /// The trees of which a block could not be used. What is missing in them may be there.
    pub(super) damaged: BTreeSet<TreeId>,
}

impl<'w, 'c> Walk<'w, 'c> {
    /// A walk whose records are cut at `bounds`, which ascend.
    pub(super) fn new(volume: &'w CheckedVolume<'c>, bounds: &[u64]) -> Self {
        Self::with_marks(volume, bounds, BlockMarks::read(volume))
    }

    /// As [`new`](Self::new), with other marks than those of the extent tree.
    pub(super) fn with_marks(
        volume: &'w CheckedVolume<'c>,
        bounds: &[u64],
        marks: BlockMarks,
    ) -> Self {
        let (quarter, scratch) = (volume.options.memory_bytes / 4, volume.scratch());
        let sixteenth = volume.options.memory_bytes / 16;
        let count = |bytes: u64| usize::try_from(sixteenth / bytes).unwrap_or(usize::MAX);
        Self {
            marks,
            volume,
            visited: AddressSet::default(),
            blocks: AtomicU64::new(0),
            references: Sorter::new(bounds.to_vec(), quarter, &scratch),
            uses: Sorter::new(bounds.to_vec(), quarter, &scratch),
            owned: OwnedBlocks::of(volume),
            root_blocks: OnceLock::new(),
            summaries: Cache::with_weighter(
                count(SubtreeSummary::default().bytes()),
                sixteenth,
                SummaryWeight,
            ),
            units_at_once: count(volume.node_size()).max(2 * cores::count()),
            failure: Mutex::new(None),
            damaged: Mutex::default(),
        }
    }

    /// Walks through all trees.
    ///
    /// # Errors
    /// When a file for records cannot be written, or the caller has ended the check.
    pub(super) fn run(&self) -> Result<WalkedVolume> {
        let trees = self.trees();
        self.root_blocks.get_or_init(|| RootBlocks::of(&trees));
        let mut units = Vec::new();
        let mut joined = JoinedTrees::default();
        for (number, tree) in trees.iter().enumerate() {
            self.pass_on(&mut root_references(tree))?;
            let root = self.volume.usable_block(&tree.root.expected());
            self.gather_units(&trees, number, root, None, &mut units, &mut joined)?;
        }
        self.finish_units(&trees, &mut units, &mut joined)?;
        joined.finish(self, &trees)?;
        Ok(WalkedVolume {
            blocks: self.blocks.load(Ordering::Relaxed),
            inodes: joined.inodes,
            damaged: self.damaged.lock().clone(),
            trees,
        })
    }

    /// Reports what is wrong with root blocks of subvolumes, after the walk.
    pub(super) fn check_root_blocks(&self) {
        if let Some(roots) = self.root_blocks.get() {
            roots.check(self.volume);
        }
    }

    /// All trees: root tree, chunk tree, and those that the root tree leads to.
    fn trees(&self) -> Vec<WalkedTree> {
        let volume = self.volume;
        let whole = |root| WalkedTree { root, dropped: None, has_inodes: false };
        let mut trees = vec![whole(volume.root_tree()), whole(volume.chunk_tree())];
        let walked = volume.each_item(volume.root_tree(), KeyRange::ALL, &mut |key, data| {
            if key.item_type == ItemType::ROOT_ITEM
                && let Ok(item) = RootItem::parse(data)
            {
                let mut tree = walked_tree(TreeId(key.objectid), &item);
                tree.root = volume.actual_root(tree.root);
                trees.push(tree);
            }
            ControlFlow::Continue(())
        });
        if !walked.is_whole() {
            self.note_damage(TreeId::ROOT);
        }
        trees
    }

    /// Goes down to the nodes above leaves, and gathers these.
    fn gather_units(
        &self,
        trees: &[WalkedTree],
        number: usize,
        block: Option<Arc<TreeBlock>>,
        upper: Option<Key>,
        units: &mut Vec<Unit>,
        joined: &mut JoinedTrees,
    ) -> Result<()> {
        self.volume.require_going_on()?;
        let Some(tree) = trees.get(number) else { return Ok(()) };
        let Some(block) = block.as_ref().filter(|block| block.header().level > 1) else {
            units.push(Unit { tree: number, block, upper });
            if units.len() >= self.units_at_once {
                self.finish_units(trees, units, joined)?;
            }
            return Ok(());
        };
        self.visit_node(tree, block)?;
        for slot in kept_slots(tree, block) {
            let upper = if slot + 1 < block.len() { Some(block.key(slot + 1)) } else { upper };
            let child = self.volume.usable_child(block, slot, tree.root.id, upper);
            self.gather_units(trees, number, child, upper, units, joined)?;
        }
        Ok(())
    }

    /// Looks at the units on all cores, and joins their summaries in order.
    fn finish_units(
        &self,
        trees: &[WalkedTree],
        units: &mut Vec<Unit>,
        joined: &mut JoinedTrees,
    ) -> Result<()> {
        let summaries: Vec<_> = units.iter().map(|_| Mutex::new(None)).collect();
        cores::for_each(units.len(), &|index| {
            let (Some(unit), Some(slot)) = (units.get(index), summaries.get(index)) else { return };
            let Some(tree) = trees.get(unit.tree) else { return };
            if self.failure.lock().is_some() || self.volume.is_over() {
                return;
            }
            match self.look_at(tree, unit) {
                Ok(summary) => *slot.lock() = Some(summary),
                Err(error) => {
                    self.failure.lock().get_or_insert(error);
                }
            }
        });
        if let Some(error) = self.failure.lock().take() {
            return Err(error);
        }
        self.volume.require_going_on()?;
        for (unit, summary) in units.iter().zip(summaries) {
            if let Some(summary) = summary.into_inner() {
                joined.add(self, trees, unit.tree, &summary)?;
            }
        }
        units.clear();
        Ok(())
    }

    /// The summary of a unit. Passes on what its blocks point to, if the walk comes to them for the
    /// first time.
    fn look_at(&self, tree: &WalkedTree, unit: &Unit) -> Result<Arc<SubtreeSummary>> {
        let Some(block) = &unit.block else {
            self.note_damage(tree.root.id);
            return Ok(Arc::new(SubtreeSummary::gap()));
        };
        let logical = block.header().bytenr.get();
        // What is left of a deleted subvolume is other than what a snapshot has of the same node.
        let is_shared = tree.has_inodes && !block.is_leaf();
        if is_shared && let Some(known) = self.summaries.get(&logical) {
            return Ok(known);
        }
        let mut records = GatheredRecords::default();
        let summary = Arc::new(self.summarize(tree, block, unit.upper, &mut records)?);
        self.pass_on(&mut records)?;
        if is_shared && summary.is_whole() {
            self.summaries.insert(logical, summary.clone());
        }
        Ok(summary)
    }

    fn summarize(
        &self,
        tree: &WalkedTree,
        block: &TreeBlock,
        upper: Option<Key>,
        records: &mut GatheredRecords,
    ) -> Result<SubtreeSummary> {
        if block.is_leaf() {
            return Ok(self.visit_leaf(tree, block, records));
        }
        self.visit_node(tree, block)?;
        self.volume.read_ahead(block, kept_slots(tree, block));
        let mut summary = SubtreeSummary::default();
        for slot in kept_slots(tree, block) {
            let upper = if slot + 1 < block.len() { Some(block.key(slot + 1)) } else { upper };
            let child = self.volume.usable_child(block, slot, tree.root.id, upper);
            let right = if let Some(leaf) = child {
                self.visit_leaf(tree, &leaf, records)
            } else {
                self.note_damage(tree.root.id);
                SubtreeSummary::gap()
            };
            summary = inodes::join(self, tree, summary, &right);
            if records.references.len().max(records.uses.len()) >= RECORDS_AT_ONCE {
                self.pass_on(records)?;
            }
            if self.volume.is_over() {
                break;
            }
        }
        Ok(summary)
    }

    /// Gathers the references of a node to its children, if the walk comes to it for the first
    /// time.
    fn visit_node(&self, tree: &WalkedTree, node: &TreeBlock) -> Result<()> {
        if !self.is_first_visit(node) {
            return Ok(());
        }
        let header = node.header();
        let logical = Logical(header.bytenr.get());
        let owner = if self.has_full_references(node) {
            RefOwner::Block { parent: logical }
        } else {
            RefOwner::Tree { root: header.owner() }
        };
        let reference = |slot: usize| {
            let ExpectedBlock { logical, level, generation, .. } =
                node.child_expected(slot, tree.root.id);
            if let Some(roots) = self.root_blocks.get() {
                roots.pass(logical);
            }
            ReferenceRecord::new(logical, owner, ReferenceTarget::Block { level, generation })
        };
        let references = kept_slots(tree, node).map(reference).collect();
        self.pass_on(&mut GatheredRecords { references, ..GatheredRecords::default() })
    }

    /// The summary of a leaf. Gathers its references to data, if the walk comes to it for the first
    /// time.
    fn visit_leaf(
        &self,
        tree: &WalkedTree,
        leaf: &TreeBlock,
        records: &mut GatheredRecords,
    ) -> SubtreeSummary {
        let is_first = self.is_first_visit(leaf);
        // The files of the root tree are space caches.
        let has_files = tree.root.id.is_fs_like() || tree.root.id == TreeId::ROOT;
        inodes::leaf(self, tree, leaf, (is_first && has_files).then_some(records))
    }

    fn is_first_visit(&self, block: &TreeBlock) -> bool {
        let logical = Logical(block.header().bytenr.get());
        let is_first = self.visited.insert(logical);
        if block.header().flags.get() & HEADER_RELOC != 0 {
            self.marks.add(logical);
        }
        if is_first {
            self.blocks.fetch_add(1, Ordering::Relaxed);
            self.owned.add(block.header(), self.volume.node_size());
            self.volume.progress(self.volume.node_size());
        }
        is_first
    }

    /// Whether the references of what a block points to name the block.
    pub(super) fn has_full_references(&self, block: &TreeBlock) -> bool {
        let header = block.header();
        header.flags.get() & HEADER_RELOC != 0
            || self.marks.has_full_references(Logical(header.bytenr.get()))
    }

    fn pass_on(&self, records: &mut GatheredRecords) -> Result<()> {
        self.references.add_all(&mut records.references)?;
        self.uses.add_all(&mut records.uses)
    }

    fn note_damage(&self, tree: TreeId) {
        self.damaged.lock().insert(tree);
    }
}

/// The reference that a tree has to its root.
fn root_references(tree: &WalkedTree) -> GatheredRecords {
    let TreeRoot { id, logical, level, generation } = tree.root;
    let target = ReferenceTarget::Block { level, generation };
    // The root of a relocation tree names itself.
    let owner = if id == TreeId::TREE_RELOC {
        RefOwner::Block { parent: logical }
    } else {
        RefOwner::Tree { root: id }
    };
    let record = ReferenceRecord::new(logical, owner, target);
    GatheredRecords { references: vec![record], ..GatheredRecords::default() }
}

/// The tree of a root item.
pub(super) fn walked_tree(id: TreeId, item: &RootItem) -> WalkedTree {
    // As in the kernel: the object id tells whether there is progress, and of subvolumes only the
    // trees of deleted ones are given up.
    let progress = item.drop_progress.get();
    let is_live = id.is_subvolume() && item.refs > 0;
    let is_dropped = progress.objectid != 0 && !is_live;
    let dropped = is_dropped.then_some((progress, item.drop_level));
    let is_of_inodes = id.is_subvolume() || id == TreeId::DATA_RELOC;
    let has_inodes = is_of_inodes && dropped.is_none() && !item.is_dead();
    WalkedTree { root: root_of(id, item), dropped, has_inodes }
}

/// The slots of a node whose pointers were not given up.
pub(super) fn kept_slots(tree: &WalkedTree, node: &TreeBlock) -> std::ops::Range<usize> {
    let level = node.header().level;
    let first = match tree.dropped {
        Some((key, at)) if level > at => node.floor(key).unwrap_or(0),
        Some((key, at)) if level == at => {
            (0..node.len()).find(|&slot| node.key(slot) >= key).unwrap_or(node.len())
        }
        _ => 0,
    };
    first..node.len()
}

/// The summaries of trees, joined in order.
#[derive(Default)]
struct JoinedTrees {
    /// The number of the tree that is joined, and what is joined of it.
    current: Option<(usize, SubtreeSummary)>,
    inodes: u64,
}

impl JoinedTrees {
    /// Adds the next summary of a tree.
    fn add(
        &mut self,
        walk: &Walk<'_, '_>,
        trees: &[WalkedTree],
        number: usize,
        summary: &SubtreeSummary,
    ) -> Result<()> {
        let Some(tree) = trees.get(number) else { return Ok(()) };
        let left = self.take(walk, trees, number)?;
        self.current = Some((number, inodes::join(walk, tree, left, summary)));
        Ok(())
    }

    /// What is joined of the tree `number`. Finishes the tree before it.
    fn take(
        &mut self,
        walk: &Walk<'_, '_>,
        trees: &[WalkedTree],
        number: usize,
    ) -> Result<SubtreeSummary> {
        match self.current.take() {
            Some((current, summary)) if current == number => Ok(summary),
            other => {
                self.current = other;
                self.finish(walk, trees)?;
                Ok(SubtreeSummary::default())
            }
        }
    }

    /// Finishes the last tree.
    fn finish(&mut self, walk: &Walk<'_, '_>, trees: &[WalkedTree]) -> Result<()> {
        let Some((number, summary)) = self.current.take() else { return Ok(()) };
        if let Some(tree) = trees.get(number).filter(|tree| tree.has_inodes) {
            self.inodes += inodes::finish(walk, tree, summary)?;
        }
        Ok(())
    }
}
