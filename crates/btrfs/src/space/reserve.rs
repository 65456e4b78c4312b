//! Reserving: making sure, before an operation begins, that it can be finished and committed.
//!
//! Free metadata serves these uses, in this order:
//!
//! 1. what is reserved already, and the commit of the changes so far (`C`, [`Space::commit_cost`]),
//! 2. chunk allocation and removals, which make room, and write-back, which finishes accepted work
//!    (`K`, [`Space::kept_bytes`]),
//! 3. all other work.
//!
//! A demand that does not fit waits in line (`tickets`), and the leader of the line makes room
//! (`upkeep/reclaim`).
//!
//! # Why a commit always finds room
//!
//! `reserved + C <= free` holds at all times:
//!
//! - It holds when any claim is granted (`ledger`).
//! - An operation takes blocks, and queues references that increase `C`. Both together are at most
//!   what it reserved, and that counts until the operation is done ([`Space::cost`]).
//! - A commit takes at most `C`. It copies each block of the trees that references go to at most
//!   once, and these trees grow by what the references add. After the commit the copied blocks are
//!   free again, so only the growth `g` is lost. `C` counts `g` more than twice: once for the
//!   growth, and once because the next commit copies the new blocks too. So what remains is enough
//!   for the `C` of the next transaction.
//!
//! # Why a removal always finds room
//!
//! Normal work leaves `K` free. Using `K` is only a loan: the blocks that a removal or a chunk
//! allocation copies are free again after the next commit, and all removals leave the trees smaller
//! or equal. Only the fill of blocks may change. Removals keep leaves at least a third full. So
//! trees of the commit that are two thirds full may become twice as large. `K` pays for that
//! ([`Space::drift`]), beside one removal or one chunk allocation, whichever is larger.
//!
//! So after a commit, and when the operations that had reservations are done, a removal fits. It is
//! also next: no claim is granted past the line, and removals stand at its front. The tickets
//! before it are removals too, and each is done after one commit.
//!
//! A snapshot keeps the shared blocks that a removal copies. So removals of names whose items lie
//! scattered may use up `K`. Therefore removals leave the last part of `K` to the operations that
//! free what snapshots keep: deleting subvolumes and dropping them. While a snapshot exists, a full
//! volume may refuse a removal, but never the deletion of a subvolume.
//!
//! # Why write-back always finds room
//!
//! One step of write-back takes no more at a time than a removal, and the blocks that it copies are
//! free again after the next commit, unless a snapshot keeps them. So nothing is reserved for these
//! copies for all buffered files together: their steps use `K` one after the other. But write-back
//! makes trees larger. This growth is promised when data is accepted, and the step that writes the
//! data back gives the promise up.
//!
//! Items are promised byte for byte ([`growth_bytes`]). A byte that is added to the trees of a
//! commit counts four times: once because it exists, once because it increases `C`, and twice
//! because it increases `K` ([`Space::drift`]). So what holds after one commit also holds after the
//! commit that follows the step, with the promises that remain.
//!
//! Blocks of the tree of the file are promised in addition ([`Space::lasting_bytes`]). A leaf may
//! be full, as a series of items leaves it, so each place that items go to may take one more block.
//! If there is a snapshot of the tree, it keeps the blocks on the way to that place. Neither
//! happens more often for a file than the tree has blocks.
//!
//! When promises count on a chunk that is not allocated yet, the steps leave `K` to the allocation
//! of that chunk.
//!
//! When free space for data is in pieces, one run becomes several extents, which was not promised.
//! But then as many extents lie between the pieces, and `K` covers the trees of these extents
//! twice.
//!
//! # What an item costs
//!
//! Changing one item of a tree with `n` levels copies `n` blocks on the way. Making room below a
//! node copies two siblings, or adds two blocks, on each level at most. A leaf may split in three,
//! and a root may be added. For `k` items these are at most `k (3 (n - 1) + 2) + 3` blocks, which
//! is never more than `3 k (n + 1)`. For example, with `k = 9` and `n = 3` these are 75 of 108
//! blocks. So a reservation is also enough when the trees become one level higher before it is
//! used. That takes a hundred times more items than there were. No buffered file adds so many,
//! except to a small tree, and so trees count as if they had at least three levels.
//!
//! A block that is taken queues one reference, and one for the block that it is a copy of. If a
//! snapshot may share blocks, a copy may queue one for everything that the block points to.
//!
//! # What a commit costs
//!
//! Delayed references change the extent tree and the trees that belong to it. A block is copied
//! once in a transaction, so a commit copies at most these whole trees. They grow by what the
//! references add, in blocks that are at least a third full. A commit that changes more than
//! [`MOST_COMMIT_BYTES`] of them has enough references of its own to pay for that.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Instant;

