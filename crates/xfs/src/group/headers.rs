//! The headers of a group, as a transaction reads and changes them.

use offshoot_vfs::{Error, Result, Structure};
use offshoot_xfs_format::group::{Agf, Agfl, AgflHeader, Agi};
use offshoot_xfs_format::ids::BASIC_BLOCK;
use offshoot_xfs_format::{AgNumber, BasicBlock};
use zerocopy::IntoBytes;

use crate::buffer::{BufferRole, DiskRun, malformed};
use crate::trans::XfsTransaction;

/// The header sector at `offset`.
fn run(t: &XfsTransaction<'_>, offset: u64) -> DiskRun {
    DiskRun { at: BasicBlock(offset / BASIC_BLOCK), bytes: t.geometry().sector_size() }
}

/// Where a group has its AGF.
pub(super) fn agf_run(t: &XfsTransaction<'_>, ag: AgNumber) -> DiskRun {
    run(t, Agf::offset(t.geometry(), ag))
}

/// Locks the AGI or the AGF of a group. The transaction waits for it only in the order of groups.
///
/// # Errors
/// `EAGAIN` when another transaction has it, and waiting for that may never end.
pub(super) fn lock_in_order(t: &mut XfsTransaction<'_>, role: BufferRole) -> Result<()> {
    let run = match role {
        BufferRole::Inodes(ag) => agi_run(t, ag),
        BufferRole::FreeSpace(ag) => agf_run(t, ag),
        _ => return Ok(()),
    };
    t.read(run, role).map(drop)
}

/// The AGF of a group. Locks it.
pub(super) fn agf(t: &mut XfsTransaction<'_>, ag: AgNumber) -> Result<Agf> {
    let run = agf_run(t, ag);
    let bytes = t.read(run, BufferRole::FreeSpace(ag))?;
    Agf::view(bytes).copied().map_err(malformed)
}

/// Changes the AGF of a group, and logs what differs.
pub(super) fn change_agf(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    change: impl FnOnce(&mut Agf) -> Option<()>,
) -> Result<()> {
    let mut fields = agf(t, ag)?;
    change(&mut fields).ok_or_else(|| miscounted(Structure::GroupFreeSpace, ag))?;
    let run = run(t, Agf::offset(t.geometry(), ag));
    t.put(run.at, 0, fields.as_bytes())
}

/// Where a group has its AGI.
pub(super) fn agi_run(t: &XfsTransaction<'_>, ag: AgNumber) -> DiskRun {
    run(t, Agi::offset(t.geometry(), ag))
}

/// The AGI of a group. Locks it.
pub(super) fn agi(t: &mut XfsTransaction<'_>, ag: AgNumber) -> Result<Agi> {
    let run = agi_run(t, ag);
    let bytes = t.read(run, BufferRole::Inodes(ag))?;
    Agi::view(bytes).copied().map_err(malformed)
}

/// Changes the AGI of a group, and logs what differs.
pub(super) fn change_agi(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    change: impl FnOnce(&mut Agi) -> Option<()>,
) -> Result<()> {
    let mut fields = agi(t, ag)?;
    change(&mut fields).ok_or_else(|| miscounted(Structure::GroupInodes, ag))?;
    let run = run(t, Agi::offset(t.geometry(), ag));
    t.put(run.at, 0, fields.as_bytes())
}

/// Reads place `index` of the ring of the free list. Locks the AGFL.
pub(super) fn listed(t: &mut XfsTransaction<'_>, ag: AgNumber, index: u32) -> Result<u32> {
    let run = run(t, Agfl::offset(t.geometry(), ag));
    let bytes = t.read(run, BufferRole::FreeList(ag))?;
    let place = bytes.get(listed_at(index)..).and_then(<[u8]>::first_chunk);
    let place = place.ok_or_else(|| miscounted(Structure::GroupFreeList, ag))?;
    Ok(u32::from_be_bytes(*place))
}

/// Writes place `index` of the ring of the free list.
pub(super) fn set_listed(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    index: u32,
    block: u32,
) -> Result<()> {
    let run = run(t, Agfl::offset(t.geometry(), ag));
    t.read(run, BufferRole::FreeList(ag))?;
    t.put(run.at, listed_at(index), &block.to_be_bytes())
}

fn listed_at(index: u32) -> usize {
    size_of::<AgflHeader>() + index as usize * size_of::<u32>()
}

/// The error about a counter that would leave its range.
#[cold]
pub(super) fn miscounted(structure: Structure, ag: AgNumber) -> Error {
    Error::corrupt(structure, format!("group {ag}: a counter does not agree with its tree"))
}

/// Adds to a counter of a header; `None` when it would leave its range.
pub(super) fn add(counter: &mut offshoot_xfs_format::U32, change: i64) -> Option<()> {
    let sum = i64::from(counter.get()).checked_add(change)?;
    *counter = u32::try_from(sum).ok()?.into();
    Some(())
}
