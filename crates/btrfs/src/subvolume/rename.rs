//! Moving subvolumes. One may go into another subvolume: nothing in it says where it stands.

use offshoot_btrfs_format::TreeId;
use offshoot_btrfs_format::inode::inode_flags;
use offshoot_btrfs_format::root::RootRef;
use offshoot_vfs::{Errno, Error, FileId, FileType, Place, Rename, Result, Timestamp};

use super::delete::{index_at, refuse_root_flags};
use super::parent_of;
use crate::inode::changes::{Changes, refuse_flags};
use crate::inode::entries::{Target, has_entries};
use crate::inode::{ROOT_DIR, inode_item, lookup, placeholder_in, tree_of, type_of};
use crate::space::Claim;
use crate::transaction::Handle;
use crate::volume::Engine;

/// Items that a move changes: two directory items, two indexes, two directories, and three of the root tree.
const RENAME_ITEMS: u64 = 9;

/// Moves the subvolume with the root `moved` from `from` to `to`, where nothing else may be. `how` is no exchange.
pub(crate) fn rename(
    volume: &Engine,
    from: Place<'_>,
    to: Place<'_>,
    moved: FileId,
    how: Rename,
    at: Timestamp,
) -> Result<()> {
    let _locks = volume.inodes.lock(&[from.dir, to.dir]);
    let reserved = volume.reserve_for(RENAME_ITEMS, Claim::Work)?;
    let is_durable = volume.alone(reserved, |handle| {
        if lookup(volume, from.dir, from.name)? != moved {
            return Err(Error::posix(Errno::NOENT, "the subvolume, which just moved"));
        }
        match lookup(volume, to.dir, to.name) {
            Ok(_) if how == Rename::NoReplace => {
                let what = format!("`{}` in {}", to.name.escape_ascii(), to.dir);
                Err(Error::posix(Errno::EXIST, what))
            }
            Ok(same) if same == moved => Ok(false),
            Ok(other) => refuse_to_replace(volume, to, other),
            Err(Error::Posix { errno: Errno::NOENT, .. }) => {
                rename_alone(handle, from, to, TreeId(moved.dev), at)
            }
            Err(e) => Err(e),
        }
    })?;
    volume.commit_if(is_durable)
}

/// Only an empty directory could be replaced by a subvolume.
fn refuse_to_replace(volume: &Engine, to: Place<'_>, other: FileId) -> Result<bool> {
    let name = to.name.escape_ascii();
    let refuse = |errno| Err(Error::posix(errno, format!("replacing `{name}` by a subvolume")));
    if placeholder_in(other).is_none() {
        if other.ino == ROOT_DIR {
            return refuse(Errno::NOTEMPTY);
        }
        if type_of(&inode_item(volume, tree_of(volume, other)?, other)?)? != FileType::Directory {
            return refuse(Errno::NOTDIR);
        }
        if has_entries(volume, other)? {
            return refuse(Errno::NOTEMPTY);
        }
    }
    Err(Error::Unsupported(format!("replacing the empty directory `{name}` by a subvolume")))
}

/// Moves it, and says whether that is to be durable at once.
fn rename_alone(
    handle: &Handle<'_>,
    from: Place<'_>,
    to: Place<'_>,
    id: TreeId,
    at: Timestamp,
) -> Result<bool> {
    let volume = handle.volume();
    require_outside(volume, to.dir, id)?;
    refuse_root_flags(volume, id)?;
    if from.dir != to.dir {
        // The kernel changes `..` of a directory that moves, though that of a subvolume is stored nowhere.
        handle.tree(id)?.require_writable()?;
    }
    let mut source = Changes::new(handle, from.dir)?;
    let dir = source.directory(from.dir)?;
    refuse_flags(&dir, inode_flags::APPEND, from.dir)?;
    source.remove_entry(from, index_at(volume, from.dir, id)?, at)?;
    let mut other =
        (from.dir.dev != to.dir.dev).then(|| Changes::new(handle, to.dir)).transpose()?;
    let target = other.as_mut().unwrap_or(&mut source);
    target.directory(to.dir)?;
    let index = target.next_index(to.dir)?;
    target.add_entry(to, Target::subvolume(id), index, at)?;
    let is_durable = source.is_synchronous() || other.as_ref().is_some_and(Changes::is_synchronous);
    let place = RootRef { dirid: to.dir.ino, sequence: index, name: to.name };
    let _moving = volume.live()?.subvolumes.moving();
    handle.whole(|| {
        handle.remove_place(id, from.dir)?;
        handle.add_place(id, to.dir, &place)?;
        other.map_or(Ok(()), Changes::apply)?;
        source.apply()
    })?;
    Ok(is_durable)
}

/// `EINVAL` when `dir` is in the subvolume `id` or in one below it.
fn require_outside(volume: &Engine, dir: FileId, id: TreeId) -> Result<()> {
    /// More than any path has, and a bound for a damaged volume.
    const MAX_STEPS: usize = 1 << 16;
    let mut at = TreeId(dir.dev);
    for _ in 0..MAX_STEPS {
        if at == id {
            return Err(Error::posix(Errno::INVAL, format!("subvolume {id} below itself")));
        }
        match parent_of(volume, at)? {
            Some(parent) => at = TreeId(parent.dir.dev),
            None => return Ok(()),
        }
    }
    Err(Error::corrupt("root backref", format!("the way up from {dir} does not end")))
}
