//! Root blocks of subvolumes: each belongs to one subvolume, and no node leads to it.
//!
//! A snapshot begins with a copy of the root block. So the kernel never asks whether the root block
//! of a subvolume is shared: when it writes there, it passes the children on to the new root, and
//! counts no second reference to them. The other tree with this root block would lose them with the
//! next write.

use std::collections::{BTreeMap, BTreeSet};

use offshoot_btrfs_format::{Logical, TreeId};
use parking_lot::Mutex;

use super::finding::{BtrfsFindingCode, BtrfsFindingPlace};
use super::volume::CheckedVolume;
use super::walk::WalkedTree;
use crate::tree::{Blocks as _, TreeRoot};

/// The root blocks of all subvolumes.
pub(super) struct RootBlocks {
    /// The subvolumes with a root block, by their numbers.
    roots: BTreeMap<Logical, Vec<TreeRoot>>,
    /// The root blocks that a node leads to.
    below: Mutex<BTreeSet<Logical>>,
}

impl RootBlocks {
    /// Those of the subvolumes among `trees`.
    pub(super) fn of(trees: &[WalkedTree]) -> Self {
        let mut roots = BTreeMap::<_, Vec<_>>::new();
        for root in trees.iter().map(|tree| tree.root).filter(|root| root.id.is_subvolume()) {
            roots.entry(root.logical).or_default().push(root);
        }
        Self { roots, below: Mutex::default() }
    }

    /// Takes note that a node leads to the block at `child`.
    pub(super) fn pass(&self, child: Logical) {
        if self.roots.contains_key(&child) {
            self.below.lock().insert(child);
        }
    }

    /// Reports the subvolumes that need a root block of their own.
    pub(super) fn check(&self, volume: &CheckedVolume<'_>) {
        let below = self.below.lock();
        for (logical, roots) in &self.roots {
            let is_below = below.contains(logical);
            let keeps_it = if is_below { None } else { keeper(volume, roots) };
            for root in roots.iter().filter(|root| Some(root.id) != keeps_it) {
                let problem = match keeps_it {
                    Some(other) => format!("its root block at {logical} is that of tree {other}"),
                    None => format!("a node leads to its root block at {logical}"),
                };
                let place = BtrfsFindingPlace::Tree(root.id);
                volume.findings.add(BtrfsFindingCode::SharedRoot, place, problem);
            }
        }
    }
}

/// Which of the subvolumes with one root block keeps it: the one that the block was made for, or
/// else the first one.
fn keeper(volume: &CheckedVolume<'_>, roots: &[TreeRoot]) -> Option<TreeId> {
    let first = roots.first()?;
    if roots.len() == 1 {
        return Some(first.id);
    }
    let owner = volume.block(&first.expected()).ok().map(|block| block.header().owner());
    Some(owner.filter(|owner| roots.iter().any(|root| root.id == *owner)).unwrap_or(first.id))
}
