//! Reserving: making sure, before an operation begins, that it can be finished and committed.
//!
//! Metadata that is free serves, in this order,
//!
//! 1. the commit of what was changed so far ([`commit_cost`](Engine::commit_cost)),
//! 2. chunk allocation and removals, which make room ([`MAKING_ROOM_ITEMS`]),
//! 3. all other work.
//!
//! So when there is none left for other work, files can still be removed, and what is
//! left for the commit is left whatever happens. An operation that does not fit makes room,
//! from cheap to dear: a block group whose free space was not looked at yet, buffered data, which gives up what was
//! reserved for it, a new chunk, a commit, which frees what the transaction has given up. When metadata is mostly free and only worst cases
//! fill it, the commit comes before the chunk. One operation at a time makes room, and others wait
//! for their turn behind it.
//!
//! # What an item costs
//!
//! Changing one item of a tree with `n` levels copies `n` blocks on the way. Room is made below a node with
//! at most two siblings copied, or blocks added, on each level; a leaf may split in three, and a root may
//! be added: `3 n + 3` blocks. Half as much again pays for what the references of these blocks add to
//! the extent tree. All trees are taken to be as high as the highest.
//!
//! # What a commit costs
//!
//! Delayed references change the extent tree and those that go with it. A block is copied once in a
//! transaction, so this copies at most these trees whole, and they grow by what the references add.

use offshoot_btrfs_format::TreeId;
use offshoot_btrfs_format::superblock::CompatRo;
use offshoot_vfs::{Errno, Error, Result};

use super::ledger::Reservation;
use super::{Purpose, Space};
use crate::inode::write_back;
use crate::sync::thread;
use crate::transaction::{Handle, Live};
use crate::volume::Engine;

/// Items that an operation of the namespace touches at most: two directory items, two indexes, two
/// references, and the inodes of a file and of two directories.
pub(crate) const OPERATION_ITEMS: u64 = 9;

/// Items for which space is kept that only chunk allocation and removals get, beside one for
/// each member: a chunk, its block group and its free space in two items, and an operation.
const MAKING_ROOM_ITEMS: u64 = 4 + OPERATION_ITEMS;

/// What a reference adds to the extent tree and the free-space tree, in bytes: an extent item
/// without skinny metadata and two free ranges, with their headers.
const REFERENCE_BYTES: u64 = 51 + 25 + 2 * 25;

/// Blocks of the root tree that a commit may change, and new roots of the trees that it changes.
const COMMIT_BLOCKS: u64 = 48;

/// The most that is kept for a commit: what the kernel keeps at most. A single commit that changes more
/// of the extent tree than this has many extents of its own, which [`REFERENCE_BYTES`] pays for.
const MOST_COMMIT_BYTES: u64 = 512 << 20;

/// How often an operation has a commit made before it is told that there is no space. More than
/// once, because others may take what a commit frees.
const COMMITS: u32 = 3;

/// The same for what makes room itself. It is refused nothing because others were faster, so this is far more often
/// than there are others who hold a claim at the moment.
const COMMITS_TO_REMOVE: u32 = 64;

/// What an operation is for, which decides how far it may go into what is kept back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// Work that may be refused.
    Work,
    /// Work that makes room.
    MakesRoom,
}

impl Space {
    /// The worst case of changing one item, in bytes of metadata.
    pub(crate) fn item_cost(&self) -> u64 {
        self.cost_with(self.tallest())
    }

    /// What an item cost before the last tree became higher than all others, in bytes of metadata.
    pub(crate) fn least_item_cost(&self) -> u64 {
        self.cost_with(self.tallest().saturating_sub(1))
    }

    fn cost_with(&self, tallest: u8) -> u64 {
        let levels = u64::from(tallest) + 1;
        (3 * levels + 3) * self.node_size * 3 / 2
    }

    /// What is kept beside the cost of a commit.
    pub(super) fn kept_bytes(&self, claim: Claim) -> u64 {
        match claim {
            Claim::Work => 2 * (MAKING_ROOM_ITEMS + self.member_count()) * self.item_cost(),
            Claim::MakesRoom => 0,
        }
    }

    /// Whether less than three quarters of the block groups for `purpose` are in use.
    fn is_mostly_free(&self, purpose: Purpose) -> bool {
        let (total, free) = self.totals(purpose);
        free > total / 4
    }
}

