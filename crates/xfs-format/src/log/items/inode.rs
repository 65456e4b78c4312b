//! Inodes.

use std::mem::offset_of;

use zerocopy::little_endian as le;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{ItemHead, XfsItemType, check_run};
use crate::inode::{INODE_CRC, INODE_MAGIC, XfsInodeCore, XfsInodeFlags2};
use crate::log::{XfsLogVector, XfsRegions, bad_item};
use crate::{BasicBlock, Ino, Malformed, Structure, XfsGeometry, csum};

/// The bytes of an inode's core on V5 volumes.
pub const CORE_SIZE: usize = size_of::<XfsInodeCore>();

/// The bytes of a core of versions 1 and 2 that count: those before its chain of unlinked inodes.
const OLD_CORE: usize = NEXT_UNLINKED;

/// Where a core has the chain of unlinked inodes.
pub(super) const NEXT_UNLINKED: usize = offset_of!(XfsInodeCore, next_unlinked);

/// The first region of an inode.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct InodeFormat {
    head: ItemHead,
    fields: le::U32,
    asize: le::U16,
    dsize: le::U16,
    pad: le::U32,
    tail: InodeFormatTail,
}

/// The first region of an inode on machines that do not align 8 bytes.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct PackedInodeFormat {
    head: ItemHead,
    fields: le::U32,
    asize: le::U16,
    dsize: le::U16,
    tail: InodeFormatTail,
}

/// What both have at their end.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct InodeFormatTail {
    ino: le::U64,
    rdev: le::U32,
    uuid_rest: [u8; 12],
    blkno: le::U64,
    len: le::U32,
    boffset: le::U32,
}

const _: () = {
    assert!(size_of::<InodeFormat>() == 56 && align_of::<InodeFormat>() == 1);
    assert!(size_of::<PackedInodeFormat>() == 52);
    assert!(offset_of!(InodeFormat, tail) == 16 && offset_of!(InodeFormatTail, blkno) == 24);
};

bitflags::bitflags! {
    /// What of an inode is logged.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct XfsInodeFields: u32 {
        /// The core.
        const CORE = 1;
        /// The data fork: its contents.
        const DATA_LOCAL = 2;
        /// The data fork: its extents.
        const DATA_EXTENTS = 4;
        /// The data fork: the root of its tree.
        const DATA_ROOT = 8;
        /// The number of the device.
        const DEVICE = 0x10;
        /// The attribute fork: its contents.
        const ATTRIBUTES_LOCAL = 0x40;
        /// The attribute fork: its extents.
        const ATTRIBUTES_EXTENTS = 0x80;
        /// The attribute fork: the root of its tree.
        const ATTRIBUTES_ROOT = 0x100;
        /// The blocks of the data fork's tree become those of this inode.
        const DATA_OWNER = 0x200;
        /// The blocks of the attribute fork's tree become those of this inode.
        const ATTRIBUTES_OWNER = 0x400;
        /// Any data fork.
        const DATA = 0xe;
        /// Any attribute fork.
        const ATTRIBUTES = 0x1c0;
        /// Bits of kernels in memory are kept, and mean nothing.
        const _ = !0;
    }
}

/// An inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsInodeItem<'a> {
    /// What of it is logged.
    pub fields: XfsInodeFields,
    /// Its number.
    pub ino: Ino,
    /// The number of the device, with [`XfsInodeFields::DEVICE`].
    pub device: u32,
    /// Where the buffer with it lies.
    pub place: BasicBlock,
    /// The basic blocks of that buffer.
    pub blocks: u32,
    /// Where it lies in the buffer, in bytes.
    pub offset: u32,
    /// The core in the form of the log: [`Self::put_core`] makes that of the disk of it.
    pub core: &'a [u8],
    /// The data fork. Contents and extents are as on disk. The root of a tree is a whole block of
    /// a tree, as in the memory of the kernel.
    pub data: Option<&'a [u8]>,
    /// The attribute fork, in the same way.
    pub attributes: Option<&'a [u8]>,
}

