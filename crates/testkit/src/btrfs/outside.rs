//! The kernel's turn on a volume that we wrote: it mounts the volume, must show path by path what
//! we show, and changes the volume.
//!
//! [`change`] and [`require_change`] are the two ends of that change: the kernel makes a file, and
//! we must find it.

use std::io::ErrorKind;

use offshoot_vfs::FileSystem;

use crate::btrfs::disks::MountedMembers;
use crate::compare::Compare;

/// The name and the contents of the file that the kernel makes.
const KERNELS: &str = "of-the-kernel";
const KERNELS_DATA: [u8; 9000] = [1; 9000];

/// If this many bytes are free, the kernel must find room for that file.
const ROOM_BYTES: u64 = 64 << 20;

/// Checks that the kernel shows what we show.
///
/// # Errors
/// The differences.
pub fn require_same(
    compare: &Compare,
    ours: &dyn FileSystem,
    mount: &MountedMembers,
) -> Result<(), String> {
    let outcome = compare.run(ours, mount.path());
    if outcome.differences.is_empty() {
        Ok(())
    } else {
        Err(format!("the kernel shows: {outcome}"))
    }
}

/// Lets the kernel make a file. Returns whether there was room for it. If we show at least
/// [`ROOM_BYTES`] of free space, there must be room.
///
/// # Errors
/// Why the kernel could not make it.
pub fn change(mount: &MountedMembers, ours: &dyn FileSystem) -> Result<bool, String> {
    let sizes = ours.statfs().map_err(|error| format!("what is free: {error}"))?;
    let may_be_full = sizes.available_bytes < ROOM_BYTES;
    let is_changed = match std::fs::write(mount.path().join(KERNELS), KERNELS_DATA) {
        Err(error) if error.kind() == ErrorKind::StorageFull && may_be_full => false,
        done => done.map(|()| true).map_err(|e| format!("a file of the kernel: {e}"))?,
    };
    mount.sync();
    Ok(is_changed)
}

/// Checks that we find the file that the kernel made.
///
/// # Errors
/// What we find instead.
pub fn require_change(ours: &dyn FileSystem) -> Result<(), String> {
    let mut found = vec![0; KERNELS_DATA.len() + 1];
    let file = ours.lookup(ours.root(), KERNELS.as_bytes());
    let len = file.and_then(|file| ours.read(file, 0, &mut found));
    let len = len.map_err(|error| format!("the file of the kernel: {error}"))?;
    if found[..len] == KERNELS_DATA {
        Ok(())
    } else {
        Err("the file of the kernel holds something else".to_owned())
    }
}
