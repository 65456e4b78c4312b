//! Changes of directories: names are added, removed, and led to other files, in every form.
//!
//! ```text
//!            grows                                         shrinks
//! short      no room in the inode                          all entries fit in the inode
//!   block    no room for the entry or its hash             the end of the block has room for all
//!                                                          hashes
//!   leaf     no room for the hash, or for the free space   hashes and free space fit in one leaf,
//!            of one more data block                        and one index block has all free space
//!   node
//! ```
//!
//! Each change is the work of one transaction, which locks the directory, and the AGF when it takes
//! a block. An error leaves the transaction to be dropped. What a change gives up is freed later:
//! each change returns that as deferred work, whose intents the caller logs with the transaction.
//!
//! A removal works on a full volume too. A block that it empties stays when its extent would be cut
//! in two and the tree of the extents has no block for that; later entries go there, and it goes
//! when it is the last one.
//!
//! The caller keeps times, change counts and links of all inodes. The size of a directory is kept
//! here: it is that of the short form, or ends with the last data block.
//!
//! | file | what it changes |
//! |---|---|
//! | `short` | the form in the inode, and the way from there to a block and back |
//! | `block` | the form with one block, and the way to a leaf and back |
//! | `leaves` | the hashes in leaves, and the way from one leaf to a tree and back |
//! | `space` | data blocks, and what says how much room they have |

mod block;
mod leaves;
mod short;
mod space;
#[cfg(test)]
mod tests;

use offshoot_vfs::{Errno, Error, NAME_MAX, Result};
use offshoot_xfs_format::da::DaKind;
use offshoot_xfs_format::dir::{XfsDirEntry, file_type};
use offshoot_xfs_format::hash::name_hash;
use offshoot_xfs_format::inode::file_type as inode_type;
use offshoot_xfs_format::record::XfsExtent;
use offshoot_xfs_format::{BasicBlock, FileBlock, Ino, XfsGeometry};

use crate::da::change::{ChangedHashFork, HashPath};
use crate::defer::DeferredWork;
use crate::inode::file_id;
use crate::trans::{
    ChangedFork, DIRECTORY_BLOCKS, ForkName, ReservationSizes, XfsTransaction, XfsTransactions,
};

/// What an entry leads to: the file, and its type ([`file_type`]).
pub(crate) type XfsEntryTarget = (Ino, u8);

/// The free blocks that adding a name, or leading it elsewhere, may take: a data block, an index
/// block, and a block on each level of the tree; and what the tree of the extents needs for each.
pub(crate) fn most_blocks_to_add(engine: &XfsTransactions) -> u64 {
    (DIRECTORY_BLOCKS << engine.geometry().dir_block_log) + most_blocks_to_remove(engine)
}

/// The free blocks that the removal of a name may take: extents that are cut in two may need room
/// in their tree.
pub(crate) fn most_blocks_to_remove(engine: &XfsTransactions) -> u64 {
    let (geometry, levels) = (engine.geometry(), engine.most_levels());
    let sizes = ReservationSizes { geometry, levels, is_old: false };
    DIRECTORY_BLOCKS * sizes.extent_blocks(1 << geometry.dir_block_log, levels.data)
}

/// Does something with a directory. Errors say which one it is.
fn with<'e, T>(
    t: &mut XfsTransaction<'e>,
    dir: Ino,
    act: impl FnOnce(ChangedDirectory<'_, 'e>) -> Result<T>,
) -> Result<T> {
    let outcome = ChangedDirectory::new(t, dir).and_then(act);
    outcome.map_err(|error| error.in_file_if_unnamed(file_id(dir)))
}

/// Makes an inode, whose core says that it is a directory, one without names.
pub(crate) fn make_empty(t: &mut XfsTransaction<'_>, dir: Ino, parent: Ino) -> Result<()> {
    with(t, dir, |mut directory| directory.make_empty(parent))
}

/// What a name leads to. `.` and `..` are names too.
pub(crate) fn find_name(
    t: &mut XfsTransaction<'_>,
    dir: Ino,
    name: &[u8],
) -> Result<Option<XfsEntryTarget>> {
    with(t, dir, |mut directory| match directory.form()? {
        DirectoryForm::Short(bytes) => directory.find_in_short(&bytes, name),
        DirectoryForm::Block(place) => directory.find_in_block(place, name),
        DirectoryForm::Tree => Ok(directory.search_tree(name)?.found.map(|found| found.target)),
    })
}

