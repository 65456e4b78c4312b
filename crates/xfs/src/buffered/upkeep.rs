//! The bound of all data in memory, and write-back in the background.

use std::sync::Arc;
use std::time::{Duration, Instant};

use offshoot_kit::counter::count;
use offshoot_vfs::Result;

use super::XfsBufferedData;
use super::memory::BufferedFile;

/// How long the background leaves data alone that it could not write back.
const PAUSE: Duration = Duration::from_secs(1);

/// The background looks for old data so many times in the age at which it is written back, but not
/// more often than after the least pause.
const LOOKS: u32 = 6;
const LEAST_PAUSE: Duration = Duration::from_millis(10);

impl XfsBufferedData<'_> {
    fn is_below(&self, part: u64) -> bool {
        self.files.bytes() <= self.files.limits.bytes / part
    }

    /// Wakes the background when half of the bound is used, and writes back when all of it is.
    ///
    /// Files that cannot be written back may use a bound of their own, so that one of them does not
    /// stop the writers of all others.
    ///
    /// # Errors
    /// That of the write-back of `file`, or of any when too much cannot be written back.
    pub(super) fn keep_bound(&self, file: &BufferedFile) -> Result<()> {
        if self.is_below(2) {
            return Ok(());
        }
        self.files.signal.want();
        if self.is_below(1) {
            return Ok(());
        }
        count(&self.files.counters.waits_at_bound, 1);
        let (stuck, others) = self.files.all().into_iter().partition(|file| file.is_stuck());
        let outcome = self.relieve(others);
        // With an error that leaves room the next call goes on.
        if self.is_below(1) {
            return Ok(());
        }
        if file.is_stuck() {
            return self.write_back(file);
        }
        if self.is_below_without_stuck() {
            return Ok(());
        }
        outcome.and_then(|()| self.relieve(stuck))
    }

    /// Whether the bound would be kept without what cannot be written back, or a bound of that.
    fn is_below_without_stuck(&self) -> bool {
        let mut stuck: u64 = 0;
        for file in self.files.all() {
            let state = file.state.read();
            stuck += if state.is_stuck { state.runs.bytes() } else { 0 };
        }
        let most = self.files.limits.bytes;
        self.files.bytes() <= most + stuck.min(most)
    }

    /// Writes back until half of the bound is used: the files with the oldest data first.
    fn relieve(&self, mut files: Vec<Arc<BufferedFile>>) -> Result<()> {
        files.sort_by_cached_key(|file| (file.state.read().since, file.ino));
        self.write_back_files(&files, || self.is_below(2))
    }

    /// Writes back what is old and makes it durable, and writes back all that is above half of the
    /// bound.
    ///
    /// # Errors
    /// The first one, after all files were tried.
    pub(crate) fn write_back_due(&self) -> Result<()> {
        let now = Instant::now();
        let is_old = |since: Instant| now.duration_since(since) >= self.files.limits.age;
        let mut files = self.files.all();
        files.retain(|file| file.state.read().since.is_some_and(is_old));
        let mut outcome = self.write_back_files(&files, || false);
        if !files.is_empty() {
            let forced = self.flush_places().and_then(|()| self.transactions.log().force_all());
            outcome = outcome.and(forced);
        }
        if self.is_below(2) { outcome } else { outcome.and(self.relieve(self.files.all())) }
    }

    /// Writes back in the background until [`Self::end_background`], or until `enter` says that
    /// writing has ended. Data that cannot be written back stays in memory, and the calls that want
    /// it durable say why.
    pub(crate) fn run_background<G>(&self, enter: impl Fn() -> Option<G>) {
        let signal = &self.files.signal;
        while signal.pause((self.files.limits.age / LOOKS).max(LEAST_PAUSE)) {
            let Some(call) = enter() else { return };
            let is_done = self.write_back_due().is_ok();
            drop(call);
            let again = Instant::now() + PAUSE;
            while let Some(rest) = again.checked_duration_since(Instant::now())
                && !is_done
            {
                if !signal.pause(rest) {
                    return;
                }
            }
        }
    }

    /// Ends the background.
    pub(crate) fn end_background(&self) {
        self.files.signal.end();
    }
}
