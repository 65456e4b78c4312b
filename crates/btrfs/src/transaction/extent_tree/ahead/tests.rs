//! What a commit reads and looks up before it stops writers, and after.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::Duration;

use offshoot_btrfs_format::TreeId;
use offshoot_device::BlockDevice;
use offshoot_testkit::btrfs::checked::CheckedDevice;
use offshoot_vfs::{
    EntryPlace, FilePosition, FileSystem as _, FileSystemMut as _, NewFile, Timestamp,
};

use super::{ExtentKind, MOST, OWNERS, PlannedExtent, PlannedReferences};
use crate::test_volumes::in_memory;
use crate::transaction::RefOwner;
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

fn name(number: usize) -> String {
    format!("file-{number}")
}

/// A volume with `count` files, each with an extent of its own.
fn with_files(count: usize) -> Arc<CheckedDevice> {
    let device = in_memory(4096);
    let fs = open(device.clone(), Mechanisms::default());
    let dir = fs.root();
    for number in 0..count {
        let file = fs.create(EntryPlace { dir, name: name(number).as_bytes() }, &NEW);
        let byte = u8::try_from(number % 251).expect("below 251");
        fs.write(file.expect("there is room"), 0, &[byte; 4096], AT).expect("there is room");
    }
    fs.sync().expect("a commit");
    device
}

fn remove(fs: &Filesystem, numbers: Range<usize>) {
    for number in numbers {
        let name = name(number);
        fs.unlink(EntryPlace { dir: fs.root(), name: name.as_bytes() }, AT).expect("it is there");
    }
}

/// Removes all files of a volume with `count` files. Returns what the last commit did, and how
/// often it read a device while writers were stopped.
fn remove_files(count: usize, mechanisms: Mechanisms) -> (Stats, u64) {
    let device = with_files(count);
    let device = Arc::new(GateDevice { device, volume: OnceLock::new(), reads: AtomicU64::new(0) });
    let fs = open(device.clone(), mechanisms);
    remove(&fs, 0..count);
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

/// Before the mend, each round kept as many extents as both may keep.
#[test]
fn two_rounds_keep_no_more_extents_than_one_may() {
    let fs = open(with_files(800), Mechanisms::default().plans_from(1));
    let volume = fs.volume();
    let live = volume.live().expect("it is writable");
    let _commit = live.lock_commits();
    let mut planned = PlannedReferences::default();
    remove(&fs, 0..400);
    assert!(volume.plan_more(live, &mut planned, 600, true));
    assert!((400..600).contains(&planned.0.len()), "{}", planned.0.len());
    remove(&fs, 400..800);
    assert!(volume.plan_more(live, &mut planned, 600, false));
    assert_eq!(planned.0.len(), 600);
}

/// The item of an extent that many files share takes up to 3 KiB.
#[test]
fn extents_with_many_owners_are_not_kept() {
    let count = OWNERS + 2;
    let fs = open(with_files(count), Mechanisms::default().plans_from(1));
    let at = |number: usize| {
        let file = fs.lookup(fs.root(), name(number).as_bytes()).expect("it is there");
        FilePosition { file, offset: 0 }
    };
    for number in 2..count {
        fs.clone_range(at(0), at(number), 4096, AT).expect("there is room");
    }
    fs.sync().expect("a commit");
    remove(&fs, 0..count);
    let volume = fs.volume();
    let live = volume.live().expect("it is writable");
    let _commit = live.lock_commits();
    let planned = volume.plan_references(live);
    let is_data = |one: &&PlannedExtent| one.kind == ExtentKind::Data;
    let owners = |one: &PlannedExtent| one.known.record.inline.len();
    let kept: Vec<_> = planned.0.values().filter(is_data).map(owners).collect();
    assert_eq!(kept, [1]);
}

/// `docs/memory.md` says what the extents take.
#[test]
fn the_extents_of_a_commit_take_at_most_50_mib() {
    // The table has a power of two of places, of which an eighth stays free. An extent is in the
    // result of a thread too until all threads are done.
    let places = (MOST * 8 / 7).next_power_of_two();
    let entry = size_of::<(u64, PlannedExtent)>();
    let owners = OWNERS * size_of::<(RefOwner, u32)>();
    let bytes = places * (entry + 1) + MOST * (entry + owners);
    assert!(bytes <= 50 << 20, "{bytes} bytes, {entry} an entry, {owners} owners");
}

/// A snapshot of a subvolume that is not changed makes no commit. Before the mend, it looked up the
/// extents that other subvolumes gave up.
#[test]
fn a_snapshot_of_an_unchanged_subvolume_looks_up_nothing() {
    let fs = open(with_files(100), Mechanisms::default().plans_from(1));
    let volume = fs.volume();
    let place = |name| EntryPlace { dir: fs.root(), name };
    let other = fs.create_subvolume(place(b"other"), &NEW).expect("there is room");
    fs.sync().expect("a commit");
    remove(&fs, 0..100);
    let before = volume.stats();
    fs.snapshot(other, place(b"snapshot"), false, AT).expect("there is room");
    let after = volume.stats();
    assert_eq!(after.commits, before.commits);
    assert_eq!(after.references_planned, before.references_planned);
}

/// Before the mend, the wait for operations under way did not count.
#[test]
fn a_commit_stops_writers_while_it_waits_for_operations_under_way() {
    let fs = open(with_files(1), Mechanisms::default());
    remove(&fs, 0..1);
    let volume = fs.volume();
    let live = volume.live().expect("it is writable");
    let under_way = volume.join().expect("it is writable");
    thread::scope(|scope| {
        let commit = scope.spawn(|| fs.sync());
        while live.gate.try_read().is_some() {
            thread::yield_now();
        }
        thread::sleep(Duration::from_millis(20));
        drop(under_way);
        commit.join().expect("no panic").expect("a commit");
    });
    assert!(volume.stats().gate_shut_peak_us >= 20_000);
}
