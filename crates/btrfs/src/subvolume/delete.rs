//! Deleting subvolumes.
//!
//! The name goes at once. What the subvolume holds is dropped later, a step at a time (`drop`): an
//! ORPHAN_ITEM in the root tree says that it is to be done.
//!
//! As long as files of it are open all that is in it can be used as before, but that its root
//! directory gets no new entries, and nothing in it becomes the place of a subvolume. When the last
//! one is closed the subvolume *ends*: nobody finds anything of it any more, and it can be dropped.
//! After a crash it has ended.
//!
//! A subvolume loses its name, and ends, while nobody else has a handle. So whoever found under a
//! handle that a subvolume is there does what it does before that, and whoever comes later finds
//! nothing.

use offshoot_btrfs_format::inode::inode_flags;
use offshoot_btrfs_format::key::DiskKey;
use offshoot_btrfs_format::root::{ROOT_SUBVOL_DEAD, RootItem, RootRef};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, FileId, Place, Result, Timestamp};

use super::items::{orphan_key, uuids_without};
use crate::engine::{Engine, Handle};
use crate::inode::changes::{Changes, refuse_flags};
use crate::inode::entries::{Target, has_entries, require_name};
use crate::inode::subvolume::writable;
use crate::inode::{ROOT_DIR, inode_item, lookup, placeholder_in, tree_of, write_back};
use crate::inode::{attributes, unlink};
use crate::space::{Claim, DELETION_ITEMS};
use crate::storage::malformed;
use crate::transaction::root_item;
use crate::tree::{Cursor, with_item};

/// What may be deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Only {
    /// A subvolume with all that is in it, but for subvolumes.
    Subvolumes,
    /// A subvolume, or the place of one that is elsewhere, when nothing is in it.
    Empty,
}

/// Removes an empty directory, or subvolume, or the place of one that is elsewhere.
pub(crate) fn rmdir(volume: &Engine, place: Place<'_>, at: Timestamp) -> Result<()> {
    if unlink::rmdir(volume, place, at)? { Ok(()) } else { delete(volume, place, Only::Empty, at) }
}

/// Counts one opening of `file` less. Without openings and names it goes, and with the last one in
/// a deleted subvolume that one.
pub(crate) fn release(volume: &Engine, file: FileId) -> Result<()> {
    if volume.live_part().is_none() || placeholder_in(file).is_some() {
        return Ok(());
    }
    let removed = attributes::release(volume, file)?;
    removed.and(closed(volume, TreeId(file.dev)))
}

/// Deletes the subvolume at `place`.
pub(crate) fn delete(volume: &Engine, place: Place<'_>, only: Only, at: Timestamp) -> Result<()> {
    require_name(place.name)?;
    writable(volume, place.dir)?;
    let child = lookup(volume, place.dir, place.name)?;
    if placeholder_in(child).is_some() && only == Only::Empty {
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
            if only == Only::Empty && has_entries(volume, child)? {
                return Err(Error::posix(Errno::NOTEMPTY, format!("subvolume {id}")));
            }
            match refuse_root_flags(volume, id) {
                // In a damaged subvolume there may be no root directory, and then nothing that
                // keeps it. Whether it is empty is not known.
                Err(Error::Posix { errno: Errno::NOENT, .. }) if only == Only::Subvolumes => {}
                allowed => allowed?,
            }
            delete_alone(handle, place, id, at)
        })?
    };
    if has_ended {
        forget(volume, id)?;
    }
    volume.commit_if(is_durable)
}

/// A file of the subvolume `id` is open once less. The subvolume ends with the last one when it was
/// deleted.
fn closed(volume: &Engine, id: TreeId) -> Result<()> {
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
                volume.subvolumes.add_deleted(id, generation);
            }
            has_ended
        })?
    };
    if has_ended { forget(volume, id) } else { Ok(()) }
}

/// Has the subvolume `id`, which ended, dropped, and forgets what is buffered for it: nobody is
/// going to buffer more.
fn forget(volume: &Engine, id: TreeId) -> Result<()> {
    volume.live()?.pressure.press();
    write_back::sync_subvolume(volume, id)
}

/// Deletes it, and says whether that is to be durable at once, and whether the subvolume ended.
fn delete_alone(
    handle: &Handle<'_>,
    place: Place<'_>,
    id: TreeId,
    at: Timestamp,
) -> Result<(bool, bool)> {
    let volume = handle.volume();
    require_deletable(volume, id)?;
    let dir = place.dir;
    let mut changes = Changes::new(handle, dir)?;
    let parent = changes.directory(dir)?;
    refuse_flags(&parent, inode_flags::APPEND, dir)?;
    changes.remove_entry(place, Target::subvolume(id), index_at(volume, place, id)?, at)?;
    let tree = handle.tree(id)?;
    let missing = || Error::posix(Errno::NOENT, format!("subvolume {id}"));
    let item = root_item(volume, id)?.ok_or_else(missing)?;
    let uuids = uuids_without(volume, id, &item)?;
    let is_durable = changes.is_synchronous();
    let _moving = volume.subvolumes.moving();
    handle.whole(|| {
        changes.apply()?;
        handle.remove_place(id, dir)?;
        handle.change_root_item(id, |item: &mut RootItem| {
            item.refs = 0.into();
            item.flags |= ROOT_SUBVOL_DEAD;
            item.drop_progress = DiskKey::from(Key::MIN);
            item.drop_level = 0;
        })?;
        handle.change(TreeId::ROOT, |tree| tree.modify(orphan_key(id), 0, |_| Ok(Vec::new())))?;
        handle.change_uuids(uuids)
    })?;
    tree.set_removed();
    let has_ended = tree.end();
    if has_ended {
        volume.subvolumes.add_deleted(id, handle.generation());
    }
    Ok((is_durable, has_ended))
}

/// `EPERM` for what a mount shows, and `ENOTEMPTY` for what holds subvolumes.
fn require_deletable(volume: &Engine, id: TreeId) -> Result<()> {
    if volume.default_subvolume()? == id {
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

/// `EPERM` when the root directory of the subvolume `id` is immutable or can only be added to: its
/// name stays. It stays too where that cannot be read.
pub(super) fn refuse_root_flags(volume: &Engine, id: TreeId) -> Result<()> {
    let root = FileId { dev: id.0, ino: ROOT_DIR };
    let item = inode_item(volume, tree_of(volume, root)?, root);
    let item = item.map_err(|error| error.in_file_if_unnamed(root))?;
    refuse_flags(&item, inode_flags::IMMUTABLE | inode_flags::APPEND, root)
}

/// The index of the entry at `place` that leads to the subvolume `id`, as both sides of the root
/// tree say.
///
/// # Errors
/// When one of them is missing, or says that the subvolume stands elsewhere: nothing was changed
/// yet.
pub(super) fn index_at(volume: &Engine, place: Place<'_>, id: TreeId) -> Result<u64> {
    let Place { dir, name } = place;
    let keys = [
        Key::new(dir.dev, ItemType::ROOT_REF, id.0),
        Key::new(id.0, ItemType::ROOT_BACKREF, dir.dev),
    ];
    let mut index = None;
    for (key, structure) in keys.into_iter().zip(["root ref", "root backref"]) {
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
    index.ok_or_else(|| Error::corrupt("root ref", format!("none leads to subvolume {id}")))
}

/// Removes the entry of a subvolume that is elsewhere: nothing else of it is here.
fn remove_placeholder(
    volume: &Engine,
    place: Place<'_>,
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
