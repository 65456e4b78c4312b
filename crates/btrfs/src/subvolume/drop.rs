//! Dropping what deleted subvolumes hold.
//!
//! A block of a deleted subvolume that another one shares loses a reference. One that nobody shares
//! is freed, when what it refers to has been given up: the walk goes down into it. What is freed
//! was at its place in the last commit, so it is not used again before the next.
//!
//! ```text
//!   root          o o o * . .     o  given up      *  what comes next (the progress)
//!                      /  \       .  still held
//!   level 1     o o * . .  . . .
//! ```
//!
//! What is below a shared block may be counted for the deleted subvolume, when that is the one
//! which wrote the block. Before the block is left to others, it and all such blocks below it are
//! *detached*: they refer to what is below them by their own address from then on.
//!
//! The walk is done in steps of bounded size. Between two steps the root item says how far it is:
//! `drop_progress` is the key of the pointer that comes next, and `drop_level` the level of the
//! node that has it. All before that pointer is given up, and the nodes above it are not shared. So
//! the kernel goes on where ours stopped, and ours where the kernel did. How far the blocks below
//! that pointer are detached is known in memory only. Who begins anew there finds them detached.
//!
//! A step begins no earlier than in the transaction after the one that deleted the subvolume: then
//! nothing of it is queued, and no block of it is changed any more. It decides by the counts of
//! references of shared blocks, like those who copy them (`Live::counting`).

#[cfg(test)]
mod tests;

use std::sync::Arc;

use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{Generation, Key, Logical, TreeId};
use offshoot_vfs::{Error, Result};

use super::items::orphan_key;
use crate::block::TreeBlock;
use crate::engine::{Engine, Handle};
use crate::space::{Claim, REMOVAL_ITEMS};
use crate::transaction::{Cause, Owner, require_one_root_item, root_item, root_item_key, root_of};
use crate::tree::Blocks;

/// References that a step gives up before it ends, beside those of one leaf and of the nodes above
/// it. They add less to what a commit takes than is reserved to remove one item.
const STEP_REFERENCES: usize = 256;

/// References that wait for a commit, in bytes of items, before one is made: memory for a hundred
/// thousand.
const WAITING_BYTES: u64 = 5 << 20;

/// Whether there is more to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Nothing, or nothing before the next commit.
    Waits,
    /// A step was done.
    Went,
}

