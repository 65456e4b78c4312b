//! Volumes on block devices, which are mounted with the type `fuseblk`.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use offshoot_device::{BlockDevice as _, FileDevice, hold_block_device};
use offshoot_testkit::btrfs::disks::{AttachedImages, Disks};
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::run::{run, try_run};
use offshoot_testkit::scratch_dir;
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::Signal;
use tempfile::TempDir;

use super::mapped::{MappedIds, MappedPlace};
use super::{ServedMount, does, offshoot, require, unmount, volume};

/// A volume of the program on a loop device.
struct BlockVolume {
    // The fields are dropped in this order.
    link: PathBuf,
    dir: TempDir,
    attached: AttachedImages,
    disks: Disks,
}

impl BlockVolume {
    fn new(judges: &Judges) -> Self {
        let disks = volume(judges, 256);
        let attached = AttachedImages::new(disks.images());
        let dir = scratch_dir();
        // The log of a mount is beside this name of the device.
        let link = dir.path().join("device");
        std::os::unix::fs::symlink(attached.devices()[0], &link).expect("a link");
        Self { link, dir, attached, disks }
    }

    fn device(&self) -> &Path {
        Path::new(self.attached.devices()[0])
    }

    /// Mounts it, which must be with the type `fuseblk`.
    #[track_caller]
    fn mount(&self, options: &str) -> ServedMount {
        self.wait_until_free();
        let mounted = ServedMount::new(&self.link, options);
        assert_eq!(kind_of(mounted.path()).as_deref(), Some("fuseblk.offshoot"));
        mounted
    }

    /// What the kernel's mount finds in `name` as soon as the kernel can have the device.
    #[track_caller]
    fn read_by_kernel(&self, name: &str) -> Option<String> {
        self.wait_until_free();
        self.try_read_by_kernel(name).expect("the kernel mounts it")
    }

    /// The same, if the kernel can have the device now.
    fn try_read_by_kernel(&self, name: &str) -> Result<Option<String>, Errno> {
        let dir = self.dir.path().join("kernel");
        fs::create_dir_all(&dir).expect("a directory");
        let flags = MountFlags::empty();
        rustix::mount::mount(self.device(), &dir, "btrfs", flags, Some(c""))?;
        // Another program reads it: a process that another test starts inherits our open files for
        // a moment.
        let read = try_run("cat", &[dir.join(name)]).ok();
        rustix::mount::unmount(&dir, UnmountFlags::empty()).expect("its end");
        Ok(read)
    }

    /// Waits until another program can have the device. A mount namespace that another test makes
    /// at the wrong moment has a copy of each mount, which keeps the device until it ends.
    #[track_caller]
    fn wait_until_free(&self) {
        for _ in 0..1000 {
            match hold_block_device(self.device()) {
                Err(error) if error.kind() == ErrorKind::ResourceBusy => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                held => return held.map(drop).expect("a device"),
            }
        }
        panic!("{} stays in use", self.device().display());
    }

    /// Requires that no other program can have the device.
    #[track_caller]
    fn assert_held(&self) {
        let held = hold_block_device(self.device()).map_err(|error| error.kind());
        assert_eq!(held.err(), Some(ErrorKind::ResourceBusy));
    }

    /// Frees the device, and checks the volume.
    fn assert_checks(self) {
        drop(self.attached);
        self.disks.assert_checks();
    }
}

/// The type of what is mounted over `dir`.
fn kind_of(dir: &Path) -> Option<String> {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("it is there");
    let line = table
        .lines()
        .rev()
        .find(|line| line.split(' ').nth(4).is_some_and(|place| Path::new(place) == dir))?;
    line.split_once(" - ")?.1.split(' ').next().map(str::to_owned)
}

fn sync(dir: &Path) {
    run("sync", &["-f".as_ref(), dir.as_os_str()]);
}

/// Whether the kernel passes `syncfs` on.
fn has_syncfs() -> bool {
    let release = rustix::system::uname();
    let release = release.release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let is_new = (numbers.next(), numbers.next()) >= (Some(6), Some(18));
    if !is_new {
        judges::skip(&format!("Linux {release} does not pass syncfs on, Linux 6.18 does"));
    }
    is_new
}

