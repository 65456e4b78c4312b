//! Volumes in memory that are judged when the last user drops them.
//!
//! ```text
//! CheckedDevice ── MemoryDevice ── the volume, as the engine writes it
//!      │
//!    drop ──> an image file ──> btrfs check ──> the kernel, of a sample
//!        └──> the engine that the test gave, which reads everything
//! ```
//!
//! A test opens its volume on such a device and need not ask for the check. The judges see what the
//! devices hold when they are dropped: the last commit, as if the power were cut. A test that
//! damages its volume, or writes something other than btrfs, says so with
//! [`CheckedDevice::leave_unchecked`]. A test that panics has failed already, so its volume is not
//! judged.
//!
//! The kernel judges one volume in [`JUDGED_EVERY`], or in the number that the variable
//! `OFFSHOOT_JUDGED_EVERY` holds. It mounts the volume for writing, must show path by path what we
//! show, and changes the volume. Then `btrfs check` must find nothing, we must show what the kernel
//! shows, and we must find what it changed.

use std::io::{IoSlice, Result};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_vfs::FileSystem;

use crate::btrfs::disks::{Disks, OLD_CACHE, UUID_TREE, assert_image_checks};
use crate::btrfs::judges;
use crate::btrfs::outside::{change, require_change, require_same};
use crate::compare::{Aspect, Compare};
use crate::model::Model;

/// The kernel judges one volume in this many.
pub const JUDGED_EVERY: u64 = 8;

/// What a volume shows.
pub struct ShownVolume {
    /// The files of the volume.
    pub files: Box<dyn FileSystem>,
    /// Whether the engine replayed a pending log to show this.
    pub has_log: bool,
    /// Whether the volume holds orphans: files or subvolumes that have no name any more.
    pub has_orphans: bool,
}

/// Opens the volume on a device. Panics if it cannot.
pub type ShowVolume = fn(&Arc<dyn BlockDevice>) -> ShownVolume;

/// A device in memory. When it is dropped, `btrfs check` and the engine must find the volume on it
/// in order.
#[derive(Debug)]
pub struct CheckedDevice {
    memory: MemoryDevice,
    /// The device that is read where nothing was written.
    below: Option<Arc<CheckedDevice>>,
    show: ShowVolume,
    is_left_unchecked: AtomicBool,
    /// The kernel judges this volume even if it is not drawn.
    is_for_kernel: AtomicBool,
}

impl CheckedDevice {
    /// An empty device of `size_bytes`, on which the test makes a volume.
    #[must_use]
    pub fn sparse(size_bytes: u64, show: ShowVolume) -> Self {
        let memory = MemoryDevice::sparse(size_bytes);
        Self::with(memory, None, show)
    }

    /// A device that shows `below` and keeps all writes to itself.
    #[must_use]
    pub fn over(below: Arc<Self>) -> Self {
        let memory = MemoryDevice::over(below.clone());
        let show = below.show;
        Self::with(memory, Some(below), show)
    }

    fn with(memory: MemoryDevice, below: Option<Arc<Self>>, show: ShowVolume) -> Self {
        let (is_left_unchecked, is_for_kernel) = Default::default();
        Self { memory, below, show, is_left_unchecked, is_for_kernel }
    }

    /// Lets the kernel judge the volume even if it is not drawn.
    pub fn have_kernel_judge(&self) {
        self.is_for_kernel.store(true, Ordering::Relaxed);
    }

    /// Leaves the volume unjudged when the device is dropped. `_reason` tells the reader of the
    /// test why.
    pub fn leave_unchecked(&self, _reason: &str) {
        self.is_left_unchecked.store(true, Ordering::Relaxed);
    }

    /// Calls `visit` with the offset and the bytes of everything that was written, in this device
    /// and in those below it.
    fn visit_contents(&self, visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        if let Some(below) = &self.below {
            below.visit_contents(visit)?;
        }
        self.memory.visit_changes(visit)
    }

    fn judge(&self) {
        let memory: Arc<dyn BlockDevice> = Arc::new(self.memory.snapshot());
        let shown = (self.show)(&memory);
        Model::copy(&*shown.files).expect("everything reads");
        if !judges::are_present() {
            return;
        }
        let disks = Disks::beside(self.size_bytes());
        let image = &disks.images()[0];
        let file = std::fs::File::options().write(true).open(image).expect("an image file");
        let mut write =
            |at, bytes: &[u8]| std::os::unix::fs::FileExt::write_all_at(&file, bytes, at);
        self.visit_contents(&mut write).expect("an image of the volume");
        drop(file);
        assert_image_checks(image);
        if is_drawn() || self.is_for_kernel.load(Ordering::Relaxed) {
            self.judge_by_kernel(&disks, &shown).unwrap_or_else(|reason| {
                panic!("{reason}\nOFFSHOOT_JUDGED_EVERY=1 has the kernel judge every volume")
            });
        }
    }

    fn judge_by_kernel(
        &self,
        disks: &Disks,
        shown: &ShownVolume,
    ) -> std::result::Result<(), String> {
        /// All volumes of a test have the same id, and the kernel mounts only one of them at a
        /// time.
        static TURN: Mutex<()> = Mutex::new(());
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let ShownVolume { files, has_log, has_orphans } = shown;
        let mut compare = Compare::default();
        if *has_log {
            // A file that lost a name in a log replay has the time of the replay.
            compare = compare.without(Aspect::TimesOfNames);
        }
        let mut expected = vec![OLD_CACHE];
        // The kernel checks the UUID tree after it replayed a log or removed orphans.
        expected.extend((*has_log || *has_orphans).then_some(UUID_TREE));
        let mounted = disks.mount_watched("rw,noatime,subvolid=5", &expected);
        require_same(&compare, &**files, &mounted)?;
        let is_changed = change(&mounted, &**files)?;
        drop(mounted);
        assert_image_checks(&disks.images()[0]);
        let left = (self.show)(&disks.devices()[0]).files;
        let mounted = disks.mount_watched("ro,noatime,subvolid=5", &expected);
        require_same(&Compare::default(), &*left, &mounted)
            .map_err(|e| format!("what the kernel left: {e}"))?;
        if is_changed {
            require_change(&*left)?;
        }
        Ok(())
    }
}

/// Whether the kernel judges the next volume.
fn is_drawn() -> bool {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let every = std::env::var("OFFSHOOT_JUDGED_EVERY").ok();
    let every = every
        .map_or(JUDGED_EVERY, |every| every.parse().expect("OFFSHOOT_JUDGED_EVERY is a number"));
    NEXT.fetch_add(1, Ordering::Relaxed).is_multiple_of(every)
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

impl offshoot_device::Delegate for CheckedDevice {
    fn inner(&self) -> &dyn BlockDevice {
        &self.memory
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> Result<()> {
        self.inner().write_vectored_at(offset, bufs)
    }
}
