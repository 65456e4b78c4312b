//! Calls about subvolumes.

use std::path::Path;

use offshoot_vfs::Result;
use offshoot_vfs::path::at_path;

use super::{Volume, bytes, subvolume_at};

impl Volume {
    /// Makes an empty subvolume at `path`, with the permissions 0755.
    ///
    /// # Errors
    /// `EEXIST`, `ENOENT` for a directory above it.
    pub fn create_subvolume(&self, path: impl AsRef<Path>) -> Result<()> {
        let (path, files) = (bytes(path.as_ref()), self.files.btrfs()?);
        let call = self.call();
        let name = call.free(path)?;
        let made = call
            .new_file(name.dir, 0o755)
            .and_then(|new| files.create_subvolume(name.place(), &new));
        made.map(drop).map_err(|error| at_path(error, path))
    }

    /// Makes a snapshot of the subvolume at `source` at `path`. Its cost does not depend on how
    /// much is in it.
    ///
    /// # Errors
    /// `EINVAL` when no subvolume is at `source`, `EEXIST`.
    pub fn snapshot(
        &self,
        source: impl AsRef<Path>,
        path: impl AsRef<Path>,
        is_read_only: bool,
    ) -> Result<()> {
        let (path, files) = (bytes(path.as_ref()), self.files.btrfs()?);
        let call = self.call();
        let source = subvolume_at(files, bytes(source.as_ref()))?;
        let name = call.free(path)?;
        let taken = files.snapshot(source, name.place(), is_read_only, self.now());
        taken.map(drop).map_err(|error| at_path(error, path))
    }

    /// Deletes the subvolume at `path` with everything in it. The space that it alone takes becomes
    /// free after that, piece by piece.
    ///
    /// # Errors
    /// `EINVAL` when no subvolume is there, `ENOTEMPTY` when it holds subvolumes.
    pub fn delete_subvolume(&self, path: impl AsRef<Path>) -> Result<()> {
        let (path, files) = (bytes(path.as_ref()), self.files.btrfs()?);
        let call = self.call();
        let (name, _) = call.named(path)?;
        let deleted = files.delete_subvolume(name.place(), self.now());
        deleted.map_err(|error| at_path(error, path))
    }
}
