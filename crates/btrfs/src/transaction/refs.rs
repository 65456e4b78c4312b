//! Delayed references: changes of the references to extents, gathered until the commit runs them.
//!
//! An extent that is made and freed in one transaction cancels out here and never reaches the
//! extent tree. Several changes to one extent become one change of its item.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use offshoot_btrfs_format::extent::RefOwner;
use offshoot_btrfs_format::{Logical, TreeId};
use offshoot_kit::shards::scatter;
use parking_lot::{Mutex, MutexGuard};

use crate::shared::Padded;
use crate::space;

/// The kind of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExtentKind {
    /// A tree block of this level.
    Block { level: u8 },
    /// Data.
    Data,
}

/// All pending changes of one extent.
#[derive(Clone, Debug)]
pub(crate) struct PendingRefs {
    pub(crate) len: u64,
    pub(crate) kind: ExtentKind,
    /// The extent was allocated in this transaction and has no item yet.
    pub(crate) is_new: bool,
    /// The tree that it was allocated for, if that was in this transaction.
    pub(crate) made_for: Option<TreeId>,
    /// From now on the tree block refers to its children by its own address.
    pub(crate) has_full_backref: bool,
    /// The change of the count of each owner; never 0.
    pub(crate) changes: BTreeMap<RefOwner, i64>,
    /// Another length and kind, which contradict the first ones, from a later reference.
    pub(crate) contradiction: Option<(u64, ExtentKind)>,
    /// The writer assumed that the owner that gives it up is the only one.
    pub(crate) must_go: bool,
    /// The bytes of items that this may add to the trees of a commit.
    growth: u64,
}

/// An extent with pending changes, as they were at some time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExtentToLookUp {
    pub(crate) at: Logical,
    pub(crate) len: u64,
    pub(crate) kind: ExtentKind,
    pub(crate) is_new: bool,
    /// The change of the number of all references.
    pub(crate) net: i64,
}

/// The bytes that a new extent adds: its item with the owner for simple quotas, and the end of a
/// free range in the free-space tree.
const NEW_BYTES: u64 = 53 + 9 + 25 + 25;

/// The bytes that a removed reference may add to the free-space tree and to the checksum tree.
const GONE_BYTES: u64 = 25 + 25;

/// The bytes that one more owner adds to the item of an extent, or beside it: for a block, and for
/// data.
const OWNER_BYTES: [u64; 2] = [9, 28 + 25];

/// Shards of the delayed references.
const SHARDS: usize = 32;

/// The delayed references of a transaction, by the address of the extent. All changes of one extent
/// are in one shard, so threads that change different extents rarely meet.
pub(crate) struct DelayedRefs {
    shards: [Padded<Mutex<BTreeMap<u64, PendingRefs>>>; SHARDS],
    /// Counts the bytes that they may add to trees.
    counted: Arc<space::CommitWork>,
    /// The bytes of blocks that lost an owner. Most of them had only one.
    given_up: AtomicU64,
}

impl DelayedRefs {
    pub(crate) fn new(counted: Arc<space::CommitWork>) -> Self {
        let shards = std::array::from_fn(|_| Padded::default());
        Self { shards, counted, given_up: AtomicU64::new(0) }
    }

