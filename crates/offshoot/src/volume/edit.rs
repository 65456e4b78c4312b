//! Calls that change files.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use offshoot_vfs::path::{LastLink, at_path, prefix, resolve_end};
use offshoot_vfs::walk::{DEPTH_MAX, WalkVisitor, WalkedFile, walk};
use offshoot_vfs::{
    EntryPlace, Errno, Error, FileId, FileSystem, FileSystemMut, FileType, NewFile, Result,
    SetAttr, XattrMode,
};

use super::{NameInDirectory, PathCall, Volume, bytes, fail, owned};

/// How often a file is looked for that other threads make and remove meanwhile.
const MOST_TRIES: usize = 100;

impl Volume {
    /// Gives the file at `path` these contents. It is made when nothing is there, with the
    /// permissions 0644.
    ///
    /// A crash before the next [`sync`](Self::sync) may leave old and new contents mixed. To
    /// replace a file in one step, write another one, [`sync_file`](Self::sync_file) it, and
    /// [`rename`](Self::rename) it.
    ///
    /// # Errors
    /// `EISDIR`, `ENOENT` for a directory that is not there, `ENOSPC`, `EROFS`.
    pub fn write(&self, path: impl AsRef<Path>, contents: impl AsRef<[u8]>) -> Result<()> {
        let (path, contents, call) = (bytes(path.as_ref()), contents.as_ref(), self.call());
        let named = |error| at_path(error, path);
        let file = call.file_or_new(path)?;
        call.files.write(file, 0, contents, self.now()).map_err(named)?;
        let size = contents.len() as u64;
        if call.files.attr(file).map_err(named)?.size == size {
            return Ok(());
        }
        let set = SetAttr { size: Some(size), ..SetAttr::default() };
        call.files.set_attr(file, &set, self.now()).map_err(named)
    }

