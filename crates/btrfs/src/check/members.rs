//! Superblocks, members, chunks and the ranges that chunks have of members.
//!
//! ```text
//! superblock     each member: its primary, copies, backup roots          superblocks
//!   dev_item     the item of the member in the chunk tree                devices
//!   system chunks <─> chunk tree: stripes <─> device tree: extents       chunks
//! ```
//!
//! # What a crash leaves
//!
//! A commit writes the primaries of all members, then the copies, and a crash may come between any
//! two of them. So a member whose primary is one commit behind the newest is
//! [`Superblock`](super::BtrfsFindingCode::Superblock), and nothing else is compared with it. A
//! member that is further behind missed commits, which is
//! [`MissingMember`](super::BtrfsFindingCode::MissingMember). A copy that is older or newer than
//! its primary is [`SuperblockCopy`](super::BtrfsFindingCode::SuperblockCopy). The next commit puts
//! all of that right. An fsync writes the log into primaries only, so superblocks may differ in
//! what they say about the log.

mod chunks;
mod devices;
mod superblocks;

use offshoot_vfs::Result;

use super::volume::CheckedVolume;
use devices::KnownDevices;

/// Checks them.
///
/// # Errors
/// When the caller has ended the check.
pub(super) fn check(volume: &CheckedVolume<'_>) -> Result<()> {
    let devices = KnownDevices::read(volume);
    superblocks::check(volume, &devices);
    devices.check_counters(volume);
    chunks::check(volume, &devices);
    volume.require_going_on()
}
