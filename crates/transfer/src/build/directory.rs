//! A directory of the host as a source.
//!
//! The walk goes depth first, with the directories on the way open: no path is followed that
//! another process could change meanwhile. The names in a directory are sorted by their bytes, so
//! the order of the host does not matter; they are in memory while the walk is in the directory.
//!
//! The time of the last access is left out, because reading a file changes it.
//!
//! A build that must be the same everywhere finds the holes itself ([`zeros`](crate::zeros)), when
//! it measures, too.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::vec;

use offshoot_vfs::{
    Code, Error, FileFlags, FileType, Nameless, NewNode, Result as VfsResult, SafeName,
};
use rustix::fs::{self, AtFlags, Dir};

use super::BuildOptions;
use super::entry::{
    BuildEntry, Contents, EntryKind, EntrySink, NoContents, PIECE_BYTES, SourceProblem,
    drop_second_lists, piece_len,
};
use crate::copy::{HostFile, Original, doing};
use crate::host::Process;
use crate::zeros::{first_nonzero_run, whole_sectors};
use crate::{Result, TransferFailure, Watcher};

/// How many files are open beside the directories on the way.
const OTHER_DESCRIPTORS: u64 = 64;

/// A directory that the walk is in.
struct DirectorySourceLevel {
    directory: OwnedFd,
    names: vec::IntoIter<(SafeName, FileType)>,
    /// The length of its path in the source.
    path_len: usize,
}

/// Gives `sink` what is in the directory at `top`, and the directory itself.
pub(super) fn read_directory(
    top: &Path,
    options: &BuildOptions,
    process: Process,
    watcher: &dyn Watcher,
    sink: &mut dyn EntrySink,
) -> Result {
    let base = top.as_os_str().as_bytes();
    let failed = |path: &[u8], error: &Error| {
        let shown = if path.is_empty() { base.to_vec() } else { [base, b"/", path].concat() };
        SourceProblem::Failed(Nameless(error).to_string()).at(&shown)
    };
    let depth_max = process.descriptors.saturating_sub(OTHER_DESCRIPTORS).max(1);
    let file = HostFile::named(top, true).map_err(|error| failed(b"", &error))?;
    let mut path = Vec::new();
    let mut chunk = vec![0; if options.finds_zeros { PIECE_BYTES } else { 0 }];
    sink.put(entry(&file, b"").map_err(|error| failed(b"", &error))?, &mut NoContents)?;
    let mut levels =
        vec![DirectorySourceLevel::open(file, 0).map_err(|error| failed(b"", &error))?];
    loop {
        if watcher.is_interrupted() {
            return Err(TransferFailure::Interrupted);
        }
        let depth = levels.len() as u64;
        let Some(level) = levels.last_mut() else { return Ok(()) };
        let Some((name, file_type)) = level.names.next() else {
            levels.pop();
            continue;
        };
        path.truncate(level.path_len);
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(&name);
        if options.leaves_out(&path) {
            continue;
        }
        let file = HostFile::found(level.directory.as_fd(), &name, file_type);
        let file = file.map_err(|error| failed(&path, &error))?;
        let id = file.attr().file;
        if options.images.contains(&(id.dev, id.ino)) {
            continue;
        }
        let entry = entry(&file, &path).map_err(|error| failed(&path, &error))?;
        if file.attr().file_type == FileType::Directory {
            if depth >= depth_max {
                let what = format!("a directory more than {depth_max} levels deep");
                return Err(failed(&path, &Error::unsupported(Code::TooDeep, what)));
            }
            sink.put(entry, &mut NoContents)?;
            let level = DirectorySourceLevel::open(file, path.len());
            levels.push(level.map_err(|error| failed(&path, &error))?);
        } else {
            let fail = |error: &Error| failed(&path, error);
            let chunk = options.finds_zeros.then_some(&mut chunk[..]);
            let data = HostData { file: &file, size: file.attr().size, watcher, fail: &fail };
            data.give(chunk, |contents| sink.put(entry, contents))?;
        }
    }
}

impl DirectorySourceLevel {
    fn open(file: HostFile<'_>, path_len: usize) -> VfsResult<Self> {
        let directory = file.into_directory()?;
        let mut names = Vec::new();
        for entry in Dir::read_from(&directory).map_err(doing("reading the directory"))? {
            let entry = entry.map_err(doing("reading the directory"))?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let mode = match entry.file_type() {
                fs::FileType::Unknown => {
                    let stat = fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW);
                    stat.map_err(doing("looking at it"))?.st_mode
                }
                known => known.as_raw_mode(),
            };
            let file_type = FileType::from_mode(mode).ok_or_else(|| {
                Error::unsupported(Code::Unsupported, format!("a file of the mode {mode:o}"))
            })?;
            names.push((SafeName::new(name.to_bytes())?, file_type));
        }
        names.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        Ok(Self { directory, names: names.into_iter(), path_len })
    }
}

/// What `file` is in a source, where its path is `path`.
fn entry(file: &HostFile<'_>, path: &[u8]) -> VfsResult<BuildEntry> {
    let attr = file.attr();
    let kind = match attr.file_type {
        FileType::Regular => EntryKind::Regular { size: attr.size },
        FileType::Directory => EntryKind::Directory,
        FileType::Symlink => EntryKind::Symlink(file.read_link()?),
        file_type => EntryKind::Node(NewNode { file_type, rdev: attr.rdev }),
    };
    let has_names = attr.nlink > 1 && attr.file_type != FileType::Directory;
    let mut xattrs = file.xattrs()?;
    drop_second_lists(&mut xattrs);
    Ok(BuildEntry {
        path: path.to_vec(),
        kind,
        permissions: attr.permissions,
        uid: attr.uid,
        gid: attr.gid,
        mtime: attr.mtime,
        atime: None,
        xattrs,
        flags: FileFlags::empty(),
        has_other_flags: false,
        inode: has_names.then_some(*attr),
    })
}

