//! A leaf and the edits that go into it, as one sequence of items in the order of their keys.
//!
//! Merging moves no bytes. A sequence is a list of runs: neighbouring items of a leaf, or
//! neighbouring edits that put something (`edits`). Writing it copies run by run, one copy for
//! headers and one for data. It can be cut into parts that each fit a leaf.

use std::cell::Cell;
use std::ops::{Deref, Range};

use offshoot_btrfs_format::Key;
use offshoot_btrfs_format::edit::{ITEM_SIZE, LeafFiller, items_bytes, remove_items};

use super::batch::AppliedEdits;
use super::edits::ItemEdits;
use super::path::bytes;
use crate::block::{TreeBlock, WriteLatch};

/// Where the items of a run are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ItemSource {
    Leaf,
    Sibling,
    Edits,
}

/// A copy of a leaf, which is read while the leaf is written anew. Each thread keeps the memory for
/// its next copy.
pub(super) struct LeafCopy(Option<TreeBlock>);

thread_local! {
    static KEPT: Cell<Option<TreeBlock>> = const { Cell::new(None) };
}

impl LeafCopy {
    pub(super) fn of(leaf: &TreeBlock) -> Self {
        let mut copy = KEPT.take().filter(|kept| kept.bytes().len() == leaf.bytes().len());
        match &mut copy {
            Some(kept) => kept.bytes_mut().copy_from_slice(leaf.bytes()),
            None => copy = Some(leaf.clone()),
        }
        Self(copy)
    }
}

impl Deref for LeafCopy {
    type Target = TreeBlock;

    fn deref(&self) -> &TreeBlock {
        self.0.as_ref().expect("it is there until it is dropped")
    }
}

impl Drop for LeafCopy {
    fn drop(&mut self) {
        KEPT.set(self.0.take());
    }
}

/// Items that lie side by side.
#[derive(Clone, Debug)]
struct ItemRun {
    place: ItemSource,
    at: Range<usize>,
}

/// What the places of runs refer to.
#[derive(Clone, Copy)]
pub(super) struct RunSources<'s> {
    pub(super) leaf: &'s TreeBlock,
    pub(super) sibling: Option<&'s TreeBlock>,
    pub(super) edits: ItemEdits<'s>,
}

impl<'s> RunSources<'s> {
    fn block(&self, place: ItemSource) -> Option<&'s TreeBlock> {
        match place {
            ItemSource::Leaf => Some(self.leaf),
            ItemSource::Sibling => self.sibling,
            ItemSource::Edits => None,
        }
    }

    fn key(&self, run: &ItemRun) -> Key {
        match self.block(run.place) {
            Some(block) => block.key(run.at.start),
            None => self.edits.key(run.at.start),
        }
    }

    /// The bytes of the item at `at` with its header.
    fn size(&self, place: ItemSource, at: usize) -> usize {
        match self.block(place) {
            Some(block) => ITEM_SIZE + block.items()[at].size.get() as usize,
            None => self.edits.bytes(at..at + 1),
        }
    }
}

/// Items in the order of their keys.
#[derive(Debug, Default)]
pub(super) struct ItemSequence {
    runs: Vec<ItemRun>,
    /// The bytes of the items with their headers.
    pub(super) bytes: usize,
}

impl ItemSequence {
    /// Adds a run behind the others.
    fn push(&mut self, place: ItemSource, at: Range<usize>, bytes: usize) {
        self.bytes += bytes;
        match self.runs.last_mut() {
            _ if at.is_empty() => {}
            Some(last) if last.place == place && last.at.end == at.start => last.at.end = at.end,
            _ => self.runs.push(ItemRun { place, at }),
        }
    }

    pub(super) fn first_key(&self, sources: RunSources<'_>) -> Option<Key> {
        self.runs.first().map(|run| sources.key(run))
    }

    /// The key of the last item when it comes from an edit.
    pub(super) fn last_edit(&self, sources: RunSources<'_>) -> Option<Key> {
        let last = self.runs.last().filter(|run| run.place == ItemSource::Edits)?;
        Some(sources.edits.key(last.at.end - 1))
    }

    /// Whether the sequence is exactly the items of the leaf.
    fn is_leaf(&self, sources: RunSources<'_>) -> bool {
        let all = 0..sources.leaf.len();
        matches!(&self.runs[..], [ItemRun { place: ItemSource::Leaf, at }] if *at == all)
    }

    /// The sequence with all items of a sibling added, on the left or on the right.
    pub(super) fn with_sibling(&self, sibling: &TreeBlock, is_left: bool) -> Self {
        let whole = ItemRun { place: ItemSource::Sibling, at: 0..sibling.len() };
        let mut runs = self.runs.clone();
        runs.insert(if is_left { 0 } else { runs.len() }, whole);
        Self { runs, bytes: self.bytes + items_bytes(sibling.bytes(), 0, sibling.len()) }
    }

