//! Copying files and trees into a volume: from the host, from another volume, from elsewhere in the
//! same one. Out of a volume copies [`Onto`](crate::extract::Onto).
//!
//! | part | what it does |
//! |---|---|
//! | [`preserve`] | which attributes a copy has |
//! | [`manner`] | what is left out, what is replaced, what is reported |
//! | [`original`] | a file that is copied, wherever it is |
//! | [`target`] | one file, made in the volume and filled |
//! | [`directory`] | directories of the volume that are being filled |
//! | [`tree`] | whole trees, on all cores |
//! | [`host`] | going through a tree of the host |
//!
//! One thread goes through the source and makes the directories; the other files are made and
//! filled by workers, one for each core, which read the source and write to the volume at the same
//! time. Names and attributes wait in a bounded queue, and a worker holds one piece of data, so
//! memory does not grow with the source. A directory gets its times when the last file in it is
//! done.
//!
//! What cannot be copied is reported with its path, and no new file is left with less than its
//! data. A file that is written into stays: as it was when nothing of the source can be read, and
//! with what was written into it by then otherwise.

mod directory;
mod host;
mod manner;
mod original;
mod preserve;
mod target;
mod tree;

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use offshoot_vfs::path::{climb, prefix};
use offshoot_vfs::{
    Attr, EntryPlace, Errno, Error, FileId, FileSystemMut, FileType, HeldFile, Structure, Timestamp,
};

use crate::extract::{LinkTable, Problems, TransferCounters};
use crate::host::{HostId, Process};
use crate::{Hint, TransferProgress};
pub use manner::{CopyReporter, Existing, Manner};
pub(crate) use original::{HostFile, Original, attr_of, doing};
use original::{StreamOriginal, VolumeFile};
pub use preserve::{Preserve, PreservedAttribute};
pub(crate) use target::is_refusal;

/// How long a path may be that is made only to be shown, or to follow a link in its place.
const SHOWN_PATH_MAX: usize = 64 << 10;

/// When a copy shares its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReflinkMode {
    /// Where both are in one volume, and can.
    Auto,
    /// Nothing is copied that cannot share.
    Always,
    /// Everything is written anew.
    Never,
}

/// A name that is to be given.
pub struct NewName {
    /// The directory.
    pub dir: FileId,
    /// The name in it.
    pub name: Vec<u8>,
    /// The file that has the name now.
    pub existing: Option<FileId>,
}

/// A copy into a volume, of one source.
pub struct IntoVolume<'a> {
    /// The volume that is copied into.
    pub(crate) fs: &'a dyn FileSystemMut,
    /// When everything is made.
    pub(crate) at: Timestamp,
    /// Which attributes are kept.
    pub(crate) preserve: &'a Preserve,
    /// Everything that goes wrong.
    pub(crate) problems: &'a Problems<'a>,
    /// How far it is.
    pub(crate) progress: &'a dyn TransferProgress,
    /// Totals.
    pub(crate) counters: &'a TransferCounters,
    /// The devices of the volumes. They are neither replaced nor copied.
    pub(crate) devices: &'a [HostId],
    /// Whether data is shared inside the volume.
    pub(crate) reflink: ReflinkMode,
    /// What is left out, replaced and reported.
    pub(crate) manner: &'a Manner,
    /// Names that inodes of the source were given that have several.
    links: &'a Mutex<LinkTable>,
}

/// What copies of several sources share, when their problems and totals are one.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct SharedCopy<'a> {
    /// Which attributes are kept.
    pub preserve: &'a Preserve,
    /// Everything that goes wrong.
    pub problems: &'a Problems<'a>,
    /// How far it is.
    pub progress: &'a dyn TransferProgress,
    /// Totals.
    pub counters: &'a TransferCounters,
    /// The devices of the volumes. They are neither replaced nor copied.
    pub devices: &'a [HostId],
    /// Whether data is shared inside the volume.
    pub reflink: ReflinkMode,
    /// What is left out, replaced and reported.
    pub manner: &'a Manner,
}

impl<'a> SharedCopy<'a> {
    /// Copies that keep what `preserve` says and treat files as `manner` says. No device is spared,
    /// and data is shared where it can be.
    pub fn new(
        preserve: &'a Preserve,
        manner: &'a Manner,
        problems: &'a Problems<'a>,
        progress: &'a dyn TransferProgress,
        counters: &'a TransferCounters,
    ) -> Self {
        let (devices, reflink): (&[_], _) = (&[], ReflinkMode::Auto);
        Self { preserve, problems, progress, counters, devices, reflink, manner }
    }
}

/// Where one source goes.
pub struct Goal {
    /// What it becomes.
    pub becomes: Becomes,
    /// The place, as the caller writes it.
    pub shown: Vec<u8>,
    /// Another source became the file that is there, since the caller began.
    pub is_just_made: bool,
}

/// What one source becomes.
pub enum Becomes {
    /// It gets this name.
    Name(NewName),
    /// What is in it goes into this directory.
    Contents(FileId),
}

