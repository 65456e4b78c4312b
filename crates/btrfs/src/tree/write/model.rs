//! The latches of a tree under the model checker: `cargo test --features shuttle --lib model`.
//!
//! Three writers and a reader work on neighbouring keys, in nodes of 4 KiB with items so large that
//! a leaf has three. So leaves and nodes split, share with siblings, merge and run empty, and the
//! tree gains and loses levels. Before every lock, the checker decides which thread runs next, so
//! rare orders on real cores are common here. A schedule that hangs is a deadlock. Debug builds
//! also check the order of latches.
//!
//! Each writer has its own keys and always knows their data. In the end the tree must hold what all
//! writers know, in memory and, after a commit, on the device. There every block and every pointer
//! is verified, and the number of blocks must be the counted one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use offshoot_btrfs_format::edit::node_capacity;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::random::{Random, seed_of_run};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, FailurePersistence, Runner, thread};

use crate::block::TreeBlock;
use crate::test_volumes::bare;
use crate::tree::Blocks as _;
use crate::{BtrfsVolume, EngineOptions, Latching, Mechanisms, Stats};

const NODE_SIZE: u32 = 4096;
/// The inode number of the test items. No file of the new volume has it.
const OBJECT: u64 = 1 << 20;
const WRITERS: u64 = 3;
/// Changes that a writer makes in one schedule.
const STEPS: usize = 4;
/// Three items of this size fill a leaf.
const THIRD: usize = 1300;
/// Schedules of each kind.
const SCHEDULES: usize = 800;

type ScheduleItems = BTreeMap<u64, Vec<u8>>;

fn key(number: u64) -> Key {
    Key::new(OBJECT, ItemType::STRING_ITEM, number)
}

/// The tree that a schedule begins with: a committed volume and its items.
struct ScheduleStart {
    device: MemoryDevice,
    holds: ScheduleItems,
    /// Every other schedule works around this key, where a split or a merge is due.
    focus: u64,
}

/// The distance between the first keys: seven others fit between two.
const GAP: u64 = 8;

impl ScheduleStart {
    /// A tree of this many levels with `count` items. Of those from `keep` on, all are removed
    /// again that are not in the first of eight leaves.
    fn new(levels: u8, count: u64, keep: u64, focus: u64) -> Self {
        let device = bare(NODE_SIZE);
        let stays = move |&number: &u64| number < keep || number % 24 == 0;
        let inside = device.clone();
        once(move || {
            let volume = open(inside.clone(), ScheduleKind::Plain);
            let handle = volume.join().expect("it is writable");
            let change = handle.change(TreeId::FS, |tree| {
                for number in 0..count {
                    tree.insert(key(number * GAP), &[7; THIRD])?;
                }
                for number in (0..count).filter(|number| !stays(number)) {
                    assert!(tree.remove(key(number * GAP))?);
                }
                Ok(())
            });
            change.expect("the change goes through");
            drop(handle);
            volume.commit().expect("a commit");
            let root = volume.tree(TreeId::FS).expect("the tree");
            assert_eq!(root.level + 1, levels);
        });
        let holds = (0..count).filter(stays).map(|n| (n * GAP, vec![7; THIRD])).collect();
        Self { device: device.snapshot(), holds, focus: focus * GAP }
    }
}

fn open(device: Arc<dyn BlockDevice>, how: ScheduleKind) -> Arc<BtrfsVolume> {
    let is_exclusive = how == ScheduleKind::Exclusive;
    let latching = Latching { is_exclusive, ..Latching::default() };
    let mechanisms = Mechanisms::default().latching(latching).plans_from(1);
    let mut options =
        EngineOptions { mechanisms, commit_interval: None, ..EngineOptions::default() };
    if how == ScheduleKind::TwoCommits {
        options.cache_bytes = 0;
    }
    BtrfsVolume::open_writable(vec![device], &options).expect("it opens")
}

fn config() -> Config {
    let mut config = Config::new();
    config.stack_size = 1 << 20;
    config.failure_persistence = FailurePersistence::Print;
    config.silence_warnings = true;
    config
}

fn once(run: impl Fn() + Send + Sync + 'static) {
    Runner::new(RandomScheduler::new_from_seed(0, 1), config()).run(run);
}

