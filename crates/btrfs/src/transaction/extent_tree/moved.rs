//! Moving the items of extents to other addresses, with all their references.

use std::ops::Range;

use offshoot_btrfs_format::block::LEVEL_COUNT;
use offshoot_btrfs_format::extent::{EXTENT_FLAG_FULL_BACKREF, EXTENT_FLAG_TREE_BLOCK};
use offshoot_btrfs_format::{Generation, ItemType, Key, Logical, TreeId};
use offshoot_vfs::{Error, Result};

use super::verify::{LookupProblem, is_extent, keyed_owner, look_up, range_of, wrong};
use super::{ExtentRecord, RefRun, TransactionHandle};
use crate::transaction::Base;
use crate::transaction::RefOwner;
use crate::transaction::refs::ExtentKind;
use crate::tree::Cursor;

/// An extent with all its references, inline and keyed.
pub(in crate::transaction) struct KnownReferences {
    record: ExtentRecord,
    keyed: Vec<KeyedReference>,
}

/// A reference that is an item of its own.
struct KeyedReference {
    key: Key,
    data: Vec<u8>,
    owner: RefOwner,
    count: u32,
}

/// The error for a reference without the block or item that it should come from.
pub(in crate::transaction) fn no_parent(at: Logical, owner: RefOwner) -> Error {
    wrong(at, &format!("it counts a reference of {owner}, which was not found"))
}

/// The extent of `len` bytes at `at` with all its references. `is_metadata` is true when the caller
/// knows that it is a tree block.
///
/// # Errors
/// When the extent tree has no such extent, or contradicts itself about it. This does not end
/// writing, because nothing has relied on it yet.
pub(in crate::transaction) fn known_references(
    volume: &Base,
    at: Logical,
    len: u64,
    is_metadata: bool,
) -> Result<KnownReferences> {
    let kind = kind_of(volume, at, is_metadata)?;
    let known = look_up(volume, at, len, kind).map_err(|problem| match problem {
        LookupProblem::Contradiction(problem) => wrong(at, &problem),
        LookupProblem::Failure(error) => error,
    })?;
    let mut keyed = Vec::new();
    if known.in_items > 0 {
        let first = Key::new(at.0, ItemType::TREE_BLOCK_REF, 0);
        let mut cursor = Cursor::seek(volume, volume.tree(TreeId::EXTENT)?, first)?;
        while let Some((key, data)) = cursor.item().filter(|(key, _)| key.objectid == at.0) {
            if let Some((owner, count)) = keyed_owner(key, data)? {
                keyed.push(KeyedReference { key, data: data.to_vec(), owner, count });
            }
            cursor.advance()?;
        }
    }
    let found = KnownReferences { record: known.record, keyed };
    let named = found.owners().fold(0u64, |sum, (_, count)| sum.saturating_add(count.into()));
    if named != found.count() {
        let problem = format!("it counts {} references and names {named}", found.count());
        return Err(wrong(at, &problem));
    }
    Ok(found)
}

/// The ranges of all extents in `range`, by address, as the extent tree has them.
///
/// # Errors
/// When the tree cannot be read.
pub(crate) fn extents_in(volume: &Base, range: &Range<u64>) -> Result<Vec<Range<u64>>> {
    let node_size = u64::from(volume.superblock().node_size);
    let mut all = Vec::new();
    let first = Key::new(range.start, ItemType(0), 0);
    let mut cursor = Cursor::seek(volume, volume.tree(TreeId::EXTENT)?, first)?;
    while let Some((key, _)) = cursor.item().filter(|(key, _)| key.objectid < range.end) {
        if is_extent(key) {
            all.push(range_of(key, node_size));
        }
        cursor.advance()?;
    }
    Ok(all)
}

/// The kind of the extent at `at`, as its item says.
fn kind_of(volume: &Base, at: Logical, is_metadata: bool) -> Result<ExtentKind> {
    let last = Key::new(at.0, ItemType::METADATA_ITEM, u64::MAX);
    let cursor = Cursor::seek_floor(volume, volume.tree(TreeId::EXTENT)?, last)?;
    let found = cursor.item().filter(|(key, _)| key.objectid == at.0);
    let Some((key, data)) = found else {
        return Err(wrong(at, "it has no item for an extent that is in use"));
    };
    let record = ExtentRecord::parse(key, data)?;
    if record.flags & EXTENT_FLAG_TREE_BLOCK == 0 {
        let problem = "data is where a tree block is expected";
        return if is_metadata { Err(wrong(at, problem)) } else { Ok(ExtentKind::Data) };
    }
    Ok(ExtentKind::Block { level: record.level() })
}

