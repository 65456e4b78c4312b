//! The two ioctls, as the client makes them. The kernel reads and writes through the pointer that
//! it is given as many bytes as the number of the ioctl says, which is what is unsafe here.

#![expect(unsafe_code, reason = "two ioctls, as the essay says")]

use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

use super::{NEXT_BYTES, START_BYTES};

/// No ioctl of Linux has these.
const GROUP: u8 = 0xbf;

/// Has a job started.
pub(super) const START: Opcode = opcode::read_write::<[u8; START_BYTES]>(GROUP, 0x51);

/// Asks what comes next of it.
pub(super) const NEXT: Opcode = opcode::read_write::<[u8; NEXT_BYTES]>(GROUP, 0x52);

/// START on `directory`.
pub(super) fn start(directory: impl AsFd, data: &mut [u8; START_BYTES]) -> Result<(), Errno> {
    // SAFETY: the number says that the ioctl is about as many bytes as the array has, and the array
    // is there as long as the call.
    unsafe { ioctl(directory, Updater::<START, _>::new(data)) }
}

/// NEXT on `directory`.
pub(super) fn next(directory: impl AsFd, data: &mut [u8; NEXT_BYTES]) -> Result<(), Errno> {
    // SAFETY: as for `start`.
    unsafe { ioctl(directory, Updater::<NEXT, _>::new(data)) }
}
