//! The extent tree: reference counts of extents, and the owners of the references.
//!
//! The item of an extent counts all references to it, and holds as many of them as fit inline. The
//! others are items of their own behind it ("keyed"). A reference is a [`RefOwner`] and a count.
//!
//! A tree block that several subvolumes share counts one reference for each of them. The blocks and
//! data below it count for the tree that the block belongs to, until that tree copies the block.
//! From then on, the old block itself owns what is below it (a *full back reference*).

mod ahead;
mod moved;
mod verify;

#[cfg(test)]
mod tests;

use std::ops::Range;

use offshoot_btrfs_format::block::HEADER_RELOC;
use offshoot_btrfs_format::extent::{
    EXTENT_FLAG_DATA, EXTENT_FLAG_FULL_BACKREF, EXTENT_FLAG_TREE_BLOCK, ExtentItem, InlineRef,
    ParsedExtent, RefOwner, TreeBlockInfo, most_extent_item,
};
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::key::DiskKey;
use offshoot_btrfs_format::superblock::Incompat;
use offshoot_btrfs_format::{Generation, ItemType, Key, Logical, TreeId, U64};
use offshoot_vfs::{Error, Result, Structure};
use zerocopy::IntoBytes;

use super::TransactionHandle;
use super::checksums::remove_checksums;
use super::refs::{ExtentKind, PendingRefs};
use crate::block::TreeBlock;
use crate::storage::malformed;
use crate::transaction::ChangingTree;
use crate::tree::{Cursor, ItemEdit};
pub(super) use ahead::PlannedReferences;
pub(crate) use moved::extents_in;
pub(super) use moved::{KnownReferences, known_references, no_parent};
use verify::{KnownExtent, keyed_owner, names, wrong};

/// A parsed item of the extent tree.
#[derive(Debug)]
struct ExtentRecord {
    key: Key,
    refs: u64,
    generation: Generation,
    flags: u64,
    block: Option<TreeBlockInfo>,
    /// The subvolume that simple quotas count the extent for.
    owner: Option<TreeId>,
    inline: Vec<(RefOwner, u32)>,
}

/// The effects of references that run together.
#[derive(Default)]
pub(super) struct RefRun {
    /// The edits of extent items, in ascending order.
    edits: Vec<(Key, Option<Vec<u8>>)>,
    /// The counts that applying the edits must return.
    expected: ExtentCounts,
    /// Ranges that become extents, ascending.
    used: Vec<Range<u64>>,
    /// Ranges that stop being extents, ascending.
    freed: Vec<Range<u64>>,
    /// Data whose checksums are to be removed, ascending.
    unsummed: Vec<Range<u64>>,
    /// The part of that which never became an extent.
    unmade: Vec<Range<u64>>,
}

/// What a search for the reference of a file does at a gap between keyed references whose hashes
/// collide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GapSearch {
    /// It ends there: a new reference goes into the gap.
    Stop,
    /// It continues through all references of the kind: a reference that is given up must be
    /// somewhere.
    Cross,
}

#[derive(Default)]
struct ExtentCounts {
    inserted: usize,
    replaced: usize,
    removed: usize,
}

impl ExtentRecord {
    fn parse(key: Key, data: &[u8]) -> Result<Self> {
        let extent = ParsedExtent::parse(key.item_type, data).map_err(malformed)?;
        let (mut inline, mut made_for) = (Vec::new(), None);
        for reference in extent.inline_refs() {
            match reference.map_err(malformed)? {
                InlineRef::Owner(root) => made_for = Some(TreeId(root)),
                reference => inline.extend(reference.owner()),
            }
        }
        Ok(Self {
            key,
            refs: extent.item.refs.get(),
            generation: Generation(extent.item.generation.get()),
            flags: extent.item.flags.get(),
            block: extent.block.copied(),
            owner: made_for,
            inline,
        })
    }

    /// Whether the block refers to its children by its own address, with delayed references
    /// counted.
    fn is_full(&self, pending: Option<&PendingRefs>) -> bool {
        self.flags & EXTENT_FLAG_FULL_BACKREF != 0
            || pending.is_some_and(|pending| pending.has_full_backref)
    }