impl Engine {
    /// Drops all that subvolumes hold which were deleted, as far as it can be done: not of those
    /// that have files open. The thread of the volume does the same by and by, and what is left
    /// when a volume is closed is done when it is opened again.
    ///
    /// # Errors
    /// When a block of one cannot be read: the first such error, after all others were dropped.
    /// `EROFS` when the volume was opened for reading or nothing is written any more.
    pub fn drop_deleted(&self) -> Result<()> {
        let live = self.live()?;
        let mut failed = None;
        loop {
            let first = self.subvolumes.first_deleted();
            match self.drop_step() {
                Ok(Progress::Went) => {}
                Ok(Progress::Waits) if !self.subvolumes.has_deleted() => {
                    return failed.map_or(Ok(()), Err);
                }
                Ok(Progress::Waits) => self.commit()?,
                // It was given up, and the next one comes first.
                Err(error)
                    if self.subvolumes.first_deleted() != first && live.require_whole().is_ok() =>
                {
                    failed.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Does one step, if one can be done now.
    ///
    /// # Errors
    /// When a block cannot be read: what the subvolume holds beside what was given up before is
    /// left until the volume is opened again.
    pub(crate) fn drop_step(&self) -> Result<Progress> {
        let live = self.live()?;
        let mut dropping = self.subvolumes.dropping();
        let Some((id, deleted_in)) = self.subvolumes.first_deleted() else {
            return Ok(Progress::Waits);
        };
        if live.space.pending.reference_bytes.get() > WAITING_BYTES {
            self.commit_over(0, Cause::DirtyBlocks)?;
        }
        let is_done = {
            let handle = self.join_for(REMOVAL_ITEMS, Claim::LastResort)?;
            if handle.generation() <= deleted_in {
                return Ok(Progress::Waits);
            }
            step(&handle, id, &mut dropping)
        };
        match is_done {
            Ok(false) => return Ok(Progress::Went),
            Ok(true) => {
                live.forget_tree(id);
                self.inodes.forget_subvolume(id);
            }
            Err(_) => {}
        }
        self.subvolumes.forget_deleted(id);
        is_done.map(|_| Progress::Went)
    }
}

/// What who drops knows beside what is stored.
#[derive(Debug, Default)]
pub(crate) struct Dropping {
    /// The subvolume, and the key up to which the blocks below the pointer that comes next are
    /// detached.
    detached: Option<(TreeId, Key)>,
}

/// Does one step for the subvolume `id`, and says whether it was the last.
fn step(handle: &Handle<'_>, id: TreeId, dropping: &mut Dropping) -> Result<bool> {
    let volume = handle.volume();
    let Some(item) = root_item(volume, id)? else {
        // Nothing is left of it but that it was to be dropped.
        handle.change(TreeId::ROOT, |tree| tree.remove(orphan_key(id)))?;
        handle.drop_quota_group(id);
        return Ok(true);
    };
    require_one_root_item(volume, id)?;
    let root = volume.block(&root_of(id, &item).expected())?;
    let made_in = made_in(root_item_key(volume, id)?, &item);
    let mut walk = Walk { handle, id, made_in, path: Vec::new(), given_up: 0, dropping };
    walk.return_to(&root, &item)?;
    // References are given up one by one, so whatever fails, how far it got is stored.
    handle.whole(|| {
        let outcome = walk.go_on(&root);
        walk.store(matches!(outcome, Ok(true)))?;
        Ok(outcome)
    })?
}

/// The transaction that made the snapshot with this root item; 0 for a subvolume that is none, and
/// where that is not known. The key and the item say it: of two that differ the older one is taken,
/// with which more is looked at.
fn made_in(key: Key, item: &RootItem) -> Generation {
    let in_item = item.otransid.get();
    let said = if in_item == 0 { key.offset } else { key.offset.min(in_item) };
    if said > item.generation.get() { Generation(0) } else { Generation(said) }
}

/// A block, and the key that all its keys stay below; `None` at the right edge.
type Bounded = (Arc<TreeBlock>, Option<Key>);

/// A node on the way.
#[derive(Clone)]
struct Node {
    block: Arc<TreeBlock>,
    /// The key that all its keys stay below.
    upper: Option<Key>,
    /// The pointer that comes next.
    slot: usize,
    /// Whether it refers to what is below it by its own address.
    is_full: bool,
}

impl Node {
    /// The pointer that comes next: where it leads to, the level and the generation of that.
    fn next(&self) -> (Logical, u8, Generation) {
        let pointer = &self.block.pointers()[self.slot];
        let generation = Generation(pointer.generation.get());
        (pointer.logical(), self.block.header().level - 1, generation)
    }

    /// The block to which it leads. No walk meets a block twice, because what is below one pointer
    /// is before the next.
    fn child(&self, handle: &Handle<'_>, id: TreeId) -> Result<Bounded> {
        let block = handle.volume().child(&self.block, self.slot, id)?;
        let is_last = self.slot + 1 == self.block.len();
        let upper = if is_last { self.upper } else { Some(self.block.key(self.slot + 1)) };
        let last = block.key(block.len() - 1);
        if let Some(upper) = upper.filter(|&upper| last >= upper) {
            let problem = format!("its last key {last} is not below {upper}, the next one above");
            return Err(Error::corrupt_at("tree block", address(&block).0, problem));
        }
        Ok((block, upper))
    }

    fn is_finished(&self) -> bool {
        self.slot >= self.block.len()
    }
}

/// The walk through a deleted tree.
struct Walk<'h, 'v> {
    handle: &'h Handle<'v>,
    id: TreeId,
    /// The transaction that made the snapshot; what is as old was not written by it. 0 for a
    /// subvolume that is none.
    made_in: Generation,
    /// From the root to the node that has the pointer which comes next, none of them shared; empty
    /// before the beginning, and at the end.
    path: Vec<Node>,
    given_up: usize,
    dropping: &'h mut Dropping,
}

/// Where a block is.
fn address(block: &TreeBlock) -> Logical {
    Logical(block.header().bytenr.get())
}

impl Walk<'_, '_> {
    /// Goes to where an earlier step ended, as the root item says.
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
                    // It comes next as a whole: nothing of what is shared was given up.
                    return Ok(());
                }
                let problem =
                    format!("a root of level {level} with {count} references, half dropped");
                return Err(Error::corrupt_at("tree block", at.0, problem));
            }
            let slot = block.floor(progress).unwrap_or(0);
            let node = Node { block, upper, slot, is_full };
            if level == item.drop_level {
                self.path.push(node);
                return Ok(());
            }
            (block, upper) = node.child(self.handle, self.id)?;
            self.path.push(node);
        }
    }

