//! Snapshots.
//!
//! A snapshot is a new root block with the same pointers as the root block of its source, so its
//! cost does not depend on the size of the source. From then on both trees copy the blocks that
//! they change (`transaction/extent_tree`).
//!
//! It shows the source at one moment: all earlier changes are in it, including buffered data, and
//! no later ones. So no change of the source may be in progress at that moment. Nor may a block of
//! the source belong to the transaction that takes the snapshot, because later changes in that
//! transaction would be made in place:
//!
//! 1. The snapshot keeps all threads from buffering data of the source, and writes buffered data
//!    back.
//! 2. It quiesces the transaction and flushes all delayed items.
//! 3. If the source was changed in the running transaction, that is ended, and written after
//!    writers continue.
//! 4. It copies the root, as the first change of the next transaction.
//!
//! The *moment* of the snapshot is the transaction before the one that takes it. It is stored in
//! the key of the snapshot's root item, and in the root items of both as the last snapshot. Blocks
//! of either tree that are newer are not shared.
//!
//! So several snapshots of unchanged sources share one commit, and need none of their own.
//!
//! Open files without names in the source are in the snapshot too. They cannot be opened there, so
//! they are removed from it at once, even if it is read-only, as in the kernel. If a crash comes
//! first, they are removed as after any crash.

use offshoot_btrfs_format::root::{ROOT_SUBVOL_RDONLY, RootItem};
use offshoot_btrfs_format::{Generation, ItemType, Key, TreeId};
use offshoot_vfs::{EntryPlace, Errno, Error, FileId, Result, Timestamp};
use uuid::Uuid;
use zerocopy::FromZeros;

use super::create::{NEW_ITEMS, require_new_name};
use super::items::{add_subvolume, change_root_item, uuids_with};
use super::{MadeSubvolume, SubvolumeState, require_subvolume};
use crate::inode::changes::{Changes, timespec};
use crate::inode::entries::EntryTarget;
use crate::inode::subvolume::{loaded, writable};
use crate::inode::{ROOT_DIR, orphans, write_back};
use crate::inode::{Rooms, RoomsHandle};
use crate::space::Claim;
use crate::transaction::{ChangingTree, NewGroup};
use crate::tree::TreeRoot;

/// A request for a snapshot.
#[derive(Clone, Copy)]
pub(crate) struct Snapshot<'a> {
    pub(crate) source: TreeId,
    pub(crate) place: EntryPlace<'a>,
    pub(crate) is_read_only: bool,
    pub(crate) at: Timestamp,
}

impl Snapshot<'_> {
    /// Takes the snapshot, and returns its id.
    pub(crate) fn take(self, volume: &Rooms, subvolumes: &SubvolumeState) -> Result<TreeId> {
        require_new_name(self.place.name)?;
        timespec(self.at)?;
        writable(volume, self.place.dir)?;
        require_subvolume(volume, self.source)?;
        let sharing = volume.live()?.space.expect_sharing();
        let subvolume = loaded(volume, FileId { dev: self.source.0, ino: ROOT_DIR })?;
        let still = subvolume.still();
        let source = volume.live()?.tree(volume, self.source)?;
        source.require_alive()?;
        write_back::sync_subvolume(volume, self.source)?;
        let locks = volume.inodes.lock(&[self.place.dir]);
        let group = NewGroup::below(volume, TreeId(self.place.dir.dev))?;
        let reserved = volume.reserve_for(NEW_ITEMS + group.items(), Claim::Work)?;
        let take = |handle: &RoomsHandle<'_>| self.take_alone(handle, subvolumes, &source, &group);
        let (id, is_durable) = volume.at_rest(&source, reserved, take)?;
        sharing.begins();
        drop((locks, still));
        remove_orphans(volume, id)?;
        volume.commit_if(is_durable)?;
        Ok(id)
    }

    /// Takes the snapshot while no other thread has a handle. Returns its id, and whether it must
    /// be durable at once.
    fn take_alone(
        self,
        handle: &RoomsHandle<'_>,
        subvolumes: &SubvolumeState,
        source: &ChangingTree,
        group: &NewGroup,
    ) -> Result<(TreeId, bool)> {
        let (volume, place) = (handle.volume(), self.place);
        source.require_alive()?;
        let stored = require_subvolume(volume, self.source)?;
        let mut changes = Changes::new(handle, place.dir)?;
        changes.directory(place.dir)?;
        let index = changes.next_index(place.dir)?;
        let id = subvolumes.take_id()?;
        changes.add_entry(place, EntryTarget::subvolume(id), index, self.at)?;
        let generation = handle.generation();
        let moment = Generation(generation.0 - 1);
        let made = MadeSubvolume { id, source: Some(self.source), generation, place, at: self.at };
        let mut item = self.root_item(&stored, made.uuid(volume), generation, moment)?;
        let uuids = uuids_with(volume, id, &item)?;
        let is_durable = changes.is_synchronous();
        handle.all_or_stop(|| {
            let TreeRoot { logical, level, .. } = handle.copy_root(source, id)?;
            (item.bytenr, item.level) = (logical.0.into(), level);
            let key = Key::new(id.0, ItemType::ROOT_ITEM, moment.0);
            add_subvolume(handle, key, &item, place, index, uuids, group)?;
            source.set_last_snapshot(moment);
            change_root_item(handle, self.source, |item| item.last_snapshot = moment.0.into())?;
            changes.apply()
        })?;
        Ok((id, is_durable))
    }

    /// The root item of the snapshot, without the address of its root: that of the source with new
    /// ids and times.
    fn root_item(
        self,
        source: &RootItem,
        uuid: Uuid,
        generation: Generation,
        moment: Generation,
    ) -> Result<RootItem> {
        let generation = generation.0.into();
        let mut item = RootItem {
            generation,
            generation_v2: generation,
            last_snapshot: moment.0.into(),
            uuid: uuid.into_bytes(),
            parent_uuid: source.uuid,
            otransid: generation,
            otime: timespec(self.at)?,
            flags: (source.flags.get() & !ROOT_SUBVOL_RDONLY).into(),
            ..*source
        };
        if self.is_read_only {
            item.flags |= ROOT_SUBVOL_RDONLY;
        } else {
            // A writable snapshot is no longer the received subvolume.
            item.received_uuid = [0; 16];
            (item.stransid, item.rtransid) = (0.into(), 0.into());
            (item.stime, item.rtime) = (FromZeros::new_zeroed(), FromZeros::new_zeroed());
        }
        Ok(item)
    }
}

/// Removes the files without names from the new snapshot `id`.
fn remove_orphans(volume: &Rooms, id: TreeId) -> Result<()> {
    match orphans::remove_orphans(volume, id) {
        // The snapshot is complete. On a full volume its first change removes the files. Or another
        // thread has deleted the snapshot already.
        Err(Error::Posix { errno: Errno::NOSPC | Errno::NOENT, .. }) => Ok(()),
        other => other,
    }
}
