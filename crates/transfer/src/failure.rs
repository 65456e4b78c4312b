//! How a transfer ends that did not do everything.

use std::{fmt, io};

use offshoot_vfs::{self as vfs, OsReason};

/// Why a transfer did not begin, or could not go on.
#[derive(Debug)]
pub enum Failure {
    /// The filesystem behind the `vfs` traits failed.
    Volume(vfs::Error),
    /// The host failed, while doing what the text says.
    Host(String, io::Error),
    /// It is not done, for the reason that the text gives.
    Refused(String),
    /// What takes the archive refused it.
    Archive(io::Error),
}

/// The result of a transfer.
pub type Result<T = (), E = Failure> = std::result::Result<T, E>;

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Volume(error) => error.fmt(f),
            Self::Host(what, error) => write!(f, "{what}: {}", OsReason(error)),
            Self::Refused(why) => f.write_str(why),
            Self::Archive(error) => write!(f, "writing the archive: {}", OsReason(error)),
        }
    }
}

impl std::error::Error for Failure {}

impl From<vfs::Error> for Failure {
    fn from(error: vfs::Error) -> Self {
        Self::Volume(error)
    }
}

/// The worst of what went wrong with single files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Worst {
    /// A call, a device or the host failed.
    Failed,
    /// The volume contradicts itself.
    Corrupt,
    /// It needs what is not there.
    Unsupported,
}

impl Worst {
    /// Of this error.
    #[must_use]
    pub fn of(error: &vfs::Error) -> Self {
        match error {
            vfs::Error::Posix { .. } | vfs::Error::Io { .. } => Self::Failed,
            vfs::Error::Unsupported(_) => Self::Unsupported,
            vfs::Error::Corrupt(_) => Self::Corrupt,
        }
    }
}
