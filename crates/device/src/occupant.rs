//! Recognises the contents of a device that is in use.
//!
//! Without `force`, a program that makes volumes refuses a device with the signature of something
//! that people keep. The table has what is found on disks and images today: filesystems, volume
//! managers, encryption, swap, partition tables. Like every such table it is no guarantee.
//!
//! Some signatures are two bytes long, and text or a program may have them by chance. A program
//! that makes volumes refuses these too, because users can force it. A program that copies a plain
//! file over another one asks for [`Occupant::is_certain`]: then the fields beside the signature
//! also have values that such a filesystem has.

use std::io;
use std::ops::Range;

use crate::BlockDevice;

/// Bytes at an offset, and the name of the structure that has them there.
struct Signature {
    what: &'static str,
    offset: u64,
    bytes: &'static [u8],
}

const fn signature(what: &'static str, offset: u64, bytes: &'static [u8]) -> Signature {
    Signature { what, offset, bytes }
}

/// The offset of the magic in a superblock of btrfs, in bytes.
const BTRFS_MAGIC_AT: u64 = 64;

/// The magic of btrfs.
const BTRFS_MAGIC: [u8; 8] = *b"_BHRfS_M";

/// Where the superblocks of btrfs are, in bytes, and their size.
const BTRFS_SUPERBLOCKS: [u64; 3] = [64 << 10, 64 << 20, 256 << 30];
const BTRFS_SUPERBLOCK_BYTES: u64 = 4096;

/// The bytes at both ends of a device that a new volume wipes.
const WIPED_ENDS: u64 = 1 << 20;

/// Filesystems with a short signature, and the sector that ends with one.
const EXT: &str = "ext2, ext3 or ext4";
const NILFS2: &str = "NILFS2";
const MINIX: &str = "MINIX";
const HFS_PLUS: &str = "HFS+";
const BOOT_SECTOR: &str = "a partition table or boot sector";

/// Where the superblock of all of these is, in bytes.
const SUPERBLOCK_AT: u64 = 1024;

/// The offset of the signature of MINIX version 3, in bytes.
const MINIX_3_AT: u64 = SUPERBLOCK_AT + 24;

/// More specific signatures come first, because the mark of a boot sector occurs together with
/// others. Copies of a btrfs superblock may survive after another filesystem is made, so they come
/// last.
const SIGNATURES: [Signature; 44] = [
    // A file of an XFS volume may lie where btrfs has its superblock. The first sector of a btrfs
    // volume never begins so: programs that make one clear it.
    signature("XFS", 0, b"XFSB"),
    signature("btrfs", BTRFS_SUPERBLOCKS[0] + BTRFS_MAGIC_AT, &BTRFS_MAGIC),
    signature(EXT, 1024 + 56, &[0x53, 0xef]),
    signature("F2FS", 1024, &[0x10, 0x20, 0xf5, 0xf2]),
    signature("bcache or bcachefs", 4096 + 24, &[0xc6, 0x85, 0x73, 0xf6]),
    signature("EROFS", 1024, &[0xe2, 0xe1, 0xf5, 0xe0]),
    signature("SquashFS", 0, b"hsqs"),
    signature(NILFS2, 1024 + 6, &[0x34, 0x34]),
    signature("ReiserFS", 65536 + 52, b"ReIsEr"),
    signature("JFS", 32768, b"JFS1"),
    signature("GFS2", 65536, &[0x01, 0x16, 0x19, 0x70]),
    signature("OCFS2", 2048, b"OCFSV2"),
    signature("OCFS2", 4096, b"OCFSV2"),
    signature(MINIX, 1024 + 16, &[0x7f, 0x13]),
    signature(MINIX, MINIX_3_AT, &[0x5a, 0x4d]),
    signature(HFS_PLUS, 1024, b"H+"),
    signature("APFS", 32, b"NXSB"),
    signature("exFAT", 3, b"EXFAT   "),
    signature("NTFS", 3, b"NTFS    "),
    signature("FAT", 54, b"FAT1"),
    signature("FAT", 82, b"FAT32   "),
    signature("ISO 9660", 32768 + 1, b"CD001"),
    signature("UDF", 32768 + 1, b"BEA01"),
    signature("ZFS", 128 * 1024, &[0x0c, 0xb1, 0xba]),
    signature("LUKS", 0, b"LUKS\xba\xbe"),
    signature("BitLocker", 3, b"-FVE-FS-"),
    signature("LVM", 24, b"LVM2 001"),
    signature("LVM", 512 + 24, b"LVM2 001"),
    signature("an MD RAID", 0, &MD_RAID),
    signature("an MD RAID", 4096, &MD_RAID),
    signature("swap space", 4096 - 10, b"SWAPSPACE2"),
    signature("swap space", 16384 - 10, b"SWAPSPACE2"),
    signature("swap space", 65536 - 10, b"SWAPSPACE2"),
    signature("VMFS", 1024 * 1024, &[0x0d, 0xd0, 0x01, 0xc0]),
    signature("a GUID partition table", 512, b"EFI PART"),
    signature("a GUID partition table", 4096, b"EFI PART"),
    signature("a qcow2 image", 0, b"QFI\xfb"),
    signature("a VDI image", 64, &[0x7f, 0x10, 0xda, 0xbe]),
    signature("a VHD image", 0, b"conectix"),
    signature("a VHDX image", 0, b"vhdxfile"),
    signature("a VMDK image", 0, b"KDMV"),
    signature(BOOT_SECTOR, 510, &[0x55, 0xaa]),
    signature("btrfs", BTRFS_SUPERBLOCKS[1] + BTRFS_MAGIC_AT, &BTRFS_MAGIC),
    signature("btrfs", BTRFS_SUPERBLOCKS[2] + BTRFS_MAGIC_AT, &BTRFS_MAGIC),
];

