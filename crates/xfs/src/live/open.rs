//! Opening for writing, and the end of all writing.
//!
//! ```text
//! the log is brought to disk (`recover`)     what it leaves to do is done, and it is empty
//! the log begins behind its head             free space is counted, from the headers of groups
//! unlinked inodes, staged extents            freed, if a clean volume has some nevertheless
//! ...
//! the last call ends                         open inodes without names are freed
//! everything goes home                       counters in the superblock, the record of an unmount
//! ```

use std::sync::Arc;
use std::time::Duration;

use offshoot_kit::counter::{OnStop, WriteStop};
use offshoot_kit::read_ahead::ReadAhead;
use offshoot_kit::spread::SpreadRwLock;
use offshoot_kit::sync::Mutex;
use offshoot_vfs::Result;
use offshoot_xfs_format::Ino;

use super::XfsLive;
use super::inodes::{LiveInodes, LockedFiles};
use crate::buffered::{BufferLimits, BufferedFiles};
use crate::defer::IntentIds;
use crate::group;
use crate::inode::XfsInodes;
use crate::log::{LogDisk, XfsLog, XfsLogOptions};
use crate::names::XfsNameState;
use crate::names::inactive::{UnlinkedLeft, free_unlinked_lists};
use crate::options::XfsOptions;
use crate::recover::{VolumeLog, free_staged};
use crate::report::{XfsReport, XfsReporter, tell};
use crate::volume::OpenedXfs;

/// The age at which data is written back when no interval is asked for.
const USUAL_AGE: Duration = Duration::from_secs(30);

/// Begins to write a volume whose log is empty. Readers keep inodes in `reading`.
pub(crate) fn open_live(
    opened: &OpenedXfs,
    log: &VolumeLog,
    reading: Arc<XfsInodes>,
    options: &XfsOptions,
) -> Result<Arc<XfsLive>> {
    let reporter = options.reporter.as_ref();
    let age = options.sync_interval.unwrap_or(USUAL_AGE);
    let shadow_rounding = options.shadow_round_bytes;
    let is_in_line = options.is_reproducible;
    let log_options = XfsLogOptions { shadow_rounding, is_in_line, ..XfsLogOptions::default() };
    let limits = BufferLimits { bytes: options.dirty_bytes, age };
    let stop = WriteStop::new(Some(telling(reporter.cloned())));
    let (buffers, superblock) = (opened.buffers.clone(), &opened.superblock);
    let disk = LogDisk::new(buffers.device(), superblock)?;
    let log = XfsLog::start(disk, &log.ends, &[], &stop, &log_options)?;
    let transactions = group::begin_transactions(buffers, log, superblock, &stop)?;
    transactions.prove_all(options.proves_commits);
    let ids = IntentIds::default();
    let freed = free_unlinked_lists(&transactions, &ids)?;
    if freed.cleared_lists > 0 {
        tell(reporter, &XfsReport::UnlinkedListsLost { lists: freed.cleared_lists });
    }
    for UnlinkedLeft { ino, problem } in freed.left {
        tell(reporter, &XfsReport::NotFreed { ino: ino.0, problem });
    }
    free_staged(&transactions, &ids)?;
    Ok(Arc::new(XfsLive {
        transactions,
        ids,
        name_state: XfsNameState::default(),
        inodes: LiveInodes::default(),
        buffered: BufferedFiles::new(limits, &stop),
        reading,
        read_ahead: ReadAhead::default(),
        gate: SpreadRwLock::new("xfs gate", || ()),
        label: Mutex::new(superblock.fields.fname),
        stop,
        reporter: reporter.cloned(),
    }))
}

/// Tells that all writing has ended.
fn telling(reporter: Option<XfsReporter>) -> OnStop {
    Box::new(move |cause| {
        let report = XfsReport::WritingStopped { cause: cause.to_owned() };
        tell(reporter.as_ref(), &report);
    })
}

impl XfsLive {
    /// Makes everything durable, and ends all writing. Calls that run are waited for; those that
    /// come later fail with `EROFS`.
    pub(crate) fn shut_down(&self) -> Result<()> {
        let _all = self.gate.write();
        if self.stop.cause() == Some(SHUT_DOWN) {
            return Ok(());
        }
        self.require_writing()?;
        for ino in self.inodes.nameless() {
            self.free_nameless(&self.inodes.write([ino]), ino);
        }
        let written = self.data().write_back_all();
        let is_ended = self.transactions.end();
        let outcome = written.and(is_ended);
        match &outcome {
            Ok(()) => self.stop.set_quietly(SHUT_DOWN),
            Err(error) => self.stop.set_quietly(&format!("it was not shut down: {error}")),
        }
        outcome
    }

    /// The same for the last share of a volume, which has no caller to tell an error.
    pub(crate) fn shut_down_at_last(&self) {
        if self.stop.cause().is_some() {
            return;
        }
        if let Err(error) = self.shut_down() {
            let cause = error.to_string();
            tell(self.reporter.as_ref(), &XfsReport::WritingStopped { cause });
        }
    }

    /// Says that an inode has lost its last name, and frees it if it is not open.
    pub(super) fn lose(&self, ino: Ino) {
        let locked = self.inodes.write([ino]);
        locked.with_state(ino, |state| state.is_nameless = true);
        self.free_if_unused(&locked, ino);
    }

    /// Frees an inode that is locked, if it has no name and is not open.
    pub(super) fn free_if_unused(&self, locked: &LockedFiles<'_>, ino: Ino) {
        if locked.with_state(ino, |state| state.is_unused()) == Some(true) {
            self.free_nameless(locked, ino);
        }
    }

    /// Tries to free inodes again that could not be freed.
    pub(super) fn free_again(&self) {
        for ino in self.inodes.not_freed() {
            self.free_if_unused(&self.inodes.write([ino]), ino);
        }
    }

    /// Frees an inode without names. The first error is told: the call that took the last name has
    /// done so, and the idle thread frees the inode later, or the next opening of the volume.
    ///
    /// Its number is free before the call returns, and another thread may make a file with it. So
    /// the state is that of a new inode before.
    fn free_nameless(&self, locked: &LockedFiles<'_>, ino: Ino) {
        let was_told = locked.with_state(ino, |state| {
            let was_told = state.has_failed;
            *state = state.renewed();
            was_told
        });
        locked.forget_buffer(ino);
        if let Some(buffer) = self.buffered.in_use(ino) {
            self.data().discard(&buffer);
        }
        if let Err(error) = self.names().inactivate(ino) {
            locked.with_state(ino, |state| (state.is_nameless, state.has_failed) = (true, true));
            if was_told != Some(true) {
                let problem = error.to_string();
                tell(self.reporter.as_ref(), &XfsReport::NotFreed { ino: ino.0, problem });
            }
        }
    }
}

/// Why nothing is written behind the end.
const SHUT_DOWN: &str = "it was shut down";
