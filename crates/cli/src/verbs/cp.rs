//! `offshoot cp`: copy files and directories into, out of and between volumes.

mod told;

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use offshoot_transfer::Hint;
use offshoot_transfer::copy::{
    self, Becomes, Existing, Goal, IntoVolume, Manner, Preserve, SharedCopy,
};
use offshoot_transfer::extract::{
    Counted, ExtractSource, LinkTable, Onto, Problems, TransferCounters, finish, while_counting,
};
use offshoot_transfer::host::{HostId, Process, host_id_of_file, umask};
use offshoot_transfer::stream::{StreamFailure, write_contents};
use offshoot_vfs::globs::expand;
use offshoot_vfs::path::{
    LastLink, PathEnd, at_path, bare, last_name, prefix, resolve, resolve_end, resolve_held,
};
use offshoot_vfs::wildcard::Pattern;
use offshoot_vfs::{
    Attr, Errno, Error, FileId, FileSystem, FileType, HeldFile, HeldFiles, SafeName, Timestamp,
};

use crate::args::{CpArguments, PreserveListArgument, ReflinkArgument};
use crate::edit::{Aim, Volumes, joined, moment, place_in, require_one_source, source_date};
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::interrupt;
use crate::occupied;
use crate::output::{Console, Escaped, human_size, words, write_line};
use crate::place::{VolumePath, mistaken_for_place};
use crate::places::Failures;
use crate::session::{Access, OpenTree};
use crate::stream::TextOnly;
use told::CopyOutput;

/// The error for a copy from the host to the host.
const NEITHER_IN_VOLUME: &str = "neither side is in a volume: a place is VOLUME:/PATH";

/// One side of a copy.
enum CopySide {
    Host(PathBuf),
    Volume(VolumePath),
    /// Standard input.
    Stream,
}

pub(super) fn run(arguments: &CpArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let at = moment()?;
    let preserve =
        Preserve::all_but(&PreserveListArgument::each(&arguments.no_preserve), umask(), at);
    let (first, last) = match (&arguments.target_directory, &arguments.paths[..]) {
        (Some(directory), sources) => (sources, directory),
        (None, [first @ .., last]) => (first, last),
        (None, []) => return Ok(()),
    };
    let told = arguments.verbose.then(CopyOutput::start).transpose()?.map(Arc::new);
    let mut manner = manner(arguments, &preserve, told.clone());
    if first.is_empty() {
        return Err(VerbFailure::Usage(format!("where to copy {} is missing", last.display())));
    }
    let more = first.get(1).map(|more| more.as_bytes());
    require_one_source(arguments.no_target_directory, more)?;
    let sources = sources(first)?;
    let (problems, counters) = (Problems::new(&**console), TransferCounters::default());
    let to_stdout = last == "-";
    if to_stdout {
        require_one_for_stdout(arguments)?;
    }
    let target = VolumePath::parse_unless_host(last);
    let latest = source_date()?.filter(|_| target.is_some());
    let preserve = preserve.with_latest(latest);
    manner.is_reproducible = latest.is_some();
    let places = sources.iter().filter_map(|side| match side {
        CopySide::Volume(place) => Some(place),
        CopySide::Host(_) | CopySide::Stream => None,
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
    let more = opened.get(1).map(OpenedSource::shown);
    require_one_source(arguments.no_target_directory, more.as_deref())?;
    if to_stdout {
        for source in &opened {
            to_stdout_from(source, out)?;
        }
        return failures.result();
    }
    let progress = console.start_progress("copied");
    let devices = volumes.devices();
    let mut shared = SharedCopy::new(&preserve, &manner, &problems, &progress, &counters);
    shared.devices = &devices;
    shared.reflink = match arguments.reflink {
        // Data that is to be compressed must be written anew.
        ReflinkArgument::Auto if arguments.edit.storing.chosen().compress.is_some() => {
            copy::ReflinkMode::Never
        }
        reflink => reflink.into(),
    };
    let is_into_directory = arguments.target_directory.is_some();
    let job = CopyRun { arguments, shared, at, count: opened.len(), is_into_directory };
    let counted =
        counted(&opened, target.is_some() && job.shared.reflink != copy::ReflinkMode::Never);
    let result = while_counting(&counted, &progress, || match &target {
        Some((fs, place)) => job.to_volume(&opened, fs, place, &mut failures),
        None => job.to_host(&opened, Path::new(last), &mut failures),
    });
    let is_stored = volumes.sync(&mut failures);
    console.stop_progress();
    result?;
    told.map_or(Ok(()), |told| told.finish())?;
    let outcome = finish(counters, problems);
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
    if let Some(worst) = outcome.worst {
        failures.note(worst.into());
    }
    if arguments.edit.json {
        write_line(out, &outcome)?;
    }
    failures.result()
}

/// How to treat existing files and attributes, by the options.
fn manner(arguments: &CpArguments, preserve: &Preserve, told: Option<Arc<CopyOutput>>) -> Manner {
    let existing = match arguments {
        CpArguments { no_clobber: true, .. } => Existing::Kept,
        CpArguments { update: true, .. } => Existing::KeptIfNew,
        _ => Existing::Replaced,
    };
    let (paths, names): (Vec<_>, Vec<_>) = arguments
        .exclude
        .iter()
        .map(|text| text.as_bytes())
        .map(|text| text.strip_suffix(b"/").unwrap_or(text))
        .partition(|text| text.contains(&b'/'));
    let mut manner = Manner::plain();
    manner.existing = existing;
    manner.is_apart = preserve.keeps(copy::PreservedAttribute::Links)
        && (arguments.recursive
            || arguments.no_dereference
            || arguments.preserve.contains(&PreserveListArgument::Links));
    manner.is_forced = arguments.force;
    manner.is_one_filesystem = arguments.one_file_system;
    manner.names = names.into_iter().map(Pattern::new).collect();
    let below = |path: &[u8]| Pattern::new(path.strip_prefix(b"/").unwrap_or(path));
    manner.paths = paths.into_iter().map(below).collect();
    manner.reporter = told.map(|told| told as Arc<dyn copy::CopyReporter>);
    manner
}

/// The sources that can be counted before the copy: not a stream, and no data that may be shared
/// instead.
fn counted<'a>(sources: &'a [OpenedSource], may_share: bool) -> Vec<Counted<'a>> {
    let count = |source: &'a OpenedSource| match source {
        OpenedSource::Volume(_, fs, path) if !may_share => {
            let top = resolve(&**fs, path, LastLink::Follow).ok()?;
            Some(Counted::InVolume(&**fs, top))
        }
        OpenedSource::Host(path) => Some(Counted::OnHost(path)),
        OpenedSource::Volume(..) | OpenedSource::Stream => None,
    };
    sources.iter().map(count).collect::<Option<_>>().unwrap_or_default()
}

