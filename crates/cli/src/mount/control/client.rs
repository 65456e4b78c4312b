//! The client: it asks the process that serves a mount to run a verb.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use offshoot_transfer::host::look_at;
use offshoot_transfer::host::umask;
use offshoot_vfs::Errno;
use rustix::fs::{CWD, StatVfsMountFlags, fstatvfs};

use super::super::table::{Inside, inside};
use super::channel;
use super::{NEXT_BYTES, Next, StartRequest};
use crate::args::{OnMount, Verb};
use crate::disk::{DiskName, is_file};
use crate::edit::moment;
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::occupied;
use crate::output::{Console, Escaped};
use crate::place::VolumePath;

/// How long a client waits before it tries again, if all jobs are taken.
const PAUSE: Duration = Duration::from_millis(50);

/// A verb for a mounted volume.
pub(crate) struct Client {
    /// A directory of the mount.
    directory: PathBuf,
    /// The places, as paths in the mounted tree.
    places: Vec<OsString>,
    is_changing: bool,
}

/// A place of the host that is in a mount of this program.
struct Spot {
    inside: Inside,
    /// The place itself, or the lowest directory above it that exists.
    directory: PathBuf,
}

/// The client for `verb`, if its places are in a mounted volume.
pub(crate) fn mounted(verb: &mut Verb) -> Result<Option<Client>> {
    let Some(OnMount { places: texts, opening, changes, is_whole, takes_files, .. }) =
        verb.on_mount()
    else {
        return Ok(None);
    };
    // A misspelt image inside a mount does not mean the mounted volume. The code that opens the
    // image reports the error.
    if is_whole && texts.iter().any(|text| !Path::new(&**text).exists()) {
        return Ok(None);
    }
    let spots = texts.iter().map(|text| spot(text, takes_files));
    let spots: Vec<Option<Spot>> = spots.collect::<Result<_>>()?;
    let Some(first) = spots.iter().flatten().next() else { return Ok(None) };
    let (tree, directory) = (first.inside.tree(), first.directory.clone());
    let mut places = Vec::new();
    for (text, spot) in texts.iter().zip(spots) {
        let Some(spot) = spot.filter(|spot| spot.inside.tree() == tree) else {
            let (shown, other) = (directory.display(), Escaped(text.as_bytes()));
            // Without search permission on its directory, this process cannot tell where it is.
            match Path::new(&**text).symlink_metadata() {
                Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                    return Err(VerbFailure::Host(other.to_string(), error));
                }
                _ => {}
            }
            return Err(VerbFailure::Usage(format!(
                "{other} is not in the mounted volume of {shown}, and a command works on one of these"
            )));
        };
        places.push(spot.inside.path.into_os_string());
    }
    if let Some(option) = opening {
        let what = format!("{option} says how a volume is opened, and this one is mounted");
        return Err(VerbFailure::Usage(what));
    }
    Ok(Some(Client { directory, places, is_changing: changes }))
}

/// Where `text` is in a mount of this program; `None` if it is in none. For some verbs a regular
/// file is a place, unless it is an image stored in the mount. A symbolic link at the end belongs
/// to the volume, which decides whether to follow it, unless the link leads into the mount from
/// outside.
fn spot(text: &OsStr, takes_files: bool) -> Result<Option<Spot>> {
    let is_image = |path: &Path| {
        let held = look_at(CWD, path).ok().map(|file| occupied::held_by(&file));
        matches!(held, Some(Ok(Some(_))))
    };
    let path = Path::new(text);
    let is_missing = match path.symlink_metadata() {
        Ok(_) => false,
        Err(error) if error.kind() == ErrorKind::NotFound => true,
        // The code that opens it reports the error.
        Err(_) => return Ok(None),
    };
    let is_there_as_file = is_file(path);
    if is_there_as_file && (!takes_files || is_image(path))
        || is_missing && is_file(&DiskName::parse(&VolumePath::parse(text).volume).file)
    {
        return Ok(None);
    }
    if is_missing || is_there_as_file || path.is_symlink() {
        // Directories above it may be missing too: the verb may make one place inside another that
        // it makes first.
        let above = path.ancestors().skip(1).find_map(|above| {
            let is_here = above.as_os_str().is_empty();
            let there = if is_here { Path::new(".") } else { above }.canonicalize().ok()?;
            Some((there, path.strip_prefix(above).ok()?))
        });
        let Some((directory, rest)) = above else { return Ok(None) };
        let spot = inside(&directory)?.map(|inside| Spot {
            inside: Inside { path: inside.path.join(rest), ..inside },
            directory,
        });
        if is_missing || is_there_as_file || spot.is_some() {
            return Ok(spot);
        }
    }
    // A dangling link leads into no mount.
    let Ok(directory) = path.canonicalize() else { return Ok(None) };
    Ok(inside(&directory)?.map(|inside| Spot { inside, directory }))
}

impl Client {
    /// Has the serving process run the verb `words`, and shows what it prints.
    pub(crate) fn run(self, words: &[OsString], out: &mut dyn Write, console: &Console) -> Result {
        let shown = self.directory.display().to_string();
        let failed = |errno: Errno| VerbFailure::Host(shown.clone(), errno.into());
        let directory = File::open(&self.directory);
        let directory = directory.map_err(|error| VerbFailure::Host(shown.clone(), error))?;
        // The serving process does not know that a mount was made read-only later.
        let flags = fstatvfs(&directory).map_err(failed)?.f_flag;
        if self.is_changing && flags.contains(StatVfsMountFlags::RDONLY) {
            return Err(failed(Errno::ROFS));
        }
        let start = StartRequest {
            umask: umask(),
            at: moment()?,
            words: words.to_vec(),
            places: self.places,
        };
        let mut start = start.encode().ok_or_else(|| {
            VerbFailure::Usage("the command line is too long for a mounted volume".to_owned())
        })?;
        loop {
            match channel::start(&directory, &mut start) {
                Err(Errno::AGAIN | Errno::INTR) => thread::sleep(PAUSE),
                Err(errno) => return Err(refused(&shown, errno)),
                Ok(()) => break,
            }
        }
        let mut data = [0; NEXT_BYTES];
        loop {
            match channel::next(&directory, &mut data) {
                Ok(()) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(failed(errno)),
            }
            match Next::decode(&data) {
                // While the job is silent, show the user what was printed so far.
                Some(Next::Nothing) => out.flush()?,
                Some(Next::Out(bytes)) => out.write_all(&bytes)?,
                Some(Next::Err(bytes)) => {
                    // Flush standard output first, so that both streams stay in order on a
                    // terminal.
                    out.flush()?;
                    console.relay(&bytes);
                }
                Some(Next::Ended(code)) => {
                    out.flush()?;
                    if code == 0 {
                        return Ok(());
                    }
                    let status = ExitStatus::of_code(i32::try_from(code).unwrap_or(i32::MAX));
                    return Err(VerbFailure::Reported(status));
                }
                None => return Err(refused(&shown, Errno::PROTO)),
            }
        }
    }
}

/// Why the serving process refuses the request.
fn refused(directory: &str, errno: Errno) -> VerbFailure {
    let why = match errno {
        Errno::PERM => "only root, and the user who mounted it, may do that while it is mounted",
        Errno::ACCESS => "it is mounted with idmap, so the kernel names no user",
        Errno::NOTTY | Errno::PROTO | Errno::OPNOTSUPP => {
            "it is served by another version of offshoot"
        }
        _ => "asking the process that serves it",
    };
    VerbFailure::Host(format!("{directory}: {why}"), errno.into())
}
