//! Ranges of blocks that are taken out of a file, so that what follows moves to the front, and
//! ranges of holes that are put into it.
//!
//! ```text
//! collapse b    a | b | c | d      ->   a | c | d
//! insert        a | c | d          ->   a | hole | c | d
//! ```
//!
//! Each step moves one extent, to the front the first ones first, to the back the last ones first.
//! A crash in the middle leaves a file of which a part has moved, as with the kernel. A move needs
//! no block of the file, and that reverse maps have room is proved for all moves before the first.

use std::collections::BTreeSet;
use std::ops::Range;

use offshoot_vfs::{Errno, Error, Result};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::log::items::XfsReverseOp;
use offshoot_xfs_format::record::{MOST_FILE_BLOCKS, XfsExtent};
use offshoot_xfs_format::{FileBlock, Ino};

use super::write::{in_group, require_room_to_map};
use super::{FORK, MOST_BYTES, MOST_PASSED_OVER, XfsFileChanges, require_extents};
use crate::defer::DeferredWork;
use crate::group::require_tree_room;
use crate::inode::change::{end, move_extent, next_mapped, previous_mapped, split_extent};
use crate::trans::{XfsTransaction, XfsTransactionKind as Kind};

impl XfsFileChanges<'_> {
    /// Takes a range of bytes, whole blocks in front of the end of the file, out of it.
    pub(crate) fn collapse(&self, ino: Ino, bytes: &Range<u64>) -> Result<()> {
        let size = self.size(ino)?;
        let blocks = self.require_collapse(ino, size, bytes)?;
        self.prove_moves(ino, blocks.end)?;
        self.unmap_blocks(ino, blocks.clone())?;
        let mut at = blocks.end;
        while let Some(next) = self.retry(|changes| changes.move_to_front(ino, &blocks, at))? {
            at = next;
        }
        self.set_size(ino, size - (bytes.end - bytes.start))
    }

    /// Proves that bytes can be taken out of a file of this size. Returns their blocks.
    ///
    /// # Errors
    /// `EINVAL` unless they are whole blocks in front of the end.
    pub(crate) fn require_collapse(
        &self,
        ino: Ino,
        size: u64,
        bytes: &Range<u64>,
    ) -> Result<Range<u64>> {
        let blocks = self.aligned(bytes)?;
        if bytes.end < size {
            return Ok(blocks);
        }
        let what = format!("bytes {bytes:?} of the {size} of inode {ino} are its end");
        Err(Error::posix(Errno::INVAL, what))
    }

    /// Proves that the reverse maps can say where all extents from block `at` on move, before the
    /// first of them does: else the volume would be found full when a part has moved.
    fn prove_moves(&self, ino: Ino, at: u64) -> Result<()> {
        if !self.transactions.geometry().layout.contains(XfsLayout::REVERSE_MAP) {
            return Ok(());
        }
        let (mut at, mut groups) = (at, BTreeSet::new());
        loop {
            let mut t = self.begin(Kind::ChangeTimes, ino)?;
            for _ in 0..MOST_PASSED_OVER {
                let Some(next) = next_mapped(&mut t, ino, FORK, FileBlock(at))? else {
                    drop(t);
                    return self.retry(|changes| {
                        require_tree_room(&mut changes.begin(Kind::Write, ino)?, &groups)
                    });
                };
                groups.insert(in_group(&t, ino, &next)?.0);
                at = end(&next);
            }
        }
    }

    /// Moves the first extent from block `at` on. Returns the block behind where it was; `None` if
    /// there is none.
    fn move_to_front(&self, ino: Ino, blocks: &Range<u64>, at: u64) -> Result<Option<u64>> {
        let mut t = self.begin(Kind::Write, ino)?;
        let Some(old) = next_mapped(&mut t, ino, FORK, FileBlock(at))? else { return Ok(None) };
        let to = old.offset.0.saturating_sub(blocks.end - blocks.start);
        self.move_step(t, ino, &old, FileBlock(to))?;
        Ok(Some(end(&old)))
    }

    /// Puts a hole of `len` bytes into a file, at byte `at` of it, between blocks.
    ///
    /// # Errors
    /// `EFBIG` when the file cannot be as large.
    pub(crate) fn insert(&self, ino: Ino, at: u64, len: u64) -> Result<()> {
        let (blocks, new_size) = self.require_insert(ino, self.size(ino)?, at, len)?;
        // Space behind the end that would move behind the end of the largest file.
        let most = MOST_BYTES.div_ceil(self.block_bytes());
        self.unmap_blocks(ino, most - (blocks.end - blocks.start)..most)?;
        self.prove_moves(ino, blocks.start)?;
        self.make_room(ino, &blocks)?;
        // Before anything moves behind the old size, where no reader sees it.
        self.truncate(ino, new_size)?;
        let mut behind = MOST_FILE_BLOCKS;
        while let Some(next) = self.retry(|changes| changes.move_to_back(ino, &blocks, behind))? {
            behind = next;
        }
        Ok(())
    }

    /// Proves that a file of this size can have such a hole. Returns the blocks of the hole, and
    /// the new size.
    ///
    /// # Errors
    /// `EINVAL` unless it is whole blocks in front of the end, `EFBIG` as [`insert`](Self::insert).
    pub(crate) fn require_insert(
        &self,
        ino: Ino,
        size: u64,
        at: u64,
        len: u64,
    ) -> Result<(Range<u64>, u64)> {
        let blocks = self.aligned(&(at..at.saturating_add(len)))?;
        if at >= size {
            let what = format!("a hole at byte {at} of the {size} of inode {ino}");
            return Err(Error::posix(Errno::INVAL, what));
        }
        let new_size = size.checked_add(len).filter(|size| *size <= MOST_BYTES);
        Ok((blocks, new_size.ok_or_else(|| too_large(ino, len))?))
    }

    /// Proves that the last extent can move, and makes two of the one that the range cuts.
    fn make_room(&self, ino: Ino, blocks: &Range<u64>) -> Result<()> {
        let len = blocks.end - blocks.start;
        self.retry(|changes| {
            let mut t = changes.begin(Kind::Write, ino)?;
            require_extents(&mut t, ino, 1)?;
            let last = previous_mapped(&mut t, ino, FORK, FileBlock(MOST_FILE_BLOCKS))?;
            if last.is_some_and(|last| end(&last).saturating_add(len) > MOST_FILE_BLOCKS) {
                return Err(too_large(ino, len << self.block_log()));
            }
            t.promise(self.tree_blocks())?;
            let tree_blocks = split_extent(&mut t, ino, FORK, FileBlock(blocks.start))?;
            let work = DeferredWork::of_tree_blocks(ino, FORK, &tree_blocks).collect();
            changes.finish(t, work, &[ino])
        })
    }

    /// Moves the last extent in front of block `behind`. Returns where it was; `None` if there is
    /// none that has to move.
    fn move_to_back(&self, ino: Ino, blocks: &Range<u64>, behind: u64) -> Result<Option<u64>> {
        let mut t = self.begin(Kind::Write, ino)?;
        let old = previous_mapped(&mut t, ino, FORK, FileBlock(behind))?;
        let Some(old) = old.filter(|old| old.offset.0 >= blocks.start) else { return Ok(None) };
        let to = old.offset.0.saturating_add(blocks.end - blocks.start);
        self.move_step(t, ino, &old, FileBlock(to))?;
        Ok(Some(old.offset.0))
    }

    fn move_step(
        &self,
        mut t: XfsTransaction<'_>,
        ino: Ino,
        old: &XfsExtent,
        to: FileBlock,
    ) -> Result<()> {
        require_room_to_map(&mut t, ino, old)?;
        let tree_blocks = move_extent(&mut t, ino, FORK, old, to)?;
        t.require_promised()?;
        t.give_up((old.start, old.count));
        let of = (ino, FORK);
        let mut work: Vec<_> = DeferredWork::of_tree_blocks(ino, FORK, &tree_blocks).collect();
        work.extend(DeferredWork::reverse(&mut t, XfsReverseOp::Unmap, of, *old)?);
        let moved = XfsExtent { offset: to, ..*old };
        work.extend(DeferredWork::reverse(&mut t, XfsReverseOp::Map, of, moved)?);
        self.finish(t, work, &[ino])
    }
}

#[cold]
fn too_large(ino: Ino, len: u64) -> Error {
    Error::posix(Errno::FBIG, format!("{len} bytes more in inode {ino}"))
}
