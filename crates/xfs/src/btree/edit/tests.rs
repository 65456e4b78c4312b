//! Random changes of all trees against a model, with blocks of all small sizes.

mod damage;
mod image;
mod judged;
mod model;

use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_xfs_format::btree::XfsTree;
use offshoot_xfs_format::record::{
    XfsExtentItem, XfsFreeExtent, XfsInodeChunk, XfsReverseMap, XfsSharedExtent,
};

use self::image::TestImage;
use self::model::{RecordOrder, TreeModel, TreeRecordMaker};

/// Grows a tree to at least `levels` levels and `most` records, changes it at random, and removes
/// all records, in each order.
fn grow_and_shrink<R: TreeRecordMaker>(tree: XfsTree, block_log: u8, most: u64) {
    let mut random = Random::new(seed_of_run());
    for order in [RecordOrder::Up, RecordOrder::Down, RecordOrder::Mixed] {
        let mut model = TreeModel::<R>::new(TestImage::new(tree, block_log));
        model.fill(&mut random, order, most);
        eprintln!("{tree:?}, {order:?}: {}", model.summary());
        model.churn(&mut random, 400);
        model.drain(&mut random, order);
    }
}

/// All trees that a volume with blocks of this size has.
fn all_trees(block_log: u8, most: u64) {
    grow_and_shrink::<XfsFreeExtent>(XfsTree::FreeByBlock, block_log, most);
    grow_and_shrink::<XfsFreeExtent>(XfsTree::FreeBySize, block_log, most);
    grow_and_shrink::<XfsInodeChunk>(XfsTree::Inodes, block_log, most);
    grow_and_shrink::<XfsExtentItem>(XfsTree::Extents, block_log, most);
    if block_log > 9 {
        grow_and_shrink::<XfsInodeChunk>(XfsTree::FreeInodes, block_log, most);
        grow_and_shrink::<XfsReverseMap>(XfsTree::ReverseMap, block_log, most);
        grow_and_shrink::<XfsSharedExtent>(XfsTree::ReferenceCounts, block_log, most);
    }
}

#[test]
fn trees_of_version_4_with_blocks_of_512_bytes_are_as_their_model() {
    all_trees(9, 3_000);
}

#[test]
fn trees_with_blocks_of_1_kib_are_as_their_model() {
    all_trees(10, 8_000);
}

#[test]
fn trees_with_blocks_of_4_kib_are_as_their_model() {
    all_trees(12, 3_000);
}

#[test]
fn trees_of_four_levels_grow_and_go() {
    let mut random = Random::new(seed_of_run());
    let mut model = TreeModel::<XfsReverseMap>::new(TestImage::new(XfsTree::ReverseMap, 10));
    model.fill(&mut random, RecordOrder::Mixed, 20_000);
    assert_eq!(model.levels(), 4, "{}", model.summary());
    model.drain(&mut random, RecordOrder::Mixed);
    let mut model = TreeModel::<XfsExtentItem>::new(TestImage::new(XfsTree::Extents, 9));
    model.fill(&mut random, RecordOrder::Mixed, 12_000);
    assert_eq!(model.levels(), 4, "{}", model.summary());
    model.drain(&mut random, RecordOrder::Up);
}

#[test]
fn an_insert_logs_few_blocks_and_few_bytes() {
    let mut random = Random::new(seed_of_run());
    let mut model = TreeModel::<XfsFreeExtent>::new(TestImage::new(XfsTree::FreeByBlock, 12));
    model.fill(&mut random, RecordOrder::Mixed, 20_000);
    let (blocks, most, bytes) = model.cost(&mut random, 2_000);
    eprintln!("{blocks} blocks and {bytes} bytes for 2,000 inserts, at most {most} for one");
    // A leaf, and now and then a neighbour or a new block, and their parent.
    assert!(blocks < 2_200 && most <= 6, "{blocks}, {most}");
    // Half of a leaf that is three quarters full is 1.5 KiB; and whole pieces of 128 bytes count.
    assert!(bytes < 2_000 * 2_100, "{bytes}");
}

#[test]
fn records_that_overlap_a_range_are_found_through_the_high_keys() {
    let mut random = Random::new(seed_of_run());
    let mut model = TreeModel::<XfsReverseMap>::new(TestImage::new(XfsTree::ReverseMap, 10));
    model.fill(&mut random, RecordOrder::Mixed, 3_000);
    for _ in 0..300 {
        model.check_overlapping(&mut random);
    }
}

#[test]
fn a_list_of_extents_becomes_a_tree_and_a_list_again() {
    let mut random = Random::new(seed_of_run());
    for count in [1, 10, 20] {
        let mut model = TreeModel::<XfsExtentItem>::new(TestImage::new(XfsTree::Extents, 10));
        model.plant_list(count);
        model.fill(&mut random, RecordOrder::Mixed, 2_000);
        model.drain_to(&mut random, RecordOrder::Mixed, 9);
        model.take_list(8, false);
        model.take_list(9, true);
    }
}
