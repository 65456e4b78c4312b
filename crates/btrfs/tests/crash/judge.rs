//! States judged from outside: `btrfs check`, and the kernel, which mounts them and changes them.

use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use offshoot_btrfs::{Report, Reporter, Volume};
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::crash::Engine;
use offshoot_testkit::disks::{Attached, Disks, Mount};
use offshoot_testkit::judges::{self, Judges};
use offshoot_testkit::run::try_run;
use offshoot_vfs::{SetAttr, Timestamp};

use crate::engine::OURS;

/// The outside judges, where there are any.
pub(crate) struct Outside {
    judges: Judges,
    /// All states of a run have one id, and the kernel mounts only one volume with it.
    turn: Mutex<()>,
}

impl Outside {
    pub(crate) fn new() -> Option<Self> {
        Some(Self { judges: judges::require()?, turn: Mutex::default() })
    }

    /// `btrfs check` finds nothing; the kernel mounts the state, changes it, and leaves it in order.
    pub(crate) fn judge(&self, devices: &[Arc<MemoryDevice>]) -> Result<(), String> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let devices = with_superblocks(devices)?;
        let disks = Disks::create(&self.judges, devices.len(), devices[0].size_bytes() >> 20);
        let devices: Vec<_> = devices.iter().map(|device| &**device as &dyn BlockDevice).collect();
        disks.fill(&devices).map_err(|e| format!("a copy of the state: {e}"))?;
        check(&disks)?;
        // Whoever scans or forgets devices at the wrong moment fails a mount of several, but not twice.
        let mount = || Mount::try_new(disks.images(), "rw,noatime");
        let mount = mount().or_else(|_| mount())?;
        match std::fs::write(mount.path().join("of-the-kernel"), [1; 9000]) {
            Err(e) if e.kind() != ErrorKind::StorageFull => {
                return Err(format!("a file of the kernel: {e}"));
            }
            _ => {}
        }
        mount.sync();
        drop(mount);
        check(&disks)
    }
}

/// Neither of them looks for a copy of a torn superblock: our next commit writes it anew.
fn with_superblocks(devices: &[Arc<MemoryDevice>]) -> Result<Vec<Arc<MemoryDevice>>, String> {
    let devices: Vec<_> = devices.iter().map(|device| Arc::new(device.snapshot())).collect();
    let shared = || devices.iter().map(|device| device.clone() as Arc<_>).collect();
    let is_torn = Arc::new(AtomicBool::new(false));
    let seen = is_torn.clone();
    let reporter: Reporter = Arc::new(move |report| {
        if matches!(report, Report::SuperblockCopy { .. }) {
            seen.store(true, Ordering::Relaxed);
        }
    });
    let options = offshoot_btrfs::OpenOptions { reporter: Some(reporter), ..Default::default() };
    Volume::open(shared(), &options).map_err(|e| format!("opening it for a judge: {e}"))?;
    if is_torn.load(Ordering::Relaxed) {
        let fs = OURS.open_writable(shared()).map_err(|e| format!("mending it: {e}"))?;
        let at = Timestamp::default();
        let touched = fs.set_attr(fs.root(), &SetAttr::default(), at).and_then(|()| fs.sync());
        touched.map_err(|e| format!("mending it: {e}"))?;
    }
    Ok(devices)
}

fn check(disks: &Disks) -> Result<(), String> {
    let attached = Attached::new(disks.images());
    let words = ["check", "--readonly", "--check-data-csum", attached.devices()[0]];
    try_run("btrfs", &words).map(drop).map_err(|e| format!("btrfs check: {e}"))
}
