//! Moving files and directories. `subvolume/rename` has looked up and locked their names before.
//!
//! An exchange removes the names of both files, and then gives each the name of the other, in one
//! operation.

use offshoot_btrfs_format::inode::inode_flags;
use offshoot_vfs::{
    EntryPlace, Errno, Error, FileId, FileType, Rename, Result, Structure, Timestamp,
};

use super::changes::{Changes, refuse_flags};
use super::create::Whiteout;
use super::entries::EntryTarget;
use super::in_use::Locks;
use super::subvolume::Subvolume;
use super::unlink::{UnlinkRest, is_stored_here};
use super::write_back::{self, Patience};
use super::{ROOT_DIR, inode_item, lookup, parent, tree_of, type_of};
use parking_lot::MutexGuard;

use crate::inode::Rooms;
use crate::space::{Claim, OPERATION_ITEMS};
use crate::transaction::Obstacle;

/// The items that a move changes if it replaces a file: those of any operation, and of the replaced
/// file its index, its reference, its inode, and two leaves of its items or its orphan item. An
/// exchange changes as many: two entries, four indexes, four references and four inodes.
const REPLACING_ITEMS: u64 = OPERATION_ITEMS + 5;

/// The files that the two names of a move lead to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct RenameEnds {
    pub(crate) moved: FileId,
    pub(crate) replaced: Option<FileId>,
}

impl RenameEnds {
    pub(crate) fn find(volume: &Rooms, from: EntryPlace<'_>, to: EntryPlace<'_>) -> Result<Self> {
        let moved = lookup(volume, from.dir, from.name)?;
        let replaced = match lookup(volume, to.dir, to.name) {
            Ok(file) => Some(file),
            Err(Error::Posix { errno: Errno::NOENT, .. }) => None,
            Err(e) => return Err(e),
        };
        Ok(Self { moved, replaced })
    }

    /// `EEXIST` if there is a file at `to` that must not be there, `ENOENT` if one is missing.
    pub(crate) fn require(self, how: Rename, to: EntryPlace<'_>) -> Result<()> {
        let errno = match (how, self.replaced) {
            (Rename::NoReplace | Rename::Whiteout { replaces: false, .. }, Some(_)) => Errno::EXIST,
            (Rename::Exchange, None) => Errno::NOENT,
            _ => return Ok(()),
        };
        Err(Error::posix(errno, format!("`{}` in {}", to.name.escape_ascii(), to.dir)))
    }
}

/// Takes the rename lock if one of the moved files is a directory. Each item of `moves` is a moved
/// file, its place, and the directory into which it moves.
///
/// # Errors
/// `EINVAL` when a directory moves below itself.
pub(crate) fn still<'s>(
    volume: &Rooms,
    subvolume: &'s Subvolume,
    moves: impl Iterator<Item = (FileId, EntryPlace<'s>, FileId)>,
) -> Result<Option<MutexGuard<'s, ()>>> {
    let mut still = None;
    for (moved, _, dir) in moves {
        if is_directory(volume, moved)? {
            still.get_or_insert_with(|| subvolume.rename.lock());
            require_not_below(volume, dir, moved)?;
        }
    }
    Ok(still)
}

fn is_directory(volume: &Rooms, file: FileId) -> Result<bool> {
    let item = inode_item(volume, tree_of(volume, file)?, file)?;
    Ok(type_of(&item)? == FileType::Directory)
}

/// `EINVAL` when `dir` is `moved` or below it.
fn require_not_below(volume: &Rooms, dir: FileId, moved: FileId) -> Result<()> {
    /// More than any path that a kernel can make. It bounds the loop in a damaged volume.
    const MAX_STEPS: usize = 1 << 16;
    let mut at = dir;
    for _ in 0..MAX_STEPS {
        if at == moved {
            return Err(Error::posix(Errno::INVAL, format!("{moved} below itself")));
        }
        if at.ino == ROOT_DIR {
            return Ok(());
        }
        at = parent(volume, at)?.dir;
    }
    Err(Error::corrupt(Structure::InodeRef, format!("the way up from {dir} does not end")))
}

