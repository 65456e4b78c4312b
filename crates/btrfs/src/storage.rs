//! Reading and writing the members of a volume by logical address. Storage knows no trees.
//!
//! ```text
//! open:  superblocks of all members -> system chunks -> what the chunk tree says, from above
//! read:  logical address -> chunk -> ways to read it -> member -> verified bytes
//! write: logical address -> chunk -> every copy on a member that has not failed
//! ```
//!
//! Words: a *member* is a device that belongs to the volume, present or not. A member is *stale*
//! when its superblock is older than the newest: it missed commits, so what it holds may be
//! outdated. A *way* is one method of reading an address: a copy on a member, or a rebuild from the
//! other members of a row.
//!
//! Storage asks the trees above it two questions, through [`StorageTrees`]: where data is in a
//! volume with a RAID stripe tree, and whether a member has what the newest commit wrote.
//!
//! Invariants:
//!
//! 1. Storage never changes a map of chunks that a reader has: it changes a copy of that map. A
//!    member that fails stays failed until the volume is opened again. A reader holds the lock of
//!    the map only while it clones the [`Arc`], and releases it before it asks a device.
//! 2. Storage returns only bytes that verified. When one way gives something else, it tries the
//!    others and reports the bad one.
//! 3. Without a checksum, storage reads a stale member only where no redundancy exists.

mod at_once;
mod chunk_map;
mod copies;
mod every_way;
mod failing;
mod lanes;
mod members;
mod mirrors;
mod open;
mod parity;
mod read;
mod ways;

use std::ops::Range;
use std::sync::Arc;

use offshoot_btrfs_format::check::Geometry;
use offshoot_btrfs_format::chunk::Chunk;
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, Superblock};
use offshoot_btrfs_format::{Logical, Malformed, Physical};
use offshoot_vfs::{Code, Errno, Error, Result, Structure};
use parking_lot::{Mutex, RwLock};
use uuid::Uuid;

use crate::report::{self, Reporter, VolumeReport};
use crate::shared::Shared;
pub(crate) use chunk_map::{ChunkMap, MappedChunk};
pub(crate) use copies::CopyPart;
pub(crate) use every_way::BadSectors;
pub(crate) use failing::{DeviceError, RecordedFailures, WrittenCopy};
use lanes::MemberLanes;
pub(crate) use lanes::{MemberWrite, MemberWrites};
pub use members::Member;
pub(crate) use members::{GivenDevice, Members, superblock_at};
pub(crate) use ways::{MemberOffset, ReadSegment, ReadWay};

/// The members of a volume, and the map from logical addresses to them.
pub(crate) struct Storage {
    superblock: Superblock,
    members: Members,
    chunks: Shared<RwLock<Arc<ChunkMap>>>,
    geometry: Geometry,
    chunk_tree_uuid: [u8; 16],
    reporter: Option<Reporter>,
    /// Members that failed while the volume was written.
    failing: Mutex<failing::FailureCounts>,
    lanes: MemberLanes,
    mirrors: mirrors::MirrorChoices,
}

/// The questions that storage asks the trees above it.
pub(crate) trait StorageTrees {
    /// The segment of at most `len` bytes of data from `logical` on, as the RAID stripe tree
    /// describes it; `None` in a volume without that tree. `mapped` covers `logical`.
    fn recorded_segment(
        &self,
        mapped: &MappedChunk,
        logical: Logical,
        len: u64,
    ) -> Result<Option<ReadSegment>>;

    /// Whether the member at `index`, whose superblock is one commit behind, has what the newest
    /// commit wrote.
    fn has_newest_commit(&self, index: usize) -> Result<bool>;
}

/// The error for a stored structure that violates the format.
pub(crate) fn malformed(e: Malformed) -> Error {
    Error::corrupt(e.structure, e.problem)
}

impl Storage {
    /// The superblock of the last commit.
    pub(crate) fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// The superblock, to read the volume through other roots than those that it names.
    pub(crate) fn superblock_mut(&mut self) -> &mut Superblock {
        &mut self.superblock
    }

    /// The superblocks of this volume on all members, copies included, that verify.
    pub(crate) fn stored_superblocks(&self) -> Vec<Superblock> {
        let devices = self.members.all().iter().filter_map(|member| member.device.as_ref());
        let all = devices.flat_map(|device| {
            SUPERBLOCK_OFFSETS
                .into_iter()
                .filter_map(|offset| superblock_at(&**device, offset).ok())
        });
        all.filter(|found| found.fsid == self.superblock.fsid).collect()
    }

