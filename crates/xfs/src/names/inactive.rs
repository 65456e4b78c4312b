//! Inodes without names: what they hold is freed step by step, and then the inode. All the while
//! they are in a list of unlinked inodes, so a crash leaves the rest to recovery, which calls this.
//!
//! Blocks that the log carries, those of attributes and targets, are cancelled when they are freed.
//! Otherwise the log would write or replay them over what their blocks hold next.

use std::collections::BTreeSet;

use offshoot_vfs::{Errno, Error, Result, Structure};
use offshoot_xfs_format::attr::leaf::XattrLeaf;
use offshoot_xfs_format::group::{Agi, UNLINKED_LISTS};
use offshoot_xfs_format::inode::file_type;
use offshoot_xfs_format::record::{MOST_FILE_BLOCKS, XfsExtent};
use offshoot_xfs_format::{AgIno, AgNumber, FileBlock, FsBlock, Ino};

use crate::buffer::{DiskRun, malformed};
use crate::da::change::ChangedHashFork;
use crate::defer::{DeferredChain, DeferredWork, IntentIds, MOST_UNMAPPED};
use crate::file::require_room_to_unmap;
use crate::group;
use crate::inode::change::{end, previous_mapped, prove_extent_count, unmap_extents};
use crate::trans::{
    ForkName, MissedLocks, XfsTransaction, XfsTransactionKind as Kind, XfsTransactions,
};

/// The blocks of attributes that a step frees: each is cancelled by itself.
const MOST_CANCELLED: u64 = 64;

/// What became of the lists of unlinked inodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FreedUnlinked {
    /// Inodes that were freed.
    pub(crate) inodes: u64,
    /// Lists that were given up, because they could not be walked.
    pub(crate) cleared_lists: u64,
    /// Inodes that stay in their lists: the trees of a full group had no room for what a removal
    /// may make of them.
    pub(crate) left: Vec<UnlinkedLeft>,
}

/// An inode that stays in its list, and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnlinkedLeft {
    pub(crate) ino: Ino,
    pub(crate) problem: String,
}

/// Why an inode was not freed.
enum UnlinkedFailure {
    /// The list, or an inode of it, is damaged. Nothing of it is half done.
    Damaged(Error),
    /// The trees of a group have no room for the next step. Nothing of that is logged, so it can be
    /// tried again, and others can go on.
    NoRoom(Error),
    /// All else. What a list needs is not done, so nothing may go on.
    Fatal(Error),
}

impl UnlinkedFailure {
    fn into_error(self) -> Error {
        let (Self::Damaged(error) | Self::NoRoom(error) | Self::Fatal(error)) = self;
        error
    }
}

impl From<Error> for UnlinkedFailure {
    fn from(error: Error) -> Self {
        match error {
            Error::Corrupt(_) => Self::Damaged(error),
            Error::Posix { errno: Errno::NOSPC | Errno::AGAIN, .. } => Self::NoRoom(error),
            error => Self::Fatal(error),
        }
    }
}

/// Frees an inode that is in its list of unlinked ones. No other transaction changes it meanwhile.
pub(crate) fn free_unlinked_inode(
    transactions: &XfsTransactions,
    ids: &IntentIds,
    ino: Ino,
    missed: &MissedLocks,
) -> Result<()> {
    let freed = UnlinkedInodes { transactions, ids, missed: Some(missed) }.free(ino);
    freed.map_err(UnlinkedFailure::into_error)
}

/// Frees all unlinked inodes of a volume that was just recovered. A list that cannot be walked is
/// emptied: its inodes are lost until a repair finds them. An inode for whose blocks the trees of a
/// full group have no room stays in its list, for the next opening.
pub(crate) fn free_unlinked_lists(
    transactions: &XfsTransactions,
    ids: &IntentIds,
) -> Result<FreedUnlinked> {
    let inodes = UnlinkedInodes { transactions, ids, missed: None };
    let mut freed = FreedUnlinked::default();
    for ag in (0..transactions.geometry().ag_count).map(AgNumber) {
        for list in group::unlinked_lists(transactions.buffers(), ag)? {
            inodes.free_list(ag, list.min(UNLINKED_LISTS - 1), &mut freed)?;
        }
    }
    Ok(freed)
}

