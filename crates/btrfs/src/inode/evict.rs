//! Removing whole inodes.
//!
//! An inode without names is removed at once if it has few items and is not open. Otherwise an
//! ORPHAN_ITEM marks it for removal. When it is closed for the last time it is removed, in as many
//! transactions as its items need. If a crash or an error comes between, its orphan item makes a
//! later sweep remove it (`orphans`).

use offshoot_btrfs_format::edit::{ITEM_SIZE, leaf_capacity};
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::{FileId, Result};

use super::changes::Changes;
use super::write_back;
use crate::delayed;
use crate::inode::{Rooms, RoomsHandle};
use crate::storage::malformed;
use crate::transaction::{ExtentKind, RefOwner};
use crate::tree::Cursor;

/// The most items that one batch removes. An inode with more gets an orphan item. A batch takes no
/// more than a leaf, so it changes few blocks, and the reservation of an operation is enough.
const BATCH: usize = 64;

/// How many queued names a batch removes. An inode without names has none, unless it is damaged and
/// counts fewer names than it has.
const QUEUED: usize = 2;

/// The key of the orphan item of the inode `ino`.
pub(crate) fn orphan_key(ino: u64) -> Key {
    Key::new(objectid::ORPHAN, ItemType::ORPHAN_ITEM, ino)
}

/// Some items of an inode, and the extents that they refer to.
pub(super) struct EvictBatch {
    file: FileId,
    /// Keys of items in the tree.
    keys: Vec<Key>,
    /// Keys of queued names.
    queued: Vec<Key>,
    extents: Vec<(Key, ExtentReference)>,
    /// The bytes of data that these items add to the size counted by the inode.
    nbytes: u64,
    /// Whether the inode has more items behind these.
    has_more: bool,
}

/// A reference of a file to an extent.
struct ExtentReference {
    logical: Logical,
    len: u64,
    /// Where in the extent the item begins.
    skip: u64,
}

impl EvictBatch {
    /// The first items of `file` except its inode item. Items of all types are removed with an
    /// inode, even types that only a newer kernel knows.
    pub(super) fn read(volume: &Rooms, file: FileId) -> Result<Self> {
        let (tree, ino) = (TreeId(file.dev), file.ino);
        let refs = |parent| Key::new(ino, ItemType::INODE_REF, parent);
        let waiting = delayed::queued_between(volume, tree, refs(0)..=refs(u64::MAX));
        let is_queued = |key| waiting.iter().any(|&(waiting, _)| waiting == key);
        let queued: Vec<_> = waiting.iter().filter(|one| one.1).map(|one| one.0).collect();
        let (keys, extents) = (Vec::new(), Vec::new());
        let mut batch = Self { file, keys, queued, extents, nbytes: 0, has_more: false };
        let inode = Key::new(ino, ItemType::INODE_ITEM, 0);
        let first = Key { item_type: ItemType(0), ..inode };
        let mut cursor = Cursor::seek(volume, volume.tree(tree)?, first)?;
        let mut room = leaf_capacity(volume.superblock().node_size);
        while let Some((key, data)) = cursor.item().filter(|(key, _)| key.objectid == ino) {
            if key == inode {
                cursor.advance()?;
                continue;
            }
            let size = data.len() + ITEM_SIZE;
            if batch.keys.len() == BATCH || size > room {
                batch.has_more = true;
                break;
            }
            if !is_queued(key) {
                room -= size;
                batch.keys.push(key);
            }
            if key.item_type == ItemType::EXTENT_DATA {
                batch.add_extent(key, data)?;
            }
            cursor.advance()?;
        }
        Ok(batch)
    }

    /// The file that the items belong to.
    pub(super) fn file(&self) -> FileId {
        self.file
    }

    /// The number of the inode, if these are all its items and one operation can remove all of
    /// them.
    pub(super) fn inode_gone(&self) -> Option<u64> {
        (!self.has_more && self.queued.is_empty()).then_some(self.file.ino)
    }

    /// Leaves out items that are removed in another way.
    pub(super) fn leave_out(&mut self, is_out: impl Fn(Key) -> bool) {
        self.keys.retain(|&key| !is_out(key));
        self.queued.retain(|&key| !is_out(key));
    }

    fn add_extent(&mut self, key: Key, data: &[u8]) -> Result<()> {
        let extent = FileExtent::parse(data).map_err(malformed)?;
        match extent.body {
            FileExtentBody::Inline(_) => self.nbytes += extent.ram_bytes,
            FileExtentBody::Hole { .. } => {}
            FileExtentBody::Extent { disk_bytenr, disk_num_bytes, offset, num_bytes, .. } => {
                let held =
                    ExtentReference { logical: disk_bytenr, len: disk_num_bytes, skip: offset };
                self.extents.push((key, held));
                self.nbytes += num_bytes;
            }
        }
        Ok(())
    }

    /// Drops the references to the extents, and returns the keys of the items to remove from the
    /// tree.
    pub(super) fn give_up(self, handle: &RoomsHandle<'_>) -> Vec<Key> {
        for (key, held) in &self.extents {
            let offset = key.offset.wrapping_sub(held.skip);
            let owner = RefOwner::File { root: TreeId(self.file.dev), ino: self.file.ino, offset };
            handle.refer(held.logical, held.len, ExtentKind::Data, owner, -1);
        }
        self.keys
    }
}

/// Removes an inode that has an orphan item, and the orphan item. The caller has its lock.
pub(super) fn evict(volume: &Rooms, file: FileId) -> Result<()> {
    while !evict_batch(volume, file)? {}
    Ok(())
}

/// Removes one batch of an inode that has an orphan item, and returns whether that was the last.
/// The caller has its lock.
pub(super) fn evict_batch(volume: &Rooms, file: FileId) -> Result<bool> {
    write_back::discard(volume, file);
    let handle = volume.join_to_remove()?;
    let batch = EvictBatch::read(volume, file)?;
    let mut changes = Changes::accepted(&handle, file)?;
    let is_last = batch.inode_gone().is_some();
    if is_last {
        changes.remove(orphan_key(file.ino))?;
    } else {
        // Between two batches the inode counts the data that it still has.
        changes.adjust_inode(file, |item| {
            item.nbytes = item.nbytes.get().saturating_sub(batch.nbytes).into();
        })?;
        for &key in batch.queued.iter().take(QUEUED) {
            changes.remove(key)?;
        }
    }
    changes.remove_items(batch);
    changes.apply()?;
    Ok(is_last)
}
