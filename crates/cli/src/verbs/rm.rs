//! `offshoot rm`: removes files and directories, and with `-i` or `-v` asks or reports.

use std::io::{self, Write};
use std::sync::Arc;

use offshoot_vfs::enter::is_empty;
use offshoot_vfs::path::{LastLink, at_path, bare, resolve_end};
use offshoot_vfs::walk::{DEPTH_MAX, WalkVisitor, WalkedFile, walk};
use offshoot_vfs::{
    Attr, EntryPlace, Errno, Error, FileId, FileSystem, FileSystemMut, FileType, HeldFiles,
    Timestamp,
};

use crate::args::RmArguments;
use crate::edit::{EditReport, at_every_place, joined, moment};
use crate::exit::Result;
use crate::interrupt::{self, is_interrupted};
use crate::output::{Console, Escaped, type_words, write_name};
use crate::place::VolumePath;

pub(super) fn run(arguments: &RmArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let at = moment()?;
    interrupt::watch(console)?;
    let places: Vec<VolumePath> =
        arguments.places.iter().map(|text| VolumePath::parse(text)).collect();
    let mut talk = Talk { arguments, out, failed: None };
    let result = at_every_place(places, &arguments.edit, console, |fs, path, report| {
        let absent = |error: &Error| matches!(error.errno(), Errno::NOENT | Errno::NOTDIR);
        match remove(fs, path, &mut talk, report, at) {
            Err(error @ Error::Posix { .. }) if arguments.force && absent(&error) => Ok(()),
            result => result,
        }
    });
    talk.failed.map_or(result, |error| Err(error.into()))
}

/// Questions to the caller and reports on the way.
struct Talk<'a> {
    arguments: &'a RmArguments,
    out: &'a mut dyn Write,
    /// Why standard output cannot be written any more.
    failed: Option<io::Error>,
}

impl Talk<'_> {
    /// Whether the caller wants this file removed.
    fn is_wanted(&mut self, what: &str, path: &[u8]) -> bool {
        if !self.arguments.interactive {
            return true;
        }
        // If these streams cannot be written, the caller sees no question and gives no answer.
        let _ = self.out.flush();
        let _ = write!(io::stderr(), "offshoot: {what} '{}'? ", Escaped(path));
        let answer = interrupt::line_of_stdin();
        matches!(answer.trim_ascii_start().first(), Some(b'y' | b'Y'))
    }

    fn is_file_wanted(&mut self, attr: &Attr, path: &[u8]) -> bool {
        let kind = match attr.file_type {
            FileType::Regular if attr.size == 0 => "regular empty file",
            file_type => type_words(file_type),
        };
        self.is_wanted(&format!("remove {kind}"), path)
    }

    fn removed(&mut self, what: &str, path: &[u8]) {
        if !self.arguments.verbose || self.failed.is_some() {
            return;
        }
        let told = write!(self.out, "removed {what}'")
            .and_then(|()| write_name(self.out, path))
            .and_then(|()| writeln!(self.out, "'"));
        self.failed = told.err();
    }
}

fn remove(
    fs: &HeldFiles<'_>,
    path: &[u8],
    talk: &mut Talk<'_>,
    report: &mut EditReport<'_, '_>,
    at: Timestamp,
) -> Result<(), Error> {
    let fail = |errno| Err(Error::posix(errno, Escaped(path).to_string()));
    // A link is removed itself. A trailing slash asks for a directory.
    let bare = bare(path);
    let end = resolve_end(fs, bare, LastLink::Keep)?;
    let Some(file) = end.file else { return fail(Errno::NOENT) };
    require_name(bare)?;
    let Some((dir, name)) = end.place else { return Err(root()) };
    let place = EntryPlace { dir, name: &name };
    let attr = fs.attr(file).map_err(|error| at_path(error, path))?;
    let shown = report.place(path);
    if attr.file_type != FileType::Directory {
        if bare.len() < path.len() {
            return fail(Errno::NOTDIR);
        }
        if talk.is_file_wanted(&attr, &shown) {
            fs.unlink(place, at).map_err(|error| at_path(error, path))?;
            talk.removed("", &shown);
        }
        return Ok(());
    }
    if file.dev != dir.dev {
        return Err(subvolume(path));
    }
    if !talk.arguments.recursive {
        if !talk.arguments.dir {
            return fail(Errno::ISDIR);
        }
        if talk.is_wanted("remove directory", &shown) {
            fs.rmdir(place, at).map_err(|error| at_path(error, path))?;
            talk.removed("directory ", &shown);
        }
        return Ok(());
    }
    let is_empty = is_empty(fs, file).map_err(|error| at_path(error, path))?;
    if !is_empty && !talk.is_wanted("descend into directory", &shown) {
        return Ok(());
    }
    let top = OpenDirectory { place: (dir, name), left: 0 };
    let fs = fs.inner();
    let mut removal = RmVisitor { fs, at, report, talk, named: path, top: bare, left: 0 };
    walk(fs, file, top, DEPTH_MAX, &mut removal);
    Ok(())
}