impl Engine {
    /// Joins the running transaction, with space for one operation of the namespace.
    ///
    /// The caller must hold no handle.
    ///
    /// # Errors
    /// `EROFS` when the volume was opened for reading, or something failed before; `ENOSPC` when there
    /// is no room and none can be made.
    pub(crate) fn join(&self) -> Result<Handle<'_>> {
        self.join_for(OPERATION_ITEMS, Claim::Work)
    }

    /// Joins the running transaction, to remove something: this works on a full volume.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub(crate) fn join_to_remove(&self) -> Result<Handle<'_>> {
        self.join_for(OPERATION_ITEMS, Claim::MakesRoom)
    }

    /// Joins the running transaction, with space to change this many items.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub(crate) fn join_for(&self, items: u64, claim: Claim) -> Result<Handle<'_>> {
        let live = self.live()?;
        self.limit_delayed()?;
        self.limit_dirty_blocks()?;
        let attempt = || self.try_join(live, items, claim);
        match Self::unless_tight(live, attempt)? {
            Some(handle) => Ok(handle),
            None => self.make_room(Purpose::Metadata, claim, attempt),
        }
    }

    /// Commits when there are more dirty tree blocks than may be, and has that done before.
    /// The caller must hold no handle.
    pub(crate) fn limit_dirty_blocks(&self) -> Result<()> {
        let live = self.live()?;
        let dirty_bytes = self.enter()?.dirty_bytes();
        if dirty_bytes > live.dirty_bytes {
            return self.commit_over(live.dirty_bytes);
        }
        if dirty_bytes > live.dirty_bytes / 2 {
            live.pressure.press();
        }
        Ok(())
    }

    /// Reserves space for `bytes` of data, before a write is accepted. The caller must hold no handle.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub(crate) fn reserve_data(&self, bytes: u64) -> Result<Reservation<'_>> {
        let live = self.live()?;
        let sector = u64::from(self.superblock().sector_size);
        let bytes = bytes.next_multiple_of(sector);
        let attempt = || self.try_reserve_data(live, bytes);
        match Self::unless_tight(live, attempt)? {
            Some(reservation) => Ok(reservation),
            None => self.make_room(Purpose::Data, Claim::Work, attempt),
        }
    }

    /// Makes an attempt, unless somebody makes room: what that gives is for who waits already, also when the
    /// attempt began before and waited for a commit.
    fn unless_tight<T>(live: &Live, attempt: impl Fn() -> Result<Option<T>>) -> Result<Option<T>> {
        let is_tight = || live.space.turn.is_locked();
        if is_tight() { Ok(None) } else { Ok(attempt()?.filter(|_| !is_tight())) }
    }

    /// Makes room until `attempt` has something.
    fn make_room<T>(
        &self,
        purpose: Purpose,
        claim: Claim,
        attempt: impl Fn() -> Result<Option<T>>,
    ) -> Result<T> {
        let live = self.live()?;
        let _turn = live.space.turn.lock();
        let most = if claim == Claim::Work { COMMITS } else { COMMITS_TO_REMOVE };
        let mut commits = 0;
        loop {
            if let Some(success) = attempt()? {
                return Ok(success);
            }
            // A good part, so that the next to flush finds much again.
            if self.flush_delayed(live.space.ledger(Purpose::Metadata).reserved() / 4)? > 0
                && let Some(success) = attempt()?
            {
                return Ok(success);
            }
            if write_back::make_room(self)?
                && let Some(success) = attempt()?
            {
                return Ok(success);
            }
            if (commits > 0 || !live.space.is_mostly_free(purpose)) && self.grow(purpose)? {
                continue;
            }
            if commits == most {
                return Err(Error::posix(Errno::NOSPC, format!("room for {purpose}")));
            }
            self.commit()?;
            // Who has a claim and is on the way lets go of it.
            thread::yield_now();
            commits += 1;
        }
    }

    /// What must be left beside an operation: the commit, and what is kept for others. A commit makes the next
    /// one dearer, by what it adds to the trees; ordinary work leaves a quarter more for that, so that
    /// removals find room after it too.
    fn kept_for(&self, handle: &Handle<'_>, claim: Claim) -> Result<u64> {
        let commit = self.commit_cost(handle)?;
        let spare = if claim == Claim::Work { commit / 4 } else { 0 };
        Ok(commit.saturating_add(spare).saturating_add(handle.space().kept_bytes(claim)))
    }

    /// Joins when space for `items` is there.
    pub(crate) fn try_join<'v>(
        &'v self,
        live: &'v Live,
        items: u64,
        claim: Claim,
    ) -> Result<Option<Handle<'v>>> {
        let handle = self.enter()?;
        let keep = self.kept_for(&handle, claim)?;
        let bytes = items * live.space.item_cost();
        let found = self.find_free(Purpose::Metadata, bytes, keep)?;
        Ok(found.map(|reservation| handle.with_reservation(reservation)))
    }

    fn try_reserve_data<'v>(
        &'v self,
        live: &'v Live,
        bytes: u64,
    ) -> Result<Option<Reservation<'v>>> {
        // What is free is read from the trees, which a commit must not change meanwhile.
        let handle = self.enter()?;
        let keep = if live.space.is_mixed() { self.kept_for(&handle, Claim::Work)? } else { 0 };
        self.find_free(Purpose::Data, bytes, keep)
    }

    /// Reserves `bytes`, looking into block groups until it knows of as much.
    fn find_free(
        &self,
        purpose: Purpose,
        bytes: u64,
        keep: u64,
    ) -> Result<Option<Reservation<'_>>> {
        let space = &self.live()?.space;
        loop {
            if let Some(reservation) = Reservation::of(space, purpose, bytes, keep) {
                return Ok(Some(reservation));
            }
            if !space.load_one(self, purpose)? {
                return Ok(None);
            }
        }
    }

    /// What a commit of the running transaction may take, in bytes of metadata.
    pub(super) fn commit_cost(&self, handle: &Handle<'_>) -> Result<u64> {
        let superblock = self.superblock();
        let has = |feature| superblock.compat_ro.has(feature);
        let trees = [
            Some(TreeId::EXTENT),
            has(CompatRo::FREE_SPACE_TREE).then_some(TreeId::FREE_SPACE),
            has(CompatRo::BLOCK_GROUP_TREE).then_some(TreeId::BLOCK_GROUP),
            self.csum_tree().map(|root| root.id),
        ];
        let mut whole = 0u64;
        for id in trees.into_iter().flatten() {
            whole = whole.saturating_add(handle.tree_bytes(id)?);
        }
        let node_size = u64::from(superblock.node_size);
        let (references, roots) = handle.pending();
        // Copied blocks are references too, two for each.
        let references = references + 2 * whole.min(MOST_COMMIT_BYTES) / node_size;
        // Blocks are at least a third full.
        let growth = 3 * references * REFERENCE_BYTES;
        let fixed = (COMMIT_BLOCKS + 4 * roots) * node_size;
        Ok(whole.min(MOST_COMMIT_BYTES) + growth + fixed)
    }
}
