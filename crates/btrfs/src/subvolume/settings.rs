//! Settings of a subvolume: whether it is read-only, and whether it is the default. Also the label
//! of the volume.

use offshoot_btrfs_format::dir::{DirItemEntry, dir_entries, name_hash};
use offshoot_btrfs_format::encode;
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::root::{ROOT_SUBVOL_RDONLY, RootItem};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, FileId, Result, Structure, Timestamp};
use zerocopy::FromZeros;

use super::items::{UuidEdits, change_root_item, change_uuids, received_without};
use super::{DEFAULT, require_subvolume};
use crate::SubvolumeId;
use crate::inode::Rooms;
use crate::inode::changes::timespec;
use crate::inode::subvolume::loaded;
use crate::inode::{ROOT_DIR, orphans, write_back};
use crate::space::Claim;
use crate::storage::malformed;
use crate::transaction::root_item_key;
use crate::tree::with_item;

/// The most items that a setting changes: a root item, and the item with the received UUID.
const SETTING_ITEMS: u64 = 2;

/// As [`Engine::set_read_only`](crate::Engine::set_read_only).
pub(crate) fn set_read_only(
    volume: &Rooms,
    id: SubvolumeId,
    is_read_only: bool,
    at: Timestamp,
) -> Result<()> {
    let item = require_subvolume(volume, id)?;
    if item.is_read_only() == is_read_only {
        return Ok(());
    }
    let at = timespec(at)?;
    {
        let subvolume = loaded(volume, FileId { dev: id.0, ino: ROOT_DIR })?;
        let _still = subvolume.still();
        write_back::sync_subvolume(volume, id)?;
        let reserved = volume.reserve_for(SETTING_ITEMS, Claim::Work)?;
        volume.alone(reserved, |handle| {
            let tree = handle.tree(id)?;
            tree.require_alive()?;
            let item = require_subvolume(volume, id)?;
            let is_received = !is_read_only && RootItem::uuid(item.received_uuid).is_some();
            let uuids =
                if is_received { received_without(volume, id, &item)? } else { UuidEdits::new() };
            handle.all_or_stop(|| {
                change_root_item(handle, id, |item| {
                    let others = item.flags.get() & !ROOT_SUBVOL_RDONLY;
                    let flag = if is_read_only { ROOT_SUBVOL_RDONLY } else { 0 };
                    item.flags = (others | flag).into();
                    if is_received {
                        item.received_uuid = [0; 16];
                        (item.stransid, item.stime) = (0.into(), FromZeros::new_zeroed());
                        (item.rtransid, item.rtime) = (handle.generation().0.into(), at);
                    }
                })?;
                change_uuids(handle, uuids)
            })?;
            tree.set_read_only(is_read_only);
            Ok(())
        })?;
    }
    // While it was read-only, orphans could not be removed.
    if is_read_only { Ok(()) } else { orphans::remove_orphans(volume, id) }
}

/// As [`Engine::set_default_subvolume`](crate::Engine::set_default_subvolume).
pub(crate) fn set_default_subvolume(volume: &Rooms, id: SubvolumeId) -> Result<()> {
    let reserved = volume.reserve_for(SETTING_ITEMS, Claim::Work)?;
    volume.live()?.note_default_subvolume();
    volume.alone(reserved, |handle| {
        require_subvolume(volume, id)?;
        let location = root_item_key(volume, id)?;
        let key = Key::new(objectid::ROOT_TREE_DIR, ItemType::DIR_ITEM, name_hash(DEFAULT));
        let stored = with_item(volume, volume.tree(TreeId::ROOT)?, key, |data| Ok(data.to_vec()))?;
        let (mut all, mut is_named) = (Vec::new(), false);
        for entry in dir_entries(&stored.unwrap_or_default()) {
            let entry = entry.map_err(malformed)?;
            let is_it = entry.name == DEFAULT;
            is_named |= is_it;
            let location = if is_it { location } else { entry.location };
            all.extend(encode::dir_entry(&DirItemEntry { location, ..entry }));
        }
        if !is_named {
            let problem = "it has no entry for the default subvolume";
            return Err(Error::corrupt(Structure::RootTree, problem));
        }
        handle.change(TreeId::ROOT, |tree| tree.modify(key, 0, |_| Ok(all)))
    })
}

/// As [`Engine::label`](crate::Engine::label).
pub(crate) fn label(volume: &Rooms) -> Vec<u8> {
    let changed = volume.live().ok().and_then(|live| live.new_label.lock().clone());
    match changed {
        Some(label) => label.split(|&byte| byte == 0).next().unwrap_or_default().to_vec(),
        None => volume.superblock().item.label().to_vec(),
    }
}

/// As [`Engine::set_label`](crate::Engine::set_label).
pub(crate) fn set_label(volume: &Rooms, label: &[u8]) -> Result<()> {
    let mut field = Box::new([0; 256]);
    if label.len() >= field.len() || label.contains(&0) || label.contains(&b'\n') {
        return Err(Error::posix(Errno::INVAL, "a label of such bytes"));
    }
    field[..label.len()].copy_from_slice(label);
    let reserved = volume.reserve_for(SETTING_ITEMS, Claim::Work)?;
    volume.alone(reserved, |handle| {
        // The kernel accepts a superblock only with a root tree of the same generation, so one
        // item of that is rewritten.
        change_root_item(handle, SubvolumeId::FS, |_| ())?;
        *volume.live()?.new_label.lock() = Some(field);
        Ok(())
    })
}