/// What was written before `syncfs` survives a kill, and the helper frees the device after it.
#[test]
fn syncfs_stores_everything() {
    let Some(judges) = require() else { return };
    if !has_syncfs() {
        return;
    }
    let volume = BlockVolume::new(&judges);
    let mounted = volume.mount("rw");
    fs::write(mounted.path().join("file"), "stored").expect("a file");
    sync(mounted.path());
    fs::write(mounted.path().join("late"), "lost").expect("a file");
    mounted.signal(Signal::KILL);
    volume.wait_until_free();
    assert_eq!(kind_of(mounted.path()), None, "it is unmounted");
    assert_eq!(volume.read_by_kernel("file").as_deref(), Some("stored"));
    assert_eq!(volume.read_by_kernel("late"), None);
    drop(mounted);
    // It can be mounted again, and unmounting stores what no program synced.
    let mounted = volume.mount("rw");
    fs::write(mounted.path().join("again"), "stored").expect("a file");
    mounted.unmount();
    assert_eq!(volume.read_by_kernel("again").as_deref(), Some("stored"));
    volume.assert_checks();
}

/// When umount(2) returns, everything is stored and the kernel's mount may write the device.
#[test]
fn umount_waits_until_everything_is_stored() {
    let Some(judges) = require() else { return };
    let volume = BlockVolume::new(&judges);
    let mut at_once = 0;
    for round in 0..10 {
        let mounted = volume.mount("rw");
        fs::write(mounted.path().join("file"), round.to_string()).expect("a file");
        // The kernel may tell of the removed file only when it unmounts.
        let removed = mounted.path().join("removed");
        let mut file = File::create(&removed).expect("a file");
        file.write_all(&vec![7; 100_000]).expect("data");
        fs::remove_file(&removed).expect("it is removed");
        drop(file);
        // Not the program under its name `umount.fuseblk.offshoot`, which waits by itself.
        while let Err(Errno::BUSY) = rustix::mount::unmount(mounted.path(), UnmountFlags::empty()) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let read = volume.try_read_by_kernel("file");
        at_once += u32::from(read.is_ok());
        let read = read.unwrap_or_else(|_| volume.read_by_kernel("file"));
        assert_eq!(read, Some(round.to_string()));
        mounted.ends_well();
    }
    assert!(at_once > 0, "the device was never free at once");
    volume.assert_checks();
}

/// Nobody else gets the device while it is mounted.
#[test]
fn other_writers_are_refused() {
    let Some(judges) = require() else { return };
    let volume = BlockVolume::new(&judges);
    let mounted = volume.mount("rw");
    let device = volume.device().as_os_str();
    let dir = scratch_dir();
    let place = format!("{}:/directory", volume.device().display());
    for args in [["mkdir", &*place], ["mkfs", &*device.to_string_lossy()]] {
        let output = offshoot(&args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("in use by"), "{args:?}: {said}");
    }
    try_run("mkfs.btrfs", &["-f".as_ref(), device]).expect_err("mkfs is refused");
    let flags = MountFlags::empty();
    let kernel = rustix::mount::mount(device, dir.path(), "btrfs", flags, Some(c""));
    assert_eq!(kernel, Err(Errno::BUSY));
    volume.assert_held();
    // In a further place it is the same mount.
    does(&["mount".as_ref(), device, dir.path().as_os_str()]);
    assert_eq!(kind_of(dir.path()).as_deref(), Some("fuseblk.offshoot"));
    fs::write(dir.path().join("file"), "data").expect("a file");
    rustix::mount::unmount(dir.path(), UnmountFlags::empty()).expect("its end");
    mounted.unmount();
    assert_eq!(volume.read_by_kernel("file").as_deref(), Some("data"));
    volume.assert_checks();
}

/// While a device is lent and not mounted, its locks keep away who honours them. The kernel gives
/// it to any other holder, and then it cannot be taken back.
#[test]
fn a_lent_device_stays_locked() {
    let Some(judges) = require() else { return };
    let volume = BlockVolume::new(&judges);
    let open = FileDevice::open_writable(volume.device()).expect("it opens");
    let hold = open.exclusive_hold().expect("a block device has one");
    let busy = |error: std::io::Error| error.kind() == ErrorKind::ResourceBusy;
    assert!(hold_block_device(volume.device()).is_err_and(busy));
    hold.lend();
    let refused = FileDevice::open_writable(volume.device()).expect_err("it is locked");
    assert!(refused.to_string().contains("in use by process"), "{refused}");
    let other = hold_block_device(volume.device()).expect("it is free to hold");
    assert!(hold_block_device(volume.device()).is_err_and(busy));
    hold.take_back(other);
    assert!(hold_block_device(volume.device()).is_err_and(busy));
    open.write_at(128 << 20, &[1; 4096]).expect("it can be written all the time");
    drop((open, hold));
    volume.wait_until_free();
}