/// Where a name goes in a directory that does not have it: what [`find_free_name`] has found. It is
/// right as long as the transaction keeps the inode of the directory locked, over commits of steps
/// too, and changes no name in it.
#[derive(Debug)]
pub(crate) struct FreeName {
    dir: Ino,
    hash: u32,
    /// The way to the leaf that gets the hash, in a directory with leaves.
    path: Option<HashPath>,
    /// The extents that the search has looked up.
    seen: Vec<XfsExtent>,
}

/// Looks for a name that is to be added. `None` when the directory has it.
pub(crate) fn find_free_name(
    t: &mut XfsTransaction<'_>,
    dir: Ino,
    name: &[u8],
) -> Result<Option<FreeName>> {
    check_name(name)?;
    let hash = name_hash(name);
    with(t, dir, |mut directory| {
        let (is_there, path) = match directory.form()? {
            DirectoryForm::Short(bytes) => (directory.find_in_short(&bytes, name)?.is_some(), None),
            DirectoryForm::Block(place) => (directory.find_in_block(place, name)?.is_some(), None),
            DirectoryForm::Tree => {
                let search = directory.search_tree(name)?;
                (search.found.is_some(), Some(search.first))
            }
        };
        let seen = directory.blocks.seen;
        Ok((!is_there).then_some(FreeName { dir, hash, path, seen }))
    })
}

/// Whether a directory has no names. As for the kernel, one with blocks has names: the removal of
/// the last ones brings it to the short form.
pub(crate) fn is_empty(t: &mut XfsTransaction<'_>, dir: Ino) -> Result<bool> {
    with(t, dir, |mut directory| {
        let DirectoryForm::Short(bytes) = directory.form()? else { return Ok(false) };
        directory.is_short_empty(&bytes)
    })
}

/// Adds a name; `EEXIST` when it is there.
pub(crate) fn add_name(
    t: &mut XfsTransaction<'_>,
    dir: Ino,
    name: &[u8],
    target: XfsEntryTarget,
) -> Result<Vec<DeferredWork>> {
    match find_free_name(t, dir, name)? {
        Some(free) => add_free_name(t, free, name, target),
        None => with(t, dir, |directory| Err(directory.exists(name))),
    }
}

/// Adds a name where [`find_free_name`] has found that it goes.
pub(crate) fn add_free_name(
    t: &mut XfsTransaction<'_>,
    FreeName { dir, hash, path, seen }: FreeName,
    name: &[u8],
    (ino, file_type): XfsEntryTarget,
) -> Result<Vec<DeferredWork>> {
    debug_assert_eq!(hash, name_hash(name), "another name was looked for");
    let entry = XfsDirEntry { offset: 0, ino, name, file_type };
    with(t, dir, |mut directory| {
        directory.blocks.seen = seen;
        match directory.form()? {
            DirectoryForm::Short(bytes) => directory.add_to_short(&bytes, &entry),
            DirectoryForm::Block(_) => directory.add_to_block(&entry),
            DirectoryForm::Tree => directory.add_to_tree(&entry, hash, path),
        }?;
        directory.given_up()
    })
}

/// Brings names that are in the inode to a block, so that the inode has room for attributes.
pub(crate) fn move_to_block(t: &mut XfsTransaction<'_>, dir: Ino) -> Result<Vec<DeferredWork>> {
    let mut directory = ChangedDirectory::new(t, dir)?;
    if let DirectoryForm::Short(bytes) = directory.form()? {
        directory.bring_to_block(&bytes)?;
    }
    directory.given_up()
}

/// Removes a name; `ENOENT` when it is not there.
pub(crate) fn remove_name(
    t: &mut XfsTransaction<'_>,
    dir: Ino,
    name: &[u8],
) -> Result<Vec<DeferredWork>> {
    check_name(name)?;
    with(t, dir, |mut directory| {
        match directory.form()? {
            DirectoryForm::Short(bytes) => directory.remove_from_short(&bytes, name),
            DirectoryForm::Block(place) => directory.remove_from_block(place, name),
            DirectoryForm::Tree => directory.remove_from_tree(name),
        }?;
        directory.given_up()
    })
}

/// Lets a name lead to another file; `ENOENT` when it is not there.
pub(crate) fn replace_name(
    t: &mut XfsTransaction<'_>,
    dir: Ino,
    name: &[u8],
    target: XfsEntryTarget,
) -> Result<Vec<DeferredWork>> {
    check_name(name)?;
    with(t, dir, |directory| directory.replace(name, target))
}

