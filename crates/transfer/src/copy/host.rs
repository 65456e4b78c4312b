//! Going through a tree of the host.
//!
//! Depth first, with the directories on the way open: nothing is reached by a path that could
//! be changed, or become too long, meanwhile. Their number bounds the depth.

use offshoot_vfs::{Code, Error, FileType, HeldFile, SafeName};
use rustix::fs::{self, AtFlags, Dir, DirEntry};

use super::directory::CopyDirectoryRef;
use super::original::{HostFile, Original, doing};
use super::tree::{Batches, CopyJob, SeenFile, batches_in_flight, enter, with_workers};
use super::{CopySource, CopyTrouble, target};
use crate::extract::Limits;
use crate::host::Process;

/// A directory that the walk is in.
struct HostLevel<'a> {
    directory: CopyDirectoryRef<'a>,
    entries: HostEntries,
}

/// What is in a directory.
enum HostEntries {
    /// In the order of the host.
    Listed(Dir),
    /// In the order of their names, and then what ended the list.
    Sorted(std::vec::IntoIter<rustix::io::Result<DirEntry>>),
}

impl HostEntries {
    /// The entries of `dir` in the order of their names, which are all in memory.
    fn sorted(dir: Dir) -> Self {
        let (mut entries, mut failure) = (Vec::new(), None);
        for entry in dir {
            match entry {
                Ok(entry) => entries.push(entry),
                Err(errno) => {
                    failure = Some(errno);
                    break;
                }
            }
        }
        entries.sort_unstable_by(|one, other| one.file_name().cmp(other.file_name()));
        let all: Vec<_> = entries.into_iter().map(Ok).chain(failure.map(Err)).collect();
        Self::Sorted(all.into_iter())
    }

    fn next(&mut self) -> Option<rustix::io::Result<DirEntry>> {
        match self {
            Self::Listed(dir) => dir.next(),
            Self::Sorted(entries) => entries.next(),
        }
    }
}

impl<'a> HostLevel<'a> {
    /// The directory `held`, as a copy of `original`.
    fn open(
        source: &'a CopySource<'a>,
        original: HostFile<'_>,
        held: HeldFile<'a>,
        is_new: bool,
    ) -> Result<Self, Error> {
        let attr = *original.attr();
        let fd = original.into_directory()?;
        let dir = Dir::read_from(&fd).map_err(doing("reading the directory"))?;
        let is_sorted = source.into.manner.is_reproducible;
        let entries = if is_sorted { HostEntries::sorted(dir) } else { HostEntries::Listed(dir) };
        let directory = CopyDirectoryRef::new(source, held, attr, is_new, Some(fd));
        Ok(Self { directory, entries })
    }
}

/// How far a walk may go with the descriptors that there are.
fn limits(process: Process) -> Limits {
    let limits = Limits::share(process.descriptors, batches_in_flight());
    // A level has two open: the directory, and its entries.
    Limits { depth_max: (limits.depth_max / 2).max(1), ..limits }
}

/// Copies what is below the directory `top`, which has become `held`.
pub(super) fn copy<'a>(
    source: &'a CopySource<'a>,
    top: HostFile<'_>,
    held: HeldFile<'a>,
    is_new: bool,
    process: Process,
) -> Result<(), CopyTrouble> {
    let limits = limits(process);
    target::dress_directory(source.into, held.file(), &top)?;
    let top = HostLevel::open(source, top, held, is_new).map_err(CopyTrouble::Source)?;
    with_workers(source.into, limits.batch_files, |batches| {
        HostWalk { source, batches, levels: vec![top], depth_max: limits.depth_max }.run();
    });
    Ok(())
}

struct HostWalk<'w, 'a> {
    source: &'a CopySource<'a>,
    batches: &'w mut Batches<'a>,
    levels: Vec<HostLevel<'a>>,
    depth_max: usize,
}

impl<'a> HostWalk<'_, 'a> {
    fn run(&mut self) {
        while let Some(level) = self.levels.last_mut() {
            if self.source.into.problems.is_stopped() {
                return;
            }
            match level.entries.next() {
                None => {
                    self.levels.pop();
                }
                Some(Ok(entry)) if matches!(entry.file_name().to_bytes(), b"." | b"..") => {}
                Some(Ok(entry)) => {
                    let directory = level.directory.clone();
                    let name = entry.file_name().to_bytes();
                    let seen = self.see(&directory, &entry);
                    if let Err(error) = seen {
                        self.source.report(directory.file(), name, &CopyTrouble::Source(error));
                    }
                }
                Some(Err(errno)) => {
                    let trouble = CopyTrouble::Source(doing("reading the directory")(errno));
                    self.source.report(level.directory.file(), b".", &trouble);
                    self.levels.pop();
                }
            }
        }
    }

    fn see(&mut self, directory: &CopyDirectoryRef<'a>, entry: &DirEntry) -> Result<(), Error> {
        let name = SafeName::new(entry.file_name().to_bytes())?;
        if self.source.leaves_out(directory.file(), &name) {
            return Ok(());
        }
        let file_type = type_of(directory, entry)?;
        if file_type != FileType::Directory {
            let seen = SeenFile::Host(file_type);
            self.batches.push(CopyJob { directory: directory.clone(), name, seen, _held: None });
            return Ok(());
        }
        if self.levels.len() >= self.depth_max {
            let what = format!("a directory more than {} levels deep", self.depth_max);
            return Err(Error::unsupported(Code::TooDeep, what));
        }
        let original = HostFile::found(directory.host_fd(), &name, file_type)?;
        let is_other = original.attr().file.dev != directory.device();
        if let Some((held, is_new)) = enter(directory, &name, &original) {
            if is_other && self.source.into.manner.is_one_filesystem {
                // Its place is there, and nothing in it.
                drop(CopyDirectoryRef::new(self.source, held, *original.attr(), is_new, None));
                return Ok(());
            }
            self.levels.push(HostLevel::open(self.source, original, held, is_new)?);
        }
        Ok(())
    }
}

/// The type of an entry; some filesystems do not tell it in the directory.
fn type_of(directory: &CopyDirectoryRef<'_>, entry: &DirEntry) -> Result<FileType, Error> {
    let mode = match entry.file_type() {
        fs::FileType::Unknown => {
            let flags = AtFlags::SYMLINK_NOFOLLOW;
            let stat = fs::statat(directory.host_fd(), entry.file_name(), flags);
            stat.map_err(doing("looking at it"))?.st_mode
        }
        known => known.as_raw_mode(),
    };
    FileType::from_mode(mode).ok_or_else(|| {
        Error::unsupported(Code::Unsupported, format!("a file of the mode {mode:o}"))
    })
}
