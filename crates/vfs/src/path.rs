//! From a path to a file, as a mount of the volume would resolve it.
//!
//! The root is the root of the filesystem that was opened. `.` and empty components are
//! skipped, `..` goes to the parent and stays at the root there. Symbolic links on the way
//! are followed inside the volume only: an absolute target starts at the volume's root. At
//! most 40 are followed, like in the kernel; together with the length of a target that bounds
//! the work.
//!
//! Errors name the path as the caller wrote it, [`Escaped`].

use crate::escape::Escaped;
use crate::{
    EntryPlace, Errno, Error, FileId, FileSystem, FileSystemMut, FileType, HeldFile, HeldFiles,
    NAME_MAX, Result,
};

/// How many symbolic links one path may follow.
const LINKS_MAX: u32 = 40;

/// The longest target of a symbolic link that is followed, `PATH_MAX` of the kernel.
const TARGET_MAX: usize = 4096;

/// What to do with a symbolic link at the end of the path. A path that ends in `/`
/// follows it in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastLink {
    /// Follow it.
    Follow,
    /// It is the file that was meant.
    Keep,
}

/// Where a path leads.
#[derive(Clone)]
pub struct PathEnd {
    /// The directory and the name in it; none for the root and for what ends with `..`.
    pub place: Option<(FileId, Vec<u8>)>,
    /// What has that name, if anything has.
    pub file: Option<FileId>,
    /// The path ends in `/`, so only a directory may be there.
    pub must_be_directory: bool,
}

/// The file at `path`.
pub fn resolve(fs: &dyn FileSystem, path: &[u8], last: LastLink) -> Result<FileId> {
    let end = resolve_end(fs, path, last)?;
    end.file.ok_or_else(|| Error::posix(Errno::NOENT, Escaped(path).to_string()))
}

/// The file at `path`, which stays what it is until the result is dropped.
pub fn resolve_held<'a>(
    fs: &'a dyn FileSystemMut,
    path: &[u8],
    last: LastLink,
) -> Result<HeldFile<'a>> {
    // All files on the way are held until the last one is.
    let way = HeldFiles::new(fs);
    HeldFile::new(fs, resolve(&way, path, last)?)
}

/// Where `path` leads, whose last name need not exist.
pub fn resolve_end(fs: &dyn FileSystem, path: &[u8], last: LastLink) -> Result<PathEnd> {
    let fail = |errno| Error::posix(errno, Escaped(path).to_string());
    let mut must_be_directory = path.ends_with(b"/") || path.ends_with(b"/.");
    let mut todo: Vec<Vec<u8>> = components(path).collect();
    let mut links = 0;
    let mut at = fs.root();
    let mut place = None;
    while let Some(name) = todo.pop() {
        if name == b".." {
            let parent = fs.parent(at).map_err(|error| at_path(error, path))?;
            (at, place) = (parent.map_or(at, |parent| parent.dir), None);
            continue;
        }
        if name.len() > NAME_MAX {
            return Err(fail(Errno::NAMETOOLONG));
        }
        let next = match fs.lookup(at, &name) {
            Err(Error::Posix { errno: Errno::NOENT, .. }) if todo.is_empty() => {
                return Ok(PathEnd { place: Some((at, name)), file: None, must_be_directory });
            }
            found => found.map_err(|error| at_path(error, path))?,
        };
        let attr = fs.attr_of_entry(at, &name, next).map_err(|error| at_path(error, path))?;
        let file_type = attr.file_type;
        let is_last = todo.is_empty();
        match file_type {
            FileType::Symlink if !is_last || must_be_directory || last == LastLink::Follow => {
                links += 1;
                if links > LINKS_MAX {
                    return Err(fail(Errno::LOOP));
                }
                let target = fs.read_link(next)?;
                if target.is_empty() {
                    return Err(fail(Errno::NOENT));
                }
                if target.len() >= TARGET_MAX {
                    return Err(fail(Errno::NAMETOOLONG));
                }
                must_be_directory |= is_last && target.ends_with(b"/");
                if target.starts_with(b"/") {
                    (at, place) = (fs.root(), None);
                }
                todo.extend(components(&target));
                continue;
            }
            FileType::Directory => {}
            _ if !is_last || must_be_directory => return Err(fail(Errno::NOTDIR)),
            _ => {}
        }
        place = Some((at, name));
        at = next;
    }
    Ok(PathEnd { place, file: Some(at), must_be_directory })
}

