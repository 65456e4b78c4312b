//! Work that later transactions do: changes that are too large for one transaction, or that would
//! lock groups in the wrong order.
//!
//! An *intent* in the log says what is to be done. It is logged with the change that makes it
//! necessary. The transaction that does it logs the *end* of the intent, with the intents of what
//! follows. A crash between the two leaves the intent to recovery, ours or the kernel's.
//!
//! ```text
//! a file loses an extent that it shares        log of a chain
//!   mapping                                    BUI
//!     reverse mapping                          BUD RUI
//!       reference count                        RUD CUI
//!         no reference left: free              CUD EFI
//!                                              EFD
//! ```
//!
//! `work` is one such change, `item` are intents and their ends.

mod item;
#[cfg(test)]
mod tests;
mod work;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use offshoot_kit::sync::Mutex;
use offshoot_vfs::{Errno, Result};
use offshoot_xfs_format::Ino;
use offshoot_xfs_format::inode::XfsInodeCore;

use crate::attr::change::XattrChange;
use crate::inode::change::ForkStep;
use crate::log::LoggedItem;
use crate::trans::{ForkName, XfsTransaction, XfsTransactions};
use item::IntentEnd;
pub(crate) use item::LoggedIntent;
use work::DeferredKind;
pub(crate) use work::{DeferredWork, MOST_UNMAPPED};

/// The records of an intent that we log. The kernel has up to 16.
const MOST_RECORDS: usize = 8;

/// The extents that a transaction frees: a truncation has log space for the trees of four.
const MOST_FREED: usize = 4;

/// The intents that a step logs again at most.
const MOST_LOGGED_AGAIN: usize = 8;

/// The ids of intents, each unique among those that are pending.
#[derive(Debug, Default)]
pub(crate) struct IntentIds(Mutex<IntentIdsState>);

#[derive(Debug, Default)]
struct IntentIdsState {
    last: u64,
    /// Those of a log that was replayed.
    taken: BTreeSet<u64>,
}

impl IntentIds {
    /// Ids for a log with pending intents that have these.
    pub(crate) fn beside(taken: BTreeSet<u64>) -> Self {
        Self(Mutex::new(IntentIdsState { last: 0, taken }))
    }

    fn next(&self) -> u64 {
        let mut state = self.0.lock();
        loop {
            state.last = state.last.wrapping_add(1);
            if !state.taken.contains(&state.last) {
                return state.last;
            }
        }
    }
}

/// An intent in the log, and its work, all of one kind.
#[derive(Debug)]
struct LoggedWork {
    intent: Arc<LoggedIntent>,
    work: Vec<DeferredWork>,
}

/// Work whose intents are logged and that is still to be done.
///
/// Reverse mappings go before reference counts, and these before frees: a block is free only when
/// nothing says otherwise. Mappings and attributes come last, so that few intents are pending at a
/// time.
#[derive(Debug)]
pub(crate) struct DeferredChain<'a> {
    ids: &'a IntentIds,
    waiting: BTreeMap<DeferredKind, VecDeque<LoggedWork>>,
}

impl<'a> DeferredChain<'a> {
    pub(crate) fn new(ids: &'a IntentIds) -> Self {
        Self { ids, waiting: BTreeMap::new() }
    }

    /// Logs intents of work with the transaction.
    pub(crate) fn defer(
        &mut self,
        transaction: &mut XfsTransaction<'_>,
        work: impl IntoIterator<Item = DeferredWork>,
    ) {
        let mut by_kind = BTreeMap::<_, Vec<_>>::new();
        for work in work {
            by_kind.entry(work.kind()).or_default().push(work);
        }
        for (kind, mut work) in by_kind {
            // An intent has its groups in the order in which they are locked.
            let geometry = transaction.geometry();
            let group = |block| geometry.split(block).map(|(ag, _)| ag.0);
            work.sort_by_key(|work| work.start().and_then(group));
            let most = match kind {
                DeferredKind::Map | DeferredKind::Exchange | DeferredKind::Attribute => 1,
                DeferredKind::Free => MOST_FREED,
                DeferredKind::Reverse | DeferredKind::Count => MOST_RECORDS,
            };
            for work in work.chunks(most) {
                let intent = Arc::new(LoggedIntent::new(self.ids.next(), kind, work));
                transaction.add_item(intent.clone());
                let logged = LoggedWork { intent, work: work.to_vec() };
                self.waiting.entry(kind).or_default().push_back(logged);
            }
        }
    }

