//! Reads the fields of foreign formats: disk images and partition tables.

use std::io;

use crate::BlockDevice;

/// The little-endian number at `at`. The caller has checked that `bytes` holds it.
pub(crate) fn u32_le(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// As [`u32_le`].
pub(crate) fn u64_le(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// As [`u32_le`].
pub(crate) fn u32_be(bytes: &[u8], at: usize) -> u32 {
    u32_le(bytes, at).swap_bytes()
}

/// As [`u32_le`].
pub(crate) fn u64_be(bytes: &[u8], at: usize) -> u64 {
    u64_le(bytes, at).swap_bytes()
}

/// The `len` bytes from `offset` on; `None` when they are more than `most`, or end past the device.
pub(crate) fn part(
    device: &dyn BlockDevice,
    offset: u64,
    len: u64,
    most: u64,
) -> io::Result<Option<Vec<u8>>> {
    let is_there = offset.checked_add(len).is_some_and(|end| end <= device.size_bytes());
    if !is_there || len > most {
        return Ok(None);
    }
    let mut bytes = vec![0; usize::try_from(len).map_err(io::Error::other)?];
    device.read_at(offset, &mut bytes)?;
    Ok(Some(bytes))
}

/// An error of kind `InvalidData`.
pub(crate) fn invalid(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}
