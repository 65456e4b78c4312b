//! Writes the files of sources into a volume.
//!
//! One thread does it, in the order in which the source gives the files. So the same source makes
//! the same calls, and from these a volume that commits at no times of its own makes the same
//! bytes.
//!
//! What stands at the path of a file already is replaced, but for a directory by a directory: that
//! gets the new attributes, and keeps what is in it.
//!
//! | module | what it does |
//! |---|---|
//! | [`way`] | opens the directories on the way to a file, and gives them their times back |
//! | [`links`] | makes hard links, also to files that come later |
//! | [`replace`] | removes files |

mod links;
mod replace;
mod way;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use offshoot_vfs::path::at_path;
use offshoot_vfs::{
    EntryPlace, Errno, Error, FileId, FileSystemMut, NewFile, Result as VfsResult, SetAttr,
    SetTime, Timestamp, XattrMode,
};

use super::dedupe::{FilledFile, StoredUnits};
use super::entry::{
    BuildEntry, Contents, EntryKind, EntrySink, PIECE_BYTES, SourceProblem, split_path,
};
use super::owners::map_owners;
use super::settings::FileSettings;
use super::{BuildOptions, tar::UNREADABLE_ACL};
use crate::copy::is_refusal;
use crate::extract::{LinkTable, Problems, TransferCounters, Unapplied};
use crate::xattrs::held_xattrs;
use crate::{Result, TransferFailure, TransferProgress};
use links::WokenLinks;
use replace::Removal;
use way::{BuilderLevel, Way};

/// The permissions of a directory that no source describes.
pub(super) const MISSING_PERMISSIONS: u32 = 0o755;

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

    fn require_not_interrupted(&self) -> Result {
        if self.context.problems.is_stopped() { Err(TransferFailure::Interrupted) } else { Ok(()) }
    }

    fn new_file(&self, permissions: u32, uid: u32, gid: u32) -> NewFile {
        NewFile { permissions, uid, gid, umask: None, at: self.context.options.at }
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
                    let parent = self.here()?.file;
                    let inherited = self.context.settings.inherit(file, parent);
                    inherited.map_err(|error| at(error, path))?;
                }
                file
            }
            None => self
                .make(name, |fs, place| fs.mkdir(place, &new))
                .map_err(|failure| failure.at(path))?,
        };
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
