//! Moving files, directories and subvolumes. A subvolume may move into another one, because nothing
//! in it stores where it is attached.
//!
//! This module looks up and checks both names, under the locks of inodes. If one of the moved files
//! is a subvolume, it does the move while no other thread has a handle. All other moves are done by
//! `inode::rename`.

use offshoot_btrfs_format::TreeId;
use offshoot_btrfs_format::inode::inode_flags;
use offshoot_btrfs_format::root::RootRef;
use offshoot_vfs::{EntryPlace, Errno, Error, FileId, Rename, Result, Structure, Timestamp};

use super::delete::{index_at, refuse_root_flags};
use super::items::{add_place, remove_place};
use super::parent_of;
use crate::inode::changes::{Changes, refuse_flags};
use crate::inode::create::Whiteout;
use crate::inode::entries::{EntryTarget, require_name};
use crate::inode::rename::{self, RenameEnds, still};
use crate::inode::subvolume::{Subvolume, writable};
use crate::inode::unlink::{UnlinkRest, is_stored_here, require_stored_here};
use crate::inode::{Locks, ROOT_DIR, placeholder_in, type_of};
use crate::inode::{Rooms, RoomsHandle};
use crate::space::Claim;

/// The items that a move of a subvolume changes: two directory items, two indexes, two directories,
/// and three of the root tree. If it replaces a directory, also that one's index, reference, inode,
/// and two leaves of its items or its orphan item.
const RENAME_ITEMS: u64 = 9 + 5;

/// The items that an exchange changes: two directory items, four indexes, two directories, and four
/// of the root tree for each of two subvolumes. A file instead of one subvolume has fewer: two
/// references and its inode.
const EXCHANGE_ITEMS: u64 = 16;

/// Moves the file, directory or subvolume at `from` to `to`.
pub(crate) fn rename(
    volume: &Rooms,
    from: EntryPlace<'_>,
    to: EntryPlace<'_>,
    how: Rename,
    at: Timestamp,
) -> Result<()> {
    require_name(from.name)?;
    require_name(to.name)?;
    let of_both = writable(volume, from.dir)?;
    writable(volume, to.dir)?;
    loop {
        let ends = RenameEnds::find(volume, from, to)?;
        ends.require(how, to)?;
        let RenameEnds { moved, replaced } = ends;
        let other = replaced.filter(|_| how == Rename::Exchange);
        // The moved file, its place, and the directory into which it moves.
        let moves = [(moved, from, to.dir)].into_iter();
        let moves = moves.chain(other.map(|other| (other, to, from.dir)));
        let inodes = moves.clone().filter(|(file, ..)| file.ino != ROOT_DIR);
        let has_inodes = inodes.clone().next().is_some();
        let has_subvolumes = moves.clone().any(|(file, ..)| file.ino == ROOT_DIR);
        if has_inodes && from.dir.dev != to.dir.dev {
            return Err(Error::posix(Errno::XDEV, format!("{} and {}", from.dir, to.dir)));
        }
        if placeholder_in(moved).is_some() && how != Rename::Exchange {
            let name = from.name.escape_ascii();
            let what = format!("`{name}`, the place of a subvolume that is elsewhere");
            return Err(Error::posix(Errno::NOTEMPTY, what));
        }
        inodes.clone().try_for_each(|(file, place, _)| require_stored_here(place, file))?;
        if replaced == Some(moved) {
            return Ok(());
        }
        let _still = if from.dir == to.dir { None } else { still(volume, &of_both, inodes)? };
        let mut files = vec![from.dir, to.dir];
        // A subvolume or a placeholder has no lock of its own. The locks of both directories cover
        // it.
        let both = [(from, Some(moved)), (to, replaced)].into_iter();
        let both = both.filter_map(|(place, file)| Some((place, file?)));
        files.extend(
            both.filter(|&(place, file)| is_stored_here(place, file)).map(|(_, file)| file),
        );
        let locks = volume.inodes.lock(&files);
        if RenameEnds::find(volume, from, to)? != ends {
            continue;
        }
        let whiteout =
            how.whiteout().map(|new| Whiteout::new(volume, from.dir, new)).transpose()?;
        let whiteout = whiteout.map(|whiteout| (whiteout, &*of_both));
        return match other.map(|other| [(from, moved), (to, other)]) {
            Some(ends) if has_subvolumes => exchange(volume, ends, at),
            Some(ends) => rename::exchange(volume, ends, at),
            None if has_subvolumes => move_subvolume(volume, [from, to], ends, whiteout, locks, at),
            None => rename::rename(volume, from, to, ends, whiteout, locks, at),
        };
    }
}

