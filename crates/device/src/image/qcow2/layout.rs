//! The geometry of an image, and the meaning of an entry of an L2 table.
//!
//! ```text
//! L1 entry   9-55 where the L2 table is     63 counted once
//! L2 entry   0 all zeros   9-55 where the cluster is   62 compressed   63 counted once
//! extended   a second word: 0-31 which of 32 subclusters are stored, 32-63 which are zeros
//! compressed 0-x where, in bytes   x-61 how many sectors beyond the first, x = 70 - cluster bits
//! ```
//!
//! A *unit* is the smallest part that an entry describes on its own: a subcluster with extended
//! entries, otherwise the cluster. A unit that is neither stored nor zeros comes from the backing
//! file.

use std::io;
use std::ops::Range;

use crate::fields::{invalid, u32_be, u64_be};

/// The bits of an entry that hold an offset in the file.
pub(super) const OFFSET_BITS: u64 = 0x00ff_ffff_ffff_fe00;
/// The count of the cluster that the entry leads to is 1, so it may be written in place.
pub(super) const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const ALL_ZEROS: u64 = 1;
const SECTOR_BYTES: u64 = 512;

/// The geometry of an image: sizes, and where its tables are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Qcow2Geometry {
    pub(super) version: u32,
    pub(super) size_bytes: u64,
    pub(super) cluster_bits: u32,
    pub(super) has_subclusters: bool,
    pub(super) has_zstd: bool,
    pub(super) l1_offset: u64,
    pub(super) l1_entries: u64,
    /// The base-2 logarithm of the bits of a reference count.
    pub(super) count_order: u32,
    pub(super) count_table_offset: u64,
    pub(super) count_table_bytes: u64,
}

/// An L2 entry: where a cluster of the disk is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct L2Entry {
    /// The byte of the file at which its cluster begins; 0 when it has none.
    pub(super) host: u64,
    /// The entry says that the count of its cluster is 1.
    pub(super) is_copied: bool,
    /// The units that the cluster of the file stores, as bits.
    pub(super) stored: u32,
    /// The units that are zeros, as bits.
    pub(super) zeros: u32,
    pub(super) compressed: Option<CompressedCluster>,
}

/// Where the bytes of a compressed cluster are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CompressedCluster {
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Qcow2Geometry {
    pub(super) fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    fn entry_bits(&self) -> u32 {
        if self.has_subclusters { 4 } else { 3 }
    }

    pub(super) fn entry_bytes(&self) -> usize {
        1 << self.entry_bits()
    }

    pub(super) fn unit_bits(&self) -> u32 {
        // A cluster has 32 subclusters.
        self.cluster_bits - if self.has_subclusters { 5 } else { 0 }
    }

    /// The base-2 logarithm of the bytes of the disk that one L2 table maps.
    pub(super) fn table_span_bits(&self) -> u32 {
        2 * self.cluster_bits - self.entry_bits()
    }

    /// The byte of the file that holds the L1 entry for byte `at` of the disk.
    pub(super) fn l1_entry_at(&self, at: u64) -> u64 {
        // The header check guarantees an L1 entry for every byte of the disk.
        self.l1_offset + (at >> self.table_span_bits()) * 8
    }

    /// The byte of its L2 table that holds the entry for byte `at` of the disk.
    pub(super) fn entry_in_table(&self, at: u64) -> u64 {
        let index_bits = self.cluster_bits - self.entry_bits();
        ((at >> self.cluster_bits) & ((1 << index_bits) - 1)) << self.entry_bits()
    }

    /// The offset of byte `at` in its cluster.
    pub(super) fn inside(&self, at: u64) -> u64 {
        at & (self.cluster_bytes() - 1)
    }

    /// The numbers of the clusters of the file that the range `bytes` touches.
    pub(super) fn clusters(&self, bytes: Range<u64>) -> Range<u64> {
        bytes.start >> self.cluster_bits..bytes.end.div_ceil(self.cluster_bytes())
    }

    /// The numbers of the clusters of the file that `entry` leads to.
    pub(super) fn clusters_of(&self, entry: &L2Entry) -> Range<u64> {
        match entry.compressed {
            Some(CompressedCluster { offset, len }) => self.clusters(offset..offset + len),
            None if entry.host != 0 => {
                let cluster = entry.host >> self.cluster_bits;
                cluster..cluster + 1
            }
            None => 0..0,
        }
    }

    /// The bits of all units of a cluster.
    pub(super) fn all_units(&self) -> u32 {
        if self.has_subclusters { u32::MAX } else { 1 }
    }

    /// The bits of the units that the bytes `range` of a cluster touch; `range` must not be empty.
    pub(super) fn units(&self, range: &Range<u64>) -> u32 {
        let (first, last) = (range.start >> self.unit_bits(), (range.end - 1) >> self.unit_bits());
        (u32::MAX >> (31 - last)) & (u32::MAX << first)
    }

    /// Decodes the entry at the beginning of `bytes`.
    pub(super) fn decode(&self, bytes: &[u8]) -> io::Result<L2Entry> {
        let word = u64_be(bytes, 0);
        if word & COMPRESSED != 0 {
            return Ok(L2Entry { compressed: Some(self.compressed(word)), ..L2Entry::default() });
        }
        let host = word & OFFSET_BITS;
        let (stored, zeros) = if self.has_subclusters {
            (u32_be(bytes, 12), u32_be(bytes, 8))
        } else if word & ALL_ZEROS != 0 {
            (0, 1)
        } else {
            (u32::from(host != 0), 0)
        };
        if self.inside(host) != 0 || stored & zeros != 0 || self.version < 3 && zeros != 0 {
            return Err(invalid("an entry of its tables is damaged"));
        }
        if host == 0 && stored != 0 {
            return Err(invalid("a part of the disk is stored nowhere"));
        }
        Ok(L2Entry { host, is_copied: word & COPIED != 0, stored, zeros, compressed: None })
    }

    /// Encodes an entry that is not compressed. Only the first [`Self::entry_bytes`] bytes are
    /// used.
    pub(super) fn encode(&self, entry: &L2Entry) -> [u8; 16] {
        let mut word = entry.host | if entry.is_copied { COPIED } else { 0 };
        if !self.has_subclusters && entry.zeros != 0 {
            word |= ALL_ZEROS;
        }
        let units = u64::from(entry.stored) | u64::from(entry.zeros) << 32;
        (u128::from(word) << 64 | u128::from(units)).to_be_bytes()
    }

    fn compressed(&self, word: u64) -> CompressedCluster {
        let sectors_bits = self.cluster_bits - 8;
        let offset_bits = 62 - sectors_bits;
        let offset = word & ((1 << offset_bits) - 1);
        let sectors = 1 + (word >> offset_bits & ((1 << sectors_bits) - 1));
        CompressedCluster { offset, len: sectors * SECTOR_BYTES - offset % SECTOR_BYTES }
    }
}