    /// Cuts the sequence into parts of at most `capacity` bytes. With `full`, all parts but the
    /// last are as large as possible. Otherwise there are as few parts as possible, about equal in
    /// size.
    pub(super) fn cut(self, sources: RunSources<'_>, capacity: usize, full: bool) -> Vec<Self> {
        let (mut left, mut leaves) = (self.bytes, self.bytes.div_ceil(capacity).max(1));
        let mut parts = Vec::with_capacity(leaves + 1);
        let mut part = Self::default();
        for ItemRun { place, at } in self.runs {
            for at in at {
                let size = sources.size(place, at);
                // The part is nearer to its share without the item.
                let has_share = !full && leaves > 1 && 2 * part.bytes + size > 2 * (left / leaves);
                if part.bytes > 0 && (has_share || part.bytes + size > capacity) {
                    left -= part.bytes;
                    leaves = (leaves - 1).max(1);
                    parts.push(std::mem::take(&mut part));
                }
                part.push(place, at..at + 1, size);
            }
        }
        parts.push(part);
        parts
    }

    /// Fills an empty leaf that has its header.
    pub(super) fn fill(&self, leaf: &mut [u8], sources: RunSources<'_>) {
        let mut filler = LeafFiller::new(leaf);
        for ItemRun { place, at } in &self.runs {
            match sources.block(*place) {
                Some(block) => filler.copy(block.bytes(), at.clone()),
                None => sources.edits.fill(&mut filler, at.clone()),
            }
        }
        filler.finish();
    }

    /// Replaces the items of `leaf` by these. `sources` has a copy of the old ones.
    pub(super) fn replace(&self, leaf: &mut WriteLatch, sources: RunSources<'_>) {
        if !self.is_leaf(sources) {
            self.fill(bytes(leaf), sources);
        }
    }
}

/// A leaf merged with edits.
pub(super) struct MergedLeaf {
    pub(super) sequence: ItemSequence,
    /// How many edits were merged.
    pub(super) edits: usize,
    pub(super) applied: AppliedEdits,
    /// No item is added or removed, or changes its size.
    keeps_shape: bool,
}

impl MergedLeaf {
    /// Merges the items of `leaf` with edits that belong there, at least one, until the new data
    /// would take more than `most` bytes.
    pub(super) fn new(leaf: &TreeBlock, edits: ItemEdits<'_>, most: usize) -> Self {
        let items = |range: Range<usize>| items_bytes(leaf.bytes(), range.start, range.end);
        let mut new = Self {
            sequence: ItemSequence::default(),
            edits: 0,
            applied: AppliedEdits { leaves: 1, ..AppliedEdits::default() },
            keeps_shape: true,
        };
        let (mut slot, mut put) = (0, 0);
        while new.edits < edits.len() {
            let i = new.edits;
            let (at, exists) = leaf.search_near(slot, edits.key(i));
            let upper = (at < leaf.len()).then(|| leaf.key(at));
            let mut end = if exists { i + 1 } else { edits.end_of_run(i, upper) };
            let least = if i == 0 { 1 } else { i };
            while end > least && put + edits.bytes(i..end) > most {
                end -= 1;
            }
            if end == i {
                break;
            }
            let size = edits.bytes(i..end);
            put += size;
            new.sequence.push(ItemSource::Leaf, slot..at, items(slot..at));
            if edits.puts(i) {
                new.sequence.push(ItemSource::Edits, i..end, size);
            }
            slot = at + usize::from(exists);
            new.keeps_shape &= size == items(at..slot);
            new.edits = end;
            *new.applied.count(edits.puts(i), exists) += end - i;
        }
        new.sequence.push(ItemSource::Leaf, slot..leaf.len(), items(slot..leaf.len()));
        new
    }

    /// Writes the result to `leaf`, the one that was merged, and moves as few bytes as possible.
    pub(super) fn write(&self, leaf: &mut WriteLatch, edits: ItemEdits<'_>) {
        if self.keeps_shape {
            return self.overwrite(bytes(leaf), edits);
        }
        let Some((gap, puts)) = self.one_gap(leaf.len()) else {
            let old = LeafCopy::of(leaf);
            return self.sequence.replace(leaf, RunSources { leaf: &old, sibling: None, edits });
        };
        if !gap.is_empty() {
            remove_items(bytes(leaf), gap.start, gap.end);
        }
        if !puts.is_empty() {
            edits.insert(bytes(leaf), gap.start, puts);
        }
    }

    /// The slots that leave a leaf of `len` items, and the edits that replace them, if each of the
    /// two is one range.
    fn one_gap(&self, len: usize) -> Option<(Range<usize>, Range<usize>)> {
        let (mut runs, mut gap, mut puts) = (&self.sequence.runs[..], 0..len, 0..0);
        if let [ItemRun { place: ItemSource::Leaf, at }, rest @ ..] = runs
            && at.start == 0
        {
            (gap.start, runs) = (at.end, rest);
        }
        if let [ItemRun { place: ItemSource::Edits, at }, rest @ ..] = runs {
            (puts, runs) = (at.clone(), rest);
        }
        if let [ItemRun { place: ItemSource::Leaf, at }] = runs
            && at.end == len
        {
            (gap.end, runs) = (at.start, &[]);
        }
        runs.is_empty().then_some((gap, puts))
    }

    /// Overwrites data with new data of the same sizes.
    fn overwrite(&self, leaf: &mut [u8], edits: ItemEdits<'_>) {
        let mut slot = 0;
        for ItemRun { place, at } in &self.sequence.runs {
            if *place == ItemSource::Edits {
                for (slot, edit) in (slot..).zip(at.clone()) {
                    edits.overwrite(leaf, slot, edit);
                }
            }
            slot += at.len();
        }
    }
}
