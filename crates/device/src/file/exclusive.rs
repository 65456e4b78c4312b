//! The exclusive hold of a block device.
//!
//! The kernel lets one holder at a time have a block device: a descriptor that was opened with
//! `O_EXCL`, a mount, a RAID, a mapper. A writer holds its device with a descriptor of its own,
//! beside the one for its requests. So it can lend the device to a mount of type `fuseblk` that it
//! serves itself, and write under the hold of that mount:
//!
//! ```text
//! opened ──────── give_up ── mount(2) ── lend ───────── the mount ends ── reclaim ── closed
//! O_EXCL, written │ nobody, not written  │ the mount, written │ nobody, not written │ O_EXCL, written
//! flock and QEMU locks: all the time
//! ```
//!
//! While nobody holds it, the locks keep away all programs that honour them, this crate included.
//! A program that honours none of them may become the holder: the kernel's own mount, or `mkfs`.
//! So nothing is written then:
//!
//! 1. Every change passes [`ExclusiveHold::pass`]. While the device is lent, that asks the
//!    [`Borrower`] first whether it still holds the device.
//! 2. The first change that finds the end waits until all changes under way are done, and takes the
//!    device back. All others wait for that.
//! 3. The device is taken back only if the kernel gives it, and if its *mark*, a range of bytes
//!    that every writer changes, has what was written last through this hold. Otherwise every
//!    change fails from then on.
//!
//! Between the question and the end of a write, the mount may end and another program may get the
//! device. So each thread may write one last request too late, and no second one.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use rustix::fs::OFlags;

use super::in_use;

/// Opens the block device at `path` so that the kernel gives it to no other holder until the
/// descriptor is closed.
///
/// # Errors
/// Of kind `ResourceBusy` when there is a holder, which the message names as far as the host shows
/// it; others of the host.
pub fn hold_block_device(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::EXCL.bits().cast_signed();
    match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
            Err(in_use::of_block_device(path))
        }
        result => result.map(File::into),
    }
}

/// Holds a block device for the process that writes it: a mount that this process serves.
pub trait Borrower: Send + Sync + fmt::Debug {
    /// Whether it may have given the device up. Called before every change, so it must not wait.
    fn has_ended(&self) -> bool;

    /// Holds the device again as [`hold_block_device`] does. Called once, after the end.
    ///
    /// # Errors
    /// When another program holds the device, and others of the host.
    fn take_back(&self) -> io::Result<OwnedFd>;
}

/// The exclusive hold of a block device that is open for writing
/// ([`BlockDevice::exclusive_hold`](crate::BlockDevice::exclusive_hold)).
#[derive(Debug)]
pub struct ExclusiveHold {
    /// Every change of the device holds this shared.
    state: RwLock<HoldState>,
    mark: Mutex<DeviceMark>,
    /// The hold of another member of the volume: without that, this device is not changed either.
    leader: OnceLock<Arc<ExclusiveHold>>,
}

#[derive(Debug)]
enum HoldState {
    Held(#[expect(dead_code, reason = "it is closed when this is dropped")] File),
    Lent(Box<dyn Borrower>),
    /// The device is not changed any more, for this reason.
    GivenUp(String),
}

/// A range of the device, and the bytes that were last written there.
#[derive(Debug, Default)]
struct DeviceMark {
    start: u64,
    bytes: Vec<u8>,
}

impl DeviceMark {
    /// Notes a write of `bufs` at `offset`.
    fn note(&mut self, mut offset: u64, bufs: &[IoSlice<'_>]) {
        for buf in bufs {
            let Range { start, end } = shared(self.start, &self.bytes, offset, buf);
            if start < end {
                let at = |from: u64| {
                    let at = |place: u64| usize::try_from(place - from).expect("in a buffer");
                    at(start)..at(end)
                };
                self.bytes[at(self.start)].copy_from_slice(&buf[at(offset)]);
            }
            offset += buf.len() as u64;
        }
    }
}

/// The range that two pieces of the device have in common.
fn shared(first: u64, of_first: &[u8], second: u64, of_second: &[u8]) -> Range<u64> {
    let [first_end, second_end] =
        [(first, of_first), (second, of_second)].map(|(start, bytes)| start + bytes.len() as u64);
    first.max(second)..first_end.min(second_end)
}

/// The permission to change a device, for as long as this is there.
pub(super) struct ChangePass<'a>(
    #[expect(dead_code, reason = "it is held, not read")] RwLockReadGuard<'a, HoldState>,
);

impl ExclusiveHold {
    pub(super) fn take(path: &Path) -> io::Result<Self> {
        let held = hold_block_device(path)?;
        Ok(Self {
            state: RwLock::new(HoldState::Held(held.into())),
            mark: Mutex::default(),
            leader: OnceLock::new(),
        })
    }

