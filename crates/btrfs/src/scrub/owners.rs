//! Finds the owners of a bad place: files by path, trees by number.
//!
//! The back references of a data extent name the files that refer to it, or the leaves that do. A
//! leaf belongs to the trees that refer to it, or to a block above it.

use std::collections::BTreeSet;

use offshoot_btrfs_format::check;
use offshoot_btrfs_format::extent::{ExtentDataRef, InlineRef, ParsedExtent};
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::{Errno, Error, FileId, Result};
use zerocopy::FromBytes;

use super::ScrubOwner;
use super::gather::{CommittedTrees, ScrubbedBlock};
use crate::block::TreeBlock;
use crate::inode::Rooms;
use crate::storage::malformed;
use crate::subvolume::path_of;
use crate::tree::Cursor;

/// The most files that are listed for one extent.
const MOST_FILES: usize = 16;

/// The most blocks that are visited on the way up from a shared leaf.
const MOST_BLOCKS: usize = 64;

/// Owners, before their paths are looked up.
#[derive(Default)]
pub(super) struct ExtentOwners {
    files: BTreeSet<FileId>,
    tree: Option<(Option<TreeId>, u8)>,
    /// There are more owners than these.
    is_cut: bool,
}

/// A back reference of an extent.
enum Referrer {
    File(FileId),
    /// The leaf, or the node, at this address.
    Block(Logical),
    Tree(TreeId),
}

impl ExtentOwners {
    /// The owner of a tree block.
    pub(super) fn of_block(block: &ScrubbedBlock) -> Self {
        Self { tree: Some((block.owner, block.level)), ..Self::default() }
    }

    /// The owners of the data extent at `extent`.
    ///
    /// # Errors
    /// When the extent tree cannot be read. Owners that cannot be found for another reason are left
    /// out.
    pub(super) fn of_data(committed: &CommittedTrees<'_>, extent: u64) -> Result<Self> {
        let mut owners = Self::default();
        for referrer in referrers(committed, extent)? {
            if owners.files.len() >= MOST_FILES {
                owners.is_cut = true;
                break;
            }
            match referrer {
                Referrer::File(file) => drop(owners.files.insert(file)),
                Referrer::Block(leaf) => owners.add_leaf(committed, leaf, extent),
                Referrer::Tree(_) => {}
            }
        }
        Ok(owners)
    }

    /// Adds the files that refer to the extent in the leaf at `leaf`. Skips a damaged leaf, because
    /// the scrub reports it separately.
    fn add_leaf(&mut self, committed: &CommittedTrees<'_>, leaf: Logical, extent: u64) {
        let volume = committed.volume;
        let verify = |bytes: &[u8]| check::verify(bytes, volume.storage.geometry(), leaf);
        let Ok(bytes) = volume.storage.find_block(leaf, verify) else { return };
        let block = TreeBlock::verified(bytes);
        if !block.is_leaf() {
            return;
        }
        let is_it = |slot: &usize| {
            block.key(*slot).item_type == ItemType::EXTENT_DATA
                && FileExtent::parse(block.data(*slot)).is_ok_and(|item| {
                    matches!(item.body, FileExtentBody::Extent { disk_bytenr, .. } if disk_bytenr.0 == extent)
                })
        };
        let inodes: BTreeSet<_> =
            (0..block.len()).filter(is_it).map(|slot| block.key(slot).objectid).collect();
        let trees = trees_of(committed, leaf);
        for (tree, ino) in trees.iter().flat_map(|tree| inodes.iter().map(move |ino| (tree, *ino)))
        {
            if self.files.len() >= MOST_FILES {
                self.is_cut = true;
                return;
            }
            self.files.insert(FileId { dev: tree.0, ino });
        }
    }

    /// The owners with their current paths.
    pub(super) fn named(self, volume: &Rooms) -> Vec<ScrubOwner> {
        let tree = self.tree.map(|(tree, level)| ScrubOwner::Tree { tree, level });
        let files = self.files.into_iter().map(|file| {
            let path = match path_of(volume, file) {
                Err(Error::Posix { errno: Errno::NOENT, .. }) => Ok(None),
                other => other.map(Some),
            };
            // If the way up is damaged, the scrub reports that separately.
            ScrubOwner::File { file, path: path.unwrap_or(None) }
        });
        let cut = self.is_cut.then_some(ScrubOwner::Others);
        tree.into_iter().chain(files).chain(cut).collect()
    }
}

/// The back references of the extent at `extent`, up to a few more than [`MOST_BLOCKS`].
fn referrers(committed: &CommittedTrees<'_>, extent: u64) -> Result<Vec<Referrer>> {
    let mut found = Vec::new();
    let file = |one: &ExtentDataRef| {
        Referrer::File(FileId { dev: one.root.get(), ino: one.objectid.get() })
    };
    let first = Key::new(extent, ItemType::EXTENT_ITEM, 0);
    let mut cursor = Cursor::seek_committed(committed.volume, committed.extents, first)?;
    while let Some((key, data)) = cursor.item().filter(|(key, _)| key.objectid == extent) {
        match key.item_type {
            ItemType::EXTENT_ITEM | ItemType::METADATA_ITEM => {
                let item = ParsedExtent::parse(key.item_type, data).map_err(malformed)?;
                for inline in item.inline_refs() {
                    found.extend(match inline.map_err(malformed)? {
                        InlineRef::ExtentData(one) => Some(file(one)),
                        InlineRef::SharedData { parent, .. } | InlineRef::SharedBlock(parent) => {
                            Some(Referrer::Block(Logical(parent)))
                        }
                        InlineRef::TreeBlock(tree) => Some(Referrer::Tree(TreeId(tree))),
                        InlineRef::Owner(_) => None,
                    });
                }
            }
            ItemType::EXTENT_DATA_REF => {
                found.extend(ExtentDataRef::ref_from_bytes(data).ok().map(file));
            }
            ItemType::SHARED_DATA_REF | ItemType::SHARED_BLOCK_REF => {
                found.push(Referrer::Block(Logical(key.offset)));
            }
            ItemType::TREE_BLOCK_REF => found.push(Referrer::Tree(TreeId(key.offset))),
            _ => {}
        }
        if found.len() > MOST_BLOCKS {
            break;
        }
        cursor.advance()?;
    }
    Ok(found)
}

/// The trees that a block belongs to.
fn trees_of(committed: &CommittedTrees<'_>, block: Logical) -> BTreeSet<TreeId> {
    let (mut trees, mut seen) = (BTreeSet::new(), BTreeSet::from([block]));
    let mut next = vec![block];
    while let Some(block) = next.pop() {
        for referrer in referrers(committed, block.0).unwrap_or_default() {
            match referrer {
                Referrer::Tree(tree) => drop(trees.insert(tree)),
                Referrer::Block(above) if seen.len() < MOST_BLOCKS && seen.insert(above) => {
                    next.push(above);
                }
                Referrer::Block(_) | Referrer::File(_) => {}
            }
        }
    }
    trees
}
