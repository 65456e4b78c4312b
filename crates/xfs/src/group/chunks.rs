//! Chunks of inodes: made when a group has no free inode, and freed when all of theirs are.

use std::ops::Range;

use offshoot_vfs::{Error, Result, Structure};
use offshoot_xfs_format::btree::{XfsSearchKey, XfsTree};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::inode::XfsInodeCore;
use offshoot_xfs_format::log::items::XfsIcreateItem;
use offshoot_xfs_format::record::{CHUNK_INODES, XfsInodeChunk, XfsOwner};
use offshoot_xfs_format::superblock::XfsSuperblockFields;
use offshoot_xfs_format::{AgBlock, AgIno, AgNumber, Ino, XfsGeometry};

use super::allocate::{ExtentWish, GroupAnswer, allocate_now};
use super::free::{FreedFrom, free_extent};
use super::headers::{add, agi, agi_run, change_agi, lock_in_order};
use super::reverse::ReverseOwner;
use super::tree;
use crate::buffer::{BufferRole, DiskRun};
use crate::trans::{AgExtent, CountChanges, XfsTransaction};

/// The inodes that one bit of a hole mask stands for.
const INODES_PER_HOLE_BIT: u32 = 4;

/// As [`make_chunk_now`], and forces the log for blocks that were freed a moment ago.
#[cfg(test)]
pub(crate) fn make_chunk(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    generation: u32,
) -> Result<bool> {
    let mut outcome = make_chunk_now(t, ag, generation)?;
    if outcome == ChunkOutcome::Busy {
        t.engine().log().force_all()?;
        outcome = make_chunk_now(t, ag, generation)?;
    }
    Ok(outcome == ChunkOutcome::Made)
}

/// What became of a chunk that was to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChunkOutcome {
    Made,
    /// There is no room for it.
    NoRoom,
    /// There may be, when the log is on the device.
    Busy,
}

impl ChunkOutcome {
    /// What became of it when no extent was found.
    fn without(answer: GroupAnswer) -> Self {
        if answer == GroupAnswer::Busy { Self::Busy } else { Self::NoRoom }
    }
}

/// Makes a chunk of inodes in a group, of which some are not there if free space has no whole one.
/// There is no room when the group has none for a cluster either, or when the volume has as many
/// inodes as it may have; the group is released then, unless the transaction has changed it. Locks
/// the AGI and the AGF.
///
/// # Errors
/// `EAGAIN` when another transaction has the group, and this one has one behind it.
pub(crate) fn make_chunk_now(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    generation: u32,
) -> Result<ChunkOutcome> {
    let mut before = t.held_buffers();
    // Locked when the caller looked for a free inode.
    let agi = agi_run(t, ag).at;
    before.retain(|place| *place != agi);
    let outcome = make_locked_chunk(t, ag, generation)?;
    if outcome != ChunkOutcome::Made {
        t.release_unchanged(&before);
    }
    Ok(outcome)
}

fn make_locked_chunk(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    generation: u32,
) -> Result<ChunkOutcome> {
    let geometry = t.geometry();
    let per_block = geometry.inodes_per_block_log();
    let blocks = (CHUNK_INODES >> per_block).max(1);
    let fields = t.engine().superblock();
    if t.inodes_with(blocks << per_block) > most_inodes(fields, geometry, blocks) {
        return Ok(ChunkOutcome::NoRoom);
    }
    for role in [BufferRole::Inodes(ag), BufferRole::FreeSpace(ag)] {
        lock_in_order(t, role)?;
    }
    let header = agi(t, ag)?;
    let (alignment, part) = (fields.inoalignmt.get(), fields.spino_align.get());
    let near = AgIno(header.newino.get());
    let near = (near != AgIno::NULL).then(|| AgBlock(near.0 >> per_block));
    let owner = Some(ReverseOwner::special(XfsOwner::Inodes));
    // Both trees of inodes may grow by the chunk.
    let left = t.engine().most_levels().inodes * 2;
    let wish =
        |count, alignment| ExtentWish { near, alignment, owner, left, ..ExtentWish::blocks(count) };
    let of_whole = allocate_now(t, ag, &wish(blocks, alignment))?;
    if let GroupAnswer::Extent(extent) = of_whole {
        let start = AgIno(extent.start.0 << per_block);
        return add_chunks(t, ag, extent, start, generation).map(|()| ChunkOutcome::Made);
    }
    let may_be_sparse = geometry.layout.contains(XfsLayout::SPARSE_INODES) && part > 0;
    if of_whole == GroupAnswer::Busy || !may_be_sparse || part >= blocks {
        return Ok(ChunkOutcome::without(of_whole));
    }
    // The chunk that the part belongs to lies in the group as a whole: in one of 1004 blocks, whose
    // chunks have 8, no part is in the last 4.
    let end = geometry.ag_len(ag) / blocks * blocks;
    let bounds = (geometry.header_blocks().next_multiple_of(blocks), end);
    let wish = ExtentWish { bounds, ..wish(part, part) };
    let extent = match allocate_now(t, ag, &wish)? {
        GroupAnswer::Extent(extent) => extent,
        answer => return Ok(ChunkOutcome::without(answer)),
    };
    let first = extent.start.0 / blocks * blocks;
    add_chunks(t, ag, extent, AgIno(first << per_block), generation).map(|()| ChunkOutcome::Made)
}