    /// Gives the device up, after all changes under way. All later changes fail because of
    /// `reason`. Other locks stay.
    pub fn give_up(&self, reason: &str) {
        *self.state.write() = HoldState::GivenUp(reason.to_owned());
    }

    /// Allows changes again after [`give_up`](Self::give_up), because `borrower` holds the device
    /// now. `mark` is the range of bytes that every other writer would change.
    ///
    /// # Errors
    /// When `mark` cannot be read from `device`, which is this device.
    pub fn lend(
        &self,
        borrower: Box<dyn Borrower>,
        device: &dyn crate::BlockDevice,
        mark: Range<u64>,
    ) -> io::Result<()> {
        let mut state = self.state.write();
        let len = usize::try_from(mark.end - mark.start).map_err(io::Error::other)?;
        let mut bytes = vec![0; len];
        device.read_at(mark.start, &mut bytes)?;
        *self.mark.lock() = DeviceMark { start: mark.start, bytes };
        *state = HoldState::Lent(borrower);
        Ok(())
    }

    /// Makes changes of this device depend on the hold of another member too.
    ///
    /// # Panics
    /// When it follows one already.
    pub fn follow(&self, leader: Arc<Self>) {
        // A second leader would be one of another volume.
        assert!(self.leader.set(leader).is_ok(), "it follows one already");
    }

    /// Takes the device back from a borrower that has ended, after all changes under way. Does
    /// nothing if it is held already.
    ///
    /// # Errors
    /// When it cannot be taken back, or was given up: it is not changed any more.
    pub fn reclaim(&self) -> io::Result<()> {
        let mut state = self.state.write();
        if let HoldState::Lent(borrower) = &*state {
            *state = match self.taken_back(&**borrower) {
                Ok(held) => HoldState::Held(held),
                Err(error) => HoldState::GivenUp(error.to_string()),
            };
        }
        match &*state {
            HoldState::GivenUp(reason) => Err(not_written(reason)),
            HoldState::Held(_) | HoldState::Lent(_) => Ok(()),
        }
    }

    /// What was last written to the mark; empty before [`lend`](Self::lend).
    #[must_use]
    pub fn mark(&self) -> Vec<u8> {
        self.mark.lock().bytes.clone()
    }

    fn taken_back(&self, borrower: &dyn Borrower) -> io::Result<File> {
        let held = File::from(borrower.take_back()?);
        let mark = self.mark.lock();
        let mut found = vec![0; mark.bytes.len()];
        held.read_exact_at(&mut found, mark.start)?;
        if found != mark.bytes {
            return Err(io::Error::other("another program has written the device meanwhile"));
        }
        Ok(held)
    }

    /// Waits until it is known whether the device may be changed. No code may ask for a second pass
    /// while it has one.
    pub(super) fn pass(&self) -> io::Result<ChangePass<'_>> {
        if let Some(leader) = self.leader.get() {
            return leader.pass();
        }
        loop {
            let state = self.state.read();
            match &*state {
                HoldState::Held(_) => return Ok(ChangePass(state)),
                HoldState::Lent(borrower) if !borrower.has_ended() => {
                    return Ok(ChangePass(state));
                }
                HoldState::Lent(_) => {}
                HoldState::GivenUp(reason) => return Err(not_written(reason)),
            }
            drop(state);
            self.reclaim()?;
        }
    }

    /// Notes that `bufs` were written at `offset`. The caller has a pass.
    pub(super) fn note_write(&self, offset: u64, bufs: &[IoSlice<'_>]) {
        let mut mark = self.mark.lock();
        if !mark.bytes.is_empty() {
            mark.note(offset, bufs);
        }
    }
}

fn not_written(reason: &str) -> io::Error {
    io::Error::other(format!("the device is not written any more: {reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_follows_what_is_written() {
        let mut mark = DeviceMark { start: 10, bytes: vec![0; 4] };
        let mut write = |offset, bufs: &[&[u8]]| {
            let bufs: Vec<_> = bufs.iter().map(|buf| IoSlice::new(buf)).collect();
            mark.note(offset, &bufs);
            mark.bytes.clone()
        };
        assert_eq!(write(0, &[&[1; 10]]), [0; 4]);
        assert_eq!(write(14, &[&[1; 10]]), [0; 4]);
        assert_eq!(write(8, &[&[1, 2, 3]]), [3, 0, 0, 0]);
        assert_eq!(write(11, &[&[], &[4], &[5, 6, 7, 8]]), [3, 4, 5, 6]);
        assert_eq!(write(0, &[&[9; 100]]), [9; 4]);
    }
}
