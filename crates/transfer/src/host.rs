//! Files of the host, and what a transfer needs of its process.

use std::fs::{File, Metadata};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags, openat};
use rustix::process::{self, Resource, Rlimit};

use crate::{Result, TransferFailure};

/// Which file of the host: device and inode, or the device that a special file stands for.
pub type HostId = (u64, u64);

/// The identity of the file at `path`, links followed.
#[must_use]
pub fn host_id_of_file(path: &Path) -> Option<HostId> {
    path.metadata().ok().map(|metadata| host_id_of(&metadata))
}

/// The identity of the file that has this metadata.
#[must_use]
pub fn host_id_of(metadata: &Metadata) -> HostId {
    host_id(metadata.dev(), metadata.ino(), metadata.rdev())
}

/// The identity of the file of which `stat` gives these numbers.
pub(crate) fn host_id(dev: u64, ino: u64, rdev: u64) -> HostId {
    if rdev == 0 { (dev, ino) } else { (rdev, 0) }
}

/// The file mode creation mask of the process.
///
/// Linux has no call that only reads it. This sets it to 0 and back, so a file that another thread
/// makes in between gets permissions that the mask would have taken away.
#[must_use]
pub fn umask() -> u32 {
    let mask = process::umask(Mode::empty());
    process::umask(mask);
    mask.bits()
}

/// A process that is ready for transfers from and to files of the host.
///
/// These need two things that belong to the whole process, so the program prepares them and not the
/// transfer. Nothing else in this crate changes the process, but for a moment [`umask`].
///
/// - *No file mode creation mask.* The permissions of a file come from the volume. Those that it
///   has until then are given with each call, and a mask would take bits away from both.
/// - *Many open files.* A walk keeps one directory open for each level, or two where it reads the
///   host. Workers keep the files open that they fill.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    pub(crate) umask: u32,
    /// How many files it may have open.
    pub(crate) descriptors: u64,
}

impl Process {
    /// Sets the file mode creation mask of the process to 0, and raises its limit of open files as
    /// far as it goes. Both stay so. A program calls it once: a second call finds a mask of 0, and
    /// an extraction of one file makes its directory with the permissions that the mask leaves.
    ///
    /// # Errors
    /// When the limit cannot be raised.
    pub fn prepare() -> Result<Self> {
        let limit = process::getrlimit(Resource::Nofile);
        if limit.current != limit.maximum {
            let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
            process::setrlimit(Resource::Nofile, raised).map_err(|errno| {
                TransferFailure::Host("the limit of open files".to_owned(), errno.into())
            })?;
        }
        let umask = process::umask(Mode::empty()).bits();
        Ok(Self { umask, descriptors: limit.maximum.unwrap_or(u64::MAX) })
    }
}

/// Opens what is at `path` from `directory` to look at it, links followed. Nothing waits for the
/// other end of a FIFO, and no terminal becomes that of the program.
pub fn look_at(directory: impl AsFd, path: impl rustix::path::Arg) -> rustix::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    openat(directory, path, flags, Mode::empty()).map(File::from)
}
