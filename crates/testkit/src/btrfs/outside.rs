//! The kernel's turn on a volume that we wrote: it mounts it, shows path by path what we show, and
//! changes it.
//!
//! [`change`] and [`require_change`] are the two ends of that: a file which the kernel makes, and
//! which we find behind it.

use std::io::ErrorKind;

use offshoot_vfs::FileSystem;

use crate::btrfs::disks::Mount;
use crate::compare::Compare;

/// What the kernel makes, and writes there.
const KERNELS: &str = "of-the-kernel";
const KERNELS_DATA: [u8; 9000] = [1; 9000];

/// With so much free there is room for that, in bytes.
const ROOM_BYTES: u64 = 64 << 20;

/// The kernel shows what we do.
///
/// # Errors
/// What it shows otherwise.
pub fn require_same(compare: &Compare, ours: &dyn FileSystem, mount: &Mount) -> Result<(), String> {
    let outcome = compare.run(ours, mount.path());
    if outcome.differences.is_empty() {
        Ok(())
    } else {
        Err(format!("the kernel shows: {outcome}"))
    }
}

/// Has the kernel make a file, and says whether there was room for it, as must be where we show
/// [`ROOM_BYTES`].
///
/// # Errors
/// Why it could not.
pub fn change(mount: &Mount, ours: &dyn FileSystem) -> Result<bool, String> {
    let sizes = ours.statfs().map_err(|error| format!("what is free: {error}"))?;
    let may_be_full = sizes.available_bytes < ROOM_BYTES;
    let is_changed = match std::fs::write(mount.path().join(KERNELS), KERNELS_DATA) {
        Err(error) if error.kind() == ErrorKind::StorageFull && may_be_full => false,
        done => done.map(|()| true).map_err(|e| format!("a file of the kernel: {e}"))?,
    };
    mount.sync();
    Ok(is_changed)
}

/// We find the file that the kernel made.
///
/// # Errors
/// What we find.
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
