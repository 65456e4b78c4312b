//! Names of an inode: they are in INODE_REF items, and in INODE_EXTREF items where these are full.

use offshoot_btrfs_format::dir::extref_hash;
use offshoot_btrfs_format::edit::{ITEM_SIZE, leaf_capacity};
use offshoot_btrfs_format::encode::{inode_extref, inode_ref};
use offshoot_btrfs_format::inode::{InodeName, inode_extrefs, inode_refs};
use offshoot_btrfs_format::superblock::Incompat;
use offshoot_btrfs_format::{ItemType, Key};

use super::FileMender;

/// A name of an inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OwnedName {
    pub(super) parent: u64,
    pub(super) index: u64,
    pub(super) name: Vec<u8>,
}

impl OwnedName {
    fn of(one: InodeName<'_>) -> Self {
        Self { parent: one.parent, index: one.index, name: one.name.to_vec() }
    }
}

impl FileMender<'_, '_> {
    /// Whether an item of this length fits into a leaf.
    pub(super) fn fits(&self, len: usize) -> bool {
        len + ITEM_SIZE <= leaf_capacity(self.volume.superblock().node_size)
    }

    /// The names of an inode; the name `..` of a root directory included.
    pub(super) fn names(&self, ino: u64) -> Vec<OwnedName> {
        let mut names = Vec::new();
        for (key, data) in self.items_of(ino, ItemType::INODE_REF) {
            names.extend(in_reference(key.offset, &data));
        }
        for data in self.items_of(ino, ItemType::INODE_EXTREF).values() {
            names.extend(in_extended_reference(data));
        }
        names
    }

    /// Gives an inode a name. Returns whether there is room for it.
    pub(super) fn add_name(&mut self, ino: u64, dir: u64, index: u64, name: &[u8]) -> bool {
        let key = Key::new(ino, ItemType::INODE_REF, dir);
        let mut data = self.item(key).unwrap_or_default();
        data.extend_from_slice(&inode_ref(index, name));
        if self.fits(data.len()) {
            self.set(key, data);
            return true;
        }
        if !self.volume.superblock().incompat.has(Incompat::EXTENDED_IREF) {
            return false;
        }
        let key = Key::new(ino, ItemType::INODE_EXTREF, extref_hash(dir, name));
        let mut data = self.item(key).unwrap_or_default();
        data.extend_from_slice(&inode_extref(dir, index, name));
        let fits = self.fits(data.len());
        if fits {
            self.set(key, data);
        }
        fits
    }

    /// Gives a name of an inode the index of its entry.
    pub(super) fn correct_index(&mut self, ino: u64, parent: u64, name: &[u8], index: u64) {
        let corrected = |one: OwnedName| {
            let is_it = one.parent == parent && one.name == name;
            OwnedName { index: if is_it { index } else { one.index }, ..one }
        };
        let key = Key::new(ino, ItemType::INODE_REF, parent);
        if let Some(data) = self.item(key) {
            let names = in_reference(parent, &data).into_iter().map(corrected);
            self.set(key, names.flat_map(|one| inode_ref(one.index, &one.name)).collect());
        }
        let key = Key::new(ino, ItemType::INODE_EXTREF, extref_hash(parent, name));
        if let Some(data) = self.item(key) {
            let names = in_extended_reference(&data).into_iter().map(corrected);
            let encode = |one: OwnedName| inode_extref(one.parent, one.index, &one.name);
            self.set(key, names.flat_map(encode).collect());
        }
    }
}

/// The names in an INODE_REF of a directory.
fn in_reference(parent: u64, data: &[u8]) -> Vec<OwnedName> {
    inode_refs(parent, data).flatten().map(OwnedName::of).collect()
}

/// The names in an INODE_EXTREF.
fn in_extended_reference(data: &[u8]) -> Vec<OwnedName> {
    inode_extrefs(data).flatten().map(OwnedName::of).collect()
}
