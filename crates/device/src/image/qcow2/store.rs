//! What `imago` has for a file.
//!
//! `imago` asks its storage for requests in functions that it declares `unsafe`, because a caller
//! that ignores its rules of alignment and order would harm itself. Nothing in here is unsafe, but
//! a function of such a trait cannot be declared otherwise.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use imago::Storage;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::drivers::CommonStorageHelper;
use parking_lot::Mutex;

use super::counts::Counts;
use super::reader::read_or_zeros;
use crate::{BlockDevice, together};

/// When a write may reach the medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// At any time until the next barrier.
    Free,
    /// Only after everything that was written before it.
    AfterAll,
}

/// A device as a file of `imago`.
#[derive(Debug)]
pub(super) struct Store {
    below: Arc<dyn BlockDevice>,
    order: Order,
    /// Bytes that are shown in place of those of the device, each with its offset.
    overlay: Vec<(u64, Vec<u8>)>,
    /// Held by a thread that writes metadata.
    counts: Mutex<Counts>,
    /// Stores beside each other share it.
    barriers: Arc<Barriers>,
    helper: CommonStorageHelper,
}

/// When a barrier is needed.
#[derive(Debug, Default)]
struct Barriers {
    /// A write returned since the last barrier began.
    is_dirty: AtomicBool,
    /// Held during a barrier: who finds that none is needed waits for the one that is under way,
    /// which may be about its own writes.
    one: Mutex<()>,
}

impl Store {
    pub(super) fn new(
        below: Arc<dyn BlockDevice>,
        order: Order,
        overlay: Vec<(u64, Vec<u8>)>,
    ) -> Self {
        Self {
            below,
            order,
            overlay,
            counts: Mutex::default(),
            barriers: Arc::default(),
            helper: CommonStorageHelper::default(),
        }
    }

    /// A second store over the same device.
    pub(super) fn beside(&self, order: Order) -> Self {
        Self {
            below: self.below.clone(),
            order,
            overlay: Vec::new(),
            counts: Mutex::default(),
            barriers: self.barriers.clone(),
            helper: CommonStorageHelper::default(),
        }
    }

    fn barrier(&self) -> io::Result<()> {
        let Barriers { is_dirty, one } = &*self.barriers;
        let _alone = one.lock();
        if !is_dirty.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        let result = self.below.flush();
        if result.is_err() {
            is_dirty.store(true, Ordering::Release);
        }
        result
    }

    /// Reads what is there; behind the end there are zeros.
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        read_or_zeros(&*self.below, offset, buf)?;
        let end = offset.saturating_add(buf.len() as u64);
        for (start, bytes) in &self.overlay {
            let (from, to) = ((*start).max(offset), (start + bytes.len() as u64).min(end));
            if from < to {
                let inside = |at: u64| usize::try_from(at).map_err(io::Error::other);
                let len = inside(to - from)?;
                let (to_at, from_at) = (inside(from - offset)?, inside(from - start)?);
                buf[to_at..to_at + len].copy_from_slice(&bytes[from_at..from_at + len]);
            }
        }
        Ok(())
    }
}

#[expect(unsafe_code, reason = "the trait declares its functions so; nothing unsafe is done")]
impl Storage for Store {
    fn size(&self) -> io::Result<u64> {
        Ok(self.below.size_bytes())
    }

    unsafe fn pure_readv(&self, bufv: IoVectorMut<'_>, mut offset: u64) -> io::Result<()> {
        for mut buf in bufv.into_inner() {
            self.read(offset, &mut buf)?;
            offset = offset.saturating_add(buf.len() as u64);
        }
        Ok(())
    }

    unsafe fn pure_writev(&self, bufv: IoVector<'_>, offset: u64) -> io::Result<()> {
        let pieces = bufv.into_inner();
        let result = match self.order {
            Order::Free => self.below.write_vectored_at(offset, &pieces),
            Order::AfterAll => {
                let mut bytes = together(&pieces).into_owned();
                let mut counts = self.counts.lock();
                let written = counts.before_write(&*self.below, offset, &mut bytes);
                // What failed may have been written in part.
                if !matches!(written, Ok(false)) {
                    self.barriers.is_dirty.store(true, Ordering::Release);
                }
                written?;
                self.barrier()?;
                self.below.write_at(offset, &bytes)
            }
        };
        // Not before: a barrier that began meanwhile is not about this write.
        self.barriers.is_dirty.store(true, Ordering::Release);
        result
    }

    unsafe fn pure_discard(&self, offset: u64, length: u64) -> io::Result<()> {
        // What refers to the range no more has to say so on the medium first.
        self.barrier()?;
        match self.below.discard(offset, length) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
            result => result,
        }
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.below.flush()
    }

    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        &self.helper
    }
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.below.name())
    }
}
