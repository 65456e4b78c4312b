//! What a volume does by itself: it commits by the clock and by the amount of changes, and limits
//! what is in memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem};
use offshoot_btrfs_format::TreeId;
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::btrfs::checked::CheckedDevice;
use offshoot_vfs::{FileSystem, FileSystemMut};

use crate::common::{AT, NEW, in_memory, place};

fn volume(options: &EngineOptions) -> (Arc<CheckedDevice>, Filesystem) {
    let device = in_memory(16384, 512);
    let volume = BtrfsVolume::open_writable(vec![device.clone()], options).expect("it opens");
    (device, volume.filesystem(TreeId::FS).expect("the top level"))
}

/// The volume that a crash now would leave.
fn committed(device: &MemoryDevice) -> Filesystem {
    let devices: Vec<Arc<dyn BlockDevice>> = vec![Arc::new(device.snapshot())];
    let volume = BtrfsVolume::open(devices, &EngineOptions::default()).expect("it opens");
    volume.filesystem(TreeId::FS).expect("the top level")
}

/// Waits until a crash would leave what `is_there` wants, with a limit that suits a busy machine.
fn wait_for(device: &MemoryDevice, is_there: impl Fn(&Filesystem) -> bool) -> bool {
    let end = Instant::now() + Duration::from_secs(60);
    while Instant::now() < end {
        if is_there(&committed(device)) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}

#[test]
fn data_and_names_are_committed_by_time() {
    let interval = Duration::from_millis(100);
    let options = EngineOptions { commit_interval: Some(interval), ..EngineOptions::default() };
    let (device, fs) = volume(&options);
    for round in 0..3u8 {
        let name = format!("file{round}");
        let file = fs.create(place(fs.root(), &name), &NEW).expect("a file");
        fs.write(file, 0, &[round; 10_000], AT).expect("there is room");
        let is_there = |fs: &Filesystem| {
            let mut bytes = vec![255; 10_001];
            fs.lookup(fs.root(), name.as_bytes())
                .and_then(|file| fs.read(file, 0, &mut bytes))
                .is_ok_and(|len| len == 10_000 && bytes[..len].iter().all(|&byte| byte == round))
        };
        assert!(wait_for(&device, is_there), "{name} is not there after a minute");
    }
}

#[test]
fn nothing_is_committed_unless_it_is_asked_for() {
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let (device, fs) = volume(&options);
    let before = device.snapshot();
    let file = fs.create(place(fs.root(), "file"), &NEW).expect("a file");
    fs.write(file, 0, b"data", AT).expect("there is room");
    drop(fs);
    let read = |device: &MemoryDevice| {
        let mut bytes = vec![0; 8 << 20];
        device.read_at(0, &mut bytes).expect("it reads");
        bytes
    };
    assert!(read(&before) == read(&device), "a volume that is dropped holds its last commit");
}

#[test]
fn much_that_is_changed_is_committed_by_the_thread_and_without_it() {
    for interval in [Some(Duration::from_secs(3600)), None] {
        let options = EngineOptions {
            dirty_bytes: 1 << 20,
            commit_interval: interval,
            ..EngineOptions::default()
        };
        let (device, fs) = volume(&options);
        for number in 0..8000 {
            fs.create(place(fs.root(), &format!("file{number}")), &NEW).expect("a file");
        }
        let is_there = |fs: &Filesystem| fs.lookup(fs.root(), b"file1000").is_ok();
        assert!(wait_for(&device, is_there), "nothing was committed with {interval:?}");
    }
}

#[test]
fn data_is_written_back_when_there_is_much_of_it() {
    let options =
        EngineOptions { dirty_bytes: 1 << 20, commit_interval: None, ..EngineOptions::default() };
    let (device, fs) = volume(&options);
    let needle = [0xa5; 4096];
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let fs = &fs;
            scope.spawn(move || {
                for number in 0..40 {
                    let name = format!("file{thread}-{number}");
                    let file = fs.create(place(fs.root(), &name), &NEW).expect("a file");
                    fs.write(file, 0, &needle.repeat(50), AT).expect("there is room");
                }
            });
        }
    });
    // 32,000 KiB were written. A megabyte of it may be in memory, and the pieces that the writers
    // are writing.
    let mut written = 0;
    let mut sector = [0; 4096];
    for offset in (0..512 << 20).step_by(4096) {
        device.read_at(offset, &mut sector).expect("it reads");
        written += usize::from(sector == needle);
    }
    assert!(written > 8000 - (1 << 20) / 4096 - 4 * 50, "{written} of 8000 sectors are written");
}
