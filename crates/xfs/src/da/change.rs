//! Forks with a tree of hashes, as a transaction changes them: their blocks, which are taken,
//! found, stored and given up. The tree itself is in `tree`.
//!
//! A block of a directory may have several blocks of the filesystem. They lie in a row where the
//! volume has such a row, and else in up to four pieces. That is the last resort: the kernel
//! replays no log that has such a block, not even one of its own. Our recovery does.
//!
//! Each piece is an allocation, and each of these changes the trees of a group. So their number is
//! bounded, as the log space of a transaction is. A directory block of 64 KiB in blocks of 4 KiB
//! needs up to four free pieces, of 16 KiB on average. Without these the volume is full for it.
//!
//! No space is freed here: [`ChangedHashFork::step`] says what the fork has no longer, and rooms
//! above free that.

mod join;
mod proof;
mod tree;

use std::ops::Range;

use offshoot_vfs::{Errno, Error, Result, Structure};
use offshoot_xfs_format::da::{DaEdit, DaExpected, DaKind, DaNode};
use offshoot_xfs_format::dir::{free_start, leaf_start};
use offshoot_xfs_format::record::XfsExtent;
use offshoot_xfs_format::{
    AgBlock, AgNumber, BasicBlock, FileBlock, FsBlock, Ino, Malformed, XfsGeometry,
};

use crate::buffer::{BufferRole, DiskRun, malformed};
use crate::group::{ExtentWish, ReverseOwner, allocate_anywhere, hold_room_anywhere};
use crate::inode::change::{
    ForkStep, HoleWish, end, first_hole, map_extent, mapped, previous_mapped, unmap_extents,
    unmapping_cuts_extent, unmapping_needs_block,
};
use crate::trans::{BufferRuns, ForkName, XfsChangedInode, XfsTransaction};
pub(crate) use tree::HashPath;

/// The pieces of a block of a directory, and the extents that one change takes, at most. A change
/// takes up to 7 blocks, so some of these may have pieces.
const MOST_PIECES: u32 = 4;
const MOST_TAKEN: u32 = 16;

/// The locked blocks and the extents that are remembered. A change of one name comes to a block on
/// each level of a tree, to their neighbours, a data block and an index block. A search among many
/// names with one hash comes to any number of data blocks, and must not compare each with all.
const MOST_REMEMBERED: usize = 16;

/// The extents behind which a directory looks for room for a block of its tree.
const NEAR_HOLES: usize = 64;

/// The data fork of a directory, or the attribute fork of a file, that a transaction changes.
pub(crate) struct ChangedHashFork<'t, 'e> {
    pub(crate) t: &'t mut XfsTransaction<'e>,
    pub(crate) ino: Ino,
    /// What the fork has no longer.
    pub(crate) step: ForkStep,
    /// The extents that it has taken.
    taken: u32,
    /// Extents that were looked up lately, the last ones behind, as long as none changes. A change
    /// of one name looks for the same few blocks again and again.
    pub(crate) seen: Vec<XfsExtent>,
    /// Blocks that were locked lately, and their places, for as long.
    held: Vec<(FileBlock, BasicBlock)>,
    is_directory: bool,
}

impl<'t, 'e> ChangedHashFork<'t, 'e> {
    pub(crate) fn of_attributes(t: &'t mut XfsTransaction<'e>, ino: Ino) -> Self {
        Self::new(t, ino, false)
    }

    pub(crate) fn of_directory(t: &'t mut XfsTransaction<'e>, ino: Ino) -> Self {
        Self::new(t, ino, true)
    }

    fn new(t: &'t mut XfsTransaction<'e>, ino: Ino, is_directory: bool) -> Self {
        let (step, seen, held) = (ForkStep::default(), Vec::new(), Vec::new());
        Self { t, ino, step, taken: 0, seen, held, is_directory }
    }

