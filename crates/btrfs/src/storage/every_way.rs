//! Reading data in every way, and not only in the first good one.

use offshoot_btrfs_format::Logical;
use offshoot_vfs::Result;

use super::ways::{ReadWay, WaySelection};
use super::{Storage, StorageTrees};

/// What one way to read a sector gives.
pub(crate) struct WayRead {
    /// The place on a member, or what the sector is computed from.
    pub(crate) source: String,
    /// The bytes; an error when a device failed.
    pub(crate) bytes: Result<Vec<u8>>,
}

impl Storage {
    /// The bytes of the sector of data at `logical` in every way there is, unverified.
    ///
    /// # Errors
    /// When no chunk covers the address.
    pub(crate) fn read_every_way(
        &self,
        trees: &impl StorageTrees,
        logical: Logical,
    ) -> Result<Vec<WayRead>> {
        let sector = self.superblock.sector_size as usize;
        let segments = self.data_segments(trees, logical, sector as u64, WaySelection::All)?;
        let read = |way: &ReadWay| {
            let mut bytes = vec![0; sector];
            let read = self.read_way(way, 0, &mut bytes);
            WayRead { source: self.describe_way(way, 0), bytes: read.map(|()| bytes) }
        };
        Ok(segments.iter().flat_map(|segment| &segment.ways).map(read).collect())
    }
}
