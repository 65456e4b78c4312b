use offshoot_testkit::random::{Random, seed_of_run};

use super::*;
use crate::shared::taken_by;
use crate::test_volumes::bare;
use crate::{BtrfsVolume, EngineOptions};

/// Checksums of this many sectors are there in the beginning, with gaps.
const SECTORS: u64 = 40_000;
const SECTOR: u64 = 4096;
/// Where the first of them is. No data of the new volume is there.
const BASE: u64 = 1 << 30;

fn open() -> std::sync::Arc<BtrfsVolume> {
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    BtrfsVolume::open_writable(vec![bare(4096)], &options).expect("it opens")
}

fn insert(volume: &BtrfsVolume, items: &[(Key, Vec<u8>)]) {
    let handle = volume.join().expect("it is writable");
    let edits: Vec<_> = items.iter().map(|(key, data)| (*key, Some(&data[..]))).collect();
    handle.change(TreeId::CSUM, |tree| tree.apply_batch(&edits)).expect("it goes through");
}

fn all(volume: &BtrfsVolume) -> Vec<(Key, Vec<u8>)> {
    let root = volume.tree(TreeId::CSUM).expect("the tree");
    let mut cursor = volume.cursor(root, sums_key(0)).expect("a search");
    let mut all = Vec::new();
    while let Some((key, data)) = cursor.item() {
        all.push((key, data.to_vec()));
        cursor.advance().expect("the next item");
    }
    all
}

/// Random ranges lose their checksums at once in one volume, and one by one in another.
#[test]
fn many_ranges_lose_the_same_checksums_as_one_by_one() {
    let mut random = Random::new(seed_of_run());
    let mut items = Vec::new();
    let mut at = 0;
    while at < SECTORS {
        let sectors = 1 + random.below(600);
        let len = usize::try_from(sectors * 4).expect("small");
        items.push((sums_key(BASE + at * SECTOR), random.bytes(len)[..len].to_vec()));
        at += sectors + random.below(3) * random.below(50);
    }
    for round in 0..8 {
        let mut ranges = Vec::new();
        let mut at = random.below(20);
        // Few large ones and many small ones, some of them adjacent.
        let most = [3, 30, 300, 3000][round % 4];
        while at < SECTORS + 100 {
            let sectors = 1 + random.below(most);
            ranges.push(BASE + at * SECTOR..BASE + (at + sectors) * SECTOR);
            at += sectors + random.below(3) * random.below(most);
        }
        let volumes = [open(), open()];
        for volume in &volumes {
            insert(volume, &items);
        }
        let [together, singly] = &volumes;
        let handle = together.join().expect("it is writable");
        remove_checksums(&handle, &ranges).expect("they go");
        drop(handle);
        let handle = singly.join().expect("it is writable");
        for range in &ranges {
            let (logical, len) = (Logical(range.start), range.end - range.start);
            remove_checksums_beside_writers(&handle, logical, len).expect("they go");
        }
        drop(handle);
        let [together, singly] = volumes.each_ref().map(|volume| all(volume));
        assert!(together == singly, "round {round}");
        assert!(!together.is_empty() && together != items, "round {round}");
    }
}

/// Before the mend, readers waited until the checksums of a whole range were gone, however many
/// items those were.
#[test]
fn one_large_range_is_removed_in_several_batches() {
    let volume = open();
    let count = 4 * EDITS as u64 - 24;
    let items: Vec<_> = (0..count).map(|at| (sums_key(BASE + at * SECTOR), vec![7; 4])).collect();
    insert(&volume, &items);
    let handle = volume.join().expect("it is writable");
    let ranges = [BASE..BASE + 500 * SECTOR, BASE + 500 * SECTOR..BASE + count * SECTOR];
    let (taken, removed) = taken_by(|| remove_checksums(&handle, &ranges));
    removed.expect("they go");
    drop(handle);
    assert_eq!(taken.get("checksums"), Some(&4));
    assert!(all(&volume).is_empty());
}