    /// The devices of the volume, those of its seeds included, by their number.
    pub(crate) fn members(&self) -> &[Member] {
        self.members.all()
    }

    /// All chunks, by their logical address.
    pub(crate) fn chunks(&self) -> impl ExactSizeIterator<Item = Chunk> {
        self.mapped_chunks().into_iter().map(|mapped| mapped.chunk.clone())
    }

    /// All chunks with their members, by address.
    pub(crate) fn mapped_chunks(&self) -> Vec<Arc<MappedChunk>> {
        self.chunk_map().mapped().cloned().collect()
    }

    /// The address behind the last chunk.
    pub(crate) fn end_of_chunks(&self) -> u64 {
        self.chunk_map().mapped().next_back().map_or(0, |mapped| mapped.chunk.end().0)
    }

    /// The system chunks, by their logical address.
    pub(crate) fn system_chunks(&self) -> Vec<Chunk> {
        self.chunk_map().system().cloned().collect()
    }

    /// The map of chunks as it is now.
    fn chunk_map(&self) -> Arc<ChunkMap> {
        self.chunks.read().clone()
    }

    /// Maps a chunk that was allocated.
    pub(crate) fn map_chunk(&self, chunk: Chunk) -> Result<()> {
        let on = chunk.stripes.iter().map(|s| self.members.find_present(s.device_uuid));
        let mapped = MappedChunk { members: on.collect(), chunk };
        Arc::make_mut(&mut *self.chunks.write()).add(mapped)
    }

    /// Replaces a chunk by one at the same address, which is shorter or at other places.
    pub(crate) fn replace_chunk(&self, chunk: Chunk) -> Result<()> {
        let on = chunk.stripes.iter().map(|s| self.members.find_present(s.device_uuid));
        let mapped = MappedChunk { members: on.collect(), chunk };
        let mut chunks = self.chunks.write();
        let map = Arc::make_mut(&mut *chunks);
        map.remove(mapped.chunk.start);
        map.add(mapped)
    }

    /// Forgets a chunk that was removed.
    pub(crate) fn unmap_chunk(&self, start: Logical) {
        Arc::make_mut(&mut *self.chunks.write()).remove(start);
    }

    /// The chunk that begins at `start`.
    pub(crate) fn chunk_at(&self, start: Logical) -> Result<Chunk> {
        let found = self.chunk_map().find(start).map(|mapped| mapped.chunk.clone());
        found.filter(|chunk| chunk.start == start).ok_or_else(|| {
            Error::corrupt_at(Structure::Chunk, start.0, "the block group has no chunk")
        })
    }

    /// How blocks of the volume are verified.
    pub(crate) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The UUID that the headers of blocks carry for the chunk tree.
    pub(crate) fn chunk_tree_uuid(&self) -> Uuid {
        Uuid::from_bytes(self.chunk_tree_uuid)
    }

    /// The ranges of the block group at `start` that are never allocated, ascending and apart:
    /// where superblocks are, and the lowest logical addresses.
    pub(crate) fn left_out_ranges(&self, start: Logical) -> Vec<Range<u64>> {
        let map = self.chunk_map();
        let ranges = map.find(start).map(|mapped| mapped.chunk.left_out_ranges());
        let plain = |range: Range<Logical>| range.start.0..range.end.0;
        ranges.unwrap_or_default().into_iter().map(plain).collect()
    }

    /// Where `len` bytes at `logical` are to be written: for each copy the index of the member, the
    /// offset on it, and which of the bytes it gets. Copies on members that are missing or have
    /// failed are left out.
    ///
    /// # Errors
    /// When all members that some of the bytes go to are missing or have failed;
    /// [`Error::Unsupported`] for a chunk with parity.
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
                Error::corrupt_at(
                    Structure::Chunk,
                    at.0,
                    "no chunk covers an address that was allocated",
                )
            })?;
            let run = mapped.chunk.run(at, len - done).ok_or_else(|| {
                Error::unsupported(Code::Parity, "writing to a chunk with parity")
            })?;
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
    pub(crate) fn report(&self, report: &VolumeReport) {
        report::tell(self.reporter.as_ref(), report);
    }

    /// Makes the check of blocks refuse all that the kernel refuses, from now on.
    pub(crate) fn set_strict(&mut self) {
        self.geometry.is_strict = true;
    }

    /// Notes that the volume is written from now on. The headers of its blocks carry
    /// `chunk_tree_uuid` for the chunk tree.
    pub(crate) fn set_written(&mut self, chunk_tree_uuid: [u8; 16]) {
        self.chunk_tree_uuid = chunk_tree_uuid;
        self.geometry.is_written = true;
    }
}
