//! `offshoot ls`: what is in directories.
//!
//! Names are sorted by their bytes, as `ls` does in the C locale. A directory is sorted in
//! memory as long as no more than [`SORTED_MAX`] entries are held on all levels together; a
//! larger one is shown in its own order, as it comes. With `-R` the directories below a
//! directory follow it, where [`may_enter`] lets them, so cycles in a hostile image end.
//!
//! Several places are shown as ls shows them: files first, then the directories, each
//! under its path. A place that is not there is reported, and the others are shown.

use std::io::Write;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use offshoot_vfs::{Attr, Errno, Error, FileId, FileSystem, FileType};

use crate::args::LsArguments;
use crate::enter::{Entrance, attr_of, may_enter};
use crate::exit::{ExitStatus, Failure, Nameless, Result};
use crate::output::{CivilTime, Console, Escaped, FileRecord, JsonArray, ModeLetters, json_name};
use crate::places::{Failures, Places};
use crate::resolve::LastLink;
use crate::session::PlaceSession;

/// How many entries are held in memory to be sorted.
const SORTED_MAX: usize = 1_000_000;

/// How many entries are read from a directory at a time.
const BATCH: usize = 1024;

/// The longest path that `-R` goes down, in bytes.
const PATH_MAX: usize = 64 * 1024;

/// How many errors are printed before they are only counted.
const ERRORS_PRINTED: u64 = 50;

pub(super) fn run(arguments: &LsArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    // As in ls: with -l a link is shown, without it what it leads to.
    let last = if arguments.long { LastLink::Keep } else { LastLink::Follow };
    let mut places = Places::new(&arguments.places, console);
    let mut failures = Failures::new(&places);
    let (mut files, mut directories) = (Vec::new(), Vec::new());
    while let Some(place) = places.next() {
        match place.map(|session| find(session, last)) {
            Ok(Ok(top)) if top.attr.file_type == FileType::Directory => directories.push(top),
            Ok(Ok(top)) => files.push(top),
            Ok(Err((volume, failure))) => failures.inside(&volume, failure.status(), &failure),
            Err(failure) => failures.opening(&failure),
        }
    }
    if files.is_empty() && directories.is_empty() {
        return failures.result();
    }
    let form = match (arguments.json, arguments.long) {
        (true, _) => Form::Json(JsonArray::new(out)?),
        (false, true) => Form::Long(out),
        (false, false) => Form::Names(out),
    };
    let is_recursive = arguments.recursive;
    let has_headers = is_recursive || arguments.places.places.len() > 1;
    let mut listing = Listing {
        form,
        console,
        failures,
        errors: 0,
        without_target: None,
        is_recursive,
        has_headers,
        is_empty: true,
    };
    for top in files.into_iter().chain(directories) {
        listing.top(top)?;
    }
    listing.finish()
}

/// What a place leads to.
struct Top {
    session: PlaceSession,
    file: FileId,
    attr: Attr,
}

fn find(session: PlaceSession, last: LastLink) -> Result<Top, (PathBuf, Failure)> {
    let found = session.file(last).and_then(|file| Ok((file, session.fs.attr(file)?)));
    match found {
        Ok((file, attr)) => Ok(Top { session, file, attr }),
        Err(error) => Err((session.volume, error)),
    }
}