/// A copy of one source: what there is below it is named by its path, and its place below the top.
struct CopySource<'a> {
    into: &'a IntoVolume<'a>,
    /// Its path, as the caller gave it.
    path: &'a [u8],
    /// Where its top goes, as the caller writes it.
    shown: &'a [u8],
    /// What its top became in the volume.
    top: FileId,
}

/// How messages name one copy; found only where that is needed.
struct CopyNames<'x> {
    from: &'x dyn Fn() -> Vec<u8>,
    to: &'x dyn Fn() -> Vec<u8>,
}

/// Why a file could not be copied.
enum CopyTrouble {
    /// It cannot be read.
    Source(Error),
    /// The volume cannot take it.
    Target(Error),
    /// Another name of the same inode could not be copied before.
    OtherName,
    /// The whole copy ends, for a reason that it has reported.
    Stopped,
    /// What has the name stays, as was asked for.
    Kept,
}

impl<'a> IntoVolume<'a> {
    /// A copy into `fs` with everything made at the moment `at`. Sources in one filesystem share
    /// the table of links.
    pub fn new(
        fs: &'a dyn FileSystemMut,
        at: Timestamp,
        shared: SharedCopy<'a>,
        links: &'a Mutex<LinkTable>,
    ) -> Self {
        let SharedCopy { preserve, problems, progress, counters, devices, reflink, manner } =
            shared;
        Self { fs, at, preserve, problems, progress, counters, devices, reflink, manner, links }
    }

    /// Copies the file or directory of the host at `path`.
    pub fn host(
        &self,
        path: &Path,
        goal: &Goal,
        is_recursive: bool,
        is_link_kept: bool,
        process: Process,
    ) {
        let shown = path.as_os_str().as_bytes();
        let result =
            HostFile::named(path, !is_link_kept).map_err(CopyTrouble::Source).and_then(|file| {
                let attr = *file.attr();
                if attr.file_type != FileType::Directory {
                    return self.one(shown, goal, &file);
                }
                self.require_recursive(is_recursive)?;
                self.below(shown, goal, &attr, |source, id, is_new| {
                    host::copy(source, file, id, is_new, process)
                })
            });
        self.report_if(shown, result);
    }

    /// Copies a file or directory of a volume, the same one or another.
    pub fn volume(
        &self,
        fs: &dyn FileSystemMut,
        file: FileId,
        path: &[u8],
        goal: &Goal,
        is_recursive: bool,
        is_same: bool,
    ) {
        let copy = || {
            let attr = fs.attr(file).map_err(CopyTrouble::Source)?;
            if attr.file_type != FileType::Directory {
                return self.one(path, goal, &VolumeFile { fs, attr, is_same });
            }
            self.require_recursive(is_recursive)?;
            if is_same {
                self.require_elsewhere(&attr, goal)?;
            }
            self.below(path, goal, &attr, |source, id, is_new| {
                let top = VolumeFile { fs, attr, is_same };
                tree::copy_volume(source, &top, id, is_new)
            })
        };
        self.report_if(path, copy());
    }

    /// Copies what `input` gives into a file with the attributes `attr`. Messages call it `name`.
    pub fn stream(&self, input: impl Read, name: &OsStr, attr: Attr, goal: &Goal) {
        let result = self.one(name.as_bytes(), goal, &StreamOriginal::new(input, attr));
        self.report_if(name.as_bytes(), result);
    }

    fn report_if(&self, path: &[u8], result: Result<(), CopyTrouble>) {
        if let Err(trouble) = result {
            self.report(path, &trouble);
        }
    }

    /// Copies a file that is no directory.
    fn one(&self, path: &[u8], goal: &Goal, original: &dyn Original) -> Result<(), CopyTrouble> {
        let Becomes::Name(new) = &goal.becomes else {
            return Err(CopyTrouble::Source(Error::posix(Errno::NOTDIR, "what it is copied to")));
        };
        let place = EntryPlace { dir: new.dir, name: &new.name };
        if goal.is_just_made {
            target::require_not_just_made(self, place, original)?;
        }
        let names = CopyNames { from: &|| path.to_vec(), to: &|| goal.shown.clone() };
        target::put(self, &names, place, original, &mut Vec::new())?;
        self.manner.tell(names.from, names.to);
        self.count_file();
        Ok(())
    }