/// Moves the subvolume at the first place to the second one, replaces an empty directory there, and
/// leaves a whiteout if it gets one. The directories and the replaced one are locked, and both
/// names were looked up under these locks.
fn move_subvolume(
    volume: &Rooms,
    [from, to]: [EntryPlace<'_>; 2],
    ends: RenameEnds,
    whiteout: Option<(Whiteout, &Subvolume)>,
    mut locks: Locks,
    at: Timestamp,
) -> Result<()> {
    let items = RENAME_ITEMS + whiteout.as_ref().map_or(0, |(whiteout, _)| whiteout.items());
    let reserved = volume.reserve_for(items, Claim::Work)?;
    let (rest, is_durable) = volume.alone(reserved, |handle| {
        require_movable(handle, ends.moved, from.dir, to.dir)?;
        let mut moving = MoveChanges::new(handle, from.dir, to.dir)?;
        moving.take(from, ends.moved, at)?;
        let changes = moving.changes(to.dir);
        changes.directory(to.dir)?;
        let rest = match ends.replaced {
            Some(other) if is_stored_here(to, other) => {
                changes.take_away(to, other, true, *locks.opens(other), at)?
            }
            Some(other) => {
                changes.take_place_away(to, other, true, at)?;
                UnlinkRest::Nothing
            }
            None => UnlinkRest::Nothing,
        };
        moving.put(ends.moved, from.dir, to, at)?;
        if let Some((whiteout, subvolume)) = whiteout {
            whiteout.put(moving.changes(from.dir), subvolume, from)?;
        }
        Ok((rest, moving.apply(handle)?))
    })?;
    rest.finish(volume, locks)?;
    volume.commit_if(is_durable)
}

/// Exchanges the places of two files, at least one of which is the root of a subvolume. The
/// directories, and a file that is an inode, are locked.
pub(crate) fn exchange(
    volume: &Rooms,
    ends: [(EntryPlace<'_>, FileId); 2],
    at: Timestamp,
) -> Result<()> {
    let [(one, file), (place, other)] = ends;
    let reserved = volume.reserve_for(EXCHANGE_ITEMS, Claim::Work)?;
    let is_durable = volume.alone(reserved, |handle| {
        let moves = [(file, one, place), (other, place, one)];
        for (file, from, to) in moves.into_iter().filter(|(file, ..)| file.ino == ROOT_DIR) {
            require_movable(handle, file, from.dir, to.dir)?;
        }
        let mut moving = MoveChanges::new(handle, one.dir, place.dir)?;
        for (file, from, _) in moves {
            moving.take(from, file, at)?;
        }
        for (file, from, to) in moves {
            moving.put(file, from.dir, to, at)?;
        }
        moving.apply(handle)
    })?;
    volume.commit_if(is_durable)
}

/// A subvolume that moves.
struct MovedSubvolume<'p> {
    id: TreeId,
    from: FileId,
    to: EntryPlace<'p>,
    /// The index of its new entry.
    index: u64,
}

/// A move between two directories: its changes in the subvolumes of both, which may be the same,
/// and in the root tree.
struct MoveChanges<'h, 'v, 'p> {
    first: Changes<'h, 'v>,
    /// The changes in the second subvolume, with its id, if there are two.
    second: Option<(u64, Changes<'h, 'v>)>,
    moves: Vec<MovedSubvolume<'p>>,
}

impl<'h, 'v, 'p> MoveChanges<'h, 'v, 'p> {
    fn new(handle: &'h RoomsHandle<'v>, from: FileId, to: FileId) -> Result<Self> {
        let first = Changes::new(handle, from)?;
        let is_one = from.dev == to.dev;
        let second = if is_one { None } else { Some((to.dev, Changes::new(handle, to)?)) };
        Ok(Self { first, second, moves: Vec::new() })
    }

    /// The changes in the subvolume of `dir`.
    fn changes(&mut self, dir: FileId) -> &mut Changes<'h, 'v> {
        match &mut self.second {
            Some((id, second)) if *id == dir.dev => second,
            _ => &mut self.first,
        }
    }

    /// Takes `file` from its place.
    fn take(&mut self, place: EntryPlace<'_>, file: FileId, at: Timestamp) -> Result<()> {
        let changes = self.changes(place.dir);
        let dir = changes.directory(place.dir)?;
        refuse_flags(&dir, inode_flags::APPEND, place.dir)?;
        if file.ino == ROOT_DIR {
            let id = TreeId(file.dev);
            let index = index_at(changes.volume(), place, id)?;
            return changes.remove_entry(place, EntryTarget::subvolume(id), index, at);
        }
        let item = changes.inode(file)?;
        refuse_flags(&item, inode_flags::IMMUTABLE | inode_flags::APPEND, file)?;
        let target = EntryTarget::inode(file.ino, type_of(&item)?);
        let index = changes.remove_name(file.ino, target, place)?;
        changes.remove_entry(place, target, index, at)
    }

    /// Gives `file`, which was in the directory `from`, the place `to`.
    fn put(&mut self, file: FileId, from: FileId, to: EntryPlace<'p>, at: Timestamp) -> Result<()> {
        let changes = self.changes(to.dir);
        let index = changes.next_index(to.dir)?;
        if file.ino == ROOT_DIR {
            let id = TreeId(file.dev);
            changes.add_entry(to, EntryTarget::subvolume(id), index, at)?;
            self.moves.push(MovedSubvolume { id, from, to, index });
            return Ok(());
        }
        let file_type = type_of(&changes.inode(file)?)?;
        changes.add_entry(to, EntryTarget::inode(file.ino, file_type), index, at)?;
        changes.add_name(file.ino, to, index)?;
        changes.change_inode(file, at, |_| {})
    }

    /// Applies all changes, and returns whether they must be durable at once.
    fn apply(self, handle: &RoomsHandle<'_>) -> Result<bool> {
        let Self { first, second, moves } = self;
        let second = second.map(|(_, changes)| changes);
        let is_durable =
            first.is_synchronous() || second.as_ref().is_some_and(Changes::is_synchronous);
        let _moving = handle.volume().moves.moving();
        handle.all_or_stop(|| {
            moves.iter().try_for_each(|one| remove_place(handle, one.id, one.from))?;
            for MovedSubvolume { id, to: EntryPlace { dir, name }, index, .. } in moves {
                let place = RootRef { dirid: dir.ino, sequence: index, name };
                add_place(handle, id, dir, &place)?;
            }
            second.map_or(Ok(()), Changes::apply)?;
            first.apply()
        })?;
        Ok(is_durable)
    }
}

/// Whether the subvolume with this root may move from the directory `from` into the directory `to`.
fn require_movable(handle: &RoomsHandle<'_>, root: FileId, from: FileId, to: FileId) -> Result<()> {
    let (volume, id) = (handle.volume(), TreeId(root.dev));
    require_outside(volume, to, id)?;
    refuse_root_flags(volume, id)?;
    if from != to {
        // The kernel treats this as a change of `..` in the moved directory, though that of a
        // subvolume is not stored.
        handle.tree(id)?.require_writable()?;
    }
    Ok(())
}

/// `EINVAL` when `dir` is in the subvolume `id` or in one below it.
fn require_outside(volume: &Rooms, dir: FileId, id: TreeId) -> Result<()> {
    /// More than any path has. It bounds the loop in a damaged volume.
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
    Err(Error::corrupt(Structure::RootBackref, format!("the way up from {dir} does not end")))
}
