//! Adding names to files, and removing names.

use offshoot_btrfs_format::inode::inode_flags;
use offshoot_vfs::{Code, EntryPlace, Errno, Error, FileId, FileType, Result, Timestamp};

use super::changes::{Changes, refuse_flags};
use super::entries::{EntryTarget, has_entries, require_name};
use super::evict::{self, orphan_key};
use super::in_use::Locks;
use super::names::LINK_MAX;
use super::subvolume::writable;
use super::{lookup, lookup_once, placeholder_in, type_of};
use crate::inode::Rooms;
use crate::report::VolumeReport;
use crate::transaction::Obstacle;

/// The work that remains after a name was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnlinkRest {
    Nothing,
    /// Remove this inode, which has many items and is not open.
    Evict(FileId),
}

impl UnlinkRest {
    /// Does the work. The caller must have dropped its handle. The name is gone, and an orphan item
    /// records what remains, so a failure is only reported. It is an error only if all writing has
    /// ended, because then the name stays.
    pub(crate) fn finish(self, volume: &Rooms, mut locks: Locks) -> Result<()> {
        let Self::Evict(file) = self else { return Ok(()) };
        locks.keep_only(file);
        if let Err(error) = evict::evict(volume, file) {
            if volume.live()?.require_writing().is_err() {
                return Err(error);
            }
            volume.report(&VolumeReport::LeftBehind { file, problem: error.to_string() });
        }
        Ok(())
    }
}

/// Finds the file at `place`, and locks it and its directory. It takes no lock if the file is in
/// another subvolume.
fn lock_place(volume: &Rooms, place: EntryPlace<'_>) -> Result<(FileId, Option<Locks>)> {
    {
        // Most files were made after their directory, and so have the higher id.
        let mut locks = volume.inodes.lock(&[place.dir]);
        let file = lookup_once(volume, place.dir, place.name)?;
        if is_stored_here(place, file) && volume.inodes.lock_behind(&mut locks, file) {
            return Ok((file, Some(locks)));
        }
    }
    loop {
        let file = lookup(volume, place.dir, place.name)?;
        if !is_stored_here(place, file) {
            return Ok((file, None));
        }
        let locks = volume.inodes.lock(&[place.dir, file]);
        if lookup(volume, place.dir, place.name)? == file {
            return Ok((file, Some(locks)));
        }
    }
}

/// Whether `file`, which is at `place`, is an inode of the same subvolume.
pub(crate) fn is_stored_here(place: EntryPlace<'_>, file: FileId) -> bool {
    file.dev == place.dir.dev && placeholder_in(file).is_none()
}

/// Refuses entries that lead to other subvolumes.
pub(crate) fn require_stored_here(place: EntryPlace<'_>, file: FileId) -> Result<()> {
    if is_stored_here(place, file) {
        return Ok(());
    }
    let name = place.name.escape_ascii();
    Err(Error::unsupported(
        Code::SubvolumePlace,
        format!("moving or replacing `{name}`, the place of a subvolume"),
    ))
}

/// Gives `file` one more name.
pub(crate) fn link(
    volume: &Rooms,
    file: FileId,
    place: EntryPlace<'_>,
    at: Timestamp,
) -> Result<()> {
    require_name(place.name)?;
    writable(volume, place.dir)?;
    if placeholder_in(file).is_some() {
        return Err(Error::posix(Errno::PERM, "one more name for a directory"));
    }
    if file.dev != place.dir.dev {
        return Err(Error::posix(Errno::XDEV, format!("{file} in {}", place.dir)));
    }
    let mut locks = volume.inodes.lock(&[file, place.dir]);
    let handle = volume.join()?;
    let mut changes = Changes::new(&handle, place.dir)?;
    let item = changes.inode(file)?;
    changes.directory(place.dir)?;
    let file_type = type_of(&item)?;
    let index = changes.next_index(place.dir)?;
    changes.add_entry(place, EntryTarget::inode(file.ino, file_type), index, at)?;
    let refuse = |errno| Err(Error::posix(errno, format!("one more name for {file}")));
    match item.nlink.get() {
        _ if file_type == FileType::Directory => return refuse(Errno::PERM),
        0 if *locks.is_linkable(file) => {
            changes.remove(orphan_key(file.ino))?;
        }
        // The file is open, has lost its last name, and gets no new one.
        0 => return refuse(Errno::NOENT),
        LINK_MAX.. => return refuse(Errno::MLINK),
        _ => {}
    }
    refuse_flags(&item, inode_flags::IMMUTABLE | inode_flags::APPEND, file)?;
    changes.add_name(file.ino, place, index)?;
    changes.change_inode(file, at, |item| item.nlink += 1)?;
    let is_durable = changes.is_synchronous();
    changes.apply()?;
    *locks.is_linkable(file) = false;
    drop(handle);
    volume.commit_if(is_durable)
}

