//! Makes volumes larger, while no other program uses them.
//!
//! The device becomes longer first. Two steps follow, each of which is one transaction and leaves a
//! whole volume, so that a power cut between any two writes leaves the old size, the size between
//! the steps or the new one:
//!
//! ```text
//! before  | group 0 | group 1 | gr. 2 |
//! step 1  | group 0 | group 1 | group 2 |              the last group gets the length of the others
//! step 2  | group 0 | group 1 | group 2 | group 3 | 4 |
//! ```
//!
//! 1. One transaction changes the headers of the last group, adds the blocks to its free space, and
//!    changes the size in the superblock.
//! 2. The new groups are written first, behind the end of the volume, where nothing refers to them,
//!    and made durable. Then a transaction changes the superblock alone.
//!
//! The copies of the superblock are not in the log. They are written at the end, and those that a
//! power cut has left with an old size at the end of the next call.
//!
//! Blocks behind the last group that would be a group of less than 64 blocks are left out, as the
//! kernel does it.

use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_kit::counter::WriteStop;
use offshoot_kit::device_size::lengthen;
use offshoot_kit::new_volume;
use offshoot_vfs::{Code, Errno, Error, Result};
use offshoot_xfs_format::superblock::{LEAST_AG_BLOCKS, XfsSuperblock, XfsSuperblockFields};
use offshoot_xfs_format::{AgBlock, AgNumber, XfsGeometry};

use crate::buffer::{XfsBuffers, malformed, sector_at};
use crate::group;
use crate::log::{LogDisk, XfsLog, XfsLogOptions};
use crate::mkfs::write_empty_groups;
use crate::options::XfsOptions;
use crate::recover::VolumeLog;
use crate::trans::XfsTransactionKind;
use crate::volume;

/// How a volume has grown, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct XfsGrowth {
    /// The size before.
    pub old_bytes: u64,
    /// The size now.
    pub bytes: u64,
}

/// Makes the volume on `device` so many bytes long, less what is no whole group at its end. The
/// device becomes longer first, if it must. A volume that was not unmounted is recovered first.
/// Everything is durable when the call returns.
///
/// # Errors
/// As [`XfsVolume::open_writable`](crate::XfsVolume::open_writable); [`Error::Unsupported`] also
/// when the volume has more bytes, because XFS cannot shrink, and for a device whose size is fixed.
pub fn grow_xfs(
    device: &Arc<dyn BlockDevice>,
    bytes: u64,
    options: &XfsOptions,
) -> Result<XfsGrowth> {
    let (mut found, mut log) = open(device, options)?;
    let size =
        |superblock: &XfsSuperblock| superblock.geometry.blocks << superblock.geometry.block_log;
    let old_bytes = size(&found);
    let target = blocks_of(&found.geometry, bytes)?;
    lengthen(&**device, target << found.geometry.block_log)?;
    let full = u64::from(found.geometry.ag_count) * u64::from(found.geometry.ag_blocks);
    for blocks in [target.min(full), target] {
        if blocks > found.geometry.blocks {
            grow_to(device, &found, &log, blocks, options)?;
            (found, log) = open(device, options)?;
        }
    }
    mend_copies(device, &found)?;
    Ok(XfsGrowth { old_bytes, bytes: size(&found) })
}

/// The superblock and the log of a volume, which is recovered.
fn open(device: &Arc<dyn BlockDevice>, options: &XfsOptions) -> Result<(XfsSuperblock, VolumeLog)> {
    let (opened, log) = volume::open_writable(device.clone(), options)?;
    Ok((opened.superblock, log))
}

/// The blocks of a volume of so many bytes.
fn blocks_of(geometry: &XfsGeometry, bytes: u64) -> Result<u64> {
    let blocks = bytes >> geometry.block_log;
    if blocks < geometry.blocks {
        let what = "making an XFS volume smaller: copy its files to a smaller one";
        return Err(Error::unsupported(Code::NotInFormat, what));
    }
    let rest = blocks % u64::from(geometry.ag_blocks);
    let is_group = rest >= LEAST_AG_BLOCKS.into();
    Ok(if is_group { blocks } else { (blocks - rest).max(geometry.blocks) })
}

/// One step: new blocks in the last group, or new groups behind it.
fn grow_to(
    device: &Arc<dyn BlockDevice>,
    old: &XfsSuperblock,
    log: &VolumeLog,
    blocks: u64,
    options: &XfsOptions,
) -> Result<()> {
    let new = with_blocks(old, blocks)?;
    let groups = old.geometry.ag_count;
    if new.geometry.ag_count > groups {
        write_empty_groups(&**device, &new, groups)?;
    }
    let stop = WriteStop::new(None);
    let buffers = Arc::new(XfsBuffers::new(device.clone(), new.geometry.clone(), CACHE_BYTES));
    let disk = LogDisk::new(device, &new)?;
    let is_in_line = options.is_reproducible;
    let log_options = XfsLogOptions { is_in_line, ..XfsLogOptions::default() };
    let log = XfsLog::start(disk, &log.ends, &[], &stop, &log_options)?;
    let transactions = group::begin_transactions(buffers, log, &new, &stop)?;
    let mut t = transactions.begin_step(XfsTransactionKind::Truncate, 0)?;
    let last = AgNumber(groups - 1);
    let (from, to) = (old.geometry.ag_len(last), new.geometry.ag_len(last));
    if to > from {
        group::lengthen(&mut t, last, from, to)?;
    }
    t.change_superblock(|fields| set_size(fields, &new.geometry))?;
    t.commit()?;
    transactions.unmount()
}

/// How much of a volume is cached while it grows, in bytes.
const CACHE_BYTES: u64 = 8 << 20;

/// The superblock of the same volume with so many blocks, proved like any other.
fn with_blocks(old: &XfsSuperblock, blocks: u64) -> Result<XfsSuperblock> {
    let groups = blocks.div_ceil(old.geometry.ag_blocks.into());
    let ag_count = u32::try_from(groups).map_err(|_| {
        let what = format!("{groups} allocation groups, which is more than XFS has numbers for");
        Error::posix(Errno::INVAL, what)
    })?;
    let mut fields = old.fields;
    set_size(&mut fields, &XfsGeometry { blocks, ag_count, ..old.geometry.clone() });
    XfsSuperblock::parse(&fields.encode()).map_err(malformed)
}

fn set_size(fields: &mut XfsSuperblockFields, geometry: &XfsGeometry) {
    fields.dblocks = geometry.blocks.into();
    fields.agcount = geometry.ag_count.into();
}

/// Writes `superblock` to all other groups whose copy is of another size, or none.
fn mend_copies(device: &Arc<dyn BlockDevice>, superblock: &XfsSuperblock) -> Result<()> {
    let geometry = &superblock.geometry;
    let bytes = superblock.fields.encode();
    for ag in (1..geometry.ag_count).map(AgNumber) {
        let place = geometry.place(ag, AgBlock(0)).bytes();
        let copy = sector_at(&**device, place)?;
        if XfsSuperblock::parse(&copy).is_ok_and(|copy| copy.geometry == *geometry) {
            continue;
        }
        new_volume::write(&**device, place, &bytes)?;
    }
    new_volume::flush(&**device)
}