use offshoot_btrfs_format::edit::ITEM_SIZE;
use offshoot_vfs::{Errno, Error, Result};
use tracing::debug;

use super::ledger::{Floor, Promise, Reservation};
use super::place::{PlaceInLine, TurnInLine};
use super::tickets::{Claim, Demand, TicketOutcome, Waiter};
use super::{Purpose, Space};
use crate::events::{RECLAIM, micros};
use crate::stats::EngineCounters;

/// The most items that an operation on names touches: two directory items, two indexes, two
/// references, and the inodes of a file and of two directories.
pub(crate) const OPERATION_ITEMS: u64 = 9;

/// The most places in a tree that a removal touches: a directory item, an index and the inode of
/// the directory; the inode, and two leaves of its items; an orphan item. A step of write-back
/// touches no more.
pub(crate) const REMOVAL_ITEMS: u64 = 7;

/// The most places that deleting a subvolume touches: a directory item, an index and the inode of
/// the directory; the root item with the reference beside it, the reference of the containing
/// subvolume, and an orphan item; two UUIDs.
pub(crate) const DELETION_ITEMS: u64 = 8;

/// The items that a chunk changes beside those of the members: itself, its block group, two of its
/// free space.
const CHUNK_ITEMS: u64 = 4;

/// The bytes of references for a block that is taken and for the block that it copies, times the
/// factor of [`Space::commit_cost`].
const REFERENCES_OF_A_BLOCK: u64 = 1100;

/// The size of the references of everything that a shared block points to, as a fraction of a
/// block: 5/2.
const SHARED_PARTS: u64 = 5;
const PARTS: u64 = 2;

/// The blocks of a log tree beside its leaves: nodes and a root.
const LOG_BLOCKS: u64 = 16;

/// The fewest levels that a tree counts as.
const LEAST_LEVELS: u64 = 3;

/// The blocks of the root tree that are copied for each stored root.
const BLOCKS_OF_A_ROOT: u64 = 4;

/// Blocks of the root tree, and new roots, of the trees that a commit itself changes.
const COMMIT_BLOCKS: u64 = 4 * (BLOCKS_OF_A_ROOT + 1) + 4;

/// The bytes that the references of a copied block add to the trees of a commit.
const COPY_BYTES: u64 = 3 * 128;

/// The most bytes that are kept for a commit. The kernel has the same limit.
const MOST_COMMIT_BYTES: u64 = 512 << 20;

/// The most bytes that are kept because trees may become less full.
const MOST_DRIFT_BYTES: u64 = 32 << 20;

/// A chunk is allocated ahead when more than one part in this many of the remaining metadata is
/// reserved.
const CHUNK_PARTS: u64 = 2;

/// When a block group is removed, this many times the reserve stays free.
const SPARE: u64 = 4;

/// How often a thread that finds no room retries before it joins the line. Most operations reserve
/// far more than they take, and end sooner than a sleeping thread would wake. While a ticket waits,
/// all other demands join the line too, and each of these threads must be woken. Retrying lets the
/// line run empty. Without it, when only one removal has room at a time, every removal would wait
/// to be woken.
const LOOKS: u32 = 16;

/// Space that is reserved to change a number of items.
pub(crate) struct Reserved<'v>(pub(crate) Reservation<'v>, pub(crate) u64);

