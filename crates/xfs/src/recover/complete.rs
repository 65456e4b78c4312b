//! What a replayed log leaves to do, done: intents without an end, unlinked inodes, and extents
//! that are staged for copy on write.
//!
//! ```text
//! tail                head
//!  | records of before | BUD RUI | RUD | inodes are freed | staged extents are freed | unmount
//!  '- the oldest intent holds the tail until its end is durable
//! ```
//!
//! Each change is a transaction, and the log goes on behind its head. So when this is cut, what is
//! done is in the log, and the next recovery, ours or the kernel's, finds what is left.
//!
//! An intent that cannot be done ends the recovery, as it ends that of the kernel: what follows
//! from it is not known, and to leave it away would make a volume of which only a repair knows
//! what is wrong. So does an unlinked inode that counts other extents than it has, for which the
//! kernel shuts the volume down; a list that cannot be walked is emptied, as by the kernel. All of
//! this happens in memory first, so the device is left as it was. Only an inode whose blocks a full
//! group cannot take back stays in its list, and so do staged extents of such a group.
//!
//! Intents are ended in their order. What follows from them comes after the last of them: a later
//! intent may be of the same chain.

use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_kit::counter::WriteStop;
use offshoot_vfs::{Code, Errno, Error, Result};
use offshoot_xfs_format::log::XfsLogItem;
use offshoot_xfs_format::superblock::XfsSuperblock;
use offshoot_xfs_format::{AgNumber, Lsn};

use super::log::{VolumeLog, in_log};
use super::pending::PendingIntents;
use super::{CACHE_BYTES, NEXT_STEP, finish};
use crate::buffer::{XfsBuffers, malformed};
use crate::defer::{DeferredChain, DeferredWork, IntentIds, LoggedIntent};
use crate::group;
use crate::log::{LogDisk, LoggedItem, XfsLog, XfsLogOptions};
use crate::names::inactive::{UnlinkedLeft, free_unlinked_lists};
use crate::options::XfsOptions;
use crate::trans::{AgExtent, XfsTransaction, XfsTransactionKind, XfsTransactions};

/// The blocks that a transaction may take for trees that grow.
const TREE_BLOCKS: u64 = 64;

/// The staged extents of a group that are looked up at once.
const STAGED_AT_ONCE: usize = 64;

/// What was done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CompletedWork {
    pub(super) intents: u64,
    /// Inodes that were freed.
    pub(super) inodes: u64,
    /// Extents that were freed.
    pub(super) staged: u64,
    /// Lists of unlinked inodes that were given up, because they could not be walked.
    pub(super) cleared_lists: u64,
    /// Inodes that stay in their lists, because their group is full.
    pub(super) left: Vec<UnlinkedLeft>,
}

/// Does what is left to do, and empties the log. Everything that was replayed is durable.
pub(super) fn complete(
    device: &Arc<dyn BlockDevice>,
    log: &VolumeLog,
    intents: &PendingIntents,
    options: &XfsOptions,
) -> Result<CompletedWork> {
    let (_, superblock) = finish::first_superblock(device)?;
    let old = OldIntent::all(intents)?;
    let ids = IntentIds::beside(intents.ids().collect());
    let transactions = start(device, &superblock, log, &old, options)?;
    transactions.prove_all(options.proves_commits);
    let step = OldIntent::step_kind(&old);
    require_room(log, &transactions, (!old.is_empty()).then_some(step))?;
    let completion = Completion { transactions: &transactions, ids: &ids, step };
    let mut done = CompletedWork { intents: old.len() as u64, ..CompletedWork::default() };
    completion.end_intents(old)?;
    let unlinked = free_unlinked_lists(&transactions, &ids)?;
    (done.inodes, done.cleared_lists) = (unlinked.inodes, unlinked.cleared_lists);
    done.left = unlinked.left;
    done.staged = free_staged(&transactions, &ids)?;
    transactions.unmount()?;
    Ok(done)
}

/// Frees the extents that writes to shared blocks had staged. No such write is under way. Returns
/// how many. Where the trees of a group have no room for that, its extents stay staged.
pub(crate) fn free_staged(transactions: &XfsTransactions, ids: &IntentIds) -> Result<u64> {
    let mut count = 0;
    for ag in (0..transactions.geometry().ag_count).map(AgNumber) {
        if group::staged_extents(transactions.buffers(), ag)? > 0 {
            count += free_staged_in(transactions, ids, ag)?;
        }
    }
    Ok(count)
}

/// Starts the log behind the head, and transactions over it.
fn start(
    device: &Arc<dyn BlockDevice>,
    superblock: &XfsSuperblock,
    log: &VolumeLog,
    old: &[OldIntent],
    options: &XfsOptions,
) -> Result<XfsTransactions> {
    let stop = WriteStop::new(None);
    let buffers =
        Arc::new(XfsBuffers::new(device.clone(), superblock.geometry.clone(), CACHE_BYTES));
    let holders =
        old.iter().map(|old| -> (Arc<dyn LoggedItem>, Lsn) { (old.intent.clone(), old.lsn) });
    let holders: Vec<_> = holders.collect();
    let disk = LogDisk::new(device, superblock)?;
    let is_in_line = options.is_reproducible;
    let log_options = XfsLogOptions { is_in_line, ..XfsLogOptions::default() };
    let log = XfsLog::start(disk, &log.ends, &holders, &stop, &log_options)?;
    group::begin_transactions(buffers, log, superblock, &stop)
}

