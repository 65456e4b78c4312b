//! Tickets: room in the log that a transaction owns.

use std::sync::Arc;

use offshoot_vfs::{Error, Result, Structure};

use super::LogShared;

/// Room for a number of steps of a transaction. What is left of it is given back when it is
/// dropped.
#[derive(Debug)]
pub(crate) struct LogTicket {
    log: Arc<LogShared>,
    /// The bytes of a step, with what the log adds.
    step: u64,
    /// The steps behind this one that are promised.
    more: u32,
    /// What is left of this step.
    left: u64,
}

impl LogTicket {
    /// Waits for room for `steps` steps of `bytes` bytes.
    pub(super) fn reserve(log: &Arc<LogShared>, bytes: u64, steps: u32) -> Result<Self> {
        let (step, steps) = (log.sizes.checkpoint(bytes), steps.max(1));
        let all = step.saturating_mul(steps.into());
        if all > log.sizes.most() {
            let (most, ring) = (log.sizes.most(), log.sizes.ring);
            let problem = format!(
                "a log of {ring} bytes holds no transaction of {all} bytes, only of {most}"
            );
            return Err(Error::corrupt(Structure::Superblock, problem));
        }
        log.keep_up_in_line()?;
        log.throttle()?;
        log.space.reserve(all, || log.wait_for_room())?;
        Ok(Self { log: log.clone(), step, more: steps - 1, left: step })
    }

    /// Takes `bytes` of the step away for a context.
    ///
    /// # Errors
    /// When the step is too small: the transaction logged more than it reserved.
    pub(super) fn spend(&mut self, bytes: u64) -> Result<()> {
        match self.left.checked_sub(bytes) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => Err(Error::corrupt(
                Structure::LogRecord,
                format!(
                    "a transaction needs {bytes} bytes of the log, and {} are left of the {} that \
                     it reserved; report this",
                    self.left, self.step
                ),
            )),
        }
    }

    /// Begins the next step of a rolling transaction. What of the step before was not used is given
    /// back. Behind the last of the steps that were reserved it waits for room, before transactions
    /// that have not begun. The items that stay locked were all in the last commit.
    ///
    /// # Errors
    /// When writing has ended.
    pub(crate) fn roll(&mut self) -> Result<()> {
        let left = std::mem::take(&mut self.left);
        match self.more.checked_sub(1) {
            Some(more) => {
                self.log.space.release(left);
                self.more = more;
            }
            None => self.log.space.roll(left, self.step, || self.log.wait_for_room())?,
        }
        self.left = self.step;
        Ok(())
    }
}

impl Drop for LogTicket {
    fn drop(&mut self) {
        self.log.space.release(self.left + self.step * u64::from(self.more));
    }
}
