//! Ioctls that mean nothing to a mount itself, for whoever serves the filesystem: a way to it that
//! is there in every name space, goes to the right mount by construction, and leaves nothing
//! behind.
//!
//! Only those on open directories are passed on: an open directory has a number of its own here,
//! and the kernel says when it is closed, also when the program that opened it was killed. So what
//! belongs to who asks can be kept by that number.

use offshoot_vfs::Result;

/// An ioctl on an open directory. The kernel has copied what its number says: 16 KiB at the most.
#[derive(Clone, Copy, Debug)]
pub struct Ioctl<'a> {
    /// The open directory: no two have the same number while a filesystem is mounted.
    pub directory: u64,
    /// The user who asks.
    pub uid: u32,
    /// The group of that user.
    pub gid: u32,
    /// The number of the ioctl.
    pub command: u32,
    /// What it came with.
    pub data: &'a [u8],
    /// How long its answer can be.
    pub most_bytes: usize,
}

/// Who answers ioctls.
pub trait Ioctls: Send + Sync {
    /// The answer, of which nothing is sent when it is longer than there is room for. A thread of
    /// the mount waits for it.
    ///
    /// # Errors
    /// Whatever the program that asks is to be told: `ENOTTY` for what is not known.
    fn answer(&self, ioctl: &Ioctl<'_>) -> Result<Vec<u8>>;

    /// The open directory is closed. Most of them never had an ioctl.
    fn closed(&self, directory: u64);
}
