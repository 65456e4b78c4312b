//! Names that a caller can hand to the host.
//!
//! An engine refuses an image with other names. A caller that makes files on the host does not rely
//! on that: it hands only a [`SafeName`] to system calls, and only the check here makes one.

use std::ops::Deref;

use crate::escape::Escaped;
use crate::{Error, NAME_MAX, Result, Structure};

/// A name of 1 to 255 bytes, without `/` and NUL, that is neither `.` nor `..`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SafeName(Box<[u8]>);

impl SafeName {
    /// Checks a name that comes from a volume.
    pub fn new(name: &[u8]) -> Result<Self> {
        let problem = if name.is_empty() {
            "is empty"
        } else if name.len() > NAME_MAX {
            "is longer than 255 bytes"
        } else if name.contains(&b'/') {
            "holds a slash"
        } else if name.contains(&0) {
            "holds a NUL byte"
        } else if name == b"." || name == b".." {
            "is reserved"
        } else {
            return Ok(Self(name.into()));
        };
        let shown = &name[..name.len().min(NAME_MAX)];
        Err(Error::corrupt(
            Structure::DirectoryEntry,
            format!("the name \"{}\" {problem}", Escaped(shown)),
        ))
    }
}

impl Deref for SafeName {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::SafeName;

    #[test]
    fn only_names_are_names() {
        for bad in
            [&b""[..], b".", b"..", b"/", b"a/b", b"../x", b"/etc/passwd", b"a\0b", &[b'x'; 256]]
        {
            assert!(SafeName::new(bad).is_err(), "{bad:?}");
        }
        for good in [&b"a"[..], b"...", b"..a", b"\xff\n", &[b'x'; 255]] {
            assert_eq!(&*SafeName::new(good).unwrap(), good);
        }
    }
}
