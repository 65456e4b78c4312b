//! The last group of a volume gets longer.

use offshoot_vfs::Result;
use offshoot_vfs::Structure;
use offshoot_xfs_format::AgNumber;

use super::free::{FreedFrom, free_extent};
use super::headers::{agf, agi, change_agf, change_agi, miscounted};
use crate::trans::{AgExtent, XfsTransaction};

/// Adds free blocks to the end of the last group, which had `from` of them, so that it has `to`.
/// Locks its headers.
pub(crate) fn lengthen(t: &mut XfsTransaction<'_>, ag: AgNumber, from: u32, to: u32) -> Result<()> {
    if agi(t, ag)?.length.get() != from {
        return Err(miscounted(Structure::GroupInodes, ag));
    }
    if agf(t, ag)?.length.get() != from {
        return Err(miscounted(Structure::GroupFreeSpace, ag));
    }
    change_agi(t, ag, |agi| {
        agi.length = to.into();
        Some(())
    })?;
    change_agf(t, ag, |agf| {
        agf.length = to.into();
        Some(())
    })?;
    free_extent(t, ag, AgExtent::new(from, to - from), FreedFrom::Nobody)
}
