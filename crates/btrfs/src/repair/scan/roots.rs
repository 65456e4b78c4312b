//! Which of the found blocks is the root of the root tree.
//!
//! Of each transaction the highest block of the root tree may be its root. A root is *whole* when
//!
//! 1. all blocks below it and below the roots in it are there, but for those of trees that a repair
//!    makes anew,
//! 2. its own extent tree lists it, and no higher block of the root tree. So a block that was below
//!    a lost root is none, and neither is one that the transaction wrote before it was complete.
//!
//! Where the extent tree cannot be read, no older block of the root tree may be higher.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use offshoot_btrfs_format::extent::{EXTENT_FLAG_TREE_BLOCK, InlineRef, ParsedExtent};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::Result;

use super::search::{FoundBlock, ScannedVolume};
use crate::check::{CheckedVolume, KeyRange, ReachedVolume};

/// The trees that a repair makes anew, so that blocks of them may be lost.
const MADE_ANEW: [TreeId; 4] =
    [TreeId::EXTENT, TreeId::BLOCK_GROUP, TreeId::FREE_SPACE, TreeId::DEV];

/// The trees that every volume has.
const REQUIRED: [TreeId; 3] = [TreeId::EXTENT, TreeId::DEV, TreeId::FS];

/// Why `root`, through which `volume` is open, is not whole; `None` when it is.
///
/// # Errors
/// When a file for records cannot be written, or the caller has ended the repair.
pub(super) fn why_not_whole(
    volume: &CheckedVolume<'_>,
    scanned: &ScannedVolume,
    root: &FoundBlock,
) -> Result<Option<String>> {
    let trees = trees(volume);
    let lacking = REQUIRED.iter().find(|tree| !trees.contains(tree));
    if let Some(lacking) = lacking {
        return Ok(Some(format!("it has no {lacking}")));
    }
    if let Some(problem) = why_no_root(volume, scanned, root) {
        return Ok(Some(problem));
    }
    let reached = ReachedVolume::of(volume, &[])?;
    let lost = reached.damaged().iter().filter(|tree| !MADE_ANEW.contains(tree));
    let lost: Vec<_> = lost.map(ToString::to_string).collect();
    Ok((!lost.is_empty()).then(|| format!("blocks of the trees {} are lost", lost.join(", "))))
}

/// Whether `root`, through which `volume` is open, leads to the top level and nothing says that it
/// is no root. Below it blocks may be lost.
pub(super) fn may_be_root(
    volume: &CheckedVolume<'_>,
    scanned: &ScannedVolume,
    root: &FoundBlock,
) -> bool {
    trees(volume).contains(&TreeId::FS) && why_no_root(volume, scanned, root).is_none()
}

/// The trees that have a root item.
pub(super) fn trees(volume: &CheckedVolume<'_>) -> BTreeSet<TreeId> {
    let mut trees = BTreeSet::new();
    volume.each_item(volume.root_tree(), KeyRange::ALL, &mut |key, _| {
        if key.item_type == ItemType::ROOT_ITEM {
            trees.insert(TreeId(key.objectid));
        }
        ControlFlow::Continue(())
    });
    trees
}

/// What the extent tree, or else an older block, says against it that `root` is a root.
fn why_no_root(
    volume: &CheckedVolume<'_>,
    scanned: &ScannedVolume,
    root: &FoundBlock,
) -> Option<String> {
    let (mut is_listed, mut highest) = (false, 0);
    let walked = volume.tree(TreeId::EXTENT).map(|tree| {
        volume.each_item(tree, KeyRange::ALL, &mut |key, data| {
            if let Some(level) = level_in_root_tree(key, data) {
                is_listed |= (key.objectid, level) == (root.logical.0, root.level.into());
                highest = highest.max(level);
            }
            ControlFlow::Continue(())
        })
    });
    if walked.is_some_and(crate::check::Walked::is_whole) {
        return if highest > u64::from(root.level) {
            Some("its extent tree lists a higher block of the root tree".into())
        } else if is_listed {
            None
        } else {
            Some("its extent tree does not list it".into())
        };
    }
    let older = scanned.of_tree(TreeId::ROOT).filter(|one| one.generation < root.generation);
    let is_lower = older.map(|one| one.level).max().is_some_and(|level| level > root.level);
    is_lower
        .then(|| "an older block of the root tree is higher, and the extent tree is lost".into())
}

/// The level of a block of the root tree, by its item in the extent tree.
fn level_in_root_tree(key: Key, data: &[u8]) -> Option<u64> {
    if !matches!(key.item_type, ItemType::METADATA_ITEM | ItemType::EXTENT_ITEM) {
        return None;
    }
    let parsed = ParsedExtent::parse(key.item_type, data).ok()?;
    let is_block = parsed.item.flags.get() & EXTENT_FLAG_TREE_BLOCK != 0;
    let mut refs = parsed.inline_refs();
    let is_own = |one| matches!(one, Ok(InlineRef::TreeBlock(tree)) if tree == TreeId::ROOT.0);
    if !is_block || !refs.any(is_own) {
        return None;
    }
    match parsed.block {
        Some(block) => Some(block.level.into()),
        None => Some(key.offset),
    }
}
