//! Where tests keep files.

use std::path::Path;

use tempfile::TempDir;

/// A new directory for images. It is in memory if there are 4 GiB free, because the judges force
/// everything they write to the disk, and a test does not need its images to last.
#[must_use]
pub fn scratch_dir() -> TempDir {
    const ROOM_BYTES: u64 = 4 << 30;
    let shm = Path::new("/dev/shm");
    let roomy =
        rustix::fs::statvfs(shm).is_ok_and(|stat| stat.f_bavail * stat.f_frsize >= ROOM_BYTES);
    let mut builder = tempfile::Builder::new();
    builder.prefix("offshoot-test-");
    let made = match std::env::var_os("OFFSHOOT_TEST_DIR") {
        Some(dir) => builder.tempdir_in(dir),
        None if roomy => builder.tempdir_in(shm),
        None => builder.tempdir(),
    };
    made.expect("a temporary directory")
}
