//! What the extent tree says: extents in the order of their addresses, each with the references
//! that it knows.
//!
//! The references of an extent are inline in its item, or items of their own behind it, in the
//! order of hashes. They are sorted here, as the records of the walk are, so that both can be
//! compared step by step. Some extents have millions of references; these go through files.

use std::path::PathBuf;

use offshoot_btrfs_format::extent::{
    EXTENT_FLAG_DATA, EXTENT_FLAG_FULL_BACKREF, EXTENT_FLAG_TREE_BLOCK, ExtentDataRef,
    ParsedExtent, RefOwner,
};
use offshoot_btrfs_format::{Generation, ItemType, Key, Logical, TreeId, U32};
use offshoot_vfs::Result;
use zerocopy::FromBytes;

use super::super::reference::{ReferenceRecord, ReferenceTarget};
use super::super::sort::{SortedRecords, Sorter};
use super::stream::ItemStream;

/// The references of an extent that are sorted in memory.
const REFERENCES_AT_ONCE: usize = 32 << 10;

/// The bytes of references in memory while those of one extent go through files.
const SORT_BYTES: u64 = 8 << 20;

/// The flags of extents.
const KNOWN_FLAGS: u64 = EXTENT_FLAG_DATA | EXTENT_FLAG_TREE_BLOCK | EXTENT_FLAG_FULL_BACKREF;

/// What follows in the extent tree.
pub(super) enum ExtentEntry {
    /// The extents in this range of addresses are in blocks that cannot be used.
    Gap { start: u64, end: u64 },
    /// An extent, or references without an extent item.
    Extent(CheckedExtent),
    /// The item of a block group.
    Group(Key),
    /// An item that cannot be parsed.
    Malformed {
        key: Key,
        /// The length of its extent, in bytes.
        len: u64,
        problem: String,
    },
}

/// An address with an extent item, or with references alone.
pub(super) struct CheckedExtent {
    pub(super) start: u64,
    /// `None` for references alone.
    pub(super) item: Option<CheckedExtentItem>,
    /// How many references it has, inline and as items.
    pub(super) listed: u64,
    /// Whether all items at its address could be read.
    pub(super) is_whole: bool,
}

/// An extent item.
#[derive(Clone, Copy, Debug)]
pub(super) struct CheckedExtentItem {
    /// The length of the extent, in bytes.
    pub(super) len: u64,
    pub(super) is_block: bool,
    /// Whether the references of what a tree block points to name the block.
    pub(super) has_full_references: bool,
    /// Flags without a meaning.
    pub(super) unknown_flags: u64,
    /// The level of a tree block.
    pub(super) level: u64,
    pub(super) generation: Generation,
    /// How many references the item counts.
    pub(super) refs: u64,
}

/// Reads the extents of a range.
pub(super) struct ExtentReader<'v> {
    stream: ItemStream<'v>,
    node_size: u64,
    /// Whether the gap in front of the current item was returned.
    is_gap_told: bool,
    known: ListedReferences,
}

/// The references that the extent tree knows of one extent. The count of each is the size of its
/// record.
pub(super) struct ListedReferences {
    records: Vec<ReferenceRecord>,
    /// The references of an extent that has too many for memory.
    sorter: Option<Sorter<ReferenceRecord>>,
    scratch: PathBuf,
}

/// The references of one extent, in order.
pub(super) enum SortedReferences<'r> {
    Memory(std::slice::Iter<'r, ReferenceRecord>),
    Files(SortedRecords<ReferenceRecord>),
}

impl SortedReferences<'_> {
    /// The next reference, and how often it is counted.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub(super) fn next(&mut self) -> Result<Option<(RefOwner, u64)>> {
        let record = match self {
            Self::Memory(records) => records.next().copied(),
            Self::Files(records) => records.next()?,
        };
        Ok(record.map(|record| {
            let count = match record.target() {
                ReferenceTarget::Block { generation, .. } => generation.0,
                ReferenceTarget::Data { len } => len,
            };
            (record.owner(), count)
        }))
    }
}

