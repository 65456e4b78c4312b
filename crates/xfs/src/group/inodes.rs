//! Taking and freeing inodes, and the lists of unlinked ones.

use offshoot_vfs::Result;
use offshoot_xfs_format::btree::{XfsSearchKey, XfsTree};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::group::{Agi, UNLINKED_LISTS};
use offshoot_xfs_format::inode::{XfsForkFormat, XfsInodeFlags2};
use offshoot_xfs_format::record::{CHUNK_INODES, XfsInodeChunk};
use offshoot_xfs_format::{AgIno, AgNumber, Ino, XfsGeometry};

use super::chunks::{self, contradiction, set_chunk, set_chunk_in, split};
use super::headers::{add, agi, change_agi, lock_in_order};
use super::tree;
use crate::btree::edit::XfsTreeEdit;
use crate::buffer::BufferRole;
use crate::trans::{ChangedFork, CountChanges, ForkName, XfsTransaction};

/// Takes a free inode of a group, best near to `near`; `None` when the group has none: then the
/// caller makes a chunk. Locks the AGI.
///
/// # Errors
/// `EAGAIN` when another transaction has the group, and this one has one behind it.
pub(crate) fn take_inode(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    near: AgIno,
) -> Result<Option<Ino>> {
    if agi(t, ag)?.freecount.get() == 0 {
        return Ok(None);
    }
    let geometry = t.geometry();
    let has_free_tree = geometry.layout.contains(XfsLayout::FREE_INODES);
    let which = if has_free_tree { XfsTree::FreeInodes } else { XfsTree::Inodes };
    // The search leaves the cursor at the record, which is changed there.
    let taken = tree::edit(t, ag, which, |tree| {
        let Some(chunk) = find_free(tree, geometry, near)? else { return Ok(None) };
        let index = chunk.free(geometry).trailing_zeros();
        let inode = AgIno(chunk.start().0.saturating_add(index));
        let new = with_free(geometry, ag, inode, &chunk, chunk.free.get() & !(1 << index))?;
        if has_free_tree && new.free(geometry) == 0 {
            tree.remove()?;
        } else {
            tree.replace(&new)?;
        }
        Ok(Some((inode, chunk, new)))
    })?;
    let Some((inode, chunk, new)) = taken else {
        return Err(contradiction(ag, near, "the AGI counts a free inode, and no chunk has one"));
    };
    if has_free_tree {
        set_chunk_in(t, ag, XfsTree::Inodes, Some(&chunk), &new)?;
    }
    count_free(t, ag, -1)?;
    Ok(Some(geometry.ino(ag, inode)))
}

/// Sets the cursor to a chunk with a free inode, best in front of `near`.
fn find_free(
    tree: &mut XfsTreeEdit<'_>,
    geometry: &XfsGeometry,
    near: AgIno,
) -> Result<Option<XfsInodeChunk>> {
    let has_none = |chunk: &XfsInodeChunk| chunk.free(geometry) == 0;
    let key = XfsSearchKey([near.0.into(), 0, 0]);
    let mut found = tree.at_most::<XfsInodeChunk>(key)?;
    while found.as_ref().is_some_and(has_none) {
        found = tree.previous()?;
    }
    if found.is_none() {
        found = tree.at_least::<XfsInodeChunk>(key)?;
        while found.as_ref().is_some_and(has_none) {
            found = tree.next()?;
        }
    }
    Ok(found)
}

/// The record of a chunk, one of whose inodes is taken or freed, with another mask of free ones.
fn with_free(
    geometry: &XfsGeometry,
    ag: AgNumber,
    inode: AgIno,
    chunk: &XfsInodeChunk,
    free: u64,
) -> Result<XfsInodeChunk> {
    if !geometry.has_inode(ag, inode) {
        return Err(contradiction(ag, inode, "it is not in the group"));
    }
    Ok(XfsInodeChunk::new(geometry, chunk.start(), chunk.holes(geometry), free))
}

/// Counts an inode that was taken or freed.
fn count_free(t: &mut XfsTransaction<'_>, ag: AgNumber, change: i64) -> Result<()> {
    change_agi(t, ag, |agi| add(&mut agi.freecount, change))?;
    t.count(CountChanges { free_inodes: change, ..CountChanges::default() });
    Ok(())
}

/// Frees an inode whose forks are empty, and its chunk if no other inode of it is in use. The
/// inode is in no list of unlinked ones any more. Locks the inode, the AGI, and the AGF.
pub(crate) fn free_inode(t: &mut XfsTransaction<'_>, ino: Ino) -> Result<()> {
    let (ag, inode) = split(t, ino)?;
    lock_in_order(t, BufferRole::Inodes(ag))?;
    reset_core(t, ino)?;
    let chunk = chunks::chunk_of(t, ag, inode)?;
    let bit = 1 << ((inode.0 - chunk.start().0) % CHUNK_INODES);
    if chunk.free.get() & bit != 0 {
        return Err(contradiction(ag, inode, "it is freed, and is free"));
    }
    let free = chunk.free.get() | bit;
    let freed = with_free(t.geometry(), ag, inode, &chunk, free)?;
    set_chunk(t, ag, Some(&chunk), &freed)?;
    count_free(t, ag, 1)?;
    // A block with more inodes than a chunk has belongs to several.
    let is_whole_block =
        t.geometry().inodes_per_block_log() <= CHUNK_INODES.ilog2().try_into().unwrap_or(0);
    if free == u64::MAX && is_whole_block {
        let geometry = t.geometry();
        let chunk = XfsInodeChunk::new(geometry, chunk.start(), chunk.holes(geometry), free);
        chunks::free_chunk(t, ag, &chunk)?;
    }
    Ok(())
}

