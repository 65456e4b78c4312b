//! Why a log was not replayed. The text of the error says it, because the remedies differ: a
//! damaged log can only be thrown away, and a sound one must be kept.

use offshoot_vfs::{Corrupt, Error};

/// The first words of errors that the log itself causes.
const IN_LOG: &str = "pending tree log: ";
/// The first words of errors from the volume that the log is replayed into.
const IN_VOLUME: &str = "replaying the pending tree log: ";

/// Why opening a volume failed at its pending tree log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFailure {
    /// The log contradicts itself or the volume, and cannot be replayed.
    Damaged,
    /// The log may be sound, but something that replaying needs is missing.
    NotReplayed,
}

impl LogFailure {
    /// The failure that an error of [`BtrfsVolume::open`](crate::BtrfsVolume::open) or
    /// [`BtrfsVolume::open_writable`](crate::BtrfsVolume::open_writable) reports; `None` if the
    /// error is not about the log.
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

/// Marks an error as one of replaying, unless it is marked already.
pub(super) fn in_log(error: Error) -> Error {
    if LogFailure::of(&error).is_some() { error } else { behind(IN_LOG, error) }
}

/// Marks an error that keeps the volume from being written, which replaying needs.
pub(crate) fn in_volume(error: Error) -> Error {
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
