//! Files that are made in another order each time.

use std::fs;
use std::path::PathBuf;

use offshoot_testkit::random::Random;

/// Makes files in an order that follows from `order`, so that the host lists them in another one.
pub(crate) fn write_shuffled(mut files: Vec<(PathBuf, Vec<u8>)>, order: u64) {
    let mut random = Random::new(order);
    for at in (1..files.len()).rev() {
        let other = usize::try_from(random.below(at as u64 + 1)).expect("a small number");
        files.swap(at, other);
    }
    for (path, data) in files {
        fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        fs::write(path, data).expect("a file");
    }
}
