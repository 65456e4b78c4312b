//! The checksum: CRC-32C over a whole unit with the field itself as zero, stored little-endian.
//!
//! The unit is the sector for the headers of an allocation group, the block for trees, the
//! directory block for directories, and the inode for inodes.

/// The bytes of a checksum.
pub const LEN: usize = 4;

/// The checksum of `unit`, whose field begins at `field`.
///
/// # Panics
///
/// When the field does not lie in the unit.
#[must_use]
pub fn compute(unit: &[u8], field: usize) -> u32 {
    let crc = crc32c::crc32c(&unit[..field]);
    let crc = crc32c::crc32c_append(crc, &[0; LEN]);
    crc32c::crc32c_append(crc, &unit[field + LEN..])
}

/// Whether the checksum that `unit` stores at `field` is that of its contents.
///
/// # Panics
///
/// When the field does not lie in the unit.
#[must_use]
pub fn is_right(unit: &[u8], field: usize) -> bool {
    unit[field..field + LEN] == compute(unit, field).to_le_bytes()
}

/// Stores the checksum of `unit` at `field`.
///
/// # Panics
///
/// When the field does not lie in the unit.
pub fn store(unit: &mut [u8], field: usize) {
    let crc = compute(unit, field);
    unit[field..field + LEN].copy_from_slice(&crc.to_le_bytes());
}
