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
//! A hard link to a file that has not come yet waits until the source ends, or the layer. Then each
//! is made, or waits for the one name that its way to the file lacks. Making that name wakes it. So
//! a chain of links takes time in proportion to its length, in whatever order it comes.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;

use offshoot_vfs::escape::Escaped;
use offshoot_vfs::path::at_path;
use offshoot_vfs::{
    Attr, EntryPlace, Errno, Error, FileFlags, FileId, FileSystemMut, FileType, NewFile,
    Result as VfsResult, SafeName, SetAttr, SetTime, Timestamp, XattrMode,
};

use super::dedupe::{FilledFile, StoredUnits};
use super::entry::{
    BuildEntry, Contents, EntryKind, EntrySink, PIECE_BYTES, SourceProblem, split_path,
};
use super::owners::map_owners;
use super::settings::FileSettings;
use super::{BuildOptions, tar::UNREADABLE_ACL};
use crate::copy::is_refusal;
use crate::extract::{LinkName, LinkTable, Problems, TransferCounters, Unapplied};
use crate::xattrs::held_xattrs;
use crate::{Result, TransferFailure, TransferProgress};

/// How many symbolic links one path may lead through, as for the kernel.
const LINKS_MAX: u32 = 40;

/// How much memory the paths of hard links may take that wait for their files.
const WAITING_BYTES_MAX: usize = 64 << 20;

/// How many names of a directory that is being emptied are in memory.
const EMPTIED_NAMES: usize = 256;

/// What a waiting hard link takes beside its paths.
const WAITING_EACH_BYTES: usize = 128;

/// The permissions of a directory that no source describes.
pub(super) const MISSING_PERMISSIONS: u32 = 0o755;

/// A directory that is open.
struct BuilderLevel {
    name: Vec<u8>,
    file: FileId,
    /// The times that it has when the way leaves it.
    atime: Timestamp,
    mtime: Timestamp,
    /// What was made in it gave it other times.
    is_changed: bool,
}

/// Whether there is a way to a place.
enum Way {
    /// There is.
    Found,
    /// This directory lacks this name, or has no directory there.
    Lacks(FileId, Vec<u8>),
}

/// A hard link that waits.
struct WaitingLink {
    path: Vec<u8>,
    target: Vec<u8>,
}

/// Hard links while they are made that waited.
#[derive(Default)]
struct WokenLinks {
    /// Those that wait for a name in a directory.
    waiting: BTreeMap<(FileId, Vec<u8>), Vec<WaitingLink>>,
    /// Those to try next.
    ready: VecDeque<WaitingLink>,
}

impl WokenLinks {
    /// The directory has this name now.
    fn wake(&mut self, dir: FileId, name: &[u8]) {
        if !self.waiting.is_empty()
            && let Some(woken) = self.waiting.remove(&(dir, name.to_vec()))
        {
            self.ready.extend(woken);
        }
    }
}

/// A directory that is being emptied.
struct EmptiedDirectory {
    file: FileId,
    /// Its name in the one before.
    name: Vec<u8>,
    /// Everything up to here is removed.
    cookie: u64,
}

/// What builds of several sources have in common.
#[derive(Clone, Copy)]
pub(super) struct BuildContext<'a> {
    pub(super) fs: &'a dyn FileSystemMut,
    pub(super) options: &'a BuildOptions,
    pub(super) problems: &'a Problems<'a>,
    pub(super) progress: &'a dyn TransferProgress,
    pub(super) counters: &'a TransferCounters,
    pub(super) settings: &'a FileSettings<'a>,
    /// What is stored already, if equal data is stored once.
    pub(super) units: Option<&'a RefCell<StoredUnits>>,
}

/// A source on its way into a volume; see the top of this file.
pub(super) struct Builder<'a> {
    context: BuildContext<'a>,
    /// The path of the place that is built into, from the root of the volume.
    base_path: Vec<u8>,
    /// The directories on the way. The first is the place that is built into.
    levels: Vec<BuilderLevel>,
    /// Names that inodes of the source have that have several.
    links: LinkTable,
    /// Hard links that wait for their files: path, and path of the file.
    waiting: BTreeMap<Vec<u8>, Vec<u8>>,
    waiting_bytes: usize,
    woken: WokenLinks,
    buf: Vec<u8>,
}

