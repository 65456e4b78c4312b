//! A volume: its devices, and how logical addresses lead to verified bytes.
//!
//! ```text
//! open:  superblocks of all devices -> members -> system chunks -> chunk tree -> roots
//! read:  logical address -> chunk -> ways to read it -> device -> verified bytes
//! ```
//!
//! Words: a *member* is a device that belongs to the volume, present or not. A member is
//! *stale* when its superblock is older than the newest: it missed commits, so
//! what it holds may be outdated. A *way* is one manner of getting at the bytes of
//! an address: a copy on a member, or a rebuild from the other members of a row.
//!
//! Invariants:
//!
//! 1. Opening reads the superblocks, the chunk tree and the root of the root tree. Nothing
//!    that grows with what the volume holds is read.
//! 2. Nothing here changes after opening but the map of chunks, which is replaced as a whole: its
//!    lock is held to share it, never on the way to a device; and whether a member has failed, which stays so.
//! 3. A tree block or a checksummed sector that is returned was verified; when one way
//!    gives something else, the others are tried and the bad one is reported.
//! 4. Without a checksum a stale member is used only where no redundancy exists.

mod chunk_map;
mod copies;
mod failing;
mod members;
mod newest;
mod open;
mod parity;
mod read;
mod report;
mod stripe_tree;
mod ways;
mod writable;

use std::ops::Range;
use std::sync::Arc;

use offshoot_btrfs_format::check::Geometry;
use offshoot_btrfs_format::chunk::Chunk;
use offshoot_btrfs_format::superblock::Superblock;
use offshoot_btrfs_format::{Key, Logical, Physical, TreeId};
use offshoot_vfs::{Errno, Error, Result};
use parking_lot::{Mutex, RwLock};
use uuid::Uuid;

use crate::block::BlockCache;
use crate::transaction::Live;
use crate::tree::TreeRoot;
use chunk_map::{ChunkMap, MappedChunk};
pub(crate) use copies::CopyPart;
pub(crate) use failing::{DeviceError, Tells, WrittenCopy};
pub use members::Member;
use members::Members;
pub(crate) use members::superblock_at;
pub use open::{Latching, OpenOptions, Unlock};
pub use report::{Report, Reporter};
pub(crate) use writable::Change;

/// The engine of an open volume: everything that a [`Volume`](crate::Volume) can do.
pub struct Engine {
    superblock: Superblock,
    members: Members,
    chunks: RwLock<Arc<ChunkMap>>,
    geometry: Geometry,
    chunk_tree_uuid: [u8; 16],
    pub(crate) cache: BlockCache,
    root_tree: TreeRoot,
    csum_tree: Option<TreeRoot>,
    /// Where data is, in a volume that does not leave that to its chunks.
    stripe_tree: Option<TreeRoot>,
    pub(crate) subvolume_roots: crate::subvolume::RootCache,
    /// Inodes that are being changed or are open.
    pub(crate) inodes: crate::inode::Inodes,
    /// Data that was written and is in no extent yet.
    pub(crate) buffers: crate::data::Buffers,
    pub(crate) read_ahead: crate::data::ReadAhead,
    reporter: Option<Reporter>,
    /// Members that failed while the volume was written.
    failing: Mutex<failing::Failing>,
    /// What can change, in a volume that was opened for writing.
    live: Option<Live>,
}

