//! The tree of files that verbs work on, by the format of its volume.

use std::ffi::OsStr;
use std::ops::Deref;
use std::sync::Arc;

use offshoot_btrfs::Filesystem;
use offshoot_btrfs_format::TreeId;
use offshoot_vfs::{self as vfs, FileSystem, FileSystemMut};
use offshoot_xfs::XfsVolume;

use super::{only_in_btrfs, subvolume_of};
use crate::exit::Result;
use crate::verbs::btrfs::statistics::Statistics;
use crate::verbs::statistics::{EngineStatistics, XfsCounters};

/// A tree of files of an open volume. Verbs for every format use it through the traits of `vfs`.
#[derive(Clone)]
pub(crate) enum OpenTree {
    Btrfs(Filesystem),
    Xfs(OpenXfsFiles),
}

/// The files of a volume of XFS, which refuse changes when it is open for reading.
#[derive(Clone)]
pub(crate) struct OpenXfsFiles {
    pub(super) volume: Arc<XfsVolume>,
    files: Arc<dyn FileSystemMut>,
}

impl OpenXfsFiles {
    pub(super) fn of(volume: &Arc<XfsVolume>) -> vfs::Result<Self> {
        let files = vfs::Volume::files(volume.clone(), volume.root().dev)?;
        Ok(Self { volume: volume.clone(), files: files.into() })
    }
}

impl Deref for OpenTree {
    type Target = dyn FileSystemMut;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Btrfs(files) => files,
            Self::Xfs(tree) => &*tree.files,
        }
    }
}

impl OpenTree {
    /// The tree of files of the subvolume `dev` of the same volume.
    pub(crate) fn at(&self, dev: u64) -> vfs::Result<Self> {
        match self {
            Self::Btrfs(files) => files.volume().filesystem(TreeId(dev)).map(Self::Btrfs),
            Self::Xfs(tree) if dev == tree.volume.root().dev => Ok(self.clone()),
            Self::Xfs(_) => Err(only_in_btrfs("a subvolume")),
        }
    }

    /// The volume that contains it.
    pub(crate) fn volume(&self) -> Arc<dyn vfs::Volume> {
        match self {
            Self::Btrfs(files) => files.volume().clone(),
            Self::Xfs(tree) => tree.volume.clone(),
        }
    }

    /// Makes everything durable, and ends the use of the volume, which nothing else uses.
    pub(crate) fn close(&self) -> vfs::Result<()> {
        let synced = self.sync();
        synced.and(self.volume().shut_down())
    }

    /// Whether both trees are in the same open volume.
    pub(crate) fn is_beside(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Btrfs(one), Self::Btrfs(other)) => Arc::ptr_eq(one.volume(), other.volume()),
            (Self::Xfs(one), Self::Xfs(other)) => Arc::ptr_eq(&one.volume, &other.volume),
            _ => false,
        }
    }

    /// What the engine counted since the volume was opened.
    pub(crate) fn statistics(&self) -> EngineStatistics {
        match self {
            Self::Btrfs(files) => EngineStatistics::Btrfs(Box::new(Statistics::of(files.volume()))),
            Self::Xfs(tree) => EngineStatistics::Xfs(XfsCounters::of(&tree.volume)),
        }
    }

    /// The id of the subvolume `name` of the same volume, or else of the default one.
    pub(crate) fn subvolume(&self, name: Option<&OsStr>) -> Result<u64> {
        match self {
            Self::Btrfs(files) => Ok(subvolume_of(files.volume(), name)?.0),
            Self::Xfs(_) if name.is_some() => Err(only_in_btrfs("a subvolume").into()),
            Self::Xfs(tree) => Ok(tree.volume.root().dev),
        }
    }

    /// The number space whose files have plain inode numbers on a mount.
    pub(crate) fn plain_space(&self) -> u64 {
        match self {
            Self::Btrfs(_) => TreeId::FS.0,
            Self::Xfs(tree) => tree.volume.root().dev,
        }
    }

    /// Access to what only btrfs has: `what`, in an error.
    pub(crate) fn btrfs(&self, what: &str) -> vfs::Result<&Filesystem> {
        match self {
            Self::Btrfs(files) => Ok(files),
            Self::Xfs(_) => Err(only_in_btrfs(what)),
        }
    }
}
