//! The engine of an open volume: storage, and what the rooms above it keep between calls.
//!
//! Opening reads the superblocks, the chunk tree and the root of the root tree. It reads nothing
//! that grows with what the volume holds.

mod blocks;
mod newest;
mod open;
mod stripe_tree;
mod usage;
mod writable;

use offshoot_btrfs_format::chunk::Chunk;
use offshoot_btrfs_format::superblock::Superblock;
use offshoot_btrfs_format::{Key, Logical, TreeId};
use offshoot_vfs::{Errno, Error, Result};

use crate::block::BlockCache;
use crate::report::Report;
use crate::space::{Roots, SpaceStats};
use crate::stats::Stats;
use crate::storage::{MappedChunk, Member, Segment, Storage, Trees};
use crate::transaction::{Live, RootCache, tree_root};
use crate::tree::{Cursor, TreeRoot};
pub use open::OpenOptions;
pub(crate) use writable::Change;

/// The engine of an open volume: everything that a [`Volume`](crate::Volume) can do.
pub struct Engine {
    pub(crate) storage: Storage,
    pub(crate) cache: BlockCache,
    root_tree: TreeRoot,
    csum_tree: Option<TreeRoot>,
    /// Where data is, in a volume that does not leave that to its chunks.
    stripe_tree: Option<TreeRoot>,
    pub(crate) subvolume_roots: RootCache,
    /// Inodes that are being changed or are open.
    pub(crate) inodes: crate::inode::Inodes,
    /// Data that was written and is in no extent yet.
    pub(crate) buffers: crate::data::Buffers,
    pub(crate) read_ahead: crate::data::ReadAhead,
    /// What can change, in a volume that was opened for writing.
    live: Option<Live>,
}

impl Engine {
    /// The superblock of the last commit.
    #[must_use]
    pub fn superblock(&self) -> &Superblock {
        self.storage.superblock()
    }

    /// The devices of the volume, those of its seeds included, by their number.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        self.storage.members()
    }

    /// All chunks, by their logical address.
    pub fn chunks(&self) -> impl ExactSizeIterator<Item = Chunk> {
        self.storage.chunks()
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
        tree_root(self, id)
    }

    /// Calls `visit` with every item of the tree `root` from `from` on, until it breaks. In a
    /// volume that is written, what waits to be put into the tree is not among them.
    pub fn for_each_item(
        &self,
        root: TreeRoot,
        from: Key,
        mut visit: impl FnMut(Key, &[u8]) -> std::ops::ControlFlow<()>,
    ) -> Result<()> {
        let mut cursor = self.cursor(root, from)?;
        while let Some((key, data)) = cursor.item() {
            if visit(key, data).is_break() {
                break;
            }
            cursor.advance()?;
        }
        Ok(())
    }

    /// A cursor on the first item of the tree `root` whose key is `key` or greater.
    pub fn cursor(&self, root: TreeRoot, key: Key) -> Result<Cursor<'_>> {
        Cursor::seek(self, root, key)
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

    /// What the engine has done since the volume was opened. Nothing in one that was opened for
    /// reading.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let Some(live) = self.live_part() else { return Stats::default() };
        live.stats.note_backlog(live.delayed.peak_bytes());
        live.stats.note_metadata_reserved(live.space.metadata_reserved_peak());
        live.stats.read()
    }

    /// What happened to reservations since the volume was opened, and what there is of each kind of
    /// space. Nothing of a volume that was opened for reading.
    #[must_use]
    pub fn space_stats(&self) -> SpaceStats {
        let Some(live) = self.live_part() else { return SpaceStats::default() };
        live.space.stats(live.stats.read().reservations_at_once)
    }

    /// Tells the reporter, if there is one.
    pub(crate) fn report(&self, report: &Report) {
        self.storage.report(report);
    }

    /// Fills `buf`, whole sectors, with the data at `logical`: [`Storage::read_data`].
    pub(crate) fn read_data(
        &self,
        logical: Logical,
        buf: &mut [u8],
        checksums: Option<&[u8]>,
    ) -> Result<()> {
        self.storage.read_data(self, logical, buf, checksums)
    }
}

impl Roots for Engine {
    fn storage(&self) -> &Storage {
        &self.storage
    }

    fn tree(&self, id: TreeId) -> Result<TreeRoot> {
        tree_root(self, id)
    }
}

impl Trees for Engine {
    fn recorded_segment(
        &self,
        mapped: &MappedChunk,
        logical: Logical,
        len: u64,
    ) -> Result<Option<Segment>> {
        let tree = self.stripe_tree.filter(|_| mapped.chunk.flags.is_in_stripe_tree());
        tree.map(|tree| stripe_tree::recorded_segment(self, tree, mapped, logical, len)).transpose()
    }

    fn has_newest_commit(&self, index: usize) -> Result<bool> {
        newest::has_newest_commit(self, index)
    }
}
