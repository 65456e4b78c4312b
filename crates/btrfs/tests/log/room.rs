//! Short logs of large changes: one item of a log can remove thousands of items of the subvolume.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use offshoot_testkit::btrfs::judges;

use crate::cut::{LogShape, PLAIN, cut_with_log, judge, shell};

fn path_of(dir: &Path, number: usize) -> std::path::PathBuf {
    dir.join(format!("{number:0186}"))
}

/// The trees have holes, and one range of indexes removes thousands of names all over them.
#[test]
fn one_range_that_removes_thousands_of_names() {
    let Some(judges) = judges::require() else { return };
    let shape = LogShape { mkfs: "-n 4k -m single", ..PLAIN };
    let before = |root: &Path| {
        for dir in ["d", "e"] {
            fs::create_dir(root.join(dir)).expect("a directory");
        }
        let [kept, gone] = ["d", "e"].map(|dir| root.join(dir));
        for number in 0..16_000 {
            File::create(path_of(&kept, number)).expect("a file");
            File::create(path_of(&gone, number)).expect("a file");
        }
        shell(root, "sync -f .");
        // Holes all over the trees, and nowhere a large one.
        for number in (0..16_000).filter(|number| number % 2000 < 300) {
            fs::remove_file(path_of(&gone, number)).expect("a file");
        }
    };
    let after = |root: &Path| {
        let dir = root.join("d");
        for number in 5000..8000 {
            fs::remove_file(path_of(&dir, number)).expect("a file");
        }
        File::open(dir).and_then(|dir| dir.sync_all()).expect("an fsync");
    };
    let cut = cut_with_log(&judges, shape, before, after);
    judge(&judges, &cut, "one range", 20_000);
}

/// One inode item says that a file with thousands of extents is short now.
#[test]
fn a_truncation_that_removes_thousands_of_extents() {
    let Some(judges) = judges::require() else { return };
    let before = |root: &Path| {
        let [kept, gone] = ["kept", "gone"].map(|name| File::create(root.join(name)).unwrap());
        // Every other sector, so that no two extents merge.
        for number in 0..8000 {
            kept.write_all_at(&[1; 4096], number * 8192).expect("data");
            gone.write_all_at(&[1; 4096], number * 8192).expect("data");
        }
        shell(root, "sync -f .; rm gone");
    };
    let after = |root: &Path| {
        let file = File::options().write(true).open(root.join("kept")).expect("a file");
        file.set_len(8192).and_then(|()| file.sync_all()).expect("an fsync");
    };
    let cut = cut_with_log(&judges, PLAIN, before, after);
    judge(&judges, &cut, "a truncation", 1);
}
