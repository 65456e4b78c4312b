//! `offshoot lsattr`: shows flags of files, in the columns of e2fsprogs.

use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use offshoot_vfs::path::LastLink;
use offshoot_vfs::{Error, FileFlags, FileId, FileType, Nameless};
use serde::Serialize;

use crate::args::LsattrArguments;
use crate::edit::joined;
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::listed::listed;
use crate::output::{Console, Escaped, json_name, write_line, write_name};
use crate::places::{Failures, VolumePaths};
use crate::session::PlaceSession;

/// The letters of all flags that e2fsprogs knows, in its order.
const LETTERS: &str = "suSDiadAcEjItTeCxFNPVm";

/// A file as JSON.
#[derive(Serialize)]
#[expect(clippy::struct_field_names, reason = "it is the name in JSON")]
struct Flags {
    volume: String,
    path: String,
    flags: String,
}

pub(super) fn run(
    arguments: &LsattrArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let mut places = VolumePaths::new(&arguments.places, console);
    let mut listing = FlagsListing { arguments, out, failures: Failures::new(console) };
    while let Some(place) = places.next() {
        match place.and_then(|session| listing.place(&session)) {
            Ok(()) => {}
            Err(failure @ VerbFailure::Output(_)) => return Err(failure),
            Err(failure) => listing.failures.opening(&failure),
        }
    }
    listing.failures.result()
}

struct FlagsListing<'a> {
    arguments: &'a LsattrArguments,
    out: &'a mut dyn Write,
    failures: Failures<'a>,
}

impl FlagsListing<'_> {
    fn place(&mut self, session: &PlaceSession) -> Result {
        let held = session.file(LastLink::Keep)?;
        let file = held.file();
        let attr = session.fs.attr(file).map_err(|error| session.named(error))?;
        let is_listed = attr.file_type == FileType::Directory && !self.arguments.directory;
        if !is_listed {
            return self.line(session, file, attr.file_type, &session.path);
        }
        let mut path = session.path.clone();
        let mut levels = vec![(path.len(), self.directory(session, file, file, &path)?)];
        while let Some((path_len, below)) = levels.last_mut() {
            let Some((directory, name)) = below.next() else {
                levels.pop();
                continue;
            };
            path.truncate(*path_len);
            if !path.ends_with(b"/") {
                path.push(b'/');
            }
            path.extend_from_slice(&name);
            levels.push((path.len(), self.directory(session, file, directory, &path)?));
        }
        Ok(())
    }

    /// Shows a directory. Returns the directories in it that are shown after it.
    fn directory(
        &mut self,
        session: &PlaceSession,
        top: FileId,
        directory: FileId,
        path: &[u8],
    ) -> Result<impl Iterator<Item = (FileId, Vec<u8>)> + use<>> {
        let has_header = directory != top && !self.arguments.json;
        if has_header {
            writeln!(self.out)?;
            write_name(self.out, path)?;
            writeln!(self.out, ":")?;
        }
        let (entries, error) = listed(&*session.fs, top, directory, self.arguments.all);
        if let Some(error) = error {
            self.error(session, path, &error);
        }
        if self.arguments.all {
            let parent = session.fs.parent(directory).map_err(|error| session.named(error))?;
            let parent = parent.map_or(directory, |parent| parent.dir);
            self.line(session, directory, FileType::Directory, &joined(path, b"."))?;
            self.line(session, parent, FileType::Directory, &joined(path, b".."))?;
        }
        let mut below = Vec::new();
        for entry in entries {
            let path = joined(path, &entry.name);
            match entry.attr {
                Ok(attr) => {
                    self.line(session, attr.file, attr.file_type, &path)?;
                    if entry.is_entered && self.arguments.recursive {
                        below.push((attr.file, entry.name));
                    }
                }
                Err(error) => self.error(session, &path, &error),
            }
        }
        if has_header {
            writeln!(self.out)?;
        }
        Ok(below.into_iter())
    }

    fn error(&mut self, session: &PlaceSession, path: &[u8], error: &Error) {
        let text = format_args!("{}: {}", Escaped(path), Nameless(error));
        self.failures.inside(&session.volume, ExitStatus::of(error), &text);
    }

    fn line(
        &mut self,
        session: &PlaceSession,
        file: FileId,
        file_type: FileType,
        path: &[u8],
    ) -> Result {
        // As in lsattr, which cannot open files of other types without side effects.
        if !matches!(file_type, FileType::Regular | FileType::Directory) {
            return Ok(());
        }
        let flags = match session.fs.flags(file) {
            Ok(flags) => flags,
            Err(error) => {
                self.error(session, path, &error);
                return Ok(());
            }
        };
        if self.arguments.json {
            let volume = json_name(session.volume.as_os_str().as_bytes());
            let shown = Flags { volume, path: json_name(path), flags: flags.to_string() };
            return Ok(write_line(self.out, &shown)?);
        }
        write!(self.out, "{} ", columns(flags))?;
        write_name(self.out, path)?;
        Ok(writeln!(self.out)?)
    }
}

/// One letter for each flag that is set, and a `-` for each that is not.
fn columns(flags: FileFlags) -> String {
    let is_set = |letter| FileFlags::of_letter(letter).is_some_and(|flag| flags.contains(flag));
    LETTERS.chars().map(|letter| if is_set(letter) { letter } else { '-' }).collect()
}
