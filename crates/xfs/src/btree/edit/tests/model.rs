//! A model of a tree: its records by their keys.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;

use offshoot_testkit::random::Random;
use offshoot_xfs_format::btree::{XfsSearchKey, XfsTree};
use offshoot_xfs_format::record::{
    XfsExtent, XfsExtentItem, XfsFreeExtent, XfsInodeChunk, XfsReverseFlags, XfsReverseMap,
    XfsSharedExtent, XfsTreeRecord,
};
use offshoot_xfs_format::{AgBlock, AgIno, AgNumber, FileBlock, FsBlock, XfsGeometry};

use super::super::{XfsEditRoot, XfsTreeEdit};
use super::image::TestImage;
use crate::btree::XfsTreeCursor;

/// In which order records come and go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecordOrder {
    Up,
    Down,
    Mixed,
}

/// Records that tests make up.
pub(super) trait TreeRecordMaker: XfsTreeRecord + PartialEq + std::fmt::Debug {
    /// The record of a slot. Those of two slots have different keys and, but for the reverse map,
    /// do not overlap. The key depends on the slot alone.
    fn make(geometry: &XfsGeometry, slot: u32, variant: u32) -> Self;
}

/// The first block of a slot.
fn start(slot: u32) -> u32 {
    64 + slot * 8
}

impl TreeRecordMaker for XfsFreeExtent {
    fn make(_: &XfsGeometry, slot: u32, _: u32) -> Self {
        Self { start: start(slot).into(), count: (1 + slot.wrapping_mul(0x9e37_79b1) % 7).into() }
    }
}

impl TreeRecordMaker for XfsInodeChunk {
    fn make(geometry: &XfsGeometry, slot: u32, variant: u32) -> Self {
        let first = AgIno(64 * (64 + slot));
        Self::new(geometry, first, 0, 1 | u64::from(variant) << 7)
    }
}

impl TreeRecordMaker for XfsReverseMap {
    fn make(geometry: &XfsGeometry, slot: u32, variant: u32) -> Self {
        // Four files share what begins at one block, and long extents reach over short ones.
        let count = if slot.is_multiple_of(97) { 1 + variant % 4000 } else { 1 + variant % 9 };
        let is_unwritten = variant.is_multiple_of(5);
        let flags = if is_unwritten { XfsReverseFlags::UNWRITTEN.bits() } else { 0 };
        Self {
            start: start(slot / 4).into(),
            count: count.into(),
            owner: geometry.ino(AgNumber(0), AgIno(1024 + slot % 4)).0.into(),
            offset: (flags | (u64::from(slot) * 5000)).into(),
        }
    }
}

impl TreeRecordMaker for XfsSharedExtent {
    fn make(_: &XfsGeometry, slot: u32, variant: u32) -> Self {
        Self {
            start: start(slot).into(),
            count: (1 + variant % 8).into(),
            references: (2 + variant).into(),
        }
    }
}

impl TreeRecordMaker for XfsExtentItem {
    fn make(_: &XfsGeometry, slot: u32, variant: u32) -> Self {
        Self::from(XfsExtent {
            offset: FileBlock(u64::from(slot) * 8),
            start: FsBlock(start(slot).into()),
            count: 1 + variant % 8,
            is_unwritten: variant.is_multiple_of(3),
        })
    }
}

/// A tree and what should be in it.
pub(super) struct TreeModel<R> {
    pub(super) image: TestImage,
    records: BTreeMap<XfsSearchKey, R>,
    /// The slots of all keys.
    slots: HashMap<XfsSearchKey, u32>,
    tree: XfsTree,
    changes: u64,
}

/// Slots are below this.
const SLOTS: u32 = 60_000;

impl<R: TreeRecordMaker> TreeModel<R> {
    pub(super) fn new(image: TestImage) -> Self {
        let tree = image.root.tree();
        let key = |slot| tree.low_key(R::make(&image.geometry, slot, 1).as_bytes());
        let slots = (0..SLOTS).map(|slot| (key(slot), slot)).collect();
        let mut model = Self { image, records: BTreeMap::new(), slots, tree, changes: 0 };
        if tree == XfsTree::Extents {
            model.plant_list(1);
        }
        model
    }

    pub(super) fn parts(&self) -> (XfsGeometry, XfsEditRoot) {
        (self.image.geometry.clone(), self.image.root.clone())
    }

    fn key(&self, record: &R) -> XfsSearchKey {
        self.tree.low_key(record.as_bytes())
    }

    fn make(&self, slot: u32, variant: u64) -> R {
        R::make(&self.image.geometry, slot, u32::try_from(variant).unwrap())
    }

