//! The free blocks that a transaction may take, those that it must not use yet, and what it counts.

use std::sync::Arc;

use offshoot_vfs::{Errno, Error, Result};
use offshoot_xfs_format::{AgNumber, FsBlock};

use super::XfsTransaction;
use crate::log::LogSequence;
use crate::trans::busy::UnsettledExtents;
use crate::trans::discards::DiscardedExtents;
use crate::trans::{AgExtent, BlockPromise, CountChanges, DiscardGuard, SpaceClaim};

/// The blocks of a group whose freeing is not durable, or that are being discarded, for a search of
/// free ones.
#[derive(Debug)]
pub(crate) struct BusyBlocks<'e> {
    /// What others have freed.
    table: &'e UnsettledExtents,
    durable: LogSequence,
    ag: AgNumber,
    /// What the transaction itself has freed.
    own: Vec<AgExtent>,
    discarded: &'e DiscardedExtents,
    /// Whether only what is being discarded counts.
    are_others_free: bool,
    /// Whether what is being discarded does not count.
    are_discards_free: bool,
}

impl BusyBlocks<'_> {
    /// The same without what is being discarded.
    pub(crate) fn without_discards(self) -> Self {
        Self { are_discards_free: true, ..self }
    }

    /// Those of an extent, ascending. They may overlap.
    pub(crate) fn in_extent(&self, extent: AgExtent) -> Vec<AgExtent> {
        let mut busy = Vec::new();
        if !self.are_discards_free {
            busy = self.discarded.overlapping(self.ag, extent);
        }
        if self.are_others_free {
            busy.sort_unstable();
            return busy;
        }
        busy.extend(self.table.overlapping(self.ag, extent, self.durable));
        let overlaps = |own: &&AgExtent| own.start.0 < extent.end() && extent.start.0 < own.end();
        busy.extend(self.own.iter().filter(overlaps));
        busy.sort_unstable();
        busy
    }
}

impl<'e> XfsTransaction<'e> {
    /// Whether it may take blocks that groups hold back for their trees, when no others are free.
    pub(crate) fn may_take_held_back(&self) -> bool {
        self.claim == SpaceClaim::All
    }

    /// Lets it take the blocks that are promised to data. It gives back what it does not take.
    pub(crate) fn borrow_from(&mut self, lender: &Arc<BlockPromise>) {
        self.lender = Some(lender.clone());
    }

    /// Borrows up to so many blocks. Returns how many are missing.
    fn borrow_blocks(&mut self, blocks: u64) -> u64 {
        let lent = self.lender.as_ref().map_or(0, |lender| lender.lend(blocks));
        self.promised += lent;
        blocks - lent
    }

    /// Promises itself free blocks, beside those that it began with.
    ///
    /// # Errors
    /// `ENOSPC` when too few are free.
    pub(crate) fn promise(&mut self, blocks: u64) -> Result<()> {
        let missing = self.borrow_blocks(blocks);
        self.promise_beside(missing)
    }

    /// The same, and borrows none.
    pub(crate) fn promise_beside(&mut self, blocks: u64) -> Result<()> {
        self.engine.counters.promise(blocks, self.claim)?;
        self.promised += blocks;
        Ok(())
    }

    /// The same for a change that has to succeed on a full volume, and rarely takes a block: it may
    /// take blocks of the reserve, and gets as many of these as there are. Returns how many. When
    /// it has taken what it needs it proves that by [`Self::require_promised`].
    pub(crate) fn promise_of_reserve(&mut self, blocks: u64) -> u64 {
        self.claim = self.claim.max(SpaceClaim::Reserve);
        let missing = self.borrow_blocks(blocks);
        let granted = self.engine.counters.promise_most(missing, self.claim);
        self.promised += granted;
        blocks - missing + granted
    }

    /// Proves that this step, which no group has grown a tree for, has taken no more free blocks
    /// than were promised to it: others would have had them.
    ///
    /// # Errors
    /// `ENOSPC`.
    pub(crate) fn require_promised(&self) -> Result<()> {
        self.require_promised_beside(0)
    }

    /// The free blocks that this step has taken.
    pub(crate) fn taken(&self) -> u64 {
        self.counts.free_blocks.min(0).unsigned_abs()
    }

    /// The same when later steps of the chain take so many as well.
    ///
    /// # Errors
    /// `ENOSPC`.
    pub(crate) fn require_promised_beside(&self, later: u64) -> Result<()> {
        let taken = self.taken().saturating_add(later);
        if self.claim == SpaceClaim::All || taken <= self.promised {
            return Ok(());
        }
        let what = format!("{taken} blocks, of which {} were promised", self.promised);
        Err(Error::posix(Errno::NOSPC, what))
    }

