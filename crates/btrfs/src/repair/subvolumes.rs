//! Subvolumes, their links, entries and UUIDs, mended from each other.
//!
//! | | what is believed | what is made from it |
//! |---|---|---|
//! | level and generation of a root | the root block | its root item |
//! | a root block that another tree has | unused blocks, or a copy | its own root ([`own_roots`]) |
//! | a deleted subvolume that no item lists | the root item | the orphan item |
//! | one that counts as deleted, and has links and entries | these | its root item |
//! | progress of a removal that is impossible | | the deleted subvolume becomes empty |
//! | both links of a subvolume, and its entries | what most of them say | the others ([`links`]) |
//! | a link of a subvolume that is not there | | it is removed, with its entries |
//! | a subvolume without links | | a name in `lost+found` of the top level |
//! | a default subvolume that is not there | | the top level is the default one |
//! | the UUID tree | the root items | its items |
//! | the tree for data on its way, with a bad block | | it becomes empty |
//!
//! An orphan item of a subvolume that is not there is sound: the kernel removes it.

mod links;
mod own_roots;
mod uuids;

use std::collections::{BTreeMap, BTreeSet};

use offshoot_btrfs_format::dir::{DirItemEntry, dir_entries};
use offshoot_btrfs_format::encode::{dir_entry, inode_ref};
use offshoot_btrfs_format::inode::InodeItem;
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{Generation, ItemType, Key, TreeId};
use offshoot_vfs::Result;
use zerocopy::{FromZeros, IntoBytes};

use super::cut::forget_progress;
use super::editor::TreeEdits;
use super::files::FileMender;
use super::roots::lead_to;
use crate::check::{
    BtrfsFinding, BtrfsFindingCode as Code, CheckedVolume, ListedRoot, RootTreeItems,
    is_possible_removal,
};
use own_roots::OwnRoots;

/// What is to be changed for subvolumes.
#[derive(Default)]
pub(super) struct SubvolumeEdits {
    /// Edits of trees; of the root tree, too.
    pub(super) trees: BTreeMap<TreeId, TreeEdits>,
    /// Deleted subvolumes that become empty, and the tree for data on its way.
    pub(super) emptied: BTreeSet<TreeId>,
    /// The UUID tree as a whole, if a block of it is bad.
    pub(super) uuids: Option<TreeEdits>,
}

impl SubvolumeEdits {
    /// Whether nothing is to be changed.
    pub(super) fn is_empty(&self) -> bool {
        self.trees.is_empty() && self.emptied.is_empty() && self.uuids.is_none()
    }
}

/// The trees that are made anew as a whole if one of their blocks is bad. The one for data that is
/// relocated has nothing in it when no balance runs, and with an unfinished one there is no repair.
pub(super) const MADE_ANEW: [TreeId; 2] = [TreeId::UUID, TreeId::DATA_RELOC];

/// Whether a finding may be mended here.
pub(super) fn is_mended(finding: &BtrfsFinding, tree: Option<TreeId>) -> bool {
    match finding.code {
        Code::RootReference
        | Code::SubvolumeEntry
        | Code::UnreachableSubvolume
        | Code::UuidTree
        | Code::DeletedSubvolume
        | Code::RootItem
        | Code::SharedRoot => true,
        Code::TreeBlock | Code::RefusedBlock => tree.is_some_and(|tree| MADE_ANEW.contains(&tree)),
        Code::MissingTree => tree == Some(TreeId(objectid::ROOT_TREE_DIR)),
        _ => false,
    }
}

/// The edits that mend the subvolumes of a volume. `findings` are those of its check. `bad` has
/// those of [`MADE_ANEW`] of which the kernel cannot use a block.
///
/// # Errors
/// When the caller has ended the repair.
pub(super) fn edits(
    volume: &CheckedVolume<'_>,
    generation: Generation,
    findings: &[BtrfsFinding],
    bad: &BTreeSet<TreeId>,
) -> Result<SubvolumeEdits> {
    let items = RootTreeItems::read(volume);
    let mut edits = SubvolumeEdits::default();
    if !items.is_whole {
        return Ok(edits);
    }
    let mut mender = SubvolumeMender {
        volume,
        generation,
        roots: TreeEdits::new(),
        emptied: BTreeSet::new(),
        menders: BTreeMap::new(),
        touched: BTreeSet::new(),
        own_roots: OwnRoots::default(),
        items,
    };
    mender.mend_roots();
    mender.mend_shared_roots(findings);
    mender.mend_links()?;
    mender.mend_default();
    mender.mend_strays();
    uuids::mend(&mender, bad.contains(&TreeId::UUID), &mut edits);
    edits.emptied.clone_from(&mender.emptied);
    edits.emptied.extend(bad.get(&TreeId::DATA_RELOC));
    mender.finish(&mut edits.trees);
    volume.require_going_on()?;
    Ok(edits)
}

