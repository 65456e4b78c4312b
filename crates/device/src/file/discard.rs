//! Discarding on a block device: the request `BLKDISCARD` of the kernel.
//!
//! `fallocate`, which makes holes in files, does not work here: on a block device the kernel zeros
//! the range, and a disk that can discard but promises no zeros refuses that. No crate offers this
//! request as a safe function, so this module has unsafe code.

#![expect(unsafe_code, reason = "an ioctl that no crate has as a safe function")]

use std::fs::File;
use std::ops::Range;

use rustix::io::Result;
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};

/// The largest sector of a block device in bytes. A block device discards whole sectors only.
const UNIT_BYTES: u64 = 4096;

/// `_IO(0x12, 119)` of `linux/fs.h`.
const BLKDISCARD: Opcode = opcode::none(0x12, 119);

/// Discards the whole units of `range` on `device`, which is a block device. Example: of 1000..9000
/// it discards 4096..8192.
pub(super) fn on_block_device(device: &File, range: Range<u64>) -> Result<()> {
    let start = range.start.next_multiple_of(UNIT_BYTES);
    let end = range.end / UNIT_BYTES * UNIT_BYTES;
    if start >= end {
        return Ok(());
    }
    // SAFETY: the request reads two numbers of 64 bits through its pointer, the start and the
    // length of the range, and writes no memory.
    unsafe { ioctl(device, Setter::<BLKDISCARD, _>::new([start, end - start])) }
}
