//! What leaves look like after batches, and what is counted.

use std::sync::Arc;

use offshoot_btrfs_format::edit::{ITEM_SIZE, items_bytes, leaf_capacity};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::BlockDevice;

use super::{Applied, ItemEdit};
use crate::block::TreeBlock;
use crate::test_volumes::in_memory;
use crate::{OpenOptions, Volume};

const NODE_SIZE: u32 = 16384;
/// The inode number that the items pretend to be about: no file of the new volume has it.
const OBJECT: u64 = 1 << 20;
const DATA: [u8; 75] = [7; 75];
/// Items of this size that a leaf holds.
const LEAF_ITEMS: usize = leaf_capacity(NODE_SIZE) / (DATA.len() + ITEM_SIZE);

fn key(number: u64) -> Key {
    Key::new(OBJECT, ItemType::STRING_ITEM, number)
}

struct Tree {
    device: Arc<dyn BlockDevice>,
    volume: Arc<Volume>,
}

impl Tree {
    fn new() -> Self {
        let device: Arc<dyn BlockDevice> = in_memory(NODE_SIZE);
        let options = OpenOptions { commit_interval: None, ..OpenOptions::default() };
        let volume = Volume::open_writable(vec![device.clone()], &options).expect("it opens");
        Self { device, volume }
    }

    fn apply(&self, edits: &[ItemEdit<'_>]) -> Applied {
        let handle = self.volume.join().expect("it is writable");
        handle.change(TreeId::FS, |tree| tree.apply_batch(edits)).expect("it goes through")
    }

    fn put(&self, numbers: impl Iterator<Item = u64>) -> Applied {
        self.apply(&numbers.map(|number| (key(number), Some(&DATA[..]))).collect::<Vec<_>>())
    }

    fn remove(&self, numbers: impl Iterator<Item = u64>) -> Applied {
        self.apply(&numbers.map(|number| (key(number), None)).collect::<Vec<_>>())
    }

    /// The bytes that items take in each leaf.
    fn leaves(&self) -> Vec<usize> {
        let root = self.volume.tree(TreeId::FS).expect("the tree");
        let mut level = vec![self.volume.block(&root.expected()).expect("it verifies")];
        while !level[0].is_leaf() {
            let below = |node: &Arc<TreeBlock>| {
                let child = |slot| self.volume.child(node, slot, TreeId::FS).expect("it verifies");
                (0..node.len()).map(child).collect::<Vec<_>>()
            };
            level = level.iter().flat_map(below).collect();
        }
        level.iter().map(|leaf| items_bytes(leaf.bytes(), 0, leaf.len())).collect()
    }
}

/// A run behind everything else fills leaf after leaf, and goes down once for many of them.
#[test]
fn a_run_at_the_right_edge_leaves_full_leaves() {
    let tree = Tree::new();
    let count = 200 * LEAF_ITEMS;
    let applied = tree.put(0..count as u64);
    assert_eq!((applied.inserted, applied.replaced, applied.removed), (count, 0, 0));
    assert!(applied.leaves <= 20, "{applied:?}");
    let leaves = tree.leaves();
    let full = leaf_capacity(NODE_SIZE) - (DATA.len() + ITEM_SIZE);
    let whole = leaves.iter().filter(|&&used| used > full).count();
    assert!(whole + 2 >= leaves.len() && leaves.len() <= 202, "{leaves:?}");
}

/// A batch between the items of a leaf makes leaves that are about equal.
#[test]
fn a_run_between_others_leaves_equal_leaves() {
    let tree = Tree::new();
    let begin = 3 * LEAF_ITEMS as u64;
    tree.put((0..begin).map(|number| number * 100_000));
    let before = tree.leaves().len();
    let between = begin / 2 * 100_000;
    tree.put((between + 1..).take(5 * LEAF_ITEMS / 2));
    let leaves = tree.leaves();
    assert!((before + 2..=before + 4).contains(&leaves.len()), "{leaves:?}");
    // The last one has what was left of the run at the right edge.
    let (_, equal) = leaves.split_last().expect("there are leaves");
    assert!(equal.iter().all(|&used| used > leaf_capacity(NODE_SIZE) * 3 / 4), "{leaves:?}");
}

/// One visit to a leaf is enough for all that belongs there, whatever becomes of it.
#[test]
fn a_leaf_is_visited_once() {
    let tree = Tree::new();
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

/// Leaves that a batch empties are freed, and what is removed twice is not counted twice.
#[test]
fn a_batch_removes_everything() {
    let tree = Tree::new();
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

/// What grows in one batch with what goes: a leaf of which nothing is left takes the new items.
#[test]
fn what_goes_makes_room_for_what_comes() {
    let tree = Tree::new();
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

/// A new item as large as an item can be, in the middle of a leaf of two that are nearly as large together.
#[test]
fn the_largest_item_stands_alone() {
    let tree = Tree::new();
    let largest = vec![1; leaf_capacity(NODE_SIZE) - ITEM_SIZE];
    let half = vec![2; leaf_capacity(NODE_SIZE) / 2 - ITEM_SIZE];
    tree.apply(&[(key(10), Some(&half)), (key(20), Some(&half))]);
    tree.apply(&[(key(15), Some(&largest))]);
    tree.apply(&[(key(12), Some(&largest)), (key(13), Some(&largest)), (key(25), Some(&[]))]);
    tree.volume.commit().expect("a commit");
    let volume = Volume::open(vec![tree.device.clone()], &OpenOptions::default());
    let tree = Tree { volume: volume.expect("it opens"), ..tree };
    assert!(tree.leaves().len() >= 5);
}
