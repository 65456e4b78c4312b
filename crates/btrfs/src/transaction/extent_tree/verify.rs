//! Checks of an extent before its references change.
//!
//! When the last reference to an extent is removed, other threads may use the space. So a count
//! that is too small frees space that is in use. A count of 1 that belongs to another owner makes a
//! writer change a shared block. The extent tree is believed only if it agrees with itself, with
//! the trees that refer to the extent, and with the neighbouring extents:
//!
//! | when | what must be true |
//! |---|---|
//! | its item is read | it has the kind, the level and the length of the reference; it counts what it names inline, and more only if keyed references follow; it overlaps no neighbour in the leaf |
//! | a block counts as not shared | the one reference is that of the tree or block through which the caller reached it |
//! | a tree gives up a block younger than its last snapshot | no reference to the block remains |
//! | a reference is removed | the item names its owner, often enough |
//! | the last one is removed | the references that are removed are all that are named, inline and keyed; no other extent overlaps it |
//! | an extent is new | its range overlaps no extent |
//!
//! If one of these is false, all writing ends before the commit is on the devices. They hold the
//! last commit.

use std::collections::BTreeMap;
use std::ops::Range;

use offshoot_btrfs_format::extent::{EXTENT_FLAG_DATA, EXTENT_FLAG_TREE_BLOCK, ExtentDataRef};
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId, U32};
use offshoot_vfs::{Error, Result, Structure};
use zerocopy::FromBytes;

use super::{ExtentRecord, GapSearch, TransactionHandle};
use crate::transaction::Base;
use crate::transaction::RefOwner;
use crate::transaction::refs::{ExtentKind, PendingRefs};
use crate::tree::Cursor;

/// What the user can do.
const ADVICE: &str =
    "nothing is written any more: copy what you need, then see what btrfs check finds";

/// The item of an extent, which agrees with itself and with the references to the extent.
#[derive(Debug)]
pub(super) struct KnownExtent {
    pub(super) record: ExtentRecord,
    /// How many references are keyed.
    pub(super) in_items: u64,
    /// The key before that of the item, if it is in the same leaf.
    before: Option<Key>,
    /// The first key behind the item that is not a reference to the extent, if it is known.
    behind: Option<Key>,
}

/// The error for a wrong extent tree, or a wrong reference to an extent.
pub(super) fn wrong(logical: Logical, problem: &str) -> Error {
    Error::corrupt_at(Structure::ExtentTree, logical.0, format!("{problem}; {ADVICE}"))
}

/// Whether an item with this key is that of an extent.
pub(super) fn is_extent(key: Key) -> bool {
    matches!(key.item_type, ItemType::EXTENT_ITEM | ItemType::METADATA_ITEM)
}

/// Whether an item with this key is a reference to the extent at `logical`.
fn is_reference(key: Key, logical: Logical) -> bool {
    key.objectid == logical.0
        && (ItemType::TREE_BLOCK_REF..=ItemType::SHARED_DATA_REF).contains(&key.item_type)
}

/// The range of the extent whose item has this key.
pub(super) fn range_of(key: Key, node_size: u64) -> Range<u64> {
    let len = if key.item_type == ItemType::METADATA_ITEM { node_size } else { key.offset };
    key.objectid..key.objectid.saturating_add(len)
}

/// The owner that a keyed reference names, and its count.
pub(super) fn keyed_owner(key: Key, data: &[u8]) -> Result<Option<(RefOwner, u32)>> {
    let cut = || wrong(Logical(key.objectid), &format!("{key}: the reference is cut"));
    Ok(Some(match key.item_type {
        ItemType::TREE_BLOCK_REF => (RefOwner::Tree { root: TreeId(key.offset) }, 1),
        ItemType::SHARED_BLOCK_REF => (RefOwner::Block { parent: Logical(key.offset) }, 1),
        ItemType::EXTENT_DATA_REF => {
            let (one, _) = ExtentDataRef::ref_from_prefix(data).map_err(|_| cut())?;
            one.owner()
        }
        ItemType::SHARED_DATA_REF => {
            let count = U32::read_from_bytes(data).map_err(|_| cut())?;
            (RefOwner::Leaf { parent: Logical(key.offset) }, count.get())
        }
        _ => return Ok(None),
    }))
}

