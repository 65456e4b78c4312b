//! Which files have lost something with the blocks that were cut off, as far as names tell.
//!
//! An inode in the range of keys of a lost block is known by the entries that are left of it, or by
//! its other items on both sides of the range:
//!
//! ```text
//! leaf                    lost leaf                       leaf
//! [ 257  258 INODE ]      [ 258 EXTENT .. 261 INODE ]     [ 261 EXTENT  262 ]
//!                           258 may lack a part             261 is gone, but for a part
//!                           259 and 260 are gone, if an entry still leads to them
//! ```

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use offshoot_btrfs_format::dir::dir_entries;
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_vfs::Result;

use super::{CutOff, CutOffBlock, CutOffFile};
use crate::check::{CheckedVolume, KeyRange, path_of_inode};
use crate::tree::TreeRoot;

/// The most files that are listed for a subvolume.
const MOST_FILES: usize = 10_000;

/// The files that are known to have lost something, by inode. The value says where the entry of an
/// inode is that is gone: the directory, and the name in it.
type LostInodes = BTreeMap<u64, Option<(u64, Vec<u8>)>>;

/// Notes for each subvolume which of its files have lost something. `volume` is as it was cut.
///
/// # Errors
/// When the caller has ended the repair.
pub(in crate::repair) fn find(volume: &CheckedVolume<'_>, cuts: &mut [CutOff]) -> Result<()> {
    for cut in cuts {
        let root = volume.tree(cut.subvolume);
        let Some(root) = root.filter(|root| root.id.is_subvolume() && !cut.is_emptied) else {
            continue;
        };
        let mut inodes = torn(volume, root, &cut.blocks);
        add_gone(volume, root, &cut.blocks, &mut inodes);
        volume.require_going_on()?;
        cut.are_more = inodes.len() > MOST_FILES;
        for (ino, entry) in inodes.into_iter().take(MOST_FILES) {
            let is_gone = !has_inode(volume, root, ino);
            let path = match entry {
                Some((dir, name)) => path_of_inode(volume, cut.subvolume, dir).map(|mut path| {
                    if !path.ends_with(b"/") {
                        path.push(b'/');
                    }
                    path.extend_from_slice(&name);
                    path
                }),
                None => path_of_inode(volume, cut.subvolume, ino),
            };
            cut.files.push(CutOffFile { ino, path, is_gone });
        }
    }
    Ok(())
}

/// The inodes at both ends of the lost ranges that have items outside of them.
fn torn(volume: &CheckedVolume<'_>, root: TreeRoot, blocks: &[CutOffBlock]) -> LostInodes {
    let is_left = |ino: u64| {
        let mut is_left = false;
        volume.each_item(root, KeyRange::of_object(ino), &mut |_, _| {
            is_left = true;
            ControlFlow::Break(())
        });
        is_left
    };
    let mut inodes = LostInodes::new();
    for block in blocks {
        // An inode that begins behind the range is whole.
        let behind = block.behind.filter(|key| key.item_type > ItemType::INODE_ITEM);
        for ino in [Some(block.first.objectid), behind.map(|key| key.objectid)] {
            if let Some(ino) = ino.filter(|&ino| is_left(ino)) {
                inodes.insert(ino, None);
            }
        }
    }
    inodes
}

/// Adds the inodes that are gone, and that an entry leads to.
fn add_gone(
    volume: &CheckedVolume<'_>,
    root: TreeRoot,
    blocks: &[CutOffBlock],
    inodes: &mut LostInodes,
) {
    let is_lost = |key: Key| {
        let at = blocks.partition_point(|block| block.first <= key);
        let block = at.checked_sub(1).and_then(|at| blocks.get(at));
        block.is_some_and(|block| block.behind.is_none_or(|behind| key < behind))
    };
    volume.each_item(root, KeyRange::ALL, &mut |key, data| {
        if key.item_type == ItemType::DIR_INDEX {
            for entry in dir_entries(data).flatten().filter(|entry| is_lost(entry.location)) {
                if entry.location.item_type == ItemType::INODE_ITEM
                    && !has_inode(volume, root, entry.location.objectid)
                {
                    let place = Some((key.objectid, entry.name.to_vec()));
                    inodes.insert(entry.location.objectid, place);
                }
            }
        }
        let is_enough = inodes.len() > MOST_FILES;
        if is_enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
}

fn has_inode(volume: &CheckedVolume<'_>, root: TreeRoot, ino: u64) -> bool {
    volume.with_item(root, Key::new(ino, ItemType::INODE_ITEM, 0), |_| Some(())).is_some()
}
