//! Finding the superblock.
//!
//! That of group 0 is the one that counts. When it is damaged, the volume opens only if all others
//! agree, so that none of them is of another age, and if the AGF of group 0 leads to them, so that
//! they are of this volume. A first sector without the magic number is no damage: then another
//! program has made something else there.
//!
//! The others have no counters, and only some know the root directory.

use offshoot_device::BlockDevice;
use offshoot_vfs::{Code, Error, Malformed, Result};
use offshoot_xfs_format::group::Agf;
use offshoot_xfs_format::superblock::{MAGIC, XfsSuperblock, XfsSuperblockFields};
use offshoot_xfs_format::{AgNumber, U64, XfsGeometry};

use crate::buffer::sector_at;
use crate::report::{XfsReport, XfsReporter, tell};

/// The bytes of sectors, as powers of two.
const SECTOR_LOGS: std::ops::RangeInclusive<u8> = 9..=15;

/// The bytes of blocks, as powers of two.
const BLOCK_LOGS: std::ops::RangeInclusive<u8> = 9..=16;

/// A superblock, and whether it is that of group 0, with counters.
#[derive(Debug)]
pub(super) struct VolumeSuperblock {
    pub(super) superblock: XfsSuperblock,
    pub(super) is_first: bool,
}

/// The superblock of the volume on `device`.
pub(super) fn read(
    device: &dyn BlockDevice,
    reporter: Option<&XfsReporter>,
) -> Result<VolumeSuperblock> {
    let bytes = sector_at(device, 0)?;
    if !bytes.starts_with(&MAGIC) {
        let what = format!("{} holds no XFS volume", device.name());
        return Err(Error::unsupported(Code::NoVolume, what));
    }
    let problem = match XfsSuperblock::parse(&bytes) {
        Ok(superblock) => return Ok(VolumeSuperblock { superblock, is_first: true }),
        Err(problem) => problem,
    };
    let (group, superblock) = copies(device)?.ok_or_else(|| {
        let Malformed { structure, problem } = &problem;
        let text = format!(
            "{}: {problem}; the other groups give no safe copy, so run xfs_repair on a copy of it",
            device.name()
        );
        Error::corrupt(*structure, text)
    })?;
    let problem = problem.problem.into_owned();
    tell(reporter, &XfsReport::SuperblockCopy { group, problem });
    Ok(VolumeSuperblock { superblock, is_first: false })
}

/// The superblock that all groups but the first have, if they agree, with the group that knows the
/// root directory.
fn copies(device: &dyn BlockDevice) -> Result<Option<(u32, XfsSuperblock)>> {
    let start = sector_at(device, 0)?;
    for sector_log in SECTOR_LOGS {
        let agf = start.get(1 << sector_log..).unwrap_or_default();
        let Some(&length) = agf.get(12..).and_then(|rest| rest.first_chunk::<4>()) else { break };
        if !agf.starts_with(b"XAGF") {
            continue;
        }
        let length = u32::from_be_bytes(length);
        for block_log in BLOCK_LOGS {
            let bytes = sector_at(device, u64::from(length) << block_log)?;
            let Ok(second) = XfsSuperblock::parse(&bytes) else { continue };
            let geometry = &second.geometry;
            let is_meant = (geometry.ag_blocks, geometry.block_log, geometry.sector_log)
                == (length, block_log, sector_log);
            if is_meant && has_agf(agf, geometry) {
                return agreed(device, second);
            }
        }
    }
    Ok(None)
}

/// Whether the AGF of group 0 is one of this volume.
fn has_agf(agf: &[u8], geometry: &XfsGeometry) -> bool {
    let sector = agf.get(..geometry.sector_size()).unwrap_or_default();
    Agf::parse(sector, geometry, AgNumber(0)).is_ok()
}

/// `second`, with the root directory, if all groups behind it say the same.
fn agreed(device: &dyn BlockDevice, second: XfsSuperblock) -> Result<Option<(u32, XfsSuperblock)>> {
    let XfsSuperblock { mut fields, geometry } = second;
    let features = |fields: &XfsSuperblockFields| {
        let words = [fields.features2, fields.compat, fields.ro_compat, fields.incompat];
        (fields.versionnum, words, fields.uuid)
    };
    let mut root = None;
    for group in 1..geometry.ag_count {
        let block = u64::from(group) * u64::from(geometry.ag_blocks);
        let bytes = sector_at(device, block << geometry.block_log)?;
        let Ok(other) = XfsSuperblock::parse(&bytes) else { return Ok(None) };
        if other.geometry != geometry || features(&other.fields) != features(&fields) {
            return Ok(None);
        }
        match (root, other.fields.root()) {
            (None, Some(ino)) => root = Some((group, ino)),
            (Some((_, known)), Some(ino)) if known != ino => return Ok(None),
            _ => {}
        }
    }
    let Some((group, ino)) = root else { return Ok(None) };
    fields.rootino = U64::new(ino.0);
    // mkfs clears this mark in group 0 alone.
    fields.inprogress = 0;
    Ok(Some((group, XfsSuperblock { fields, geometry })))
}
