//! What the inodes of a subvolume say of themselves and of each other.

use offshoot_vfs::Result;

use super::walk::{GatheredRecords, Walk, WalkedTree};
use crate::block::TreeBlock;

/// What a part of a subvolume says, from a leaf to the whole tree.
#[derive(Clone, Debug, Default)]
pub(super) struct SubtreeSummary {
    has_gap: bool,
}

impl SubtreeSummary {
    /// A part of the tree that cannot be read.
    pub(super) fn gap() -> Self {
        Self { has_gap: true }
    }

    /// Whether all of the part could be read.
    pub(super) fn is_whole(&self) -> bool {
        !self.has_gap
    }
}

/// The summary of a leaf. Adds its references to data to `records`, if there are any.
pub(super) fn leaf(
    _walk: &Walk<'_, '_>,
    _tree: &WalkedTree,
    _leaf: &TreeBlock,
    _records: Option<&mut GatheredRecords>,
) -> SubtreeSummary {
    SubtreeSummary::default()
}

/// The summary of two parts that follow each other in a tree.
pub(super) fn join(
    _walk: &Walk<'_, '_>,
    _tree: &WalkedTree,
    left: SubtreeSummary,
    right: &SubtreeSummary,
) -> SubtreeSummary {
    SubtreeSummary { has_gap: left.has_gap || right.has_gap }
}

/// Finishes a tree. Returns how many inodes it has.
pub(super) fn finish(
    _walk: &Walk<'_, '_>,
    _tree: &WalkedTree,
    _summary: SubtreeSummary,
) -> Result<u64> {
    Ok(0)
}
