//! `offshoot find`: looks for files.
//!
//! The walk evaluates the expression for each file, as find does: the parts of an `and` until one
//! is false, those of an `or` until one is true. Only `-delete` opens the volume for writing.

mod expression;

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use offshoot_vfs::enter::is_empty;
use offshoot_vfs::globs::expand;
use offshoot_vfs::path::{LastLink, resolve, resolve_end};
use offshoot_vfs::walk::{DEPTH_MAX, WalkVisitor, WalkedFile, walk};
use offshoot_vfs::{
    Attr, Errno, Error, FileId, FileSystemMut, FileType, HeldFiles, Nameless, Timestamp,
};

use super::rm::require_name;
use crate::args::FindArguments;
use crate::edit::{joined, moment, require_one_volume, say_if_interrupted, sync};
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::interrupt::{self, is_interrupted};
use crate::output::{
    Console, Escaped, FileRecord, OwnerNames, json_name, shown_inode, write_line, write_name,
};
use crate::place::VolumePath;
use crate::places::Failures;
use crate::session::{Access, OpenTree, Opening, open_tree};
use expression::{
    Expression, NumberMatch, Numbered, PermissionMatch, Search, Which, beginning, parse,
};

pub(super) fn run(
    arguments: &FindArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let now = moment()?;
    let (places, words) = arguments.words.split_at(beginning(&arguments.words));
    let search = parse(words, now).map_err(VerbFailure::Usage)?;
    if places.is_empty() {
        return Err(VerbFailure::Usage("where to look is missing: VOLUME or VOLUME:/PATH".into()));
    }
    let access = if search.expression.has(|part| matches!(part, Expression::Delete)) {
        Access::Write
    } else {
        Access::Read
    };
    let places: Vec<VolumePath> =
        places.iter().map(|text| arguments.tree.open.place(text)).collect();
    let mut failures = Failures::new(console);
    let mut failed = None;
    if access == Access::Write {
        interrupt::watch(console)?;
    }
    let mut opened: Vec<(std::path::PathBuf, OpenTree)> = Vec::new();
    for VolumePath { volume, path } in places {
        let known = opened.iter().find(|(known, _)| *known == volume).map(|(_, fs)| fs.clone());
        let fs = match known {
            Some(fs) => fs,
            None => match Opening::of_verb(access)
                .and_then(|opening| open_tree(&volume, &arguments.tree, opening, console))
            {
                Ok(fs) => {
                    opened.push((volume.clone(), fs.clone()));
                    fs
                }
                Err(failure) => {
                    failures.opening(&failure);
                    continue;
                }
            },
        };
        let mut finding = Finding {
            search: &search,
            is_json: arguments.json,
            now,
            fs: &*fs,
            volume: &volume,
            owners: OwnerNames::of(&*fs),
            newer: Vec::new(),
            out: &mut *out,
            failures: &mut failures,
            top: Vec::new(),
            failed: None,
        };
        match finding.prepare().and_then(|()| expand(&*fs, &path)) {
            Ok(paths) => {
                for path in paths {
                    if let Err(error) = finding.place(&path) {
                        finding.whole_error(&error);
                    }
                    if finding.is_over() {
                        break;
                    }
                }
            }
            Err(error) => finding.whole_error(&error),
        }
        failed = finding.failed.take();
        if failed.is_some() || is_interrupted() {
            break;
        }
    }
    // Changes are made durable even if standard output cannot be written any more.
    if access == Access::Write {
        let mut is_stored = true;
        for (volume, fs) in &opened {
            is_stored &= sync(fs, volume, false, &mut failures);
        }
        say_if_interrupted(is_stored, console, &mut failures);
    }
    failed.map_or_else(|| failures.result(), Err)
}

