//! The end of a recovery to disk: the counters of the superblock, and an empty log.
//!
//! ```text
//! head, 3:100      | stamps: headers of the older cycle, without a body, as far as the tail
//!                  |         or the records that can be in flight                   flush
//! then from there  | unmount record | stamps                                        flush
//! ```
//!
//! What a crash left behind the head may have the cycle of the head. The stamps hide it, so that no
//! later search takes it for a part of the log. The log is dirty until the unmount record is whole,
//! and it is one write into free blocks. A cut before that lets the recovery begin again.

use std::io;
use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_vfs::{Code, Error, Result, Structure};
use offshoot_xfs_format::log::record::BUFFER_MAX;
use offshoot_xfs_format::log::{BLOCK, XfsLogRecord, XfsLogRing};
use offshoot_xfs_format::superblock::{CRC, XfsSuperblock, XfsSuperblockFields};
use offshoot_xfs_format::{AgNumber, Lsn, csum};

use super::log::VolumeLog;
use super::{CACHE_BYTES, NEXT_STEP};
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
    /// The record for the head of a log, which must have room for it.
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
        let count = record.block_count();
        if log.disk.ring.free(log.ends.tail, head).is_none_or(|free| free <= count) {
            let what = format!(
                "a log without room for the {count} blocks of an unmount record at {head}: \
                 {NEXT_STEP}"
            );
            return Err(Error::unsupported(Code::LogNotReplayed, what));
        }
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

    /// Empties the log. Everything that was replayed is durable.
    pub(super) fn write(&self, log: &VolumeLog) -> Result<()> {
        let head = log.ends.head;
        log.disk.stamp(&self.record, log.ends.tail, head)?;
        self.store(log)
    }

    /// Writes the record alone, into a log whose free blocks are stamped.
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
