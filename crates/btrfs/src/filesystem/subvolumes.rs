//! Making and deleting subvolumes, which the `vfs` traits do not have.

use offshoot_vfs::{EntryPlace, NewFile, Result, Timestamp};

use super::{Filesystem, of};
use crate::SubvolumeId;
use crate::subvolume::create::create;
use crate::subvolume::delete::{DeleteMode, delete};
use crate::subvolume::snapshot::Snapshot;

impl Filesystem {
    /// Makes an empty subvolume at `place`. Its root directory gets owner, permissions and times
    /// from `new`.
    ///
    /// # Errors
    /// As for a new directory.
    pub fn create_subvolume(&self, place: EntryPlace<'_>, new: &NewFile) -> Result<SubvolumeId> {
        create(&self.volume, &self.volume.subvolumes, place, new).map_err(of(place.dir))
    }

    /// Makes a snapshot of the subvolume `source` at `place`, which may be in any subvolume. The
    /// snapshot contains all changes before the call, including buffered data, and changes of other
    /// threads up to one moment during the call. Like any change it is durable after the next sync.
    ///
    /// # Errors
    /// As for a new directory; `ENOENT` when there is no such source.
    pub fn snapshot(
        &self,
        source: SubvolumeId,
        place: EntryPlace<'_>,
        is_read_only: bool,
        at: Timestamp,
    ) -> Result<SubvolumeId> {
        Snapshot { source, place, is_read_only, at }
            .take(&self.volume, &self.volume.subvolumes)
            .map_err(of(place.dir))
    }

    /// Deletes the subvolume at `place` with all its contents. While files of it are
    /// [open](offshoot_vfs::FileSystemMut::open), its contents can be used as before. After that
    /// they are gone (`ENOENT`), and the space that only it used becomes free, see
    /// [`drop_deleted`](crate::Engine::drop_deleted).
    ///
    /// # Errors
    /// `EINVAL` when `place` is no subvolume, `EPERM` for the default subvolume, `ENOTEMPTY` when
    /// it contains subvolumes.
    pub fn delete_subvolume(&self, place: EntryPlace<'_>, at: Timestamp) -> Result<()> {
        delete(&self.volume, &self.volume.subvolumes, place, DeleteMode::Subvolumes, at)
            .map_err(of(place.dir))
    }
}
