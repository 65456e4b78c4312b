//! What the verbs that change volumes have in common.
//!
//! A verb opens its volumes through [`Volumes`] and changes them. At its end it makes everything
//! durable with [`Volumes::sync`], even if something failed on the way. So finished changes are not
//! lost, and no change is reported as done that a crash could undo.

use std::fmt::Display;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use offshoot_transfer::copy::NewName;
use offshoot_transfer::host::{HostId, host_id_of_file, umask};
use offshoot_vfs::globs::expand;
use offshoot_vfs::path::{LastLink, PathEnd, at_path, resolve_end};
use offshoot_vfs::{
    self as vfs, Errno, Error, FileId, FileSystem, FileSystemMut, FileType, HeldFiles, Nameless,
    NewFile, Timestamp,
};
use rustix::process;

use crate::args::{EditArguments, OpenArguments};
use crate::disk::{DiskName, VolumeId, open_files};
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::interrupt::is_interrupted;
use crate::output::{Console, Done, Escaped, json_name};
use crate::place::VolumePath;
use crate::places::Failures;
use crate::session::{Access, OpenTree, Opening, member_disk, open_tree_on};

/// The current time, or the time that the environment sets, as in
/// <https://reproducible-builds.org/specs/source-date-epoch/>. One run of the program uses one such
/// time.
pub(crate) fn moment() -> Result<Timestamp> {
    Ok(source_date()?.unwrap_or_else(Timestamp::now))
}

/// The time that the environment sets, if it does.
pub(crate) fn source_date() -> Result<Option<Timestamp>> {
    const VARIABLE: &str = "SOURCE_DATE_EPOCH";
    let Some(text) = std::env::var_os(VARIABLE) else { return Ok(None) };
    let secs = text.to_str().and_then(|text| text.parse().ok()).ok_or_else(|| {
        VerbFailure::Usage(format!("{VARIABLE} is {}, not a number of seconds", text.display()))
    })?;
    Ok(Some(Timestamp { secs, nanos: 0 }))
}

/// The user for whom a verb works, and the time of the changes.
#[derive(Clone, Copy)]
pub(crate) struct Caller {
    /// User and group; `None` if each new file belongs to the owner of its directory.
    pub(crate) uid: Option<u32>,
    pub(crate) gid: Option<u32>,
    /// The file mode creation mask.
    pub(crate) umask: u32,
    /// The time of the changes.
    pub(crate) at: Timestamp,
}

impl Caller {
    /// The user of this program. In the process that serves a mount, it is the client that asked
    /// for the verb.
    pub(crate) fn of(arguments: &OpenArguments) -> Result<Self> {
        if let Some(live) = &arguments.live {
            return Ok(live.caller);
        }
        let uid = Some(process::geteuid().as_raw());
        let gid = Some(process::getegid().as_raw());
        Ok(Self { uid, gid, umask: umask(), at: moment()? })
    }
}

/// The attributes of a new file that the caller makes in `dir`. It belongs to the caller. In a
/// directory with the set-group-id bit its group is that of the directory, as on any mount.
pub(crate) fn new_file(
    fs: &dyn FileSystem,
    dir: FileId,
    permissions: u32,
    caller: &Caller,
) -> Result<NewFile, Error> {
    let parent = fs.attr(dir)?;
    let gid = match parent.permissions & 0o2000 {
        0 => caller.gid.unwrap_or(parent.gid),
        _ => parent.gid,
    };
    let uid = caller.uid.unwrap_or(parent.uid);
    Ok(NewFile { permissions, uid, gid, umask: Some(caller.umask), at: caller.at })
}

/// The file at `path`. Makes it if there is none.
pub(crate) fn file_or_new(
    fs: &dyn FileSystemMut,
    path: &[u8],
    caller: &Caller,
) -> Result<FileId, Error> {
    let end = resolve_end(fs, path, LastLink::Follow)?;
    match (end.file, end.place) {
        (Some(file), _) => Ok(file),
        (None, Some((dir, name))) if !end.must_be_directory => {
            let new = new_file(fs, dir, 0o666, caller)?;
            let place = vfs::EntryPlace { dir, name: &name };
            fs.create(place, &new).map_err(|error| at_path(error, path))
        }
        _ => Err(Error::posix(Errno::ISDIR, Escaped(path).to_string())),
    }
}

