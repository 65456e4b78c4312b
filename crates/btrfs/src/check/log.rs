//! A pending tree log: every block of it must be readable.
//!
//! A log of a subvolume that is not there is no finding: the kernel skips it when it replays the
//! others. All blocks of a log have the generation after that of the superblock.

use offshoot_btrfs_format::check::ExpectedBlock;
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{Generation, ItemType, Key, Logical, TreeId};
use offshoot_vfs::Result;

use super::finding::{BtrfsFindingCode, BtrfsFindingPlace};
use super::volume::CheckedVolume;
use crate::block::TreeBlock;
use crate::tree::{Blocks, TreeRoot};

/// Checks the log, if one is pending.
///
/// # Errors
/// When the caller has ended the check.
pub(super) fn check(volume: &CheckedVolume<'_>) -> Result<()> {
    let superblock = volume.superblock();
    // The log of a volume that is written changes meanwhile.
    if !superblock.has_pending_log() || volume.is_written {
        return Ok(());
    }
    let generation = Generation(superblock.generation.0.saturating_add(1));
    let tree_of_logs = TreeRoot {
        id: TreeId::TREE_LOG,
        logical: Logical(superblock.item.log_root.get()),
        level: superblock.item.log_root_level,
        generation,
    };
    let mut logs = Vec::new();
    each_leaf(volume, &tree_of_logs.expected(), None, &mut |leaf| {
        for slot in 0..leaf.len() {
            match log_root(leaf.key(slot), leaf.data(slot), generation) {
                Ok(root) => logs.push(root),
                Err(problem) => {
                    let key = leaf.key(slot);
                    let place = BtrfsFindingPlace::Item { tree: TreeId::TREE_LOG, key };
                    volume.findings.add(BtrfsFindingCode::TreeLog, place, problem);
                }
            }
        }
    });
    for root in logs {
        each_leaf(volume, &root.expected(), None, &mut |_| {});
    }
    volume.require_going_on()
}

/// The log tree that an item of the tree of logs leads to, or what is wrong with the item.
fn log_root(
    key: Key,
    data: &[u8],
    generation: Generation,
) -> std::result::Result<TreeRoot, String> {
    let is_log = key.item_type == ItemType::ROOT_ITEM
        && key.objectid == TreeId::TREE_LOG.0
        && TreeId(key.offset).is_subvolume();
    if !is_log {
        return Err("not the log of a subvolume".to_owned());
    }
    let item = RootItem::parse(data).map_err(|error| error.problem.to_string())?;
    if item.generation() != generation {
        return Err(format!("generation {generation} expected, {} found", item.generation()));
    }
    let (logical, level) = (item.logical(), item.level);
    Ok(TreeRoot { id: TreeId::TREE_LOG, logical, level, generation })
}

/// Calls `visit` with each leaf below the block that `expected` describes, whose keys are below
/// `upper`. Blocks that cannot be used are findings.
fn each_leaf(
    volume: &CheckedVolume<'_>,
    expected: &ExpectedBlock,
    upper: Option<Key>,
    visit: &mut dyn FnMut(&TreeBlock),
) {
    let code = BtrfsFindingCode::TreeLog;
    let place = BtrfsFindingPlace::Block { tree: TreeId::TREE_LOG, logical: expected.logical };
    let block = match volume.block(expected) {
        Ok(block) => block,
        Err(error) => return volume.findings.add_error(code, place, &error),
    };
    let last = block.len().checked_sub(1).map(|slot| block.key(slot));
    if let (Some(last), Some(upper)) = (last, upper)
        && last >= upper
    {
        let problem = format!("its last key {last} is not below {upper}, the next in its node");
        return volume.findings.add(code, place, problem);
    }
    if block.is_leaf() {
        return visit(&block);
    }
    for slot in 0..block.len() {
        if volume.is_over() {
            return;
        }
        let upper = if slot + 1 < block.len() { Some(block.key(slot + 1)) } else { upper };
        each_leaf(volume, &block.child_expected(slot, TreeId::TREE_LOG), upper, visit);
    }
}
