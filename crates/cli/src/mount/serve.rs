//! The run that serves a mount, from opening the volume to its end.
//!
//! Signals are kept from all threads but one, which waits for them. The first SIGTERM or SIGINT makes everything durable and takes the mount
//! out of the tree; who uses files in it can go on, and when nobody does any more the program ends. The second one makes everything durable
//! and ends it at once.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use nix::sys::signal::{SigSet, Signal};
use offshoot_btrfs::Report;
use offshoot_fuse::{Control, MountOptions, ServeOptions, Server, Transport, Unmount, unmount};
use offshoot_vfs::Error;
use rustix::io::Errno;
use rustix::stdio::{dup2_stderr, dup2_stdout};
use rustix::thread::disable_transparent_huge_pages;

use super::log::Log;
use super::options::Wanted;
use super::table::{SUBTYPE, find, read_ahead, source_name};
use crate::args::{MountArguments, OpenArguments, TreeArguments};
use crate::exit::{Failure, Result};
use crate::output::Console;
use crate::session::{Access, Opening, open_tree_with};

/// Mounts what `arguments` say, and serves it until it is unmounted.
pub(super) fn serve(
    arguments: &MountArguments,
    wanted: Wanted,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
    signals.thread_block().map_err(|errno| host("blocking signals", errno as i32))?;
    // Many threads keep free memory of many sizes each, which in huge pages is several times what is in use. A host that has none refuses.
    let _ = disable_transparent_huge_pages(true);
    let log = Arc::new(Log::new(console.clone()));
    let dir = arguments.directory.canonicalize();
    let dir = dir.map_err(|e| Failure::Host(arguments.directory.display().to_string(), e))?;
    let mount = MountOptions {
        source: source_name(&arguments.volume.volume),
        subtype: SUBTYPE,
        read_only: wanted.read_only,
        allow_other: wanted.allow_other,
        suid: wanted.suid,
        dev: wanted.dev,
        exec: wanted.exec,
    };
    let streams = arguments.in_background.then(|| Streams::open(arguments.log.as_deref()));
    let streams = streams.transpose()?;
    let server = start(arguments, wanted, &mount, &dir, console, &log)?;
    read_ahead(&dir);
    let waits = {
        let (control, log, dir) = (server.control(), log.clone(), dir.clone());
        let device = find(&dir).ok().map(|mounted| mounted.device);
        move || wait_for_signals(&signals, &control, &dir, device.as_deref(), &log)
    };
    let started = thread::Builder::new().name("signals".to_owned()).spawn(waits);
    let begun = started
        .map_err(|error| Failure::Host("starting a thread".to_owned(), error))
        .and_then(|_| streams.map_or(Ok(()), |streams| streams.detach(out, &log)));
    if let Err(failure) = begun {
        // Nobody was told of the mount yet. Without it in the tree the end of the program is that of the mount.
        if let Err(error) = unmount(&dir, Unmount::Lazily) {
            log.line(&error);
        }
        return Err(failure);
    }
    log.note(&match server.transport() {
        Transport::Device => format_args!("served over /dev/fuse"),
        _ => format_args!("served over io_uring"),
    });
    server.wait().map_err(|error| {
        log.line(&format_args!("the end of the mount: {error}"));
        error.into()
    })
}

/// Opens the volume and mounts it.
fn start(
    arguments: &MountArguments,
    wanted: Wanted,
    mount: &MountOptions,
    dir: &Path,
    console: &Arc<Console>,
    log: &Arc<Log>,
) -> Result<Server> {
    let open = &arguments.volume.open;
    let devices = open.devices.iter().chain(&wanted.devices).cloned().collect();
    let tree = TreeArguments {
        subvolume: wanted.subvolume,
        open: OpenArguments {
            devices,
            degraded: open.degraded || wanted.degraded,
            ignore_log: open.ignore_log,
        },
    };
    let for_reports = log.clone();
    let reporter = move |report: &Report| for_reports.line(&format_args!("warning: {report}"));
    let access = if wanted.read_only { Access::Read } else { Access::Write };
    let opening = Opening {
        compress: wanted.compress,
        new_files: wanted.new_files,
        max_inline: wanted.max_inline,
        commit: wanted.commit,
        tree_log: wanted.tree_log,
        discard: wanted.discard,
        flush_on_commit: wanted.flush_on_commit,
        reporter: Some(Arc::new(reporter)),
        ..Opening::to(access)
    };
    let fs = open_tree_with(&arguments.volume.volume, &tree, opening, console)?;
    let for_errors = log.clone();
    let options = ServeOptions {
        owner: wanted.owner,
        transport: wanted.transport,
        reporter: Some(Arc::new(move |error: &Error| for_errors.line(error))),
    };
    Ok(Server::start(Box::new(fs), dir, mount, options)?)
}

fn host(what: &str, errno: i32) -> Failure {
    Failure::Host(what.to_owned(), std::io::Error::from_raw_os_error(errno))
}

/// What becomes of the standard streams in the background. It is opened before there is a mount, which nobody would serve when that fails.
struct Streams {
    null: File,
    errors: File,
    /// Errors go to the log of the system.
    is_system: bool,
}

impl Streams {
    fn open(log: Option<&Path>) -> Result<Self> {
        let null = File::options().read(true).write(true).open("/dev/null");
        let null = null.map_err(|error| Failure::Host("/dev/null".to_owned(), error))?;
        let errors = match log {
            Some(path) => OpenOptions::new().create(true).append(true).open(path),
            None => null.try_clone(),
        };
        let name = log.map_or("/dev/null".into(), |path| path.display().to_string());
        let errors = errors.map_err(|error| Failure::Host(name, error))?;
        Ok(Self { null, errors, is_system: log.is_none() })
    }

    /// Leaves the terminal and the directory that it was started from, and says that the mount can be used.
    fn detach(&self, out: &mut dyn Write, log: &Log) -> Result {
        let failed = |what: &str, error| Failure::Host(what.to_owned(), error);
        // It fails for the leader of a group alone, which is in a session of its own already or has no terminal to leave.
        let _ = rustix::process::setsid();
        std::env::set_current_dir("/").map_err(|error| failed("/", error))?;
        let point = |result: rustix::io::Result<()>| {
            result.map_err(|errno: Errno| failed("standard streams", errno.into()))
        };
        // Whoever is told that the mount can be used finds in the log what is said from then on.
        point(dup2_stderr(self.errors.as_fd()))?;
        if self.is_system {
            log.use_system();
        }
        out.write_all(b"\n")?;
        out.flush()?;
        point(dup2_stdout(self.null.as_fd()))
    }
}

/// Waits for signals, and ends the mount when they come. Its device number tells it from what somebody mounted over it.
fn wait_for_signals(
    signals: &SigSet,
    control: &Control,
    dir: &Path,
    device: Option<&str>,
    log: &Log,
) {
    let sync = || {
        if let Err(error) = control.sync() {
            log.line(&format_args!("not everything that was done is stored: {error}"));
        }
    };
    while signals.wait().is_err() {}
    sync();
    let top = find(dir).ok().map(|mounted| mounted.device);
    if device.is_none() || top.as_deref() != device {
        log.line(&format_args!("not unmounted: it is not what is seen at {}", dir.display()));
    } else if let Err(error) = unmount(dir, Unmount::Lazily) {
        log.line(&error);
    }
    while signals.wait().is_err() {}
    sync();
    log.line(&"ended by a second signal while files were in use");
    std::process::exit(1);
}
