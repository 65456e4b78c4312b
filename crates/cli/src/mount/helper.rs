//! The run that mounts and unmounts for the serving process, which has given up the right to do so
//! ([`super::sandbox`]).
//!
//! The serving process starts it with the same words before it reads the volume, and it ends with
//! the serving process. It ignores signals: a user who wants the mount to end signals the serving
//! process, and that process then needs the helper.
//!
//! A mount over a block device keeps that device from every other use. So when its serving process
//! ends without unmounting it, the helper does.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};
use offshoot_device::hold_block_device;
use offshoot_fuse::{BlockMounter, Helper, MountOptions, MountPoint, Mounter, Unmount};
use offshoot_vfs::{Error, Result};
use rustix::io::Errno;

use super::Mounting;
use super::background::again;
use super::options::MountCommandOptions;
use super::table::{Mounted, SUBTYPE, find, is_dead, places_of, read_ahead, source_name};
use crate::exit::{self, VerbFailure};

/// Starts the helper.
pub(super) fn start(mounting: &Mounting<'_>) -> exit::Result<Arc<Helper>> {
    let helper = again(mounting, "--helper").and_then(Helper::start);
    let failed = |error| VerbFailure::Host("starting the process that mounts".to_owned(), error);
    Ok(Arc::new(helper.map_err(failed)?))
}

/// Works as the helper until the serving process ends.
pub(super) fn help(mounting: &Mounting<'_>, wanted: &MountCommandOptions) -> exit::Result {
    let failed = |what: &str, error| VerbFailure::Host(what.to_owned(), error);
    let signals = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGUSR1];
    let signals = SigSet::from_iter(signals);
    signals.thread_block().map_err(|errno| failed("blocking signals", errno.into()))?;
    // Keys typed on the terminal must not signal it either. The call fails for a session leader,
    // which this process never is.
    let _ = rustix::process::setpgid(None, None);
    let dir = mounting.directory.canonicalize();
    let dir = dir.map_err(|error| failed(&mounting.directory.display().to_string(), error))?;
    let mut options = MountOptions::new(source_name(mounting.volume), SUBTYPE);
    options.is_read_only = wanted.is_read_only;
    options.allows_others = wanted.allows_others;
    options.allows_suid = wanted.allows_suid;
    options.allows_devices = wanted.allows_devices;
    options.allows_exec = wanted.allows_exec;
    std::env::set_current_dir("/").map_err(|error| failed("/", error))?;
    let source = PathBuf::from(&options.source);
    let point = MountPoint::new(dir, options);
    let ours = HelperMount { source, point, mounted: OnceLock::new() };
    let helped = offshoot_fuse::help(io::stdin().as_fd(), &ours);
    ours.free_block_device();
    helped.map_err(|error| failed("the socket of the process that mounts", error))
}

/// The mount, and what the table of mounts said of it, so that the helper never unmounts another
/// mount over it.
struct HelperMount {
    /// The volume.
    source: PathBuf,
    point: MountPoint,
    mounted: OnceLock<Mounted>,
}

impl HelperMount {
    /// Mounts by `mount`, and notes which mount that is.
    fn mount_with(&self, mount: impl FnOnce() -> Result<OwnedFd>) -> Result<OwnedFd> {
        if self.mounted.get().is_some() {
            return Err(Error::posix(Errno::BUSY, self.point.dir().display().to_string()));
        }
        let device = mount()?;
        let mounted = find(self.point.dir()).map_err(|failure| {
            // A mount that cannot be identified could not be unmounted later.
            let _ = self.point.unmount(Unmount::Lazily);
            Error::io("finding what was mounted", io::Error::other(failure.to_string()))
        })?;
        read_ahead(&mounted);
        let _ = self.mounted.set(mounted);
        Ok(device)
    }

    /// Unmounts a mount over a block device whose serving process has ended, if it is still there.
    fn free_block_device(&self) {
        let is_block = self.mounted.get().is_some_and(|mounted| mounted.is_block);
        if is_block && is_dead(self.point.dir()) {
            // If another mount is over it, the user has to unmount both.
            let _ = self.unmount(Unmount::Lazily);
        }
    }
}

impl Mounter for HelperMount {
    fn mount(&self) -> Result<OwnedFd> {
        self.mount_with(|| self.point.mount())
    }

    fn unmount(&self, how: Unmount) -> Result<()> {
        let top = find(self.point.dir()).ok();
        let Some(top) = top.filter(|top| self.mounted.get() == Some(top)) else {
            let what = format!("not unmounted: {}", self.point.dir().display());
            return Err(Error::io(what, io::Error::other("another mount is seen there")));
        };
        // All further places of the volume end with the first one. The user who ends the mount does
        // not know them.
        if how == Unmount::Lazily {
            for dir in further_places(&top.device, self.point.dir()) {
                offshoot_fuse::unmount(&dir, how)?;
            }
        }
        self.point.unmount(how)
    }
}

impl BlockMounter for HelperMount {
    fn mount_block(&self) -> Result<OwnedFd> {
        self.mount_with(|| self.point.mount_block())
    }

    fn hold(&self) -> Result<OwnedFd> {
        const TRIES: u32 = 40;
        const PAUSE: Duration = Duration::from_millis(25);

        let failed = |error| Error::io(format!("holding {}", self.source.display()), error);
        // A mount that the user ends by force gives the device up a moment later, and one whose
        // connection was aborted does not.
        for attempt in 0..TRIES {
            if attempt == TRIES / 2 {
                self.free_block_device();
            }
            match hold_block_device(&self.source) {
                Err(error) if error.kind() == ErrorKind::ResourceBusy => thread::sleep(PAUSE),
                held => return held.map_err(failed),
            }
        }
        hold_block_device(&self.source).map_err(failed)
    }
}

/// The other mount points of the mount with this device number.
fn further_places(device: &str, first: &Path) -> Vec<PathBuf> {
    let places = places_of(device).unwrap_or_default();
    places.into_iter().filter(|place| place != first).collect()
}