/// How many bytes trees may grow by for items of this size in the trees of files and of commits: in
/// leaves that are a third full, and with what a commit and removals may then take in addition.
pub(crate) fn growth_bytes(of_files: u64, of_commits: u64) -> u64 {
    3 * (of_files + 4 * of_commits)
}

impl Space {
    /// The worst case of changing one item, in bytes of metadata.
    pub(crate) fn item_cost(&self) -> u64 {
        let levels = (u64::from(self.tallest()) + 1).max(LEAST_LEVELS);
        3 * (levels + 1) * self.block_cost()
    }

    /// The worst case of taking a block, with its references, in bytes of metadata.
    pub(crate) fn block_cost(&self) -> u64 {
        let shared = if self.may_share() { self.node_size * SHARED_PARTS / PARTS } else { 0 };
        self.new_block_cost() + shared
    }

    /// The worst case of taking a block that is no copy.
    fn new_block_cost(&self) -> u64 {
        self.node_size + REFERENCES_OF_A_BLOCK
    }

    /// The bytes of metadata that items of one file take for good, beside their own bytes. They go
    /// to `places` places in `leaves` leaves of a tree whose blocks have `used` bytes.
    pub(crate) fn lasting_bytes(
        &self,
        used: u64,
        has_snapshots: bool,
        places: u64,
        leaves: u64,
    ) -> u64 {
        let blocks = used / self.node_size;
        let split = places.min(blocks) * self.new_block_cost();
        if !has_snapshots {
            return split;
        }
        let copied = leaves * (u64::from(self.tallest()) + 1);
        split + copied.min(blocks) * self.block_cost()
    }

    /// The worst case of an operation on `items` items, in bytes of metadata.
    pub(crate) fn cost(&self, items: u64) -> u64 {
        items.saturating_mul(self.item_cost()).saturating_add(BLOCKS_OF_A_ROOT * self.node_size)
    }

    /// The bytes of metadata that a commit must free to be worth making for a priority caller: as
    /// many as a removal reserves, and at least half of the free bytes, so that a few commits make
    /// room for all callers.
    pub(crate) fn worth_a_commit(&self) -> u64 {
        let free = self.ledger(Purpose::Metadata).free();
        self.cost(REMOVAL_ITEMS).max(free / 2)
    }

    /// The share of one of `items` in `bytes` that were reserved for all of them. Since then the
    /// volume may have loaded trees that are higher or may share blocks. The tree of these items
    /// may be one of them, if a snapshot of it was taken in between. The reserve for removals pays
    /// for that.
    pub(crate) fn share_of_an_item(&self, bytes: u64, items: u64) -> u64 {
        bytes.saturating_sub(BLOCKS_OF_A_ROOT * self.node_size) / items.max(1)
    }

    /// The worst case of `edits` edits of a log tree with a root of this level, which put `bytes`
    /// bytes there, in bytes of metadata. The log took `blocks` so far.
    pub(crate) fn cost_of_log(&self, blocks: u64, level: u8, edits: usize, bytes: usize) -> u64 {
        let new = 3 * (bytes + edits * ITEM_SIZE) as u64 / self.node_size;
        let copied = blocks.min(edits as u64) * 3 * (u64::from(level) + 1);
        (new + copied + LOG_BLOCKS) * self.node_size
    }

