//! The leaves of an attribute fork: finding, adding and removing attributes. The tree above them is
//! [`crate::da::change`].

use offshoot_vfs::Result;
use offshoot_xfs_format::attr::leaf::{self, XattrLeaf};
use offshoot_xfs_format::attr::{XattrContent, XattrFlags, XfsXattr};
use offshoot_xfs_format::da::DaKind;
use offshoot_xfs_format::{FileBlock, XfsGeometry};

use super::OwnedXattr;
use super::fork::ChangedXattrs;
use crate::buffer::malformed;
use crate::da::change::HashPath;

pub(super) const ROOT: FileBlock = FileBlock(0);
const LEAF: DaKind = DaKind::AttrLeaf;

/// An attribute that was found.
#[derive(Clone, Debug)]
pub(super) struct FoundXattr {
    pub(super) path: HashPath,
    /// Its number in the leaf.
    pub(super) index: usize,
    pub(super) value: FoundValue,
}

/// The value of an attribute that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FoundValue {
    Local(Vec<u8>),
    /// In blocks from this one on, with so many bytes.
    Remote(FileBlock, usize),
}

/// All attributes with a namespace and a name.
#[derive(Clone, Debug, Default)]
pub(super) struct FoundXattrs {
    pub(super) complete: Option<FoundXattr>,
    pub(super) incomplete: Vec<FoundXattr>,
}

/// The last hash in a leaf.
fn last_hash(leaf: &XattrLeaf<'_>) -> Option<u32> {
    leaf.hashes.last().map(|entry| entry.hash.get())
}

impl ChangedXattrs<'_, '_> {
    /// All attributes with the namespace and the name of `wanted`.
    pub(super) fn matches(&mut self, wanted: &OwnedXattr) -> Result<FoundXattrs> {
        let hash = wanted.hash()?;
        let mut left = self.inode()?.core().nblocks.get();
        let mut found = FoundXattrs::default();
        let first = self.blocks.find(hash)?;
        let start = first.leaf;
        let mut next = Some(first);
        while let Some(path) = next {
            let block = self.blocks.copy(path.leaf)?;
            let leaf = self.leaf(&block)?;
            for (index, xattr) in leaf.with_hash(hash).filter(|(_, xattr)| wanted.is(xattr)) {
                let value = match xattr.value {
                    XattrContent::Local(value) => FoundValue::Local(value.to_vec()),
                    XattrContent::Remote { block, len } => FoundValue::Remote(block, len),
                };
                let one = FoundXattr { path: path.clone(), index, value };
                if xattr.flags.contains(XattrFlags::INCOMPLETE) {
                    found.incomplete.push(one);
                } else {
                    found.complete = Some(one);
                }
            }
            // The following leaves may have the hash too.
            next = match last_hash(&leaf) {
                Some(last) if last != hash => None,
                _ => self.blocks.next(&path, start)?,
            };
            left = left.checked_sub(1).ok_or_else(|| self.damaged("its leaves do not end"))?;
        }
        Ok(found)
    }

    /// Adds an attribute to the leaf of a path, which has its hash or the place for it.
    pub(super) fn insert(&mut self, path: &HashPath, xattr: &XfsXattr<'_>) -> Result<()> {
        let has_room = self
            .blocks
            .edit((path.leaf, LEAF), |geometry, edit| leaf::insert(geometry, edit, xattr))?;
        if has_room { self.blocks.note_last(path) } else { self.split_leaf(path, xattr) }
    }

    /// Stores the attributes of a leaf and one more in two leaves, or in three when a large one
    /// comes between others.
    fn split_leaf(&mut self, path: &HashPath, xattr: &XfsXattr<'_>) -> Result<()> {
        let geometry = self.geometry();
        let block = self.blocks.copy(path.leaf)?;
        let leaf = self.leaf(&block)?;
        let hash = xattr.hash().map_err(malformed)?;
        let place = leaf.hashes.partition_point(|entry| entry.hash.get() <= hash);
        let mut all: Vec<_> = leaf.xattrs(0).collect();
        all.insert(place.min(all.len()), *xattr);
        let parts = parts(geometry, &all, place);
        self.blocks.split_leaf(path, parts.len(), |index, expected, links| {
            let part = parts.get(index).copied().unwrap_or_default();
            XattrLeaf::encode(geometry, expected, links, part)
        })
    }

    /// Makes the only leaf of a fork without blocks.
    pub(super) fn plant(&mut self, xattrs: &[XfsXattr<'_>]) -> Result<()> {
        let at = self.blocks.create()?;
        let expected = self.blocks.expected(at)?;
        let bytes = XattrLeaf::encode(self.geometry(), &expected, (0, 0), xattrs);
        self.blocks.store(at, &bytes.map_err(malformed)?)
    }

    /// Takes an attribute out of its leaf, which may be empty then, and has its hash still above
    /// it.
    pub(super) fn take_out(&mut self, found: &FoundXattr) -> Result<()> {
        self.blocks.edit((found.path.leaf, LEAF), |geometry, edit| {
            leaf::remove(geometry, edit, found.index)
        })
    }

    /// Removes an attribute. A leaf without attributes goes, and one with few is joined with its
    /// neighbour. The only leaf may be empty then.
    pub(super) fn remove(&mut self, found: &FoundXattr) -> Result<()> {
        self.take_out(found)?;
        let path = &found.path;
        let block = self.blocks.copy(path.leaf)?;
        if self.leaf(&block)?.hashes.is_empty() {
            return self.blocks.drop_leaf(path);
        }
        self.blocks.note_last(path)?;
        self.blocks.join(&path.nodes)
    }

    pub(super) fn mark_incomplete(&mut self, found: &FoundXattr) -> Result<()> {
        self.blocks.edit((found.path.leaf, LEAF), |geometry, edit| {
            leaf::set_incomplete(geometry, edit, found.index, true)
        })
    }

    /// Says that an attribute is complete.
    pub(super) fn mark_complete(&mut self, found: &FoundXattr) -> Result<()> {
        self.blocks.edit((found.path.leaf, LEAF), |geometry, edit| {
            leaf::set_incomplete(geometry, edit, found.index, false)
        })
    }

    /// Says where the value of an attribute is.
    pub(super) fn set_remote(
        &mut self,
        found: &FoundXattr,
        (block, len): (FileBlock, usize),
    ) -> Result<()> {
        self.blocks.edit((found.path.leaf, LEAF), |geometry, edit| {
            leaf::set_remote(geometry, edit, found.index, block, len)
        })
    }
}

/// Splits attributes, of which number `new` did not fit, into as few leaves as possible, about
/// equally full.
fn parts<'x, 'a>(
    geometry: &XfsGeometry,
    all: &'x [XfsXattr<'a>],
    new: usize,
) -> Vec<&'x [XfsXattr<'a>]> {
    let sum = |part: &[XfsXattr<'_>]| part.iter().map(leaf::taken).sum::<usize>();
    let capacity = leaf::capacity(geometry);
    let halves = (1..all.len()).map(|at| all.split_at(at));
    let halves = halves.map(|(left, right)| (sum(left), sum(right), [left, right]));
    let fitting = halves.filter(|(left, right, _)| *left <= capacity && *right <= capacity);
    if let Some((_, _, halves)) = fitting.min_by_key(|(left, right, _)| left.abs_diff(*right)) {
        return halves.to_vec();
    }
    let (left, rest) = all.split_at(new.min(all.len()));
    let (middle, right) = rest.split_at(rest.len().min(1));
    [left, middle, right].into_iter().filter(|part| !part.is_empty()).collect()
}
