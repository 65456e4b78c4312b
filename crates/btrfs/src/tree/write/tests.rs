//! A tree under random changes is what a map becomes under the same ones.
//!
//! Several threads change one tree, each its own keys, which lie between those of the others, so
//! that they meet in the same leaves. Commits run meanwhile. In the end, and after the volume was
//! opened again, the tree holds what the maps hold, and every block of it verifies.

use std::collections::BTreeMap;
use std::sync::Arc;

use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::BlockDevice;
use offshoot_testkit::random::Random;
use offshoot_vfs::Result;

use crate::test_volumes::in_memory;
use crate::tree::{Cursor, TreeWriter};
use crate::{OpenOptions, Volume};

/// The inode number that the items pretend to be about: no file of the new volume has it.
const OBJECT: u64 = 1 << 20;
const THREADS: u64 = 4;

type Model = BTreeMap<u64, Vec<u8>>;

fn key(number: u64) -> Key {
    Key::new(OBJECT, ItemType::STRING_ITEM, number)
}

fn open(device: &Arc<dyn BlockDevice>) -> Arc<Volume> {
    Volume::open_writable(vec![device.clone()], &OpenOptions::default()).expect("it opens")
}

/// The numbers of a thread are those that leave its own remainder.
fn own(random: &mut Random, thread: u64) -> u64 {
    random.below(20_000) * THREADS + thread
}

fn step(volume: &Volume, random: &mut Random, thread: u64, model: &mut Model, most: u64) {
    let handle = volume.join().expect("it is writable");
    handle
        .change(TreeId::FS, |tree| {
            let first = own(random, thread);
            match random.below(10) {
                8 => edit_batch(&tree, random, thread, model, most)?,
                9 => {
                    // A stretch of this thread's items goes at once.
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
                    // Only this thread's items may go, so a range is removed one by one.
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
    model: &mut Model,
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

fn compare(volume: &Volume, model: &Model) {
    let root = volume.tree(TreeId::FS).expect("the tree");
    let mut cursor = Cursor::seek(volume, root, key(0)).expect("a search");
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
    let device: Arc<dyn BlockDevice> = in_memory(node_size);
    let volume = open(&device);
    let mut models: Vec<Model> = vec![Model::new(); usize::try_from(THREADS).expect("few")];
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
        let all: Model = models.iter().flat_map(Model::clone).collect();
        compare(&volume, &all);
        volume.commit().expect("a commit");
        compare(
            &Volume::open(vec![device.clone()], &OpenOptions::default()).expect("it opens"),
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
    compare(&volume, &Model::new());
    volume.commit().expect("a commit");
    compare(&open(&device), &Model::new());
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
