//! Places to write data to, and the commit of what was written.

use std::ops::Range;

use offshoot_vfs::{Errno, Error, Result, Structure};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::inode::XfsInodeFlags2;
use offshoot_xfs_format::log::items::{XfsCountExtent, XfsCountOp, XfsReverseOp};
use offshoot_xfs_format::record::{XfsExtent, XfsOwner};
use offshoot_xfs_format::{AgBlock, AgNumber, FileBlock, FsBlock, Ino};

use super::{FORK, XfsFileChanges, raise_size, require_extents};
use crate::defer::DeferredWork;
use crate::group::{ReverseOwner, require_tree_room, shared_part};
use crate::inode::change::{ForkPiece, end, map_extent, next_mapped, part, piece_at, replace_part};
use crate::trans::{AgExtent, XfsTransaction, XfsTransactionKind as Kind};

/// What a commit has to do about a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum XfsWriteKind {
    /// Nothing: the file shows what is there.
    InPlace,
    /// The blocks are mapped as unwritten.
    Unwritten,
    /// The blocks are staged: the file maps others, which it shares.
    Staged,
}

/// Where blocks of a file are to be written. All of them are: nothing is known about what they
/// hold, but for blocks in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct XfsWritePlace {
    /// The first block of the file.
    pub(crate) at: FileBlock,
    /// The first block of the volume.
    pub(crate) start: FsBlock,
    pub(crate) count: u32,
    pub(crate) kind: XfsWriteKind,
    /// Whether the blocks were allocated for it: the file had a hole.
    is_new: bool,
}

impl XfsWritePlace {
    fn end(&self) -> u64 {
        self.at.0 + u64::from(self.count)
    }

    /// The place without its first blocks.
    fn behind(&self, count: u32) -> Self {
        Self {
            at: FileBlock(self.at.0 + u64::from(count)),
            start: FsBlock(self.start.0 + u64::from(count)),
            count: self.count.saturating_sub(count),
            ..*self
        }
    }

    fn of(extent: &XfsExtent, kind: XfsWriteKind) -> Self {
        let XfsExtent { offset, start, count, .. } = *extent;
        Self { at: offset, start, count, kind, is_new: false }
    }
}

/// Which free blocks a step may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpaceFor {
    /// Those that files may have.
    Data,
    /// Also those that groups hold back: a removal goes on.
    Removal,
}

