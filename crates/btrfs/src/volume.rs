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
//! 2. Nothing here changes after opening: no lock is taken on the way to a device.
//! 3. A tree block or a checksummed sector that is returned was verified; when one way
//!    gives something else, the others are tried and the bad one is reported.
//! 4. Without a checksum a stale member is used only where no redundancy exists.

mod chunk_map;
mod members;
mod open;
mod parity;
mod read;
mod report;
mod ways;

use std::sync::Arc;

use offshoot_btrfs_format::check::Geometry;
use offshoot_btrfs_format::chunk::Chunk;
use offshoot_btrfs_format::superblock::Superblock;
use offshoot_btrfs_format::{Key, TreeId};
use offshoot_vfs::Result;

use crate::block::BlockCache;
use crate::tree::TreeRoot;
use chunk_map::ChunkMap;
pub use members::Member;
use members::Members;
pub use open::OpenOptions;
pub use report::{Report, Reporter};

/// A btrfs volume that is open for reading.
pub struct Volume {
    superblock: Superblock,
    members: Members,
    chunks: ChunkMap,
    geometry: Geometry,
    pub(crate) cache: BlockCache,
    root_tree: TreeRoot,
    csum_tree: Option<TreeRoot>,
    pub(crate) subvolume_roots: crate::subvolume::RootCache,
    reporter: Option<Reporter>,
}

impl Volume {
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
    pub fn chunks(&self) -> impl ExactSizeIterator<Item = &Chunk> {
        self.chunks.iter()
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

    /// Calls `visit` with every item of the tree `root` from `from` on, until it breaks.
    pub fn for_each_item(
        self: &Arc<Self>,
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

    /// Tells the reporter, if there is one.
    pub(crate) fn report(&self, report: &Report) {
        if let Some(reporter) = &self.reporter {
            reporter(report);
        }
    }
}
