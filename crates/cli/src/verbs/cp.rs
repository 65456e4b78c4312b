//! `offshoot cp`: copy files and directories into, out of and between volumes.

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use offshoot_btrfs::{Filesystem, Volume};
use offshoot_vfs::{Errno, Error, FileId, FileSystem, FileType, Timestamp};
use rustix::fs::Mode;

use crate::args::{CpArguments, Reflink};
use crate::copy::{Goal, IntoVolume, Manner, Preserve, Shared, limits};
use crate::edit::{Aim, NewName, Volumes, moment};
use crate::exit::{ExitStatus, Failure, Result};
use crate::extract::{
    Counted, Counters, Limits, LinkTable, Onto, Problems, SafeName, Source, finish, while_counting,
};
use crate::globs::expand;
use crate::interrupt;
use crate::output::{Console, Escaped, human_size, write_line};
use crate::place::{Place, mistaken_for_place};
use crate::places::Failures;
use crate::resolve::{End, LastLink, at_path, climb_file, last_name, resolve, resolve_end};
use crate::session::Access;
use crate::stream::{StreamFailure, TextOnly, write_contents};

/// What is wrong with a copy from the host to the host.
const NEITHER_IN_VOLUME: &str = "neither side is in a volume: a place is VOLUME:/PATH";

/// One side of a copy.
enum Side {
    Host(PathBuf),
    Volume(Place),
    /// Standard input.
    Stream,
}

pub(super) fn run(arguments: &CpArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let at = moment()?;
    let preserve = Preserve::all_but(&arguments.no_preserve, at);
    let (first, last) = match (&arguments.target_directory, &arguments.paths[..]) {
        (Some(directory), sources) => (sources, directory),
        (None, [first @ .., last]) => (first, last),
        (None, []) => return Ok(()),
    };
    let manner = Manner::new(arguments)?;
    if first.is_empty() {
        return Err(Failure::Usage(format!("where to copy {} is missing", last.display())));
    }
    let sources = sources(first)?;
    let (problems, counters) = (Problems::new(console), Counters::default());
    let to_stdout = last == "-";
    if to_stdout {
        require_one_for_stdout(arguments)?;
    }
    let target = Place::parse_unless_host(last);
    let places = sources.iter().filter_map(|side| match side {
        Side::Volume(place) => Some(place),
        Side::Host(_) | Side::Stream => None,
    });
    if !to_stdout {
        interrupt::watch(console)?;
    }
    let mut volumes = Volumes::new(places.chain(&target), &arguments.edit, console)?;
    let mut failures = Failures::new(console);
    let target = match target {
        Some(place) => Some((volumes.open(&place.volume, Access::Write)?, place)),
        None => None,
    };
    let opened = open_sources(sources, &mut volumes, &mut failures)?;
    if to_stdout {
        for source in &opened {
            to_stdout_from(source, out)?;
        }
        return failures.result();
    }
    let progress = console.start_progress("copied");
    let devices = volumes.devices();
    let shared = Shared {
        preserve: &preserve,
        manner: &manner,
        problems: &problems,
        progress: &progress,
        counters: &counters,
        devices: &devices,
        reflink: match arguments.reflink {
            // What is to be compressed is written anew.
            Reflink::Auto if arguments.edit.storing.compress().is_some() => Reflink::Never,
            reflink => reflink,
        },
    };
    let into_directory = arguments.target_directory.is_some();
    let job = Copying { arguments, shared, at, count: opened.len(), into_directory };
    let counted = counted(&opened, target.is_some() && job.shared.reflink != Reflink::Never);
    let result = while_counting(&counted, &progress, || match &target {
        Some((fs, place)) => job.to_volume(&opened, fs, place, &mut failures),
        None => job.to_host(&opened, Path::new(last), &mut failures),
    });
    let is_stored = volumes.sync(&mut failures);
    console.stop_progress();
    result?;
    manner.finish()?;
    let (outcome, result) = finish(counters, problems);
    if interrupt::is_interrupted() {
        let (files, bytes) = (outcome.files, human_size(outcome.bytes));
        if is_stored {
            console.error(&format_args!(
                "interrupted: {files} files, {bytes}, were copied and are stored"
            ));
            console.detail(&"the others are not there, or not whole");
        } else {
            console.error(&"interrupted, and not everything that was copied is stored");
        }
        failures.note(ExitStatus::Failed);
    }
    if let Err(failure) = result {
        failures.note(failure.status());
    }
    if arguments.edit.json {
        write_line(out, &outcome)?;
    }
    failures.result()
}