impl XfsFileChanges<'_> {
    /// Places for the data of a range of blocks, ascending. What files share gets other blocks,
    /// which the caller commits, or gives back by [`Self::abandon_write`].
    ///
    /// # Errors
    /// `ENOSPC` when too few blocks are free. What was taken before is given back.
    pub(crate) fn prepare_write(&self, ino: Ino, blocks: Range<u64>) -> Result<Vec<XfsWritePlace>> {
        self.places(ino, blocks, SpaceFor::Data)
    }

    pub(super) fn places(
        &self,
        ino: Ino,
        blocks: Range<u64>,
        space: SpaceFor,
    ) -> Result<Vec<XfsWritePlace>> {
        self.require_blocks(ino, &blocks)?;
        let (mut places, mut at) = (Vec::new(), blocks.start);
        while at < blocks.end {
            match self.retry(|changes| changes.next_place(ino, at..blocks.end, space)) {
                Ok(place) => {
                    // With a hint, the first ones may end in front of the range.
                    if place.end() > at {
                        at = place.end();
                        places.push(place);
                    }
                }
                Err(error) => return self.abandon_write(ino, &places).and(Err(error)),
            }
        }
        Ok(places)
    }

    /// The place for the front of a range.
    fn next_place(&self, ino: Ino, blocks: Range<u64>, space: SpaceFor) -> Result<XfsWritePlace> {
        let mut t = self.begin(Kind::Write, ino)?;
        let found = next_mapped(&mut t, ino, FORK, FileBlock(blocks.start))?;
        let next = found.map_or(u64::MAX, |found| found.offset.0);
        let old = found.and_then(|found| part(&found, blocks.start, end(&found).min(blocks.end)));
        let Some(old) = old else {
            let (new, work) = self.fill_hole(&mut t, ino, blocks.start..blocks.end.min(next))?;
            self.finish(t, work, &[ino])?;
            let last = end(&new).min(blocks.end);
            let new = part(&new, blocks.start, last).unwrap_or(new);
            let place = XfsWritePlace::of(&new, XfsWriteKind::Unwritten);
            return Ok(XfsWritePlace { is_new: true, ..place });
        };
        if old.is_unwritten {
            return self.own_place(t, &old, XfsWriteKind::Unwritten);
        }
        let Some(shared) = shared_range(&mut t, ino, &old)? else {
            return self.own_place(t, &old, XfsWriteKind::InPlace);
        };
        if let Some(own) = part(&old, old.offset.0, shared.start) {
            return self.own_place(t, &own, XfsWriteKind::InPlace);
        }
        let count = self.most_at_once(shared.end - shared.start);
        self.stage(t, ino, &XfsExtent { count, ..old }, space)
    }

    /// A place whose blocks only this file has. That is durable when it returns: before, a crash
    /// would give them back to another file too, or to another place of this one. A force of the
    /// log needs no block, which a copy would: a full volume may have none.
    fn own_place(
        &self,
        t: XfsTransaction<'_>,
        extent: &XfsExtent,
        kind: XfsWriteKind,
    ) -> Result<XfsWritePlace> {
        let given_up = t.given_up((extent.start, extent.count));
        drop(t);
        given_up.map_or(Ok(()), |sequence| self.transactions.log().force(sequence))?;
        Ok(XfsWritePlace::of(extent, kind))
    }

    /// Stages blocks for data that takes the place of `old`, or of its front.
    fn stage(
        &self,
        mut t: XfsTransaction<'_>,
        ino: Ino,
        old: &XfsExtent,
        space: SpaceFor,
    ) -> Result<XfsWritePlace> {
        let most = match space {
            SpaceFor::Data => t.promise(old.count.into()).map(|()| old.count)?,
            SpaceFor::Removal => granted_of_reserve(&mut t, ino, old.count)?,
        };
        let near = t.geometry().split(old.start);
        let owner = ReverseOwner::special(XfsOwner::Staging);
        let found = self.find_blocks(&mut t, ino, most, (near, false), owner)?;
        require_room_to_stage(&mut t, found.0)?;
        let work = DeferredWork::Count(XfsCountExtent::new(XfsCountOp::Stage, found));
        self.finish(t, vec![work], &[ino])?;
        let (start, count) = found;
        let kind = XfsWriteKind::Staged;
        Ok(XfsWritePlace { at: old.offset, start, count, kind, is_new: true })
    }

    /// Makes visible what was written to places of a file, and raises its size to `size`. What lies
    /// between its old size and the first place becomes zeros. Where the file has other unwritten
    /// blocks by now, these stay unwritten: nothing is known about what they hold.
    ///
    /// # Errors
    /// `ENOSPC` when a tree of extents has to grow and not even the reserve has a block. The file
    /// keeps what it had in the place of blocks that are not committed, and those that were taken
    /// for them are given back.
    pub(crate) fn commit_write(
        &self,
        ino: Ino,
        places: &[XfsWritePlace],
        size: Option<u64>,
    ) -> Result<()> {
        if places.iter().any(|place| place.kind == XfsWriteKind::InPlace) {
            self.transactions.note_in_place();
        }
        let mut left: Vec<_> = places.iter().rev().copied().collect();
        let outcome = self.commit_places(ino, &mut left, size);
        outcome.or_else(|error| self.abandon_write(ino, &left).and(Err(error)))
    }

    /// Commits places, of which the first is the last in the list, and removes what is committed.
    fn commit_places(
        &self,
        ino: Ino,
        left: &mut Vec<XfsWritePlace>,
        size: Option<u64>,
    ) -> Result<()> {
        if let (Some(_), Some(first)) = (size, left.last()) {
            let (old, start) = (self.size(ino)?, first.at.0 << self.block_log());
            if old < start {
                self.clear(ino, old..start)?;
            }
        }
        let mut is_size_set = false;
        while let Some(&place) = left.last() {
            // Nothing of a larger size is visible before all of its data is.
            let size = size.filter(|_| left.len() == 1);
            let (done, is_set) = match place.kind {
                XfsWriteKind::InPlace => (self.prove_in_place(ino, &place)?, false),
                XfsWriteKind::Unwritten => {
                    self.retry(|changes| changes.make_written(ino, &place, size))?
                }
                XfsWriteKind::Staged => {
                    self.retry(|changes| changes.remap_step(ino, &place, size))?
                }
            };
            is_size_set = is_set;
            left.pop();
            left.extend((done < place.count).then(|| place.behind(done)));
        }
        match size {
            Some(size) if !is_size_set => {
                let mut t = self.begin(Kind::ChangeInode, ino)?;
                raise_size(&mut t, ino, size)?;
                t.commit().map(drop)
            }
            _ => Ok(()),
        }
    }

    /// Proves that the file has the blocks of a place alone, as when it was prepared: the caller
    /// keeps clones of the file away, and what was written shows in one that was made even so.
    /// Returns how many blocks the place has.
    ///
    /// # Errors
    /// `EIO` when they are shared.
    fn prove_in_place(&self, ino: Ino, place: &XfsWritePlace) -> Result<u32> {
        let mut t = self.begin(Kind::ChangeTimes, ino)?;
        let (offset, start, count) = (place.at, place.start, place.count);
        let extent = XfsExtent { offset, start, count, is_unwritten: false };
        if shared_range(&mut t, ino, &extent)?.is_none() {
            return Ok(count);
        }
        let what = format!("{place:?} of inode {ino}, which was cloned since it was prepared");
        Err(Error::posix(Errno::IO, what))
    }

    /// Gives back the blocks that were taken for places of a file, as many as it can: staged ones,
    /// and those that filled holes. Else a write that finds the volume full would leave blocks
    /// behind the end of the file, each time.
    ///
    /// # Errors
    /// The first one.
    pub(crate) fn abandon_write(&self, ino: Ino, places: &[XfsWritePlace]) -> Result<()> {
        let taken = places.iter().filter(|place| place.is_new);
        let all = taken.map(|place| match place.kind {
            XfsWriteKind::Staged => self.retry(|changes| changes.abandon(place)),
            XfsWriteKind::Unwritten => {
                let blocks = place.at.0..place.end();
                self.unmap_unwritten(ino, blocks, place.start)
            }
            XfsWriteKind::InPlace => Ok(()),
        });
        all.fold(Ok(()), Result::and)
    }

    fn abandon(&self, staged: &XfsWritePlace) -> Result<()> {
        let mut t = self.transactions.begin_step(Kind::Truncate, 0)?;
        t.try_again(self.missed);
        let blocks = (staged.start, staged.count);
        require_room_to_stage(&mut t, staged.start)?;
        let work = DeferredWork::unstaged(self.transactions.geometry(), blocks, true);
        self.finish(t, work, &[])
    }

    /// Makes the first extent of a place written. Returns how many blocks are done, and whether
    /// these were the last ones, and the size grew with them, if it had to.
    fn make_written(
        &self,
        ino: Ino,
        place: &XfsWritePlace,
        size: Option<u64>,
    ) -> Result<(u32, bool)> {
        let mut t = self.begin(Kind::Write, ino)?;
        let (at, blocks) = (place.at.0, u64::from(place.count));
        let ForkPiece { extent, blocks } = piece_at(&mut t, ino, FORK, at, blocks)?;
        let done = u32::try_from(blocks).unwrap_or(place.count);
        let is_ours = |old: &XfsExtent| old.is_unwritten && old.start == place.start;
        let Some(old) = extent.filter(is_ours) else { return Ok((done, false)) };
        let work = self.convert_extent(&mut t, ino, &old)?;
        let is_last = done == place.count;
        if let Some(size) = size.filter(|_| is_last) {
            raise_size(&mut t, ino, size)?;
        }
        self.finish(t, work, &[ino])?;
        Ok((done, is_last))
    }

    /// Converts an extent, or a part of one. Returns the work that follows.
    pub(super) fn convert_extent(
        &self,
        t: &mut XfsTransaction<'_>,
        ino: Ino,
        old: &XfsExtent,
    ) -> Result<Vec<DeferredWork>> {
        require_extents(t, ino, 2)?;
        require_room_to_map(t, ino, old)?;
        // The data is written already.
        t.promise_of_reserve(self.tree_blocks());
        let new = XfsExtent { is_unwritten: !old.is_unwritten, ..*old };
        let (_, tree_blocks) = replace_part(t, ino, FORK, &new)?;
        t.require_promised()?;
        let mut work: Vec<_> = DeferredWork::of_tree_blocks(ino, FORK, &tree_blocks).collect();
        work.extend(DeferredWork::reverse(t, XfsReverseOp::Convert, (ino, FORK), new)?);
        Ok(work)
    }

    /// Maps the first staged blocks of a place. Returns what [`Self::make_written`] does.
    fn remap_step(
        &self,
        ino: Ino,
        staged: &XfsWritePlace,
        size: Option<u64>,
    ) -> Result<(u32, bool)> {
        let mut t = self.begin(Kind::Truncate, ino)?;
        let (done, work) = self.remap_front(&mut t, ino, staged)?;
        let is_last = done == staged.count;
        if let Some(size) = size.filter(|_| is_last) {
            raise_size(&mut t, ino, size)?;
        }
        self.finish(t, work, &[ino])?;
        Ok((done, is_last))
    }

    /// Maps the first staged blocks, as many as take the place of one extent or of a hole. Returns
    /// how many, and the work that follows.
    pub(super) fn remap_front(
        &self,
        t: &mut XfsTransaction<'_>,
        ino: Ino,
        staged: &XfsWritePlace,
    ) -> Result<(u32, Vec<DeferredWork>)> {
        require_extents(t, ino, 2)?;
        let old = piece_at(t, ino, FORK, staged.at.0, staged.count.into())?;
        let count = u32::try_from(old.blocks).unwrap_or(staged.count).min(staged.count);
        // The data is written already.
        t.promise_of_reserve(self.tree_blocks());
        require_room_to_unmap(t, ino, old.extent.as_slice())?;
        let (offset, start) = (staged.at, staged.start);
        let new = XfsExtent { offset, start, count, is_unwritten: false };
        require_room_to_map(t, ino, &new)?;
        let unstaged = DeferredWork::unstaged(t.geometry(), (start, count), false);
        let work = map_in_place(t, ino, old.extent.is_some(), &new, unstaged)?;
        t.require_promised()?;
        Ok((count, work))
    }
}

