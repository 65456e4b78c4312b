//! Volumes on block devices, which are mounted with the type `fuseblk`.
//!
//! | module | what it holds |
//! |---|---|
//! | `forced` | ends without DESTROY: by force, by SIGKILL |
//! | `refused` | what is not mounted so, and mounts that fail |

mod forced;
mod refused;

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use offshoot_device::hold_block_device;
use offshoot_testkit::btrfs::disks::{AttachedImages, Disks};
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::run::{run, try_run};
use offshoot_testkit::scratch_dir;
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::Signal;
use tempfile::TempDir;

use super::disk::MountDisk;
use super::mapped::{MappedIds, MappedPlace};
use super::{
    LEAVE_OTHER_MOUNTS, NamespaceHolder, ServedMount, command, does, is_over_ring, offshoot,
    require, unmount, unmount_here, volume,
};

/// A volume of the program on a loop device.
struct BlockVolume {
    // The fields are dropped in this order.
    link: PathBuf,
    dir: TempDir,
    attached: AttachedImages,
    disks: MountDisk,
}

impl BlockVolume {
    fn new(judges: &Judges) -> Self {
        Self::on(volume(judges, 128))
    }

    /// The volume on `disks`.
    fn on(disks: MountDisk) -> Self {
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
        self.mount_with(command(), options)
    }

    /// The same with the program that `command` starts.
    #[track_caller]
    fn mount_with(&self, command: Command, options: &str) -> ServedMount {
        self.wait_until_free();
        let options = format!("fuseblk,{options}");
        let mounted = ServedMount::of(command, scratch_dir(), &self.link, &options);
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
        unmount_here(&dir);
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

/// All bytes of a device.
fn bytes_of(device: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    File::open(device).and_then(|mut file| file.read_to_end(&mut bytes)).expect("it is read");
    bytes
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
        unmount_here(mounted.path());
        let read = volume.try_read_by_kernel("file");
        at_once += u32::from(read.is_ok());
        let read = read.unwrap_or_else(|_| volume.read_by_kernel("file"));
        assert_eq!(read, Some(round.to_string()));
        mounted.ends_well();
    }
    assert!(at_once > 0, "the device was never free at once");
    volume.assert_checks();
}

/// The kernel gives the device to no other program while it is mounted.
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
    unmount_here(dir.path());
    mounted.unmount();
    assert_eq!(volume.read_by_kernel("file").as_deref(), Some("data"));
    volume.assert_checks();
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

/// The volume is looked at, then mounted, and only then opened for writing.
#[test]
fn the_volume_is_opened_for_writing_behind_the_mount() {
    let Some(judges) = require() else { return };
    let volume = BlockVolume::new(&judges);
    let path = volume.dir.path().join("errors");
    let mut command = command();
    command.env("OFFSHOOT_LOG", "fuse::mount=info,btrfs::open=info");
    command.stderr(File::create(&path).expect("a file"));
    let mounted = volume.mount_with(command, "rw");
    let args = [mounted.path().as_os_str()];
    assert!(unmount(&args).status.success());
    let said = fs::read_to_string(&path).expect("it is there");
    let place = |what: &str| said.find(what).unwrap_or_else(|| panic!("no {what} in {said}"));
    let steps = ["is_writable=false", "mounted over the block device", "is_writable=true"];
    let [looked, mounted, opened] = steps.map(place);
    assert!(looked < mounted && mounted < opened, "{said}");
}

/// Two members: the mount holds the first, and the serving process the second.
#[test]
fn a_volume_with_two_members() {
    let Some(judges) = require() else { return };
    let disks = Disks::create(&judges, 2, 256);
    disks.mkfs(&["-d", "raid1", "-m", "raid1"]);
    let volume = BlockVolume::on(MountDisk::Btrfs(disks));
    let second = Path::new(volume.attached.devices()[1]).to_owned();
    for round in 0..2 {
        let mounted = volume.mount(&format!("rw,device={}", second.display()));
        fs::write(mounted.path().join("file"), round.to_string()).expect("a file");
        for device in [volume.device(), &second] {
            let held = hold_block_device(device).map_err(|error| error.kind());
            assert_eq!(held.err(), Some(ErrorKind::ResourceBusy));
        }
        if round == 0 {
            mounted.unmount();
        } else {
            let flags = UnmountFlags::FORCE | UnmountFlags::DETACH;
            rustix::mount::unmount(mounted.path(), flags).expect("its end");
            mounted.ends_well();
        }
        let place = format!("{}:/file", volume.device().display());
        let read = offshoot(&["cat", "--device", &second.to_string_lossy(), &place]);
        assert_eq!(read.stdout, round.to_string().into_bytes(), "{read:?}");
    }
    volume.assert_checks();
}

/// A lazy unmount stores everything when the last file is closed, and holds the device until then.
#[test]
fn a_lazy_unmount_ends_with_the_last_file() {
    let Some(judges) = require() else { return };
    let volume = BlockVolume::new(&judges);
    let mounted = volume.mount("rw");
    let mut file = File::create(mounted.path().join("file")).expect("a file");
    rustix::mount::unmount(mounted.path(), UnmountFlags::DETACH).expect("it is detached");
    assert_eq!(kind_of(mounted.path()), None);
    file.write_all(b"data").expect("it works on");
    volume.assert_held();
    drop(file);
    mounted.ends_well();
    assert_eq!(volume.read_by_kernel("file").as_deref(), Some("data"));
    volume.assert_checks();
}

/// A copy of the mount in another mount namespace keeps the device until it ends, and then
/// everything is stored.
#[test]
fn a_copied_namespace_keeps_the_device() {
    let Some(judges) = require() else { return };
    let volume = BlockVolume::new(&judges);
    let mounted = volume.mount("rw");
    let copy = NamespaceHolder::start("--mount", LEAVE_OTHER_MOUNTS, mounted.path());
    fs::write(mounted.path().join("file"), "data").expect("a file");
    unmount_here(mounted.path());
    volume.assert_held();
    drop(copy);
    mounted.ends_well();
    assert_eq!(volume.read_by_kernel("file").as_deref(), Some("data"));
    volume.assert_checks();
}

/// While the serving process is stopped, `offshoot unmount` waits in a call that can be
/// interrupted. Over io_uring no call can be, once its request is assigned to a stopped thread.
#[test]
fn unmounting_a_stopped_server_can_be_interrupted() {
    let Some(judges) = require().filter(|_| !is_over_ring()) else { return };
    let volume = BlockVolume::new(&judges);
    let mounted = volume.mount("rw");
    fs::write(mounted.path().join("file"), "data").expect("a file");
    mounted.signal(Signal::STOP);
    let mut waiting = command();
    waiting.arg("unmount").arg(mounted.path());
    let mut waiting = waiting.spawn().expect("the program starts");
    std::thread::sleep(Duration::from_millis(300));
    waiting.kill().expect("it waits");
    let ended = waiting.wait().expect("a child");
    assert!(!ended.success(), "{ended}");
    mounted.signal(Signal::CONT);
    assert_eq!(kind_of(mounted.path()).as_deref(), Some("fuseblk.offshoot"));
    mounted.unmount();
    assert_eq!(volume.read_by_kernel("file").as_deref(), Some("data"));
    volume.assert_checks();
}
