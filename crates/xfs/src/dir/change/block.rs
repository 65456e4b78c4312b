//! The form with one block, which holds the entries and their hashes.

use offshoot_vfs::Result;
use offshoot_xfs_format::FileBlock;
use offshoot_xfs_format::da::DaKind;
use offshoot_xfs_format::dir::block::{self, DirBlock};
use offshoot_xfs_format::dir::{XfsDirEntry, data};

use super::{ChangedDirectory, XfsEntryTarget};

const ONLY: (FileBlock, DaKind) = (FileBlock(0), DaKind::DirBlock);

impl ChangedDirectory<'_, '_> {
    fn entry_in_block<'b>(&self, bytes: &'b [u8], name: &[u8]) -> Result<Option<XfsDirEntry<'b>>> {
        let damaged = self.blocks.in_block(FileBlock(0));
        let view = DirBlock::view(self.geometry(), bytes).map_err(&damaged)?;
        view.find(name).map_err(damaged)
    }

    pub(super) fn find_in_block(
        &self,
        bytes: &[u8],
        name: &[u8],
    ) -> Result<Option<XfsEntryTarget>> {
        let found = self.entry_in_block(bytes, name)?;
        Ok(found.map(|entry| (entry.ino, entry.file_type)))
    }

    pub(super) fn add_to_block(&mut self, bytes: &[u8], entry: &XfsDirEntry<'_>) -> Result<()> {
        if self.entry_in_block(bytes, entry.name)?.is_some() {
            return Err(self.exists(entry.name));
        }
        let offset =
            self.blocks.edit(ONLY, |geometry, edit| block::insert(geometry, edit, entry))?;
        if offset.is_some() {
            return Ok(());
        }
        self.block_to_leaf()?;
        self.add_to_tree(entry)
    }

    pub(super) fn remove_from_block(&mut self, bytes: &[u8], name: &[u8]) -> Result<()> {
        let found = self.entry_in_block(bytes, name)?.ok_or_else(|| self.missing(name))?;
        self.blocks
            .edit(ONLY, |geometry, edit| block::remove(geometry, edit, found.offset, name))?;
        self.block_to_short()
    }

    pub(super) fn replace_in_block(
        &mut self,
        bytes: &[u8],
        name: &[u8],
        target: XfsEntryTarget,
    ) -> Result<()> {
        let found = self.entry_in_block(bytes, name)?.ok_or_else(|| self.missing(name))?;
        self.blocks
            .edit(ONLY, |geometry, edit| data::set_file(geometry, edit, found.offset, target))
    }

    /// Moves the hashes to a leaf.
    fn block_to_leaf(&mut self) -> Result<()> {
        let root = self.blocks.root();
        self.blocks.create_at(root)?;
        let expected = self.blocks.expected(root)?;
        let leaf =
            self.blocks.edit(ONLY, |geometry, edit| block::to_leaf(geometry, edit, &expected))?;
        self.blocks.store(root, &leaf)
    }
}
