//! The map from logical addresses to chunks.
//!
//! A reader clones the [`Arc`] of the map under the lock and continues with the map that it got. So
//! a map never changes while a reader has it. When a chunk is added or removed, the volume changes
//! the map in place, or first copies it if a reader has it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use offshoot_btrfs_format::Logical;
use offshoot_btrfs_format::chunk::{BlockGroupFlags, Chunk};
use offshoot_vfs::{Error, Result, Structure};

use super::members::Members;

/// A chunk, with the members that its stripes are on.
#[derive(Debug)]
pub(crate) struct MappedChunk {
    pub(crate) chunk: Chunk,
    /// For every stripe, the index of its member in [`super::Members`]; `None` when that member is
    /// missing.
    pub(crate) members: Vec<Option<usize>>,
}

impl MappedChunk {
    /// A chunk of a volume with these members.
    pub(crate) fn new(chunk: Chunk, members: &Members) -> Self {
        let on = chunk.stripes.iter().map(|stripe| members.find_present(stripe.device_uuid));
        Self { members: on.collect(), chunk }
    }
}

/// All chunks that are known, by address. They do not overlap.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChunkMap {
    chunks: BTreeMap<Logical, Arc<MappedChunk>>,
    /// Where the system chunks begin.
    system: BTreeSet<Logical>,
}

impl ChunkMap {
    /// Adds a chunk.
    ///
    /// # Errors
    /// When it overlaps another one.
    pub(crate) fn add(&mut self, mapped: MappedChunk) -> Result<()> {
        let new = &mapped.chunk;
        let next = self.chunks.range(new.start..).next().map(|(_, after)| (new, &after.chunk));
        let before = self.chunks.range(..new.start).next_back();
        let before = before.map(|(_, before)| (&before.chunk, new));
        for (left, right) in before.into_iter().chain(next) {
            if left.end() > right.start {
                return Err(Error::corrupt_at(
                    Structure::Chunk,
                    right.start.0,
                    format!("overlaps the chunk at {} with {} bytes", left.start, left.length),
                ));
            }
        }
        if new.flags.0 & BlockGroupFlags::SYSTEM != 0 {
            self.system.insert(new.start);
        }
        self.chunks.insert(new.start, Arc::new(mapped));
        Ok(())
    }

    /// Removes the chunk at `start`.
    pub(super) fn remove(&mut self, start: Logical) {
        self.chunks.remove(&start);
        self.system.remove(&start);
    }

    /// The chunk that covers `logical`.
    pub(super) fn find(&self, logical: Logical) -> Option<&MappedChunk> {
        let (_, mapped) = self.chunks.range(..=logical).next_back()?;
        (logical < mapped.chunk.end()).then_some(mapped)
    }

    /// The system chunks, by address.
    pub(super) fn system(&self) -> impl Iterator<Item = &Chunk> {
        self.system.iter().filter_map(|start| self.chunks.get(start)).map(|mapped| &mapped.chunk)
    }

    pub(super) fn mapped(
        &self,
    ) -> impl DoubleEndedIterator<Item = &Arc<MappedChunk>> + ExactSizeIterator {
        self.chunks.values()
    }
}
