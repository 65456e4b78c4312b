//! Making everything refer to the new places.

use std::sync::atomic::Ordering;

use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::{Error, Result, Structure};

use super::{MovingBlock, Relocation, TouchedBlock, range_of};
use crate::storage::malformed;
use crate::transaction::RefOwner;
use crate::transaction::extent_tree::RefRun;
use crate::transaction::refs::ExtentKind;
use crate::tree::with_item;

impl Relocation<'_, '_> {
    /// Makes everything refer to the new places. The blocks are written, and data is copied and has
    /// its checksums. An error ends all writing.
    pub(crate) fn apply(&self) -> Result<()> {
        self.handle.all_or_stop(|| {
            for &at in &self.own {
                let mut latch = self.handle.latch(TreeId::FS, Logical(at))?;
                self.patch(latch.block_mut(), |_| ())?;
            }
            for (&id, at) in &self.roots {
                let to = self.blocks.get(at).map(|block| block.to);
                let to = to.ok_or_else(|| Error::corrupt(Structure::RootItem, "it stays"))?;
                self.handle.relocate_root(id, to)?;
            }
            // Readers that found an old place before may miss its checksums from now on. They look
            // again when the epoch has changed.
            let live = self.handle.live();
            drop(live.freeing.write());
            live.epoch.fetch_add(1, Ordering::AcqRel);
            self.refer_to_the_rest()?;
            let run = self.moved_items();
            self.handle.run_moved(run)?;
            self.touched.iter().try_for_each(|block| self.touch(block))
        })
    }

    /// The edits of the extent tree.
    fn moved_items(&self) -> RefRun {
        let mut run = RefRun::default();
        let new_parent = |at: Logical| self.blocks.get(&at.0).map_or(at, |block| block.to);
        let node_size = self.node_size();
        for (&at, block) in &self.blocks {
            run.add_moved(&block.references, block.to, new_parent);
            run.add_ranges(range_of(at, node_size), range_of(block.to.0, node_size));
        }
        for (&at, data) in &self.data {
            run.add_moved(&data.references, data.to, new_parent);
            run.add_ranges(range_of(at, data.len), range_of(data.to.0, data.len));
            run.add_unsummed(range_of(at, data.len));
        }
        run.sort();
        run
    }

    /// Changes the references of blocks with full back references that move to what stays.
    fn refer_to_the_rest(&self) -> Result<()> {
        let is_full = |(_, block): &(&u64, &MovingBlock)| block.references.is_full();
        for (&at, moving) in self.blocks.iter().filter(is_full) {
            let block = self.read(Logical(at), moving.level, moving.generation, TreeId::FS)?;
            let (from, to) = (Logical(at), moving.to);
            if !block.is_leaf() {
                let kind = ExtentKind::Block { level: moving.level - 1 };
                for pointer in block.pointers() {
                    if !self.blocks.contains_key(&pointer.logical().0) {
                        let owners = [from, to].map(|parent| RefOwner::Block { parent });
                        self.exchange(pointer.logical(), self.node_size(), kind, owners);
                    }
                }
                continue;
            }
            for (slot, item) in block.items().iter().enumerate() {
                if item.key.get().item_type != ItemType::EXTENT_DATA {
                    continue;
                }
                let extent = FileExtent::parse(block.data(slot)).map_err(malformed)?;
                if let FileExtentBody::Extent { disk_bytenr, disk_num_bytes, .. } = extent.body
                    && !self.data.contains_key(&disk_bytenr.0)
                {
                    let owners = [from, to].map(|parent| RefOwner::Leaf { parent });
                    self.exchange(disk_bytenr, disk_num_bytes, ExtentKind::Data, owners);
                }
            }
        }
        Ok(())
    }

    /// Queues that the second owner takes a reference over from the first one.
    fn exchange(&self, at: Logical, len: u64, kind: ExtentKind, [from, to]: [RefOwner; 2]) {
        self.handle.refer(at, len, kind, from, -1);
        self.handle.refer(at, len, kind, to, 1);
    }

    /// Copies a block of a tree that shares none, by storing an item below it anew.
    fn touch(&self, block: &TouchedBlock) -> Result<()> {
        let volume = self.handle.volume();
        let Some(key) = block.key else {
            // The tree was empty.
            return self.handle.change(block.tree, |tree| {
                tree.insert(Key::MIN, &[])?;
                tree.remove(Key::MIN).map(drop)
            });
        };
        let stored = with_item(volume, volume.tree(block.tree)?, key, |data| Ok(data.to_vec()))?;
        // If the item has gone meanwhile, the leaf that it was in was copied for that.
        let Some(stored) = stored else { return Ok(()) };
        self.handle.change(block.tree, |tree| tree.modify(key, 0, |_| Ok(stored)))
    }
}
