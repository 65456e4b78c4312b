//! Block devices that their writer has lent to a mount, with a borrower that the tests end.

use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use offshoot_device::{BlockDevice, Borrower, FileDevice, hold_block_device};
use offshoot_testkit::btrfs::disks::{AttachedImages, Disks};
use offshoot_testkit::btrfs::judges;

/// The range that shows whether another program wrote the device.
const MARK: std::ops::Range<u64> = 65_536..69_632;

/// Empty block devices.
struct EmptyDevices {
    // Detached before the images go.
    attached: AttachedImages,
    _disks: Disks,
    _turn: MutexGuard<'static, ()>,
}

/// One test at a time: a process that another one starts has copies of all descriptors, and so of
/// holds, until it becomes its program.
static TURN: Mutex<()> = Mutex::new(());

impl EmptyDevices {
    fn new(count: usize) -> Option<Self> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let disks = Disks::create(&judges::require()?, count, 8);
        Some(Self { attached: AttachedImages::new(disks.images()), _disks: disks, _turn: turn })
    }

    fn path(&self, index: usize) -> PathBuf {
        self.attached.devices()[index].into()
    }
}

/// A borrower that ends when the test says so.
struct EndingBorrower {
    has_ended: Arc<AtomicBool>,
    take_back: Box<dyn Fn() -> io::Result<OwnedFd> + Send + Sync>,
}

impl fmt::Debug for EndingBorrower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.has_ended.fmt(f)
    }
}

impl Borrower for EndingBorrower {
    fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::SeqCst)
    }

    fn take_back(&self) -> io::Result<OwnedFd> {
        (self.take_back)()
    }
}

/// Lends `device` to a borrower. Setting the flag ends it.
fn lend(
    device: &FileDevice,
    take_back: impl Fn() -> io::Result<OwnedFd> + Send + Sync + 'static,
) -> Arc<AtomicBool> {
    let hold = device.exclusive_hold().expect("a block device has one");
    hold.give_up("it is being mounted");
    let has_ended = Arc::new(AtomicBool::new(false));
    let borrower = EndingBorrower { has_ended: has_ended.clone(), take_back: Box::new(take_back) };
    hold.lend(Box::new(borrower), device, MARK).expect("it can be read");
    has_ended
}

#[track_caller]
fn assert_held(path: &Path, is_held: bool) {
    let held = hold_block_device(path).map(drop).map_err(|error| error.kind());
    assert_eq!(held, if is_held { Err(ErrorKind::ResourceBusy) } else { Ok(()) });
}

/// Requires that no change of `device` is possible, for a reason that says `why`.
#[track_caller]
fn assert_not_written(device: &FileDevice, why: &str) {
    for refused in [device.write_at(0, &[1]), device.flush(), device.discard(0, 4096)] {
        let said = refused.expect_err("it is refused").to_string();
        assert!(said.contains("not written any more") && said.contains(why), "{said}");
    }
}

/// All bytes of the device at `path`.
fn bytes_of(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    File::open(path).and_then(|mut file| file.read_to_end(&mut bytes)).expect("it is read");
    bytes
}

/// While no one holds the device, nothing is written, and its locks keep away the programs that
/// honour them.
#[test]
fn a_device_that_nobody_holds_is_not_written_and_stays_locked() {
    let Some(devices) = EmptyDevices::new(1) else { return };
    let path = devices.path(0);
    let device = FileDevice::open_writable(&path).expect("it opens");
    assert_held(&path, true);
    let hold = device.exclusive_hold().expect("a block device has one");
    hold.give_up("it is being mounted");
    assert_not_written(&device, "it is being mounted");
    assert_held(&path, false);
    let refused = FileDevice::open_writable(&path).expect_err("it is locked");
    assert!(refused.to_string().contains("in use by"), "{refused}");
    device.read_at(0, &mut [0; 4096]).expect("it can be read");
    drop((device, hold));
    drop(FileDevice::open_writable(&path).expect("it is free"));
}

/// The device is written while the borrower holds it, and after its end when it could be taken
/// back.
#[test]
fn what_is_taken_back_is_written_again() {
    let Some(devices) = EmptyDevices::new(1) else { return };
    let path = devices.path(0);
    let device = FileDevice::open_writable(&path).expect("it opens");
    let from = path.clone();
    let has_ended = lend(&device, move || hold_block_device(&from));
    device.write_at(MARK.start - 100, &[7; 8192]).expect("the borrower holds it");
    device.flush().expect("the borrower holds it");
    assert_held(&path, false);
    has_ended.store(true, Ordering::SeqCst);
    device.write_at(MARK.start, &[8; 4096]).expect("it was taken back");
    assert_held(&path, true);
    device.exclusive_hold().expect("it has one").reclaim().expect("it is held already");
    device.write_at(0, &[9]).expect("it is held");
    assert_eq!(bytes_of(&path)[..1], [9]);
}

