//! `offshoot ls`: lists directories.
//!
//! Names are sorted by their bytes, as `ls` does in the C locale, or by time or size. A directory
//! is sorted in memory as long as at most [`SORTED_MAX`] entries are held on all levels together. A
//! larger one is listed in its stored order. With `-R`, the directories below a directory follow it
//! if [`may_enter`] allows it, so cycles in a hostile image end.
//!
//! Several places are listed as in ls: files first, then the directories, each under its path. A
//! missing place is reported, and the others are listed.

mod color;
mod line;

use std::io::Write;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use offshoot_vfs::enter::{Entrance, attr_of, may_enter};
use offshoot_vfs::path::LastLink;
use offshoot_vfs::{Attr, Code, Errno, Error, FileId, FileSystem, FileType, Nameless, Structure};

use crate::args::LsArguments;
use crate::edit::{joined, place_in};
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::output::{Console, Escaped, FileRecord, JsonArray, OwnerNames, json_name, write_name};
use crate::places::{Failures, VolumePaths};
use crate::session::PlaceSession;
use line::{ListedFile, Style, Widths, has_acl, write_header, write_row};

/// How many entries are held in memory to be sorted.
const SORTED_MAX: usize = 1_000_000;

/// How many entries are read from a directory at a time.
const BATCH: usize = 1024;

/// The longest path that `-R` enters, in bytes.
const PATH_MAX: usize = 64 * 1024;

/// How many errors are printed before they are only counted.
const ERRORS_PRINTED: u64 = 50;

pub(super) fn run(arguments: &LsArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let style = Style::new(arguments);
    // As in ls: with -l or -d a link is listed itself, otherwise the file that it leads to.
    let is_kept = style.is_long || arguments.directory;
    let mut places = VolumePaths::new(&arguments.places, console);
    let names_volume = places.are_in_several_volumes();
    let mut failures = Failures::new(console);
    let (mut files, mut directories) = (Vec::new(), Vec::new());
    while let Some(place) = places.next() {
        match place.and_then(|session| find(session, is_kept)) {
            Ok(top) if top.attr.file_type == FileType::Directory && !arguments.directory => {
                directories.push(top);
            }
            Ok(top) => files.push(top),
            // As in ls, naming a missing file is an error in the command line.
            Err(VerbFailure::Inside(volume, error @ Error::Posix { .. })) => {
                failures.inside(&volume, ExitStatus::Usage, &error);
            }
            Err(failure) => failures.opening(&failure),
        }
    }
    if files.is_empty() && directories.is_empty() {
        return failures.result();
    }
    let count = arguments.places.places.len();
    let order = SortOrder::new(arguments);
    let key = |top: &Top| (order.key(Some(&top.attr)), top.session.path.clone());
    for tops in [&mut files, &mut directories] {
        tops.sort_by_cached_key(key);
        if order.is_reversed {
            tops.reverse();
        }
    }
    let form = if arguments.json { Form::Json(JsonArray::new(out)?) } else { Form::Lines(out) };
    let is_recursive = arguments.recursive && !arguments.directory;
    let mut listing = LsListing {
        form,
        style,
        order,
        hidden: match arguments {
            LsArguments { all: true, json: false, .. } => HiddenNames::WithDots,
            LsArguments { all: false, almost_all: false, json: false, .. } => HiddenNames::No,
            _ => HiddenNames::Yes,
        },
        console,
        failures,
        names_volume,
        errors: 0,
        without_target: None,
        is_recursive,
        has_headers: is_recursive || count.max(files.len() + directories.len()) > 1,
        is_empty: true,
    };
    listing.files(files, &directories)?;
    for top in directories {
        listing.directory(&top)?;
    }
    listing.finish()
}

/// A place and the file that it leads to.
struct Top {
    session: PlaceSession,
    file: FileId,
    attr: Attr,
}