/// The last extent that begins before `end`.
fn last_extent_before(volume: &Base, end: u64) -> Result<Option<Range<u64>>> {
    let node_size = u64::from(volume.superblock().node_size);
    let root = volume.tree(TreeId::EXTENT)?;
    let mut last = Key::new(end, ItemType(0), 0);
    loop {
        let cursor = Cursor::seek_floor(volume, root, last)?;
        let Some((key, _)) = cursor.item().filter(|(key, _)| *key < last) else { return Ok(None) };
        if is_extent(key) {
            return Ok(Some(range_of(key, node_size)));
        }
        // A reference or a block group comes behind the extent item of the same address.
        last = if key.item_type > ItemType::METADATA_ITEM {
            Key::new(key.objectid, ItemType::METADATA_ITEM, u64::MAX)
        } else {
            Key::new(key.objectid, ItemType(0), 0)
        };
    }
}

/// Why the item of an extent is not known.
pub(super) enum LookupProblem {
    /// The extent tree is wrong about the extent.
    Contradiction(String),
    /// The tree could not be read.
    Failure(Error),
}

impl From<Error> for LookupProblem {
    fn from(error: Error) -> Self {
        Self::Failure(error)
    }
}

/// The item of the extent at `logical`, as the tree has it now. The extent must have `len` bytes
/// and this kind. This changes nothing, so a caller without a handle may look.
///
/// # Errors
/// When there is no such item, it describes another extent, or it contradicts itself or the
/// neighbouring extents.
pub(super) fn look_up(
    volume: &Base,
    logical: Logical,
    len: u64,
    kind: ExtentKind,
) -> std::result::Result<KnownExtent, LookupProblem> {
    use LookupProblem::{Contradiction, Failure};
    let node_size = u64::from(volume.superblock().node_size);
    let root = volume.tree(TreeId::EXTENT)?;
    let last = Key::new(logical.0, ItemType::METADATA_ITEM, u64::MAX);
    let mut cursor = Cursor::seek_floor(volume, root, last)?;
    let found = cursor.item().filter(|(key, _)| key.objectid == logical.0 && is_extent(*key));
    let Some((key, data)) = found else {
        return Err(Contradiction(format!("it has no item for {len} bytes that are in use")));
    };
    let record = ExtentRecord::parse(key, data).map_err(|error| match error {
        Error::Corrupt(corrupt) => Contradiction(corrupt.to_string()),
        error => Failure(error),
    })?;
    let before = cursor.key_before();
    cursor.advance()?;
    let next = cursor.item().map(|(key, _)| key);
    let has_items = next.is_some_and(|next| is_reference(next, logical));
    if let Some(problem) = record.misfit(len, kind, node_size) {
        return Err(Contradiction(problem));
    }
    let in_items = record.in_items(has_items).map_err(Contradiction)?;
    let known = KnownExtent { record, in_items, before, behind: next.filter(|_| !has_items) };
    let beside = [known.before, known.behind].into_iter().flatten().filter(|key| is_extent(*key));
    for other in beside.map(|key| range_of(key, node_size)) {
        if let Some(problem) = overlap(logical, len, &other) {
            return Err(Contradiction(problem));
        }
    }
    Ok(known)
}

/// The problem that the extent at `logical` overlaps the range of another one, if it does.
fn overlap(logical: Logical, len: u64, other: &Range<u64>) -> Option<String> {
    let own = logical.0..logical.0.saturating_add(len);
    let (start, bytes) = (other.start, other.end - other.start);
    (own.start < other.end && other.start < own.end)
        .then(|| format!("the extent, {len} bytes, overlaps the one of {bytes} bytes at {start}"))
}

/// The owners that an item names inline, for messages.
pub(super) fn names(inline: &[(RefOwner, u32)]) -> String {
    const MOST: usize = 4;
    let mut all: Vec<_> = inline.iter().take(MOST).map(|(owner, _)| owner.to_string()).collect();
    if inline.len() > MOST {
        all.push(format!("{} more", inline.len() - MOST));
    }
    if all.is_empty() { "nothing".into() } else { all.join(", ") }
}

impl KnownExtent {
    /// Requires that `now` is the same item. Its neighbours may have moved to other leaves.
    #[cfg(debug_assertions)]
    pub(super) fn require_current(&self, now: &Self) {
        let parts = |one: &Self| format!("{:?}, {} in items", one.record, one.in_items);
        assert_eq!(parts(self), parts(now), "the item of an extent changed beside a commit");
    }
}