/// Refuses everything but one file for standard output.
fn require_one_for_stdout(arguments: &CpArguments) -> Result {
    let mistake = if arguments.paths.len() > 2 || arguments.target_directory.is_some() {
        "standard output (-) takes one source; `offshoot cat` writes several"
    } else if arguments.edit.json {
        "--json cannot be used with -, because standard output is the file"
    } else if arguments.reflink == ReflinkArgument::Always {
        "--reflink=always is for copies inside one volume"
    } else {
        return Ok(());
    };
    Err(VerbFailure::Usage(mistake.into()))
}

/// Writes a source to standard output. A symbolic link is followed, because it has no data itself.
fn to_stdout_from(source: &OpenedSource, out: &mut dyn Write) -> Result {
    let OpenedSource::Volume(volume, fs, path) = source else {
        return Err(VerbFailure::Usage(NEITHER_IN_VOLUME.into()));
    };
    let inside = |error| VerbFailure::Inside(volume.clone(), error);
    let held = resolve_held(&**fs, path, LastLink::Follow).map_err(inside)?;
    let file = held.file();
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
    write_contents(&**fs, file, attr.size, &mut out, |_| {}).map_err(|failure| match failure {
        StreamFailure::Source(error) => inside(error.in_file(Escaped(path))),
        StreamFailure::Target(error) => TextOnly::failure(error, path),
    })
}

fn sources(texts: &[OsString]) -> Result<Vec<CopySide>> {
    let side = |text: &OsString| match VolumePath::parse_unless_host(text) {
        _ if text == "-" => CopySide::Stream,
        Some(place) => CopySide::Volume(place),
        None => CopySide::Host(text.into()),
    };
    let sources: Vec<CopySide> = texts.iter().map(side).collect();
    if sources.len() > 1 && sources.iter().any(|side| matches!(side, CopySide::Stream)) {
        return Err(VerbFailure::Usage("standard input (-) must be the only source".into()));
    }
    Ok(sources)
}

/// A source whose volume is open.
enum OpenedSource {
    Host(PathBuf),
    /// The volume, as the caller named it, and a path in it.
    Volume(PathBuf, OpenTree, Vec<u8>),
    Stream,
}

impl OpenedSource {
    /// Its path, as the caller wrote it.
    fn path(&self) -> Option<&[u8]> {
        match self {
            Self::Host(path) => Some(path.as_os_str().as_bytes()),
            Self::Volume(_, _, path) => Some(path),
            Self::Stream => None,
        }
    }

