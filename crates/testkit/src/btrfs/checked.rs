//! Volumes in memory that are judged when nobody has them any more.
//!
//! ```text
//! CheckedDevice ── MemoryDevice ── the volume, as the engine writes it
//!      │
//!    drop ──> an image file ──> btrfs check ──> the kernel, of a sample
//!        └──> the engine that the test gave, which reads everything
//! ```
//!
//! A test opens its volume on such a device, and need not remember to have it checked. What is
//! judged is what the devices hold then: the last commit, as if the power were cut. A test that
//! damages its volume, or puts into it what is none of btrfs, says so with
//! [`CheckedDevice::leave_unchecked`]. A test that panics has its verdict already.
//!
//! The kernel takes its turn on one volume of [`JUDGED_EVERY`], or of what the variable
//! `OFFSHOOT_JUDGED_EVERY` says: it mounts the volume for writing, shows path by path what we show,
//! and changes it. Then `btrfs check` finds nothing, we show what the kernel does, and we find what
//! it changed.

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

/// The volumes of which the kernel takes its turn on one.
pub const JUDGED_EVERY: u64 = 8;

/// What a volume shows.
pub struct Shown {
    /// Its files.
    pub files: Box<dyn FileSystem>,
    /// Whether that is what a pending log makes of it.
    pub has_log: bool,
    /// Whether files or subvolumes without a name are left.
    pub has_orphans: bool,
}

/// Opens the volume on a device, and panics where it cannot.
pub type Show = fn(&Arc<dyn BlockDevice>) -> Shown;

/// A device in memory, on which is a volume that `btrfs check` and the engine find in order when
/// the device is dropped.
#[derive(Debug)]
pub struct CheckedDevice {
    memory: MemoryDevice,
    /// What shows where nothing was written.
    below: Option<Arc<CheckedDevice>>,
    show: Show,
    is_left_unchecked: AtomicBool,
    /// The kernel takes its turn, drawn or not.
    is_for_kernel: AtomicBool,
}

impl CheckedDevice {
    /// An empty device of `size_bytes`, on which somebody makes a volume.
    #[must_use]
    pub fn sparse(size_bytes: u64, show: Show) -> Self {
        let memory = MemoryDevice::sparse(size_bytes);
        Self::with(memory, None, show)
    }

    /// A device that shows `below`, and keeps what is written to it for itself.
    #[must_use]
    pub fn over(below: Arc<Self>) -> Self {
        let memory = MemoryDevice::over(below.clone());
        let show = below.show;
        Self::with(memory, Some(below), show)
    }

    fn with(memory: MemoryDevice, below: Option<Arc<Self>>, show: Show) -> Self {
        let (is_left_unchecked, is_for_kernel) = Default::default();
        Self { memory, below, show, is_left_unchecked, is_for_kernel }
    }

    /// The kernel takes its turn on the volume, whether it is drawn or not.
    pub fn have_kernel_judge(&self) {
        self.is_for_kernel.store(true, Ordering::Relaxed);
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

    fn judge_by_kernel(&self, disks: &Disks, shown: &Shown) -> std::result::Result<(), String> {
        /// All volumes of a test have one id, and the kernel mounts only one with it.
        static TURN: Mutex<()> = Mutex::new(());
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let Shown { files, has_log, has_orphans } = shown;
        let mut compare = Compare::default();
        if *has_log {
            // What lost a name in a replay has the time of that.
            compare = compare.without(Aspect::TimesOfNames);
        }
        let mut expected = vec![OLD_CACHE];
        // It looks through that tree when it has replayed a log, or removed files without names.
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

/// Whether the next volume is one on which the kernel takes its turn.
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
