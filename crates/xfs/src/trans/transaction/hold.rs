//! What a transaction locks: headers of groups in their order, and what lies below them.

use std::time::Duration;

use offshoot_vfs::{Errno, Error, Result, Structure};
use offshoot_xfs_format::BasicBlock;

use super::{HeldBuffer, HeldContent, XfsTransaction};
use crate::buffer::{BufferRole, DiskRun};
use crate::trans::missed::{MissedLocks, group_order};
use crate::trans::runs::BufferRuns;
use crate::trans::shared::BufferHolder;

/// How long a transaction waits for a buffer that another one has, and should not have.
const LONGEST_WAIT: Duration = Duration::from_secs(4);

impl<'e> XfsTransaction<'e> {
    /// Makes it a try of an operation: it waits first for what the tries before have missed.
    pub(crate) fn try_again(&mut self, missed: Option<&'e MissedLocks>) {
        self.first = missed.map(MissedLocks::headers).unwrap_or_default();
        self.told = missed;
    }

    /// Whether it may wait for the AGI or the AGF of a group: it has none that comes behind.
    pub(crate) fn may_wait_for(&self, role: BufferRole) -> bool {
        let held = self.buffers.values().filter_map(|held| group_order(held.role)).max();
        held <= group_order(role)
    }

    /// Locks the AGI or the AGF of a group, unless another transaction has it. Returns whether it
    /// is locked.
    pub(crate) fn try_hold(&mut self, run: DiskRun, role: BufferRole) -> Result<bool> {
        self.hold_first(None)?;
        let locks = &self.engine.shared.buffer_locks;
        let is_locked = self.buffers.contains_key(&run.at)
            || locks.try_lock(run.at, BufferHolder::Transaction(role));
        if is_locked {
            self.hold_locked(run.into(), role)?;
        } else if let Some(order) = group_order(role) {
            self.missed.headers.insert(order, (run, role));
            self.missed.were_held = false;
        }
        Ok(is_locked)
    }

    /// Waits for all headers that the transaction has missed since its last commit, in the order in
    /// which transactions lock them. It has none now. Returns false if it has not missed any since
    /// it waited last.
    pub(crate) fn hold_missed(&mut self) -> Result<bool> {
        if self.missed.headers.is_empty() || self.missed.were_held {
            return Ok(false);
        }
        self.missed.were_held = true;
        let headers: Vec<_> = self.missed.headers.values().copied().collect();
        headers.into_iter().try_for_each(|(run, role)| self.hold(run.into(), role))?;
        Ok(true)
    }

    /// Waits for the headers that come first, and for one more among them, in their order. It has
    /// none now.
    fn hold_first(&mut self, more: Option<(DiskRun, BufferRole)>) -> Result<()> {
        let mut first = std::mem::take(&mut self.first);
        if first.is_empty() {
            return Ok(());
        }
        let order = more.and_then(|(_, role)| group_order(role));
        first.extend(order.zip(more));
        first.into_values().try_for_each(|(run, role)| self.hold(run.into(), role))
    }

    /// Whether it has the buffer at a place locked.
    pub(crate) fn holds(&self, place: BasicBlock) -> bool {
        self.buffers.contains_key(&place)
    }

    /// The places of the buffers that it has locked, ascending.
    pub(crate) fn held_buffers(&self) -> Vec<BasicBlock> {
        self.buffers.keys().copied().collect()
    }

    /// Releases the buffers that it has locked since it had those of `before`, if it has changed
    /// none of them.
    pub(crate) fn release_unchanged(&mut self, before: &[BasicBlock]) {
        let is_new = |place: &BasicBlock| before.binary_search(place).is_err();
        let has_changed = self.buffers.iter().any(|(place, held)| {
            is_new(place) && !matches!(held.content, HeldContent::Committed(_))
        });
        if has_changed {
            return;
        }
        let locks = &self.engine.shared.buffer_locks;
        for is_header in [false, true] {
            self.buffers.retain(|place, held| {
                let is_released = is_new(place) && held.role.is_header() == is_header;
                if is_released {
                    locks.unlock(*place);
                }
                !is_released
            });
        }
    }

    /// Locks a buffer, and reads it unless the transaction has it.
    pub(super) fn hold(&mut self, runs: BufferRuns, role: BufferRole) -> Result<()> {
        let at = runs.at();
        if let Some(held) = self.buffers.get(&at) {
            if held.role == role && held.runs == runs {
                return Ok(());
            }
            let problem = format!("block {at} is {:?} and {role:?}", held.role);
            return Err(Error::corrupt(Structure::BtreeBlock, problem));
        }
        if let (Some(_), [run]) = (group_order(role), &runs[..]) {
            return self.hold_header(*run, role);
        }
        self.lock_buffer(at, role)?;
        self.hold_locked(runs, role)
    }

    /// The same for the AGI or the AGF of a group. The transaction waits for it only in the order
    /// of groups.
    ///
    /// # Errors
    /// `EAGAIN` when another transaction has it, and waiting for that may never end.
    fn hold_header(&mut self, run: DiskRun, role: BufferRole) -> Result<()> {
        self.hold_first(Some((run, role)))?;
        if self.holds(run.at) {
            return Ok(());
        }
        if self.may_wait_for(role) {
            self.lock_buffer(run.at, role)?;
            return self.hold_locked(run.into(), role);
        }
        if self.try_hold(run, role)? {
            return Ok(());
        }
        let what = format!("{role:?} is locked, and waiting for it may never end");
        Err(Error::posix(Errno::AGAIN, what))
    }

    /// Locks a place. What lies below the lock of an inode or of a group is free, or the thread
    /// that writes home has it, for as long as the device needs. A transaction has it only if the
    /// volume is damaged and another structure has the place too. That one may want a block of this
    /// one, so this one gives up after a while.
    pub(super) fn lock_buffer(&self, at: BasicBlock, role: BufferRole) -> Result<()> {
        let locks = &self.engine.shared.buffer_locks;
        let holder = BufferHolder::Transaction(role);
        if role.is_header() {
            return locks.lock(at, holder);
        }
        let is_legal = |holder: &BufferHolder| *holder == BufferHolder::WriteHome;
        locks.lock_within(at, holder, LONGEST_WAIT, is_legal).map_err(|holder| {
            let problem = format!("block {at} is {role:?}, and {holder:?} does not release it");
            Error::corrupt(Structure::BtreeBlock, problem)
        })
    }

    /// Reads a buffer that is locked, unless the transaction has it.
    fn hold_locked(&mut self, runs: BufferRuns, role: BufferRole) -> Result<()> {
        let at = runs.at();
        if self.buffers.contains_key(&at) {
            return Ok(());
        }
        let shared = &self.engine.shared;
        let buffer = shared.buffers.read(&runs, role).inspect_err(|_| {
            shared.buffer_locks.unlock(at);
        })?;
        let content = HeldContent::Committed(buffer);
        self.buffers.insert(at, HeldBuffer::new(runs, role, content));
        Ok(())
    }
}
