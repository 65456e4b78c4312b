//! The ring on the device: where it lies, and reading and writing blocks of it.

use std::io;
use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_vfs::{Error, Result, Structure};
use offshoot_xfs_format::Lsn;
use offshoot_xfs_format::ids::BASIC_BLOCK;
use offshoot_xfs_format::log::ring::IN_FLIGHT;
use offshoot_xfs_format::log::{XfsLogRecord, XfsLogRing};
use offshoot_xfs_format::superblock::XfsSuperblock;
use uuid::Uuid;

use crate::buffer::malformed;

/// The log of a volume on its device.
#[derive(Clone, Debug)]
pub(crate) struct LogDisk {
    pub(crate) device: Arc<dyn BlockDevice>,
    /// The first byte of the ring.
    start: u64,
    pub(crate) ring: XfsLogRing,
    pub(crate) uuid: Uuid,
    /// The bytes that each record fills a multiple of.
    pub(crate) unit: usize,
}

impl LogDisk {
    /// The log of the volume on `device`.
    pub(crate) fn new(device: &Arc<dyn BlockDevice>, superblock: &XfsSuperblock) -> Result<Self> {
        let XfsSuperblock { fields, geometry } = superblock;
        let ring = XfsLogRing::of(geometry).map_err(malformed)?;
        let start = geometry
            .place_of(geometry.log_start)
            .ok_or_else(|| Error::corrupt(Structure::Superblock, "the log is not in the volume"))?;
        let (uuid, unit) = (Uuid::from_bytes(fields.uuid), fields.log_unit());
        Ok(Self { device: device.clone(), start: start.bytes(), ring, uuid, unit })
    }

    /// Fills `bytes` from a block of the ring on, not over its end.
    pub(crate) fn read(&self, block: u32, bytes: &mut [u8]) -> Result<()> {
        let at = self.start + u64::from(block) * BASIC_BLOCK;
        let len = bytes.len();
        self.device.read_at(at, bytes).map_err(|error| {
            let name = self.device.name();
            Error::io(format!("reading {len} bytes of the log at {at} of {name}"), error)
        })
    }

    /// Writes whole blocks from `at` on, over the end of the ring when they reach it.
    pub(crate) fn write(&self, at: Lsn, blocks: &[u8]) -> Result<()> {
        let before_end = u64::from(self.ring.blocks().saturating_sub(at.block())) * BASIC_BLOCK;
        let middle = usize::try_from(before_end).unwrap_or(usize::MAX).min(blocks.len());
        let (first, second) = blocks.split_at(middle);
        let place = self.start + u64::from(at.block()) * BASIC_BLOCK;
        let write = |place, blocks: &[u8]| {
            self.device.write_at(place, blocks).map_err(|error| self.failed("writing", error))
        };
        write(place, first)?;
        if second.is_empty() { Ok(()) } else { write(self.start, second) }
    }

    /// Makes everything durable that was written to the device.
    pub(crate) fn flush(&self) -> Result<()> {
        self.device.flush().map_err(|error| self.failed("flushing", error))
    }

    /// Stamps the free blocks behind `head` with headers of the older cycle, without a body: as
    /// many as can be in flight. What a crash left there may have the cycle of the head, and no
    /// later search takes it for a part of the log then. Durable when this returns.
    pub(crate) fn stamp(&self, last: &XfsLogRecord, tail: Lsn, head: Lsn) -> Result<()> {
        let free = self.ring.free(tail, head).unwrap_or(0);
        // In a log that is hardly larger than that, the last record stays.
        let others = self.ring.blocks().saturating_sub(last.block_count());
        let count = free.min(IN_FLIGHT).min(others);
        let stamps: Vec<_> = last.stamps(self.ring, head, count).flatten().collect();
        self.write(head, &stamps)?;
        self.flush()
    }

    fn failed(&self, what: &str, error: io::Error) -> Error {
        Error::io(format!("{what} the log on {}", self.device.name()), error)
    }
}
