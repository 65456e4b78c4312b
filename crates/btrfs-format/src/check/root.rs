//! Checks of the roots of trees and the names of subvolumes.

use super::dir::verify_name;
use super::item::{ItemChecked, ItemContext, ensure};
use crate::TreeId;
use crate::block::LEVEL_COUNT;
use crate::root::{ROOT_SUBVOL_DEAD, ROOT_SUBVOL_RDONLY, RootItem, RootRef, RootRefItem};

pub(super) fn verify(item: &ItemContext<'_>) -> ItemChecked {
    ensure!(item.key.objectid != 0, "no tree has the id 0");
    ensure!(
        item.key.objectid != TreeId::TREE_RELOC.0 || item.key.offset != 0,
        "a relocation tree of no tree"
    );
    let root = RootItem::parse(item.data)?;
    item.generation("generation", root.generation.get())?;
    // A writer that moves the root also rewrites this item, so the root is not newer than the leaf.
    let (root_is_of, leaf_is_of) = (root.generation.get(), item.generation);
    ensure!(root_is_of <= leaf_is_of, "generation {root_is_of} in a leaf of {leaf_is_of}");
    item.generation("generation_v2", root.generation_v2.get())?;
    item.generation("last_snapshot", root.last_snapshot.get())?;
    item.aligned("bytenr", root.bytenr.get())?;
    for (what, level) in [("level", root.level), ("drop_level", root.drop_level)] {
        ensure!(level < LEVEL_COUNT, "{what} {level}, the highest is {}", LEVEL_COUNT - 1);
    }
    let unknown = root.flags.get() & !(ROOT_SUBVOL_RDONLY | ROOT_SUBVOL_DEAD);
    ensure!(unknown == 0, "unknown flags {unknown:#x}");
    Ok(())
}

pub(super) fn verify_ref(item: &ItemContext<'_>) -> ItemChecked {
    let root_ref = RootRef::parse(item.data)?;
    item.size(size_of::<RootRefItem>() + root_ref.name.len())?;
    verify_name(root_ref.name)
}

/// Whether the kernel takes `id` as that of a subvolume. Its upper 16 bits are the level of a quota
/// group, which is 0 for that of a subvolume.
pub(super) fn is_fs_tree(id: u64) -> bool {
    TreeId(id).is_subvolume() && id >> 48 == 0
}