/// Makes the changes of one writer at keys from `low` on. Its numbers have its own remainder.
fn write(
    volume: &BtrfsVolume,
    random: &mut Random,
    writer: u64,
    low: u64,
    model: &mut ScheduleItems,
) {
    let own = |random: &mut Random| (low + random.below(6 * GAP)) / WRITERS * WRITERS + writer;
    for _ in 0..STEPS {
        let handle = volume.join().expect("it is writable");
        let mut number = own(random);
        let change = handle.change(TreeId::FS, |tree| match random.below(10) {
            // Some items are added, some change, some are removed.
            8.. => {
                let batch: Vec<_> = (0..=random.below(4))
                    .map(|i| (number + i * WRITERS, (random.below(3) > 0).then(|| item(random))))
                    .collect();
                let edits: Vec<_> =
                    batch.iter().map(|(n, data)| (key(*n), data.as_deref())).collect();
                tree.apply_batch(&edits)?;
                for (number, data) in batch {
                    match data {
                        Some(data) => drop(model.insert(number, data)),
                        None => drop(model.remove(&number)),
                    }
                }
                Ok(())
            }
            0..=3 => {
                let batch: Vec<_> = (0..=random.below(2))
                    .map(|i| (number + i * WRITERS, item(random)))
                    .filter(|(number, _)| !model.contains_key(number))
                    .collect();
                let items: Vec<_> = batch.iter().map(|(n, data)| (key(*n), &data[..])).collect();
                tree.insert_batch(&items)?;
                model.extend(batch);
                Ok(())
            }
            4 => {
                let data = item(random);
                let old = model.insert(number, data.clone());
                let room = data.len().saturating_sub(old.as_ref().map_or(0, Vec::len));
                tree.modify(key(number), room, |found| {
                    assert_eq!(found, old.as_deref(), "item {number}");
                    Ok(data)
                })
            }
            _ => {
                // An existing item, if there is any.
                number = model.range(number..).next().map_or(number, |(number, _)| *number);
                let was = model.remove(&number).is_some();
                assert_eq!(tree.remove(key(number))?, was, "item {number}");
                Ok(())
            }
        });
        change.expect("the change goes through");
        drop(handle);
        look_up(volume, number, model.get(&number));
    }
}

fn number_below(random: &mut Random, bound: usize) -> usize {
    usize::try_from(random.below(bound as u64)).expect("below a usize")
}

fn item(random: &mut Random) -> Vec<u8> {
    let sizes = [60, THIRD, THIRD, 2 * THIRD, 3 * THIRD];
    vec![1; sizes[number_below(random, sizes.len())]]
}

fn look_up(volume: &BtrfsVolume, number: u64, expected: Option<&Vec<u8>>) {
    let root = volume.tree(TreeId::FS).expect("the tree");
    let cursor = volume.cursor(root, key(number)).expect("a search");
    let found = cursor.item().filter(|(found, _)| *found == key(number));
    assert_eq!(found.map(|(_, data)| data), expected.map(|data| &data[..]), "item {number}");
}

/// Reads all items. Keys must ascend, and the items that no writer changes must be there.
fn read(volume: &BtrfsVolume, untouched: &[u64]) {
    let root = volume.tree(TreeId::FS).expect("the tree");
    let mut cursor = volume.cursor(root, key(0)).expect("a search");
    let (mut last, mut seen) = (None, Vec::new());
    while let Some((found, _)) = cursor.item_of(OBJECT, ItemType::STRING_ITEM) {
        assert!(last < Some(found), "{found} after {last:?}");
        last = Some(found);
        seen.extend(untouched.binary_search(&found.offset).is_ok().then_some(found.offset));
        cursor.advance().expect("the next item");
    }
    assert_eq!(seen, untouched);
}

fn compare(volume: &BtrfsVolume, model: &ScheduleItems) {
    let root = volume.tree(TreeId::FS).expect("the tree");
    let mut cursor = volume.cursor(root, key(0)).expect("a search");
    for (number, data) in model {
        let found = cursor.item_of(OBJECT, ItemType::STRING_ITEM);
        assert_eq!(found, Some((key(*number), &data[..])), "item {number}");
        cursor.advance().expect("the next item");
    }
    assert!(cursor.item_of(OBJECT, ItemType::STRING_ITEM).is_none(), "an item too many");
}

/// The number of blocks below `block`, itself included. Reading them verifies them and the
/// pointers.
fn blocks(volume: &BtrfsVolume, block: &TreeBlock) -> u64 {
    if block.is_leaf() {
        return 1;
    }
    let children = (0..block.len()).map(|slot| {
        let child = volume.child(block, slot, TreeId::FS).expect("it verifies");
        assert!(!child.is_empty(), "an empty block is freed");
        blocks(volume, &child)
    });
    1 + children.sum::<u64>()
}

