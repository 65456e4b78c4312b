//! Full quotas: which subvolumes reach which extents.
//!
//! The trees of all subvolumes are read by level, from the highest roots down. The blocks of a
//! level are in the order of addresses, each with the set of subvolumes that reach it: the sets of
//! the blocks that point to it, joined. So each block is read once, however many snapshots share
//! it. Extents of data come last.
//!
//! ```text
//! level 2   root of 5: {5}    root of 257: {257}
//! level 1   a: {5}   b: {5, 257}   c: {257}      records (address, set), sorted
//! level 0   ...
//! data      ...                                  each adds its bytes to its set
//! ```
//!
//! A group refers to the extents that one of its subvolumes reaches. An extent is exclusive to it
//! when all subvolumes that reach it are in the group. Subvolumes without a group count, too, and
//! deleted ones until they are dropped.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};

use offshoot_btrfs_format::block::LEVEL_COUNT;
use offshoot_btrfs_format::check::ExpectedBlock;
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::quota::QgroupId;
use offshoot_btrfs_format::{Generation, ItemType, Logical, TreeId};
use offshoot_kit::cores;
use offshoot_vfs::{Error, Result};
use parking_lot::Mutex;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::GroupBytes;
use super::groups::QuotaGroups;
use super::sets::{EMPTY, SetId, SubvolumeSets};
use crate::block::TreeBlock;
use crate::check::finding::{BtrfsFindingCode, BtrfsFindingPlace};
use crate::check::sort::{SortedRecord, SortedRecords, Sorter};
use crate::check::volume::CheckedVolume;
use crate::check::walk::WalkedVolume;
use crate::tree::Blocks;

/// The blocks that are read at a time.
const BLOCKS_AT_ONCE: usize = 1024;

/// An extent that a set of subvolumes reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct ReachedExtent {
    logical: u64,
    /// The generation of a tree block, or the length of an extent of data in bytes.
    detail: u64,
    set: u64,
}

impl SortedRecord for ReachedExtent {
    fn address(&self) -> u64 {
        self.logical
    }
}

impl ReachedExtent {
    fn set(&self) -> SetId {
        SetId::try_from(self.set).unwrap_or(EMPTY)
    }
}

/// The computation of all sets.
struct Reach<'v, 'c> {
    volume: &'v CheckedVolume<'c>,
    sets: SubvolumeSets,
    /// The bytes of the extents that exactly this set reaches.
    bytes: HashMap<SetId, u64>,
    levels: Vec<Sorter<ReachedExtent>>,
    data: Sorter<ReachedExtent>,
    /// Whether a block could not be read.
    has_gap: AtomicBool,
    failure: Mutex<Option<Error>>,
}

/// The numbers of all groups; `None` when they cannot be computed.
///
/// # Errors
/// When a file of records cannot be written or read, or the caller has ended the check.
pub(super) fn computed(
    volume: &CheckedVolume<'_>,
    walked: &WalkedVolume,
    groups: &QuotaGroups,
) -> Result<Option<BTreeMap<QgroupId, GroupBytes>>> {
    let trees: Vec<_> = walked.trees.iter().filter(|tree| tree.root.id.is_subvolume()).collect();
    if trees.iter().any(|tree| tree.dropped.is_some() || walked.damaged.contains(&tree.root.id)) {
        return Ok(None);
    }
    let (memory, scratch) = (volume.options.memory_bytes, volume.scratch());
    let sorter = |part| Sorter::new(Vec::new(), memory / part, &scratch);
    let mut reach = Reach {
        volume,
        sets: SubvolumeSets::new(trees.len(), memory / 4),
        bytes: HashMap::new(),
        levels: (0..LEVEL_COUNT).map(|_| sorter(32)).collect(),
        data: sorter(4),
        has_gap: AtomicBool::new(false),
        failure: Mutex::new(None),
    };
    for (number, tree) in trees.iter().enumerate() {
        let set = u64::from(reach.sets.single(number));
        let record =
            ReachedExtent { logical: tree.root.logical.0, detail: tree.root.generation.0, set };
        if let Some(level) = reach.levels.get(usize::from(tree.root.level)) {
            level.add_all(&mut vec![record])?;
        }
    }
    reach.run()?;
    if reach.sets.are_too_many() {
        let problem = "the groups were not compared: more sets of subvolumes share extents than \
                       there is memory for; give the check more";
        let place = BtrfsFindingPlace::Tree(TreeId::QUOTA);
        volume.findings.add(BtrfsFindingCode::NotRead, place, problem);
        return Ok(None);
    }
    if reach.has_gap.load(Ordering::Relaxed) {
        return Ok(None);
    }
    let ids: Vec<_> = trees.iter().map(|tree| tree.root.id).collect();
    reach.sums(&ids, groups).map(Some)
}

