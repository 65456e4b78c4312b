//! Giving new places to what moves, and writing the blocks there.

use std::sync::Arc;

use offshoot_btrfs_format::edit::header_mut;
use offshoot_btrfs_format::{Logical, TreeId};
use offshoot_vfs::{Error, Result, Structure};

use super::Relocation;
use super::patch::FoundPointers;
use crate::block::TreeBlock;
use crate::space::Purpose;
use crate::sync::RwLock;

/// How many blocks are written together.
const BLOCKS_AT_ONCE: usize = 256;

impl Relocation<'_, '_> {
    /// Takes a place for everything that moves. The caller has reserved it.
    ///
    /// # Errors
    /// `ENOSPC` when there is no room in one piece. Nothing is taken then.
    pub(crate) fn place(&mut self) -> Result<()> {
        let (space, volume) = (self.handle.space(), self.handle.volume());
        let node_size = self.node_size();
        let mut taken = Vec::new();
        let mut take = |purpose, len| {
            let at = space.take(volume, purpose, len)?;
            taken.push((at, len));
            Ok::<_, Error>(at)
        };
        let mut place = || {
            for data in self.data.values_mut() {
                data.to = take(Purpose::Data, data.len)?;
            }
            for block in self.blocks.values_mut() {
                block.to = take(Purpose::Metadata, node_size)?;
            }
            Ok(())
        };
        let placed = place();
        if placed.is_err() {
            for (at, len) in taken {
                space.give_back(at, len)?;
            }
        }
        placed
    }

    /// Gives all new places back: nothing moves.
    pub(crate) fn give_up(&self) -> Result<()> {
        let node_size = self.node_size();
        let data = self.data.values().map(|data| (data.to, data.len));
        let blocks = self.blocks.values().map(|block| (block.to, node_size));
        data.chain(blocks).try_for_each(|(at, len)| self.handle.space().give_back(at, len))
    }

    /// Writes the blocks that move to their new places. Nothing refers to them yet.
    ///
    /// # Errors
    /// When a block cannot be read or written, or when the extent tree counts other references than
    /// there are.
    pub(crate) fn write_blocks(&self) -> Result<()> {
        let volume = self.handle.volume();
        let mut found = FoundPointers::new();
        let mut count = |at: u64| *found.entry(at).or_default() += 1;
        let mut waiting = Vec::with_capacity(BLOCKS_AT_ONCE);
        let write = |waiting: &mut Vec<(Logical, Arc<RwLock<Arc<TreeBlock>>>)>| {
            volume.write_blocks(waiting)?;
            for (_, block) in waiting.drain(..) {
                // The cache may have an older block of this address and generation.
                volume.cache.insert(block.read().clone());
            }
            Ok::<_, Error>(())
        };
        for (&at, moving) in &self.blocks {
            let old = self.read(Logical(at), moving.level, moving.generation, TreeId::FS)?;
            let mut new = TreeBlock::clone(&old);
            self.patch(&mut new, &mut count)?;
            header_mut(new.bytes_mut()).bytenr = moving.to.0.into();
            waiting.push((moving.to, Arc::new(RwLock::new(Arc::new(new)))));
            if waiting.len() >= BLOCKS_AT_ONCE {
                write(&mut waiting)?;
            }
        }
        write(&mut waiting)?;
        for &at in &self.own {
            let mut copy = TreeBlock::clone(&*self.handle.own_copy(Logical(at))?);
            self.patch(&mut copy, &mut count)?;
        }
        self.roots.values().for_each(|&at| count(at));
        self.require_all(&found)
    }

    /// # Errors
    /// When the extent tree counts other references than were found.
    fn require_all(&self, found: &FoundPointers) -> Result<()> {
        let blocks = self.blocks.iter().map(|(at, block)| (at, &block.references));
        let data = self.data.iter().map(|(at, data)| (at, &data.references));
        for (at, references) in blocks.chain(data) {
            let (counted, pointers) = (references.count(), found.get(at).copied().unwrap_or(0));
            if counted != pointers {
                let problem = format!(
                    "it counts {counted} references and {pointers} were found; it is not moved"
                );
                return Err(Error::corrupt_at(Structure::ExtentTree, *at, problem));
            }
        }
        Ok(())
    }
}
