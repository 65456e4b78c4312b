//! The map from logical addresses to chunks.
//!
//! A map never changes. When a chunk is added or removed, the volume replaces the map by a new one.
//! A reader clones the [`Arc`] under the lock and continues with the map that it got.

use std::sync::Arc;

use offshoot_btrfs_format::Logical;
use offshoot_btrfs_format::chunk::Chunk;
use offshoot_vfs::{Error, Result, Structure};

/// A chunk, with the members that its stripes are on.
#[derive(Debug)]
pub(crate) struct MappedChunk {
    pub(crate) chunk: Chunk,
    /// For every stripe, the index of its member in [`super::Members`]; `None` when that member is
    /// missing.
    pub(crate) members: Vec<Option<usize>>,
}

/// All chunks that are known, by address. They do not overlap.
#[derive(Clone, Debug, Default)]
pub(super) struct ChunkMap {
    chunks: Vec<Arc<MappedChunk>>,
}

impl ChunkMap {
    /// A map of `chunks`, in any order.
    ///
    /// # Errors
    /// When two of them overlap.
    pub(super) fn new(chunks: Vec<MappedChunk>) -> Result<Self> {
        Self::of(chunks.into_iter().map(Arc::new).collect())
    }

    fn of(mut chunks: Vec<Arc<MappedChunk>>) -> Result<Self> {
        chunks.sort_by_key(|mapped| mapped.chunk.start);
        for pair in chunks.windows(2) {
            let (left, right) = (&pair[0].chunk, &pair[1].chunk);
            if left.end() > right.start {
                return Err(Error::corrupt_at(
                    Structure::Chunk,
                    right.start.0,
                    format!("overlaps the chunk at {} with {} bytes", left.start, left.length),
                ));
            }
        }
        Ok(Self { chunks })
    }

    /// The map with one more chunk.
    ///
    /// # Errors
    /// When the new chunk overlaps another one.
    pub(super) fn with(&self, chunk: MappedChunk) -> Result<Self> {
        Self::of(self.chunks.iter().cloned().chain([Arc::new(chunk)]).collect())
    }

    /// The map without the chunk at `start`.
    pub(super) fn without(&self, start: Logical) -> Self {
        let others = self.chunks.iter().filter(|mapped| mapped.chunk.start != start);
        Self { chunks: others.cloned().collect() }
    }

    /// The chunk that covers `logical`.
    pub(super) fn find(&self, logical: Logical) -> Option<&MappedChunk> {
        let after = self.chunks.partition_point(|mapped| mapped.chunk.start <= logical);
        let mapped = &self.chunks[after.checked_sub(1)?];
        (logical < mapped.chunk.end()).then_some(mapped)
    }

    pub(super) fn mapped(
        &self,
    ) -> impl DoubleEndedIterator<Item = &Arc<MappedChunk>> + ExactSizeIterator {
        self.chunks.iter()
    }
}