    /// Its name for messages.
    fn shown(&self) -> Vec<u8> {
        match self {
            Self::Volume(volume, _, path) => place_in(volume, path),
            Self::Host(_) | Self::Stream => self.path().unwrap_or(b"-").to_vec(),
        }
    }
}

/// The sources that were named so far.
#[derive(Default)]
struct SeenSources {
    /// The directory and name of each source on the host.
    on_host: HashSet<(HostId, Vec<u8>)>,
    /// The same for sources in volumes, each with the address of the open volume.
    in_volumes: HashSet<(usize, FileId, Vec<u8>)>,
}

impl SeenSources {
    /// Whether a source is named for the first time. A source without a name is always new.
    fn is_new(&mut self, source: &OpenedSource) -> bool {
        match source {
            OpenedSource::Stream => true,
            OpenedSource::Host(path) => {
                let name = last_name(path.as_os_str().as_bytes());
                let parent = path.parent().unwrap_or(path);
                let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
                let (Some(name), Some(parent)) = (name, host_id_of_file(parent)) else {
                    return true;
                };
                path.symlink_metadata().is_err() || self.on_host.insert((parent, name.to_vec()))
            }
            OpenedSource::Volume(_, fs, path) => {
                match resolve_end(&**fs, bare(path), LastLink::Keep) {
                    Ok(PathEnd { file: Some(_), place: Some((dir, name)), .. }) => {
                        let volume = Arc::as_ptr(&fs.volume()).addr();
                        self.in_volumes.insert((volume, dir, name))
                    }
                    Ok(_) | Err(_) => true,
                }
            }
        }
    }
}

/// A source in a volume.
struct SourceInVolume<'a> {
    held: HeldFile<'a>,
    is_directory: bool,
    /// Its name for messages.
    path: Vec<u8>,
}

/// The tables of hard links. Hard links are kept only inside one filesystem, because each has its
/// own inode numbers.
fn link_tables<'s>(sources: &'s [OpenedSource]) -> Vec<Arc<Mutex<LinkTable>>> {
    let new = || Arc::new(Mutex::new(LinkTable::default()));
    let host = new();
    let mut volumes: Vec<(&OpenTree, Arc<Mutex<LinkTable>>)> = Vec::new();
    let table = |source: &'s OpenedSource| {
        let OpenedSource::Volume(_, fs, _) = source else { return host.clone() };
        let known = volumes.iter().find(|(tree, _)| tree.is_beside(fs));
        if let Some((_, table)) = known {
            return table.clone();
        }
        let table = new();
        volumes.push((fs, table.clone()));
        table
    };
    sources.iter().map(table).collect()
}

/// Opens the volumes of all sources. If one does not open, only its own sources are left out.
fn open_sources(
    sources: Vec<CopySide>,
    volumes: &mut Volumes<'_>,
    failures: &mut Failures<'_>,
) -> Result<Vec<OpenedSource>> {
    let mut opened = Vec::new();
    for source in sources {
        match source {
            CopySide::Host(path) => opened.push(OpenedSource::Host(path)),
            CopySide::Stream => opened.push(OpenedSource::Stream),
            CopySide::Volume(VolumePath { volume, path }) => {
                match volumes.open(&volume, Access::Read) {
                    Ok(fs) => {
                        let paths = expand(&*fs, &path);
                        let paths =
                            paths.map_err(|error| VerbFailure::Inside(volume.clone(), error))?;
                        let one = |path| OpenedSource::Volume(volume.clone(), fs.clone(), path);
                        opened.extend(paths.into_iter().map(one));
                    }
                    Err(failure) => failures.opening(&failure),
                }
            }
        }
    }
    Ok(opened)
}

/// One run of `cp`.
struct CopyRun<'a> {
    arguments: &'a CpArguments,
    shared: SharedCopy<'a>,
    at: Timestamp,
    /// How many sources there are.
    count: usize,
    /// The destination must be a directory (`-t`).
    is_into_directory: bool,
}