    /// Does the work of an intent in the transaction, ends it, and logs the intents of what
    /// follows. The kernel logs intents to free more extents than one transaction frees: what is
    /// left of such a one follows too.
    pub(crate) fn end(
        &mut self,
        transaction: &mut XfsTransaction<'_>,
        intent: Arc<LoggedIntent>,
        work: &[DeferredWork],
    ) -> Result<()> {
        let is_free = |work: &DeferredWork| work.kind() == DeferredKind::Free;
        let now = if work.iter().all(is_free) { work.len().min(MOST_FREED) } else { work.len() };
        let (now, later) = work.split_at(now);
        let mut next = later.to_vec();
        for work in now {
            work.perform(transaction, &mut next)?;
        }
        transaction.add_item(Arc::new(IntentEnd::of(intent)));
        self.defer(transaction, next);
        Ok(())
    }

    /// Ends waiting intents that lie far behind the head of the log, and logs them again: a long
    /// chain would keep the tail from moving.
    fn log_again(&mut self, transaction: &mut XfsTransaction<'_>) {
        let log = transaction.engine().log();
        if !log.is_near_tail(log.tail()) {
            return;
        }
        let is_old = |waiting: &&mut LoggedWork| {
            let lsn = waiting.intent.state().active_lsn();
            lsn.is_some_and(|lsn| log.is_near_tail(lsn))
        };
        let old = self
            .waiting
            .iter_mut()
            .flat_map(|(kind, all)| all.iter_mut().filter(is_old).map(|waiting| (*kind, waiting)));
        for (kind, waiting) in old.take(MOST_LOGGED_AGAIN) {
            let new = Arc::new(LoggedIntent::new(self.ids.next(), kind, &waiting.work));
            let old = std::mem::replace(&mut waiting.intent, new.clone());
            transaction.add_item(Arc::new(IntentEnd::of(old)));
            transaction.add_item(new);
        }
    }

    /// Does the next work in the transaction, which nothing was done in before. Returns false when
    /// there is none. The inodes `kept` stay locked.
    fn step(&mut self, transaction: &mut XfsTransaction<'_>, kept: &[Ino]) -> Result<bool> {
        self.log_again(transaction);
        let next = self.waiting.values_mut().find_map(VecDeque::pop_front);
        let Some(LoggedWork { intent, work }) = next else { return Ok(false) };
        again_while_locked(transaction, kept, |transaction| {
            self.end(transaction, intent.clone(), &work)
        })?;
        Ok(true)
    }

    fn is_empty(&self) -> bool {
        self.waiting.values().all(VecDeque::is_empty)
    }

    /// Commits the transaction and does all work in further ones. The inodes `kept` stay locked.
    ///
    /// # Errors
    /// When work whose intents are in the log cannot be done: all writing has ended then, and a
    /// recovery does it.
    pub(crate) fn finish(
        mut self,
        mut transaction: XfsTransaction<'_>,
        kept: &[Ino],
    ) -> Result<()> {
        if self.is_empty() {
            return transaction.commit().map(drop);
        }
        self.settle(&mut transaction, kept)?;
        let engine = transaction.engine();
        transaction.commit().map(drop).inspect_err(|error| engine.stop_writing(error))
    }

    /// Does all work in further steps of the transaction. The last one is not committed.
    fn settle(&mut self, transaction: &mut XfsTransaction<'_>, kept: &[Ino]) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        transaction.roll(kept)?;
        let engine = transaction.engine();
        self.do_all(transaction, kept).inspect_err(|error| engine.stop_writing(error))
    }

    /// Does all work, the first of it in the transaction as it is.
    fn do_all(&mut self, transaction: &mut XfsTransaction<'_>, kept: &[Ino]) -> Result<()> {
        self.step(transaction, kept)?;
        while !self.is_empty() {
            transaction.roll(kept)?;
            self.step(transaction, kept)?;
        }
        Ok(())
    }

    /// Does all work, each step in a transaction of its own from `begin`.
    pub(crate) fn finish_alone<'e>(
        mut self,
        transactions: &'e XfsTransactions,
        begin: impl Fn(&'e XfsTransactions) -> Result<XfsTransaction<'e>>,
    ) -> Result<()> {
        while !self.is_empty() {
            let mut transaction = begin(transactions)?;
            self.step(&mut transaction, &[])?;
            transaction.commit()?;
        }
        Ok(())
    }
}

