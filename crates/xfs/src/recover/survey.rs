//! The first pass: proves every item, and learns what the second pass and the finish have to know.
//! Nothing is written.

use std::sync::Arc;

use offshoot_device::{BlockDevice, MemoryBudget, MemoryDevice};
use offshoot_vfs::{Code, Error, Result};
use offshoot_xfs_format::AgNumber;
use offshoot_xfs_format::log::items::{XfsBufferFlags, XfsBufferType, XfsItemType};
use offshoot_xfs_format::log::{XfsCheckpoint, XfsLogItem};
use offshoot_xfs_format::superblock::XfsSuperblock;

use super::cancel::{CANCEL_COST, CancelledBuffers};
use super::log::{VolumeLog, in_log};
use super::pending::PendingIntents;
use super::replay::{LogReplay, unsupported};
use crate::buffer::{XfsBuffers, malformed};
use crate::group;
use crate::report::XfsPending;

/// The cache for the headers of groups, each of which is read once.
const CACHE_BYTES: u64 = 1 << 20;

/// What the first pass learned.
pub(super) struct LogSurvey {
    pub(super) cancels: CancelledBuffers,
    pub(super) intents: PendingIntents,
    /// What is left to do behind the replay.
    pub(super) pending: XfsPending,
}

/// A pass in progress.
struct SurveyPass<'a> {
    cancels: CancelledBuffers,
    cancel_cost: u64,
    intents: PendingIntents,
    /// Replays superblocks, which say how large the volume is, and the headers of inodes, which
    /// have the lists of unlinked ones. The headers of groups are small.
    preview: LogReplay<'a>,
    most_bytes: u64,
}

/// Surveys the log of the volume on `device`.
pub(super) fn survey(
    device: &Arc<dyn BlockDevice>,
    superblock: &XfsSuperblock,
    log: &VolumeLog,
    most_bytes: u64,
) -> Result<LogSurvey> {
    let XfsSuperblock { fields, geometry } = superblock;
    let budget = MemoryBudget::new(most_bytes);
    let memory: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::over_within(device.clone(), &budget));
    let cancels = CancelledBuffers::new(fields, geometry);
    let none = CancelledBuffers::new(fields, geometry);
    let preview = LogReplay::new(&*memory, geometry, log.ends.head, None, none);
    let intents = PendingIntents::default();
    let mut pass = SurveyPass { cancels, cancel_cost: 0, intents, preview, most_bytes };
    log.each_checkpoint(most_bytes, &mut |checkpoint| pass.transaction(checkpoint))?;
    pass.preview.finish()?;
    let geometry = pass.preview.geometry.clone();
    let SurveyPass { cancels, intents, .. } = pass;
    let mut pending = intents.pending().map_err(malformed)?;
    let groups = 0..geometry.ag_count;
    let buffers = XfsBuffers::new(memory.clone(), geometry, CACHE_BYTES);
    for ag in groups {
        pending.unlinked_lists += group::unlinked_lists(&buffers, AgNumber(ag))?;
    }
    Ok(LogSurvey { cancels, intents, pending })
}

impl SurveyPass<'_> {
    fn transaction(&mut self, checkpoint: &XfsCheckpoint) -> Result<()> {
        let lsn = checkpoint.lsn;
        self.preview.enter(lsn)?;
        for regions in checkpoint.items() {
            let item = XfsLogItem::parse(regions).map_err(malformed);
            let seen = item.and_then(|item| {
                item.check(&self.preview.geometry).map_err(malformed)?;
                self.intents.add(lsn, &item);
                self.item(&item)
            });
            seen.map_err(|error| in_log(lsn, error))?;
        }
        let taken = self.cancel_cost + self.intents.cost;
        if taken > self.most_bytes {
            let what = format!(
                "cancelled buffers and intents that take {taken} bytes of memory, where {} are \
                 allowed",
                self.most_bytes
            );
            return Err(in_log(lsn, Error::unsupported(Code::LogNotReplayed, what)));
        }
        Ok(())
    }

    fn item(&mut self, item: &XfsLogItem<'_>) -> Result<()> {
        match item {
            XfsLogItem::Buffer(buffer) if buffer.flags.contains(XfsBufferFlags::CANCEL) => {
                let is_first = self.cancels.add(buffer.place, buffer.blocks.into());
                self.cancel_cost += if is_first { CANCEL_COST } else { 0 };
                Ok(())
            }
            XfsLogItem::Buffer(buffer) => match buffer.flags.block_type() {
                Some(XfsBufferType::Superblock | XfsBufferType::Agi) => {
                    self.preview.buffer(buffer).map(drop)
                }
                _ => Ok(()),
            },
            // Records of quotas are neither shown nor kept: a volume with quotas is only read.
            XfsLogItem::Unsupported(XfsItemType::Dquot | XfsItemType::QuotaOff) => Ok(()),
            XfsLogItem::Unsupported(item) => Err(unsupported(*item)),
            _ => Ok(()),
        }
    }
}
