//! The account of a tree: what is reserved for the items that are queued for it.
//!
//! Flushing changes no block twice without need: each block of the tree that the transaction has
//! not copied yet is copied once, a leaf that an item goes into may be split, and otherwise leaves
//! stay a third full. So however many units items have kept, *uncopied blocks + all blocks + three
//! times what is added* pay for all of them, each with what its references come to
//! (`space::reserve`). More is never held.

use std::sync::atomic::Ordering;

use super::Delayed;
use super::node::Load;
use crate::space::{Kept, OPERATION_ITEMS, Space};
use crate::transaction::{Account, Handle, Tree};

/// Blocks that a tree may get besides: a root for every level, and what goes with it.
const FEW_BLOCKS: u64 = 16;

/// What a tree counts for itself before it adds to the sums of the volume, in bytes of memory:
/// operations in different directories need not have the same line of the processors' caches each
/// time.
const COUNTED_BYTES: i64 = 4096;

/// The same for blocks that become dirty, in bytes.
const COUNTED_DIRTIES: i64 = 64 << 10;

/// The part of what is left of metadata, beside what is kept back and the next operation, that
/// queued items may hold.
const HELD_PARTS: u64 = 4;

/// What is enough for all others, in bytes of metadata: where more than that is left, queued items
/// may hold the rest of it.
const OTHERS_BYTES: u64 = 64 << 20;

impl Delayed {
    /// The items that are queued for `tree` became more, for which `handle` pays, or less. Says how
    /// many bytes of reserved metadata that gave back.
    pub(super) fn settle(
        &self,
        tree: &Tree,
        space: &Space,
        more: Load,
        handle: Option<&Handle<'_>>,
    ) -> u64 {
        let less = self.recount(&mut tree.hold.account(), tree, space, more, handle);
        // Who waits for it is served when that is dropped, without the account being locked.
        less.map_or(0, |less| less.bytes())
    }

    /// Counts that there is more, and gives what of reserved metadata is not needed any more.
    fn recount(
        &self,
        account: &mut Account,
        tree: &Tree,
        space: &Space,
        more: Load,
        handle: Option<&Handle<'_>>,
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
        let wanted = if self.by_item { all } else { all.min(whole) };
        let before = account.held.bytes();
        let mut less = None;
        if wanted > before {
            // An operation pays for what it queues; that the tree became larger is not its
            // business.
            let pay = |handle: &Handle<'_>| {
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
            // What is queued is not on the devices, even if it should take no further block.
            let copies = positive(account.blocks).saturating_mul(node_size).min(uncopied);
            (copies + growth * 3 / 2).max(1)
        };
        self.count(account, dirties.cast_signed(), more.bytes);
        less
    }

    /// Whether all trees together, and `more` bytes, hold more than their part of what is left of
    /// metadata, and no chunk is a cheap way to more.
    pub(super) fn holds_much(&self, space: &Space, more: u64) -> bool {
        if space.is_roomy() {
            return false;
        }
        let left = space.left_of_metadata().saturating_sub(space.cost(OPERATION_ITEMS));
        let most = (left / HELD_PARTS).max(left.saturating_sub(OTHERS_BYTES));
        self.held.get().saturating_add(more) > most
    }

    /// Adds to the sums of the volume, now and then. What becomes less is counted at once, because
    /// somebody may wait for it, and so is what an operation counts when a flush has taken it away
    /// already.
    fn count(&self, account: &mut Account, dirties: i64, bytes: i64) {
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
