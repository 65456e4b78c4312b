//! What may be on a device already.
//!
//! A new volume is not made over a device that shows a signature of something that
//! people keep, unless it is forced. The table has what is found on disks and images
//! today: filesystems, volume managers, encryption, swap, partition tables. It is
//! no guarantee, as none of its kind is.

use offshoot_btrfs_format::superblock::{MAGIC, SUPERBLOCK_OFFSETS};
use offshoot_device::BlockDevice;
use offshoot_vfs::{Errno, Error, Result};

/// Bytes at a place, and what has them there.
struct Signature {
    what: &'static str,
    offset: u64,
    bytes: &'static [u8],
}

const fn signature(what: &'static str, offset: u64, bytes: &'static [u8]) -> Signature {
    Signature { what, offset, bytes }
}

/// Where in a superblock of btrfs its magic is.
const BTRFS_MAGIC_AT: u64 = 64;

/// The more telling ones first: a boot sector has the last one too.
const SIGNATURES: [Signature; 39] = [
    signature("btrfs", SUPERBLOCK_OFFSETS[0] + BTRFS_MAGIC_AT, &MAGIC),
    signature("btrfs", SUPERBLOCK_OFFSETS[1] + BTRFS_MAGIC_AT, &MAGIC),
    signature("btrfs", SUPERBLOCK_OFFSETS[2] + BTRFS_MAGIC_AT, &MAGIC),
    signature("ext2, ext3 or ext4", 1024 + 56, &[0x53, 0xef]),
    signature("XFS", 0, b"XFSB"),
    signature("F2FS", 1024, &[0x10, 0x20, 0xf5, 0xf2]),
    signature("bcache or bcachefs", 4096 + 24, &[0xc6, 0x85, 0x73, 0xf6]),
    signature("EROFS", 1024, &[0xe2, 0xe1, 0xf5, 0xe0]),
    signature("SquashFS", 0, b"hsqs"),
    signature("NILFS2", 1024 + 6, &[0x34, 0x34]),
    signature("ReiserFS", 65536 + 52, b"ReIsEr"),
    signature("JFS", 32768, b"JFS1"),
    signature("GFS2", 65536, &[0x01, 0x16, 0x19, 0x70]),
    signature("OCFS2", 2048, b"OCFSV2"),
    signature("OCFS2", 4096, b"OCFSV2"),
    signature("MINIX", 1024 + 16, &[0x7f, 0x13]),
    signature("MINIX", 1024 + 24, &[0x5a, 0x4d]),
    signature("HFS+", 1024, b"H+"),
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
    signature("a partition table or boot sector", 510, &[0x55, 0xaa]),
];

const MD_RAID: [u8; 4] = 0xa92b_4efc_u32.to_le_bytes();

/// Those that are found from the end of a device of `size_bytes`.
fn at_end(size_bytes: u64) -> [Signature; 3] {
    let sector = |offset: u64| offset / 512 * 512;
    [
        signature("an MD RAID", (size_bytes / 65536 * 65536).saturating_sub(65536), &MD_RAID),
        signature("an MD RAID", size_bytes.saturating_sub(8192) / 4096 * 4096, &MD_RAID),
        signature("a GUID partition table", sector(size_bytes.saturating_sub(512)), b"EFI PART"),
    ]
}

/// Refuses a device with something on it.
///
/// # Errors
/// `EEXIST` with the name of what is there.
pub(super) fn refuse_used(device: &dyn BlockDevice) -> Result<()> {
    for Signature { what, offset, bytes } in SIGNATURES.iter().chain(&at_end(device.size_bytes())) {
        let mut found = vec![0; bytes.len()];
        if offset + bytes.len() as u64 > device.size_bytes() {
            continue;
        }
        device
            .read_at(*offset, &mut found)
            .map_err(|e| Error::io(format!("{}: reading at {offset}", device.name()), e))?;
        if found == *bytes {
            return Err(Error::posix(
                Errno::EXIST,
                format!("{} holds {what}, which is only overwritten by force", device.name()),
            ));
        }
    }
    Ok(())
}