fn find(session: PlaceSession, is_kept: bool) -> Result<Top> {
    let mut file = session.file(LastLink::Keep)?.file();
    if !is_kept {
        match session.file(LastLink::Follow).map(|held| held.file()) {
            Ok(end) if is_directory(&session, end)? => file = end,
            // A dangling link, or one that leads to no directory, is listed itself.
            Ok(_) | Err(VerbFailure::Inside(_, Error::Posix { errno: Errno::NOENT, .. })) => {}
            Err(failure) => return Err(failure),
        }
    }
    let attr = session.fs.attr(file).map_err(|error| session.named(error))?;
    Ok(Top { session, file, attr })
}

fn is_directory(session: &PlaceSession, file: FileId) -> Result<bool> {
    let attr = session.fs.attr(file).map_err(|error| session.named(error))?;
    Ok(attr.file_type == FileType::Directory)
}

enum Form<'o> {
    Lines(&'o mut dyn Write),
    Json(JsonArray<&'o mut dyn Write>),
}

/// Which names with a leading dot are listed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HiddenNames {
    No,
    Yes,
    /// With `.` and `..`.
    WithDots,
}

/// How the entries of a directory are sorted.
#[derive(Clone, Copy)]
struct SortOrder {
    is_by_time: bool,
    is_by_size: bool,
    is_reversed: bool,
}

impl SortOrder {
    fn new(arguments: &LsArguments) -> Self {
        let LsArguments { by_time: is_by_time, by_size: is_by_size, reverse: is_reversed, .. } =
            *arguments;
        Self { is_by_time, is_by_size, is_reversed }
    }

    fn needs_attr(self) -> bool {
        self.is_by_time || self.is_by_size
    }

    /// The first sort key, before the name. Files that cannot be read come last.
    fn key(self, attr: Option<&Attr>) -> i128 {
        let size = |attr: &Attr| i128::from(attr.size);
        let time = |attr: &Attr| {
            i128::from(attr.mtime.secs) * 1_000_000_000 + i128::from(attr.mtime.nanos)
        };
        match attr {
            Some(attr) if self.is_by_time => -time(attr),
            Some(attr) if self.is_by_size => -size(attr),
            None if self.needs_attr() => i128::MAX,
            _ => 0,
        }
    }
}

/// The listing of all places on the command line.
#[expect(clippy::struct_excessive_bools, reason = "each is a question of its own")]
struct LsListing<'a, 'o> {
    form: Form<'o>,
    style: Style,
    order: SortOrder,
    hidden: HiddenNames,
    console: &'a Console,
    failures: Failures<'a>,
    /// Whether the places are in several volumes, so that a path alone is ambiguous.
    names_volume: bool,
    errors: u64,
    /// How many symbolic links have no target because the image is a metadata dump, and the path of
    /// the first one.
    without_target: Option<(u64, Vec<u8>)>,
    is_recursive: bool,
    /// Whether each directory is listed under a line with its path.
    has_headers: bool,
    /// Whether no line was written yet.
    is_empty: bool,
}

/// The listing of one place.
struct ListedTree<'l, 'a, 'o> {
    listing: &'l mut LsListing<'a, 'o>,
    fs: &'l dyn FileSystem,
    /// The directory where the listing of the place begins.
    top: FileId,
    volume: &'l Path,
    /// The volume as a JSON name.
    json_volume: String,
    owners: OwnerNames,
    /// The widths of the columns of the current directory.
    widths: Widths,
}

struct Named {
    name: Vec<u8>,
    file: FileId,
    cookie: u64,
}

/// A directory whose subdirectories are being listed.
struct ListedLevel {
    directory: FileId,
    /// The length of its path. The path of every level below begins with it.
    path_len: usize,
    /// The subdirectories that are left.
    todo: std::vec::IntoIter<Named>,
    /// The cookie after which to read more of them, if the directory was not sorted.
    after: Option<u64>,
}