/// Mends subvolumes.
struct SubvolumeMender<'m, 'c> {
    volume: &'m CheckedVolume<'c>,
    generation: Generation,
    /// What the root tree says, with what was mended.
    items: RootTreeItems,
    /// The edits of the root tree.
    roots: TreeEdits,
    emptied: BTreeSet<TreeId>,
    /// The menders of the subvolumes with entries that were mended.
    menders: BTreeMap<TreeId, FileMender<'m, 'c>>,
    /// The directories with such entries.
    touched: BTreeSet<(TreeId, u64)>,
    own_roots: OwnRoots,
}

impl SubvolumeMender<'_, '_> {
    /// An item of the root tree, with the edits so far.
    fn root_tree_item(&self, key: Key) -> Option<Vec<u8>> {
        match self.roots.get(&key) {
            Some(edited) => edited.clone(),
            None => self.volume.with_item(self.volume.root_tree(), key, |data| Some(data.to_vec())),
        }
    }

    /// Changes the root item of a tree.
    fn change_root(&mut self, id: TreeId, change: impl FnOnce(&mut RootItem)) {
        let Some(key) = self.items.root(id).map(ListedRoot::key) else { return };
        let item = self.root_tree_item(key).and_then(|data| RootItem::parse(&data).ok());
        if let Some(mut item) = item {
            change(&mut item);
            self.roots.insert(key, Some(item.as_bytes().to_vec()));
        }
    }

    /// Mends what root items say of their trees and of their removal.
    fn mend_roots(&mut self) {
        let roots: Vec<_> = self.items.roots.values().copied().collect();
        for listed in roots {
            let (id, actual) = (listed.root.id, self.volume.actual_root(listed.root));
            if actual != listed.root {
                self.change_root(id, |item| lead_to(item, actual));
            }
            let has_progress = listed.drop_progress.objectid != 0;
            if !id.is_subvolume() {
                continue;
            }
            if listed.refs > 0 || self.is_linked(id) {
                if listed.refs == 0 {
                    self.change_root(id, |item| item.refs = 1.into());
                    if let Some(root) = self.items.roots.get_mut(&id) {
                        root.refs = 1;
                    }
                }
                if has_progress {
                    self.change_root(id, forget_progress);
                }
                continue;
            }
            if self.items.orphans.binary_search(&id.0).is_err() {
                let key = Key::new(objectid::ORPHAN, ItemType::ORPHAN_ITEM, id.0);
                self.roots.insert(key, Some(Vec::new()));
            }
            if has_progress && is_possible_removal(self.volume, &listed) == Some(false) {
                self.emptied.insert(id);
            }
        }
    }

    /// Makes the top level the default subvolume, if the default one is not there. Makes the
    /// directory that has the entry of the default one, if that is not there.
    fn mend_default(&mut self) {
        let dir = objectid::ROOT_TREE_DIR;
        if !self.items.has_root_dir {
            let item = InodeItem {
                generation: self.generation.0.into(),
                transid: self.generation.0.into(),
                nlink: 1.into(),
                mode: 0o040_755.into(),
                ..InodeItem::new_zeroed()
            };
            let key = Key::new(dir, ItemType::INODE_ITEM, 0);
            self.roots.insert(key, Some(item.as_bytes().to_vec()));
            let key = Key::new(dir, ItemType::INODE_REF, dir);
            if self.root_tree_item(key).is_none() {
                self.roots.insert(key, Some(inode_ref(0, b"..")));
            }
        }
        let Some((key, location)) = self.items.default else { return };
        let is_there = self.items.is_live(TreeId(location.objectid));
        if is_there && location.item_type == ItemType::ROOT_ITEM {
            return;
        }
        let Some(data) = self.root_tree_item(key) else { return };
        let top = Key::new(TreeId::FS.0, ItemType::ROOT_ITEM, u64::MAX);
        let encode = |entry: DirItemEntry<'_>| {
            let location = if entry.location == location { top } else { entry.location };
            dir_entry(&DirItemEntry { location, ..entry })
        };
        let data = dir_entries(&data).flatten().flat_map(encode).collect();
        self.roots.insert(key, Some(data));
    }

    /// Removes items behind the root of a tree of which there is only one. The root itself comes to
    /// the key where all programs look for it.
    fn mend_strays(&mut self) {
        for key in self.items.strays.clone() {
            let id = TreeId(key.objectid);
            let is_root = self.items.root(id).is_some_and(|root| root.key() == key);
            if is_root {
                let moved = Key { offset: 0, ..key };
                let data = self.root_tree_item(key);
                self.roots.insert(moved, data);
            }
            self.roots.insert(key, None);
        }
    }

    /// The edits of all trees.
    fn finish(mut self, trees: &mut BTreeMap<TreeId, TreeEdits>) {
        for (subvolume, dir) in std::mem::take(&mut self.touched) {
            if let Some(mender) = self.menders.get_mut(&subvolume) {
                mender.mend_counts(dir);
            }
        }
        for (id, mender) in self.menders {
            let edits = mender.into_edits();
            if !edits.is_empty() {
                trees.insert(id, edits);
            }
        }
        self.own_roots.finish(trees);
        if !self.roots.is_empty() {
            trees.insert(TreeId::ROOT, self.roots);
        }
    }
}