/// The most inodes of a volume: `imax_pct` percent of its blocks, in whole chunks of this many
/// blocks. 0 is no limit. 25 % of 262,144 blocks are 8,192 chunks of 8 blocks: 524,288 inodes.
fn most_inodes(fields: &XfsSuperblockFields, geometry: &XfsGeometry, blocks: u32) -> u64 {
    if fields.imax_pct == 0 {
        return u64::MAX;
    }
    // Hundredths first: the product may be above 64 bits.
    let (whole, rest) = (geometry.blocks / 100, geometry.blocks % 100);
    let percent = u64::from(fields.imax_pct);
    let most = whole.saturating_mul(percent).saturating_add(rest * percent / 100);
    let chunks = most / u64::from(blocks);
    chunks.saturating_mul(u64::from(blocks) << geometry.inodes_per_block_log())
}

/// Makes the inodes of an extent: all those of the chunk that begins with `start`, or a part. A
/// block of 64 KiB with inodes of 512 bytes has 128 of them: two chunks.
fn add_chunks(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    extent: AgExtent,
    start: AgIno,
    generation: u32,
) -> Result<()> {
    write_inodes(t, ag, extent, generation)?;
    let per_block = t.geometry().inodes_per_block_log();
    let (first, count) = (extent.start.0 << per_block, extent.count << per_block);
    for chunk in (start.0..first + count).step_by(CHUNK_INODES as usize) {
        add_chunk(t, ag, AgIno(chunk), first..first + count)?;
    }
    let change = i64::from(count);
    change_agi(t, ag, |agi| {
        agi.newino = start.0.into();
        add(&mut agi.count, change)?;
        add(&mut agi.freecount, change)
    })?;
    t.count(CountChanges { inodes: change, free_inodes: change, ..CountChanges::default() });
    Ok(())
}

/// Records those of the inodes `made` that are of the chunk that begins with `start`.
fn add_chunk(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    start: AgIno,
    made: Range<u32>,
) -> Result<()> {
    let geometry = t.geometry();
    let first = made.start.saturating_sub(start.0);
    let end = made.end.saturating_sub(start.0).min(CHUNK_INODES);
    let bits = first / INODES_PER_HOLE_BIT..end.div_ceil(INODES_PER_HOLE_BIT);
    let holes = bits.fold(u16::MAX, |holes, bit| holes & !(1_u16.checked_shl(bit).unwrap_or(0)));
    let new = XfsInodeChunk::new(geometry, start, holes, u64::MAX);
    let key = XfsSearchKey([start.0.into(), 0, 0]);
    // Another part of the chunk may be there.
    let old = tree::edit(t, ag, XfsTree::Inodes, |tree| tree.exact::<XfsInodeChunk>(key))?;
    let chunk = match old {
        Some(old) => {
            if old.allocated(geometry) & new.allocated(geometry) != 0 {
                return Err(contradiction(ag, start, "its inodes lie in free space"));
            }
            let holes = old.holes(geometry) & holes;
            XfsInodeChunk::new(geometry, start, holes, old.free.get())
        }
        None => new,
    };
    set_chunk(t, ag, old.as_ref(), &chunk)
}

/// Fills the clusters of an extent with free inodes.
fn write_inodes(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    extent: AgExtent,
    generation: u32,
) -> Result<()> {
    let geometry = t.geometry();
    let size = geometry.inode_size();
    let mut all = Vec::new();
    for run in cluster_runs(t, ag, extent) {
        let mut bytes = vec![0; run.bytes];
        let block = geometry.at(run.at).map_or(0, |(_, block)| block.0);
        let first = block << geometry.inodes_per_block_log();
        for (inode, place) in (first..).zip(bytes.chunks_exact_mut(size)) {
            let ino = geometry.ino(ag, AgIno(inode));
            XfsInodeCore::fresh(geometry, ino, generation).write(place, geometry);
        }
        all.push((run, bytes.into_boxed_slice()));
    }
    if !extent.count.is_multiple_of(geometry.cluster_blocks) {
        return Err(contradiction(ag, AgIno(extent.start.0), "it is no multiple of a cluster"));
    }
    let item = XfsIcreateItem {
        ag,
        block: extent.start,
        count: extent.count << geometry.inodes_per_block_log(),
        inode_size: 1 << geometry.inode_log,
        blocks: extent.count,
        generation,
    };
    t.make_inodes(item, all)
}

/// The clusters of an extent of inodes.
fn cluster_runs(t: &XfsTransaction<'_>, ag: AgNumber, extent: AgExtent) -> Vec<DiskRun> {
    let geometry = t.geometry();
    let starts = (extent.start.0..extent.end()).step_by(geometry.cluster_blocks.max(1) as usize);
    starts.map(|block| DiskRun::cluster(geometry, ag, AgBlock(block))).collect()
}

