//! The sectors of a file, by its extent items.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use offshoot_btrfs::Filesystem;
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::inode::InodeItem;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::FileId;

/// What a sector is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SectorKind {
    Inline,
    Preallocated,
    Data,
}

/// Visits the extent items of a file, each with its offset in the file.
pub(crate) fn for_each_extent(
    fs: &Filesystem,
    file: FileId,
    mut visit: impl FnMut(u64, FileExtent<'_>),
) {
    let volume = fs.volume();
    let root = volume.tree(TreeId(file.dev)).expect("the subvolume");
    let first = Key::new(file.ino, ItemType::EXTENT_DATA, 0);
    let each = |key: Key, data: &[u8]| {
        if key.objectid != file.ino || key.item_type != ItemType::EXTENT_DATA {
            return ControlFlow::Break(());
        }
        visit(key.offset, FileExtent::parse(data).expect("an extent item"));
        ControlFlow::Continue(())
    };
    volume.for_each_item(root, first, each).expect("the tree reads");
}

/// The kinds of a file's sectors, without holes.
pub(crate) fn sectors(fs: &Filesystem, file: FileId) -> BTreeMap<u64, SectorKind> {
    let mut all = BTreeMap::new();
    for_each_extent(fs, file, |at, extent| match extent.body {
        FileExtentBody::Inline(_) => drop(all.insert(at, SectorKind::Inline)),
        FileExtentBody::Hole { .. } => {}
        FileExtentBody::Extent { num_bytes, is_preallocated, .. } => {
            let is = if is_preallocated { SectorKind::Preallocated } else { SectorKind::Data };
            all.extend((at..at + num_bytes).step_by(4096).map(|at| (at / 4096, is)));
        }
    });
    all
}

/// The flags of an inode in the tree.
pub(crate) fn flags(fs: &Filesystem, file: FileId) -> u64 {
    let volume = fs.volume();
    let root = volume.tree(TreeId(file.dev)).expect("the subvolume");
    let key = Key::new(file.ino, ItemType::INODE_ITEM, 0);
    let mut flags = None;
    let first = |found: Key, data: &[u8]| {
        assert_eq!(found, key);
        flags = Some(InodeItem::view(data).expect("an inode item").flags.get());
        ControlFlow::Break(())
    };
    volume.for_each_item(root, key, first).expect("the tree reads");
    flags.expect("the tree has it")
}