/// A search below one place.
struct Finding<'a, 'f> {
    search: &'a Search,
    is_json: bool,
    now: Timestamp,
    fs: &'a dyn FileSystemMut,
    volume: &'a Path,
    owners: OwnerNames,
    /// The modification times of the files that `-newer` compares with.
    newer: Vec<(&'a OsString, Timestamp)>,
    out: &'a mut dyn Write,
    failures: &'a mut Failures<'f>,
    /// The path of the place.
    top: Vec<u8>,
    /// Why no more can be written.
    failed: Option<VerbFailure>,
}

/// A file for which the expression is evaluated.
struct Candidate<'c> {
    /// Its path in the volume.
    path: &'c [u8],
    name: &'c [u8],
    attr: &'c Attr,
    depth: usize,
    /// The directory and the name in it, if the file can be removed.
    place: Option<(FileId, &'c [u8])>,
}

impl<'a> Finding<'a, '_> {
    /// Looks up the times and owners that the expression compares with.
    fn prepare(&mut self) -> Result<(), Error> {
        let (mut places, mut owners) = (Vec::new(), Vec::new());
        self.search.expression.visit(&mut |test| match test {
            Expression::Newer(place) => places.push(place),
            Expression::User(name) => owners.push(("user", name, self.owners.uid(name))),
            Expression::Group(name) => owners.push(("group", name, self.owners.gid(name))),
            _ => {}
        });
        for text in places {
            let place = VolumePath::parse(text);
            let both =
                [place.clone(), VolumePath { volume: self.volume.to_owned(), path: Vec::new() }];
            require_one_volume("-newer", &both)
                .map_err(|failure| Error::posix(Errno::INVAL, failure.to_string()))?;
            let file = resolve(self.fs, &place.path, LastLink::Keep)?;
            self.newer.push((text, self.fs.attr(file)?.mtime));
        }
        // An unknown name must be an error: after a `!` it would match all files.
        if let Some((what, name, _)) = owners.iter().find(|(_, _, number)| number.is_none()) {
            let what = format!("no {what} is called {} in /etc of the volume", Escaped(name));
            return Err(Error::posix(Errno::INVAL, what));
        }
        Ok(())
    }

    fn place(&mut self, path: &[u8]) -> Result<(), Error> {
        let held = HeldFiles::new(self.fs);
        let end = resolve_end(&held, path, LastLink::Keep)?;
        let file = end.file.ok_or_else(|| Error::posix(Errno::NOENT, Escaped(path).to_string()))?;
        let attr = self.fs.attr(file)?;
        self.top = path.to_vec();
        let bare = path.strip_suffix(b"/").unwrap_or(path);
        let name = bare.rsplit(|&byte| byte == b'/').next().unwrap_or(b"/");
        let name = if name.is_empty() { &b"/"[..] } else { name };
        // A directory named by `.` or `..` is not removed, only its contents.
        let place = end.place.as_ref().filter(|_| require_name(bare).is_ok());
        let place = place.map(|(dir, name)| (*dir, &name[..]));
        let top = Candidate { path, name, attr: &attr, depth: 0, place };
        let is_directory = attr.file_type == FileType::Directory;
        let mut is_pruned = false;
        if !self.search.is_depth_first {
            is_pruned = self.show(&top);
        }
        if is_directory && !is_pruned && self.search.max_depth > 0 {
            walk(self.fs, file, 0, DEPTH_MAX, &mut FindWalk { finding: self, levels: Vec::new() });
        }
        if self.search.is_depth_first && !self.is_over() {
            self.show(&top);
        }
        Ok(())
    }

    /// Evaluates the expression for a file. Returns whether the walk must not go below it.
    fn show(&mut self, candidate: &Candidate<'_>) -> bool {
        if candidate.depth < self.search.min_depth || candidate.depth > self.search.max_depth {
            return false;
        }
        let mut is_pruned = false;
        self.is(&self.search.expression, candidate, &mut is_pruned);
        is_pruned
    }

