//! What a repair takes from the check: all extents that the trees lead to, and their references.
//!
//! The extent tree is not asked. What it should say follows from the other trees alone: the walk
//! gathers all references, and [`owned`](super::owned) finds out of which kind they are.

use std::collections::{BTreeMap, BTreeSet};

use offshoot_btrfs_format::extent::RefOwner;
use offshoot_btrfs_format::quota::QgroupId;
use offshoot_btrfs_format::{Logical, TreeId};
use offshoot_vfs::{Error, Result, Structure};

use super::owned;
use super::quota::{self, GroupBytes, OwnedBytes, QuotaGroups};
use super::reference::ReferenceTarget;
use super::volume::CheckedVolume;
use super::walk::{Walk, WalkedVolume};

/// A volume whose trees were walked through.
pub(crate) struct ReachedVolume<'w, 'c> {
    walk: Walk<'w, 'c>,
    walked: WalkedVolume,
}

/// An extent, and all references to it.
#[derive(Clone, Debug)]
pub(crate) struct ExtentWithOwners {
    pub(crate) logical: Logical,
    pub(crate) target: ReferenceTarget,
    /// The owners of references to it, and how many references each has. An owner is there once.
    pub(crate) owners: Vec<(RefOwner, u32)>,
    /// Whether the references of what a tree block points to name the block.
    pub(crate) has_full_references: bool,
}

impl<'w, 'c> ReachedVolume<'w, 'c> {
    /// Walks through all trees of `volume`. The extents come in one part in front of the first and
    /// one behind each of `bounds`, which ascend.
    ///
    /// # Errors
    /// When a file for records cannot be written, or the caller has ended the check.
    pub(crate) fn of(volume: &'w CheckedVolume<'c>, bounds: &[u64]) -> Result<Self> {
        let walk = Walk::with_marks(volume, bounds, owned::marks(volume)?);
        let walked = walk.run()?;
        Ok(Self { walk, walked })
    }

    /// The trees of which a block could not be used.
    pub(crate) fn damaged(&self) -> &BTreeSet<TreeId> {
        &self.walked.damaged
    }

    /// How many tree blocks there are. Each counts once.
    pub(crate) fn blocks(&self) -> u64 {
        self.walked.blocks
    }

    /// The volume.
    pub(crate) fn volume(&self) -> &CheckedVolume<'c> {
        self.walk.volume
    }

    /// The subvolumes that were not deleted.
    pub(crate) fn subvolumes(&self) -> impl Iterator<Item = TreeId> {
        let trees = self.walked.trees.iter().filter(|tree| tree.has_inodes);
        trees.map(|tree| tree.root.id).filter(|id| id.is_subvolume())
    }

    /// The numbers of the groups of full quotas; `None` when a deleted subvolume is dropped
    /// half-way, so that it is not known what it still reaches.
    ///
    /// # Errors
    /// When a file of records cannot be written or read, or the caller has ended the check.
    pub(crate) fn full_quotas(
        &self,
        groups: &QuotaGroups,
    ) -> Result<Option<BTreeMap<QgroupId, GroupBytes>>> {
        quota::full_numbers(self.walk.volume, &self.walked, groups)
    }

    /// The bytes of tree blocks of each subvolume that simple quotas count for; `None` when the
    /// volume has no simple quotas.
    pub(crate) fn owned_blocks(&self) -> Option<OwnedBytes> {
        self.walk.owned.bytes()
    }

    /// Calls `visit` with each extent of the part `index`, by address. A part has extents once.
    ///
    /// # Errors
    /// Those of `visit`; when a file of records cannot be read; when two references contradict each
    /// other.
    pub(crate) fn each_extent(
        &self,
        index: usize,
        visit: &mut dyn FnMut(&ExtentWithOwners) -> Result<()>,
    ) -> Result<()> {
        let mut records = self.walk.references.take(index)?;
        let mut extent: Option<ExtentWithOwners> = None;
        while let Some(record) = records.next()? {
            let (logical, owner, target) = (record.logical(), record.owner(), record.target());
            let next = match extent.take() {
                Some(mut same) if same.logical == logical => {
                    if same.target != target {
                        let problem = format!(
                            "references to {:?} and to {target:?} contradict each other",
                            same.target
                        );
                        return Err(Error::corrupt_at(Structure::ExtentItem, logical.0, problem));
                    }
                    match same.owners.last_mut() {
                        Some((last, count)) if *last == owner => *count = count.saturating_add(1),
                        _ => same.owners.push((owner, 1)),
                    }
                    same
                }
                before => {
                    if let Some(before) = before {
                        visit(&before)?;
                    }
                    let has_full_references = self.walk.marks.has_full_references(logical);
                    let owners = vec![(owner, 1)];
                    ExtentWithOwners { logical, target, owners, has_full_references }
                }
            };
            extent = Some(next);
        }
        extent.map_or(Ok(()), |last| visit(&last))
    }
}
