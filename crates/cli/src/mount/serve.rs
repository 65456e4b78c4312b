//! The run that serves a mount, from opening the volume to its end.
//!
//! All threads but one block signals, and that one waits for them. The first SIGTERM or SIGINT
//! makes everything durable and detaches the mount from the tree. Programs that use files in it can
//! go on, and when the last one is done, the serving process ends. The second signal makes
//! everything durable and ends the process at once. SIGUSR1 switches [`events`] on, and off again.

use std::cell::RefCell;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::thread;

use nix::sys::signal::{SigSet, Signal};
use offshoot_fuse::{
    Gate, Helper, MountControl, Mounter, ServeOptions, Server, Transport, Unmount,
};
use offshoot_vfs::{Error, OsReason};
use rustix::io::Errno;
use rustix::process::setpgid;
use rustix::stdio::{dup2_stderr, dup2_stdout};
use rustix::thread::disable_transparent_huge_pages;

use super::Mounting;
use super::block::VolumeMounter;
use super::control::Jobs;
use super::further::WritableMountLock;
use super::gate;
use super::helper;
use super::log::Log;
use super::memory::dirty_bytes;
use super::options::MountCommandOptions;
use super::sandbox::MountSandbox;
use super::table::source_name;
use crate::args::{OpenArguments, TreeArguments};
use crate::events;
use crate::exit::{Result, VerbFailure};
use crate::output::Console;
use crate::session::{Access, OnOpenDevices, Opening, open_tree};
use crate::verbs::btrfs::rescuing::RescueArguments;

/// Mounts the volume of `mounting`, and serves it until it is unmounted.
pub(super) fn serve(
    mounting: &Mounting<'_>,
    wanted: &MountCommandOptions,
    mount_lock: Option<WritableMountLock>,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let signals = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGUSR1];
    let signals = SigSet::from_iter(signals);
    signals.thread_block().map_err(|errno| host("blocking signals", errno as i32))?;
    // Each of many threads keeps free memory of many sizes. With huge pages that is several times
    // the memory in use. A host without huge pages refuses the call, which is as good.
    let _ = disable_transparent_huge_pages(true);
    let log = Arc::new(Log::new(console.clone()));
    let Mounting { arguments, directory, .. } = mounting;
    directory.canonicalize().map_err(|e| VerbFailure::Host(directory.display().to_string(), e))?;
    let streams = arguments.in_background.then(|| Streams::open(arguments.log.as_deref()));
    let streams = streams.transpose()?;
    let helper = helper::start(mounting)?;
    let sandbox = Rc::new(RefCell::new(wanted.has_sandbox.then(MountSandbox::default)));
    let block = wanted.is_fuseblk.then(|| Arc::new(VolumeMounter::new(helper.clone())));
    let mounter = block.clone().map_or(helper.clone() as Arc<dyn Mounter>, |block| block as _);
    let server = start(mounting, wanted, mounter, block.clone(), &sandbox, console, &log);
    let server = server.inspect_err(|_| {
        // Nothing uses the volume any more, so nothing writes to the device behind the mount.
        if let Err(error) = block.as_ref().map_or(Ok(()), |block| block.abandon()) {
            log.line(&error);
        }
    })?;
    // From now on other runs find the mount in the table of mounts.
    drop(mount_lock);
    let waits = {
        let (control, log, helper) = (server.control(), log.clone(), helper.clone());
        move || wait_for_signals(&signals, &control, &helper, &log)
    };
    let begin = || -> Result {
        let started = thread::Builder::new().name("signals".to_owned()).spawn(waits);
        started.map_err(|error| VerbFailure::Host("starting a thread".to_owned(), error))?;
        if let Some(streams) = &streams {
            streams.detach(&log)?;
        }
        log.note(&match (server.transport(), server.fallback()) {
            (Transport::Device, Some(why)) => format!("served over /dev/fuse ({})", OsReason(why)),
            (Transport::Device, None) => "served over /dev/fuse".to_owned(),
            _ => "served over io_uring".to_owned(),
        });
        if let Some(sandbox) = sandbox.take() {
            log.note(&sandbox.close());
        }
        streams.as_ref().map_or(Ok(()), |streams| streams.tell(out))
    };
    if let Err(failure) = begin() {
        // No program was told of the mount yet. Once it is detached from the tree, it ends with
        // this process.
        if let Err(error) = helper.unmount(Unmount::Lazily) {
            log.line(&error);
        }
        return Err(failure);
    }
    server.wait().map_err(|error| {
        log.line(&format_args!("the end of the mount: {error}"));
        error.into()
    })
}

