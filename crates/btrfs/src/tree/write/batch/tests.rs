//! The leaves after batches, and the counters.

use std::collections::BTreeMap;
use std::sync::Arc;

use offshoot_btrfs_format::edit::{ITEM_SIZE, items_bytes, leaf_capacity};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::BlockDevice;
use offshoot_testkit::random::{Random, seed_of_run};

use super::{AppliedEdits, ItemEdit};
use crate::block::TreeBlock;
use crate::test_volumes::bare;
use crate::tree::Blocks;
use crate::{BtrfsVolume, EngineOptions};

const NODE_SIZE: u32 = 16384;
/// The inode number of the test items. No file of the new volume has it.
const OBJECT: u64 = 1 << 20;
const DATA: [u8; 75] = [7; 75];
/// How many items of this size a leaf holds.
const LEAF_ITEMS: usize = leaf_capacity(NODE_SIZE) / (DATA.len() + ITEM_SIZE);

fn key(number: u64) -> Key {
    Key::new(OBJECT, ItemType::STRING_ITEM, number)
}

struct BatchTree {
    device: Arc<dyn BlockDevice>,
    volume: Arc<BtrfsVolume>,
}

impl BatchTree {
    fn new() -> Self {
        let device: Arc<dyn BlockDevice> = bare(NODE_SIZE);
        let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
        let volume = BtrfsVolume::open_writable(vec![device.clone()], &options).expect("it opens");
        Self { device, volume }
    }

