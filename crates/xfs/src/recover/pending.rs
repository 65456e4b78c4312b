//! What is left to do when all transactions are replayed: intents without an end, unlinked inodes,
//! and extents that are staged for copy on write.

use std::collections::BTreeMap;

use offshoot_vfs::{Error, Malformed, Result, Structure};
use offshoot_xfs_format::log::items::XfsItemType;
use offshoot_xfs_format::log::{XfsLogItem, XfsLogVector};
use offshoot_xfs_format::{AgNumber, Ino, Lsn};

use crate::buffer::XfsBuffers;
use crate::group;
use crate::report::XfsPending;

/// The bytes that an intent takes besides its regions, roundly.
const INTENT_COST: u64 = 160;

/// The files that a report names.
const MOST_FILES: usize = 1000;

/// An intent whose end the log does not have.
#[derive(Debug)]
pub(super) struct PendingIntent {
    /// The transaction that it is of.
    pub(super) lsn: Lsn,
    /// Intents are finished in the order of the log.
    order: u64,
    /// The item.
    pub(super) regions: XfsLogVector,
}

/// The intents whose ends did not come yet.
#[derive(Debug, Default)]
pub(super) struct PendingIntents {
    /// By the number of their type and their id, which are unique together.
    intents: BTreeMap<(u16, u64), PendingIntent>,
    /// How many there were.
    count: u64,
    /// The memory that they take.
    pub(super) cost: u64,
}

/// The type of an intent, and its id; `None` for an item that is none.
fn intent_of(item: &XfsLogItem<'_>) -> Option<(XfsItemType, u64)> {
    Some(match item {
        XfsLogItem::Efi(intent) => (XfsItemType::Efi, intent.id),
        XfsLogItem::Rui(intent) => (XfsItemType::Rui, intent.id),
        XfsLogItem::Cui(intent) => (XfsItemType::Cui, intent.id),
        XfsLogItem::Bui(intent) => (XfsItemType::Bui, intent.id),
        XfsLogItem::Attri(intent) => (XfsItemType::Attri, intent.id),
        XfsLogItem::Xmi(intent) => (XfsItemType::Xmi, intent.id),
        _ => return None,
    })
}

/// The type of the intent that an item ends, and its id.
fn ended_by(item: &XfsLogItem<'_>) -> Option<(XfsItemType, u64)> {
    let (end, id) = match item {
        XfsLogItem::Efd(end) => (XfsItemType::Efd, end.id),
        XfsLogItem::Done { item, id } => (*item, *id),
        _ => return None,
    };
    let intent = match end {
        XfsItemType::Efd => XfsItemType::Efi,
        XfsItemType::Rud => XfsItemType::Rui,
        XfsItemType::Cud => XfsItemType::Cui,
        XfsItemType::Bud => XfsItemType::Bui,
        XfsItemType::Attrd => XfsItemType::Attri,
        XfsItemType::Xmd => XfsItemType::Xmi,
        _ => return None,
    };
    Some((intent, id))
}

impl PendingIntents {
    /// Takes an item of a transaction, in the order of the log.
    pub(super) fn add(&mut self, lsn: Lsn, item: &XfsLogItem<'_>) {
        if let Some((kind, id)) = ended_by(item) {
            // The intent of an end may lie before the tail.
            if let Some(intent) = self.intents.remove(&(kind as u16, id)) {
                self.cost -= intent.cost();
            }
            return;
        }
        let Some((kind, id)) = intent_of(item) else { return };
        let mut regions = XfsLogVector::default();
        if item.encode(&mut regions) {
            let intent = PendingIntent { lsn, order: self.count, regions };
            self.count += 1;
            self.cost += intent.cost();
            if let Some(before) = self.intents.insert((kind as u16, id), intent) {
                self.cost -= before.cost();
            }
        }
    }

    /// Counts them by type, and names the files that are wrong without them.
    pub(super) fn pending(&self) -> Result<XfsPending, Malformed> {
        let mut pending = XfsPending::default();
        for PendingIntent { regions, .. } in self.oldest_first() {
            let item = XfsLogItem::parse(regions.regions())?;
            let (count, files) = match &item {
                XfsLogItem::Efi(_) => (&mut pending.frees, vec![]),
                XfsLogItem::Rui(_) => (&mut pending.reverse_mappings, vec![]),
                XfsLogItem::Cui(_) => (&mut pending.reference_counts, vec![]),
                XfsLogItem::Bui(intent) => {
                    let files = intent.records.iter().map(|record| Ino(record.owner.get()));
                    (&mut pending.mappings, files.collect())
                }
                XfsLogItem::Attri(intent) => (&mut pending.attributes, vec![intent.ino]),
                XfsLogItem::Xmi(intent) => (&mut pending.exchanges, intent.inodes.to_vec()),
                _ => {
                    let problem = "an item that is no intent waits for its end";
                    return Err(Malformed::new(Structure::LogItem, problem));
                }
            };
            *count += 1;
            for Ino(file) in files {
                if pending.files.len() < MOST_FILES && !pending.files.contains(&file) {
                    pending.files.push(file);
                }
            }
        }
        Ok(pending)
    }

    /// The ids of all of them.
    pub(super) fn ids(&self) -> impl Iterator<Item = u64> {
        self.intents.keys().map(|(_, id)| *id)
    }

    pub(super) fn oldest_first(&self) -> Vec<&PendingIntent> {
        let mut intents: Vec<_> = self.intents.values().collect();
        intents.sort_unstable_by_key(|intent| intent.order);
        intents
    }

    /// The transaction with the oldest one.
    pub(super) fn first(&self) -> Option<Lsn> {
        self.oldest_first().first().map(|intent| intent.lsn)
    }
}

/// Adds what the headers of groups show. A reader can do without a damaged group, and without one
/// that the device does not read. Nothing is written while there is one: `for_writing`, the error
/// of the device is that of the call.
pub(super) fn add_groups(
    pending: &mut XfsPending,
    buffers: &XfsBuffers,
    for_writing: bool,
) -> Result<()> {
    for ag in (0..buffers.geometry().ag_count).map(AgNumber) {
        let found = group::unlinked_lists(buffers, ag)
            .and_then(|lists| Ok((lists, group::staged_extents(buffers, ag)?)));
        match found {
            Ok((lists, staged)) => {
                pending.unlinked_lists += lists.len() as u64;
                pending.staged_extents += staged;
            }
            Err(Error::Corrupt(_)) => pending.damaged_groups += 1,
            Err(Error::Io { .. }) if !for_writing => pending.damaged_groups += 1,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl PendingIntent {
    fn cost(&self) -> u64 {
        INTENT_COST + self.regions.byte_count() as u64
    }
}
