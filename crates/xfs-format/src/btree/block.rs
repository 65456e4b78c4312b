//! The check of a block, and the views of what it holds.

use zerocopy::FromBytes;

use super::{STRUCTURE, XfsSearchKey, XfsTree};
use crate::group::MOST_LEVELS;
use crate::layout::{ensure, number};
use crate::record::XfsTreeRecord;
use crate::{AgBlock, AgNumber, FsBlock, Ino, Lsn, Malformed, XfsGeometry};

/// What the header of a block says, for short and long ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsBtreeHeader {
    /// The level, 0 for a leaf.
    pub level: u16,
    /// The number of records or children.
    pub count: u16,
    /// The block to the left on the same level: of the group, or of the volume in a long block.
    pub left: Option<u64>,
    /// The block to the right on the same level.
    pub right: Option<u64>,
    /// The LSN of the last change; none in a V4 volume.
    pub lsn: Option<Lsn>,
    /// The number of the group or of the inode that owns the tree; none in a V4 volume.
    pub owner: Option<u64>,
}

/// A verified block of a tree.
#[derive(Clone, Copy, Debug)]
pub struct XfsBtreeBlock<'a> {
    /// The tree.
    pub tree: XfsTree,
    /// Its header.
    pub header: XfsBtreeHeader,
    /// The records, or the keys.
    entries: &'a [u8],
    /// The pointers; none in a leaf.
    pointers: &'a [u8],
}

impl<'a> XfsBtreeBlock<'a> {
    /// Checks everything that the block in `bytes`, read from block `at`, can show by itself, and
    /// that it belongs to file `owner` if the caller knows that.
    ///
    /// # Errors
    /// The first fault, with the expected and the found value.
    pub fn verify(
        bytes: &'a [u8],
        geometry: &XfsGeometry,
        tree: XfsTree,
        at: FsBlock,
        owner: Option<Ino>,
    ) -> Result<Self, Malformed> {
        let (len, size) = (bytes.len(), geometry.block_size());
        ensure!(STRUCTURE, len == size, "{len} bytes, not the {size} of a block");
        let magic = tree.magic(geometry);
        ensure!(
            STRUCTURE,
            magic.is_some_and(|magic| bytes.starts_with(&magic)),
            "not a block of the tree {tree:?}"
        );
        let Some((ag, block)) = geometry.split(at) else {
            return Err(Malformed::new(STRUCTURE, format!("block {at} is not in the volume")));
        };
        let header = XfsBtreeHeader::read(bytes, geometry, tree);
        if geometry.has_checksums() {
            let place = Some(geometry.place(ag, block));
            let owner = if tree.is_long() { owner.map(|ino| ino.0) } else { Some(ag.0.into()) };
            tree.identity().verify(STRUCTURE, bytes, geometry, place, owner)?;
        }
        let (level, count) = (header.level, usize::from(header.count));
        let capacity = tree.capacity(geometry, level);
        ensure!(STRUCTURE, level < MOST_LEVELS, "level {level}");
        ensure!(
            STRUCTURE,
            count <= capacity && (level == 0 || count > 0),
            "{count} entries at level {level}, where {capacity} fit"
        );
        let own = if tree.is_long() { at.0 } else { block.0.into() };
        for sibling in [header.left, header.right].into_iter().flatten() {
            ensure!(
                STRUCTURE,
                sibling != own && is_block(geometry, tree, ag, sibling),
                "sibling {sibling} of block {own}"
            );
        }
        let block = Self::view(bytes, geometry, tree);
        if level == 0 {
            block.verify_records(geometry, ag)?;
        } else {
            block.verify_children(geometry, ag)?;
        }
        Ok(block)
    }

    /// Views a block that [`Self::verify`] has accepted before. One that it has not may give wrong
    /// entries, or none.
    #[must_use]
    #[inline]
    pub fn view(bytes: &'a [u8], geometry: &XfsGeometry, tree: XfsTree) -> Self {
        let header = XfsBtreeHeader::read(bytes, geometry, tree);
        let (level, count) = (header.level, usize::from(header.count));
        let content = bytes.get(tree.header_len(geometry)..).unwrap_or_default();
        let (entry, pointers) = if level == 0 {
            (tree.record_len(), &[][..])
        } else {
            let pointers = content.get(tree.capacity(geometry, level) * tree.key_len()..);
            let pointers = pointers.and_then(|rest| rest.get(..count * tree.pointer_len()));
            (tree.key_len(), pointers.unwrap_or_default())
        };
        let entries = content.get(..count * entry).unwrap_or_default();
        Self { tree, header, entries, pointers }
    }

