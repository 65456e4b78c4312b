//! Mounts the sides, and undoes it: after an error, too, nothing stays mounted, attached or
//! running.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use offshoot_fuse::{MountOptions, MountPoint, ServeOptions, Server, Transport};
use offshoot_testkit::run::try_run;
use rustix::mount::UnmountFlags;

use super::null::NullFilesystem;
use super::{FUSER, NULL, independent};
use crate::Result;
use crate::kernel::new_image;

/// A side of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MountSide {
    Ours,
    OursDevice,
    OursXfs,
    OursXfsDevice,
    Btrfs,
    Xfs,
    Null,
    NullDevice,
    /// The null filesystem over the crate `fuser`.
    Independent,
}

impl MountSide {
    const ALL: [(Self, &'static str); 9] = [
        (Self::Ours, "ours"),
        (Self::OursDevice, "ours-dev"),
        (Self::OursXfs, "ours-xfs"),
        (Self::OursXfsDevice, "ours-xfs-dev"),
        (Self::Btrfs, "btrfs"),
        (Self::Xfs, "xfs"),
        (Self::Null, "null"),
        (Self::NullDevice, "null-dev"),
        (Self::Independent, FUSER),
    ];

    /// The side of this name.
    pub(super) fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, known)| *known == name).map(|(side, _)| *side)
    }

    pub(super) fn name(self) -> &'static str {
        Self::ALL.iter().find(|(side, _)| *side == self).map_or("", |(_, name)| name)
    }
}

/// The paths that a mount needs.
pub(super) struct MountPaths<'a> {
    pub(super) offshoot: &'a Path,
    pub(super) image: &'a Path,
    pub(super) dir: &'a Path,
    pub(super) image_bytes: u64,
}

/// A mounted side.
pub(super) struct MountedSide {
    dir: PathBuf,
    how: MountUndo,
}

/// How to undo a mount.
enum MountUndo {
    /// The program unmounts.
    Ours(PathBuf),
    /// The system call unmounts, and then the loop device is detached.
    Kernel { _device: BenchLoop },
    /// The system call unmounts, and then the serving process is ended.
    Null { _process: NullServer },
}

/// A loop device, detached on drop.
struct BenchLoop(String);

impl Drop for BenchLoop {
    fn drop(&mut self) {
        if let Err(reason) = try_run("losetup", &["--detach", &self.0]) {
            eprintln!("offshoot-bench: {reason}");
        }
    }
}

/// The process that serves the null filesystem.
struct NullServer(Child);

