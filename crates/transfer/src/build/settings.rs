//! Flags and properties of files that are built.
//!
//! They are set when a file is made: new files inherit them from their directory, and they decide
//! how data is stored. Two flags forbid what a build does later, so these are set when all else is
//! done: immutable files and those that can only be appended to.
//!
//! Paths are those that files have in the end, from the root of the volume: no path here leads
//! through a symbolic link.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};

use offshoot_vfs::path::{LastLink, resolve};
use offshoot_vfs::{
    Errno, Error, FileFlags, FileId, FileSystemMut, Result as VfsResult, Timestamp, XattrMode,
};

use super::entry::{SourceProblem, normal_path};
use crate::{Result, TransferFailure};

/// How much memory the paths may take whose flags are set in the end.
const LATE_BYTES_MAX: usize = 64 << 20;

/// What such a path takes beside its bytes.
const LATE_EACH_BYTES: usize = 96;

/// The flags that are set in the end.
const LATE: FileFlags = FileFlags::IMMUTABLE.union(FileFlags::APPEND);

/// Flags that say whether data is compressed. No file has them beside the one that says that it is
/// written in place.
const COMPRESSING: FileFlags = FileFlags::COMPRESS.union(FileFlags::NOCOMPRESS);

/// What a file is given before its contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileProperty {
    /// An extended attribute, name and value.
    Xattr(Vec<u8>, Vec<u8>),
    /// Flags, beside those that it has.
    Flags(FileFlags),
}

/// Properties by the paths of their files, as [`super::BuildOptions`] has them.
pub(super) type PropertiesByPath = BTreeMap<Vec<u8>, FileProperty>;

/// The path of a property as it is compared: without `.` and empty names.
pub(super) fn property_path(path: &[u8]) -> Result<Vec<u8>> {
    normal_path(path).map_err(|problem| problem.at(path))
}

/// Flags and properties while a volume is built.
pub(super) struct FileSettings<'a> {
    fs: &'a dyn FileSystemMut,
    at: Timestamp,
    properties: &'a PropertiesByPath,
    /// The paths of properties that were set.
    set: RefCell<BTreeSet<&'a [u8]>>,
    late: RefCell<BTreeMap<Vec<u8>, FileFlags>>,
    late_bytes: Cell<usize>,
    /// Some file is written in place.
    has_in_place: Cell<bool>,
}

impl<'a> FileSettings<'a> {
    /// Gives the files that are there already their properties.
    pub(super) fn begin(
        fs: &'a dyn FileSystemMut,
        properties: &'a PropertiesByPath,
        at: Timestamp,
    ) -> Result<Self> {
        let settings = Self {
            fs,
            at,
            properties,
            set: RefCell::default(),
            late: RefCell::default(),
            late_bytes: Cell::new(0),
            has_in_place: Cell::new(false),
        };
        for path in properties.keys() {
            let names = path.split(|&byte| byte == b'/').filter(|name| !name.is_empty());
            let found = names.into_iter().try_fold(fs.root(), |dir, name| fs.lookup(dir, name));
            match found {
                Ok(file) => settings.set_properties(file, path)?,
                Err(error) if matches!(error.errno(), Errno::NOENT | Errno::NOTDIR) => {}
                Err(error) => return Err(failed(path, error)),
            }
        }
        Ok(settings)
    }

    /// Whether a path matters to anything here.
    pub(super) fn needs_paths(&self) -> bool {
        !self.properties.is_empty() || !self.late.borrow().is_empty()
    }

    /// Sets the properties of the file at `path`, which was just made, or got new attributes.
    pub(super) fn set_properties(&self, file: FileId, path: &[u8]) -> Result {
        let Some((path, property)) = self.properties.get_key_value(path) else { return Ok(()) };
        let done = match property {
            FileProperty::Xattr(name, value) => self
                .take_flags(file, FileFlags::NODATACOW)
                .and_then(|()| self.fs.set_xattr(file, name, value, XattrMode::Set, self.at)),
            FileProperty::Flags(flags) => self.add_flags(file, *flags),
        };
        done.map_err(|error| failed(path, error))?;
        self.set.borrow_mut().insert(path);
        Ok(())
    }

