//! Reserving: making sure, before an operation begins, that it can be finished and committed.
//!
//! Metadata that is free serves, in this order,
//!
//! 1. what is reserved already, and the commit of what was changed so far (`C`,
//!    [`Space::commit_cost`]),
//! 2. chunk allocation and removals, which make room, and write-back, which finishes what was
//!    accepted (`K`, [`Space::kept_bytes`]),
//! 3. all other work.
//!
//! What does not fit waits in line (`tickets`), and whoever leads the line makes room (`upkeep/reclaim`).
//!
//! # Why a commit always finds room
//!
//! `reserved + C <= free` holds at all times:
//!
//! - It holds when something is granted, whatever it is for (`ledger`).
//! - An operation takes blocks, and queues references that make `C` larger. Both together are no
//!   more than what it reserved, which counts until it is done ([`Space::cost`]).
//! - A commit takes no more than `C`: it copies the trees that references go to once at most, and
//!   they grow by what the references add. When it is done the copied blocks are free again, so
//!   what is lost is the growth `g` alone. `C` counts `g` more than twice: once for the growth,
//!   once because the next commit copies that too. So what is left is the `C` of the next
//!   transaction.
//!
//! # Why a removal always finds room
//!
//! Work leaves `K`. What may go into `K` is not lost: the blocks that a removal or a chunk
//! allocation copies are free again after the next commit, and all removals leave the trees smaller
//! or as they were. Only how full blocks are may change: removals keep leaves at least a third
//! full, so the trees of the commit may become twice as large as they are when two thirds of them
//! are in use. `K` pays for that ([`Space::drift`]) beside one removal or chunk allocation,
//! whichever is larger.
//!
//! So after a commit, and when those are done who had something reserved, a removal fits. It is
//! next: nothing is granted past the line, and removals stand at its front. Those who hold the next
//! places in front of it are removals too, and done after one commit each.
//!
//! Where a snapshot shares blocks, it keeps what a removal copies, and removals of names whose
//! items lie scattered may use `K` up. So they leave the last of it to what gives back what
//! snapshots keep: deleting subvolumes, and dropping them. Beside a snapshot a removal may be
//! refused on a full volume; deleting a subvolume is not.
//!
//! # Why write-back always finds room
//!
//! A step of write-back takes no more at a time than a removal, and what it copies is free again
//! after the next commit, unless a snapshot keeps it. So nothing is reserved for these copies of
//! all files that are buffered together: however many they are, their steps take `K` one after the
//! other. But write-back leaves trees larger. That is promised when the data is accepted and given
//! up by the step that does it.
//!
//! Items are promised byte for byte ([`growth_bytes`]): what is added to the trees of a commit
//! counts four times, because it is there, `C` is larger by it, and `K` by twice as much
//! ([`Space::drift`]). So what holds after a commit holds after the commit behind the step, with
//! what is still promised.
//!
//! Blocks of the tree of the file are promised beside that ([`Space::lasting_bytes`]): a leaf may
//! be full, as series of items leave them, so each place that items go to may take one more; and
//! where a snapshot was taken of the tree, it keeps what is on the way there. A file does neither
//! more often than the tree has blocks.
//!
//! Where promises count on a chunk that is not there yet, steps leave `K` to its allocation.
//!
//! Where free space for data is in pieces, a run becomes more extents than one, which was not
//! promised. But as many extents stand between the pieces, and `K` has the trees that these are in
//! twice.
//!
//! # What an item costs
//!
//! Changing one item of a tree with `n` levels copies `n` blocks on the way. Room is made below a
//! node with at most two siblings copied, or blocks added, on each level; a leaf may split in
//! three, and a root may be added. For `k` items that is at most `k (3 (n - 1) + 2) + 3` blocks,
//! which `3 k (n + 1)` is not below. So what is reserved with the trees as they are is also enough
//! when they become one level higher before it is used. That takes a hundred times more items than
//! there were, which no file that is buffered sees, but in small trees: they count as if they had
//! three levels.
//!
//! A block that is taken queues a reference, and one for the block that it is a copy of. Where a
//! snapshot may share blocks, a copy may queue one for everything that is in it.
//!
//! # What a commit costs
//!
//! Delayed references change the extent tree and those that go with it. A block is copied once in a
//! transaction, so this copies at most these trees whole, and they grow by what the references add,
//! in blocks that are at least a third full. A commit that changes more than [`MOST_COMMIT_BYTES`]
//! of them has that many references of its own.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Instant;