    /// Reserves metadata if it is free and no ticket waits, for a caller that has a handle and
    /// cannot wait.
    pub(crate) fn try_reserve(self: &Arc<Self>, bytes: u64) -> Option<Reservation<'_>> {
        let demand = Demand::new(Claim::Work, bytes);
        let granted = || Reservation::granted(self, Purpose::Metadata, bytes);
        self.try_grant(Purpose::Metadata, demand).then(granted)
    }

    /// The most that a commit of the running transaction may take, in bytes of metadata.
    pub(crate) fn commit_cost(&self) -> u64 {
        let whole = self.pending.tree_bytes.load(Relaxed).min(MOST_COMMIT_BYTES);
        let copies = whole / self.node_size * COPY_BYTES;
        // Blocks are at least a third full. The growth exists, and the next commit copies it.
        let growth = 3 * self.pending.reference_bytes.get();
        let roots = self.pending.roots.get();
        let fixed = (COMMIT_BLOCKS + BLOCKS_OF_A_ROOT * roots) * self.node_size;
        whole + copies + growth + growth + growth / 4 + fixed
    }

    /// The worst case of taking blocks of `bytes` bytes in one transaction, and of its commit, in
    /// bytes of metadata. What the commit frees, and copies for that, is as large again as its
    /// trees.
    pub(crate) fn cost_of_a_batch(&self, bytes: u64) -> u64 {
        let blocks = (bytes / self.node_size).saturating_mul(self.block_cost());
        blocks.saturating_add(2 * self.commit_cost())
    }

    /// The worst case of moving so many blocks to other places, with what refers to them. A commit
    /// copies the trees of references for that once, which the reserve for commits covers.
    pub(crate) fn cost_of_moving(&self, blocks: u64) -> u64 {
        blocks.saturating_mul(self.block_cost()).saturating_add(self.cost(2))
    }

    /// How much less a removal may find when trees become less full.
    fn drift(&self) -> u64 {
        let whole = self.pending.tree_bytes.load(Relaxed);
        (2 * whole).min(MOST_DRIFT_BYTES) + 8 * self.node_size
    }

    /// The reserve for removals and for chunk allocation.
    pub(super) fn kept_bytes(&self) -> u64 {
        let removal = if self.may_share() { self.cost(REMOVAL_ITEMS) } else { 0 };
        self.most_of_last_resort() + removal + self.drift()
    }

    /// The most that deleting a subvolume, dropping it, or allocating a chunk takes at a time.
    fn most_of_last_resort(&self) -> u64 {
        self.cost(REMOVAL_ITEMS.max(DELETION_ITEMS).max(self.chunk_items()))
    }

    /// The part of the reserve that removals leave, because snapshots may keep the blocks that
    /// removals copy for good.
    fn left_by_removals(&self) -> u64 {
        if self.may_share() { self.most_of_last_resort() } else { 0 }
    }

    /// The items that a chunk on all members changes.
    pub(crate) fn chunk_items(&self) -> u64 {
        CHUNK_ITEMS + 2 * self.allocated.member_count()
    }

    /// Sets the bytes that the next chunk of metadata would hold. Returns false, without a change,
    /// when that is less than before and too little for the promises.
    pub(crate) fn set_next_chunk(&self, bytes: u64) -> bool {
        let floor = self.floor(Purpose::Metadata);
        self.ledger(Purpose::Metadata).set_next_chunk(bytes, floor)
    }

    /// What must stay free of this kind of space.
    pub(super) fn floor(&self, purpose: Purpose) -> Floor {
        if self.counts_as_metadata(purpose) {
            let (commit, kept) = (self.commit_cost(), self.kept_bytes());
            Floor { commit, kept, last: self.left_by_removals() }
        } else {
            Floor::default()
        }
    }

    /// The free metadata beside the reserves, claimed or not, in bytes.
    pub(crate) fn left_of_metadata(&self) -> u64 {
        let Floor { commit, kept, .. } = self.floor(Purpose::Metadata);
        self.ledger(Purpose::Metadata).free().saturating_sub(commit + kept)
    }

    /// Grants `demand` if it fits and no ticket comes before it.
    pub(super) fn try_grant(&self, purpose: Purpose, demand: Demand) -> bool {
        let ledger = self.ledger(purpose);
        let line = ledger.line();
        !line.is_before(demand.claim) && ledger.grant(&line, demand, &|| self.floor(purpose))
    }

    /// Grants `demand` if it fits, also before the tickets in line: the caller makes room for
    /// these.
    pub(super) fn try_grant_aside(&self, purpose: Purpose, demand: Demand) -> bool {
        let ledger = self.ledger(purpose);
        ledger.grant(&ledger.line(), demand, &|| self.floor(purpose))
    }

    /// Grants waiting tickets that fit, because space may have become free.
    pub(crate) fn serve(&self, purpose: Purpose) {
        self.ledger(purpose).serve(&|| self.floor(purpose));
    }

    /// The demand of the first ticket for this kind of space.
    pub(crate) fn first_in_line(&self, purpose: Purpose) -> Option<Demand> {
        self.ledger(purpose).line().front()
    }

    /// Whether `demand` would be granted if `more` bytes were free.
    pub(crate) fn would_fit(&self, purpose: Purpose, demand: Demand, more: u64) -> bool {
        self.ledger(purpose).fits(demand, more, &|| self.floor(purpose))
    }

    /// Whether a ticket waits for any kind of space.
    pub(crate) fn is_awaited(&self) -> bool {
        self.ledgers.iter().any(super::ledger::Ledger::is_awaited)
    }

    /// Grants waiting tickets for all kinds of space.
    pub(crate) fn serve_all(&self) {
        self.serve(Purpose::Data);
        self.serve(Purpose::Metadata);
    }

    /// Whether so much is promised that some promises should be redeemed before a caller has to
    /// wait.
    pub(crate) fn is_tight(&self) -> bool {
        self.ledger(Purpose::Metadata).is_tight(self.floor(Purpose::Metadata))
    }

    /// The promised growth of trees by buffered data, in bytes of metadata.
    pub(crate) fn promised(&self) -> u64 {
        self.ledger(Purpose::Metadata).promised()
    }

    /// Whether more data is reserved, mostly for buffered data, than remains for others, counting
    /// space for new chunks, after `taken` more bytes are taken.
    pub(crate) fn has_little_data(&self, taken: u64) -> bool {
        let (_, free) = self.totals(Purpose::Data);
        let left = (free + self.allocated.unallocated()).saturating_sub(taken);
        self.ledger(Purpose::Data).reserved() > left / 2
    }

    /// Whether so much is reserved that a chunk should be allocated before a caller has to wait,
    /// and allocating one is cheap.
    pub(crate) fn needs_chunk(&self) -> bool {
        let reserved = self.ledger(Purpose::Metadata).reserved();
        self.is_roomy() && reserved > self.left_of_metadata() / CHUNK_PARTS
    }

    /// The metadata that must stay free beside all claims when a block group is removed that takes
    /// `taken` bytes of the members, so that it is not allocated again at once. If allocating is
    /// cheap, this includes what was claimed at the peak. If data wants room now, data goes first.
    pub(crate) fn spare_bytes(&self, taken: u64, data_wants_room: bool) -> u64 {
        let kept = self.commit_cost() + self.kept_bytes();
        if data_wants_room {
            return kept;
        }
        let peak = if self.allocated.has_much_room(-taken.cast_signed()) {
            self.ledger(Purpose::Metadata).reserved_peak()
        } else {
            0
        };
        SPARE * kept + CHUNK_PARTS * peak
    }

    /// Whether less than three quarters of the block groups for `purpose` are in use.
    pub(crate) fn is_mostly_free(&self, purpose: Purpose) -> bool {
        let (total, free) = self.totals(purpose);
        free > total / 4
    }
}