/// Maps an extent where a part of another one, or a hole, is. Returns the work that follows,
/// with `between`: what is done when the file has lost its old blocks, and has not yet got the
/// new ones.
pub(super) fn map_in_place(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    is_mapped: bool,
    new: &XfsExtent,
    between: Vec<DeferredWork>,
) -> Result<Vec<DeferredWork>> {
    let (old, tree_blocks) = if is_mapped {
        let (old, tree_blocks) = replace_part(t, ino, FORK, new)?;
        (Some(old), tree_blocks)
    } else {
        (None, map_extent(t, ino, FORK, new)?.tree_blocks)
    };
    let of = (ino, FORK);
    let mut work: Vec<_> = DeferredWork::of_tree_blocks(ino, FORK, &tree_blocks).collect();
    if let Some(old) = old {
        work.extend(DeferredWork::reverse(t, XfsReverseOp::Unmap, of, old)?);
    }
    work.extend(between);
    if let Some(old) = old {
        work.push(DeferredWork::release(t, of, (old.start, old.count))?);
    }
    work.extend(DeferredWork::reverse(t, XfsReverseOp::Map, of, *new)?);
    Ok(work)
}

/// Takes up to `blocks` from the reserve.
///
/// # Errors
/// `ENOSPC` when it has none.
fn granted_of_reserve(t: &mut XfsTransaction<'_>, ino: Ino, blocks: u32) -> Result<u32> {
    match u32::try_from(t.promise_of_reserve(blocks.into())).unwrap_or(blocks) {
        0 => Err(Error::posix(Errno::NOSPC, format!("a block of the reserve for inode {ino}"))),
        granted => Ok(granted),
    }
}

