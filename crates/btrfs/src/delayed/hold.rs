//! The account of a tree: the metadata that is reserved for its queued items.
//!
//! A flush copies each block of the tree that the transaction has not copied yet at most once. A
//! leaf that gets an item may be split, and otherwise leaves stay at least a third full. So
//! *uncopied blocks + all blocks + three times the added bytes* pay for all queued items, however
//! many units they have. Each block counts with the cost of its references (`space::reserve`). An
//! account never holds more than that.

use std::sync::atomic::Ordering;

use super::Delayed;
use super::node::ItemTotals;
use crate::space::{Kept, OPERATION_ITEMS, Space};
use crate::transaction::{ChangingTree, QueueAccount, TransactionHandle};

/// More blocks that a tree may get: a new root for every level, and a few blocks with it.
const FEW_BLOCKS: u64 = 16;

/// The bytes of memory that a tree counts by itself before it adds them to the sums of the volume.
/// So operations in different directories do not write to the same cache line each time.
const COUNTED_BYTES: i64 = 4096;

/// The same for dirty blocks, in bytes.
const COUNTED_DIRTIES: i64 = 64 << 10;

/// Queued items may hold one such part of the metadata that is left beside the reserve and one more
/// operation.
const HELD_PARTS: u64 = 4;

/// Enough metadata for all other work, in bytes. If more is left, queued items may hold the rest.
const OTHERS_BYTES: u64 = 64 << 20;

impl Delayed {
    /// Counts that the queue of `tree` changed by `more`. For an increase `handle` pays. Returns
    /// how many bytes of reserved metadata this released.
    pub(super) fn settle(
        &self,
        tree: &ChangingTree,
        space: &Space,
        more: ItemTotals,
        handle: Option<&TransactionHandle<'_>>,
    ) -> u64 {
        let less = self.recount(&mut tree.hold.account(), tree, space, more, handle);
        // Dropping it grants waiting tickets, so this happens after the account is unlocked.
        less.map_or(0, |less| less.bytes())
    }

    /// Counts the change, and returns the reserved metadata that is no longer needed.
    fn recount(
        &self,
        account: &mut QueueAccount,
        tree: &ChangingTree,
        space: &Space,
        more: ItemTotals,
        handle: Option<&TransactionHandle<'_>>,
    ) -> Option<Kept> {
        account.units += more.units;
        account.blocks += more.blocks;
        account.growth += more.growth;
        let (cost, node_size) = (space.item_cost(), space.node_size());
        let positive = |number: i64| u64::try_from(number).unwrap_or(0);
        let (units, growth) = (positive(account.units), positive(account.growth));
        let uncopied = tree.hold.uncopied.load(Ordering::Relaxed);
        let whole = uncopied + tree.used.load(Ordering::Relaxed) + 3 * growth;
        let whole = (whole / node_size + FEW_BLOCKS) * space.block_cost();
        let all = units.saturating_mul(cost);
        let wanted = if self.is_by_item { all } else { all.min(whole) };
        let before = account.held.bytes();
        let mut less = None;
        if wanted > before {
            // An operation pays only for the items that it queues, not for the growth of the tree
            // since.
            let pay = |handle: &TransactionHandle<'_>| {
                let share = positive(more.units).saturating_mul(handle.item_cost());
                handle.hand_over(&mut account.held, share.min(wanted - before))
            };
            self.held.add(handle.map_or(0, pay));
        } else if wanted < before {
            less = Some(account.held.split(before - wanted));
            self.held.sub(before - wanted);
        }
        let dirties = if units == 0 {
            0
        } else {
            // At least 1 while items are queued, because they are not on the devices yet.
            let copies = positive(account.blocks).saturating_mul(node_size).min(uncopied);
            (copies + growth * 3 / 2).max(1)
        };
        self.count(account, dirties.cast_signed(), more.bytes);
        less
    }

    /// Whether all trees together, with `more` bytes, hold more than their part of the metadata
    /// that is left, and a chunk is no cheap way to more.
    pub(super) fn holds_much(&self, space: &Space, more: u64) -> bool {
        if space.is_roomy() {
            return false;
        }
        let left = space.left_of_metadata().saturating_sub(space.cost(OPERATION_ITEMS));
        let most = (left / HELD_PARTS).max(left.saturating_sub(OTHERS_BYTES));
        self.held.get().saturating_add(more) > most
    }

    /// Adds to the sums of the volume, but not every time. A decrease is counted at once, because a
    /// writer may wait for it. So is the count of an operation whose items a flush has already
    /// taken.
    fn count(&self, account: &mut QueueAccount, dirties: i64, bytes: i64) {
        let is_first_or_last = (dirties == 0) != (account.dirties == 0);
        let change = dirties - account.dirties;
        if is_first_or_last || bytes < 0 || change.abs() >= COUNTED_DIRTIES {
            self.dirties.fetch_add(change, Ordering::AcqRel);
            account.dirties = dirties;
        }
        account.uncounted += bytes;
        if bytes < 0 || dirties == 0 || account.uncounted >= COUNTED_BYTES {
            let more = std::mem::take(&mut account.uncounted);
            self.backlog.note(more);
        }
    }
}
