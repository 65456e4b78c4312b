//! The image files of btrfs volumes, and their mounts.
//!
//! ```text
//! Disks              sparse image files in a temporary directory; one per member
//!   MountedMembers   all or some of them attached to loop devices and mounted somewhere
//! ```
//!
//! [`loops`](crate::loops) undoes everything. The kernel forgets a member before it is detached.

use std::ffi::OsStr;
use std::ops::{ControlFlow, Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::Arc;
use std::time::Duration;

use offshoot_btrfs::{CheckOptions, check_btrfs};
use offshoot_device::{BlockDevice, FileDevice};

use crate::btrfs::judges::Judges;
use crate::images::ImageFiles;
use crate::kernel_log::KernelLog;
use crate::loops::{AttachedLoop, LoopMount};
use crate::run::{command, run, try_run};

/// The message with which the kernel completes the UUID tree: on the first mount of a volume that
/// `mkfs.btrfs` made, and nowhere else.
pub const UUID_TREE: &str = "checking UUID tree";

/// The message of the kernel about every volume without a free-space tree.
pub const OLD_CACHE: &str = "space cache v1 is being deprecated";

/// The image files of one volume.
#[derive(Debug)]
pub struct Disks(ImageFiles);

impl Deref for Disks {
    type Target = ImageFiles;

    fn deref(&self) -> &ImageFiles {
        &self.0
    }
}

impl Disks {
    /// `count` empty images of `mib` MiB each, all of them holes.
    #[must_use]
    pub fn create(_judges: &Judges, count: usize, mib: u64) -> Self {
        Self(ImageFiles::create(count, mib << 20))
    }

    /// One empty image of `size_bytes`, for a caller that is judged only for a moment and does not
    /// wait in the queue of [`Judges`].
    pub(crate) fn beside(size_bytes: u64) -> Self {
        Self(ImageFiles::create(1, size_bytes))
    }

    /// Copies these images as they are now. They may be mounted meanwhile.
    #[must_use]
    pub fn copy(&self, _judges: &Judges) -> Self {
        Self(self.0.copy())
    }

    /// As [`copy`](Self::copy), each image as it is at one moment: see
    /// [`ImageFiles::copy_at_once`].
    #[must_use]
    pub fn copy_at_once(&self, _judges: &Judges) -> Option<Self> {
        self.0.copy_at_once().map(Self)
    }

    /// Adds one more image.
    pub fn add(&mut self, mib: u64) {
        self.0.add(mib << 20);
    }

    /// Runs `mkfs.btrfs` with `options` over all images.
    pub fn mkfs(&self, options: &[&str]) {
        let mut args: Vec<&OsStr> = vec!["-q".as_ref(), "-f".as_ref()];
        args.extend(options.iter().map(OsStr::new));
        args.extend(self.images().iter().map(|image| image.as_os_str()));
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
        panic!("the kernel does not complete the UUID tree of {}", self.images()[0].display());
    }

    /// Mounts all members with `options`, in the form of `mount -o`.
    #[must_use]
    pub fn mount(&self, options: &str) -> MountedMembers {
        MountedMembers::new(self.images(), options)
    }

    /// Like [`mount`](Self::mount), but watched: when the volume is unmounted, the kernel must have
    /// logged no complaint about the members or itself, as [`KernelLog::assert_only`] defines it.
    /// Lines that contain one of `expected` are allowed.
    #[must_use]
    pub fn mount_watched(&self, options: &str, expected: &[&'static str]) -> MountedMembers {
        let attached = AttachedImages::new(self.images());
        // The kernel may have complained about the previous user of the loop devices.
        let log = KernelLog::start();
        let mount = attached.mount(options).unwrap_or_else(|reason| panic!("{reason}"));
        MountedMembers(mount.0.watched(log, expected))
    }

    /// Mounts only the members with these indexes.
    #[must_use]
    pub fn mount_some(&self, members: &[usize], options: &str) -> MountedMembers {
        let images: Vec<_> = members.iter().map(|&index| self.images()[index].clone()).collect();
        MountedMembers::new(&images, options)
    }

    /// Checks that neither `btrfs check` nor our check finds anything, in metadata and in data.
    #[track_caller]
    pub fn assert_checks(&self) {
        if let [image] = self.images() {
            return assert_image_checks(image);
        }
        let attached = AttachedImages::new(self.images());
        let output = attached.checked(|device| check(device));
        // The search for members also meets loop devices that another program is detaching, or that
        // hold a copy of a member or a damaged volume.
        let foreign = |line: &str| {
            let words = line.split(|c: char| c.is_whitespace() || c == ':');
            !words.into_iter().any(|word| attached.devices().contains(&word))
        };
        let is_harmless = |line: &str| {
            line.starts_with("ERROR: cannot scan ")
                || line == "ERROR: superblock checksum mismatch"
                || line.starts_with("WARNING: adding device ") && foreign(line)
        };
        assert_nothing_found(&self.images()[0], &output, is_harmless);
        assert_ours_finds_nothing(self.images());
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

/// Checks that neither `btrfs check` nor our check finds anything in a volume of one image, in
/// metadata and in data. It needs no loop device.
#[track_caller]
pub fn assert_image_checks(image: &Path) {
    assert_nothing_found(image, &check(image), |_| false);
    assert_ours_finds_nothing(&[image]);
}

/// Checks that our check finds nothing.
#[track_caller]
fn assert_ours_finds_nothing(images: &[impl AsRef<Path>]) {
    let open = |image: &dyn AsRef<Path>| -> Arc<dyn BlockDevice> {
        Arc::new(FileDevice::open(image.as_ref()).expect("an image opens"))
    };
    let devices = images.iter().map(|image| open(image)).collect();
    let options = CheckOptions { verifies_data: true, ..CheckOptions::default() };
    let outcome = check_btrfs(devices, &options, &|_| ControlFlow::Continue(()));
    let findings = outcome.expect("our check runs").findings;
    let shown: Vec<_> = findings.iter().map(ToString::to_string).collect();
    assert!(
        shown.is_empty(),
        "our check of {}:\n{}",
        images[0].as_ref().display(),
        shown.join("\n")
    );
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

/// Attaches a member. The kernel remembers the members of unmounted volumes, and a later volume on
/// the same loop device, or a degraded mount, must not find this one. So the kernel forgets it
/// before it is detached.
fn attach(image: &Path, sector_bytes: u32) -> AttachedLoop {
    AttachedLoop::attach(image, sector_bytes).before_detach(|device| {
        let _ = try_run("btrfs", &["device", "scan", "--forget", device]);
    })
}

/// Members of a volume, attached and mounted.
#[derive(Debug)]
pub struct MountedMembers(LoopMount);

impl Deref for MountedMembers {
    type Target = LoopMount;

    fn deref(&self) -> &LoopMount {
        &self.0
    }
}

impl DerefMut for MountedMembers {
    fn deref_mut(&mut self) -> &mut LoopMount {
        &mut self.0
    }
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

    /// The mount, for callers that take one of any format.
    #[must_use]
    pub fn into_mount(self) -> LoopMount {
        self.0
    }

    /// Attaches one more image and makes it a member with `btrfs device add`.
    pub fn add_device(&mut self, image: &Path) {
        let member = attach(image, 512);
        let (device, dir) = (member.device().as_ref(), self.path().as_os_str());
        run("btrfs", &["device".as_ref(), "add".as_ref(), "-f".as_ref(), device, dir]);
        self.0.add_loop(member);
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
        Self { loops: images.iter().map(|image| attach(image, sector_bytes)).collect() }
    }

    /// The loop devices, in the order of the images.
    #[must_use]
    pub fn devices(&self) -> Vec<&str> {
        self.loops.iter().map(AttachedLoop::device).collect()
    }

    /// Calls `check`, which runs a tool that looks for the members on the device of the first one.
    ///
    /// All members are there. But if a member was on another loop device a moment ago, or another
    /// program attaches and detaches devices, the search for members may miss one: it ends at a
    /// device that cannot be read. Then `check` is called again.
    pub fn checked(&self, check: impl Fn(&str) -> Output) -> Output {
        const MOST_CALLS: u32 = 50;
        let misses =
            |output: &Output| String::from_utf8_lossy(&output.stderr).contains(" is missing");
        let mut output = check(self.devices()[0]);
        for _ in 1..MOST_CALLS {
            if !misses(&output) {
                break;
            }
            std::thread::sleep(Duration::from_millis(200));
            output = check(self.devices()[0]);
        }
        output
    }

    /// Mounts the loop devices as one volume.
    ///
    /// # Errors
    /// What the kernel said when it refused to mount them.
    pub fn mount(self, options: &str) -> Result<MountedMembers, String> {
        // With `device=` options the kernel uses these members, and no others.
        let members = self.loops.iter().map(|member| format!("device={}", member.device()));
        let options = std::iter::once(options.to_owned()).chain(members).collect::<Vec<_>>();
        LoopMount::new(self.loops, "btrfs", &options.join(",")).map(MountedMembers)
    }
}