impl CopyRun<'_> {
    /// How many files were copied so far. A source adds to it when its copy is a file.
    fn count_files(&self) -> u64 {
        self.shared.counters.files.load(Ordering::Relaxed)
    }

    /// How to treat a link at the end of a source.
    fn last_link(&self) -> LastLink {
        let is_kept = self.arguments.recursive || self.arguments.no_dereference;
        if is_kept { LastLink::Keep } else { LastLink::Follow }
    }

    /// The number of sources, but at least two if the destination must be a directory.
    fn count(&self) -> usize {
        if self.is_into_directory { self.count.max(2) } else { self.count }
    }

    fn to_volume(
        &self,
        sources: &[OpenedSource],
        fs: &OpenTree,
        VolumePath { volume, path }: &VolumePath,
        failures: &mut Failures<'_>,
    ) -> Result {
        let is_name = self.arguments.no_target_directory;
        let inside = |error| VerbFailure::Inside(volume.clone(), error);
        // The destination stays the same directory until the end.
        let held = HeldFiles::new(&**fs);
        let aim = Aim::of(&held, path, is_name, self.count(), LastLink::Keep).map_err(inside)?;
        let process = Process::prepare()?;
        let mut seen = SeenSources::default();
        let mut made = HashSet::new();
        for (source, links) in sources.iter().zip(&link_tables(sources)) {
            if self.shared.problems.is_stopped() {
                break;
            }
            if self.is_left_out(source, &mut seen) {
                continue;
            }
            let into = IntoVolume::new(&**fs, self.at, self.shared, links);
            let to = (fs, &aim, volume.as_path(), &path[..]);
            if let Err(failure) = self.one_to_volume(&into, source, to, &mut made, process) {
                failures.opening(&failure);
            }
        }
        Ok(())
    }

    /// Whether a source is left out: an option excludes its name, or it was named before.
    fn is_left_out(&self, source: &OpenedSource, seen: &mut SeenSources) -> bool {
        let Some(path) = source.path() else { return false };
        if self.shared.manner.leaves_out_source(path) {
            return true;
        }
        let is_again = !seen.is_new(source);
        if is_again {
            let what = &"it was named before, and is copied once";
            self.shared.problems.warning(&source.shown(), what);
        }
        is_again
    }

    fn one_to_volume(
        &self,
        into: &IntoVolume<'_>,
        source: &OpenedSource,
        (fs, aim, volume, path): (&OpenTree, &Aim, &Path, &[u8]),
        made: &mut HashSet<(FileId, Vec<u8>)>,
        process: Process,
    ) -> Result {
        let recursive = self.arguments.recursive;
        let inside = |error| VerbFailure::Inside(volume.to_path_buf(), error);
        let held = HeldFiles::new(&**fs);
        let mut named = None;
        let mut goal = |name: &[u8], is_directory| {
            let becomes = becomes(aim, &held, path, name, is_directory)?;
            if let Becomes::Name(new) = &becomes {
                named = Some((new.dir, new.name.clone()));
            }
            let is_just_made = named.as_ref().is_some_and(|name| made.contains(name));
            let shown = match aim {
                Aim::Into(_) => joined(path, last_name(name).unwrap_or(b".")),
                Aim::Name(_) => path.to_vec(),
            };
            Ok(Goal { becomes, shown: place_in(volume, &shown), is_just_made })
        };
        let before = self.count_files();
        match source {
            OpenedSource::Stream => {
                if matches!(aim, Aim::Into(_)) {
                    return Err(inside(Error::posix(Errno::ISDIR, Escaped(path).to_string())));
                }
                let goal = goal(b"", false).map_err(inside)?;
                let attr = self.shared.preserve.of_stream();
                into.stream(io::stdin(), OsStr::new("-"), attr, &goal);
            }
            OpenedSource::Host(file) => {
                let name = file.as_os_str().as_bytes();
                let goal = goal(name, file.is_dir()).map_err(inside)?;
                let is_link_kept = self.last_link() == LastLink::Keep;
                into.host(file, &goal, recursive, is_link_kept, process);
            }
            OpenedSource::Volume(from, source, name) => {
                let found = self.found(from, source, name)?;
                let goal = goal(name, found.is_directory).map_err(inside)?;
                let is_same = source.is_beside(fs);
                into.volume(&**source, found.held.file(), &found.path, &goal, recursive, is_same);
            }
        }
        made.extend(named.filter(|_| self.count_files() > before));
        Ok(())
    }

    /// Whether a file with these attributes would replace another one on the host.
    fn replaces(&self, target: &Path, new: &Attr) -> bool {
        target.metadata().or_else(|_| target.symlink_metadata()).is_ok_and(|old| {
            let nanos = u32::try_from(old.mtime_nsec()).unwrap_or_default();
            let old_mtime = Timestamp { secs: old.mtime(), nanos };
            !old.is_dir() && !self.shared.manner.keeps(old_mtime, new.mtime)
        })
    }

    /// The source at `path` in a volume.
    fn found<'f>(
        &self,
        volume: &Path,
        fs: &'f OpenTree,
        path: &[u8],
    ) -> Result<SourceInVolume<'f>> {
        let find = || {
            let held = resolve_held(&**fs, path, self.last_link())?;
            let attr = fs.attr(held.file()).map_err(|error| at_path(error, path))?;
            Ok((held, attr))
        };
        let (held, attr) =
            find().map_err(|error| VerbFailure::Inside(volume.to_path_buf(), error))?;
        let path = place_in(volume, path);
        Ok(SourceInVolume { held, is_directory: attr.file_type == FileType::Directory, path })
    }

    fn to_host(
        &self,
        sources: &[OpenedSource],
        path: &Path,
        failures: &mut Failures<'_>,
    ) -> Result {
        if self.arguments.reflink == ReflinkArgument::Always {
            let message = "--reflink=always is for copies inside one volume";
            return Err(VerbFailure::Usage(message.into()));
        }
        if let Some(mistake) = mistaken_for_place(path, true).filter(|_| !path.exists()) {
            return Err(VerbFailure::Usage(mistake));
        }
        if !sources.iter().all(|source| matches!(source, OpenedSource::Volume(..))) {
            return Err(VerbFailure::Usage(NEITHER_IN_VOLUME.into()));
        }
        let is_directory = path.is_dir();
        let into = is_directory && !self.arguments.no_target_directory;
        if self.count() > 1 && !into {
            let errno = if path.exists() { Errno::NOTDIR } else { Errno::NOENT };
            return Err(VerbFailure::Host(path.display().to_string(), errno.into()));
        }
        let mut onto = Onto::new(self.shared, Process::prepare()?);
        onto.refuse = Some(&occupied::refusal);
        let mut seen = SeenSources::default();
        let mut made = HashSet::new();
        for source in sources {
            let OpenedSource::Volume(volume, fs, name) = source else { continue };
            if self.shared.problems.is_stopped() {
                break;
            }
            if self.is_left_out(source, &mut seen) {
                continue;
            }
            if let Err(failure) =
                self.one_to_host(&onto, (volume, fs), name, (path, into), &mut made)
            {
                failures.opening(&failure);
            }
        }
        Ok(())
    }

    fn one_to_host(
        &self,
        onto: &Onto<'_>,
        (volume, fs): (&Path, &OpenTree),
        name: &[u8],
        (path, into): (&Path, bool),
        made: &mut HashSet<PathBuf>,
    ) -> Result {
        let SourceInVolume { held, is_directory, path: shown } = self.found(volume, fs, name)?;
        let file = held.file();
        if is_directory && !self.arguments.recursive {
            let what = format!("{}, {}", Escaped(name), words(Hint::NotRecursive));
            return Err(VerbFailure::Inside(
                volume.to_path_buf(),
                Error::posix(Errno::ISDIR, what),
            ));
        }
        let bytes = path.as_os_str().as_bytes();
        let fail = |errno: Errno| VerbFailure::Host(path.display().to_string(), errno.into());
        if !into && bytes.ends_with(b"/") && !is_directory {
            return Err(fail(Errno::NOTDIR));
        }
        let (parent, name) = match (into, last_name(bytes)) {
            (true, _) => (path, last_name(name)),
            (false, Some(name)) => (path.parent().unwrap_or(path), Some(name)),
            (false, None) => (path, None),
        };
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        let target = parent.join(OsStr::from_bytes(name.unwrap_or_default()));
        if made.contains(&target) && !is_directory && self.replaces(&target, &fs.attr(file)?) {
            return Err(VerbFailure::Refused(format!(
                "{}: {}",
                target.display(),
                words(Hint::JustMade)
            )));
        }
        let name = name.map(SafeName::new).transpose().map_err(|_| fail(Errno::NAMETOOLONG))?;
        let before = self.count_files();
        onto.copy(
            &ExtractSource { fs: &**fs, top: file, path: prefix(&shown) },
            parent,
            name.as_ref(),
        )?;
        if self.count_files() > before {
            made.insert(target);
        }
        Ok(())
    }
}

/// The new name of the source `source`.
fn becomes(
    aim: &Aim,
    fs: &dyn FileSystem,
    path: &[u8],
    source: &[u8],
    is_directory: bool,
) -> Result<Becomes, Error> {
    match (aim, last_name(source)) {
        (Aim::Into(dir), None) => Ok(Becomes::Contents(*dir)),
        (Aim::Name(end), _) if end.place.is_none() && is_directory => {
            let root = end.file.unwrap_or(fs.root());
            Ok(Becomes::Contents(root))
        }
        (_, name) => {
            let name = name.unwrap_or_default();
            aim.new_name(fs, path, name, is_directory).map(Becomes::Name)
        }
    }
}
