//! The items of a subvolume in the root tree and in the UUID tree.
//!
//! | tree | key | what it stores |
//! |---|---|---|
//! | root | id ROOT_ITEM 0, or the transaction of the snapshot | the root item |
//! | root | id ROOT_BACKREF parent | where it is attached, found from the child |
//! | root | parent ROOT_REF id | the same, found from the parent |
//! | root | -5 ORPHAN_ITEM id | that it was deleted and is still to be dropped |
//! | UUID | UUID_KEY_SUBVOL between the halves of a UUID | the subvolume with this UUID |
//! | UUID | UUID_KEY_RECEIVED_SUBVOL between the halves of a UUID | all subvolumes that were received from this one, and snapshots of them |
//!
//! A volume made by an old kernel has no UUID tree. The next newer kernel that mounts it makes one.

use offshoot_btrfs_format::edit::{ITEM_SIZE, leaf_capacity};
use offshoot_btrfs_format::encode::{self, uuid_key};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::root::{RootItem, RootRef};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{EntryPlace, Errno, Error, FileId, Result, Structure};
use zerocopy::IntoBytes;

use crate::inode::{Rooms, RoomsHandle};
use crate::storage::malformed;
use crate::transaction::{NewGroup, root_item_key, stored_root};
use crate::tree::with_item;

/// The key of the orphan item of the subvolume `id`.
pub(super) fn orphan_key(id: TreeId) -> Key {
    Key::new(objectid::ORPHAN, ItemType::ORPHAN_ITEM, id.0)
}

/// The keys under which the UUID tree has a subvolume, if there is such a tree.
fn uuid_keys(volume: &Rooms, item: &RootItem) -> Result<impl Iterator<Item = Key>> {
    let own = (item.uuid, ItemType::UUID_KEY_SUBVOL);
    let received = (item.received_uuid, ItemType::UUID_KEY_RECEIVED_SUBVOL);
    let has_tree = has_uuid_tree(volume)?;
    let keys = [own, received].into_iter().filter(move |_| has_tree);
    Ok(keys.filter_map(|(uuid, item_type)| Some(uuid_key(RootItem::uuid(uuid)?, item_type))))
}

fn has_uuid_tree(volume: &Rooms) -> Result<bool> {
    match stored_root(volume, TreeId::UUID) {
        Ok(_) => Ok(true),
        Err(Error::Posix { errno: Errno::NOENT, .. }) => Ok(false),
        Err(e) => Err(e),
    }
}

/// The ids of subvolumes that the UUID tree stores under `key`, in stored form.
fn ids_of(volume: &Rooms, key: Key) -> Result<Vec<u8>> {
    let found = with_item(volume, volume.tree(TreeId::UUID)?, key, |data| Ok(data.to_vec()))?;
    Ok(found.unwrap_or_default())
}

/// Edits of the UUID tree: the new data of each key, or `None` to remove it.
pub(super) type UuidEdits = Vec<(Key, Option<Vec<u8>>)>;

/// The edits that add the new subvolume `id` with the root item `item` to the UUID tree.
///
/// # Errors
/// `EOVERFLOW` when the item has no room for one more subvolume that was received from the same
/// one.
pub(super) fn uuids_with(volume: &Rooms, id: TreeId, item: &RootItem) -> Result<UuidEdits> {
    let mut edits = UuidEdits::new();
    for key in uuid_keys(volume, item)? {
        let ids = [&ids_of(volume, key)?[..], &id.0.to_le_bytes()].concat();
        if ids.len() + ITEM_SIZE > leaf_capacity(volume.superblock().node_size) {
            let what = "one more subvolume that was received from the same one";
            return Err(Error::posix(Errno::OVERFLOW, what));
        }
        edits.push((key, Some(ids)));
    }
    Ok(edits)
}

/// The edits that remove the subvolume `id` with the root item `item` from the UUID tree.
pub(super) fn uuids_without(volume: &Rooms, id: TreeId, item: &RootItem) -> Result<UuidEdits> {
    without(volume, id, uuid_keys(volume, item)?)
}