    /// Writes `data` at byte `offset` of the file at `path`, which is made when nothing is there,
    /// and becomes longer where needed.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn write_at(
        &self,
        path: impl AsRef<Path>,
        offset: u64,
        data: impl AsRef<[u8]>,
    ) -> Result<()> {
        let (path, call) = (bytes(path.as_ref()), self.call());
        let file = call.file_or_new(path)?;
        let written = call.files.write(file, offset, data.as_ref(), self.now());
        written.map_err(|error| at_path(error, path))
    }

    /// Makes a directory at `path`, with the permissions 0755.
    ///
    /// # Errors
    /// `EEXIST`, `ENOENT` for a directory above it.
    pub fn create_dir(&self, path: impl AsRef<Path>) -> Result<()> {
        let (path, call) = (bytes(path.as_ref()), self.call());
        let name = call.free(path)?;
        call.make_dir(&name).map_err(|error| at_path(error, path))
    }

    /// Makes the directory at `path` and all above it that are not there.
    ///
    /// # Errors
    /// `ENOTDIR` when another file is in the way.
    pub fn create_dir_all(&self, path: impl AsRef<Path>) -> Result<()> {
        let (path, call) = (bytes(path.as_ref()), self.call());
        let named = |error| at_path(error, path);
        let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(end, _)| end);
        for end in ends.chain([path.len()]) {
            let end = resolve_end(&call.files, &path[..end], LastLink::Follow)?;
            let file = match (end.file, end.place) {
                (Some(file), _) => file,
                (None, Some((dir, name))) => {
                    match call.make_dir(&NameInDirectory { dir, name: name.clone() }) {
                        Ok(()) => continue,
                        // Another thread was faster.
                        Err(Error::Posix { errno: Errno::EXIST, .. }) => {
                            call.files.lookup(dir, &name).map_err(named)?
                        }
                        Err(error) => return Err(named(error)),
                    }
                }
                (None, None) => return Err(fail(Errno::NOENT, path)),
            };
            if call.files.attr(file).map_err(named)?.file_type != FileType::Directory {
                return Err(fail(Errno::NOTDIR, path));
            }
        }
        Ok(())
    }

    /// Makes a symbolic link at `path` that leads to `target`.
    ///
    /// # Errors
    /// `EEXIST`.
    pub fn symlink(&self, target: impl AsRef<Path>, path: impl AsRef<Path>) -> Result<()> {
        let (target, path) = (bytes(target.as_ref()), bytes(path.as_ref()));
        let call = self.call();
        let name = call.free(path)?;
        let made = call
            .new_file(name.dir, 0o777)
            .and_then(|new| call.files.symlink(name.place(), target, &new));
        made.map(drop).map_err(|error| at_path(error, path))
    }

    /// Gives the file at `existing` one more name, `path`.
    ///
    /// # Errors
    /// `EEXIST`, `EPERM` for a directory, `EXDEV` in another subvolume.
    pub fn hard_link(&self, existing: impl AsRef<Path>, path: impl AsRef<Path>) -> Result<()> {
        let (existing, path) = (bytes(existing.as_ref()), bytes(path.as_ref()));
        let call = self.call();
        let (_, file) = call.named(existing)?;
        let name = call.free(path)?;
        let linked = call.files.link(file, name.place(), self.now());
        linked.map_err(|error| at_path(error, path))
    }

    /// Moves the file at `from` to `to`, and replaces a file or an empty directory there, in one
    /// step.
    ///
    /// # Errors
    /// `EXDEV` for a move into another subvolume, where only subvolumes themselves go.
    pub fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
        let (from, to) = (bytes(from.as_ref()), bytes(to.as_ref()));
        let call = self.call();
        let (old, file) = call.named(from)?;
        let end = resolve_end(&call.files, to, LastLink::Keep)?;
        let (dir, name) = end.place.ok_or_else(|| fail(Errno::BUSY, to))?;
        let attr = call.files.attr(file).map_err(|error| at_path(error, from))?;
        if end.must_be_directory && attr.file_type != FileType::Directory {
            return Err(fail(Errno::NOTDIR, to));
        }
        let moved = call.files.rename(old.place(), EntryPlace { dir, name: &name }, self.now());
        moved.map_err(|error| at_path(error, to))
    }

    /// Removes the file at `path`, which is no directory.
    ///
    /// # Errors
    /// `EISDIR`.
    pub fn remove_file(&self, path: impl AsRef<Path>) -> Result<()> {
        let (path, call) = (bytes(path.as_ref()), self.call());
        let (name, _) = call.named(path)?;
        call.files.unlink(name.place(), self.now()).map_err(|error| at_path(error, path))
    }

    /// Removes the empty directory at `path`.
    ///
    /// # Errors
    /// `ENOTDIR`, `ENOTEMPTY`.
    pub fn remove_dir(&self, path: impl AsRef<Path>) -> Result<()> {
        let (path, call) = (bytes(path.as_ref()), self.call());
        let (name, _) = call.named(path)?;
        call.files.rmdir(name.place(), self.now()).map_err(|error| at_path(error, path))
    }

    /// Removes the directory at `path` with everything in it. It stops at a subvolume, which
    /// [`delete_subvolume`](Self::delete_subvolume) removes.
    ///
    /// # Errors
    /// `ENOTDIR`. `EXDEV` for a subvolume. Then, and after every other error, a part may be gone.
    pub fn remove_dir_all(&self, path: impl AsRef<Path>) -> Result<()> {
        let (path, call) = (bytes(path.as_ref()), self.call());
        let (name, top) = call.named(path)?;
        let attr = call.files.attr(top).map_err(|error| at_path(error, path))?;
        if attr.file_type != FileType::Directory {
            return Err(fail(Errno::NOTDIR, path));
        }
        if top.dev != name.dir.dev {
            return Err(fail(Errno::XDEV, path));
        }
        let mut removal = RemovalVisitor { volume: self, top: path, failed: None };
        walk(&*self.files, top, name, DEPTH_MAX, &mut removal);
        removal.failed.map_or(Ok(()), Err)
    }

    /// Changes attributes of the file at `path`, links followed.
    ///
    /// # Errors
    /// `EPERM` for an immutable file, `EROFS`.
    pub fn set_attr(&self, path: impl AsRef<Path>, set: &SetAttr) -> Result<()> {
        let (path, call) = (bytes(path.as_ref()), self.call());
        let file = call.file(path)?;
        call.files.set_attr(file, set, self.now()).map_err(|error| at_path(error, path))
    }

    /// Sets an extended attribute of the file at `path`, links followed.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for a name without a known prefix such as `user.`, `ENOSPC` for a value that is
    /// too large.
    pub fn set_xattr(
        &self,
        path: impl AsRef<Path>,
        name: impl AsRef<OsStr>,
        value: impl AsRef<[u8]>,
    ) -> Result<()> {
        let (path, call) = (bytes(path.as_ref()), self.call());
        let (file, name) = (call.file(path)?, name.as_ref().as_bytes());
        let set = call.files.set_xattr(file, name, value.as_ref(), XattrMode::Set, self.now());
        set.map_err(|error| at_path(error, path))
    }
}