enum Form<'o> {
    Names(&'o mut dyn Write),
    Long(&'o mut dyn Write),
    Json(JsonArray<&'o mut dyn Write>),
}

/// All places of the command line.
struct Listing<'a, 'o> {
    form: Form<'o>,
    console: &'a Console,
    failures: Failures<'a>,
    errors: u64,
    /// How many symbolic links a metadata dump has no target of, and the path of the first one.
    without_target: Option<(u64, Vec<u8>)>,
    is_recursive: bool,
    /// Whether the path of a directory stands above what is in it.
    has_headers: bool,
    /// Whether nothing was written yet.
    is_empty: bool,
}

/// One of them.
struct Tree<'l, 'a, 'o> {
    listing: &'l mut Listing<'a, 'o>,
    fs: &'l dyn FileSystem,
    /// Where it begins.
    top: FileId,
    volume: &'l Path,
    /// The volume as a JSON name.
    json_volume: String,
}

struct Named {
    name: Vec<u8>,
    file: FileId,
    cookie: u64,
}

/// A directory whose subdirectories are being listed.
struct Level {
    directory: FileId,
    /// The length of its path, with which the path of every level below begins.
    path_len: usize,
    /// The subdirectories that are still to come.
    todo: std::vec::IntoIter<Named>,
    /// Where to read more of them, when the directory was not sorted.
    after: Option<u64>,
}

impl Listing<'_, '_> {
    /// Lists one place.
    fn top(&mut self, top: Top) -> Result {
        let Top { session: PlaceSession { volume, fs, path }, file, attr } = top;
        let json_volume = json_name(volume.as_os_str().as_bytes());
        let mut tree = Tree { listing: self, fs: &fs, top: file, volume: &volume, json_volume };
        if attr.file_type == FileType::Directory {
            return tree.directory(path);
        }
        let name = tree.full_path(&path);
        tree.show(&path, &name, &attr)
    }

    fn finish(self) -> Result {
        if let Form::Json(array) = self.form {
            array.finish()?;
        }
        if let Some((count, first)) = self.without_target {
            self.console.error(&format_args!(
                "{count} symbolic links without a target, which metadata dumps have none of (the first: {})",
                Escaped(&first)
            ));
        }
        if self.errors > ERRORS_PRINTED {
            let hidden = self.errors - ERRORS_PRINTED;
            self.console.error(&format_args!("and {hidden} more errors like these"));
        }
        self.failures.result()
    }
}

impl Tree<'_, '_, '_> {
    /// A path with the volume in front of it where that is needed to tell it from others.
    fn full_path(&self, path: &[u8]) -> Vec<u8> {
        if self.listing.failures.names_volume() {
            [self.volume.as_os_str().as_bytes(), b":", path].concat()
        } else {
            path.to_vec()
        }
    }

    fn directory(&mut self, mut path: Vec<u8>) -> Result {
        let mut levels = Vec::new();
        let mut held = 0;
        self.begin(&path)?;
        self.enter(&mut levels, &mut held, self.top, &path)?;
        while self.listing.is_recursive
            && let Some(level) = levels.last_mut()
        {
            path.truncate(level.path_len);
            let Some(next) = level.todo.next() else {
                if let Some(after) = level.after {
                    // What cannot be read was reported when the directory was listed.
                    let batch = self.batch(level.directory, after);
                    let (entries, is_last) = batch.unwrap_or((Vec::new(), true));
                    level.after = entries.last().map(|e| e.cookie).filter(|_| !is_last);
                    level.todo = self.directories(entries).into_iter();
                } else {
                    levels.pop();
                }
                continue;
            };
            held = held.saturating_sub(1);
            path = join(&path, &next.name);
            match self.may_enter(level.directory, &next, path.len()) {
                Ok(Entrance::Walk) => {
                    self.begin(&path)?;
                    self.enter(&mut levels, &mut held, next.file, &path)?;
                }
                // There is nothing in it.
                Ok(Entrance::StandIn) => self.begin(&path)?,
                Err(error) => self.error(&path, &error),
            }
        }
        Ok(())
    }

    /// Lists a directory, and keeps what is needed to go below it.
    fn enter(
        &mut self,
        levels: &mut Vec<Level>,
        held: &mut usize,
        directory: FileId,
        path: &[u8],
    ) -> Result {
        let mut entries = Vec::new();
        let mut after = 0;
        let mut is_complete = false;
        while !is_complete && *held + entries.len() < SORTED_MAX {
            let (batch, is_last) = self.batch_or_report(directory, after, path);
            after = batch.last().map_or(after, |entry| entry.cookie);
            is_complete = is_last;
            entries.extend(batch);
        }
        if is_complete {
            entries.sort_unstable_by(|a, b| a.name.cmp(&b.name));
            for entry in &entries {
                self.entry(path, entry)?;
            }
            let todo = self.directories(entries);
            *held += todo.len();
            levels.push(Level {
                directory,
                path_len: path.len(),
                todo: todo.into_iter(),
                after: None,
            });
            return Ok(());
        }
        while !entries.is_empty() {
            for entry in &entries {
                self.entry(path, entry)?;
            }
            let last = if is_complete { None } else { entries.last().map(|e| e.cookie) };
            entries = Vec::new();
            if let Some(last) = last {
                (entries, is_complete) = self.batch_or_report(directory, last, path);
            }
        }
        levels.push(Level {
            directory,
            path_len: path.len(),
            todo: Vec::new().into_iter(),
            after: Some(0),
        });
        Ok(())
    }

    fn batch_or_report(&mut self, dir: FileId, after: u64, path: &[u8]) -> (Vec<Named>, bool) {
        self.batch(dir, after).unwrap_or_else(|error| {
            self.error(path, &error);
            (Vec::new(), true)
        })
    }

    /// The next entries of a directory, and whether they are the last ones.
    fn batch(&self, directory: FileId, after: u64) -> Result<(Vec<Named>, bool), Error> {
        let mut batch: Vec<Named> = Vec::new();
        let mut last = after;
        let mut descends = false;
        self.fs.read_dir(directory, after, &mut |entry| {
            descends = entry.cookie <= last;
            if descends || batch.len() == BATCH {
                return ControlFlow::Break(());
            }
            last = entry.cookie;
            batch.push(Named { name: entry.name.to_vec(), file: entry.file, cookie: last });
            ControlFlow::Continue(())
        })?;
        if descends {
            return Err(Error::corrupt("directory", "its entries are not in ascending order"));
        }
        let is_last = batch.len() < BATCH;
        Ok((batch, is_last))
    }

    /// Those of the entries that `-R` goes down to. What is wrong with the others was said.
    fn directories(&self, entries: Vec<Named>) -> Vec<Named> {
        if !self.listing.is_recursive {
            return Vec::new();
        }
        let is_directory =
            |file| self.fs.attr(file).is_ok_and(|attr| attr.file_type == FileType::Directory);
        entries.into_iter().filter(|entry| is_directory(entry.file)).collect()
    }

    fn may_enter(
        &self,
        directory: FileId,
        entry: &Named,
        path_len: usize,
    ) -> Result<Entrance, Error> {
        if path_len > PATH_MAX {
            return Err(Error::Unsupported(format!("a path of more than {PATH_MAX} bytes")));
        }
        may_enter(self.fs, self.top, directory, &entry.name, entry.file)
    }

    fn begin(&mut self, path: &[u8]) -> Result {
        let header = self.full_path(path);
        let Listing { form, has_headers, is_empty, .. } = &mut *self.listing;
        if let Form::Names(out) | Form::Long(out) = form
            && *has_headers
        {
            let gap = if std::mem::take(is_empty) { "" } else { "\n" };
            writeln!(out, "{gap}{}:", Escaped(&header))?;
        }
        Ok(())
    }

    fn entry(&mut self, directory: &[u8], entry: &Named) -> Result {
        let found = attr_of(self.fs, &entry.name, entry.file);
        if let Form::Names(out) = &mut self.listing.form {
            // The name is there, whatever it leads to.
            writeln!(out, "{}", Escaped(&entry.name))?;
        }
        match found {
            Ok(_) if matches!(self.listing.form, Form::Names(_)) => Ok(()),
            Ok(attr) => self.show(&join(directory, &entry.name), &entry.name, &attr),
            Err(error) => {
                self.error(&join(directory, &entry.name), &error);
                Ok(())
            }
        }
    }

    fn show(&mut self, path: &[u8], name: &[u8], attr: &Attr) -> Result {
        self.listing.is_empty = false;
        if let Form::Names(out) = &mut self.listing.form {
            return Ok(writeln!(out, "{}", Escaped(name))?);
        }
        let mut target = None;
        if attr.file_type == FileType::Symlink {
            match self.fs.read_link(attr.file) {
                Ok(found) => target = Some(found),
                Err(Error::Posix { errno: Errno::NODATA, .. }) => self.without_target(path),
                Err(error) => self.error(path, &error),
            }
        }
        match &mut self.listing.form {
            Form::Json(array) => {
                array.push(&FileRecord::new(&self.json_volume, path, attr, target.as_deref()))?;
            }
            Form::Long(out) | Form::Names(out) => {
                write!(
                    out,
                    "{} {:>3} {:>5} {:>5} {:>12} {:#} {}",
                    ModeLetters(attr.file_type, attr.permissions),
                    attr.nlink,
                    attr.uid,
                    attr.gid,
                    size_or_device(attr),
                    CivilTime(attr.mtime),
                    Escaped(name)
                )?;
                match target {
                    Some(target) => writeln!(out, " -> {}", Escaped(&target))?,
                    None => writeln!(out)?,
                }
            }
        }
        Ok(())
    }

    /// Notes a symbolic link that a metadata dump has no target of.
    fn without_target(&mut self, path: &[u8]) {
        let Listing { failures, without_target, .. } = &mut *self.listing;
        failures.note(ExitStatus::Failed);
        let (count, _) = without_target.get_or_insert_with(|| (0, path.to_vec()));
        *count += 1;
    }

    fn error(&mut self, path: &[u8], error: &Error) {
        let Listing { failures, errors, .. } = &mut *self.listing;
        let status = ExitStatus::of(error);
        *errors += 1;
        if *errors <= ERRORS_PRINTED {
            let text = format_args!("{}: {}", Escaped(path), Nameless(error));
            failures.inside(self.volume, status, &text);
        } else {
            failures.note(status);
        }
    }
}

