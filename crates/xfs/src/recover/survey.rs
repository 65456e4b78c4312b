//! The first pass: which buffers are cancelled, and which intents have no end.

use offshoot_vfs::Result;
use offshoot_xfs_format::log::items::XfsBufferFlags;
use offshoot_xfs_format::log::{XfsCheckpoint, XfsLogItem};
use offshoot_xfs_format::superblock::XfsSuperblock;

use super::cancel::{CANCEL_COST, CancelledBuffers};
use super::log::{VolumeLog, in_log, too_much};
use super::pending::PendingIntents;
use crate::buffer::malformed;

/// What the first pass learned.
pub(super) struct LogSurvey {
    pub(super) cancels: CancelledBuffers,
    pub(super) intents: PendingIntents,
}

/// Surveys a log. What is learned may take `most_bytes` of memory.
pub(super) fn survey(
    superblock: &XfsSuperblock,
    log: &VolumeLog,
    most_bytes: u64,
) -> Result<LogSurvey> {
    let cancels = CancelledBuffers::new(&superblock.fields, &superblock.geometry);
    let mut survey = LogSurvey { cancels, intents: PendingIntents::default() };
    log.each_checkpoint(most_bytes, &mut |checkpoint| {
        survey.transaction(checkpoint, most_bytes).map_err(|error| in_log(checkpoint.lsn, error))
    })?;
    Ok(survey)
}

impl LogSurvey {
    fn transaction(&mut self, checkpoint: &XfsCheckpoint, most_bytes: u64) -> Result<()> {
        for regions in checkpoint.items() {
            let item = XfsLogItem::parse(regions).map_err(malformed)?;
            if let XfsLogItem::Buffer(buffer) = &item
                && buffer.flags.contains(XfsBufferFlags::CANCEL)
            {
                self.cancels.add(buffer.place, buffer.blocks.into());
            }
            self.intents.add(checkpoint.lsn, &item);
            self.check_memory(most_bytes)?;
        }
        Ok(())
    }

    fn check_memory(&self, most_bytes: u64) -> Result<()> {
        let taken = self.cancels.len() as u64 * CANCEL_COST + self.intents.cost;
        if taken <= most_bytes {
            return Ok(());
        }
        Err(too_much("cancelled buffers and intents", most_bytes))
    }
}
