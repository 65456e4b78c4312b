//! Dropping the blocks of deleted subvolumes.
//!
//! A block that the deleted subvolume shares with another one loses a reference. An unshared block
//! is freed after everything below it was given up, so the walk goes down into it. A freed block is
//! part of the last commit, so it is not used again before the next one.
//!
//! ```text
//!   root          o o o * . .     o  given up      *  the next pointer (the progress)
//!                      /  \       .  still held
//!   level 1     o o * . .  . . .
//! ```
//!
//! Blocks below a shared block may be counted for the deleted subvolume, if that wrote the shared
//! block. Before the walk leaves such a block to the others, it *detaches* the block and all such
//! blocks below it: from then on they refer to what is below them by their own address.
//!
//! The walk is done in steps of bounded size. Between two steps the root item stores the progress:
//! `drop_progress` is the key of the next pointer, and `drop_level` the level of the node with that
//! pointer. All pointers before it are given up, and the nodes above it are not shared. So the
//! kernel can continue where this engine stopped, and the other way round. How far the blocks below
//! the next pointer are detached is known only in memory. A walk that starts there again finds them
//! detached already.
//!
//! The first step comes in a transaction after the one that deleted the subvolume. Then no item of
//! it is queued, and no block of it changes any more. A step decides by the reference counts of
//! shared blocks, under the same lock as threads that copy such blocks (`LiveVolume::counting`).

#[cfg(test)]
mod tests;

use std::sync::Arc;

use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{Generation, Key, Logical, TreeId};
use offshoot_vfs::{Error, Result, Structure};
use tracing::{debug, info};

use super::SubvolumeState;
use super::items::{change_root_item, orphan_key};
use crate::block::TreeBlock;
use crate::events::DROP;
use crate::inode::{Rooms, RoomsHandle};
use crate::space::{Claim, REMOVAL_ITEMS};
use crate::transaction::{
    CommitCause, RefOwner, require_one_root_item, root_item, root_item_key, root_of,
};
use crate::tree::Blocks;

/// The references that a step gives up before it ends, beside those of one leaf and of the nodes
/// above it. For a commit they cost less than the reservation for removing one item.
const STEP_REFERENCES: usize = 256;

/// The bytes of items of waiting references at which a drop commits. That is memory for about a
/// hundred thousand references.
const WAITING_BYTES: u64 = 5 << 20;

/// Whether there is more to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DropProgress {
    /// No step can be done, at least before the next commit.
    Waits,
    /// A step was done.
    Went,
}