    /// The entries of the shard of an extent.
    fn shard(&self, at: Logical) -> MutexGuard<'_, BTreeMap<u64, PendingRefs>> {
        // Extents begin at multiples of 4 KiB at least.
        self.shards[scatter(at.0 >> 12) % SHARDS].lock()
    }

    /// Changes the pending entry of an extent, and counts the bytes that it may add to trees.
    fn with(&self, at: Logical, len: u64, kind: ExtentKind, change: impl FnOnce(&mut PendingRefs)) {
        let mut pending = self.shard(at);
        let entry = pending.entry(at.0).or_insert_with(|| PendingRefs::new(len, kind));
        if (entry.len, entry.kind) != (len, kind) {
            entry.contradiction = Some((len, kind));
        }
        let before = entry.growth;
        change(entry);
        self.counted.reference_bytes.add(entry.growth - before);
    }

    /// Stops counting a pending entry: it was cancelled, or is in the trees now.
    pub(crate) fn uncount(&self, pending: &PendingRefs) {
        self.counted.reference_bytes.sub(pending.growth);
    }

    /// Adds an extent that was allocated for its first owner.
    pub(crate) fn add_new(&self, logical: Logical, len: u64, kind: ExtentKind, owner: RefOwner) {
        self.with(logical, len, kind, |entry| {
            debug_assert!(!entry.is_new && entry.changes.is_empty(), "an extent is allocated once");
            entry.is_new = true;
            entry.made_for = owner.root();
            entry.growth += NEW_BYTES;
            entry.change(owner, 1);
        });
    }

    /// Changes the count of `owner` by `delta`.
    pub(crate) fn add(
        &self,
        logical: Logical,
        len: u64,
        kind: ExtentKind,
        owner: RefOwner,
        delta: i64,
    ) {
        if delta < 0 && matches!(kind, ExtentKind::Block { .. }) {
            self.given_up.fetch_add(len, Relaxed);
        }
        self.with(logical, len, kind, |entry| entry.change(owner, delta));
    }

    /// Gives up a block that the writer copied without reading its reference count, because `owner`
    /// should be its only owner. If the extent tree counts other owners, the transaction does not
    /// commit.
    pub(crate) fn give_up_unshared(&self, logical: Logical, len: u64, level: u8, owner: RefOwner) {
        self.given_up.fetch_add(len, Relaxed);
        self.with(logical, len, ExtentKind::Block { level }, |entry| {
            entry.change(owner, -1);
            entry.must_go = true;
        });
    }

    /// Makes the block refer to its children by its own address from now on.
    pub(crate) fn set_full_backref(&self, logical: Logical, len: u64, level: u8) {
        let kind = ExtentKind::Block { level };
        self.with(logical, len, kind, |entry| entry.has_full_backref = true);
    }

    /// The bytes of metadata that become free when the transaction is committed. With snapshots it
    /// is less, because they own some of it.
    pub(crate) fn given_up(&self) -> u64 {
        self.given_up.load(Relaxed)
    }

    /// Cancels an extent that has no item yet. Returns whether there was one.
    pub(crate) fn cancel_new(&self, logical: Logical) -> bool {
        let mut pending = self.shard(logical);
        let is_new = pending.get(&logical.0).is_some_and(|entry| entry.is_new);
        if is_new && let Some(entry) = pending.remove(&logical.0) {
            self.uncount(&entry);
        }
        is_new
    }

    /// The pending entry of one extent.
    pub(crate) fn get(&self, logical: Logical) -> Option<PendingRefs> {
        self.shard(logical).get(&logical.0).cloned()
    }

    /// The pending entries that are wanted before they are taken, at most `most`, by ascending
    /// address. Other threads may change entries meanwhile.
    pub(crate) fn to_look_up(
        &self,
        most: usize,
        is_wanted: impl Fn(&ExtentToLookUp) -> bool,
    ) -> Vec<ExtentToLookUp> {
        let mut all = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock();
            let wanted = shard.iter().map(|(&at, pending)| ExtentToLookUp {
                at: Logical(at),
                len: pending.len,
                kind: pending.kind,
                is_new: pending.is_new,
                net: pending.net(),
            });
            all.extend(wanted.filter(&is_wanted).take(most - all.len()));
        }
        all.sort_unstable_by_key(|one| one.at.0);
        all
    }

    /// Takes all pending entries, by ascending address. They count until they are in the trees,
    /// because other threads reserve space meanwhile. No other thread has a handle: it could add
    /// entries to a shard that was taken before.
    pub(crate) fn take(&self) -> Vec<(u64, PendingRefs)> {
        let take = |shard: &Padded<Mutex<_>>| std::mem::take(&mut *shard.lock());
        let mut all: Vec<_> = self.shards.iter().flat_map(take).collect();
        all.sort_unstable_by_key(|(at, _)| *at);
        debug_assert!(self.is_empty(), "another thread has a handle");
        all
    }

    /// Whether no entry is pending. The answer holds while no other thread has a handle.
    pub(crate) fn is_empty(&self) -> bool {
        self.shards.iter().all(|shard| shard.lock().is_empty())
    }
}

impl PendingRefs {
    fn new(len: u64, kind: ExtentKind) -> Self {
        Self {
            len,
            kind,
            is_new: false,
            made_for: None,
            has_full_backref: false,
            changes: BTreeMap::new(),
            contradiction: None,
            must_go: false,
            growth: 0,
        }
    }

    fn change(&mut self, owner: RefOwner, delta: i64) {
        self.growth += match self.kind {
            _ if delta < 0 => GONE_BYTES,
            ExtentKind::Block { .. } => OWNER_BYTES[0],
            ExtentKind::Data => OWNER_BYTES[1],
        };
        let count = self.changes.entry(owner).or_default();
        *count += delta;
        if *count == 0 {
            self.changes.remove(&owner);
        }
    }

    /// Whether a subvolume may own it. Other trees share no blocks.
    pub(crate) fn may_be_of_a_subvolume(&self) -> bool {
        self.changes.keys().any(|owner| owner.root().is_none_or(TreeId::is_subvolume))
    }

    /// The change of the number of all references.
    pub(crate) fn net(&self) -> i64 {
        self.changes.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Before the mend, references counted for nothing while they were run, and other threads could
    /// reserve the space that the references were about to take.
    #[test]
    fn what_is_run_counts_until_it_is_done() {
        let counted = Arc::new(space::CommitWork::new(&Arc::default()));
        let bytes = || counted.reference_bytes.get();
        let refs = DelayedRefs::new(counted.clone());
        let (kind, owner) = (ExtentKind::Block { level: 0 }, RefOwner::Tree { root: TreeId::FS });
        refs.add_new(Logical(1 << 20), 16384, kind, owner);
        refs.add(Logical(2 << 20), 16384, kind, owner, -1);
        let before = bytes();
        let all = refs.take();
        assert!(refs.is_empty() && all.len() == 2);
        assert!(before > 0 && bytes() == before, "{} of {before} bytes", bytes());
        for (_, pending) in &all {
            refs.uncount(pending);
        }
        assert_eq!(bytes(), 0);
    }

    /// References run in the order of addresses, whatever shards they are in.
    #[test]
    fn references_are_taken_by_address() {
        let refs = DelayedRefs::new(Arc::new(space::CommitWork::new(&Arc::default())));
        let (kind, owner) = (ExtentKind::Data, RefOwner::Leaf { parent: Logical(4096) });
        let addresses = || (1..1000).map(|number| number * 4096);
        for at in addresses().rev() {
            refs.add(Logical(at), 4096, kind, owner, 1);
            refs.add(Logical(at), 4096, kind, owner, 1);
        }
        let all = refs.take();
        assert!(all.iter().map(|(at, _)| *at).eq(addresses()));
        assert!(all.iter().all(|(_, pending)| pending.net() == 2) && refs.is_empty());
    }
}
