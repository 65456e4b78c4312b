//! Removing whole inodes.
//!
//! An inode without names goes at once when it has few items and nobody has it open. Otherwise
//! an ORPHAN_ITEM says that it is to be removed, and it goes when the last who has it open lets
//! go of it, in as many transactions as its items need. After a crash the orphan items tell what
//! is left to do; that is done when the subvolume is first changed again.

use offshoot_btrfs_format::edit::{ITEM_SIZE, leaf_capacity};
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::inode::InodeItem;
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::{Error, FileId, Result};
use zerocopy::IntoBytes;

use super::{inode_item, write_back};
use crate::subvolume::malformed;
use crate::transaction::{ExtentKind, Handle, Owner};
use crate::tree::{Cursor, Edit};
use crate::volume::Engine;

/// The most items that are removed in one go, and that an inode without an orphan item may have. Together
/// they take no more than a leaf, so that a batch changes few blocks: what an operation reserves is enough.
const BATCH: usize = 64;

/// The key of the orphan item of the inode `ino`.
pub(super) fn orphan_key(ino: u64) -> Key {
    Key::new(objectid::ORPHAN, ItemType::ORPHAN_ITEM, ino)
}

/// Some items of an inode, and the data that they hold.
#[derive(Default)]
struct Batch {
    keys: Vec<Key>,
    extents: Vec<(Key, Held)>,
    /// What the inode counts as its data.
    nbytes: u64,
    /// The inode has items behind these.
    has_more: bool,
}

/// A reference of a file to an extent.
struct Held {
    logical: Logical,
    len: u64,
    /// Where in the extent the item begins.
    skip: u64,
}

impl Batch {
    /// The first items of the inode `ino` that are not its inode item.
    fn read(volume: &Engine, tree: TreeId, ino: u64) -> Result<Self> {
        let mut batch = Self::default();
        let first = Key::new(ino, ItemType(ItemType::INODE_ITEM.0 + 1), 0);
        let mut cursor = Cursor::seek(volume, volume.tree(tree)?, first)?;
        let mut room = leaf_capacity(volume.superblock().node_size);
        while let Some((key, data)) = cursor.item().filter(|(key, _)| key.objectid == ino) {
            let size = data.len() + ITEM_SIZE;
            if batch.keys.len() == BATCH || size > room {
                batch.has_more = true;
                break;
            }
            room -= size;
            batch.keys.push(key);
            if key.item_type == ItemType::EXTENT_DATA {
                batch.add_extent(key, data)?;
            }
            cursor.advance()?;
        }
        Ok(batch)
    }

    fn add_extent(&mut self, key: Key, data: &[u8]) -> Result<()> {
        let extent = FileExtent::parse(data).map_err(malformed)?;
        match extent.body {
            FileExtentBody::Inline(_) => self.nbytes += extent.ram_bytes,
            FileExtentBody::Hole { .. } => {}
            FileExtentBody::Extent { disk_bytenr, disk_num_bytes, offset, num_bytes, .. } => {
                let held = Held { logical: disk_bytenr, len: disk_num_bytes, skip: offset };
                self.extents.push((key, held));
                self.nbytes += num_bytes;
            }
        }
        Ok(())
    }

    fn remove(&self, handle: &Handle<'_>, tree: TreeId, ino: u64) -> Result<()> {
        for (key, held) in &self.extents {
            let offset = key.offset.wrapping_sub(held.skip);
            let owner = Owner::File { root: tree, ino, offset };
            handle.refer(held.logical, held.len, ExtentKind::Data, owner, -1);
        }
        let (Some(&first), Some(&last)) = (self.keys.first(), self.keys.last()) else {
            return Ok(());
        };
        handle.change(tree, |tree| tree.remove_range(first, last).map(drop))
    }
}

/// Whether the inode has so few items that it can go in one go.
pub(super) fn has_few_items(volume: &Engine, file: FileId) -> Result<bool> {
    Ok(!Batch::read(volume, TreeId(file.dev), file.ino)?.has_more)
}

/// Removes all items of an inode that has few, its inode item included, and what is buffered of it. Its names are gone,
/// so what fails ends all writing.
pub(super) fn remove_all_items(handle: &Handle<'_>, tree: TreeId, ino: u64) -> Result<()> {
    let remove = || {
        let batch = Batch::read(handle.volume(), tree, ino)?;
        batch.remove(handle, tree, ino)?;
        let key = Key::new(ino, ItemType::INODE_ITEM, 0);
        handle.change(tree, |tree| tree.remove(key).map(drop))
    };
    remove().inspect_err(|e| handle.break_off(e))?;
    write_back::discard(handle.volume(), FileId { dev: tree.0, ino });
    Ok(())
}

/// Removes an inode that has an orphan item, and the orphan item.
pub(super) fn evict(volume: &Engine, file: FileId) -> Result<()> {
    write_back::discard(volume, file);
    let (tree, ino) = (TreeId(file.dev), file.ino);
    loop {
        let handle = volume.join_to_remove()?;
        let batch = Batch::read(volume, tree, ino)?;
        if !batch.has_more {
            remove_all_items(&handle, tree, ino)?;
            return handle.change(tree, |tree| tree.remove(orphan_key(ino)).map(drop));
        }
        batch.remove(&handle, tree, ino)?;
        // Between two batches the inode counts what it still has.
        let key = Key::new(ino, ItemType::INODE_ITEM, 0);
        handle.change(tree, |tree| {
            tree.modify(key, 0, |data| {
                let Some(data) = data else { return Ok(Edit::Keep) };
                let mut item = *InodeItem::view(data).map_err(malformed)?;
                item.nbytes = item.nbytes.get().saturating_sub(batch.nbytes).into();
                item.transid = handle.generation().0.into();
                Ok(Edit::Put(item.as_bytes().to_vec()))
            })
        })?;
    }
}

/// Removes what is left of the unlinked files of the subvolume `tree`, none of which is open.
pub(super) fn remove_orphans(volume: &Engine, tree: TreeId) -> Result<()> {
    let mut next = Some(orphan_key(0));
    while let Some(from) = next {
        let root = volume.tree(tree)?;
        let cursor = Cursor::seek(volume, root, from)?;
        let found = cursor.item_of(objectid::ORPHAN, ItemType::ORPHAN_ITEM).map(|(key, _)| key);
        drop(cursor);
        let Some(key) = found else { return Ok(()) };
        let file = FileId { dev: tree.0, ino: key.offset };
        let links = match inode_item(volume, root, file) {
            Ok(item) => Some(item.nlink.get()),
            Err(Error::Posix { .. }) => None,
            Err(e) => return Err(e),
        };
        if links == Some(0) {
            evict(volume, file)?;
        } else {
            // Old kernels left such items for what they truncated, too.
            let handle = volume.join_to_remove()?;
            handle.change(tree, |tree| tree.remove(key).map(drop))?;
        }
        next = key.successor();
    }
    Ok(())
}
