//! The label of a volume, by its format.

use std::io;

use offshoot_device::{BlockDevice, VolumeFormat};
use offshoot_xfs_format::superblock::{MOST_SECTOR_BYTES, XfsSuperblock};

use crate::verbs::btrfs::label::label_at;

/// The label of the volume that begins at `start`; empty when its first superblock is damaged.
pub(super) fn label_of(
    format: VolumeFormat,
    device: &dyn BlockDevice,
    start: u64,
) -> io::Result<Vec<u8>> {
    if format == VolumeFormat::Btrfs {
        return label_at(device, start);
    }
    let len = device.size_bytes().saturating_sub(start).min(MOST_SECTOR_BYTES);
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
    device.read_at(start, &mut bytes)?;
    let superblock = XfsSuperblock::parse(&bytes);
    Ok(superblock.map(|superblock| superblock.fields.label().to_vec()).unwrap_or_default())
}
