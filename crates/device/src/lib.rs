//! Block devices: where the bytes of a volume are.
//!
//! A [`BlockDevice`] is read and written at byte offsets by many threads at once. Offsets and
//! lengths need no alignment: a device that needs alignment (direct I/O) aligns its requests
//! itself. A request that ends past the device fails with [`std::io::ErrorKind::UnexpectedEof`],
//! which engines treat like any I/O error (a truncated image is a damaged image). A write never
//! makes a device longer.
//!
//! # What a write promises
//!
//! ```text
//!   write_at returns          flush is called      flush returns
//!        |                          |                    |
//!   -----+--------------------------+--------------------+------->
//!     every read sees it;      may be on the        is on the medium,
//!     a power cut may lose     medium or not        whatever happens
//!     or tear it
//! ```
//!
//! 1. A read that begins after a write returned sees it.
//! 2. A write is durable when a flush that was *called after it returned* has returned. Until then
//!    a power cut may leave all of the write, none of it, or some of its sectors of
//!    [`SECTOR_BYTES`] bytes. That is independent of every other write since the last flush: when
//!    two of them overlap, the older one may be on the medium over the newer one.
//! 3. A write that fails may have been done in part. After a flush that failed, the caller can rely
//!    only on what was durable before. Another flush does not bring the rest back.
//! 4. Two requests that overlap and run at the same time have no order.
//!
//! # The devices
//!
//! | device | what it is |
//! |---|---|
//! | [`FileDevice`] | an image file or a block device of the host |
//! | [`WindowDevice`] | a part of another device: a partition ([`PartitionTable`]), a volume at an offset |
//! | [`OpenedDisk`] | the disk in a file, with the images around it |
//! | [`open_qcow2`], [`open_vmdk`], [`VmdkDescriptor`], [`open_image`] | the disk in an image |
//! | [`MemoryDevice`] | pages in memory, sparse, with cheap snapshots, over zeros, bytes or another device |
//! | [`FaultDevice`] | wraps another device, and makes requests fail that a test chooses |
//! | [`CrashDevice`] | wraps another device, alone or in a set, logs every write and barrier, and builds what a power cut could leave |

mod crash;
mod delegate;
mod disk;
mod fault;
mod fields;
mod file;
mod image;
mod memory;
mod occupant;
mod partition;
mod window;

use std::borrow::Cow;
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;
use std::{fmt, ops};

pub use crash::{CrashDevice, CrashEntry, CrashLog, CrashPlan, CrashState, CrashStates};
pub use delegate::Delegate;
pub use disk::{
    DiskContents, DiskError, DiskFormat, DiskObstacle, DiskOptions, OpenedDisk, OtherFiles,
    PartitionContents,
};
pub use fault::{Fault, FaultDevice, RequestKind};
pub use file::{Borrower, ExclusiveHold, FileDevice, FileUse, hold_block_device};
pub use image::{
    ImageKind, Qcow2Header, Qcow2Limits, Qcow2Options, Qcow2Snapshot, VmdkDescriptor, VmdkFile,
    open_image, open_qcow2, open_qcow2_within, open_vmdk,
};
pub use memory::{MemoryBudget, MemoryDevice};
pub use occupant::{Occupant, VolumeFormat, occupant, occupant_at, signature_places};
pub use partition::{Partition, PartitionTable, TableKind};
pub use window::WindowDevice;

/// Every device writes a sector of this size, at a multiple of this size, whole or not at all.
/// Devices with larger sectors (4096 bytes) promise it as well.
pub const SECTOR_BYTES: u64 = 512;

/// A device that holds one member of a volume.
pub trait BlockDevice: Send + Sync + fmt::Debug {
    /// The name of the device in messages: a path, for a file.
    fn name(&self) -> &str;

    /// Its size in bytes.
    fn size_bytes(&self) -> u64;

    /// The size in bytes of the sectors in which the device, and a partition table on it, counts.
    /// `None` when the device does not say: an image file may hold a disk with any sector size.
    fn logical_sector_bytes(&self) -> Option<u64> {
        None
    }

