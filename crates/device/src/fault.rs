//! A device that fails on purpose.
//!
//! Faults live in the device, so that tests can inject them under every layer and no layer needs a
//! hook of its own. A test chooses them in two ways:
//!
//! * by place: [`FaultDevice::add`] hits every request that touches a range, like a bad spot of a
//!   medium, and [`FaultDevice::add_to`] hits those of one kind;
//! * by time: [`FaultDevice::strike`] hits the one request with a given number. A test counts the
//!   requests of a workload once, and then runs it with a fault at the first request, the second,
//!   and so on to the last.
//!
//! | | a read | a write | a flush | a discard |
//! |---|---|---|---|---|
//! | [`Fault::Error`] | `EIO` | `EIO`, nothing is written | `EIO`, nothing reaches the device below | as a flush |
//! | [`Fault::Short`] | `EIO` | `EIO`, some sectors are written: those before the range, or the first half | as `Error` | as `Error` |
//! | [`Fault::Garbage`] by time | every byte of the request comes inverted | every byte is written inverted | succeeds, and nothing reaches the device below | none |
//! | [`Fault::Garbage`] by place | the bytes of the range come inverted | none: the medium spoils what is read | none | none |
//!
//! The device does not count hints ([`BlockDevice::prefetch`]), and they never fail.

use std::io::{self, IoSlice};
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::io::Errno;

use crate::{BlockDevice, SECTOR_BYTES, together, total_bytes};

/// What goes wrong with a request to a [`FaultDevice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The request fails with `EIO` and does nothing.
    Error,
    /// The request succeeds, and every byte that it reads or writes is inverted, as after a silent
    /// corruption. A flush does nothing and succeeds.
    Garbage,
    /// The request fails with `EIO`; a write has written its first sectors before.
    Short,
}

/// The kinds of requests that a [`FaultDevice`] counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// [`BlockDevice::read_at`].
    Reads,
    /// [`BlockDevice::write_at`] and [`BlockDevice::write_vectored_at`]; each call counts as one.
    Writes,
    /// [`BlockDevice::flush`].
    Flushes,
    /// [`BlockDevice::discard`].
    Discards,
    /// Requests of all these kinds, in the order in which they arrive.
    All,
}

/// A device over another one, with faults at some places or times.
#[derive(Debug)]
pub struct FaultDevice {
    below: Arc<dyn BlockDevice>,
    state: Mutex<FaultState>,
}

#[derive(Debug, Default)]
struct FaultState {
    places: Vec<(RequestKind, Range<u64>, Fault)>,
    times: Vec<(RequestKind, u64, Fault)>,
    reads: u64,
    writes: u64,
    flushes: u64,
    discards: u64,
}

impl FaultState {
    fn count(&self, requests: RequestKind) -> u64 {
        match requests {
            RequestKind::Reads => self.reads,
            RequestKind::Writes => self.writes,
            RequestKind::Flushes => self.flushes,
            RequestKind::Discards => self.discards,
            RequestKind::All => self.reads + self.writes + self.flushes + self.discards,
        }
    }
}

impl FaultDevice {
    /// A device that passes everything through to `below` until a fault is added.
    #[must_use]
    pub fn new(below: Arc<dyn BlockDevice>) -> Self {
        Self { below, state: Mutex::default() }
    }

    /// Makes all bytes of `range` faulty from now on.
    pub fn add(&self, range: Range<u64>, fault: Fault) {
        self.add_to(RequestKind::All, range, fault);
    }

    /// Makes all bytes of `range` faulty for requests of one kind.
    pub fn add_to(&self, requests: RequestKind, range: Range<u64>, fault: Fault) {
        self.state.lock().places.push((requests, range, fault));
    }

    /// Makes one request faulty: the one that arrives when [`count`](Self::count) is `number` for
    /// its kind. 0 is the first request since the device was made.
    pub fn strike(&self, requests: RequestKind, number: u64, fault: Fault) {
        self.state.lock().times.push((requests, number, fault));
    }

    /// How many requests of a kind arrived since the device was made.
    #[must_use]
    pub fn count(&self, requests: RequestKind) -> u64 {
        self.state.lock().count(requests)
    }

