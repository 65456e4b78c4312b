//! A device that fails while a flush state is under way.

use std::io::{self, IoSlice};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use offshoot_btrfs::{BtrfsVolume, FlushState};
use offshoot_device::{BlockDevice, MemoryDevice, RequestKind};

pub(super) struct Trap {
    below: Arc<MemoryDevice>,
    state: FlushState,
    /// The kind of requests that fail.
    requests: RequestKind,
    /// The volume whose counters say whether the flush state is under way.
    volume: OnceLock<Weak<BtrfsVolume>>,
    is_disarmed: AtomicBool,
    struck: AtomicU64,
}

impl std::fmt::Debug for Trap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "trap of {}", self.state)
    }
}

impl Trap {
    pub(super) fn new(below: Arc<MemoryDevice>, state: FlushState, requests: RequestKind) -> Self {
        let (volume, is_disarmed, struck) = Default::default();
        Self { below, state, requests, volume, is_disarmed, struck }
    }

    /// From now on requests fail while the flush state is under way.
    pub(super) fn arm(&self, volume: &Arc<BtrfsVolume>) {
        self.volume.set(Arc::downgrade(volume)).expect("it is armed once");
    }

    /// From now on nothing fails.
    pub(super) fn disarm(&self) {
        self.is_disarmed.store(true, Ordering::Relaxed);
    }

    /// How many requests it made fail.
    pub(super) fn struck(&self) -> u64 {
        self.struck.load(Ordering::Relaxed)
    }

    fn is_under_way(&self) -> bool {
        let Some(volume) = self.volume.get().and_then(Weak::upgrade) else { return false };
        let flushes = volume.space_stats().flushes;
        flushes.iter().any(|flush| flush.state == self.state && flush.under_way > 0)
    }

    fn arrive(&self, requests: RequestKind) -> io::Result<()> {
        if requests != self.requests
            || self.is_disarmed.load(Ordering::Relaxed)
            || !self.is_under_way()
        {
            return Ok(());
        }
        self.struck.fetch_add(1, Ordering::Relaxed);
        Err(io::Error::other("a fault in a flush state"))
    }
}

impl offshoot_device::Delegate for Trap {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.below
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.arrive(RequestKind::Reads)?;
        self.inner().read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.arrive(RequestKind::Writes)?;
        self.inner().write_at(offset, buf)
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        self.arrive(RequestKind::Writes)?;
        self.inner().write_vectored_at(offset, bufs)
    }

    fn flush(&self) -> io::Result<()> {
        self.arrive(RequestKind::Flushes)?;
        self.inner().flush()
    }
}
