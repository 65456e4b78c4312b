//! Recovery: what the log holds reaches the blocks of the volume.
//!
//! ```text
//! survey   tail to head: proves every item; cancelled buffers, intents without an end,
//!          lists of unlinked inodes                                          nothing is written
//! replay   tail to head: each transaction, in the order of the commit ops    written as it goes
//! finish   counters of the superblock, an empty log                          to disk only
//! ```
//!
//! A volume that is only read is replayed in memory, over its device. A recovery to disk writes
//! nothing to the log before everything else is durable, so one that is cut begins again.
//!
//! What intents and lists of unlinked inodes leave to do needs transactions. A reader sees the
//! state before it, with a report of what is left. To disk nothing is written then.
//!
//! `survey` and `finish` are the steps with their rules. `replay` keeps blocks until the LSN
//! changes; `buffer` and `inode` apply items; `cancel` and `pending` are what a survey learns;
//! `verify` knows the types of blocks; `log` reads and writes the ring.

mod buffer;
mod cancel;
mod finish;
mod inode;
mod log;
mod pending;
mod replay;
mod survey;
mod verify;

use std::sync::Arc;

use offshoot_device::{BlockDevice, MemoryBudget, MemoryDevice};
use offshoot_vfs::{Code, Error, Result};
use offshoot_xfs_format::Lsn;
use offshoot_xfs_format::superblock::XfsSuperblock;

use crate::options::XfsOptions;
use crate::report::{XfsPending, XfsReport, tell};
use finish::UnmountRecord;
pub(crate) use log::VolumeLog;
use log::in_log;
use replay::{LogReplay, ReplayCounts};
use survey::LogSurvey;

/// What a user can do about a log that is not replayed.
pub(crate) const NEXT_STEP: &str =
    "mount the volume once with the kernel, or open it with the log ignored";

/// What a recovery did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct XfsRecovery {
    /// The first record that was replayed, as cycle and block; empty when the log was empty.
    pub from: String,
    /// Where the log ended, as cycle and block.
    pub to: String,
    /// Whether records that a crash had torn were left out at the end.
    pub is_torn: bool,
    /// The transactions.
    pub transactions: u64,
    /// The items that were replayed.
    pub replayed: u64,
    /// The items that were passed over, because a block was newer or is free by now.
    pub passed_over: u64,
    /// What is left to do.
    pub pending: XfsPending,
}

impl XfsRecovery {
    fn new(log: &VolumeLog, counts: ReplayCounts, pending: XfsPending) -> Self {
        let ReplayCounts { transactions, replayed, skipped } = counts;
        let (from, to) = (log.ends.tail.to_string(), log.ends.head.to_string());
        let is_torn = log.ends.is_torn;
        Self { from, to, is_torn, transactions, replayed, passed_over: skipped, pending }
    }
}

/// Replays the log in memory. Returns a device that shows the volume with its changes.
pub(crate) fn in_memory(
    device: &Arc<dyn BlockDevice>,
    superblock: &XfsSuperblock,
    log: &VolumeLog,
    options: &XfsOptions,
) -> Result<(Arc<dyn BlockDevice>, XfsRecovery)> {
    let survey = survey::survey(device, superblock, log, options.replay_bytes)?;
    let pending = survey.pending.clone();
    let budget = MemoryBudget::new(options.replay_bytes);
    let memory: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::over_within(device.clone(), &budget));
    let counts = replay(&memory, superblock, log, survey, options)?;
    let report = XfsReport::LogReplayed { is_stored: false, pending: pending.clone() };
    tell(options.reporter.as_ref(), &report);
    Ok((memory, XfsRecovery::new(log, counts, pending)))
}

/// Replays the log onto `device`, and empties it.
pub(crate) fn to_disk(
    device: &Arc<dyn BlockDevice>,
    superblock: &XfsSuperblock,
    log: &VolumeLog,
    options: &XfsOptions,
) -> Result<XfsRecovery> {
    let survey = survey::survey(device, superblock, log, options.replay_bytes)?;
    let pending = survey.pending.clone();
    if !pending.is_empty() {
        let at = survey.intents.first().unwrap_or(log.ends.head);
        return Err(in_log(at, not_finished(&pending)));
    }
    let unmount = UnmountRecord::new(log, superblock)?;
    let counts = replay(device, superblock, log, survey, options)?;
    log.flush()?;
    finish::count(device)?;
    log.flush()?;
    unmount.write(log)?;
    let report = XfsReport::LogReplayed { is_stored: true, pending: pending.clone() };
    tell(options.reporter.as_ref(), &report);
    Ok(XfsRecovery::new(log, counts, pending))
}

fn replay(
    device: &Arc<dyn BlockDevice>,
    superblock: &XfsSuperblock,
    log: &VolumeLog,
    survey: LogSurvey,
    options: &XfsOptions,
) -> Result<ReplayCounts> {
    let (geometry, reporter) = (&superblock.geometry, options.reporter.as_ref());
    let head: Lsn = log.ends.head;
    let mut replay = LogReplay::new(&**device, geometry, head, reporter, survey.cancels);
    log.each_checkpoint(options.replay_bytes, &mut |checkpoint| replay.transaction(checkpoint))?;
    replay.finish()?;
    Ok(replay.counts)
}

/// The error about work that needs transactions.
fn not_finished(pending: &XfsPending) -> Error {
    let what = format!("recovering a volume to disk whose log leaves to do {pending}");
    Error::unsupported(Code::LogNotReplayed, what)
}