/// The edits that remove the received UUID of the subvolume `id` with the root item `item`.
pub(super) fn received_without(volume: &Rooms, id: TreeId, item: &RootItem) -> Result<UuidEdits> {
    let is_received = |key: &Key| key.item_type == ItemType::UUID_KEY_RECEIVED_SUBVOL;
    without(volume, id, uuid_keys(volume, item)?.filter(is_received))
}

/// The edits that remove the subvolume `id` under these keys.
fn without(volume: &Rooms, id: TreeId, keys: impl Iterator<Item = Key>) -> Result<UuidEdits> {
    let mut edits = UuidEdits::new();
    for key in keys {
        let stored = ids_of(volume, key)?;
        let others = stored.chunks(size_of::<u64>()).filter(|&one| one != id.0.to_le_bytes());
        let left = others.collect::<Vec<_>>().concat();
        if left.len() < stored.len() {
            edits.push((key, Some(left).filter(|left| !left.is_empty())));
        }
    }
    Ok(edits)
}

/// Adds the items of a subvolume that is attached at `place`, where its entry has this index. The
/// caller adds the entry.
pub(super) fn add_subvolume(
    handle: &RoomsHandle<'_>,
    key: Key,
    item: &RootItem,
    place: EntryPlace<'_>,
    index: u64,
    uuids: UuidEdits,
    group: &NewGroup,
) -> Result<()> {
    let EntryPlace { dir, name } = place;
    let id = TreeId(key.objectid);
    handle.change(TreeId::ROOT, |tree| tree.insert(key, item.as_bytes()))?;
    add_place(handle, id, dir, &RootRef { dirid: dir.ino, sequence: index, name })?;
    change_uuids(handle, uuids)?;
    handle.add_quota_group(id, group)
}

/// Changes the UUID tree.
pub(super) fn change_uuids(handle: &RoomsHandle<'_>, edits: UuidEdits) -> Result<()> {
    for (key, ids) in edits {
        handle.change(TreeId::UUID, |tree| match ids {
            Some(ids) => tree.modify(key, size_of::<u64>(), |_| Ok(ids)),
            None => tree.remove(key).map(drop),
        })?;
    }
    Ok(())
}

/// Adds both references for the subvolume `id` in `dir`.
pub(super) fn add_place(
    handle: &RoomsHandle<'_>,
    id: TreeId,
    dir: FileId,
    place: &RootRef<'_>,
) -> Result<()> {
    let data = encode::root_ref(place);
    handle.change(TreeId::ROOT, |tree| {
        tree.insert(Key::new(id.0, ItemType::ROOT_BACKREF, dir.dev), &data)?;
        tree.insert(Key::new(dir.dev, ItemType::ROOT_REF, id.0), &data)
    })
}

/// Removes both references for the subvolume `id` in the subvolume of `dir`.
pub(super) fn remove_place(handle: &RoomsHandle<'_>, id: TreeId, dir: FileId) -> Result<()> {
    handle.change(TreeId::ROOT, |tree| {
        let above = tree.remove(Key::new(dir.dev, ItemType::ROOT_REF, id.0))?;
        let below = tree.remove(Key::new(id.0, ItemType::ROOT_BACKREF, dir.dev))?;
        if above && below {
            return Ok(());
        }
        Err(Error::corrupt(Structure::RootRef, format!("subvolume {id} is held by one side only")))
    })
}

/// Changes the root item of the tree `id`.
pub(super) fn change_root_item(
    handle: &RoomsHandle<'_>,
    id: TreeId,
    change: impl FnOnce(&mut RootItem),
) -> Result<()> {
    let key = root_item_key(handle.volume(), id)?;
    handle.change(TreeId::ROOT, |tree| {
        tree.modify(key, 0, |data| {
            let old = data.unwrap_or_default();
            let mut item = RootItem::parse(old).map_err(malformed)?;
            change(&mut item);
            // The root item of a very old kernel is shorter.
            Ok(item.as_bytes()[..old.len()].to_vec())
        })
    })
}
