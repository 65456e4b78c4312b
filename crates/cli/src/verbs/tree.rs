//! `offshoot tree`: shows directories as a tree.

use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use offshoot_vfs::path::LastLink;
use offshoot_vfs::{Attr, Error, FileId, FileType, Nameless};

use crate::args::TreeVerbArguments;
use crate::edit::place_in;
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::listed::{Listed, listed};
use crate::output::{Console, Escaped, FileRecord, json_name, write_line, write_name};
use crate::places::{Failures, VolumePaths};
use crate::session::PlaceSession;

pub(super) fn run(
    arguments: &TreeVerbArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let mut places = VolumePaths::new(&arguments.places, console);
    let failures = Failures::new(console);
    let mut tree = ShownTree { arguments, out, failures, directories: 0, files: 0 };
    while let Some(place) = places.next() {
        match place.and_then(|session| tree.place(&session)) {
            Ok(()) => {}
            Err(failure @ VerbFailure::Output(_)) => return Err(failure),
            Err(failure) => tree.failures.opening(&failure),
        }
    }
    tree.sum()?;
    tree.failures.result()
}

struct ShownTree<'a> {
    arguments: &'a TreeVerbArguments,
    out: &'a mut dyn Write,
    failures: Failures<'a>,
    directories: u64,
    files: u64,
}

/// A directory that is being shown.
struct ShownLevel {
    /// The length of the path of the directory.
    path_len: usize,
    /// The entries that are left.
    entries: std::vec::IntoIter<Listed>,
    /// Whether it is the last entry of its own directory, so that no line continues below it.
    is_last: bool,
}

impl ShownTree<'_> {
    fn place(&mut self, session: &PlaceSession) -> Result {
        let held = session.file(LastLink::Follow)?;
        let file = held.file();
        let attr = session.fs.attr(file).map_err(|error| session.named(error))?;
        let top = place_in(&session.volume, &session.path);
        if self.arguments.json {
            self.record(session, &session.path, &attr)?;
        } else {
            write_name(self.out, &top)?;
            writeln!(self.out)?;
        }
        if attr.file_type != FileType::Directory {
            self.files += 1;
            return Ok(());
        }
        let mut path = session.path.clone();
        let mut levels = vec![self.level(session, file, file, &path, true)];
        while let Some(level) = levels.last_mut() {
            let Some(entry) = level.entries.next() else {
                levels.pop();
                continue;
            };
            let is_last = level.entries.len() == 0;
            path.truncate(level.path_len);
            if !path.ends_with(b"/") {
                path.push(b'/');
            }
            path.extend_from_slice(&entry.name);
            let attr = match entry.attr {
                Ok(attr) => attr,
                Err(error) => {
                    self.error(session, &path, &error);
                    continue;
                }
            };
            match attr.file_type {
                FileType::Directory => self.directories += 1,
                _ => self.files += 1,
            }
            if self.arguments.json {
                self.record(session, &path, &attr)?;
            } else {
                let open = levels[1..].iter().map(|level| level.is_last);
                self.line(session, open, is_last, &entry.name, &attr)?;
            }
            let depth = levels.len();
            if entry.is_entered && self.arguments.level.is_none_or(|max| depth < max) {
                levels.push(self.level(session, file, attr.file, &path, is_last));
            }
        }
        Ok(())
    }

    fn level(
        &mut self,
        session: &PlaceSession,
        top: FileId,
        directory: FileId,
        path: &[u8],
        is_last: bool,
    ) -> ShownLevel {
        let (mut entries, error) = listed(&*session.fs, top, directory, self.arguments.all);
        if let Some(error) = error {
            self.error(session, path, &error);
        }
        if self.arguments.directories {
            let is_directory = |attr: &Attr| attr.file_type == FileType::Directory;
            entries.retain(|entry| entry.attr.as_ref().map_or(true, is_directory));
        }
        ShownLevel { path_len: path.len(), entries: entries.into_iter(), is_last }
    }

    fn line(
        &mut self,
        session: &PlaceSession,
        above: impl Iterator<Item = bool>,
        is_last: bool,
        name: &[u8],
        attr: &Attr,
    ) -> Result {
        for is_last in above {
            self.out.write_all(if is_last { "    " } else { "│   " }.as_bytes())?;
        }
        self.out.write_all(if is_last { "└── " } else { "├── " }.as_bytes())?;
        write_name(self.out, name)?;
        // An unreadable target is left out: the tree shows names.
        if attr.file_type == FileType::Symlink
            && let Ok(target) = session.fs.read_link(attr.file)
        {
            self.out.write_all(b" -> ")?;
            write_name(self.out, &target)?;
        }
        Ok(writeln!(self.out)?)
    }

    fn record(&mut self, session: &PlaceSession, path: &[u8], attr: &Attr) -> Result {
        let volume = json_name(session.volume.as_os_str().as_bytes());
        let is_link = attr.file_type == FileType::Symlink;
        let target = is_link.then(|| session.fs.read_link(attr.file).ok()).flatten();
        Ok(write_line(self.out, &FileRecord::new(&volume, path, attr, target.as_deref()))?)
    }

    fn sum(&mut self) -> Result {
        if self.arguments.json {
            return Ok(());
        }
        let some = |count: u64, one: &str, many: &str| {
            format!("{count} {}", if count == 1 { one } else { many })
        };
        write!(self.out, "\n{}", some(self.directories, "directory", "directories"))?;
        if !self.arguments.directories {
            write!(self.out, ", {}", some(self.files, "file", "files"))?;
        }
        Ok(writeln!(self.out)?)
    }

    fn error(&mut self, session: &PlaceSession, path: &[u8], error: &Error) {
        let text = format_args!("{}: {}", Escaped(path), Nameless(error));
        self.failures.inside(&session.volume, ExitStatus::of(error), &text);
    }
}
