//! Reservations of items: by the leaf, and none when no item is queued.

use super::super::node::{ItemTotals, QueuedItems, Releases};
use super::*;
use crate::space::OPERATION_ITEMS;

pub(super) fn index(offset: u64) -> Key {
    Key::new(257, ItemType::DIR_INDEX, offset)
}

#[test]
fn new_indexes_are_paid_by_the_leaf() {
    // Ten items of a hundred bytes, headers included, fill a leaf.
    let mut items = QueuedItems::default();
    let units = |items: &QueuedItems| items.load(false).units;
    for number in 0..30 {
        items.put(index(number), [0; 75], false, 1000);
        assert_eq!(units(&items), i64::try_from(number).unwrap() / 10 + 1, "{number}");
        assert_eq!(items.load(true).units, i64::try_from(number).unwrap() + 1);
    }
    // With several leaves it is unknown to which one they were counted.
    for number in 0..29 {
        assert!(items.remove(index(number)), "it never came to the tree");
        assert_eq!(units(&items), 3);
    }
    assert!(items.remove(index(29)));
    assert_eq!(items.load(false), ItemTotals::default());
    // With one leaf, a removal leaves room.
    for number in 0..100 {
        items.put(index(number), [0; 75], false, 1000);
        assert!(items.remove(index(number)));
        items.put(index(1000 + number % 5), [0; 75], false, 1000);
        assert_eq!(units(&items), 1, "{number}");
    }
}

#[test]
fn what_the_tree_has_is_paid_one_by_one() {
    let mut items = QueuedItems::default();
    for number in 0..10 {
        assert!(!items.remove(index(number)), "the tree has it");
    }
    assert_eq!(items.load(false).units, 10);
    let inode = Key::new(257, ItemType::INODE_ITEM, 0);
    for _ in 0..100 {
        items.put(inode, [0; 160], true, 1000);
    }
    assert_eq!(items.load(false).units, 11, "one inode, however often it changes");
    let new = Key::new(258, ItemType::INODE_ITEM, 0);
    items.put(new, [0; 160], false, 1000);
    assert_eq!(items.load(false).units, 12, "a leaf");
    items.put(new, [1; 160], false, 1000);
    assert_eq!(items.load(false).units, 13, "other items may be beside it");
    assert!(items.remove(new));
    assert_eq!(items.load(false).units, 11);
}

/// A flush could once take an inode between the look at it and the unit for it, and the unit stayed
/// with other queued items. When those were taken back nothing was queued, but every interval an
/// idle volume was committed as if something were.
#[test]
fn units_go_with_their_items() {
    let inode = |ino| Key::new(ino, ItemType::INODE_ITEM, 0);
    let (here, gone) = (inode(258), inode(259));
    let mut items = QueuedItems::default();
    items.put(here, [0; 160], false, 1000);
    items.keep_unit(gone);
    assert_eq!(items.load(false).units, 1, "nothing waits of the other one");
    items.keep_unit(here);
    assert_eq!(items.load(false).units, 2);
    assert!(items.remove(here), "it never came to the tree");
    assert_eq!(items.load(false), ItemTotals::default());
}

/// Items that change at random hold nothing when none is left, and release what they held when they
/// are flushed.
#[test]
fn what_items_keep_is_given_back() {
    let mut random = Random::new(seed_of_run());
    for by_item in [false, true] {
        for _ in 0..2000 {
            let mut items = QueuedItems::default();
            let few = 1 + random.below(4);
            for _ in 0..random.below(40) {
                let ino = 256 + random.below(few);
                let (item_type, offset) = match random.below(3) {
                    0 => (ItemType::INODE_ITEM, 0),
                    _ => (ItemType::INODE_REF, random.below(few)),
                };
                let key = Key::new(ino, item_type, offset);
                let size = usize::try_from(random.below(300)).expect("it is small");
                match random.below(10) {
                    0..5 => items.put(key, vec![0; size], random.below(2) == 0, 1000),
                    5..8 => drop(items.remove(key)),
                    8 => items.keep_unit(key),
                    _ => drop(items.take_inode(ino, 1000)),
                }
                assert!(!items.is_empty() || items.load(by_item) == ItemTotals::default());
            }
            let all = items.load(by_item);
            let sorted = items.in_order(256);
            let mut left = Releases::new(&items, by_item, 1000);
            let mut given = ItemTotals::default();
            for batch in sorted.chunks(3) {
                given += left.after(batch);
            }
            given += left.rest();
            assert_eq!(given, all);
        }
    }
}