/// The identity of the file that holds the disk `path`. Links are followed.
pub(crate) fn host_id(path: &Path) -> Option<HostId> {
    host_id_of_file(&DiskName::parse(path).file)
}

struct Opened {
    volume: PathBuf,
    /// The identity of the volume; `None` if the volume was open before.
    id: Option<VolumeId>,
    access: Access,
    fs: OpenTree,
}

/// The volumes of one command line. Each is opened once, whatever names it is given.
pub(crate) struct Volumes<'a> {
    arguments: &'a EditArguments,
    console: &'a Arc<Console>,
    /// Whether volumes of other formats are refused before they are read.
    is_for_btrfs: bool,
    opened: Vec<Opened>,
}

impl<'a> Volumes<'a> {
    /// Prepares to open the volumes of `places`. Further devices belong to one volume, so if they
    /// are given, the places must be in one volume.
    pub(crate) fn new<'p>(
        places: impl Iterator<Item = &'p VolumePath>,
        arguments: &'a EditArguments,
        console: &'a Arc<Console>,
    ) -> Result<Self> {
        let volumes: Vec<&PathBuf> = places.map(|place| &place.volume).collect();
        let is_several = volumes.windows(2).any(|pair| !is_same(pair[0], pair[1]));
        if is_several && !arguments.tree.open.devices.is_empty() {
            let message = "--device is for a command on one volume, and these are several";
            return Err(VerbFailure::Usage(message.into()));
        }
        Ok(Self { arguments, console, is_for_btrfs: false, opened: Vec::new() })
    }

    /// The same for a verb that only btrfs has.
    pub(crate) fn for_btrfs(self) -> Self {
        Self { is_for_btrfs: true, ..self }
    }

    /// Opens the tree of files of `volume`. Volumes to be changed must be opened before those to be
    /// read.
    pub(crate) fn open(&mut self, volume: &Path, access: Access) -> Result<OpenTree> {
        let can = |opened: &&Opened| opened.access >= access;
        let mut known = self.opened.iter().filter(can);
        if let Some(opened) = known.find(|opened| opened.volume == volume) {
            return Ok(opened.fs.clone());
        }
        let EditArguments { tree, storing, .. } = self.arguments;
        let (id, fs) = if let Some(live) = &tree.open.live {
            (None, live.fs.clone())
        } else {
            // Only the opened disk shows that this is another name of an open volume.
            let is_for_btrfs = self.is_for_btrfs;
            let opening =
                Opening { storing: storing.chosen(), is_for_btrfs, ..Opening::of_verb(access)? };
            let disk = member_disk(volume, &tree.open, &opening, true)?;
            let id = Some(disk.id);
            if let Some(opened) = self.opened.iter().filter(can).find(|opened| opened.id == id) {
                return Ok(opened.fs.clone());
            }
            (id, open_tree_on(disk, tree, opening, self.console)?)
        };
        self.opened.push(Opened { volume: volume.to_path_buf(), id, access, fs: fs.clone() });
        Ok(fs)
    }

    /// The devices of the volumes, and the backing files of images.
    pub(crate) fn devices(&self) -> Vec<HostId> {
        let volumes = self.opened.iter().map(|opened| &opened.volume);
        let named = volumes.chain(&self.arguments.tree.open.devices);
        named.filter_map(|path| host_id(path)).chain(open_files()).collect()
    }

    /// With `--json`, prints whether the change at a place was done.
    pub(crate) fn done(&self, volume: &Path, path: &[u8], is_done: bool) {
        if self.arguments.json {
            let volume = json_name(volume.as_os_str().as_bytes());
            self.console.done(Done { volume, path: json_name(path), done: is_done });
        }
    }

    /// Makes all changes durable, and ends the use of the volumes; with `--stats` prints what the
    /// engine did. Returns whether all changes are durable.
    pub(crate) fn sync(&self, failures: &mut Failures<'_>) -> bool {
        let mut is_stored = true;
        for opened in self.opened.iter().filter(|opened| opened.access == Access::Write) {
            is_stored &= sync(&opened.fs, &opened.volume, opened.id.is_none(), failures);
            if self.arguments.stats {
                let volume = Escaped(opened.volume.as_os_str().as_bytes());
                self.console.note(&format_args!("what the engine did to {volume}"));
                let statistics = opened.fs.statistics().to_string();
                statistics.lines().for_each(|line| self.console.detail(&line));
            }
        }
        is_stored
    }
}