    /// Copies a directory: makes it or takes the one that is there, and fills it.
    fn below(
        &self,
        path: &[u8],
        goal: &Goal,
        attr: &Attr,
        fill: impl for<'s> FnOnce(&'s CopySource<'s>, HeldFile<'s>, bool) -> Result<(), CopyTrouble>,
    ) -> Result<(), CopyTrouble> {
        let (top, is_new) = match &goal.becomes {
            Becomes::Contents(dir) => {
                (HeldFile::new(self.fs, *dir).map_err(CopyTrouble::Target)?, false)
            }
            Becomes::Name(new) => target::make_directory(self, new.dir, &new.name, attr)?,
        };
        if is_new {
            self.manner.tell(|| path.to_vec(), || goal.shown.clone());
        }
        self.counters.directories.fetch_add(1, Ordering::Relaxed);
        let [path, shown] = [path, &goal.shown].map(prefix);
        fill(&CopySource { into: self, path, shown, top: top.file() }, top, is_new)
    }

    /// Refuses to copy a directory when the caller asked only for files.
    fn require_recursive(&self, is_recursive: bool) -> Result<(), CopyTrouble> {
        if is_recursive {
            return Ok(());
        }
        let what = self.problems.words(Hint::NotRecursive);
        Err(CopyTrouble::Source(Error::posix(Errno::ISDIR, what)))
    }

    /// Refuses to copy a directory onto itself and into itself.
    fn require_elsewhere(&self, attr: &Attr, goal: &Goal) -> Result<(), CopyTrouble> {
        /// More than any path has levels.
        const LEVELS_MAX: usize = 1 << 16;
        let (mut at, existing) = match &goal.becomes {
            Becomes::Name(new) => (new.dir, new.existing),
            Becomes::Contents(dir) => (*dir, Some(*dir)),
        };
        if existing == Some(attr.file) {
            return Err(if self.manner.keeps_all() { CopyTrouble::Kept } else { same_file() });
        }
        for _ in 0..LEVELS_MAX {
            if at == attr.file {
                let what = "it would be copied into itself";
                return Err(CopyTrouble::Source(Error::posix(Errno::INVAL, what)));
            }
            match self.fs.parent(at).map_err(CopyTrouble::Target)? {
                Some(parent) => at = parent.dir,
                None => return Ok(()),
            }
        }
        Err(CopyTrouble::Target(Error::corrupt(
            Structure::InodeRef,
            "the way up from a directory does not end",
        )))
    }

    /// The path of a place in the volume, for messages.
    fn path_of(&self, place: EntryPlace<'_>) -> Vec<u8> {
        shown(b"", climb(self.fs, self.fs.root(), place.dir, SHOWN_PATH_MAX), place.name)
    }

    fn count_file(&self) {
        self.counters.files.fetch_add(1, Ordering::Relaxed);
        self.progress.add_file();
    }

    fn count_bytes(&self, bytes: usize) {
        self.counters.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.progress.add_bytes(bytes as u64);
    }

    /// Reports that what is at `path` was not copied.
    fn report(&self, path: &[u8], trouble: &CopyTrouble) {
        match trouble {
            CopyTrouble::Stopped | CopyTrouble::Kept => {}
            CopyTrouble::Source(error) => self.problems.unreadable(path, error),
            CopyTrouble::OtherName => self.problems.unreadable(
                path,
                &Error::posix(Errno::IO, "another name of it could not be copied"),
            ),
            CopyTrouble::Target(error) => {
                if self.problems.is_stopped() {
                    return;
                }
                match error {
                    Error::Posix { errno, .. } => {
                        self.problems.unreadable(path, &Error::posix(*errno, "storing it"));
                    }
                    other => self.problems.unreadable(path, other),
                }
                // These come back for every file that follows.
                let errno = error.errno();
                if matches!(errno, Errno::NOSPC | Errno::IO | Errno::ROFS) {
                    self.problems.stop();
                }
            }
        }
    }
}

/// Refuses to copy a file onto one of its own names.
fn same_file() -> CopyTrouble {
    CopyTrouble::Source(Error::posix(Errno::INVAL, "it and the destination are the same file"))
}

impl CopySource<'_> {
    /// Tells that `name` in the directory that became `parent` was copied.
    fn tell(&self, parent: FileId, name: &[u8]) {
        let to = || self.shown_of(parent, name);
        self.into.manner.tell(|| self.path_of(parent, name), to);
    }

    /// Whether `name` in the directory that became `parent` is left out.
    fn leaves_out(&self, parent: FileId, name: &[u8]) -> bool {
        let path = || shown(b"", climb(self.into.fs, self.top, parent, SHOWN_PATH_MAX), name);
        self.into.manner.leaves_out(name, || path().split_off(1))
    }

    /// Reports that `name` in the directory that became `parent` was not copied.
    fn report(&self, parent: FileId, name: &[u8], trouble: &CopyTrouble) {
        self.into.report(&self.path_of(parent, name), trouble);
    }

    /// The path of `name` in the directory that became `parent`, found in the copy.
    fn path_of(&self, parent: FileId, name: &[u8]) -> Vec<u8> {
        shown(self.path, climb(self.into.fs, self.top, parent, SHOWN_PATH_MAX), name)
    }

    /// The place that it becomes, as the caller writes it.
    fn shown_of(&self, parent: FileId, name: &[u8]) -> Vec<u8> {
        shown(self.shown, climb(self.into.fs, self.top, parent, SHOWN_PATH_MAX), name)
    }
}

/// The path of `name` in the directory to which `way` leads from `top`. `.` is the directory
/// itself.
fn shown(top: &[u8], way: Result<Option<Vec<u8>>, Error>, name: &[u8]) -> Vec<u8> {
    let way = way.ok().flatten().unwrap_or_else(|| b"...".to_vec());
    let parts = [&way[..], name].into_iter().filter(|part| !part.is_empty() && *part != b".");
    parts.fold(top.to_vec(), |path, part| [&path[..], b"/", part].concat())
}