/// Makes fsync commit if a directory moves, because a log does not record the directories above a
/// file.
fn note_directory(changes: &Changes<'_, '_>, moved: FileType) {
    if moved == FileType::Directory {
        changes.handle().obstruct(Obstacle::DirectoryMoved);
    }
}

/// Exchanges the places of two files.
pub(crate) fn exchange(
    volume: &Rooms,
    ends: [(EntryPlace<'_>, FileId); 2],
    at: Timestamp,
) -> Result<()> {
    let handle = volume.join_for(REPLACING_ITEMS, Claim::Work)?;
    let [(from, moved), (to, other)] = ends;
    let mut changes = Changes::new(&handle, from.dir)?;
    for (place, file) in ends {
        let dir = changes.directory(place.dir)?;
        refuse_flags(&dir, inode_flags::APPEND, place.dir)?;
        let item = changes.inode(file)?;
        refuse_flags(&item, inode_flags::IMMUTABLE | inode_flags::APPEND, file)?;
        let target = EntryTarget::inode(file.ino, type_of(&item)?);
        let index = changes.remove_name(file.ino, target, place)?;
        changes.remove_entry(place, target, index, at)?;
    }
    // A log of only one of them would leave the other without a name.
    changes.handle().obstruct(Obstacle::Exchanged);
    for (place, file) in [(to, moved), (from, other)] {
        let file_type = type_of(&changes.inode(file)?)?;
        let index = changes.next_index(place.dir)?;
        changes.add_entry(place, EntryTarget::inode(file.ino, file_type), index, at)?;
        changes.add_name(file.ino, place, index)?;
        changes.change_inode(file, at, |_| {})?;
    }
    let is_durable = changes.is_synchronous();
    changes.apply()?;
    drop(handle);
    volume.commit_if(is_durable)
}

/// Moves the inode at `from`, which is in this subvolume, to `to`, and leaves a whiteout if it gets
/// one.
pub(crate) fn rename(
    volume: &Rooms,
    from: EntryPlace<'_>,
    to: EntryPlace<'_>,
    ends: RenameEnds,
    whiteout: Option<(Whiteout, &Subvolume)>,
    mut locks: Locks,
    at: Timestamp,
) -> Result<()> {
    if ends.replaced.is_some() {
        // A program that replaces a file expects the data of the old or of the new file after a
        // crash.
        write_back::write_back(volume, ends.moved, Patience::Waits)?;
    }
    let items = if ends.replaced.is_some() { REPLACING_ITEMS } else { OPERATION_ITEMS };
    let items = items + whiteout.as_ref().map_or(0, |(whiteout, _)| whiteout.items());
    let handle = volume.join_for(items, Claim::Work)?;
    let mut changes = Changes::new(&handle, from.dir)?;
    let RenameEnds { moved, replaced } = ends;
    let source = changes.directory(from.dir)?;
    refuse_flags(&source, inode_flags::APPEND, from.dir)?;
    changes.directory(to.dir)?;
    let item = changes.inode(moved)?;
    refuse_flags(&item, inode_flags::IMMUTABLE | inode_flags::APPEND, moved)?;
    let file_type = type_of(&item)?;
    note_directory(&changes, file_type);
    let mut rest = UnlinkRest::Nothing;
    if let Some(replaced) = replaced {
        let directory = file_type == FileType::Directory;
        if is_stored_here(to, replaced) {
            let opens = *locks.opens(replaced);
            rest = changes.take_away(to, replaced, directory, opens, at)?;
        } else {
            changes.take_place_away(to, replaced, directory, at)?;
        }
    }
    let target = EntryTarget::inode(moved.ino, file_type);
    let old_index = changes.remove_name(moved.ino, target, from)?;
    changes.remove_entry(from, target, old_index, at)?;
    let index = changes.next_index(to.dir)?;
    changes.add_entry(to, target, index, at)?;
    changes.add_name(moved.ino, to, index)?;
    changes.change_inode(moved, at, |_| {})?;
    if let Some((whiteout, subvolume)) = whiteout {
        whiteout.put(&mut changes, subvolume, from)?;
    }
    let is_durable = changes.is_synchronous();
    changes.apply()?;
    drop(handle);
    rest.finish(volume, locks)?;
    volume.commit_if(is_durable)
}