    fn len(&self) -> usize {
        size_of::<ExtentItem>()
            + if self.block.is_some() { size_of::<TreeBlockInfo>() } else { 0 }
            + if self.owner.is_some() { 1 + size_of::<U64>() } else { 0 }
            + self.inline.iter().map(|(owner, _)| owner.inline_size()).sum::<usize>()
    }

    fn encode(&mut self) -> Vec<u8> {
        // The format orders by type, and within a type in descending order.
        self.inline
            .sort_by_key(|(owner, _)| (owner.item_type(), std::cmp::Reverse(owner.sequence())));
        let mut data = Vec::with_capacity(self.len());
        let item = ExtentItem {
            refs: self.refs.into(),
            generation: self.generation.0.into(),
            flags: self.flags.into(),
        };
        data.extend_from_slice(item.as_bytes());
        data.extend_from_slice(self.block.as_ref().map_or(&[][..], IntoBytes::as_bytes));
        if let Some(owner) = self.owner {
            data.push(ItemType::EXTENT_OWNER_REF.0);
            data.extend_from_slice(&owner.0.to_le_bytes());
        }
        for (owner, count) in &self.inline {
            data.push(owner.item_type().0);
            owner.encode(*count, true, &mut data);
        }
        data
    }
}

fn underflow(logical: Logical, owner: RefOwner) -> Error {
    wrong(logical, &format!("{owner} gives up a reference that it does not count"))
}