fn size_or_device(attr: &Attr) -> String {
    match attr.file_type {
        FileType::CharDevice | FileType::BlockDevice => {
            format!("{}, {}", attr.rdev.0, attr.rdev.1)
        }
        _ => attr.size.to_string(),
    }
}

fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    let directory = directory.strip_suffix(b"/").unwrap_or(directory);
    [directory, b"/", name].concat()
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::args::{OpenArguments, PlacesArguments, TreeArguments};
    use crate::extract::testing::{Memory, id};

    /// The start was listed, and then again below itself, without an end.
    #[test]
    fn a_cycle_through_the_start_ends_at_the_start() {
        let mut fs = Memory::new();
        fs.node(300, FileType::Directory).parent = Some((301, b"again".to_vec()));
        fs.add(300, b"below", 301, FileType::Directory);
        fs.enter(301, b"again", 300);
        let open = OpenArguments::default();
        let tree = TreeArguments { subvolume: None, open };
        let arguments = PlacesArguments { places: vec![OsString::from("volume:/start")], tree };
        let console = Arc::new(Console::default());
        let failures = Failures::new(&Places::new(&arguments, &console));
        let mut out = Vec::new();
        let mut listing = Listing {
            form: Form::Names(&mut out),
            console: &console,
            failures,
            errors: 0,
            without_target: None,
            is_recursive: true,
            has_headers: true,
            is_empty: true,
        };
        let (volume, json_volume) = (Path::new("volume"), String::new());
        let mut tree = Tree { listing: &mut listing, fs: &fs, top: id(300), volume, json_volume };
        tree.directory(b"/start".to_vec()).unwrap();
        assert_eq!(listing.errors, 1);
        assert_eq!(listing.finish().unwrap_err().status(), ExitStatus::Corrupt);
        assert_eq!(out, b"/start:\nbelow\n\n/start/below:\nagain\n");
    }
}
