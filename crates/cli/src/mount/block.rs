//! Mounts a volume on a whole block device with the type `fuseblk`: then `sync` and `syncfs` reach
//! the serving process, and `umount` waits for it.
//!
//! The mount holds the block device exclusively, so the serving process lends its own hold to it
//! ([`ExclusiveHold`]), and goes on writing under the hold of the mount:
//!
//! | the mount ends | the hold |
//! |---|---|
//! | by unmounting, also lazily | the kernel gives it up when the serving process has stored everything and ended all writing |
//! | by force | the serving process takes it back before it stores what is left, or stores nothing |
//! | because the serving process was killed | the helper unmounts, which gives it up |
//!
//! Only root in the first user namespace may mount so. Where the kernel refuses, the serving
//! process takes its hold back and mounts with the type `fuse`. If it cannot take it back, another
//! program has the device by now, and the volume is not mounted.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use offshoot_device::{BlockDevice, ExclusiveHold};
use offshoot_fuse::{BlockMounter, Helper, Mounter, Unmount};
use offshoot_vfs::Result;

/// Mounts over the block device of a volume if it has one, and as a plain mount otherwise.
pub(super) struct VolumeMounter {
    helper: Arc<Helper>,
    /// The hold of the block device that is the whole volume.
    hold: Option<Arc<ExclusiveHold>>,
    is_lent: AtomicBool,
}

impl VolumeMounter {
    /// Mounts the volume on `devices` with `helper`.
    pub(super) fn new(helper: Arc<Helper>, devices: &[Arc<dyn BlockDevice>]) -> Self {
        let only = if let [device] = devices { device.exclusive_hold() } else { None };
        let hold = only.filter(|_| rustix::process::geteuid().is_root());
        Self { helper, hold, is_lent: AtomicBool::new(false) }
    }
}

impl Mounter for VolumeMounter {
    fn mount(&self) -> Result<OwnedFd> {
        let Some(hold) = &self.hold else { return self.helper.mount() };
        hold.lend();
        self.is_lent.store(true, Ordering::SeqCst);
        self.helper.mount_block().or_else(|_| {
            self.reclaim()?;
            self.helper.mount()
        })
    }

    fn unmount(&self, how: Unmount) -> Result<()> {
        self.helper.unmount(how)
    }

    fn reclaim(&self) -> Result<()> {
        if let Some(hold) = &self.hold
            && self.is_lent.load(Ordering::SeqCst)
        {
            hold.take_back(self.helper.hold()?);
            self.is_lent.store(false, Ordering::SeqCst);
        }
        Ok(())
    }
}
