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
    // As in release builds.
    bench.engine.prove_all(false);
    let before = (bench.engine.block_work(), bench.engine.statistics().early_proofs);
    for number in 0..FILES {
        let name = format!("{number:040}");
        let place = NamePlace { dir, name: name.as_bytes() };
        names.create(place, XfsNewKind::Regular, &new_file(0o644, 2)).unwrap();
    }
    let after = (bench.engine.block_work(), bench.engine.statistics().early_proofs);
    let copied = cost_of_one(after.0.copied_bytes - before.0.copied_bytes);
    let searches = cost_of_one(after.0.searches - before.0.searches);
    let proofs = cost_of_one(after.1 - before.1);
    assert!((15_000.0..=21_500.0).contains(&copied), "{copied} bytes are copied");
    assert!((0.9..=1.0).contains(&searches), "{searches} searches");
    // New data blocks, and leaves that are split: of two files in a hundred or three.
    assert!((0.01..=0.05).contains(&proofs), "{proofs} blocks are proved before the commit");
}
