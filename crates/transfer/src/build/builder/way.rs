//! The way to the file that is written: directories that stay open until it leads elsewhere.
//!
//! A source that goes through one directory after another looks up each once. What is made in a
//! directory changes its times, so it gets its own back when the way leaves it: those that the
//! source gave it, or those that it had. A later file may lead into it again. Nothing else is
//! remembered of directories, so memory does not grow with their number.
//!
//! A path of the source leads through symbolic links of the volume, as far as these stay below the
//! place that is built into, which is what `/` means in them and where `..` ends.

use std::sync::atomic::Ordering;

use offshoot_vfs::{Attr, EntryPlace, Errno, Error, FileId, FileType, Timestamp};

use super::{Builder, MISSING_PERMISSIONS, at, times};
use crate::Result;

/// How many symbolic links one path may lead through, as for the kernel.
const LINKS_MAX: u32 = 40;

/// A directory that is open.
pub(super) struct BuilderLevel {
    pub(super) name: Vec<u8>,
    pub(super) file: FileId,
    /// The times that it has when the way leaves it.
    pub(super) atime: Timestamp,
    pub(super) mtime: Timestamp,
    /// What was made in it gave it other times.
    pub(super) is_changed: bool,
}

/// Whether there is a way to a place.
pub(super) enum Way {
    /// There is.
    Found,
    /// This directory lacks this name, or has no directory there.
    Lacks(FileId, Vec<u8>),
}

impl Builder<'_> {
    /// Makes the directory at `path`, and those that lead to it, where there are none. Gives its
    /// path without symbolic links, too.
    pub(in crate::build) fn make_way(&mut self, path: &[u8]) -> Result<(FileId, Vec<u8>)> {
        self.enter(path, true)?;
        Ok((self.here()?.file, self.real_path(b"")))
    }

    /// The path of `name` in the directory that the way leads to, from the root of the volume; of
    /// that directory itself without a name.
    pub(super) fn real_path(&self, name: &[u8]) -> Vec<u8> {
        let levels = self.levels.iter().map(|level| &level.name[..]);
        let names = std::iter::once(&self.base_path[..]).chain(levels).chain([name]);
        names.filter(|name| !name.is_empty()).collect::<Vec<_>>().join(&b'/')
    }

    /// The directory that the way leads to.
    pub(super) fn here(&self) -> Result<&BuilderLevel> {
        self.levels.last().ok_or_else(|| Error::posix(Errno::NOENT, "the way").into())
    }

    /// Something is made in the directory that the way leads to, which gets its times back.
    pub(in crate::build) fn touch_here(&mut self) {
        if let Some(level) = self.levels.last_mut() {
            level.is_changed = true;
        }
    }

    /// Closes all open directories but the first `count`, and gives all of them their times.
    pub(super) fn leave(&mut self, count: usize) -> Result {
        while self.levels.len() > count {
            self.close_last()?;
        }
        Ok(())
    }

    fn close_last(&mut self) -> Result {
        let Some(level) = self.levels.pop() else { return Ok(()) };
        if level.is_changed {
            let set = times(level.atime, level.mtime);
            let set = self.context.fs.set_attr(level.file, &set, self.context.options.at);
            set.map_err(|error| at(error, &level.name))?;
        }
        Ok(())
    }

    /// Makes `path` the way. A directory that is missing is made if `makes`.
    pub(super) fn enter(&mut self, path: &[u8], makes: bool) -> Result<Way> {
        let names = |path: &[u8]| -> Vec<Vec<u8>> {
            let names = path.split(|&byte| byte == b'/');
            names.rev().filter(|name| !name.is_empty()).map(<[u8]>::to_vec).collect()
        };
        let (mut todo, mut depth, mut links) = (names(path), 0_usize, 0);
        while let Some(name) = todo.pop() {
            match &name[..] {
                b"." => continue,
                b".." => {
                    depth = depth.saturating_sub(1);
                    continue;
                }
                _ => {}
            }
            if self.levels.get(depth + 1).is_some_and(|level| level.name == name) {
                depth += 1;
                continue;
            }
            self.leave(depth + 1)?;
            let dir = self.here()?.file;
            let place = EntryPlace { dir, name: &name };
            let file = match self.context.fs.lookup(dir, &name) {
                Ok(file) => file,
                Err(error) if error.errno() == Errno::NOENT => {
                    if !makes {
                        return Ok(Way::Lacks(dir, name));
                    }
                    self.touch_here();
                    let (uid, gid) = self.context.options.missing_owner();
                    let new = self.new_file(MISSING_PERMISSIONS, uid, gid);
                    let made = self.context.fs.mkdir(place, &new);
                    self.context.counters.directories.fetch_add(1, Ordering::Relaxed);
                    let made = made.map_err(|error| at(error, path))?;
                    if self.context.settings.needs_paths() {
                        let real = self.real_path(&name);
                        self.context.settings.set_properties(made, &real)?;
                    }
                    self.woken.wake(dir, &name);
                    made
                }
                Err(error) => return Err(at(error, path)),
            };
            let attr = self.context.fs.attr(file).map_err(|error| at(error, path))?;
            match attr.file_type {
                FileType::Directory => {
                    let Attr { atime, mtime, .. } = attr;
                    self.levels.push(BuilderLevel { name, file, atime, mtime, is_changed: false });
                    depth += 1;
                }
                FileType::Symlink => {
                    links += 1;
                    if links > LINKS_MAX {
                        return Err(at(Error::posix(Errno::LOOP, ""), path));
                    }
                    let target = self.context.fs.read_link(file);
                    let target = target.map_err(|error| at(error, path))?;
                    if target.starts_with(b"/") {
                        depth = 0;
                    }
                    todo.extend(names(&target));
                }
                _ if !makes => return Ok(Way::Lacks(dir, name)),
                _ => return Err(at(Error::posix(Errno::NOTDIR, ""), path)),
            }
        }
        self.leave(depth + 1)?;
        Ok(Way::Found)
    }

    /// The directory with this name in the directory that the way leads to. Anything else there is
    /// left to be replaced.
    pub(super) fn directory_at(&self, name: &[u8]) -> Result<Option<FileId>> {
        let (fs, here) = (self.context.fs, self.here()?);
        let file = match fs.lookup(here.file, name) {
            Err(error) if error.errno() == Errno::NOENT => return Ok(None),
            found => found.map_err(|error| at(error, name))?,
        };
        let attr = fs.attr(file).map_err(|error| at(error, name))?;
        Ok((attr.file_type == FileType::Directory).then_some(file))
    }
}
