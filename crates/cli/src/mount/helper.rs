//! The run that mounts and unmounts for the one that serves, which has no right to do so any more ([`super::sandbox`]).
//!
//! It is started before the volume is looked at, with the same words, and ends with who started it. Signals are not for it: who wants the
//! mount to end tells the process that serves it, and that one needs it then.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use nix::sys::signal::{SigSet, Signal};
use offshoot_fuse::{Helper, MountOptions, MountPoint, Mounter, Unmount};
use offshoot_vfs::{Error, Result};
use rustix::io::Errno;

use super::background::again;
use super::options::Wanted;
use super::table::{SUBTYPE, find, read_ahead, source_name};
use crate::args::MountArguments;
use crate::exit::{self, Failure};

/// Starts it.
pub(super) fn start(arguments: &MountArguments) -> exit::Result<Arc<Helper>> {
    let helper = again(arguments, "--helper").and_then(Helper::start);
    let failed = |error| Failure::Host("starting the process that mounts".to_owned(), error);
    Ok(Arc::new(helper.map_err(failed)?))
}

/// Is it, until the one that serves ends.
pub(super) fn help(arguments: &MountArguments, wanted: &Wanted) -> exit::Result {
    let failed = |what: &str, error| Failure::Host(what.to_owned(), error);
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
    signals.thread_block().map_err(|errno| failed("blocking signals", errno.into()))?;
    // What is typed on the terminal is not for it either. It fails for who leads a session, which this never is.
    let _ = rustix::process::setpgid(None, None);
    let dir = arguments.directory.canonicalize();
    let dir = dir.map_err(|error| failed(&arguments.directory.display().to_string(), error))?;
    let options = MountOptions {
        read_only: wanted.read_only,
        allow_other: wanted.allow_other,
        suid: wanted.suid,
        dev: wanted.dev,
        exec: wanted.exec,
        ..MountOptions::new(source_name(&arguments.volume.volume), SUBTYPE)
    };
    std::env::set_current_dir("/").map_err(|error| failed("/", error))?;
    let ours = Ours { point: MountPoint::new(dir, options), device: OnceLock::new() };
    offshoot_fuse::help(std::io::stdin().as_fd(), &ours)
        .map_err(|error| failed("the socket of the process that mounts", error))
}

/// The mount, of which the device number is known, so that nothing is unmounted that somebody mounted over it.
struct Ours {
    point: MountPoint,
    device: OnceLock<String>,
}

impl Mounter for Ours {
    fn mount(&self) -> Result<OwnedFd> {
        if self.device.get().is_some() {
            return Err(Error::posix(Errno::BUSY, self.point.dir().display().to_string()));
        }
        let device = self.point.mount()?;
        let mounted = find(self.point.dir()).map_err(|failure| {
            // Nobody could unmount it later.
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
        self.point.unmount(how)
    }
}
