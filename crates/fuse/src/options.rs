//! What whoever mounts a filesystem decides.

use std::sync::Arc;

use offshoot_vfs::{Error, FileId};

use crate::ioctls::Ioctls;

/// Whom the files are shown to belong to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// The user, `None` for whom each file belongs to.
    pub uid: Option<u32>,
    /// The group, in the same way.
    pub gid: Option<u32>,
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

/// Who is told of what went wrong in the filesystem.
pub type Reporter = Arc<dyn Fn(&Error) + Send + Sync>;

/// The directory that has a name behind a [`Gate`].
pub type Find = Arc<dyn Fn(&[u8]) -> Option<FileId> + Send + Sync>;

/// Directories that root finds behind a gate: what can be mounted elsewhere, but is perhaps not in
/// the tree that is mounted.
///
/// Root finds the gate in every directory. Its name is longer than
/// [`NAME_MAX`](offshoot_vfs::NAME_MAX), so no file has it and no listing shows it. It is a
/// directory that only root may search, because the kernel keeps a name that root found and shows
/// it to everybody.
#[derive(Clone)]
pub struct Gate {
    /// The name of the gate.
    pub name: &'static [u8],
    /// What is found behind it.
    pub find: Find,
}

/// How a filesystem is served.
#[derive(Clone, Default)]
pub struct ServeOptions {
    /// All files are shown with this owner. Then new ones belong to the owner of the directory that
    /// they are made in, and no owner can be changed.
    pub owner: Owner,
    /// How requests come and answers go.
    pub transport: Transport,
    /// Who is told of what went wrong in the filesystem, beside the program whose call it was.
    pub reporter: Option<Reporter>,
    /// Who answers ioctls on directories that are not known here.
    pub ioctls: Option<Arc<dyn Ioctls>>,
    /// What root finds that is not in the tree.
    pub gate: Option<Gate>,
}
