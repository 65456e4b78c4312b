//! Subvolumes, their names and UUIDs, and their removal; trees that must exist.
//!
//! ```text
//! root tree, read once ──> root items, links, orphans          roots
//!   links: ROOT_REF <─> ROOT_BACKREF, entries in directories   links
//!   UUIDs of root items <─> UUID tree                          uuids
//!   deleted subvolumes: orphan item, progress                  deleted
//! ```
//!
//! What is read takes some hundred bytes for each subvolume. Both sides of each comparison are in
//! the order of keys, so a subvolume costs two look-ups, of the entries with its name.
//!
//! # What is sound
//!
//! - A snapshot has entries of subvolumes that were nested in its source, and no links to them.
//! - An orphan item of the root tree without a subvolume: the kernel removes it. It may also be
//!   that of an inode of the root tree.
//! - A UUID tree whose generation in the superblock is not that of the last commit: the kernel
//!   builds it anew.

mod deleted;
mod links;
mod roots;
mod uuids;

use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::superblock::{CompatRo, Incompat};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::Result;

use super::finding::{BtrfsFindingCode, BtrfsFindingPlace};
use super::volume::CheckedVolume;
pub(crate) use deleted::is_possible as is_possible_removal;
pub(crate) use roots::{LinkPlace, ListedRoot, RootTreeItems};

/// Checks them.
///
/// # Errors
/// When the caller has ended the check.
pub(super) fn check(volume: &CheckedVolume<'_>) -> Result<()> {
    let items = RootTreeItems::read(volume);
    if items.is_whole {
        check_trees(volume, &items);
        links::check(volume, &items);
        deleted::check(volume, &items);
        uuids::check(volume, &items);
    }
    volume.require_going_on()
}

/// Checks that the trees exist that every volume has, and those that its features require.
fn check_trees(volume: &CheckedVolume<'_>, items: &RootTreeItems) {
    let (incompat, compat_ro) = (volume.superblock().incompat, volume.superblock().compat_ro);
    let required = [
        (TreeId::EXTENT, true),
        (TreeId::DEV, true),
        (TreeId::FS, true),
        (TreeId::CSUM, true),
        (TreeId::DATA_RELOC, true),
        (TreeId::FREE_SPACE, compat_ro.has(CompatRo::FREE_SPACE_TREE)),
        (TreeId::BLOCK_GROUP, compat_ro.has(CompatRo::BLOCK_GROUP_TREE)),
        (TreeId::RAID_STRIPE, incompat.has(Incompat::RAID_STRIPE_TREE)),
    ];
    for (id, is_required) in required {
        if is_required && items.root(id).is_none() {
            let problem = "the root tree does not have the root of this tree";
            let place = BtrfsFindingPlace::Tree(id);
            volume.findings.add(BtrfsFindingCode::MissingTree, place, problem);
        }
    }
    for &key in &items.strays {
        let place = BtrfsFindingPlace::Item { tree: TreeId::ROOT, key };
        let problem = "behind the root of a tree of which there is only one";
        volume.findings.add(BtrfsFindingCode::RootItem, place, problem);
    }
    if !items.has_root_dir {
        let key = Key::new(objectid::ROOT_TREE_DIR, ItemType::INODE_ITEM, 0);
        let place = BtrfsFindingPlace::Item { tree: TreeId::ROOT, key };
        let problem = "the directory that names the default subvolume is missing";
        volume.findings.add(BtrfsFindingCode::MissingTree, place, problem);
    }
}