use offshoot_btrfs_format::edit::ITEM_SIZE;
use offshoot_vfs::{Errno, Error, Result};

use super::ledger::{Floor, Promise, Reservation};
use super::place::{PlaceInLine, Turn};
use super::tickets::{Demand, Kind, Outcome, Waiter};
use super::{Purpose, Space};
use crate::stats::Counters;

/// Items that an operation of the namespace touches at most: two directory items, two indexes, two
/// references, and the inodes of a file and of two directories.
pub(crate) const OPERATION_ITEMS: u64 = 9;

/// Places in a tree that a removal touches at most: a directory item, an index and the inode of the
/// directory; the inode, and two leaves of its items; an orphan item. A step of write-back touches
/// no more.
pub(crate) const REMOVAL_ITEMS: u64 = 7;

/// Places that deleting a subvolume touches at most: a directory item, an index and the inode of
/// the directory; its root item, with the reference beside it, the reference of the subvolume that
/// holds it, and an orphan item; two UUIDs.
pub(crate) const DELETION_ITEMS: u64 = 8;

/// Items that a chunk changes beside those of the members: itself, its block group, two of its free
/// space.
const CHUNK_ITEMS: u64 = 4;

/// What a block that is taken adds to the bytes of references, with the block that it is a copy of,
/// times what [`Space::commit_cost`] makes of each.
const REFERENCES_OF_A_BLOCK: u64 = 1100;

/// What the references of everything that a shared block points to come to, in parts of a block.
const SHARED_PARTS: u64 = 5;
const PARTS: u64 = 2;

/// Blocks that a log tree may take more than its leaves: those of nodes and of a root.
const LOG_BLOCKS: u64 = 16;

/// Levels that trees count as at least.
const LEAST_LEVELS: u64 = 3;

/// Blocks of the root tree that are copied for each root that is stored.
const BLOCKS_OF_A_ROOT: u64 = 4;

/// Blocks of the root tree, and new roots, of the trees that a commit itself changes.
const COMMIT_BLOCKS: u64 = 4 * (BLOCKS_OF_A_ROOT + 1) + 4;

/// What the references of a copied block add to the trees of a commit, in bytes.
const COPY_BYTES: u64 = 3 * 128;

/// The most that is kept for a commit: what the kernel keeps at most.
const MOST_COMMIT_BYTES: u64 = 512 << 20;

/// The most that is kept because trees may become less full, in bytes.
const MOST_DRIFT_BYTES: u64 = 32 << 20;

/// The part of what is left of metadata beside what is kept back that may be reserved before a
/// chunk is allocated ahead.
const CHUNK_PARTS: u64 = 2;

/// How many times what is kept back stays free when a block group is removed.
const SPARE: u64 = 4;

/// How often who finds no room looks again before it joins the line. Most have reserved far more
/// than they take, and are done in less time than waking a thread takes. While somebody is in line
/// all others join it, and each of them has to be woken: so they look again then, too, until the
/// line is empty. Where only one has room at a time, a line that does not run empty makes every
/// removal wait to be woken.
const LOOKS: u32 = 16;

/// Space that is reserved to change so many items.
pub(crate) struct Reserved<'v>(pub(crate) Reservation<'v>, pub(crate) u64);

/// What an operation is for, which decides how far it may go into what is kept back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// Work that may be refused.
    Work,
    /// Work that makes room, but where a snapshot keeps what it copies.
    MakesRoom,
    /// Work that makes room in any case: deleting and dropping subvolumes, and chunks.
    LastResort,
    /// Work that stores what was accepted.
    WritesBack,
}

/// What items of so many bytes make trees larger by, those of files and those of a commit: in
/// leaves that are a third full, and with what a commit and removals may take more then.
pub(crate) fn growth_bytes(of_files: u64, of_commits: u64) -> u64 {
    3 * (of_files + 4 * of_commits)
}

impl From<Claim> for Kind {
    fn from(claim: Claim) -> Self {
        match claim {
            Claim::Work => Self::Work,
            Claim::MakesRoom => Self::MakesRoom,
            Claim::LastResort => Self::LastResort,
            Claim::WritesBack => Self::WritesBack,
        }
    }
}

