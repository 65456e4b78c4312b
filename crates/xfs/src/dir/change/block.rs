//! The form with one block, which holds the entries and their hashes.

use offshoot_vfs::Result;
use offshoot_xfs_format::da::DaKind;
use offshoot_xfs_format::dir::block::{self, DirBlock};
use offshoot_xfs_format::dir::{XfsDirEntry, data};
use offshoot_xfs_format::hash::name_hash;
use offshoot_xfs_format::{BasicBlock, FileBlock};

use super::{ChangedDirectory, XfsEntryTarget};

const ONLY: (FileBlock, DaKind) = (FileBlock(0), DaKind::DirBlock);

impl ChangedDirectory<'_, '_> {
    /// The entry with a name in the only block, which the transaction has at `place`.
    fn entry_in_block(&self, place: BasicBlock, name: &[u8]) -> Result<Option<XfsDirEntry<'_>>> {
        let damaged = self.blocks.in_block(FileBlock(0));
        let bytes = self.blocks.bytes(place)?;
        let view = DirBlock::view(self.geometry(), bytes).map_err(&damaged)?;
        view.find(name).map_err(damaged)
    }

    /// The offset of that entry, which has to be there.
    fn offset_in_block(&self, place: BasicBlock, name: &[u8]) -> Result<usize> {
        let found = self.entry_in_block(place, name)?;
        found.map(|entry| entry.offset).ok_or_else(|| self.missing(name))
    }

    pub(super) fn find_in_block(
        &self,
        place: BasicBlock,
        name: &[u8],
    ) -> Result<Option<XfsEntryTarget>> {
        let found = self.entry_in_block(place, name)?;
        Ok(found.map(|entry| (entry.ino, entry.file_type)))
    }

    /// Adds an entry whose name the block does not have.
    pub(super) fn add_to_block(&mut self, entry: &XfsDirEntry<'_>) -> Result<()> {
        let offset =
            self.blocks.edit(ONLY, |geometry, edit| block::insert(geometry, edit, entry))?;
        if offset.is_some() {
            return Ok(());
        }
        self.block_to_leaf()?;
        self.add_to_tree(entry, name_hash(entry.name), None)
    }

    pub(super) fn remove_from_block(&mut self, place: BasicBlock, name: &[u8]) -> Result<()> {
        let offset = self.offset_in_block(place, name)?;
        self.blocks.edit(ONLY, |geometry, edit| block::remove(geometry, edit, offset, name))?;
        self.block_to_short()
    }

    pub(super) fn replace_in_block(
        &mut self,
        place: BasicBlock,
        name: &[u8],
        target: XfsEntryTarget,
    ) -> Result<()> {
        let offset = self.offset_in_block(place, name)?;
        self.blocks.edit(ONLY, |geometry, edit| data::set_file(geometry, edit, offset, target))
    }

    /// Moves the hashes to a leaf.
    fn block_to_leaf(&mut self) -> Result<()> {
        let root = self.blocks.root();
        self.blocks.create_at(root)?;
        let expected = self.blocks.expected(root)?;
        self.blocks.require_proof(FileBlock(0))?;
        let leaf =
            self.blocks.edit(ONLY, |geometry, edit| block::to_leaf(geometry, edit, &expected))?;
        self.blocks.store(root, &leaf)
    }
}
