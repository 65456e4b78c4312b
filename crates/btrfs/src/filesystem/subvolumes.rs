//! Making and deleting subvolumes: what only this filesystem has.

use offshoot_vfs::{NewFile, Place, Result, Timestamp};

use super::{Filesystem, of};
use crate::SubvolumeId;
use crate::subvolume::create::create;
use crate::subvolume::delete::{Only, delete};
use crate::subvolume::snapshot::Snapshot;

impl Filesystem {
    /// Makes an empty subvolume at `place`. Owner, permissions and times of its root directory are
    /// those of `new`.
    ///
    /// # Errors
    /// As for a new directory.
    pub fn create_subvolume(&self, place: Place<'_>, new: &NewFile) -> Result<SubvolumeId> {
        create(&self.volume, place, new).map_err(of(place.dir))
    }

    /// Makes a snapshot of the subvolume `source` at `place`, which may be in any subvolume. It
    /// holds what was done before the call, buffered data included, and what other threads did up
    /// to one moment during it. Like any change it is durable after the next sync.
    ///
    /// # Errors
    /// As for a new directory; `ENOENT` when there is no such source.
    pub fn snapshot(
        &self,
        source: SubvolumeId,
        place: Place<'_>,
        is_read_only: bool,
        at: Timestamp,
    ) -> Result<SubvolumeId> {
        Snapshot { source, place, is_read_only, at }.take(&self.volume).map_err(of(place.dir))
    }

    /// Deletes the subvolume at `place` with all that is in it. As long as files of it are
    /// [open](offshoot_vfs::FileSystemMut::open), what is in it can be used as before; then it is
    /// gone (`ENOENT`). The space that it alone takes becomes free after that, see
    /// [`drop_deleted`](crate::Engine::drop_deleted).
    ///
    /// # Errors
    /// `EINVAL` when something else is there, `EPERM` for the default subvolume, `ENOTEMPTY` when
    /// it holds subvolumes.
    pub fn delete_subvolume(&self, place: Place<'_>, at: Timestamp) -> Result<()> {
        delete(&self.volume, place, Only::Subvolumes, at).map_err(of(place.dir))
    }
}
