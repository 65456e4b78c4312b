//! The start of an empty log that takes the place of one that is thrown away, and the counters of
//! the superblock then. A log that is replayed is emptied by `complete`.

use std::io;
use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_vfs::{Error, Result, Structure};
use offshoot_xfs_format::log::record::BUFFER_MAX;
use offshoot_xfs_format::log::{BLOCK, XfsLogRecord, XfsLogRing};
use offshoot_xfs_format::superblock::{CRC, XfsSuperblock, XfsSuperblockFields};
use offshoot_xfs_format::{AgNumber, Lsn, csum};

use super::CACHE_BYTES;
use super::log::VolumeLog;
use crate::buffer::{XfsBuffers, malformed, sector_at};
use crate::group;
use crate::log::unmount_record;

/// The record that says that the log is empty.
pub(super) struct UnmountRecord {
    record: XfsLogRecord,
    /// The whole record, packed.
    blocks: Vec<u8>,
}

impl UnmountRecord {
    /// The record for the head of an empty log.
    pub(super) fn new(log: &VolumeLog) -> Result<Self> {
        let head = log.ends.head;
        let last = log.ends.last.as_ref().ok_or_else(|| {
            Error::corrupt(Structure::LogRecord, "a log that is not empty has no last record")
        })?;
        let unit = log.disk.unit;
        let smallest = u32::try_from(unit).unwrap_or(BUFFER_MAX);
        let record = XfsLogRecord {
            lsn: head,
            tail: head,
            previous: Some(last.lsn.block()),
            uuid: log.disk.uuid,
            buffer: last.buffer.max(smallest).min(BUFFER_MAX),
            ..last.clone()
        };
        let (record, blocks) = unmount_record(log.disk.ring, unit, &record).map_err(malformed)?;
        Ok(Self { record, blocks })
    }

    /// The blocks without a record that go behind a head.
    pub(super) fn stamps(
        &self,
        ring: XfsLogRing,
        head: Lsn,
        count: u32,
    ) -> impl Iterator<Item = [u8; BLOCK]> {
        self.record.stamps(ring, head, count)
    }

    /// Writes the record into a log whose free blocks are stamped.
    pub(super) fn store(&self, log: &VolumeLog) -> Result<()> {
        log.disk.write(log.ends.head, &self.blocks)?;
        log.disk.flush()
    }
}

/// The first sector of a volume, and the superblock in it.
pub(super) fn first_superblock(device: &Arc<dyn BlockDevice>) -> Result<(Vec<u8>, XfsSuperblock)> {
    let mut sector = sector_at(&**device, 0)?;
    let superblock = XfsSuperblock::parse(&sector).map_err(malformed)?;
    sector.truncate(superblock.geometry.sector_size());
    Ok((sector, superblock))
}

fn failed(what: &str, device: &dyn BlockDevice, error: io::Error) -> Error {
    Error::io(format!("{what} the superblock of {}", device.name()), error)
}

/// Writes the counters of the superblock, which a running volume does not keep: the sums of those
/// of all groups. Features that only a log in use needs are cleared.
pub(super) fn count(device: &Arc<dyn BlockDevice>) -> Result<()> {
    let (mut sector, XfsSuperblock { mut fields, geometry }) = first_superblock(device)?;
    let groups = 0..geometry.ag_count;
    let buffers = XfsBuffers::new(device.clone(), geometry, CACHE_BYTES);
    let (mut blocks, mut inodes, mut free_inodes) = (0, 0, 0);
    for ag in groups.map(AgNumber) {
        let (count, free) = group::inode_counts(&buffers, ag)?;
        (inodes, free_inodes) = (inodes + count, free_inodes + free);
        blocks += group::free_blocks(&buffers, ag)?;
    }
    fields.icount = inodes.into();
    fields.ifree = free_inodes.into();
    fields.fdblocks = blocks.into();
    fields.log_incompat = 0.into();
    // What lies behind the fields stays.
    let encoded = fields.encode();
    for (to, from) in sector.iter_mut().zip(&encoded).take(size_of::<XfsSuperblockFields>()) {
        *to = *from;
    }
    csum::store(&mut sector, CRC);
    device.write_at(0, &sector).map_err(|error| failed("writing", &**device, error))
}
