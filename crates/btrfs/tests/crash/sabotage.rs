//! An explorer that finds nothing proves nothing: engines that are broken on purpose must be caught.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use offshoot_device::BlockDevice;
use offshoot_testkit::crash::explore::Explorer;
use offshoot_testkit::crash::generate::Generator;
use offshoot_testkit::crash::{Devices, Engine, FsyncIs};
use offshoot_vfs::{FileSystem, FileSystemMut, Result};

use crate::engine::{ONE, OURS, volume};
use crate::plan;

/// A device that is flushed less often than it is asked to be.
#[derive(Debug)]
struct Lazy {
    below: Arc<dyn BlockDevice>,
    flushes: AtomicUsize,
    /// Which of each two flushes it leaves out.
    left_out: [bool; 2],
}

impl BlockDevice for Lazy {
    fn name(&self) -> &str {
        self.below.name()
    }

    fn size_bytes(&self) -> u64 {
        self.below.size_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.below.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.below.write_at(offset, buf)
    }

    fn flush(&self) -> io::Result<()> {
        let number = self.flushes.fetch_add(1, Ordering::Relaxed);
        if self.left_out[number % 2] { Ok(()) } else { self.below.flush() }
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.below.discard(offset, len)
    }
}

/// Our engine without some of its barriers: of those before and behind a superblock.
struct WithoutBarriers([bool; 2]);

impl Engine for WithoutBarriers {
    fn open(&self, devices: Devices) -> Result<Box<dyn FileSystem>> {
        OURS.open(devices)
    }

    fn open_writable(&self, devices: Devices) -> Result<Box<dyn FileSystemMut>> {
        let lazy = |below| {
            Arc::new(Lazy { below, flushes: AtomicUsize::new(0), left_out: self.0 }) as Arc<_>
        };
        OURS.open_writable(devices.into_iter().map(lazy).collect())
    }

    fn check(&self, devices: Devices) -> Result<()> {
        OURS.check(devices)
    }

    fn fsync_is(&self) -> FsyncIs {
        FsyncIs::Commit
    }
}

/// What the explorer says of such an engine.
fn caught(left_out: [bool; 2]) -> String {
    let (image, engine) = (volume(7, ONE), WithoutBarriers(left_out));
    let explorer = Explorer { engine: &engine, image, plan: plan(7), judge: None };
    explorer.explore(&Generator::default().one(0)).expect_err("it is broken")
}

#[test]
fn a_superblock_without_a_barrier_before_it_is_found() {
    let problem = caught([true, false]);
    assert!(problem.contains("tree block"), "{problem}");
}

#[test]
fn a_commit_without_a_barrier_behind_it_is_found() {
    let problem = caught([false, true]);
    assert!(problem.contains("lost"), "{problem}");
}
