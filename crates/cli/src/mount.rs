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
//! A process that has threads cannot fork safely, so the process in the background is a new run of
//! the program with the same words. It reports back over its standard output: one byte when the
//! mount can be used. Until then its messages go to the standard error of the waiting run, and the
//! waiting run ends with its exit code.
//!
//! | module | what it holds |
//! |---|---|
//! | [`options`] | options in the form of mount |
//! | [`list`] | the list of mounts |
//! | [`block`] | a volume on block devices, with the type `fuseblk` |
//! | [`further`], [`gate`] | a volume mounted in several places, each with a subvolume of its own |
//! | [`serve`] | the run that serves: volume, mount, signals, end |
//! | [`background`] | the run that starts it |
//! | [`helper`] | the run that mounts and unmounts for it |
//! | [`sandbox`] | the rights that the serving process gives up |
//! | [`log`] | where messages go meanwhile |
//! | [`memory`] | how much memory a mount uses for changed data |
//! | [`control`] | verbs on a volume while it is mounted |
//! | [`table`] | which volume is mounted where, by the table of the kernel |
//! | [`unmount`] | unmounting |

mod background;
mod block;
mod control;
mod further;
mod gate;
mod helper;
mod list;
mod log;
mod memory;
mod options;
mod sandbox;
mod serve;
mod stopped;
mod table;
mod unmount;

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::iter;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use offshoot_fuse::Unmount;
use offshoot_transfer::host::look_at;
use rustix::fs::CWD;
use rustix::mount::MountFlags;

use crate::args::MountArguments;
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::occupied;
use crate::output::Console;
use control::in_force;
pub(crate) use control::{Served, mounted};
use options::MountCommandOptions;
pub(crate) use options::{name_and_value, number};
use table::MountTableLine;
pub(crate) use unmount::unmount;

/// The names under which mount and umount call the program, and the verb for each.
const NAMES: [(&str, &str); 6] = [
    ("mount.offshoot", "mount"),
    ("mount.fuse.offshoot", "mount"),
    (MOUNT_BLOCK, "mount"),
    ("umount.offshoot", "unmount"),
    ("umount.fuse.offshoot", "unmount"),
    ("umount.fuseblk.offshoot", "unmount"),
];

/// The name that stands for the option `fuseblk` too.
const MOUNT_BLOCK: &str = "mount.fuseblk.offshoot";

/// The words of the command line, with the verb that the program's name implies.
pub(crate) fn with_verb(words: Vec<OsString>) -> Vec<OsString> {
    // mount can be set-uid, and then it mounts for a user as root.
    let is_root = rustix::process::getuid().is_root() && rustix::process::geteuid().is_root();
    words_for(words, is_root)
}

/// As [`with_verb`] does it when root runs the program, or another user does.
fn words_for(mut words: Vec<OsString>, is_root: bool) -> Vec<OsString> {
    let name = words.first().and_then(|word| Path::new(word).file_name()).and_then(OsStr::to_str);
    if let Some(&(known, verb)) = NAMES.iter().find(|(known, _)| name == Some(known)) {
        // mount(8) of util-linux passes on `nosuid` and `nodev`, and does not pass on `suid` and
        // `dev`, its defaults. That of BusyBox passes on none of the four, nor `rw` and `ro`, one
        // of which the first always passes on.
        let is_util_linux = words.windows(2).any(|pair| {
            let list = pair[1].as_bytes().split(|&byte| byte == b',');
            pair[0] == "-o" && list.into_iter().any(|option| matches!(option, b"rw" | b"ro"))
        });
        words.insert(1, verb.into());
        if verb == "mount" && is_root && is_util_linux {
            words.splice(2..2, ["-o", "suid,dev"].map(OsString::from));
        }
        if known == MOUNT_BLOCK {
            words.splice(2..2, ["-o", "fuseblk"].map(OsString::from));
        }
    }
    words
}

/// Whether mount or umount calls the program.
pub(crate) fn is_called_by_mount() -> bool {
    let name = std::env::args_os().next();
    let name = name.as_deref().and_then(|word| Path::new(word).file_name()).and_then(OsStr::to_str);
    NAMES.iter().any(|(known, _)| name == Some(known))
}

/// The exit code of mount(8) or umount(8) for this result.
pub(crate) fn exit_code(result: &Result) -> u8 {
    let is_of_system = |error: &io::Error| {
        use rustix::io::Errno;
        let numbers = [Errno::NOMEM, Errno::AGAIN, Errno::MFILE, Errno::NFILE];
        numbers.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
    };
    match result {
        Ok(()) => 0,
        Err(failure) if failure.is_broken_pipe() => 0,
        Err(VerbFailure::Usage(_) | VerbFailure::Reported(ExitStatus::Usage)) => 1,
        Err(VerbFailure::Host(_, error)) if is_of_system(error) => 2,
        Err(_) => 32,
    }
}

/// The volume to mount, and where.
pub(crate) struct Mounting<'a> {
    arguments: &'a MountArguments,
    volume: &'a Path,
    directory: &'a Path,
    /// The options, with those that this program adds.
    options: Vec<String>,
}