/// How a schedule differs from the plain one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScheduleKind {
    Plain,
    /// All writers latch exclusively all the way down.
    Exclusive,
    /// The transaction ends meanwhile, and the next one begins.
    Commits,
    /// Two transactions end meanwhile, and no cache has the blocks that they wrote.
    TwoCommits,
}

/// One schedule.
fn schedule(start: &ScheduleStart, seed: u64, how: ScheduleKind, total: &ScheduleTotals) {
    let device = Arc::new(start.device.snapshot());
    let volume = open(device.clone(), how);
    // The free space is loaded once, before other threads begin.
    drop(volume.join().expect("it is writable"));
    let mut random = Random::new(seed);
    let somewhere = start.holds.keys().nth(number_below(&mut random, start.holds.len()));
    let low = match random.below(2) {
        0 => *somewhere.expect("below their number"),
        _ => start.focus,
    };
    let window = low.saturating_sub(WRITERS)..low + 9 * GAP;
    let untouched: Vec<_> =
        start.holds.keys().filter(|number| !window.contains(number)).copied().collect();
    let mut threads = Vec::new();
    for writer in 0..WRITERS {
        let own = |(number, _): &(&u64, &Vec<u8>)| {
            *number % WRITERS == writer && window.contains(*number)
        };
        let mut model: ScheduleItems =
            start.holds.iter().filter(own).map(|(n, data)| (*n, data.clone())).collect();
        let mut random = Random::new(seed ^ (writer + 1) << 32);
        let volume = volume.clone();
        threads.push(thread::spawn(move || {
            write(&volume, &mut random, writer, low, &mut model);
            model
        }));
    }
    let reader = {
        let (volume, untouched) = (volume.clone(), untouched.clone());
        thread::spawn(move || read(&volume, &untouched))
    };
    if matches!(how, ScheduleKind::Commits | ScheduleKind::TwoCommits) {
        volume.commit().expect("a commit");
    }
    if how == ScheduleKind::TwoCommits {
        let handle = volume.join().expect("it is writable");
        let same = |data: Option<&[u8]>| Ok(data.expect("it stays").to_vec());
        let change = handle.change(TreeId::FS, |tree| tree.modify(key(untouched[0]), 0, same));
        change.expect("the change goes through");
        drop(handle);
        volume.commit().expect("a commit");
    }
    let mut model: ScheduleItems =
        untouched.iter().map(|number| (*number, start.holds[number].clone())).collect();
    for thread in threads {
        model.extend(thread.join().expect("a writer"));
    }
    reader.join().expect("the reader");
    compare(&volume, &model);
    volume.commit().expect("a commit");
    total.add(&volume.stats());
    drop(volume);
    let options = EngineOptions::default();
    let volume = BtrfsVolume::open(vec![device.clone()], &options).expect("it opens");
    compare(&volume, &model);
    let root = volume.tree(TreeId::FS).expect("the tree");
    let top = volume.block(&root.expected()).expect("it verifies");
    let count = blocks(&volume, &top);
    let used = crate::transaction::stored_root(&volume, TreeId::FS).expect("its item").used_bytes;
    assert_eq!(used, count * u64::from(NODE_SIZE), "the blocks of the tree");
}

/// What happened in all schedules.
#[derive(Debug, Default)]
struct ScheduleTotals {
    schedules: AtomicU64,
    waits: AtomicU64,
    early_unlocks: AtomicU64,
    splits: AtomicU64,
    pushes: AtomicU64,
    merges: AtomicU64,
}

impl ScheduleTotals {
    fn add(&self, stats: &Stats) {
        let Stats { lock_waits, early_unlocks, splits, pushes, merges, .. } = *stats;
        let counts = [1, lock_waits, early_unlocks, splits, pushes, merges];
        for (total, count) in self.all().into_iter().zip(counts) {
            total.fetch_add(count, Ordering::Relaxed);
        }
    }

    fn all(&self) -> [&AtomicU64; 6] {
        let Self { schedules, waits, early_unlocks, splits, pushes, merges } = self;
        [schedules, waits, early_unlocks, splits, pushes, merges]
    }
}

