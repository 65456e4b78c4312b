//! The volume that is checked: its blocks, and ways through its trees that go on past bad blocks.

use std::ops::{ControlFlow, Range};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use offshoot_btrfs_format::block::{LEVEL_COUNT, NodePointer};
use offshoot_btrfs_format::check::{self as format_check, ExpectedBlock, Geometry};
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::superblock::Superblock;
use offshoot_btrfs_format::{Generation, ItemType, Key, Logical, TreeId};
use offshoot_vfs::{Errno, Error, Result, Structure};
use parking_lot::Mutex;

use super::finding::{BtrfsFindingCode, BtrfsFindingPlace, BtrfsFindings};
use super::{CheckEvent, CheckOptions, CheckWatch};
use crate::block::{BlockCache, HeldBlock, TreeBlock};
use crate::report::VolumeReport;
use crate::storage::Storage;
use crate::tree::{Blocks, TreeRoot};

/// A volume that is checked.
pub(crate) struct CheckedVolume<'c> {
    pub(crate) storage: Storage,
    /// Whether other threads write the volume meanwhile. Then the superblocks on the devices may be
    /// newer than the commit that is checked.
    pub(super) is_written: bool,
    cache: BlockCache,
    /// The RAID stripe tree, once data was looked for; `None` when it cannot be read.
    pub(super) stripe_tree: OnceLock<Option<TreeRoot>>,
    /// How a reader verifies blocks. The storage verifies as the kernel does.
    readers: Geometry,
    pub(super) findings: BtrfsFindings,
    pub(super) options: CheckOptions,
    watch: &'c CheckWatch<'c>,
    is_over: AtomicBool,
    /// The tree blocks and bytes of data that were checked.
    done: AtomicU64,
    /// How many of them there are; 0 while that is not known.
    total: AtomicU64,
    /// What the storage reported: bad copies, and members that are missing or outdated.
    pub(super) reports: Arc<Mutex<Vec<VolumeReport>>>,
}

/// A range of keys of a tree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyRange {
    pub(crate) first: Key,
    /// Inclusive.
    pub(crate) last: Key,
}

impl KeyRange {
    /// All keys.
    pub(crate) const ALL: Self = Self { first: Key::MIN, last: Key::MAX };

    /// The keys of one object.
    pub(crate) const fn of_object(objectid: u64) -> Self {
        Self {
            first: Key::new(objectid, ItemType(0), 0),
            last: Key::new(objectid, ItemType(u8::MAX), u64::MAX),
        }
    }

    /// The keys of objects from `first` on, before `end`. Not empty.
    pub(crate) const fn of_objects(first: u64, end: u64) -> Self {
        Self {
            first: Key::new(first, ItemType(0), 0),
            last: Key::new(end.saturating_sub(1), ItemType(u8::MAX), u64::MAX),
        }
    }
}

/// Whether all blocks of a range could be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Walked {
    /// All of them.
    Whole,
    /// Some could not be read. They are findings.
    InPart,
}

impl Walked {
    /// Whether all blocks could be read.
    pub(crate) fn is_whole(self) -> bool {
        self == Self::Whole
    }
}

impl<'c> CheckedVolume<'c> {
    pub(super) fn new(
        storage: Storage,
        options: &CheckOptions,
        watch: &'c CheckWatch<'c>,
        reports: Arc<Mutex<Vec<VolumeReport>>>,
    ) -> Self {
        let readers = Geometry { is_strict: false, ..storage.geometry().clone() };
        Self {
            cache: BlockCache::new(options.memory_bytes / 16, storage.superblock().node_size),
            readers,
            storage,
            is_written: false,
            stripe_tree: OnceLock::new(),
            findings: BtrfsFindings::default(),
            options: options.clone(),
            watch,
            is_over: AtomicBool::new(false),
            done: AtomicU64::new(0),
            total: AtomicU64::new(0),
            reports,
        }
    }

    pub(crate) fn superblock(&self) -> &Superblock {
        self.storage.superblock()
    }