    /// Makes blocks of a group, which has so many free, those of the trees that the chain of this
    /// transaction may grow. Returns false when other chains leave too few. The transaction has the
    /// AGF.
    pub(crate) fn claim_tree_room(&mut self, ag: AgNumber, blocks: u64, free: u64) -> bool {
        let has_claim = self.tree_rooms.contains_key(&ag);
        let rooms = self.engine.counters.tree_rooms();
        let is_there = has_claim || rooms.claim(ag, blocks, free);
        if !is_there {
            self.missed.crowded = Some(ag);
        } else if !has_claim {
            self.tree_rooms.insert(ag, blocks);
        }
        is_there
    }

    /// Says that trees of a group took blocks. They are free no longer, so the chain of this
    /// transaction may need so many fewer:
    ///
    /// ```text
    /// 100 free, ten claims of 10     one takes 2     98 free, claims of 98
    /// ```
    pub(crate) fn use_tree_room(&mut self, ag: AgNumber, blocks: u64) {
        let Some(own) = self.tree_rooms.get_mut(&ag) else { return };
        let used = blocks.min(*own);
        *own -= used;
        self.engine.counters.tree_rooms().release(ag, used);
    }

    /// The blocks of a group that other chains may still need for its trees.
    pub(crate) fn room_of_others(&self, ag: AgNumber) -> u64 {
        let own = self.tree_rooms.get(&ag).copied().unwrap_or(0);
        self.engine.counters.tree_rooms().claimed(ag).saturating_sub(own)
    }

    /// Adds to the counters of the superblock.
    pub(crate) fn count(&mut self, changes: CountChanges) {
        self.counts.inodes += changes.inodes;
        self.counts.free_inodes += changes.free_inodes;
        self.counts.free_blocks += changes.free_blocks;
        self.counts.held_back += changes.held_back;
        self.counts.free_inode_trees.extend(changes.free_inode_trees);
    }

    /// The inodes of the volume, those that the transaction has made, and `more`.
    pub(crate) fn inodes_with(&self, more: u32) -> u64 {
        let inodes = self.engine.counters.counts().inodes;
        inodes.saturating_add_signed(self.counts.inodes).saturating_add(more.into())
    }

    /// The blocks of the tree of free inodes of a group, with those that the transaction adds.
    pub(crate) fn free_inode_tree(&self, ag: AgNumber) -> u64 {
        let own = self.counts.free_inode_trees.iter().filter(|(group, _)| *group == ag);
        let own: i64 = own.map(|(_, change)| change).sum();
        self.engine.counters.free_inode_tree(ag).saturating_add_signed(own)
    }

    /// Says that blocks were freed. No file gets them before that is durable.
    pub(crate) fn add_busy(&mut self, ag: AgNumber, extent: AgExtent) {
        self.freed.push((ag, extent));
    }

    /// The blocks of a group whose freeing is not durable.
    pub(crate) fn busy(&self, ag: AgNumber) -> BusyBlocks<'e> {
        let own = self.freed.iter().filter(|(group, _)| *group == ag);
        BusyBlocks {
            table: &self.engine.busy,
            durable: self.engine.log().durable(),
            ag,
            own: own.map(|(_, extent)| *extent).collect(),
            discarded: &self.engine.discarded,
            are_others_free: false,
            are_discards_free: false,
        }
    }

    /// The blocks of a group that are being discarded.
    pub(crate) fn being_discarded(&self, ag: AgNumber) -> BusyBlocks<'e> {
        BusyBlocks { are_others_free: true, ..self.busy(ag) }
    }

    /// Whether blocks of a group are being discarded.
    pub(crate) fn has_discards(&self, ag: AgNumber) -> bool {
        self.engine.discarded.has_any(ag)
    }

    /// Waits until no blocks of a group are being discarded.
    pub(crate) fn wait_for_discards(&self, ag: AgNumber) {
        self.engine.discarded.wait(ag);
    }

    /// Keeps free extents of a group from all transactions, for a discard. This one has the AGF.
    pub(crate) fn begin_discard(&self, ag: AgNumber, extents: Vec<AgExtent>) -> DiscardGuard<'e> {
        self.engine.discarded.begin(ag, extents)
    }

    /// Whether a force of the log would make blocks of a group free for files.
    pub(crate) fn waits_for_log(&self, ag: AgNumber) -> bool {
        self.engine.busy.has_any(ag, self.engine.log().durable())
    }

    /// Says that a file has lost blocks that another file has, or another place of it. No
    /// thread writes data to them before that is durable: after a crash the first file would show
    /// it.
    pub(crate) fn give_up(&mut self, (start, count): (FsBlock, u32)) {
        if let Some((ag, start)) = self.geometry().split(start) {
            self.given_up.push((ag, AgExtent { start, count }));
        }
    }

    /// What has to be durable before data is written to blocks; `None` when all of it is.
    pub(crate) fn given_up(&self, (start, count): (FsBlock, u32)) -> Option<LogSequence> {
        let (ag, start) = self.geometry().split(start)?;
        let durable = self.engine.log().durable();
        self.engine.given_up.last_change(ag, AgExtent { start, count }, durable)
    }
}
