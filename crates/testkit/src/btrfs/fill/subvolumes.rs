//! Subvolumes: nested, snapshotted, and what a snapshot keeps of a nested one.

use std::ffi::OsStr;
use std::path::Path;

use super::{directory, sync, write};
use crate::run::run;

/// Subvolumes in subvolumes and snapshots of them.
pub fn fill(dir: &Path) {
    let outer = dir.join("outer");
    create(&outer);
    write(&outer.join("file"), b"in the outer subvolume");
    let between = directory(&outer, "between");
    let inner = between.join("inner");
    create(&inner);
    write(&inner.join("file"), b"in the inner subvolume");
    create(&inner.join("innermost"));
    write(&inner.join("innermost/file"), &vec![b'i'; 10_000]);
    create(&dir.join("empty"));

    // The snapshots show an empty directory where the inner subvolume is.
    snapshot(&outer, &dir.join("snapshot"), false);
    snapshot(&outer, &dir.join("snapshot-read-only"), true);
    write(&outer.join("file"), b"changed after the snapshots");
    write(&outer.join("only here"), b"made after the snapshots");
    std::fs::remove_file(dir.join("snapshot/file")).expect("a file of a snapshot goes");
    write(&dir.join("snapshot/only in the snapshot"), &vec![b's'; 100_000]);
    snapshot(&dir.join("snapshot"), &dir.join("snapshot-of-snapshot"), true);

    // A deleted subvolume, and a moved one: its back reference names the new path.
    create(&dir.join("deleted"));
    write(&dir.join("deleted/file"), b"gone");
    sync(dir);
    run("btrfs", &["subvolume".as_ref(), "delete".as_ref(), dir.join("deleted").as_os_str()]);
    create(&dir.join("before"));
    let moved = directory(dir, "moved");
    std::fs::rename(dir.join("before"), moved.join("after")).expect("a subvolume moves");
}

/// Makes a subvolume at `path`.
pub fn create(path: &Path) {
    run("btrfs", &["subvolume".as_ref(), "create".as_ref(), path.as_os_str()]);
}

/// Makes a snapshot of the subvolume at `source`.
pub fn snapshot(source: &Path, path: &Path, is_read_only: bool) {
    let mut args: Vec<&OsStr> = vec!["subvolume".as_ref(), "snapshot".as_ref()];
    if is_read_only {
        args.push("-r".as_ref());
    }
    args.extend([source.as_os_str(), path.as_os_str()]);
    run("btrfs", &args);
}
