//! The items of block groups against the chunks.

use std::ops::ControlFlow;

use offshoot_btrfs_format::chunk::{BlockGroupFlags, Chunk};
use offshoot_btrfs_format::space::BlockGroupItem;
use offshoot_btrfs_format::{ItemType, Key};

use super::super::finding::{BtrfsFindingCode, BtrfsFindingPlace};
use super::super::volume::{CheckedVolume, KeyRange};
use super::space::CheckedGroup;
use crate::tree::TreeRoot;

/// What the item of a block group says.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupItem {
    pub(super) used: u64,
    flags: BlockGroupFlags,
}

/// The block groups of `chunks`, which are those of a partition by their address. `tree` has the
/// items of block groups.
pub(super) fn groups(
    volume: &CheckedVolume<'_>,
    tree: TreeRoot,
    chunks: &[Chunk],
) -> Vec<CheckedGroup> {
    chunks.iter().map(|chunk| CheckedGroup::new(chunk, item_of(volume, tree, chunk))).collect()
}

/// The item of the block group of a chunk. Reports what is wrong with it.
fn item_of(volume: &CheckedVolume<'_>, tree: TreeRoot, chunk: &Chunk) -> Option<GroupItem> {
    let key = Key::new(chunk.start.0, ItemType::BLOCK_GROUP_ITEM, chunk.length);
    let mut found = None;
    let walked = volume.each_item(tree, KeyRange { first: key, last: key }, &mut |_, data| {
        found = BlockGroupItem::view(data).ok().map(|item| GroupItem {
            used: item.used.get(),
            flags: BlockGroupFlags(item.flags.get()),
        });
        ControlFlow::Break(())
    });
    let (code, place) = (BtrfsFindingCode::BlockGroup, BtrfsFindingPlace::Logical(chunk.start));
    match found {
        Some(item) if item.flags != chunk.flags => {
            let (chunk, item) = (chunk.flags.0, item.flags.0);
            let what = "type of the block group of the chunk";
            volume.findings.differs(
                code,
                place,
                what,
                format_args!("{chunk:#x}"),
                format_args!("{item:#x}"),
            );
        }
        None if walked.is_whole() => {
            let problem =
                format!("the chunk of {} bytes has no item of its block group", chunk.length);
            volume.findings.add(code, place, problem);
        }
        _ => {}
    }
    found
}

/// Reports the item of a block group that no chunk has. `chunks` are those of the partition.
pub(super) fn require_chunk(
    volume: &CheckedVolume<'_>,
    tree: TreeRoot,
    chunks: &[Chunk],
    key: Key,
) {
    let at = chunks.binary_search_by_key(&key.objectid, |chunk| chunk.start.0);
    let chunk = at.ok().and_then(|at| chunks.get(at));
    if chunk.is_some_and(|chunk| chunk.length == key.offset) {
        return;
    }
    let place = BtrfsFindingPlace::Item { tree: tree.id, key };
    volume.findings.add(BtrfsFindingCode::BlockGroup, place, "no chunk has this block group");
}