impl ListedReferences {
    pub(super) fn new(scratch: PathBuf) -> Self {
        Self { records: Vec::new(), sorter: None, scratch }
    }

    fn clear(&mut self) {
        self.records.clear();
        self.sorter = None;
    }

    fn add(&mut self, at: u64, owner: RefOwner, count: u64) -> Result<()> {
        let target = match owner {
            RefOwner::Tree { .. } | RefOwner::Block { .. } => {
                ReferenceTarget::Block { level: 0, generation: Generation(count) }
            }
            RefOwner::File { .. } | RefOwner::Leaf { .. } => ReferenceTarget::Data { len: count },
        };
        self.records.push(ReferenceRecord::new(Logical(at), owner, target));
        if self.records.len() >= REFERENCES_AT_ONCE {
            let new = || Sorter::new(Vec::new(), SORT_BYTES, &self.scratch);
            self.sorter.get_or_insert_with(new).add_all(&mut self.records)?;
        }
        Ok(())
    }

    /// All references of the extent, in order.
    ///
    /// # Errors
    /// When a file cannot be written or read.
    pub(super) fn sorted(&mut self) -> Result<SortedReferences<'_>> {
        if let Some(sorter) = self.sorter.take() {
            sorter.add_all(&mut self.records)?;
            return Ok(SortedReferences::Files(sorter.take(0)?));
        }
        if self.records.len() > 1 {
            self.records.sort_unstable();
        }
        Ok(SortedReferences::Memory(self.records.iter()))
    }
}

fn is_extent(item_type: ItemType) -> bool {
    matches!(item_type, ItemType::EXTENT_ITEM | ItemType::METADATA_ITEM)
}

fn is_reference(item_type: ItemType) -> bool {
    matches!(
        item_type,
        ItemType::TREE_BLOCK_REF
            | ItemType::EXTENT_DATA_REF
            | ItemType::SHARED_BLOCK_REF
            | ItemType::SHARED_DATA_REF
            | ItemType::EXTENT_OWNER_REF
    )
}

impl<'v> ExtentReader<'v> {
    pub(super) fn new(stream: ItemStream<'v>, node_size: u64, scratch: PathBuf) -> Self {
        Self { stream, node_size, is_gap_told: false, known: ListedReferences::new(scratch) }
    }

    /// The references of the extent that was returned last.
    pub(super) fn references(&mut self) -> &mut ListedReferences {
        &mut self.known
    }

    /// The next entry; `None` behind the last one.
    ///
    /// # Errors
    /// When a file for references cannot be written.
    pub(super) fn next(&mut self) -> Result<Option<ExtentEntry>> {
        loop {
            if let Some(gap) = self.stream.gap().filter(|_| !self.is_gap_told) {
                self.is_gap_told = true;
                let end = gap.end.map_or(u64::MAX, |end| end.objectid);
                // References of an extent may go on in the gap.
                let is_behind = gap.first.item_type > ItemType::METADATA_ITEM;
                let start = gap.first.objectid.saturating_add(u64::from(is_behind));
                return Ok(Some(ExtentEntry::Gap { start: start.min(end), end }));
            }
            let Some((key, _)) = self.stream.item() else { return Ok(None) };
            if is_extent(key.item_type) || is_reference(key.item_type) {
                return self.extent(key).map(Some);
            }
            self.advance();
            if key.item_type == ItemType::BLOCK_GROUP_ITEM {
                return Ok(Some(ExtentEntry::Group(key)));
            }
        }
    }

    /// The length of the extent with this key, in bytes.
    fn len_of(&self, key: Key) -> u64 {
        if key.item_type == ItemType::METADATA_ITEM { self.node_size } else { key.offset }
    }

    fn advance(&mut self) {
        self.is_gap_told = false;
        self.stream.advance();
    }