/// Sets the directory above one that is moved.
pub(crate) fn set_parent(
    t: &mut XfsTransaction<'_>,
    dir: Ino,
    parent: Ino,
) -> Result<Vec<DeferredWork>> {
    with(t, dir, |directory| directory.replace(b"..", (parent, file_type::DIR)))
}

/// Proves a name other than `.` and `..`.
pub(crate) fn check_name(name: &[u8]) -> Result<()> {
    let errno = match name {
        _ if name.len() > NAME_MAX => Errno::NAMETOOLONG,
        b"." | b".." | b"" => Errno::INVAL,
        _ if name.iter().any(|byte| matches!(byte, 0 | b'/')) => Errno::INVAL,
        _ => return Ok(()),
    };
    Err(Error::posix(errno, name.escape_ascii().to_string()))
}

/// The form of a directory that a transaction changes.
enum DirectoryForm {
    /// In the inode, with these bytes.
    Short(Vec<u8>),
    /// In one block, at this place of the device.
    Block(BasicBlock),
    /// Data blocks with one leaf, or with a tree of leaves.
    Tree,
}

/// A directory that a transaction changes.
struct ChangedDirectory<'t, 'e> {
    blocks: ChangedHashFork<'t, 'e>,
}

impl<'t, 'e> ChangedDirectory<'t, 'e> {
    fn new(t: &'t mut XfsTransaction<'e>, ino: Ino) -> Result<Self> {
        let mut blocks = ChangedHashFork::of_directory(t, ino);
        let inode = blocks.inode()?;
        if inode.core().file_type() != inode_type::DIRECTORY {
            return Err(Error::posix(Errno::NOTDIR, format!("inode {ino}")));
        }
        Ok(Self { blocks })
    }

    fn geometry(&self) -> &'e XfsGeometry {
        self.blocks.geometry()
    }

    fn size(&mut self) -> Result<u64> {
        Ok(self.blocks.inode()?.core().size.get())
    }

    fn set_size(&mut self, size: u64) -> Result<()> {
        if self.size()? != size {
            self.blocks.inode()?.core_mut().size = size.into();
        }
        Ok(())
    }

    fn form(&mut self) -> Result<DirectoryForm> {
        match self.blocks.inode()?.fork(ForkName::Data) {
            Some(ChangedFork::Local(bytes)) => return Ok(DirectoryForm::Short(bytes.clone())),
            Some(ChangedFork::Extents(_) | ChangedFork::Btree(_)) => {}
            _ => return Err(self.blocks.damaged("its fork has another form")),
        }
        let geometry = self.geometry();
        if self.size()? == geometry.dir_block_size() as u64 {
            let place = self.blocks.hold(FileBlock(0))?;
            let block = self.blocks.bytes(place)?;
            if DaKind::of_directory(geometry, block) == Some(DaKind::DirBlock) {
                return Ok(DirectoryForm::Block(place));
            }
        }
        Ok(DirectoryForm::Tree)
    }

    fn replace(mut self, name: &[u8], target: XfsEntryTarget) -> Result<Vec<DeferredWork>> {
        match self.form()? {
            DirectoryForm::Short(bytes) => self.replace_in_short(&bytes, name, target),
            DirectoryForm::Block(place) => self.replace_in_block(place, name, target),
            DirectoryForm::Tree => self.replace_in_tree(name, target),
        }?;
        self.given_up()
    }

    /// What the directory has no longer. The inode is logged with each change: recovery finds by it
    /// which pieces of the device are one directory block.
    fn given_up(mut self) -> Result<Vec<DeferredWork>> {
        self.blocks.inode()?.core_mut();
        let ChangedHashFork { t, ino, step, .. } = self.blocks;
        DeferredWork::unmapped(t, (ino, ForkName::Data), &step)
    }

    #[cold]
    fn exists(&self, name: &[u8]) -> Error {
        self.about(Errno::EXIST, name)
    }

    #[cold]
    fn missing(&self, name: &[u8]) -> Error {
        self.about(Errno::NOENT, name)
    }

    fn about(&self, errno: Errno, name: &[u8]) -> Error {
        let name = name.escape_ascii();
        Error::posix(errno, format!("`{name}` in directory {}", self.blocks.ino))
    }
}
