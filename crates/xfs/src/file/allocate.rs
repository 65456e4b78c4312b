//! Blocks for the holes of a file.
//!
//! A hole is filled from its front. The blocks are near to those of the extent before it, as if
//! the file had no hole, or else to those behind it, or to the inode. An extent as long as the hole
//! comes before one of a quarter of that, and this before any:
//!
//! ```text
//! file    | extent of blocks 100..110 | hole of 40 |
//! wanted  40 blocks from 110 on, near to it, or in a group behind; else 10 or more; else any
//! ```
//!
//! As in the kernel, an extent-size hint makes a hole larger to both sides, up to the extents
//! beside it, and the blocks at the front of a file begin at a stripe if they fill one. Not as in
//! the kernel: a hint does not align the blocks on the device, and blocks behind the front of a
//! file are not aligned to stripes; the hint for copy on write is not used, no blocks are
//! preallocated because a file grows, and directories have no streams.

use std::ops::Range;

use offshoot_vfs::{Errno, Error, Result};
use offshoot_xfs_format::inode::XfsInodeFlags;
use offshoot_xfs_format::record::{MOST_EXTENT_BLOCKS, MOST_FILE_BLOCKS, XfsExtent};
use offshoot_xfs_format::{AgBlock, AgNumber, FileBlock, FsBlock, Ino};

use super::{FORK, MOST_PASSED_OVER, XfsFileChanges, require_extents};
use crate::defer::DeferredWork;
use crate::group::{ExtentWish, ReverseOwner, allocate_first};
use crate::inode::change::{end, map_extent, next_mapped, previous_mapped};
use crate::trans::{AgExtent, XfsTransaction, XfsTransactionKind as Kind};

/// Blocks that were allocated, and their first one.
pub(super) type FoundBlocks = (FsBlock, u32);

impl XfsFileChanges<'_> {
    /// Fills the holes in a range of blocks with unwritten ones.
    ///
    /// # Errors
    /// `ENOSPC` when too few blocks are free: the holes at the front of the range may be filled.
    pub(crate) fn allocate(&self, ino: Ino, blocks: Range<u64>) -> Result<()> {
        self.require_blocks(ino, &blocks)?;
        let mut at = blocks.start;
        while at < blocks.end {
            at = self.retry(|changes| changes.allocate_step(ino, at..blocks.end))?;
        }
        Ok(())
    }

    /// Fills the front of the first hole. Returns where the next step begins.
    fn allocate_step(&self, ino: Ino, blocks: Range<u64>) -> Result<u64> {
        let mut t = self.begin(Kind::Write, ino)?;
        let mut at = blocks.start;
        for _ in 0..MOST_PASSED_OVER {
            let next = next_mapped(&mut t, ino, FORK, FileBlock(at))?;
            let start = next.map_or(u64::MAX, |next| next.offset.0);
            if let Some(next) = next.filter(|_| start <= at) {
                at = end(&next);
            } else {
                let hole = at..blocks.end.min(start);
                let (extent, work) = self.fill_hole(&mut t, ino, hole)?;
                self.finish(t, work, &[ino])?;
                // With a hint it may begin in front of the range, and end there.
                return Ok(end(&extent).max(blocks.start));
            }
            if at >= blocks.end {
                break;
            }
        }
        Ok(at)
    }

    /// Maps unwritten blocks at the front of a hole, which a hint may make larger. Returns them,
    /// and the work that follows.
    pub(super) fn fill_hole(
        &self,
        t: &mut XfsTransaction<'_>,
        ino: Ino,
        hole: Range<u64>,
    ) -> Result<(XfsExtent, Vec<DeferredWork>)> {
        require_extents(t, ino, 1)?;
        let before = previous_mapped(t, ino, FORK, FileBlock(hole.start))?;
        let behind = next_mapped(t, ino, FORK, FileBlock(hole.end))?;
        let wide = with_hint(t, ino, &hole, before.as_ref(), behind.as_ref())?;
        let tree_blocks = self.tree_blocks();
        let blocks = |hole: &Range<u64>| self.most_at_once(hole.end - hole.start);
        t.promise(u64::from(blocks(&hole)) + tree_blocks)?;
        // What is promised to other data of the file stays for that.
        let more = u64::from(blocks(&wide).saturating_sub(blocks(&hole)));
        let hole = if t.promise_beside(more).is_ok() { wide } else { hole };
        let near = near_to(t, ino, hole.start, before.as_ref(), behind.as_ref());
        let owner = ReverseOwner::file(ino, FORK, FileBlock(hole.start), true);
        let is_front = before.is_none();
        let (start, count) = self.find_blocks(t, ino, blocks(&hole), (near, is_front), owner)?;
        let offset = FileBlock(hole.start);
        let extent = XfsExtent { offset, start, count, is_unwritten: true };
        let step = map_extent(t, ino, FORK, &extent)?;
        let work = DeferredWork::of_tree_blocks(ino, FORK, &step.tree_blocks).collect();
        Ok((extent, work))
    }

    /// The blocks of an extent that is allocated at once for so many.
    pub(super) fn most_at_once(&self, blocks: u64) -> u32 {
        let most = MOST_EXTENT_BLOCKS.min(self.transactions.geometry().ag_blocks);
        u32::try_from(blocks).unwrap_or(u32::MAX).min(most)
    }

    /// Allocates up to `most` blocks in a row, for the owner that the reverse map gets. With
    /// `is_front` they begin at a stripe, if they fill one.
    pub(super) fn find_blocks(
        &self,
        t: &mut XfsTransaction<'_>,
        ino: Ino,
        most: u32,
        (near, is_front): (Option<(AgNumber, AgBlock)>, bool),
        owner: ReverseOwner,
    ) -> Result<FoundBlocks> {
        let stripe = self.transactions.superblock().unit.get();
        let left = self.transactions.most_levels().data;
        let whole = ExtentWish { owner: Some(owner), left, ..ExtentWish::blocks(most) };
        let aligned = ExtentWish { alignment: stripe.max(1), ..whole };
        let quarter = ExtentWish { least: most.div_ceil(4), ..whole };
        let any = ExtentWish { least: 1, ..whole };
        let is_aligned = is_front && stripe > 1 && most >= stripe;
        let wishes: Vec<_> =
            is_aligned.then_some(aligned).into_iter().chain([whole, quarter, any]).collect();
        let found = allocate_first(t, near, &wishes)?.ok_or_else(|| {
            Error::posix(Errno::NOSPC, format!("a block for the data of inode {ino}"))
        })?;
        let (ag, AgExtent { start, count }) = found;
        Ok((t.geometry().fs_block(ag, start), count))
    }
}