    fn any_slot(random: &mut Random) -> u32 {
        u32::try_from(random.below(SLOTS.into())).unwrap()
    }

    pub(super) fn levels(&self) -> u32 {
        self.image.levels()
    }

    pub(super) fn summary(&self) -> String {
        format!("{} records on {} levels", self.records.len(), self.levels())
    }

    /// A model of a tree that was made of a list of extents.
    pub(super) fn plant_list(&mut self, count: u32) {
        let (geometry, root) = self.parts();
        let XfsEditRoot::Fork { owner, room, root } = root else { panic!("{root:?}") };
        for (_, at) in root.children {
            use super::super::XfsTreeBlocks;
            self.image.free(at).unwrap();
        }
        let list: Vec<_> = (0..count).map(|slot| self.make(slot * 3, 1)).collect();
        self.records = list.iter().map(|record| (self.key(record), *record)).collect();
        let items: Vec<XfsExtentItem> = list
            .iter()
            .map(|record| zerocopy::FromBytes::read_from_bytes(record.as_bytes()).unwrap())
            .collect();
        let near = geometry.fs_block(AgNumber(1), AgBlock(100));
        XfsTreeEdit::plant(&geometry, (owner, room), near, &items, &mut self.image).unwrap();
        self.prove();
    }

    /// Makes a list of the tree again, if it is small enough.
    pub(super) fn take_list(&mut self, most: usize, expected: bool) {
        let (geometry, root) = self.parts();
        let list = XfsTreeEdit::new(&geometry, root, &mut self.image).take_list(most).unwrap();
        assert_eq!(list.is_some(), expected);
        if let Some(list) = list {
            let expected: Vec<_> = self.records.values().map(|r| r.as_bytes().to_vec()).collect();
            let list: Vec<_> = list.iter().map(|item| item.0.to_vec()).collect();
            assert_eq!(list, expected);
        }
    }

    pub(super) fn insert(&mut self, record: R) {
        let (geometry, root) = self.parts();
        XfsTreeEdit::new(&geometry, root, &mut self.image).insert(&record).unwrap();
        self.records.insert(self.key(&record), record);
        self.written();
    }

    fn remove(&mut self, key: XfsSearchKey) {
        let (geometry, root) = self.parts();
        let mut edit = XfsTreeEdit::new(&geometry, root, &mut self.image);
        assert_eq!(edit.exact(key).unwrap(), self.records.get(&key).copied());
        edit.remove().unwrap();
        self.records.remove(&key);
        self.written();
    }

    fn written(&mut self) {
        self.image.write_back();
        self.changes += 1;
        if self.changes.is_multiple_of(1_500) {
            self.prove();
        }
    }

    /// Proves that the tree is sound and has the records of the model, also for a reader.
    pub(super) fn prove(&mut self) {
        self.image.write_back();
        let expected: Vec<_> =
            self.records.values().map(|record| record.as_bytes().to_vec()).collect();
        assert!(self.image.prove() == expected, "other records than those of the model");
        let buffers = self.image.buffers();
        let mut cursor = XfsTreeCursor::new(&buffers, self.image.root.view());
        if self.records.is_empty() {
            return;
        }
        cursor.seek(XfsSearchKey([0; 3])).unwrap();
        for record in self.records.values() {
            assert_eq!(cursor.record::<R>().as_ref(), Some(record));
            cursor.advance().unwrap();
        }
        assert_eq!(cursor.record::<R>(), None);
    }

    /// A record that is not in the tree.
    pub(super) fn new_record(&self, random: &mut Random) -> R {
        loop {
            let record = self.make(Self::any_slot(random), random.below(1 << 20));
            if !self.records.contains_key(&self.key(&record)) {
                return record;
            }
        }
    }

    /// Inserts records until there are `most`.
    pub(super) fn fill(&mut self, random: &mut Random, order: RecordOrder, most: u64) {
        let mut slot = 0;
        while (self.records.len() as u64) < most {
            let record = match order {
                RecordOrder::Mixed => self.new_record(random),
                RecordOrder::Up => self.make(slot, random.below(1 << 20)),
                RecordOrder::Down => self.make(SLOTS - 1 - slot, random.below(1 << 20)),
            };
            slot += 1;
            if !self.records.contains_key(&self.key(&record)) {
                self.insert(record);
            }
        }
        self.prove();
    }

    fn any_key(&self, random: &mut Random) -> XfsSearchKey {
        let key = self.key(&self.make(Self::any_slot(random), 1));
        let behind = self.records.range(key..).next();
        *behind.or(self.records.first_key_value()).unwrap().0
    }

