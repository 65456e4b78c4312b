//! A new log in the place of one that is thrown away.

use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_vfs::{Error, Result};
use offshoot_xfs_format::Lsn;
use offshoot_xfs_format::superblock::XfsSuperblock;

use super::finish::{self, UnmountRecord};
use super::log::VolumeLog;

/// The blocks of a log that one request writes.
const STAMPS_A_WRITE: usize = 2048;

/// An empty log that is not written yet.
pub(crate) struct EmptyLog {
    log: VolumeLog,
    unmount: UnmountRecord,
}

impl EmptyLog {
    /// One that begins with this cycle.
    pub(crate) fn new(
        device: &Arc<dyn BlockDevice>,
        superblock: &XfsSuperblock,
        cycle: u32,
    ) -> Result<Self> {
        let log = VolumeLog::empty(device, superblock, Lsn::new(cycle, 0))?;
        let unmount = UnmountRecord::new(&log)?;
        Ok(Self { log, unmount })
    }

    /// Where it begins.
    pub(crate) fn start(&self) -> Lsn {
        self.log.ends.head
    }

    /// Writes it over the old one, after the counters of the superblock, and makes it durable.
    /// Returns why the counters could not be summed.
    ///
    /// When this is cut, the log is the old one, or one that nothing replays.
    pub(crate) fn write(&self) -> Result<Option<Error>> {
        let (ring, start) = (self.log.disk.ring, self.start());
        let mut stamps = self.unmount.stamps(ring, start, ring.blocks()).peekable();
        let mut at = start;
        while stamps.peek().is_some() {
            let blocks: Vec<_> = stamps.by_ref().take(STAMPS_A_WRITE).flatten().collect();
            self.log.disk.write(at, &blocks)?;
            at = ring.advance(at, u32::try_from(STAMPS_A_WRITE).unwrap_or(u32::MAX));
        }
        self.log.disk.flush()?;
        let counted = finish::count(&self.log.disk.device);
        let problem = match counted {
            Err(problem @ Error::Corrupt(_)) => Some(problem),
            counted => counted.map(|()| None)?,
        };
        self.log.disk.flush()?;
        self.unmount.store(&self.log)?;
        Ok(problem)
    }
}
