//! What the kernel writes into a volume before we read it.
//!
//! [`everything`] fills a mounted volume with all the shapes that a reader has to understand. Each
//! family of shapes has a directory:
//!
//! | directory | holds |
//! |---|---|
//! | `names` | names of every byte value and of 255 bytes, hash collisions |
//! | `links` | more hard links than one reference item holds |
//! | `data-*` | contents of many sizes, with and without compression and checksums |
//! | `shapes` | holes, preallocation, clones, overwritten and truncated extents |
//! | `special` | device nodes, fifos, sockets, symbolic links, owners and modes |
//! | `times` | before 1970, after 2446, nanoseconds |
//! | `xattrs` | every namespace, access control lists, capabilities, large values |
//! | `deep` | a path longer than `PATH_MAX` |
//! | `volumes` | subvolumes in subvolumes, snapshots, and what they leave behind |
//!
//! [`handful`] makes a little of everything. [`crowd`] makes many entries, for high trees. All
//! random data comes from fixed seeds.

pub mod data;
pub mod handful;
pub mod shapes;
pub mod subvolumes;

use std::fs::File;
use std::io::Write;
use std::path::Path;

pub use crate::fill::{directory, names, special, sync, write, xattrs};

/// The compression methods.
pub const METHODS: [&str; 3] = ["zlib", "lzo", "zstd"];

/// Fills the volume mounted at `root` with one of everything.
pub fn everything(root: &Path) {
    everything_by(root, &METHODS);
}

/// The same for a mount whose options forbid compression.
pub fn everything_uncompressed(root: &Path) {
    everything_by(root, &[]);
}

fn everything_by(root: &Path, methods: &[&str]) {
    names::fill(&directory(root, "names"));
    names::hard_links(&directory(root, "links"));
    data::fill_by(root, methods);
    shapes::fill_by(&directory(root, "shapes"), methods);
    special::fill(&directory(root, "special"));
    special::times(&directory(root, "times"));
    xattrs::fill(&directory(root, "xattrs"));
    names::deep(&directory(root, "deep"));
    subvolumes::fill(&directory(root, "volumes"));
    sync(root);
}

/// The least number of names that [`everything`] makes. A comparison uses it to prove that it saw
/// them.
pub const EVERYTHING_AT_LEAST: u64 = 1000;

/// A directory of `entries` files with few bytes each.
pub fn crowd(root: &Path, entries: u32) {
    let dir = directory(root, "crowd");
    for number in 0..entries {
        let path = dir.join(format!("entry-{number:06}"));
        let mut file = File::create(path).expect("a file in a large directory");
        if number % 8 == 0 {
            writeln!(file, "{number}").expect("a few bytes");
        }
    }
    sync(root);
}

/// Makes files of 64 MiB with `mib` MiB in total: more than one chunk holds.
pub fn bulk(root: &Path, mib: u64) {
    let mut piece = crate::random::Random::new(0xb01c).bytes(1 << 20);
    let mut file = None;
    for number in 0..mib {
        if number % 64 == 0 {
            let path = root.join(format!("bulk-{number}"));
            file = Some(File::create(path).expect("a file"));
        }
        // Every piece is different, so that a comparison notices exchanged pieces.
        piece[..8].copy_from_slice(&number.to_le_bytes());
        file.as_mut().expect("opened above").write_all(&piece).expect("room for it");
    }
    sync(root);
}

/// Makes subvolumes with several thousand files each, so that the kernel needs time to drop them.
pub fn subvolumes_of_a_crowd(root: &Path) {
    for name in ["one", "two", "three", "kept"] {
        let path = root.join(name);
        subvolumes::create(&path);
        crowd(&path, if name == "kept" { 30 } else { 8000 });
    }
}
