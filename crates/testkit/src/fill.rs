//! What the kernel writes into a volume of any format before we read it. Random data comes from
//! fixed seeds.

pub mod data;
pub mod names;
pub mod shapes;
pub mod special;
pub mod xattrs;

use std::fs::File;
use std::path::{Path, PathBuf};

/// Makes the directory `name` in `parent`.
#[must_use]
pub fn directory(parent: &Path, name: &str) -> PathBuf {
    let dir = parent.join(name);
    std::fs::create_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    dir
}

/// Writes a whole file.
pub fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// Commits everything that was written to the filesystem of `path`.
pub fn sync(path: &Path) {
    let file = File::open(path).expect("a directory opens");
    rustix::fs::syncfs(file).expect("sync of a mounted volume");
}