/// Refuses to remove or move a directory named by a `.` or `..` in it, as rm, rmdir and mv do.
pub(super) fn require_name(path: &[u8]) -> Result<(), Error> {
    if matches!(path.rsplit(|&byte| byte == b'/').next(), Some(b"." | b"..")) {
        let what = "`.` and `..` are neither removed nor moved: name the directory itself";
        return Err(Error::posix(Errno::INVAL, format!("{}: {what}", Escaped(path))));
    }
    Ok(())
}

/// The error for removing or moving the root.
pub(super) fn root() -> Error {
    Error::posix(Errno::BUSY, "/ is the root of the volume, which stays")
}

/// The error for removing a subvolume, which only `subvolume delete` deletes, so that it is not
/// emptied as a directory by mistake.
pub(super) fn subvolume(path: &[u8]) -> Error {
    let what = format!("{} is a subvolume, which `subvolume delete` deletes", Escaped(path));
    Error::posix(Errno::ISDIR, what)
}

/// A directory whose contents are being removed.
struct OpenDirectory {
    place: (FileId, Vec<u8>),
    /// How many files were left before this directory.
    left: u64,
}

/// Removes what the walk visits. A directory is removed after its contents.
struct RmVisitor<'a, 'r, 'f, 't> {
    fs: &'a dyn FileSystemMut,
    at: Timestamp,
    report: &'a mut EditReport<'r, 'f>,
    talk: &'a mut Talk<'t>,
    /// The place as it was named, and without trailing slashes.
    named: &'a [u8],
    top: &'a [u8],
    /// How many files could not be removed, or were kept by the caller. Each keeps all directories
    /// above it.
    left: u64,
}

impl RmVisitor<'_, '_, '_, '_> {
    fn error(&mut self, error: &Error) {
        self.left += 1;
        self.report.error(error);
    }

    /// A path for messages; empty if no message needs it, which saves most of the work in deep
    /// trees.
    fn shown(&self, path: &impl Fn() -> Vec<u8>) -> Vec<u8> {
        let RmArguments { interactive, verbose, .. } = self.talk.arguments;
        if *interactive || *verbose { self.report.place(&path()) } else { Vec::new() }
    }
}

impl WalkVisitor for RmVisitor<'_, '_, '_, '_> {
    type Directory = OpenDirectory;

    fn enter(&mut self, _: &OpenDirectory, entry: &WalkedFile<'_>) -> Option<OpenDirectory> {
        let path = || joined(self.top, entry.path);
        if entry.attr.file.dev != entry.parent.dev {
            let error = subvolume(&path());
            self.error(&error);
            return None;
        }
        if self.talk.arguments.interactive {
            let shown = self.report.place(&path());
            // If it cannot be read, the walk reports the error.
            let is_full = !is_empty(self.fs, entry.attr.file).unwrap_or(true);
            if is_full && !self.talk.is_wanted("descend into directory", &shown) {
                self.left += 1;
                return None;
            }
        }
        Some(OpenDirectory { place: (entry.parent, entry.name.to_vec()), left: self.left })
    }

    fn visit(&mut self, _: &OpenDirectory, entry: &WalkedFile<'_>) {
        let path = || joined(self.top, entry.path);
        let shown = self.shown(&path);
        if !self.talk.is_file_wanted(entry.attr, &shown) {
            self.left += 1;
            return;
        }
        match self.fs.unlink(EntryPlace { dir: entry.parent, name: entry.name }, self.at) {
            Ok(()) => self.talk.removed("", &shown),
            Err(error) => {
                let error = at_path(error, &path());
                self.error(&error);
            }
        }
    }

    fn leave(&mut self, directory: OpenDirectory, path: &[u8]) {
        if self.left > directory.left {
            return;
        }
        let path = || if path.is_empty() { self.named.to_vec() } else { joined(self.top, path) };
        let shown = self.shown(&path);
        if !self.talk.is_wanted("remove directory", &shown) {
            self.left += 1;
            return;
        }
        let (dir, name) = &directory.place;
        match self.fs.rmdir(EntryPlace { dir: *dir, name }, self.at) {
            Ok(()) => self.talk.removed("directory ", &shown),
            Err(error) => {
                let error = at_path(error, &path());
                self.error(&error);
            }
        }
    }

    fn failed(&mut self, path: &[u8], error: &Error) {
        self.left += 1;
        self.report.at(&joined(self.top, path), error);
    }

    fn is_stopped(&self) -> bool {
        is_interrupted()
    }
}