/// Names the path in an error: those from below speak of inodes, and the path is what the
/// caller knows.
#[must_use]
pub fn at_path(error: Error, path: &[u8]) -> Error {
    match error {
        // What makes no sense says itself what that is.
        Error::Posix { errno: Errno::INVAL, what, .. } => {
            Error::posix(Errno::INVAL, format!("{}: {what}", Escaped(path)))
        }
        Error::Posix { errno, .. } => Error::posix(errno, Escaped(path).to_string()),
        other => other.in_file(Escaped(path)),
    }
}

/// The last component of a path; `None` when that is no name: the root, `.` and `..`.
#[must_use]
pub fn last_name(path: &[u8]) -> Option<&[u8]> {
    let last = path.rsplit(|&byte| byte == b'/').find(|name| !name.is_empty())?;
    (last != b"." && last != b"..").then_some(last)
}

/// A path without the slashes at its end.
#[must_use]
pub fn bare(mut path: &[u8]) -> &[u8] {
    while let [front @ .., b'/'] = path {
        path = front;
    }
    path
}

/// A path in front of those of what is in it: without slashes at its end, and a `.` behind them.
#[must_use]
pub fn prefix(path: &[u8]) -> &[u8] {
    let path = bare(path);
    bare(path.strip_suffix(b"/.").unwrap_or(path))
}

/// The components of a path, last one first, so that a stack of them pops the next one.
fn components(path: &[u8]) -> impl Iterator<Item = Vec<u8>> + '_ {
    path.rsplit(|&byte| byte == b'/')
        .filter(|name| !name.is_empty() && *name != b".")
        .map(<[u8]>::to_vec)
}

/// The path of a directory from `top`, without a `/` in front, found by climbing; `None`
/// when `top` is not above it or the way is longer than `len_max` bytes.
pub fn climb(
    fs: &dyn FileSystem,
    top: FileId,
    directory: FileId,
    len_max: usize,
) -> Result<Option<Vec<u8>>> {
    let mut names: Vec<Vec<u8>> = Vec::new();
    let mut len = 0;
    let mut at = directory;
    while at != top {
        let Some(parent) = fs.parent(at)? else { return Ok(None) };
        // A name has at least one byte, so this bounds the climb in a cycle, too.
        len += parent.name.len() + 1;
        if len > len_max {
            return Ok(None);
        }
        names.push(parent.name);
        at = parent.dir;
    }
    names.reverse();
    Ok(Some(names.join(&b'/')))
}

/// Whether a symbolic link to `target` would lead to itself in the place of `existing`, which is
/// none and would be lost for it.
pub fn leads_to_itself(
    fs: &dyn FileSystem,
    place: EntryPlace<'_>,
    target: &[u8],
    existing: FileId,
) -> Result<bool> {
    if fs.attr(existing)?.file_type == FileType::Symlink {
        return Ok(false);
    }
    let path = match target {
        [b'/', ..] => target.to_vec(),
        _ => [&climb_file(fs, place.dir, b"")?[..], b"/", target].concat(),
    };
    // What leads nowhere does not lead there.
    let end = resolve_end(fs, &path, LastLink::Keep).ok().and_then(|end| end.place);
    Ok(end.is_some_and(|(dir, name)| EntryPlace { dir, name: &name } == place))
}

/// The path of a file for messages, from the root and without a `/` at its end: that of a
/// directory is found by climbing; a file keeps the one by which it was reached, and its name.
pub fn climb_file(fs: &dyn FileSystem, file: FileId, given: &[u8]) -> Result<Vec<u8>> {
    /// Longer than any path that a caller shows.
    const PATH_MAX: usize = 1 << 20;
    if fs.attr(file)?.file_type != FileType::Directory {
        let names: Vec<Vec<u8>> = components(given).collect();
        let mut path = b"/".to_vec();
        path.extend(names.into_iter().rev().collect::<Vec<_>>().join(&b'/'));
        return Ok(path);
    }
    Ok(match climb(fs, fs.root(), file, PATH_MAX)? {
        Some(path) if path.is_empty() => Vec::new(),
        Some(path) => [b"/", &path[..]].concat(),
        None => given.strip_suffix(b"/").unwrap_or(given).to_vec(),
    })
}
