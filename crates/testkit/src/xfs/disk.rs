//! The image file of an XFS volume, and what the judges do with it.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_machine::xfsprogs::XfsProgs;

use crate::images::ImageFiles;
use crate::kernel_log::KernelLog;
use crate::loops::{AttachedLoop, LoopMount};
use crate::run::{command, run};
use crate::xfs::judges::XfsJudges;

/// The message of the kernel when it mounts a volume with a dirty log.
pub const RECOVERY: &str = "Starting recovery";

/// The message of the kernel about every volume whose blocks are larger than its pages.
pub const LARGE_BLOCKS: &str = "EXPERIMENTAL large block size feature enabled";

/// The message of the kernel about every volume with a directory of metadata.
pub const METADIR: &str = "EXPERIMENTAL metadata directory tree feature enabled";

/// The messages of the kernel about a shutdown that a program asked for.
const SHUTDOWN: [&str; 5] = [
    "User initiated shutdown received",
    "Shutting down filesystem",
    "Please unmount the filesystem",
    // Data that was not written yet is lost.
    "writeback error",
    // A thread of the kernel was freeing an inode, or something else that needs the device.
    "returned error -5",
];

/// The image file of one volume. It is removed on drop.
#[derive(Debug)]
pub struct XfsDisk {
    images: ImageFiles,
    progs: XfsProgs,
    /// Whether loop devices over it pass every request on.
    is_direct: bool,
}

/// What a shutdown does with the log in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XfsShutdown {
    /// The kernel writes it first: everything before the shutdown is in the log on the device.
    LogWritten,
    /// It is lost: what no program synced is gone.
    LogLost,
}

impl XfsDisk {
    /// An empty image of `mib` MiB, all of it a hole.
    #[must_use]
    pub fn create(judges: &XfsJudges, mib: u64) -> Self {
        let images = ImageFiles::create(1, mib << 20);
        Self { images, progs: judges.progs().clone(), is_direct: false }
    }

    /// The volume in a file that another owner keeps, such as a device of ours that a mount shows
    /// as a file. Every request of the kernel reaches the file as it is.
    #[must_use]
    pub fn served(judges: &XfsJudges, image: &Path) -> Self {
        let images = ImageFiles::of_other(image.to_owned());
        Self { images, progs: judges.progs().clone(), is_direct: true }
    }

    /// Copies the image as it is now; a mounted one as a power cut would leave it, if nothing
    /// writes meanwhile. The kernel mounts the copy beside the original only with `nouuid`.
    #[must_use]
    pub fn copy(&self) -> Self {
        Self { images: self.images.copy(), progs: self.progs.clone(), is_direct: false }
    }

    /// Copies the image as it is at one moment, also while it is written: as a power cut would
    /// leave it. `None` where the host does not share blocks of files.
    #[must_use]
    pub fn copy_at_once(&self) -> Option<Self> {
        let images = self.images.copy_at_once()?;
        Some(Self { images, progs: self.progs.clone(), is_direct: false })
    }

    /// The image file.
    #[must_use]
    pub fn image(&self) -> &Path {
        &self.images.images()[0]
    }

    /// The image as a device for reading.
    #[must_use]
    pub fn device(&self) -> Arc<dyn BlockDevice> {
        self.images.devices().remove(0)
    }

    /// The image as a device for writing.
    #[must_use]
    pub fn writable_device(&self) -> Arc<dyn BlockDevice> {
        self.images.writable_devices().remove(0)
    }

    /// Runs `mkfs.xfs` with `options`, which are separated by spaces.
    pub fn mkfs(&self, options: &str) {
        let mut args: Vec<&OsStr> = vec!["-q".as_ref(), "-f".as_ref()];
        args.extend(options.split_whitespace().map(OsStr::new));
        args.push(self.image().as_os_str());
        run(&self.progs.program("mkfs.xfs"), &args);
    }

    /// Mounts the volume with `options`, in the form of `mount -o`.
    ///
    /// # Errors
    /// What the kernel said when it refused to mount it.
    pub fn try_mount(&self, options: &str) -> Result<LoopMount, String> {
        LoopMount::new(vec![self.attach()], "xfs", options)
    }

    fn attach(&self) -> AttachedLoop {
        if self.is_direct {
            AttachedLoop::attach_direct(self.image())
        } else {
            AttachedLoop::attach(self.image(), 512)
        }
    }

