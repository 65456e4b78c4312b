//! Superblocks, members, chunks and the ranges that chunks have of members.

use offshoot_vfs::Result;

use super::volume::CheckedVolume;

/// Checks them.
///
/// # Errors
/// When the caller has ended the check.
pub(super) fn check(volume: &CheckedVolume<'_>) -> Result<()> {
    volume.require_going_on()
}
