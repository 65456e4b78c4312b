//! Deleting subvolumes.
//!
//! The name is removed at once. The blocks of the subvolume are dropped later, a step at a time
//! (`drop`). An ORPHAN_ITEM in the root tree marks it for that.
//!
//! While files of it are open, everything in it can be used as before, with two exceptions: its
//! root directory gets no new entries, and no subvolume can be attached in it. When the last file
//! is closed the subvolume *ends*: no operation finds anything in it any more, and it can be
//! dropped. After a crash it has ended too.
//!
//! A subvolume loses its name, and ends, while no other thread has a handle. So an operation that
//! finds the subvolume under its handle is done before that, and later operations do not find it.

use offshoot_btrfs_format::inode::inode_flags;
use offshoot_btrfs_format::key::DiskKey;
use offshoot_btrfs_format::root::{ROOT_SUBVOL_DEAD, RootItem, RootRef};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{EntryPlace, Errno, Error, FileId, Result, Structure, Timestamp};

use super::items::{change_root_item, change_uuids, orphan_key, remove_place, uuids_without};
use super::{SubvolumeState, default_subvolume};
use crate::inode::changes::{Changes, refuse_flags};
use crate::inode::entries::{EntryTarget, has_entries, require_name};
use crate::inode::subvolume::writable;
use crate::inode::{ROOT_DIR, inode_item, lookup, placeholder_in, tree_of, write_back};
use crate::inode::{Rooms, RoomsHandle};
use crate::inode::{attributes, unlink};
use crate::space::{Claim, DELETION_ITEMS};
use crate::storage::malformed;
use crate::transaction::root_item;
use crate::tree::{Cursor, with_item};

/// What a call may delete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeleteMode {
    /// A subvolume with all its contents, unless it contains subvolumes.
    Subvolumes,
    /// A subvolume, if it is empty, or a placeholder.
    Empty,
}

/// Removes an empty directory, an empty subvolume, or a placeholder.
pub(crate) fn rmdir(
    volume: &Rooms,
    subvolumes: &SubvolumeState,
    place: EntryPlace<'_>,
    at: Timestamp,
) -> Result<()> {
    if unlink::rmdir(volume, place, at)? {
        Ok(())
    } else {
        delete(volume, subvolumes, place, DeleteMode::Empty, at)
    }
}

/// Closes `file` once. A file without openings and names is removed. With its last open file a
/// deleted subvolume ends.
pub(crate) fn release(volume: &Rooms, subvolumes: &SubvolumeState, file: FileId) -> Result<()> {
    if volume.live_part().is_none() || placeholder_in(file).is_some() {
        return Ok(());
    }
    let removed = attributes::release(volume, file)?;
    removed.and(closed(volume, subvolumes, TreeId(file.dev)))
}

/// Deletes the subvolume at `place`.
pub(crate) fn delete(
    volume: &Rooms,
    subvolumes: &SubvolumeState,
    place: EntryPlace<'_>,
    only: DeleteMode,
    at: Timestamp,
) -> Result<()> {
    require_name(place.name)?;
    writable(volume, place.dir)?;
    let child = lookup(volume, place.dir, place.name)?;
    if placeholder_in(child).is_some() && only == DeleteMode::Empty {
        return remove_placeholder(volume, place, child, at);
    }
    if child.ino != ROOT_DIR || child.dev == place.dir.dev {
        let name = place.name.escape_ascii();
        return Err(Error::posix(Errno::INVAL, format!("`{name}`, which is no subvolume")));
    }
    let id = TreeId(child.dev);
    let (is_durable, has_ended) = {
        let subvolume = volume.inodes.known_subvolume(id);
        let _still = subvolume.as_ref().map(|subvolume| subvolume.still());
        let _locks = volume.inodes.lock(&[place.dir]);
        let reserved = volume.reserve_for(DELETION_ITEMS, Claim::LastResort)?;
        volume.alone(reserved, |handle| {
            if lookup(volume, place.dir, place.name)? != child {
                return Err(Error::posix(Errno::NOENT, "the subvolume, which just moved"));
            }
            if only == DeleteMode::Empty && has_entries(volume, child)? {
                return Err(Error::posix(Errno::NOTEMPTY, format!("subvolume {id}")));
            }
            match refuse_root_flags(volume, id) {
                // A damaged subvolume may have no root directory, and so no flag that protects it.
                // Whether it is empty is unknown then.
                Err(Error::Posix { errno: Errno::NOENT, .. }) if only == DeleteMode::Subvolumes => {
                }
                allowed => allowed?,
            }
            delete_alone(handle, subvolumes, place, id, at)
        })?
    };
    if has_ended {
        forget(volume, id)?;
    }
    volume.commit_if(is_durable)
}

/// Counts that a file of the subvolume `id` was closed. If the subvolume was deleted and this was
/// its last open file, it ends.
fn closed(volume: &Rooms, subvolumes: &SubvolumeState, id: TreeId) -> Result<()> {
    let live = volume.live()?;
    let tree = live.tree(volume, id)?;
    if !tree.close_file() {
        return Ok(());
    }
    let has_ended = {
        let subvolume = volume.inodes.known_subvolume(id);
        let _still = subvolume.as_ref().map(|subvolume| subvolume.still());
        volume.between_handles(|generation| {
            let has_ended = tree.end();
            if has_ended {
                subvolumes.add_deleted(id, generation);
            }
            has_ended
        })?
    };
    if has_ended { forget(volume, id) } else { Ok(()) }
}

