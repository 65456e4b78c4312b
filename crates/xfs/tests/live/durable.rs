//! What survives a power cut, a device that fails, and a volume that was not shut down.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use offshoot_device::{BlockDevice, CrashDevice, CrashPlan, Fault, FaultDevice, RequestKind};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::disk::RECOVERY;
use offshoot_testkit::xfs::judges;
use offshoot_vfs::{Errno, Fallocate, FilePosition, SetAttr, XattrMode};
use offshoot_xfs::{XfsLogState, XfsReport};

use super::*;

/// A copy of a device in a file, for the kernel.
fn image_of(judges: &XfsJudges, device: &dyn BlockDevice, mib: u64) -> XfsDisk {
    let disk = XfsDisk::create(judges, mib);
    let to = disk.writable_device();
    let mut part = vec![0; 1 << 20];
    for at in (0..mib << 20).step_by(part.len()) {
        device.read_at(at, &mut part).unwrap();
        if part.iter().any(|byte| *byte != 0) {
            to.write_at(at, &part).unwrap();
        }
    }
    disk
}

/// Options without the thread, so that only what is asked for becomes durable.
fn without_thread() -> XfsOptions {
    XfsOptions { sync_interval: None, ..XfsOptions::default() }
}

/// The bytes that a file had when it was synced, by the mark of that.
type SyncedContents = BTreeMap<String, (String, Vec<u8>)>;

/// Writes files, syncs some of them, and changes others all the time.
fn write_and_sync(opened: &WrittenXfs, device: &CrashDevice, seed: u64) -> SyncedContents {
    let mut random = Random::new(seed);
    let mut synced = SyncedContents::new();
    let nameless = opened.make("nameless", &random.bytes(50_000));
    opened.files.open(nameless).unwrap();
    opened.files.unlink(opened.place("nameless"), AT).unwrap();
    let shared = opened.make("shared", &random.bytes(40_000));
    for number in 0..14 {
        let name = format!("file-{number}");
        let len = usize::try_from(1 + random.below(60_000)).unwrap();
        let mut bytes = random.bytes(len);
        let file = opened.make(&name, &bytes);
        if number % 3 == 0 {
            let (from, to) =
                (FilePosition { file: shared, offset: 0 }, FilePosition { file, offset: 0 });
            opened.files.clone_range(from, to, 8192, AT).unwrap();
            let of_shared = opened.content(shared);
            bytes.resize(bytes.len().max(8192), 0);
            bytes[..8192].copy_from_slice(&of_shared[..8192]);
            opened.files.write(file, 100, b"over what is shared", AT).unwrap();
            bytes[100..119].copy_from_slice(b"over what is shared");
        }
        if number % 4 == 1 {
            opened
                .files
                .set_attr(file, &SetAttr { size: Some(300), ..SetAttr::default() }, AT)
                .unwrap();
            bytes.resize(300, 0);
        }
        opened.files.set_xattr(file, b"user.name", name.as_bytes(), XattrMode::Set, AT).unwrap();
        let renamed = format!("renamed-{number}");
        opened.files.rename(opened.place(&name), opened.place(&renamed), AT).unwrap();
        opened.files.fsync(file).unwrap();
        if number % 2 == 0 && bytes.len() > 20 {
            // In place, so that only the times of the inode change.
            opened.files.write(file, 3, b"in place", AT).unwrap();
            bytes[3..11].copy_from_slice(b"in place");
            opened.files.fdatasync(file).unwrap();
        }
        device.mark(&renamed);
        synced.insert(renamed.clone(), (renamed, bytes));
        // What is not synced.
        let other = opened.make(&format!("other-{number}"), &random.bytes(9000));
        let what = Fallocate::PunchHole;
        opened.files.fallocate(other, what, 0, 4096, AT).unwrap();
    }
    opened.files.release(nameless).unwrap();
    opened.files.sync().unwrap();
    synced
}

