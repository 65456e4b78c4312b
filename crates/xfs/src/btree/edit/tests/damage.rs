//! Failures in the middle of a change, and trees that are damaged: an error, and never a panic.

use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_xfs_format::btree::{XfsSearchKey, XfsTree};
use offshoot_xfs_format::record::{XfsExtentItem, XfsInodeChunk, XfsReverseMap};
use zerocopy::IntoBytes;

use super::super::XfsTreeEdit;
use super::image::TestImage;
use super::model::{RecordOrder, TreeModel, TreeRecordMaker};

/// The calls that no change of a tree of these tests needs.
const MANY_CALLS: u64 = 20_000;

fn fail_at_each_call<R: TreeRecordMaker>(tree: XfsTree, random: &mut Random) {
    let mut model = TreeModel::<R>::new(TestImage::new(tree, 10));
    model.fill(random, RecordOrder::Mixed, 1_000);
    for _ in 0..60 {
        let record = model.new_record(random);
        let key = tree.low_key(record.as_bytes());
        for left in 0.. {
            let mut image = model.image.fork();
            image.calls_left = Some(left);
            let (geometry, root) = model.parts();
            let mut edit = XfsTreeEdit::new(&geometry, root, &mut image);
            let inserted = edit.insert(&record);
            if inserted.is_err() {
                continue;
            }
            let removed = edit.exact::<R>(key).and_then(|_| edit.remove());
            if removed.is_ok() {
                assert!(left > 5);
                break;
            }
        }
        model.insert(record);
    }
}

#[test]
fn a_failure_at_any_call_is_an_error() {
    let mut random = Random::new(seed_of_run());
    fail_at_each_call::<XfsReverseMap>(XfsTree::ReverseMap, &mut random);
    fail_at_each_call::<XfsExtentItem>(XfsTree::Extents, &mut random);
}

fn change_damaged<R: TreeRecordMaker>(tree: XfsTree, random: &mut Random) {
    let mut model = TreeModel::<R>::new(TestImage::new(tree, 10));
    model.fill(random, RecordOrder::Mixed, 1_500);
    let mut refused = 0;
    for _ in 0..1_500 {
        let mut image = model.image.fork();
        let blocks = image.blocks();
        let mut places: Vec<_> = blocks.keys().copied().collect();
        places.sort_unstable();
        for _ in 0..=random.below(40) {
            let at = places[usize::try_from(random.below(places.len() as u64)).unwrap()];
            // Headers have what leads to other blocks.
            let len = if random.below(2) == 0 { 24 } else { 1024 };
            let byte = usize::try_from(random.below(len)).unwrap();
            let other = places[usize::try_from(random.below(places.len() as u64)).unwrap()];
            let block = blocks.get_mut(&at).unwrap();
            block[byte] = if random.below(2) == 0 {
                random.bytes(1)[0]
            } else {
                other.to_be_bytes()[4 + byte % 4]
            };
        }
        image.calls_left = Some(MANY_CALLS);
        let (geometry, root) = model.parts();
        let mut edit = XfsTreeEdit::new(&geometry, root, &mut image);
        let record = model.new_record(random);
        let changes = [
            edit.insert(&record),
            edit.at_most::<R>(tree.low_key(record.as_bytes())).and_then(|_| edit.remove()),
            edit.at_least::<R>(XfsSearchKey([0; 3])).and_then(|_| edit.remove()),
        ];
        refused += changes.iter().filter(|change| change.is_err()).count();
        assert!(image.calls_left > Some(0), "it does not end");
    }
    assert!(refused > 100, "{refused}");
}

#[test]
fn damaged_trees_give_errors_and_no_panic() {
    let mut random = Random::new(seed_of_run());
    change_damaged::<XfsReverseMap>(XfsTree::ReverseMap, &mut random);
    change_damaged::<XfsExtentItem>(XfsTree::Extents, &mut random);
}

/// Two chunks of inodes overlap where one leaf ends and the next begins. Each leaf is right by
/// itself, and so is what their parent says. A change of either chunk, even one that keeps its
/// keys, is refused.
#[test]
fn records_of_two_leaves_that_overlap_are_not_replaced() {
    let mut random = Random::new(seed_of_run());
    let tree = XfsTree::Inodes;
    let mut model = TreeModel::<XfsInodeChunk>::new(TestImage::new(tree, 10));
    model.fill(&mut random, RecordOrder::Up, 500);
    let mut image = model.image.fork();
    let (geometry, root) = model.parts();
    let mut edit = XfsTreeEdit::new(&geometry, root.clone(), &mut image);
    let mut last = edit.at_least::<XfsInodeChunk>(XfsSearchKey([0; 3])).unwrap().unwrap();
    let mut leaf = *edit.path.last().unwrap();
    let first = loop {
        let next = edit.next::<XfsInodeChunk>().unwrap().unwrap();
        let step = *edit.path.last().unwrap();
        if step.at != leaf.at {
            break next;
        }
        (last, leaf) = (next, step);
    };
    let key = |chunk: &XfsInodeChunk| tree.low_key(chunk.as_bytes());
    let [first_key, last_key] = [&first, &last].map(key);
    assert!(leaf.index > 0 && last_key < first_key);
    // The middle of a leaf, and both ends while nothing overlaps.
    for chunk in [&last, &first] {
        edit.exact::<XfsInodeChunk>(key(chunk)).unwrap().unwrap();
        edit.replace(chunk).unwrap();
    }
    let start = u32::try_from(first_key.0[0]).unwrap() - 32;
    let offset = tree.header_len(&geometry) + leaf.index * tree.record_len();
    let block = image.blocks().get_mut(&leaf.at.0).unwrap();
    block[offset..offset + 4].copy_from_slice(&start.to_be_bytes());
    let mut edit = XfsTreeEdit::new(&geometry, root, &mut image);
    for key in [first_key, XfsSearchKey([start.into(), 0, 0])] {
        let found = edit.exact::<XfsInodeChunk>(key).unwrap().unwrap();
        let error = edit.replace(&found).unwrap_err();
        assert!(error.to_string().contains("overlaps its neighbours"), "{error}");
    }
}