/// Where the kernel refuses `fuseblk`, the volume is mounted as `fuse`, and the device is held all
/// the same.
#[test]
fn without_the_right_it_is_a_plain_mount() {
    let Some(judges) = require() else { return };
    let volume = BlockVolume::new(&judges);
    let dir = scratch_dir();
    let script = r#"
        "$0" mount "$1" "$2"
        grep -q -F " $2 rw,nosuid,nodev,noatime - fuse.offshoot $1 " /proc/self/mountinfo
        ! mkfs.btrfs -f "$1"
        echo data > "$2/file"
        "$0" unmount "$2""#;
    let program = env!("CARGO_BIN_EXE_offshoot").as_ref();
    let words = ["--map-root-user", "--mount", "sh", "-e", "-c", script].map(AsRef::as_ref);
    let named = [program, volume.device().as_os_str(), dir.path().as_os_str()];
    run("unshare", &[&words[..], &named].concat());
    assert_eq!(volume.read_by_kernel("file").as_deref(), Some("data\n"));
    volume.assert_checks();
}

/// What is only read is a plain mount, beside which other programs can have the device.
#[test]
fn what_is_only_read_is_not_held() {
    let Some(judges) = require() else { return };
    let volume = BlockVolume::new(&judges);
    let mounted = ServedMount::new(&volume.link, "ro");
    assert_eq!(kind_of(mounted.path()).as_deref(), Some("fuse.offshoot"));
    volume.wait_until_free();
    mounted.unmount();
}

/// SIGTERM stores everything, and the device is free when the last open file is closed.
#[test]
fn a_signal_frees_the_device() {
    let Some(judges) = require() else { return };
    let volume = BlockVolume::new(&judges);
    let mounted = volume.mount("rw");
    let path = mounted.path().join("file");
    let mut file = File::create(&path).expect("a file");
    mounted.signal(Signal::TERM);
    while path.exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    file.write_all(b"data").expect("it works on");
    volume.assert_held();
    drop(file);
    mounted.ends_well();
    assert_eq!(volume.read_by_kernel("file").as_deref(), Some("data"));
    volume.assert_checks();
}

/// After a forced end, the serving process takes the device back before it stores what is left.
#[test]
fn a_forced_end_frees_the_device() {
    let Some(judges) = require() else { return };
    let volume = BlockVolume::new(&judges);
    for (options, name) in [("rw", "file"), ("rw,nosandbox", "other")] {
        let mounted = volume.mount(options);
        fs::write(mounted.path().join(name), "data").expect("a file");
        mounted.signal(Signal::STOP);
        let waiting = mounted.path().join("not asked for before");
        let waiting = std::thread::spawn(move || waiting.symlink_metadata());
        std::thread::sleep(Duration::from_millis(100));
        let output = unmount(&["-f".as_ref(), mounted.path().as_os_str()]);
        waiting.join().expect("no panic").expect_err("no such file, or no such mount");
        let said = String::from_utf8_lossy(&output.stderr);
        let is_told = output.status.code() == Some(1) && said.contains("may not be stored");
        assert!(is_told && said.contains("was stopped"), "{}: {said}", output.status);
        assert_eq!(kind_of(mounted.path()), None);
        mounted.ends_well();
        assert_eq!(volume.read_by_kernel(name).as_deref(), Some("data"));
    }
    volume.assert_checks();
}

/// Mapped ids work as on a plain mount.
#[test]
fn a_block_device_with_mapped_ids() {
    let Some(judges) = require() else { return };
    let volume = BlockVolume::new(&judges);
    let mounted = volume.mount("rw,idmap");
    fs::write(mounted.path().join("file"), "data").expect("a file");
    let mapped = MappedPlace::new(mounted.path(), &MappedIds::new()).expect("it can be shown");
    let owner = mapped.path().join("file").metadata().map(|metadata| metadata.uid());
    assert_eq!(owner.ok(), Some(10_000));
    drop(mapped);
    mounted.unmount();
    volume.assert_checks();
}