#[test]
fn what_was_synced_survives_a_cut_and_files_without_names_do_not() {
    const MIB: u64 = 64;
    let Some(judges) = judges::require() else { return };
    let seed = seed_of_run();
    let disk = made(&judges, MIB, "--unsupported");
    let device = Arc::new(CrashDevice::new(disk.device()));
    let volume = XfsVolume::open_writable(device.clone(), &without_thread()).unwrap();
    let opened = WrittenXfs::over(volume);
    let synced = write_and_sync(&opened, &device, seed);
    drop(opened);
    let plan = CrashPlan { exhaustive_limit: 3, samples_per_epoch: 3, seed, tears: true };
    let log = device.log();
    let all = log.states(&plan).count();
    let mut behind_marks = 0;
    for (number, state) in log.states(&plan).enumerate().step_by((all / 120).max(1)) {
        let state = state.unwrap();
        let (marks, description) = (state.marks().to_vec(), state.description.clone());
        let [memory] = <[_; 1]>::try_from(state.devices).unwrap();
        let memory: Arc<dyn BlockDevice> = Arc::new(memory);
        if number % 40 == 0 {
            let image = image_of(&judges, &*memory, MIB);
            drop(image.mount("nouuid", &[RECOVERY]));
            image.assert_checks();
        }
        let opened =
            WrittenXfs::over(XfsVolume::open_writable(memory.clone(), &without_thread()).unwrap());
        for mark in &marks {
            let (name, bytes) = &synced[&**mark];
            let file = opened.files.lookup(opened.root(), name.as_bytes());
            let file = file.unwrap_or_else(|error| panic!("{description}: {error}"));
            assert!(opened.content(file) == *bytes, "{description}: {name}");
            behind_marks += 1;
        }
        assert!(opened.files.lookup(opened.root(), b"nameless").is_err() || marks.is_empty());
        opened.shut_down();
        let found = check_xfs(&memory, &XfsOptions::default()).unwrap();
        assert!(found.findings.is_empty(), "{description}: {:#?}", found.findings);
    }
    assert!(behind_marks > 50, "{behind_marks} of {all} states");
}

#[test]
fn a_device_that_fails_ends_writing_and_reading_goes_on() {
    let Some(judges) = judges::require() else { return };
    let disk = made(&judges, 64, "--unsupported");
    let device = Arc::new(FaultDevice::new(disk.writable_device()));
    let told = Arc::new(Mutex::new(Vec::new()));
    let telling = told.clone();
    let options = XfsOptions {
        reporter: Some(Arc::new(move |report| telling.lock().unwrap().push(report.clone()))),
        ..without_thread()
    };
    let opened = WrittenXfs::over(XfsVolume::open_writable(device.clone(), &options).unwrap());
    let file = opened.make("file", b"content");
    opened.files.sync().unwrap();
    opened.files.mkdir(opened.place("dir"), &NEW).unwrap();
    device.strike(RequestKind::Writes, device.count(RequestKind::Writes), Fault::Error);
    opened.files.sync().unwrap_err();
    let ends = [
        opened.files.write(file, 0, b"other", AT).unwrap_err(),
        opened.files.mkdir(opened.place("more"), &NEW).unwrap_err(),
        opened.files.fsync(file).unwrap_err(),
        opened.volume.shut_down().unwrap_err(),
    ];
    assert!(ends.iter().all(|error| error.errno() == Errno::ROFS), "{ends:?}");
    assert_eq!(opened.content(file), b"content");
    opened.files.lookup(opened.root(), b"dir").unwrap();
    let reports = told.lock().unwrap().clone();
    let stops = |report: &&XfsReport| matches!(report, XfsReport::WritingStopped { .. });
    assert_eq!(reports.iter().filter(stops).count(), 1, "{reports:?}");
    drop(opened);
    drop(device);
    let opened = WrittenXfs::new(&disk);
    let file = opened.files.lookup(opened.root(), b"file").unwrap();
    assert_eq!(opened.content(file), b"content");
    opened.shut_down();
    assert_checks(&disk);
}

/// The thread makes changes durable in time, and leaves a recovery nothing to replay.
#[test]
fn a_volume_at_rest_is_durable_and_its_log_covered() {
    let Some(judges) = judges::require() else { return };
    let disk = made(&judges, 64, "--unsupported");
    let interval = Duration::from_millis(30);
    let options = XfsOptions { sync_interval: Some(interval), ..XfsOptions::default() };
    let opened = WrittenXfs::with(&disk, &options);
    opened.make("file", b"content");
    let is_covered = || {
        std::thread::sleep(interval);
        let copy = disk.copy();
        let found = XfsVolume::recover(&copy.writable_device(), &XfsOptions::default()).unwrap();
        let reader = WrittenXfs::new(&copy);
        let is_there = reader.files.lookup(reader.root(), b"file").is_ok();
        is_there && found.is_some_and(|recovery| recovery.replayed == 0)
    };
    assert!((0..100).any(|_| is_covered()), "the log is never covered");
    // What a crash leaves then is mounted by the kernel.
    let copy = disk.copy();
    drop(opened);
    let mount = copy.mount("nouuid", &[RECOVERY]);
    assert_eq!(std::fs::read(mount.path().join("file")).unwrap(), b"content");
    drop(mount);
    copy.assert_checks();
}

#[test]
fn a_volume_that_is_recovered_says_that_its_log_held_something() {
    let Some(judges) = judges::require() else { return };
    let disk = made(&judges, 64, "--unsupported");
    let opened = WrittenXfs::with(&disk, &without_thread());
    assert_eq!(opened.volume.log_state(), &XfsLogState::Empty);
    opened.make("file", b"content");
    opened.files.sync().unwrap();
    let copy = disk.copy();
    let cut = WrittenXfs::new(&copy);
    assert_eq!(cut.volume.log_state(), &XfsLogState::Pending);
    opened.shut_down();
}