impl Space {
    /// The worst case of changing one item, in bytes of metadata.
    pub(crate) fn item_cost(&self) -> u64 {
        let levels = (u64::from(self.tallest()) + 1).max(LEAST_LEVELS);
        3 * (levels + 1) * self.block_cost()
    }

    /// The worst case of taking a block, with what its references come to, in bytes of metadata.
    pub(crate) fn block_cost(&self) -> u64 {
        let shared = if self.may_share() { self.node_size * SHARED_PARTS / PARTS } else { 0 };
        self.new_block_cost() + shared
    }

    /// The same of a block that is no copy.
    fn new_block_cost(&self) -> u64 {
        self.node_size + REFERENCES_OF_A_BLOCK
    }

    /// What items of one file that go to so many places, in so many leaves, of a tree take for good
    /// beside their own bytes, in bytes of metadata. The blocks of the tree take `used` bytes.
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

    /// The worst case of an operation on so many items, in bytes of metadata.
    pub(crate) fn cost(&self, items: u64) -> u64 {
        items.saturating_mul(self.item_cost()).saturating_add(BLOCKS_OF_A_ROOT * self.node_size)
    }

    /// What a commit has to make free so that it is made for who goes before others, in bytes of
    /// metadata: what a removal reserves, and as much as half of what is free, so that a few of
    /// them make room for all.
    pub(crate) fn worth_a_commit(&self) -> u64 {
        let free = self.ledger(Purpose::Metadata).free();
        self.cost(REMOVAL_ITEMS).max(free / 2)
    }

    /// What one of `items` may take of `bytes` that were reserved for all of them. Since then trees
    /// may have been met that are higher or may share blocks. So may the one that these items go
    /// to, when a snapshot of it was taken in between: what is kept for removals pays for that.
    pub(crate) fn share_of_an_item(&self, bytes: u64, items: u64) -> u64 {
        bytes.saturating_sub(BLOCKS_OF_A_ROOT * self.node_size) / items.max(1)
    }

    /// The worst case of so many edits of a log tree with a root of this level, which put so many
    /// bytes there, in bytes of metadata. The log took `blocks` so far.
    pub(crate) fn cost_of_log(&self, blocks: u64, level: u8, edits: usize, bytes: usize) -> u64 {
        let new = 3 * (bytes + edits * ITEM_SIZE) as u64 / self.node_size;
        let copied = blocks.min(edits as u64) * 3 * (u64::from(level) + 1);
        (new + copied + LOG_BLOCKS) * self.node_size
    }

