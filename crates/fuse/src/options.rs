//! Options of the program that serves a mount.

use std::sync::Arc;

use offshoot_vfs::{Error, FileId, Volume};

use crate::ioctls::Ioctls;

/// The owner that the mount shows for all files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShownOwner {
    /// The user. With `None` each file shows its own.
    pub uid: Option<u32>,
    /// The group. With `None` each file shows its own.
    pub gid: Option<u32>,
}

/// How the mount shows files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShownFiles {
    pub(crate) owner: ShownOwner,
    /// `st_blksize`: the unit in which programs should write, in bytes.
    pub(crate) block_bytes: u32,
}

impl ServeOptions {
    /// How the mount shows files. Programs should write pages at least, as on the kernel's mounts.
    pub(crate) fn shown(&self) -> ShownFiles {
        let block_bytes = self.volume.as_ref().map_or(0, |volume| volume.block_size());
        ShownFiles { owner: self.owner, block_bytes: block_bytes.max(4096) }
    }
}

/// How requests come and answers go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Over io_uring where the kernel offers it, and over `/dev/fuse` otherwise.
    #[default]
    Best,
    /// Over io_uring, or not at all.
    IoUring,
    /// Over `/dev/fuse`.
    Device,
}

/// Receives each error of the filesystem that deserves attention.
pub type ErrorReporter = Arc<dyn Fn(&Error) + Send + Sync>;

/// Finds the directory that has this name behind a [`Gate`].
pub type FindDirectory = Arc<dyn Fn(&[u8]) -> Option<FileId> + Send + Sync>;

/// Directories that root finds behind a gate: each can be mounted elsewhere, but may lie outside
/// the mounted tree.
///
/// Root finds the gate in every directory. The name of the gate is longer than
/// [`NAME_MAX`](offshoot_vfs::NAME_MAX), so no file has it and no listing shows it. The kernel
/// caches a name that root found and shows it to every user. So the gate is a directory that only
/// root may search.
#[derive(Clone)]
#[non_exhaustive]
pub struct Gate {
    /// The name of the gate.
    pub name: &'static [u8],
    /// Finds the directories behind it.
    pub find: FindDirectory,
}

impl Gate {
    /// A gate with this name. `find` finds the directories behind it.
    pub fn new(name: &'static [u8], find: FindDirectory) -> Self {
        Self { name, find }
    }
}

/// How a filesystem is served.
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct ServeOptions {
    /// The mount shows all files with this owner. Where it is set, a new file belongs to the owner
    /// of its directory, and changing an owner fails.
    pub owner: ShownOwner,
    /// The number space whose files show their inode numbers as they are, so that these stay small
    /// ([`FileId::dev`]). In any other, the space is a part of the number that a file shows.
    pub plain_space: u64,
    /// The mount can be shown elsewhere with mapped ids (`MOUNT_ATTR_IDMAP`), where the kernel has
    /// that for FUSE: since Linux 6.12. The kernel then names the user only in requests that make
    /// files. So the mount refuses gates, and ioctls for root and the serving user, to all users.
    /// No program sees names of `trusted.` attributes in a list, and changes of a file clear its
    /// set-id bits also for root.
    pub allows_idmap: bool,
    /// How requests come and answers go.
    pub transport: Transport,
    /// Receives errors of the filesystem, in addition to the program whose call failed.
    pub reporter: Option<ErrorReporter>,
    /// The volume of the filesystem, for ioctls about it.
    pub volume: Option<Arc<dyn Volume>>,
    /// Answers ioctls on directories that this crate does not know.
    pub ioctls: Option<Arc<dyn Ioctls>>,
    /// Directories that root finds outside the tree.
    pub gate: Option<Gate>,
}

impl ServeOptions {
    /// The defaults over `transport`: each file shows its own owner, and the mount does no more
    /// than the filesystem does.
    #[must_use]
    pub fn over(transport: Transport) -> Self {
        Self { transport, ..Self::default() }
    }
}