/// A regular file of the host.
pub(super) struct HostData<'a> {
    pub(super) file: &'a HostFile<'a>,
    /// How much of it is read.
    pub(super) size: u64,
    pub(super) watcher: &'a dyn Watcher,
    /// What an error of the host becomes.
    pub(super) fail: &'a dyn Fn(&Error) -> TransferFailure,
}

impl HostData<'_> {
    /// Gives `take` the data. With a `chunk`, through which it is read then, sectors that are all
    /// zeros are holes and no others.
    pub(super) fn give(
        self,
        chunk: Option<&mut [u8]>,
        take: impl FnOnce(&mut dyn Contents) -> Result,
    ) -> Result {
        match chunk {
            Some(chunk) => {
                take(&mut NonzeroSectors { host: self, at: 0, chunk, chunk_at: 0, len: 0 })
            }
            None => take(&mut HostContents { host: self, at: 0, data_end: 0 }),
        }
    }

    /// The first range at or after `at` that is no hole.
    fn next_data(&self, at: u64) -> Result<Option<Range<u64>>> {
        if self.watcher.is_interrupted() {
            return Err(TransferFailure::Interrupted);
        }
        let next = self.file.next_data(at).map_err(|error| (self.fail)(&error))?;
        let cut = |data: Range<u64>| data.start.max(at)..data.end.min(self.size);
        Ok(next.map(cut).filter(|data| !data.is_empty()))
    }

    fn read(&self, at: u64, buf: &mut [u8]) -> Result {
        let read = self.file.read(at, buf).map_err(|error| (self.fail)(&error))?;
        if read < buf.len() {
            let error = std::io::Error::other("it became shorter meanwhile");
            return Err((self.fail)(&Error::io("reading it", error)));
        }
        Ok(())
    }
}

/// The data of a file of the host, where there are no holes.
struct HostContents<'a> {
    host: HostData<'a>,
    at: u64,
    /// The end of the data that `at` is in.
    data_end: u64,
}

impl Contents for HostContents<'_> {
    fn read_piece(&mut self, buf: &mut [u8]) -> Result<Option<(u64, usize)>> {
        if self.at >= self.data_end {
            let Some(data) = self.host.next_data(self.at)? else { return Ok(None) };
            (self.at, self.data_end) = (data.start, data.end);
        }
        let len = piece_len(self.at, self.data_end, buf);
        self.host.read(self.at, buf.get_mut(..len).unwrap_or_default())?;
        let offset = self.at;
        self.at += len as u64;
        Ok(Some((offset, len)))
    }

    fn data_bytes(&mut self) -> Result<u64> {
        let (mut at, mut bytes) = (0, 0);
        while let Some(data) = self.host.next_data(at)? {
            bytes += data.end - data.start;
            at = data.end;
        }
        Ok(bytes)
    }
}

/// The same without the sectors that are all zeros, whatever the host calls a hole.
struct NonzeroSectors<'a> {
    host: HostData<'a>,
    /// Everything before is done.
    at: u64,
    /// A part of the file. It begins with a sector.
    chunk: &'a mut [u8],
    chunk_at: u64,
    /// How much of the chunk is read.
    len: usize,
}

impl NonzeroSectors<'_> {
    /// The next run of sectors that are not all zeros, as far as it is in the chunk.
    fn next_run(&mut self) -> Result<Option<(u64, &[u8])>> {
        loop {
            let start = usize::try_from(self.at - self.chunk_at).unwrap_or(usize::MAX);
            if start >= self.len {
                let Some(data) = self.host.next_data(self.at)? else { return Ok(None) };
                let data = whole_sectors(data, self.host.size);
                self.at = data.start;
                self.len = piece_len(self.at, data.end, self.chunk);
                self.chunk_at = self.at;
                self.host.read(self.at, self.chunk.get_mut(..self.len).unwrap_or_default())?;
                continue;
            }
            let left = self.chunk.get(start..self.len).unwrap_or_default();
            let run = first_nonzero_run(left);
            let (skipped, len) = (run.start, run.len());
            let offset = self.at + skipped as u64;
            self.at = offset + len as u64;
            if len > 0 {
                let begin = start + skipped;
                return Ok(Some((offset, self.chunk.get(begin..begin + len).unwrap_or_default())));
            }
        }
    }
}

impl Contents for NonzeroSectors<'_> {
    fn read_piece(&mut self, buf: &mut [u8]) -> Result<Option<(u64, usize)>> {
        let Some((offset, run)) = self.next_run()? else { return Ok(None) };
        // The chunk is no larger than the buffer of the builder.
        let len = run.len().min(buf.len());
        buf.get_mut(..len).unwrap_or_default().copy_from_slice(run.get(..len).unwrap_or_default());
        self.at = offset + len as u64;
        Ok(Some((offset, len)))
    }

    fn data_bytes(&mut self) -> Result<u64> {
        let mut bytes = 0;
        while let Some((_, run)) = self.next_run()? {
            bytes += run.len() as u64;
        }
        Ok(bytes)
    }
}
