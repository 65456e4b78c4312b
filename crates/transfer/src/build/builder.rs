//! Writes the files of sources into a volume.
//!
//! One thread does it, in the order in which the source gives the files. So the same source makes
//! the same calls, and from these a volume that commits at no times of its own makes the same
//! bytes.
//!
//! The builder keeps the directories open on the way to the file before: a source that goes through
//! one directory after another looks up each once. What is made in a directory changes its times,
//! so it gets its own back when the way leaves it: those that the source gave it, or those that it
//! had. A later file may lead into it again. Nothing else is remembered of directories, so memory
//! does not grow with their number.
//!
//! A path of the source leads through symbolic links of the volume, as far as these stay below the
//! place that is built into, which is what `/` means in them and where `..` ends. What stands at
//! the path of a file already is replaced, but for a directory by a directory: that gets the new
//! attributes, and keeps what is in it.
//!
//! A hard link to a file that has not come yet waits until the source ends.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;

use offshoot_vfs::escape::Escaped;
use offshoot_vfs::path::at_path;
use offshoot_vfs::{
    Attr, EntryPlace, Errno, Error, FileId, FileSystemMut, FileType, NewFile, Result as VfsResult,
    SafeName, SetAttr, SetTime, Timestamp, XattrMode,
};

use super::acl::NOT_A_LIST;
use super::entry::{Contents, Entry, EntryKind, EntrySink, PIECE_BYTES, SourceProblem, split_path};
use super::{BuildOptions, tar::UNREADABLE_ACL};
use crate::copy::is_refusal;
use crate::extract::{KnownLink, LinkName, LinkTable, Problems, TransferCounters, Unapplied};
use crate::xattrs::held_xattrs;
use crate::{Result, TransferFailure, TransferProgress};

/// How many symbolic links one path may lead through, as for the kernel.
const LINKS_MAX: u32 = 40;

/// How much memory the paths of hard links may take that wait for their files.
const WAITING_BYTES_MAX: usize = 64 << 20;

/// What a waiting hard link takes beside its paths.
const WAITING_EACH_BYTES: usize = 128;

/// The permissions of a directory that no source describes.
const MISSING_PERMISSIONS: u32 = 0o755;

/// A directory that is open.
struct Level {
    name: Vec<u8>,
    file: FileId,
    /// The times that it has when the way leaves it.
    atime: Timestamp,
    mtime: Timestamp,
    /// What was made in it gave it other times.
    is_changed: bool,
}

/// What builds of several sources have in common.
#[derive(Clone, Copy)]
pub(super) struct BuildContext<'a> {
    pub(super) fs: &'a dyn FileSystemMut,
    pub(super) options: &'a BuildOptions,
    pub(super) problems: &'a Problems<'a>,
    pub(super) progress: &'a dyn TransferProgress,
    pub(super) counters: &'a TransferCounters,
}

/// A source on its way into a volume; see the top of this file.
pub(super) struct Builder<'a> {
    context: BuildContext<'a>,
    /// The directories on the way. The first is the place that is built into.
    levels: Vec<Level>,
    /// Names that inodes of the source have that have several.
    links: LinkTable,
    /// Hard links that wait for their files: path, and path of the file.
    waiting: BTreeMap<Vec<u8>, Vec<u8>>,
    waiting_bytes: usize,
    buf: Vec<u8>,
}

impl<'a> Builder<'a> {
    /// A builder into `base`.
    pub(super) fn new(context: BuildContext<'a>, base: FileId) -> VfsResult<Self> {
        let attr = context.fs.attr(base)?;
        let base = Level {
            name: Vec::new(),
            file: base,
            atime: attr.atime,
            mtime: attr.mtime,
            is_changed: false,
        };
        Ok(Self {
            context,
            levels: vec![base],
            links: LinkTable::default(),
            waiting: BTreeMap::new(),
            waiting_bytes: 0,
            buf: vec![0; PIECE_BYTES],
        })
    }

    /// Makes the directory at `path`, and those that lead to it, where there are none.
    pub(super) fn make_way(&mut self, path: &[u8]) -> Result<FileId> {
        self.enter(path, true)?;
        Ok(self.here()?.file)
    }

