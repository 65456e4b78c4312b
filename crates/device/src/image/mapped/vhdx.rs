//! VHDX, the newer image format of Hyper-V: fixed or dynamic, and only read.
//!
//! ```text
//!   0      64 KiB      128 KiB     192 KiB    256 KiB
//!   | name | header    | header    | regions  | regions | ...  metadata, table of blocks, blocks
//! ```
//!
//! Of the two headers the one with the larger sequence number is current. The regions are the table
//! of blocks, and the metadata with the size of the disk and of a block. In the table, the entries
//! of as many blocks as one bitmap describes are followed by the entry of that bitmap. Only an
//! image with a parent uses such bitmaps.
//!
//! Source: MS-VHDX, "Virtual Hard Disk v2 File Format", version 20180912.

use std::io;
use std::sync::Arc;

use super::{BlockPlace, MappedDevice, part};
use crate::BlockDevice;
use crate::fields::{invalid, u32_le, u64_le};
use crate::image::unsupported;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// The ids of regions and of metadata items, in the byte order of the file: the first three parts
/// of a GUID are little-endian.
const BLOCK_TABLE: [u8; 16] = *b"\x66\x77\xc2\x2d\x23\xf6\x00\x42\x9d\x64\x11\x5e\x9b\xfd\x4a\x08";
const METADATA: [u8; 16] = *b"\x06\xa2\x7c\x8b\x90\x47\x9a\x4b\xb8\xfe\x57\x5f\x05\x0f\x88\x6e";
const FILE_PARAMETERS: [u8; 16] =
    *b"\x37\x67\xa1\xca\x36\xfa\x43\x4d\xb3\xb6\x33\xf0\xaa\x44\xe7\x6b";
const DISK_SIZE: [u8; 16] = *b"\x24\x42\xa5\x2f\x1b\xcd\x76\x48\xb2\x11\x5d\xbe\xd8\x3b\xf4\xb8";
const SECTOR_SIZE: [u8; 16] = *b"\x1d\xbf\x41\x81\x6f\xa9\x09\x47\xba\x47\xf2\x33\xa8\xfa\xab\x5f";

/// A table of entries of 32 bytes. Each begins with the id of the thing that it describes.
struct IdTable(Vec<u8>);

impl IdTable {
    /// Reads `count` entries behind the first `head` bytes of `bytes`.
    fn read(bytes: &[u8], head: usize, count: usize) -> io::Result<Self> {
        let len = count.checked_mul(32).and_then(|len| len.checked_add(head));
        let entries = len.and_then(|end| bytes.get(head..end));
        let entries = entries.ok_or_else(|| invalid("one of its tables is impossibly large"))?;
        Ok(Self(entries.to_vec()))
    }

    /// The entry with the id `what`.
    fn find(&self, what: &[u8; 16]) -> io::Result<&[u8]> {
        let mut entries = self.0.chunks_exact(32);
        let missing = || invalid("a part that every image of its kind has is missing");
        entries.find(|entry| entry.starts_with(what)).ok_or_else(missing)
    }
}

/// Whether `bytes` begin with `signature` and their checksum is right. The checksum follows the
/// signature; it is computed with its own four bytes as zeros.
fn is_whole(bytes: &[u8], signature: &[u8]) -> bool {
    let sum = crc32c::crc32c_append(crc32c::crc32c(signature), &[0; 4]);
    bytes.starts_with(signature) && crc32c::crc32c_append(sum, &bytes[8..]) == u32_le(bytes, 4)
}

/// The current header: of those with a right checksum, the newer one.
fn header(device: &dyn BlockDevice) -> io::Result<Vec<u8>> {
    let mut newest: Option<Vec<u8>> = None;
    for at in [64 * KIB, 128 * KIB] {
        let bytes = part(device, at, 4 * KIB)?;
        let is_newer = || newest.as_ref().is_none_or(|old| u64_le(old, 8) < u64_le(&bytes, 8));
        if is_whole(&bytes, b"head") && is_newer() {
            newest = Some(bytes);
        }
    }
    newest.ok_or_else(|| invalid("both of its headers are damaged"))
}

