//! The look for the next request at `/dev/fuse`, before a thread sleeps.
//!
//! One thread at a time looks, and only while requests come in quick succession. A look that finds
//! nothing costs the time of a CPU, so after `n` such looks in a row the threads leave out
//! `2^(n-1)` looks, up to [`MOST_SKIPPED`]. A look that finds a request ends that. For example, a
//! program that makes one call a millisecond makes the threads look once in 65 calls.
//!
//! The thread that looks and the program that asks need a CPU each. So no thread looks while other
//! threads that answer requests may have taken those, nor while requests of several programs come:
//! on two CPUs, looks made one program up to half as fast again, and two a fifth slower.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use crate::cpus::usable;
use crate::device::{self, DeviceChannel, DeviceEvent};

/// The most looks in a row that are left out.
const MOST_SKIPPED: u32 = 64;

/// How many requests in a row one thread of a program has to make before a thread looks.
const ALONE: u32 = 8;

/// What the threads of a mount share to look.
pub(crate) struct SharedLook {
    /// An opening that does not block.
    opening: Arc<OwnedFd>,
    /// How many threads may answer requests while one looks.
    spare: usize,
    /// A thread holds the lock while it looks.
    pace: Mutex<LookPace>,
    /// The thread that made the last request, and how many requests it made in a row.
    asking: AtomicU32,
    in_a_row: AtomicU32,
}

impl SharedLook {
    /// For the mount of `device`, if there are CPUs enough and the device can be opened again.
    pub(crate) fn new(device: &OwnedFd) -> Option<Self> {
        let spare = usable().checked_sub(2)?;
        let opening = device::without_blocking(device)?;
        let (asking, in_a_row) = (AtomicU32::new(0), AtomicU32::new(0));
        Some(Self { opening, spare, pace: Mutex::default(), asking, in_a_row })
    }

    /// Notes that the thread `asking` made a request; 0 stands for the kernel.
    pub(crate) fn note(&self, asking: u32) {
        if asking == 0 {
            return;
        }
        if self.asking.swap(asking, Ordering::Relaxed) == asking {
            self.in_a_row.fetch_add(1, Ordering::Relaxed);
        } else {
            self.in_a_row.store(0, Ordering::Relaxed);
        }
    }

    /// Looks for a request, if no other thread looks, it is worth it, and no more than
    /// [`Self::spare`] threads are `answering`. Returns `None` if no request has come.
    pub(crate) fn look(
        &self,
        channel: &mut DeviceChannel,
        answering: usize,
    ) -> io::Result<Option<DeviceEvent>> {
        if answering > self.spare || self.in_a_row.load(Ordering::Relaxed) < ALONE {
            return Ok(None);
        }
        let Some(mut pace) = self.pace.try_lock() else { return Ok(None) };
        if !pace.is_due() {
            return Ok(None);
        }
        let event = channel.look(&self.opening)?;
        pace.note(event == DeviceEvent::Request);
        Ok(Some(event).filter(|event| *event != DeviceEvent::Nothing))
    }
}

/// When the next look is worth it.
#[derive(Default)]
struct LookPace {
    /// How many looks are left out from now on.
    skips: u32,
    /// How many were left out after the last look that found nothing; 0 after one that found a
    /// request.
    last_skips: u32,
}

impl LookPace {
    /// Whether to look now.
    fn is_due(&mut self) -> bool {
        let is_due = self.skips == 0;
        self.skips = self.skips.saturating_sub(1);
        is_due
    }

    fn note(&mut self, has_found: bool) {
        self.last_skips = if has_found { 0 } else { (self.last_skips * 2).clamp(1, MOST_SKIPPED) };
        self.skips = self.last_skips;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of `calls` calls look, if none finds a request.
    fn looks(pace: &mut LookPace, calls: u32) -> u32 {
        let mut looks = 0;
        for _ in 0..calls {
            if pace.is_due() {
                looks += 1;
                pace.note(false);
            }
        }
        looks
    }

    #[test]
    fn looks_that_find_nothing_become_rare() {
        let mut pace = LookPace::default();
        assert_eq!(looks(&mut pace, 1000), 21);
        assert_eq!(looks(&mut pace, 65 * 100), 100);
        while !pace.is_due() {}
        pace.note(true);
        assert!(pace.is_due(), "a request was found");
    }
}