    /// Gives a directory that was made before the one that it is in got its property the flag that
    /// it inherits. A subvolume inherits none.
    pub(super) fn inherit(&self, file: FileId, parent: FileId) -> VfsResult<()> {
        if self.properties.is_empty() || parent.dev != file.dev {
            return Ok(());
        }
        let inherited = self.fs.flags(parent)? & FileFlags::NODATACOW;
        if inherited.is_empty() { Ok(()) } else { self.add_flags(file, inherited) }
    }

    /// Sets the flags that a source gives the file at `path`. Those that forbid changes wait.
    pub(super) fn set_flags(
        &self,
        file: FileId,
        path: &[u8],
        flags: FileFlags,
    ) -> Result<VfsResult<()>> {
        let late = flags & LATE;
        if !late.is_empty() {
            let bytes = self.late_bytes.get() + path.len() + LATE_EACH_BYTES;
            if bytes > LATE_BYTES_MAX {
                let what = "too many files that cannot be changed".to_owned();
                return Err(SourceProblem::Refused(what).at(path));
            }
            self.late_bytes.set(bytes);
            self.late.borrow_mut().insert(path.to_vec(), late);
        }
        let now = flags - LATE;
        Ok(if now.is_empty() { Ok(()) } else { self.add_flags(file, now) })
    }

    /// Takes away what a file has from its directory and what excludes its property.
    fn take_flags(&self, file: FileId, flags: FileFlags) -> VfsResult<()> {
        let old = self.fs.flags(file)?;
        if old.intersects(flags) { self.fs.set_flags(file, old - flags, self.at) } else { Ok(()) }
    }

    fn add_flags(&self, file: FileId, flags: FileFlags) -> VfsResult<()> {
        if flags.contains(FileFlags::NODATACOW) {
            self.has_in_place.set(true);
        }
        let old = self.fs.flags(file)?;
        let without =
            if flags.contains(FileFlags::NODATACOW) { COMPRESSING } else { FileFlags::empty() };
        let new = (old - without) | flags;
        if new == old { Ok(()) } else { self.fs.set_flags(file, new, self.at) }
    }

    /// Whether the file is written in place, and others are not: its data has no checksums, and is
    /// not shared with theirs.
    pub(super) fn is_in_place(&self, file: FileId) -> VfsResult<bool> {
        Ok(self.has_in_place.get() && self.fs.flags(file)?.contains(FileFlags::NODATACOW))
    }

    /// Something else comes at `path`.
    pub(super) fn forget(&self, path: &[u8]) {
        if self.late.borrow_mut().remove(path).is_some() {
            let bytes = path.len() + LATE_EACH_BYTES;
            self.late_bytes.set(self.late_bytes.get().saturating_sub(bytes));
        }
    }

    /// Sets the flags that waited. Fails when a property has no file.
    pub(super) fn finish(&self) -> Result {
        let set = self.set.borrow();
        if let Some(path) = self.properties.keys().find(|path| !set.contains(&path[..])) {
            let what = "it has a property, and nothing was made at this path: a path that leads \
                        through a symbolic link is not followed, and further names of a file have \
                        what its first one has";
            return Err(SourceProblem::Refused(what.to_owned()).at(&shown(path)));
        }
        for (path, flags) in &*self.late.borrow() {
            let done = resolve(self.fs, path, LastLink::Keep)
                .and_then(|file| self.add_flags(file, *flags));
            match done {
                // A whiteout removed it, or a directory on the way.
                Err(error) if matches!(error.errno(), Errno::NOENT | Errno::NOTDIR) => {}
                done => done.map_err(|error| failed(path, error))?,
            }
        }
        Ok(())
    }
}

fn shown(path: &[u8]) -> Vec<u8> {
    [b"/", path].concat()
}

/// An error of the volume about the file at `path`.
fn failed(path: &[u8], error: Error) -> TransferFailure {
    offshoot_vfs::path::at_path(error, &shown(path)).into()
}
