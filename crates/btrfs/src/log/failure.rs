//! Why a log was not replayed. The code of the error says it, because the remedies differ: a
//! damaged log can only be thrown away, and a sound one must be kept.

use offshoot_vfs::{Code, Corrupt, Error};

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
        match error {
            // Its code says that a device failed.
            Error::Io { what, .. } if what.starts_with(IN_LOG) || what.starts_with(IN_VOLUME) => {
                Some(Self::NotReplayed)
            }
            error if error.code() == Code::Log => Some(Self::Damaged),
            error if error.code() == Code::LogNotReplayed => Some(Self::NotReplayed),
            _ => None,
        }
    }
}

/// Marks an error as one of replaying, unless it is marked already.
pub(super) fn in_log(error: Error) -> Error {
    if LogFailure::of(&error).is_some() {
        return error;
    }
    let is_damaged = matches!(error, Error::Corrupt(_));
    behind(IN_LOG, error).with_code(if is_damaged { Code::Log } else { Code::LogNotReplayed })
}

/// Marks an error that keeps the volume from being written, which replaying needs.
pub(crate) fn in_volume(error: Error) -> Error {
    behind(IN_VOLUME, error).with_code(Code::LogNotReplayed)
}

fn behind(prefix: &str, error: Error) -> Error {
    let with = |text: String| format!("{prefix}{text}");
    match error {
        Error::Posix { what, errno, code } => Error::Posix { what: with(what), errno, code },
        Error::Io { file, what, source } => Error::Io { file, what: with(what), source },
        Error::Unsupported { what, code } => Error::Unsupported { what: with(what), code },
        Error::Corrupt(corrupt) => {
            Corrupt { structure: format!("{prefix}{}", corrupt.structure), ..*corrupt }.into()
        }
    }
}

#[cfg(test)]
mod tests {
    use offshoot_vfs::{Errno, Structure};

    use super::*;

    /// The code and the failure of an error, which is marked once however often it passes a mark.
    fn marked(error: Error) -> (Code, Option<LogFailure>) {
        let error = in_log(in_log(error));
        assert_eq!(error.to_string().matches(IN_LOG).count(), 1, "{error}");
        (error.code(), LogFailure::of(&error))
    }

    #[test]
    fn the_code_says_why_a_log_was_not_replayed() {
        let (damaged, not_replayed) = (Some(LogFailure::Damaged), Some(LogFailure::NotReplayed));
        assert_eq!(marked(Error::corrupt(Structure::Leaf, "it is cut")), (Code::Log, damaged));
        let unsupported = Error::unsupported(Code::Unsupported, "an item of another type");
        assert_eq!(marked(unsupported), (Code::LogNotReplayed, not_replayed));
        assert_eq!(marked(Error::io("reading", Errno::IO)), (Code::Device, not_replayed));
        let volume = in_volume(Error::corrupt(Structure::Chunk, "it is cut"));
        assert_eq!((volume.code(), LogFailure::of(&volume)), (Code::LogNotReplayed, not_replayed));
        assert_eq!(LogFailure::of(&Error::corrupt(Structure::Leaf, "it is cut")), None);
    }
}
