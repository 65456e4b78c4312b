//! The way down for changes that stay inside a leaf, which are nearly all: blocks above the leaf
//! are latched shared, so any number of threads are on their way at once.
//!
//! It ends at a leaf that the transaction owns, like everything above it. Whoever came down sees
//! whether the leaf is safe: nothing above has to change for it. Otherwise the way is gone again,
//! as below.
//!
//! A thread that waits for a leaf has what is above it shared, so it is in nobody's way who goes to
//! another leaf. With exclusive latches all the way, threads that outnumber the cores line up: each
//! waits for a latch while it holds the one above, and no step is done without waking the next in
//! the line.
//!
//! So the second way, too, is shared as far as the block above the leaf, and takes that and the
//! leaf exclusively: a leaf that is copied, gets another first key, is split, or merged with a
//! sibling changes nothing further up, but where that block is about to be split or merged itself,
//! or the way leads through its first pointers. Who removes a directory's files one after the other
//! takes the first item of a leaf every time.

use offshoot_btrfs_format::edit::node_capacity;
use offshoot_btrfs_format::{Generation, Key, Logical};
use offshoot_vfs::Result;

use super::TreeWriter;
use super::path::{Path, merged_capacity};
use crate::block::{ReadLatch, TreeBlock, WriteLatch};
use crate::tree::descent::Descent;

/// The end of a way down with shared latches.
struct Above {
    /// The block above the one that is looked for.
    node: ReadLatch,
    slot: usize,
    /// The key that all keys below the slot stay below.
    upper: Option<Key>,
}

impl<'a> TreeWriter<'a> {
    /// Latches the leaf where `key` is or belongs; `None` when something on the way is not the
    /// transaction's yet.
    pub(super) fn locate_shared(&self, key: Key) -> Result<Option<(Path<'a>, WriteLatch)>> {
        let Some(Above { node, slot, upper }) = self.go_down_shared(&mut Descent::to(key), 0)?
        else {
            return Ok(None);
        };
        let leaf = self.owner.latch(node.pointers()[slot].logical())?;
        Ok(Some((Path { upper, parent: Some(node), ..Path::default() }, leaf)))
    }

    /// Latches the leaf where `key` is or belongs, which the transaction owns afterwards, and the
    /// block above it, for any change of the leaf. `None` when that may change what is further up,
    /// or something there is not the transaction's yet.
    pub(super) fn locate_with_parent(&self, key: Key) -> Result<Option<(Path<'a>, WriteLatch)>> {
        if self.owner.latching().exclusive {
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
                    // Another thread may have a sibling, and look at this one.
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
        // What the exclusive way would let go of what is above for, and room as it would make.
        let has_room = parent.len() >= 4 && parent.len() + 2 <= capacity;
        let Some(slot) = descent.floor(&parent).filter(|&slot| slot >= 2 && has_room) else {
            return Ok(None);
        };
        let mut path = Path { upper, ..Path::default() };
        let leaf = self.go_down(&mut path, parent, slot)?;
        Ok(Some((path, leaf)))
    }

    /// Goes down with shared latches to above the block of this level on the way, and holds only
    /// the last; `None` when that block or one above it is not the transaction's yet, or the tree
    /// is not so high.
    fn go_down_shared(&self, descent: &mut Descent, level: u8) -> Result<Option<Above>> {
        let top = self.share_root();
        let is_own = self.owns(top.generation, top.logical);
        if self.owner.latching().exclusive || !is_own || top.level <= level {
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
                return Ok(Some(Above { node, slot, upper }));
            }
            // The child is latched before its parent is let go.
            node = self.owner.latch_shared(pointer.logical())?;
        }
    }

    fn owns(&self, generation: Generation, logical: Logical) -> bool {
        self.owner.owns(generation, logical)
    }

    /// Whether the exclusive way would merge the sparse node with so many pointers to which the way
    /// `above` leads, and a sibling. Neither may be latched by the thread; they may change until
    /// they are.
    fn fits_a_sibling(&self, above: &Above, len: usize) -> Result<bool> {
        let Above { node, slot, .. } = above;
        let most = merged_capacity(node_capacity(self.node_size()));
        let fits = |other: &TreeBlock| len + other.len() <= most;
        Ok(slot + 1 < node.len() && self.peek(node, slot + 1, fits)?
            || *slot > 0 && self.peek(node, slot - 1, fits)?)
    }
}