struct UnlinkedInodes<'a> {
    transactions: &'a XfsTransactions,
    ids: &'a IntentIds,
    /// What the tries before have missed.
    missed: Option<&'a MissedLocks>,
}

impl<'a> UnlinkedInodes<'a> {
    /// Begins a transaction that frees more than it takes.
    fn begin(&self, kind: Kind) -> Result<XfsTransaction<'a>> {
        let mut t = self.transactions.begin_step(kind, 0)?;
        t.try_again(self.missed);
        Ok(t)
    }

    fn free_list(&self, ag: AgNumber, list: usize, freed: &mut FreedUnlinked) -> Result<()> {
        let (mut last_left, mut all_left) = (None, BTreeSet::new());
        loop {
            let next = self.next(ag, list, last_left);
            let freed_one = next.and_then(|next| match next {
                Some(ino) => match self.free(ino) {
                    Err(UnlinkedFailure::NoRoom(error)) => Ok(Some((ino, Err(error)))),
                    outcome => outcome.map(|()| Some((ino, Ok(())))),
                },
                None => Ok(None),
            });
            match freed_one {
                Ok(None) => return Ok(()),
                Ok(Some((_, Ok(())))) => freed.inodes += 1,
                Ok(Some((ino, Err(error)))) if all_left.insert(ino) => {
                    last_left = Some(ino);
                    freed.left.push(UnlinkedLeft { ino, problem: error.to_string() });
                }
                // The second time the list has come round to itself.
                Ok(Some((_, Err(_)))) | Err(UnlinkedFailure::Damaged(_)) => {
                    freed.cleared_lists += 1;
                    return self.clear_list(ag, list);
                }
                Err(failure) => return Err(failure.into_error()),
            }
        }
    }

    fn clear_list(&self, ag: AgNumber, list: usize) -> Result<()> {
        let mut t = self.begin(Kind::ClearUnlinked)?;
        group::clear_unlinked(&mut t, ag, list)?;
        t.commit().map(drop)
    }

    /// The inode of a list behind the last one that stays in it.
    fn next(
        &self,
        ag: AgNumber,
        list: usize,
        left: Option<Ino>,
    ) -> std::result::Result<Option<Ino>, UnlinkedFailure> {
        let mut t = self.begin(Kind::ClearUnlinked)?;
        // The AGI, which comes before the clusters.
        let first = group::first_unlinked(&mut t, ag, list)?;
        let next: Option<AgIno> = match left {
            Some(left) => t.next_unlinked(left)?,
            None => first,
        };
        // An inode of another list would be emptied before a walk of its own list fails.
        let is_in_list =
            |ino: &AgIno| Agi::unlinked_list(*ino) == list && t.geometry().has_inode(ag, *ino);
        if let Some(next) = next.filter(|next| !is_in_list(next)) {
            let problem = format!("group {ag}: unlinked inode {next} is in list {list}");
            return Err(Error::corrupt(Structure::GroupInodes, problem).into());
        }
        Ok(next.map(|next| t.geometry().ino(ag, next)))
    }

    fn free(&self, ino: Ino) -> std::result::Result<(), UnlinkedFailure> {
        if self.free_without_blocks(ino)? {
            return Ok(());
        }
        let mut t = self.begin(Kind::Truncate)?;
        // It would fail in the middle, with some of its blocks free and the others lost.
        for fork in [ForkName::Data, ForkName::Attributes] {
            prove_extent_count(&mut t, ino, fork).map_err(UnlinkedFailure::Fatal)?;
        }
        drop(t);
        self.empty_fork(ino, ForkName::Data)?;
        self.forget_attributes(ino)?;
        self.empty_fork(ino, ForkName::Attributes)?;
        if self.free_without_blocks(ino)? {
            return Ok(());
        }
        let mut t = self.begin(Kind::ChangeTimes)?;
        Err(t.inode(ino)?.damaged("it has extents again after all were freed").into())
    }

    /// Frees an inode, if it has no blocks.
    fn free_without_blocks(&self, ino: Ino) -> Result<bool> {
        let mut t = self.begin(Kind::FreeInode)?;
        let inode = t.inode(ino)?;
        if inode.core().is_free() || inode.core().links() != 0 {
            let problem = "it is in a list of unlinked ones, and has links or is free";
            return Err(inode.damaged(problem));
        }
        let has_extents = |fork| inode.extent_count(fork) != 0;
        if has_extents(ForkName::Data) || has_extents(ForkName::Attributes) {
            return Ok(false);
        }
        group::leave_unlinked(&mut t, ino)?;
        group::free_inode(&mut t, ino)?;
        t.commit()?;
        Ok(true)
    }

    /// Makes the root of attributes in several blocks an empty leaf: the kernel, which may go on
    /// from here after a crash, walks the tree, and finds no block that it has no longer.
    fn forget_attributes(&self, ino: Ino) -> Result<()> {
        const ROOT: FileBlock = FileBlock(0);
        let mut t = self.begin(Kind::Truncate)?;
        if t.inode(ino)?.extent_count(ForkName::Attributes) == 0 {
            return Ok(());
        }
        let mut fork = ChangedHashFork::of_attributes(&mut t, ino);
        match fork.find_held(ROOT) {
            // It is freed as it is.
            Ok(None) | Err(Error::Corrupt(_)) => return Ok(()),
            found => found?,
        };
        let expected = fork.expected(ROOT)?;
        let leaf = XattrLeaf::encode(fork.geometry(), &expected, (0, 0), &[]);
        fork.store(ROOT, &leaf.map_err(malformed)?)?;
        // The log has the inode with each change of its attributes.
        fork.inode()?.core_mut();
        t.commit().map(drop)
    }

    /// Takes all blocks from a fork.
    fn empty_fork(&self, ino: Ino, fork: ForkName) -> std::result::Result<(), UnlinkedFailure> {
        loop {
            let mut t = self.begin(Kind::Truncate)?;
            if t.inode(ino)?.extent_count(fork) == 0 {
                return Ok(());
            }
            let kind = (fork, t.inode(ino)?.core().file_type());
            let is_data = kind == (ForkName::Data, file_type::REGULAR);
            let is_target = kind == (ForkName::Data, file_type::SYMLINK);
            let is_whole = is_data || is_target;
            let start = if is_whole { 0 } else { cancelled_from(&mut t, ino, fork)? };
            let range = start..MOST_FILE_BLOCKS;
            let step = unmap_extents(&mut t, ino, fork, range, MOST_UNMAPPED)?;
            if is_data {
                require_room_to_unmap(&mut t, ino, &step.extents)?;
            }
            if is_target {
                // The kernel, which may go on from here, knows no link without a target.
                let core = t.inode(ino)?.core_mut();
                core.size = 0.into();
                core.mode = (core.mode.get() & 0o7777 | file_type::REGULAR).into();
            }
            if !is_data {
                for extent in &step.extents {
                    cancel(&mut t, extent, if is_target { extent.count } else { 1 })?;
                }
            }
            let work = DeferredWork::unmapped(&mut t, (ino, fork), &step)?;
            let mut chain = DeferredChain::new(self.ids);
            chain.defer(&mut t, work);
            chain.finish(t, &[ino]).map_err(UnlinkedFailure::Fatal)?;
        }
    }
}

/// The block from which on a step frees blocks that the log may carry.
fn cancelled_from(t: &mut XfsTransaction<'_>, ino: Ino, fork: ForkName) -> Result<u64> {
    let last = previous_mapped(t, ino, fork, FileBlock(MOST_FILE_BLOCKS))?;
    Ok(last.map_or(0, |last| last.offset.0.max(end(&last).saturating_sub(MOST_CANCELLED))))
}

/// Cancels what the log has of the buffers in an extent that is freed, each of `unit` blocks.
fn cancel(t: &mut XfsTransaction<'_>, extent: &XfsExtent, unit: u32) -> Result<()> {
    let geometry = t.geometry();
    for block in (0..extent.count).step_by(unit.max(1) as usize) {
        let start = FsBlock(extent.start.0 + u64::from(block));
        let at = geometry.place_of(start).ok_or_else(|| {
            let problem = format!("block {start} is not in the volume");
            Error::corrupt(Structure::ExtentRecord, problem)
        })?;
        t.cancel(DiskRun { at, bytes: (unit as usize) << geometry.block_log })?;
    }
    Ok(())
}
