//! The one error type.
//!
//! Four kinds that never mix, because the caller does something different for each:
//!
//! | kind | what it means | what the caller does |
//! |---|---|---|
//! | [`Error::Posix`] | the call itself is wrong, as POSIX defines it | corrects the call |
//! | [`Error::Io`] | a device or the host failed | tries elsewhere, replaces the device |
//! | [`Error::Unsupported`] | the volume needs what this program does not have | uses a newer program |
//! | [`Error::Corrupt`] | what is on the device contradicts itself | repairs, restores |
//!
//! The errno of each is made in one function, [`Error::errno`].

use std::borrow::Cow;
use std::{fmt, io};

use crate::{Code, Structure};

pub use rustix::io::Errno;

/// The result of everything that can fail in offshoot.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why something failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The call is wrong for this file or this volume.
    #[error("{what}{}", ErrnoWords(*errno))]
    Posix {
        /// What was asked for.
        what: String,
        /// The error that POSIX gives it.
        errno: Errno,
        /// Which kind of error it is: [`Code::Call`], unless there is a better one.
        code: Code,
    },
    /// A device or the host failed.
    #[error("{}{what}: {}", in_front(file.as_deref()), OsReason(source))]
    Io {
        /// The file that it was for: a path, or else an inode and its subvolume.
        file: Option<String>,
        /// What was being done, with the device and the place.
        what: String,
        /// What the operating system said.
        source: io::Error,
        /// Which kind of error it is: [`Code::Device`], unless there is a better one.
        code: Code,
    },
    /// The volume needs something that is not there.
    #[error("not supported: {what}")]
    Unsupported {
        /// What is not supported.
        what: String,
        /// Which obstacle it is.
        code: Code,
    },
    /// What is stored contradicts itself.
    #[error(transparent)]
    Corrupt(Box<Corrupt>),
}

/// An error of the operating system in its own words alone: the standard library ends
/// them with `(os error 5)`, which tells programmers what [`Error::errno`] and the source
/// of the error do, and users nothing.
pub struct OsReason<'a, E>(pub &'a E);

impl<E: fmt::Display> fmt::Display for OsReason<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.0.to_string();
        let words = text
            .strip_suffix(')')
            .map(|text| text.trim_end_matches(|c: char| c.is_ascii_digit()))
            .and_then(|text| text.strip_suffix(" (os error "));
        f.write_str(words.unwrap_or(&text))
    }
}

/// An error about a file whose path is printed beside it: what the library calls the file
/// would only repeat it with a number.
pub struct Nameless<'a>(pub &'a Error);

impl fmt::Display for Nameless<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Error::Corrupt(corrupt) => Corrupt { file: None, ..Corrupt::clone(corrupt) }.fmt(f),
            other => other.fmt(f),
        }
    }
}

/// What an error number adds to the words of a call, with a colon in front. A call that makes no
/// sense has words of its own already, to which "Invalid argument" adds nothing.
struct ErrnoWords(Errno);

impl fmt::Display for ErrnoWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Errno::INVAL => Ok(()),
            Errno::NOENT => f.write_str(": no such file"),
            Errno::NOTDIR => f.write_str(": not a directory"),
            Errno::ISDIR => f.write_str(": is a directory"),
            Errno::EXIST => f.write_str(": exists already"),
            Errno::NOTEMPTY => f.write_str(": the directory is not empty"),
            other => write!(f, ": {}", OsReason(&other)),
        }
    }
}

/// Bytes that break a rule of a format: [`Corrupt`] before a caller says where they lay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Malformed {
    /// The structure, by its name in the format.
    pub structure: Structure,
    /// What was expected and what was found.
    pub problem: Cow<'static, str>,
}

impl Malformed {
    /// An error about `structure`.
    pub fn new(structure: Structure, problem: impl Into<Cow<'static, str>>) -> Self {
        Self { structure, problem: problem.into() }
    }
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.structure, self.problem)
    }
}

impl std::error::Error for Malformed {}

/// What is wrong in a volume, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Corrupt {
    /// The damaged structure, by its name in the format.
    pub structure: String,
    /// Which kind of structure it is.
    pub code: Code,
    /// The logical address in the volume, when the structure has one.
    pub logical: Option<u64>,
    /// What was expected and what was found.
    pub problem: String,
    /// The file that it belongs to: a path, or else an inode and its subvolume.
    pub file: Option<String>,
}

/// What a message begins with when it is about a file.
fn in_front(file: Option<&str>) -> String {
    file.map(|file| format!("{file}: ")).unwrap_or_default()
}

