//! Ioctls that the mount does not know itself. It passes them to the program that serves the
//! filesystem. This way to that program exists in every mount name space, always reaches the right
//! mount, and leaves no file behind.
//!
//! The mount passes on only ioctls on open directories. An open directory has a handle of its own,
//! and the kernel says when it is closed, also when the program that opened it was killed. So the
//! serving program can keep what belongs to a client by that handle.

use offshoot_vfs::Result;

/// An ioctl on an open directory. The kernel has copied as many bytes as the number of the ioctl
/// says: 16 KiB at most.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Ioctl<'a> {
    /// The handle of the open directory. No other has the same while the filesystem is mounted.
    pub directory: u64,
    /// The user id of the program that asks.
    pub uid: u32,
    /// The group id of that program.
    pub gid: u32,
    /// The number of the ioctl.
    pub command: u32,
    /// The bytes that came with it.
    pub data: &'a [u8],
    /// How long the answer can be, in bytes.
    pub most_bytes: usize,
}

/// Answers ioctls.
pub trait Ioctls: Send + Sync {
    /// Returns the answer. An answer longer than [`Ioctl::most_bytes`] fails with `ERANGE`. A
    /// thread of the mount runs this call.
    ///
    /// # Errors
    /// The error that the asking program receives: `ENOTTY` for an unknown ioctl.
    fn answer(&self, ioctl: &Ioctl<'_>) -> Result<Vec<u8>>;

    /// The open directory was closed. Called for every directory; most never had an ioctl.
    fn closed(&self, directory: u64);
}