    /// Checks the records and their order. Those of the reverse map may overlap, but no two of any
    /// tree have one key.
    fn verify_records(&self, geometry: &XfsGeometry, ag: AgNumber) -> Result<(), Malformed> {
        let mut before: Option<XfsSearchKey> = None;
        for (index, record) in self.entries.chunks_exact(self.tree.record_len()).enumerate() {
            self.tree.verify_record(record, geometry, ag).map_err(|error| {
                Malformed::new(error.structure, format!("record {index}: {}", error.problem))
            })?;
            let key = self.tree.low_key(record);
            ensure!(
                STRUCTURE,
                before.is_none_or(|before| before < key),
                "record {index} does not follow the one before it"
            );
            let is_overlapping = self.tree == XfsTree::ReverseMap;
            before = Some(if is_overlapping { key } else { self.tree.high_key(record) });
        }
        Ok(())
    }

    fn verify_children(&self, geometry: &XfsGeometry, ag: AgNumber) -> Result<(), Malformed> {
        let mut before: Option<XfsSearchKey> = None;
        for (index, stored) in self.entries.chunks_exact(self.tree.key_len()).enumerate() {
            let key = self.tree.child_key(stored);
            ensure!(
                STRUCTURE,
                before.is_none_or(|before| before < key)
                    && self.tree.child_high_key(stored).is_none_or(|high| high >= key),
                "the keys of child {index} are out of order"
            );
            before = Some(key);
            let pointer = self.pointer(index).unwrap_or_default();
            ensure!(
                STRUCTURE,
                is_block(geometry, self.tree, ag, pointer),
                "child {index} at block {pointer}"
            );
        }
        Ok(())
    }

    /// The number of records or children.
    #[must_use]
    pub fn len(&self) -> usize {
        self.header.count.into()
    }

    /// Whether it is a leaf without records.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.header.count == 0
    }

    /// Record `index` of a leaf as it is stored.
    #[must_use]
    #[inline]
    pub fn record(&self, index: usize) -> Option<&'a [u8]> {
        (self.header.level == 0).then(|| nth(self.entries, self.tree.record_len(), index))?
    }

    /// The records of a leaf; none of a node or of a tree that has no such records.
    #[must_use]
    pub fn records<R: XfsTreeRecord>(&self) -> &'a [R] {
        if self.header.level > 0 || !R::TREES.contains(&self.tree) {
            return &[];
        }
        <[R]>::ref_from_bytes(self.entries).unwrap_or_default()
    }

    /// The lowest key of record or child `index`.
    #[must_use]
    #[inline]
    pub fn key(&self, index: usize) -> Option<XfsSearchKey> {
        match self.record(index) {
            Some(record) => Some(self.tree.low_key(record)),
            None => self.stored_key(index).map(|stored| self.tree.child_key(stored)),
        }
    }

    /// The highest key of record `index`, or of child `index` in the reverse map.
    #[must_use]
    pub fn high_key(&self, index: usize) -> Option<XfsSearchKey> {
        match self.record(index) {
            Some(record) => Some(self.tree.high_key(record)),
            None => self.tree.child_high_key(self.stored_key(index)?),
        }
    }

    /// What a node stores about child `index` besides the pointer.
    #[must_use]
    #[inline]
    pub fn stored_key(&self, index: usize) -> Option<&'a [u8]> {
        (self.header.level > 0).then(|| nth(self.entries, self.tree.key_len(), index))?
    }

    /// The block of child `index`: of the group, or of the volume in a long block.
    #[must_use]
    #[inline]
    pub fn pointer(&self, index: usize) -> Option<u64> {
        let len = self.tree.pointer_len();
        nth(self.pointers, len, index).map(|pointer| number(pointer, 0, len))
    }
}

/// Piece `index` of those of `len` bytes.
#[inline]
fn nth(bytes: &[u8], len: usize, index: usize) -> Option<&[u8]> {
    bytes.get(index.checked_mul(len)?..)?.get(..len)
}

/// Whether a tree of group `ag` may have a block there.
fn is_block(geometry: &XfsGeometry, tree: XfsTree, ag: AgNumber, block: u64) -> bool {
    if tree.is_long() {
        return geometry.is_usable_extent(FsBlock(block), 1);
    }
    u32::try_from(block).is_ok_and(|block| geometry.is_usable(ag, AgBlock(block)))
}

impl XfsBtreeHeader {
    /// Reads the header of a block, whose bytes may be those of any block.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "numbers of two bytes")]
    #[inline]
    pub fn read(bytes: &[u8], geometry: &XfsGeometry, tree: XfsTree) -> Self {
        let len = tree.pointer_len();
        let sibling = |at: usize| {
            let block = number(bytes, at, len);
            let null = if tree.is_long() { FsBlock::NULL.0 } else { AgBlock::NULL.0.into() };
            (block != null).then_some(block)
        };
        let identity = tree.identity();
        let v5 = geometry.has_checksums();
        Self {
            level: number(bytes, 4, 2) as u16,
            count: number(bytes, 6, 2) as u16,
            left: sibling(8),
            right: sibling(8 + len),
            lsn: identity.lsn_of(bytes).filter(|_| v5),
            owner: identity.owner.filter(|_| v5).map(|(at, len)| number(bytes, at, len)),
        }
    }
}
