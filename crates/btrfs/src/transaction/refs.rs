//! Delayed references: changes to who refers to which extent, gathered until they are run.
//!
//! An extent that comes and goes in one transaction cancels out here and never reaches the extent
//! tree; several changes to one extent become one change of its item.

use std::collections::BTreeMap;

use offshoot_btrfs_format::{Logical, TreeId};
use parking_lot::Mutex;

/// What an extent is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExtentKind {
    /// A tree block of this level.
    Block { level: u8 },
    /// Data.
    Data,
}

/// Who refers to an extent. The order is that of the item types in the format, which is
/// also the order of inline references.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Owner {
    /// A tree holds the block.
    Tree { root: TreeId },
    /// A file of a subvolume holds the data; `offset` is where in the file the extent would begin.
    File { root: TreeId, ino: u64, offset: u64 },
    /// The block at this address holds the block.
    Block { parent: Logical },
    /// The leaf at this address holds the data.
    Leaf { parent: Logical },
}

/// All that is pending for one extent.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    pub(crate) len: u64,
    pub(crate) kind: ExtentKind,
    /// The extent was allocated in this transaction and has no item yet.
    pub(crate) is_new: bool,
    /// The tree block refers to what is below by its own address from now on.
    pub(crate) full_backref: bool,
    /// By how much the count of each owner changes; never 0.
    pub(crate) changes: BTreeMap<Owner, i64>,
}

/// The delayed references of a transaction, by the address of the extent.
#[derive(Default)]
pub(crate) struct DelayedRefs {
    pending: Mutex<BTreeMap<u64, Pending>>,
}

impl DelayedRefs {
    /// An extent was allocated, for its first owner.
    pub(crate) fn add_new(&self, logical: Logical, len: u64, kind: ExtentKind, owner: Owner) {
        let mut pending = self.pending.lock();
        let entry = pending.entry(logical.0).or_insert_with(|| Pending::new(len, kind));
        debug_assert!(!entry.is_new && entry.changes.is_empty(), "an extent is allocated once");
        entry.is_new = true;
        entry.change(owner, 1);
    }

    /// The count of `owner` changes by `delta`.
    pub(crate) fn add(
        &self,
        logical: Logical,
        len: u64,
        kind: ExtentKind,
        owner: Owner,
        delta: i64,
    ) {
        let mut pending = self.pending.lock();
        pending.entry(logical.0).or_insert_with(|| Pending::new(len, kind)).change(owner, delta);
    }

    /// The block refers to what is below it by its own address from now on.
    pub(crate) fn set_full_backref(&self, logical: Logical, len: u64, level: u8) {
        let kind = ExtentKind::Block { level };
        let mut pending = self.pending.lock();
        pending.entry(logical.0).or_insert_with(|| Pending::new(len, kind)).full_backref = true;
    }

    /// Forgets an extent that has no item yet; whether it was one.
    pub(crate) fn cancel_new(&self, logical: Logical) -> bool {
        let mut pending = self.pending.lock();
        let is_new = pending.get(&logical.0).is_some_and(|entry| entry.is_new);
        if is_new {
            pending.remove(&logical.0);
        }
        is_new
    }

    /// What is pending for one extent.
    pub(crate) fn get(&self, logical: Logical) -> Option<Pending> {
        self.pending.lock().get(&logical.0).cloned()
    }

    /// Takes out what is pending for the extent with the lowest address.
    pub(crate) fn pop(&self) -> Option<(Logical, Pending)> {
        self.pending.lock().pop_first().map(|(at, pending)| (Logical(at), pending))
    }

    /// How many extents have something pending.
    pub(crate) fn len(&self) -> usize {
        self.pending.lock().len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pending.lock().is_empty()
    }
}

impl Pending {
    fn new(len: u64, kind: ExtentKind) -> Self {
        Self { len, kind, is_new: false, full_backref: false, changes: BTreeMap::new() }
    }

    fn change(&mut self, owner: Owner, delta: i64) {
        let count = self.changes.entry(owner).or_default();
        *count += delta;
        if *count == 0 {
            self.changes.remove(&owner);
        }
    }

    /// By how much the number of all references changes.
    pub(crate) fn net(&self) -> i64 {
        self.changes.values().sum()
    }
}