impl Reach<'_, '_> {
    fn run(&mut self) -> Result<()> {
        for level in (0..LEVEL_COUNT).rev() {
            let Some(sorter) = self.levels.get(usize::from(level)) else { continue };
            let mut records = sorter.take(0)?;
            loop {
                let blocks = self.next_extents(&mut records, BLOCKS_AT_ONCE)?;
                if blocks.is_empty() {
                    break;
                }
                let node_size = self.volume.node_size();
                for block in &blocks {
                    self.count(block.set(), node_size);
                }
                cores::for_each(blocks.len(), &|index| {
                    let Some(block) = blocks.get(index) else { return };
                    if let Err(error) = self.visit(block, level) {
                        self.failure.lock().get_or_insert(error);
                    }
                });
                if let Some(error) = self.failure.lock().take() {
                    return Err(error);
                }
                self.volume.require_going_on()?;
            }
        }
        let mut records = self.data.take(0)?;
        loop {
            let extents = self.next_extents(&mut records, BLOCKS_AT_ONCE)?;
            if extents.is_empty() {
                return Ok(());
            }
            for extent in &extents {
                self.count(extent.set(), extent.detail);
            }
            self.volume.require_going_on()?;
        }
    }

    /// The next extents, each with the set of all that reach it. At most `most`.
    fn next_extents(
        &mut self,
        records: &mut SortedRecords<ReachedExtent>,
        most: usize,
    ) -> Result<Vec<ReachedExtent>> {
        let mut extents = Vec::<ReachedExtent>::new();
        while let Some(&next) = records.peek() {
            let is_full = extents.len() == most;
            match extents.last_mut().filter(|last| last.logical == next.logical) {
                Some(last) => last.set = u64::from(self.sets.union(last.set(), next.set())),
                None if is_full => break,
                None => extents.push(next),
            }
            records.next()?;
        }
        Ok(extents)
    }

    fn count(&mut self, set: SetId, bytes: u64) {
        let sum = self.bytes.entry(set).or_default();
        *sum = sum.saturating_add(bytes);
    }

    /// Reads a block, and adds what it points to.
    fn visit(&self, block: &ReachedExtent, level: u8) -> Result<()> {
        let expected = ExpectedBlock {
            logical: Logical(block.logical),
            level,
            generation: Generation(block.detail),
            // A block that snapshots share names any subvolume.
            owner: TreeId::FS,
            first_key: None,
        };
        let Ok(found) = self.volume.block(&expected) else {
            self.has_gap.store(true, Ordering::Relaxed);
            return Ok(());
        };
        let below = level.checked_sub(1).and_then(|below| self.levels.get(usize::from(below)));
        match below {
            Some(below) => below.add_all(&mut children(&found, block.set)),
            None => self.data.add_all(&mut extents_of(&found, block.set)),
        }
    }

    /// The numbers of all groups. `ids` are the subvolumes in the order of their numbers.
    fn sums(
        &mut self,
        ids: &[TreeId],
        groups: &QuotaGroups,
    ) -> Result<BTreeMap<QgroupId, GroupBytes>> {
        let mut computed = BTreeMap::<QgroupId, GroupBytes>::new();
        let group_of = |number: usize| ids.get(number).copied().map(QgroupId::of_subvolume);
        for (number, bytes) in self.sets.spread(&self.bytes) {
            if let Some(group) = group_of(number) {
                computed.entry(group).or_default().referenced = bytes;
            }
        }
        let single: HashMap<_, _> =
            self.bytes.iter().filter(|(set, _)| self.sets.is_single(**set)).collect();
        let single = single.into_iter().map(|(set, bytes)| (*set, *bytes)).collect();
        for (number, bytes) in self.sets.spread(&single) {
            if let Some(group) = group_of(number) {
                computed.entry(group).or_default().exclusive = bytes;
            }
        }
        let mut members = BTreeMap::<QgroupId, SetId>::new();
        for (number, id) in ids.iter().enumerate() {
            let own = QgroupId::of_subvolume(*id);
            let one = self.sets.single(number);
            for group in groups.with_containers(own).into_iter().filter(|group| *group != own) {
                let set = members.entry(group).or_insert(EMPTY);
                *set = self.sets.union(*set, one);
            }
        }
        for (group, members) in members {
            self.volume.require_going_on()?;
            let sum = computed.entry(group).or_default();
            for (&set, bytes) in &self.bytes {
                if self.sets.meet(members, set) {
                    sum.referenced = sum.referenced.saturating_add(*bytes);
                }
                if set != EMPTY && self.sets.contains(members, set) {
                    sum.exclusive = sum.exclusive.saturating_add(*bytes);
                }
            }
        }
        Ok(computed)
    }
}

/// The children of a node, as reached by `set`.
fn children(node: &TreeBlock, set: u64) -> Vec<ReachedExtent> {
    let pointers = node.pointers().iter();
    let child = pointers.map(|pointer| ReachedExtent {
        logical: pointer.logical().0,
        detail: pointer.generation.get(),
        set,
    });
    child.collect()
}

/// The extents of data that a leaf refers to, as reached by `set`.
fn extents_of(leaf: &TreeBlock, set: u64) -> Vec<ReachedExtent> {
    let extent = |slot: usize| {
        if leaf.key(slot).item_type != ItemType::EXTENT_DATA {
            return None;
        }
        match FileExtent::parse(leaf.data(slot)).ok()?.body {
            FileExtentBody::Extent { disk_bytenr, disk_num_bytes, .. } => {
                Some(ReachedExtent { logical: disk_bytenr.0, detail: disk_num_bytes, set })
            }
            _ => None,
        }
    };
    let mut extents: Vec<_> = (0..leaf.len()).filter_map(extent).collect();
    extents.sort_unstable();
    extents.dedup();
    extents
}
