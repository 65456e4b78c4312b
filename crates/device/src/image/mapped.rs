//! Images with a table of blocks, which this module only reads: VDI, VHD, [VHDX](vhdx), and a
//! stream-optimised [VMDK](super::vmdk).
//!
//! ```text
//!   disk    | block 0 | block 1 | block 2 |        table: 0 -> at 4096
//!   file    | header, table | block 0 | block 2 |         1 -> nothing, zeros
//! ```
//!
//! | image | block | table |
//! |---|---|---|
//! | VDI | 1 MiB mostly | one number of 32 bits for each block, in order of allocation |
//! | VHD, dynamic | 2 MiB mostly | the sector of each block; the block begins with a bitmap |
//! | VHD, fixed | all | none: the disk, and a sector behind it |
//! | VHDX | 32 MiB mostly | the byte of each block, and its state |
//! | VMDK, stream-optimised | 64 KiB mostly, deflated | tables of 512 blocks, and a directory |
//!
//! A table may lead outside of the file, as in an image that was cut off. Opening succeeds then,
//! and a read of such a block fails.

pub(super) mod vhdx;

use std::io;
use std::sync::Arc;

use flate2::{Decompress, FlushDecompress, Status};
use parking_lot::Mutex;

use super::{TABLE_BYTES_MAX, read_by_blocks, unsupported};
use crate::fields::{self, invalid, u32_be, u32_le, u64_be, u64_le};
use crate::{BlockDevice, WindowDevice, request_range};

const SECTOR_BYTES: u64 = 512;

/// Where the bytes of a block are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockPlace {
    /// The file does not store the block: it is all zeros.
    Zeros,
    /// Stored as it is, from this byte of the file on.
    At(u64),
    /// Deflated, behind a marker that begins at this byte of the file.
    Deflated(u64),
}

/// A disk whose blocks are found in a table.
#[derive(Debug)]
pub(super) struct MappedDevice {
    below: Arc<dyn BlockDevice>,
    name: String,
    size_bytes: u64,
    block_bytes: u64,
    table: Vec<BlockPlace>,
    /// The block that was inflated last. Most reads continue in it.
    inflated: Mutex<Option<(u64, Vec<u8>)>>,
}

impl MappedDevice {
    /// Opens a disk of `size_bytes`, whose blocks of `block_bytes` are in `table`.
    pub(super) fn open(
        below: Arc<dyn BlockDevice>,
        size_bytes: u64,
        block_bytes: u64,
        table: Vec<BlockPlace>,
    ) -> io::Result<Arc<dyn BlockDevice>> {
        if block_bytes == 0 || size_bytes.div_ceil(block_bytes) > table.len() as u64 {
            return Err(invalid("its table has too few blocks for the size of the disk"));
        }
        let name = below.name().to_owned();
        let inflated = Mutex::new(None);
        Ok(Arc::new(Self { below, name, size_bytes, block_bytes, table, inflated }))
    }

    /// Fills `buf` from byte `inside` of block `number` on.
    fn read_in_block(&self, number: u64, inside: u64, buf: &mut [u8]) -> io::Result<()> {
        // `open` checked that the table has as many blocks as the size of the disk needs.
        let index = usize::try_from(number).map_err(io::Error::other)?;
        match self.table[index] {
            BlockPlace::Zeros => buf.fill(0),
            BlockPlace::At(start) => {
                let at = start.checked_add(inside).ok_or(io::ErrorKind::UnexpectedEof)?;
                self.below.read_at(at, buf)?;
            }
            BlockPlace::Deflated(at) => {
                let mut inflated = self.inflated.lock();
                if inflated.as_ref().is_none_or(|(known, _)| *known != number) {
                    *inflated = Some((number, self.inflate(at)?));
                }
                let (_, block) = inflated.as_ref().expect("it was put there");
                let inside = usize::try_from(inside).map_err(io::Error::other)?;
                buf.copy_from_slice(&block[inside..inside + buf.len()]);
            }
        }
        Ok(())
    }

    /// Inflates the block behind the marker at `at`. The marker holds the block's first sector and
    /// the number of packed bytes that follow.
    fn inflate(&self, at: u64) -> io::Result<Vec<u8>> {
        const MARKER_BYTES: u64 = 12;
        let mut marker = [0; 12];
        self.below.read_at(at, &mut marker)?;
        let len = u64::from(u32_le(&marker, 8));
        if len > self.block_bytes * 2 {
            return Err(invalid("a compressed block is larger than any could be"));
        }
        let mut packed = vec![0; usize::try_from(len).map_err(io::Error::other)?];
        self.below.read_at(at + MARKER_BYTES, &mut packed)?;
        let mut block = vec![0; usize::try_from(self.block_bytes).map_err(io::Error::other)?];
        let mut inflater = Decompress::new(true);
        let status = inflater.decompress(&packed, &mut block, FlushDecompress::Finish);
        let is_whole = inflater.total_out() == self.block_bytes;
        match status {
            // The last block may be shorter than the others.
            Ok(Status::StreamEnd) => Ok(block),
            Ok(Status::Ok | Status::BufError) if is_whole => Ok(block),
            _ => Err(invalid("a compressed block is damaged")),
        }
    }
}

impl BlockDevice for MappedDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        request_range(self.size_bytes, offset, buf.len() as u64)?;
        read_by_blocks(offset, buf, self.block_bytes, |at, part| {
            self.read_in_block(at / self.block_bytes, at % self.block_bytes, part)
        })
    }

    read_only!();
}

/// Reads a part of the file that every image has: a header, or a table of bounded size.
pub(super) fn part(device: &dyn BlockDevice, offset: u64, len: u64) -> io::Result<Vec<u8>> {
    fields::part(device, offset, len, TABLE_BYTES_MAX)?
        .ok_or_else(|| invalid("its header or its table is not in the file"))
}