/// The units that each operation adds and releases.
#[test]
fn operations_keep_what_their_items_need() {
    let fs = open(in_memory(16384), &quiet());
    let mkdir = |name| fs.mkdir(place(fs.root(), name), &NEW).expect("a directory");
    let (one, two) = (mkdir("one"), mkdir("two"));
    let old = create(&fs, one, "old");
    fs.sync().expect("a commit");
    let live = fs.volume().live().expect("it is writable");
    let tree = live.tree(fs.volume(), TreeId::FS).expect("it is there");
    let keeps = |units, what| assert_eq!(tree.hold.units(), units, "{what}");
    let moves = |from, to| fs.rename(from, to, AT).expect("it is there");
    let unlink = |name| fs.unlink(place(one, name), AT).expect("it is there");
    keeps(0, "nothing is queued");
    create(&fs, one, "first");
    keeps(4, "a hash, the directory, a leaf of indexes, a leaf of inodes and names");
    create(&fs, one, "second");
    keeps(5, "one more hash");
    fs.link(old, place(one, "linked"), AT).expect("there is room");
    keeps(7, "a hash, and an inode that the tree has");
    moves(place(one, "first"), place(one, "moved"));
    keeps(8, "a hash for a hash, and a new inode that has changed");
    moves(place(one, "second"), place(two, "moved"));
    keeps(11, "the same, and a directory with a leaf of indexes");
    unlink("moved");
    keeps(9, "without a hash and a new inode");
    unlink("old");
    keeps(11, "a hash and an index that the tree has");
    unlink("linked");
    keeps(10, "without a hash and the leaf of indexes, but with a name that the tree has");
    fs.volume().delayed.flush(&fs.volume().base, u64::MAX).expect("a flush");
    keeps(0, "nothing is queued");
}

/// The most metadata that is held for files in one new directory, and the cost of one item, in
/// bytes, from the counters.
fn held_for(files: u64, options: &EngineOptions) -> (u64, u64) {
    let fs = open(in_memory(16384), options);
    let dir = fs.mkdir(place(fs.root(), "dir"), &NEW).expect("a directory");
    for number in 0..files {
        create(&fs, dir, &format!("file-{number:06}"));
    }
    let stats = fs.volume().stats();
    assert_eq!((stats.commits, stats.flushes_by_writers), (0, 0), "all of them waited");
    assert!(held(&fs) <= stats.metadata_reserved_peak);
    let unit = fs.volume().live().expect("it is writable").space.item_cost();
    fs.sync().expect("a commit");
    assert_eq!(held(&fs), 0);
    assert_eq!(names(&fs, dir).len() as u64, files);
    (stats.metadata_reserved_peak, unit)
}

/// The peak of metadata held for creates in one directory grows by the leaf, not by the item.
#[test]
fn metadata_is_held_by_the_leaf() {
    const FEW: u64 = 1000;
    const MANY: u64 = 10_000;
    // A file has about 300 bytes of items, so a leaf of 16 KiB holds about 50 files.
    let leaves = |files| files * 300 / 16384 + 1;
    let (few, unit) = held_for(FEW, &quiet());
    let (many, _) = held_for(MANY, &quiet());
    for (files, held) in [(FEW, few), (MANY, many)] {
        // The rest is the reservation of the running operation, and items that change once: the
        // directory, roots.
        let most = leaves(files) + OPERATION_ITEMS + 16;
        assert!(held < most * unit, "{held} bytes for {files} files, {unit} for an item");
    }
    assert!(many > few, "it grows");
    assert!(many - few <= leaves(MANY - FEW) * unit, "from {few} to {many}, {unit} for an item");
    // An entry by hash, one by index, an inode and its name.
    let (by_item, unit) = held_for(
        FEW,
        &EngineOptions { mechanisms: Mechanisms::default().reserve_by_item(true), ..quiet() },
    );
    assert!(
        by_item >= 4 * FEW * unit,
        "{by_item} bytes where each item has its own unit of {unit}"
    );
    assert!(by_item > 10 * many, "{by_item} bytes by item, and {many} for ten times as many files");
}