/// Makes all changes in `volume` durable, and ends its use unless it is a live one, which is
/// mounted. Returns whether they are.
pub(crate) fn sync(
    fs: &OpenTree,
    volume: &Path,
    is_live: bool,
    failures: &mut Failures<'_>,
) -> bool {
    let stored = if is_live { fs.sync() } else { fs.close() };
    let Err(error) = stored else { return true };
    let what = format_args!("not everything that was done is stored: {error}");
    failures.inside(volume, ExitStatus::of(&error), &what);
    false
}

/// Calls `change` for every place, in one or several volumes, and makes the changes durable. After
/// a signal that the verb watches for, it stops before the next place.
pub(crate) fn at_every_place(
    places: Vec<VolumePath>,
    arguments: &EditArguments,
    console: &Arc<Console>,
    mut change: impl FnMut(&HeldFiles<'_>, &[u8], &mut EditReport<'_, '_>) -> Result<(), Error>,
) -> Result {
    let change = |tree: &OpenTree, path: &[u8], report: &mut EditReport<'_, '_>| {
        change(&HeldFiles::new(&**tree), path, report)
    };
    let volumes = Volumes::new(places.iter(), arguments, console)?;
    in_every_tree(places, volumes, change)
}

/// The same for changes of the trees of `volumes`.
pub(crate) fn in_every_tree(
    places: Vec<VolumePath>,
    mut volumes: Volumes<'_>,
    mut change: impl FnMut(&OpenTree, &[u8], &mut EditReport<'_, '_>) -> Result<(), Error>,
) -> Result {
    let console = volumes.console;
    let mut failures = Failures::new(console);
    for VolumePath { volume, path } in places {
        let opened = volumes.open(&volume, Access::Write).and_then(|fs| {
            let paths = expand(&*fs, &path);
            Ok((fs, paths.map_err(|error| VerbFailure::Inside(volume.clone(), error))?))
        });
        match opened {
            Ok((fs, paths)) => {
                for path in paths {
                    if is_interrupted() {
                        break;
                    }
                    let mut report = EditReport::new(&mut failures, &volume);
                    if let Err(error) = change(&fs, &path, &mut report) {
                        report.error(&error);
                    }
                    let is_done = report.errors == 0 && !is_interrupted();
                    volumes.done(&volume, &path, is_done);
                }
            }
            Err(failure) => {
                failures.opening(&failure);
                volumes.done(&volume, &path, false);
            }
        }
    }
    let is_stored = volumes.sync(&mut failures);
    say_if_interrupted(is_stored, console, &mut failures);
    failures.result()
}

/// After a signal, prints whether the finished changes are durable.
pub(crate) fn say_if_interrupted(is_stored: bool, console: &Console, failures: &mut Failures<'_>) {
    if !is_interrupted() {
        return;
    }
    failures.note(ExitStatus::Failed);
    console.error(&if is_stored {
        "interrupted: what was done until then is stored; the rest is as it was"
    } else {
        "interrupted, and not everything that was done is stored"
    });
}

/// Collects the errors in one volume.
pub(crate) struct EditReport<'a, 'f> {
    failures: &'a mut Failures<'f>,
    volume: &'a Path,
    errors: u64,
    /// Errors about files are counted and not printed.
    pub(crate) is_silent: bool,
}

impl<'a, 'f> EditReport<'a, 'f> {
    fn new(failures: &'a mut Failures<'f>, volume: &'a Path) -> Self {
        Self { failures, volume, errors: 0, is_silent: false }
    }

    /// The place with this path, in the form of the command line.
    pub(crate) fn place(&self, path: &[u8]) -> Vec<u8> {
        place_in(self.volume, path)
    }

    /// Prints an error about the file at `path`.
    pub(crate) fn at(&mut self, path: &[u8], error: &Error) {
        let text = format_args!("{}: {}", Escaped(path), Nameless(error));
        self.print(ExitStatus::of(error), &text);
    }

    /// Prints an error.
    pub(crate) fn error(&mut self, error: &Error) {
        self.print(ExitStatus::of(error), error);
    }

    /// Prints an unintended result for `path`, even if errors about files are silent.
    pub(crate) fn failed(&mut self, path: &[u8], what: &dyn Display) {
        self.errors += 1;
        let text = format_args!("{}: {what}", Escaped(path));
        self.failures.inside(self.volume, ExitStatus::Failed, &text);
    }

    fn print(&mut self, status: ExitStatus, text: &dyn Display) {
        self.errors += 1;
        if self.is_silent && status == ExitStatus::Failed {
            self.failures.note(status);
        } else {
            self.failures.inside(self.volume, status, text);
        }
    }
}

/// Whether two names lead to the same volume. Only the names and files are compared, not the
/// contents.
pub(crate) fn is_same(one: &Path, other: &Path) -> bool {
    let id = |path| DiskName::parse(path).id();
    one == other || id(one).is_some_and(|one| Some(one) == id(other))
}

/// Refuses places in several volumes for a verb that works inside one.
pub(crate) fn require_one_volume(verb: &str, places: &[VolumePath]) -> Result {
    for pair in places.windows(2) {
        let [one, other] = [&pair[0].volume, &pair[1].volume];
        if !is_same(one, other) {
            let (one, other) = (one.display(), other.display());
            return Err(VerbFailure::Usage(format!(
                "{verb} works inside one volume, and {one} and {other} are two"
            )));
        }
    }
    Ok(())
}

/// Refuses a second source, `more`, if the destination is a name (`-T`).
pub(crate) fn require_one_source(is_name: bool, more: Option<&[u8]>) -> Result {
    match more {
        Some(more) if is_name => {
            let message = format!("-T takes one source, and {} is one more", Escaped(more));
            Err(VerbFailure::Usage(message))
        }
        _ => Ok(()),
    }
}

/// How a verb that makes new names interprets the last of several paths.
#[derive(Clone)]
pub(crate) enum Aim {
    /// An existing directory: the new names go into it.
    Into(FileId),
    /// The new name itself.
    Name(PathEnd),
}

impl Aim {
    /// Interprets `path`. With `is_name` (`-T`) it is the new name even if it is a directory.
    /// Several sources need a directory. `last` says how to treat a link that does not lead to a
    /// directory.
    pub(crate) fn of(
        fs: &dyn FileSystem,
        path: &[u8],
        is_name: bool,
        sources: usize,
        last: LastLink,
    ) -> Result<Self, Error> {
        let fail = |errno| Err(Error::posix(errno, Escaped(path).to_string()));
        if !is_name {
            match resolve_end(fs, path, LastLink::Follow) {
                Ok(PathEnd { file: Some(file), .. })
                    if fs.attr(file)?.file_type == FileType::Directory =>
                {
                    return Ok(Self::Into(file));
                }
                Ok(PathEnd { file: None, .. }) if sources > 1 => return fail(Errno::NOENT),
                Ok(_) if sources > 1 => return fail(Errno::NOTDIR),
                Err(error) if sources > 1 => return Err(error),
                // A dangling link may still be the file to replace.
                Ok(_) | Err(_) => {}
            }
        }
        resolve_end(fs, path, last).map(Self::Name)
    }

    /// The new name of the file that is now called `name`. `path` is the path of the aim;
    /// `is_directory` says whether the file is a directory.
    pub(crate) fn new_name(
        &self,
        fs: &dyn FileSystem,
        path: &[u8],
        name: &[u8],
        is_directory: bool,
    ) -> Result<NewName, Error> {
        match self {
            Self::Into(dir) => {
                let existing = match fs.lookup(*dir, name) {
                    Ok(file) => Some(file),
                    Err(Error::Posix { errno: Errno::NOENT, .. }) => None,
                    Err(error) => return Err(error),
                };
                Ok(NewName { dir: *dir, name: name.to_vec(), existing })
            }
            Self::Name(end) => {
                let fail = |errno| Error::posix(errno, Escaped(path).to_string());
                if end.must_be_directory && !is_directory && end.file.is_none() {
                    return Err(fail(Errno::NOTDIR));
                }
                let (dir, name) = end.place.clone().ok_or_else(|| fail(Errno::BUSY))?;
                Ok(NewName { dir, name, existing: end.file })
            }
        }
    }
}

/// The path of `name` in `directory`, for messages.
pub(crate) fn joined(directory: &[u8], name: &[u8]) -> Vec<u8> {
    [directory.strip_suffix(b"/").unwrap_or(directory), b"/", name].concat()
}

/// The place of `path` in `volume`, in the form of the command line.
pub(crate) fn place_in(volume: &Path, path: &[u8]) -> Vec<u8> {
    [volume.as_os_str().as_bytes(), b":", path].concat()
}
