//! Recovery: what the log holds reaches the blocks of the volume.
//!
//! ```text
//! survey   tail to head: cancelled buffers, intents without an end
//! replay   tail to head: each transaction, in the order of the commit ops, in memory over the
//!          device. A reader has the volume now
//! pending  counts the work that is left: intents, unlinked inodes, staged extents
//! complete does it, in memory over the first
//! replay   again, onto the device, as it goes                                         to disk only
//! complete again, with transactions in the log behind its head. The counters of the superblock
//!          are right then, and the log is empty                                       to disk only
//! ```
//!
//! A recovery to disk writes nothing before the replay in memory has proved the whole log, and
//! nothing to the log before everything else is durable. So one that is cut begins again.
//!
//! `replay` keeps blocks until the LSN changes; `buffer` and `inode` apply items; `verify` knows
//! the types of blocks; `pieces` completes directory blocks of several extents; `log` reads and
//! writes the ring; `cancel` and `pending` are what a survey learns; `finish` and `zero` make a new
//! log.

mod buffer;
mod cancel;
mod complete;
mod finish;
mod inode;
mod log;
mod pending;
mod pieces;
mod replay;
mod survey;
mod verify;
mod zero;

use std::sync::Arc;

use offshoot_device::{BlockDevice, MemoryBudget, MemoryDevice};
use offshoot_vfs::{Code, Error, Result};
use offshoot_xfs_format::XfsGeometry;
use offshoot_xfs_format::superblock::XfsSuperblock;

use crate::buffer::{XfsBuffers, malformed};
use crate::names::inactive::UnlinkedLeft;
use crate::options::XfsOptions;
use crate::report::{XfsPending, XfsReport, tell};
use cancel::CancelledBuffers;
use complete::CompletedWork;
pub(crate) use complete::free_staged;
pub(crate) use log::VolumeLog;
use log::in_log;
use pending::PendingIntents;
use replay::{LogReplay, ReplayCounts};
use survey::LogSurvey;
pub(crate) use zero::EmptyLog;

/// What a user can do about a log that is not replayed.
pub(crate) const NEXT_STEP: &str =
    "mount the volume once with the kernel, or open it with the log ignored";

/// The cache for headers and trees of groups, each of which is read once.
const CACHE_BYTES: u64 = 1 << 20;

/// What a recovery did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct XfsRecovery {
    /// The first record that was replayed, as cycle and block.
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
    /// The intents that the log had left, and that were done.
    pub finished_intents: u64,
    /// The inodes that no directory had, and that were freed.
    pub freed_inodes: u64,
    /// The extents that were staged for copy on write, and that were freed.
    pub freed_extents: u64,
    /// The lists of unlinked inodes that were damaged, and were emptied. Their inodes are lost
    /// until a repair finds them.
    pub lost_lists: u64,
}

impl XfsRecovery {
    fn new(log: &VolumeLog, counts: ReplayCounts, done: &CompletedWork) -> Self {
        let ReplayCounts { transactions, replayed, skipped } = counts;
        Self {
            from: log.ends.tail.to_string(),
            to: log.ends.head.to_string(),
            is_torn: log.ends.is_torn,
            transactions,
            replayed,
            passed_over: skipped,
            finished_intents: done.intents,
            freed_inodes: done.inodes,
            freed_extents: done.staged,
            lost_lists: done.cleared_lists,
        }
    }
}

/// A volume with its log replayed in memory.
struct VolumeInMemory {
    /// Shows the volume with its changes.
    device: Arc<dyn BlockDevice>,
    budget: Arc<MemoryBudget>,
    cancels: CancelledBuffers,
    intents: PendingIntents,
    pending: XfsPending,
    options: XfsOptions,
}

/// Replays the log in memory, and does what it leaves to do. Returns a device that shows the volume
/// with its changes. What cannot be done stays, with a report.
pub(crate) fn in_memory(
    device: &Arc<dyn BlockDevice>,
    superblock: &XfsSuperblock,
    log: &VolumeLog,
    options: &XfsOptions,
) -> Result<Arc<dyn BlockDevice>> {
    let replayed = in_memory_of(device, superblock, log, options, false)?;
    let reporter = options.reporter.as_ref();
    let told = |pending| tell(reporter, &XfsReport::LogReplayed { is_stored: false, pending });
    match replayed.completed(log) {
        Ok(completed) => {
            told(XfsPending::default());
            Ok(completed)
        }
        Err(error) => {
            told(replayed.pending);
            tell(reporter, &XfsReport::NotCompleted { problem: error.to_string() });
            Ok(replayed.device)
        }
    }
}

