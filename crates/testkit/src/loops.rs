//! Loop devices and mounts of the kernel, undone on drop.
//!
//! ```text
//! LoopMount        a volume of one or several members, mounted somewhere
//!   AttachedLoop   one image file on one loop device
//! ```
//!
//! Everything is undone in the reverse order, also after a panic: unmount, prepare the devices,
//! detach them. A step that cannot be undone is reported on standard error and fails the test,
//! because a loop device that stays behind harms the next program that uses it.
//!
//! Loop devices belong to the whole machine, and other programs take them at the same time. So
//! attaching is tried again if another program took the free device first. Another program may
//! also detach a device that is no longer its own. While we have the device open, the kernel puts
//! that off until we close it.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use tempfile::TempDir;

use crate::kernel_log::KernelLog;
use crate::run::try_run;

/// One image on one loop device.
#[derive(Debug)]
pub struct AttachedLoop {
    device: String,
    image: PathBuf,
    /// The open device, until we detach it.
    held: Option<File>,
    before_detach: fn(&str),
}

impl AttachedLoop {
    /// Attaches `image` to a free loop device with sectors of `sector_bytes`.
    #[must_use]
    pub fn attach(image: &Path, sector_bytes: u32) -> Self {
        Self::attach_with(image, &[&format!("--sector-size={sector_bytes}")])
    }

    /// Attaches `image` to a free loop device that passes every request on as it is: the kernel
    /// keeps no pages of the image, so that writes and flushes keep their order.
    #[must_use]
    pub fn attach_direct(image: &Path) -> Self {
        Self::attach_with(image, &["--direct-io=on"])
    }

    fn attach_with(image: &Path, options: &[&str]) -> Self {
        // The lock keeps two threads of one process from racing for the same free device.
        static ATTACHING: Mutex<()> = Mutex::new(());
        let mut args: Vec<&OsStr> = vec!["--find".as_ref(), "--show".as_ref()];
        args.extend(options.iter().map(OsStr::new));
        args.push(image.as_os_str());
        let image = image.canonicalize().unwrap_or_else(|e| panic!("{}: {e}", image.display()));
        let mut reason = String::new();
        for attempt in 0..50 {
            let attached = {
                let _turn = ATTACHING.lock().unwrap_or_else(PoisonError::into_inner);
                try_run("losetup", &args)
            };
            let held = attached.and_then(|device| Self::hold(device.trim(), &image));
            match held {
                Ok(held) => return held,
                Err(error) => reason = error,
            }
            std::thread::sleep(Duration::from_millis(10 + attempt * 4));
        }
        panic!("no loop device for {}: {reason}", image.display());
    }

    /// Opens `device`, to which `image` was attached.
    ///
    /// # Errors
    /// Another program has detached it since.
    fn hold(device: &str, image: &Path) -> Result<Self, String> {
        let held = File::open(device).map_err(|error| format!("{device}: {error}"))?;
        let (device, image) = (device.to_owned(), image.to_owned());
        let held = Self { device, image, held: Some(held), before_detach: |_| {} };
        if held.is_ours() {
            return Ok(held);
        }
        Err(format!("{} lost its image again", held.device))
    }

    /// Calls `prepare` with the name of the device before it is detached.
    #[must_use]
    pub fn before_detach(mut self, prepare: fn(&str)) -> Self {
        self.before_detach = prepare;
        self
    }

    /// The name of the device: `/dev/loop3`.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.device
    }

    /// The file that the device is attached to now, if it is attached.
    fn backing_file(&self) -> Option<String> {
        let name = self.device.strip_prefix("/dev/")?;
        let path = format!("/sys/block/{name}/loop/backing_file");
        let file = std::fs::read_to_string(path).ok()?;
        // A loop device still holds an image that was removed before it.
        Some(file.trim().trim_end_matches(" (deleted)").to_owned())
    }

    /// Whether our image is attached to the device now.
    fn is_ours(&self) -> bool {
        self.backing_file().is_some_and(|file| Path::new(&file) == self.image)
    }
}

impl Drop for AttachedLoop {
    fn drop(&mut self) {
        (self.before_detach)(&self.device);
        let (mut is_requested, mut reason) = (false, "it is busy".to_owned());
        for attempt in 0..50 {
            // Once our image is detached, another program may already have taken the device.
            if !self.is_ours() {
                return;
            }
            // A device that is busy is detached when it is closed last. A second request may hit
            // the image that another program attaches then.
            if !is_requested {
                match try_run("losetup", &["--detach", &self.device]) {
                    Ok(_) => {
                        is_requested = true;
                        self.held = None;
                        continue;
                    }
                    Err(error) => reason = error,
                }
            }
            std::thread::sleep(Duration::from_millis(2 + attempt * 4));
        }
        loudly(&format!("{} stays on {}: {reason}", self.image.display(), self.device));
    }
}

