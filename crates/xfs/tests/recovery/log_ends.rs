//! Where the log in an image may end, and what each end leaves to do.
//!
//! A test that cuts a log must not cut what has reached the blocks at home already: no crash leaves
//! a block that is newer than the log. The kernel writes blocks home every 30 seconds, so a slow
//! machine has volumes with fewer ends than a fast one.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use offshoot_xfs_format::identity::XfsIdentity;
use offshoot_xfs_format::log::items::XfsItemType;
use offshoot_xfs_format::log::{XfsCheckpoints, XfsLogItem, XfsLogRecord, op};
use offshoot_xfs_format::{Ino, Lsn};

use crate::log_on_disk::LogOnDisk;

/// An end that a crash could have given to the log: `lost` and all behind it are lost.
#[derive(Clone, Debug)]
pub(crate) struct LogEnd {
    pub(crate) lost: XfsLogRecord,
    /// The intents without an end in front of it, by their types.
    pub(crate) intents: BTreeMap<u16, usize>,
}

/// What a walk through the log has learned.
#[derive(Default)]
struct LogWalk {
    /// The intents that wait for their ends, by type and id.
    intents: HashSet<(u16, u64)>,
    /// The places of all units that were logged, in bytes.
    units: BTreeSet<u64>,
    /// By the record with the start op of a transaction: the last one with a commit op.
    commits: BTreeMap<Lsn, Lsn>,
}

impl LogOnDisk {
    /// All ends that the log may have, in their order.
    pub(crate) fn possible_ends(&self) -> Vec<LogEnd> {
        let (mut ends, mut last) = (Vec::new(), None::<XfsLogRecord>);
        let walk = self.walk(|walk, record| {
            // Later records are written over the tail of an early one.
            let has_tail =
                |last: &XfsLogRecord| self.ring.distance(last.tail, self.ends.head).is_some();
            if last.as_ref().is_some_and(has_tail) {
                ends.push(LogEnd { lost: record.clone(), intents: walk.counts() });
            }
            last = Some(record.clone());
        });
        let at_home = walk.newest_at_home(self);
        ends.retain(|end| at_home.is_none_or(|newest| end.lost.lsn > newest));
        ends
    }

    /// The intents of a type that have no end in the whole log.
    pub(crate) fn intents_left(&self, kind: XfsItemType) -> usize {
        let counts = self.walk(|_, _| {}).counts();
        counts.get(&(kind as u16)).copied().unwrap_or(0)
    }

    /// Walks through the log. `visit` gets each record, and what the walk has learned before it.
    fn walk(&self, mut visit: impl FnMut(&LogWalk, &XfsLogRecord)) -> LogWalk {
        let (mut walk, mut open) = (LogWalk::default(), XfsCheckpoints::new(self.ring));
        for record in self.records() {
            visit(&walk, &record);
            let (_, mut blocks) = self.read(record.lsn);
            for op in op::ops(record.unpack(&mut blocks).unwrap(), record.ops) {
                let Some(whole) = open.add(record.lsn, &op.unwrap()).unwrap() else { continue };
                walk.commits.insert(whole.lsn, whole.committed);
                for regions in whole.items() {
                    walk.item(self, &XfsLogItem::parse(regions).unwrap());
                }
            }
        }
        walk
    }
}

impl LogWalk {
    fn item(&mut self, log: &LogOnDisk, item: &XfsLogItem<'_>) {
        match item {
            XfsLogItem::Efi(intent) => self.intent(XfsItemType::Efi, intent.id),
            XfsLogItem::Rui(intent) => self.intent(XfsItemType::Rui, intent.id),
            XfsLogItem::Cui(intent) => self.intent(XfsItemType::Cui, intent.id),
            XfsLogItem::Bui(intent) => self.intent(XfsItemType::Bui, intent.id),
            XfsLogItem::Attri(intent) => self.intent(XfsItemType::Attri, intent.id),
            XfsLogItem::Xmi(intent) => self.intent(XfsItemType::Xmi, intent.id),
            XfsLogItem::Efd(end) => self.end(XfsItemType::Efi, end.id),
            XfsLogItem::Done { item, id } => {
                let intent = match item {
                    XfsItemType::Rud => XfsItemType::Rui,
                    XfsItemType::Cud => XfsItemType::Cui,
                    XfsItemType::Bud => XfsItemType::Bui,
                    XfsItemType::Attrd => XfsItemType::Attri,
                    XfsItemType::Xmd => XfsItemType::Xmi,
                    _ => return,
                };
                self.end(intent, *id);
            }
            XfsLogItem::Buffer(buffer) => drop(self.units.insert(buffer.place.bytes())),
            XfsLogItem::Inode(inode) => {
                self.units.extend(log.geometry.inode_offset(Ino(inode.ino.0)));
            }
            _ => {}
        }
    }

    fn counts(&self) -> BTreeMap<u16, usize> {
        let mut counts = BTreeMap::new();
        self.intents.iter().for_each(|(kind, _)| *counts.entry(*kind).or_default() += 1);
        counts
    }

    fn intent(&mut self, kind: XfsItemType, id: u64) {
        self.intents.insert((kind as u16, id));
    }

    fn end(&mut self, kind: XfsItemType, id: u64) {
        self.intents.remove(&(kind as u16, id));
    }

    /// The record with the last commit op of what has reached its place.
    fn newest_at_home(&self, log: &LogOnDisk) -> Option<Lsn> {
        let committed = |at: &u64| {
            let unit = log.device_bytes(*at, 512);
            let lsn = XfsIdentity::of_magic(&log.geometry, &unit)?.lsn_of(&unit)?;
            self.commits.get(&lsn).copied()
        };
        self.units.iter().filter_map(committed).max()
    }
}
