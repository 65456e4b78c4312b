//! `offshoot unmount`: ends a mount after everything is on the devices.
//!
//! The process that serves the mount holds a lock on the volume while it writes it, as every writer
//! does. So once this program gets the lock, the serving process is done with the volume. Whether
//! everything was stored, this program asks before, while the mount is there: fsync of the root
//! makes everything durable.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use offshoot_device::hold_block_device;
use offshoot_fuse::Unmount;
use offshoot_vfs::{Errno, OsReason};
use rustix::fs::{FlockOperation, flock};
use serde::Serialize;

use super::{stopped, table};
use crate::args::UnmountArguments;
use crate::disk::DiskName;
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::output::{Console, json_name, write_line};

/// How often a forced unmount of a mount in use is tried, and the time between two tries, in which
/// programs can stop using it.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(50);

/// How long the end of the serving process is waited for without a message.
const PATIENCE: Duration = Duration::from_secs(30);

/// The result of unmounting, as JSON.
#[derive(Serialize)]
struct Unmounted {
    volume: String,
    directory: String,
    /// Whether all changes are durable; `None` if the serving process was not asked.
    stored: Option<bool>,
}

/// Unmounts a volume.
pub(crate) fn unmount(
    arguments: &UnmountArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let mut tell = |volume: &Path, dir: &Path, stored| {
        if !arguments.json {
            return Ok(());
        }
        let [volume, directory] = [volume, dir].map(|path| json_name(path.as_os_str().as_bytes()));
        write_line(out, &Unmounted { volume, directory, stored })
    };
    let named = &arguments.directory;
    let failed = |error| VerbFailure::Host(named.display().to_string(), error);
    if arguments.force {
        let dir = beside_the_mount(named).map_err(failed)?;
        let line = table::find_of_anybody(&dir)?;
        for server in stopped::resume_servers(&line.mounted)? {
            console
                .error(&format_args!("process {server}, which serves it, was stopped; it goes on"));
        }
        unmount_by_force(&dir)?;
        tell(&line.mounted.source, &dir, None)?;
        console.error(&"unmounted by force: what was done last may not be stored");
        return Err(VerbFailure::Reported(ExitStatus::Failed));
    }
    // The mount may not answer any more, or may refuse this user. Then symbolic links in the path
    // stay.
    let dir = named.canonicalize().or_else(|_| std::path::absolute(named)).map_err(failed)?;
    let line = table::find_of_anybody(&dir)?;
    let how = if arguments.lazy { Unmount::Lazily } else { Unmount::Unused };
    if !line.is_trusted() {
        // The other user's process is neither asked nor waited for, and may report any name as its
        // volume.
        offshoot_fuse::unmount(&dir, how)?;
        console.warning(&format_args!(
            "{}: another user mounted that; whether everything is stored was not asked",
            dir.display()
        ));
        tell(&line.mounted.source, &dir, None)?;
        return if arguments.lazy {
            Ok(())
        } else {
            Err(VerbFailure::Reported(ExitStatus::Failed))
        };
    }
    let mounted = line.mounted;
    let is_stored = match store(&dir) {
        Ok(()) => true,
        // A user who may not open the root may not ask either. The serving process stores
        // everything when it ends.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => true,
        Err(error) if error.raw_os_error() == Some(Errno::NOTCONN.raw_os_error()) => {
            let (volume, dir) = (mounted.source.display(), dir.display());
            console.error(&format_args!("{dir}: the program that served {volume} has ended"));
            console.detail(&"not everything that was done may be stored; the mount is taken away");
            false
        }
        Err(error) => {
            let reason = OsReason(&error);
            console.error(&format_args!("not everything that was done is stored: {reason}"));
            false
        }
    };
    offshoot_fuse::unmount(&dir, how)?;
    if !arguments.lazy {
        match table::places_of(&mounted.device)?.first() {
            // While the volume is mounted elsewhere, this program cannot tell when it is free.
            Some(other) => console.error(&format_args!("still mounted over {}", other.display())),
            None => wait_for_writer(&mounted.source, console)?,
        }
    }
    tell(&mounted.source, &dir, Some(is_stored))?;
    if is_stored { Ok(()) } else { Err(VerbFailure::Reported(ExitStatus::Failed)) }
}

/// Unmounts by force. A program that waits for an answer gets an error, and uses the mount until
/// then.
fn unmount_by_force(dir: &Path) -> offshoot_vfs::Result<()> {
    for _ in 0..TRIES {
        match offshoot_fuse::unmount(dir, Unmount::ByForce) {
            Err(error) if error.errno() == Errno::BUSY => thread::sleep(PAUSE),
            // Its own helper may have unmounted it meanwhile.
            Err(error) if error.errno() == Errno::INVAL && table::find_of_anybody(dir).is_err() => {
                return Ok(());
            }
            result => return result,
        }
    }
    offshoot_fuse::unmount(dir, Unmount::ByForce)
}

/// Makes all changes on the mount over `dir` durable: first those in the pages of the kernel, then
/// those in the serving process.
pub(super) fn store(dir: &Path) -> io::Result<()> {
    let root = File::open(dir)?;
    rustix::fs::syncfs(&root)?;
    root.sync_all()
}

/// The path of the mount over `named`, found without a request to its serving process.
pub(super) fn beside_the_mount(named: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(named)?;
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => Ok(parent.canonicalize()?.join(name)),
        _ => Ok(path),
    }
}

/// Waits until no process writes `volume`.
fn wait_for_writer(volume: &Path, console: &Console) -> Result {
    let DiskName { file: volume, .. } = DiskName::parse(volume);
    let failed = |error| VerbFailure::Host(format!("waiting for {}", volume.display()), error);
    let file = File::open(&volume).map_err(failed)?;
    let begun = Instant::now();
    let mut operation = FlockOperation::NonBlockingLockShared;
    loop {
        match flock(&file, operation) {
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) if begun.elapsed() < PATIENCE => thread::sleep(PAUSE / 10),
            Err(Errno::WOULDBLOCK) => {
                let volume = volume.display();
                console.error(&format_args!("waiting until the mount of {volume} has ended"));
                console.detail(
                    &"an open file, or a copy of the mount in another namespace, keeps it alive; \
                      what was done before is stored",
                );
                operation = FlockOperation::LockShared;
            }
            result => break result.map_err(|errno| failed(errno.into()))?,
        }
    }
    // A serving process that ends gives its lock up a moment before its hold of a block device.
    if file.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device()) {
        for _ in 0..TRIES {
            match hold_block_device(&volume) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    thread::sleep(PAUSE / 10);
                }
                _ => break,
            }
        }
    }
    Ok(())
}