/// Makes an inode one that no file has. Nothing of the old file may come back with the next one.
fn reset_core(t: &mut XfsTransaction<'_>, ino: Ino) -> Result<()> {
    let inode = t.inode(ino)?;
    let core = inode.core();
    if core.is_free() {
        return Err(inode.damaged("it is freed, and is free"));
    }
    if core.nblocks.get() != 0 {
        return Err(inode.damaged(format!("it is freed with {} blocks", core.nblocks)));
    }
    let kept = XfsInodeFlags2::BIGTIME | XfsInodeFlags2::NREXT64;
    let flags2 = core.flags2() & kept;
    inode.drop_attribute_fork();
    inode.set_fork(ForkName::Data, ChangedFork::Extents(Vec::new()));
    let core = inode.core_mut();
    core.format = XfsForkFormat::Extents as u8;
    core.mode = 0.into();
    core.nlink = 0.into();
    core.size = 0.into();
    core.flags = 0.into();
    core.flags2 = flags2.bits().into();
    core.extsize = 0.into();
    core.cowextsize = 0.into();
    core.generation = core.generation.get().wrapping_add(1).into();
    Ok(())
}

/// The first inode of a list of unlinked ones. Locks the AGI.
pub(crate) fn first_unlinked(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    list: usize,
) -> Result<Option<AgIno>> {
    lock_in_order(t, BufferRole::Inodes(ag))?;
    let first = agi(t, ag)?.unlinked.get(list).map_or(AgIno::NULL, |first| AgIno(first.get()));
    Ok((first != AgIno::NULL).then_some(first))
}

/// Makes an inode without names the first of its list. Locks the AGI.
pub(crate) fn enter_unlinked(t: &mut XfsTransaction<'_>, ino: Ino) -> Result<()> {
    let (ag, inode) = split(t, ino)?;
    let list = Agi::unlinked_list(inode);
    let first = first_unlinked(t, ag, list)?.unwrap_or(AgIno::NULL);
    if first == inode {
        return Err(contradiction(ag, inode, "it is in its list of unlinked inodes already"));
    }
    // The chain is in the cluster alone, and most inodes have none.
    if first != AgIno::NULL {
        t.set_next_unlinked(ino, first)?;
        t.note_unlinked_before(t.geometry().ino(ag, first), Some(ino));
    }
    t.note_unlinked_before(ino, None);
    set_first(t, ag, list, inode)
}

/// Takes an inode out of its list. Locks the AGI.
pub(crate) fn leave_unlinked(t: &mut XfsTransaction<'_>, ino: Ino) -> Result<()> {
    let (ag, inode) = split(t, ino)?;
    let list = Agi::unlinked_list(inode);
    // The AGI before the cluster, which another transaction with the AGI may want.
    let first = first_unlinked(t, ag, list)?;
    let next = t.next_unlinked(ino)?;
    if let Some(next) = next.filter(|next| !t.geometry().has_inode(ag, *next)) {
        return Err(contradiction(ag, inode, &format!("next unlinked inode {next}")));
    }
    let before = if first == Some(inode) { None } else { Some(before_in_list(t, ino, first)?) };
    let behind = next.unwrap_or(AgIno::NULL);
    match before {
        None => set_first(t, ag, list, behind)?,
        Some(before) => t.set_next_unlinked(before, behind)?,
    }
    if let Some(next) = next {
        t.set_next_unlinked(ino, AgIno::NULL)?;
        t.note_unlinked_before(t.geometry().ino(ag, next), before);
    }
    t.note_unlinked_before(ino, None);
    Ok(())
}

/// The inode in front of one that is not the first of its list. It is known, unless the list is
/// older than the opening of the volume: then the list is walked, once for all its inodes.
fn before_in_list(t: &mut XfsTransaction<'_>, ino: Ino, first: Option<AgIno>) -> Result<Ino> {
    let (ag, inode) = split(t, ino)?;
    if let Some(before) = t.unlinked_before(ino)
        && t.next_unlinked(before)? == Some(inode)
    {
        return Ok(before);
    }
    // The list is no longer than the group has inodes, or it has a loop.
    let (mut at, most) = (first, agi(t, ag)?.count.get());
    for _ in 0..most {
        let Some(before) = at.filter(|before| t.geometry().has_inode(ag, *before)) else { break };
        let before = t.geometry().ino(ag, before);
        let held = t.held_buffers();
        at = t.next_unlinked(before)?;
        if at == Some(inode) {
            return Ok(before);
        }
        // The AGI keeps the list as it is.
        t.release_unchanged(&held);
        if let Some(next) = at {
            t.note_unlinked_before(t.geometry().ino(ag, next), Some(before));
        }
    }
    Err(contradiction(ag, inode, "its list of unlinked inodes does not have it"))
}

/// Empties a list of unlinked inodes that cannot be walked: its inodes are lost until a repair.
pub(crate) fn clear_unlinked(t: &mut XfsTransaction<'_>, ag: AgNumber, list: usize) -> Result<()> {
    set_first(t, ag, list.min(UNLINKED_LISTS - 1), AgIno::NULL)
}

fn set_first(t: &mut XfsTransaction<'_>, ag: AgNumber, list: usize, first: AgIno) -> Result<()> {
    change_agi(t, ag, |agi| {
        *agi.unlinked.get_mut(list)? = first.0.into();
        Some(())
    })
}