impl ExtentRecord {
    /// Why this is not the item of an extent of this length and kind, if it is not.
    fn misfit(&self, len: u64, kind: ExtentKind, node_size: u64) -> Option<String> {
        let (flag, name) = match kind {
            ExtentKind::Data => (EXTENT_FLAG_DATA, "data"),
            ExtentKind::Block { .. } => (EXTENT_FLAG_TREE_BLOCK, "a tree block"),
        };
        if self.flags & (EXTENT_FLAG_DATA | EXTENT_FLAG_TREE_BLOCK) != flag {
            return Some(format!("{name} is expected, its flags are {:#x}", self.flags));
        }
        let found = range_of(self.key, node_size);
        if found.end - found.start != len {
            return Some(format!("{len} bytes are expected, {} found", found.end - found.start));
        }
        match (kind, self.block) {
            (ExtentKind::Data, _) if self.key.item_type != ItemType::EXTENT_ITEM => {
                Some("data is expected, the item is that of a tree block".into())
            }
            (ExtentKind::Block { level }, block) => {
                let found = block.map_or(self.key.offset, |block| u64::from(block.level));
                let problem = || format!("a block of level {level} is expected, {found} found");
                (found != u64::from(level)).then(problem)
            }
            (ExtentKind::Data, _) => None,
        }
    }

    /// How many of its references are keyed; an error when its counts contradict each other.
    fn in_items(&self, has_items: bool) -> std::result::Result<u64, String> {
        let inline: u64 = self.inline.iter().map(|(_, count)| u64::from(*count)).sum();
        let refs = self.refs;
        let is_counted = self.inline.iter().all(|(_, count)| *count > 0);
        match refs.checked_sub(inline) {
            Some(in_items) if is_counted && refs > 0 && (in_items > 0) == has_items => Ok(in_items),
            _ => Err(format!(
                "the item counts {refs} references and names {inline} ({}); {} items of references follow",
                names(&self.inline),
                if has_items { "more" } else { "no" },
            )),
        }
    }
}