/// Removes a name of a file, which must be no directory.
pub(crate) fn unlink(volume: &Rooms, place: EntryPlace<'_>, at: Timestamp) -> Result<()> {
    match remove(volume, place, at, false)? {
        None => Ok(()),
        Some(file) => Err(Error::posix(Errno::ISDIR, file.to_string())),
    }
}

/// Removes an empty directory. Returns `false` if it is a subvolume, which this leaves alone.
pub(crate) fn rmdir(volume: &Rooms, place: EntryPlace<'_>, at: Timestamp) -> Result<bool> {
    remove(volume, place, at, true).map(|left| left.is_none())
}

/// Removes the name at `place`. If the file is in another subvolume, returns it and removes
/// nothing.
fn remove(
    volume: &Rooms,
    place: EntryPlace<'_>,
    at: Timestamp,
    is_directory: bool,
) -> Result<Option<FileId>> {
    require_name(place.name)?;
    writable(volume, place.dir)?;
    let (file, locks) = lock_place(volume, place)?;
    let Some(mut locks) = locks else { return Ok(Some(file)) };
    let handle = volume.join_to_remove()?;
    let mut changes = Changes::new(&handle, place.dir)?;
    let opens = *locks.opens(file);
    let rest = changes.take_away(place, file, is_directory, opens, at)?;
    let is_durable = changes.is_synchronous();
    changes.apply()?;
    drop(handle);
    rest.finish(volume, locks)?;
    volume.commit_if(is_durable).map(|()| None)
}

impl Changes<'_, '_> {
    /// Takes the name at `place` from `file`. `wants_directory` says whether the file must be a
    /// directory or must not be one. The file is removed with its last name.
    pub(crate) fn take_away(
        &mut self,
        place: EntryPlace<'_>,
        file: FileId,
        wants_directory: bool,
        opens: u64,
        at: Timestamp,
    ) -> Result<UnlinkRest> {
        let dir = self.directory(place.dir)?;
        refuse_flags(&dir, inode_flags::APPEND, place.dir)?;
        let item = self.inode(file)?;
        refuse_flags(&item, inode_flags::IMMUTABLE | inode_flags::APPEND, file)?;
        let is_directory = type_of(&item)? == FileType::Directory;
        let refuse = |errno| Err(Error::posix(errno, file.to_string()));
        match (wants_directory, is_directory) {
            (true, false) => return refuse(Errno::NOTDIR),
            (false, true) => return refuse(Errno::ISDIR),
            (true, true) if has_entries(self.volume(), file)? => return refuse(Errno::NOTEMPTY),
            _ => {}
        }
        if is_directory
            && (item.generation.get() < self.generation().0 || self.handle().log().is_used())
        {
            // Replaying a log would find files in this directory that were moved elsewhere.
            self.handle().obstruct(Obstacle::DirectoryRemoved);
        }
        let target = EntryTarget::inode(file.ino, type_of(&item)?);
        let index = self.remove_name(file.ino, target, place)?;
        self.remove_entry(place, target, index, at)?;
        let left = item.nlink.get().saturating_sub(1);
        if left > 0 {
            self.change_inode(file, at, |item| item.nlink = left.into())?;
            return Ok(UnlinkRest::Nothing);
        }
        self.volume().inodes.forget_directory(file);
        if opens == 0 {
            let all = evict::EvictBatch::read(self.volume(), file)?;
            if self.remove_inode(all) {
                return Ok(UnlinkRest::Nothing);
            }
        }
        self.change_inode(file, at, |item| item.nlink = 0.into())?;
        self.put_new(orphan_key(file.ino), Vec::new());
        Ok(if opens == 0 { UnlinkRest::Evict(file) } else { UnlinkRest::Nothing })
    }

    /// Removes the name at `place` of a placeholder, which stands for a subvolume attached
    /// elsewhere; the caller must mean a directory (`is_directory`). A subvolume that is attached
    /// here keeps its name.
    pub(crate) fn take_place_away(
        &mut self,
        place: EntryPlace<'_>,
        file: FileId,
        is_directory: bool,
        at: Timestamp,
    ) -> Result<()> {
        let refuse = |errno| Err(Error::posix(errno, place.name.escape_ascii().to_string()));
        if !is_directory {
            return refuse(Errno::ISDIR);
        }
        if placeholder_in(file).is_none() {
            return refuse(Errno::NOTEMPTY);
        }
        let dir = self.directory(place.dir)?;
        refuse_flags(&dir, inode_flags::APPEND, place.dir)?;
        self.remove_placeholder(place, at)
    }
}