/// What is to be copied, when that can be counted: not what comes in a stream, nor what is perhaps
/// shared instead.
fn counted<'a>(sources: &'a [Opened], may_share: bool) -> Vec<Counted<'a>> {
    let count = |source: &'a Opened| match source {
        Opened::Volume(_, fs, path) if !may_share => {
            let top = resolve(fs, path, LastLink::Follow).ok()?;
            Some(Counted::InVolume(fs, top))
        }
        Opened::Host(path) => Some(Counted::OnHost(path)),
        Opened::Volume(..) | Opened::Stream => None,
    };
    sources.iter().map(count).collect::<Option<_>>().unwrap_or_default()
}

/// Refuses what standard output cannot take besides one file.
fn require_one_for_stdout(arguments: &CpArguments) -> Result {
    let mistake = if arguments.paths.len() > 2 || arguments.target_directory.is_some() {
        "standard output (-) takes one source; `offshoot cat` writes several"
    } else if arguments.edit.json {
        "--json cannot be used with -, because standard output is the file"
    } else if arguments.reflink == Reflink::Always {
        "--reflink=always is for copies inside one volume"
    } else {
        return Ok(());
    };
    Err(Failure::Usage(mistake.into()))
}

/// Writes a source to standard output. A symbolic link is followed, because it has no data itself.
fn to_stdout_from(source: &Opened, out: &mut dyn Write) -> Result {
    let Opened::Volume(volume, fs, path) = source else {
        return Err(Failure::Usage(NEITHER_IN_VOLUME.into()));
    };
    let inside = |error| Failure::Inside(volume.clone(), error);
    let file = resolve(fs, path, LastLink::Follow).map_err(inside)?;
    let attr = fs.attr(file).map_err(|error| inside(at_path(error, path)))?;
    match attr.file_type {
        FileType::Regular => {}
        FileType::Directory => {
            let what = format!(
                "{}: standard output takes a file; `offshoot extract --tar -` writes a directory",
                Escaped(path)
            );
            return Err(inside(Error::posix(Errno::ISDIR, what)));
        }
        _ => {
            let what = format!("{} is no regular file", Escaped(path));
            return Err(inside(Error::posix(Errno::INVAL, what)));
        }
    }
    let mut out = TextOnly::new(out);
    write_contents(fs, file, attr.size, &mut out, |_| {}).map_err(|failure| match failure {
        StreamFailure::Source(error) => inside(error.in_file(Escaped(path))),
        StreamFailure::Target(error) => TextOnly::failure(error, path),
    })
}

fn sources(texts: &[OsString]) -> Result<Vec<Side>> {
    let side = |text: &OsString| match Place::parse_unless_host(text) {
        _ if text == "-" => Side::Stream,
        Some(place) => Side::Volume(place),
        None => Side::Host(text.into()),
    };
    let sources: Vec<Side> = texts.iter().map(side).collect();
    if sources.len() > 1 && sources.iter().any(|side| matches!(side, Side::Stream)) {
        return Err(Failure::Usage("standard input (-) must be the only source".into()));
    }
    Ok(sources)
}

/// A source whose volume is open.
enum Opened {
    Host(PathBuf),
    /// The volume, as the caller named it, and a path in it.
    Volume(PathBuf, Filesystem, Vec<u8>),
    Stream,
}

impl Opened {
    /// Its path, as the caller wrote it.
    fn path(&self) -> Option<&[u8]> {
        match self {
            Self::Host(path) => Some(path.as_os_str().as_bytes()),
            Self::Volume(_, _, path) => Some(path),
            Self::Stream => None,
        }
    }
}

/// A source in a volume.
struct Found {
    file: FileId,
    is_directory: bool,
    /// How it is shown.
    path: Vec<u8>,
}