/// Fails when the log has no room for what has to be written first: a record that tells that the
/// tail has moved. Old intents hold the tail, so with some, a transaction of their kind has to have
/// room.
fn require_room(
    log: &VolumeLog,
    transactions: &XfsTransactions,
    old: Option<XfsTransactionKind>,
) -> Result<()> {
    let (ring, ends) = (log.disk.ring, &log.ends);
    let free = u64::from(ring.free(ends.tail, ends.head).unwrap_or(0)) << 9;
    let need = old
        .map_or_else(|| transactions.log().room_to_tell(), |kind| transactions.room_for_step(kind));
    if free > need {
        return Ok(());
    }
    let what = format!(
        "finishing what the log leaves to do, with {free} free bytes in the log where {need} are \
         needed: {NEXT_STEP}"
    );
    Err(Error::unsupported(Code::LogNotReplayed, what))
}

/// An intent that the log has without its end.
struct OldIntent {
    intent: Arc<LoggedIntent>,
    /// The transaction that it is of.
    lsn: Lsn,
    work: Vec<DeferredWork>,
}

impl OldIntent {
    /// All of them, the oldest first.
    fn all(intents: &PendingIntents) -> Result<Vec<Self>> {
        let all = intents.oldest_first().into_iter();
        all.map(|pending| {
            let item = XfsLogItem::parse(pending.regions.regions()).map_err(malformed)?;
            let work = DeferredWork::of_intent(&item).ok_or_else(|| {
                let what = "doing what the log leaves to do: an item that is no intent";
                Error::unsupported(Code::LogNotReplayed, what)
            })?;
            let intent = Arc::new(LoggedIntent::of(&item));
            Ok(Self { intent, lsn: pending.lsn, work })
        })
        .collect()
    }

    /// The kind of the transactions that end them.
    fn step_kind(old: &[Self]) -> XfsTransactionKind {
        let changes_attribute = |work: &DeferredWork| matches!(work, DeferredWork::Attribute(_));
        if old.iter().any(|old| old.work.iter().any(changes_attribute)) {
            XfsTransactionKind::ChangeAttribute
        } else {
            XfsTransactionKind::Truncate
        }
    }
}

struct Completion<'a> {
    transactions: &'a XfsTransactions,
    ids: &'a IntentIds,
    /// The kind of the transactions that end intents.
    step: XfsTransactionKind,
}

/// Begins a transaction that frees more than it takes.
fn begin(transactions: &XfsTransactions, kind: XfsTransactionKind) -> Result<XfsTransaction<'_>> {
    let free = transactions.counters().counts().free_blocks;
    transactions.begin_step(kind, TREE_BLOCKS.min(free))
}

fn begin_truncate(transactions: &XfsTransactions) -> Result<XfsTransaction<'_>> {
    begin(transactions, XfsTransactionKind::Truncate)
}

impl Completion<'_> {
    /// Ends all intents, and what follows from them.
    fn end_intents(&self, old: Vec<OldIntent>) -> Result<()> {
        let mut chain = DeferredChain::new(self.ids);
        // The last step of an exchange may end the sharing of a file, of which pending mappings
        // have to know.
        let is_exchange = |old: &OldIntent| matches!(old.work[..], [DeferredWork::Exchange(_)]);
        let (exchanges, others): (Vec<_>, Vec<_>) = old.into_iter().partition(is_exchange);
        for OldIntent { intent, lsn, work } in others.into_iter().chain(exchanges) {
            let mut transaction = begin(self.transactions, self.step)?;
            chain.end(&mut transaction, intent, &work).map_err(|error| in_log(lsn, error))?;
            transaction.commit()?;
        }
        chain.finish_alone(self.transactions, |transactions| begin(transactions, self.step))?;
        self.transactions.log().force_all()
    }
}

/// The same in a group.
fn free_staged_in(transactions: &XfsTransactions, ids: &IntentIds, ag: AgNumber) -> Result<u64> {
    let mut count = 0;
    loop {
        let mut transaction = begin_truncate(transactions)?;
        let staged = group::staged(&mut transaction, ag, STAGED_AT_ONCE)?;
        drop(transaction);
        if staged.is_empty() {
            return Ok(count);
        }
        for extent in staged {
            if !free_staged_extent(transactions, ids, (ag, extent))? {
                return Ok(count);
            }
            count += 1;
        }
    }
}

/// Frees an extent. Returns false when the trees of its group have no room for that.
fn free_staged_extent(
    transactions: &XfsTransactions,
    ids: &IntentIds,
    (ag, extent): (AgNumber, AgExtent),
) -> Result<bool> {
    let mut transaction = begin_truncate(transactions)?;
    let geometry = transaction.geometry();
    match group::require_tree_room(&mut transaction, &[ag].into()) {
        Err(error) if error.errno() == Errno::NOSPC => return Ok(false),
        outcome => outcome?,
    }
    let blocks = (geometry.fs_block(ag, extent.start), extent.count);
    let mut chain = DeferredChain::new(ids);
    chain.defer(&mut transaction, DeferredWork::unstaged(geometry, blocks, true));
    chain.finish(transaction, &[]).map(|()| true)
}
