//! The two ioctls, as the client makes them. They are unsafe because the kernel reads and writes
//! through the given pointer as many bytes as the number of the ioctl says.

#![expect(unsafe_code, reason = "two ioctls, as the essay says")]

use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

use super::{NEXT_BYTES, START_BYTES};

/// No ioctl of Linux has this group.
const GROUP: u8 = 0xbf;

/// Starts a job.
pub(super) const START: Opcode = opcode::read_write::<[u8; START_BYTES]>(GROUP, 0x51);

/// Asks for the next event of the job.
pub(super) const NEXT: Opcode = opcode::read_write::<[u8; NEXT_BYTES]>(GROUP, 0x52);

/// Calls START on `directory`.
pub(super) fn start(directory: impl AsFd, data: &mut [u8; START_BYTES]) -> Result<(), Errno> {
    // SAFETY: the number of the ioctl encodes the size of the array, and the array outlives the
    // call.
    unsafe { ioctl(directory, Updater::<START, _>::new(data)) }
}

/// Calls NEXT on `directory`.
pub(super) fn next(directory: impl AsFd, data: &mut [u8; NEXT_BYTES]) -> Result<(), Errno> {
    // SAFETY: as for `start`.
    unsafe { ioctl(directory, Updater::<NEXT, _>::new(data)) }
}
