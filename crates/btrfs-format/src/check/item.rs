//! Chooses the check of an item by its type.
//!
//! A check gets the item with its key, and the item before it in the leaf ([`ItemContext`]). It
//! returns what is wrong ([`ItemProblem`]). This module adds the slot and the key to the message.
//! Types that are not listed hold nothing that a reader depends on, or are unknown; they are not
//! checked.

use std::borrow::Cow;

use super::{Geometry, chunk, dir, extent, file_extent, inode, root, space};
use crate::{ItemType, Key, Malformed, TreeId};

/// An item of a leaf, with what its check needs to know of the leaf and the volume.
#[derive(Clone, Copy)]
pub(super) struct ItemContext<'a> {
    /// The properties that all blocks of the volume share.
    pub(super) geometry: &'a Geometry,
    /// The owner of the leaf.
    pub(super) owner: TreeId,
    /// The generation of the leaf.
    pub(super) generation: u64,
    /// The index of the item in its leaf.
    pub(super) slot: usize,
    pub(super) key: Key,
    pub(super) data: &'a [u8],
    /// Key and data of the item before it in the leaf.
    pub(super) previous: Option<(Key, &'a [u8])>,
}

/// What is wrong with an item.
pub(super) struct ItemProblem(Cow<'static, str>);

impl From<String> for ItemProblem {
    fn from(problem: String) -> Self {
        Self(problem.into())
    }
}

impl From<&'static str> for ItemProblem {
    fn from(problem: &'static str) -> Self {
        Self(problem.into())
    }
}

impl From<Malformed> for ItemProblem {
    fn from(malformed: Malformed) -> Self {
        Self(malformed.problem)
    }
}

/// The outcome of a check.
pub(super) type ItemChecked = Result<(), ItemProblem>;

/// Returns the formatted problem when the condition does not hold.
macro_rules! ensure {
    ($condition:expr, $($problem:tt)+) => {
        if !$condition {
            return Err($crate::check::item::ItemProblem::from(format!($($problem)+)));
        }
    };
}
pub(super) use ensure;

impl<'a> ItemContext<'a> {
    /// Checks the contents of the item against its key.
    ///
    /// # Errors
    /// The first fault, with slot and key.
    pub(super) fn verify(&self) -> Result<(), Malformed> {
        self.verify_contents().map_err(|problem| self.located(&problem))
    }

    #[cold]
    fn located(&self, problem: &ItemProblem) -> Malformed {
        super::bad(format!("slot {} {}: {}", self.slot, self.key, problem.0))
    }

    fn verify_contents(&self) -> ItemChecked {
        if self.geometry.is_strict && root::is_fs_tree(self.owner.0) {
            self.verify_neighbour()?;
        }
        match self.key.item_type {
            ItemType::INODE_ITEM => inode::verify_inode(self),
            ItemType::INODE_REF => inode::verify_refs(self),
            ItemType::INODE_EXTREF => inode::verify_extrefs(self),
            ItemType::ORPHAN_ITEM => self.size(0),
            ItemType::DIR_ITEM | ItemType::DIR_INDEX | ItemType::XATTR_ITEM => dir::verify(self),
            ItemType::DIR_LOG_ITEM | ItemType::DIR_LOG_INDEX => dir::verify_log(self),
            ItemType::EXTENT_DATA => file_extent::verify(self),
            ItemType::EXTENT_CSUM => extent::verify_csums(self),
            ItemType::ROOT_ITEM => root::verify(self),
            ItemType::ROOT_REF | ItemType::ROOT_BACKREF => root::verify_ref(self),
            ItemType::EXTENT_ITEM | ItemType::METADATA_ITEM => extent::verify(self),
            ItemType::TREE_BLOCK_REF
            | ItemType::SHARED_BLOCK_REF
            | ItemType::EXTENT_DATA_REF
            | ItemType::SHARED_DATA_REF => extent::verify_ref(self),
            ItemType::CHUNK_ITEM => chunk::verify(self),
            ItemType::DEV_ITEM => chunk::verify_device(self),
            ItemType::DEV_EXTENT => chunk::verify_device_extent(self),
            ItemType::BLOCK_GROUP_ITEM => space::verify_block_group(self),
            _ => space::verify_other(self),
        }
    }

    /// Checks that an item of an inode follows an item of the same inode, in a leaf of a subvolume:
    /// the item of the inode itself comes first.
    fn verify_neighbour(&self) -> ItemChecked {
        let is_of_an_inode = matches!(
            self.key.item_type,
            ItemType::INODE_REF
                | ItemType::INODE_EXTREF
                | ItemType::DIR_ITEM
                | ItemType::DIR_INDEX
                | ItemType::XATTR_ITEM
                | ItemType::EXTENT_DATA
        );
        let follows = self.previous.is_none_or(|(key, _)| key.objectid == self.key.objectid);
        ensure!(follows || !is_of_an_inode, "the item of the inode is missing before it");
        Ok(())
    }

    /// Checks that the item has exactly `expected` bytes.
    pub(super) fn size(&self, expected: usize) -> ItemChecked {
        ensure!(
            self.data.len() == expected,
            "{expected} bytes expected, {} found",
            self.data.len()
        );
        Ok(())
    }

    /// Checks that the item has at least `least` bytes.
    pub(super) fn size_at_least(&self, least: usize) -> ItemChecked {
        ensure!(
            self.data.len() >= least,
            "at least {least} bytes expected, {} found",
            self.data.len()
        );
        Ok(())
    }

    /// Checks that the field `what` of the item, with the value `bytes`, is a whole number of
    /// sectors.
    pub(super) fn aligned(&self, what: &str, bytes: u64) -> ItemChecked {
        ensure!(
            self.geometry.is_aligned(bytes),
            "{what} {bytes} is not a multiple of the sector size {}",
            self.geometry.sector_size
        );
        Ok(())
    }

    /// Checks that a generation is not newer than an item may carry: the transaction after the
    /// committed one is that of a log. In a volume that is written the leaf may be newer than what
    /// was committed when the volume was opened.
    pub(super) fn generation(&self, what: &str, generation: u64) -> ItemChecked {
        let newest = self.geometry.generation.0.max(self.generation).saturating_add(1);
        ensure!(generation <= newest, "{what} at most {newest} expected, {generation} found");
        Ok(())
    }

    /// The previous item of the leaf, if it has the same object id and type.
    pub(super) fn previous_alike(&self) -> Option<(Key, &'a [u8])> {
        self.previous.filter(|(previous, _)| {
            previous.objectid == self.key.objectid && previous.item_type == self.key.item_type
        })
    }
}
