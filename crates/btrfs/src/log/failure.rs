//! Why a log was not replayed. The code of the error says it, because the remedies differ: a
//! damaged log ([`Code::Log`]) contradicts itself or the volume, and can only be thrown away. A log
//! that may be sound ([`Code::LogNotReplayed`]) must be kept.

use offshoot_vfs::{Code, Corrupt, Error};

/// The first words of errors that the log itself causes.
const IN_LOG: &str = "pending tree log: ";
/// The first words of errors from the volume that the log is replayed into.
const IN_VOLUME: &str = "replaying the pending tree log: ";

/// Marks an error as one of replaying, unless it is marked already.
pub(super) fn in_log(error: Error) -> Error {
    if matches!(error.code(), Code::Log | Code::LogNotReplayed) {
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
        Error::Io { file, what, source, code } => {
            Error::Io { file, what: with(what), source, code }
        }
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

    /// The code of an error, which is marked once however often it passes a mark.
    fn marked(error: Error) -> Code {
        let error = in_log(in_log(error));
        assert_eq!(error.to_string().matches(IN_LOG).count(), 1, "{error}");
        error.code()
    }

    #[test]
    fn the_code_says_why_a_log_was_not_replayed() {
        assert_eq!(marked(Error::corrupt(Structure::Leaf, "it is cut")), Code::Log);
        let unsupported = Error::unsupported(Code::Unsupported, "an item of another type");
        assert_eq!(marked(unsupported), Code::LogNotReplayed);
        // Before the mend, only the first words of the message told it from other failures.
        assert_eq!(marked(Error::io("reading", Errno::IO)), Code::LogNotReplayed);
        let of_volume = in_log(in_volume(Error::corrupt(Structure::Chunk, "it is cut")));
        assert_eq!(of_volume.code(), Code::LogNotReplayed);
        assert_eq!(of_volume.to_string().matches("tree log").count(), 1, "{of_volume}");
    }
}