fn in_memory_of(
    device: &Arc<dyn BlockDevice>,
    superblock: &XfsSuperblock,
    log: &VolumeLog,
    options: &XfsOptions,
    for_writing: bool,
) -> Result<VolumeInMemory> {
    require_whole(&**device, &superblock.geometry)?;
    let LogSurvey { cancels, intents } = survey::survey(superblock, log, options.replay_bytes)?;
    let budget = MemoryBudget::new(options.replay_bytes);
    let memory: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::over_within(device.clone(), &budget));
    let (geometry, _) = replay(&memory, superblock, log, cancels.clone(), options)?;
    let mut pending = intents.pending().map_err(malformed)?;
    let buffers = XfsBuffers::new(memory.clone(), geometry, CACHE_BYTES);
    pending::add_groups(&mut pending, &buffers, for_writing)?;
    let options = options.clone();
    Ok(VolumeInMemory { device: memory, budget, cancels, intents, pending, options })
}

impl VolumeInMemory {
    /// A device that shows the volume when everything that the log leaves to do is done.
    fn completed(&self, log: &VolumeLog) -> Result<Arc<dyn BlockDevice>> {
        if self.pending.is_empty() { Ok(self.device.clone()) } else { self.complete(log) }
    }

    /// The same, with an empty log and right counters.
    fn complete(&self, log: &VolumeLog) -> Result<Arc<dyn BlockDevice>> {
        // The log may have turned on what we do not write.
        require_recoverable(&finish::first_superblock(&self.device)?.1)?;
        if self.pending.damaged_groups > 0 {
            let first = self.intents.first().unwrap_or(log.ends.head);
            return Err(in_log(first, not_finished(&self.pending)));
        }
        let over = MemoryDevice::over_within(self.device.clone(), &self.budget);
        let over: Arc<dyn BlockDevice> = Arc::new(over);
        complete::complete(&over, log, &self.intents, &self.options)?;
        Ok(over)
    }
}

/// Fails when the device is shorter than the volume: the groups behind its end cannot be read.
fn require_whole(device: &dyn BlockDevice, geometry: &XfsGeometry) -> Result<()> {
    let (size, expected) = (device.size_bytes(), geometry.blocks << geometry.block_log);
    if size >= expected {
        return Ok(());
    }
    let what = format!(
        "replaying the log of a volume of {expected} bytes on {}, which has {size}: open it with \
         the log ignored",
        device.name()
    );
    Err(Error::unsupported(Code::LogNotReplayed, what))
}

/// Fails when the volume has a feature with which we do not write it.
pub(crate) fn require_recoverable(superblock: &XfsSuperblock) -> Result<()> {
    let Some(obstacle) = superblock.fields.obstacles().into_iter().next() else { return Ok(()) };
    let what = format!("recovering XFS with {obstacle} to disk: {NEXT_STEP}");
    Err(Error::unsupported(Code::LogNotReplayed, what))
}

/// Replays the log onto `device`, and empties it.
pub(crate) fn to_disk(
    device: &Arc<dyn BlockDevice>,
    superblock: &XfsSuperblock,
    log: &VolumeLog,
    options: &XfsOptions,
) -> Result<XfsRecovery> {
    let quiet = XfsOptions { reporter: None, ..options.clone() };
    let proof = in_memory_of(device, superblock, log, &quiet, true)?;
    // The log may have turned on what we do not write.
    require_recoverable(&finish::first_superblock(&proof.device)?.1)?;
    proof.complete(log)?;
    let VolumeInMemory { cancels, intents, .. } = proof;
    let (_, counts) = replay(device, superblock, log, cancels, options)?;
    log.disk.flush()?;
    let done = complete::complete(device, log, &intents, options)?;
    let (reporter, pending) = (options.reporter.as_ref(), XfsPending::default());
    tell(reporter, &XfsReport::LogReplayed { is_stored: true, pending });
    for UnlinkedLeft { ino, problem } in &done.left {
        tell(reporter, &XfsReport::NotFreed { ino: ino.0, problem: problem.clone() });
    }
    Ok(XfsRecovery::new(log, counts, &done))
}

fn replay(
    device: &Arc<dyn BlockDevice>,
    superblock: &XfsSuperblock,
    log: &VolumeLog,
    cancels: CancelledBuffers,
    options: &XfsOptions,
) -> Result<(XfsGeometry, ReplayCounts)> {
    let (geometry, reporter) = (&superblock.geometry, options.reporter.as_ref());
    let mut replay = LogReplay::new(device, geometry, log.ends.head, reporter, cancels);
    log.each_checkpoint(options.replay_bytes, &mut |checkpoint| replay.transaction(checkpoint))?;
    replay.finish()?;
    Ok((replay.geometry, replay.counts))
}

/// The error about work that we do not do.
fn not_finished(pending: &XfsPending) -> Error {
    let what = format!("recovering a volume to disk whose log leaves to do {pending}");
    Error::unsupported(Code::LogNotReplayed, what)
}
