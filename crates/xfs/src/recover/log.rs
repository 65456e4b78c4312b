//! The log of a volume: where it lies, where it ends, and the transactions in it.

use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_vfs::{Code, Error, Malformed, Result, Structure};
use offshoot_xfs_format::Lsn;
use offshoot_xfs_format::log::ends::{self, read_record};
use offshoot_xfs_format::log::record::XfsLogChecksum;
use offshoot_xfs_format::log::{XfsCheckpoint, XfsCheckpoints, XfsLogEnds, XfsLogRecord, op};
use offshoot_xfs_format::superblock::XfsSuperblock;

use super::NEXT_STEP;
use crate::buffer::malformed;
use crate::log::LogDisk;

/// The log of a volume.
#[derive(Debug)]
pub(crate) struct VolumeLog {
    pub(super) disk: LogDisk,
    has_checksums: bool,
    pub(crate) ends: XfsLogEnds,
}

/// An error of reading the log.
struct LogFailure(Error);

impl From<Malformed> for LogFailure {
    fn from(problem: Malformed) -> Self {
        Self(malformed(problem))
    }
}

impl VolumeLog {
    /// Finds the ends of the log of the volume on `device`.
    pub(crate) fn find(device: &Arc<dyn BlockDevice>, superblock: &XfsSuperblock) -> Result<Self> {
        let XfsSuperblock { fields, geometry } = superblock;
        let log = Self::locate(device, superblock).map_err(unusable)?;
        let changed = Lsn(fields.lsn.get());
        let head = log.ends.head;
        if geometry.has_checksums() && changed != Lsn::NONE && changed > head {
            let problem = format!("it ends at {head}, and the superblock is of {changed}");
            return Err(unusable(Error::corrupt(Structure::LogRecord, problem)));
        }
        Ok(log)
    }

    /// The log of the volume on `device` as if it were empty and ended at `head`.
    pub(super) fn empty(
        device: &Arc<dyn BlockDevice>,
        superblock: &XfsSuperblock,
        head: Lsn,
    ) -> Result<Self> {
        let disk = LogDisk::new(device, superblock)?;
        let last = Some(XfsLogRecord::first(head, disk.uuid));
        let ends = XfsLogEnds { head, tail: head, is_clean: true, last, is_torn: false };
        Ok(Self { disk, has_checksums: superblock.geometry.has_checksums(), ends })
    }

    fn locate(device: &Arc<dyn BlockDevice>, superblock: &XfsSuperblock) -> Result<Self> {
        let disk = LogDisk::new(device, superblock)?;
        let mut read = |block: u32, bytes: &mut [u8]| disk.read(block, bytes).map_err(LogFailure);
        let ends = ends::find(disk.ring, disk.uuid, &mut read).map_err(|failure| failure.0)?;
        Ok(Self { disk, has_checksums: superblock.geometry.has_checksums(), ends })
    }

    /// Calls `visit` with the transactions from the tail to the head, in the order of their commit
    /// ops. Those that are open at one time may take `most_bytes` of memory.
    pub(crate) fn each_checkpoint(
        &self,
        most_bytes: u64,
        visit: &mut dyn FnMut(&XfsCheckpoint) -> Result<()>,
    ) -> Result<()> {
        let (mut at, head) = (self.ends.tail, self.ends.head);
        let mut open = XfsCheckpoints::new(self.disk.ring);
        let mut buffer = Vec::new();
        while at != head {
            let bad = |problem: Malformed| in_log(at, malformed(problem));
            let mut read =
                |block: u32, bytes: &mut [u8]| self.disk.read(block, bytes).map_err(LogFailure);
            let (record, checksum) = read_record(self.disk.ring, at, &mut read, &mut buffer)
                .map_err(|failure| failure.0)?
                .map_err(bad)?;
            let is_unproved = checksum == XfsLogChecksum::Missing && self.has_checksums;
            if checksum == XfsLogChecksum::Wrong || is_unproved {
                let problem = "its checksum is wrong or missing";
                return Err(bad(Malformed::new(Structure::LogRecord, problem)));
            }
            record.check_readable(self.disk.uuid).map_err(bad)?;
            let count = record.block_count();
            if self.disk.ring.distance(at, head).is_none_or(|rest| rest < count) {
                let problem = format!("it reaches over the head at {head}");
                return Err(bad(Malformed::new(Structure::LogRecord, problem)));
            }
            for op in op::ops(record.unpack(&mut buffer).map_err(bad)?, record.ops) {
                let whole = op.and_then(|op| open.add(record.lsn, &op)).map_err(bad)?;
                if let Some(checkpoint) = whole {
                    visit(&checkpoint)?;
                }
                if open.byte_count() > most_bytes {
                    return Err(in_log(at, too_much("open transactions", most_bytes)));
                }
            }
            at = self.disk.ring.advance(at, count);
        }
        Ok(())
    }
}

/// The error about a log that takes more memory than the options allow.
pub(super) fn too_much(what: &str, most_bytes: u64) -> Error {
    let what = format!("{what} that take more than {most_bytes} bytes of memory");
    Error::unsupported(Code::LogNotReplayed, what)
}

/// Says that the log cannot be used, and how to go on.
fn unusable(mut error: Error) -> Error {
    if let Error::Corrupt(corrupt) = &mut error {
        corrupt.problem = format!("{}; the log cannot be used: {NEXT_STEP}", corrupt.problem);
    }
    error
}

/// Says where in the log the cause of an error is, and how to go on. Code and place stay.
pub(super) fn in_log(lsn: Lsn, mut error: Error) -> Error {
    let place = format!("replaying the log at {lsn}: ");
    let behind = |text: &str| format!("{place}{text}: {NEXT_STEP}");
    match &mut error {
        Error::Corrupt(corrupt) => corrupt.problem = behind(&corrupt.problem),
        Error::Unsupported { what, .. } => *what = behind(what),
        Error::Io { what, code, .. } => {
            // The log may be sound.
            *what = format!("{place}{what}");
            *code = Code::LogNotReplayed;
        }
        Error::Posix { .. } => {}
    }
    error
}