impl<'a> Builder<'a> {
    /// A builder into `base`, which is at `base_path` from the root of the volume.
    pub(super) fn new(
        context: BuildContext<'a>,
        base: FileId,
        base_path: Vec<u8>,
    ) -> VfsResult<Self> {
        let attr = context.fs.attr(base)?;
        let base = BuilderLevel {
            name: Vec::new(),
            file: base,
            atime: attr.atime,
            mtime: attr.mtime,
            is_changed: false,
        };
        Ok(Self {
            context,
            base_path,
            levels: vec![base],
            links: LinkTable::default(),
            waiting: BTreeMap::new(),
            waiting_bytes: 0,
            woken: WokenLinks::default(),
            buf: vec![0; PIECE_BYTES],
        })
    }

    /// Makes the directory at `path`, and those that lead to it, where there are none. Gives its
    /// path without symbolic links, too.
    pub(super) fn make_way(&mut self, path: &[u8]) -> Result<(FileId, Vec<u8>)> {
        self.enter(path, true)?;
        Ok((self.here()?.file, self.real_path(b"")))
    }

    /// The path of `name` in the directory that the way leads to, from the root of the volume; of
    /// that directory itself without a name.
    fn real_path(&self, name: &[u8]) -> Vec<u8> {
        let levels = self.levels.iter().map(|level| &level.name[..]);
        let names = std::iter::once(&self.base_path[..]).chain(levels).chain([name]);
        names.filter(|name| !name.is_empty()).collect::<Vec<_>>().join(&b'/')
    }

    /// Gives a file that was made, or gets new attributes, its flags and properties.
    fn set_up(&self, file: FileId, name: &[u8], entry: &BuildEntry) -> Result {
        let settings = self.context.settings;
        let has_flags = !entry.flags.is_empty() || entry.has_other_flags;
        if !has_flags && !settings.needs_paths() {
            return Ok(());
        }
        let real = self.real_path(name);
        settings.forget(&real);
        let has_place = matches!(entry.kind, EntryKind::Regular { .. } | EntryKind::Directory);
        let set = if has_place || entry.flags.is_empty() {
            settings.set_flags(file, &real, entry.flags)?
        } else {
            Err(Error::posix(Errno::OPNOTSUPP, "flags"))
        };
        let refused = match set {
            Ok(()) => entry.has_other_flags.then_some(Errno::OPNOTSUPP),
            Err(error) if is_refusal(&error) => Some(error.errno()),
            Err(error) => return Err(at(error, &entry.path)),
        };
        if let Some(errno) = refused {
            self.context.problems.unapplied(Unapplied::Flags, || entry.path.clone(), errno);
        }
        settings.set_properties(file, &real)
    }

    /// Ends the source: makes the hard links that waited, and gives the open directories their
    /// times.
    pub(super) fn finish(mut self) -> Result {
        self.make_waiting_links()?;
        self.leave(0)
    }

    /// Makes the hard links that waited.
    pub(super) fn make_waiting_links(&mut self) -> Result {
        let waiting = std::mem::take(&mut self.waiting);
        self.waiting_bytes = 0;
        let links = waiting.into_iter().map(|(path, target)| WaitingLink { path, target });
        self.woken = WokenLinks { ready: links.collect(), ..WokenLinks::default() };
        while let Some(link) = self.woken.ready.pop_front() {
            self.require_not_interrupted()?;
            if let Way::Lacks(dir, name) = self.link(&link.path, &link.target)? {
                self.woken.waiting.entry((dir, name)).or_default().push(link);
            }
        }
        let left = self.woken.waiting.values().flatten();
        if let Some(link) = left.min_by(|one, other| one.path.cmp(&other.path)) {
            let target = Escaped(&link.target);
            let what = format!("it is a hard link to {target}, which is not there");
            return Err(SourceProblem::Refused(what).at(&link.path));
        }
        Ok(())
    }

    /// Removes what is at `path`, if anything is.
    pub(super) fn remove(&mut self, path: &[u8]) -> Result {
        let (parent, name) = split_path(path);
        if let Way::Lacks(..) = self.enter(parent, false)? {
            return Ok(());
        }
        let place = EntryPlace { dir: self.here()?.file, name };
        self.touch_here();
        self.remove_place(place).map_err(|failure| failure.at(path))
    }

    /// Removes what is at `path`, unless it is a directory.
    pub(super) fn remove_unless_directory(&mut self, path: &[u8]) -> Result {
        let (parent, name) = split_path(path);
        if path.is_empty() || matches!(self.enter(parent, false)?, Way::Lacks(..)) {
            return Ok(());
        }
        if self.directory_at(name)?.is_some() {
            return Ok(());
        }
        self.remove(path)
    }

