//! `offshoot rm`: remove files and directories.

use std::sync::Arc;

use offshoot_vfs::{Errno, Error, FileId, FileSystemMut, FileType, Place, Timestamp};

use crate::args::RmArguments;
use crate::edit::{Report, at_every_place, joined, moment};
use crate::exit::Result;
use crate::extract::{Entry, Visitor, walk};
use crate::output::{Console, Escaped};
use crate::place::Place as NamedPlace;
use crate::resolve::{LastLink, at_path, resolve_end};

/// The deepest tree that is removed: far beyond what any path names.
const DEPTH_MAX: usize = 1 << 16;

pub(super) fn run(arguments: &RmArguments, console: &Arc<Console>) -> Result {
    let at = moment()?;
    let places = arguments.places.iter().map(|text| NamedPlace::parse(text)).collect();
    at_every_place(places, &arguments.edit, console, |fs, path, report| {
        let absent = |error: &Error| matches!(error.errno(), Errno::NOENT | Errno::NOTDIR);
        match remove(fs, path, arguments.recursive, report, at) {
            Err(error @ Error::Posix { .. }) if arguments.force && absent(&error) => Ok(()),
            result => result,
        }
    })
}

fn remove(
    fs: &dyn FileSystemMut,
    path: &[u8],
    recursive: bool,
    report: &mut Report<'_, '_>,
    at: Timestamp,
) -> Result<(), Error> {
    let fail = |errno| Err(Error::posix(errno, Escaped(path).to_string()));
    // A link is removed itself, and a slash behind its name asks for a directory.
    let bare = path.len() - path.iter().rev().take_while(|&&byte| byte == b'/').count();
    let end = resolve_end(fs, &path[..bare], LastLink::Keep)?;
    let Some(file) = end.file else { return fail(Errno::NOENT) };
    let Some((dir, name)) = end.place else { return fail(Errno::BUSY) };
    let place = Place { dir, name: &name };
    if fs.attr(file)?.file_type != FileType::Directory {
        if bare < path.len() {
            return fail(Errno::NOTDIR);
        }
        return fs.unlink(place, at).map_err(|error| at_path(error, path));
    }
    if !recursive {
        return fail(Errno::ISDIR);
    }
    if file.dev != dir.dev {
        return Err(subvolume(path));
    }
    let top = Open { place: (dir, name), path: path[..bare].to_vec(), errors: 0 };
    let mut removal = Removal { fs, at, report, top: &path[..bare], errors: 0 };
    walk(fs, file, top, DEPTH_MAX, &mut removal);
    Ok(())
}

/// What a subvolume is told apart by: it goes as a whole, and is no directory that is emptied by mistake.
fn subvolume(path: &[u8]) -> Error {
    let what = format!("{} is a subvolume, which `subvolume delete` deletes", Escaped(path));
    Error::posix(Errno::ISDIR, what)
}

/// A directory whose contents are being removed.
struct Open {
    place: (FileId, Vec<u8>),
    /// For messages; only the name of it where that would be long.
    path: Vec<u8>,
    /// The errors before it.
    errors: u64,
}

/// Removes what the walk shows, each directory when it is left.
struct Removal<'a, 'r, 'f> {
    fs: &'a dyn FileSystemMut,
    at: Timestamp,
    report: &'a mut Report<'r, 'f>,
    top: &'a [u8],
    errors: u64,
}

impl Removal<'_, '_, '_> {
    fn error(&mut self, error: &Error) {
        self.errors += 1;
        self.report.error(error);
    }
}

/// The longest path that is kept for messages.
const PATH_KEPT: usize = 4096;

impl Visitor for Removal<'_, '_, '_> {
    type Directory = Open;

    fn enter(&mut self, _: &Open, entry: &Entry<'_>) -> Option<Open> {
        if entry.attr.file.dev != entry.parent.dev {
            self.error(&subvolume(&joined(self.top, entry.path)));
            return None;
        }
        let kept = &entry.path[entry.path.len().saturating_sub(PATH_KEPT)..];
        Some(Open {
            place: (entry.parent, entry.name.to_vec()),
            path: joined(self.top, kept),
            errors: self.errors,
        })
    }

    fn visit(&mut self, _: &Open, entry: &Entry<'_>) {
        let place = Place { dir: entry.parent, name: entry.name };
        if let Err(error) = self.fs.unlink(place, self.at) {
            self.error(&at_path(error, &joined(self.top, entry.path)));
        }
    }

    fn leave(&mut self, directory: Open) {
        // What could not be removed was reported, and keeps every directory above it.
        if self.errors > directory.errors {
            return;
        }
        let (dir, name) = &directory.place;
        if let Err(error) = self.fs.rmdir(Place { dir: *dir, name }, self.at) {
            self.error(&at_path(error, &directory.path));
        }
    }

    fn failed(&mut self, path: &[u8], error: &Error) {
        self.errors += 1;
        self.report.at(&joined(self.top, path), error);
    }

    fn is_stopped(&self) -> bool {
        false
    }
}