/// Mounts a volume, or lists the mounts.
pub(crate) fn mount(
    arguments: &MountArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let mut wanted = MountCommandOptions::parse(&arguments.options, arguments.sloppy)?;
    let (volume, directory) = match (&arguments.volume, &arguments.directory) {
        (Some(volume), Some(directory)) => (volume, directory),
        // Like mount, a remount needs only the directory.
        (Some(directory), None) if wanted.is_remount => (directory, directory),
        (Some(_), None) => {
            return Err(VerbFailure::Usage("name a directory to mount over".to_owned()));
        }
        (None, _) => return list::list(arguments.json, out),
    };
    let options = arguments.options.clone();
    let mut mounting = Mounting { arguments, volume, directory, options };
    if wanted.is_remount {
        return remount(&mounting, &wanted, console);
    }
    if arguments.fake {
        return Ok(());
    }
    if arguments.helper {
        return helper::help(&mounting, &wanted);
    }
    if wanted.may_be_missing
        && volume.metadata().is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
    {
        return Ok(());
    }
    // The run in the background does not repeat the message.
    let is_first = !arguments.in_background;
    if is_first {
        tell_wishes(&wanted, console);
    }
    take_dead_away(directory, console)?;
    require_directory(directory)?;
    if let Some(log) = &arguments.log {
        occupied::refuse(log)?;
    }
    let mut mount_lock = None;
    if !wanted.is_read_only {
        match claim(&mounting, &wanted, console) {
            DeviceAccess::Writable(file) if is_first => {
                let failed =
                    |error| VerbFailure::Host(format!("locking {}", volume.display()), error);
                mount_lock = Some(further::WritableMountLock::wait(file).map_err(failed)?);
            }
            DeviceAccess::Writable(_) | DeviceAccess::Unknown => {}
            DeviceAccess::ReadOnly => {
                wanted.is_read_only = true;
                mounting.options.push("ro".to_owned());
            }
        }
    }
    if wanted.is_fuseblk && wanted.is_read_only {
        return Err(block::refused(volume.display(), "is mounted to be read only").into());
    }
    if is_first && further::mount(&mounting, &wanted, console)? {
        return Ok(());
    }
    if arguments.foreground || arguments.in_background {
        return serve::serve(&mounting, &wanted, mount_lock, out, console);
    }
    background::start(&mounting)
}

/// Whether the devices can be opened as the caller asks.
enum DeviceAccess {
    /// They can be written; this is the first device.
    Writable(File),
    /// They can only be read.
    ReadOnly,
    /// They cannot be opened. The code that opens the volume reports why.
    Unknown,
}

/// Checks whether the devices can be written, and warns if they can only be read.
fn claim(mounting: &Mounting<'_>, wanted: &MountCommandOptions, console: &Console) -> DeviceAccess {
    if wanted.ignores_log {
        console.warning(&"mounted read-only, because the log is not replayed");
        return DeviceAccess::ReadOnly;
    }
    if !wanted.rescue.is_empty() || mounting.arguments.open.rescue.is_set() {
        console.warning(&"mounted read-only, because it is read around damage");
        return DeviceAccess::ReadOnly;
    }
    let mut first = None;
    let others = mounting.arguments.open.devices.iter().chain(&wanted.devices);
    for path in iter::once(mounting.volume).chain(others.map(PathBuf::as_path)) {
        match File::options().read(true).write(true).open(path) {
            Ok(file) => drop(first.get_or_insert(file)),
            Err(error) => {
                use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
                let is_protected = matches!(error.kind(), PermissionDenied | ReadOnlyFilesystem);
                if !is_protected || File::open(path).is_err() {
                    return DeviceAccess::Unknown;
                }
                let path = path.display();
                console.warning(&format_args!("{path} may only be read: mounted read-only"));
                return DeviceAccess::ReadOnly;
            }
        }
    }
    first.map_or(DeviceAccess::Unknown, DeviceAccess::Writable)
}

/// Removes a dead mount over `directory`, whose program has ended: no volume can be mounted over
/// it.
fn take_dead_away(directory: &Path, console: &Console) -> Result {
    if !table::is_dead(directory) {
        return Ok(());
    }
    let shown = directory.display().to_string();
    let dir = unmount::beside_the_mount(directory);
    let dir = dir.map_err(|error| VerbFailure::Host(shown.clone(), error))?;
    let line = table::find_of_anybody(&dir).ok();
    let Some(MountTableLine { mounted, .. }) = line.filter(MountTableLine::is_trusted) else {
        return Ok(());
    };
    offshoot_fuse::unmount(&dir, Unmount::Lazily)?;
    let source = mounted.source.display();
    let what =
        format!("{source} was mounted over {shown}, and the program that served it has ended");
    console.warning(&format_args!("{what}: unmounted"));
    Ok(())
}

/// Warns about options that are accepted and not followed.
fn tell_wishes(wanted: &MountCommandOptions, console: &Console) {
    if !wanted.wishes.is_empty() {
        let wishes = wanted.wishes.join(", ");
        console.warning(&format_args!("mounted without what these options wish: {wishes}"));
    }
}