fn explore(start: ScheduleStart, how: ScheduleKind) {
    let seed = std::env::var("OFFSHOOT_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    eprintln!("OFFSHOOT_SEED={seed}");
    let (start, total) = (Arc::new(start), Arc::new(ScheduleTotals::default()));
    let schedulers: [Box<dyn Scheduler + Send>; 2] = [
        Box::new(RandomScheduler::new_from_seed(seed, SCHEDULES)),
        Box::new(PctScheduler::new_from_seed(seed, 3, SCHEDULES)),
    ];
    for scheduler in schedulers {
        let (start, total) = (start.clone(), total.clone());
        let next = AtomicU64::new(seed << 20);
        Runner::new(scheduler, config()).run(move || {
            schedule(&start, next.fetch_add(1, Ordering::Relaxed), how, &total);
        });
    }
    eprintln!("{total:?}");
    for count in total.all() {
        assert_ne!(count.load(Ordering::Relaxed), 0, "something never happened: {total:?}");
    }
}

/// A tree that is a few leaves under a root.
#[test]
fn two_levels() {
    explore(ScheduleStart::new(2, 12, 12, 12), ScheduleKind::Plain);
}

/// A full root: the next leaf splits it, and the tree gains a level.
#[test]
fn a_full_root() {
    explore(ScheduleStart::new(2, 357, 357, 352), ScheduleKind::Plain);
}

/// Two nodes that together have just as many pointers as one may have, under a root that is then
/// replaced by its child.
#[test]
fn nodes_about_to_be_merged() {
    explore(ScheduleStart::new(3, 500, 258, 357), ScheduleKind::Plain);
}

/// The number of pointers of each node under the root of a tree of three levels, and the keys of a
/// leaf whose items can be removed without a change further up.
fn nodes(volume: &BtrfsVolume) -> Vec<(usize, Vec<Key>)> {
    let root = volume.tree(TreeId::FS).expect("the tree");
    let top = volume.block(&root.expected()).expect("it verifies");
    let node = |slot| {
        let node = volume.child(&top, slot, TreeId::FS).expect("it verifies");
        let leaf = volume.child(&node, node.len() / 2, TreeId::FS).expect("it verifies");
        (node.len(), (0..leaf.len()).map(|slot| leaf.key(slot)).collect())
    };
    (0..top.len()).map(node).collect()
}

fn remove(volume: &BtrfsVolume, key: Key) {
    let handle = volume.join().expect("it is writable");
    let removed = handle.change(TreeId::FS, |tree| tree.remove(key));
    assert!(removed.expect("the change goes through"), "{key}");
}

/// Removes items below a node until it has `pointers` pointers.
fn shrink(volume: &BtrfsVolume, node: usize, pointers: usize) {
    while nodes(volume)[node].0 > pointers {
        remove(volume, nodes(volume)[node].1[0]);
    }
}

/// Two nodes are sparse, and small enough to be merged. Two threads, each with the latch of one
/// node, wanted to see how large the other node is: a deadlock.
#[test]
fn sparse_siblings() {
    let device = bare(NODE_SIZE);
    let sparse = node_capacity(NODE_SIZE) / 4;
    let inside = device.clone();
    once(move || {
        let volume = open(inside.clone(), ScheduleKind::Plain);
        let handle = volume.join().expect("it is writable");
        let insert =
            |number| handle.change(TreeId::FS, |tree| tree.insert(key(number), &[7; THIRD]));
        (0..600).try_for_each(insert).expect("the change goes through");
        drop(handle);
        assert_eq!(nodes(&volume).len(), 2);
        (0..2).for_each(|node| shrink(&volume, node, sparse));
        volume.commit().expect("a commit");
    });
    let seed = seed_of_run();
    Runner::new(RandomScheduler::new_from_seed(seed, 100), config()).run(move || {
        let volume = open(Arc::new(device.snapshot()), ScheduleKind::Plain);
        // A sparse node is merged when the next way leads through it.
        (0..2).for_each(|node| shrink(&volume, node, sparse - 1));
        let before = nodes(&volume);
        assert_eq!(before.iter().map(|node| node.0).collect::<Vec<_>>(), [sparse - 1; 2]);
        let writer = |(_, keys): (usize, Vec<Key>)| {
            let volume = volume.clone();
            thread::spawn(move || remove(&volume, keys[0]))
        };
        let threads: Vec<_> = before.into_iter().map(writer).collect();
        for thread in threads {
            thread.join().expect("a writer");
        }
        let root = volume.tree(TreeId::FS).expect("the tree");
        let top = volume.block(&root.expected()).expect("it verifies");
        assert!(root.level == 1 || top.len() == 1, "they are one now");
    });
}

#[test]
fn exclusive_latches() {
    explore(ScheduleStart::new(2, 12, 12, 12), ScheduleKind::Exclusive);
}

/// As above, while a transaction ends and the next one begins.
#[test]
fn commits_between() {
    explore(ScheduleStart::new(2, 12, 12, 12), ScheduleKind::Commits);
}

/// A reader follows pointers to blocks of one transaction while the next two begin.
#[test]
fn two_commits_between() {
    explore(ScheduleStart::new(2, 12, 12, 12), ScheduleKind::TwoCommits);
}