    /// The extent at the current item, with all its references.
    fn extent(&mut self, key: Key) -> Result<ExtentEntry> {
        self.known.clear();
        let start = key.objectid;
        let mut extent = CheckedExtent { start, item: None, listed: 0, is_whole: true };
        let mut problem = None;
        if is_extent(key.item_type) {
            match self.item(key, &mut extent) {
                Ok(read) => read?,
                Err(malformed) => problem = Some(malformed),
            }
            self.advance();
        }
        while let Some((key, data)) = self.stream.item()
            && key.objectid == start
            && is_reference(key.item_type)
        {
            extent.is_whole &= self.stream.gap().is_none();
            extent.listed =
                extent.listed.saturating_add(keyed_references(&mut self.known, key, data)?);
            self.advance();
        }
        // The gap may have references of this extent.
        let hides_some = |end: Option<Key>| end.is_none_or(|end| end.objectid >= start);
        let gap = self.stream.gap().filter(|gap| gap.first.objectid <= start);
        extent.is_whole &= !gap.is_some_and(|gap| hides_some(gap.end));
        Ok(match problem {
            Some(problem) => ExtentEntry::Malformed { key, len: self.len_of(key), problem },
            None => ExtentEntry::Extent(extent),
        })
    }

    /// Reads the current item, which is that of an extent, and its inline references.
    fn item(&mut self, key: Key, extent: &mut CheckedExtent) -> Result<Result<()>, String> {
        let Some((_, data)) = self.stream.item() else { return Ok(Ok(())) };
        let parsed = ParsedExtent::parse(key.item_type, data).map_err(|e| e.to_string())?;
        let flags = parsed.item.flags.get();
        let is_block = flags & EXTENT_FLAG_TREE_BLOCK != 0;
        let is_skinny = key.item_type == ItemType::METADATA_ITEM;
        let level = parsed
            .block
            .map_or(if is_skinny { key.offset } else { 0 }, |block| u64::from(block.level));
        extent.item = Some(CheckedExtentItem {
            len: self.len_of(key),
            is_block,
            has_full_references: flags & EXTENT_FLAG_FULL_BACKREF != 0,
            unknown_flags: flags & !KNOWN_FLAGS,
            level,
            generation: Generation(parsed.item.generation.get()),
            refs: parsed.item.refs.get(),
        });
        for inline in parsed.inline_refs() {
            let Some((owner, count)) = inline.map_err(|e| e.to_string())?.owner() else { continue };
            extent.listed = extent.listed.saturating_add(count.into());
            if let Err(error) = self.known.add(key.objectid, owner, count.into()) {
                return Ok(Err(error));
            }
        }
        Ok(Ok(()))
    }
}

/// Adds the references of an item. Returns how many they are.
fn keyed_references(known: &mut ListedReferences, key: Key, data: &[u8]) -> Result<u64> {
    let (at, from) = (key.objectid, key.offset);
    let (owner, count) = match key.item_type {
        ItemType::TREE_BLOCK_REF => (RefOwner::Tree { root: TreeId(from) }, 1),
        ItemType::SHARED_BLOCK_REF => (RefOwner::Block { parent: Logical(from) }, 1),
        ItemType::SHARED_DATA_REF => {
            let count = U32::read_from_prefix(data).map_or(0, |(count, _)| count.get());
            (RefOwner::Leaf { parent: Logical(from) }, u64::from(count))
        }
        ItemType::EXTENT_DATA_REF => {
            let mut all = 0u64;
            for bytes in data.chunks_exact(size_of::<ExtentDataRef>()) {
                if let Ok(data_ref) = ExtentDataRef::ref_from_bytes(bytes) {
                    let (owner, count) = data_ref.owner();
                    known.add(at, owner, count.into())?;
                    all = all.saturating_add(count.into());
                }
            }
            return Ok(all);
        }
        _ => return Ok(0),
    };
    known.add(at, owner, count)?;
    Ok(count)
}
