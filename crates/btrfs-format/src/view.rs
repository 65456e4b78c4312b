//! Views of bytes as structures, with an error where they do not fit.

use offshoot_vfs::{Malformed, Structure};
use zerocopy::{FromBytes, Immutable, KnownLayout};

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