impl<'a, 'o> LsListing<'a, 'o> {
    /// Lists the places that are not directories. As in ls, all of them share the columns.
    fn files(&mut self, tops: Vec<Top>, directories: &[Top]) -> Result {
        let mut widths = Widths::default();
        let owners: Vec<OwnerNames> = tops.iter().map(|top| self.owners(&top.session)).collect();
        let mut include = |top: &Top, owners: &OwnerNames| {
            let has_acl = self.style.is_long && has_acl(&*top.session.fs, &top.attr);
            let row = ListedFile { attr: &top.attr, name: b"", owners, has_acl, target: None };
            widths.include(&row, &self.style);
        };
        tops.iter().zip(&owners).for_each(|(top, owners)| include(top, owners));
        for top in directories {
            include(top, &self.owners(&top.session));
        }
        for (Top { session, file, attr }, owners) in tops.into_iter().zip(owners) {
            let mut tree = self.tree(&session, file, owners, std::mem::take(&mut widths));
            let name = tree.full_path(&session.path);
            tree.show(&session.path, &name, &attr)?;
            widths = tree.widths;
        }
        Ok(())
    }

    /// Lists a place that is a directory.
    fn directory(&mut self, top: &Top) -> Result {
        let owners = self.owners(&top.session);
        let mut tree = self.tree(&top.session, top.file, owners, Widths::default());
        tree.directory(top.session.path.clone())
    }

    /// The names of users and groups, if they are shown.
    fn owners(&self, session: &PlaceSession) -> OwnerNames {
        if self.style.is_long { OwnerNames::of(&*session.fs) } else { OwnerNames::default() }
    }

    fn tree<'l>(
        &'l mut self,
        session: &'l PlaceSession,
        top: FileId,
        owners: OwnerNames,
        widths: Widths,
    ) -> ListedTree<'l, 'a, 'o> {
        let json_volume = json_name(session.volume.as_os_str().as_bytes());
        let (fs, volume) = (&*session.fs, &*session.volume);
        ListedTree { listing: self, fs, top, volume, json_volume, owners, widths }
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