impl TransactionHandle<'_> {
    /// Ends all writing because an extent is wrong, and returns the error.
    pub(super) fn contradicted(&self, logical: Logical, problem: &str) -> Error {
        let error = wrong(logical, problem);
        self.live.stop_writing(&error);
        error
    }

    /// The item of the extent at `logical`, as [`look_up`] finds it.
    ///
    /// # Errors
    /// As [`look_up`]. A contradiction ends all writing.
    pub(super) fn extent(
        &self,
        logical: Logical,
        len: u64,
        kind: ExtentKind,
    ) -> Result<KnownExtent> {
        look_up(self.volume, logical, len, kind).map_err(|problem| match problem {
            LookupProblem::Contradiction(problem) => self.contradicted(logical, &problem),
            LookupProblem::Failure(error) => error,
        })
    }

    /// # Errors
    /// When the extent at `logical` overlaps the range of another one.
    fn require_apart(&self, logical: Logical, len: u64, other: &Range<u64>) -> Result<()> {
        overlap(logical, len, other)
            .map_or(Ok(()), |problem| Err(self.contradicted(logical, &problem)))
    }

    /// How often `owner` refers to an extent, with the pending changes counted.
    fn count_for(
        &self,
        known: &KnownExtent,
        logical: Logical,
        owner: RefOwner,
        pending: Option<&PendingRefs>,
    ) -> Result<i64> {
        let inline = known.record.inline.iter().find(|(one, _)| *one == owner);
        let stored = match inline {
            Some((_, count)) => *count,
            None if known.in_items > 0 => {
                self.find_keyed(logical, owner, GapSearch::Cross)?.map_or(0, |(_, count)| count)
            }
            None => 0,
        };
        let change = pending.and_then(|pending| pending.changes.get(&owner)).unwrap_or(&0);
        Ok(i64::from(stored).saturating_add(*change))
    }

    /// How many references the block at `logical` has, and whether it refers to its children by its
    /// own address, with delayed references counted. `owner` is the tree or the block through which
    /// the caller reached it.
    ///
    /// # Errors
    /// When the extent tree is wrong about the block, or counts one reference that is not that of
    /// `owner`.
    pub(crate) fn count_of(
        &self,
        logical: Logical,
        level: u8,
        owner: RefOwner,
    ) -> Result<(u64, bool)> {
        let (known, pending) = self.shared_block(logical, level)?;
        let net = pending.as_ref().map_or(0, PendingRefs::net);
        let count = known.record.refs.checked_add_signed(net).filter(|count| *count > 0);
        let count = count.ok_or_else(|| {
            let problem = format!("it counts no reference any more, but {owner} refers to it");
            self.contradicted(logical, &problem)
        })?;
        if count == 1 && self.count_for(&known, logical, owner, pending.as_ref())? != 1 {
            let found = names(&known.record.inline);
            let problem =
                format!("its only reference is expected to be that of {owner}; it names {found}");
            return Err(self.contradicted(logical, &problem));
        }
        Ok((count, known.record.is_full(pending.as_ref())))
    }

    /// Whether the block at `logical` refers to its children by its own address, with delayed
    /// references counted.
    ///
    /// # Errors
    /// When the extent tree is wrong about the block.
    pub(crate) fn is_full(&self, logical: Logical, level: u8) -> Result<bool> {
        let (known, pending) = self.shared_block(logical, level)?;
        Ok(known.record.is_full(pending.as_ref()))
    }

    fn shared_block(
        &self,
        logical: Logical,
        level: u8,
    ) -> Result<(KnownExtent, Option<PendingRefs>)> {
        let node_size = u64::from(self.volume.superblock().node_size);
        let known = self.extent(logical, node_size, ExtentKind::Block { level })?;
        Ok((known, self.transaction.refs.get(logical)))
    }

    /// # Errors
    /// When the references that the extent item names are not exactly those that `pending` gives
    /// up, or another extent overlaps it.
    pub(super) fn require_all_given_up(
        &self,
        known: &KnownExtent,
        logical: Logical,
        pending: &PendingRefs,
    ) -> Result<()> {
        // An owner may be named twice: a new reference may have filled the gap of a removed
        // reference with the same hash, before an older one of the same owner.
        let mut named: BTreeMap<RefOwner, i64> = BTreeMap::new();
        let mut name = |owner: RefOwner, count: u32| {
            *named.entry(owner).or_default() += i64::from(count);
        };
        known.record.inline.iter().for_each(|(owner, count)| name(*owner, *count));
        let mut behind = known.behind;
        if known.in_items > 0 {
            let first = Key::new(logical.0, ItemType::TREE_BLOCK_REF, 0);
            let mut cursor = Cursor::seek(self.volume, self.volume.tree(TreeId::EXTENT)?, first)?;
            while let Some((key, data)) =
                cursor.item().filter(|(key, _)| is_reference(*key, logical))
            {
                if let Some((owner, count)) = keyed_owner(key, data)? {
                    name(owner, count);
                }
                cursor.advance()?;
            }
            behind = cursor.item().map(|(key, _)| key);
        }
        for (owner, count) in &named {
            if pending.changes.get(owner) != Some(&-count) {
                let going: Vec<_> = pending.changes.keys().map(|&owner| (owner, 1)).collect();
                let going = names(&going);
                let problem = format!(
                    "its last reference goes, that of {going}, but it counts {count} of {owner}"
                );
                return Err(self.contradicted(logical, &problem));
            }
        }
        if named.len() != pending.changes.len() {
            let problem = "it does not count all references that are given up";
            return Err(self.contradicted(logical, problem));
        }
        let node_size = u64::from(self.volume.superblock().node_size);
        if let Some(key) = behind.filter(|key| is_extent(*key)) {
            self.require_apart(logical, pending.len, &range_of(key, node_size))?;
        }
        // The check of the item compared it with an extent before it in the same leaf.
        if known.before.is_none_or(|key| !is_extent(key))
            && let Some(before) = last_extent_before(self.volume, logical.0)?
        {
            self.require_apart(logical, pending.len, &before)?;
        }
        Ok(())
    }

    /// # Errors
    /// When one of these ranges, which ascend and will become extents, overlaps an extent.
    pub(super) fn require_unused(&self, ranges: &[Range<u64>]) -> Result<()> {
        // Most space is taken in sequence, so adjacent ranges are checked as one.
        for run in ranges.chunk_by(|one, next| one.end == next.start) {
            let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
            if let Some(before) = last_extent_before(self.volume, last.end)? {
                self.require_apart(Logical(first.start), last.end - first.start, &before)?;
            }
        }
        Ok(())
    }
}
