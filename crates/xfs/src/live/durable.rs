//! What makes changes durable.
//!
//! The log has contexts, which become durable in their order. An inode knows the context of its
//! last commit, so a sync of one file forces the log up to that, and leaves later contexts alone:
//!
//! ```text
//! context 7 | 8     | 9
//! file        size    times        fsync forces 9, fdatasync 8
//! ```

use offshoot_vfs::{FileFlags, FileId, Result, Timestamp};
use offshoot_xfs_format::Ino;

use super::inodes::TimesCommit;
use super::{XfsLive, ino_of, touch};
use crate::inode::{LoadedInode, timestamp, xfs_time};
use crate::log::LogSequence;
use crate::trans::XfsTransactionKind as Kind;

/// The clock for times of files ticks 250 times a second, as that of most kernels.
const TICK_NANOS: i128 = 4_000_000;

fn nanos(time: Timestamp) -> i128 {
    i128::from(time.secs) * 1_000_000_000 + i128::from(time.nanos)
}

impl XfsLive {
    /// Makes everything durable that was done to a file.
    pub(crate) fn fsync(&self, file: FileId) -> Result<()> {
        let _call = self.enter()?;
        self.inode(file)?;
        self.force_file(ino_of(file))
    }

    /// The same but for times: a write in place changes nothing else, and needs no record.
    pub(crate) fn fdatasync(&self, file: FileId) -> Result<()> {
        let _call = self.enter()?;
        self.inode(file)?;
        let ino = ino_of(file);
        self.write_data(ino)?;
        let Some(last) = self.transactions.last_commit(ino) else { return Ok(()) };
        let times = self.inodes.get(ino).state.lock().times;
        match times.filter(|times| times.commit == last) {
            Some(times) => self.force(times.before),
            None => self.force(Some(last.sequence)),
        }
    }

    /// Makes everything durable that was done.
    pub(crate) fn sync(&self) -> Result<()> {
        let _call = self.enter()?;
        let data = self.data();
        // A file that cannot be written keeps no other from being durable.
        let written = data.write_back_all();
        let flushed = data.flush_places();
        let forced = self.transactions.log().force_all();
        written.and(flushed).and(forced)
    }

    /// Makes the last change of an inode durable, if its flags ask for that.
    pub(super) fn keep_synchronous(&self, inode: &LoadedInode) -> Result<()> {
        if !inode.flags().contains(FileFlags::SYNC) {
            return Ok(());
        }
        self.force_file(inode.ino)
    }

    fn force_file(&self, ino: Ino) -> Result<()> {
        self.write_data(ino)?;
        self.force(self.last_commit(ino))
    }

    /// Writes the data of a file to its places. It is durable when the log is forced up to the last
    /// commit of the file.
    fn write_data(&self, ino: Ino) -> Result<()> {
        self.write_back(ino)?;
        self.data().flush_places()
    }

    /// Writes back what a file has in memory.
    pub(super) fn write_back(&self, ino: Ino) -> Result<()> {
        match self.buffered.in_use(ino) {
            Some(buffer) => self.data().write_back(&buffer),
            None => Ok(()),
        }
    }

    fn last_commit(&self, ino: Ino) -> Option<LogSequence> {
        self.transactions.last_commit(ino).map(|commit| commit.sequence)
    }

    fn is_durable(&self, sequence: LogSequence) -> bool {
        sequence <= self.transactions.log().durable()
    }

    fn force(&self, sequence: Option<LogSequence>) -> Result<()> {
        match sequence.filter(|sequence| !self.is_durable(*sequence)) {
            Some(sequence) => self.transactions.log().force(sequence),
            None => Ok(()),
        }
    }

    /// Sets the times of a file whose data has changed, after that. The caller has its lock.
    pub(super) fn touch_data(&self, ino: Ino, at: Timestamp) -> Result<()> {
        let mut t = self.transactions.begin(Kind::ChangeTimes, 0)?;
        let core = t.inode(ino)?.core_mut();
        touch(core, at);
        core.mtime = core.time_field(xfs_time(at));
        // The transaction has the inode, so no other commit, as that of a rename, comes between.
        let before = self.transactions.last_commit(ino);
        let Some(commit) = t.commit_inode(ino)? else { return Ok(()) };
        let used = self.inodes.get(ino);
        let mut state = used.state.lock();
        // Of times after times, what was before the first of them counts.
        let before = match state.times {
            Some(times) if Some(times.commit) == before => times.before,
            _ => before.map(|before| before.sequence),
        };
        state.times = Some(TimesCommit { commit, before });
        Ok(())
    }

    /// The same when bytes were written. Within a tick of the times of the file it keeps them,
    /// unless a caller has seen these.
    pub(super) fn touch_written(&self, inode: &LoadedInode, at: Timestamp) -> Result<()> {
        let is_now = |field| {
            let age = nanos(at) - nanos(timestamp(inode.core.time(field)));
            (0..TICK_NANOS).contains(&age)
        };
        if is_now(inode.core.mtime) && is_now(inode.core.ctime) && !inode.is_seen() {
            return Ok(());
        }
        self.touch_data(inode.ino, at)
    }

    /// The same for a change that may have failed, with what became of it. If it has changed a part
    /// nevertheless, the file has its times, and a commit that `fsync` makes durable.
    pub(super) fn touch_changed<T>(
        &self,
        ino: Ino,
        at: Timestamp,
        outcome: Result<T>,
        is_changed: bool,
    ) -> Result<T> {
        if outcome.is_ok() || is_changed {
            let touched = self.touch_data(ino, at);
            return outcome.and_then(|done| touched.map(|()| done));
        }
        outcome
    }
}
