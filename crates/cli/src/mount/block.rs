//! `-o fuseblk`: a volume on whole block devices, mounted with the type `fuseblk`. Then `sync` and
//! `syncfs` reach the serving process, and `umount` waits for it.
//!
//! Such a mount holds a block device exclusively. So the serving process lends its own hold of the
//! first device to the mount ([`ExclusiveHold`]), and writes under the hold of the mount only:
//!
//! | step | holder of the device | this process writes |
//! |---|---|---|
//! | this process opens the volume for reading, to find faults first | this process | no |
//! | this process gives its hold up, and the helper mounts | none, then the mount | no |
//! | this process opens the volume for writing, and answers INIT | the mount | yes |
//! | the kernel unmounts: DESTROY stores everything and ends all writing | the mount | until then |
//! | or the kernel ends the connection without DESTROY | none | a last request of each thread |
//! | then this process takes the device back | this process | yes, or never again |
//!
//! Before each write the process asks the kernel whether the connection stands
//! ([`has_ended`](offshoot_fuse::has_ended)). The kernel ends the connection before it gives the
//! device up, so only a write that began before that can come too late. After a connection that was
//! ended by force, the helper holds the device again for this process, if no other program has it.
//! The primary superblock shows whether another program had it in between: it must be the one that
//! this process wrote last.
//!
//! Further members stay held by this process. They are written only while the first one may be.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use offshoot_device::{BlockDevice, Borrower, ExclusiveHold};
use offshoot_fuse::{BlockMounter, Helper, Mounter, Unmount, has_ended};
use offshoot_vfs::{Code, Error, Result};

use crate::verbs::btrfs::last_stored::{PRIMARY_SUPERBLOCK, last_stored};

/// The error about a volume that cannot be mounted with the type `fuseblk`.
pub(super) fn refused(volume: impl fmt::Display, why: &str) -> Error {
    Error::unsupported(Code::Unsupported, format!("the mount option fuseblk: {volume} {why}"))
}

/// Mounts a volume over its block device.
pub(super) struct VolumeMounter {
    helper: Arc<Helper>,
    hold: OnceLock<Arc<ExclusiveHold>>,
    /// Where requests come from, until they are served.
    connection: Mutex<Option<OwnedFd>>,
}

impl VolumeMounter {
    /// Will mount with `helper`.
    pub(super) fn new(helper: Arc<Helper>) -> Self {
        Self { helper, hold: OnceLock::new(), connection: Mutex::new(None) }
    }

    /// Mounts the volume on `devices`, which nothing has written yet. They may be written from then
    /// on, and requests wait until they are served.
    pub(super) fn mount_over(&self, devices: &[Arc<dyn BlockDevice>]) -> Result<()> {
        let hold_of = |device: &Arc<dyn BlockDevice>| {
            let why = "is no whole block device, and the kernel holds nothing else";
            device.exclusive_hold().ok_or_else(|| refused(device.name(), why))
        };
        let holds = devices.iter().map(hold_of).collect::<Result<Vec<_>>>()?;
        let Some((hold, others)) = holds.split_first() else {
            return Err(refused("the volume", "has no device"));
        };
        for other in others {
            other.follow(hold.clone());
        }
        hold.give_up("it is being mounted");
        let connection = self.helper.mount_block()?;
        let lent = connection.try_clone().and_then(|device| {
            let borrower = BlockMount { device, helper: self.helper.clone() };
            hold.lend(Box::new(borrower), &*devices[0], PRIMARY_SUPERBLOCK)
        });
        let _ = self.hold.set(hold.clone());
        *self.connection() = Some(connection);
        lent.map_err(|error| Error::io(format!("lending {}", devices[0].name()), error))
    }

    fn connection(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Unmounts a volume that was never served, because it could not be opened for writing.
    pub(super) fn abandon(&self) -> Result<()> {
        if self.connection().take().is_none() {
            return Ok(());
        }
        self.give_up();
        // No request was answered, so the kernel asks for nothing.
        self.helper.unmount(Unmount::Lazily)
    }
}

impl Mounter for VolumeMounter {
    fn mount(&self) -> Result<OwnedFd> {
        let connection = self.connection().take();
        connection.ok_or_else(|| refused("the volume", "was not opened for writing"))
    }

    fn unmount(&self, how: Unmount) -> Result<()> {
        self.helper.unmount(how)
    }

    fn reclaim(&self) -> Result<()> {
        let Some(hold) = self.hold.get() else { return Ok(()) };
        hold.reclaim().map_err(|error| {
            let what = format!("what was done after {} is lost", last_stored(&hold.mark()));
            Error::io(what, error)
        })
    }

    fn give_up(&self) {
        if let Some(hold) = self.hold.get() {
            hold.give_up("the mount has ended");
        }
    }
}

/// The mount, as the holder of the device.
struct BlockMount {
    device: OwnedFd,
    helper: Arc<Helper>,
}

impl fmt::Debug for BlockMount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BlockMount").field(&self.device).finish()
    }
}

impl Borrower for BlockMount {
    fn has_ended(&self) -> bool {
        // Without an answer the device may be given up.
        has_ended(&self.device).unwrap_or(true)
    }

    fn take_back(&self) -> io::Result<OwnedFd> {
        self.helper.hold().map_err(|error| io::Error::other(error.to_string()))
    }
}