/// A volume on loop devices, mounted by the kernel.
#[derive(Debug)]
pub struct LoopMount {
    // The fields are dropped in this order, after the unmount in `drop`.
    loops: Vec<AttachedLoop>,
    dir: TempDir,
    /// For a watched mount: the end of the kernel's log before the mount, and what the kernel may
    /// log.
    watch: Option<(KernelLog, Vec<&'static str>)>,
}

impl LoopMount {
    /// Mounts the volume that `loops` hold as `fs_type` with `options`, in the form of `mount -o`.
    ///
    /// # Errors
    /// The error of the call, and what the kernel logged about the devices.
    pub fn new(loops: Vec<AttachedLoop>, fs_type: &str, options: &str) -> Result<Self, String> {
        let dir = tempfile::Builder::new()
            .prefix("offshoot-mount-")
            .tempdir()
            .map_err(|error| format!("a mount point: {error}"))?;
        let (flags, data) = split_options(options);
        let mut log = KernelLog::start();
        rustix::mount::mount(&loops[0].device, dir.path(), fs_type, flags, data.as_c_str())
            .map_err(|error| {
                let devices: Vec<_> = loops.iter().map(|member| &*member.device).collect();
                let said = log.complaints(&devices).join("\n");
                format!("the kernel does not mount with `{options}`: {error}\n{said}")
            })?;
        Ok(Self { loops, dir, watch: None })
    }

    /// Lets the kernel log only lines with one of `expected` from `log` until the unmount, as
    /// [`KernelLog::assert_only`] defines it.
    #[must_use]
    pub fn watched(mut self, log: KernelLog, expected: &[&'static str]) -> Self {
        self.watch = Some((log, expected.to_vec()));
        self
    }

    /// Lets the kernel log lines with this text too.
    pub fn expect_line(&mut self, text: &'static str) {
        if let Some((_, expected)) = &mut self.watch {
            expected.push(text);
        }
    }

    /// Keeps one more device attached as long as the mount.
    pub fn add_loop(&mut self, member: AttachedLoop) {
        self.loops.push(member);
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

impl Drop for LoopMount {
    fn drop(&mut self) {
        if let Err(error) = unmount_or_detach(self.dir.path()) {
            loudly(&format!("unmount {}: {error}", self.dir.path().display()));
        }
        // The loop devices are still ours, so the lines are not about another user of them.
        let watch = self.watch.take().filter(|_| !std::thread::panicking());
        if let Some((log, expected)) = watch {
            log.assert_only(&self.devices(), &expected);
        }
    }
}

/// Unmounts as [`unmount_when_free`] does. What stays busy is detached: nothing below it waits for
/// it then, and its contents are not removed with the directory.
///
/// # Errors
/// That of the last try.
pub fn unmount_or_detach(dir: &Path) -> rustix::io::Result<()> {
    unmount_when_free(dir).inspect_err(|_| {
        let _ = rustix::mount::unmount(dir, UnmountFlags::DETACH);
    })
}

/// Unmounts what is mounted over `dir`, again while it is busy, for some seconds: a process that
/// another test starts inherits our open files for a moment.
///
/// # Errors
/// That of the last try.
pub fn unmount_when_free(dir: &Path) -> rustix::io::Result<()> {
    for _ in 0..1000 {
        match rustix::mount::unmount(dir, UnmountFlags::empty()) {
            Err(Errno::BUSY) => std::thread::sleep(Duration::from_millis(10)),
            ended => return ended,
        }
    }
    rustix::mount::unmount(dir, UnmountFlags::empty())
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

#[cfg(test)]
mod tests {
    use offshoot_machine::{may_mount, skip};

    use super::*;
    use crate::scratch_dir;

    /// Regression: the tests of another program detached a device twice. The second request hit
    /// the image that we had attached to it by then.
    #[test]
    fn an_image_stays_when_another_program_detaches_its_device() {
        if let Err(reason) = may_mount() {
            return skip(&reason);
        }
        let dir = scratch_dir();
        let image = dir.path().join("image");
        std::fs::write(&image, vec![7; 1 << 20]).expect("there is room");
        let attached = AttachedLoop::attach(&image, 512);
        let device = attached.device().to_owned();
        try_run("losetup", &["--detach", &device]).expect("a request is accepted");
        let found = std::fs::read(&device).expect("it reads");
        assert!(found == vec![7; 1 << 20], "{} bytes", found.len());
        assert!(attached.is_ours());
        drop(attached);
        let file = format!("/sys/block/{}/loop/backing_file", &device["/dev/".len()..]);
        let left = std::fs::read_to_string(file).unwrap_or_default();
        assert_ne!(Path::new(left.trim()), image, "it is detached");
    }
}