    /// Reserves so much metadata if it is there and nobody waits for it, for who has a handle and
    /// cannot wait.
    pub(crate) fn try_reserve(self: &Arc<Self>, bytes: u64) -> Option<Reservation<'_>> {
        let demand = Demand { kind: Kind::Work, bytes };
        let granted = || Reservation::granted(self, Purpose::Metadata, bytes);
        self.try_grant(Purpose::Metadata, demand).then(granted)
    }

    /// What a commit of the running transaction may take, in bytes of metadata.
    pub(crate) fn commit_cost(&self) -> u64 {
        let whole = self.pending.tree_bytes.load(Relaxed).min(MOST_COMMIT_BYTES);
        let copies = whole / self.node_size * COPY_BYTES;
        // Blocks are at least a third full. What they grow by is there, and is copied by the next
        // commit.
        let growth = 3 * self.pending.reference_bytes.get();
        let roots = self.pending.roots.get();
        let fixed = (COMMIT_BLOCKS + BLOCKS_OF_A_ROOT * roots) * self.node_size;
        whole + copies + growth + growth + growth / 4 + fixed
    }

    /// The worst case of taking blocks of so many bytes in one transaction, and of its commit, in
    /// bytes of metadata. What the commit frees, and copies for that, is as much again as its trees
    /// have.
    pub(crate) fn cost_of_a_batch(&self, bytes: u64) -> u64 {
        let blocks = (bytes / self.node_size).saturating_mul(self.block_cost());
        blocks.saturating_add(2 * self.commit_cost())
    }

    /// By how much what a removal finds may become less when trees become less full.
    fn drift(&self) -> u64 {
        let whole = self.pending.tree_bytes.load(Relaxed);
        (2 * whole).min(MOST_DRIFT_BYTES) + 8 * self.node_size
    }

    /// What is kept for removals and for chunk allocation.
    pub(crate) fn kept_bytes(&self) -> u64 {
        let removal = if self.may_share() { self.cost(REMOVAL_ITEMS) } else { 0 };
        self.most_of_last_resort() + removal + self.drift()
    }

    /// The most that deleting a subvolume, dropping it, or a chunk takes at a time.
    fn most_of_last_resort(&self) -> u64 {
        self.cost(REMOVAL_ITEMS.max(DELETION_ITEMS).max(self.chunk_items()))
    }

    /// What removals leave of what is kept: where snapshots keep what they copy, they may take it
    /// for good.
    fn left_by_removals(&self) -> u64 {
        if self.may_share() { self.most_of_last_resort() } else { 0 }
    }

    /// Items that a chunk of all members changes.
    pub(crate) fn chunk_items(&self) -> u64 {
        CHUNK_ITEMS + 2 * self.allocated.member_count()
    }

    /// What must be left of this kind of space.
    pub(crate) fn floor(&self, purpose: Purpose) -> Floor {
        if self.counts_as_metadata(purpose) {
            let (commit, kept) = (self.commit_cost(), self.kept_bytes());
            Floor { commit, kept, last: self.left_by_removals() }
        } else {
            Floor::default()
        }
    }

    /// What is free of metadata beside what is kept back, reserved or not, in bytes.
    pub(crate) fn left_of_metadata(&self) -> u64 {
        let Floor { commit, kept, .. } = self.floor(Purpose::Metadata);
        self.ledger(Purpose::Metadata).free().saturating_sub(commit + kept)
    }

    /// Grants what `demand` wants, if it fits and nobody waits who goes before it.
    pub(super) fn try_grant(&self, purpose: Purpose, demand: Demand) -> bool {
        let ledger = self.ledger(purpose);
        let line = ledger.line();
        !line.is_before(demand.kind) && ledger.grant(&line, demand, &|| self.floor(purpose))
    }

    /// Grants what `demand` wants, if it fits, to who makes room for those who wait.
    pub(super) fn try_grant_aside(&self, purpose: Purpose, demand: Demand) -> bool {
        let ledger = self.ledger(purpose);
        ledger.grant(&ledger.line(), demand, &|| self.floor(purpose))
    }

    /// Grants what fits to those who wait, because something may have become free.
    pub(crate) fn serve(&self, purpose: Purpose) {
        self.ledger(purpose).serve(&|| self.floor(purpose));
    }

    /// What the first in line of this kind of space wants.
    pub(crate) fn first_in_line(&self, purpose: Purpose) -> Option<Demand> {
        self.ledger(purpose).line().front()
    }

    /// Whether `demand` would be granted if `more` bytes were free.
    pub(crate) fn would_fit(&self, purpose: Purpose, demand: Demand, more: u64) -> bool {
        self.ledger(purpose).fits(demand, more, &|| self.floor(purpose))
    }

    /// Whether somebody waits for space of any kind.
    pub(crate) fn is_awaited(&self) -> bool {
        self.ledgers.iter().any(super::ledger::Ledger::is_awaited)
    }

    /// Serves all kinds.
    pub(crate) fn serve_all(&self) {
        self.serve(Purpose::Data);
        self.serve(Purpose::Metadata);
    }

    /// Whether so much is promised that some of it should be redeemed before somebody waits.
    pub(crate) fn is_tight(&self) -> bool {
        self.ledger(Purpose::Metadata).is_tight(self.floor(Purpose::Metadata))
    }

    /// What trees will become larger by when what is buffered is written back, in bytes of
    /// metadata.
    pub(crate) fn promised(&self) -> u64 {
        self.ledger(Purpose::Metadata).promised()
    }

    /// Whether more data is reserved, for what is buffered most of it, than is left for others, in
    /// chunks that may come too, when `taken` bytes more are.
    pub(crate) fn has_little_data(&self, taken: u64) -> bool {
        let (_, free) = self.totals(Purpose::Data);
        let left = (free + self.allocated.unallocated()).saturating_sub(taken);
        self.ledger(Purpose::Data).reserved() > left / 2
    }

    /// Whether so much is reserved that a chunk should be allocated before somebody waits, where
    /// that is cheap.
    pub(crate) fn needs_chunk(&self) -> bool {
        let reserved = self.ledger(Purpose::Metadata).reserved();
        self.is_roomy() && reserved > self.left_of_metadata() / CHUNK_PARTS
    }

    /// What must stay free of metadata beside what is spoken for when a block group is removed that
    /// takes so much of the members, so that it is not allocated again at once: where that would be
    /// cheap, enough for what was spoken for at the peak. What data wants now it gets before that.
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

