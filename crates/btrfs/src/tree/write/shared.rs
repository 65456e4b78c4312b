//! The way down for changes that stay inside a leaf, which are nearly all: blocks above the leaf are
//! latched shared, so any number of threads are on their way at once.
//!
//! It ends at a leaf that the transaction owns, like everything above it. Whoever came down sees whether the leaf is
//! safe: nothing above has to change for it. Otherwise the way is gone again with exclusive latches.
//!
//! A thread that waits for a leaf has what is above it shared, so it is in nobody's way who goes to
//! another leaf. With exclusive latches all the way, threads that outnumber the cores line up: each waits for a
//! latch while it holds the one above, and no step is done without waking the next in the line.

use offshoot_btrfs_format::{Generation, Key};
use offshoot_vfs::Result;

use super::TreeWriter;
use super::path::Path;
use crate::transaction::WriteLatch;

impl<'a> TreeWriter<'a> {
    /// Latches the leaf where `key` is or belongs; `None` when something on the way is not the
    /// transaction's yet.
    pub(super) fn locate_shared(&self, key: Key) -> Result<Option<(Path<'a>, WriteLatch)>> {
        let owns = |generation, logical| self.handle.owns(self.id(), generation, logical);
        let top = self.tree.root.read();
        let is_own = owns(top.generation, top.logical);
        if self.handle.latching().exclusive || !is_own || top.level == 0 {
            return Ok(None);
        }
        let mut node = self.handle.latch_shared(self.id(), top.logical)?;
        drop(top);
        let mut upper = None;
        loop {
            let Some(slot) = node.floor(key) else { return Ok(None) };
            if slot + 1 < node.len() {
                upper = Some(node.key(slot + 1));
            }
            let pointer = node.pointers()[slot];
            if !owns(Generation(pointer.generation.get()), pointer.logical()) {
                return Ok(None);
            }
            if node.header().level > 1 {
                // The child is latched before its parent is let go.
                node = self.handle.latch_shared(self.id(), pointer.logical())?;
                continue;
            }
            let leaf = self.handle.latch(self.id(), pointer.logical())?;
            let path = Path { upper, parent: Some(node), ..Path::default() };
            return Ok(Some((path, leaf)));
        }
    }
}
