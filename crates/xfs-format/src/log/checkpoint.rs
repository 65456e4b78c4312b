//! Transactions, put together from the ops of records.
//!
//! Since delayed logging a transaction of the log is a *checkpoint*: all changes of many calls.
//! Its ops begin with a start op and end with a commit op; those of others lie between them. Only
//! a committed one counts. Recovery passes over a transaction that a crash left without its commit
//! op, and over ops whose start op lies before the tail of the log.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::op::{CLIENT_LOG, CLIENT_TRANSACTION, XfsLogOp, XfsOpFlags, XfsTransactionHeader};
use super::{BLOCK, XfsLogRing, XfsLogVector, XfsRegions, bad_record};
use crate::{Lsn, Malformed};

/// The memory that an open transaction takes besides its regions, roundly.
const OPEN_COST: u64 = 128;

/// The memory that a region takes besides its bytes.
const REGION_COST: u64 = 4;

/// A whole transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XfsCheckpoint {
    /// The number that all its ops carry (`tid`).
    pub tid: u32,
    /// The record with its start op. What is replayed from it gets this LSN.
    pub lsn: Lsn,
    /// The record with its commit op.
    pub committed: Lsn,
    /// The transaction header, then the regions of all items.
    vector: XfsLogVector,
}

impl XfsCheckpoint {
    /// The items, in the order of the log, each with its regions.
    pub fn items(&self) -> impl Iterator<Item = XfsRegions<'_>> {
        let mut rest = self.regions();
        std::iter::from_fn(move || {
            let (item, others) = split_item(rest).ok().flatten()?;
            rest = others;
            Some(item)
        })
    }

    /// The regions of all items.
    #[must_use]
    pub fn regions(&self) -> XfsRegions<'_> {
        let all = self.vector.regions();
        all.split_at(1).map_or(all, |(_, items)| items)
    }
}

/// A transaction without its commit op.
#[derive(Debug)]
struct OpenCheckpoint {
    lsn: Lsn,
    vector: XfsLogVector,
    /// Whether the rest of the last region is still to come.
    is_split: bool,
    /// What it counts of the memory that all may take.
    cost: u64,
}

/// The transactions that have begun and are not complete.
#[derive(Debug)]
pub struct XfsCheckpoints {
    open: HashMap<u32, OpenCheckpoint>,
    /// The memory that they take.
    cost: u64,
    /// The most that they may take: the log holds no more.
    most: u64,
}

impl XfsCheckpoints {
    /// No transactions yet, of a log of this size.
    #[must_use]
    pub fn new(ring: XfsLogRing) -> Self {
        let most = u64::from(ring.blocks()) * BLOCK as u64;
        Self { open: HashMap::new(), cost: 0, most }
    }

    /// Takes `op` of the record at `lsn`. Ops come in the order of the log. Returns the transaction
    /// that it completes.
    ///
    /// # Errors
    /// When the op is impossible for its transaction, or the completed one is malformed.
    pub fn add(&mut self, lsn: Lsn, op: &XfsLogOp<'_>) -> Result<Option<XfsCheckpoint>, Malformed> {
        if !matches!(op.client, CLIENT_TRANSACTION | CLIENT_LOG) {
            return Err(bad_record(format!("an op of the unknown client {:#x}", op.client)));
        }
        let mut open = match self.open.entry(op.tid) {
            Entry::Vacant(place) => {
                if op.flags.contains(XfsOpFlags::START) {
                    let (vector, cost) = (XfsLogVector::default(), OPEN_COST);
                    place.insert(OpenCheckpoint { lsn, vector, is_split: false, cost });
                    self.charge(OPEN_COST)?;
                }
                return Ok(None);
            }
            Entry::Occupied(open) => open,
        };
        let flags = op.flags - XfsOpFlags::LAST;
        let is_continued = flags.contains(XfsOpFlags::CONTINUED);
        let is_split = flags.contains(XfsOpFlags::CONTINUES);
        let rest = flags - XfsOpFlags::CONTINUED - XfsOpFlags::CONTINUES;
        if flags == XfsOpFlags::UNMOUNT {
            self.cost -= open.remove().cost;
            return Ok(None);
        }
        if flags == XfsOpFlags::COMMIT {
            let open = open.remove();
            self.cost -= open.cost;
            return open.complete(op.tid, lsn).map(Some);
        }
        if !rest.is_empty() {
            return Err(bad_record(format!(
                "op flags {:#x} in the open transaction {:#x}",
                op.flags, op.tid
            )));
        }
        let transaction = open.get_mut();
        if transaction.is_split != is_continued {
            let what = if is_continued { "rest without a" } else { "start before the end of a" };
            return Err(bad_record(format!("a {what} split region of transaction {:#x}", op.tid)));
        }
        transaction.is_split = is_split;
        let cost = if is_continued { 0 } else { REGION_COST } + op.data.len() as u64;
        let fits = if is_continued {
            transaction.vector.extend_last(op.data)
        } else if op.data.is_empty() && !is_split {
            return Ok(None);
        } else {
            transaction.vector.push_read(op.data)
        };
        transaction.cost += cost;
        self.charge(cost)?;
        if fits { Ok(None) } else { Err(self.too_large()) }
    }

    /// How many transactions are open.
    #[must_use]
    pub fn open_count(&self) -> usize {
        self.open.len()
    }

    /// The memory that the open transactions take, in bytes.
    #[must_use]
    pub fn byte_count(&self) -> u64 {
        self.cost
    }

    fn charge(&mut self, cost: u64) -> Result<(), Malformed> {
        self.cost += cost;
        if self.cost > self.most { Err(self.too_large()) } else { Ok(()) }
    }

    #[cold]
    fn too_large(&self) -> Malformed {
        bad_record(format!(
            "{} open transactions take {} bytes, more than the log has",
            self.open.len(),
            self.cost
        ))
    }
}

impl OpenCheckpoint {
    fn complete(self, tid: u32, committed: Lsn) -> Result<XfsCheckpoint, Malformed> {
        let Self { lsn, vector, is_split, .. } = self;
        if is_split {
            return Err(bad_record(format!("the last region of transaction {tid:#x} is cut")));
        }
        let checkpoint = XfsCheckpoint { tid, lsn, committed, vector };
        if let Some(header) = checkpoint.vector.regions().get(0) {
            XfsTransactionHeader::parse(header)?;
        }
        let mut rest = checkpoint.regions();
        while let Some((_, others)) = split_item(rest)? {
            rest = others;
        }
        Ok(checkpoint)
    }
}

/// The regions of the first item and the others; `None` when there are none. The first region of an
/// item says how many it has.
fn split_item(
    regions: XfsRegions<'_>,
) -> Result<Option<(XfsRegions<'_>, XfsRegions<'_>)>, Malformed> {
    let Some(first) = regions.get(0) else { return Ok(None) };
    let count = first.get(2..).and_then(<[u8]>::first_chunk).copied().map(u16::from_le_bytes);
    let split = count.filter(|&count| count > 0).and_then(|count| regions.split_at(count.into()));
    split.map(Some).ok_or_else(|| {
        bad_record(format!(
            "an item of {} regions where {} follow",
            count.unwrap_or(0),
            regions.len()
        ))
    })
}