const MD_RAID: [u8; 4] = 0xa92b_4efc_u32.to_le_bytes();

/// Signatures at the end of a device of `size_bytes`.
fn at_end(size_bytes: u64) -> [Signature; 4] {
    let from_end = |len: u64, unit: u64| size_bytes.saturating_sub(len) / unit * unit;
    [
        signature("an MD RAID", (size_bytes / 65536 * 65536).saturating_sub(65536), &MD_RAID),
        signature("an MD RAID", from_end(8192, 4096), &MD_RAID),
        signature("a GUID partition table", from_end(512, 512), b"EFI PART"),
        signature("a GUID partition table", from_end(4096, 4096), b"EFI PART"),
    ]
}

/// The contents of a device or an image, by their signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupant {
    /// Its name: a filesystem, a volume manager, a partition table.
    pub what: &'static str,
    /// Other files do not have this signature by chance.
    pub is_certain: bool,
}

/// Recognises the contents of a device or an image of `size_bytes`; `None` if no signature is
/// known. `read_at` fills a buffer from an offset in bytes. It is never asked for bytes beyond the
/// size.
///
/// # Errors
/// Those of `read_at`.
pub fn occupant(
    size_bytes: u64,
    mut read_at: impl FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> io::Result<Option<Occupant>> {
    let mut uncertain = None;
    for Signature { what, offset, bytes } in SIGNATURES.iter().chain(&at_end(size_bytes)) {
        let mut found = vec![0; bytes.len()];
        if offset + bytes.len() as u64 > size_bytes {
            continue;
        }
        read_at(*offset, &mut found)?;
        if found != *bytes {
            continue;
        }
        if is_certain(what, *offset, size_bytes, &mut read_at)? {
            return Ok(Some(Occupant { what, is_certain: true }));
        }
        uncertain.get_or_insert(Occupant { what, is_certain: false });
    }
    Ok(uncertain)
}

/// What the `len` bytes from `start` on are, by a signature that nothing has by chance. All of them
/// are on `device`.
///
/// # Errors
/// Those of the device.
pub fn occupant_at(
    device: &dyn BlockDevice,
    start: u64,
    len: u64,
) -> io::Result<Option<&'static str>> {
    let found = occupant(len, |offset, buf| device.read_at(start + offset, buf))?;
    Ok(found.filter(|found| found.is_certain).map(|found| found.what))
}

/// Whether the fields beside a short signature have values that fit it. True for long signatures.
fn is_certain(
    what: &str,
    offset: u64,
    size_bytes: u64,
    read_at: &mut impl FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> io::Result<bool> {
    let is_short = matches!(what, EXT | NILFS2 | MINIX | HFS_PLUS | BOOT_SECTOR);
    if !is_short {
        return Ok(true);
    }
    let start = if what == BOOT_SECTOR { 0 } else { SUPERBLOCK_AT };
    // A file that ends inside of these fields is none of these filesystems.
    let mut fields = [0; 520];
    if start + fields.len() as u64 > size_bytes {
        return Ok(false);
    }
    read_at(start, &mut fields)?;
    let u16_at = |at: usize| u16::from_le_bytes([fields[at], fields[at + 1]]);
    let u32_at = |at: usize| u32::from(u16_at(at)) | u32::from(u16_at(at + 2)) << 16;
    Ok(match what {
        // Inodes, blocks, blocks and inodes of a group; and the logarithm of the block size.
        EXT => [0, 4, 32, 40].iter().all(|&at| u32_at(at) > 0) && u32_at(24) <= 6,
        // The revision, and the length of the superblock.
        NILFS2 => u32_at(0) == 2 && (256..=1024).contains(&u16_at(8)),
        // The blocks of the two bitmaps; and zones of one block each.
        MINIX if offset == MINIX_3_AT => u16_at(6) > 0 && u16_at(8) > 0 && u16_at(12) == 0,
        MINIX => u16_at(4) > 0 && u16_at(6) > 0 && u16_at(10) == 0,
        HFS_PLUS => fields[2..4] == [0, 4],
        _ => is_boot_sector(&fields),
    })
}

/// Whether a sector with the mark of a boot sector is one. An image of the Linux kernel has the
/// mark too, and is recognised by `HdrS` behind it.
fn is_boot_sector(fields: &[u8; 520]) -> bool {
    const PARTITIONS: std::ops::Range<usize> = 446..510;
    if fields[514..518] == *b"HdrS" {
        return false;
    }
    let partitions = fields[PARTITIONS].as_chunks::<16>().0;
    let has_states = partitions.iter().all(|partition| matches!(partition[0], 0 | 0x80));
    let is_used = |partition: &[u8; 16]| partition[4] != 0 && partition[12..] != [0; 4];
    let has_jump = fields[0] == 0xe9 || (fields[0] == 0xeb && fields[2] == 0x90);
    let sector_bytes = u16::from_le_bytes([fields[11], fields[12]]);
    (has_states && partitions.iter().any(is_used))
        || (has_jump && matches!(sector_bytes, 512 | 1024 | 2048 | 4096))
}

/// The places of a device of `size_bytes` that a new volume wipes, so that no program recognises
/// what the device held: both ends, where all kinds of volumes have their signatures, and the
/// superblocks of btrfs.
pub fn signature_places(size_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    let end = WIPED_ENDS.min(size_bytes);
    let ends = [0..end, size_bytes.saturating_sub(WIPED_ENDS).max(end)..size_bytes];
    let superblocks = BTRFS_SUPERBLOCKS.map(|start| start..start + BTRFS_SUPERBLOCK_BYTES);
    ends.into_iter().chain(superblocks.into_iter().filter(move |place| place.end <= size_bytes))
}

/// A format of volumes that a disk may be opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeFormat {
    /// btrfs.
    Btrfs,
    /// XFS.
    Xfs,
}