/// Refuses to mount over anything but a directory. The error says what is there instead.
fn require_directory(path: &Path) -> Result {
    let failed = |error| VerbFailure::Host(path.display().to_string(), error);
    let metadata = path.metadata().map_err(failed)?;
    let file_type = metadata.file_type();
    if file_type.is_dir() {
        return Ok(());
    }
    let is_storage = file_type.is_file() || file_type.is_block_device();
    // If the file cannot be read, the message still says whether it is a file or a device.
    let holds = is_storage
        .then(|| look_at(CWD, path).ok().and_then(|file| occupied::held_by(&file).ok()))
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

/// The mount flags for `wanted`.
fn flags_of(wanted: &MountCommandOptions) -> MountFlags {
    let flags = [
        (true, MountFlags::NOATIME),
        (wanted.is_read_only, MountFlags::RDONLY),
        (!wanted.allows_suid, MountFlags::NOSUID),
        (!wanted.allows_devices, MountFlags::NODEV),
        (!wanted.allows_exec, MountFlags::NOEXEC),
    ];
    flags.iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| *flag).collect()
}

/// Changes whether a mount can be written. All options in force may be repeated, because mount
/// repeats those of fstab.
fn remount(mounting: &Mounting<'_>, wanted: &MountCommandOptions, console: &Console) -> Result {
    let failed = |error| VerbFailure::Host(mounting.directory.display().to_string(), error);
    let dir = mounting.directory.canonicalize().map_err(failed)?;
    let line = table::find_line(&dir)?;
    tell_wishes(wanted, console);
    // A bind mount is one of several places of the volume; only that place changes.
    let is_further = line.root != Path::new("/");
    if !is_further {
        let served = match in_force(&dir, None) {
            Ok(served) => served.options,
            // The serving process may be of another version, or of another user. A mount can become
            // read-only without its options, which count as the defaults then.
            Err(failure) if wanted.is_read_only => {
                console.warning(&format_args!("its options are not known: {failure}"));
                Vec::new()
            }
            Err(failure) => return Err(failure),
        };
        let served = MountCommandOptions::parse(&served, true)?;
        let is_opened_to_be_read = served.is_read_only;
        let others = served.others(&mounting.options, mounting.arguments.sloppy)?.join(", ");
        if !others.is_empty() {
            let what = format!("remounting with options that are not in force: {others}");
            return Err(
                offshoot_vfs::Error::unsupported(offshoot_vfs::Code::Unsupported, what).into()
            );
        }
        if is_opened_to_be_read && !wanted.is_read_only {
            let dir = dir.display();
            let what = format!(
                "{dir}: mounted to be read only; to write, unmount it and mount it with rw"
            );
            return Err(VerbFailure::Refused(what));
        }
    }
    let store = || {
        let what = || format!("not everything that was done is stored: {}", dir.display());
        unmount::store(&dir).map_err(|error| VerbFailure::Host(what(), error))
    };
    // A read-only mount has nothing to store. The second call stores what was written in between.
    if wanted.is_read_only {
        store()?;
    }
    let of_place = if is_further { MountFlags::BIND } else { MountFlags::empty() };
    rustix::mount::mount_remount(&dir, of_place | flags_of(wanted), "").map_err(|errno| {
        VerbFailure::Host(format!("remounting {}", dir.display()), errno.into())
    })?;
    if wanted.is_read_only { store() } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Set-id bits and device nodes only work where mount(8) of util-linux says nothing else.
    #[test]
    fn what_mount_strips_is_not_taken_for_allowed() {
        let allows = |line: &str, is_root| {
            let words = words_for(line.split(' ').map(OsString::from).collect(), is_root);
            let lists = words.windows(2).filter(|pair| pair[0] == "-o").map(|pair| &pair[1]);
            let options = lists.flat_map(|list| list.to_str().expect("text").split(','));
            let options: Vec<_> = options.map(str::to_owned).collect();
            let wanted = MountCommandOptions::parse(&options, true).expect("they are known");
            (wanted.allows_suid, wanted.allows_devices)
        };
        let none = (false, false);
        for line in [
            "/sbin/mount.fuse.offshoot image dir",
            "/sbin/mount.fuse.offshoot image dir -o nosuid",
            "/sbin/mount.fuse.offshoot image dir -o subvol=rw,compress",
            "/sbin/mount.fuse.offshoot rw,ro dir",
            "offshoot mount image dir -o rw",
        ] {
            assert_eq!(allows(line, true), none, "{line}");
        }
        let line = "/sbin/mount.fuse.offshoot image dir -o rw";
        assert_eq!(allows(line, true), (true, true));
        assert_eq!(allows(line, false), none);
        for (options, expected) in [
            ("rw,nosuid", (false, true)),
            ("ro,nodev", (true, false)),
            ("nosuid,nodev,rw", none),
            ("noauto,ro", (true, true)),
        ] {
            let line = format!("/sbin/mount.offshoot image dir -s -o {options} -t fuse.offshoot");
            assert_eq!(allows(&line, true), expected, "{line}");
        }
    }
}