/// Asks the thread of the volume to drop the subvolume `id`, which has ended, and forgets its
/// buffered data. No thread will buffer more.
fn forget(volume: &Rooms, id: TreeId) -> Result<()> {
    volume.live()?.pressure.press();
    write_back::sync_subvolume(volume, id)
}

/// Deletes the subvolume while no other thread has a handle. Returns whether that must be durable
/// at once, and whether the subvolume has ended.
fn delete_alone(
    handle: &RoomsHandle<'_>,
    subvolumes: &SubvolumeState,
    place: EntryPlace<'_>,
    id: TreeId,
    at: Timestamp,
) -> Result<(bool, bool)> {
    let volume = handle.volume();
    require_deletable(volume, id)?;
    let dir = place.dir;
    let mut changes = Changes::new(handle, dir)?;
    let parent = changes.directory(dir)?;
    refuse_flags(&parent, inode_flags::APPEND, dir)?;
    changes.remove_entry(place, EntryTarget::subvolume(id), index_at(volume, place, id)?, at)?;
    let tree = handle.tree(id)?;
    let missing = || Error::posix(Errno::NOENT, format!("subvolume {id}"));
    let item = root_item(volume, id)?.ok_or_else(missing)?;
    let uuids = uuids_without(volume, id, &item)?;
    let is_durable = changes.is_synchronous();
    let _moving = volume.moves.moving();
    handle.all_or_stop(|| {
        changes.apply()?;
        remove_place(handle, id, dir)?;
        change_root_item(handle, id, |item: &mut RootItem| {
            item.refs = 0.into();
            item.flags |= ROOT_SUBVOL_DEAD;
            item.drop_progress = DiskKey::from(Key::MIN);
            item.drop_level = 0;
        })?;
        handle.change(TreeId::ROOT, |tree| tree.modify(orphan_key(id), 0, |_| Ok(Vec::new())))?;
        change_uuids(handle, uuids)
    })?;
    tree.set_removed();
    let has_ended = tree.end();
    if has_ended {
        subvolumes.add_deleted(id, handle.generation());
    }
    Ok((is_durable, has_ended))
}

/// `EPERM` for the default subvolume, `ENOTEMPTY` for one that contains subvolumes.
fn require_deletable(volume: &Rooms, id: TreeId) -> Result<()> {
    if default_subvolume(volume)? == id {
        let what = format!("deleting subvolume {id}, which is the default one");
        return Err(Error::posix(Errno::PERM, what));
    }
    let first = Key::new(id.0, ItemType::ROOT_REF, 0);
    let cursor = Cursor::seek(volume, volume.tree(TreeId::ROOT)?, first)?;
    if let Some((key, _)) = cursor.item_of(id.0, ItemType::ROOT_REF) {
        let what = format!("subvolume {id}, which holds subvolume {}", key.offset);
        return Err(Error::posix(Errno::NOTEMPTY, what));
    }
    Ok(())
}

/// `EPERM` when the root directory of the subvolume `id` is immutable or append-only. If it cannot
/// be read, that is an error too, and the name stays.
pub(super) fn refuse_root_flags(volume: &Rooms, id: TreeId) -> Result<()> {
    let root = FileId { dev: id.0, ino: ROOT_DIR };
    let item = inode_item(volume, tree_of(volume, root)?, root);
    let item = item.map_err(|error| error.in_file_if_unnamed(root))?;
    refuse_flags(&item, inode_flags::IMMUTABLE | inode_flags::APPEND, root)
}

/// The index of the entry at `place` that leads to the subvolume `id`, from both references in the
/// root tree.
///
/// # Errors
/// When a reference is missing, or names another place. Nothing was changed yet.
pub(super) fn index_at(volume: &Rooms, place: EntryPlace<'_>, id: TreeId) -> Result<u64> {
    let EntryPlace { dir, name } = place;
    let keys = [
        Key::new(dir.dev, ItemType::ROOT_REF, id.0),
        Key::new(id.0, ItemType::ROOT_BACKREF, dir.dev),
    ];
    let mut index = None;
    for (key, structure) in keys.into_iter().zip([Structure::RootRef, Structure::RootBackref]) {
        let found = with_item(volume, volume.tree(TreeId::ROOT)?, key, |data| {
            let found = RootRef::parse(data).map_err(malformed)?;
            let is_here = found.dirid == dir.ino && found.name == name;
            Ok(is_here.then_some(found.sequence))
        })?;
        let here = found.flatten().filter(|&here| index.is_none_or(|index| index == here));
        let shown = name.escape_ascii();
        let wrong = format!("{key} does not say that the subvolume is `{shown}` in {dir}");
        index = Some(here.ok_or_else(|| Error::corrupt(structure, wrong).in_file(dir))?);
    }
    index.ok_or_else(|| Error::corrupt(Structure::RootRef, format!("none leads to subvolume {id}")))
}

/// Removes the entry of a subvolume that is attached elsewhere. Nothing else of it is in this
/// subvolume.
fn remove_placeholder(
    volume: &Rooms,
    place: EntryPlace<'_>,
    placeholder: FileId,
    at: Timestamp,
) -> Result<()> {
    let _locks = volume.inodes.lock(&[place.dir]);
    let handle = volume.join_to_remove()?;
    let mut changes = Changes::new(&handle, place.dir)?;
    if lookup(volume, place.dir, place.name)? != placeholder {
        return Err(Error::posix(Errno::NOENT, "the place of a subvolume, which just moved"));
    }
    changes.take_place_away(place, placeholder, true, at)?;
    let is_durable = changes.is_synchronous();
    changes.apply()?;
    drop(handle);
    volume.commit_if(is_durable)
}
