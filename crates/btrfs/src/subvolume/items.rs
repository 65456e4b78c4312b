//! The items of a subvolume in the root tree and in the UUID tree.
//!
//! | tree | key | what it says |
//! |---|---|---|
//! | root | id ROOT_ITEM 0, or the transaction of the snapshot | the root item |
//! | root | id ROOT_BACKREF parent | where it stands, from below |
//! | root | parent ROOT_REF id | the same from above |
//! | root | -5 ORPHAN_ITEM id | it was deleted and is still to be dropped |
//! | UUID | halves of a UUID with UUID_KEY_SUBVOL between | the subvolume with it |
//! | UUID | the same with UUID_KEY_RECEIVED_SUBVOL | all that were received from one, and snapshots of these |
//!
//! A volume of an old kernel has no UUID tree. The next kernel that mounts it makes one.

use offshoot_btrfs_format::edit::{ITEM_SIZE, leaf_capacity};
use offshoot_btrfs_format::encode::{self, uuid_key};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::root::{RootItem, RootRef};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, FileId, Place, Result};
use zerocopy::IntoBytes;

use super::{malformed, root_item_key, stored_root};
use crate::transaction::Handle;
use crate::tree::with_item;
use crate::volume::Engine;

/// The key of the orphan item of the subvolume `id`.
pub(super) fn orphan_key(id: TreeId) -> Key {
    Key::new(objectid::ORPHAN, ItemType::ORPHAN_ITEM, id.0)
}

/// The keys under which the UUID tree has a subvolume.
fn uuid_keys(item: &RootItem) -> impl Iterator<Item = Key> {
    let own = (item.uuid, ItemType::UUID_KEY_SUBVOL);
    let received = (item.received_uuid, ItemType::UUID_KEY_RECEIVED_SUBVOL);
    [own, received]
        .into_iter()
        .filter_map(|(uuid, item_type)| Some(uuid_key(RootItem::uuid(uuid)?, item_type)))
}

fn has_uuid_tree(volume: &Engine) -> Result<bool> {
    match stored_root(volume, TreeId::UUID) {
        Ok(_) => Ok(true),
        Err(Error::Posix { errno: Errno::NOENT, .. }) => Ok(false),
        Err(e) => Err(e),
    }
}

/// The numbers of the subvolumes that the UUID tree has under `key`, as they are stored.
fn ids_of(volume: &Engine, key: Key) -> Result<Vec<u8>> {
    let found = with_item(volume, volume.tree(TreeId::UUID)?, key, |data| Ok(data.to_vec()))?;
    Ok(found.unwrap_or_default())
}

/// `EOVERFLOW` when the UUID tree has no room for one more subvolume that was received from where `item` was.
pub(super) fn require_uuid_room(volume: &Engine, item: &RootItem) -> Result<()> {
    if !has_uuid_tree(volume)? {
        return Ok(());
    }
    for key in uuid_keys(item) {
        let bytes = ids_of(volume, key)?.len() + size_of::<u64>() + ITEM_SIZE;
        if bytes > leaf_capacity(volume.superblock().node_size) {
            let what = "one more subvolume that was received from the same one";
            return Err(Error::posix(Errno::OVERFLOW, what));
        }
    }
    Ok(())
}

impl Handle<'_> {
    /// Adds a subvolume with this root item, which stands at `place`, where its entry has this index. The caller adds the entry.
    pub(super) fn add_subvolume(
        &self,
        key: Key,
        item: &RootItem,
        place: Place<'_>,
        index: u64,
    ) -> Result<()> {
        let Place { dir, name } = place;
        let id = TreeId(key.objectid);
        self.change(TreeId::ROOT, |tree| tree.insert(key, item.as_bytes()))?;
        self.add_place(id, dir, &RootRef { dirid: dir.ino, sequence: index, name })?;
        if !has_uuid_tree(self.volume())? {
            return Ok(());
        }
        for key in uuid_keys(item) {
            let mut ids = ids_of(self.volume(), key)?;
            ids.extend_from_slice(&id.0.to_le_bytes());
            self.change(TreeId::UUID, |tree| tree.modify(key, size_of::<u64>(), |_| Ok(ids)))?;
        }
        Ok(())
    }

    /// Says from both sides that the subvolume `id` stands in the subvolume of `dir`.
    pub(super) fn add_place(&self, id: TreeId, dir: FileId, place: &RootRef<'_>) -> Result<()> {
        let data = encode::root_ref(place);
        self.change(TreeId::ROOT, |tree| {
            tree.insert(Key::new(id.0, ItemType::ROOT_BACKREF, dir.dev), &data)?;
            tree.insert(Key::new(dir.dev, ItemType::ROOT_REF, id.0), &data)
        })
    }

    /// Says no more that the subvolume `id` stands in the subvolume of `dir`.
    pub(super) fn remove_place(&self, id: TreeId, dir: FileId) -> Result<()> {
        self.change(TreeId::ROOT, |tree| {
            let above = tree.remove(Key::new(dir.dev, ItemType::ROOT_REF, id.0))?;
            let below = tree.remove(Key::new(id.0, ItemType::ROOT_BACKREF, dir.dev))?;
            if above && below {
                return Ok(());
            }
            Err(Error::corrupt("root ref", format!("subvolume {id} is held by one side only")))
        })
    }

    /// Takes the subvolume `id` out of the UUID tree.
    pub(super) fn remove_uuids(&self, id: TreeId, item: &RootItem) -> Result<()> {
        if !has_uuid_tree(self.volume())? {
            return Ok(());
        }
        for key in uuid_keys(item) {
            let stored = ids_of(self.volume(), key)?;
            let others = stored.chunks(size_of::<u64>()).filter(|&one| one != id.0.to_le_bytes());
            let left = others.collect::<Vec<_>>().concat();
            if left.len() == stored.len() {
                continue;
            }
            self.change(TreeId::UUID, |tree| {
                if left.is_empty() {
                    return tree.remove(key).map(drop);
                }
                tree.modify(key, 0, |_| Ok(left))
            })?;
        }
        Ok(())
    }

    /// Changes the root item of the tree `id`.
    pub(super) fn change_root_item(
        &self,
        id: TreeId,
        change: impl FnOnce(&mut RootItem),
    ) -> Result<()> {
        let key = root_item_key(self.volume(), id)?;
        self.change(TreeId::ROOT, |tree| {
            tree.modify(key, 0, |data| {
                let old = data.unwrap_or_default();
                let mut item = RootItem::parse(old).map_err(malformed)?;
                change(&mut item);
                // One of a very old kernel is shorter.
                Ok(item.as_bytes()[..old.len()].to_vec())
            })
        })
    }
}