impl fmt::Display for Corrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}corrupt {}", in_front(self.file.as_deref()), self.structure)?;
        if let Some(logical) = self.logical {
            write!(f, " at logical address {logical}")?;
        }
        write!(f, ": {}", self.problem)
    }
}

impl std::error::Error for Corrupt {}

impl From<Corrupt> for Error {
    fn from(corrupt: Corrupt) -> Self {
        Self::Corrupt(Box::new(corrupt))
    }
}

impl Error {
    /// An error of the POSIX kind about `what`.
    pub fn posix(errno: Errno, what: impl Into<String>) -> Self {
        Self::Posix { what: what.into(), errno, code: Code::Call }
    }

    /// An error about something that is not supported.
    pub fn unsupported(code: Code, what: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into(), code }
    }

    /// A failure of the host or a device while doing `what`.
    pub fn io(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        let (what, source) = (what.into(), source.into());
        Self::Io { file: None, what, source, code: Code::Device }
    }

    /// A corrupt structure with no logical address of its own.
    pub fn corrupt(structure: Structure, problem: impl Into<String>) -> Self {
        Corrupt {
            structure: structure.name().to_owned(),
            code: structure.code(),
            logical: None,
            problem: problem.into(),
            file: None,
        }
        .into()
    }

    /// A corrupt structure at a logical address.
    pub fn corrupt_at(structure: Structure, logical: u64, problem: impl Into<String>) -> Self {
        let mut error = Self::corrupt(structure, problem);
        if let Self::Corrupt(corrupt) = &mut error {
            corrupt.logical = Some(logical);
        }
        error
    }

    /// Gives the error another code. An error of a device keeps [`Code::Device`].
    #[must_use]
    pub fn with_code(mut self, new: Code) -> Self {
        match &mut self {
            Self::Posix { code, .. } | Self::Io { code, .. } | Self::Unsupported { code, .. } => {
                *code = new;
            }
            Self::Corrupt(corrupt) => corrupt.code = new,
        }
        self
    }

    /// Which kind of error it is, by a number that stays the same in all versions.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::Posix { code, .. } | Self::Io { code, .. } | Self::Unsupported { code, .. } => {
                *code
            }
            Self::Corrupt(corrupt) => corrupt.code,
        }
    }

    /// Names the file that a corruption or a failure of a device belongs to. The caller that knows
    /// a better name (a path for an inode number) replaces the one from below.
    #[must_use]
    pub fn in_file(mut self, file: impl fmt::Display) -> Self {
        if let Some(place) = self.file_mut() {
            *place = Some(file.to_string());
        }
        self
    }

    /// Names the file, unless a name is there already.
    #[must_use]
    pub fn in_file_if_unnamed(mut self, file: impl fmt::Display) -> Self {
        if let Some(place @ None) = self.file_mut() {
            *place = Some(file.to_string());
        }
        self
    }

    fn file_mut(&mut self) -> Option<&mut Option<String>> {
        match self {
            Self::Corrupt(corrupt) => Some(&mut corrupt.file),
            Self::Io { file, .. } => Some(file),
            Self::Posix { .. } | Self::Unsupported { .. } => None,
        }
    }

    /// The number that a system call would return for this error.
    #[must_use]
    pub fn errno(&self) -> Errno {
        match self {
            Self::Posix { errno, .. } => *errno,
            Self::Io { source, .. } => {
                source.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
            }
            Self::Unsupported { .. } => Errno::OPNOTSUPP,
            // What the kernel gives for the same thing (EUCLEAN for metadata, EIO for
            // data) is not told apart by programs; EIO is the one that all of them know.
            Self::Corrupt(_) => Errno::IO,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn messages_end_with_words_where_these_help() {
        let io = Error::io("reading 4096 bytes at 65536", io::Error::from_raw_os_error(5));
        assert_eq!(io.to_string(), "reading 4096 bytes at 65536: Input/output error");
        let posix = Error::posix(Errno::NOENT, "/etc/fstab");
        assert_eq!(posix.to_string(), "/etc/fstab: no such file");
        let posix = Error::posix(Errno::INVAL, "a and b are one file");
        assert_eq!(posix.to_string(), "a and b are one file");
        let other = Error::io("a name (5)", io::Error::other("ends (here 5)"));
        assert_eq!(other.to_string(), "a name (5): ends (here 5)");
    }

    #[test]
    fn the_source_keeps_the_number() {
        let io = Error::io("reading", Errno::IO);
        let source = io.source().and_then(|source| source.downcast_ref::<io::Error>());
        assert_eq!(source.and_then(io::Error::raw_os_error), Some(Errno::IO.raw_os_error()));
        assert_eq!(io.errno(), Errno::IO);
    }
}
