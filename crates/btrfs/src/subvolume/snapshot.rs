//! Snapshots.
//!
//! A snapshot is a new root block that points to what the root block of its source points to, so it
//! costs the same however large the source is. Both trees copy what they change from then on
//! (`transaction/extent_tree`).
//!
//! It shows the source at one moment: what was done before is in it, buffered data included, and
//! nothing that is done after. So nothing of the source may be on its way meanwhile, nor belong to
//! the transaction that takes the snapshot, in which it would go on being changed in place:
//!
//! 1. Nobody buffers data of the source, and what is buffered is written back.
//! 2. The gate is shut and everything that is queued is flushed.
//! 3. If the source was changed in the running transaction, that is finished, and written when the
//!    gate is open again.
//! 4. The root is copied, as the first thing in the next one.
//!
//! Blocks of both that are newer than the transaction before that one are their own: it is the
//! moment that the snapshot is of, which stands in the key of its root item and, with both, as the
//! last snapshot.
//!
//! So several snapshots of what does not change need one commit together, and none of their own.
//!
//! Files without names that are open in the source are in the copy as well. Nobody can open them
//! there, so they are removed from it at once, also when it is read-only, as the kernel does. When
//! a commit comes between and then a crash, they go as after any crash.

use offshoot_btrfs_format::root::{ROOT_SUBVOL_RDONLY, RootItem};
use offshoot_btrfs_format::{Generation, ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, FileId, Place, Result, Timestamp};
use uuid::Uuid;
use zerocopy::FromZeros;

use super::create::{NEW_ITEMS, require_new_name};
use super::items::uuids_with;
use super::require_subvolume;
use crate::engine::{Engine, Handle};
use crate::inode::changes::{Changes, timespec};
use crate::inode::entries::Target;
use crate::inode::subvolume::{loaded, writable};
use crate::inode::{ROOT_DIR, orphans, write_back};
use crate::space::Claim;
use crate::transaction::{NewGroup, Tree};
use crate::tree::TreeRoot;

/// A snapshot that is to be taken.
#[derive(Clone, Copy)]
pub(crate) struct Snapshot<'a> {
    pub(crate) source: TreeId,
    pub(crate) place: Place<'a>,
    pub(crate) is_read_only: bool,
    pub(crate) at: Timestamp,
}

impl Snapshot<'_> {
    /// Takes it, and says which subvolume it is.
    pub(crate) fn take(self, volume: &Engine) -> Result<TreeId> {
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
        let take = |handle: &Handle<'_>| self.take_alone(handle, &source, &group);
        let (id, is_durable) = volume.at_rest(&source, reserved, take)?;
        sharing.begins();
        drop((locks, still));
        remove_orphans(volume, id)?;
        volume.commit_if(is_durable)?;
        Ok(id)
    }

    /// Takes it, and says whether it is to be durable at once.
    fn take_alone(
        self,
        handle: &Handle<'_>,
        source: &Tree,
        group: &NewGroup,
    ) -> Result<(TreeId, bool)> {
        let (volume, place) = (handle.volume(), self.place);
        source.require_alive()?;
        let stored = require_subvolume(volume, self.source)?;
        let mut changes = Changes::new(handle, place.dir)?;
        changes.directory(place.dir)?;
        let index = changes.next_index(place.dir)?;
        let id = volume.subvolumes.take_id()?;
        changes.add_entry(place, Target::subvolume(id), index, self.at)?;
        let generation = handle.generation();
        let moment = Generation(generation.0 - 1);
        let mut item = self.root_item(&stored, generation, moment)?;
        let uuids = uuids_with(volume, id, &item)?;
        let is_durable = changes.is_synchronous();
        handle.whole(|| {
            let TreeRoot { logical, level, .. } = handle.copy_root(source, id)?;
            (item.bytenr, item.level) = (logical.0.into(), level);
            let key = Key::new(id.0, ItemType::ROOT_ITEM, moment.0);
            handle.add_subvolume(key, &item, place, index, uuids, group)?;
            source.set_last_snapshot(moment);
            handle.change_root_item(self.source, |item| item.last_snapshot = moment.0.into())?;
            changes.apply()
        })?;
        Ok((id, is_durable))
    }

    /// The root item of the snapshot, but for where its root is: that of the source with what is
    /// its own.
    fn root_item(
        self,
        source: &RootItem,
        generation: Generation,
        moment: Generation,
    ) -> Result<RootItem> {
        let generation = generation.0.into();
        let mut item = RootItem {
            generation,
            generation_v2: generation,
            last_snapshot: moment.0.into(),
            uuid: Uuid::new_v4().into_bytes(),
            parent_uuid: source.uuid,
            otransid: generation,
            otime: timespec(self.at)?,
            flags: (source.flags.get() & !ROOT_SUBVOL_RDONLY).into(),
            ..*source
        };
        if self.is_read_only {
            item.flags |= ROOT_SUBVOL_RDONLY;
        } else {
            // What may be changed is not what was received any more.
            item.received_uuid = [0; 16];
            (item.stransid, item.rtransid) = (0.into(), 0.into());
            (item.stime, item.rtime) = (FromZeros::new_zeroed(), FromZeros::new_zeroed());
        }
        Ok(item)
    }
}

/// Removes the files without names from the new snapshot `id`.
fn remove_orphans(volume: &Engine, id: TreeId) -> Result<()> {
    match orphans::remove_orphans(volume, id) {
        // The snapshot is there, and whole: on a full volume they go when it is first changed. Or
        // somebody deleted it already.
        Err(Error::Posix { errno: Errno::NOSPC | Errno::NOENT, .. }) => Ok(()),
        other => other,
    }
}