    fn is(&mut self, expression: &'a Expression, one: &Candidate<'_>, prunes: &mut bool) -> bool {
        let attr = one.attr;
        match expression {
            Expression::And(parts) => parts.iter().all(|part| self.is(part, one, prunes)),
            Expression::Or(parts) => parts.iter().any(|part| self.is(part, one, prunes)),
            Expression::Not(part) => !self.is(part, one, prunes),
            Expression::Name(pattern) => pattern.matches(one.name),
            Expression::Path(pattern) => pattern.matches(one.path),
            Expression::Types(types) => types.contains(&attr.file_type),
            Expression::Size { unit, count } => count.is(attr.size.div_ceil(*unit)),
            Expression::Empty => match attr.file_type {
                FileType::Regular => attr.size == 0,
                FileType::Directory => match is_empty(self.fs, attr.file) {
                    Ok(is_empty) => is_empty,
                    Err(error) => {
                        self.error(one.path, &error);
                        false
                    }
                },
                _ => false,
            },
            Expression::Age { time, unit_secs, count } => {
                let time = match time {
                    Which::Access => attr.atime,
                    Which::Modification => attr.mtime,
                    Which::Change => attr.ctime,
                };
                is_so_old(self.now, time, *unit_secs, *count)
            }
            Expression::NewerThan(time) => is_later(attr.mtime, *time),
            Expression::Newer(place) => self
                .newer
                .iter()
                .find(|(known, _)| *known == place)
                .is_some_and(|(_, time)| is_later(attr.mtime, *time)),
            Expression::Permissions { mode, kind } => match kind {
                PermissionMatch::Just => attr.permissions == *mode,
                PermissionMatch::All => attr.permissions & mode == *mode,
                PermissionMatch::Any => *mode == 0 || attr.permissions & mode != 0,
            },
            Expression::User(name) => self.owners.uid(name) == Some(attr.uid),
            Expression::Group(name) => self.owners.gid(name) == Some(attr.gid),
            Expression::Number { what, count } => count.is(match what {
                Numbered::Uid => attr.uid.into(),
                Numbered::Gid => attr.gid.into(),
                Numbered::Links => attr.nlink.into(),
                Numbered::Inode => shown_inode(attr.file),
            }),
            Expression::Print => self.print(one, b"\n"),
            Expression::Print0 => self.print(one, b"\0"),
            Expression::Delete => self.delete(one),
            Expression::Prune => {
                *prunes = true;
                true
            }
            Expression::Always(is) => *is,
        }
    }

    fn print(&mut self, one: &Candidate<'_>, end: &[u8]) -> bool {
        let volume = self.volume.as_os_str().as_bytes();
        let written: Result = if self.is_json {
            let is_link = one.attr.file_type == FileType::Symlink;
            let target = is_link.then(|| self.fs.read_link(one.attr.file).ok()).flatten();
            let volume = json_name(volume);
            let record = FileRecord::new(&volume, one.path, one.attr, target.as_deref());
            write_line(&mut *self.out, &record).map_err(Into::into)
        } else {
            let place = [volume, b":", one.path].concat();
            let name = write_name(&mut *self.out, &place);
            name.and_then(|()| self.out.write_all(end)).map_err(Into::into)
        };
        self.failed = self.failed.take().or(written.err());
        true
    }

    /// Removes a file. If the place is the root of the volume, it stays.
    fn delete(&mut self, one: &Candidate<'_>) -> bool {
        let Some((dir, name)) = one.place else { return true };
        let place = offshoot_vfs::EntryPlace { dir, name };
        let removed = if one.attr.file_type == FileType::Directory {
            if one.attr.file.dev == dir.dev {
                self.fs.rmdir(place, self.now)
            } else {
                Err(super::rm::subvolume(one.path))
            }
        } else {
            self.fs.unlink(place, self.now)
        };
        match removed {
            Ok(()) => true,
            Err(error) => {
                self.error(one.path, &error);
                false
            }
        }
    }