impl VolumeFormat {
    /// The names of all formats, in messages.
    pub const NAMES: &str = "btrfs or XFS";

    const ALL: [Self; 2] = [Self::Btrfs, Self::Xfs];

    /// The name, which is that of its signature too.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Btrfs => "btrfs",
            Self::Xfs => "XFS",
        }
    }

    /// The format whose signature has this name.
    #[must_use]
    pub fn of(signature: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == signature)
    }

    /// The format of the volume on `device`. Without a signature, or if it cannot be read, it is
    /// btrfs: that engine may find copies, and otherwise its error says what is missing.
    #[must_use]
    pub fn on(device: &dyn BlockDevice) -> Self {
        let found = occupant_at(device, 0, device.size_bytes());
        found.ok().flatten().and_then(Self::of).unwrap_or(Self::Btrfs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(bytes: &[u8]) -> Option<Occupant> {
        let read_at = |offset: u64, buf: &mut [u8]| {
            let at = usize::try_from(offset).expect("it is small");
            buf.copy_from_slice(&bytes[at..at + buf.len()]);
            Ok(())
        };
        occupant(bytes.len() as u64, read_at).expect("memory is read")
    }

    /// Text with the two bytes of a signature at the right offset, and an image of the kernel.
    #[test]
    fn what_has_a_signature_by_chance_is_uncertain() {
        for at in [1080, 1030, 1024, 1040, 1048] {
            for bytes in [[0x53, 0xef], *b"44", *b"H+", [0x7f, 0x13], [0x5a, 0x4d]] {
                let mut text = b"one more line of text\n".repeat(1000);
                text[at..at + 2].copy_from_slice(&bytes);
                assert!(found(&text).is_none_or(|found| !found.is_certain), "{bytes:?} at {at}");
            }
        }
        let mut kernel = vec![0; 8192];
        kernel[510..512].copy_from_slice(&[0x55, 0xaa]);
        let uncertain = Occupant { what: BOOT_SECTOR, is_certain: false };
        assert_eq!(found(&kernel), Some(uncertain));
        kernel[450] = 0x83;
        kernel[458..462].fill(1);
        assert_eq!(found(&kernel), Some(Occupant { is_certain: true, ..uncertain }));
        kernel[514..518].copy_from_slice(b"HdrS");
        assert_eq!(found(&kernel), Some(uncertain));
        assert_eq!(found(&kernel[..512]), Some(uncertain));
        assert_eq!(found(b"short"), None);
    }

    /// A long signature counts more than a short one that is found first.
    #[test]
    fn a_certain_signature_is_found_behind_an_uncertain_one() {
        let mut bytes = vec![0; 70_000];
        bytes[1080..1082].copy_from_slice(&[0x53, 0xef]);
        bytes[..6].copy_from_slice(b"LUKS\xba\xbe");
        assert_eq!(found(&bytes), Some(Occupant { what: "LUKS", is_certain: true }));
    }

    /// A file of an XFS volume may hold a whole btrfs volume, and lie where that is looked for.
    #[test]
    fn a_file_of_an_xfs_volume_does_not_make_it_btrfs() {
        let mut bytes = vec![0; 70_000];
        bytes[65_600..65_608].copy_from_slice(&BTRFS_MAGIC);
        assert_eq!(found(&bytes), Some(Occupant { what: "btrfs", is_certain: true }));
        bytes[..4].copy_from_slice(b"XFSB");
        assert_eq!(found(&bytes), Some(Occupant { what: "XFS", is_certain: true }));
    }
}