/// Reads a table of `count` numbers of 32 bits.
pub(super) fn numbers(
    device: &dyn BlockDevice,
    offset: u64,
    count: u64,
    number: fn(&[u8], usize) -> u32,
) -> io::Result<Vec<u32>> {
    let len = count.checked_mul(4).ok_or_else(|| invalid("its table is impossibly large"))?;
    let bytes = part(device, offset, len)?;
    Ok(bytes.chunks_exact(4).map(|bytes| number(bytes, 0)).collect())
}

/// Opens an image of VirtualBox: version 1.1, dynamic or fixed.
pub(super) fn vdi(below: Arc<dyn BlockDevice>) -> io::Result<Arc<dyn BlockDevice>> {
    const NOTHING: u32 = u32::MAX;
    const ZEROS: u32 = u32::MAX - 1;
    let header = part(&*below, 0, 512)?;
    let (version, kind) = (u32_le(&header, 68), u32_le(&header, 76));
    if version != 0x0001_0001 || !matches!(kind, 1 | 2) {
        return Err(unsupported(format!(
            "a VDI of version {version:#x} and kind {kind} is not read here: qemu-img convert -O \
             qcow2 IN OUT makes an image that is"
        )));
    }
    let (table_at, data_at) = (u32_le(&header, 340), u64::from(u32_le(&header, 344)));
    let size_bytes = u64_le(&header, 368);
    let (block_bytes, count) = (u64::from(u32_le(&header, 376)), u32_le(&header, 384));
    let table = numbers(&*below, table_at.into(), count.into(), u32_le)?;
    let place = |number| match number {
        NOTHING | ZEROS => BlockPlace::Zeros,
        number => BlockPlace::At(data_at + u64::from(number) * block_bytes),
    };
    let table = table.into_iter().map(place).collect();
    MappedDevice::open(below, size_bytes, block_bytes, table)
}

/// The footer of a VHD, its last sector, which describes the image.
fn vhd_footer(device: &dyn BlockDevice) -> io::Result<Option<Vec<u8>>> {
    // Some versions of Virtual PC wrote a footer of 511 bytes.
    for len in [512, 511] {
        let Some(at) = device.size_bytes().checked_sub(len) else { continue };
        let mut footer = part(device, at, len)?;
        if footer.starts_with(b"conectix") && is_vhd_sum(&footer) {
            footer.resize(512, 0);
            return Ok(Some(footer));
        }
    }
    Ok(None)
}

/// Whether the checksum of a footer is right: the complement of the sum of all other bytes.
fn is_vhd_sum(footer: &[u8]) -> bool {
    let others = footer.iter().enumerate().filter(|(at, _)| !(64..68).contains(at));
    let sum = others.fold(0u32, |sum, (_, byte)| sum.wrapping_add((*byte).into()));
    u32_be(footer, 64) == !sum
}

/// Whether `device` is a fixed VHD, which has only a footer and no header.
pub(super) fn is_fixed_vhd(device: &dyn BlockDevice) -> io::Result<bool> {
    Ok(vhd_footer(device)?.is_some_and(|footer| u32_be(&footer, 60) == 2))
}

/// Opens an image of Virtual PC or Hyper-V: fixed or dynamic.
pub(super) fn vhd(below: Arc<dyn BlockDevice>) -> io::Result<Arc<dyn BlockDevice>> {
    let footer = if let Some(footer) = vhd_footer(&*below)? {
        footer
    } else {
        // A dynamic VHD has a copy of the footer at its beginning.
        let copy = part(&*below, 0, 512)?;
        if !copy.starts_with(b"conectix") || !is_vhd_sum(&copy) {
            return Err(invalid("the checksum of its footer is wrong"));
        }
        copy
    };
    let size_bytes = u64_be(&footer, 48);
    match u32_be(&footer, 60) {
        2 => {
            let name = below.name().to_owned();
            if size_bytes > below.size_bytes() {
                return Err(invalid("its footer says that it is longer than the file"));
            }
            return Ok(Arc::new(ReadOnly(WindowDevice::new(below, 0..size_bytes, name)?)));
        }
        3 => {}
        kind => {
            return Err(unsupported(format!(
                "a VHD of kind {kind} needs another file: qemu-img convert -O qcow2 IN OUT makes \
                 one image of both"
            )));
        }
    }
    let header = part(&*below, u64_be(&footer, 16), 1024)?;
    if !header.starts_with(b"cxsparse") {
        return Err(invalid("the header of its blocks is damaged"));
    }
    let (table_at, count) = (u64_be(&header, 16), u32_be(&header, 28));
    let block_bytes = u64::from(u32_be(&header, 32));
    if !block_bytes.is_power_of_two() || block_bytes < SECTOR_BYTES {
        return Err(invalid("its blocks have an impossible size"));
    }
    // A block begins with its bitmap: one bit for each sector, rounded up to whole sectors.
    let bitmap_bytes = (block_bytes / SECTOR_BYTES).div_ceil(8).next_multiple_of(SECTOR_BYTES);
    let place = |number| match number {
        u32::MAX => BlockPlace::Zeros,
        number => BlockPlace::At(u64::from(number) * SECTOR_BYTES + bitmap_bytes),
    };
    let table = numbers(&*below, table_at, count.into(), u32_be)?.into_iter().map(place).collect();
    MappedDevice::open(below, size_bytes, block_bytes, table)
}

/// A device that refuses writes.
#[derive(Debug)]
struct ReadOnly(WindowDevice);

impl crate::Delegate for ReadOnly {
    fn inner(&self) -> &dyn BlockDevice {
        &self.0
    }

    fn read_medium_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.inner().read_medium_at(offset, buf)
    }

    read_only!();
}
