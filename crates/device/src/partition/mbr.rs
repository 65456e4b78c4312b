//! The master boot record, and the chain of logical partitions.
//!
//! ```text
//! sector   440  id of the disk   446  four entries of 16 bytes   510  0x55 0xaa
//! entry      0  0x80 or 0   4  type   8  first sector   12  how many sectors
//! ```
//!
//! Logical partitions are a chain of such sectors inside of the extended partition. In each of them
//! the first entry is a partition, counted from that sector. The second entry leads to the next
//! sector, counted from the start of the extended partition.
//!
//! Sectors are those of the device. An image file does not tell their size, so the caller gives it.
//!
//! The boot sector of a filesystem ends with the same two bytes. So a sector is taken for a table
//! only when all four entries are plausible and at least one is used.

use std::io;

use super::{Partition, PartitionTable, TableKind, sectors};
use crate::BlockDevice;
use crate::fields::{invalid, u32_le};

/// How many links of a chain are followed. Linux has room for 60 logical partitions on most disks.
pub(super) const LOGICAL_MAX: u32 = 128;

const PROTECTIVE: u8 = 0xee;
const EXTENDED: [u8; 3] = [0x05, 0x0f, 0x85];

#[derive(Clone, Copy)]
struct MbrEntry {
    kind: u8,
    first: u32,
    count: u32,
}

/// Reads the table.
pub(super) fn read(
    device: &dyn BlockDevice,
    sector_bytes: u64,
) -> io::Result<Option<PartitionTable>> {
    let read_sector = |sector| read_sector(device, sector, sector_bytes);
    let Some((id, entries)) = read_sector(0)? else { return Ok(None) };
    if !entries.iter().any(|entry| entry.kind != 0 && entry.count != 0) {
        return Ok(None);
    }
    if entries[0].kind == PROTECTIVE {
        return Err(invalid("the MBR says that there is a GPT, and none is found"));
    }
    let partition = |number, first, count: u32| {
        let range = sectors(first, count.into(), sector_bytes, device.size_bytes())?;
        let uuid = format!("{id:08x}-{number:02x}");
        Some(Partition { number, range, label: String::new(), uuid })
    };
    let mut partitions = Vec::new();
    for (number, entry) in (1..).zip(entries) {
        let is_one = entry.kind != 0 && !EXTENDED.contains(&entry.kind);
        partitions
            .extend(is_one.then(|| partition(number, entry.first.into(), entry.count)).flatten());
    }
    let mut warning = None;
    let mut number = 5;
    let mut links = Vec::new();
    for extended in entries.iter().filter(|entry| EXTENDED.contains(&entry.kind)) {
        let start = u64::from(extended.first);
        let mut next_link = Some(start);
        while let Some(at) = next_link {
            let is_inside = (start..start + u64::from(extended.count)).contains(&at);
            let is_new = links.len() < LOGICAL_MAX as usize && !links.contains(&at);
            let link = if is_inside && is_new { read_sector(at)? } else { None };
            let Some((_, [one, next, ..])) = link else {
                warning = Some("the chain of logical partitions is broken".to_owned());
                break;
            };
            links.push(at);
            if one.kind != 0 && one.count != 0 {
                partitions.extend(partition(number, at + u64::from(one.first), one.count));
                number += 1;
            }
            let goes_on = EXTENDED.contains(&next.kind) && next.count != 0;
            next_link = goes_on.then(|| start + u64::from(next.first));
        }
    }
    Ok(Some(PartitionTable { kind: TableKind::Mbr, partitions, warning }))
}

/// Whether there is a protective MBR, which says that the disk has a GPT.
pub(super) fn is_protective(device: &dyn BlockDevice) -> io::Result<bool> {
    // Sector 0 begins at byte 0, whatever the sector size is.
    let sector = read_sector(device, 0, 512)?;
    Ok(sector.is_some_and(|(_, entries)| entries.iter().any(|entry| entry.kind == PROTECTIVE)))
}

/// The disk id and the entries of a sector with a table; `None` for another sector.
fn read_sector(
    device: &dyn BlockDevice,
    sector: u64,
    sector_bytes: u64,
) -> io::Result<Option<(u32, [MbrEntry; 4])>> {
    let Some(place) = sectors(sector, 1, sector_bytes, device.size_bytes()) else {
        return Ok(None);
    };
    if place.end > device.size_bytes() {
        return Ok(None);
    }
    let mut bytes = [0; 512];
    device.read_at(place.start, &mut bytes)?;
    let table = &bytes[446..510];
    if bytes[510..] != [0x55, 0xaa] || table.chunks(16).any(|entry| entry[0] & 0x7f != 0) {
        return Ok(None);
    }
    let entry = |at: usize| {
        let entry = &table[at * 16..at * 16 + 16];
        MbrEntry { kind: entry[4], first: u32_le(entry, 8), count: u32_le(entry, 12) }
    };
    Ok(Some((u32_le(&bytes, 440), std::array::from_fn(entry))))
}
