//! Block devices: where the bytes of a volume are.
//!
//! A [`BlockDevice`] is read at byte offsets by many threads at once. Offsets and
//! lengths need no alignment: a device that needs it (direct I/O) does it inside.
//! A read is all or nothing; a read past the end is an error of kind
//! [`std::io::ErrorKind::UnexpectedEof`], which engines treat like any I/O error
//! (a truncated image is a damaged image).
//!
//! [`FileDevice`] is an image file or a block device of the host, [`MemoryDevice`]
//! is a buffer, and [`FaultDevice`] stands over any other one and makes it fail where
//! a test asks for it.

mod fault;
mod file;
mod memory;

use std::{fmt, io};

pub use fault::{Fault, FaultDevice};
pub use file::FileDevice;
pub use memory::MemoryDevice;

/// A device that holds one member of a volume.
pub trait BlockDevice: Send + Sync + fmt::Debug {
    /// The name by which messages call it: a path, for a file.
    fn name(&self) -> &str;

    /// Its size in bytes.
    fn size_bytes(&self) -> u64;

    /// Fills `buf` from byte `offset` on.
    ///
    /// # Errors
    /// Whatever the host says; `UnexpectedEof` when the range ends past the device.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Tells that `len` bytes from `offset` on will be read soon. The device may
    /// start to fetch them; it never waits for them.
    fn prefetch(&self, offset: u64, len: u64) {
        let _ = (offset, len);
    }
}
