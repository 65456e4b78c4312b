//! Image files, loop devices and mounts, undone on drop.
//!
//! ```text
//! Disks              sparse image files in a temporary directory; one per member
//!   MountedMembers   all or some of them attached to loop devices and mounted somewhere
//!     AttachedLoop   one image file on one loop device
//! ```
//!
//! Everything is undone in the reverse order, also after a panic: unmount, make the kernel forget
//! the members, detach the loop devices, remove the files. A step that cannot be undone is reported
//! on standard error and fails the test, because a loop device that stays behind harms the next
//! program that uses it.
//!
//! Loop devices belong to the whole machine, and other programs take them at the same time. So
//! attaching is tried again if another program took the free device first.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use offshoot_device::{BlockDevice, FileDevice};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use tempfile::TempDir;

use crate::btrfs::judges::Judges;
use crate::kernel_log::KernelLog;
use crate::run::{command, run, try_run};
use crate::scratch_dir;

/// The message with which the kernel completes the UUID tree: on the first mount of a volume that
/// `mkfs.btrfs` made, and nowhere else.
pub const UUID_TREE: &str = "checking UUID tree";

/// The message of the kernel about every volume without a free-space tree.
pub const OLD_CACHE: &str = "space cache v1 is being deprecated";

/// The image files of one volume.
#[derive(Debug)]
pub struct Disks {
    images: Vec<PathBuf>,
    dir: TempDir,
}

impl Disks {
    /// `count` empty images of `mib` MiB each, all of them holes.
    #[must_use]
    pub fn create(_judges: &Judges, count: usize, mib: u64) -> Self {
        let mut disks = Self { images: Vec::new(), dir: scratch_dir() };
        (0..count).for_each(|_| disks.add_image(mib << 20));
        disks
    }

    /// One empty image of `size_bytes`, for a caller that is judged only for a moment and does not
    /// wait in the queue of [`Judges`].
    pub(crate) fn beside(size_bytes: u64) -> Self {
        let mut disks = Self { images: Vec::new(), dir: scratch_dir() };
        disks.add_image(size_bytes);
        disks
    }

    /// Copies these images as they are now. They may be mounted meanwhile.
    #[must_use]
    pub fn copy(&self, _judges: &Judges) -> Self {
        let dir = scratch_dir();
        let images = self
            .images
            .iter()
            .map(|image| {
                let copy = dir.path().join(image.file_name().expect("a file name"));
                run("cp", &["--sparse=always".as_ref(), image.as_os_str(), copy.as_os_str()]);
                copy
            })
            .collect();
        Self { images, dir }
    }

    /// Adds one more image.
    pub fn add(&mut self, mib: u64) {
        self.add_image(mib << 20);
    }

    fn add_image(&mut self, size_bytes: u64) {
        let path = self.dir.path().join(format!("member{}.img", self.images.len()));
        let file = File::create(&path).expect("an image file");
        file.set_len(size_bytes).expect("a sparse image file");
        self.images.push(path);
    }

    /// The image files, in the order in which they became members.
    #[must_use]
    pub fn images(&self) -> &[PathBuf] {
        &self.images
    }

    /// Runs `mkfs.btrfs` with `options` over all images.
    pub fn mkfs(&self, options: &[&str]) {
        let mut args: Vec<&OsStr> = vec!["-q".as_ref(), "-f".as_ref()];
        args.extend(options.iter().map(OsStr::new));
        args.extend(self.images.iter().map(|image| image.as_os_str()));
        run("mkfs.btrfs", &args);
    }

