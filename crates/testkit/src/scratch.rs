//! Where tests keep files.

use std::path::Path;

use tempfile::TempDir;

/// A new directory for images: in memory where there is room, because the judges
/// force everything they write to the disk and the tests need none of it to last.
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
