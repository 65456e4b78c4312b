//! The short form, in the inode.

use offshoot_vfs::Result;
use offshoot_xfs_format::dir::short::{ShortDir, ShortDirView};
use offshoot_xfs_format::dir::{XfsDirEntry, block, file_type};
use offshoot_xfs_format::{BasicBlock, FileBlock, Ino};

use super::{ChangedDirectory, XfsEntryTarget};
use crate::buffer::malformed;
use crate::trans::{ChangedFork, ForkName};

/// The most entries of a short form: it counts them in a byte.
const MOST_ENTRIES: usize = 255;

/// The least bytes of an entry besides its name: a length, an offset, and a number.
const ENTRY: usize = 1 + 2 + 4;

/// The block of a directory with one.
const ONLY_BLOCK: FileBlock = FileBlock(0);

impl ChangedDirectory<'_, '_> {
    pub(super) fn make_empty(&mut self, parent: Ino) -> Result<()> {
        let short = ShortDir { parent, entries: Vec::new() };
        if self.store_short(&short)? {
            return Ok(());
        }
        Err(self.blocks.damaged("an empty directory has no room in its inode"))
    }

    pub(super) fn find_in_short(
        &mut self,
        bytes: &[u8],
        name: &[u8],
    ) -> Result<Option<XfsEntryTarget>> {
        let short = ShortDirView::new(self.geometry(), bytes).map_err(malformed)?;
        Ok(match name {
            b"." => Some((self.blocks.ino, file_type::DIR)),
            b".." => Some((short.parent, file_type::DIR)),
            _ => short.find(name).map(|entry| (entry.ino, entry.file_type)),
        })
    }

    pub(super) fn is_short_empty(&mut self, bytes: &[u8]) -> Result<bool> {
        let short = ShortDirView::new(self.geometry(), bytes).map_err(malformed)?;
        Ok(short.entries().next().is_none())
    }

    /// Adds an entry whose name the directory does not have.
    pub(super) fn add_to_short(&mut self, bytes: &[u8], entry: &XfsDirEntry<'_>) -> Result<()> {
        let geometry = self.geometry();
        let short = ShortDir::parse(geometry, bytes).map_err(malformed)?;
        let mut with_entry = short.clone();
        if with_entry.insert(geometry, *entry) && self.store_short(&with_entry)? {
            return Ok(());
        }
        self.short_to_block(&short)?;
        self.add_to_block(entry)
    }

    pub(super) fn remove_from_short(&mut self, bytes: &[u8], name: &[u8]) -> Result<()> {
        let mut short = ShortDir::parse(self.geometry(), bytes).map_err(malformed)?;
        short.remove(name).ok_or_else(|| self.missing(name))?;
        if self.store_short(&short)? {
            return Ok(());
        }
        Err(self.blocks.damaged("fewer entries have no room in the inode"))
    }

    pub(super) fn replace_in_short(
        &mut self,
        bytes: &[u8],
        name: &[u8],
        (ino, file_type): XfsEntryTarget,
    ) -> Result<()> {
        let short = ShortDir::parse(self.geometry(), bytes).map_err(malformed)?;
        let mut changed = short.clone();
        if name == b".." {
            changed.parent = ino;
        } else {
            let entry = changed.entries.iter_mut().find(|entry| entry.name == name);
            let entry = entry.ok_or_else(|| self.missing(name))?;
            (entry.ino, entry.file_type) = (ino, file_type);
        }
        if self.store_short(&changed)? {
            return Ok(());
        }
        // A number of more than 32 bits makes all others longer.
        let place = self.short_to_block(&short)?;
        self.replace_in_block(place, name, (ino, file_type))
    }

    /// Stores a short form. Returns false when the inode has no room for it.
    fn store_short(&mut self, short: &ShortDir<'_>) -> Result<bool> {
        let geometry = self.geometry();
        if short.entries.len() > MOST_ENTRIES {
            return Ok(false);
        }
        let bytes = short.encode(geometry).map_err(malformed)?;
        let inode = self.blocks.inode()?;
        if bytes.len() > inode.room(ForkName::Data, geometry)? {
            return Ok(false);
        }
        let len = bytes.len() as u64;
        inode.set_fork(ForkName::Data, ChangedFork::Local(bytes));
        self.set_size(len)?;
        Ok(true)
    }

    /// Brings all entries of a short form to a block.
    pub(super) fn bring_to_block(&mut self, bytes: &[u8]) -> Result<()> {
        let short = ShortDir::parse(self.geometry(), bytes).map_err(malformed)?;
        self.short_to_block(&short).map(drop)
    }

    /// Brings all entries to a block. Returns its place.
    fn short_to_block(&mut self, short: &ShortDir<'_>) -> Result<BasicBlock> {
        let geometry = self.geometry();
        self.blocks.inode()?.set_fork(ForkName::Data, ChangedFork::Extents(Vec::new()));
        self.blocks.create_at(ONLY_BLOCK)?;
        let expected = self.blocks.expected(ONLY_BLOCK)?;
        let bytes = block::from_short(geometry, &expected, short).map_err(malformed)?;
        self.blocks.store(ONLY_BLOCK, &bytes)?;
        self.set_size(geometry.dir_block_size() as u64)?;
        self.blocks.hold(ONLY_BLOCK)
    }

    /// Brings the entries of the only block to the inode, if they have room there.
    pub(super) fn block_to_short(&mut self) -> Result<()> {
        let geometry = self.geometry();
        let room = self.blocks.inode()?.room(ForkName::Data, geometry)?;
        let place = self.blocks.hold(ONLY_BLOCK)?;
        let view = block::DirBlock::view(geometry, self.blocks.bytes(place)?);
        let view = view.map_err(malformed)?;
        let entries = view.data.entries(0).filter(|entry| !entry.is_dot());
        if entries.map(|entry| entry.name.len() + ENTRY).sum::<usize>() > room {
            return Ok(());
        }
        let bytes = self.blocks.copy(ONLY_BLOCK)?;
        let view = block::DirBlock::view(geometry, &bytes).map_err(malformed)?;
        let short = block::to_short(geometry, &view).map_err(malformed)?;
        let fits = short.entries.len() <= MOST_ENTRIES
            && short.encode(geometry).map_err(malformed)?.len() <= room;
        if fits {
            self.blocks.free(ONLY_BLOCK)?;
            let inode = self.blocks.inode()?;
            if let rest @ 1.. = inode.extent_count(ForkName::Data) {
                let problem = format!("{rest} extents more than block {ONLY_BLOCK}");
                return Err(self.blocks.damaged(problem));
            }
            self.store_short(&short)?;
        }
        Ok(())
    }
}