/// The tables of hard links: these are kept inside of each filesystem, whose numbers are its own.
fn link_tables(sources: &[Opened]) -> Vec<Arc<Mutex<LinkTable>>> {
    let new = || Arc::new(Mutex::new(LinkTable::new()));
    let host = new();
    let mut volumes: Vec<(Arc<Volume>, Arc<Mutex<LinkTable>>)> = Vec::new();
    let table = |source: &Opened| {
        let Opened::Volume(_, fs, _) = source else { return host.clone() };
        let known = volumes.iter().find(|(volume, _)| Arc::ptr_eq(volume, fs.volume()));
        if let Some((_, table)) = known {
            return table.clone();
        }
        let table = new();
        volumes.push((fs.volume().clone(), table.clone()));
        table
    };
    sources.iter().map(table).collect()
}

/// Opens the volumes of all sources. One that does not open keeps only its own back.
fn open_sources(
    sources: Vec<Side>,
    volumes: &mut Volumes<'_>,
    failures: &mut Failures<'_>,
) -> Result<Vec<Opened>> {
    let mut opened = Vec::new();
    for source in sources {
        match source {
            Side::Host(path) => opened.push(Opened::Host(path)),
            Side::Stream => opened.push(Opened::Stream),
            Side::Volume(Place { volume, path }) => match volumes.open(&volume, Access::Read) {
                Ok(fs) => {
                    let paths = expand(&fs, &path);
                    let paths = paths.map_err(|error| Failure::Inside(volume.clone(), error))?;
                    let one = |path| Opened::Volume(volume.clone(), fs.clone(), path);
                    opened.extend(paths.into_iter().map(one));
                }
                Err(failure) => failures.opening(&failure),
            },
        }
    }
    Ok(opened)
}

/// One command.
struct Copying<'a> {
    arguments: &'a CpArguments,
    shared: Shared<'a>,
    at: Timestamp,
    /// How many sources there are.
    count: usize,
    /// The destination must be a directory (`-t`).
    into_directory: bool,
}

