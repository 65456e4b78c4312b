//! Changing tree blocks in memory: items of leaves, pointers of nodes.
//!
//! ```text
//!          | header | item .. item |      free space      | data .. data |
//!  insert                  <- n items move right ->   <- data moves left by their sizes
//!  remove                  <- the same, the other way round ->
//! ```
//!
//! 1. However many items a call inserts or removes, it moves the headers once and the data once.
//! 2. The data of neighbouring items is contiguous, so copying a run of items to another leaf
//!    copies its data once.
//! 3. Each function leaves the block well-formed: data packed against the end, offsets descending,
//!    `nritems` right. The caller is responsible for the order of the keys.
//!
//! The caller checks first that there is room. A function panics when there is not enough.

use std::ops::Range;

use zerocopy::{FromBytes, IntoBytes};

use crate::Key;
use crate::block::{BlockHeader, HEADER_SIZE, LeafItem, NodePointer, items, pointers};

/// The size of the header of one item, in bytes.
pub const ITEM_SIZE: usize = size_of::<LeafItem>();

/// The size of one pointer, in bytes.
pub const POINTER_SIZE: usize = size_of::<NodePointer>();

const WELL_FORMED: &str = "the block is well-formed";

/// How many bytes a leaf of `node_size` bytes has for items and their data.
#[must_use]
pub const fn leaf_capacity(node_size: u32) -> usize {
    node_size as usize - HEADER_SIZE
}

/// How many pointers fit into a node of `node_size` bytes.
#[must_use]
pub const fn node_capacity(node_size: u32) -> usize {
    leaf_capacity(node_size) / POINTER_SIZE
}

/// The header of a block, to be changed.
#[must_use]
pub fn header_mut(block: &mut [u8]) -> &mut BlockHeader {
    BlockHeader::mut_from_prefix(block).expect(WELL_FORMED).0
}

fn items_mut(leaf: &mut [u8], count: usize) -> &mut [LeafItem] {
    let body = &mut leaf[HEADER_SIZE..];
    <[LeafItem]>::mut_from_prefix_with_elems(body, count).expect(WELL_FORMED).0
}

fn pointers_mut(node: &mut [u8], count: usize) -> &mut [NodePointer] {
    let body = &mut node[HEADER_SIZE..];
    <[NodePointer]>::mut_from_prefix_with_elems(body, count).expect(WELL_FORMED).0
}

fn count(block: &[u8]) -> usize {
    BlockHeader::view(block).expect(WELL_FORMED).nritems.get() as usize
}

fn set_count(block: &mut [u8], count: usize) {
    let count = u32::try_from(count).expect("a block has few items");
    header_mut(block).nritems = count.into();
}

/// Where the data of item `slot` ends, in bytes after the header. That is also where the data of
/// the items before it begins.
fn data_end(leaf: &[u8], slot: usize) -> usize {
    match slot.checked_sub(1) {
        Some(before) => items(leaf).expect(WELL_FORMED)[before].offset.get() as usize,
        None => leaf.len() - HEADER_SIZE,
    }
}

/// How many bytes of a leaf are free. An item needs [`ITEM_SIZE`] and its data.
#[must_use]
pub fn leaf_free(leaf: &[u8]) -> usize {
    let count = count(leaf);
    data_end(leaf, count) - count * ITEM_SIZE
}

/// How many bytes the items `from..to` take, with their headers.
#[must_use]
pub fn items_bytes(leaf: &[u8], from: usize, to: usize) -> usize {
    data_end(leaf, from) - data_end(leaf, to) + (to - from) * ITEM_SIZE
}

