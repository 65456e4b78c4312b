//! The attribute fork of a file that a transaction changes.

use offshoot_vfs::{Errno, Error, Result};
use offshoot_xfs_format::attr::leaf::XattrLeaf;
use offshoot_xfs_format::{FileBlock, Ino, XfsGeometry};

use crate::buffer::malformed;
use crate::da::change::ChangedHashFork;
use crate::inode::change::{HoleWish, first_hole};
use crate::trans::{ForkName, XfsChangedInode, XfsTransaction};

pub(super) const FORK: ForkName = ForkName::Attributes;

/// The attributes of a file that a transaction changes.
pub(super) struct ChangedXattrs<'t, 'e> {
    pub(super) blocks: ChangedHashFork<'t, 'e>,
}

impl<'t, 'e> ChangedXattrs<'t, 'e> {
    pub(super) fn new(t: &'t mut XfsTransaction<'e>, ino: Ino) -> Self {
        Self { blocks: ChangedHashFork::of_attributes(t, ino) }
    }

    pub(super) fn geometry(&self) -> &'e XfsGeometry {
        self.blocks.geometry()
    }

    pub(super) fn inode(&mut self) -> Result<&mut XfsChangedInode> {
        self.blocks.inode()
    }

    /// The error about the fork.
    #[cold]
    pub(super) fn damaged(&self, problem: impl std::fmt::Display) -> Error {
        self.blocks.damaged(problem)
    }

    pub(super) fn leaf<'b>(&self, block: &'b [u8]) -> Result<XattrLeaf<'b>> {
        XattrLeaf::view(self.geometry(), block).map_err(malformed)
    }

    /// The first `count` blocks in a row that are not mapped. Attributes name their blocks by 32
    /// bits.
    pub(super) fn hole(&mut self, count: u32) -> Result<FileBlock> {
        let range = 0..u64::from(u32::MAX);
        let wish = HoleWish { range, count, alignment: 1, most_extents: usize::MAX };
        let ino = self.blocks.ino;
        first_hole(self.blocks.t, ino, FORK, &wish)?.ok_or_else(|| {
            let what = format!("{count} blocks in the attribute fork of inode {ino}");
            Error::posix(Errno::NOSPC, what)
        })
    }
}
