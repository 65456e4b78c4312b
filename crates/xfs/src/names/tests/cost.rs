//! What a new file costs: blocks that are copied, and searches. These are counts, so they are the
//! same on every machine.

use super::*;

const FILES: u64 = 10_000;

/// What the counters say in the end, for one of the files.
fn cost_of_one(counted: u64) -> f64 {
    f64::from(u32::try_from(counted).unwrap()) / f64::from(u32::try_from(FILES).unwrap())
}

/// A file in a large directory changes a leaf, a data block and an index block of the directory,
/// two blocks of trees of inodes, and the AGI of 512 bytes. Each is copied once, and the name is
/// looked for once.
#[test]
fn a_new_file_copies_few_blocks_and_is_looked_for_once() {
    let Some(bench) = NameBench::make(512, "") else { return };
    let (names, root) = (bench.names(), bench.root());
    let place = NamePlace { dir: root, name: b"directory" };
    let dir = names.create(place, XfsNewKind::Directory, &new_file(0o755, 1)).unwrap();
    let before = bench.engine.block_work();
    for number in 0..FILES {
        let name = format!("{number:040}");
        let place = NamePlace { dir, name: name.as_bytes() };
        names.create(place, XfsNewKind::Regular, &new_file(0o644, 2)).unwrap();
    }
    let after = bench.engine.block_work();
    let copied = cost_of_one(after.copied_bytes - before.copied_bytes);
    let searches = cost_of_one(after.searches - before.searches);
    assert!(copied <= 21_500.0, "{copied} bytes are copied");
    assert!(searches <= 1.0, "{searches} searches");
}
