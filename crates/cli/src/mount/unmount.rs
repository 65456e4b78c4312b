//! `offshoot unmount`: the end of a mount, when everything is on the devices.
//!
//! The program that serves the mount holds a lock on the volume while it writes it, as every writer does. So whoever can lock the
//! volume knows that the program is done with it. Whether that went well it has asked before, while the mount was there: fsync of
//! the root makes all of it durable.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use offshoot_vfs::{Errno, OsReason};
use rustix::fs::{FlockOperation, flock};

use super::table;
use crate::args::UnmountArguments;
use crate::exit::{ExitStatus, Failure, Result};
use crate::output::Console;

/// Unmounts a volume.
pub(crate) fn unmount(arguments: &UnmountArguments, console: &Arc<Console>) -> Result {
    let named = &arguments.directory;
    // What is mounted there may not answer any more, or not answer to us: then its links are not followed.
    let dir = named.canonicalize().or_else(|_| std::path::absolute(named));
    let dir = dir.map_err(|error| Failure::Host(named.display().to_string(), error))?;
    let mounted = table::find(&dir)?;
    let mut is_stored = true;
    // Who may not open it may not ask either. The end of the program makes all durable as well.
    if let Ok(root) = File::open(&dir)
        && let Err(error) = root.sync_all()
    {
        console
            .error(&format_args!("not everything that was done is stored: {}", OsReason(&error)));
        is_stored = false;
    }
    offshoot_fuse::unmount(&dir, arguments.lazy)?;
    if !arguments.lazy {
        wait_for_writer(&mounted.source)?;
    }
    if is_stored { Ok(()) } else { Err(Failure::Reported(ExitStatus::Failed)) }
}

/// Waits until nobody writes `volume`.
fn wait_for_writer(volume: &Path) -> Result {
    let failed = |error| Failure::Host(format!("waiting for {}", volume.display()), error);
    let volume = File::open(volume).map_err(failed)?;
    loop {
        match flock(&volume, FlockOperation::LockShared) {
            Err(Errno::INTR) => {}
            result => return result.map_err(|errno| failed(errno.into())),
        }
    }
}