    /// Mounts the volume. When it is unmounted, the kernel must have logged no complaint and no
    /// recovery, as [`KernelLog::assert_only`] defines it. Lines that contain one of `expected` are
    /// allowed.
    #[must_use]
    pub fn mount(&self, options: &str, expected: &[&'static str]) -> LoopMount {
        let attached = self.attach();
        // The kernel may have complained about the previous user of the loop device.
        let log = KernelLog::start();
        LoopMount::new(vec![attached], "xfs", options)
            .unwrap_or_else(|reason| panic!("{reason}"))
            .watched(log, expected)
    }

    /// Shuts the mounted volume down, as if the device were gone. What the kernel has written is on
    /// the image; the log is dirty unless nothing changed.
    pub fn shut_down(&self, mount: &mut LoopMount, how: XfsShutdown) {
        for text in SHUTDOWN {
            mount.expect_line(text);
        }
        let shutdown = match how {
            XfsShutdown::LogWritten => "shutdown -f",
            XfsShutdown::LogLost => "shutdown",
        };
        self.xfs_io(mount.path(), &[shutdown]);
    }

    /// Runs `xfs_io` with these commands on a path of a mount.
    ///
    /// # Panics
    /// When it complains.
    pub fn xfs_io(&self, path: &Path, commands: &[&str]) {
        let (_, complaint) = self.run("xfs_io", "-x", commands, path);
        assert!(complaint.is_empty(), "xfs_io {commands:?}: {complaint}");
    }

    /// Checks the volume with `xfs_repair`, which changes nothing.
    ///
    /// # Errors
    /// What it found. A dirty log is a finding: `xfs_repair` does not read it.
    pub fn check(&self) -> Result<(), String> {
        const IGNORED_LOG: &str = "changes in a log which is being";
        let output = command(&self.progs.program("xfs_repair"))
            // A volume with one group has no other superblock to compare.
            .args(["-n", "-f", "-o", "force_geometry"])
            .arg(self.image())
            .output()
            .map_err(|error| format!("xfs_repair cannot be started: {error}"))?;
        let texts =
            [output.stdout, output.stderr].map(|t| String::from_utf8_lossy(&t).into_owned());
        let text = texts.concat();
        if output.status.success() && !text.contains(IGNORED_LOG) {
            return Ok(());
        }
        let image = self.image().display();
        Err(format!("xfs_repair -n {image} ends with {}\n{text}", output.status))
    }

    /// Checks that `xfs_repair` finds nothing.
    #[track_caller]
    pub fn assert_checks(&self) {
        self.check().unwrap_or_else(|finding| panic!("{finding}"));
    }

    /// Runs `xfs_db` with these commands, for reading. Returns what it printed.
    #[must_use]
    pub fn xfs_db(&self, commands: &[&str]) -> String {
        let (shown, complaint) = self.run("xfs_db", "-r", commands, self.image());
        shown + &complaint
    }

    /// Changes the volume with these commands of `xfs_db`. It must not be mounted.
    ///
    /// # Panics
    /// When `xfs_db` complains; its exit code tells of no failure. `write -d` writes what its
    /// checks would refuse.
    pub fn change_with_xfs_db(&self, commands: &[&str]) {
        let (_, complaint) = self.run("xfs_db", "-x", commands, self.image());
        assert!(complaint.is_empty(), "xfs_db {commands:?}: {complaint}");
    }

    /// Runs a program that takes its commands with `-c`. Returns what it printed on standard output
    /// and standard error.
    fn run(&self, name: &str, mode: &str, commands: &[&str], place: &Path) -> (String, String) {
        let mut program = command(&self.progs.program(name));
        program.arg(mode).args(commands.iter().flat_map(|command| ["-c", command])).arg(place);
        let output = program.output().unwrap_or_else(|error| panic!("{name}: {error}"));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{name} {commands:?}: {stdout}{stderr}");
        (stdout, stderr)
    }

    /// The number in a field of the structure that these commands of `xfs_db` go to:
    /// `field(&["sb 0"], "icount")`, `field(&["inode 128"], "core.format")`. Numbers and flags are
    /// decimal or hexadecimal in `xfs_db`, as here.
    #[must_use]
    pub fn field(&self, place: &[&str], name: &str) -> u64 {
        let print = format!("print {name}");
        let shown = self.xfs_db(&[place, &[&print]].concat());
        let value =
            shown.lines().rev().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "));
        // `2 (extents)`, `0xb4b5`, `null`
        let word = value.and_then(|value| value.split_whitespace().next());
        let number = word.and_then(|word| match word.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok(),
            None => word.parse().ok(),
        });
        number.unwrap_or_else(|| panic!("xfs_db shows no number {name} at {place:?}:\n{shown}"))
    }

    /// The inode number of a path of the mounted volume.
    #[must_use]
    pub fn ino(path: &Path) -> u64 {
        use std::os::unix::fs::MetadataExt;
        path.symlink_metadata().unwrap_or_else(|e| panic!("{}: {e}", path.display())).ino()
    }
}
