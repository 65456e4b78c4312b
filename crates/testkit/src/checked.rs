//! Volumes in memory that are judged when nobody has them any more.
//!
//! ```text
//! CheckedDevice ── MemoryDevice ── the volume, as the engine writes it
//!      │
//!    drop ──> an image file ──> btrfs check
//!        └──> the engine that the test gave, which reads everything
//! ```
//!
//! A test opens its volume on such a device, and need not remember to have it checked. What is judged is what the
//! devices hold then: the last commit, as if the power were cut. A test that damages its volume, or puts into it what is none of btrfs,
//! says so with [`CheckedDevice::leave_unchecked`]. A test that panics has its verdict already.

use std::io::{IoSlice, Result};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use offshoot_device::{BlockDevice, MemoryDevice};

use crate::disks::{assert_image_checks, scratch_dir};
use crate::judges;

/// Opens the volume on a device and reads all that is in it, and panics where it cannot.
pub type ReadAll = fn(Arc<dyn BlockDevice>);

/// A device in memory, on which is a volume that `btrfs check` and the engine find in order when the device is dropped.
#[derive(Debug)]
pub struct CheckedDevice {
    memory: MemoryDevice,
    /// What shows where nothing was written.
    below: Option<Arc<CheckedDevice>>,
    read_all: ReadAll,
    is_left_unchecked: AtomicBool,
}

impl CheckedDevice {
    /// An empty device of `size_bytes`, on which somebody makes a volume.
    #[must_use]
    pub fn sparse(size_bytes: u64, read_all: ReadAll) -> Self {
        let memory = MemoryDevice::sparse(size_bytes);
        Self { memory, below: None, read_all, is_left_unchecked: AtomicBool::new(false) }
    }

    /// A device that shows `below`, and keeps what is written to it for itself.
    #[must_use]
    pub fn over(below: Arc<Self>) -> Self {
        let memory = MemoryDevice::over(below.clone());
        let (read_all, is_left_unchecked) = (below.read_all, AtomicBool::new(false));
        Self { memory, below: Some(below), read_all, is_left_unchecked }
    }

    /// Nobody looks at the volume when the device is dropped, for this reason.
    pub fn leave_unchecked(&self, _reason: &str) {
        self.is_left_unchecked.store(true, Ordering::Relaxed);
    }

    /// Calls `visit` with the place and the bytes of all that is not zeros, or not any more.
    fn visit_contents(&self, visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        if let Some(below) = &self.below {
            below.visit_contents(visit)?;
        }
        self.memory.visit_changes(visit)
    }

    fn judge(&self) {
        (self.read_all)(Arc::new(self.memory.snapshot()));
        if !judges::are_present() {
            return;
        }
        let dir = scratch_dir();
        let image = dir.path().join("volume.img");
        let file = std::fs::File::create_new(&image).expect("an image file");
        file.set_len(self.size_bytes()).expect("a sparse image file");
        let mut write =
            |at, bytes: &[u8]| std::os::unix::fs::FileExt::write_all_at(&file, bytes, at);
        self.visit_contents(&mut write).expect("an image of the volume");
        assert_image_checks(&image);
    }
}

impl Drop for CheckedDevice {
    fn drop(&mut self) {
        if !self.is_left_unchecked.load(Ordering::Relaxed) && !std::thread::panicking() {
            self.judge();
        }
    }
}

impl Deref for CheckedDevice {
    type Target = MemoryDevice;

    fn deref(&self) -> &MemoryDevice {
        &self.memory
    }
}

impl BlockDevice for CheckedDevice {
    fn name(&self) -> &str {
        self.memory.name()
    }

    fn size_bytes(&self) -> u64 {
        self.memory.size_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.memory.read_at(offset, buf)
    }

    fn prefetch(&self, offset: u64, len: u64) {
        self.memory.prefetch(offset, len);
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.memory.write_at(offset, buf)
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> Result<()> {
        self.memory.write_vectored_at(offset, bufs)
    }

    fn flush(&self) -> Result<()> {
        self.memory.flush()
    }

    fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.memory.discard(offset, len)
    }
}
