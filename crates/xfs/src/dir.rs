//! Directories, in all their forms.
//!
//! | form | where entries are | how a name is found |
//! |---|---|---|
//! | short | in the inode | all are compared |
//! | block | in one block | by the hashes in it |
//! | leaf, node | in data blocks | by the hashes in leaves |
//!
//! A position in a directory is the place of an entry in the space of the data, which stays the
//! same as long as the entry is there.

#[cfg_attr(not(test), expect(dead_code, reason = "calls that change names are to come"))]
pub(crate) mod change;
mod children;

use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_vfs::{
    DirEntry, Errno, Error, FileType, Malformed, NAME_MAX, Result, Structure, missing,
};
use offshoot_xfs_format::dir::data::DirData;
use offshoot_xfs_format::dir::short::ShortDirView;
use offshoot_xfs_format::dir::{ALIGN, DirCookie, XfsDirEntry, file_type, leaf, leaf_start};
use offshoot_xfs_format::hash::name_hash;
use offshoot_xfs_format::{FileBlock, Ino, XfsGeometry};

use crate::buffer::{DirectoryView, XfsBuffer, XfsBuffers, malformed};
use crate::da::HashTree;
use crate::inode::fork::ForkContents;
use crate::inode::{LoadedInode, XfsInodes, file_id};
pub(crate) use children::DirectoryChildren;

/// A directory that is read.
pub(crate) struct XfsDirectory<'a> {
    buffers: &'a XfsBuffers,
    inodes: &'a XfsInodes,
    inode: &'a LoadedInode,
    tree: HashTree<'a>,
}

impl<'a> XfsDirectory<'a> {
    /// The directory with this inode; `ENOTDIR` when it is none.
    pub(crate) fn new(
        buffers: &'a XfsBuffers,
        inodes: &'a XfsInodes,
        inode: &'a LoadedInode,
    ) -> Result<Self> {
        inode.require_directory()?;
        let tree = HashTree { buffers, inode, fork: &inode.data, is_directory: true };
        Ok(Self { buffers, inodes, inode, tree })
    }

