//! Contents: files of many sizes, compressed by each method and uncompressed.
//!
//! Each directory has one way to store data. The compression method is a property of the directory,
//! which files inherit. `NOCOW` files have neither checksums nor compression.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{IFlags, XattrFlags};

use super::{METHODS, directory, sync};
pub use crate::fill::data::files as plain_files;
use crate::fill::data::files;
use crate::random::Random;

/// Makes files by every method in `root`, a directory for each.
pub fn fill(root: &Path) {
    fill_by(root, &METHODS);
}

/// Makes files with default settings, with each of these methods, and without checksums.
pub fn fill_by(root: &Path, methods: &[&str]) {
    files(&directory(root, "data-plain"));
    for method in methods {
        let dir = directory(root, &format!("data-{method}"));
        set_compression(&dir, method);
        files(&dir);
    }
    let nocow = directory(root, "data-nocow");
    set_nocow(&nocow);
    files(&nocow);
    if !methods.is_empty() {
        changing_method(&directory(root, "data-mixed"), methods);
    }
}

/// Makes one file whose extents are stored by different methods.
fn changing_method(dir: &Path, methods: &[&str]) {
    let path = dir.join("file");
    let file = File::create(&path).expect("a file");
    let mut random = Random::new(0x317);
    for (part, method) in (0..).zip(methods.iter().chain(&["none"]).chain(methods)) {
        set_compression(&path, method);
        file.write_all_at(&random.text(150_000), part * 150_000).expect("a part");
        sync(dir);
    }
}

/// Sets the compression method for everything that is written to `path` from now on.
pub(crate) fn set_compression(path: &Path, method: &str) {
    rustix::fs::setxattr(path, "btrfs.compression", method.as_bytes(), XattrFlags::empty())
        .unwrap_or_else(|error| panic!("compression {method} of {}: {error}", path.display()));
}

/// Sets `NOCOW` on the directory `path`, for new files in it, or on the empty file `path`: their
/// data is written in place and without checksums.
pub(crate) fn set_nocow(path: &Path) {
    let file = File::open(path).expect("it opens");
    let flags = rustix::fs::ioctl_getflags(&file).expect("flags of a file");
    rustix::fs::ioctl_setflags(&file, flags | IFlags::NOCOW).expect("the flag is taken");
}
