//! Partition tables: which part of a disk is which partition.
//!
//! | table | where it is | partitions |
//! |---|---|---|
//! | GPT ([`gpt`]) | sector 1, a copy in the last sector | numbered by their place in the table, with a label and a UUID each |
//! | MBR ([`mbr`]) | sector 0 | 1 to 4; logical ones from 5 on, in a chain inside of an extended one |
//!
//! Numbers and UUIDs are those that Linux gives (`PARTN`, `PARTUUID`). An extended partition holds
//! the logical ones and is none itself.
//!
//! # Invariants
//!
//! 1. A table is read, never written.
//! 2. Whatever a table says, at most [`gpt::TABLE_BYTES_MAX`] bytes of it are read, and
//!    [`mbr::LOGICAL_MAX`] links of a chain followed.
//! 3. Every partition that is returned begins on the device and is not empty. It may end behind
//!    the device, when an image was cut off. Partitions may overlap: each is a window of its own.

mod gpt;
mod mbr;

use std::fmt;
use std::io;
use std::ops::Range;

use crate::BlockDevice;

/// A partition table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionTable {
    /// Which kind of table it is.
    pub kind: TableKind,
    /// The partitions, in the order of their numbers.
    pub partitions: Vec<Partition>,
    /// What is wrong with the table, though it can be used.
    pub warning: Option<String>,
}

/// Which kind of table it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableKind {
    /// A GUID partition table.
    Gpt,
    /// A master boot record.
    Mbr,
}

impl TableKind {
    /// Its name, as a layer of a stack is called.
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
    /// Its bytes.
    pub range: Range<u64>,
    /// The label that the table gives it; empty without one.
    pub label: String,
    /// Its UUID in lower case; in an MBR the id of the disk and the number.
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
    /// The table on `device`; `None` when there is none.
    ///
    /// # Errors
    /// Those of the device; of kind `InvalidData` when there is a table and no copy of it is right.
    pub fn read(device: &dyn BlockDevice) -> io::Result<Option<Self>> {
        match gpt::read(device)? {
            Some(table) => Ok(Some(table)),
            None => mbr::read(device, device.logical_sector_bytes().unwrap_or(512)),
        }
    }

    /// The MBR on `device`, read as on a disk with sectors of so many bytes. A file does not say
    /// how large they are, nor does an MBR; what the partitions hold then may show it.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_mbr(device: &dyn BlockDevice, sector_bytes: u64) -> io::Result<Option<Self>> {
        mbr::read(device, sector_bytes)
    }
}

/// A range of sectors in bytes, if it is one and begins on the device.
fn sectors(first: u64, count: u64, sector_bytes: u64, size_bytes: u64) -> Option<Range<u64>> {
    let start = first.checked_mul(sector_bytes)?;
    let end = count.checked_mul(sector_bytes)?.checked_add(start)?;
    (start < end && start < size_bytes).then_some(start..end)
}
