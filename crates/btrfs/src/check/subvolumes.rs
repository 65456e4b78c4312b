//! Subvolumes, their names and UUIDs, and their removal.

use offshoot_vfs::Result;

use super::volume::CheckedVolume;
use super::walk::WalkedVolume;

/// Checks them.
///
/// # Errors
/// When the caller has ended the check.
pub(super) fn check(volume: &CheckedVolume<'_>, _walked: &WalkedVolume) -> Result<()> {
    volume.require_going_on()
}
