//! Our own check of a state: it reads every item of every tree, and compares the accounts of space.
//!
//! In every block group, extents and free ranges lie side by side, without a gap, from its
//! beginning to its end. The block group item counts as used the sum of its extents. The superblock
//! counts the sum of all block groups.

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use offshoot_btrfs::BtrfsVolume;
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::space::BlockGroupItem;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Error, Result, Structure};

/// Extents and free ranges by their start: the end, and whether the range is free.
type SpaceMap = BTreeMap<u64, (u64, bool)>;

/// Reads every tree and compares the accounts.
pub(crate) fn check(volume: &Arc<BtrfsVolume>) -> Result<()> {
    let mut trees = vec![TreeId::CHUNK];
    visit(volume, TreeId::ROOT, |key, data| {
        // The blocks of a deleted subvolume may be freed already, and hold other things.
        let is_dead = || RootItem::parse(data).expect("the item was verified").is_dead();
        if key.item_type == ItemType::ROOT_ITEM && !is_dead() {
            trees.push(TreeId(key.objectid));
        }
    })?;
    for id in trees {
        visit(volume, id, |_, _| {})?;
    }
    let map = map(volume)?;
    let mut used = 0;
    for (group, claimed) in groups(volume)? {
        let found = used_in(&map, &group)?;
        if found != claimed {
            let problem = format!("{claimed} bytes are used, by the extents {found}");
            return Err(Error::corrupt_at(Structure::BlockGroup, group.start, problem));
        }
        used += found;
    }
    let claimed = volume.superblock().item.bytes_used.get();
    if used != claimed {
        let problem = format!("{claimed} bytes are used, by the block groups {used}");
        return Err(Error::corrupt(Structure::Superblock, problem));
    }
    Ok(())
}

fn visit(volume: &Arc<BtrfsVolume>, id: TreeId, mut visit: impl FnMut(Key, &[u8])) -> Result<()> {
    let root = if id == TreeId::ROOT { volume.root_tree() } else { volume.tree(id)? };
    volume.for_each_item(root, Key::MIN, |key, data| {
        visit(key, data);
        ControlFlow::Continue(())
    })
}

/// All extents and all free ranges.
fn map(volume: &Arc<BtrfsVolume>) -> Result<SpaceMap> {
    let mut map = SpaceMap::new();
    let node_size = u64::from(volume.superblock().node_size);
    visit(volume, TreeId::EXTENT, |key, _| {
        let len = match key.item_type {
            ItemType::EXTENT_ITEM => key.offset,
            ItemType::METADATA_ITEM => node_size,
            _ => return,
        };
        map.insert(key.objectid, (key.objectid + len, false));
    })?;
    let sector = u64::from(volume.superblock().sector_size);
    let mut twice = None;
    visit(volume, TreeId::FREE_SPACE, |key, data| {
        let mut free = |at: u64, len: u64| {
            if map.insert(at, (at + len, true)).is_some() {
                twice = Some(at);
            }
        };
        match key.item_type {
            ItemType::FREE_SPACE_EXTENT => free(key.objectid, key.offset),
            ItemType::FREE_SPACE_BITMAP => {
                let is_set = |bit: &u64| {
                    let byte = usize::try_from(bit / 8).expect("a bitmap is small");
                    data[byte] & (1 << (bit % 8)) != 0
                };
                let bits = (0..key.offset / sector).filter(is_set);
                bits.for_each(|bit| free(key.objectid + bit * sector, sector));
            }
            _ => {}
        }
    })?;
    match twice {
        Some(at) => Err(Error::corrupt_at(
            Structure::FreeSpaceTree,
            at,
            "it is used as well, or twice free",
        )),
        None => Ok(map),
    }
}

/// The block groups, and how many bytes each says are used.
fn groups(volume: &Arc<BtrfsVolume>) -> Result<Vec<(Range<u64>, u64)>> {
    let mut groups = Vec::new();
    visit(volume, TreeId::BLOCK_GROUP, |key, data| {
        let item = BlockGroupItem::view(data).expect("the item was verified");
        groups.push((key.objectid..key.objectid + key.offset, item.used.get()));
    })?;
    Ok(groups)
}

/// How many bytes the extents of a block group take.
fn used_in(map: &SpaceMap, group: &Range<u64>) -> Result<u64> {
    let (mut at, mut used) = (group.start, 0);
    for (&start, &(end, is_free)) in map.range(group.clone()) {
        if start != at {
            let problem = format!("the next extent or free range begins at {start}");
            return Err(Error::corrupt_at(Structure::BlockGroup, at, problem));
        }
        used += if is_free { 0 } else { end - start };
        at = end;
    }
    if at == group.end {
        Ok(used)
    } else {
        Err(Error::corrupt_at(Structure::BlockGroup, at, "nothing up to its end"))
    }
}
