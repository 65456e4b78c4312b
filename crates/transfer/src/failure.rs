//! How a transfer ends that did not do everything.

use std::{fmt, io};

use offshoot_vfs::escape::Escaped;
use offshoot_vfs::{self as vfs, OsReason};

use crate::build::SourceProblem;
use crate::extract::MARK_NAME;

/// Why a transfer did not begin, or could not go on.
#[derive(Debug)]
pub enum TransferFailure {
    /// The filesystem behind the `vfs` traits failed.
    Volume(vfs::Error),
    /// The host failed, while doing what the text says.
    Host(String, io::Error),
    /// The source, at this path, has a file at its top with the name of the file that marks a
    /// destination as half done. An archive and a copy can hold it.
    HasMark(Vec<u8>),
    /// Writing the archive failed.
    Archive(io::Error),
    /// A source of a build, or the file at this path in it, cannot be used.
    Source(Vec<u8>, SourceProblem),
    /// The watcher ended the transfer.
    Interrupted,
}

impl TransferFailure {
    /// What a transfer was doing when [`Self::Archive`] happened.
    pub const WRITING_ARCHIVE: &str = "writing the archive";
}

/// The result of a transfer.
pub type Result<T = (), E = TransferFailure> = std::result::Result<T, E>;

impl fmt::Display for TransferFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Volume(error) => error.fmt(f),
            Self::Host(what, error) => write!(f, "{what}: {}", OsReason(error)),
            Self::HasMark(path) => write!(
                f,
                "{} has a file {MARK_NAME} of its own, the name of the file by which an \
                 extraction is gone on with",
                Escaped(path)
            ),
            Self::Source(place, problem) => write!(f, "{}: {problem}", Escaped(place)),
            Self::Interrupted => f.write_str("interrupted"),
            Self::Archive(error) => {
                write!(f, "{}: {}", Self::WRITING_ARCHIVE, OsReason(error))
            }
        }
    }
}

impl std::error::Error for TransferFailure {}

impl From<vfs::Error> for TransferFailure {
    fn from(error: vfs::Error) -> Self {
        Self::Volume(error)
    }
}

/// The worst of what went wrong with single files. Later variants are worse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Worst {
    /// A call, a device or the host failed.
    Failed,
    /// The volume contradicts itself.
    Corrupt,
    /// It needs a feature that is missing here.
    Unsupported,
}

impl Worst {
    /// The one that `error` counts as.
    #[must_use]
    pub fn of(error: &vfs::Error) -> Self {
        match error {
            vfs::Error::Posix { .. } | vfs::Error::Io { .. } => Self::Failed,
            vfs::Error::Unsupported { .. } => Self::Unsupported,
            vfs::Error::Corrupt(_) => Self::Corrupt,
        }
    }
}