    /// Ends the source: makes the hard links that waited, and gives the open directories their
    /// times.
    pub(super) fn finish(mut self) -> Result {
        let mut waiting = std::mem::take(&mut self.waiting);
        // One link may be the target of another.
        loop {
            let before = waiting.len();
            for (path, target) in std::mem::take(&mut waiting) {
                if !self.link(&path, &target)? {
                    waiting.insert(path, target);
                }
            }
            if waiting.is_empty() || waiting.len() == before {
                break;
            }
        }
        if let Some((path, target)) = waiting.first_key_value() {
            let what = format!("it is a hard link to {}, which is not there", Escaped(target));
            return Err(SourceProblem::Refused(what).at(path));
        }
        self.leave(0)
    }

    /// Removes what is at `path`, if anything is.
    pub(super) fn remove(&mut self, path: &[u8]) -> Result {
        let (parent, name) = split_path(path);
        if !self.enter(parent, false)? {
            return Ok(());
        }
        let place = EntryPlace { dir: self.here()?.file, name };
        self.touch_here();
        self.remove_place(place).map_err(|error| at(error, path))
    }

    /// Removes what is in the directory at `path`, if there is one.
    pub(super) fn clear(&mut self, path: &[u8]) -> Result {
        if !self.enter(path, false)? {
            return Ok(());
        }
        let dir = self.here()?.file;
        self.touch_here();
        self.clear_directory(dir).map_err(|error| at(error, path))
    }

    fn require_not_interrupted(&self) -> Result {
        if self.context.problems.is_stopped() { Err(TransferFailure::Interrupted) } else { Ok(()) }
    }

    /// The directory that the way leads to.
    fn here(&self) -> Result<&Level> {
        self.levels.last().ok_or_else(|| Error::posix(Errno::NOENT, "the way").into())
    }

    fn touch_here(&mut self) {
        if let Some(level) = self.levels.last_mut() {
            level.is_changed = true;
        }
    }

    /// Closes all open directories but the first `depth + 1` of them.
    fn close_to(&mut self, depth: usize) -> Result {
        while self.levels.len() > depth + 1 {
            self.close_last()?;
        }
        Ok(())
    }