    /// Whether the search must stop.
    fn is_over(&self) -> bool {
        self.failed.is_some() || is_interrupted()
    }

    /// Prints an error whose message says where it happened.
    fn whole_error(&mut self, error: &Error) {
        self.failures.inside(self.volume, ExitStatus::of(error), error);
    }

    fn error(&mut self, path: &[u8], error: &Error) {
        let text = format_args!("{}: {}", Escaped(path), Nameless(error));
        self.failures.inside(self.volume, ExitStatus::of(error), &text);
    }
}

fn is_later(time: Timestamp, than: Timestamp) -> bool {
    (time.secs, time.nanos) > (than.secs, than.nanos)
}

/// Whether that many whole units have passed since `time`.
fn is_so_old(now: Timestamp, time: Timestamp, unit_secs: i64, count: NumberMatch) -> bool {
    let nanos = |time: Timestamp| i128::from(time.secs) * 1_000_000_000 + i128::from(time.nanos);
    let unit = i128::from(unit_secs) * 1_000_000_000;
    let age = nanos(now) - nanos(time);
    // As in find, minutes are compared exactly and days as whole days.
    if unit_secs == 60 {
        return match count {
            NumberMatch::Just(wanted) => {
                let wanted = i128::from(wanted) * unit;
                age > wanted - unit && age <= wanted
            }
            NumberMatch::More(wanted) => age > i128::from(wanted) * unit,
            NumberMatch::Less(wanted) => age < i128::from(wanted) * unit,
        };
    }
    match u64::try_from(age.div_euclid(unit)) {
        Ok(units) => count.is(units),
        // A time in the future is younger than any age.
        Err(_) => matches!(count, NumberMatch::Less(_)),
    }
}

/// The walk below a place.
struct FindWalk<'w, 'a, 'f> {
    finding: &'w mut Finding<'a, 'f>,
    /// The directories that the walk is in, if they are shown after their contents.
    levels: Vec<(Attr, FileId)>,
}

impl FindWalk<'_, '_, '_> {
    fn show(&mut self, entry: &WalkedFile<'_>, depth: usize) -> bool {
        let path = joined(&self.finding.top, entry.path);
        self.finding.show(&Candidate {
            path: &path,
            name: entry.name,
            attr: entry.attr,
            depth,
            place: Some((entry.parent, entry.name)),
        })
    }
}

impl WalkVisitor for FindWalk<'_, '_, '_> {
    /// The depth of a directory; 0 for the place.
    type Directory = usize;

    fn enter(&mut self, depth: &usize, entry: &WalkedFile<'_>) -> Option<usize> {
        let depth = depth + 1;
        let is_other = entry.attr.file.dev != entry.parent.dev;
        let search = self.finding.search;
        if !search.is_depth_first {
            let is_pruned = self.show(entry, depth);
            let is_entered =
                !is_pruned && depth < search.max_depth && !(is_other && search.is_one_filesystem);
            return is_entered.then_some(depth);
        }
        if depth >= search.max_depth || is_other && search.is_one_filesystem {
            self.show(entry, depth);
            return None;
        }
        self.levels.push((*entry.attr, entry.parent));
        Some(depth)
    }

    fn visit(&mut self, depth: &usize, entry: &WalkedFile<'_>) {
        self.show(entry, depth + 1);
    }

    fn leave(&mut self, depth: usize, path: &[u8]) {
        if depth == 0 || !self.finding.search.is_depth_first {
            return;
        }
        let Some((attr, parent)) = self.levels.pop() else { return };
        let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
        let place = Some((parent, name));
        let path = joined(&self.finding.top, path);
        self.finding.show(&Candidate { path: &path, name, attr: &attr, depth, place });
    }

    fn failed(&mut self, path: &[u8], error: &Error) {
        let path = joined(&self.finding.top, path);
        self.finding.error(&path, error);
    }

    fn is_stopped(&self) -> bool {
        self.finding.is_over()
    }
}