    /// The size of a tree block, in bytes.
    pub(crate) fn node_size(&self) -> u64 {
        u64::from(self.superblock().node_size)
    }

    /// The size of a sector, in bytes.
    pub(crate) fn sector_size(&self) -> u64 {
        u64::from(self.superblock().sector_size)
    }

    /// How much memory the check may take, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.options.memory_bytes
    }

    /// The folder for files of records that have no room in memory.
    pub(crate) fn scratch(&self) -> PathBuf {
        self.options.scratch.clone().unwrap_or_else(std::env::temp_dir)
    }

    /// # Errors
    /// `EINTR` when the caller has ended the check.
    pub(crate) fn require_going_on(&self) -> Result<()> {
        if self.is_over() {
            return Err(Error::posix(Errno::INTR, "the check"));
        }
        Ok(())
    }

    /// Whether the caller has ended the check.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Notes how many bytes will be looked at in all, as far as that is known.
    pub(super) fn expect_bytes(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Notes that bytes were looked at, and tells the caller.
    pub(super) fn progress(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let total = self.total.load(Ordering::Relaxed).max(done);
        if (self.watch)(&CheckEvent::Progress { done, total }).is_break() {
            self.is_over.store(true, Ordering::Relaxed);
        }
    }

    /// Adds what the storage reported to the findings.
    pub(super) fn note_reports(&self) {
        for report in std::mem::take(&mut *self.reports.lock()) {
            let (code, place) = match &report {
                VolumeReport::BadCopy { logical, .. } => {
                    (BtrfsFindingCode::BadCopy, BtrfsFindingPlace::Logical(*logical))
                }
                VolumeReport::LostChunk { logical, .. } => {
                    (BtrfsFindingCode::NotRead, BtrfsFindingPlace::Logical(*logical))
                }
                VolumeReport::MissingMember { id, .. } => {
                    (BtrfsFindingCode::MissingMember, BtrfsFindingPlace::Member(id.0))
                }
                // The check of the members looks at all superblocks and sizes itself. The others
                // are facts about the volume.
                _ => continue,
            };
            self.findings.add(code, place, report.to_string());
        }
    }

    /// The block that `expected` describes; `None` when it cannot be used, which is a finding then.
    pub(crate) fn usable_block(&self, expected: &ExpectedBlock) -> Option<Arc<TreeBlock>> {
        match self.block(expected) {
            Ok(block) => Some(block),
            Err(error) => {
                let place =
                    BtrfsFindingPlace::Block { tree: expected.owner, logical: expected.logical };
                self.findings.add_error(BtrfsFindingCode::TreeBlock, place, &error);
                None
            }
        }
    }

    /// The child at `slot` of `node`, whose keys are below `upper`; `None` when it cannot be used,
    /// which is a finding then.
    pub(crate) fn usable_child(
        &self,
        node: &TreeBlock,
        slot: usize,
        tree: TreeId,
        upper: Option<Key>,
    ) -> Option<Arc<TreeBlock>> {
        let expected = node.child_expected(slot, tree);
        let child = self.usable_block(&expected)?;
        let last = child.key(child.len().checked_sub(1)?);
        if let Some(upper) = upper.filter(|&upper| last >= upper) {
            let place = BtrfsFindingPlace::Block { tree, logical: expected.logical };
            let problem = format!("its last key {last} is not below {upper}, the next in its node");
            self.findings.add(BtrfsFindingCode::TreeBlock, place, problem);
            return None;
        }
        Some(child)
    }

    /// Calls `visit` with each item in `range` of the tree `root`, in order, until it breaks.
    /// Leaves out what is in blocks that cannot be used.
    pub(crate) fn each_item(
        &self,
        root: TreeRoot,
        range: KeyRange,
        visit: &mut dyn FnMut(Key, &[u8]) -> ControlFlow<()>,
    ) -> Walked {
        self.each_leaf(root, range, &mut |leaf| {
            for slot in leaf.first_at_least(range.first)..leaf.len() {
                let key = leaf.key(slot);
                if key > range.last {
                    return ControlFlow::Break(());
                }
                visit(key, leaf.data(slot))?;
            }
            ControlFlow::Continue(())
        })
    }

    /// Calls `visit` with each leaf that may have items in `range` of the tree `root`, in order,
    /// until it breaks.
    pub(super) fn each_leaf(
        &self,
        root: TreeRoot,
        range: KeyRange,
        visit: &mut dyn FnMut(&TreeBlock) -> ControlFlow<()>,
    ) -> Walked {
        let Some(block) = self.usable_block(&root.expected()) else { return Walked::InPart };
        let mut walked = Walked::Whole;
        let _ = self.leaves_below(&block, root.id, None, range, visit, &mut walked);
        walked
    }

    fn leaves_below(
        &self,
        block: &TreeBlock,
        tree: TreeId,
        upper: Option<Key>,
        range: KeyRange,
        visit: &mut dyn FnMut(&TreeBlock) -> ControlFlow<()>,
        walked: &mut Walked,
    ) -> ControlFlow<()> {
        if self.is_over() {
            return ControlFlow::Break(());
        }
        if block.is_leaf() {
            return visit(block);
        }
        let first = block.floor(range.first).unwrap_or(0);
        let end = (first..block.len()).find(|&slot| block.key(slot) > range.last);
        let end = end.unwrap_or(block.len());
        self.read_ahead(block, first..end);
        for slot in first..block.len() {
            if slot >= end {
                return ControlFlow::Break(());
            }
            let upper = if slot + 1 < block.len() { Some(block.key(slot + 1)) } else { upper };
            match self.usable_child(block, slot, tree, upper) {
                Some(child) => {
                    self.leaves_below(&child, tree, upper, range, visit, walked)?;
                }
                None => *walked = Walked::InPart,
            }
        }
        ControlFlow::Continue(())
    }

    /// Tells the devices which leaves below a node will be read.
    pub(crate) fn read_ahead(&self, node: &TreeBlock, slots: Range<usize>) {
        if node.header().level != 1 || slots.len() < 2 {
            return;
        }
        let node_size = self.node_size();
        let pointers = node.pointers().get(slots).unwrap_or_default().iter();
        let leaves = pointers.map(NodePointer::logical);
        let unknown = leaves.filter(|&leaf| !self.cache.contains(leaf));
        self.storage.prefetch(self, unknown.map(|leaf| (leaf, node_size)));
    }

    /// Calls `found` with the data of the item with exactly this key, if it is there. `None` when
    /// it is not, or cannot be read.
    pub(crate) fn with_item<T>(
        &self,
        root: TreeRoot,
        key: Key,
        found: impl FnOnce(&[u8]) -> Option<T>,
    ) -> Option<T> {
        let (mut result, mut found) = (None, Some(found));
        self.each_item(root, KeyRange { first: key, last: key }, &mut |_, data| {
            result = found.take().and_then(|found| found(data));
            ControlFlow::Break(())
        });
        result
    }

    /// The tree of tree roots.
    pub(crate) fn root_tree(&self) -> TreeRoot {
        TreeRoot::of_root_tree(&self.superblock().item)
    }

    /// The chunk tree.
    pub(crate) fn chunk_tree(&self) -> TreeRoot {
        let item = &self.superblock().item;
        TreeRoot {
            id: TreeId::CHUNK,
            logical: Logical(item.chunk_root.get()),
            level: item.chunk_root_level,
            generation: Generation(item.chunk_root_generation.get()),
        }
    }

    /// The root of the tree `id`, by the first root item of it; `None` when there is none that can
    /// be read.
    pub(crate) fn tree(&self, id: TreeId) -> Option<TreeRoot> {
        let range = KeyRange {
            first: Key::new(id.0, ItemType::ROOT_ITEM, 0),
            last: Key::new(id.0, ItemType::ROOT_ITEM, u64::MAX),
        };
        let mut root = None;
        self.each_item(self.root_tree(), range, &mut |_, data| {
            root = RootItem::parse(data).ok().map(|item| root_of(id, &item));
            ControlFlow::Break(())
        });
        root.map(|root| self.actual_root(root))
    }

    /// The root as its block is. When the item that describes `root` contradicts a sound block, the
    /// item is wrong, which is a finding. A block that is older than the item says was not written:
    /// then the block is wrong, and the reader of the root finds that.
    pub(crate) fn actual_root(&self, root: TreeRoot) -> TreeRoot {
        if self.block(&root.expected()).is_ok() {
            return root;
        }
        let verify = |bytes: &[u8]| format_check::verify(bytes, &self.readers, root.logical);
        let Ok(bytes) = self.storage.find_block(root.logical, verify) else { return root };
        let block = TreeBlock::verified(bytes);
        let (level, generation) = (block.header().level, block.header().generation());
        let actual = TreeRoot { level, generation, ..root };
        let is_of_tree = format_check::expect(block.bytes(), &actual.expected()).is_ok();
        if !is_of_tree || generation < root.generation || actual == root {
            return root;
        }
        let shown =
            |root: TreeRoot| format!("level {}, generation {}", root.level, root.generation);
        let place = BtrfsFindingPlace::Tree(root.id);
        let (expected, found) = (shown(actual), shown(root));
        self.findings.differs(BtrfsFindingCode::RootItem, place, "its root item", expected, found);
        actual
    }

    /// The block at `logical` as the root of the tree `id`; `None` unless it is a sound block that
    /// was made for this tree.
    pub(crate) fn found_root(&self, id: TreeId, logical: Logical) -> Option<TreeRoot> {
        let verify = |bytes: &[u8]| format_check::verify(bytes, &self.readers, logical);
        let block = TreeBlock::verified(self.storage.find_block(logical, verify).ok()?);
        let header = block.header();
        let root = TreeRoot { id, logical, level: header.level, generation: header.generation() };
        let is_of_tree =
            header.owner() == id && format_check::expect(block.bytes(), &root.expected()).is_ok();
        is_of_tree.then_some(root)
    }
}