    fn geometry(&self) -> &'a XfsGeometry {
        self.buffers.geometry()
    }

    fn short(&self) -> Result<Option<ShortDirView<'a>>> {
        let ForkContents::Local(fork) = &self.inode.data.contents else { return Ok(None) };
        ShortDirView::new(self.geometry(), fork).map(Some).map_err(malformed)
    }

    /// The inode that a name other than `.` and `..` leads to.
    pub(crate) fn lookup(&self, name: &[u8]) -> Result<Ino> {
        let no_entry = || {
            let (dir, name) = (self.inode.file(), name.escape_ascii());
            Error::posix(Errno::NOENT, format!("`{name}` in {dir}"))
        };
        if name.len() > NAME_MAX {
            let name = name.escape_ascii().to_string();
            return Err(Error::posix(Errno::NAMETOOLONG, name));
        }
        if matches!(name, b"." | b"..") {
            return Err(no_entry());
        }
        if let Some(short) = self.short()? {
            return short.find(name).map(|entry| entry.ino).ok_or_else(no_entry);
        }
        self.find(name)?.ok_or_else(no_entry)
    }

    /// The directory above.
    pub(crate) fn above(&self) -> Result<Ino> {
        if let Some(short) = self.short()? {
            return Ok(short.parent);
        }
        self.find(b"..")?.ok_or_else(|| {
            Error::corrupt(Structure::Directory, "it does not say what directory it is in")
        })
    }

    /// Looks a name up by its hash, in a directory with blocks.
    fn find(&self, name: &[u8]) -> Result<Option<Ino>> {
        let size = self.inode.core.size.get();
        if size <= self.geometry().dir_block_size() as u64 {
            let buffer = self.tree.require(FileBlock(0))?;
            if let DirectoryView::Whole(block) = self.view(&buffer)? {
                let found = block.find(name).map_err(|e| buffer.damaged(e))?;
                return Ok(found.map(|entry| entry.ino));
            }
        }
        let hash = name_hash(name);
        let Some(first) = self.tree.find(leaf_start(self.geometry()), hash)? else {
            return Ok(None);
        };
        let mut walk = self.tree.walk(first);
        loop {
            let buffer = walk.leaf.buffer.clone();
            let DirectoryView::Leaf(leaf) = self.view(&buffer)? else { return Ok(None) };
            for cookie in leaf::find(leaf.hashes, hash) {
                if let Some(ino) = self.named(cookie, name)? {
                    return Ok(Some(ino));
                }
            }
            // The next leaf may have the hash too, if it is the last one of this leaf.
            let goes_on = leaf.hashes.last().is_none_or(|last| last.hash.get() == hash);
            if !goes_on || !walk.advance(leaf.info)? {
                return Ok(None);
            }
        }
    }

    /// The inode of the entry at `cookie`, if it has this name.
    fn named(&self, cookie: DirCookie, name: &[u8]) -> Result<Option<Ino>> {
        let (block, offset) = cookie.split(self.geometry());
        let buffer = self.tree.require(block)?;
        let DirectoryView::Data(data) = self.view(&buffer)? else {
            return Err(bad(&buffer, "a leaf leads to a block without entries"));
        };
        let entry = data.entry(offset).map_err(|e| buffer.damaged(e))?;
        Ok((entry.name == name).then_some(entry.ino))
    }

    fn view<'b>(&self, buffer: &'b XfsBuffer) -> Result<DirectoryView<'b>> {
        let view = buffer.directory(self.geometry())?;
        let is_one_block = self.inode.core.size.get() == self.geometry().dir_block_size() as u64;
        if matches!(view, DirectoryView::Whole(_)) && !is_one_block {
            return Err(bad(buffer, "it is all of a directory, but the inode has another size"));
        }
        Ok(view)
    }

    /// Calls `visit` for the entries behind `after`, without `.` and `..`.
    pub(crate) fn read(
        &self,
        after: u64,
        visit: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        self.entries(after, &mut |cookie, entry| {
            let file_type = self.type_of(&entry)?;
            let file = file_id(entry.ino);
            Ok(visit(DirEntry { name: entry.name, file, file_type, cookie }))
        })
    }

    /// The type that an entry records, or else that of its inode.
    fn type_of(&self, entry: &XfsDirEntry<'_>) -> Result<FileType> {
        Ok(match entry.file_type {
            file_type::REG_FILE => FileType::Regular,
            file_type::DIR => FileType::Directory,
            // A whiteout is a device with the number 0.
            file_type::CHRDEV | file_type::WHT => FileType::CharDevice,
            file_type::BLKDEV => FileType::BlockDevice,
            file_type::FIFO => FileType::Fifo,
            file_type::SOCK => FileType::Socket,
            file_type::SYMLINK => FileType::Symlink,
            _ => {
                let file = file_id(entry.ino);
                let inode = self.inodes.get(self.buffers, file).map_err(|error| match error {
                    Error::Posix { errno: Errno::NOENT, .. } => missing(entry.name, file),
                    error => error,
                })?;
                inode.file_type()?
            }
        })
    }

    /// As [`read`](Self::read), with entries as they are stored.
    fn entries(
        &self,
        after: u64,
        visit: &mut dyn FnMut(u64, XfsDirEntry<'_>) -> Result<ControlFlow<()>>,
    ) -> Result<()> {
        if let Some(short) = self.short()? {
            for entry in short.entries() {
                let cookie = (entry.offset / ALIGN) as u64;
                if cookie > after && visit(cookie, entry)?.is_break() {
                    return Ok(());
                }
            }
            return Ok(());
        }
        let geometry = self.geometry();
        if after == 0 {
            self.check_blocks()?;
        }
        let Ok(start) = u32::try_from(after) else { return Ok(()) };
        let (mut at, _) = DirCookie(start).split(geometry);
        while let Some((block, buffer)) = self.data_from(at)? {
            let view = self.view(&buffer)?;
            let data = match &view {
                DirectoryView::Whole(block) => &block.data,
                DirectoryView::Data(data) => data,
                _ => return Err(bad(&buffer, "it is in the place of a block with entries")),
            };
            if self.visit_block(block, data, after, visit)?.is_break() {
                return Ok(());
            }
            if matches!(view, DirectoryView::Whole(_)) {
                return Ok(());
            }
            at = FileBlock(block.0 + (1 << geometry.dir_block_log));
        }
        Ok(())
    }

    fn visit_block(
        &self,
        block: FileBlock,
        data: &DirData<'_>,
        after: u64,
        visit: &mut dyn FnMut(u64, XfsDirEntry<'_>) -> Result<ControlFlow<()>>,
    ) -> Result<ControlFlow<()>> {
        for entry in data.entries(0) {
            let cookie = DirCookie::new(self.geometry(), block, entry.offset);
            let cookie = cookie.map_or(u64::MAX, |cookie| cookie.0.into());
            if cookie > after && !entry.is_dot() && visit(cookie, entry)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Fails when there are more blocks than the inode counts: then one of them is at several
    /// places, and would be listed at each.
    fn check_blocks(&self) -> Result<()> {
        let most = self.inode.core.nblocks.get().min(self.geometry().blocks);
        let mut extents = self.inode.data.extents(self.buffers, FileBlock(0))?;
        let mut count = 0;
        while let Some(extent) = extents.next()? {
            count += u64::from(extent.count);
            if count > most {
                let problem = format!("{count} blocks or more, of {most}");
                return Err(self.inode.data.damaged(problem));
            }
        }
        Ok(())
    }

    /// The first data block from `at` on, and its place.
    fn data_from(&self, at: FileBlock) -> Result<Option<(FileBlock, Arc<XfsBuffer>)>> {
        let Some(extent) = self.inode.data.extents(self.buffers, at)?.next()? else {
            return Ok(None);
        };
        let blocks = 1_u64 << self.geometry().dir_block_log;
        let block = FileBlock(extent.offset.0.max(at.0) / blocks * blocks);
        if block >= leaf_start(self.geometry()) {
            return Ok(None);
        }
        let buffer = self.tree.require(block)?;
        Ok(Some((block, buffer)))
    }

    /// The name of the entry at `cookie`, which a listing gave.
    fn name_at(&self, cookie: u64) -> Result<Option<Vec<u8>>> {
        let mut name = None;
        self.entries(cookie.saturating_sub(1), &mut |_, entry| {
            name = Some(entry.name.to_vec());
            Ok(ControlFlow::Break(()))
        })?;
        Ok(name)
    }
}

#[cold]
fn bad(buffer: &XfsBuffer, problem: &'static str) -> Error {
    buffer.damaged(Malformed::new(Structure::DirectoryBlock, problem))
}