    /// Runs `mkfs.btrfs` and lets the kernel mount the volume until it has completed the UUID tree,
    /// which `mkfs` leaves to the first mount. If a later mount completes it again, then a program
    /// did not keep that tree up to date.
    pub fn mkfs_and_settle(&self, options: &[&str]) {
        self.mkfs(options);
        let mount = self.mount_watched("rw,noatime", &[UUID_TREE, OLD_CACHE]);
        let file = mount.path().join("settling");
        for _ in 0..200 {
            // An unmount interrupts it. Only a commit after its end records that it is complete.
            std::fs::write(&file, []).expect("a new volume has room");
            std::fs::remove_file(&file).expect("it was made");
            mount.sync();
            if uuid_tree_is_complete(mount.devices()[0]) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("the kernel does not complete the UUID tree of {}", self.images[0].display());
    }

    /// Copies the contents of these devices to the images, which must be empty.
    ///
    /// # Errors
    /// Those of the devices and of the images.
    pub fn fill(&self, devices: &[&dyn BlockDevice]) -> std::io::Result<()> {
        let mut bytes = vec![0; 256 << 10];
        for (device, image) in devices.iter().zip(&self.images) {
            let file = File::options().write(true).open(image)?;
            for offset in (0..device.size_bytes()).step_by(bytes.len()) {
                device.read_at(offset, &mut bytes)?;
                if bytes.iter().any(|&byte| byte != 0) {
                    file.write_all_at(&bytes, offset)?;
                }
            }
        }
        Ok(())
    }

    /// Mounts all members with `options`, in the form of `mount -o`.
    #[must_use]
    pub fn mount(&self, options: &str) -> MountedMembers {
        MountedMembers::new(&self.images, options)
    }

    /// Like [`mount`](Self::mount), but watched: when the volume is unmounted, the kernel must have
    /// logged no complaint about the members or itself, as [`KernelLog::assert_only`] defines it.
    /// Lines that contain one of `expected` are allowed.
    #[must_use]
    pub fn mount_watched(&self, options: &str, expected: &[&'static str]) -> MountedMembers {
        let attached = AttachedImages::new(&self.images);
        // The kernel may have complained about the previous user of the loop devices.
        let log = KernelLog::start();
        let mut mount = attached.mount(options).unwrap_or_else(|reason| panic!("{reason}"));
        mount.watch = Some((log, expected.to_vec()));
        mount
    }

    /// Mounts only the members with these indexes.
    #[must_use]
    pub fn mount_some(&self, members: &[usize], options: &str) -> MountedMembers {
        let images: Vec<_> = members.iter().map(|&index| self.images[index].clone()).collect();
        MountedMembers::new(&images, options)
    }

    /// All members as devices for reading.
    #[must_use]
    pub fn devices(&self) -> Vec<Arc<dyn BlockDevice>> {
        self.images.iter().map(|image| device(image)).collect()
    }

    /// All members as devices for writing.
    #[must_use]
    pub fn writable_devices(&self) -> Vec<Arc<dyn BlockDevice>> {
        let open =
            |image| FileDevice::open_writable(image).expect("no other program uses the image");
        self.images.iter().map(|image| Arc::new(open(image)) as Arc<dyn BlockDevice>).collect()
    }

    /// The members with these indexes as devices for reading.
    #[must_use]
    pub fn some_devices(&self, members: &[usize]) -> Vec<Arc<dyn BlockDevice>> {
        members.iter().map(|&index| device(&self.images[index])).collect()
    }

    /// Checks that `btrfs check` finds nothing, in metadata and in data.
    #[track_caller]
    pub fn assert_checks(&self) {
        let attached = AttachedImages::new(self.images());
        let check = || check(attached.devices()[0]);
        // All members are there. But if a member was on another loop device a moment ago, the
        // search for members takes the wrong one and then misses it.
        let misses =
            |output: &Output| String::from_utf8_lossy(&output.stderr).contains(" is missing");
        let mut output = check();
        for _ in 0..2 {
            if misses(&output) {
                std::thread::sleep(Duration::from_millis(200));
                output = check();
            }
        }
        // The search for members also meets loop devices that another program is detaching, or that
        // hold a copy of a member.
        let foreign = |line: &str| {
            let words = line.split(|c: char| c.is_whitespace() || c == ':');
            !words.into_iter().any(|word| attached.devices().contains(&word))
        };
        let is_harmless = |line: &str| {
            line.starts_with("ERROR: cannot scan ")
                || line.starts_with("WARNING: adding device ") && foreign(line)
        };
        assert_nothing_found(&self.images()[0], &output, is_harmless);
    }
}

/// Whether the superblock on a device records that the UUID tree is up to date.
fn uuid_tree_is_complete(device: &str) -> bool {
    let shown = run("btrfs", &["inspect-internal", "dump-super", device]);
    let field = |name: &str| {
        let mut lines = shown.lines().map(str::split_whitespace);
        lines.find_map(|mut words| words.next().filter(|word| *word == name).and(words.next()))
    };
    field("generation").is_some() && field("generation") == field("uuid_tree_generation")
}

/// Checks that `btrfs check` finds nothing in a volume of one image, in metadata and in data. It
/// needs no loop device.
#[track_caller]
pub fn assert_image_checks(image: &Path) {
    assert_nothing_found(image, &check(image), |_| false);
}

fn check(place: impl AsRef<OsStr>) -> Output {
    command("btrfs")
        .args(["check", "--readonly", "--check-data-csum"])
        .arg(place)
        .output()
        .expect("btrfs check runs")
}

/// Checks that it succeeded and printed only harmless lines on standard error.
#[track_caller]
fn assert_nothing_found(image: &Path, output: &Output, is_harmless: impl Fn(&str) -> bool) {
    let (stdout, stderr) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    // Progress lines such as `[3/8] checking extents` go there too.
    let complaint = stderr.lines().any(|line| !line.starts_with('[') && !is_harmless(line));
    assert!(
        output.status.success() && !complaint && stdout.contains("no error found"),
        "btrfs check of {} ends with {}\n{stdout}{stderr}",
        image.display(),
        output.status
    );
}

fn device(image: &Path) -> Arc<dyn BlockDevice> {
    Arc::new(FileDevice::open(image).expect("an image that was just made opens"))
}

/// One image on one loop device.
#[derive(Debug)]
struct AttachedLoop {
    device: String,
    image: PathBuf,
}

impl AttachedLoop {
    fn attach(image: &Path, sector_bytes: u32) -> Self {
        // The lock keeps two threads of one process from racing for the same free device.
        static ATTACHING: Mutex<()> = Mutex::new(());
        let sector_size = format!("--sector-size={sector_bytes}");
        let args: [&OsStr; 4] =
            ["--find".as_ref(), "--show".as_ref(), sector_size.as_ref(), image.as_os_str()];
        let mut reason = String::new();
        for attempt in 0..50 {
            let attached = {
                let _turn = ATTACHING.lock().unwrap_or_else(PoisonError::into_inner);
                try_run("losetup", &args)
            };
            match attached {
                Ok(device) => {
                    return Self { device: device.trim().to_owned(), image: image.to_owned() };
                }
                Err(error) => reason = error,
            }
            std::thread::sleep(Duration::from_millis(10 + attempt * 4));
        }
        panic!("no loop device for {}: {reason}", image.display());
    }

    /// The file that the device is attached to now, if it is attached.
    fn backing_file(&self) -> Option<String> {
        let name = self.device.strip_prefix("/dev/")?;
        let path = format!("/sys/block/{name}/loop/backing_file");
        let file = std::fs::read_to_string(path).ok()?;
        // A loop device still holds an image that was removed before it.
        Some(file.trim().trim_end_matches(" (deleted)").to_owned())
    }
}

impl Drop for AttachedLoop {
    fn drop(&mut self) {
        // The kernel remembers the members of unmounted volumes. A later volume on the same loop
        // device, or a degraded mount, must not find this one.
        let _ = try_run("btrfs", &["device", "scan", "--forget", &self.device]);
        let mut reason = String::new();
        for attempt in 0..50 {
            // Once our image is detached, another program may already have taken the device.
            if self.backing_file().is_none_or(|file| Path::new(&file) != self.image) {
                return;
            }
            if let Err(error) = try_run("losetup", &["--detach", &self.device]) {
                reason = error;
            }
            std::thread::sleep(Duration::from_millis(2 + attempt * 4));
        }
        loudly(&format!("{} stays on {}: {reason}", self.image.display(), self.device));
    }
}

/// Members of a volume, attached and mounted.
#[derive(Debug)]
pub struct MountedMembers {
    // The fields are dropped in this order, after the unmount in `drop`.
    loops: Vec<AttachedLoop>,
    dir: TempDir,
    /// For a watched mount: the end of the kernel's log before the mount, and what the kernel may
    /// log.
    watch: Option<(KernelLog, Vec<&'static str>)>,
}

impl MountedMembers {
    fn new(images: &[PathBuf], options: &str) -> Self {
        Self::try_new(images, options).unwrap_or_else(|reason| panic!("{reason}"))
    }

    /// Attaches and mounts `images`.
    ///
    /// # Errors
    /// What the kernel said when it refused to mount them.
    pub fn try_new(images: &[PathBuf], options: &str) -> Result<Self, String> {
        AttachedImages::new(images).mount(options)
    }

    /// The mount point.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The loop devices of the members, in the order in which they were given.
    #[must_use]
    pub fn devices(&self) -> Vec<&str> {
        self.loops.iter().map(|member| member.device.as_str()).collect()
    }

    /// Attaches one more image and makes it a member with `btrfs device add`.
    pub fn add_device(&mut self, image: &Path) {
        let member = AttachedLoop::attach(image, 512);
        let dir = self.dir.path();
        run(
            "btrfs",
            &[
                "device".as_ref(),
                "add".as_ref(),
                "-f".as_ref(),
                member.device.as_ref(),
                dir.as_os_str(),
            ],
        );
        self.loops.push(member);
    }

    /// Changes the options of the mount.
    pub fn remount(&self, options: &str) {
        let (flags, data) = split_options(options);
        rustix::mount::mount_remount(self.path(), flags, data.as_c_str())
            .unwrap_or_else(|error| panic!("remount with {options}: {error}"));
    }

    /// Commits everything that was written, so that it is on the images.
    pub fn sync(&self) {
        let root = File::open(self.path()).expect("the root of a mount opens");
        rustix::fs::syncfs(root).expect("sync of a mounted volume");
    }
}

impl Drop for MountedMembers {
    fn drop(&mut self) {
        let mut result = Ok(());
        for attempt in 0..50 {
            result = rustix::mount::unmount(self.dir.path(), UnmountFlags::empty());
            match result {
                Err(Errno::BUSY) => std::thread::sleep(Duration::from_millis(2 + attempt * 4)),
                _ => break,
            }
        }
        if let Err(error) = result {
            loudly(&format!("unmount {}: {error}", self.dir.path().display()));
        }
        // The loop devices are still ours, so the lines are not about another user of them.
        let watch = self.watch.take().filter(|_| !std::thread::panicking());
        if let Some((log, expected)) = watch {
            log.assert_only(&self.devices(), &expected);
        }
    }
}

/// Images on loop devices that are not mounted: for tools that want block devices.
#[derive(Debug)]
pub struct AttachedImages {
    loops: Vec<AttachedLoop>,
}

impl AttachedImages {
    /// Attaches all of `images`.
    #[must_use]
    pub fn new(images: &[PathBuf]) -> Self {
        Self::with_sectors(images, 512)
    }

    /// The same with sectors of `sector_bytes`.
    #[must_use]
    pub fn with_sectors(images: &[PathBuf], sector_bytes: u32) -> Self {
        Self {
            loops: images.iter().map(|image| AttachedLoop::attach(image, sector_bytes)).collect(),
        }
    }

    /// The loop devices, in the order of the images.
    #[must_use]
    pub fn devices(&self) -> Vec<&str> {
        self.loops.iter().map(|member| member.device.as_str()).collect()
    }

    /// Mounts the loop devices as one volume.
    ///
    /// # Errors
    /// What the kernel said when it refused to mount them.
    pub fn mount(self, options: &str) -> Result<MountedMembers, String> {
        let dir = tempfile::Builder::new()
            .prefix("offshoot-mount-")
            .tempdir()
            .map_err(|error| format!("a mount point: {error}"))?;
        let (flags, mut data) = split_options(options);
        // With `device=` options the kernel uses these members, and no others.
        for member in &self.loops {
            let separator = if data.as_bytes().is_empty() { "" } else { "," };
            let mut bytes = data.into_bytes();
            bytes.extend_from_slice(format!("{separator}device={}", member.device).as_bytes());
            data = CString::new(bytes).expect("no NUL in mount options");
        }
        rustix::mount::mount(&self.loops[0].device, dir.path(), "btrfs", flags, data.as_c_str())
            .map_err(|error| format!("the kernel does not mount with `{options}`: {error}"))?;
        Ok(MountedMembers { loops: self.loops, dir, watch: None })
    }
}

/// Splits `options` into the flags of the mount and the options for the filesystem.
fn split_options(options: &str) -> (MountFlags, CString) {
    let mut flags = MountFlags::empty();
    let mut rest = Vec::new();
    for option in options.split(',').filter(|option| !option.is_empty()) {
        match option {
            "ro" => flags |= MountFlags::RDONLY,
            "rw" => {}
            "noatime" => flags |= MountFlags::NOATIME,
            _ => rest.push(option),
        }
    }
    (flags, CString::new(rest.join(",")).expect("no NUL in mount options"))
}

/// Reports what could not be undone, and fails the test if it has not failed already.
fn loudly(problem: &str) {
    assert!(std::thread::panicking(), "left behind: {problem}");
    eprintln!("left behind: {problem}");
}
