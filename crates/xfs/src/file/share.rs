//! Clones: a range of a file maps the blocks of another one, or of another range.
//!
//! A step gives the range one extent or hole of the source, or as much of it as takes the place of
//! one extent or hole of the destination. So when it fails for want of a block, what it would have
//! replaced is still there.

use offshoot_vfs::{Errno, Error, Result};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::inode::XfsInodeFlags2;
use offshoot_xfs_format::log::items::{XfsCountExtent, XfsCountOp};
use offshoot_xfs_format::record::XfsExtent;
use offshoot_xfs_format::{FileBlock, Ino};

use super::write::{in_group, map_in_place, require_room_to_map, require_room_to_unmap};
use super::{FORK, MOST_PASSED_OVER, XfsFileChanges, raise_size, require_extents, require_file};
use crate::defer::{DeferredWork, MOST_UNMAPPED};
use crate::group::require_room_to_share;
use crate::inode::change::{ForkPiece, piece_at, unmap_extents};
use crate::trans::{XfsTransaction, XfsTransactionKind as Kind};

/// A range of blocks of a file, and one as long that is to have the same blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct XfsCloneRange {
    pub(crate) from: (Ino, FileBlock),
    pub(crate) to: (Ino, FileBlock),
    pub(crate) blocks: u64,
}

impl XfsCloneRange {
    fn behind(&self, blocks: u64) -> Self {
        let moved = |(ino, at): (Ino, FileBlock)| (ino, FileBlock(at.0.saturating_add(blocks)));
        let left = self.blocks.saturating_sub(blocks);
        Self { from: moved(self.from), to: moved(self.to), blocks: left }
    }

    fn inodes(&self) -> [Ino; 2] {
        [self.from.0.min(self.to.0), self.from.0.max(self.to.0)]
    }

    fn overlaps_itself(&self) -> bool {
        let ((from, source), (to, destination)) = (self.from, self.to);
        from == to && source.0.abs_diff(destination.0) < self.blocks
    }
}

impl XfsFileChanges<'_> {
    /// Lets a range of a file share the blocks of another one, and raises its size to `size`. What
    /// lies between its old size and the range becomes zeros. Unwritten blocks are not shared: they
    /// become holes. For the caller both files are changed: data that is written to places of the
    /// source that were prepared before would show in the destination.
    ///
    /// # Errors
    /// `EOPNOTSUPP` on a volume without shared blocks, `EINVAL` for ranges of one file that
    /// overlap. `ENOSPC` when too few blocks are free for trees that grow: the front of the range
    /// may be shared then.
    pub(crate) fn clone_range(&self, range: &XfsCloneRange, size: Option<u64>) -> Result<()> {
        if !self.transactions.geometry().layout.contains(XfsLayout::SHARED_BLOCKS) {
            return Err(Error::posix(Errno::OPNOTSUPP, "sharing blocks, on a volume without"));
        }
        for (ino, at) in [range.from, range.to] {
            self.require_blocks(ino, &(at.0..at.0.saturating_add(range.blocks)))?;
        }
        if range.overlaps_itself() {
            return Err(Error::posix(Errno::INVAL, format!("{range:?} overlaps itself")));
        }
        let (ino, start) = (range.to.0, range.to.1.0 << self.block_log());
        let old = self.size(ino)?;
        if size.is_some() && old < start {
            self.clear(ino, old..start)?;
        }
        let mut rest = *range;
        while rest.blocks > 0 {
            let done = self.retry(|changes| changes.clone_step(&rest))?;
            rest = rest.behind(done);
        }
        match size {
            Some(size) if size > old => {
                let mut t = self.begin(Kind::ChangeInode, ino)?;
                raise_size(&mut t, ino, size)?;
                t.commit().map(drop)
            }
            _ => Ok(()),
        }
    }

    /// Shares the front of a range. Returns how many blocks of it are done.
    fn clone_step(&self, range: &XfsCloneRange) -> Result<u64> {
        let mut t = self.transactions.begin(Kind::Truncate, 0)?;
        t.try_again(self.missed);
        for ino in range.inodes() {
            require_file(&mut t, ino)?;
        }
        let (mut rest, all) = (*range, range.blocks);
        for _ in 0..MOST_PASSED_OVER {
            let pieces = next_pieces(&mut t, &rest)?;
            let blocks = pieces[0].blocks;
            let [source, old] = pieces.map(|piece| piece.extent);
            if !pieces[0].is_same_as(&pieces[1]) {
                let work = match source {
                    Some(source) => self.share_extent(&mut t, &rest, &source, old)?,
                    None => self.unshare_hole(&mut t, &rest, blocks)?,
                };
                self.finish(t, work, &range.inodes())?;
                return Ok(all - rest.blocks + blocks);
            }
            rest = rest.behind(blocks);
            if rest.blocks == 0 {
                break;
            }
        }
        Ok(all - rest.blocks)
    }

    /// Maps the blocks of an extent of the source in the destination too, in the place of `old`.
    pub(super) fn share_extent(
        &self,
        t: &mut XfsTransaction<'_>,
        range: &XfsCloneRange,
        source: &XfsExtent,
        old: Option<XfsExtent>,
    ) -> Result<Vec<DeferredWork>> {
        let (ino, offset) = range.to;
        require_extents(t, ino, 2)?;
        require_room_to_unmap(t, ino, old.as_slice())?;
        let (ag, _) = in_group(t, range.from.0, source)?;
        require_room_to_share(t, ag)?;
        t.promise(self.tree_blocks())?;
        for ino in range.inodes() {
            let flags = t.inode(ino)?.core().flags2();
            if !flags.contains(XfsInodeFlags2::REFLINK) {
                let flags = flags | XfsInodeFlags2::REFLINK;
                t.inode(ino)?.core_mut().flags2 = flags.bits().into();
            }
        }
        let count = XfsCountExtent::new(XfsCountOp::Increase, (source.start, source.count));
        let new = XfsExtent { offset, ..*source };
        map_in_place(t, ino, old.is_some(), &new, vec![DeferredWork::Count(count)])
    }

    /// Makes a hole in the destination where the source has one.
    fn unshare_hole(
        &self,
        t: &mut XfsTransaction<'_>,
        range: &XfsCloneRange,
        blocks: u64,
    ) -> Result<Vec<DeferredWork>> {
        let (ino, at) = range.to;
        require_extents(t, ino, 1)?;
        t.promise_of_reserve(self.tree_blocks());
        let step = unmap_extents(t, ino, FORK, at.0..at.0 + blocks, MOST_UNMAPPED)?;
        t.require_promised()?;
        step.extents.iter().try_for_each(|old| require_room_to_map(t, ino, old))?;
        require_room_to_unmap(t, ino, &step.extents)?;
        DeferredWork::unmapped(t, (ino, FORK), &step)
    }
}

/// What the source and the destination have at the front of a range, equally long.
fn next_pieces(t: &mut XfsTransaction<'_>, range: &XfsCloneRange) -> Result<[ForkPiece; 2]> {
    let (from, to) = (range.from, range.to);
    let mut source = piece_at(t, from.0, FORK, from.1.0, range.blocks)?;
    source.extent = source.extent.filter(|extent| !extent.is_unwritten);
    let old = piece_at(t, to.0, FORK, to.1.0, source.blocks)?;
    let blocks = source.blocks.min(old.blocks);
    Ok([source.first(blocks), old.first(blocks)])
}
