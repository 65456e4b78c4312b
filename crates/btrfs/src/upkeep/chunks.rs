//! When chunks come and go.
//!
//! They come for those who wait in line, and ahead of them; block groups that hold nothing go
//! after each commit, but for those that will be needed again soon.

use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Result};

use crate::engine::{Engine, Handle};
use crate::space::{BlockGroup, Claim, Purpose};
use crate::tree::with_item;

/// What is worth a chunk that is not enough for it alone, in bytes: commits give back as much.
const LITTLE_BYTES: u64 = 16 << 20;

impl Engine {
    /// Allocates chunks for the first in line of this kind of space, until it is served: of what
    /// the devices have room for, or else of that and what block groups leave that hold nothing,
    /// which are removed. The caller must hold no handle, and leads the line.
    pub(super) fn grow(&self, purpose: Purpose) -> Result<()> {
        if self.grow_for_first(purpose)? {
            return Ok(());
        }
        let space = &self.live()?.space;
        let is_data = !space.counts_as_metadata(purpose);
        self.remove_empty(is_data)?;
        if self.grow_for_first(purpose)? || !is_data || !space.is_roomy() {
            return Ok(());
        }
        // Where promises count on the next chunk of metadata, that comes first.
        let is_awaited = || space.ledger(purpose).is_awaited();
        if self.chunks_would_do(purpose)? && self.try_grow(Purpose::Metadata, is_awaited)? {
            self.grow_for_first(purpose)?;
        }
        Ok(())
    }

    /// Allocates chunks until the first in line is served, if so many can be, or one if it wants
    /// little; whether there was one.
    fn grow_for_first(&self, purpose: Purpose) -> Result<bool> {
        let space = &self.live()?.space;
        let is_awaited = || space.ledger(purpose).is_awaited();
        let would_do = self.chunks_would_do(purpose)?;
        let wants_little = || space.first_in_line(purpose).is_some_and(|d| d.bytes <= LITTLE_BYTES);
        if !would_do && !wants_little() {
            return Ok(false);
        }
        let granted = || space.ledger(purpose).line().granted();
        let (before, mut has_grown) = (granted(), false);
        while is_awaited() && self.try_grow(purpose, is_awaited)? {
            has_grown = true;
            space.serve(purpose);
            // What the next in line wants may be more than all chunks have.
            if !would_do || granted() != before {
                break;
            }
        }
        Ok(has_grown)
    }

    /// Whether the first in line would be served with all chunks that the members have place for.
    /// The caller must hold no handle.
    fn chunks_would_do(&self, purpose: Purpose) -> Result<bool> {
        let space = &self.live()?.space;
        let Some(first) = space.first_in_line(purpose) else { return Ok(false) };
        let handle = self.enter()?;
        let _chunks = space.chunk_lock.lock();
        let (mut members, mut more) = (self.member_spaces()?, 0u64);
        while !space.would_fit(purpose, first, more) {
            let Some(plan) = handle.chunk_plan(purpose, &members)? else { return Ok(false) };
            more = more.saturating_add(plan.bytes);
            plan.take_from(&mut members);
        }
        Ok(true)
    }

    /// Allocates a chunk if that is still wanted when nobody else is at it, and a device has room
    /// for one that is not promised; whether it did.
    pub(crate) fn try_grow(&self, purpose: Purpose, is_wanted: impl Fn() -> bool) -> Result<bool> {
        let live = self.live()?;
        let items = live.space.chunk_items();
        // Who needs data may be the first to change anything: nothing is known of metadata then.
        let needed = || live.space.cost(items) + live.space.commit_cost();
        let metadata = live.space.ledger(Purpose::Metadata);
        self.look_around(Purpose::Metadata, || metadata.free() < metadata.reserved() + needed())?;
        let Some(handle) = self.join_for_chunk(purpose, items)? else { return Ok(false) };
        let _chunks = live.space.chunk_lock.lock();
        Ok(is_wanted() && handle.has_system_space()? && handle.allocate_chunk(purpose)?)
    }

