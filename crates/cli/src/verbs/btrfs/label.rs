//! The label of a volume that is not open.

use std::io;

use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};
use offshoot_device::BlockDevice;

/// The label of the volume that begins at `start`; empty when its first superblock is damaged.
pub(crate) fn label_at(device: &dyn BlockDevice, start: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; SUPERBLOCK_SIZE];
    match device.read_at(start + SUPERBLOCK_OFFSETS[0], &mut bytes) {
        // The disk ends inside the superblock.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(Vec::new()),
        result => result?,
    }
    let superblock = Superblock::parse(&bytes, SUPERBLOCK_OFFSETS[0]);
    Ok(superblock.map(|superblock| superblock.item.label().to_vec()).unwrap_or_default())
}