impl Drop for NullServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl MountedSide {
    /// Mounts a new volume.
    pub(super) fn new(side: MountSide, places: &MountPaths<'_>) -> Result<Self> {
        let dir = places.dir.to_path_buf();
        std::fs::create_dir_all(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        let how = match side {
            MountSide::Ours => ours(places, "btrfs", "io_uring")?,
            MountSide::OursDevice => ours(places, "btrfs", "noio_uring")?,
            MountSide::OursXfs => ours(places, "xfs", "io_uring")?,
            MountSide::OursXfsDevice => ours(places, "xfs", "noio_uring")?,
            MountSide::Btrfs => kernel(places, "btrfs", &["-q"])?,
            MountSide::Xfs => kernel(places, "xfs", &["-q", "-f"])?,
            MountSide::Null => MountUndo::Null { _process: null(&dir, "io_uring")? },
            MountSide::NullDevice => MountUndo::Null { _process: null(&dir, "noio_uring")? },
            MountSide::Independent => MountUndo::Null { _process: null(&dir, FUSER)? },
        };
        Ok(Self { dir, how })
    }

    pub(super) fn path(&self) -> &Path {
        &self.dir
    }

    /// Unmounts, and reports a failure.
    pub(super) fn unmount(mut self) -> Result {
        self.undo(UnmountFlags::empty())?;
        // An empty path tells `drop` that nothing is mounted.
        self.dir = PathBuf::new();
        Ok(())
    }

    fn undo(&mut self, flags: UnmountFlags) -> Result {
        if let MountUndo::Ours(program) = &self.how
            && flags.is_empty()
        {
            let words = ["unmount".as_ref(), self.dir.as_os_str()];
            return try_run(&program.display().to_string(), &words).map(drop);
        }
        rustix::mount::unmount(&self.dir, flags)
            .map_err(|errno| format!("unmounting {}: {errno}", self.dir.display()))
    }
}

impl Drop for MountedSide {
    fn drop(&mut self) {
        if !self.dir.as_os_str().is_empty()
            && self.undo(UnmountFlags::empty()).is_err()
            && let Err(reason) = self.undo(UnmountFlags::DETACH)
        {
            eprintln!("offshoot-bench: {reason}");
        }
    }
}

fn ours(places: &MountPaths<'_>, format: &str, transport: &str) -> Result<MountUndo> {
    new_image(places.image, places.image_bytes)?;
    let program = places.offshoot.display().to_string();
    let image = places.image.as_os_str();
    let mkfs = ["mkfs", "--format", format].map(OsStr::new);
    try_run(&program, &[&mkfs[..], &[image]].concat())?;
    // The server in the background keeps its standard error open. With a pipe, this process would
    // wait for the end of the server.
    let status = Command::new(places.offshoot)
        .args(["mount", "-o", transport])
        .args([image, places.dir.as_os_str()])
        .stdin(Stdio::null())
        .status()
        .map_err(|error| format!("{program}: {error}"))?;
    if status.success() {
        Ok(MountUndo::Ours(places.offshoot.to_path_buf()))
    } else {
        Err(format!("`{program} mount` ended with {status}"))
    }
}

fn kernel(places: &MountPaths<'_>, kind: &str, mkfs: &[&str]) -> Result<MountUndo> {
    new_image(places.image, places.image_bytes)?;
    let image = places.image.as_os_str();
    let mut words: Vec<&OsStr> = mkfs.iter().map(OsStr::new).collect();
    words.push(image);
    try_run(&format!("mkfs.{kind}"), &words)?;
    let attach = ["--direct-io=on", "--find", "--show"].map(OsStr::new);
    let device =
        BenchLoop(try_run("losetup", &[&attach[..], &[image]].concat())?.trim().to_owned());
    let options = ["-t", kind, "-o", "noatime", &device.0].map(OsStr::new);
    try_run("mount", &[&options[..], &[places.dir.as_os_str()]].concat())?;
    Ok(MountUndo::Kernel { _device: device })
}

/// Starts this program once more, to serve a null filesystem in the way that `served_by` says.
fn null(dir: &Path, served_by: &str) -> Result<NullServer> {
    let program = std::env::current_exe().map_err(|error| format!("this program: {error}"))?;
    let mut child = Command::new(program)
        .arg(NULL)
        .arg(dir)
        .arg(served_by)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map(NullServer)
        .map_err(|error| format!("the null filesystem: {error}"))?;
    let mut line = String::new();
    let output = child.0.stdout.take().ok_or("it has a pipe")?;
    let read = BufReader::new(output).read_line(&mut line);
    if read.is_ok_and(|len| len > 0) { Ok(child) } else { Err("no null filesystem".to_owned()) }
}

/// Serves a null filesystem over a directory until it is unmounted, by the crate `fuser`.
pub(super) fn serve_independently(dir: &Path) -> Result {
    independent::serve(dir, || println!("mounted"))
}

/// Serves a null filesystem over a directory until it is unmounted.
pub(super) fn serve(dir: &Path, transport: Transport) -> Result {
    let place = MountPoint::new(dir, MountOptions::new("null", "null"));
    let options = ServeOptions::over(transport);
    let server = Server::start(Box::new(NullFilesystem::new()), Arc::new(place), options)
        .map_err(|error| error.to_string())?;
    println!("mounted");
    server.wait().map_err(|error| error.to_string())
}