impl TransactionHandle<'_> {
    /// Queues the changes of references that result from copying the block `old` to `new`.
    pub(super) fn references_of_copy(
        &self,
        tree: &ChangingTree,
        old: &TreeBlock,
        new: &TreeBlock,
    ) -> Result<()> {
        let header = old.header();
        let (logical, level) = (Logical(header.bytenr.get()), header.level);
        let node_size = u64::from(self.volume.superblock().node_size);
        let may_be_shared = tree.id.is_subvolume()
            && (header.generation() <= tree.last_snapshot()
                || header.flags.get() & HEADER_RELOC != 0);
        let owner = RefOwner::Tree { root: tree.id };
        if !may_be_shared {
            self.transaction.refs.give_up_unshared(logical, node_size, level, owner);
            return Ok(());
        }
        let _counting = self.live.counting(logical);
        let (count, is_full) = self.count_of(logical, level, owner)?;
        if count > 1 && header.owner() == tree.id && !is_full {
            self.refer_to_children(old, None, 1)?;
            self.transaction.refs.set_full_backref(logical, node_size, level);
        } else if count > 1 {
            self.refer_to_children(new, Some(tree.id), 1)?;
        } else if is_full {
            self.refer_to_children(new, Some(tree.id), 1)?;
            self.refer_to_children(old, None, -1)?;
        }
        self.leave_block(logical, level, owner);
        Ok(())
    }

    /// Gives up the reference of `owner` to the block at `logical`, and returns `None`, if others
    /// refer to it too. Otherwise returns whether the block refers to its children by its own
    /// address.
    pub(crate) fn leave_if_shared(
        &self,
        logical: Logical,
        level: u8,
        owner: RefOwner,
    ) -> Result<Option<bool>> {
        let _counting = self.live.counting(logical);
        let (count, is_full) = self.count_of(logical, level, owner)?;
        if count > 1 {
            self.leave_block(logical, level, owner);
            return Ok(None);
        }
        Ok(Some(is_full))
    }

    /// Makes the block refer to its children by its own address, and no longer for `tree`, which it
    /// belongs to and which is being deleted. Returns false when it was so before.
    pub(crate) fn detach(&self, block: &TreeBlock, tree: TreeId) -> Result<bool> {
        let logical = Logical(block.header().bytenr.get());
        let _counting = self.live.counting(logical);
        if self.is_full(logical, block.header().level)? {
            return Ok(false);
        }
        self.all_or_stop(|| {
            self.refer_to_children(block, None, 1)?;
            self.refer_to_children(block, Some(tree), -1)
        })?;
        let node_size = u64::from(self.volume.superblock().node_size);
        self.transaction.refs.set_full_backref(logical, node_size, block.header().level);
        Ok(true)
    }

    /// Gives up the reference of `owner` to the block at `logical`.
    pub(crate) fn leave_block(&self, logical: Logical, level: u8, owner: RefOwner) {
        let node_size = u64::from(self.volume.superblock().node_size);
        self.transaction.refs.add(logical, node_size, ExtentKind::Block { level }, owner, -1);
    }

    /// Whether all references to the data at `logical` are those of `owner`, also after a crash: a
    /// reference that another owner gave up counts until a commit without it is on the devices.
    ///
    /// # Errors
    /// When the extent tree has no such data, `len` bytes long, or contradicts itself about it.
    pub(crate) fn is_only_of(&self, logical: Logical, len: u64, owner: RefOwner) -> Result<bool> {
        if self.live.logs_moved_extents() {
            // The log may still have the extent for a previous owner, or at another place.
            return Ok(false);
        }
        let pending = self.transaction.refs.get(logical);
        if pending.as_ref().is_some_and(|one| one.changes.keys().any(|other| *other != owner)) {
            return Ok(false);
        }
        if pending.is_some_and(|pending| pending.is_new) {
            return Ok(true);
        }
        // A keyed reference exists only beside other references. It counts as if these still
        // existed.
        let ExtentRecord { refs, inline, .. } = self.extent(logical, len, ExtentKind::Data)?.record;
        let count = inline.iter().find(|(one, _)| *one == owner).map_or(0, |(_, count)| *count);
        Ok(u64::from(count) == refs && !self.live.was_shared(logical))
    }

    /// Whether a snapshot of the tree `id` may share what the transaction `generation` made in it.
    pub(crate) fn is_as_old_as_a_snapshot(
        &self,
        id: TreeId,
        generation: Generation,
    ) -> Result<bool> {
        Ok(generation <= self.live.tree(self.volume, id)?.last_snapshot())
    }

    /// Changes the count of everything that `block` refers to by `delta`, for the tree `root`, or
    /// without it for the block itself.
    pub(crate) fn refer_to_children(
        &self,
        block: &TreeBlock,
        root: Option<TreeId>,
        delta: i64,
    ) -> Result<()> {
        let refs = &self.transaction.refs;
        let parent = Logical(block.header().bytenr.get());
        let node_size = u64::from(self.volume.superblock().node_size);
        if !block.is_leaf() {
            let kind = ExtentKind::Block { level: block.header().level - 1 };
            let owner = root.map_or(RefOwner::Block { parent }, |root| RefOwner::Tree { root });
            for pointer in block.pointers() {
                refs.add(pointer.logical(), node_size, kind, owner, delta);
            }
            return Ok(());
        }
        for (slot, item) in block.items().iter().enumerate() {
            let key = item.key.get();
            if key.item_type != ItemType::EXTENT_DATA {
                continue;
            }
            let extent = FileExtent::parse(block.data(slot)).map_err(malformed)?;
            if let FileExtentBody::Extent { disk_bytenr, disk_num_bytes, offset, .. } = extent.body
            {
                let owner = root.map_or(RefOwner::Leaf { parent }, |root| RefOwner::File {
                    root,
                    ino: key.objectid,
                    offset: key.offset.wrapping_sub(offset),
                });
                refs.add(disk_bytenr, disk_num_bytes, ExtentKind::Data, owner, delta);
            }
        }
        Ok(())
    }

    /// Runs the delayed references until none are left. The changes of trees queue more of them.
    /// This ends, because a block is copied once in a transaction.
    ///
    /// All pending references run together: first the edits of all items are planned, and then they
    /// are applied as one batch, to the extent tree and after that to the free-space tree.
    ///
    /// No item of an extent changes anywhere else. So what was `planned` is true until the first
    /// batch is applied.
    pub(super) fn run_references(&self, mut planned: PlannedReferences) -> Result<()> {
        debug_assert!(self.gate.is_none(), "other threads have handles");
        loop {
            let pending = self.transaction.refs.take();
            if pending.is_empty() {
                return Ok(());
            }
            let mut run = RefRun::default();
            for (at, pending) in &pending {
                let known = planned.take(Logical(*at), pending);
                self.plan(Logical(*at), pending, known, &mut run)?;
            }
            planned = PlannedReferences::default();
            self.remove_data(&run)?;
            self.apply(run)?;
            for (_, pending) in &pending {
                self.transaction.refs.uncount(pending);
            }
        }
    }

    /// Plans the changes of one extent. `known` is its item, if that was looked up before.
    fn plan(
        &self,
        logical: Logical,
        pending: &PendingRefs,
        known: Option<KnownExtent>,
        run: &mut RefRun,
    ) -> Result<()> {
        if let Some((len, kind)) = pending.contradiction {
            let (first, first_len) = (pending.kind, pending.len);
            let problem = format!(
                "it is referred to as {first:?} of {first_len} bytes and as {kind:?} of {len} bytes"
            );
            return Err(wrong(logical, &problem));
        }
        if pending.is_new {
            return self.add_extent(logical, pending, run);
        }
        if pending.changes.is_empty() && !pending.has_full_backref {
            return Ok(());
        }
        let known = if let Some(known) = known {
            #[cfg(debug_assertions)]
            known.require_current(&self.extent(logical, pending.len, pending.kind)?);
            known
        } else {
            self.stats().looked_up_late();
            self.extent(logical, pending.len, pending.kind)?
        };
        let left = known.record.refs.checked_add_signed(pending.net()).ok_or_else(|| {
            let (refs, less) = (known.record.refs, pending.net().unsigned_abs());
            wrong(logical, &format!("it counts {refs} references, and {less} are given up"))
        })?;
        let in_items = known.in_items;
        if left == 0 {
            self.require_all_given_up(&known, logical, pending)?;
            return self.remove_extent(logical, pending, &known.record, in_items > 0, run);
        }
        if pending.must_go {
            // By its root item, the last snapshot of the tree is older than the block. So the block
            // was copied without a look at its count. Continuing would count everything below it
            // once too little.
            let found = names(&known.record.inline);
            let problem = format!(
                "the block is younger than the last snapshot of its tree, so only the tree may \
                 refer to it, but {left} more references are counted; it names {found}"
            );
            return Err(self.contradicted(logical, &problem));
        }
        let mut record = known.record;
        let is_own = |owner: &RefOwner| record.inline.iter().all(|(one, _)| one == owner);
        if pending.kind == ExtentKind::Data
            && !(in_items == 0 && pending.changes.keys().all(is_own))
        {
            self.transaction.shared.lock().insert(logical.0);
        }
        record.refs = left;
        if pending.has_full_backref {
            record.flags |= EXTENT_FLAG_FULL_BACKREF;
        }
        for (&owner, &delta) in &pending.changes {
            self.change_owner(&mut record, logical, owner, delta, in_items > 0)?;
        }
        run.expected.replaced += 1;
        run.edits.push((record.key, Some(record.encode())));
        Ok(())
    }

    /// Removes the checksums of data that is freed, and then frees the part of it that never became
    /// an extent. Its checksums were stored when it was written.
    fn remove_data(&self, run: &RefRun) -> Result<()> {
        remove_checksums(self, &run.unsummed)?;
        for unmade in &run.unmade {
            let (logical, len) = (Logical(unmade.start), unmade.end - unmade.start);
            if self.log().is_used() {
                // Until this transaction is on the devices, a log may refer to the extent.
                self.pin(logical, len);
            } else {
                self.live.space.give_back(logical, len)?;
            }
        }
        Ok(())
    }

    /// Applies the planned changes.
    fn apply(&self, run: RefRun) -> Result<()> {
        let edits: Vec<ItemEdit<'_>> =
            run.edits.iter().map(|(key, data)| (*key, data.as_deref())).collect();
        self.require_unused(&run.used)?;
        let applied = self.change(TreeId::EXTENT, |tree| tree.apply_batch(&edits))?;
        let ExtentCounts { inserted, replaced, removed } = run.expected;
        if (applied.inserted, applied.replaced, applied.removed) != (inserted, replaced, removed) {
            let problem = format!(
                "{inserted} items should have come, {replaced} changed, {removed} gone, but it was {applied:?}"
            );
            return Err(Error::corrupt(Structure::ExtentTree, problem));
        }
        let edits = self.space().edits_of_free_space(self.volume, &run.freed, &run.used)?;
        let edits: Vec<ItemEdit<'_>> =
            edits.iter().map(|(key, data)| (*key, data.as_deref())).collect();
        if !edits.is_empty() {
            self.change(TreeId::FREE_SPACE, |tree| tree.apply_batch(&edits))?;
        }
        for used in &run.used {
            self.live.space.count_used(Logical(used.start), used.end - used.start, true)?;
        }
        for freed in &run.freed {
            self.live.space.count_used(Logical(freed.start), freed.end - freed.start, false)?;
        }
        self.transaction.pinned.lock().extend(run.freed);
        Ok(())
    }

    /// Changes the count of one owner: inline if it is there or fits, else in a keyed item.
    fn change_owner(
        &self,
        record: &mut ExtentRecord,
        logical: Logical,
        owner: RefOwner,
        delta: i64,
        has_items: bool,
    ) -> Result<()> {
        let is_block = matches!(owner, RefOwner::Tree { .. } | RefOwner::Block { .. });
        let changed = |count: u32| match i64::from(count).saturating_add(delta) {
            // A tree, or a block, refers to a block at most once.
            more @ 2.. if is_block => {
                Err(wrong(logical, &format!("{owner} would refer to the block {more} times")))
            }
            count => u32::try_from(count).map_err(|_| underflow(logical, owner)),
        };
        if let Some(at) = record.inline.iter().position(|(one, _)| *one == owner) {
            match changed(record.inline[at].1)? {
                0 => drop(record.inline.remove(at)),
                count => record.inline[at].1 = count,
            }
            return Ok(());
        }
        let gaps = if delta < 0 { GapSearch::Cross } else { GapSearch::Stop };
        let keyed = if has_items { self.find_keyed(logical, owner, gaps)? } else { None };
        if let Some((key, count)) = keyed {
            let count = changed(count)?;
            return self.change(TreeId::EXTENT, |tree| {
                if count == 0 {
                    return tree.remove(key).map(drop);
                }
                let mut data = Vec::new();
                owner.encode(count, false, &mut data);
                tree.modify(key, 0, |_| Ok(data))
            });
        }
        let count = changed(0)?;
        let most = most_extent_item(self.volume.superblock().node_size);
        if record.len() + owner.inline_size() <= most {
            record.inline.push((owner, count));
            return Ok(());
        }
        let key = self.free_key(logical, owner)?;
        let mut data = Vec::new();
        owner.encode(count, false, &mut data);
        self.change(TreeId::EXTENT, |tree| tree.insert(key, &data))
    }

    /// The keyed item of `owner`, with its count. References of files with equal hashes have
    /// successive keys. A removed one leaves a gap.
    fn find_keyed(
        &self,
        logical: Logical,
        owner: RefOwner,
        gaps: GapSearch,
    ) -> Result<Option<(Key, u32)>> {
        let root = self.volume.tree(TreeId::EXTENT)?;
        let first = Key::new(logical.0, owner.item_type(), owner.sequence());
        let mut cursor = Cursor::seek(self.volume, root, first)?;
        let mut expected = first;
        let crosses = gaps == GapSearch::Cross && matches!(owner, RefOwner::File { .. });
        let is_candidate = |key: Key, expected: Key| {
            let is_alike = key.objectid == logical.0 && key.item_type == owner.item_type();
            key == expected || (crosses && is_alike)
        };
        while let Some((key, data)) = cursor.item().filter(|(key, _)| is_candidate(*key, expected))
        {
            if let Some((_, count)) = keyed_owner(key, data)?.filter(|(found, _)| *found == owner) {
                return Ok(Some((key, count)));
            }
            expected.offset = expected.offset.wrapping_add(1);
            cursor.advance()?;
        }
        Ok(None)
    }

    /// The first free key for a keyed item of `owner`.
    fn free_key(&self, logical: Logical, owner: RefOwner) -> Result<Key> {
        let root = self.volume.tree(TreeId::EXTENT)?;
        let mut key = Key::new(logical.0, owner.item_type(), owner.sequence());
        let mut cursor = Cursor::seek(self.volume, root, key)?;
        while cursor.item().is_some_and(|(found, _)| found == key) {
            key.offset = key.offset.wrapping_add(1);
            cursor.advance()?;
        }
        Ok(key)
    }

    fn add_extent(&self, logical: Logical, pending: &PendingRefs, run: &mut RefRun) -> Result<()> {
        let refs = u64::try_from(pending.net()).map_err(|_| {
            Error::corrupt_at(Structure::ExtentTree, logical.0, "a new extent is not held")
        })?;
        if refs == 0 {
            // The extent was made and freed in this transaction.
            if pending.kind == ExtentKind::Data {
                run.unsummed.push(logical.0..logical.0 + pending.len);
                run.unmade.push(logical.0..logical.0 + pending.len);
                return Ok(());
            }
            return self.live.space.give_back(logical, pending.len);
        }
        let is_skinny = self.volume.superblock().incompat.has(Incompat::SKINNY_METADATA);
        let (key, flags, block) = match pending.kind {
            ExtentKind::Data => {
                (Key::new(logical.0, ItemType::EXTENT_ITEM, pending.len), EXTENT_FLAG_DATA, None)
            }
            ExtentKind::Block { level } if is_skinny => (
                Key::new(logical.0, ItemType::METADATA_ITEM, level.into()),
                EXTENT_FLAG_TREE_BLOCK,
                None,
            ),
            ExtentKind::Block { level } => {
                let key: DiskKey = self.first_key_of(logical).into();
                (
                    Key::new(logical.0, ItemType::EXTENT_ITEM, pending.len),
                    EXTENT_FLAG_TREE_BLOCK,
                    Some(TreeBlockInfo { key, level }),
                )
            }
        };
        let made_for = pending.made_for.filter(|&id| self.count_new_extent(id, pending.len));
        let owner = made_for.filter(|_| pending.kind == ExtentKind::Data);
        let generation = self.generation();
        let mut record =
            ExtentRecord { key, refs: 0, generation, flags, block, owner, inline: Vec::new() };
        for (&owner, &count) in &pending.changes {
            self.change_owner(&mut record, logical, owner, count, false)?;
        }
        record.refs = refs;
        run.expected.inserted += 1;
        run.edits.push((key, Some(record.encode())));
        run.used.push(logical.0..logical.0 + pending.len);
        Ok(())
    }

    /// The first key of a block of this transaction.
    fn first_key_of(&self, logical: Logical) -> Key {
        let block = self.transaction.dirty.get(logical).map(|latch| latch.read().clone());
        block.filter(|block| !block.is_empty()).map_or(Key::MIN, |block| block.key(0))
    }

    fn remove_extent(
        &self,
        logical: Logical,
        pending: &PendingRefs,
        record: &ExtentRecord,
        has_items: bool,
        run: &mut RefRun,
    ) -> Result<()> {
        // The free ranges are loaded from the trees before the trees show this range as free.
        self.live.space.load(self.volume, &*self.live.space.group_of(logical)?)?;
        if has_items {
            let first = Key::new(logical.0, ItemType::TREE_BLOCK_REF, 0);
            let last = Key::new(logical.0, ItemType::SHARED_DATA_REF, u64::MAX);
            self.change(TreeId::EXTENT, |tree| tree.remove_range(first, last))?;
        }
        match pending.kind {
            ExtentKind::Data => {
                self.uncount_data(record.owner, record.generation, pending.len);
                run.unsummed.push(logical.0..logical.0 + pending.len);
            }
            ExtentKind::Block { level } if pending.may_be_of_a_subvolume() => {
                self.uncount_block(logical, level, record.generation)?;
            }
            ExtentKind::Block { .. } => {}
        }
        run.expected.removed += 1;
        run.edits.push((record.key, None));
        run.freed.push(logical.0..logical.0 + pending.len);
        Ok(())
    }
}
