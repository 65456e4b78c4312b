//! What is put into a tree in one go: edits one by one, or items of a leaf of another tree as they
//! stand there.
//!
//! The items of a leaf lie side by side in the order of their keys, and so do their headers and
//! data. Where no item of the tree comes between them they go into it as one run: headers and data
//! with one copy each, however many there are.

use std::ops::Range;

use offshoot_btrfs_format::Key;
use offshoot_btrfs_format::edit::{
    ITEM_SIZE, LeafFiller, copy_items, data_mut, insert_items, items_bytes,
};

use crate::block::TreeBlock;

/// What becomes of the item with a key: it holds this data, or there is none.
pub(crate) type ItemEdit<'e> = (Key, Option<&'e [u8]>);

/// Edits with ascending keys.
#[derive(Clone, Copy)]
pub(super) enum Edits<'e> {
    Each(&'e [ItemEdit<'e>]),
    /// The items of this leaf from one slot to another are put.
    Run(&'e TreeBlock, usize, usize),
}

/// An edit that puts something.
fn put<'e>(&(key, data): &ItemEdit<'e>) -> (Key, &'e [u8]) {
    (key, data.expect("a run of edits has no removals"))
}

impl Edits<'_> {
    pub(super) fn len(self) -> usize {
        match self {
            Self::Each(edits) => edits.len(),
            Self::Run(_, from, to) => to - from,
        }
    }

    pub(super) fn is_empty(self) -> bool {
        self.len() == 0
    }

    pub(super) fn key(self, at: usize) -> Key {
        match self {
            Self::Each(edits) => edits[at].0,
            Self::Run(leaf, from, _) => leaf.key(from + at),
        }
    }

    pub(super) fn puts(self, at: usize) -> bool {
        match self {
            Self::Each(edits) => edits[at].1.is_some(),
            Self::Run(..) => true,
        }
    }

    /// What the items in `range` take with their headers.
    pub(super) fn bytes(self, range: Range<usize>) -> usize {
        match self {
            Self::Each(edits) => edits[range]
                .iter()
                .filter_map(|edit| edit.1)
                .map(|data| data.len() + ITEM_SIZE)
                .sum(),
            Self::Run(leaf, from, _) => {
                items_bytes(leaf.bytes(), from + range.start, from + range.end)
            }
        }
    }

    pub(super) fn part(self, range: Range<usize>) -> Self {
        match self {
            Self::Each(edits) => Self::Each(&edits[range]),
            Self::Run(leaf, from, _) => Self::Run(leaf, from + range.start, from + range.end),
        }
    }

    /// Those from `at` on.
    pub(super) fn rest(self, at: usize) -> Self {
        self.part(at..self.len())
    }

    /// Those with keys below `upper`.
    pub(super) fn below(self, upper: Option<Key>) -> Self {
        let Some(upper) = upper else { return self };
        let count = match self {
            Self::Each(edits) => edits.partition_point(|(key, _)| *key < upper),
            Self::Run(leaf, from, to) => leaf.first_at_least(upper).clamp(from, to) - from,
        };
        self.part(0..count)
    }

    /// Where those end that begin with `at`, have keys below `upper`, and go as one.
    pub(super) fn end_of_run(self, at: usize, upper: Option<Key>) -> usize {
        match (self, upper) {
            (Self::Each(_), _) => at + 1,
            (Self::Run(..), None) => self.len(),
            (Self::Run(leaf, from, to), Some(upper)) => {
                leaf.search_near(from + at, upper).0.clamp(from + at + 1, to) - from
            }
        }
    }

    /// Whether all of them surely fit into so many bytes.
    pub(super) fn surely_fit(self, mut room: usize) -> bool {
        match self {
            Self::Each(edits) => edits.iter().all(|(_, data)| {
                let left = data.and_then(|data| room.checked_sub(data.len() + ITEM_SIZE));
                room = left.unwrap_or(0);
                left.is_some()
            }),
            Self::Run(..) => self.bytes(0..self.len()) <= room,
        }
    }

    /// Adds those in `range`, which put something, to a leaf that is being filled.
    pub(super) fn fill(self, filler: &mut LeafFiller<'_>, range: Range<usize>) {
        match self {
            Self::Each(edits) => {
                edits[range].iter().map(put).for_each(|(key, data)| filler.push(key, data));
            }
            Self::Run(leaf, from, _) => {
                filler.copy(leaf.bytes(), from + range.start..from + range.end);
            }
        }
    }

    /// Inserts those in `range`, which put something, at `slot` of a leaf.
    pub(super) fn insert(self, leaf: &mut [u8], slot: usize, range: Range<usize>) {
        match self {
            Self::Each(edits) => insert_items(leaf, slot, edits[range].iter().map(put)),
            Self::Run(source, from, _) => {
                copy_items(leaf, slot, source.bytes(), from + range.start, from + range.end);
            }
        }
    }

    /// Makes the data at `slot` what the edit at `at` puts, which is as long.
    pub(super) fn overwrite(self, leaf: &mut [u8], slot: usize, at: usize) {
        let data = match self {
            Self::Each(edits) => put(&edits[at]).1,
            Self::Run(source, from, _) => source.data(from + at),
        };
        data_mut(leaf, slot).copy_from_slice(data);
    }
}