impl Copying<'_> {
    /// What a link at the end of a source means.
    fn last_link(&self) -> LastLink {
        let is_kept = self.arguments.recursive || self.arguments.no_dereference;
        if is_kept { LastLink::Keep } else { LastLink::Follow }
    }

    /// How many sources there are, or more where the destination must be a directory.
    fn count(&self) -> usize {
        if self.into_directory { self.count.max(2) } else { self.count }
    }

    fn to_volume(
        &self,
        sources: &[Opened],
        fs: &Filesystem,
        Place { volume, path }: &Place,
        failures: &mut Failures<'_>,
    ) -> Result {
        let is_name = self.arguments.no_target_directory;
        let aim = Aim::of(fs, path, is_name, self.count(), LastLink::Follow)
            .map_err(|error| Failure::Inside(volume.clone(), error))?;
        if let Aim::Name(End { file: Some(file), .. }) = &aim {
            require_written_through(fs, path, *file)
                .map_err(|error| Failure::Inside(volume.clone(), error))?;
        }
        // What leads nowhere is replaced by a link, and written through by nothing.
        let is_dangling = matches!(&aim, Aim::Name(End { file: None, .. }))
            && resolve(fs, path, LastLink::Keep).is_ok();
        let limits = limits()?;
        for (source, links) in sources.iter().zip(&link_tables(sources)) {
            if self.shared.problems.is_stopped() {
                break;
            }
            if source.path().is_some_and(|path| self.shared.manner.leaves_out_source(path)) {
                continue;
            }
            let into = IntoVolume::new(fs, volume, self.at, self.shared, links);
            let aim = match is_dangling {
                true if self.is_link(source) => Aim::of(fs, path, is_name, 1, LastLink::Keep),
                true => {
                    failures.opening(&Failure::Inside(volume.clone(), dangling(path)));
                    continue;
                }
                false => Ok(aim.clone()),
            };
            let aim = aim.map_err(|error| Failure::Inside(volume.clone(), error))?;
            if let Err(failure) =
                self.one_to_volume(&into, source, fs, &aim, (volume, path), limits)
            {
                failures.opening(&failure);
            }
        }
        Ok(())
    }

    /// Whether a source is a symbolic link that is copied as one.
    fn is_link(&self, source: &Opened) -> bool {
        self.last_link() == LastLink::Keep
            && match source {
                Opened::Host(path) => path.is_symlink(),
                Opened::Volume(_, fs, path) => resolve(fs, path, LastLink::Keep)
                    .and_then(|file| fs.attr(file))
                    .is_ok_and(|attr| attr.file_type == FileType::Symlink),
                Opened::Stream => false,
            }
    }

    fn one_to_volume(
        &self,
        into: &IntoVolume<'_>,
        source: &Opened,
        fs: &Filesystem,
        aim: &Aim,
        (volume, path): (&Path, &[u8]),
        limits: Limits,
    ) -> Result {
        let recursive = self.arguments.recursive;
        let is_link_kept = self.last_link() == LastLink::Keep;
        let inside = |error| Failure::Inside(volume.to_path_buf(), error);
        match source {
            Opened::Stream => {
                let goal = stream_goal(aim, fs, path).map_err(inside)?;
                into.stream(OsStr::new("-"), self.shared.preserve.of_stream(), &goal);
            }
            Opened::Host(file) => {
                let name = file.as_os_str().as_bytes();
                let goal = goal(aim, fs, path, name, file.is_dir()).map_err(inside)?;
                let is_regular = file.is_file() && !(is_link_kept && file.is_symlink());
                let goal = through_link(goal, fs, is_regular).map_err(inside)?;
                into.host(file, &goal, recursive, is_link_kept, limits);
            }
            Opened::Volume(from, source, name) => {
                let found = self.found(from, source, name)?;
                let goal = goal(aim, fs, path, name, found.is_directory).map_err(inside)?;
                let attr = source.attr(found.file).map_err(inside)?;
                let is_regular = attr.file_type == FileType::Regular;
                let goal = through_link(goal, fs, is_regular).map_err(inside)?;
                let is_same = Arc::ptr_eq(source.volume(), fs.volume());
                into.volume(source, found.file, &found.path, &goal, recursive, is_same);
            }
        }
        Ok(())
    }

    /// The source at `path` of a volume.
    fn found(&self, volume: &Path, fs: &Filesystem, path: &[u8]) -> Result<Found> {
        let find = || {
            let file = resolve(fs, path, self.last_link())?;
            let attr = fs.attr(file).map_err(|error| at_path(error, path))?;
            Ok((file, attr, climb_file(fs, file, path)?))
        };
        let (file, attr, path) =
            find().map_err(|error| Failure::Inside(volume.to_path_buf(), error))?;
        let path = [volume.as_os_str().as_bytes(), b":", &path].concat();
        Ok(Found { file, is_directory: attr.file_type == FileType::Directory, path })
    }

    fn to_host(&self, sources: &[Opened], path: &Path, failures: &mut Failures<'_>) -> Result {
        if self.arguments.reflink == Reflink::Always {
            let message = "--reflink=always is for copies inside one volume";
            return Err(Failure::Usage(message.into()));
        }
        if let Some(mistake) = mistaken_for_place(path, true).filter(|_| !path.exists()) {
            return Err(Failure::Usage(mistake));
        }
        if !sources.iter().all(|source| matches!(source, Opened::Volume(..))) {
            return Err(Failure::Usage(NEITHER_IN_VOLUME.into()));
        }
        let is_directory = path.is_dir();
        let into = is_directory && !self.arguments.no_target_directory;
        if self.count() > 1 && !into {
            let errno = if path.exists() { Errno::NOTDIR } else { Errno::NOENT };
            return Err(Failure::Host(path.display().to_string(), errno.into()));
        }
        let onto = Onto {
            preserve: self.shared.preserve,
            manner: self.shared.manner,
            devices: self.shared.devices,
            is_recursive: self.arguments.recursive,
            problems: self.shared.problems,
            progress: self.shared.progress,
            counters: self.shared.counters,
            limits: limits()?,
        };
        // Permissions are those of the volume; what they are before that is said with each call.
        rustix::process::umask(Mode::empty());
        for source in sources {
            let Opened::Volume(volume, fs, name) = source else { continue };
            if self.shared.problems.is_stopped() {
                break;
            }
            if self.shared.manner.leaves_out_source(name) {
                continue;
            }
            if let Err(failure) = self.one_to_host(&onto, (volume, fs), name, path, into) {
                failures.opening(&failure);
            }
        }
        Ok(())
    }

    fn one_to_host(
        &self,
        onto: &Onto<'_>,
        (volume, fs): (&Path, &Filesystem),
        name: &[u8],
        path: &Path,
        into: bool,
    ) -> Result {
        let Found { file, is_directory, path: shown } = self.found(volume, fs, name)?;
        if is_directory && !self.arguments.recursive {
            let what = format!("{}, not copied without -r", Escaped(name));
            return Err(Failure::Inside(volume.to_path_buf(), Error::posix(Errno::ISDIR, what)));
        }
        let bytes = path.as_os_str().as_bytes();
        let fail = |errno: Errno| Failure::Host(path.display().to_string(), errno.into());
        if !into && bytes.ends_with(b"/") && !is_directory {
            return Err(fail(Errno::NOTDIR));
        }
        let (parent, name) = match (into, last_name(bytes)) {
            (true, _) => (path, last_name(name)),
            (false, Some(name)) => (path.parent().unwrap_or(path), Some(name)),
            (false, None) => (path, None),
        };
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        let name = name.map(SafeName::new).transpose().map_err(|_| fail(Errno::NAMETOOLONG))?;
        onto.copy(&Source { fs, top: file, path: &shown }, parent, name.as_ref())
    }
}

