//! References that trees have to extents, as records that are sorted.

use offshoot_btrfs_format::extent::RefOwner;
use offshoot_btrfs_format::{Generation, Logical, TreeId};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::sort::SortedRecord;

/// A reference to an extent, as integers that are compared in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct ReferenceRecord {
    logical: u64,
    /// The kind in the lowest byte, the level of a tree block in the next one.
    kind: u64,
    /// The tree, or the block with the reference.
    from: u64,
    ino: u64,
    /// The file offset at which the beginning of the extent would be, in bytes.
    offset: u64,
    /// The length of a data extent in bytes, or the generation of a tree block.
    size: u64,
}

// In the order of owners.
const TREE_BLOCK: u64 = 0;
const FILE: u64 = 1;
const SHARED_BLOCK: u64 = 2;
const SHARED_DATA: u64 = 3;

/// What a reference leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReferenceTarget {
    /// A tree block.
    Block { level: u8, generation: Generation },
    /// An extent of data, with its length on disk in bytes.
    Data { len: u64 },
}

impl ReferenceRecord {
    /// A reference to the extent at `logical`.
    pub(super) fn new(logical: Logical, owner: RefOwner, target: ReferenceTarget) -> Self {
        let (kind, from, ino, offset) = match owner {
            RefOwner::Tree { root: tree } => (TREE_BLOCK, tree.0, 0, 0),
            RefOwner::Block { parent: node } => (SHARED_BLOCK, node.0, 0, 0),
            RefOwner::File { root, ino, offset } => (FILE, root.0, ino, offset),
            RefOwner::Leaf { parent: leaf } => (SHARED_DATA, leaf.0, 0, 0),
        };
        let (level, size) = match target {
            ReferenceTarget::Block { level, generation } => (level, generation.0),
            ReferenceTarget::Data { len } => (0, len),
        };
        let kind = kind | u64::from(level) << 8;
        Self { logical: logical.0, kind, from, ino, offset, size }
    }

    /// The address of the extent.
    pub(super) fn logical(&self) -> Logical {
        Logical(self.logical)
    }

    /// The owner of the reference.
    pub(super) fn owner(&self) -> RefOwner {
        match self.kind & 0xff {
            TREE_BLOCK => RefOwner::Tree { root: TreeId(self.from) },
            SHARED_BLOCK => RefOwner::Block { parent: Logical(self.from) },
            FILE => RefOwner::File { root: TreeId(self.from), ino: self.ino, offset: self.offset },
            _ => RefOwner::Leaf { parent: Logical(self.from) },
        }
    }

    /// What it leads to.
    pub(super) fn target(&self) -> ReferenceTarget {
        if matches!(self.kind & 0xff, TREE_BLOCK | SHARED_BLOCK) {
            let level = u8::try_from(self.kind >> 8 & 0xff).unwrap_or(u8::MAX);
            ReferenceTarget::Block { level, generation: Generation(self.size) }
        } else {
            ReferenceTarget::Data { len: self.size }
        }
    }
}

impl SortedRecord for ReferenceRecord {
    fn address(&self) -> u64 {
        self.logical
    }
}

/// A range of data that a file refers to, as integers that are compared in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct DataUse {
    /// The address of the first byte.
    pub(super) start: u64,
    /// In bytes.
    pub(super) len: u64,
    /// The address of the extent that the range is in.
    pub(super) extent: u64,
    /// Whether there must be checksums (1), or must not be any (0).
    has_checksums: u64,
    /// The subvolume.
    pub(super) subvolume: u64,
    /// The inode.
    pub(super) ino: u64,
}

impl DataUse {
    /// A range with or without checksums.
    pub(super) fn new(
        range: std::ops::Range<u64>,
        extent: Logical,
        has_checksums: bool,
        (subvolume, ino): (TreeId, u64),
    ) -> Self {
        Self {
            start: range.start,
            len: range.end.saturating_sub(range.start),
            extent: extent.0,
            has_checksums: u64::from(has_checksums),
            subvolume: subvolume.0,
            ino,
        }
    }

    /// Whether there must be checksums. Otherwise there must not be any.
    pub(super) fn has_checksums(&self) -> bool {
        self.has_checksums != 0
    }
}

impl SortedRecord for DataUse {
    fn address(&self) -> u64 {
        self.start
    }
}