    /// The exclusive hold of the kernel's block device, if this is a whole one, open for writing.
    fn exclusive_hold(&self) -> Option<Arc<ExclusiveHold>> {
        None
    }

    /// Fills all of `buf` from byte `offset` on, or fails.
    ///
    /// # Errors
    /// Those of the host; `UnexpectedEof` when the range ends past the device.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Fills `bufs` one behind the other from byte `offset` on. The device can make one large
    /// request of them.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at).
    fn read_vectored_at(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        let mut at = offset;
        for buf in bufs {
            self.read_at(at, buf)?;
            at += buf.len() as u64;
        }
        Ok(())
    }

    /// Reads as [`read_at`](Self::read_at) does, but from the medium and past the page cache of the
    /// host where the host can do that. A scrub uses it to verify the medium. This works for whole
    /// pages of 4 KiB that are read into memory aligned to a page; every other request is served as
    /// by `read_at`.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at).
    fn read_medium_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.read_at(offset, buf)
    }

    /// Announces that `len` bytes from `offset` on will be read soon. The device may start to fetch
    /// them; it never waits for them.
    fn prefetch(&self, offset: u64, len: u64) {
        let _ = (offset, len);
    }

    /// Writes all of `buf` at `offset`. It is durable only after a later
    /// [`flush`](Self::flush) returned, and until then it may be there in part.
    ///
    /// # Errors
    /// Those of the host; `UnexpectedEof` when the range ends past the device, `EROFS` when the
    /// device was opened for reading. A part may have been written.
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()>;

    /// Writes `bufs` one behind the other from `offset` on. The device can make one large request
    /// of them, so that the caller need not copy them together.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        let mut at = offset;
        for buf in bufs {
            self.write_at(at, buf)?;
            at += buf.len() as u64;
        }
        Ok(())
    }

    /// The barrier: when it returns, every write that returned before it was called is durable.
    ///
    /// # Errors
    /// Those of the host. What was not durable before may be lost then, and a second flush that
    /// succeeds does not bring it back.
    fn flush(&self) -> io::Result<()>;

    /// Tells the device that the range is not needed any more. What a read of it returns afterwards
    /// is not defined, nor whether that is durable. A device that discards in larger units may
    /// leave out the parts of the range that fill no whole unit.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at); of kind [`Unsupported`](io::ErrorKind::Unsupported)
    /// when the host cannot do it.
    fn discard(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Makes the device `size_bytes` long. New bytes read as zeros, and bytes behind the new end
    /// are lost. The next [`flush`](Self::flush) makes the new size durable. The caller makes no
    /// request meanwhile that reaches behind the new end.
    ///
    /// # Errors
    /// Those of the host; of kind [`Unsupported`](io::ErrorKind::Unsupported) for a device whose
    /// size is fixed. A block device of the host has the size that the host gives it, so this only
    /// looks whether that is enough.
    fn resize(&self, size_bytes: u64) -> io::Result<()> {
        let _ = size_bytes;
        Err(io::Error::new(io::ErrorKind::Unsupported, "its size is fixed"))
    }
}

/// The range of a request, if it lies inside a device of `size_bytes`.
fn request_range(size_bytes: u64, offset: u64, len: u64) -> io::Result<ops::Range<u64>> {
    match offset.checked_add(len) {
        Some(end) if end <= size_bytes => Ok(offset..end),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// How many bytes `bufs` have together.
fn total_bytes(bufs: &[impl ops::Deref<Target = [u8]>]) -> u64 {
    bufs.iter().map(|buf| buf.len() as u64).sum()
}

/// The bytes of `bufs` one behind the other. A single buffer is not copied.
fn together<'a>(bufs: &'a [IoSlice<'_>]) -> Cow<'a, [u8]> {
    match bufs {
        [one] => Cow::Borrowed(one),
        many => Cow::Owned(many.iter().map(|buf| &**buf).collect::<Vec<_>>().concat()),
    }
}