    /// Closes all open directories but the first `count`, and gives all of them their times.
    fn leave(&mut self, count: usize) -> Result {
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

    /// Makes `path` the way. A directory that is missing is made if `makes`. Whether there is such
    /// a way.
    fn enter(&mut self, path: &[u8], makes: bool) -> Result<bool> {
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
            self.close_to(depth)?;
            let dir = self.here()?.file;
            let place = EntryPlace { dir, name: &name };
            let file = match self.context.fs.lookup(dir, &name) {
                Ok(file) => file,
                Err(error) if error.errno() == Errno::NOENT => {
                    if !makes {
                        return Ok(false);
                    }
                    self.touch_here();
                    let (uid, gid) = self.context.options.owner.unwrap_or((0, 0));
                    let new = self.new_file(MISSING_PERMISSIONS, uid, gid);
                    let made = self.context.fs.mkdir(place, &new);
                    self.context.counters.directories.fetch_add(1, Ordering::Relaxed);
                    made.map_err(|error| at(error, path))?
                }
                Err(error) => return Err(at(error, path)),
            };
            let attr = self.context.fs.attr(file).map_err(|error| at(error, path))?;
            match attr.file_type {
                FileType::Directory => {
                    let Attr { atime, mtime, .. } = attr;
                    self.levels.push(Level { name, file, atime, mtime, is_changed: false });
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
                _ if !makes => return Ok(false),
                _ => return Err(at(Error::posix(Errno::NOTDIR, ""), path)),
            }
        }
        self.close_to(depth)?;
        Ok(true)
    }

    fn new_file(&self, permissions: u32, uid: u32, gid: u32) -> NewFile {
        NewFile { permissions, uid, gid, umask: None, at: self.context.options.at }
    }

    /// Removes what is at `place`, if anything is, with everything in it.
    fn remove_place(&self, place: EntryPlace<'_>) -> VfsResult<()> {
        let at = self.context.options.at;
        match self.context.fs.unlink(place, at) {
            Err(error) if error.errno() == Errno::ISDIR => {
                let dir = self.context.fs.lookup(place.dir, place.name)?;
                self.clear_directory(dir)?;
                self.context.fs.rmdir(place, at)
            }
            Err(error) if error.errno() == Errno::NOENT => Ok(()),
            unlinked => unlinked,
        }
    }

    /// Removes everything in a directory.
    fn clear_directory(&self, top: FileId) -> VfsResult<()> {
        let (fs, at) = (self.context.fs, self.context.options.at);
        // Directories that are being emptied, each with its name in the one before.
        let mut stack = vec![(top, Vec::new())];
        while let Some((dir, _)) = stack.last() {
            let dir = *dir;
            let mut first = None;
            fs.read_dir(dir, 0, &mut |entry| {
                first = Some((entry.name.to_vec(), entry.file));
                ControlFlow::Break(())
            })?;
            if let Some((name, file)) = first {
                match fs.unlink(EntryPlace { dir, name: &name }, at) {
                    Err(error) if error.errno() == Errno::ISDIR => stack.push((file, name)),
                    unlinked => unlinked?,
                }
                continue;
            }
            let emptied = stack.pop();
            if let (Some((parent, _)), Some((_, name))) = (stack.last(), emptied) {
                fs.rmdir(EntryPlace { dir: *parent, name: &name }, at)?;
            }
        }
        Ok(())
    }

    /// Makes a file with `call`. What has its name goes before that.
    fn make(
        &mut self,
        name: &[u8],
        call: impl Fn(&dyn FileSystemMut, EntryPlace<'_>) -> VfsResult<FileId>,
    ) -> VfsResult<FileId> {
        self.touch_here();
        let Some(level) = self.levels.last() else {
            return Err(Error::posix(Errno::NOENT, "the way"));
        };
        let place = EntryPlace { dir: level.file, name };
        match call(self.context.fs, place) {
            Err(error) if error.errno() == Errno::EXIST => {
                self.remove_place(place)?;
                call(self.context.fs, place)
            }
            made => made,
        }
    }

    /// Gives a file its last attributes.
    fn finish_file(&self, file: FileId, entry: &Entry, size: Option<u64>) -> Result {
        self.set_xattrs(file, entry)?;
        let (atime, mtime) = self.times_of(entry);
        let set = SetAttr { size, ..times(atime, mtime) };
        let set = self.context.fs.set_attr(file, &set, self.context.options.at);
        set.map_err(|error| at(error, &entry.path))?;
        self.context.counters.files.fetch_add(1, Ordering::Relaxed);
        self.context.progress.add_file();
        Ok(())
    }

    fn times_of(&self, entry: &Entry) -> (Timestamp, Timestamp) {
        let clamp = |time: Timestamp| self.context.options.latest.map_or(time, |max| time.min(max));
        (clamp(entry.atime.unwrap_or(entry.mtime)), clamp(entry.mtime))
    }

    /// Sets extended attributes. Those that a volume has no place for are counted.
    fn set_xattrs(&self, file: FileId, entry: &Entry) -> Result {
        for (name, value) in &entry.xattrs {
            if name == UNREADABLE_ACL {
                self.context.problems.warning(&entry.path, &NOT_A_LIST);
                continue;
            }
            let (fs, now) = (self.context.fs, self.context.options.at);
            match fs.set_xattr(file, name, value, XattrMode::Set, now) {
                Ok(()) => {}
                Err(error) if is_refusal(&error) => {
                    let path = || entry.path.clone();
                    self.context.problems.unapplied(Unapplied::Xattr, path, error.errno());
                }
                Err(error) => return Err(at(error, &entry.path)),
            }
        }
        Ok(())
    }

    /// Makes a directory, or gives the one that is there these attributes.
    fn put_directory(&mut self, entry: &Entry) -> Result {
        let path = &entry.path;
        let (parent, name) = split_path(path);
        let is_base = path.is_empty();
        self.enter(parent, true)?;
        let new = self.new_file(entry.permissions, entry.uid, entry.gid);
        let existing = if is_base { Some(self.here()?.file) } else { self.directory_at(name)? };
        let file = match existing {
            Some(file) => {
                self.redo_attributes(file, entry)?;
                file
            }
            None => self
                .make(name, |fs, place| fs.mkdir(place, &new))
                .map_err(|error| at(error, path))?,
        };
        self.set_xattrs(file, entry)?;
        let (atime, mtime) = self.times_of(entry);
        let level = Level { name: name.to_vec(), file, atime, mtime, is_changed: true };
        if is_base {
            self.levels.clear();
        }
        self.levels.push(level);
        self.context.counters.directories.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// The directory with this name in the directory that the way leads to. Anything else there is
    /// left to be replaced.
    fn directory_at(&self, name: &[u8]) -> Result<Option<FileId>> {
        let (fs, here) = (self.context.fs, self.here()?);
        let file = match fs.lookup(here.file, name) {
            Err(error) if error.errno() == Errno::NOENT => return Ok(None),
            found => found.map_err(|error| at(error, name))?,
        };
        let attr = fs.attr(file).map_err(|error| at(error, name))?;
        Ok((attr.file_type == FileType::Directory).then_some(file))
    }

    /// Gives a directory that was there the owner and permissions of `entry`, and takes its
    /// extended attributes away.
    fn redo_attributes(&self, file: FileId, entry: &Entry) -> Result {
        let (fs, now) = (self.context.fs, self.context.options.at);
        let fail = |error| at(error, &entry.path);
        for (name, _) in held_xattrs(fs, file).map_err(fail)? {
            match fs.remove_xattr(file, &name, now) {
                // It is one that only the volume sets.
                Err(error) if is_refusal(&error) => {}
                removed => removed.map_err(fail)?,
            }
        }
        let set = SetAttr {
            permissions: Some(entry.permissions),
            uid: Some(entry.uid),
            gid: Some(entry.gid),
            ..SetAttr::default()
        };
        fs.set_attr(file, &set, now).map_err(fail)
    }

    /// Makes a regular file and fills it.
    fn put_regular(&mut self, entry: &Entry, size: u64, contents: &mut dyn Contents) -> Result {
        let path = &entry.path;
        let new = self.new_file(entry.permissions, entry.uid, entry.gid);
        let (_, name) = split_path(path);
        let file =
            self.make(name, |fs, place| fs.create(place, &new)).map_err(|error| at(error, path))?;
        let mut end = 0;
        while let Some((offset, len)) = contents.read_piece(&mut self.buf)? {
            self.require_not_interrupted()?;
            let piece = self.buf.get(..len).unwrap_or_default();
            let written = self.context.fs.write(file, offset, piece, self.context.options.at);
            written.map_err(|error| at(error, path))?;
            end = offset.saturating_add(len as u64);
            self.context.counters.bytes.fetch_add(len as u64, Ordering::Relaxed);
            self.context.progress.add_bytes(len as u64);
        }
        self.finish_file(file, entry, (end < size).then_some(size))
    }

    /// Gives the file at `target` the name `path`. Whether the file is there.
    fn link(&mut self, path: &[u8], target: &[u8]) -> Result<bool> {
        let (target_parent, target_name) = split_path(target);
        if !self.enter(target_parent, false)? {
            return Ok(false);
        }
        let (fs, dir) = (self.context.fs, self.here()?.file);
        let file = match fs.lookup(dir, target_name) {
            Err(error) if error.errno() == Errno::NOENT => return Ok(false),
            found => found.map_err(|error| at(error, target))?,
        };
        let (parent, name) = split_path(path);
        self.enter(parent, true)?;
        self.link_to(file, name).map_err(|error| at(error, path))?;
        Ok(true)
    }

    /// Gives `file` one more name in the directory that the way leads to.
    fn link_to(&mut self, file: FileId, name: &[u8]) -> VfsResult<()> {
        let (fs, now) = (self.context.fs, self.context.options.at);
        let Some(level) = self.levels.last() else {
            return Err(Error::posix(Errno::NOENT, "the way"));
        };
        // GNU tar writes a file that it was told to archive twice as a link to itself.
        let is_itself = match fs.lookup(level.file, name) {
            Ok(there) => there == file,
            Err(error) if error.errno() == Errno::NOENT => false,
            Err(error) => return Err(error),
        };
        if is_itself {
            return Ok(());
        }
        if fs.attr(file)?.file_type == FileType::Directory {
            return Err(Error::posix(Errno::INVAL, "it is a hard link to a directory"));
        }
        self.make(name, |fs, place| fs.link(file, place, now).map(|()| file))?;
        self.context.counters.files.fetch_add(1, Ordering::Relaxed);
        self.context.progress.add_file();
        Ok(())
    }

    /// Keeps a hard link until its file comes.
    fn wait_for(&mut self, path: Vec<u8>, target: Vec<u8>) -> Result {
        self.waiting_bytes += path.len() + target.len() + WAITING_EACH_BYTES;
        if self.waiting_bytes > WAITING_BYTES_MAX {
            let what = "too many hard links come before the files that they lead to".to_owned();
            return Err(SourceProblem::Refused(what).at(&path));
        }
        self.waiting.insert(path, target);
        Ok(())
    }

    /// Gives the name of `entry` to the file that another name of its inode became. Whether it did.
    fn link_to_known(&mut self, entry: &Entry, inode: &Attr) -> Result<bool> {
        let failed = |error: std::io::Error| {
            TransferFailure::Host("the table of hard links".to_owned(), error)
        };
        let (_, name) = split_path(&entry.path);
        if let Some(KnownLink::Name(known)) = self.links.newest(inode).map_err(failed)? {
            let fs = self.context.fs;
            let file = fs.lookup(known.parent, &known.name);
            let file = file.map_err(|error| at(error, &entry.path))?;
            match self.link_to(file, name) {
                Ok(()) => return Ok(true),
                // Another subvolume, or more names than the volume gives a file: it becomes a
                // file of its own, to which later names are given.
                Err(error) if matches!(error.errno(), Errno::XDEV | Errno::MLINK) => {
                    let path = || entry.path.clone();
                    self.context.problems.unapplied(Unapplied::HardLink, path, error.errno());
                }
                Err(error) => return Err(at(error, &entry.path)),
            }
        }
        let known = LinkName { parent: self.here()?.file, name: SafeName::new(name)? };
        self.links.add(inode, &known).map_err(failed)?;
        Ok(false)
    }
}

impl EntrySink for Builder<'_> {
    fn put(&mut self, mut entry: Entry, contents: &mut dyn Contents) -> Result {
        self.require_not_interrupted()?;
        if let Some((uid, gid)) = self.context.options.owner {
            (entry.uid, entry.gid) = (uid, gid);
        }
        if !self.waiting.is_empty() {
            // The later of two entries with one name counts.
            self.waiting.remove(&entry.path);
        }
        if let EntryKind::Directory = entry.kind {
            return self.put_directory(&entry);
        }
        if entry.path.is_empty() {
            let what = "it is a single file, and no directory to build from".to_owned();
            return Err(SourceProblem::Refused(what).at(b"."));
        }
        if let EntryKind::HardLink(target) = &entry.kind {
            if !self.link(&entry.path, target)? {
                let target = target.clone();
                self.wait_for(entry.path, target)?;
            }
            return Ok(());
        }
        let (parent, name) = split_path(&entry.path);
        self.enter(parent, true)?;
        if let Some(inode) = entry.inode
            && self.link_to_known(&entry, &inode)?
        {
            return Ok(());
        }
        let new = self.new_file(entry.permissions, entry.uid, entry.gid);
        let made = match &entry.kind {
            EntryKind::Regular { size } => return self.put_regular(&entry, *size, contents),
            EntryKind::Symlink(target) => {
                self.make(name, |fs, place| fs.symlink(place, target, &new))
            }
            EntryKind::Node(node) => self.make(name, |fs, place| fs.mknod(place, *node, &new)),
            EntryKind::Directory | EntryKind::HardLink(_) => return Ok(()),
        };
        let file = made.map_err(|error| at(error, &entry.path))?;
        self.finish_file(file, &entry, None)
    }
}

fn times(atime: Timestamp, mtime: Timestamp) -> SetAttr {
    SetAttr {
        atime: Some(SetTime::To(atime)),
        mtime: Some(SetTime::To(mtime)),
        ..SetAttr::default()
    }
}

/// An error of the volume about the file at `path`.
fn at(error: Error, path: &[u8]) -> TransferFailure {
    at_path(error, &[b"/", path].concat()).into()
}
