//! Adding and removing chunks.
//!
//! A chunk is recorded in many places, and all of them change in one transaction:
//!
//! | where | what |
//! |---|---|
//! | chunk tree | the chunk; for every member that it is on, how many bytes are allocated |
//! | device tree | an extent for every stripe |
//! | extent tree or block-group tree | the block group |
//! | free-space tree, if there is one | that all of it is free |
//! | superblock | system chunks, and the allocated bytes of the device itself; written by the commit |
//! | memory | the map of chunks, the block groups, the ledger, the unallocated ranges of the members |
//!
//! This takes metadata and system space itself. So it happens when room is made, never inside a
//! change of a tree. One thread at a time does it, under the chunk lock, which it takes while it
//! holds a handle.
//!
//! A block group is removed when nothing in it is used, taken or pinned. Then no commit that a
//! crash could lead back to refers to it, so its place on the devices may be written again.

mod ends;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use offshoot_btrfs_format::chunk::{
    BlockGroupFlags, Chunk, DevExtent, DevItem, Profile, STRIPE_LEN, Stripe, parse_system_chunks,
};
use offshoot_btrfs_format::encode::{chunk_item, chunk_key, system_chunk_array};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::space::{BlockGroupItem, FreeSpaceInfo};
use offshoot_btrfs_format::superblock::{CompatRo, SYSTEM_CHUNK_ARRAY_SIZE, SuperblockItem};
use offshoot_btrfs_format::{DeviceId, ItemType, Key, Logical, Physical, TreeId};
use offshoot_vfs::{Error, Result, Structure};
use zerocopy::{FromBytes, IntoBytes};

use super::Base;
use super::{Obstacle, TransactionHandle};
use crate::space::chunk_plan::{self, ChunkPlan, MemberSpace};
use crate::space::{BlockGroup, Purpose, StoredGroup};
use crate::storage::malformed;
use crate::tree::Cursor;

/// The highest address that a chunk may end at.
const MOST_LOGICAL: u64 = i64::MAX.cast_unsigned();

impl Base {
    /// Calls `work` with the allocated and free space of every member. The caller holds the chunk
    /// lock, and a handle. What `work` changes, it must change back.
    pub(crate) fn with_member_spaces<T>(
        &self,
        work: impl FnOnce(&mut [MemberSpace]) -> T,
    ) -> Result<T> {
        let space = &self.live()?.space;
        if space.member_spaces.lock().is_none() {
            let loaded = self.load_member_spaces()?;
            *space.member_spaces.lock() = Some(loaded);
        }
        let allocated = space.allocated();
        let mut all = space.member_spaces.lock();
        let all = all.as_deref_mut().unwrap_or_default();
        for (own, (member, bytes)) in all.iter_mut().zip(self.members().iter().zip(allocated)) {
            own.allocated_bytes = bytes;
            // A device that has failed gets no chunk.
            if member.has_failed() {
                own.total_bytes = 0;
            }
        }
        Ok(work(all))
    }

    /// The space of every member, from the device tree.
    pub(crate) fn load_member_spaces(&self) -> Result<Vec<MemberSpace>> {
        let root = self.tree(TreeId::DEV)?;
        let mut all = Vec::with_capacity(self.members().len());
        for (index, member) in self.members().iter().enumerate() {
            let mut extents = Vec::new();
            let first = Key::new(member.id.0, ItemType::DEV_EXTENT, 0);
            let mut cursor = Cursor::seek(self, root, first)?;
            while let Some((key, data)) = cursor.item_of(member.id.0, ItemType::DEV_EXTENT) {
                let (extent, _) = DevExtent::ref_from_prefix(data).map_err(|_| {
                    Error::corrupt(Structure::DeviceExtent, format!("{key}: it is cut"))
                })?;
                let len = extent.length.get();
                extents.push(key.offset..key.offset.saturating_add(len));
                cursor.advance()?;
            }
            // A device that is shorter than the volume says gets no chunk past its end.
            let limit = self.live()?.space.member_limit(index);
            all.push(MemberSpace::new(index, member.usable_bytes().min(limit), extents));
        }
        Ok(all)
    }
}

