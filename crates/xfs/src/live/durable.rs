//! What makes changes durable.
//!
//! The log has contexts, which become durable in their order. An inode knows the context of its
//! last commit, so a sync of one file forces the log up to that, and leaves later contexts alone:
//!
//! ```text
//! context 7 | 8     | 9
//! file        size    times        fsync forces 9, fdatasync 8
//! ```

use std::sync::atomic::Ordering;

use offshoot_vfs::{FileFlags, FileId, Result, Timestamp};
use offshoot_xfs_format::Ino;

use super::inodes::TimesCommit;
use super::{XfsLive, ino_of, touch};
use crate::inode::{LoadedInode, xfs_time};
use crate::log::LogSequence;
use crate::trans::XfsTransactionKind as Kind;

impl XfsLive {
    /// Makes everything durable that was done to a file.
    pub(crate) fn fsync(&self, file: FileId) -> Result<()> {
        let _call = self.enter()?;
        self.inode(file)?;
        self.force(self.last_commit(ino_of(file)))
    }

    /// The same but for times: the data of a write that changed nothing else needs no record.
    pub(crate) fn fdatasync(&self, file: FileId) -> Result<()> {
        let _call = self.enter()?;
        self.inode(file)?;
        let ino = ino_of(file);
        let Some(last) = self.transactions.last_commit(ino) else { return Ok(()) };
        let times = self.inodes.get(ino).state.lock().times;
        match times.filter(|times| times.commit == last) {
            Some(times) if !self.is_durable(last.sequence) => {
                self.flush_device()?;
                self.force(times.before)
            }
            _ => self.force(Some(last.sequence)),
        }
    }

    /// Makes everything durable that was done.
    pub(crate) fn sync(&self) -> Result<()> {
        let _call = self.enter()?;
        self.transactions.log().force_all()
    }

    /// Makes the last change of an inode durable, if its flags ask for that.
    pub(super) fn keep_synchronous(&self, inode: &LoadedInode) -> Result<()> {
        if !inode.flags().contains(FileFlags::SYNC) {
            return Ok(());
        }
        self.force(self.last_commit(inode.ino))
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

    /// Flushes the device. What a flush that failed has lost is not known, and the next one would
    /// succeed without it: so that ends all writing, as a write of the log that fails does.
    pub(super) fn flush_device(&self) -> Result<()> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        self.buffers().flush().inspect_err(|error| self.transactions.stop_writing(error))
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
