//! What a commit reads and looks up before it stops writers, and after.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use offshoot_btrfs_format::TreeId;
use offshoot_device::BlockDevice;
use offshoot_testkit::btrfs::checked::CheckedDevice;
use offshoot_vfs::{EntryPlace, FileSystem as _, FileSystemMut as _, NewFile, Timestamp};

use crate::test_volumes::in_memory;
use crate::{BtrfsVolume, EngineOptions, Filesystem, Mechanisms, Stats};

const AT: Timestamp = Timestamp { secs: 1, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };

/// A device that counts the reads of it while writers are stopped.
#[derive(Debug)]
struct GateDevice {
    device: Arc<CheckedDevice>,
    volume: OnceLock<Weak<BtrfsVolume>>,
    reads: AtomicU64,
}

impl offshoot_device::Delegate for GateDevice {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.device
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let volume = self.volume.get().and_then(Weak::upgrade);
        let live = volume.as_ref().and_then(|volume| volume.live_part());
        if live.is_some_and(|live| live.gate.try_read().is_none()) {
            self.reads.fetch_add(1, Ordering::Relaxed);
        }
        self.inner().read_at(offset, buf)
    }
}

fn open(device: Arc<dyn BlockDevice>, mechanisms: Mechanisms) -> Filesystem {
    let options = EngineOptions { mechanisms, commit_interval: None, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(vec![device], &options).expect("it opens");
    volume.filesystem(TreeId::FS).expect("it has a top level")
}

/// Makes a volume with `count` files, each with an extent of its own, and opens it again. Removes
/// the files. Returns what the last commit did, and how often it read a device while writers were
/// stopped.
fn remove_files(count: usize, mechanisms: Mechanisms) -> (Stats, u64) {
    let device = in_memory(4096);
    let fs = open(device.clone(), Mechanisms::default());
    let dir = fs.root();
    for number in 0..count {
        let name = format!("file-{number}");
        let place = EntryPlace { dir, name: name.as_bytes() };
        let file = fs.create(place, &NEW).expect("there is room");
        let byte = u8::try_from(number % 251).expect("below 251");
        fs.write(file, 0, &[byte; 4096], AT).expect("there is room");
    }
    fs.sync().expect("a commit");
    drop(fs);
    let device = Arc::new(GateDevice { device, volume: OnceLock::new(), reads: AtomicU64::new(0) });
    let fs = open(device.clone(), mechanisms);
    for number in 0..count {
        let name = format!("file-{number}");
        fs.unlink(EntryPlace { dir, name: name.as_bytes() }, AT).expect("it is there");
    }
    device.volume.set(Arc::downgrade(fs.volume())).expect("it is set once");
    fs.sync().expect("a commit");
    (fs.volume().stats(), device.reads.load(Ordering::Relaxed))
}

/// The extents that are looked up while writers are stopped are blocks of the trees that a commit
/// changes, far fewer than the extents that writers changed.
#[test]
fn extents_are_looked_up_before_writers_are_stopped() {
    for count in [1000, 8000] {
        let (stats, _) = remove_files(count, Mechanisms::default());
        let (planned, late) = (stats.references_planned, stats.references_looked_up_late);
        eprintln!("{count} files: {planned} planned, {late} late");
        assert!(planned >= count as u64, "{planned} of {count}");
        assert!(late * 8 < planned, "{late} late, {planned} planned");
    }
}

/// Before the mend, the commit read every leaf of the extent tree, the free-space tree and the
/// checksum tree that it needed while writers waited.
#[test]
fn leaves_are_read_before_writers_are_stopped() {
    let (_, planned) = remove_files(6000, Mechanisms::default());
    let (_, unplanned) = remove_files(6000, Mechanisms::default().plans_from(usize::MAX));
    eprintln!("{planned} reads while writers are stopped, {unplanned} without planning");
    assert!(planned * 8 < unplanned, "{planned} reads, {unplanned} without planning");
}