/// Does a step. When it has a group and needs a lower one that another transaction has locked, it
/// is undone, so that it has none, waits for all groups that it has missed, the lowest one first,
/// and begins again with these: what a chain did before is committed, so the caller cannot begin
/// again. Each time it misses at least one group more, so this ends:
///
/// ```text
/// has 5, wants 2, which is locked     undone, waits for 2
/// has 2 and 5, wants 1                undone, waits for 1, then for 2
/// ```
///
/// The inodes `kept` stay locked. What the transaction has of intents stays.
fn again_while_locked<T>(
    transaction: &mut XfsTransaction<'_>,
    kept: &[Ino],
    mut step: impl FnMut(&mut XfsTransaction<'_>) -> Result<T>,
) -> Result<T> {
    let items = transaction.item_count();
    loop {
        match step(transaction) {
            Err(error) if error.errno() == Errno::AGAIN => {
                transaction.undo(kept, items)?;
                if !transaction.hold_missed()? {
                    return Err(error);
                }
            }
            outcome => return outcome,
        }
    }
}

/// Changes an attribute in the transaction and further ones, and commits them. The inode stays
/// locked, so no other transaction sees a step.
///
/// Nothing of this has an intent in the log: a volume whose log has intents of attributes needs a
/// bit that older kernels refuse. A crash leaves the old value, or the new one, and at times an
/// incomplete entry besides. Only where a parent pointer replaces another may a crash leave
/// neither: changes of names give that an intent.
///
/// Once readers find the new value, the rest has to succeed: it may take blocks of the reserve. If
/// even these are gone, an incomplete entry stays, and the next change of the name removes it.
///
/// # Errors
/// `ENOSPC` and those of the device. The attribute then has its old value: when the volume fills up
/// in the middle of a change, what the steps before have made is removed again.
pub(crate) fn change_xattr(
    transaction: XfsTransaction<'_>,
    ids: &IntentIds,
    change: XattrChange,
) -> Result<()> {
    change_xattr_with(transaction, ids, change, |_| {})
}

/// The same, and changes the core of the inode in the transaction in which readers find the new
/// value.
pub(crate) fn change_xattr_with(
    mut transaction: XfsTransaction<'_>,
    ids: &IntentIds,
    mut change: XattrChange,
    with: impl FnOnce(&mut XfsInodeCore),
) -> Result<()> {
    let ino = change.ino();
    let kept = [ino];
    let mut with = Some(with);
    let mut has_reserve = false;
    let mut step = change.step(&mut transaction)?;
    transaction.require_promised()?;
    loop {
        let is_done = step.is_done;
        if (is_done || change.is_in_force())
            && let Some(with) = with.take()
        {
            with(transaction.inode(ino)?.core_mut());
        }
        defer_unmapped(&mut transaction, ids, &change, &step)?;
        if is_done {
            return transaction.commit().map(drop);
        }
        transaction.roll(&kept)?;
        if change.is_in_force() && !has_reserve {
            has_reserve = true;
            transaction.promise_of_reserve(2 * transaction.engine().most_levels().attributes);
        }
        let next = again_while_locked(&mut transaction, &kept, |transaction| {
            let step = change.step(transaction)?;
            if has_reserve { transaction.require_promised().map(|()| step) } else { Ok(step) }
        });
        step = match next {
            Ok(step) => step,
            Err(error) => {
                if !matches!(error.errno(), Errno::NOSPC | Errno::AGAIN) {
                    return Err(error);
                }
                let is_in_force = change.is_in_force();
                // If this fails too, the next change of the name removes what is left.
                let _is_undone = undo_xattr(transaction, ids, change);
                return if is_in_force { Ok(()) } else { Err(error) };
            }
        };
    }
}

/// Removes what the steps of a change have made. The last of these has failed, and is not
/// committed.
fn undo_xattr(
    mut transaction: XfsTransaction<'_>,
    ids: &IntentIds,
    change: XattrChange,
) -> Result<()> {
    let kept = [change.ino()];
    transaction.undo(&kept, 0)?;
    let mut undoing = change.undoing();
    loop {
        let step = again_while_locked(&mut transaction, &kept, |t| undoing.step(t))?;
        defer_unmapped(&mut transaction, ids, &undoing, &step)?;
        if step.is_done {
            return transaction.commit().map(drop);
        }
        transaction.roll(&kept)?;
    }
}

/// Frees what a step of a change of an attribute has unmapped. The last transaction of that is not
/// committed.
fn defer_unmapped(
    transaction: &mut XfsTransaction<'_>,
    ids: &IntentIds,
    change: &XattrChange,
    step: &ForkStep,
) -> Result<()> {
    let ino = change.ino();
    let mut chain = DeferredChain::new(ids);
    let work = DeferredWork::unmapped(transaction, (ino, ForkName::Attributes), step)?;
    chain.defer(transaction, work);
    chain.settle(transaction, &[ino])
}