    fn apply(&self, edits: &[ItemEdit<'_>]) -> AppliedEdits {
        let handle = self.volume.join().expect("it is writable");
        handle.change(TreeId::FS, |tree| tree.apply_batch(edits)).expect("it goes through")
    }

    fn put(&self, numbers: impl Iterator<Item = u64>) -> AppliedEdits {
        self.apply(&numbers.map(|number| (key(number), Some(&DATA[..]))).collect::<Vec<_>>())
    }

    fn remove(&self, numbers: impl Iterator<Item = u64>) -> AppliedEdits {
        self.apply(&numbers.map(|number| (key(number), None)).collect::<Vec<_>>())
    }

    fn put_all(&self, items: &[(Key, Option<Vec<u8>>)]) -> (usize, usize, usize) {
        let edits: Vec<_> = items.iter().map(|(key, data)| (*key, data.as_deref())).collect();
        let applied = self.apply(&edits);
        (applied.inserted, applied.replaced, applied.removed)
    }

    /// The items of the pretended inode.
    fn items(&self) -> Vec<(Key, Option<Vec<u8>>)> {
        let leaves = self.blocks();
        let items = leaves.iter().flat_map(|leaf| {
            (0..leaf.len()).map(|at| (leaf.key(at), Some(leaf.data(at).to_vec())))
        });
        items.filter(|(key, _)| key.objectid == OBJECT).collect()
    }

    /// The bytes that items take in each leaf.
    fn leaves(&self) -> Vec<usize> {
        let leaves = self.blocks();
        leaves.iter().map(|leaf| items_bytes(leaf.bytes(), 0, leaf.len())).collect()
    }

    /// All leaves.
    fn blocks(&self) -> Vec<Arc<TreeBlock>> {
        let root = self.volume.tree(TreeId::FS).expect("the tree");
        let mut level = vec![self.volume.block(&root.expected()).expect("it verifies")];
        while !level[0].is_leaf() {
            let below = |node: &Arc<TreeBlock>| {
                let child = |slot| self.volume.child(node, slot, TreeId::FS).expect("it verifies");
                (0..node.len()).map(child).collect::<Vec<_>>()
            };
            level = level.iter().flat_map(below).collect();
        }
        level
    }
}

/// A run behind all other items fills leaf after leaf, and goes down once for many leaves.
#[test]
fn a_run_at_the_right_edge_leaves_full_leaves() {
    let tree = BatchTree::new();
    let count = 200 * LEAF_ITEMS;
    let applied = tree.put(0..count as u64);
    assert_eq!((applied.inserted, applied.replaced, applied.removed), (count, 0, 0));
    assert!(applied.leaves <= 20, "{applied:?}");
    let leaves = tree.leaves();
    let full = leaf_capacity(NODE_SIZE) - (DATA.len() + ITEM_SIZE);
    let whole = leaves.iter().filter(|&&used| used > full).count();
    assert!(whole + 2 >= leaves.len() && leaves.len() <= 202, "{leaves:?}");
}

/// Putting runs of another tree's leaves has the same result as putting their items one by one,
/// wherever they come between existing items, and whichever of these they replace. When a whole
/// leaf goes behind all items, its headers and data are copied once.
#[test]
fn runs_of_a_leaf_are_its_items() {
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    for _ in 0..20 {
        let [source, by_run, by_item] = [(); 3].map(|()| BatchTree::new());
        let mut model = BTreeMap::new();
        let sizes: Vec<_> = (0..4000).map(|_| random.below(200)).collect();
        let value = |number: u64| {
            let size = usize::try_from(sizes[usize::try_from(number).expect("small")]);
            vec![number.to_le_bytes()[0]; size.expect("small")]
        };
        let edit = |number| (key(number), Some(value(number)));
        let all: Vec<_> = (0..4000).filter(|_| random.below(3) > 0).map(edit).collect();
        source.put_all(&all);
        // Some of the same keys, with other data.
        let before: Vec<_> = (0..4000)
            .filter(|_| random.below(40) == 0)
            .map(|n| (key(n), Some(vec![1; 50])))
            .collect();
        for tree in [&by_run, &by_item] {
            tree.put_all(&before);
        }
        model.extend(before);
        for leaf in source.blocks() {
            let (one, other) = (random.below(leaf.len() as u64), random.below(leaf.len() as u64));
            let [from, to] =
                [one.min(other), one.max(other)].map(|at| usize::try_from(at).expect("small"));
            let items = (from..to).filter(|&at| leaf.key(at).objectid == OBJECT);
            let items: Vec<_> =
                items.map(|at| (leaf.key(at), Some(leaf.data(at).to_vec()))).collect();
            let run = to - items.len()..to;
            let handle = by_run.volume.join().expect("it is writable");
            let applied =
                handle.change(TreeId::FS, |tree| tree.put_run(&leaf, run)).expect("a run");
            drop(handle);
            assert_eq!(
                (applied.inserted, applied.replaced, applied.removed),
                by_item.put_all(&items),
                "seed {seed}"
            );
            model.extend(items);
        }
        let model: Vec<_> = model.into_iter().collect();
        for tree in [by_run, by_item] {
            assert!(tree.items() == model, "seed {seed}");
            tree.volume.commit().expect("every block verifies");
        }
    }
}

/// A batch between the items of a leaf makes full leaves, except the one behind it.
#[test]
fn a_run_between_others_leaves_full_leaves() {
    let tree = BatchTree::new();
    let begin = 3 * LEAF_ITEMS as u64;
    tree.put((0..begin).map(|number| number * 100_000));
    let before = tree.leaves().len();
    let between = begin / 2 * 100_000;
    tree.put((between + 1..).take(5 * LEAF_ITEMS / 2));
    let leaves = tree.leaves();
    assert!((before + 2..=before + 4).contains(&leaves.len()), "{leaves:?}");
    // The last leaf has the rest of the first run, at the right edge.
    let is_full = |used: &&usize| **used > leaf_capacity(NODE_SIZE) * 3 / 4;
    assert!(leaves.iter().filter(is_full).count() + 2 >= leaves.len(), "{leaves:?}");
}

/// One visit to a leaf applies all edits that belong there.
#[test]
fn a_leaf_is_visited_once() {
    let tree = BatchTree::new();
    tree.put((0..10 * LEAF_ITEMS as u64).map(|number| number * 4));
    let leaves = tree.leaves().len();
    let every = |n: u64| (0..10 * LEAF_ITEMS as u64).filter(move |number| number % n == 0);
    let before = tree.volume.stats();
    assert!(tree.put(every(10).map(|number| number * 4)).leaves <= leaves);
    let applied = tree.remove(every(9).map(|number| number * 4));
    assert!(applied.leaves <= leaves, "{applied:?}");
    assert_eq!(applied.removed, every(9).count());
    let stats = tree.volume.stats();
    assert_eq!(
        stats.items_removed_in_batches - before.items_removed_in_batches,
        applied.removed as u64
    );
    assert_eq!(stats.items_inserted_in_batches, before.items_inserted_in_batches);
    assert!(stats.batches - before.batches <= 2 * leaves as u64);
}

/// Leaves that a batch empties are freed. An item that is removed twice counts once.
#[test]
fn a_batch_removes_everything() {
    let tree = BatchTree::new();
    let all = 0..40 * LEAF_ITEMS as u64;
    let before = tree.leaves().len();
    tree.put(all.clone());
    tree.volume.commit().expect("a commit");
    let applied = tree.remove(all.clone());
    assert_eq!(applied.removed, 40 * LEAF_ITEMS);
    assert!(tree.leaves().len() <= before + 1, "{:?}", tree.leaves());
    assert_eq!(tree.remove(all).removed, 0);
    tree.volume.commit().expect("a commit");
}

/// One batch removes all items of a leaf and adds new ones: the leaf takes the new items.
#[test]
fn what_goes_makes_room_for_what_comes() {
    let tree = BatchTree::new();
    let count = LEAF_ITEMS as u64 / 2;
    tree.put((0..count).map(|number| number * 2));
    let splits = tree.volume.stats().splits;
    let edits: Vec<_> = (0..2 * count)
        .map(|number| (key(number), (number % 2 == 1).then_some(&DATA[..])))
        .collect();
    let applied = tree.apply(&edits);
    assert_eq!(
        (applied.inserted, applied.removed),
        (usize::try_from(count).expect("small"), usize::try_from(count).expect("small"))
    );
    assert_eq!(tree.volume.stats().splits, splits);
}

/// A new item of the greatest size goes between the two items of a leaf, which together are nearly
/// as large.
#[test]
fn the_largest_item_stands_alone() {
    let tree = BatchTree::new();
    let largest = vec![1; leaf_capacity(NODE_SIZE) - ITEM_SIZE];
    let half = vec![2; leaf_capacity(NODE_SIZE) / 2 - ITEM_SIZE];
    tree.apply(&[(key(10), Some(&half)), (key(20), Some(&half))]);
    tree.apply(&[(key(15), Some(&largest))]);
    tree.apply(&[(key(12), Some(&largest)), (key(13), Some(&largest)), (key(25), Some(&[]))]);
    tree.volume.commit().expect("a commit");
    let volume = BtrfsVolume::open(vec![tree.device.clone()], &EngineOptions::default());
    let tree = BatchTree { volume: volume.expect("it opens"), ..tree };
    assert!(tree.leaves().len() >= 5);
}

/// Before the mend, a thread that removed the items of a directory in order, the first of a leaf
/// every time, took the root of the tree exclusively.
#[test]
fn the_first_item_of_a_leaf_goes_while_others_hold_the_root() {
    // A leaf below the root, and one below a node.
    for leaves in [20, 600] {
        let tree = Arc::new(BatchTree::new());
        let count = leaves * LEAF_ITEMS;
        tree.put(0..count as u64);
        let root = tree.volume.tree(TreeId::FS).expect("the tree");
        let mut node = tree.volume.block(&root.expected()).expect("it verifies");
        while node.header().level > 1 {
            let last = node.len() - 1;
            node = tree.volume.child(&node, last, TreeId::FS).expect("it verifies");
        }
        let first = node.key(node.len() / 2);
        let live = tree.volume.live().expect("it is writable");
        let held = live.tree(&tree.volume, TreeId::FS).expect("the tree");
        let held = held.root.read();
        let (send, receive) = std::sync::mpsc::channel();
        let remover = tree.clone();
        std::thread::spawn(move || send.send(remover.remove(std::iter::once(first.offset))));
        let applied = receive.recv_timeout(std::time::Duration::from_secs(60));
        drop(held);
        assert_eq!(applied.map(|applied| applied.removed), Ok(1), "{leaves} leaves");
        let rest = (0..count as u64).filter(|&number| number != first.offset);
        assert_eq!(tree.put(rest).replaced, count - 1, "the others are where they are looked for");
        tree.volume.commit().expect("every block verifies");
    }
}
