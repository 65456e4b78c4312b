//! The error for bytes that are not a structure of the format.

use std::borrow::Cow;
use std::fmt;

use offshoot_vfs::Structure;
use zerocopy::{FromBytes, Immutable, KnownLayout};

/// Bytes that break a rule of the format.
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

/// Views the start of `bytes` as a `T`. Returns it with the bytes behind it.
pub(crate) fn view<T: FromBytes + KnownLayout + Immutable>(
    structure: Structure,
    bytes: &[u8],
) -> Result<(&T, &[u8]), Malformed> {
    T::ref_from_prefix(bytes).map_err(|_| {
        Malformed::new(structure, format!("{} bytes, but it needs {}", bytes.len(), size_of::<T>()))
    })
}

/// Splits off the first `len` bytes of `bytes`, which hold `what`.
pub(crate) fn take<'a>(
    structure: Structure,
    what: &'static str,
    bytes: &'a [u8],
    len: usize,
) -> Result<(&'a [u8], &'a [u8]), Malformed> {
    bytes.split_at_checked(len).ok_or_else(|| {
        Malformed::new(
            structure,
            format!("its {what} is {len} bytes, but only {} are left", bytes.len()),
        )
    })
}
