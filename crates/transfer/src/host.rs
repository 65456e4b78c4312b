//! Files of the host.

use std::fs::{File, Metadata};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags, openat};
use rustix::process;

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
#[must_use]
pub fn umask() -> u32 {
    let mask = process::umask(Mode::empty());
    process::umask(mask);
    mask.bits()
}

/// Opens what is at `path` from `directory` to look at it, links followed. Nothing waits for the
/// other end of a FIFO, and no terminal becomes that of the program.
pub fn look_at(directory: impl AsFd, path: impl rustix::path::Arg) -> rustix::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    openat(directory, path, flags, Mode::empty()).map(File::from)
}
