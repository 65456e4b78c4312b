//! Contents: files of many sizes, compressed by each method and uncompressed.
//!
//! Each directory has one way to store data. The compression method is a property of the directory,
//! which files inherit. `NOCOW` files have neither checksums nor compression.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{IFlags, XattrFlags};

use super::{METHODS, directory, sync, write};
use crate::random::Random;

/// Sizes in bytes around every limit that changes how data is stored: nothing, inline data, a
/// sector, a compressed extent, several extents.
const SIZES: [usize; 19] = [
    0, 1, 2, 100, 2047, 2048, 2049, 4000, 4095, 4096, 4097, 8191, 65_537, 131_071, 131_072,
    131_073, 262_149, 524_288, 1_048_577,
];

/// Sizes in bytes at which incompressible data is stored in another way.
const INCOMPRESSIBLE_SIZES: [usize; 6] = [1, 2048, 4097, 131_072, 131_073, 300_001];

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

/// Makes the files of one method, in a directory of any filesystem.
pub fn plain_files(dir: &Path) {
    files(dir);
}

fn files(dir: &Path) {
    let mut random = Random::new(0xda7a);
    for size in SIZES {
        write(&dir.join(format!("text-{size}")), &random.text(size));
    }
    for size in INCOMPRESSIBLE_SIZES {
        write(&dir.join(format!("random-{size}")), &random.bytes(size));
    }
    write(&dir.join("zeros"), &vec![0; 700_001]);
    // Neighbouring extents, some of which compress.
    let mut mixed = Vec::new();
    for part in 0..6 {
        let len = 60_000 + part * 7000;
        mixed.extend(if part % 2 == 0 { random.text(len) } else { random.bytes(len) });
    }
    write(&dir.join("mixed"), &mixed);
    // Long runs with small differences make every kind of match in an LZ stream.
    let mut runs = Vec::new();
    while runs.len() < 200_000 {
        let byte = u8::try_from(random.below(256)).expect("below 256");
        let len = random.below(900);
        runs.extend((0..len).map(|_| byte));
        let again = usize::try_from(random.below(1 + runs.len() as u64)).expect("an index");
        let piece: Vec<u8> = runs[again..].iter().take(300).copied().collect();
        runs.extend(piece);
    }
    write(&dir.join("runs"), &runs);
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
