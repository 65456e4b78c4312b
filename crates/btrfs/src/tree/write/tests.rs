//! A tree under random changes holds what a map under the same changes holds.
//!
//! Several threads change one tree. Each has its own keys, which lie between those of the others,
//! so the threads meet in the same leaves. Commits run meanwhile. In the end, and after the volume
//! was opened again, the tree holds what the maps hold, and every block verifies.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use offshoot_btrfs_format::edit::{items_bytes, leaf_capacity, node_capacity};
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_device::BlockDevice;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::Result;

use crate::block::TreeBlock;
use crate::test_volumes::bare;
use crate::tree::{Blocks, TreeRoot, TreeWriter};
use crate::{BtrfsVolume, EngineOptions, Stats};

/// The inode number of the test items. No file of the new volume has it.
const OBJECT: u64 = 1 << 20;
const THREADS: u64 = 4;

type ModelItems = BTreeMap<u64, Vec<u8>>;

fn key(number: u64) -> Key {
    Key::new(OBJECT, ItemType::STRING_ITEM, number)
}

fn open(device: &Arc<dyn BlockDevice>) -> Arc<BtrfsVolume> {
    BtrfsVolume::open_writable(vec![device.clone()], &EngineOptions::default()).expect("it opens")
}

/// A random number of this thread: its remainder by the number of threads is `thread`.
fn own(random: &mut Random, thread: u64) -> u64 {
    random.below(20_000) * THREADS + thread
}

fn step(volume: &BtrfsVolume, random: &mut Random, thread: u64, model: &mut ModelItems, most: u64) {
    let handle = volume.join().expect("it is writable");
    handle
        .change(TreeId::FS, |tree| {
            let first = own(random, thread);
            match random.below(10) {
                8 => edit_batch(&tree, random, thread, model, most)?,
                9 => {
                    // A range of this thread's items is removed at once.
                    let last = first + random.below(2000) * THREADS;
                    let gone: Vec<_> =
                        model.range(first..=last).map(|(number, _)| (key(*number), None)).collect();
                    let applied = tree.apply_batch(&gone)?;
                    assert_eq!(applied.removed, gone.len());
                    model.retain(|number, _| !(first..=last).contains(number));
                }
                0..=2 => {
                    let batch: Vec<_> = (0..=random.below(20))
                        .map(|i| first + i * THREADS)
                        .filter(|number| !model.contains_key(number))
                        .map(|number| {
                            let len = usize::try_from(random.below(most)).expect("small");
                            (number, random.bytes(len))
                        })
                        .collect();
                    let items: Vec<_> =
                        batch.iter().map(|(number, data)| (key(*number), &data[..])).collect();
                    tree.insert_batch(&items)?;
                    model.extend(batch);
                }
                3..=5 => {
                    let at = model.range(first..).next().map_or(first, |(number, _)| *number);
                    let old = model.get(&at).cloned();
                    let len = usize::try_from(random.below(most)).expect("small");
                    let mut new = random.bytes(len);
                    if random.below(8) == 0 {
                        new = old.clone().unwrap_or(new);
                    }
                    let room = new.len().saturating_sub(old.as_ref().map_or(0, Vec::len));
                    tree.modify(key(at), room, |found| {
                        assert_eq!(found, old.as_deref(), "item {at}");
                        Ok(new.clone())
                    })?;
                    model.insert(at, new);
                }
                6 => {
                    let at = model.range(first..).next().map_or(first, |(number, _)| *number);
                    assert_eq!(tree.remove(key(at))?, model.remove(&at).is_some(), "item {at}");
                }
                _ => {
                    // Other threads have items in the range, so this one removes its own items one
                    // by one.
                    let last = first + random.below(400) * THREADS;
                    let gone: Vec<_> =
                        model.range(first..=last).map(|(number, _)| *number).collect();
                    for number in gone {
                        assert!(tree.remove(key(number))?, "item {number}");
                        model.remove(&number);
                    }
                }
            }
            Ok(())
        })
        .expect("the change goes through");
}