/// Stores the record of a chunk in both trees of inodes; that of free inodes has only chunks with
/// one. Both have to have had `old`.
pub(super) fn set_chunk(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    old: Option<&XfsInodeChunk>,
    chunk: &XfsInodeChunk,
) -> Result<()> {
    trees(t.geometry()).try_for_each(|which| set_chunk_in(t, ag, which, old, chunk))
}

/// The same in one of the trees.
pub(super) fn set_chunk_in(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    which: XfsTree,
    old: Option<&XfsInodeChunk>,
    chunk: &XfsInodeChunk,
) -> Result<()> {
    let geometry = t.geometry();
    let key = XfsSearchKey([chunk.start().0.into(), 0, 0]);
    let belongs = |chunk: &&XfsInodeChunk| which == XfsTree::Inodes || chunk.free(geometry) != 0;
    let (before, is_kept) = (old.filter(belongs), belongs(&chunk));
    tree::edit(t, ag, which, |tree| {
        let found = tree.exact::<XfsInodeChunk>(key)?;
        if found.as_ref() != before {
            let problem = format!("tree {which:?} has {found:?} of it, not {before:?}");
            return Err(contradiction(ag, chunk.start(), &problem));
        }
        match (found.is_some(), is_kept) {
            (true, true) => tree.replace(chunk),
            (true, false) => tree.remove(),
            (false, true) => tree.insert(chunk),
            (false, false) => Ok(()),
        }
    })
}

/// The trees of inodes that a volume has.
fn trees(geometry: &XfsGeometry) -> impl Iterator<Item = XfsTree> {
    let count = if geometry.layout.contains(XfsLayout::FREE_INODES) { 2 } else { 1 };
    [XfsTree::Inodes, XfsTree::FreeInodes].into_iter().take(count)
}

/// Frees a chunk of which no inode is in use.
pub(super) fn free_chunk(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    chunk: &XfsInodeChunk,
) -> Result<()> {
    let geometry = t.geometry();
    let key = XfsSearchKey([chunk.start().0.into(), 0, 0]);
    for which in trees(geometry) {
        tree::edit(t, ag, which, |tree| match tree.exact::<XfsInodeChunk>(key)? {
            Some(_) => tree.remove(),
            None => Err(contradiction(ag, chunk.start(), "a tree does not have it")),
        })?;
    }
    let inodes = i64::from(chunk.allocated(geometry).count_ones());
    change_agi(t, ag, |agi| {
        add(&mut agi.count, -inodes)?;
        add(&mut agi.freecount, -inodes)
    })?;
    t.count(CountChanges { inodes: -inodes, free_inodes: -inodes, ..CountChanges::default() });
    for extent in extents(t, chunk) {
        for run in cluster_runs(t, ag, extent) {
            t.cancel(run)?;
        }
        let owner = ReverseOwner::special(XfsOwner::Inodes);
        free_extent(t, ag, extent, FreedFrom::Owner(owner))?;
    }
    Ok(())
}

/// The blocks of a chunk that are allocated.
fn extents(t: &XfsTransaction<'_>, chunk: &XfsInodeChunk) -> Vec<AgExtent> {
    let geometry = t.geometry();
    let per_block = geometry.inodes_per_block_log();
    let allocated = chunk.allocated(geometry);
    let mut all: Vec<AgExtent> = Vec::new();
    for index in (0..CHUNK_INODES).filter(|index| allocated & 1 << index != 0) {
        let block = chunk.start().0.saturating_add(index) >> per_block;
        match all.last_mut() {
            Some(last) if last.end() > block => {}
            Some(last) if last.end() == block => last.count += 1,
            _ => all.push(AgExtent::new(block, 1)),
        }
    }
    all
}

/// The chunk that an inode belongs to.
pub(super) fn chunk_of(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    inode: AgIno,
) -> Result<XfsInodeChunk> {
    let key = XfsSearchKey([inode.0.into(), 0, 0]);
    let chunk = tree::edit(t, ag, XfsTree::Inodes, |tree| tree.at_most::<XfsInodeChunk>(key))?;
    let has = |chunk: &XfsInodeChunk| {
        let index = inode.0.checked_sub(chunk.start().0).filter(|index| *index < CHUNK_INODES);
        index.is_some_and(|index| chunk.allocated(t.geometry()) & 1 << index != 0)
    };
    let found = chunk.filter(has);
    found.ok_or_else(|| contradiction(ag, inode, "no chunk has the inode"))
}

/// The error about a chunk or an inode that contradicts another structure.
#[cold]
pub(super) fn contradiction(ag: AgNumber, inode: AgIno, problem: &str) -> Error {
    let what = format!("group {ag}, inode {inode}: {problem}");
    Error::corrupt(Structure::InodeRecord, what)
}

/// The number of an inode in its group.
pub(super) fn split(t: &XfsTransaction<'_>, ino: Ino) -> Result<(AgNumber, AgIno)> {
    t.geometry().split_ino(ino).ok_or_else(|| {
        Error::corrupt(Structure::InodeCore, format!("inode {ino} is not in the volume"))
    })
}