impl<'a> XfsInodeItem<'a> {
    pub(super) fn parse(first: &'a [u8], regions: XfsRegions<'a>) -> Result<Self, Malformed> {
        let (fields, [asize, dsize], tail) = if let Ok(format) = InodeFormat::ref_from_bytes(first)
        {
            (format.fields, [format.asize, format.dsize], format.tail)
        } else if let Ok(format) = PackedInodeFormat::ref_from_bytes(first) {
            (format.fields, [format.asize, format.dsize], format.tail)
        } else {
            return Err(bad_item(format!("a first region of {} bytes", first.len())));
        };
        let fields = XfsInodeFields::from_bits_retain(fields.get());
        let core = regions.get(1).unwrap_or_default();
        check_core(core)?;
        // A kernel that logs no fork may leave the bits of one.
        let mut at = 2;
        let mut fork = |bits: XfsInodeFields, size: le::U16| {
            let bits = fields & bits;
            if bits.is_empty() || regions.len() == 2 {
                return Ok(None);
            }
            let region = regions.get(at).unwrap_or_default();
            at += 1;
            let size = usize::from(size.get());
            match region.get(..size) {
                Some(fork) if bits.bits().is_power_of_two() && region.len() - size < 4 => {
                    Ok(Some(fork))
                }
                _ => Err(bad_item(format!(
                    "a fork of {size} bytes in {}, fields {:#x}",
                    region.len(),
                    bits
                ))),
            }
        };
        let data = fork(XfsInodeFields::DATA, dsize)?;
        let attributes = fork(XfsInodeFields::ATTRIBUTES, asize)?;
        if at < regions.len() {
            return Err(bad_item(format!("{} regions, {at} expected", regions.len())));
        }
        Ok(Self {
            fields,
            ino: Ino(tail.ino.get()),
            device: tail.rdev.get(),
            place: BasicBlock(tail.blkno.get()),
            blocks: tail.len.get(),
            offset: tail.boffset.get(),
            core,
            data,
            attributes,
        })
    }

    pub(super) fn check(&self, geometry: &XfsGeometry) -> Result<(), Malformed> {
        geometry.check_ino(Structure::LogItem, self.ino)?;
        let disk = self.disk_core();
        let core = XfsInodeCore::ref_from_bytes(&disk).map_err(|_| bad_item("no core"))?;
        if (core.version == 3) != geometry.has_checksums() {
            return Err(bad_item(format!("inode {} has version {}", self.ino, core.version)));
        }
        core.verify_flags2(geometry)
            .map_err(|error| bad_item(format!("inode {}: {}", self.ino, error.problem)))?;
        let (start, len) = (self.place.bytes(), u64::from(self.blocks) << 9);
        let at = start.saturating_add(self.offset.into());
        let end = at.saturating_add(geometry.inode_size() as u64);
        if geometry.inode_offset(self.ino) != Some(at) || end > start.saturating_add(len) {
            return Err(bad_item(format!(
                "inode {} at {} of {len} bytes in block {}",
                self.ino, self.offset, self.place
            )));
        }
        let outside = || bad_item(format!("inode {} outside of the volume", self.ino));
        check_run(geometry, geometry.at(BasicBlock(at >> 9)).ok_or_else(outside)?, 1)
    }

    /// The core in the form of the disk, with zeros for what an older version does not have.
    fn disk_core(&self) -> [u8; CORE_SIZE] {
        let mut core = [0; CORE_SIZE];
        for (to, from) in core.iter_mut().zip(self.core) {
            *to = *from;
        }
        swap_core(&mut core, CoreForm::Log);
        core
    }

    /// Writes the core over that of `inode`, in the form of the disk. Keeps what the log never has:
    /// the chain of unlinked inodes. The LSN and the checksum are the caller's to set.
    ///
    /// # Errors
    /// When `inode` is shorter than the core.
    pub fn put_core(&self, inode: &mut [u8]) -> Result<(), Malformed> {
        let core = self.disk_core();
        let (len, have) = (self.core.len().min(CORE_SIZE), inode.len());
        let (Some(old), Some(new)) = (inode.get_mut(..len), core.get(..len)) else {
            return Err(bad_item(format!("a core of {len} bytes for an inode of {have}")));
        };
        for (at, (old, new)) in old.iter_mut().zip(new).enumerate() {
            if !(NEXT_UNLINKED..INODE_CRC).contains(&at) {
                *old = *new;
            }
        }
        Ok(())
    }

