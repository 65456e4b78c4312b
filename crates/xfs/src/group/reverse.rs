//! The reverse map of a group: which owner has each block. All of it does nothing on a volume
//! without one.
//!
//! Mappings of one owner that follow each other on the device, and in the file, are one record.
//! Those of shared blocks overlap: each owner has its own.

use std::ops::ControlFlow;

use offshoot_vfs::{Error, Result, Structure};
use offshoot_xfs_format::btree::{XfsSearchKey, XfsTree};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::log::items::XfsReverseOp;
use offshoot_xfs_format::record::{XfsOwner, XfsReverseFlags as Flags, XfsReverseMap};
use offshoot_xfs_format::{AgBlock, AgNumber, FileBlock, Ino};
use zerocopy::IntoBytes;

use super::{free_list, tree};
use crate::trans::{AgExtent, ForkName, XfsTransaction};

/// What the reverse map says about an extent, but for its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReverseOwner {
    owner: XfsOwner,
    /// The offset in the fork of the owner, and flags.
    offset: u64,
}

impl ReverseOwner {
    /// An owner that is no file.
    pub(crate) fn special(owner: XfsOwner) -> Self {
        Self { owner, offset: 0 }
    }

    /// Blocks of a file.
    pub(crate) fn file(ino: Ino, fork: ForkName, at: FileBlock, is_unwritten: bool) -> Self {
        let state = if is_unwritten { Flags::UNWRITTEN.bits() } else { 0 };
        Self { owner: XfsOwner::File(ino), offset: at.0 | of_fork(fork) | state }
    }

    /// Blocks of the tree of extents of a file.
    pub(crate) fn tree_block(ino: Ino, fork: ForkName) -> Self {
        let offset = Flags::TREE_BLOCK.bits() | of_fork(fork);
        Self { owner: XfsOwner::File(ino), offset }
    }

    /// The record about `extent`.
    pub(crate) fn over(&self, extent: AgExtent) -> XfsReverseMap {
        XfsReverseMap {
            start: extent.start.0.into(),
            count: extent.count.into(),
            owner: self.owner.number().into(),
            offset: self.offset.into(),
        }
    }
}

fn of_fork(fork: ForkName) -> u64 {
    if fork == ForkName::Attributes { Flags::ATTRIBUTES.bits() } else { 0 }
}

/// A record with numbers that can be computed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mapping {
    start: u64,
    count: u64,
    owner: u64,
    offset: u64,
}

impl Mapping {
    fn of(record: &XfsReverseMap) -> Self {
        let (start, count) = (record.start.get().into(), record.count.get().into());
        Self { start, count, owner: record.owner.get(), offset: record.offset.get() }
    }

    fn end(&self) -> u64 {
        self.start + self.count
    }

    /// Whether each block has its own offset in a file.
    fn has_offsets(&self) -> bool {
        self.owner.cast_signed() >= 0 && self.offset & Flags::TREE_BLOCK.bits() == 0
    }

    /// What it says about the blocks from `start` on.
    fn part(&self, start: u64, end: u64) -> Self {
        let moved = if self.has_offsets() { start - self.start } else { 0 };
        let offset = self.offset + moved;
        Self { start, count: end - start, offset, ..*self }
    }

    /// Whether `next` says of the blocks behind this one what this one would.
    fn is_followed_by(&self, next: &Self) -> bool {
        let moved = if self.has_offsets() { self.count } else { 0 };
        next.start == self.end() && next.owner == self.owner && next.offset == self.offset + moved
    }

    /// Whether this record says about the blocks of `part` what `part` says.
    fn has(&self, part: &Self) -> bool {
        self.start <= part.start
            && self.end() >= part.end()
            && self.owner == part.owner
            && self.has_offsets() == part.has_offsets()
            && self.part(part.start, part.end()) == *part
    }

    fn record(&self) -> Option<XfsReverseMap> {
        Some(XfsReverseMap {
            start: u32::try_from(self.start).ok()?.into(),
            count: u32::try_from(self.count).ok()?.into(),
            owner: self.owner.into(),
            offset: self.offset.into(),
        })
    }

    fn key(&self) -> Option<XfsSearchKey> {
        Some(XfsTree::ReverseMap.low_key(self.record()?.as_bytes()))
    }
}

/// Makes the change that an intent asks for. Locks the AGF.
pub(crate) fn change_reverse(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    op: XfsReverseOp,
    record: &XfsReverseMap,
) -> Result<()> {
    use XfsReverseOp as Op;
    if !has_map(t) {
        return Ok(());
    }
    free_list::prepare(t, ag)?;
    match op {
        Op::Map | Op::Alloc => map(t, ag, record),
        Op::MapShared => insert(t, ag, &Mapping::of(record), true),
        Op::Unmap | Op::UnmapShared | Op::Free => unmap(t, ag, record),
        Op::Convert | Op::ConvertShared => {
            // The record says what the blocks become.
            let offset = record.offset.get() ^ Flags::UNWRITTEN.bits();
            unmap(t, ag, &XfsReverseMap { offset: offset.into(), ..*record })?;
            insert(t, ag, &Mapping::of(record), op == Op::ConvertShared)
        }
    }
}

fn has_map(t: &XfsTransaction<'_>) -> bool {
    t.geometry().layout.contains(XfsLayout::REVERSE_MAP)
}