    /// Removes records until there are `most`.
    pub(super) fn drain_to(&mut self, random: &mut Random, order: RecordOrder, most: usize) {
        while self.records.len() > most {
            let key = match order {
                RecordOrder::Up => *self.records.first_key_value().unwrap().0,
                RecordOrder::Down => *self.records.last_key_value().unwrap().0,
                RecordOrder::Mixed => self.any_key(random),
            };
            self.remove(key);
        }
        self.prove();
    }

    /// Removes all records.
    pub(super) fn drain(&mut self, random: &mut Random, order: RecordOrder) {
        self.drain_to(random, order, 0);
        let levels = if self.tree == XfsTree::Extents { 2 } else { 1 };
        assert_eq!(self.levels(), levels);
        // An empty tree is as good as a new one.
        self.fill(random, RecordOrder::Up, 3);
    }

    /// Inserts, replaces, removes and finds records at random.
    pub(super) fn churn(&mut self, random: &mut Random, changes: u64) {
        for _ in 0..changes {
            match random.below(3) {
                0 => self.insert(self.new_record(random)),
                1 => self.remove(self.any_key(random)),
                _ => self.replace(random),
            }
            self.find(random);
        }
        self.prove();
    }

    fn replace(&mut self, random: &mut Random) {
        let key = self.any_key(random);
        let changed = self.make(self.slots[&key], random.below(1 << 20));
        let (geometry, root) = self.parts();
        let mut edit = XfsTreeEdit::new(&geometry, root, &mut self.image);
        edit.exact::<R>(key).unwrap().unwrap();
        edit.replace(&changed).unwrap();
        // The cursor stays.
        edit.replace(&changed).unwrap();
        self.records.insert(key, changed);
        self.written();
    }

    fn find(&mut self, random: &mut Random) {
        let key = self.key(&self.make(Self::any_slot(random), 1));
        let (geometry, root) = self.parts();
        let records = &self.records;
        let mut edit = XfsTreeEdit::new(&geometry, root, &mut self.image);
        assert_eq!(edit.exact::<R>(key).unwrap(), records.get(&key).copied());
        let mut before = records.range(..=key).rev().map(|(_, record)| *record);
        assert_eq!(edit.at_most::<R>(key).unwrap(), before.next());
        for expected in before.map(Some).chain([None]).take(100) {
            assert_eq!(edit.previous::<R>().unwrap(), expected);
        }
        let mut behind = records.range(key..).map(|(_, record)| *record);
        assert_eq!(edit.at_least::<R>(key).unwrap(), behind.next());
        for expected in behind.map(Some).chain([None]).take(100) {
            assert_eq!(edit.next::<R>().unwrap(), expected);
        }
    }

    /// The blocks that inserts change: all, and most for one; and the bytes of their chunks.
    pub(super) fn cost(&mut self, random: &mut Random, inserts: u64) -> (usize, usize, usize) {
        let (mut blocks, mut most, mut bytes) = (0, 0, 0);
        for _ in 0..inserts {
            let record = self.new_record(random);
            let (geometry, root) = self.parts();
            XfsTreeEdit::new(&geometry, root, &mut self.image).insert(&record).unwrap();
            self.records.insert(self.key(&record), record);
            let changed = &self.image.changed;
            blocks += changed.len();
            most = most.max(changed.len());
            bytes += changed.values().map(|chunks| chunks.len() * 128).sum::<usize>();
            self.image.write_back();
        }
        self.prove();
        (blocks, most, bytes)
    }

    /// Compares what overlaps a range with the model.
    pub(super) fn check_overlapping(&mut self, random: &mut Random) {
        let first = Self::any_slot(random) * 2;
        let last = first + u32::try_from(random.below(50)).unwrap();
        let tree = self.tree;
        let (geometry, root) = self.parts();
        let expected: Vec<_> = self
            .records
            .values()
            .filter(|record| {
                let bytes = record.as_bytes();
                let (low, high) = (tree.low_key(bytes), tree.high_key(bytes));
                low.0[0] <= last.into() && high.0[0] >= first.into()
            })
            .copied()
            .collect();
        let mut found = Vec::new();
        let mut edit = XfsTreeEdit::new(&geometry, root, &mut self.image);
        edit.overlapping((AgBlock(first), AgBlock(last)), &mut |record: &R| {
            found.push(*record);
            ControlFlow::Continue(())
        })
        .unwrap();
        assert_eq!(found, expected);
    }
}
