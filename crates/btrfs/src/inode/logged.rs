//! Names from a tree log. These functions change no times, because the log has the times of inodes.

use crate::inode::RoomsHandle;
use offshoot_btrfs_format::inode::InodeItem;
use offshoot_vfs::{EntryPlace, FileId, FileType, Result, Timestamp};

use super::changes::Changes;
use super::entries::EntryTarget;
use super::type_of;

/// A placeholder where a call needs a time. The old times are restored afterwards.
const NEVER: Timestamp = Timestamp { secs: 0, nanos: 0 };

/// Gives `file` the name at `place` with this index; both are free. The link count does not change.
pub(crate) fn add_name(
    handle: &RoomsHandle<'_>,
    place: EntryPlace<'_>,
    file: FileId,
    index: u64,
) -> Result<()> {
    let mut changes = Changes::accepted(handle, place.dir)?;
    let before = changes.inode(place.dir)?;
    let file_type = type_of(&changes.inode(file)?)?;
    changes.add_entry(place, EntryTarget::inode(file.ino, file_type), index, NEVER)?;
    changes.add_name(file.ino, place, index)?;
    changes.keep_times(place.dir, &before)?;
    changes.apply()
}

/// Takes the name at `place` from `file`. The link count does not change.
pub(crate) fn remove_name(
    handle: &RoomsHandle<'_>,
    place: EntryPlace<'_>,
    file: FileId,
) -> Result<()> {
    let mut changes = Changes::accepted(handle, place.dir)?;
    let before = changes.inode(place.dir)?;
    let target = EntryTarget::inode(file.ino, FileType::Regular);
    let index = changes.remove_name(file.ino, target, place)?;
    changes.remove_entry(place, target, index, NEVER)?;
    changes.keep_times(place.dir, &before)?;
    changes.apply()
}

impl Changes<'_, '_> {
    /// Gives the inode of `file` the times that it had before.
    fn keep_times(&mut self, file: FileId, before: &InodeItem) -> Result<()> {
        self.adjust_inode(file, |item| {
            (item.mtime, item.ctime, item.sequence) = (before.mtime, before.ctime, before.sequence);
        })
    }
}