/// Where a source at `source` goes.
fn goal(
    aim: &Aim,
    fs: &Filesystem,
    path: &[u8],
    source: &[u8],
    is_directory: bool,
) -> Result<Goal, Error> {
    match (aim, last_name(source)) {
        (Aim::Into(dir), None) => Ok(Goal::Contents(*dir)),
        (Aim::Name(end), _) if end.place.is_none() && is_directory => {
            let root = end.file.unwrap_or(fs.root());
            Ok(Goal::Contents(root))
        }
        (_, name) => {
            let name = name.unwrap_or_default();
            aim.new_name(fs, path, name, is_directory).map(Goal::Name)
        }
    }
}

/// What a regular file is written into, when a symbolic link has its name in a directory: the
/// regular file that it leads to, as for `cp`.
fn through_link(goal: Goal, fs: &Filesystem, is_regular: bool) -> Result<Goal, Error> {
    let Goal::Name(new) = &goal else { return Ok(goal) };
    let Some(link) = new.existing.filter(|_| is_regular) else { return Ok(goal) };
    if fs.attr(link)?.file_type != FileType::Symlink {
        return Ok(goal);
    }
    let path = [&climb_file(fs, new.dir, b"")?[..], b"/", &new.name].concat();
    match resolve_end(fs, &path, LastLink::Follow)? {
        End { file: existing @ Some(file), place: Some((dir, name)), .. }
            if fs.attr(file)?.file_type == FileType::Regular =>
        {
            Ok(Goal::Name(NewName { dir, name, existing }))
        }
        End { file: Some(_), .. } => Err(through_no_file(&path)),
        End { file: None, .. } => Err(dangling(&path)),
    }
}

/// Refuses a `path` whose last name is a link that leads to `file`, if that is a device, a FIFO or
/// a socket: it would be replaced by a regular file, wherever it is.
fn require_written_through(fs: &Filesystem, path: &[u8], file: FileId) -> Result<(), Error> {
    let is_plain = matches!(fs.attr(file)?.file_type, FileType::Regular | FileType::Directory);
    if is_plain || resolve(fs, path, LastLink::Keep)? == file {
        return Ok(());
    }
    Err(through_no_file(path))
}

/// The refusal to write through a link that leads to what is no regular file.
fn through_no_file(path: &[u8]) -> Error {
    let what = "is a symbolic link to what is no regular file, and is not written through";
    Error::posix(Errno::INVAL, format!("{} {what}", Escaped(path)))
}

/// The refusal to write through a link that leads nowhere.
fn dangling(path: &[u8]) -> Error {
    let what = "is a symbolic link to nothing, and is not written through";
    Error::posix(Errno::INVAL, format!("{} {what}", Escaped(path)))
}

/// Where standard input goes, which has no name of its own.
fn stream_goal(aim: &Aim, fs: &Filesystem, path: &[u8]) -> Result<Goal, Error> {
    match aim {
        Aim::Into(_) => Err(Error::posix(Errno::ISDIR, Escaped(path).to_string())),
        Aim::Name(_) => aim.new_name(fs, path, b"", false).map(Goal::Name),
    }
}
