//! What goes into a tree in one batch: single edits, or a run of items of a leaf of another tree.
//!
//! The items of a leaf lie side by side in the order of their keys, and so do their headers and
//! data. When no item of the target tree comes between them, they are copied as one run: one copy
//! for all headers and one for all data.

use std::ops::Range;

use offshoot_btrfs_format::Key;
use offshoot_btrfs_format::edit::{
    ITEM_SIZE, LeafFiller, copy_items, data_mut, insert_items, items_bytes,
};

use crate::block::TreeBlock;

/// An edit of the item with a key: its new data, or `None` to remove it.
pub(crate) type ItemEdit<'e> = (Key, Option<&'e [u8]>);

/// Edits with ascending keys.
#[derive(Clone, Copy)]
pub(super) enum ItemEdits<'e> {
    Each(&'e [ItemEdit<'e>]),
    /// Puts the items of this leaf from the first slot up to, not including, the second.
    Run(&'e TreeBlock, usize, usize),
}

/// An edit that puts something.
fn put<'e>(&(key, data): &ItemEdit<'e>) -> (Key, &'e [u8]) {
    (key, data.expect("a run of edits has no removals"))
}

impl ItemEdits<'_> {
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

    /// The bytes that the items in `range` take with their headers.
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

    /// The edits from `at` on.
    pub(super) fn rest(self, at: usize) -> Self {
        self.part(at..self.len())
    }

    /// The edits with keys below `upper`.
    pub(super) fn below(self, upper: Option<Key>) -> Self {
        let Some(upper) = upper else { return self };
        let count = match self {
            Self::Each(edits) => edits.partition_point(|(key, _)| *key < upper),
            Self::Run(leaf, from, to) => leaf.first_at_least(upper).clamp(from, to) - from,
        };
        self.part(0..count)
    }

    /// The end of the edits that begin with `at`, have keys below `upper`, and are copied as one.
    pub(super) fn end_of_run(self, at: usize, upper: Option<Key>) -> usize {
        match (self, upper) {
            (Self::Each(_), _) => at + 1,
            (Self::Run(..), None) => self.len(),
            (Self::Run(leaf, from, to), Some(upper)) => {
                leaf.search_near(from + at, upper).0.clamp(from + at + 1, to) - from
            }
        }
    }

    /// Whether the sizes prove that all edits fit into `room` bytes.
    pub(super) fn fits_surely(self, mut room: usize) -> bool {
        match self {
            Self::Each(edits) => edits.iter().all(|(_, data)| {
                let left = data.and_then(|data| room.checked_sub(data.len() + ITEM_SIZE));
                room = left.unwrap_or(0);
                left.is_some()
            }),
            Self::Run(..) => self.bytes(0..self.len()) <= room,
        }
    }

    /// Adds the edits in `range`, none of which removes, to a leaf that is being filled.
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

    /// Inserts the edits in `range`, none of which removes, at `slot` of a leaf.
    pub(super) fn insert(self, leaf: &mut [u8], slot: usize, range: Range<usize>) {
        match self {
            Self::Each(edits) => insert_items(leaf, slot, edits[range].iter().map(put)),
            Self::Run(source, from, _) => {
                copy_items(leaf, slot, source.bytes(), from + range.start, from + range.end);
            }
        }
    }

    /// Overwrites the data at `slot` with that of the edit at `at`, which has the same length.
    pub(super) fn overwrite(self, leaf: &mut [u8], slot: usize, at: usize) {
        let data = match self {
            Self::Each(edits) => put(&edits[at]).1,
            Self::Run(source, from, _) => source.data(from + at),
        };
        data_mut(leaf, slot).copy_from_slice(data);
    }
}