/// Opens a gap for `new` items with `bytes` of data before the item at `slot`. Returns where their
/// data ends, in bytes after the header.
fn open_gap(leaf: &mut [u8], slot: usize, new: usize, bytes: usize) -> usize {
    let old = count(leaf);
    assert!(bytes + new * ITEM_SIZE <= leaf_free(leaf), "no room in the leaf");
    let (low, end) = (data_end(leaf, old), data_end(leaf, slot));
    let body = &mut leaf[HEADER_SIZE..];
    body.copy_within(low..end, low - bytes);
    body.copy_within(slot * ITEM_SIZE..old * ITEM_SIZE, (slot + new) * ITEM_SIZE);
    let moved = u32::try_from(bytes).expect("within a block");
    for item in &mut items_mut(leaf, old + new)[slot + new..] {
        item.offset -= moved;
    }
    set_count(leaf, old + new);
    end
}

/// Inserts items before the item at `slot`.
pub fn insert_items<'d>(
    leaf: &mut [u8],
    slot: usize,
    new: impl Iterator<Item = (Key, &'d [u8])> + Clone,
) {
    let (number, bytes) =
        new.clone().fold((0, 0), |(number, bytes), (_, data)| (number + 1, bytes + data.len()));
    let mut end = open_gap(leaf, slot, number, bytes);
    for (at, (key, data)) in (slot..).zip(new) {
        end = put_item(leaf, at, end, key, data);
    }
}

/// Writes the header of the item at `slot`, and its data so that it ends `end` bytes after the
/// header of the block. Returns where the data begins.
fn put_item(leaf: &mut [u8], slot: usize, end: usize, key: Key, data: &[u8]) -> usize {
    let start = end - data.len();
    let body = &mut leaf[HEADER_SIZE..];
    body[start..end].copy_from_slice(data);
    let item = LeafItem {
        key: key.into(),
        offset: u32::try_from(start).expect("within a block").into(),
        size: u32::try_from(data.len()).expect("within a block").into(),
    };
    body[slot * ITEM_SIZE..][..ITEM_SIZE].copy_from_slice(item.as_bytes());
    start
}

/// Copies the headers of the items `run` of `source` to `slot`, and their data so that it ends
/// `end` bytes after the header of the block. Returns where the data begins.
fn put_run(leaf: &mut [u8], slot: usize, end: usize, source: &[u8], run: Range<usize>) -> usize {
    let data = data_end(source, run.end)..data_end(source, run.start);
    let start = end - data.len();
    let body = &mut leaf[HEADER_SIZE..];
    body[start..end].copy_from_slice(&source[HEADER_SIZE..][data.clone()]);
    let headers = run.start * ITEM_SIZE..run.end * ITEM_SIZE;
    let to = &mut body[slot * ITEM_SIZE..][..headers.len()];
    to.copy_from_slice(&source[HEADER_SIZE..][headers]);
    let moved = u32::try_from(end).expect("within a block");
    let from = u32::try_from(data.end).expect("within a block");
    for item in <[LeafItem]>::mut_from_bytes(to).expect("whole headers") {
        item.offset = (item.offset.get() + moved - from).into();
    }
    start
}

/// Removes the items `from..to`.
pub fn remove_items(leaf: &mut [u8], from: usize, to: usize) {
    let old = count(leaf);
    let (low, cut, end) = (data_end(leaf, old), data_end(leaf, to), data_end(leaf, from));
    let bytes = end - cut;
    let body = &mut leaf[HEADER_SIZE..];
    body.copy_within(low..cut, low + bytes);
    body.copy_within(to * ITEM_SIZE..old * ITEM_SIZE, from * ITEM_SIZE);
    let left = old - (to - from);
    let moved = u32::try_from(bytes).expect("within a block");
    for item in &mut items_mut(leaf, left)[from..] {
        item.offset += moved;
    }
    set_count(leaf, left);
}

