//! Throwing a log away that cannot be replayed.
//!
//! The empty log that takes its place begins with a cycle above that of every LSN in the volume.
//! The kernel refuses blocks that are newer than the log, and a replay would take them for done.
//!
//! ```text
//! newest block of 7:1200     log:  8:0 unmount record | stamps of cycle 7 to the end of the ring
//! ```

use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_vfs::{Error, Result, Structure};

use crate::check;
use crate::options::XfsOptions;
use crate::recover::EmptyLog;
use crate::volume::log_to_zero;

/// The first cycle that a new log does not get. No log comes so far: at 1 GiB/s, one of 10 MiB
/// takes more than half a year.
const MOST_CYCLES: u32 = i32::MAX as u32;

/// What was thrown away with a log.
#[derive(Debug)]
#[non_exhaustive]
pub struct XfsLostLog {
    /// The transactions that could be read.
    pub transactions: u64,
    /// The items in them: changes of blocks and inodes.
    pub items: u64,
    /// Why the rest could not be read.
    pub problem: Option<Error>,
    /// Why the counters of the superblock were left as they are.
    pub counters_problem: Option<Error>,
    /// Where the new log begins, as cycle and block.
    pub from: String,
}

/// Throws the log of the volume on `device` away: all changes that are only there are lost, and
/// structures may contradict each other then, so the volume needs a repair. Everything is durable
/// when the call returns. `None` when the log was empty; nothing is written then.
///
/// # Errors
/// As for [`XfsVolume::open`](crate::XfsVolume::open), but for what is wrong with the log;
/// [`Error::Unsupported`] also when the volume has a feature that the engine does not write.
pub fn zero_xfs_log(
    device: &Arc<dyn BlockDevice>,
    options: &XfsOptions,
) -> Result<Option<XfsLostLog>> {
    let quiet = XfsOptions { is_log_ignored: true, reporter: None, ..options.clone() };
    let Some((superblock, log)) = log_to_zero(device, options)? else { return Ok(None) };
    let (mut transactions, mut items, mut newest) = (0, 0, check::newest_lsn(device, &quiet)?);
    let read = log.and_then(|log| {
        newest = newest.max(log.ends.head);
        log.each_checkpoint(options.replay_bytes, &mut |checkpoint| {
            transactions += 1;
            items += checkpoint.items().count() as u64;
            Ok(())
        })
    });
    if newest.cycle() >= MOST_CYCLES {
        let problem = format!("no log ends behind the change {newest} of a block");
        return Err(Error::corrupt(Structure::LogRecord, problem));
    }
    let empty = EmptyLog::new(device, &superblock, newest.cycle() + 1)?;
    let counters_problem = empty.write()?;
    let from = empty.start().to_string();
    Ok(Some(XfsLostLog { transactions, items, problem: read.err(), counters_problem, from }))
}