impl ExtentRecord {
    /// The level of a tree block.
    fn level(&self) -> u8 {
        let in_key = || u8::try_from(self.key.offset).unwrap_or(u8::MAX);
        self.block.map_or_else(in_key, |block| block.level)
    }
}

impl KnownReferences {
    /// The kind of the extent.
    pub(in crate::transaction) fn kind(&self) -> ExtentKind {
        if self.record.flags & EXTENT_FLAG_TREE_BLOCK == 0 {
            ExtentKind::Data
        } else {
            ExtentKind::Block { level: self.record.level() }
        }
    }

    /// # Errors
    /// When this is not a tree block of this level.
    pub(in crate::transaction) fn require_level(&self, at: Logical, level: u8) -> Result<()> {
        if level < LEVEL_COUNT && self.kind() == (ExtentKind::Block { level }) {
            return Ok(());
        }
        let problem = format!("a block of level {level} is expected, {:?} found", self.kind());
        Err(wrong(at, &problem))
    }

    /// The transaction that made the extent.
    pub(in crate::transaction) fn generation(&self) -> Generation {
        self.record.generation
    }

    /// Whether the block refers to what is below it by its own address.
    pub(in crate::transaction) fn is_full(&self) -> bool {
        self.record.flags & EXTENT_FLAG_FULL_BACKREF != 0
    }

    /// How many references there are.
    pub(in crate::transaction) fn count(&self) -> u64 {
        self.record.refs
    }

    /// All owners, with the number of their references.
    pub(in crate::transaction) fn owners(&self) -> impl Iterator<Item = (RefOwner, u32)> + '_ {
        let keyed = self.keyed.iter().map(|one| (one.owner, one.count));
        self.record.inline.iter().copied().chain(keyed)
    }
}

/// An owner when blocks have moved.
fn moved(owner: RefOwner, new_parent: impl Fn(Logical) -> Logical) -> RefOwner {
    match owner {
        RefOwner::Block { parent } => RefOwner::Block { parent: new_parent(parent) },
        RefOwner::Leaf { parent } => RefOwner::Leaf { parent: new_parent(parent) },
        RefOwner::Tree { .. } | RefOwner::File { .. } => owner,
    }
}

impl RefRun {
    /// Adds the edits that move the items of an extent to the address `to`. `new_parent` says where
    /// a block that refers to it is then.
    pub(in crate::transaction) fn add_moved(
        &mut self,
        references: &KnownReferences,
        to: Logical,
        new_parent: impl Fn(Logical) -> Logical,
    ) {
        let record = &references.record;
        let inline = record.inline.iter();
        let mut moved = ExtentRecord {
            key: Key { objectid: to.0, ..record.key },
            inline: inline.map(|&(owner, count)| (moved(owner, &new_parent), count)).collect(),
            ..*record
        };
        self.edits.push((record.key, None));
        self.edits.push((moved.key, Some(moved.encode())));
        for one in &references.keyed {
            let offset = match one.owner {
                RefOwner::Block { parent } | RefOwner::Leaf { parent } => new_parent(parent).0,
                RefOwner::Tree { .. } | RefOwner::File { .. } => one.key.offset,
            };
            self.edits.push((one.key, None));
            let key = Key { objectid: to.0, offset, ..one.key };
            self.edits.push((key, Some(one.data.clone())));
        }
        let items = 1 + references.keyed.len();
        self.expected.inserted += items;
        self.expected.removed += items;
    }

    /// Adds a range that stops being an extent, and one that becomes one.
    pub(in crate::transaction) fn add_ranges(&mut self, freed: Range<u64>, used: Range<u64>) {
        self.freed.push(freed);
        self.used.push(used);
    }

    /// Adds a range whose checksums go.
    pub(in crate::transaction) fn add_unsummed(&mut self, range: Range<u64>) {
        self.unsummed.push(range);
    }

    /// Puts everything in ascending order.
    pub(in crate::transaction) fn sort(&mut self) {
        self.edits.sort_unstable_by_key(|(key, _)| *key);
        for ranges in [&mut self.freed, &mut self.used, &mut self.unsummed] {
            ranges.sort_unstable_by_key(|range| range.start);
        }
    }
}

impl TransactionHandle<'_> {
    /// Applies the edits of moved extents.
    pub(in crate::transaction) fn run_moved(&self, run: RefRun) -> Result<()> {
        for freed in &run.freed {
            // The free ranges are loaded from the trees before the trees show this range as free.
            let group = self.live.space.group_of(Logical(freed.start))?;
            self.live.space.load(self.volume, &group)?;
        }
        self.remove_data(&run)?;
        self.apply(run)
    }
}
