//! The exclusive hold of a block device.
//!
//! The kernel lets one holder at a time have a block device: a descriptor that was opened with
//! `O_EXCL`, a mount, a RAID, a mapper. A writer holds its device with a descriptor of its own,
//! beside the one for its requests. So it can lend the device to a mount of type `fuseblk` that it
//! serves itself, and go on writing:
//!
//! ```text
//! opened ───────────── lend ── mount(2) ─────────── unmounted ── take back ── closed
//! O_EXCL of the writer │ nobody │ the mount holds it │ nobody   │ O_EXCL
//! flock and QEMU locks: all the time
//! ```
//!
//! While nobody holds it, the locks still keep away all programs that honour them, this crate
//! included. A program that honours none of them may become the holder: the kernel's own mount, or
//! `mkfs`. Then the device can be neither mounted nor taken back, and the writer must stop.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use parking_lot::Mutex;
use rustix::fs::OFlags;

use super::in_use;

/// Opens the block device at `path` so that the kernel gives it to no other holder until the
/// descriptor is closed.
///
/// # Errors
/// Of kind `ResourceBusy` when there is a holder, which the message names as far as the host shows
/// it; others of the host.
pub fn hold_block_device(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::EXCL.bits().cast_signed();
    match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
            Err(in_use::of_block_device(path))
        }
        result => result.map(File::into),
    }
}

/// The exclusive hold of a block device that is open for writing
/// ([`BlockDevice::exclusive_hold`](crate::BlockDevice::exclusive_hold)).
#[derive(Debug)]
pub struct ExclusiveHold(Mutex<Option<OwnedFd>>);

impl ExclusiveHold {
    pub(super) fn take(path: &Path) -> io::Result<Self> {
        hold_block_device(path).map(|held| Self(Mutex::new(Some(held))))
    }

    /// Gives the hold up, for a mount of this device that the caller makes and serves. Other locks
    /// stay.
    pub fn lend(&self) {
        *self.0.lock() = None;
    }

    /// Holds the device again. `held` is from [`hold_block_device`]: a caller without the right to
    /// open the device gets it from another process.
    pub fn take_back(&self, held: OwnedFd) {
        *self.0.lock() = Some(held);
    }
}