/// When another program has the device, or had it and wrote it, nothing is written any more.
#[test]
fn what_another_program_had_is_not_written() {
    let Some(devices) = EmptyDevices::new(1) else { return };
    let path = devices.path(0);
    let (held, written) = (path.clone(), path.clone());
    let device = FileDevice::open_writable(&path).expect("it opens");
    let has_ended = lend(&device, move || hold_block_device(&held));
    device.write_at(MARK.start, &[7; 4096]).expect("the borrower holds it");
    let other = hold_block_device(&path).expect("no one holds it");
    has_ended.store(true, Ordering::SeqCst);
    assert_not_written(&device, "in use by the kernel");
    drop(other);
    assert_not_written(&device, "in use by the kernel");
    assert_held(&path, false);
    drop(device);

    let device = FileDevice::open_writable(&path).expect("it opens");
    let has_ended = lend(&device, move || hold_block_device(&written));
    device.write_at(MARK.start, &[8; 4096]).expect("the borrower holds it");
    let other = File::options().write(true).open(&path).expect("it opens");
    std::os::unix::fs::FileExt::write_all_at(&other, &[9], MARK.end - 1).expect("it is written");
    has_ended.store(true, Ordering::SeqCst);
    assert_not_written(&device, "another program has written the device");
    assert_held(&path, false);
}

/// A further member is written only while the first one may be.
#[test]
fn members_end_together() {
    let Some(devices) = EmptyDevices::new(2) else { return };
    let [first, second] =
        [0, 1].map(|at| FileDevice::open_writable(&devices.path(at)).expect("it opens"));
    let hold = first.exclusive_hold().expect("it has one");
    second.exclusive_hold().expect("it has one").follow(hold.clone());
    second.write_at(0, &[1]).expect("both are held");
    let has_ended = lend(&first, || Err(io::Error::other("refused by the test")));
    second.write_at(0, &[2]).expect("both are held");
    has_ended.store(true, Ordering::SeqCst);
    assert_not_written(&second, "refused by the test");
    assert_not_written(&first, "refused by the test");
    assert_held(&devices.path(1), true);
    assert_eq!(bytes_of(&devices.path(1))[..1], [2]);
}

/// Threads write all the time. Once the device is being taken back, none of them changes a byte
/// until it is decided.
#[test]
fn all_writing_stops_before_the_device_is_taken_back() {
    const THREADS: u64 = 4;
    let Some(devices) = EmptyDevices::new(1) else { return };
    for round in 0..20_u64 {
        let path = devices.path(0);
        let device = FileDevice::open_writable(&path).expect("it opens");
        let (from, begun) = (path.clone(), Arc::new(AtomicU32::new(0)));
        let count = begun.clone();
        let has_ended = lend(&device, move || {
            count.fetch_add(1, Ordering::SeqCst);
            let before = bytes_of(&from);
            std::thread::sleep(Duration::from_millis(20));
            assert!(bytes_of(&from) == before, "a byte changed");
            if round % 2 == 0 { hold_block_device(&from) } else { Err(ErrorKind::Other.into()) }
        });
        let write = |thread: u64| {
            let (mut after, len) = (0, if thread == 0 { 128 << 10 } else { 4096 });
            for value in (0..=255).cycle() {
                let at = (1 << 20) * (1 + thread);
                let has_ended = has_ended.load(Ordering::SeqCst);
                match device.write_at(at, &vec![value; len]) {
                    Ok(()) => after += u32::from(has_ended),
                    Err(error) => return Err(error),
                }
                if after == 10 {
                    break;
                }
            }
            Ok(())
        };
        let ends = std::thread::scope(|scope| {
            let threads = (0..THREADS).map(|thread| scope.spawn(move || write(thread)));
            let threads: Vec<_> = threads.collect();
            std::thread::sleep(Duration::from_millis(2 * round));
            has_ended.store(true, Ordering::SeqCst);
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Vec<_>>()
        });
        assert_eq!(begun.load(Ordering::SeqCst), 1, "it is decided once");
        let is_taken_back = round % 2 == 0;
        assert!(ends.iter().all(|end| end.is_ok() == is_taken_back), "{ends:?}");
        drop(device);
    }
}
