//! The state of the subvolumes of a volume that is open for writing.

use std::collections::BTreeMap;

use offshoot_btrfs_format::{Generation, ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, Result};
use parking_lot::{Mutex, MutexGuard};

use super::drop::Dropping;
use super::items::orphan_key;
use crate::inode::Rooms;
use crate::transaction::{require_own_root, root_item, root_of};
use crate::tree::Cursor;

/// The state of all subvolumes.
#[derive(Default)]
pub(crate) struct SubvolumeState {
    /// The number of the next subvolume. It only grows, so no number is used twice while the volume
    /// is open.
    next: Mutex<u64>,
    /// The deleted subvolumes that still hold blocks, with the transaction that deleted each.
    deleted: Mutex<BTreeMap<TreeId, Generation>>,
    /// Held by the thread that drops blocks of deleted subvolumes.
    dropping: Mutex<Dropping>,
}

impl SubvolumeState {
    /// A number for a new subvolume.
    pub(super) fn take_id(&self) -> Result<TreeId> {
        let mut next = self.next.lock();
        // In a damaged volume a deleted subvolume may have nothing but its orphan item. A new
        // subvolume with its number would be dropped.
        while self.deleted.lock().contains_key(&TreeId(*next)) {
            *next += 1;
        }
        if *next > TreeId::LAST_FREE.0 {
            return Err(Error::posix(Errno::NOSPC, "a number for a subvolume"));
        }
        let id = TreeId(*next);
        *next += 1;
        Ok(id)
    }

    /// Notes that the transaction `generation` deletes the subvolume `id`.
    pub(super) fn add_deleted(&self, id: TreeId, generation: Generation) {
        self.deleted.lock().insert(id, generation);
    }

    /// Notes that the subvolume `id` is dropped, or cannot be dropped.
    pub(super) fn forget_deleted(&self, id: TreeId) {
        self.deleted.lock().remove(&id);
    }

    /// The subvolume that was deleted first, and the transaction that deleted it.
    pub(super) fn first_deleted(&self) -> Option<(TreeId, Generation)> {
        let deleted = self.deleted.lock();
        deleted.iter().map(|(&id, &generation)| (id, generation)).min_by_key(|one| one.1)
    }

    /// Whether deleted subvolumes still hold blocks.
    pub(crate) fn has_deleted(&self) -> bool {
        !self.deleted.lock().is_empty()
    }

    /// Keeps other threads from dropping blocks until the guard is dropped.
    pub(super) fn dropping(&self) -> MutexGuard<'_, Dropping> {
        self.dropping.lock()
    }

    /// Finds the highest number in use, and the subvolumes that were deleted before the volume was
    /// opened.
    ///
    /// # Errors
    /// When the root tree cannot be read, or when the root of a deleted subvolume is a block of
    /// another one. The kernel does not mount such a volume for writing either.
    pub(crate) fn load(&self, volume: &Rooms) -> Result<()> {
        *self.next.lock() = highest_id(volume)?.saturating_add(1).max(TreeId::FIRST_FREE.0);
        let first = orphan_key(TreeId(0));
        let mut cursor = Cursor::seek(volume, volume.tree(TreeId::ROOT)?, first)?;
        while let Some((key, _)) = cursor.item_of(first.objectid, first.item_type) {
            let id = TreeId(key.offset);
            // If the root item says that it is alive, it is kept, as the kernel does.
            let item = root_item(volume, id)?;
            let is_alive = item.as_ref().is_some_and(|item| item.refs.get() > 0);
            if let Some(item) = item {
                require_own_root(volume, &root_of(id, &item))?;
            }
            if id.is_subvolume() && !is_alive {
                self.add_deleted(id, Generation(0));
            }
            cursor.advance()?;
        }
        Ok(())
    }
}

/// The highest object id in the root tree below the reserved ones.
fn highest_id(volume: &Rooms) -> Result<u64> {
    let last = Key::new(TreeId::LAST_FREE.0, ItemType(u8::MAX), u64::MAX);
    let cursor = Cursor::seek_floor(volume, volume.tree(TreeId::ROOT)?, last)?;
    Ok(cursor.item().map_or(0, |(key, _)| key.objectid))
}