/// The root that an item describes.
pub(super) fn root_of(id: TreeId, item: &RootItem) -> TreeRoot {
    TreeRoot {
        id,
        logical: item.logical(),
        level: item.level.min(LEVEL_COUNT - 1),
        generation: item.generation(),
    }
}

impl Blocks for CheckedVolume<'_> {
    fn is_changing(&self) -> bool {
        false
    }

    fn epoch(&self) -> u64 {
        0
    }

    fn block(&self, expected: &ExpectedBlock) -> Result<Arc<TreeBlock>> {
        let error = match self.cache.committed(&self.storage, expected) {
            Ok(block) => return Ok(block),
            Err(error) => error,
        };
        if !matches!(error, Error::Corrupt(_)) {
            return Err(error);
        }
        // The kernel refuses the block. A reader may be able to use it.
        let verify = |bytes: &[u8]| {
            format_check::verify(bytes, &self.readers, expected.logical)?;
            format_check::expect(bytes, expected)
        };
        let Ok(bytes) = self.storage.find_block(expected.logical, verify) else {
            return Err(error);
        };
        let place = BtrfsFindingPlace::Block { tree: expected.owner, logical: expected.logical };
        self.findings.add(BtrfsFindingCode::RefusedBlock, place, error.to_string());
        let block = Arc::new(TreeBlock::verified(bytes));
        self.cache.insert(block.clone());
        Ok(block)
    }

    fn child(&self, node: &TreeBlock, slot: usize, owner: TreeId) -> Result<Arc<TreeBlock>> {
        self.block(&node.child_expected(slot, owner))
    }

    fn hold_root(&self, id: TreeId) -> Result<HeldBlock> {
        let root = self
            .tree(id)
            .ok_or_else(|| Error::corrupt(Structure::RootTree, format!("there is no tree {id}")))?;
        self.hold(&root.expected())
    }

    fn hold(&self, expected: &ExpectedBlock) -> Result<HeldBlock> {
        self.block(expected).map(HeldBlock::Committed)
    }
}
