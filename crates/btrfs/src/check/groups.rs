//! Each block group on its own: references, extents, free space, checksums.

use offshoot_vfs::Result;

use super::volume::CheckedVolume;
use super::walk::{Walk, WalkedVolume};

/// What was looked at.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GroupCounts {
    /// Extents of data.
    pub(super) data_extents: u64,
    /// Bytes of data that were compared with checksums.
    pub(super) data_bytes: u64,
}

/// The addresses at which the records of the walk are cut: starts of block groups.
pub(super) fn bounds(_volume: &CheckedVolume<'_>) -> Vec<u64> {
    Vec::new()
}

/// Checks all block groups.
///
/// # Errors
/// When a file of records cannot be read, or the caller has ended the check.
pub(super) fn check(_walk: &Walk<'_, '_>, _walked: &WalkedVolume) -> Result<GroupCounts> {
    Ok(GroupCounts::default())
}