    pub(crate) fn geometry(&self) -> &'e XfsGeometry {
        self.t.geometry()
    }

    pub(crate) fn inode(&mut self) -> Result<&mut XfsChangedInode> {
        self.t.inode(self.ino)
    }

    fn name(&self) -> ForkName {
        if self.is_directory { ForkName::Data } else { ForkName::Attributes }
    }

    /// The blocks of the filesystem in a block of the fork.
    pub(crate) fn unit(&self) -> u32 {
        if self.is_directory { 1 << self.geometry().dir_block_log } else { 1 }
    }

    /// The error about the fork.
    #[cold]
    pub(crate) fn damaged(&self, problem: impl std::fmt::Display) -> Error {
        let (structure, fork) = if self.is_directory {
            (Structure::DirectoryBlock, "directory")
        } else {
            (Structure::AttributeBlock, "attribute fork")
        };
        Error::corrupt(structure, format!("inode {}: {fork}: {problem}", self.ino))
    }

    /// The error about the contents of a block.
    pub(crate) fn in_block(&self, at: FileBlock) -> impl Fn(Malformed) -> Error {
        let ino = self.ino;
        move |Malformed { structure, problem }| {
            Error::corrupt(structure, format!("inode {ino}: block {at}: {problem}"))
        }
    }

    #[cold]
    pub(crate) fn no_space(&self, what: &str) -> Error {
        let of = if self.is_directory { "directory" } else { "attributes of inode" };
        Error::posix(Errno::NOSPC, format!("{what} for {of} {}", self.ino))
    }

    /// The extent with block `at` of the fork, if it is mapped.
    fn find_extent(&mut self, at: FileBlock) -> Result<Option<XfsExtent>> {
        let has_block = |extent: &&XfsExtent| (extent.offset.0..end(extent)).contains(&at.0);
        self.t.count_compared(self.seen.len());
        if let Some(seen) = self.seen.iter().rev().find(has_block) {
            return Ok(Some(*seen));
        }
        let found = mapped(self.t, self.ino, self.name(), at)?;
        if found.is_some_and(|extent| extent.is_unwritten) {
            return Err(self.damaged(format!("block {at} is unwritten")));
        }
        if let Some(found) = found {
            remember(&mut self.seen, found);
        }
        Ok(found)
    }

    /// The extent with block `at` of the fork.
    pub(crate) fn extent(&mut self, at: FileBlock) -> Result<XfsExtent> {
        let found = self.find_extent(at)?;
        found.ok_or_else(|| self.damaged(format!("block {at} is not there")))
    }

    /// Where a block of the volume is on the device.
    pub(crate) fn place(&self, block: FsBlock) -> Result<BasicBlock> {
        let place = self.geometry().place_of(block);
        place.ok_or_else(|| self.damaged(format!("block {block} is not in the volume")))
    }

    /// Where the block at `at` of the fork is on the device; `None` when it is not mapped.
    fn find_runs(&mut self, at: FileBlock) -> Result<Option<BufferRuns>> {
        let geometry = self.geometry();
        let (mut next, end) = (at.0, at.0 + u64::from(self.unit()));
        let mut runs = Vec::new();
        while next < end {
            let Some(extent) = self.find_extent(FileBlock(next))? else {
                if runs.is_empty() {
                    return Ok(None);
                }
                return Err(self.damaged(format!("block {next} is not there")));
            };
            let inside = next - extent.offset.0;
            let count = (u64::from(extent.count) - inside).min(end - next);
            let at = self.place(FsBlock(extent.start.0 + inside))?;
            let bytes = usize::try_from(count << geometry.block_log).unwrap_or(usize::MAX);
            let run = DiskRun { at, bytes };
            next += count;
            if runs.is_empty() && next == end {
                return Ok(Some(run.into()));
            }
            run.push_to(&mut runs);
        }
        Ok(Some(runs.into()))
    }

    fn runs(&mut self, at: FileBlock) -> Result<BufferRuns> {
        let runs = self.find_runs(at)?;
        runs.ok_or_else(|| self.damaged(format!("block {at} is not there")))
    }

    fn role(&self, at: FileBlock) -> BufferRole {
        if self.is_directory {
            BufferRole::Directory(self.ino, at)
        } else {
            BufferRole::Attributes(self.ino, at)
        }
    }

    /// What a block at `at` says about itself.
    pub(crate) fn expected(&mut self, at: FileBlock) -> Result<DaExpected> {
        let place = self.runs(at)?.at();
        Ok(DaExpected { place, owner: Some(self.ino), block: Some(at), is_sealed: true })
    }

    /// Locks the block at `at`. Returns its place, for [`Self::bytes`].
    pub(crate) fn hold(&mut self, at: FileBlock) -> Result<BasicBlock> {
        let held = self.find_held(at)?;
        held.ok_or_else(|| self.damaged(format!("block {at} is not there")))
    }

    /// The same; `None` when no block is mapped at `at`.
    pub(crate) fn find_held(&mut self, at: FileBlock) -> Result<Option<BasicBlock>> {
        self.t.count_compared(self.held.len());
        if let Some((_, place)) = self.held.iter().rev().find(|(held, _)| *held == at) {
            return Ok(Some(*place));
        }
        let (Some(runs), role) = (self.find_runs(at)?, self.role(at)) else { return Ok(None) };
        let place = runs.at();
        self.t.read(runs, role)?;
        remember(&mut self.held, (at, place));
        Ok(Some(place))
    }

    /// The bytes of a block that is locked, as they are now.
    pub(crate) fn bytes(&self, place: BasicBlock) -> Result<&[u8]> {
        self.t.bytes(place)
    }

    /// A copy of the block at `at`, for a change that reads it while it changes other blocks.
    pub(crate) fn copy(&mut self, at: FileBlock) -> Result<Vec<u8>> {
        let place = self.hold(at)?;
        let copy = self.bytes(place)?.to_vec();
        self.t.count_copy(copy.len());
        Ok(copy)
    }

    /// The kind of a block by its magic number.
    fn kind(&self, block: &[u8]) -> Option<DaKind> {
        if self.is_directory {
            DaKind::of_directory(self.geometry(), block)
        } else {
            DaKind::of_attributes(self.geometry(), block)
        }
    }

    /// The block as a node; `None` when it is none.
    pub(crate) fn node<'b>(&self, block: &'b [u8]) -> Result<Option<DaNode<'b>>> {
        match self.kind(block) {
            Some(kind @ (DaKind::AttrNode | DaKind::DirNode)) => {
                DaNode::view(self.geometry(), kind, block).map(Some).map_err(malformed)
            }
            _ => Ok(None),
        }
    }

    /// Makes `bytes` those of the block at `at`, and lets the commit prove them. The log gets the
    /// parts that differ.
    pub(crate) fn store(&mut self, at: FileBlock, bytes: &[u8]) -> Result<()> {
        let place = self.hold(at)?;
        self.t.require_proof(place);
        self.t.put(place, 0, bytes)
    }

    /// Lets the commit prove the block at `at` whole. A change asks for this that makes a block one
    /// of another kind, or goes to an entry by what another block says: that may be wrong although
    /// each of the two blocks is right by itself.
    pub(crate) fn require_proof(&mut self, at: FileBlock) -> Result<()> {
        let place = self.hold(at)?;
        self.t.require_proof(place);
        Ok(())
    }

    /// Changes a block where it is. Returns what `change` does. After an error a part of the change
    /// may be there: the caller returns the error, and the transaction is dropped.
    ///
    /// The commit proves nodes, which change with a split or a join, and leaves of attributes,
    /// whose names are not known to lie apart. Blocks of a directory with names and hashes are
    /// proved when they are read, so that the change of one name finds in its place what it
    /// expects; other changes of them call [`Self::require_proof`].
    pub(crate) fn edit<T>(
        &mut self,
        (at, kind): (FileBlock, DaKind),
        change: impl FnOnce(&XfsGeometry, &mut DaEdit<'_>) -> Result<T, Malformed>,
    ) -> Result<T> {
        let (place, geometry) = (self.hold(at)?, self.geometry());
        if matches!(kind, DaKind::AttrLeaf | DaKind::AttrNode | DaKind::DirNode) {
            self.t.require_proof(place);
        }
        let outcome = self.t.edit(place, |block, changed| {
            change(geometry, &mut DaEdit::new(kind, block, changed))
        })?;
        outcome.map_err(self.in_block(at))
    }

    /// Where a block of the tree of hashes can be added.
    fn room_for_block(&mut self) -> Result<FileBlock> {
        let (geometry, unit) = (self.geometry(), self.unit());
        let (range, most_extents) = if self.is_directory {
            (leaf_start(geometry).0..free_start(geometry).0, NEAR_HOLES)
        } else {
            (0..u64::from(u32::MAX), usize::MAX)
        };
        let wish = HoleWish { range, count: unit, alignment: unit.into(), most_extents };
        for most_extents in [most_extents, usize::MAX] {
            let wish = HoleWish { most_extents, ..wish.clone() };
            if let Some(hole) = first_hole(self.t, self.ino, self.name(), &wish)? {
                return Ok(hole);
            }
        }
        Err(self.no_space("a block number"))
    }

    /// Takes a new block into the tree of hashes. It is zeros.
    pub(crate) fn create(&mut self) -> Result<FileBlock> {
        let at = self.room_for_block()?;
        self.create_at(at)?;
        Ok(at)
    }

    /// Takes a new block into the fork at a place where none is. It is zeros.
    pub(crate) fn create_at(&mut self, at: FileBlock) -> Result<()> {
        let (mut next, mut left) = (at, self.unit());
        let (unit, mut least, mut pieces) = (left, left, 1);
        while left > 0 {
            if self.is_directory && self.taken >= MOST_TAKEN {
                return Err(self.no_space("so many pieces of blocks"));
            }
            let Some(count) = self.try_map(next, least..left + 1)? else {
                if unit == 1 || left < unit || pieces > 1 {
                    return Err(self.no_space("a block"));
                }
                // Nowhere are so many free in a row.
                pieces = MOST_PIECES;
                least = left.div_ceil(pieces);
                continue;
            };
            self.taken += 1;
            next.0 += u64::from(count);
            left -= count;
            pieces = pieces.saturating_sub(1).max(1);
            least = left.div_ceil(pieces).max(1);
        }
        let (runs, role) = (self.runs(at)?, self.role(at));
        self.t.fresh(runs, role)
    }

    /// Maps new blocks from `at` of the fork on: at least one, and up to `most` in a row. Returns
    /// how many.
    pub(crate) fn map(&mut self, at: FileBlock, most: u32) -> Result<u32> {
        let count = self.try_map(at, 1..most + 1)?;
        count.ok_or_else(|| self.no_space("a block"))
    }

    /// Maps as many new blocks as `counts` has. Returns how many; `None` when no group has so many
    /// in a row.
    fn try_map(&mut self, at: FileBlock, counts: Range<u32>) -> Result<Option<u32>> {
        let (geometry, fork) = (self.geometry(), self.name());
        let owner = Some(ReverseOwner::file(self.ino, fork, at, false));
        let levels = self.t.engine().most_levels();
        let left = if self.is_directory { levels.data } else { levels.attributes };
        let near = self.near(at)?;
        let most = counts.end - 1;
        let wish = ExtentWish { owner, least: counts.start, left, ..ExtentWish::blocks(most) };
        let Some((ag, found)) = allocate_anywhere(self.t, near, &wish)? else { return Ok(None) };
        let start = geometry.fs_block(ag, found.start);
        let extent = XfsExtent { offset: at, start, count: found.count, is_unwritten: false };
        self.forget();
        let ForkStep { tree_blocks, .. } = map_extent(self.t, self.ino, fork, &extent)?;
        self.step.tree_blocks.extend(tree_blocks);
        Ok(Some(found.count))
    }

    /// Where a new block at `at` of the fork had best be: for a directory behind the block before
    /// it, so that blocks that are read one after the other lie so.
    fn near(&mut self, at: FileBlock) -> Result<Option<(AgNumber, AgBlock)>> {
        let geometry = self.geometry();
        let of_inode = geometry.locate(self.ino).map(|(ag, block, _)| (ag, block));
        if !self.is_directory {
            return Ok(of_inode);
        }
        let before = previous_mapped(self.t, self.ino, ForkName::Data, at)?;
        let behind = before.map(|last| FsBlock(last.start.0 + (end(&last) - last.offset.0)));
        Ok(behind.and_then(|behind| geometry.split(behind)).or(of_inode))
    }

    /// Forgets where blocks are, because that changes.
    fn forget(&mut self) {
        self.seen.clear();
        self.held.clear();
    }

    fn range(&self, at: FileBlock) -> Range<u64> {
        at.0..at.0 + u64::from(self.unit())
    }

    /// Whether the blocks at these places of a directory can be given up. On a full volume they
    /// cannot if an extent is cut in two and the tree of the extents needs a block for that. Then
    /// they stay, as for the kernel, and the name goes even so.
    ///
    /// The blocks of attributes never stay: a leaf without attributes is damage for the kernel's
    /// tools. A change that finds no block for them fails, and has its promise of one.
    pub(crate) fn may_free(&mut self, blocks: &[FileBlock]) -> Result<bool> {
        if !self.is_directory {
            return Ok(true);
        }
        let (mut cut, fork) = (0, self.name());
        for &at in blocks {
            let range = self.range(at);
            // A list with room for one more extent has none for the next block.
            let needs_block = if blocks.len() == 1 {
                unmapping_needs_block(self.t, self.ino, fork, range)?
            } else {
                unmapping_cuts_extent(self.t, self.ino, fork, range)?
            };
            cut += u64::from(needs_block);
        }
        if cut == 0 {
            return Ok(true);
        }
        // A leaf and each level above it may become two blocks.
        let needed = cut * (self.t.engine().most_levels().data + 2);
        let group = self.geometry().locate(self.ino).map(|(ag, _, _)| ag);
        match self.t.promise(needed) {
            Ok(()) => hold_room_anywhere(self.t, group, needed),
            Err(error) if error.errno() == Errno::NOSPC => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Gives up the block at `at` of the fork.
    pub(crate) fn free(&mut self, at: FileBlock) -> Result<()> {
        let (runs, unit) = (self.runs(at)?, self.unit());
        self.t.cancel(runs)?;
        self.unmap(self.range(at), unit as usize).map(drop)
    }

    /// Unmaps up to `most` extents of a range, the last ones first. Returns whether all are.
    pub(crate) fn unmap(&mut self, range: Range<u64>, most: usize) -> Result<bool> {
        self.forget();
        let ForkStep { extents, tree_blocks, is_done } =
            unmap_extents(self.t, self.ino, self.name(), range, most)?;
        self.step.extents.extend(extents);
        self.step.tree_blocks.extend(tree_blocks);
        Ok(is_done)
    }
}

/// Remembers what was found last, in the place of what was found first if it is too much.
fn remember<T>(known: &mut Vec<T>, found: T) {
    if known.len() >= MOST_REMEMBERED {
        known.remove(0);
    }
    known.push(found);
}