    /// Joins with room for a chunk. Who leads the line of data waits in that of metadata, where
    /// others may have all there is for a moment, if there is place for a chunk; who leads that
    /// itself cannot.
    fn join_for_chunk(&self, purpose: Purpose, items: u64) -> Result<Option<Handle<'_>>> {
        let live = self.live()?;
        let joined = self.try_join(live, items, Claim::LastResort)?;
        let may_wait = !live.space.counts_as_metadata(purpose);
        if joined.is_some() || !may_wait || !self.has_place(purpose)? {
            return Ok(joined);
        }
        match self.join_for(items, Claim::LastResort) {
            Err(error) if error.errno() == Errno::NOSPC => Ok(None),
            joined => joined.map(Some),
        }
    }

    /// Whether the members have place for a chunk.
    fn has_place(&self, purpose: Purpose) -> Result<bool> {
        let handle = self.enter()?;
        let _chunks = handle.space().chunk_lock.lock();
        Ok(handle.next_chunk(purpose, &self.member_spaces()?)?.is_some())
    }

    /// Finds out what the next chunk of metadata would hold, and what is free in block groups for
    /// `purpose`, one after the other as long as that `is_wanted`. The caller must hold no handle.
    pub(crate) fn look_around(&self, purpose: Purpose, is_wanted: impl Fn() -> bool) -> Result<()> {
        self.note_next_chunk()?;
        let space = &self.live()?.space;
        // The trees are read under a handle: a commit must not change them meanwhile.
        let _handle = self.enter()?;
        while is_wanted() && space.load_one(&self.base, purpose)? {
            space.serve(purpose);
        }
        Ok(())
    }

    /// Finds out where metadata is free, everywhere, and allocates chunks while `bytes` are not and
    /// there is place for one. The caller must hold no handle.
    pub(crate) fn look_for_room(&self, bytes: u64) -> Result<()> {
        let metadata = self.live()?.space.ledger(Purpose::Metadata);
        let is_wanted = || metadata.free() < bytes;
        self.look_around(Purpose::Metadata, || true)?;
        while is_wanted() && self.try_grow(Purpose::Metadata, is_wanted)? {}
        if is_wanted() {
            self.remove_empty(false)?;
            while is_wanted() && self.try_grow(Purpose::Metadata, is_wanted)? {}
        }
        Ok(())
    }

    /// Finds out what the next chunk of metadata would hold, where that was nothing: whoever makes
    /// or removes a chunk notes it anew, but where the chunk tree had no room a commit may have
    /// made some. The caller must hold no handle.
    pub(crate) fn note_next_chunk(&self) -> Result<()> {
        let space = &self.live()?.space;
        if space.is_roomy() || !space.allocated.has_much_room(0) {
            return Ok(());
        }
        let handle = self.enter()?;
        let _chunks = space.chunk_lock.lock();
        handle.note_next_chunk()
    }

    /// Removes block groups that hold nothing, but for one of each kind, and those that will be
    /// needed again soon.
    pub(crate) fn remove_empty_groups(&self) -> Result<()> {
        self.remove_empty(false)
    }

    /// The same; when data wants the room, those of metadata too that are not needed now.
    fn remove_empty(&self, data_wants_room: bool) -> Result<()> {
        let live = self.live()?;
        for group in live.space.empty_groups() {
            let items = live.space.chunk_items() + bitmap_leaves(self, &group);
            let Some(handle) = self.try_join(live, items, Claim::LastResort)? else {
                return Ok(());
            };
            let _chunks = live.space.chunk_lock.lock();
            if group.is_retired() {
                // Somebody else removed it meanwhile.
                continue;
            }
            let chunk = self.storage.chunk_at(group.start)?;
            let taken = chunk.stripe_bytes() * chunk.stripes.len() as u64;
            let keep = live.space.spare_bytes(taken, data_wants_room);
            if has_cache_file(self, &group)? || !handle.has_system_space()? {
                continue;
            }
            if live.space.retire(&group, keep) {
                handle.remove_group(&group)?;
            }
        }
        Ok(())
    }
}

/// Leaves that the bitmaps of a block group may fill.
fn bitmap_leaves(volume: &Engine, group: &BlockGroup) -> u64 {
    let sector = u64::from(volume.superblock().sector_size);
    let bitmap_bytes = group.len / sector / 8;
    2 + 4 * bitmap_bytes / u64::from(volume.superblock().node_size)
}

/// Whether the root tree names a file with version 1 free space of the block group. Such a group
/// stays, because removing it would leave that file behind.
fn has_cache_file(volume: &Engine, group: &BlockGroup) -> Result<bool> {
    let key = Key::new(objectid::FREE_SPACE, ItemType(0), group.start.0);
    Ok(with_item(volume, volume.tree(TreeId::ROOT)?, key, |_| Ok(()))?.is_some())
}