/// Changes the size of the data of the item at `slot`. The data keeps its beginning. When it grows,
/// the new bytes at its end are zero.
pub fn resize_item(leaf: &mut [u8], slot: usize, size: usize) {
    let all = count(leaf);
    let old = items(leaf).expect(WELL_FORMED)[slot].size.get() as usize;
    assert!(size <= old + leaf_free(leaf), "no room in the leaf");
    let (low, start, end) = (data_end(leaf, all), data_end(leaf, slot + 1), data_end(leaf, slot));
    let kept = old.min(size);
    let body = &mut leaf[HEADER_SIZE..];
    // The data will begin at `end - size`. The data of all later items, and the part that is kept,
    // move by the same distance.
    body.copy_within(low..start + kept, low + old - size);
    body[end - size + kept..end].fill(0);
    let items = items_mut(leaf, all);
    items[slot].size = u32::try_from(size).expect("within a block").into();
    for item in &mut items[slot..] {
        let offset = item.offset.get() as usize + old - size;
        item.offset = u32::try_from(offset).expect("within a block").into();
    }
}

/// The data of the item at `slot`, to be changed.
#[must_use]
pub fn data_mut(leaf: &mut [u8], slot: usize) -> &mut [u8] {
    let (start, end) = (data_end(leaf, slot + 1), data_end(leaf, slot));
    &mut leaf[HEADER_SIZE..][start..end]
}

/// Copies the items `from..to` of `source` before the item at `slot` of `leaf`.
pub fn copy_items(leaf: &mut [u8], slot: usize, source: &[u8], from: usize, to: usize) {
    let bytes = data_end(source, from) - data_end(source, to);
    let end = open_gap(leaf, slot, to - from, bytes);
    put_run(leaf, slot, end, source, from..to);
}

/// Fills an empty leaf in the order of the keys, without moving what it wrote.
#[derive(Debug)]
pub struct LeafFiller<'l> {
    leaf: &'l mut [u8],
    count: usize,
    /// Where the data of the last item begins, in bytes after the header.
    low: usize,
}

impl<'l> LeafFiller<'l> {
    /// Begins with a leaf without items, whose header is already made.
    pub fn new(leaf: &'l mut [u8]) -> Self {
        let low = leaf.len() - HEADER_SIZE;
        Self { leaf, count: 0, low }
    }

    fn require_room(&self, items: usize, bytes: usize) {
        let used = (self.count + items) * ITEM_SIZE + bytes;
        assert!(used <= self.low, "no room in the leaf");
    }

    /// Adds an item.
    pub fn push(&mut self, key: Key, data: &[u8]) {
        self.require_room(1, data.len());
        self.low = put_item(self.leaf, self.count, self.low, key, data);
        self.count += 1;
    }

    /// Adds the items `run` of another leaf.
    pub fn copy(&mut self, source: &[u8], run: Range<usize>) {
        self.require_room(run.len(), data_end(source, run.start) - data_end(source, run.end));
        let items = run.len();
        self.low = put_run(self.leaf, self.count, self.low, source, run);
        self.count += items;
    }

    /// Stores the number of added items in the header.
    pub fn finish(self) {
        set_count(self.leaf, self.count);
    }
}

/// Inserts pointers before the pointer at `slot` of a node.
pub fn insert_pointers(node: &mut [u8], slot: usize, new: &[NodePointer]) {
    let old = count(node);
    let body = &mut node[HEADER_SIZE..];
    assert!((old + new.len()) * POINTER_SIZE <= body.len(), "no room in the node");
    body.copy_within(slot * POINTER_SIZE..old * POINTER_SIZE, (slot + new.len()) * POINTER_SIZE);
    body[slot * POINTER_SIZE..][..new.len() * POINTER_SIZE].copy_from_slice(new.as_bytes());
    set_count(node, old + new.len());
}

/// Removes the pointers `from..to` of a node.
pub fn remove_pointers(node: &mut [u8], from: usize, to: usize) {
    let old = count(node);
    node[HEADER_SIZE..].copy_within(to * POINTER_SIZE..old * POINTER_SIZE, from * POINTER_SIZE);
    set_count(node, old - (to - from));
}

