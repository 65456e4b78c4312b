//! Root blocks of their own for subvolumes whose root block another tree has as well.
//!
//! ```text
//!   item of 258 ──┐                          item of 258 ──> its own root, if the extent tree
//!   item of 256 ──┴─> root of 256     ──>                    still lists it and nothing has it,
//!                                                            else a copy of the root of 256
//!                                            item of 256 ──> root of 256
//! ```
//!
//! With a copy, both trees share the children, as a snapshot and its source do. The kernel looks
//! for other owners of a block only if the block is not newer than the last snapshot of the tree.
//! So all subvolumes count this repair as their last snapshot.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use offshoot_btrfs_format::TreeId;

use super::SubvolumeMender;
use crate::check::{
    BtrfsFinding, BtrfsFindingCode as Code, BtrfsFindingPlace, CheckedVolume, KeyRange,
};
use crate::repair::editor::TreeEdits;
use crate::repair::roots::lead_to;
use crate::tree::TreeRoot;

/// The subvolumes that get another root block.
#[derive(Default)]
pub(super) struct OwnRoots {
    /// Those whose root item leads to their own tree again.
    found: BTreeSet<TreeId>,
    /// Those that get a copy of their root block.
    copied: BTreeSet<TreeId>,
}

impl OwnRoots {
    /// Completes the edits of all trees. An edit copies the root block, even an empty one. Edits
    /// of a tree that is another one now are dropped.
    pub(super) fn finish(&self, trees: &mut BTreeMap<TreeId, TreeEdits>) {
        for &id in &self.copied {
            trees.entry(id).or_default();
        }
        trees.retain(|id, _| !self.found.contains(id));
    }
}

impl SubvolumeMender<'_, '_> {
    /// Gives subvolumes a root block of their own. A deleted one becomes empty.
    pub(super) fn mend_shared_roots(&mut self, findings: &[BtrfsFinding]) {
        let shared = findings.iter().filter(|one| one.code == Code::SharedRoot);
        let shared: BTreeSet<_> = shared.filter_map(subvolume_of).collect();
        for &id in &shared {
            let Some(listed) = self.items.root(id).copied() else { continue };
            if listed.refs == 0 {
                self.emptied.insert(id);
            } else if let Some(own) = lost_root(self.volume, id, findings) {
                self.own_roots.found.insert(id);
                self.change_root(id, |item| lead_to(item, own));
            } else {
                self.own_roots.copied.insert(id);
            }
        }
        if shared.is_empty() {
            return;
        }
        let all: Vec<_> = self.items.subvolumes().map(|listed| listed.root.id).collect();
        let generation = self.generation.0;
        for id in all {
            self.change_root(id, |item| item.last_snapshot = generation.into());
        }
    }
}

/// The subvolume that a finding is about.
fn subvolume_of(finding: &BtrfsFinding) -> Option<TreeId> {
    match finding.place {
        BtrfsFindingPlace::Tree(id) => Some(id),
        _ => None,
    }
}

/// The root of the tree that was made for a subvolume and that nothing refers to: the only block of
/// the highest level, if all below it can be read.
fn lost_root(
    volume: &CheckedVolume<'_>,
    id: TreeId,
    findings: &[BtrfsFinding],
) -> Option<TreeRoot> {
    let mut highest = Vec::<TreeRoot>::new();
    for finding in findings.iter().filter(|one| one.code == Code::UnusedExtent) {
        let BtrfsFindingPlace::Logical(logical) = finding.place else { continue };
        let Some(root) = volume.found_root(id, logical) else { continue };
        match highest.first().map(|other| root.level.cmp(&other.level)) {
            Some(Ordering::Less) => {}
            Some(Ordering::Equal) => highest.push(root),
            Some(Ordering::Greater) | None => highest = vec![root],
        }
    }
    let &[root] = highest.as_slice() else { return None };
    let walked = volume.each_item(root, KeyRange::ALL, &mut |_, _| ControlFlow::Continue(()));
    walked.is_whole().then_some(root)
}