/// Proves that the group of an extent has blocks for its reverse map, in which a later step of the
/// chain changes or adds what it says about the extent.
pub(super) fn require_room_to_map(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    extent: &XfsExtent,
) -> Result<()> {
    if !t.geometry().layout.contains(XfsLayout::REVERSE_MAP) {
        return Ok(());
    }
    let (ag, _) = in_group(t, ino, extent)?;
    require_tree_room(t, &[ag].into())
}

/// Proves that the group of staged blocks has blocks for its reference counts, which say that they
/// are staged.
fn require_room_to_stage(t: &mut XfsTransaction<'_>, start: FsBlock) -> Result<()> {
    let Some((ag, _)) = t.geometry().split(start) else { return Ok(()) };
    require_tree_room(t, &[ag].into())
}

/// Proves that the groups of extents have blocks for their trees when a file gives these up. What
/// it shares stays allocated, so that gives none back.
pub(crate) fn require_room_to_unmap(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    extents: &[XfsExtent],
) -> Result<()> {
    if !t.inode(ino)?.core().flags2().contains(XfsInodeFlags2::REFLINK) {
        return Ok(());
    }
    let groups = extents.iter().map(|old| in_group(t, ino, old).map(|(ag, _)| ag));
    let groups = groups.collect::<Result<_>>()?;
    require_tree_room(t, &groups)
}

/// The group of an extent of a file, and its first block there.
pub(super) fn in_group(
    t: &XfsTransaction<'_>,
    ino: Ino,
    extent: &XfsExtent,
) -> Result<(AgNumber, AgBlock)> {
    t.geometry().split(extent.start).ok_or_else(|| {
        let problem = format!("inode {ino}: {extent:?} is not in the volume");
        Error::corrupt(Structure::ExtentRecord, problem)
    })
}

/// The first blocks in a row of an extent of a file that other files have too, as blocks of the
/// file. Those of a file whose inode is locked get no more owners, and may lose some at any time.
pub(super) fn shared_range(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    extent: &XfsExtent,
) -> Result<Option<Range<u64>>> {
    if !t.inode(ino)?.core().flags2().contains(XfsInodeFlags2::REFLINK) {
        return Ok(None);
    }
    let (ag, start) = in_group(t, ino, extent)?;
    let before = t.held_buffers();
    let shared = shared_part(t, ag, AgExtent { start, count: extent.count })?;
    // So that the transaction may wait for any group next.
    t.release_unchanged(&before);
    Ok(shared.map(|shared| {
        let first = extent.offset.0 + u64::from(shared.start.0.saturating_sub(start.0));
        first..first + u64::from(shared.count)
    }))
}