/// As [`Engine::drop_deleted`](crate::Engine::drop_deleted).
pub(crate) fn drop_deleted(volume: &Rooms, subvolumes: &SubvolumeState) -> Result<()> {
    let live = volume.live()?;
    let mut failed = None;
    loop {
        let first = subvolumes.first_deleted();
        match drop_step(volume, subvolumes) {
            Ok(DropProgress::Went) => {}
            Ok(DropProgress::Waits) if !subvolumes.has_deleted() => {
                return failed.map_or(Ok(()), Err);
            }
            Ok(DropProgress::Waits) => volume.commit()?,
            // That subvolume was given up. The next one follows.
            Err(error) if subvolumes.first_deleted() != first && live.require_writing().is_ok() => {
                failed.get_or_insert(error);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Does one step, if one is possible now.
///
/// # Errors
/// When a block cannot be read. The rest of the subvolume is kept until the volume is opened again.
pub(crate) fn drop_step(volume: &Rooms, subvolumes: &SubvolumeState) -> Result<DropProgress> {
    let live = volume.live()?;
    let mut dropping = subvolumes.dropping();
    let Some((id, deleted_in)) = subvolumes.first_deleted() else {
        return Ok(DropProgress::Waits);
    };
    if live.space.pending.reference_bytes.get() > WAITING_BYTES {
        volume.commit_over(0, CommitCause::DirtyBlocks)?;
    }
    let is_done = {
        let handle = volume.join_for(REMOVAL_ITEMS, Claim::LastResort)?;
        if handle.generation() <= deleted_in {
            return Ok(DropProgress::Waits);
        }
        step(&handle, id, &mut dropping)
    };
    match is_done {
        Ok(false) => {
            debug!(target: DROP, subvolume = id.0, "a part of a subvolume is dropped");
            return Ok(DropProgress::Went);
        }
        Ok(true) => {
            info!(target: DROP, subvolume = id.0, "a subvolume is dropped");
            live.forget_tree(id);
            volume.inodes.forget_subvolume(id);
        }
        Err(_) => {}
    }
    subvolumes.forget_deleted(id);
    is_done.map(|_| DropProgress::Went)
}

/// The progress of a drop that is not stored.
#[derive(Debug, Default)]
pub(crate) struct Dropping {
    /// The subvolume, and the key up to which the blocks below the next pointer are detached.
    detached: Option<(TreeId, Key)>,
}

/// Does one step for the subvolume `id`, and returns whether it was the last.
fn step(handle: &RoomsHandle<'_>, id: TreeId, dropping: &mut Dropping) -> Result<bool> {
    let volume = handle.volume();
    let Some(item) = root_item(volume, id)? else {
        // Only its orphan item is left.
        handle.change(TreeId::ROOT, |tree| tree.remove(orphan_key(id)))?;
        handle.drop_quota_group(id);
        return Ok(true);
    };
    require_one_root_item(volume, id)?;
    let root = volume.block(&root_of(id, &item).expected())?;
    let made_in = made_in(root_item_key(volume, id)?, &item);
    let mut walk = DropWalk { handle, id, made_in, path: Vec::new(), given_up: 0, dropping };
    walk.return_to(&root, &item)?;
    // References are given up one by one, so the progress is stored even after a failure.
    handle.all_or_stop(|| {
        let outcome = walk.go_on(&root);
        walk.store(matches!(outcome, Ok(true)))?;
        Ok(outcome)
    })?
}

/// The transaction that made the snapshot with this root item; 0 for a subvolume that is no
/// snapshot, and if it is unknown. If key and item differ, the older value counts, with which the
/// walk looks at more blocks.
fn made_in(key: Key, item: &RootItem) -> Generation {
    let in_item = item.otransid.get();
    let said = if in_item == 0 { key.offset } else { key.offset.min(in_item) };
    if said > item.generation.get() { Generation(0) } else { Generation(said) }
}

/// A block, and the upper bound of its keys; `None` at the right edge.
type BoundedBlock = (Arc<TreeBlock>, Option<Key>);

/// A node on the path.
#[derive(Clone)]
struct DropPathNode {
    block: Arc<TreeBlock>,
    /// The upper bound of its keys.
    upper: Option<Key>,
    /// The slot of the next pointer.
    slot: usize,
    /// Whether it refers to what is below it by its own address (full back references).
    is_full: bool,
}

impl DropPathNode {
    /// The address, the level and the generation of the next child.
    fn next(&self) -> (Logical, u8, Generation) {
        let pointer = &self.block.pointers()[self.slot];
        let generation = Generation(pointer.generation.get());
        (pointer.logical(), self.block.header().level - 1, generation)
    }

    /// The next child. No walk visits a block twice, because all keys below one pointer are lower
    /// than the next pointer.
    fn child(&self, handle: &RoomsHandle<'_>, id: TreeId) -> Result<BoundedBlock> {
        let block = handle.volume().child(&self.block, self.slot, id)?;
        let is_last = self.slot + 1 == self.block.len();
        let upper = if is_last { self.upper } else { Some(self.block.key(self.slot + 1)) };
        let last = block.key(block.len() - 1);
        if let Some(upper) = upper.filter(|&upper| last >= upper) {
            let problem = format!("its last key {last} is not below {upper}, the next one above");
            return Err(Error::corrupt_at(Structure::TreeBlock, address(&block).0, problem));
        }
        Ok((block, upper))
    }

    fn is_finished(&self) -> bool {
        self.slot >= self.block.len()
    }
}

/// The walk through a deleted tree.
struct DropWalk<'h, 'v> {
    handle: &'h RoomsHandle<'v>,
    id: TreeId,
    /// The transaction that made the snapshot. The snapshot did not write blocks as old as that. 0
    /// for a subvolume that is no snapshot.
    made_in: Generation,
    /// The nodes from the root to the one with the next pointer. None of them is shared. Empty
    /// before the beginning, and at the end.
    path: Vec<DropPathNode>,
    given_up: usize,
    dropping: &'h mut Dropping,
}

/// The address of a block.
fn address(block: &TreeBlock) -> Logical {
    Logical(block.header().bytenr.get())
}

impl DropWalk<'_, '_> {
    /// Goes to where the previous step ended, which the root item stores.
    fn return_to(&mut self, root: &Arc<TreeBlock>, item: &RootItem) -> Result<()> {
        let progress = item.drop_progress.get();
        if progress.objectid == 0 {
            return Ok(());
        }
        self.require_pointer(root, progress, item.drop_level)?;
        let (mut block, mut upper) = (root.clone(), None);
        loop {
            let (at, level) = (address(&block), block.header().level);
            let (count, is_full) = self.handle.count_of(at, level, self.owner())?;
            if level == 0 || count != 1 {
                if !self.path.is_empty() {
                    // The walk starts at this whole block, because no step gave up part of a shared
                    // block.
                    return Ok(());
                }
                let problem =
                    format!("a root of level {level} with {count} references, half dropped");
                return Err(Error::corrupt_at(Structure::TreeBlock, at.0, problem));
            }
            let slot = block.floor(progress).unwrap_or(0);
            let node = DropPathNode { block, upper, slot, is_full };
            if level == item.drop_level {
                self.path.push(node);
                return Ok(());
            }
            (block, upper) = node.child(self.handle, self.id)?;
            self.path.push(node);
        }
    }

    /// Fails unless a node of `level` on the path to `progress` has a pointer with that key. All
    /// pointers before it count as given up, so a wrong key would leave blocks in use for ever.
    fn require_pointer(&self, root: &Arc<TreeBlock>, progress: Key, level: u8) -> Result<()> {
        let mut block = root.clone();
        while level > 0 && block.header().level >= level {
            let slot = block.floor(progress).unwrap_or(0);
            if block.header().level > level {
                block = self.handle.volume().child(&block, slot, self.id)?;
                continue;
            }
            if block.key(slot) == progress {
                return Ok(());
            }
            break;
        }
        let problem =
            format!("{} was dropped up to {progress} of level {level}, which it has not", self.id);
        Err(Error::corrupt(Structure::RootItem, problem))
    }

    /// Gives up references until the step is full or none is left. Returns whether none is left.
    fn go_on(&mut self, root: &Arc<TreeBlock>) -> Result<bool> {
        if self.path.is_empty() {
            let (at, level) = (address(root), root.header().level);
            if !self.give_up(at, level, root.header().generation(), || Ok((root.clone(), None)))? {
                return Ok(false);
            }
        }
        self.leave_finished();
        while let Some(node) = self.path.last()
            && self.given_up < STEP_REFERENCES
        {
            let (node, depth, handle, id) = (node.clone(), self.path.len(), self.handle, self.id);
            let (at, level, generation) = node.next();
            let is_done = self.give_up(at, level, generation, || node.child(handle, id))?;
            if is_done && self.path.len() == depth {
                self.path[depth - 1].slot += 1;
            }
            self.leave_finished();
        }
        Ok(self.path.is_empty())
    }

    /// Gives up the block at `at` with all that it refers to, or goes down into it if it is an
    /// unshared node. Returns whether the step could finish that.
    fn give_up(
        &mut self,
        at: Logical,
        level: u8,
        generation: Generation,
        read: impl Fn() -> Result<BoundedBlock>,
    ) -> Result<bool> {
        let owner = self.owner();
        self.given_up += 1;
        if self.may_count(at, level, generation)? && !self.detach_below(read()?)? {
            return Ok(false);
        }
        self.dropping.detached = None;
        let Some(is_full) = self.handle.leave_if_shared(at, level, owner)? else {
            return Ok(true);
        };
        let (block, upper) = read()?;
        if !is_full && block.header().owner() != self.id {
            let problem = format!("tree {} counts what it refers to", block.header().owner());
            return Err(Error::corrupt_at(Structure::TreeBlock, at.0, problem));
        }
        if level > 0 {
            self.path.push(DropPathNode { block, upper, slot: 0, is_full });
            return Ok(true);
        }
        self.given_up += block.len();
        let root = (!is_full).then_some(self.id);
        self.handle.all_or_stop(|| self.handle.refer_to_children(&block, root, -1))?;
        self.handle.leave_block(at, level, owner);
        Ok(true)
    }

    /// Whether the block at `at` is shared, and whether this block or blocks below it may be
    /// counted for the subvolume.
    fn may_count(&self, at: Logical, level: u8, generation: Generation) -> Result<bool> {
        if generation <= self.made_in {
            return Ok(false);
        }
        let (count, is_full) = self.handle.count_of(at, level, self.owner())?;
        Ok(count > 1 && !(level == 0 && is_full))
    }

    /// Detaches the shared block and the blocks below it, from where the previous step ended.
    /// Returns whether this step finished that.
    fn detach_below(&mut self, shared: BoundedBlock) -> Result<bool> {
        let from = self.dropping.detached.filter(|(id, _)| *id == self.id);
        let from = from.map_or(Key::MIN, |(_, key)| key);
        let mut below = Vec::new();
        self.detach(shared, from, &mut below)?;
        while let Some(node) = below.last() {
            if node.is_finished() {
                below.pop();
                if let Some(above) = below.last_mut() {
                    above.slot += 1;
                }
                continue;
            }
            if self.given_up >= STEP_REFERENCES {
                self.dropping.detached = Some((self.id, node.block.key(node.slot)));
                return Ok(false);
            }
            let (at, level, generation) = node.next();
            self.given_up += 1;
            let depth = below.len();
            let is_older = generation <= self.made_in;
            let is_detached_leaf = level == 0 && self.handle.is_full(at, level)?;
            if !is_older && !is_detached_leaf {
                let child = node.child(self.handle, self.id)?;
                self.detach(child, from, &mut below)?;
            }
            if below.len() == depth {
                below[depth - 1].slot += 1;
            }
        }
        Ok(true)
    }

    /// Detaches one block, if the subvolume wrote it, and adds it to the path if it is a node.
    /// Below a block of another subvolume there is no block that this one wrote.
    fn detach(
        &mut self,
        (block, upper): BoundedBlock,
        from: Key,
        way: &mut Vec<DropPathNode>,
    ) -> Result<()> {
        if block.header().owner() != self.id {
            return Ok(());
        }
        if self.handle.detach(&block, self.id)? {
            self.given_up += 2 * block.len();
        }
        if !block.is_leaf() {
            let slot = block.floor(from).unwrap_or(0);
            way.push(DropPathNode { block, upper, slot, is_full: true });
        }
        Ok(())
    }

    /// The owner of the reference to the next block.
    fn owner(&self) -> RefOwner {
        match self.path.last() {
            Some(node) if node.is_full => RefOwner::Block { parent: address(&node.block) },
            _ => RefOwner::Tree { root: self.id },
        }
    }

    /// Gives up the nodes whose pointers are all given up.
    fn leave_finished(&mut self) {
        while let Some(node) = self.path.pop_if(|node| node.is_finished()) {
            self.handle.leave_block(address(&node.block), node.block.header().level, self.owner());
            if let Some(above) = self.path.last_mut() {
                above.slot += 1;
            }
        }
    }

    /// Stores the progress, or removes the items of the subvolume at the end.
    fn store(&self, is_done: bool) -> Result<()> {
        if !is_done {
            // Before the walk has entered the root there is no progress.
            let Some(node) = self.path.last() else { return Ok(()) };
            return change_root_item(self.handle, self.id, |item| {
                item.drop_progress = node.block.key(node.slot).into();
                item.drop_level = node.block.header().level;
            });
        }
        let key = root_item_key(self.handle.volume(), self.id)?;
        self.handle.change(TreeId::ROOT, |tree| {
            tree.remove(key)?;
            tree.remove(orphan_key(self.id)).map(drop)
        })?;
        self.handle.drop_quota_group(self.id);
        Ok(())
    }
}
