//! The GUID partition table (UEFI 2.10, chapter 5).
//!
//! ```text
//! header   0  signature  8 revision  12 size  16 CRC  20 0  24 its sector  32 that of the copy
//!         40  first and last sector of partitions  56 GUID of the disk
//!         72  first sector of the entries  80 how many  84 bytes of each  88 CRC of all of them
//! entry    0  type  16 GUID  32 first sector  40 last sector  48 attributes  56 name, UTF-16
//! ```
//!
//! A GPT does not store the size of a sector. The header is in sector 1, so the reader looks for it
//! with each size that disks have: first the sector size of the device, or 512 bytes if the device
//! names none; then 512 and 4096. So a disk that was copied to one with another sector size still
//! shows its table. A header is valid when its checksum, the checksum of its entries, and the
//! sector that it names for itself are right.
//!
//! We do not use the crates `gpt` and `gptman`: they allocate as much as the header says, and panic
//! on an unexpected size of entries.

use std::io;

use flate2::Crc;

use super::{Partition, PartitionTable, TableKind, sectors};
use crate::BlockDevice;
use crate::fields::{invalid, u32_le, u64_le};

/// The most bytes that all entries may take. The usual 128 entries of 128 bytes take 16 KiB.
pub(super) const TABLE_BYTES_MAX: u64 = 4 << 20;

const SIGNATURE: &[u8; 8] = b"EFI PART";
const HEADER_BYTES: usize = 92;
const ENTRY_BYTES_MIN: u64 = 128;

/// The result of looking for a header.
enum GptSearch<T> {
    Nothing,
    Table(T),
    Damaged(&'static str),
}

/// Reads the table, or its copy when the first one is damaged.
pub(super) fn read(device: &dyn BlockDevice) -> io::Result<Option<PartitionTable>> {
    let own = device.logical_sector_bytes().unwrap_or(512);
    let mut problem = None;
    let others = [512, 4096].into_iter().filter(|&other| other != own);
    for sector_bytes in std::iter::once(own).chain(others) {
        match read_of(device, sector_bytes)? {
            GptSearch::Nothing => {}
            GptSearch::Table(table) => return Ok(Some(table)),
            GptSearch::Damaged(what) => problem = problem.or(Some(what)),
        }
    }
    match problem {
        Some(what) => Err(invalid(format!("the GPT and its copy are damaged: {what}"))),
        None => Ok(None),
    }
}

/// As [`read`], for sectors of one size.
fn read_of(device: &dyn BlockDevice, sector_bytes: u64) -> io::Result<GptSearch<PartitionTable>> {
    let table = |partitions, warning| {
        GptSearch::Table(PartitionTable { kind: TableKind::Gpt, partitions, warning })
    };
    let problem = match read_at(device, 1, sector_bytes)? {
        GptSearch::Table(partitions) => return Ok(table(partitions, None)),
        GptSearch::Damaged(problem) => Some(problem),
        // Without a first header the copy is valid only if a protective MBR announces a GPT: a disk
        // that got an MBR later may still have the old copy at its end.
        GptSearch::Nothing if super::mbr::is_protective(device)? => None,
        GptSearch::Nothing => return Ok(GptSearch::Nothing),
    };
    let last = (device.size_bytes() / sector_bytes).saturating_sub(1);
    if let GptSearch::Table(partitions) = read_at(device, last, sector_bytes)? {
        let problem = problem.unwrap_or("it is missing");
        let warning = format!("the first GPT is damaged ({problem}); its copy is used");
        return Ok(table(partitions, Some(warning)));
    }
    Ok(problem.map_or(GptSearch::Nothing, GptSearch::Damaged))
}

/// Reads the table whose header is in `sector`.
fn read_at(
    device: &dyn BlockDevice,
    sector: u64,
    sector_bytes: u64,
) -> io::Result<GptSearch<Vec<Partition>>> {
    let Some(place) = sectors(sector, 1, sector_bytes, device.size_bytes()) else {
        return Ok(GptSearch::Nothing);
    };
    if place.end > device.size_bytes() || sector == 0 {
        return Ok(GptSearch::Nothing);
    }
    let mut header = [0; HEADER_BYTES];
    device.read_at(place.start, &mut header)?;
    if header[..8] != *SIGNATURE {
        return Ok(GptSearch::Nothing);
    }
    if u32_le(&header, 12) as usize != HEADER_BYTES {
        return Ok(GptSearch::Damaged("its header has another size than 92 bytes"));
    }
    let mut blank = header;
    blank[16..20].fill(0);
    if crc(&blank) != u32_le(&header, 16) {
        return Ok(GptSearch::Damaged("the checksum of its header is wrong"));
    }
    if u64_le(&header, 24) != sector {
        return Ok(GptSearch::Damaged("its header belongs to another place"));
    }
    let (first, count) = (u64_le(&header, 72), u64::from(u32_le(&header, 80)));
    let entry_bytes = u64::from(u32_le(&header, 84));
    if entry_bytes < ENTRY_BYTES_MIN || entry_bytes.saturating_mul(count) > TABLE_BYTES_MAX {
        return Ok(GptSearch::Damaged("its entries have an impossible size"));
    }
    let table_bytes = entry_bytes * count;
    let place = sectors(first, table_bytes.div_ceil(sector_bytes), sector_bytes, u64::MAX);
    let Some(place) = place.filter(|place| place.end <= device.size_bytes()) else {
        return Ok(GptSearch::Damaged("its entries are not on the disk"));
    };
    // At most `TABLE_BYTES_MAX`, which fits `usize` on every supported host.
    let mut table = vec![0; usize::try_from(table_bytes).map_err(io::Error::other)?];
    device.read_at(place.start, &mut table)?;
    if crc(&table) != u32_le(&header, 88) {
        return Ok(GptSearch::Damaged("the checksum of its entries is wrong"));
    }
    let entries = table.chunks_exact(usize::try_from(entry_bytes).map_err(io::Error::other)?);
    let partitions = (1..).zip(entries).filter_map(|(number, entry)| {
        let (first, last) = (u64_le(entry, 32), u64_le(entry, 40));
        if entry[..16] == [0; 16] {
            return None;
        }
        let count = last.checked_sub(first)?.checked_add(1)?;
        let range = sectors(first, count, sector_bytes, device.size_bytes())?;
        Some(Partition { number, range, label: label(&entry[56..128]), uuid: guid(&entry[16..32]) })
    });
    Ok(GptSearch::Table(partitions.collect()))
}

fn crc(bytes: &[u8]) -> u32 {
    let mut crc = Crc::new();
    crc.update(bytes);
    crc.sum()
}

/// The name in an entry. It ends at the first zero or at the end of the field.
fn label(bytes: &[u8]) -> String {
    let units = bytes.as_chunks::<2>().0.iter().map(|unit| u16::from_le_bytes(*unit));
    let units: Vec<u16> = units.take_while(|unit| *unit != 0).collect();
    String::from_utf16_lossy(&units)
}

/// A GUID as text. Its first three groups are little-endian numbers.
fn guid(bytes: &[u8]) -> String {
    const ORDER: [usize; 16] = [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15];
    let part = |(at, from): (usize, &usize)| {
        let dash = if matches!(at, 4 | 6 | 8 | 10) { "-" } else { "" };
        format!("{dash}{:02x}", bytes[*from])
    };
    ORDER.iter().enumerate().map(part).collect()
}
