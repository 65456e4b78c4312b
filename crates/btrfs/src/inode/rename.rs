//! Moving files and directories.

use offshoot_btrfs_format::inode::inode_flags;
use offshoot_vfs::{Errno, Error, FileId, FileType, Place, Result, Timestamp};

use super::changes::{Changes, refuse_flags};
use super::entries::{Target, require_name};
use super::in_use::Locks;
use super::subvolume::writable;
use super::unlink::{Rest, require_stored_here};
use super::write_back::{self, Patience};
use super::{ROOT_DIR, inode_item, lookup, parent, tree_of, type_of};
use crate::space::{Claim, OPERATION_ITEMS};
use crate::volume::Engine;

/// Items that a move changes which takes the place of a file: besides those of any operation the replaced file's index, its
/// reference, its inode, and two leaves of its items or its orphan item.
const REPLACING_ITEMS: u64 = OPERATION_ITEMS + 5;

/// The files that the two names of a move lead to.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Ends {
    moved: FileId,
    replaced: Option<FileId>,
}

impl Ends {
    fn find(volume: &Engine, from: Place<'_>, to: Place<'_>) -> Result<Self> {
        let moved = lookup(volume, from.dir, from.name)?;
        let replaced = match lookup(volume, to.dir, to.name) {
            Ok(file) => Some(file),
            Err(Error::Posix { errno: Errno::NOENT, .. }) => None,
            Err(e) => return Err(e),
        };
        Ok(Self { moved, replaced })
    }
}

/// Moves what stands at `from` to `to`.
pub(crate) fn rename(volume: &Engine, from: Place<'_>, to: Place<'_>, at: Timestamp) -> Result<()> {
    require_name(from.name)?;
    require_name(to.name)?;
    let subvolume = writable(volume, from.dir)?;
    writable(volume, to.dir)?;
    if from.dir.dev != to.dir.dev {
        return Err(Error::posix(Errno::XDEV, format!("{} and {}", from.dir, to.dir)));
    }
    loop {
        let ends = Ends::find(volume, from, to)?;
        require_stored_here(from, ends.moved)?;
        if ends.replaced == Some(ends.moved) {
            return Ok(());
        }
        let _still = if from.dir != to.dir && is_directory(volume, ends.moved)? {
            let still = subvolume.rename.lock();
            require_not_below(volume, to.dir, ends.moved)?;
            Some(still)
        } else {
            None
        };
        let mut files = vec![from.dir, to.dir, ends.moved];
        // What is no inode of this subvolume is refused under the locks; it has none itself.
        files.extend(ends.replaced.filter(|&file| require_stored_here(to, file).is_ok()));
        let locks = volume.inodes.lock(&files);
        if Ends::find(volume, from, to)? == ends {
            return rename_locked(volume, from, to, ends, locks, at);
        }
    }
}

fn is_directory(volume: &Engine, file: FileId) -> Result<bool> {
    let item = inode_item(volume, tree_of(volume, file)?, file)?;
    Ok(type_of(&item)? == FileType::Directory)
}

/// `EINVAL` when `dir` is `moved` or below it.
fn require_not_below(volume: &Engine, dir: FileId, moved: FileId) -> Result<()> {
    /// More than any path that a kernel can make, and a bound for a damaged volume.
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
    Err(Error::corrupt("inode ref", format!("the way up from {dir} does not end")))
}

fn rename_locked(
    volume: &Engine,
    from: Place<'_>,
    to: Place<'_>,
    ends: Ends,
    mut locks: Locks,
    at: Timestamp,
) -> Result<()> {
    if ends.replaced.is_some() {
        // Who replaces a file by another means the data of one of them to be there after a crash.
        write_back::write_back(volume, ends.moved, Patience::Waits)?;
    }
    let items = if ends.replaced.is_some() { REPLACING_ITEMS } else { OPERATION_ITEMS };
    let handle = volume.join_for(items, Claim::Work)?;
    let mut changes = Changes::new(&handle, from.dir)?;
    let Ends { moved, replaced } = ends;
    let source = changes.directory(from.dir)?;
    refuse_flags(&source, inode_flags::APPEND, from.dir)?;
    changes.directory(to.dir)?;
    let item = changes.inode(moved)?;
    refuse_flags(&item, inode_flags::IMMUTABLE | inode_flags::APPEND, moved)?;
    let file_type = type_of(&item)?;
    let mut rest = Rest::Nothing;
    if let Some(replaced) = replaced {
        require_stored_here(to, replaced)?;
        let opens = *locks.opens(replaced);
        let directory = file_type == FileType::Directory;
        rest = changes.take_away(to, replaced, directory, opens, at)?;
    }
    let old_index = changes.remove_name(moved.ino, from)?;
    changes.remove_entry(from, old_index, at)?;
    let index = changes.next_index(to.dir)?;
    changes.add_entry(to, Target { ino: moved.ino, file_type }, index, at)?;
    changes.add_name(moved.ino, to, index)?;
    changes.change_inode(moved, at, |_| {})?;
    changes.apply()?;
    drop(handle);
    rest.finish(volume, locks)
}
