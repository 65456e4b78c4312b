//! What every filesystem says of extended attributes that a caller sets, before it looks at its
//! own rules.

use crate::acl::{ACCESS, DEFAULT};
use crate::{Errno, Error, FileId, FileType, NAME_MAX, Result};

/// The longest value that a system call takes, in bytes.
pub const VALUE_MAX: usize = 65_536;

/// The namespaces that are stored, beside that of access control lists.
const NAMESPACES: [&[u8]; 3] = [b"security.", b"trusted.", b"user."];

/// The error about an attribute.
#[cold]
#[must_use]
pub fn refused(errno: Errno, name: &[u8], file: FileId) -> Error {
    Error::posix(errno, format!("xattr `{}` of {file}", name.escape_ascii()))
}

/// Refuses names and values that no system call takes.
///
/// # Errors
/// `ERANGE` for a name without bytes or of more than 255, `EINVAL` for one with a NUL byte, and
/// `E2BIG` for a value of more than [`VALUE_MAX`] bytes.
pub fn require_sizes(file: FileId, name: &[u8], value: &[u8]) -> Result<()> {
    let errno = if name.is_empty() || name.len() > NAME_MAX {
        Errno::RANGE
    } else if name.contains(&0) {
        Errno::INVAL
    } else if value.len() > VALUE_MAX {
        Errno::TOOBIG
    } else {
        return Ok(());
    };
    Err(refused(errno, name, file))
}

/// Refuses names outside the namespaces `security`, `trusted` and `user`, but for those of access
/// control lists.
///
/// # Errors
/// `EOPNOTSUPP`, and `EINVAL` for a namespace without a name.
pub fn require_namespace(file: FileId, name: &[u8]) -> Result<()> {
    if matches!(name, ACCESS | DEFAULT) {
        return Ok(());
    }
    match NAMESPACES.iter().find(|namespace| name.starts_with(namespace)) {
        Some(namespace) if namespace.len() == name.len() => Err(refused(Errno::INVAL, name, file)),
        Some(_) => Ok(()),
        None => Err(refused(Errno::OPNOTSUPP, name, file)),
    }
}

/// Refuses attributes that files of this type cannot have.
///
/// # Errors
/// `EPERM` for those of users on what is neither a regular file nor a directory, `EOPNOTSUPP` for
/// lists of symbolic links, and `EACCES` for default lists of what is no directory.
pub fn require_file_type(file: FileId, file_type: FileType, name: &[u8]) -> Result<()> {
    let is_plain = matches!(file_type, FileType::Regular | FileType::Directory);
    let errno = if name.starts_with(b"user.") && !is_plain {
        Errno::PERM
    } else if name.starts_with(b"system.") && file_type == FileType::Symlink {
        Errno::OPNOTSUPP
    } else if name == DEFAULT && file_type != FileType::Directory {
        Errno::ACCESS
    } else {
        return Ok(());
    };
    Err(refused(errno, name, file))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId { dev: 0, ino: 1 };

    fn errno(result: Result<()>) -> Option<Errno> {
        result.err().map(|error| error.errno())
    }

    #[test]
    fn only_what_can_be_stored_is_taken() {
        assert_eq!(errno(require_sizes(FILE, b"", b"")), Some(Errno::RANGE));
        assert_eq!(errno(require_sizes(FILE, &[b'x'; 256], b"")), Some(Errno::RANGE));
        assert_eq!(errno(require_sizes(FILE, b"user.\0", b"")), Some(Errno::INVAL));
        let value = vec![0; VALUE_MAX + 1];
        assert_eq!(errno(require_sizes(FILE, b"user.a", &value)), Some(Errno::TOOBIG));
        assert_eq!(errno(require_sizes(FILE, b"user.a", &value[1..])), None);
        assert_eq!(errno(require_namespace(FILE, b"user.")), Some(Errno::INVAL));
        assert_eq!(errno(require_namespace(FILE, b"system.other")), Some(Errno::OPNOTSUPP));
        assert_eq!(errno(require_namespace(FILE, ACCESS)), None);
    }

    #[test]
    fn the_type_of_a_file_says_which_attributes_it_has() {
        let of = |file_type, name| errno(require_file_type(FILE, file_type, name));
        assert_eq!(of(FileType::Fifo, b"user.a"), Some(Errno::PERM));
        assert_eq!(of(FileType::Fifo, b"trusted.a"), None);
        assert_eq!(of(FileType::Symlink, ACCESS), Some(Errno::OPNOTSUPP));
        assert_eq!(of(FileType::Regular, DEFAULT), Some(Errno::ACCESS));
        assert_eq!(of(FileType::Directory, DEFAULT), None);
    }
}