/// The room above, which makes room for waiting callers.
pub(crate) trait MakesRoom {
    /// Counters of what the volume does.
    fn stats(&self) -> &EngineCounters;

    /// `EROFS` when the volume has stopped writing.
    fn require_writing(&self) -> Result<()>;

    /// A priority caller found no room. Asks the background thread of the volume to commit, if a
    /// commit makes room.
    fn ask_for_commit(&self);

    /// Makes room until the ticket of `own`, the leader of the line for this kind of space, has
    /// ended.
    fn lead(&self, purpose: Purpose, own: &Waiter) -> Result<()>;
}

impl Space {
    /// Reserves `bytes`. The caller must hold no handle.
    ///
    /// # Errors
    /// `ENOSPC` when there is no room and none can be made; errors of making room.
    pub(crate) fn reserve(
        self: &Arc<Self>,
        purpose: Purpose,
        claim: Claim,
        bytes: u64,
        maker: &impl MakesRoom,
    ) -> Result<Reservation<'_>> {
        self.get(purpose, Demand::new(claim, bytes), maker)?;
        Ok(Reservation::granted(self, purpose, bytes))
    }

    /// Promises `bytes` of metadata for the growth of trees. The caller must hold no handle.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub(crate) fn promise(
        self: &Arc<Self>,
        bytes: u64,
        maker: &impl MakesRoom,
    ) -> Result<Promise<'_>> {
        if bytes > 0 {
            self.get(Purpose::Metadata, Demand::promise(bytes), maker)?;
        }
        Ok(Promise::granted(self, bytes))
    }

    /// Reserves metadata if it is free and no ticket waits. A caller that makes room, or writes
    /// back, takes the reserve for that even while tickets wait.
    pub(crate) fn try_reserve_for(
        self: &Arc<Self>,
        claim: Claim,
        bytes: u64,
    ) -> Option<Reservation<'_>> {
        let demand = Demand::new(claim, bytes);
        let is_granted = match claim {
            Claim::Work => self.try_grant(Purpose::Metadata, demand),
            Claim::MakesRoom | Claim::LastResort | Claim::WritesBack => {
                self.try_grant_aside(Purpose::Metadata, demand)
            }
        };
        is_granted.then(|| Reservation::granted(self, Purpose::Metadata, bytes))
    }

    /// Reserves space for data, if it is free.
    pub(crate) fn try_reserve_data(self: &Arc<Self>, bytes: u64) -> Option<Reservation<'_>> {
        let demand = Demand::new(Claim::LastResort, bytes);
        let is_granted = self.try_grant_aside(Purpose::Data, demand);
        is_granted.then(|| Reservation::granted(self, Purpose::Data, bytes))
    }

    /// Gets `demand` granted: at once, after a few retries, or in line.
    fn get(&self, purpose: Purpose, demand: Demand, maker: &impl MakesRoom) -> Result<()> {
        let try_grant = || self.try_grant(purpose, demand);
        if try_grant() {
            maker.stats().granted_at_once();
            return Ok(());
        }
        if purpose == Purpose::Metadata && demand.claim.is_first() {
            maker.ask_for_commit();
        }
        let since = Instant::now();
        let look_again = |_| {
            thread::yield_now();
            try_grant()
        };
        if (0..LOOKS).any(look_again) {
            self.stats.looked_again(since.elapsed());
            return Ok(());
        }
        debug!(target: RECLAIM, %purpose, ?demand, "waiting for space");
        let result = self.wait_in_line(purpose, demand, maker);
        debug!(
            target: RECLAIM,
            %purpose,
            ?demand,
            is_granted = result.is_ok(),
            us = micros(Some(since)),
            "the wait for space has ended",
        );
        self.stats.waited(since.elapsed(), &result);
        result
    }

    /// Waits until `demand` is granted. The caller must hold no handle.
    ///
    /// # Errors
    /// `ENOSPC` when no room can be made; errors of making room.
    fn wait_in_line(&self, purpose: Purpose, demand: Demand, maker: &impl MakesRoom) -> Result<()> {
        #[cfg(debug_assertions)]
        crate::block::lock_order::require_no_handle();
        let mut place = PlaceInLine::join(self.ledger(purpose), demand);
        loop {
            match place.wait() {
                TurnInLine::Ended(TicketOutcome::Granted) => return Ok(()),
                TurnInLine::Ended(TicketOutcome::Refused) => {
                    return Err(Error::posix(Errno::NOSPC, format!("room for {purpose}")));
                }
                TurnInLine::Leads(leading) => {
                    let led = maker.lead(purpose, &leading.waiter);
                    drop(leading);
                    // When making room failed but the ticket was granted, the caller continues,
                    // unless the volume has stopped writing.
                    if let Err(error) = led
                        && (!place.is_granted() || maker.require_writing().is_err())
                    {
                        return Err(error);
                    }
                }
            }
        }
    }
}