impl Engine {
    /// The superblock of the last commit.
    #[must_use]
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// The devices of the volume, those of its seeds included, by their number.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        self.members.all()
    }

    /// All chunks, by their logical address.
    pub fn chunks(&self) -> impl ExactSizeIterator<Item = Chunk> {
        let all: Vec<_> = self.chunk_map().mapped().map(|mapped| mapped.chunk.clone()).collect();
        all.into_iter()
    }

    /// The map of chunks as it is now.
    fn chunk_map(&self) -> Arc<ChunkMap> {
        self.chunks.read().clone()
    }

    /// Maps a chunk that was allocated.
    pub(crate) fn map_chunk(&self, chunk: Chunk) -> Result<()> {
        let on = chunk.stripes.iter().map(|s| self.members.find_present(s.device_uuid));
        let mapped = MappedChunk { members: on.collect(), chunk };
        let mut chunks = self.chunks.write();
        *chunks = Arc::new(chunks.with(mapped)?);
        Ok(())
    }

    /// Forgets a chunk that was removed.
    pub(crate) fn unmap_chunk(&self, start: Logical) {
        let mut chunks = self.chunks.write();
        *chunks = Arc::new(chunks.without(start));
    }

    /// The chunk that begins at `start`.
    pub(crate) fn chunk_at(&self, start: Logical) -> Result<Chunk> {
        let found = self.chunk_map().find(start).map(|mapped| mapped.chunk.clone());
        found
            .filter(|chunk| chunk.start == start)
            .ok_or_else(|| Error::corrupt_at("chunk", start.0, "the block group has no chunk"))
    }

    /// The tree of tree roots.
    #[must_use]
    pub fn root_tree(&self) -> TreeRoot {
        self.root_tree
    }

    /// The checksum tree; `None` in a volume that has none.
    #[must_use]
    pub(crate) fn csum_tree(&self) -> Option<TreeRoot> {
        self.csum_tree
    }

    /// The root of the tree `id`.
    ///
    /// # Errors
    /// `ENOENT` when the volume has no such tree.
    pub fn tree(&self, id: TreeId) -> Result<TreeRoot> {
        crate::subvolume::tree_root(self, id)
    }

    /// Calls `visit` with every item of the tree `root` from `from` on, until it breaks. In a volume that is written, what
    /// waits to be put into the tree is not among them.
    pub fn for_each_item(
        &self,
        root: TreeRoot,
        from: Key,
        mut visit: impl FnMut(Key, &[u8]) -> std::ops::ControlFlow<()>,
    ) -> Result<()> {
        let mut cursor = crate::tree::Cursor::seek(self, root, from)?;
        while let Some((key, data)) = cursor.item() {
            if visit(key, data).is_break() {
                break;
            }
            cursor.advance()?;
        }
        Ok(())
    }

    /// What can change, in a volume that was opened for writing.
    pub(crate) fn live_part(&self) -> Option<&Live> {
        self.live.as_ref()
    }

    /// What can change.
    ///
    /// # Errors
    /// `EROFS` when the volume was opened for reading.
    pub(crate) fn live(&self) -> Result<&Live> {
        self.live
            .as_ref()
            .ok_or_else(|| Error::posix(Errno::ROFS, "the volume was opened for reading"))
    }

    /// How often space became free that was looked at before: what a search found may be something else
    /// when this has changed since.
    pub(crate) fn epoch(&self) -> u64 {
        self.live.as_ref().map_or(0, |live| live.epoch.load(std::sync::atomic::Ordering::Acquire))
    }

    /// How blocks of the volume are verified.
    pub(crate) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The UUID that the headers of blocks carry for the chunk tree.
    pub(crate) fn chunk_tree_uuid(&self) -> Uuid {
        Uuid::from_bytes(self.chunk_tree_uuid)
    }

    /// The ranges of the block group at `start` that are never allocated, ascending and apart: where
    /// superblocks are, and the lowest logical addresses.
    pub(crate) fn left_out_ranges(&self, start: Logical) -> Vec<Range<u64>> {
        let map = self.chunk_map();
        let ranges = map.find(start).map(|mapped| mapped.chunk.left_out_ranges());
        let plain = |range: Range<Logical>| range.start.0..range.end.0;
        ranges.unwrap_or_default().into_iter().map(plain).collect()
    }

    /// Where on which members `len` bytes at `logical` are to be written: every copy but those on members that are missing or have failed, and which of the
    /// bytes go there.
    ///
    /// # Errors
    /// When no member is left that some of them go to.
    pub(crate) fn write_places(
        &self,
        logical: Logical,
        len: u64,
    ) -> Result<Vec<(usize, Physical, Range<u64>)>> {
        let mut places = Vec::with_capacity(2);
        let chunks = self.chunk_map();
        let mut done = 0;
        while done < len {
            let at = Logical(logical.0 + done);
            let mapped = chunks.find(at).ok_or_else(|| {
                Error::corrupt_at("chunk", at.0, "no chunk covers an address that was allocated")
            })?;
            let run = mapped
                .chunk
                .run(at, len - done)
                .ok_or_else(|| Error::Unsupported("writing to a chunk with parity".to_owned()))?;
            let before = places.len();
            for (stripe, physical) in run.copies {
                let is_written = |member: &usize| !self.members()[*member].has_failed();
                if let Some(member) = mapped.members[stripe].filter(is_written) {
                    places.push((member, physical, done..done + run.len));
                }
            }
            if places.len() == before {
                let what =
                    format!("writing at {}: no member that it goes to is there and whole", at.0);
                return Err(Error::io(what, Errno::NXIO));
            }
            done += run.len;
        }
        Ok(places)
    }

    /// Tells the reporter, if there is one.
    pub(crate) fn report(&self, report: &Report) {
        if let Some(reporter) = &self.reporter {
            reporter(report);
        }
    }
}