/// The system chunks that the superblock `item` names, by address.
pub(crate) fn system_chunks_of(item: &SuperblockItem, sector_size: u32) -> Result<Vec<Chunk>> {
    let len = item.sys_chunk_array_size.get() as usize;
    let bytes = item.sys_chunk_array.get(..len).unwrap_or_default();
    let mut chunks = parse_system_chunks(bytes, sector_size).map_err(malformed)?;
    chunks.sort_by_key(|chunk| chunk.start);
    Ok(chunks)
}

impl TransactionHandle<'_> {
    /// The tree that has the block group items.
    pub(crate) fn block_group_tree(&self) -> TreeId {
        if self.volume().superblock().compat_ro.has(CompatRo::BLOCK_GROUP_TREE) {
            TreeId::BLOCK_GROUP
        } else {
            TreeId::EXTENT
        }
    }

    /// Notes in the device item of the member `index` that its superblock is complete only from
    /// this transaction on. Returns false when there is no room for that.
    pub(crate) fn note_failed(&self, index: usize) -> Result<bool> {
        let _chunks = self.space().chunk_lock.lock();
        if !self.has_system_space()? {
            return Ok(false);
        }
        let id = self.volume().members()[index].id;
        let key = Key::new(objectid::DEV_ITEMS, ItemType::DEV_ITEM, id.0);
        self.change(TreeId::CHUNK, |tree| {
            tree.modify(key, 0, |data| {
                let mut item = *DevItem::view(data.unwrap_or_default()).map_err(malformed)?;
                item.generation = self.generation().0.into();
                Ok(item.as_bytes().to_vec())
            })
        })?;
        Ok(true)
    }

    /// Gives the member at `index` another size. The caller holds the chunk lock, and no chunk
    /// reaches behind the new end.
    pub(crate) fn set_member_size(&self, index: usize, bytes: u64) -> Result<()> {
        let Some(member) = self.volume().members().get(index) else {
            return Err(Error::corrupt(Structure::DeviceItem, "there is no such member"));
        };
        let before = member.total_bytes();
        let key = Key::new(objectid::DEV_ITEMS, ItemType::DEV_ITEM, member.id.0);
        self.change(TreeId::CHUNK, |tree| {
            tree.modify(key, 0, |data| {
                let mut item = *DevItem::view(data.unwrap_or_default()).map_err(malformed)?;
                item.total_bytes = bytes.into();
                Ok(item.as_bytes().to_vec())
            })
        })?;
        member.set_total_bytes(bytes);
        self.live().count_resized(before, bytes);
        self.space().allocated.note_sizes(self.volume().members());
        *self.space().member_spaces.lock() = None;
        self.note_next_chunk()
    }

    /// Whether the chunk tree can be changed at least once. When it can be changed only once, this
    /// first allocates a system chunk if possible, so that later chunks stay possible.
    pub(crate) fn has_system_space(&self) -> Result<bool> {
        let changes = self.changes_of_chunks()?;
        if changes == 1 {
            self.allocate_chunk(Purpose::System)?;
        }
        Ok(changes > 0)
    }

    /// How often the chunk tree can be changed. The result may stop at two.
    fn changes_of_chunks(&self) -> Result<u64> {
        let (volume, space) = (self.volume(), self.space());
        let levels = u64::from(volume.tree(TreeId::CHUNK)?.level) + 1;
        let node_size = u64::from(volume.superblock().node_size);
        let once = (1 + space.allocated.member_count()) * (3 * levels + 3) * node_size;
        while space.ledger(Purpose::System).free() < 2 * once {
            if !space.load_one(volume, Purpose::System)? {
                break;
            }
        }
        Ok(space.ledger(Purpose::System).free() / once)
    }

    /// Allocates a chunk, if there is room that is not promised. Returns whether it did.
    pub(crate) fn allocate_chunk(&self, purpose: Purpose) -> Result<bool> {
        let space = self.space();
        let is_metadata = space.counts_as_metadata(purpose);
        let planned = self.volume().with_member_spaces(|members| {
            let Some((chunk, plan)) = self.next_chunk(purpose, members)? else { return Ok(None) };
            if is_metadata {
                return Ok(Some((chunk, plan, None)));
            }
            plan.take_from(members);
            let taken = plan.stripe_bytes * plan.stripes.len() as u64;
            let bytes = self.next_chunk_bytes(taken.cast_signed(), members);
            plan.give_to(members);
            Ok::<_, Error>(Some((chunk, plan, Some(bytes?))))
        })?;
        let Some((chunk, plan, next_bytes)) = planned? else { return Ok(false) };
        if next_bytes.is_some_and(|bytes| !space.set_next_chunk(bytes)) {
            return Ok(false);
        }
        // This comes before any thread gets space of the chunk: a log belongs to the last commit,
        // which does not know the chunk.
        self.obstruct(Obstacle::NewChunk);
        self.add_chunk(chunk, &plan)?;
        Ok(true)
    }

    /// Allocates a chunk of exactly `bytes` bytes on the member at `index`, in its lowest holes
    /// below `below`. Returns where its block group begins, or `None` if there is no place. Its
    /// profile has all copies on one member.
    pub(crate) fn allocate_tight_chunk(
        &self,
        purpose: Purpose,
        index: usize,
        bytes: u64,
        below: u64,
    ) -> Result<Option<Logical>> {
        let flags = self.space().flags_for(purpose);
        let copies = match flags.profile().map_err(malformed)? {
            Profile::Single => 1,
            Profile::Dup => 2,
            _ => return Ok(None),
        };
        let plan = |members: &mut [MemberSpace]| {
            let member = members.get_mut(index)?;
            chunk_plan::plan_tight(member, bytes, copies, below)
        };
        let Some(plan) = self.volume().with_member_spaces(plan)? else { return Ok(None) };
        let Some(chunk) = self.planned_chunk(purpose, &plan)? else { return Ok(None) };
        self.obstruct(Obstacle::NewChunk);
        let start = chunk.start;
        self.add_chunk(chunk, &plan)?;
        Ok(Some(start))
    }

    /// Computes how many bytes the next chunk of metadata would hold: 0 when the chunk tree cannot
    /// be changed. The caller holds the chunk lock.
    pub(crate) fn note_next_chunk(&self) -> Result<()> {
        let space = self.space();
        let bytes = match self.changes_of_chunks()? {
            0 => 0,
            _ => self.volume().with_member_spaces(|all| self.next_chunk_bytes(0, all))??,
        };
        space.ledger(Purpose::Metadata).note_next_chunk(bytes);
        space.serve(Purpose::Metadata);
        Ok(())
    }

    /// As [`note_next_chunk`](Self::note_next_chunk), but returns false, without a change, when
    /// that is too little for the promises.
    pub(crate) fn may_lose_next_chunk(&self) -> Result<bool> {
        let bytes = match self.changes_of_chunks()? {
            0 => 0,
            _ => self.volume().with_member_spaces(|all| self.next_chunk_bytes(0, all))??,
        };
        Ok(self.space().set_next_chunk(bytes))
    }

    /// How many bytes the next chunk of metadata would hold with these allocations, `more` bytes of
    /// which are not counted yet: 0 when a chunk is not a cheap way to more room.
    fn next_chunk_bytes(&self, more: i64, members: &[MemberSpace]) -> Result<u64> {
        if !self.space().allocated.has_much_room(more) {
            return Ok(0);
        }
        let next = self.next_chunk(Purpose::Metadata, members)?;
        Ok(next.map_or(0, |(chunk, _)| chunk.length))
    }

    /// The chunk that would be allocated next with these allocations, and its places on the
    /// members.
    pub(crate) fn next_chunk(
        &self,
        purpose: Purpose,
        members: &[MemberSpace],
    ) -> Result<Option<(Chunk, ChunkPlan)>> {
        let Some(plan) = self.chunk_plan(purpose, members)? else { return Ok(None) };
        Ok(self.planned_chunk(purpose, &plan)?.map(|chunk| (chunk, plan)))
    }

    /// The chunk of a plan; `None` when there is no address or no room in the superblock for it.
    fn planned_chunk(&self, purpose: Purpose, plan: &ChunkPlan) -> Result<Option<Chunk>> {
        let volume = self.volume();
        // Converted volumes have chunks that end at any address.
        let end = volume.storage.end_of_chunks();
        let Some(start) = end.checked_next_multiple_of(STRIPE_LEN) else { return Ok(None) };
        let start = Logical(start);
        let stripes = plan.stripes.iter().map(|&(index, at)| {
            let member = &volume.members()[index];
            Stripe { device: member.id, physical: Physical(at), device_uuid: member.uuid }
        });
        let stripes = stripes.collect();
        let flags = self.space().flags_for(purpose);
        let profile = flags.profile().map_err(malformed)?;
        let chunk = Chunk { start, length: plan.bytes, flags, profile, stripes };
        let fits = start.0.checked_add(chunk.length).is_some_and(|end| end <= MOST_LOGICAL);
        let fits = fits && (purpose != Purpose::System || self.fits_superblock(&chunk));
        Ok(fits.then_some(chunk))
    }

    /// The places of the next chunk with these allocations, if there is room for one.
    pub(crate) fn chunk_plan(
        &self,
        purpose: Purpose,
        members: &[MemberSpace],
    ) -> Result<Option<ChunkPlan>> {
        let flags = self.space().flags_for(purpose);
        let profile = flags.profile().map_err(malformed)?;
        Ok(chunk_plan::plan(members, flags, profile, self.most_members(flags)))
    }

    /// The most members that a chunk of this kind can have, because its item must fit.
    fn most_members(&self, flags: BlockGroupFlags) -> usize {
        let room = if flags.0 & BlockGroupFlags::SYSTEM != 0 {
            SYSTEM_CHUNK_ARRAY_SIZE / 2
        } else {
            self.volume().superblock().node_size as usize / 2
        };
        // A chunk with its key has 97 bytes with the first stripe, each further one 32.
        room.saturating_sub(97) / 32 + 1
    }

    fn fits_superblock(&self, chunk: &Chunk) -> bool {
        let all = self.volume().storage.system_chunks();
        let sector_size = self.volume().superblock().sector_size;
        let bytes = system_chunk_array(all.iter().chain([chunk]), sector_size);
        bytes.len() <= SYSTEM_CHUNK_ARRAY_SIZE
    }

    /// Writes the system chunks into the superblock, if it names others.
    pub(crate) fn store_system_chunks(&self, item: &mut SuperblockItem) -> Result<()> {
        let sector_size = self.volume().superblock().sector_size;
        let chunks = self.volume().storage.system_chunks();
        if system_chunks_of(item, sector_size)? == chunks {
            return Ok(());
        }
        let bytes = system_chunk_array(&chunks, sector_size);
        item.sys_chunk_array.fill(0);
        let place = item.sys_chunk_array.get_mut(..bytes.len()).ok_or_else(|| {
            Error::corrupt(Structure::Superblock, "it has no room for all system chunks")
        })?;
        place.copy_from_slice(&bytes);
        item.sys_chunk_array_size =
            u32::try_from(bytes.len()).expect("it fits into the superblock").into();
        Ok(())
    }

    /// Records a new chunk in all places, with the planned stripes.
    pub(crate) fn add_chunk(&self, chunk: Chunk, plan: &ChunkPlan) -> Result<()> {
        let volume = self.volume();
        let item = chunk_item(&chunk, volume.superblock().sector_size);
        self.change(TreeId::CHUNK, |tree| tree.insert(chunk_key(&chunk), &item))?;
        self.change_allocated(&chunk, true)?;
        for &(index, at) in &plan.stripes {
            let key = Key::new(volume.members()[index].id.0, ItemType::DEV_EXTENT, at);
            let extent = DevExtent {
                chunk_tree: TreeId::CHUNK.0.into(),
                chunk_objectid: objectid::FIRST_CHUNK_TREE.into(),
                chunk_offset: chunk.start.0.into(),
                length: plan.stripe_bytes.into(),
                chunk_tree_uuid: volume.storage.chunk_tree_uuid().into_bytes(),
            };
            self.change(TreeId::DEV, |tree| tree.insert(key, extent.as_bytes()))?;
        }
        let (start, len, flags) = (chunk.start, chunk.length, chunk.flags);
        let key = Key::new(start.0, ItemType::BLOCK_GROUP_ITEM, len);
        let item = BlockGroupItem {
            used: 0.into(),
            chunk_objectid: objectid::FIRST_CHUNK_TREE.into(),
            flags: flags.0.into(),
        };
        self.change(self.block_group_tree(), |tree| tree.insert(key, item.as_bytes()))?;
        if self.volume().superblock().compat_ro.has(CompatRo::FREE_SPACE_TREE) {
            let info = FreeSpaceInfo { extent_count: 1.into(), flags: 0.into() };
            let info_key = Key::new(start.0, ItemType::FREE_SPACE_INFO, len);
            let range_key = Key::new(start.0, ItemType::FREE_SPACE_EXTENT, len);
            self.change(TreeId::FREE_SPACE, |tree| {
                tree.insert_batch(&[(info_key, info.as_bytes()), (range_key, &[])])
            })?;
        }
        volume.storage.map_chunk(chunk)?;
        if flags.has_metadata() {
            // The size of the following chunk is computed after this chunk is counted. Until then
            // the ledger shows too little.
            self.space().ledger(Purpose::Metadata).note_next_chunk(0);
        }
        self.space().add_group(volume, StoredGroup { start, len, flags, used: 0 })?;
        self.note_next_chunk()
    }

    /// Removes a retired block group, and its chunk, from all trees.
    pub(crate) fn remove_group(&self, group: &Arc<BlockGroup>) -> Result<()> {
        let volume = self.volume();
        let chunk = volume.storage.chunk_at(group.start)?;
        if volume.superblock().compat_ro.has(CompatRo::FREE_SPACE_TREE) {
            let first = Key::new(group.start.0, ItemType(0), 0);
            let last = Key::new(group.end() - 1, ItemType(u8::MAX), u64::MAX);
            self.change(TreeId::FREE_SPACE, |tree| tree.remove_range(first, last))?;
        }
        let key = Key::new(group.start.0, ItemType::BLOCK_GROUP_ITEM, group.len);
        self.remove_one(self.block_group_tree(), key)?;
        for stripe in &chunk.stripes {
            let key = Key::new(stripe.device.0, ItemType::DEV_EXTENT, stripe.physical.0);
            self.remove_one(TreeId::DEV, key)?;
        }
        self.change_allocated(&chunk, false)?;
        self.remove_one(TreeId::CHUNK, chunk_key(&chunk))?;
        self.space().remove_group(group);
        volume.storage.unmap_chunk(chunk.start);
        self.space().note_removed(&chunk, volume.members());
        self.note_next_chunk()
    }

    /// Removes an item that must exist.
    fn remove_one(&self, tree: TreeId, key: Key) -> Result<()> {
        self.change(tree, |tree| {
            if tree.remove(key)? {
                return Ok(());
            }
            Err(Error::corrupt(Structure::Tree, format!("it has no item with the key {key}")))
        })
    }

    /// Counts the stripes of a chunk that is added or removed, for their members.
    fn change_allocated(&self, chunk: &Chunk, is_new: bool) -> Result<()> {
        let whole = |stripe: &Stripe| stripe.physical.0..stripe.physical.0 + chunk.stripe_bytes();
        self.change_allocated_ranges(chunk, whole, is_new)
    }

    /// Counts a range of each stripe of a chunk, for their members.
    fn change_allocated_ranges(
        &self,
        chunk: &Chunk,
        range_of: impl Fn(&Stripe) -> Range<u64>,
        is_new: bool,
    ) -> Result<()> {
        let mut stripes: BTreeMap<DeviceId, u64> = BTreeMap::new();
        for stripe in &chunk.stripes {
            let range = range_of(stripe);
            *stripes.entry(stripe.device).or_default() += range.end - range.start;
        }
        for (device, bytes) in stripes {
            let index = self.volume().members().iter().position(|member| member.id == device);
            let index = index.ok_or_else(|| {
                Error::corrupt_at(
                    Structure::Chunk,
                    chunk.start.0,
                    format!("no member is device {device}"),
                )
            })?;
            if let Some(all) = &mut *self.space().member_spaces.lock() {
                for stripe in chunk.stripes.iter().filter(|stripe| stripe.device == device) {
                    let range = range_of(stripe);
                    if is_new {
                        all[index].take(range);
                    } else {
                        all[index].give_back(range);
                    }
                }
            }
            let changed = self.space().allocated.change(index, bytes, is_new);
            let allocated = self.space().counted(changed)?;
            let key = Key::new(objectid::DEV_ITEMS, ItemType::DEV_ITEM, device.0);
            self.change(TreeId::CHUNK, |tree| {
                tree.modify(key, 0, |data| {
                    let mut item = *DevItem::view(data.unwrap_or_default()).map_err(malformed)?;
                    item.bytes_used = allocated.into();
                    Ok(item.as_bytes().to_vec())
                })
            })?;
        }
        Ok(())
    }
}
