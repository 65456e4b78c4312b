//! The run that mounts and unmounts for the serving process, which has given up the right to do so
//! ([`super::sandbox`]).
//!
//! The serving process starts it with the same words before it reads the volume, and it ends with
//! the serving process. It ignores signals: a user who wants the mount to end signals the serving
//! process, and that process then needs the helper.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use nix::sys::signal::{SigSet, Signal};
use offshoot_fuse::{Helper, MountOptions, MountPoint, Mounter, Unmount};
use offshoot_vfs::{Error, Result};
use rustix::io::Errno;

use super::Mounting;
use super::background::again;
use super::options::MountCommandOptions;
use super::table::{SUBTYPE, find, places_of, read_ahead, source_name};
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
    let ours = HelperMount { point: MountPoint::new(dir, options), device: OnceLock::new() };
    offshoot_fuse::help(std::io::stdin().as_fd(), &ours)
        .map_err(|error| failed("the socket of the process that mounts", error))
}

/// The mount, with its device number, so that the helper never unmounts another mount over it.
struct HelperMount {
    point: MountPoint,
    device: OnceLock<String>,
}

impl Mounter for HelperMount {
    fn mount(&self) -> Result<OwnedFd> {
        if self.device.get().is_some() {
            return Err(Error::posix(Errno::BUSY, self.point.dir().display().to_string()));
        }
        let device = self.point.mount()?;
        let mounted = find(self.point.dir()).map_err(|failure| {
            // A mount that cannot be identified could not be unmounted later.
            let _ = self.point.unmount(Unmount::Lazily);
            Error::io("finding what was mounted", std::io::Error::other(failure.to_string()))
        })?;
        read_ahead(&mounted);
        let _ = self.device.set(mounted.device);
        Ok(device)
    }

    fn unmount(&self, how: Unmount) -> Result<()> {
        let top = find(self.point.dir()).ok().map(|mounted| mounted.device);
        if top.is_none() || top.as_ref() != self.device.get() {
            let what = format!("not unmounted: {}", self.point.dir().display());
            return Err(Error::io(what, std::io::Error::other("another mount is seen there")));
        }
        // All further places of the volume end with the first one. The user who ends the mount does
        // not know them.
        if how == Unmount::Lazily {
            let device = top.as_deref().unwrap_or_default();
            for dir in further_places(device, self.point.dir()) {
                offshoot_fuse::unmount(&dir, how)?;
            }
        }
        self.point.unmount(how)
    }
}

/// The other mount points of the mount with this device number.
fn further_places(device: &str, first: &Path) -> Vec<PathBuf> {
    let places = places_of(device).unwrap_or_default();
    places.into_iter().filter(|place| place != first).collect()
}
