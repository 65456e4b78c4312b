//! The check of a volume that other threads write meanwhile.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use offshoot_btrfs::{
    BtrfsVolume, CheckEvent, CheckOptions, EngineOptions, Filesystem, MkfsOptions, SubvolumeId,
    mkfs,
};
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::threads::SetOnDrop;
use offshoot_vfs::{
    EntryPlace, Errno, Error, FileSystem as _, FileSystemMut as _, NewFile, Timestamp,
};

use uuid::Uuid;

use crate::common::show;

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o755, uid: 0, gid: 0, umask: None, at: AT };

fn volume(mib: usize) -> (Arc<BtrfsVolume>, Filesystem) {
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(vec![0; mib << 20]));
    mkfs(std::slice::from_ref(&device), &MkfsOptions::new(Uuid::from_u128(7), AT))
        .expect("a new volume");
    let options = EngineOptions {
        commit_interval: Some(Duration::from_millis(5)),
        ..EngineOptions::default()
    };
    let volume = BtrfsVolume::open_writable(vec![device], &options).expect("it opens");
    let fs = volume.filesystem(SubvolumeId::FS).expect("every volume has one");
    (volume, fs)
}

/// Makes a file of `len` bytes.
fn make(fs: &Filesystem, name: &str, len: usize) -> Result<(), Error> {
    let place = EntryPlace { dir: fs.root(), name: name.as_bytes() };
    let file = fs.create(place, &NEW)?;
    let data: Vec<u8> = (0..=250).cycle().take(len).collect();
    fs.write(file, 0, &data, AT)
}

/// Threads make and remove files, and the volume commits many times within each check. Without the
/// kept commit, its blocks are overwritten and the check finds damage.
#[test]
fn a_check_finds_nothing_while_others_write() {
    let (volume, fs) = volume(512);
    for number in 0..2000 {
        make(&fs, &format!("old-{number}"), 5000).expect("there is room");
    }
    let (is_over, made) = (AtomicBool::new(false), AtomicU64::new(0));
    let options = CheckOptions { verifies_data: true, ..CheckOptions::default() };
    std::thread::scope(|scope| {
        let _over = SetOnDrop(&is_over);
        for thread in 0..2 {
            let (fs, is_over, made) = (&fs, &is_over, &made);
            scope.spawn(move || {
                for number in 0.. {
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                    let name = |number: u64| format!("{thread}-{number}");
                    make(fs, &name(number), 6000).expect("there is room");
                    let old = if number < 1000 {
                        format!("old-{}", number * 2 + thread)
                    } else {
                        name(number - 500)
                    };
                    fs.unlink(EntryPlace { dir: fs.root(), name: old.as_bytes() }, AT)
                        .expect("it is there");
                    made.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for _ in 0..5 {
            let (before, commits) = (made.load(Ordering::Relaxed), volume.stats().commits);
            let others_went_on = || {
                made.load(Ordering::Relaxed) > before + 10 && volume.stats().commits > commits + 3
            };
            // The first block is looked at when the others have written much.
            let watch = |_: &CheckEvent| {
                while !others_went_on() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                ControlFlow::Continue(())
            };
            let outcome = volume.check(&options, &watch).expect("it is checked");
            assert!(outcome.findings.is_empty(), "{}", show(&outcome));
        }
    });
    fs.sync().expect("it is written");
}

/// What a check keeps is given back before a writer is refused.
#[test]
fn writers_get_what_a_check_keeps() {
    let (volume, fs) = volume(256);
    let fill = |prefix: &str| {
        (0..100_000).find(|number| make(&fs, &format!("{prefix}-{number}"), 1 << 20).is_err())
    };
    let first = fill("first").expect("the volume gets full");
    let again = Once::new();
    let watch = |_: &CheckEvent| {
        // Everything is removed and written once more while the check runs.
        again.call_once(|| {
            for number in 0..first {
                let name = format!("first-{number}");
                fs.unlink(EntryPlace { dir: fs.root(), name: name.as_bytes() }, AT).expect("there");
            }
            let second = fill("second").expect("the volume gets full");
            assert!(second + 10 > first, "{second} files fit, and {first} before");
        });
        ControlFlow::Continue(())
    };
    let error = volume.check(&CheckOptions::default(), &watch).expect_err("it was given up");
    assert_eq!(error.errno(), Errno::NOSPC, "{error}");
    let nothing = |_: &CheckEvent| ControlFlow::Continue(());
    let outcome = volume.check(&CheckOptions::default(), &nothing).expect("it is checked");
    assert!(outcome.findings.is_empty(), "{}", show(&outcome));
}