impl PathCall<'_> {
    fn file_or_new(&self, path: &[u8]) -> Result<FileId> {
        let mut tries = 0;
        loop {
            let end = resolve_end(&self.files, path, LastLink::Follow)?;
            let (dir, name) = match (end.file, end.place) {
                (Some(file), _) => return Ok(file),
                (None, Some(place)) if !end.must_be_directory => place,
                _ => return Err(fail(Errno::ISDIR, path)),
            };
            let new = self.new_file(dir, 0o644)?;
            let made = self.files.create(EntryPlace { dir, name: &name }, &new);
            let error = match made {
                Ok(file) => return Ok(file),
                Err(error) => at_path(error, path),
            };
            tries += 1;
            // Another thread has made the file meanwhile, or removed the one that we made.
            let has_raced = matches!(error.errno(), Errno::EXIST | Errno::NOENT);
            if !has_raced || tries == MOST_TRIES {
                return Err(error);
            }
        }
    }

    /// What a new file in `dir` begins with. It has the group of a directory with the set-group-id
    /// bit, as on any mount.
    pub(super) fn new_file(&self, dir: FileId, permissions: u32) -> Result<NewFile> {
        let parent = self.files.attr(dir)?;
        let (uid, gid) = self.volume.owner;
        let gid = if parent.permissions & 0o2000 == 0 { gid } else { parent.gid };
        Ok(NewFile { permissions, uid, gid, umask: None, at: self.volume.now() })
    }

    fn make_dir(&self, name: &NameInDirectory) -> Result<()> {
        let new = self.new_file(name.dir, 0o755)?;
        // As on any mount, a directory passes its set-group-id bit on.
        let set_gid = self.files.attr(name.dir)?.permissions & 0o2000;
        let new = NewFile { permissions: new.permissions | set_gid, ..new };
        self.files.mkdir(name.place(), &new).map(drop)
    }
}

/// Removes what a walk shows, each directory when it is left.
struct RemovalVisitor<'a> {
    volume: &'a Volume,
    top: &'a [u8],
    failed: Option<Error>,
}

impl RemovalVisitor<'_> {
    fn keep(&mut self, result: Result<()>, path: &[u8]) {
        if let Err(error) = result
            && self.failed.is_none()
        {
            let path = [prefix(self.top), b"/", path].concat();
            self.failed = Some(at_path(error, &path));
        }
    }
}

impl WalkVisitor for RemovalVisitor<'_> {
    type Directory = NameInDirectory;

    fn enter(&mut self, _: &NameInDirectory, entry: &WalkedFile<'_>) -> Option<NameInDirectory> {
        if entry.attr.file.dev != entry.parent.dev {
            self.keep(Err(fail(Errno::XDEV, entry.path)), entry.path);
            return None;
        }
        Some(NameInDirectory { dir: entry.parent, name: entry.name.to_vec() })
    }

    fn visit(&mut self, _: &NameInDirectory, entry: &WalkedFile<'_>) {
        let place = EntryPlace { dir: entry.parent, name: entry.name };
        let removed = self.volume.files.unlink(place, self.volume.now());
        self.keep(removed, entry.path);
    }

    fn leave(&mut self, directory: NameInDirectory, path: &[u8]) {
        if self.failed.is_none() {
            let removed = self.volume.files.rmdir(directory.place(), self.volume.now());
            self.keep(removed, path);
        }
    }

    fn failed(&mut self, path: &[u8], error: &Error) {
        if self.failed.is_none() {
            let path = [prefix(self.top), b"/", path].concat();
            self.failed = Some(at_path(owned(error), &path));
        }
    }

    fn is_stopped(&self) -> bool {
        self.failed.is_some()
    }
}