    /// Removes what is in the directory at `path`, if there is one. A symbolic link there is none:
    /// what a layer says of its directory `lib` is not about the one that a link `lib` leads to.
    pub(super) fn clear(&mut self, path: &[u8]) -> Result {
        let (parent, name) = split_path(path);
        if let Way::Lacks(..) = self.enter(parent, false)? {
            return Ok(());
        }
        if !path.is_empty() && self.directory_at(name)?.is_none() {
            return Ok(());
        }
        self.enter(path, false)?;
        let dir = self.here()?.file;
        self.touch_here();
        self.clear_directory(dir).map_err(|failure| failure.at(path))
    }

    fn require_not_interrupted(&self) -> Result {
        if self.context.problems.is_stopped() { Err(TransferFailure::Interrupted) } else { Ok(()) }
    }

    /// The directory that the way leads to.
    fn here(&self) -> Result<&BuilderLevel> {
        self.levels.last().ok_or_else(|| Error::posix(Errno::NOENT, "the way").into())
    }

    /// Something is made in the directory that the way leads to, which gets its times back.
    pub(super) fn touch_here(&mut self) {
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

    /// Makes `path` the way. A directory that is missing is made if `makes`.
    fn enter(&mut self, path: &[u8], makes: bool) -> Result<Way> {
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
        self.close_to(depth)?;
        Ok(Way::Found)
    }

    fn new_file(&self, permissions: u32, uid: u32, gid: u32) -> NewFile {
        NewFile { permissions, uid, gid, umask: None, at: self.context.options.at }
    }

    /// Removes what is at `place`, if anything is, with everything in it.
    fn remove_place(&self, place: EntryPlace<'_>) -> Result<(), Removal> {
        let at = self.context.options.at;
        match self.context.fs.unlink(place, at) {
            Err(error) if error.errno() == Errno::ISDIR => {
                let dir = self.context.fs.lookup(place.dir, place.name)?;
                self.clear_directory(dir)?;
                Ok(self.context.fs.rmdir(place, at)?)
            }
            Err(error) if error.errno() == Errno::NOENT => Ok(()),
            unlinked => Ok(unlinked?),
        }
    }

    /// Removes everything in a directory. Each name is read once: what is removed may stay in the
    /// trees until a commit, and reading from the beginning would pass it again and again.
    fn clear_directory(&self, top: FileId) -> Result<(), Removal> {
        let (fs, at) = (self.context.fs, self.context.options.at);
        let mut stack = vec![EmptiedDirectory { file: top, name: Vec::new(), cookie: 0 }];
        while let Some(last) = stack.last_mut() {
            let (dir, mut batch) = (last.file, Vec::new());
            fs.read_dir(dir, last.cookie, &mut |entry| {
                batch.push((entry.name.to_vec(), entry.file, entry.cookie));
                let is_last =
                    batch.len() == EMPTIED_NAMES || entry.file_type == FileType::Directory;
                if is_last { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })?;
            let is_empty = batch.is_empty();
            let mut inner = None;
            for (name, file, cookie) in batch {
                if self.context.problems.is_stopped() {
                    return Err(Removal::Interrupted);
                }
                last.cookie = cookie;
                match fs.unlink(EntryPlace { dir, name: &name }, at) {
                    Err(error) if error.errno() == Errno::ISDIR => {
                        inner = Some(EmptiedDirectory { file, name, cookie: 0 });
                        break;
                    }
                    unlinked => unlinked?,
                }
            }
            stack.extend(inner);
            if is_empty {
                let emptied = stack.pop();
                if let (Some(parent), Some(emptied)) = (stack.last(), emptied) {
                    fs.rmdir(EntryPlace { dir: parent.file, name: &emptied.name }, at)?;
                }
            }
        }
        Ok(())
    }

    /// Makes a file with `call`. What has its name goes before that.
    fn make(
        &mut self,
        name: &[u8],
        call: impl Fn(&dyn FileSystemMut, EntryPlace<'_>) -> VfsResult<FileId>,
    ) -> Result<FileId, Removal> {
        self.touch_here();
        let Some(level) = self.levels.last() else {
            return Err(Error::posix(Errno::NOENT, "the way").into());
        };
        let dir = level.file;
        if self.context.settings.needs_paths() {
            self.context.settings.forget(&self.real_path(name));
        }
        let place = EntryPlace { dir, name };
        let made = match call(self.context.fs, place) {
            Err(error) if error.errno() == Errno::EXIST => {
                self.remove_place(place)?;
                call(self.context.fs, place)?
            }
            made => made?,
        };
        self.woken.wake(dir, name);
        Ok(made)
    }

    /// Gives a file its last attributes.
    fn finish_file(&self, file: FileId, entry: &BuildEntry, size: Option<u64>) -> Result {
        if !entry.xattrs.is_empty() {
            self.set_xattrs(file, entry)?;
            // The property of an option counts before that of the source.
            let (_, name) = split_path(&entry.path);
            if self.context.settings.needs_paths() {
                self.context.settings.set_properties(file, &self.real_path(name))?;
            }
        }
        let (atime, mtime) = self.times_of(entry);
        let set = SetAttr { size, ..times(atime, mtime) };
        let set = self.context.fs.set_attr(file, &set, self.context.options.at);
        set.map_err(|error| at(error, &entry.path))?;
        self.context.counters.files.fetch_add(1, Ordering::Relaxed);
        self.context.progress.add_file();
        Ok(())
    }

    fn times_of(&self, entry: &BuildEntry) -> (Timestamp, Timestamp) {
        let clamp = |time: Timestamp| self.context.options.latest.map_or(time, |max| time.min(max));
        (clamp(entry.atime.unwrap_or(entry.mtime)), clamp(entry.mtime))
    }

    /// Sets extended attributes. Those that a volume has no place for are counted.
    fn set_xattrs(&self, file: FileId, entry: &BuildEntry) -> Result {
        for (name, value) in &entry.xattrs {
            let path = || entry.path.clone();
            if name == UNREADABLE_ACL {
                self.context.problems.unapplied(Unapplied::TextList, path, Errno::INVAL);
                continue;
            }
            let bytes = name.len() + value.len();
            if self.context.options.xattr_bytes_max.is_some_and(|max| bytes > max) {
                self.context.problems.unapplied(Unapplied::Xattr, path, Errno::TOOBIG);
                continue;
            }
            let (fs, now) = (self.context.fs, self.context.options.at);
            match fs.set_xattr(file, name, value, XattrMode::Set, now) {
                Ok(()) => {}
                Err(error) if is_refusal(&error) => {
                    self.context.problems.unapplied(Unapplied::Xattr, path, error.errno());
                }
                Err(error) => return Err(at(error, &entry.path)),
            }
        }
        Ok(())
    }

    /// Gives the new file at `path` the flags that the options say, before it has any data.
    fn set_flags(&self, file: FileId, path: &[u8]) -> Result {
        let Some(flags) = self.context.options.file_flags.get(path) else { return Ok(()) };
        self.add_flags(file, *flags).map_err(|error| at(error, path))
    }

    fn add_flags(&self, file: FileId, more: FileFlags) -> VfsResult<()> {
        let (fs, now) = (self.context.fs, self.context.options.at);
        let flags = fs.flags(file)?;
        if flags.contains(more) { Ok(()) } else { fs.set_flags(file, flags | more, now) }
    }

    /// Gives a directory that was made before the one that it is in got its flags those that it
    /// inherits. A subvolume inherits none.
    fn inherit_flags(&self, file: FileId) -> VfsResult<()> {
        let Some(parent) = self.levels.last().map(|level| level.file) else { return Ok(()) };
        if self.context.options.file_flags.is_empty() || parent.dev != file.dev {
            return Ok(());
        }
        let inherited = self.context.fs.flags(parent)? & FileFlags::NODATACOW;
        self.add_flags(file, inherited)
    }

    /// Makes a directory, or gives the one that is there these attributes.
    fn put_directory(&mut self, entry: &BuildEntry) -> Result {
        let path = &entry.path;
        let (parent, name) = split_path(path);
        let is_base = path.is_empty();
        self.enter(parent, true)?;
        let new = self.new_file(entry.permissions, entry.uid, entry.gid);
        let existing = if is_base { Some(self.here()?.file) } else { self.directory_at(name)? };
        let file = match existing {
            Some(file) => {
                self.redo_attributes(file, entry)?;
                if !is_base {
                    self.inherit_flags(file).map_err(|error| at(error, path))?;
                }
                file
            }
            None => self
                .make(name, |fs, place| fs.mkdir(place, &new))
                .map_err(|failure| failure.at(path))?,
        };
        self.set_flags(file, path)?;
        self.set_xattrs(file, entry)?;
        self.set_up(file, name, entry)?;
        let (atime, mtime) = self.times_of(entry);
        let level = BuilderLevel { name: name.to_vec(), file, atime, mtime, is_changed: true };
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
    fn redo_attributes(&self, file: FileId, entry: &BuildEntry) -> Result {
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
    fn put_regular(
        &mut self,
        entry: &BuildEntry,
        size: u64,
        contents: &mut dyn Contents,
    ) -> Result {
        let path = &entry.path;
        let new = self.new_file(entry.permissions, entry.uid, entry.gid);
        let (_, name) = split_path(path);
        let made = self.make(name, |fs, place| fs.create(place, &new));
        let file = made.map_err(|failure| failure.at(path))?;
        self.set_flags(file, path)?;
        self.set_up(file, name, entry)?;
        let BuildContext { fs, options: &BuildOptions { at: now, .. }, units, settings, .. } =
            self.context;
        let is_in_place = settings.is_in_place(file).map_err(|error| at(error, path))?;
        let units = units.filter(|_| !is_in_place);
        let into = FilledFile { fs, file, size, at: now };
        let mut end = 0;
        while let Some((offset, len)) = contents.read_piece(&mut self.buf)? {
            self.require_not_interrupted()?;
            let piece = self.buf.get(..len).unwrap_or_default();
            let written = match units {
                None => fs.write(file, offset, piece, now),
                Some(units) => units.borrow_mut().put(&into, offset, piece),
            };
            written.map_err(|error| at(error, path))?;
            end = offset.saturating_add(len as u64);
            self.context.counters.bytes.fetch_add(len as u64, Ordering::Relaxed);
            self.context.progress.add_bytes(len as u64);
        }
        if let Some(units) = units {
            units.borrow_mut().end_file(&into).map_err(|error| at(error, path))?;
        }
        self.finish_file(file, entry, (end < size).then_some(size))
    }

    /// Gives the file at `target` the name `path`, if there is a way to the file.
    fn link(&mut self, path: &[u8], target: &[u8]) -> Result<Way> {
        let (target_parent, target_name) = split_path(target);
        if let Way::Lacks(dir, name) = self.enter(target_parent, false)? {
            return Ok(Way::Lacks(dir, name));
        }
        let (fs, dir) = (self.context.fs, self.here()?.file);
        let file = match fs.lookup(dir, target_name) {
            Err(error) if error.errno() == Errno::NOENT => {
                return Ok(Way::Lacks(dir, target_name.to_vec()));
            }
            found => found.map_err(|error| at(error, target))?,
        };
        let (parent, name) = split_path(path);
        self.enter(parent, true)?;
        self.link_to(file, name).map_err(|failure| failure.at(path))?;
        Ok(Way::Found)
    }

    /// Gives `file` one more name in the directory that the way leads to.
    fn link_to(&mut self, file: FileId, name: &[u8]) -> Result<(), Removal> {
        let (fs, now) = (self.context.fs, self.context.options.at);
        let Some(level) = self.levels.last() else {
            return Err(Error::posix(Errno::NOENT, "the way").into());
        };
        // GNU tar writes a file that it was told to archive twice as a link to itself.
        let is_itself = match fs.lookup(level.file, name) {
            Ok(there) => there == file,
            Err(error) if error.errno() == Errno::NOENT => false,
            Err(error) => return Err(error.into()),
        };
        if is_itself {
            return Ok(());
        }
        if fs.attr(file)?.file_type == FileType::Directory {
            return Err(Error::posix(Errno::INVAL, "it is a hard link to a directory").into());
        }
        self.make(name, |fs, place| fs.link(file, place, now).map(|()| file))?;
        self.context.counters.files.fetch_add(1, Ordering::Relaxed);
        self.context.progress.add_file();
        Ok(())
    }

    /// Keeps a hard link until its file comes.
    fn wait_for(&mut self, path: Vec<u8>, target: Vec<u8>) -> Result {
        self.waiting_bytes += waiting_bytes(&path, &target);
        if self.waiting_bytes > WAITING_BYTES_MAX {
            let what = "too many hard links come before the files that they lead to".to_owned();
            return Err(SourceProblem::Refused(what).at(&path));
        }
        self.waiting.insert(path, target);
        Ok(())
    }

    /// Forgets the hard links that wait for the name `path`, and unless a directory comes there,
    /// for names below it: the later of two entries with one name counts.
    fn forget_waiting(&mut self, path: &[u8], is_directory: bool) {
        if self.waiting.is_empty() {
            return;
        }
        if let Some(target) = self.waiting.remove(path) {
            self.waiting_bytes -= waiting_bytes(path, &target);
        }
        let below = [path, b"/"].concat();
        while !is_directory
            && let Some((inner, _)) = self.waiting.range(below.clone()..).next()
            && inner.starts_with(&below)
        {
            let inner = inner.clone();
            if let Some(target) = self.waiting.remove(&inner) {
                self.waiting_bytes -= waiting_bytes(&inner, &target);
            }
        }
    }

    /// Gives the name of `entry` to the file that another name of its inode became. Whether it did.
    fn link_to_known(&mut self, entry: &BuildEntry, inode: &Attr) -> Result<bool> {
        let failed = |error: std::io::Error| {
            TransferFailure::Host("the table of hard links".to_owned(), error)
        };
        let (_, name) = split_path(&entry.path);
        // Each subvolume has files of its own. The name of the one in this subvolume is searched,
        // because the newest may be in another.
        let (mut fitting, mut is_elsewhere) = (None, false);
        let dev = self.here()?.file.dev;
        for known in self.links.names(inode).map_err(failed)? {
            let known = known.map_err(failed)?;
            if known.parent.dev == dev {
                fitting = Some(known);
                break;
            }
            is_elsewhere = true;
        }
        let mut errno = is_elsewhere.then_some(Errno::XDEV);
        if let Some(known) = fitting {
            let fs = self.context.fs;
            let file = fs.lookup(known.parent, &known.name);
            let file = file.map_err(|error| at(error, &entry.path))?;
            match self.link_to(file, name) {
                Ok(()) => return Ok(true),
                // More names than the volume gives a file.
                Err(Removal::Volume(error)) if error.errno() == Errno::MLINK => {
                    errno = Some(Errno::MLINK);
                }
                Err(failure) => return Err(failure.at(&entry.path)),
            }
        }
        if let Some(errno) = errno {
            // It becomes a file of its own, to which later names are given.
            let path = || entry.path.clone();
            self.context.problems.unapplied(Unapplied::HardLink, path, errno);
        }
        let known = LinkName { parent: self.here()?.file, name: SafeName::new(name)? };
        self.links.add(inode, &known).map_err(failed)?;
        Ok(false)
    }
}

impl EntrySink for Builder<'_> {
    fn put(&mut self, mut entry: BuildEntry, contents: &mut dyn Contents) -> Result {
        self.require_not_interrupted()?;
        let options = self.context.options;
        map_owners(&mut entry, &options.users, &options.groups);
        if let Some((uid, gid)) = options.owner {
            (entry.uid, entry.gid) = (uid, gid);
        }
        self.forget_waiting(&entry.path, matches!(entry.kind, EntryKind::Directory));
        if let EntryKind::Directory = entry.kind {
            return self.put_directory(&entry);
        }
        if entry.path.is_empty() {
            let what = "it is a single file, and no directory to build from".to_owned();
            return Err(SourceProblem::Refused(what).at(b"."));
        }
        if let EntryKind::HardLink(target) = &entry.kind {
            if let Way::Lacks(..) = self.link(&entry.path, target)? {
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
        let file = made.map_err(|failure| failure.at(&entry.path))?;
        self.set_up(file, name, &entry)?;
        self.finish_file(file, &entry, None)
    }
}

/// Why a call failed that may remove what is in its way.
enum Removal {
    Volume(Error),
    Interrupted,
}

impl From<Error> for Removal {
    fn from(error: Error) -> Self {
        Self::Volume(error)
    }
}

impl Removal {
    /// The failure that this is for the file at `path`.
    fn at(self, path: &[u8]) -> TransferFailure {
        match self {
            Self::Volume(error) => at(error, path),
            Self::Interrupted => TransferFailure::Interrupted,
        }
    }
}

/// The memory that a waiting hard link takes, about.
fn waiting_bytes(path: &[u8], target: &[u8]) -> usize {
    path.len() + target.len() + WAITING_EACH_BYTES
}

fn times(atime: Timestamp, mtime: Timestamp) -> SetAttr {
    SetAttr {
        atime: Some(SetTime::To(atime)),
        mtime: Some(SetTime::To(mtime)),
        ..SetAttr::default()
    }
}

/// An error of the volume about the file at `path`.
pub(super) fn at(error: Error, path: &[u8]) -> TransferFailure {
    at_path(error, &[b"/", path].concat()).into()
}
