//! Whether a member that is one generation behind has what the newest commit wrote.
//!
//! All blocks of a commit are on every member before the first superblock is written. So a power
//! cut between the superblocks leaves some superblocks one generation behind, on members that have
//! everything. A member that was away for one whole commit looks the same, but holds old data:
//! nothing shows that data without checksums, which was overwritten in place, is old. The blocks of
//! the newest commit tell the two apart. The first member has its copies of these blocks. The
//! second one has the bytes that were there before.
//!
//! A small commit on several members may put none of its blocks on one of them. Then nothing can
//! tell, and the member counts as complete: every power failure can cause this, and refusing the
//! member would make a sound volume read-only.

use std::collections::VecDeque;

use offshoot_btrfs_format::check::ExpectedBlock;
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{ItemType, TreeId};
use offshoot_vfs::Result;

use super::Base;
use crate::block::TreeBlock;
use crate::storage::{MemberOffset, malformed};
use crate::transaction::chunk_tree_root;
use crate::tree::{Blocks, TreeRoot};

/// How many blocks of the newest commit are read, once one of them was found on the member.
const ENOUGH: usize = 64;

/// How many blocks are read to find one that is on the member.
const MOST: usize = 1024;

/// Whether the member at `index` has what the newest commit wrote: of the blocks of that commit
/// that are read, all copies on the member are right.
pub(super) fn has_newest_commit(engine: &Base, index: usize) -> Result<bool> {
    let roots = [engine.root_tree(), chunk_tree_root(engine)];
    let roots = roots.iter().map(TreeRoot::expected);
    let mut blocks: VecDeque<_> = roots.filter(|root| is_newest(engine, root)).collect();
    let mut is_shown = false;
    for looked_at in 0..MOST {
        if is_shown && looked_at >= ENOUGH {
            break;
        }
        let Some(expected) = blocks.pop_front() else { break };
        let places = own_places(engine, index, &expected)?;
        if places.is_empty() && expected.level == 0 && expected.owner != TreeId::ROOT {
            continue;
        }
        let block = engine.block(&expected)?;
        let mut copy = vec![0; block.bytes().len()];
        for place in places {
            engine.storage.read_place(place, 0, &mut copy)?;
            if copy[..] != *block.bytes() {
                return Ok(false);
            }
            is_shown = true;
        }
        let below = blocks_below(&block, expected.owner)?;
        blocks.extend(below.into_iter().filter(|child| is_newest(engine, child)));
        blocks.truncate(MOST);
    }
    Ok(true)
}

fn is_newest(engine: &Base, block: &ExpectedBlock) -> bool {
    block.generation == engine.superblock().generation
}

/// The places on the member that should hold whole copies of a block.
fn own_places(engine: &Base, index: usize, block: &ExpectedBlock) -> Result<Vec<MemberOffset>> {
    let len = u64::from(engine.superblock().node_size);
    let all = engine.storage.write_places(block.logical, len)?;
    let own = all.into_iter().filter(|(member, _, part)| *member == index && *part == (0..len));
    Ok(own.map(|(member, physical, _)| MemberOffset { member, physical }).collect())
}

/// The blocks that a block of the tree `owner` points to. Leaves of the root tree point to roots of
/// trees.
fn blocks_below(block: &TreeBlock, owner: TreeId) -> Result<Vec<ExpectedBlock>> {
    if !block.is_leaf() {
        return Ok((0..block.len()).map(|slot| block.child_expected(slot, owner)).collect());
    }
    let mut roots = Vec::new();
    for slot in (0..block.len()).filter(|_| owner == TreeId::ROOT) {
        let key = block.key(slot);
        let id = TreeId(key.objectid);
        // The roots of relocated or dropped trees may lead to blocks that are gone.
        if key.item_type != ItemType::ROOT_ITEM || id == TreeId::TREE_RELOC {
            continue;
        }
        let item = RootItem::parse(block.data(slot)).map_err(malformed)?;
        if !item.is_dead() {
            let (logical, level, generation) = (item.logical(), item.level, item.generation());
            roots.push(TreeRoot { id, logical, level, generation }.expected());
        }
    }
    Ok(roots)
}