/// Puts and removes items, close to each other or all over the tree, as one batch.
fn edit_batch(
    tree: &TreeWriter<'_>,
    random: &mut Random,
    thread: u64,
    model: &mut ModelItems,
    most: u64,
) -> Result<()> {
    let first = own(random, thread);
    let apart = [1, 3, 500][usize::try_from(random.below(3)).expect("small")];
    let removals = random.below(4);
    let (mut edits, mut number) = (BTreeMap::new(), first);
    for _ in 0..random.below(200) {
        let len = usize::try_from(random.below(most)).expect("small");
        let data = (random.below(4) >= removals).then(|| random.bytes(len));
        edits.insert(number, data);
        number += (1 + random.below(apart)) * THREADS;
    }
    let batch: Vec<_> = edits.iter().map(|(n, data)| (key(*n), data.as_deref())).collect();
    let applied = tree.apply_batch(&batch)?;
    assert!(applied.leaves <= batch.len());
    let (mut inserted, mut replaced, mut removed) = (0, 0, 0);
    for (number, data) in edits {
        match (data, model.remove(&number).is_some()) {
            (Some(data), existed) => {
                *(if existed { &mut replaced } else { &mut inserted }) += 1;
                model.insert(number, data);
            }
            (None, existed) => removed += usize::from(existed),
        }
    }
    assert_eq!(
        (applied.inserted, applied.replaced, applied.removed),
        (inserted, replaced, removed)
    );
    Ok(())
}

fn compare(volume: &BtrfsVolume, model: &ModelItems) {
    let root = volume.tree(TreeId::FS).expect("the tree");
    let mut cursor = volume.cursor(root, key(0)).expect("a search");
    for (number, data) in model {
        let (found, bytes) =
            cursor.item_of(OBJECT, ItemType::STRING_ITEM).expect("no item is missing");
        assert_eq!((found, bytes), (key(*number), &data[..]), "item {number}");
        cursor.advance().expect("the next item");
    }
    assert!(cursor.item_of(OBJECT, ItemType::STRING_ITEM).is_none(), "an item too many");
}

