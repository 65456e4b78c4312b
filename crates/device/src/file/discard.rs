//! Discarding on a block device: the request `BLKDISCARD` of the kernel.
//!
//! Making a hole, as in a file, is another thing there: the kernel zeros the range then, which
//! disks refuse that can discard and do not promise zeros. No crate has this request as a safe
//! function, so this module has unsafe code.

#![expect(unsafe_code, reason = "an ioctl that no crate has as a safe function")]

use std::fs::File;
use std::ops::Range;

use rustix::io::Result;
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};

/// What block devices have as their sectors at the most, in bytes: they take nothing else than
/// whole ones.
const UNIT_BYTES: u64 = 4096;

/// `_IO(0x12, 119)` of `linux/fs.h`.
const BLKDISCARD: Opcode = opcode::none(0x12, 119);

/// Discards what of `range` is whole units of `device`, which is a block device, and the whole of
/// them inside of it.
pub(super) fn on_block_device(device: &File, range: Range<u64>) -> Result<()> {
    let start = range.start.next_multiple_of(UNIT_BYTES);
    let end = range.end / UNIT_BYTES * UNIT_BYTES;
    if start >= end {
        return Ok(());
    }
    // SAFETY: the request reads two numbers of 64 bits behind its pointer, where the range begins
    // and how long it is, and writes no memory.
    unsafe { ioctl(device, Setter::<BLKDISCARD, _>::new([start, end - start])) }
}