/// What makes room for those who wait.
pub(crate) trait MakesRoom {
    /// Counters of what the volume does.
    fn stats(&self) -> &Counters;

    /// `EROFS` when nothing is written any more.
    fn require_whole(&self) -> Result<()>;

    /// Who goes before others found no room: has the thread of the volume commit, if that makes
    /// room.
    fn ask_for_commit(&self);

    /// Makes room until the ticket of `own`, which leads the line of this kind of space, has come
    /// to its end.
    fn lead(&self, purpose: Purpose, own: &Waiter) -> Result<()>;
}

impl Space {
    /// Reserves so many bytes. The caller must hold no handle.
    ///
    /// # Errors
    /// `ENOSPC` when there is no room and none can be made; what failed while it was made.
    pub(crate) fn reserve(
        self: &Arc<Self>,
        purpose: Purpose,
        claim: Claim,
        bytes: u64,
        maker: &impl MakesRoom,
    ) -> Result<Reservation<'_>> {
        self.get(purpose, Demand { kind: claim.into(), bytes }, maker)?;
        Ok(Reservation::granted(self, purpose, bytes))
    }

    /// Promises so many bytes of metadata, which trees will become larger by. The caller must hold
    /// no handle.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub(crate) fn promise(
        self: &Arc<Self>,
        bytes: u64,
        maker: &impl MakesRoom,
    ) -> Result<Promise<'_>> {
        if bytes > 0 {
            self.get(Purpose::Metadata, Demand { kind: Kind::Promise, bytes }, maker)?;
        }
        Ok(Promise::granted(self, bytes))
    }

    /// Reserves so much metadata when it is there, and nobody waits for it. Who makes room, or
    /// writes back, takes what is kept for that, whoever waits.
    pub(crate) fn try_reserve_for(
        self: &Arc<Self>,
        claim: Claim,
        bytes: u64,
    ) -> Option<Reservation<'_>> {
        let demand = Demand { kind: claim.into(), bytes };
        let is_granted = match claim {
            Claim::Work => self.try_grant(Purpose::Metadata, demand),
            Claim::MakesRoom | Claim::LastResort | Claim::WritesBack => {
                self.try_grant_aside(Purpose::Metadata, demand)
            }
        };
        is_granted.then(|| Reservation::granted(self, Purpose::Metadata, bytes))
    }

    /// Gets what `demand` wants: at once, when others have gone on for a moment, or in line.
    fn get(&self, purpose: Purpose, demand: Demand, maker: &impl MakesRoom) -> Result<()> {
        let try_grant = || self.try_grant(purpose, demand);
        if try_grant() {
            maker.stats().granted_at_once();
            return Ok(());
        }
        if purpose == Purpose::Metadata && demand.kind.is_first() {
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
        let result = self.wait_in_line(purpose, demand, maker);
        self.stats.waited(since.elapsed(), &result);
        result
    }

    /// Waits until `demand` is granted. The caller must hold no handle.
    ///
    /// # Errors
    /// `ENOSPC` when no room can be made; what failed while it was made.
    fn wait_in_line(&self, purpose: Purpose, demand: Demand, maker: &impl MakesRoom) -> Result<()> {
        #[cfg(debug_assertions)]
        crate::block::lock_order::require_no_handle();
        let mut place = PlaceInLine::join(self.ledger(purpose), demand);
        loop {
            match place.wait() {
                Turn::Ended(Outcome::Granted) => return Ok(()),
                Turn::Ended(Outcome::Refused) => {
                    return Err(Error::posix(Errno::NOSPC, format!("room for {purpose}")));
                }
                Turn::Leads(leading) => {
                    let led = maker.lead(purpose, &leading.waiter);
                    drop(leading);
                    // Who was granted space all the same goes on, but where nothing can be written
                    // any more.
                    if let Err(error) = led
                        && (!place.is_granted() || maker.require_whole().is_err())
                    {
                        return Err(error);
                    }
                }
            }
        }
    }
}
