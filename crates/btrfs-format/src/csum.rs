//! Checksums.
//!
//! A volume uses one of four algorithms. Headers and superblocks have a field of 32 bytes for a
//! checksum; a shorter checksum fills its beginning. The checksum tree stores only the bytes of the
//! checksum.

use std::fmt;

use blake2::digest::consts::U32 as Len32;
use blake2::{Blake2b, Digest};
use sha2::Sha256;

/// The checksum algorithm of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChecksumType {
    /// CRC-32C, 4 bytes.
    Crc32c,
    /// xxHash, 8 bytes.
    Xxhash64,
    /// SHA-256, 32 bytes.
    Sha256,
    /// BLAKE2b with 256 bits of output, 32 bytes.
    Blake2b,
}

impl ChecksumType {
    /// The algorithm with this number in the superblock; `None` when it is unknown.
    #[must_use]
    pub fn from_disk(value: u16) -> Option<Self> {
        Some(match value {
            0 => Self::Crc32c,
            1 => Self::Xxhash64,
            2 => Self::Sha256,
            3 => Self::Blake2b,
            _ => return None,
        })
    }

    /// Its number in the superblock.
    #[must_use]
    pub fn to_disk(self) -> u16 {
        match self {
            Self::Crc32c => 0,
            Self::Xxhash64 => 1,
            Self::Sha256 => 2,
            Self::Blake2b => 3,
        }
    }

    /// The length of one checksum in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a length of a kind, not of a collection")]
    pub fn len(self) -> usize {
        match self {
            Self::Crc32c => 4,
            Self::Xxhash64 => 8,
            Self::Sha256 | Self::Blake2b => 32,
        }
    }

    /// Its name for `mkfs.btrfs --csum`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Crc32c => "crc32c",
            Self::Xxhash64 => "xxhash64",
            Self::Sha256 => "sha256",
            Self::Blake2b => "blake2",
        }
    }

    /// The checksum of `bytes`.
    #[must_use]
    pub fn compute(self, bytes: &[u8]) -> Checksum {
        let mut all = [0; 32];
        match self {
            Self::Crc32c => all[..4].copy_from_slice(&crc32c::crc32c(bytes).to_le_bytes()),
            Self::Xxhash64 => {
                all[..8].copy_from_slice(&xxhash_rust::xxh64::xxh64(bytes, 0).to_le_bytes());
            }
            Self::Sha256 => all.copy_from_slice(&Sha256::digest(bytes)),
            Self::Blake2b => all.copy_from_slice(&Blake2b::<Len32>::digest(bytes)),
        }
        Checksum { all, len: self.len() }
    }
}

/// A checksum, computed or read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checksum {
    all: [u8; 32],
    len: usize,
}

impl Checksum {
    /// A checksum that was read from disk: its bytes, at most 32.
    #[must_use]
    pub fn stored(bytes: &[u8]) -> Self {
        let mut all = [0; 32];
        all[..bytes.len()].copy_from_slice(bytes);
        Self { all, len: bytes.len() }
    }

    /// Its bytes in the order of the disk.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.all[..self.len]
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("0x")?;
        self.bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Check values that were published with the algorithms: `123456789` for CRC-32C (RFC 3720) and
    /// `abc` for SHA-256 (FIPS 180-4), xxHash and BLAKE2b-256; and the values of the empty input.
    #[test]
    fn published_vectors() {
        let vectors: [(ChecksumType, &[u8], &str); 7] = [
            (ChecksumType::Crc32c, b"", "0x00000000"),
            (ChecksumType::Crc32c, b"123456789", "0x839206e3"),
            (ChecksumType::Xxhash64, b"", "0x99e9d85137db46ef"),
            (ChecksumType::Xxhash64, b"abc", "0x990977adf52cbc44"),
            (
                ChecksumType::Sha256,
                b"abc",
                "0xba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
            ),
            (
                ChecksumType::Blake2b,
                b"",
                "0x0e5751c026e543b2e8ab2eb06099daa1d1e5df47778f7787faab45cdf12fe3a8",
            ),
            (
                ChecksumType::Blake2b,
                b"abc",
                "0xbddd813c634239723171ef3fee98579b94964e3bb1cb3e427262c8c068d52319",
            ),
        ];
        for (kind, input, expected) in vectors {
            let checksum = kind.compute(input);
            assert_eq!(checksum.to_string(), expected, "{kind:?} of {input:?}");
            assert_eq!(checksum.bytes().len(), kind.len());
        }
    }

    /// The crate chooses an implementation by the length of the input. This compares all of them
    /// with the definition.
    #[test]
    fn crc32c_of_all_lengths_is_that_of_the_definition() {
        fn by_the_bit(bytes: &[u8]) -> u32 {
            !bytes.iter().fold(!0u32, |crc, &byte| {
                (0..8).fold(crc ^ u32::from(byte), |crc, _| {
                    (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 }
                })
            })
        }
        let bytes: Vec<u8> =
            (0..20_000u32).map(|n| n.wrapping_mul(0x9e37_79b1).to_be_bytes()[0]).collect();
        for len in (0..600).chain([4064, 4096, 8192, 16_352, 16_384, 20_000]) {
            let expected = by_the_bit(&bytes[..len]).to_le_bytes();
            assert_eq!(
                ChecksumType::Crc32c.compute(&bytes[..len]).bytes(),
                expected,
                "{len} bytes"
            );
        }
    }
}