/// Opens the volume and mounts it.
fn start(
    mounting: &Mounting<'_>,
    wanted: &MountCommandOptions,
    mounter: Arc<dyn Mounter>,
    block: Option<Arc<VolumeMounter>>,
    sandbox: &Rc<RefCell<Option<MountSandbox>>>,
    console: &Arc<Console>,
    log: &Arc<Log>,
) -> Result<Server> {
    let open = &mounting.arguments.open;
    let by_id = wanted.subvolume_id.map(|id| id.to_string().into());
    let devices = open.devices.iter().chain(&wanted.devices).cloned().collect();
    let tree = TreeArguments {
        subvolume: wanted.subvolume.clone().or(by_id),
        open: OpenArguments {
            devices,
            degraded: open.degraded || wanted.is_degraded,
            ignore_log: open.ignore_log || wanted.ignores_log,
            rescue: RescueArguments {
                rescue: open.rescue.rescue.iter().chain(&wanted.rescue).copied().collect(),
                ..open.rescue.clone()
            },
            layers: open.layers.clone(),
            live: None,
        },
    };
    let for_reports = log.clone();
    let warned =
        move |report: &dyn fmt::Display| for_reports.line(&format_args!("warning: {report}"));
    let entered = sandbox.clone();
    let enter = move || entered.borrow_mut().iter_mut().for_each(MountSandbox::enter);
    let access = if wanted.is_read_only { Access::Read } else { Access::Write };
    let opening = Opening {
        only_btrfs: wanted.only_btrfs.clone(),
        only_xfs: wanted.only_xfs.clone(),
        storing: wanted.storing,
        commit: wanted.commit,
        dirty_bytes: Some(dirty_bytes()),
        has_tree_log: wanted.has_tree_log,
        is_discarding: wanted.is_discarding,
        flushes_on_commit: wanted.flushes_on_commit,
        warned: Some(Arc::new(warned)),
        when_devices_are_open: Some(Box::new(enter)),
        before_writing: block
            .map(|block| -> OnOpenDevices { Box::new(move |devices| block.mount_over(devices)) }),
        ..Opening::to(access)
    };
    let fs = open_tree(mounting.volume, &tree, opening, console)?;
    let root = fs.root();
    if wanted.subvolume_id.is_some_and(|id| id != root.dev) {
        return Err(wanted.other_subvolume(root.dev));
    }
    let jobs = Arc::new(Jobs::new(
        fs.clone(),
        PathBuf::from(source_name(mounting.volume)),
        wanted.owner,
        mounting.options.clone(),
    ));
    let volume = fs.volume();
    let find = move |name: &[u8]| {
        // A name that stands for no subvolume does not exist.
        volume.clone().files(gate::subvolume(name)?).ok().map(|fs| fs.root())
    };
    let for_errors = log.clone();
    let files = fs.volume().files(fs.root().dev)?;
    let mut options = ServeOptions::over(wanted.transport);
    options.owner = wanted.owner;
    // 32-bit programs can `stat` files of the top-level subvolume.
    options.plain_space = fs.plain_space();
    options.allows_idmap = wanted.allows_idmap;
    options.reporter = Some(Arc::new(move |error: &Error| for_errors.line(error)));
    options.volume = Some(fs.volume());
    options.ioctls = Some(jobs.clone());
    options.gate = Some(Gate::new(gate::NAME, Arc::new(find)));
    let server = Server::start(files, mounter, options)?;
    jobs.begin(server.caches());
    Ok(server)
}

fn host(what: &str, errno: i32) -> VerbFailure {
    VerbFailure::Host(what.to_owned(), std::io::Error::from_raw_os_error(errno))
}

/// The standard streams of a process in the background. They are opened before the mount is made:
/// if that failed later, no process would serve the mount.
struct Streams {
    null: File,
    errors: File,
    /// Errors go to the system log.
    is_system: bool,
}

impl Streams {
    fn open(log: Option<&Path>) -> Result<Self> {
        let null = File::options().read(true).write(true).open("/dev/null");
        let null = null.map_err(|error| VerbFailure::Host("/dev/null".to_owned(), error))?;
        let errors = match log {
            Some(path) => OpenOptions::new().create(true).append(true).open(path),
            None => null.try_clone(),
        };
        let name = log.map_or("/dev/null".into(), |path| path.display().to_string());
        let errors = errors.map_err(|error| VerbFailure::Host(name, error))?;
        Ok(Self { null, errors, is_system: log.is_none() })
    }

    /// Leaves the terminal and the current directory. From now on, messages go to the log.
    fn detach(&self, log: &Log) -> Result {
        // Keys typed on the terminal must not signal this process any more. The call fails for a
        // session leader, which is in a group of its own already. The process stays in the session:
        // if the kernel schedules by session, answers to programs of another session take twice as
        // long.
        let _ = setpgid(None, None);
        std::env::set_current_dir("/").map_err(|error| VerbFailure::Host("/".to_owned(), error))?;
        dup2_stderr(self.errors.as_fd()).map_err(not_pointed)?;
        if self.is_system {
            log.use_system();
        }
        Ok(())
    }

    /// Reports that the mount can be used.
    fn tell(&self, out: &mut dyn Write) -> Result {
        out.write_all(b"\n")?;
        out.flush()?;
        dup2_stdout(self.null.as_fd()).map_err(not_pointed)
    }
}

fn not_pointed(errno: Errno) -> VerbFailure {
    host("standard streams", errno.raw_os_error())
}

/// Waits for a signal that ends the mount. SIGUSR1 switches events on and off.
fn wait_for_end(signals: &SigSet) {
    loop {
        match signals.wait() {
            Ok(Signal::SIGUSR1) => events::switch(),
            Ok(_) => return,
            Err(_) => {}
        }
    }
}

/// Waits for signals, and ends the mount when they come.
fn wait_for_signals(signals: &SigSet, control: &MountControl, helper: &Helper, log: &Log) {
    let tell = |stored: Result<(), Error>| {
        if let Err(error) = stored {
            log.line(&format_args!("not everything that was done is stored: {error}"));
        }
    };
    wait_for_end(signals);
    tell(control.sync());
    if let Err(error) = helper.unmount(Unmount::Lazily) {
        log.line(&error);
    }
    wait_for_end(signals);
    tell(control.end());
    log.line(&"ended by a second signal while files were in use");
    std::process::exit(1);
}