impl ListedTree<'_, '_, '_> {
    /// The path, after the name of the volume if there are several volumes.
    fn full_path(&self, path: &[u8]) -> Vec<u8> {
        if self.listing.names_volume { place_in(self.volume, path) } else { path.to_vec() }
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
                    // An error was reported when the directory was listed.
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
            path = joined(&path, &next.name);
            match self.may_enter(level.directory, &next, path.len()) {
                Ok(Entrance::Walk) => {
                    self.begin(&path)?;
                    self.enter(&mut levels, &mut held, next.file, &path)?;
                }
                // It stands in for a subvolume that is elsewhere, so it is empty.
                Ok(Entrance::StandIn) => self.begin(&path)?,
                Err(error) => self.error(&path, &error),
            }
        }
        Ok(())
    }

    /// Lists a directory, and keeps what is needed to list those below it.
    fn enter(
        &mut self,
        levels: &mut Vec<ListedLevel>,
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
            self.sort(&mut entries);
            self.measure(directory, &entries)?;
            self.entries(directory, path, &entries)?;
            let todo = self.directories(entries);
            *held += todo.len();
            levels.push(ListedLevel {
                directory,
                path_len: path.len(),
                todo: todo.into_iter(),
                after: None,
            });
            return Ok(());
        }
        self.measure(directory, &entries)?;
        while !entries.is_empty() {
            self.entries(directory, path, &entries)?;
            let last = if is_complete { None } else { entries.last().map(|e| e.cookie) };
            entries = Vec::new();
            if let Some(last) = last {
                (entries, is_complete) = self.batch_or_report(directory, last, path);
            }
        }
        levels.push(ListedLevel {
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
            return Err(Error::corrupt(
                Structure::Directory,
                "its entries are not in ascending order",
            ));
        }
        let is_last = batch.len() < BATCH;
        Ok((batch, is_last))
    }

    /// Sorts entries by the options.
    fn sort(&self, entries: &mut [Named]) {
        let order = self.listing.order;
        if order.needs_attr() {
            let key = |entry: &Named| order.key(self.fs.attr(entry.file).ok().as_ref());
            entries.sort_by_cached_key(|entry| (key(entry), entry.name.clone()));
        } else {
            entries.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        }
        if order.is_reversed {
            entries.reverse();
        }
    }

    /// Whether an entry is listed.
    fn is_shown(&self, entry: &Named) -> bool {
        self.listing.hidden != HiddenNames::No || !entry.name.starts_with(b".")
    }

    /// `.` and `..`, if they are listed.
    fn dots(&self, directory: FileId) -> Vec<Named> {
        if self.listing.hidden != HiddenNames::WithDots {
            return Vec::new();
        }
        let parent =
            self.fs.parent(directory).ok().flatten().map_or(directory, |parent| parent.dir);
        let dot = |name: &[u8], file| Named { name: name.to_vec(), file, cookie: 0 };
        vec![dot(b".", directory), dot(b"..", parent)]
    }

    /// Makes the columns wide enough for the entries, and writes the total of their space. An entry
    /// that cannot be read is reported when it is listed.
    fn measure(&mut self, directory: FileId, entries: &[Named]) -> Result {
        self.widths = Widths::default();
        if !self.listing.style.has_columns() || matches!(self.listing.form, Form::Json(_)) {
            return Ok(());
        }
        for entry in self.dots(directory).iter().chain(entries) {
            let Ok(attr) = self.fs.attr(entry.file) else { continue };
            if self.is_shown(entry) {
                let style = &self.listing.style;
                let has_acl = style.is_long && has_acl(self.fs, &attr);
                let row = ListedFile {
                    attr: &attr,
                    name: b"",
                    owners: &self.owners,
                    has_acl,
                    target: None,
                };
                self.widths.include(&row, style);
            }
        }
        if let Form::Lines(out) = &mut self.listing.form
            && self.listing.style.is_long
        {
            write!(out, "{}", self.listing.style.total(self.widths.total))?;
            self.listing.style.end(out)?;
        }
        Ok(())
    }

    /// Lists entries of a directory, with `.` and `..` at their places.
    fn entries(&mut self, directory: FileId, path: &[u8], entries: &[Named]) -> Result {
        let mut dots = self.dots(directory);
        let is_reversed = self.listing.order.is_reversed;
        if self.listing.order.needs_attr() {
            // The two are sorted like all other entries.
            let mut all = dots;
            let copy = |entry: &Named| Named { name: entry.name.clone(), ..*entry };
            all.extend(entries.iter().map(copy));
            self.sort(&mut all);
            return all.iter().try_for_each(|entry| self.entry(path, entry));
        }
        if is_reversed {
            dots.reverse();
        } else {
            dots.iter().try_for_each(|entry| self.entry(path, entry))?;
        }
        entries.iter().try_for_each(|entry| self.entry(path, entry))?;
        if is_reversed { dots.iter().try_for_each(|entry| self.entry(path, entry)) } else { Ok(()) }
    }

    /// The entries that `-R` enters. Entries that cannot be read were reported before.
    fn directories(&self, entries: Vec<Named>) -> Vec<Named> {
        if !self.listing.is_recursive {
            return Vec::new();
        }
        let is_directory =
            |file| self.fs.attr(file).is_ok_and(|attr| attr.file_type == FileType::Directory);
        let is_entered = |entry: &Named| self.is_shown(entry) && is_directory(entry.file);
        entries.into_iter().filter(is_entered).collect()
    }

    fn may_enter(
        &self,
        directory: FileId,
        entry: &Named,
        path_len: usize,
    ) -> Result<Entrance, Error> {
        if path_len > PATH_MAX {
            return Err(Error::unsupported(
                Code::Unsupported,
                format!("a path of more than {PATH_MAX} bytes"),
            ));
        }
        may_enter(self.fs, self.top, directory, &entry.name, entry.file)
    }

    fn begin(&mut self, path: &[u8]) -> Result {
        let header = self.full_path(path);
        let LsListing { form, has_headers, is_empty, .. } = &mut *self.listing;
        if let Form::Lines(out) = form
            && *has_headers
        {
            if !std::mem::take(is_empty) {
                out.write_all(b"\n")?;
            }
            write_header(out, &header)?;
        }
        Ok(())
    }

    fn entry(&mut self, directory: &[u8], entry: &Named) -> Result {
        if !self.is_shown(entry) {
            return Ok(());
        }
        let is_plain = !self.listing.style.needs_attr();
        if let Form::Lines(out) = &mut self.listing.form
            && is_plain
        {
            // A plain name is written without reading the file.
            write_name(out, &entry.name)?;
            self.listing.style.end(out)?;
        }
        match attr_of(self.fs, &entry.name, entry.file) {
            Ok(_) if is_plain && matches!(self.listing.form, Form::Lines(_)) => Ok(()),
            Ok(attr) => self.show(&joined(directory, &entry.name), &entry.name, &attr),
            Err(error) => {
                self.error(&joined(directory, &entry.name), &error);
                Ok(())
            }
        }
    }

    fn show(&mut self, path: &[u8], name: &[u8], attr: &Attr) -> Result {
        self.listing.is_empty = false;
        let mut target = None;
        let is_json = matches!(self.listing.form, Form::Json(_));
        if attr.file_type == FileType::Symlink && (is_json || self.listing.style.is_long) {
            match self.fs.read_link(attr.file) {
                Ok(found) => target = Some(found),
                Err(Error::Posix { errno: Errno::NODATA, .. }) => self.without_target(path),
                Err(error) => self.error(path, &error),
            }
        }
        let target = target.as_deref();
        match &mut self.listing.form {
            Form::Json(array) => {
                array.push(&FileRecord::new(&self.json_volume, path, attr, target))?;
            }
            Form::Lines(out) => {
                let has_acl = self.listing.style.is_long && has_acl(self.fs, attr);
                let row = ListedFile { attr, name, owners: &self.owners, has_acl, target };
                write_row(out, &row, &self.widths, &mut self.listing.style)?;
            }
        }
        Ok(())
    }

    /// Counts a symbolic link that has no target because the image is a metadata dump.
    fn without_target(&mut self, path: &[u8]) {
        let LsListing { failures, without_target, .. } = &mut *self.listing;
        failures.note(ExitStatus::Failed);
        let (count, _) = without_target.get_or_insert_with(|| (0, path.to_vec()));
        *count += 1;
    }

    fn error(&mut self, path: &[u8], error: &Error) {
        let LsListing { failures, errors, .. } = &mut *self.listing;
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

#[cfg(test)]
mod tests {
    use clap::Parser;
    use offshoot_testkit::memory::{MemoryFilesystem, id};

    use super::*;
    use crate::args::{Arguments, Verb};

    /// Otherwise the start would be listed below itself, without end.
    #[test]
    fn a_cycle_through_the_start_ends_at_the_start() {
        let mut fs = MemoryFilesystem::new();
        fs.node(300, FileType::Directory).parent = Some((301, b"again".to_vec()));
        fs.add(300, b"below", 301, FileType::Directory);
        fs.enter(301, b"again", 300);
        let words = ["offshoot", "ls", "-R", "volume:/start"];
        let Verb::Ls(arguments) = Arguments::try_parse_from(words).unwrap().verb else { panic!() };
        let console = Console::default();
        let mut out = Vec::new();
        let mut listing = LsListing {
            form: Form::Lines(&mut out),
            style: Style::new(&arguments),
            order: SortOrder::new(&arguments),
            hidden: HiddenNames::No,
            console: &console,
            failures: Failures::new(&console),
            names_volume: false,
            errors: 0,
            without_target: None,
            is_recursive: true,
            has_headers: true,
            is_empty: true,
        };
        let mut tree = ListedTree {
            listing: &mut listing,
            fs: &fs,
            top: id(300),
            volume: Path::new("volume"),
            json_volume: String::new(),
            owners: OwnerNames::default(),
            widths: Widths::default(),
        };
        tree.directory(b"/start".to_vec()).unwrap();
        assert_eq!(listing.errors, 1);
        assert_eq!(listing.finish().unwrap_err().status(), ExitStatus::Corrupt);
        assert_eq!(out, b"/start:\nbelow\n\n/start/below:\nagain\n");
    }
}