/// Adds a mapping of blocks that have no other owner. The free list has to be prepared.
pub(super) fn map(t: &mut XfsTransaction<'_>, ag: AgNumber, record: &XfsReverseMap) -> Result<()> {
    insert(t, ag, &Mapping::of(record), false)
}

/// The mappings with a block of a range.
fn mappings(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    start: u64,
    end: u64,
    mut wanted: impl FnMut(&Mapping) -> bool,
) -> Result<Vec<Mapping>> {
    let block = |number: u64| AgBlock(u32::try_from(number).unwrap_or(u32::MAX));
    let mut found = Vec::new();
    tree::edit(t, ag, XfsTree::ReverseMap, |tree| {
        let range = (block(start), block(end.saturating_sub(1)));
        tree.overlapping::<XfsReverseMap>(range, &mut |record| {
            let mapping = Mapping::of(record);
            if wanted(&mapping) {
                found.push(mapping);
            }
            ControlFlow::Continue(())
        })
    })?;
    Ok(found)
}

/// Adds a mapping, joined with those beside it.
fn insert(t: &mut XfsTransaction<'_>, ag: AgNumber, new: &Mapping, is_shared: bool) -> Result<()> {
    if !has_map(t) {
        return Ok(());
    }
    let (mut left, mut right, mut other) = (None, None, None);
    mappings(t, ag, new.start.saturating_sub(1), new.end() + 1, |found| {
        if found.is_followed_by(new) {
            left = Some(*found);
        } else if new.is_followed_by(found) {
            right = Some(*found);
        } else if found.start < new.end() && found.end() > new.start {
            let is_same = found.owner == new.owner && found.offset == new.offset;
            if !is_shared || is_same {
                other = Some(*found);
            }
        }
        false
    })?;
    if let Some(other) = other {
        return Err(contradiction(ag, new, &format!("{other:?} overlaps it")));
    }
    let whole = joined(left, *new, right);
    let key = |mapping: &Mapping| {
        mapping.key().ok_or_else(|| contradiction(ag, mapping, "it is too long"))
    };
    let record = whole.record().ok_or_else(|| contradiction(ag, &whole, "it is too long"))?;
    tree::edit(t, ag, XfsTree::ReverseMap, |tree| {
        for old in [right, left].iter().flatten() {
            tree::must_find::<XfsReverseMap>(tree, key(old)?)?;
            if Some(*old) == left {
                return tree.replace(&record);
            }
            // Records of shared blocks may lie between its key and the new one.
            tree.remove()?;
        }
        tree.insert(&record)
    })
}

/// A mapping with those beside it.
fn joined(left: Option<Mapping>, new: Mapping, right: Option<Mapping>) -> Mapping {
    let count =
        new.count + left.map_or(0, |left| left.count) + right.map_or(0, |right| right.count);
    Mapping { count, ..left.unwrap_or(new) }
}

/// Removes a mapping. It may be a part of a longer one. The free list has to be prepared.
pub(super) fn unmap(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    record: &XfsReverseMap,
) -> Result<()> {
    if !has_map(t) {
        return Ok(());
    }
    let old = Mapping::of(record);
    let found = mappings(t, ag, old.start, old.end(), |found| found.has(&old))?;
    let Some(whole) = found.first() else {
        return Err(contradiction(ag, &old, "the reverse map does not have it"));
    };
    cut(t, ag, whole, old.start, old.end())
}

/// Removes what the map has of an extent that one owner has, whoever that is.
pub(super) fn unmap_anyone(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    extent: AgExtent,
) -> Result<()> {
    if !has_map(t) {
        return Ok(());
    }
    let (start, end) = (u64::from(extent.start.0), u64::from(extent.end()));
    for found in mappings(t, ag, start, end, |_| true)? {
        cut(t, ag, &found, found.start.max(start), found.end().min(end))?;
    }
    Ok(())
}

/// Takes a range out of a record.
fn cut(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    whole: &Mapping,
    start: u64,
    end: u64,
) -> Result<()> {
    let rests = [whole.part(whole.start, start), whole.part(end, whole.end())];
    let rests: Vec<_> =
        rests.iter().filter(|rest| rest.count > 0).filter_map(Mapping::record).collect();
    let key = whole.key().ok_or_else(|| contradiction(ag, whole, "it is too long"))?;
    tree::edit(t, ag, XfsTree::ReverseMap, |tree| {
        tree::must_find::<XfsReverseMap>(tree, key)?;
        // The left rest keeps the key. The right one has another, before which others may be.
        let keeps_key = start > whole.start;
        if let Some(left) = rests.first().filter(|_| keeps_key) {
            tree.replace(left)?;
        } else {
            tree.remove()?;
        }
        rests.iter().skip(keeps_key.into()).try_for_each(|rest| tree.insert(rest))
    })
}

#[cold]
fn contradiction(ag: AgNumber, mapping: &Mapping, problem: &str) -> Error {
    let Mapping { start, count, owner, offset } = mapping;
    let owner = owner.cast_signed();
    let what = format!(
        "group {ag}: {count} blocks from {start} of owner {owner} at {offset:#x}: {problem}"
    );
    Error::corrupt(Structure::ReverseRecord, what)
}