fn run(node_size: u32, steps: usize, most: u64) {
    let seed = std::env::var("OFFSHOOT_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    eprintln!("OFFSHOOT_SEED={seed}");
    let device: Arc<dyn BlockDevice> = bare(node_size);
    let volume = open(&device);
    let mut models: Vec<ModelItems> =
        vec![ModelItems::new(); usize::try_from(THREADS).expect("few")];
    for round in 0..3u64 {
        std::thread::scope(|scope| {
            for (thread, model) in (0..).zip(&mut models) {
                let volume = &volume;
                let mut random = Random::new(seed.wrapping_add(round * THREADS + thread));
                scope.spawn(move || {
                    for _ in 0..steps {
                        step(volume, &mut random, thread, model, most);
                    }
                });
            }
            for _ in 0..4 {
                volume.commit().expect("a commit");
            }
        });
        let all: ModelItems = models.iter().flat_map(ModelItems::clone).collect();
        compare(&volume, &all);
        volume.commit().expect("a commit");
        compare(
            &BtrfsVolume::open(vec![device.clone()], &EngineOptions::default()).expect("it opens"),
            &all,
        );
    }
    let all = models.iter().flat_map(|m| m.keys().copied()).count() as u64;
    let handle = volume.join().expect("it is writable");
    let removed = handle
        .change(TreeId::FS, |tree| tree.remove_range(key(0), key(u64::MAX)))
        .expect("the removal goes through");
    drop(handle);
    assert_eq!(removed, all, "a range over many leaves");
    compare(&volume, &ModelItems::new());
    volume.commit().expect("a commit");
    compare(&open(&device), &ModelItems::new());
}

#[test]
fn small_items_in_small_nodes() {
    run(4096, 1500, 120);
}

#[test]
fn large_items_in_small_nodes() {
    run(4096, 800, 3900);
}

#[test]
fn items_of_all_sizes() {
    run(16384, 600, 9000);
}

#[test]
fn items_as_large_as_they_can_be() {
    run(4096, 300, 4096 - 101 - 25 + 1);
}

#[test]
fn small_items_in_the_largest_nodes() {
    run(65536, 800, 200);
}

/// A new volume on which only the test commits.
fn quiet(node_size: u32) -> Arc<BtrfsVolume> {
    let options =
        EngineOptions { commit_interval: None, dirty_bytes: u64::MAX, ..EngineOptions::default() };
    BtrfsVolume::open_writable(vec![bare(node_size)], &options).expect("it opens")
}

/// Inserts items one by one, of 20 to 100 bytes.
fn insert(volume: &BtrfsVolume, numbers: impl Iterator<Item = u64>) {
    let data = [7; 100];
    for number in numbers {
        let handle = volume.join().expect("it is writable");
        let len = 20 + usize::try_from(number * 7 % 81).expect("small");
        let insert = handle.change(TreeId::FS, |tree| tree.insert(key(number), &data[..len]));
        insert.expect("the change goes through");
    }
}

/// Calls with every block of a tree, parents first and then in the order of their keys.
fn visit(volume: &BtrfsVolume, root: TreeRoot, mut call: impl FnMut(&TreeBlock)) {
    let mut left = vec![volume.block(&root.expected()).expect("it verifies")];
    while let Some(block) = left.pop() {
        call(&block);
        let slots = if block.is_leaf() { 0 } else { block.len() };
        let child = |slot| volume.child(&block, slot, root.id).expect("it verifies");
        left.extend((0..slots).rev().map(child));
    }
}

/// The addresses of all tree blocks of a volume, and the generation of its newest tree.
fn all_blocks(volume: &BtrfsVolume) -> (BTreeSet<u64>, u64) {
    let root = volume.tree(TreeId::ROOT).expect("the tree");
    let mut trees = vec![root, volume.tree(TreeId::CHUNK).expect("the tree")];
    let mut cursor = volume.cursor(root, Key::MIN).expect("a search");
    while let Some((key, _)) = cursor.item() {
        if key.item_type == ItemType::ROOT_ITEM {
            trees.push(volume.tree(TreeId(key.objectid)).expect("the tree"));
        }
        cursor.advance().expect("the next item");
    }
    let mut all = BTreeSet::new();
    for tree in &trees {
        visit(volume, *tree, |block| all.extend([block.header().bytenr.get()]));
    }
    (all, trees.iter().map(|tree| tree.generation.0).max().expect("there are some"))
}

/// A committed block is freed only because it was copied. So when no block is copied twice, as many
/// are freed as were copied. This counts the commit with its extents, free space and roots.
#[test]
fn a_block_is_copied_once_in_a_transaction() {
    let seed = seed_of_run();
    let volume = quiet(4096);
    let mut models: Vec<ModelItems> =
        vec![ModelItems::new(); usize::try_from(THREADS).expect("few")];
    let mut copies = Vec::new();
    for round in 0..4u64 {
        let (before, last) = all_blocks(&volume);
        let counted = volume.stats();
        std::thread::scope(|scope| {
            for (thread, model) in (0..).zip(&mut models) {
                let volume = &volume;
                let mut random = Random::new(seed.wrapping_add(round * THREADS + thread));
                scope.spawn(move || {
                    for _ in 0..400 {
                        step(volume, &mut random, thread, model, 200);
                    }
                });
            }
        });
        volume.commit().expect("a commit");
        let (after, newest) = all_blocks(&volume);
        assert_eq!(newest, last + 1, "one transaction");
        copies.push(volume.stats().copies - counted.copies);
        let gone = before.difference(&after).count() as u64;
        assert_eq!(copies.last(), Some(&gone), "round {round}, of {} blocks", before.len());
    }
    assert!(copies[1..].iter().all(|&copies| copies > 100), "{copies:?}");
}

/// Items that are appended one by one leave full leaves behind, and cause no more splits than there
/// are blocks.
#[test]
fn ascending_insertions_leave_full_blocks() {
    for (node_size, items) in [(16384, 20_000), (4096, 40_000)] {
        let volume = quiet(node_size);
        insert(&volume, 0..items);
        let (mut leaves, mut nodes) = (Vec::new(), Vec::new());
        visit(&volume, volume.tree(TreeId::FS).expect("the tree"), |block| {
            if block.is_leaf() {
                let used = items_bytes(block.bytes(), 0, block.len());
                leaves.push(100 * used / leaf_capacity(node_size));
            } else {
                nodes.push(100 * block.len() / node_capacity(node_size));
            }
        });
        let Stats { splits, pushes, .. } = volume.stats();
        eprintln!("{node_size}: {splits} splits, {} leaves, {} nodes", leaves.len(), nodes.len());
        assert!(leaves.len() > 70, "{leaves:?}");
        // The last leaf is being filled, and so are the nodes above it.
        leaves.pop();
        assert!(leaves.iter().all(|&percent| percent >= 95), "{leaves:?}");
        let full = nodes.iter().filter(|&&percent| percent >= 95).count();
        let levels = usize::from(volume.tree(TreeId::FS).expect("the tree").level);
        assert!(full + levels >= nodes.len(), "{nodes:?}");
        assert!(splits <= (leaves.len() + nodes.len()) as u64, "{splits} splits");
        assert_eq!(pushes, 0);
    }
}

/// The data of small files is added after the items of their inodes, or before; in batches or one
/// by one.
#[test]
fn items_between_others_leave_full_blocks() {
    for (node_size, bytes) in [(16384, 1021), (16384, 300), (4096, 300)] {
        for inodes_first in [true, false] {
            for at_once in [64, 1] {
                let leaves = leaves_of_files(node_size, bytes, inodes_first, at_once);
                let mean = leaves.iter().sum::<usize>() / leaves.len();
                let count = leaves.len();
                eprintln!("{node_size}, {bytes}, {inodes_first}, {at_once}: {count}, {mean} %");
                assert!(mean >= if at_once > 1 { 88 } else { 82 }, "{leaves:?}");
            }
        }
    }
}

/// How full leaves are, in percent, after all inodes were put and then all data, or the other way
/// round, `at_once` items with each way down.
fn leaves_of_files(node_size: u32, bytes: usize, inodes_first: bool, at_once: usize) -> Vec<usize> {
    const FILES: usize = 3000;
    let volume = quiet(node_size);
    let kinds = [(ItemType::INODE_ITEM, 160), (ItemType::EXTENT_DATA, bytes)];
    for at in [usize::from(!inodes_first), usize::from(inodes_first)] {
        let (item_type, len) = kinds[at];
        let data = vec![7; len];
        let numbers: Vec<_> = (OBJECT..).take(FILES).collect();
        for batch in numbers.chunks(at_once) {
            let key = |&number| Key::new(number, item_type, 0);
            let edits: Vec<_> = batch.iter().map(|n| (key(n), Some(&data[..]))).collect();
            let handle = volume.join().expect("it is writable");
            let applied = handle.change(TreeId::FS, |tree| tree.apply_batch(&edits));
            assert_eq!(applied.expect("the change goes through").inserted, edits.len());
        }
    }
    let mut leaves = Vec::new();
    visit(&volume, volume.tree(TreeId::FS).expect("the tree"), |block| {
        if block.is_leaf() {
            let used = items_bytes(block.bytes(), 0, block.len());
            leaves.push(100 * used / leaf_capacity(node_size));
        }
    });
    leaves
}

/// Lets another thread wait for a held lock, and releases the lock when a wait is counted.
fn require_wait<G>(
    volume: &BtrfsVolume,
    held: G,
    count: impl Fn(&Stats) -> u64,
    work: impl FnOnce() + Send,
) {
    let before = count(&volume.stats());
    std::thread::scope(|scope| {
        scope.spawn(work);
        let end = Instant::now() + Duration::from_secs(60);
        while count(&volume.stats()) == before && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(held);
    });
    assert_eq!(count(&volume.stats()), before + 1);
}

#[test]
fn locks_are_counted_on_all_levels() {
    let volume = quiet(4096);
    insert(&volume, 0..20_000);
    let root = volume.tree(TreeId::FS).expect("the tree");
    assert_eq!(root.level, 2);
    let handle = volume.join().expect("it is writable");
    let makes_room = handle.change(TreeId::FS, |tree| tree.remove(key(10_002)));
    assert!(makes_room.expect("the change goes through"));
    drop(handle);
    let rewrite = || {
        let handle = volume.join().expect("it is writable");
        let same = |data: Option<&[u8]>| Ok(data.expect("it is there").to_vec());
        let change = handle.change(TreeId::FS, |tree| tree.modify(key(10_001), 0, same));
        change.expect("the change goes through");
    };
    let seek = || drop(volume.cursor(root, key(10_001)).expect("a search"));
    let all = |stats: &Stats| {
        let Stats { locks_taken, lock_waits, shared_locks_taken, shared_lock_waits, .. } = *stats;
        [locks_taken, lock_waits, shared_locks_taken, shared_lock_waits]
    };
    let counted = |work: &dyn Fn()| {
        let before = all(&volume.stats());
        work();
        let after = all(&volume.stats());
        [0, 1, 2, 3].map(|at: usize| after[at] - before[at])
    };
    // The lock of the root, and one for each level.
    assert_eq!(counted(&rewrite), [1, 0, 3, 0]);
    assert_eq!(counted(&seek), [0, 0, 4, 0]);
    let live = volume.live().expect("it is writable");
    let latch = live.recent_block(root.generation, root.logical).expect("it was just made");
    let shared = |stats: &Stats| stats.shared_lock_waits;
    require_wait(&volume, latch.write(), shared, rewrite);
    require_wait(&volume, latch.write(), shared, seek);
    let tree = live.tree(&volume, TreeId::FS).expect("the tree");
    require_wait(&volume, tree.root.write(), shared, rewrite);
    let cursor = volume.cursor(root, key(10_001)).expect("a search");
    let leaf = &cursor.path.last().expect("an item").block;
    let at = Logical(leaf.header().bytenr.get());
    let latch = live.recent_block(root.generation, at).expect("it was just made");
    require_wait(&volume, latch.read(), |stats| stats.lock_waits, rewrite);
}
