//! The ways down with shared latches.
//!
//! Nearly all changes stay inside a leaf. For these, the blocks above the leaf are latched shared,
//! so many threads go down at once. The transaction must own the leaf and all blocks above it. The
//! writer then checks whether the leaf is *safe*: the change leaves the blocks above as they are.
//! If not, the writer goes down a second way.
//!
//! A thread that waits for a leaf holds the block above with a shared latch, so threads that go to
//! other leaves pass. With exclusive latches all the way, threads queue when there are more than
//! cores: each one waits for a latch while it holds the one above, so each step of one thread waits
//! until the next thread is woken.
//!
//! The second way is shared, too, down to the block above the leaf. It latches that block and the
//! leaf exclusively. When a leaf is copied, gets another first key, is split, or is merged with a
//! sibling, usually nothing changes above that block. The exceptions are a block that is about to
//! be split or merged itself, and a way through its first pointers. The second way matters when a
//! caller removes the files of a directory in order: each removal takes the first item of a leaf.

use offshoot_btrfs_format::edit::node_capacity;
use offshoot_btrfs_format::{Generation, Key, Logical};
use offshoot_vfs::Result;

use super::TreeWriter;
use super::path::{LatchedPath, merged_capacity};
use crate::block::{ReadLatch, TreeBlock, WriteLatch};
use crate::tree::descent::Descent;

/// Where a way down with shared latches ended.
struct LatchedParent {
    /// The block above the searched one.
    node: ReadLatch,
    slot: usize,
    /// The keys below the slot stay below this key.
    upper: Option<Key>,
}

impl<'a> TreeWriter<'a> {
    /// Latches the leaf where `key` is or belongs; `None` when the transaction does not own all
    /// blocks on the way.
    pub(super) fn locate_shared(&self, key: Key) -> Result<Option<(LatchedPath<'a>, WriteLatch)>> {
        let Some(LatchedParent { node, slot, upper }) =
            self.go_down_shared(&mut Descent::to(key), 0)?
        else {
            return Ok(None);
        };
        let leaf = self.owner.latch(node.pointers()[slot].logical())?;
        Ok(Some((LatchedPath { upper, parent: Some(node), ..LatchedPath::default() }, leaf)))
    }

    /// Latches the leaf where `key` is or belongs, and the block above it, for any change of the
    /// leaf. Copies the leaf if the transaction does not own it. `None` when the change may reach
    /// further up, or the transaction does not own the blocks above.
    pub(super) fn locate_with_parent(
        &self,
        key: Key,
    ) -> Result<Option<(LatchedPath<'a>, WriteLatch)>> {
        if self.owner.latching().is_exclusive {
            return Ok(None);
        }
        let capacity = node_capacity(self.node_size());
        let mut descent = Descent::to(key);
        let (parent, upper) = {
            let top = self.share_root();
            if top.level == 1 && self.owns(top.generation, top.logical) {
                (self.owner.latch(top.logical)?, None)
            } else {
                drop(top);
                let Some(above) = self.go_down_shared(&mut descent, 1)? else {
                    return Ok(None);
                };
                let pointer = above.node.pointers()[above.slot];
                let mut parent = self.owner.latch(pointer.logical())?;
                if parent.len() < capacity / 4 {
                    // Another thread may hold a sibling and look at this block.
                    let len = parent.len();
                    drop(parent);
                    if self.fits_a_sibling(&above, len)? {
                        return Ok(None);
                    }
                    parent = self.owner.latch(pointer.logical())?;
                }
                (parent, above.upper)
            }
        };
        // Under the same condition the exclusive way releases the blocks above, and it makes the
        // same room.
        let has_room = parent.len() >= 4 && parent.len() + 2 <= capacity;
        let Some(slot) = descent.floor(&parent).filter(|&slot| slot >= 2 && has_room) else {
            return Ok(None);
        };
        let mut path = LatchedPath { upper, ..LatchedPath::default() };
        let leaf = self.go_down(&mut path, parent, slot)?;
        Ok(Some((path, leaf)))
    }

    /// Goes down with shared latches to the parent of the block of `level` on the way, and keeps
    /// only the latch of that parent. `None` when the transaction does not own that block or one
    /// above it, or the tree has fewer levels.
    fn go_down_shared(&self, descent: &mut Descent, level: u8) -> Result<Option<LatchedParent>> {
        let top = self.share_root();
        let is_own = self.owns(top.generation, top.logical);
        if self.owner.latching().is_exclusive || !is_own || top.level <= level {
            return Ok(None);
        }
        let mut node = self.owner.latch_shared(top.logical)?;
        drop(top);
        let mut upper = None;
        loop {
            let Some(slot) = descent.floor(&node) else { return Ok(None) };
            if slot + 1 < node.len() {
                upper = Some(node.key(slot + 1));
            }
            let pointer = node.pointers()[slot];
            if !self.owns(Generation(pointer.generation.get()), pointer.logical()) {
                return Ok(None);
            }
            if node.header().level == level + 1 {
                return Ok(Some(LatchedParent { node, slot, upper }));
            }
            // The child is latched before its parent is released.
            node = self.owner.latch_shared(pointer.logical())?;
        }
    }

    fn owns(&self, generation: Generation, logical: Logical) -> bool {
        self.owner.owns(generation, logical)
    }

    /// Whether the exclusive way would merge a sparse node of `len` pointers, to which `above`
    /// leads, with a sibling. The thread must hold the latch of neither. Both may change until they
    /// are latched.
    fn fits_a_sibling(&self, above: &LatchedParent, len: usize) -> Result<bool> {
        let LatchedParent { node, slot, .. } = above;
        let most = merged_capacity(node_capacity(self.node_size()));
        let fits = |other: &TreeBlock| len + other.len() <= most;
        Ok(slot + 1 < node.len() && self.peek(node, slot + 1, fits)?
            || *slot > 0 && self.peek(node, slot - 1, fits)?)
    }
}