/// The table of regions, or its copy when the first one is damaged.
fn regions(device: &dyn BlockDevice) -> io::Result<IdTable> {
    for at in [192 * KIB, 256 * KIB] {
        let bytes = part(device, at, 64 * KIB)?;
        if is_whole(&bytes, b"regi") {
            return IdTable::read(&bytes, 16, u32_le(&bytes, 8) as usize);
        }
    }
    Err(invalid("the table of its regions and its copy are damaged"))
}

/// Opens the disk in a VHDX.
pub(in crate::image) fn open(below: Arc<dyn BlockDevice>) -> io::Result<Arc<dyn BlockDevice>> {
    let header = header(&*below)?;
    if header[66] != 1 || header[67] != 0 {
        return Err(unsupported(format!("a VHDX of version {} is not read here", header[66])));
    }
    if header[48..64] != [0; 16] {
        return Err(unsupported(
            "it was not closed, and its log has to be replayed: qemu-img check -r all IN does that",
        ));
    }
    let regions = regions(&*below)?;
    let region = |what| -> io::Result<(u64, u64)> {
        let entry = regions.find(what)?;
        Ok((u64_le(entry, 16), u32_le(entry, 24).into()))
    };
    let (metadata_at, metadata_len) = region(&METADATA)?;
    let metadata = part(&*below, metadata_at, metadata_len)?;
    if metadata.len() < 32 || !metadata.starts_with(b"metadata") {
        return Err(invalid("its metadata is damaged"));
    }
    let count = usize::from(u16::from_le_bytes([metadata[10], metadata[11]]));
    let items = IdTable::read(&metadata, 32, count)?;
    let item = |what, len: usize| -> io::Result<&[u8]> {
        let at = u32_le(items.find(what)?, 16) as usize;
        let item = at.checked_add(len).and_then(|end| metadata.get(at..end));
        item.ok_or_else(|| invalid("a part of its metadata is behind the end"))
    };
    let parameters = item(&FILE_PARAMETERS, 8)?;
    let (block_bytes, flags) = (u64::from(u32_le(parameters, 0)), u32_le(parameters, 4));
    let size_bytes = u64_le(item(&DISK_SIZE, 8)?, 0);
    let sector_bytes = u64::from(u32_le(item(&SECTOR_SIZE, 4)?, 0));
    if flags & 2 != 0 {
        return Err(unsupported(
            "a VHDX that stands over another is not read here: qemu-img convert -O qcow2 IN OUT \
             makes one image of both",
        ));
    }
    let is_possible = block_bytes.is_power_of_two()
        && (MIB..=256 * MIB).contains(&block_bytes)
        && matches!(sector_bytes, 512 | 4096)
        && size_bytes <= 64 << 40;
    if !is_possible {
        return Err(invalid("the sizes in its metadata are impossible"));
    }
    // A bitmap takes 1 MiB and has a bit for each sector: with sectors of 512 bytes it describes 4
    // GiB.
    let blocks_of_a_bitmap = 8 * MIB * sector_bytes / block_bytes;
    let blocks = size_bytes.div_ceil(block_bytes);
    let entries = blocks + blocks.saturating_sub(1) / blocks_of_a_bitmap;
    let (table_at, table_len) = region(&BLOCK_TABLE)?;
    if entries * 8 > table_len {
        return Err(invalid("its table has too few blocks for the size of the disk"));
    }
    let bytes = part(&*below, table_at, entries * 8)?;
    let table = bytes.chunks_exact(8).enumerate().filter_map(|(number, entry)| {
        // The entry of a bitmap follows those of the blocks that it describes.
        let is_bitmap = number as u64 % (blocks_of_a_bitmap + 1) == blocks_of_a_bitmap;
        (!is_bitmap).then(|| place(u64_le(entry, 0)))
    });
    let table = table.collect::<io::Result<Vec<_>>>()?;
    MappedDevice::open(below, size_bytes, block_bytes, table)
}

/// Where the block of an entry is. A block that was never written, or was trimmed, reads as zeros.
fn place(entry: u64) -> io::Result<BlockPlace> {
    match entry & 7 {
        0..=3 => Ok(BlockPlace::Zeros),
        6 => Ok(BlockPlace::At(entry & !(MIB - 1))),
        state => Err(invalid(format!("a block is in the state {state}"))),
    }
}