/// A hole between two extents, made larger by the extent-size hint of its inode: to 16..48 for a
/// hole of 20..40 and a hint of 16, if no extent is there.
fn with_hint(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    hole: &Range<u64>,
    before: Option<&XfsExtent>,
    behind: Option<&XfsExtent>,
) -> Result<Range<u64>> {
    let core = t.inode(ino)?.core();
    let hint = u64::from(core.extsize.get());
    if hint == 0 || !core.flags().contains(XfsInodeFlags::EXTSIZE) {
        return Ok(hole.clone());
    }
    let first = before.map_or(0, end);
    let last = behind.map_or(MOST_FILE_BLOCKS, |behind| behind.offset.0);
    let start = (hole.start / hint * hint).max(first);
    Ok(start..hole.end.next_multiple_of(hint).min(last))
}

/// Where the blocks at `at` of a file would best be.
fn near_to(
    t: &XfsTransaction<'_>,
    ino: Ino,
    at: u64,
    before: Option<&XfsExtent>,
    behind: Option<&XfsExtent>,
) -> Option<(AgNumber, AgBlock)> {
    let geometry = t.geometry();
    if let Some(before) = before {
        let last = geometry.split(FsBlock(before.start.0 + u64::from(before.count) - 1))?;
        let wanted = geometry.split(FsBlock(before.start.0 + (at - before.offset.0)));
        let next = (last.0, AgBlock(last.1.0 + 1));
        return Some(wanted.filter(|(ag, _)| *ag == last.0).unwrap_or(next));
    }
    if let Some(behind) = behind {
        let (ag, first) = geometry.split(behind.start)?;
        let distance = u32::try_from(behind.offset.0 - at).unwrap_or(u32::MAX);
        return Some((ag, AgBlock(first.0.checked_sub(distance).unwrap_or(first.0))));
    }
    geometry.locate(ino).map(|(ag, block, _)| (ag, block))
}
