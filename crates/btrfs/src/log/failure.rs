//! Why a log was not replayed. The error itself says so, because what helps is not the same: a log
//! that is damaged can only be thrown away, and one that is sound must not be.

use offshoot_vfs::{Corrupt, Error};

/// What errors begin with that the log itself is the reason of.
const IN_LOG: &str = "pending tree log: ";
/// What errors begin with that come from the volume that it is replayed into.
const IN_VOLUME: &str = "replaying the pending tree log: ";

/// Why opening a volume ended at its pending tree log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFailure {
    /// The log contradicts itself or the volume: nobody can replay it.
    Damaged,
    /// The log may be sound. Something that replaying needs is not there.
    NotReplayed,
}

impl LogFailure {
    /// Whether an error of [`Volume::open`](crate::Volume::open) or
    /// [`Volume::open_writable`](crate::Volume::open_writable) is about the log, and which.
    #[must_use]
    pub fn of(error: &Error) -> Option<Self> {
        let (text, is_corrupt) = match error {
            Error::Corrupt(corrupt) => (&corrupt.structure, true),
            Error::Posix { what, .. } | Error::Io { what, .. } | Error::Unsupported(what) => {
                (what, false)
            }
        };
        match text {
            text if is_corrupt && text.starts_with(IN_LOG) => Some(Self::Damaged),
            text if text.starts_with(IN_LOG) || text.starts_with(IN_VOLUME) => {
                Some(Self::NotReplayed)
            }
            _ => None,
        }
    }
}

/// Says of an error that it came from replaying.
pub(super) fn in_log(error: Error) -> Error {
    if LogFailure::of(&error).is_some() { error } else { behind(IN_LOG, error) }
}

/// Says of an error that the volume cannot be changed, which replaying does.
pub(super) fn in_volume(error: Error) -> Error {
    behind(IN_VOLUME, error)
}

fn behind(prefix: &str, error: Error) -> Error {
    let with = |text: String| format!("{prefix}{text}");
    match error {
        Error::Posix { what, errno } => Error::Posix { what: with(what), errno },
        Error::Io { file, what, source } => Error::Io { file, what: with(what), source },
        Error::Unsupported(what) => Error::Unsupported(with(what)),
        Error::Corrupt(corrupt) => {
            let structure = with(corrupt.structure);
            Corrupt {
                structure,
                logical: corrupt.logical,
                problem: corrupt.problem,
                file: corrupt.file,
            }
            .into()
        }
    }
}