    /// Counts one request of the kind `kind`. Returns the fault of its number, and the faults of
    /// the ranges that it touches.
    fn arrive(&self, kind: RequestKind, range: &Range<u64>) -> RequestFaults {
        let mut state = self.state.lock();
        let number = |requests| state.count(requests);
        let hit = |requests, at| {
            (requests == kind || requests == RequestKind::All) && at == number(requests)
        };
        let in_time = state.times.iter().find(|time| hit(time.0, time.1)).map(|time| time.2);
        let touched = |at: &Range<u64>| at.start.max(range.start)..at.end.min(range.end);
        let is_of_kind = |of: &RequestKind| *of == kind || *of == RequestKind::All;
        let places = state.places.iter().filter(|(of, ..)| is_of_kind(of));
        let in_place = places.map(|(_, at, fault)| (touched(at), *fault));
        let in_place = in_place.filter(|(at, _)| !at.is_empty()).collect();
        match kind {
            RequestKind::Reads => state.reads += 1,
            RequestKind::Writes => state.writes += 1,
            RequestKind::Flushes | RequestKind::All => state.flushes += 1,
            RequestKind::Discards => state.discards += 1,
        }
        RequestFaults { in_time, in_place }
    }
}

/// The faults of one request.
struct RequestFaults {
    in_time: Option<Fault>,
    in_place: Vec<(Range<u64>, Fault)>,
}

/// What happens to a write.
enum WriteOutcome {
    Done,
    Inverted,
    /// It fails after its first bytes, this many, were written.
    Cut(u64),
}

impl RequestFaults {
    fn of_write(&self, range: &Range<u64>) -> WriteOutcome {
        let sector = |offset: u64| (offset / SECTOR_BYTES * SECTOR_BYTES).max(range.start);
        let middle = range.start + (range.end - range.start) / 2;
        let by_time = match self.in_time {
            Some(Fault::Error) => Some(range.start),
            Some(Fault::Short) => Some(sector(middle)),
            Some(Fault::Garbage) | None => None,
        };
        let by_place = self.in_place.iter().filter_map(|(at, fault)| match fault {
            Fault::Error => Some(range.start),
            Fault::Short => Some(sector(at.start)),
            Fault::Garbage => None,
        });
        match by_place.chain(by_time).min() {
            Some(end) => WriteOutcome::Cut(end - range.start),
            None if self.in_time == Some(Fault::Garbage) => WriteOutcome::Inverted,
            None => WriteOutcome::Done,
        }
    }
}

impl crate::Delegate for FaultDevice {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.below
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let range = offset..offset.saturating_add(buf.len() as u64);
        let faults = self.arrive(RequestKind::Reads, &range);
        let by_time = faults.in_time.map(|fault| (range, fault));
        self.inner().read_at(offset, buf)?;
        for (range, fault) in by_time.into_iter().chain(faults.in_place) {
            match fault {
                Fault::Error | Fault::Short => return Err(Errno::IO.into()),
                Fault::Garbage => {
                    let inside = |at: u64| usize::try_from(at - offset).expect("inside `buf`");
                    invert(&mut buf[inside(range.start)..inside(range.end)]);
                }
            }
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        BlockDevice::write_vectored_at(self, offset, &[IoSlice::new(buf)])
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        let range = offset..offset.saturating_add(total_bytes(bufs));
        match self.arrive(RequestKind::Writes, &range).of_write(&range) {
            WriteOutcome::Done => self.inner().write_vectored_at(offset, bufs),
            WriteOutcome::Inverted => {
                let mut bytes = together(bufs).into_owned();
                invert(&mut bytes);
                self.inner().write_at(offset, &bytes)
            }
            WriteOutcome::Cut(len) => {
                let len = usize::try_from(len).expect("a part of what is in memory");
                self.inner().write_at(offset, &together(bufs)[..len])?;
                Err(Errno::IO.into())
            }
        }
    }

    fn flush(&self) -> io::Result<()> {
        match self.arrive(RequestKind::Flushes, &(0..0)).in_time {
            None => self.inner().flush(),
            Some(Fault::Garbage) => Ok(()),
            Some(Fault::Error | Fault::Short) => Err(Errno::IO.into()),
        }
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let faults = self.arrive(RequestKind::Discards, &(offset..offset.saturating_add(len)));
        let in_place = faults.in_place.into_iter().map(|(_, fault)| fault);
        if faults.in_time.into_iter().chain(in_place).any(|fault| fault != Fault::Garbage) {
            return Err(Errno::IO.into());
        }
        self.inner().discard(offset, len)
    }
}

fn invert(bytes: &mut [u8]) {
    for byte in bytes {
        *byte = !*byte;
    }
}
