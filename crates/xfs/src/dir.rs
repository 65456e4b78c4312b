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
//!
//! A reader takes no lock, and a commit changes several blocks. So a reader reads what it needs at
//! one *moment*, between two commits of the directory, and again if one came between: an entry that
//! is renamed has one of its names, never none or both. When commits come one after the other it
//! makes them wait after a few tries ([`XfsInodes::at_one_moment`]). A listing has a moment for
//! each block with entries: it shows each entry that stays, and may miss one that moves, as any
//! listing may.

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
    ino: Ino,
}

impl<'a> XfsDirectory<'a> {
    /// The directory with this inode; `ENOTDIR` when it is none.
    pub(crate) fn new(
        buffers: &'a XfsBuffers,
        inodes: &'a XfsInodes,
        inode: &LoadedInode,
    ) -> Result<Self> {
        inode.require_directory()?;
        Ok(Self { buffers, inodes, ino: inode.ino })
    }

    /// What `read` finds in the directory as one commit has left it. It is called again when
    /// another commit of the directory came between, whatever it found.
    fn at_one_moment<T>(
        &self,
        mut read: impl FnMut(&DirectoryMoment<'_>) -> Result<T>,
    ) -> Result<T> {
        self.inodes.at_one_moment(self.buffers, file_id(self.ino), |inode| {
            inode.require_directory()?;
            read(&DirectoryMoment::new(self.buffers, inode))
        })
    }

    /// The inode that a name other than `.` and `..` leads to.
    pub(crate) fn lookup(&self, name: &[u8]) -> Result<Ino> {
        if name.len() > NAME_MAX {
            let name = name.escape_ascii().to_string();
            return Err(Error::posix(Errno::NAMETOOLONG, name));
        }
        let found = match name {
            b"." | b".." => None,
            _ => self.at_one_moment(|directory| directory.find(name))?,
        };
        found.ok_or_else(|| {
            let (dir, name) = (file_id(self.ino), name.escape_ascii());
            Error::posix(Errno::NOENT, format!("`{name}` in {dir}"))
        })
    }

    /// The directory above.
    pub(crate) fn above(&self) -> Result<Ino> {
        self.at_one_moment(|directory| {
            if let Some(short) = directory.short()? {
                return Ok(short.parent);
            }
            directory.find(b"..")?.ok_or_else(|| {
                Error::corrupt(Structure::Directory, "it does not say what directory it is in")
            })
        })
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
        let geometry = self.buffers.geometry();
        let mut after = after;
        while let Some(part) = self.at_one_moment(|directory| directory.part_behind(after))? {
            match part {
                DirectoryPart::Short(fork) => {
                    let short = ShortDirView::new(geometry, &fork).map_err(malformed)?;
                    for entry in short.entries() {
                        let cookie = (entry.offset / ALIGN) as u64;
                        if cookie > after && visit(cookie, entry)?.is_break() {
                            break;
                        }
                    }
                    return Ok(());
                }
                DirectoryPart::Block(block, buffer) => {
                    let (data, is_all) = data_of(geometry, &buffer)?;
                    if visit_block(geometry, block, &data, after, visit)?.is_break() || is_all {
                        return Ok(());
                    }
                    // The header of the next block is there.
                    after = ((block.0 << geometry.block_log) + geometry.dir_block_size() as u64)
                        / ALIGN as u64;
                }
            }
        }
        Ok(())
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

/// Entries that were there at one moment.
enum DirectoryPart {
    /// All of them: the contents of the inode.
    Short(Vec<u8>),
    /// Those of a block at a place of the fork.
    Block(FileBlock, Arc<XfsBuffer>),
}

/// The entries of a block, and whether the directory has no others.
fn data_of<'b>(geometry: &XfsGeometry, buffer: &'b XfsBuffer) -> Result<(DirData<'b>, bool)> {
    match buffer.directory(geometry)? {
        DirectoryView::Whole(block) => Ok((block.data, true)),
        DirectoryView::Data(data) => Ok((data, false)),
        _ => Err(bad(buffer, "it is in the place of a block with entries")),
    }
}

fn visit_block(
    geometry: &XfsGeometry,
    block: FileBlock,
    data: &DirData<'_>,
    after: u64,
    visit: &mut dyn FnMut(u64, XfsDirEntry<'_>) -> Result<ControlFlow<()>>,
) -> Result<ControlFlow<()>> {
    for entry in data.entries(0) {
        let cookie = DirCookie::new(geometry, block, entry.offset);
        let cookie = cookie.map_or(u64::MAX, |cookie| cookie.0.into());
        if cookie > after && !entry.is_dot() && visit(cookie, entry)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// A directory as one commit has left it.
struct DirectoryMoment<'a> {
    buffers: &'a XfsBuffers,
    inode: &'a LoadedInode,
    tree: HashTree<'a>,
}

impl<'a> DirectoryMoment<'a> {
    fn new(buffers: &'a XfsBuffers, inode: &'a LoadedInode) -> Self {
        let tree = HashTree { buffers, inode, fork: &inode.data, is_directory: true };
        Self { buffers, inode, tree }
    }

    fn geometry(&self) -> &'a XfsGeometry {
        self.buffers.geometry()
    }

    fn short(&self) -> Result<Option<ShortDirView<'a>>> {
        let ForkContents::Local(fork) = &self.inode.data.contents else { return Ok(None) };
        ShortDirView::new(self.geometry(), fork).map(Some).map_err(malformed)
    }

    /// The inode that a name leads to.
    fn find(&self, name: &[u8]) -> Result<Option<Ino>> {
        match self.short()? {
            Some(short) => Ok(short.find(name).map(|entry| entry.ino)),
            None => self.find_in_blocks(name),
        }
    }

    /// Looks a name up by its hash, in a directory with blocks.
    fn find_in_blocks(&self, name: &[u8]) -> Result<Option<Ino>> {
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

    /// The first entries that may be behind `after`; `None` when there are none.
    fn part_behind(&self, after: u64) -> Result<Option<DirectoryPart>> {
        if let ForkContents::Local(fork) = &self.inode.data.contents {
            return Ok(Some(DirectoryPart::Short(fork.to_vec())));
        }
        if after == 0 {
            self.check_blocks()?;
        }
        let Ok(start) = u32::try_from(after) else { return Ok(None) };
        let (at, _) = DirCookie(start).split(self.geometry());
        let Some((block, buffer)) = self.data_from(at)? else { return Ok(None) };
        self.view(&buffer)?;
        Ok(Some(DirectoryPart::Block(block, buffer)))
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
}

#[cold]
fn bad(buffer: &XfsBuffer, problem: &'static str) -> Error {
    buffer.damaged(Malformed::new(Structure::DirectoryBlock, problem))
}