/// Copies the pointers `from..to` of `source` before the pointer at `slot` of `node`.
pub fn copy_pointers(node: &mut [u8], slot: usize, source: &[u8], from: usize, to: usize) {
    insert_pointers(node, slot, &pointers(source).expect(WELL_FORMED)[from..to]);
}

/// The pointer at `slot` of a node, to be changed.
#[must_use]
pub fn pointer_mut(node: &mut [u8], slot: usize) -> &mut NodePointer {
    let count = count(node);
    &mut pointers_mut(node, count)[slot]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ItemType;
    use crate::block::item_data;

    const NODE_SIZE: usize = 4096;

    fn key(number: u64) -> Key {
        Key::new(number, ItemType::STRING_ITEM, 0)
    }

    fn value(number: u64, size: usize) -> Vec<u8> {
        let first = number.to_le_bytes()[0];
        (0u8..=255).cycle().map(|i| i.wrapping_mul(31) ^ first).take(size).collect()
    }

    fn check(leaf: &[u8], model: &[(u64, Vec<u8>)]) {
        let items = items(leaf).unwrap();
        assert_eq!(items.len(), model.len());
        let mut end = leaf.len() - HEADER_SIZE;
        for (item, (number, data)) in items.iter().zip(model) {
            assert_eq!(item.key.get(), key(*number));
            assert_eq!(item.offset.get() as usize + data.len(), end, "data is packed");
            end -= data.len();
            assert_eq!(item_data(leaf, item).unwrap(), data);
        }
        assert_eq!(leaf_free(leaf), end - items.len() * ITEM_SIZE);
    }

    /// Random edits change a leaf as they change a vector of items.
    #[test]
    fn a_leaf_is_a_list_of_items() {
        let mut state = 0x1234_5678_9abc_def0u64;
        let mut random = move |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            usize::try_from(state % below.max(1) as u64).expect("below a usize")
        };
        let mut leaf = vec![0; NODE_SIZE];
        let mut model: Vec<(u64, Vec<u8>)> = Vec::new();
        for round in 0..20_000u64 {
            match random(4) {
                0 | 1 => {
                    let slot = random(model.len() + 1);
                    let new: Vec<_> = (0..=random(3))
                        .map(|i| (round * 4 + i as u64, random(120)))
                        .map(|(number, size)| (number, value(number, size)))
                        .collect();
                    let bytes: usize = new.iter().map(|(_, d)| d.len() + ITEM_SIZE).sum();
                    if bytes > leaf_free(&leaf) {
                        continue;
                    }
                    let items = new.iter().map(|(number, data)| (key(*number), &data[..]));
                    insert_items(&mut leaf, slot, items);
                    model.splice(slot..slot, new);
                }
                2 if !model.is_empty() => {
                    let from = random(model.len());
                    let to = from + random((model.len() - from).min(4) + 1);
                    remove_items(&mut leaf, from, to);
                    model.drain(from..to);
                }
                3 if !model.is_empty() => {
                    let slot = random(model.len());
                    let size = random(150);
                    if size > model[slot].1.len() + leaf_free(&leaf) {
                        continue;
                    }
                    resize_item(&mut leaf, slot, size);
                    model[slot].1.resize(size, 0);
                }
                _ => {}
            }
            check(&leaf, &model);
        }
        let mut other = vec![0; NODE_SIZE];
        let half = model.len() / 2;
        copy_items(&mut other, 0, &leaf, half, model.len());
        check(&other, &model[half..]);
        // Builds the same leaf again: two runs of the old leaf, and a single item between them.
        let mut again = vec![0; NODE_SIZE];
        let mut filler = LeafFiller::new(&mut again);
        filler.copy(&leaf, 0..half);
        filler.push(key(model[half].0), &model[half].1);
        filler.copy(&leaf, half + 1..model.len());
        filler.finish();
        check(&again, &model);
    }
}
