//! Writes a new volume to its device.
//!
//! ```text
//! first sector | barrier | wipe | barrier | log, groups | barrier
//!     | copies of the superblock | barrier | superblock | barrier
//! ```
//!
//! Wiping skips pieces that are zero already, so an image stays as sparse as it was. The log is
//! zeroed, because recovery looks at all of it. Blocks that nothing owns keep what they hold.

use offshoot_device::BlockDevice;
use offshoot_kit::new_volume::{flush, wipe, write, zero};
use offshoot_vfs::Result;
use offshoot_xfs_format::log::{XfsLogRecord, XfsLogRing};
use offshoot_xfs_format::superblock::{MOST_SECTOR_BYTES, XfsSuperblock, XfsSuperblockFields};
use offshoot_xfs_format::{AgBlock, AgNumber, Ino};
use uuid::Uuid;

use super::group::NewXfsGroup;
use super::layout::{LEAST_GROUP, NewXfsLayout};
use super::options::XfsMkfsOptions;
use crate::buffer::{malformed, sector_at};
use crate::log::unmount_record;

/// The version of the log.
const LOG_VERSION: u32 = 2;

/// The byte order of little-endian Linux.
const LITTLE_ENDIAN: u32 = 1;

/// The least log buffer, in bytes.
const LEAST_BUFFER: u32 = 32 << 10;

/// Writes the volume.
pub(super) fn volume(
    device: &dyn BlockDevice,
    options: &XfsMkfsOptions,
    layout: &NewXfsLayout,
) -> Result<()> {
    let old = old_superblock(device)?;
    // An old superblock must not outlive what it leads to.
    zero(device, 0..device.size_bytes().min(MOST_SECTOR_BYTES))?;
    flush(device)?;
    wipe(device)?;
    flush(device)?;
    if let Some(old) = old {
        wipe_groups(device, &old)?;
    }
    let (ag, start) = layout.log;
    let log = layout.geometry.place(ag, start).bytes();
    let log_bytes = u64::from(layout.geometry.log_blocks) << layout.geometry.block_log;
    zero(device, log..log + log_bytes)?;
    write(device, log, &first_record(layout)?)?;

    let mut superblock = layout.fields;
    let (mut inodes, mut free_inodes, mut free, mut chunk) = (0_u64, 0_u64, 0, 0);
    for ag in (0..layout.geometry.ag_count).map(AgNumber) {
        let group = NewXfsGroup::of(layout, ag);
        let pieces = group.pieces(layout)?;
        for (place, bytes) in pieces.into_iter().chain(group.inodes_piece(layout, options)?) {
            write(device, place, &bytes)?;
        }
        let (group_inodes, group_free) = group.inodes(layout);
        inodes += u64::from(group_inodes);
        free_inodes += u64::from(group_free);
        free += group.free_blocks();
        chunk += u64::from(group.chunk_blocks());
        if let Some(root) = group.root(layout) {
            superblock.rootino = root.0.into();
        }
    }
    flush(device)?;

    // The copies are of the time before the root chunk was made; two know the root directory.
    let copy = XfsSuperblockFields {
        inprogress: 1,
        fdblocks: (free + chunk).into(),
        rootino: Ino::NULL.0.into(),
        ..superblock
    };
    let last = layout.geometry.ag_count - 1;
    for ag in (1..=last).rev() {
        let knows_root = ag == last || ag == last / 2;
        let rootino = if knows_root { superblock.rootino } else { copy.rootino };
        let place = layout.geometry.place(AgNumber(ag), AgBlock(0)).bytes();
        write(device, place, &XfsSuperblockFields { rootino, ..copy }.encode())?;
    }
    let root = superblock.rootino.get();
    superblock.rbmino = (root + 1).into();
    superblock.rsumino = (root + 2).into();
    superblock.icount = inodes.into();
    superblock.ifree = free_inodes.into();
    superblock.fdblocks = free.into();
    flush(device)?;
    write(device, 0, &superblock.encode())?;
    flush(device)
}

/// The record of an unmount, the only one of a new log.
fn first_record(layout: &NewXfsLayout) -> Result<Vec<u8>> {
    let record = XfsLogRecord {
        lsn: XfsLogRing::NEVER_WRITTEN,
        tail: XfsLogRing::NEVER_WRITTEN,
        version: LOG_VERSION,
        len: 0,
        previous: None,
        ops: 1,
        byte_order: LITTLE_ENDIAN,
        uuid: Uuid::from_bytes(layout.fields.uuid),
        buffer: layout.fields.logsunit.get().max(LEAST_BUFFER),
    };
    let ring = XfsLogRing::of(&layout.geometry).map_err(malformed)?;
    let (_, blocks) = unmount_record(ring, layout.fields.log_unit(), &record).map_err(malformed)?;
    Ok(blocks)
}

/// The superblock of the volume that the device holds, if it holds one.
fn old_superblock(device: &dyn BlockDevice) -> Result<Option<XfsSuperblock>> {
    Ok(XfsSuperblock::parse(&sector_at(device, 0)?).ok())
}

/// Zeroes the superblocks of all groups of an old volume but the first, from which a repair could
/// make it up again. No `mkfs.xfs` of today makes groups below 16 MiB. A superblock that has
/// smaller ones may be made up, and could cost any number of writes.
fn wipe_groups(device: &dyn BlockDevice, old: &XfsSuperblock) -> Result<()> {
    let geometry = &old.geometry;
    if u64::from(geometry.ag_blocks) << geometry.block_log < LEAST_GROUP {
        return Ok(());
    }
    for ag in (1..geometry.ag_count).map(AgNumber) {
        let start = geometry.place(ag, AgBlock(0)).bytes();
        let end = start + geometry.sector_size() as u64;
        if end > device.size_bytes() {
            break;
        }
        zero(device, start..end)?;
    }
    Ok(())
}
