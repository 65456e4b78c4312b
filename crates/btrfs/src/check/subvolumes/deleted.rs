//! Deleted subvolumes, whose trees are still to be given up.
//!
//! The orphan item of a deleted subvolume makes the kernel continue the removal. The progress is
//! the key of a pointer, in a node of the level that the root item names.

use std::sync::Arc;

use offshoot_btrfs_format::TreeId;

use super::roots::{ListedRoot, RootTreeItems};
use crate::block::TreeBlock;
use crate::check::finding::{BtrfsFindingCode, BtrfsFindingPlace};
use crate::check::volume::CheckedVolume;

/// Checks them.
pub(super) fn check(volume: &CheckedVolume<'_>, items: &RootTreeItems) {
    for root in items.subvolumes() {
        let code = BtrfsFindingCode::DeletedSubvolume;
        let place = BtrfsFindingPlace::Item { tree: TreeId::ROOT, key: root.key() };
        if root.refs > 0 {
            if root.drop_progress.objectid != 0 {
                let problem = "the subvolume was not deleted, and its removal has begun";
                volume.findings.add(code, place, problem);
            }
            continue;
        }
        if items.orphans.binary_search(&root.root.id.0).is_err() {
            let problem = "the subvolume was deleted, and no orphan item lists it for removal";
            volume.findings.add(code, place, problem);
        }
        // As in the kernel, the object id alone tells whether there is progress.
        if root.drop_progress.objectid != 0 && is_possible(volume, root) == Some(false) {
            let ListedRoot { drop_progress, drop_level, .. } = root;
            let problem = format!(
                "the removal ended at {drop_progress} in a node of level {drop_level}, which is not \
                 there"
            );
            volume.findings.add(code, place, problem);
        }
    }
}

/// Whether the tree has the pointer at which the removal ended; `None` when the way to it cannot be
/// read.
pub(crate) fn is_possible(volume: &CheckedVolume<'_>, root: &ListedRoot) -> Option<bool> {
    let ListedRoot { root, drop_progress, drop_level, .. } = *root;
    let root = volume.actual_root(root);
    if drop_level == 0 || drop_level > root.level {
        return Some(false);
    }
    let mut block: Arc<TreeBlock> = volume.usable_block(&root.expected())?;
    while block.header().level > drop_level {
        let slot = block.floor(drop_progress).unwrap_or(0);
        block = volume.usable_child(&block, slot, root.id, None)?;
    }
    Some(block.floor(drop_progress).is_some_and(|slot| block.key(slot) == drop_progress))
}