    /// Fails unless a node of this level on the way to `progress` has a pointer with that key. All
    /// before it counts as given up, so what a wrong one passes over would stay in use for ever.
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
        Err(Error::corrupt("root item", problem))
    }

    /// Gives up references, until there were enough of them or none is left: whether that is so.
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

    /// Gives up the block at `at`, to which the way leads, with what it holds; or goes down into
    /// it, when it is a node that nobody shares. Whether this step got so far.
    fn give_up(
        &mut self,
        at: Logical,
        level: u8,
        generation: Generation,
        read: impl Fn() -> Result<Bounded>,
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
            return Err(Error::corrupt_at("tree block", at.0, problem));
        }
        if level > 0 {
            self.path.push(Node { block, upper, slot: 0, is_full });
            return Ok(true);
        }
        self.given_up += block.len();
        let root = (!is_full).then_some(self.id);
        self.handle.whole(|| self.handle.refer_to_children(&block, root, -1))?;
        self.handle.leave_block(at, level, owner);
        Ok(true)
    }

    /// Whether the block at `at` is shared, and something at it or below may be counted for the
    /// subvolume.
    fn may_count(&self, at: Logical, level: u8, generation: Generation) -> Result<bool> {
        if generation <= self.made_in {
            return Ok(false);
        }
        let (count, is_full) = self.handle.count_of(at, level, self.owner())?;
        Ok(count > 1 && !(level == 0 && is_full))
    }

    /// Detaches the shared block and what is below it, from where an earlier step ended; whether
    /// this step came to the end.
    fn detach_below(&mut self, shared: Bounded) -> Result<bool> {
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

    /// Detaches one block, if the subvolume wrote it, and adds it to the way when it is a node.
    /// What another one wrote has nothing below it that this one wrote.
    fn detach(&mut self, (block, upper): Bounded, from: Key, way: &mut Vec<Node>) -> Result<()> {
        if block.header().owner() != self.id {
            return Ok(());
        }
        if self.handle.detach(&block, self.id)? {
            self.given_up += 2 * block.len();
        }
        if !block.is_leaf() {
            let slot = block.floor(from).unwrap_or(0);
            way.push(Node { block, upper, slot, is_full: true });
        }
        Ok(())
    }

    /// Who refers to that to which the way leads.
    fn owner(&self) -> Owner {
        match self.path.last() {
            Some(node) if node.is_full => Owner::Block { parent: address(&node.block) },
            _ => Owner::Tree { root: self.id },
        }
    }

    /// Gives up the nodes in which no pointer is left.
    fn leave_finished(&mut self) {
        while let Some(node) = self.path.pop_if(|node| node.is_finished()) {
            self.handle.leave_block(address(&node.block), node.block.header().level, self.owner());
            if let Some(above) = self.path.last_mut() {
                above.slot += 1;
            }
        }
    }

    /// Stores how far it got, or that nothing is left.
    fn store(&self, is_done: bool) -> Result<()> {
        if !is_done {
            // Before the root is given up there is nothing to store.
            let Some(node) = self.path.last() else { return Ok(()) };
            return self.handle.change_root_item(self.id, |item| {
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
