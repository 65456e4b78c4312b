//! Partition tables: which part of a disk is which partition.
//!
//! | table | where it is | partitions |
//! |---|---|---|
//! | GPT ([`gpt`]) | sector 1, a copy in the last sector | numbered by their place in the table, with a label and a UUID each |
//! | MBR ([`mbr`]) | sector 0 | 1 to 4; logical ones from 5 on, in a chain inside of an extended one |
//!
//! Numbers and UUIDs are those that Linux shows (`PARTN`, `PARTUUID`). An extended partition holds
//! the logical ones and is not itself listed.
//!
//! # Invariants
//!
//! 1. A table is read, never written.
//! 2. At most [`gpt::TABLE_BYTES_MAX`] bytes of a table are read, and at most [`mbr::LOGICAL_MAX`]
//!    links of a chain followed, whatever the table says.
//! 3. Every partition that is returned begins on the device and is not empty. It may end past the
//!    device when an image was cut off. Partitions may overlap.

mod gpt;
mod mbr;

use std::fmt;
use std::io;
use std::ops::Range;

use crate::BlockDevice;

/// A partition table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionTable {
    /// The kind of the table.
    pub kind: TableKind,
    /// The partitions, in the order of their numbers.
    pub partitions: Vec<Partition>,
    /// What is wrong with the table, when it can still be used.
    pub warning: Option<String>,
}

/// The kind of a partition table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableKind {
    /// A GUID partition table.
    Gpt,
    /// A master boot record.
    Mbr,
}

impl TableKind {
    /// Its name, as the user writes it in a stack of layers.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Gpt => "gpt",
            Self::Mbr => "mbr",
        }
    }
}

impl fmt::Display for TableKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gpt => "GPT",
            Self::Mbr => "MBR",
        })
    }
}

/// A partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Its number, from 1 on.
    pub number: u32,
    /// The bytes of the device that it takes.
    pub range: Range<u64>,
    /// The label in the table; empty when it has none.
    pub label: String,
    /// Its UUID in lower case. In an MBR it is the id of the disk and the partition number:
    /// `1a2b3c4d-01`.
    pub uuid: String,
}

impl Partition {
    /// Its size in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.range.end - self.range.start
    }
}

impl PartitionTable {
    /// Reads the partition table on `device`; `None` when there is none.
    ///
    /// # Errors
    /// Those of the device; of kind `InvalidData` when there is a table but neither it nor its copy
    /// is right.
    pub fn read(device: &dyn BlockDevice) -> io::Result<Option<Self>> {
        match gpt::read(device)? {
            Some(table) => Ok(Some(table)),
            None => mbr::read(device, device.logical_sector_bytes().unwrap_or(512)),
        }
    }

    /// Reads the MBR on `device`, as on a disk with sectors of `sector_bytes`. Neither an MBR nor
    /// an image file tells the size of its sectors. The caller may try a size and look whether the
    /// partitions hold something that it knows.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_mbr(device: &dyn BlockDevice, sector_bytes: u64) -> io::Result<Option<Self>> {
        mbr::read(device, sector_bytes)
    }
}

/// Converts a range of sectors to bytes; `None` if it is empty or does not begin on the device.
fn sectors(first: u64, count: u64, sector_bytes: u64, size_bytes: u64) -> Option<Range<u64>> {
    let start = first.checked_mul(sector_bytes)?;
    let end = count.checked_mul(sector_bytes)?.checked_add(start)?;
    (start < end && start < size_bytes).then_some(start..end)
}
