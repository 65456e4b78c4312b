//! `offshoot mount`: a volume as a part of the file system of the host.
//!
//! ```text
//! offshoot mount ── starts ──> the same program, in a process group of its own
//!      │                        opens the volume, mounts it, serves it
//!      │ <─── one byte ──────── when it does
//!      ends with 0              goes on until it is unmounted, or SIGTERM
//!                               └── starts ──> the same program, which mounts and unmounts for it
//! ```
//!
//! A process that has threads cannot be split in two, so what stays in the background is a new run of the program with the same words.
//! Its standard output is the way back: one byte when the mount can be used. Until then its messages go to the standard error of who
//! waits, and its exit code is theirs.
//!
//! | module | what it holds |
//! |---|---|
//! | [`options`] | options in the form of mount |
//! | [`serve`] | the run that serves: volume, mount, signals, end |
//! | [`background`] | the run that starts it |
//! | [`helper`] | the run that mounts and unmounts for it |
//! | [`sandbox`] | what the one that serves is kept from |
//! | [`log`] | where messages go meanwhile |
//! | [`memory`] | how much of the memory it takes |
//! | [`control`] | verbs on a volume while it is mounted |
//! | [`table`] | what is mounted where, by the table of the kernel |
//! | [`unmount`] | the other end |

mod background;
mod control;
mod helper;
mod log;
mod memory;
mod options;
mod sandbox;
mod serve;
mod stopped;
mod table;
mod unmount;

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::CWD;
use rustix::mount::MountFlags;

use crate::args::MountArguments;
use crate::exit::{Failure, Result};
use crate::occupied;
use crate::output::Console;
pub(crate) use control::mounted;
use options::Wanted;
pub(crate) use unmount::unmount;

/// How the program is called by mount and umount, and which verb that is.
const NAMES: [(&str, &str); 4] = [
    ("mount.offshoot", "mount"),
    ("mount.fuse.offshoot", "mount"),
    ("umount.offshoot", "unmount"),
    ("umount.fuse.offshoot", "unmount"),
];

/// The words of the command line, with the verb that the name of the program stands for.
pub(crate) fn with_verb(mut words: Vec<OsString>) -> Vec<OsString> {
    let name = words.first().and_then(|word| Path::new(word).file_name()).and_then(OsStr::to_str);
    if let Some((_, verb)) = NAMES.iter().find(|(known, _)| name == Some(known)) {
        words.insert(1, verb.into());
    }
    words
}

/// Mounts a volume.
pub(crate) fn mount(
    arguments: &MountArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let wanted = Wanted::parse(&arguments.options, arguments.sloppy)?;
    if wanted.remount {
        return remount(arguments, &wanted);
    }
    if arguments.fake {
        return Ok(());
    }
    if arguments.helper {
        return helper::help(arguments, &wanted);
    }
    require_directory(&arguments.directory)?;
    if let Some(log) = &arguments.log {
        occupied::refuse(log)?;
    }
    if arguments.foreground || arguments.in_background {
        return serve::serve(arguments, wanted, out, console);
    }
    background::start(arguments)
}

/// Refuses to mount over what is no directory, and says what it is instead.
fn require_directory(path: &Path) -> Result {
    let failed = |error| Failure::Host(path.display().to_string(), error);
    let metadata = path.metadata().map_err(failed)?;
    let file_type = metadata.file_type();
    if file_type.is_dir() {
        return Ok(());
    }
    let is_storage = file_type.is_file() || file_type.is_block_device();
    // What may not be looked at is a file or a device all the same.
    let holds = is_storage
        .then(|| occupied::look_at(CWD, path).ok().and_then(|file| occupied::held_by(&file).ok()))
        .flatten()
        .flatten();
    let kind = match file_type {
        kind if kind.is_file() => "a file",
        kind if kind.is_block_device() => "a block device",
        kind if kind.is_char_device() => "a character device",
        kind if kind.is_fifo() => "a FIFO",
        kind if kind.is_socket() => "a socket",
        _ => "something else",
    };
    let holds = holds.map_or_else(String::new, |what| format!(" that holds {what}"));
    let what = format!("not a directory, but {kind}{holds}; name a directory to mount over");
    Err(failed(io::Error::new(io::ErrorKind::NotADirectory, what)))
}

/// Changes whether a mount can be written.
fn remount(arguments: &MountArguments, wanted: &Wanted) -> Result {
    let plain = Wanted {
        remount: true,
        read_only: wanted.read_only,
        suid: wanted.suid,
        dev: wanted.dev,
        exec: wanted.exec,
        // Nobody changes it: mount repeats what there is.
        allow_other: wanted.allow_other,
        ..Wanted::default()
    };
    if *wanted != plain {
        let what = "remounting with other options than ro, rw, suid, dev and exec";
        return Err(offshoot_vfs::Error::Unsupported(what.into()).into());
    }
    let flags = [
        (true, MountFlags::NOATIME),
        (wanted.read_only, MountFlags::RDONLY),
        (!wanted.suid, MountFlags::NOSUID),
        (!wanted.dev, MountFlags::NODEV),
        (!wanted.exec, MountFlags::NOEXEC),
    ];
    let flags = flags.iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| *flag).collect();
    let failed = |error| Failure::Host(arguments.directory.display().to_string(), error);
    let dir = arguments.directory.canonicalize().map_err(failed)?;
    table::find(&dir)?;
    let store = || {
        let what = || format!("not everything that was done is stored: {}", dir.display());
        unmount::store(&dir).map_err(|error| Failure::Host(what(), error))
    };
    // What is only read has nothing that is not stored. The second time is for what came between.
    if wanted.read_only {
        store()?;
    }
    rustix::mount::mount_remount(&dir, flags, "")
        .map_err(|errno| Failure::Host(format!("remounting {}", dir.display()), errno.into()))?;
    if wanted.read_only { store() } else { Ok(()) }
}
