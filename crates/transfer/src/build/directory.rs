//! A directory of the host as a source.
//!
//! The walk goes depth first, with the directories on the way open: no path is followed that
//! another process could change meanwhile. The names in a directory are sorted by their bytes, so
//! the order of the host does not matter; they are in memory while the walk is in the directory.
//!
//! The time of the last access is left out, because reading a file changes it.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::vec;

use offshoot_vfs::{Code, Error, FileType, Nameless, NewNode, Result as VfsResult, SafeName};
use rustix::fs::{self, AtFlags, Dir};

use super::BuildOptions;
use super::entry::{
    Contents, Entry, EntryKind, EntrySink, NoContents, SourceProblem, drop_second_lists, piece_len,
};
use crate::copy::{HostFile, Original, doing};
use crate::host::Process;
use crate::{Result, TransferFailure};

/// How many files are open beside the directories on the way.
const OTHER_DESCRIPTORS: u64 = 64;

/// A directory that the walk is in.
struct HostLevel {
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
    sink.put(entry(&file, b"").map_err(|error| failed(b"", &error))?, &mut NoContents)?;
    let mut levels = vec![HostLevel::open(file, 0).map_err(|error| failed(b"", &error))?];
    loop {
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
        if file_type == FileType::Directory {
            if depth >= depth_max {
                let what = format!("a directory more than {depth_max} levels deep");
                return Err(failed(&path, &Error::unsupported(Code::TooDeep, what)));
            }
            sink.put(entry, &mut NoContents)?;
            let level = HostLevel::open(file, path.len());
            levels.push(level.map_err(|error| failed(&path, &error))?);
        } else {
            let fail = |error: &Error| failed(&path, error);
            let size = file.attr().size;
            let mut contents = HostContents { file: &file, size, at: 0, data_end: 0, fail: &fail };
            sink.put(entry, &mut contents)?;
        }
    }
}

impl HostLevel {
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
fn entry(file: &HostFile<'_>, path: &[u8]) -> VfsResult<Entry> {
    let attr = file.attr();
    let kind = match attr.file_type {
        FileType::Regular => EntryKind::Regular { size: attr.size },
        FileType::Directory => EntryKind::Directory,
        FileType::Symlink => EntryKind::Symlink(file.read_link()?),
        file_type => EntryKind::Node(NewNode { file_type, rdev: attr.rdev }),
    };
    let has_names = attr.nlink > 1 && attr.file_type != FileType::Directory;
    let mut xattrs = file.xattrs()?;
    // The host lists them in an order of its own.
    xattrs.sort_unstable();
    drop_second_lists(&mut xattrs);
    Ok(Entry {
        path: path.to_vec(),
        kind,
        permissions: attr.permissions,
        uid: attr.uid,
        gid: attr.gid,
        mtime: attr.mtime,
        atime: None,
        xattrs,
        inode: has_names.then_some(*attr),
    })
}

/// The data of a file of the host, where there are no holes.
struct HostContents<'a> {
    file: &'a HostFile<'a>,
    size: u64,
    at: u64,
    /// The end of the data that `at` is in.
    data_end: u64,
    fail: &'a dyn Fn(&Error) -> TransferFailure,
}

impl HostContents<'_> {
    fn read(&mut self, buf: &mut [u8]) -> VfsResult<Option<(u64, usize)>> {
        if self.at >= self.data_end {
            let Some(data) = self.file.next_data(self.at)? else { return Ok(None) };
            (self.at, self.data_end) = (data.start.max(self.at), data.end.min(self.size));
        }
        if self.at >= self.data_end {
            return Ok(None);
        }
        let len = piece_len(self.at, self.data_end, buf);
        let piece = buf.get_mut(..len).unwrap_or_default();
        if self.file.read(self.at, piece)? < len {
            let error = std::io::Error::other("it became shorter meanwhile");
            return Err(Error::io("reading it", error));
        }
        let offset = self.at;
        self.at += len as u64;
        Ok(Some((offset, len)))
    }
}

impl Contents for HostContents<'_> {
    fn read_piece(&mut self, buf: &mut [u8]) -> Result<Option<(u64, usize)>> {
        self.read(buf).map_err(|error| (self.fail)(&error))
    }

    fn data_bytes(&mut self) -> Result<u64> {
        let (mut at, mut bytes) = (0, 0);
        while at < self.size {
            let next = self.file.next_data(at).map_err(|error| (self.fail)(&error))?;
            let Some(data) = next else { break };
            let end = data.end.min(self.size);
            bytes += end.saturating_sub(data.start.max(at));
            // A file that ended meanwhile gives ranges without end.
            at = end.max(at + 1);
        }
        Ok(bytes)
    }
}