    pub(super) fn encode(&self, to: &mut XfsLogVector) {
        let size = |fork: Option<&[u8]>| {
            let len = u16::try_from(fork.map_or(0, <[u8]>::len));
            le::U16::new(len.expect("a fork is below 2 KiB, or was measured so"))
        };
        let forks = [self.data, self.attributes];
        let regions = 2 + u16::from(self.data.is_some()) + u16::from(self.attributes.is_some());
        let format = InodeFormat {
            head: ItemHead::new(XfsItemType::Inode, regions),
            fields: le::U32::new(self.fields.bits()),
            asize: size(self.attributes),
            dsize: size(self.data),
            pad: le::U32::ZERO,
            tail: InodeFormatTail {
                ino: le::U64::new(self.ino.0),
                rdev: le::U32::new(self.device),
                uuid_rest: [0; 12],
                blkno: le::U64::new(self.place.0),
                len: le::U32::new(self.blocks),
                boffset: le::U32::new(self.offset),
            },
        };
        to.push(&[format.as_bytes()]);
        to.push(&[self.core]);
        for fork in forks.into_iter().flatten() {
            to.push(&[fork]);
        }
    }
}

/// Proves the length and the magic of a core in the form of the log.
fn check_core(core: &[u8]) -> Result<(), Malformed> {
    let magic = core.first_chunk().copied().map(u16::from_le_bytes);
    let fits = match core.get(4) {
        Some(1 | 2) => core.len() == OLD_CORE,
        Some(3) => core.len() == CORE_SIZE,
        _ => false,
    };
    if magic != Some(u16::from_be_bytes(INODE_MAGIC)) || !fits {
        return Err(bad_item(format!(
            "a core of {} bytes, magic {:#x}, version {}",
            core.len(),
            magic.unwrap_or(0),
            core.get(4).unwrap_or(&0)
        )));
    }
    Ok(())
}

/// The core of the inode on disk in the form of the log: without its checksum and its chain of
/// unlinked inodes.
#[must_use]
pub fn core_for_log(disk: &[u8; CORE_SIZE]) -> [u8; CORE_SIZE] {
    const CRC_END: usize = INODE_CRC + csum::LEN;
    let mut core = *disk;
    swap_core(&mut core, CoreForm::Disk);
    for (at, byte) in core.iter_mut().enumerate().skip(NEXT_UNLINKED) {
        match at {
            NEXT_UNLINKED..INODE_CRC => *byte = 0xff,
            INODE_CRC..CRC_END => *byte = 0,
            _ => break,
        }
    }
    core
}

/// The two forms of a core. They differ in the order of bytes only.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CoreForm {
    Log,
    Disk,
}

/// Makes a core of the one form one of the other.
fn swap_core(core: &mut [u8], from: CoreForm) {
    const TIMES: [usize; 4] = [32, 40, 48, 144];
    const NUMBERS: [(usize, usize); 23] = [
        (0, 2),   // magic
        (2, 2),   // mode
        (6, 2),   // metadata type, or links of version 1
        (8, 4),   // uid
        (12, 4),  // gid
        (16, 4),  // nlink
        (20, 2),  // project, low
        (22, 2),  // project, high
        (56, 8),  // size
        (64, 8),  // nblocks
        (72, 4),  // extsize
        (76, 4),  // nextents, or anextents
        (80, 2),  // anextents
        (84, 4),  // dmevmask
        (88, 2),  // dmstate
        (90, 2),  // flags
        (92, 4),  // gen
        (96, 4),  // next_unlinked
        (104, 8), // changecount
        (112, 8), // lsn
        (120, 8), // flags2
        (128, 4), // cowextsize
        (152, 8), // ino
    ];
    let is_v3 = core.get(4) == Some(&3);
    let flags2 = core
        .get(offset_of!(XfsInodeCore, flags2)..)
        .and_then(<[u8]>::first_chunk)
        .copied()
        .filter(|_| is_v3);
    let flags2 = flags2.map_or(0, |bytes| match from {
        CoreForm::Log => u64::from_le_bytes(bytes),
        CoreForm::Disk => u64::from_be_bytes(bytes),
    });
    let mut swap = |at: usize, len: usize| {
        if let Some(number) = core.get_mut(at..at + len) {
            number.reverse();
        }
    };
    for (at, len) in NUMBERS {
        swap(at, len);
    }
    // Version 3 has a number of 64 bits (extents, or zeros) where version 2 has a counter of
    // flushes in the last 2 bytes.
    if is_v3 {
        swap(24, 8);
    } else {
        swap(30, 2);
    }
    for at in TIMES {
        if flags2 & XfsInodeFlags2::BIGTIME.bits() != 0 {
            swap(at, 8);
        } else {
            swap(at, 4);
            swap(at + 4, 4);
        }
    }
}
