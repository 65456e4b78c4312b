//! Mounting and unmounting: by the system call where the process has the right, and otherwise with
//! the help of `fusermount3`.
//!
//! `fusermount3` is set-user-id root, and mounts over directories that its caller may mount over.
//! It sends the opened device back over a socket whose number is in its environment. Both ways lead
//! to the same mount, except that `fusermount3` always adds `nosuid` and `nodev` for users.
//!
//! Root can mount a filesystem over its block device, with the type `fuseblk`
//! ([`MountPoint::mount_block`]). It differs from `fuse` in four ways:
//!
//! - `sync` and `syncfs` reach the serving process (SYNCFS, since Linux 6.18);
//! - unmounting waits until the serving process has stored everything (DESTROY);
//! - the device number of the mount is that of the block device;
//! - the kernel holds the block device exclusively, and gives it up when the mount has ended.
//!   Before that it waits for DESTROY, or ends the connection without asking ([`has_ended`],
//!   [`Mounter::reclaim`]).

use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{self, IoSliceMut, Read, Seek, SeekFrom};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use offshoot_vfs::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::ioctl_blksszget;
use rustix::io::{Errno, FdFlags, fcntl_setfd, retry_on_intr};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
    recvmsg, socketpair,
};

use crate::device;

const HELPER: &str = "fusermount3";

/// How a filesystem is mounted.
#[derive(Clone, Debug)]
#[non_exhaustive]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub struct MountOptions {
    /// The source that the table of mounts shows.
    pub source: OsString,
    /// The type that the table of mounts shows, behind `fuse.` or `fuseblk.`.
    pub subtype: &'static str,
    /// The mount is read-only.
    pub is_read_only: bool,
    /// Users other than the one who mounts may use it.
    pub allows_others: bool,
    /// The kernel honours set-id bits.
    pub allows_suid: bool,
    /// Device nodes work.
    pub allows_devices: bool,
    /// Programs can be run.
    pub allows_exec: bool,
}

impl MountOptions {
    /// The defaults: the user who mounts `source` can read and write it and run programs, but
    /// neither set-id bits nor device nodes work.
    pub fn new(source: impl Into<OsString>, subtype: &'static str) -> Self {
        Self {
            source: source.into(),
            subtype,
            is_read_only: false,
            allows_others: false,
            allows_suid: false,
            allows_devices: false,
            allows_exec: true,
        }
    }

    fn flags(&self) -> MountFlags {
        let unless = |is_allowed: bool, flag| if is_allowed { MountFlags::empty() } else { flag };
        // Reads do not change access times, and the table of mounts shows that.
        MountFlags::NOATIME
            | unless(!self.is_read_only, MountFlags::RDONLY)
            | unless(self.allows_suid, MountFlags::NOSUID)
            | unless(self.allows_devices, MountFlags::NODEV)
            | unless(self.allows_exec, MountFlags::NOEXEC)
    }

    /// The options that both ways take as text: the kernel checks permissions always, and
    /// `allows_others` is a choice.
    fn words(&self) -> Vec<String> {
        let mut words = vec!["default_permissions".to_owned()];
        words.extend(self.allows_others.then(|| "allow_other".to_owned()));
        words
    }
}

/// Mounts and unmounts a filesystem. This takes rights that the serving process may have given
/// away. Then a [`Helper`](crate::Helper) asks another process.
pub trait Mounter: Send + Sync {
    /// Mounts the filesystem, and returns the device that its requests come from.
    ///
    /// # Errors
    /// Those of the host.
    fn mount(&self) -> Result<OwnedFd>;

    /// Unmounts the filesystem.
    ///
    /// # Errors
    /// `EBUSY` when a program uses it, and others of the host.
    fn unmount(&self, how: Unmount) -> Result<()>;

    /// Called when the kernel has ended the mount without asking for what is not stored, and before
    /// that is stored; several threads may call it. Takes back what was lent to the mount.
    ///
    /// # Errors
    /// When the devices may not be written any more. Then nothing more is stored.
    fn reclaim(&self) -> Result<()> {
        Ok(())
    }

    /// Called when everything is stored, and right before the kernel gives up what was lent to the
    /// mount. Nothing may be written from then on.
    fn give_up(&self) {}
}

/// A [`Mounter`] of a filesystem on a block device.
pub trait BlockMounter: Mounter {
    /// Mounts the filesystem over its block device, which nobody may hold exclusively. Returns the
    /// device that its requests come from.
    ///
    /// # Errors
    /// Those of the host: only root may, and only where the kernel has `fuseblk`.
    fn mount_block(&self) -> Result<OwnedFd>;

    /// Holds the block device exclusively for as long as the descriptor is open. A mount whose
    /// serving process has ended gives it up before.
    ///
    /// # Errors
    /// `EBUSY` when there is another holder, and others of the host.
    fn hold(&self) -> Result<OwnedFd>;
}

/// A directory that a filesystem is mounted over.
#[derive(Clone, Debug)]
pub struct MountPoint {
    dir: PathBuf,
    options: MountOptions,
}

impl MountPoint {
    /// The directory `dir`, for a filesystem that is mounted with `options`.
    pub fn new(dir: impl Into<PathBuf>, options: MountOptions) -> Self {
        Self { dir: dir.into(), options }
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Mounts the filesystem over the block device that is its source.
    ///
    /// # Errors
    /// Those of the host: only root may, and no one may hold the block device exclusively.
    pub fn mount_block(&self) -> Result<OwnedFd> {
        let source = Path::new(&self.options.source);
        let failed = |error| Error::io(format!("mounting {}", source.display()), error);
        let option = format!("blksize={}", block_size(source).map_err(failed)?);
        device::open()
            .and_then(|device| mount_directly(device, &self.dir, &self.options, "fuseblk", &option))
            .map_err(|errno| failed(errno.into()))
    }
}

impl Mounter for MountPoint {
    fn mount(&self) -> Result<OwnedFd> {
        mount(&self.dir, &self.options)
    }

    fn unmount(&self, how: Unmount) -> Result<()> {
        unmount(&self.dir, how)
    }
}

/// Whether the kernel has ended the mount whose requests come from `device`. Does not wait.
///
/// # Errors
/// Those of the host.
pub fn has_ended(device: impl AsFd) -> io::Result<bool> {
    let mut device = [PollFd::new(&device, PollFlags::empty())];
    retry_on_intr(|| poll(&mut device, Some(&Timespec::default())))?;
    Ok(device[0].revents().contains(PollFlags::ERR))
}

/// The block size that the kernel uses for a block device by itself: up to a page, if the device
/// consists of whole blocks. For another size the kernel would drop its cache of the device.
fn block_size(device: &Path) -> io::Result<u64> {
    let mut device = File::open(device)?;
    let size_bytes = device.seek(SeekFrom::End(0))?;
    let mut block_bytes = u64::from(ioctl_blksszget(&device)?);
    let page_bytes = rustix::param::page_size() as u64;
    while block_bytes < page_bytes && size_bytes.is_multiple_of(2 * block_bytes) {
        block_bytes *= 2;
    }
    Ok(block_bytes)
}

fn mount(dir: &Path, options: &MountOptions) -> Result<OwnedFd> {
    let device = device::open();
    if let Err(errno @ (Errno::NOENT | Errno::NXIO | Errno::NODEV)) = device {
        return Err(no_device(errno));
    }
    match device.and_then(|device| mount_directly(device, dir, options, "fuse", "")) {
        Err(Errno::PERM | Errno::ACCESS) if !rustix::process::geteuid().is_root() => {
            mount_with_help(dir, options)
        }
        result => {
            result.map_err(|errno| Error::io(format!("mounting over {}", dir.display()), errno))
        }
    }
}

/// The error where the kernel offers no FUSE.
fn no_device(errno: Errno) -> Error {
    let what = "this machine or container does not have it (root can `modprobe fuse`, and give it \
                to a container with `--device /dev/fuse`); what reads and writes files in an image \
                works without a mount";
    let error = io::Error::new(io::Error::from(errno).kind(), what);
    Error::io("mounting needs /dev/fuse", error)
}

/// Mounts with the type `kind`, and with the option `further` unless it is empty.
fn mount_directly(
    device: OwnedFd,
    dir: &Path,
    options: &MountOptions,
    kind: &str,
    further: &str,
) -> Result<OwnedFd, Errno> {
    let mut data = options.words();
    data.extend((!further.is_empty()).then(|| further.to_owned()));
    data.push(format!("fd={}", device.as_raw_fd()));
    data.push("rootmode=40000".to_owned());
    data.push(format!("user_id={}", rustix::process::getuid().as_raw()));
    data.push(format!("group_id={}", rustix::process::getgid().as_raw()));
    let data = CString::new(data.join(",")).map_err(|_| Errno::INVAL)?;
    let kind = format!("{kind}.{}", options.subtype);
    rustix::mount::mount(
        options.source.as_os_str(),
        dir,
        &*kind,
        options.flags(),
        data.as_c_str(),
    )?;
    Ok(device)
}

/// Escapes text for a list of options that are separated by commas.
fn escaped(text: &OsStr) -> OsString {
    let escape =
        |&byte: &u8| if matches!(byte, b'\\' | b',') { vec![b'\\', byte] } else { vec![byte] };
    OsString::from_vec(text.as_bytes().iter().flat_map(escape).collect())
}

fn mount_with_help(dir: &Path, options: &MountOptions) -> Result<OwnedFd> {
    let failed = |error: io::Error| Error::io(format!("mounting with {HELPER}"), error);
    let mut words = options.words();
    words.push(format!("subtype={}", options.subtype));
    words.push(if options.is_read_only { "ro" } else { "rw" }.to_owned());
    words.push("noatime".to_owned());
    words.extend((!options.allows_exec).then(|| "noexec".to_owned()));
    let mut all = OsString::from(words.join(",") + ",fsname=");
    all.push(escaped(&options.source));
    let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let (ours, theirs) = pair.map_err(|errno| failed(errno.into()))?;
    fcntl_setfd(&theirs, FdFlags::empty()).map_err(|errno| failed(errno.into()))?;
    let mut helper = Command::new(HELPER)
        .args(["-o".as_ref(), all.as_os_str(), "--".as_ref()])
        .arg(dir)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(not_started)
        .map_err(failed)?;
    // The helper now has the only other end: the socket ends when the helper does.
    drop(theirs);
    let received = receive(&ours, &mut [0]);
    let said = finish(&mut helper).map_err(failed)?;
    match received {
        Ok((_, Some(device))) => Ok(device),
        Ok((_, None)) => Err(failed(io::Error::other(said))),
        Err(error) => Err(failed(error)),
    }
}

/// Explains why the helper did not start.
fn not_started(error: io::Error) -> io::Error {
    if error.kind() != io::ErrorKind::NotFound {
        return error;
    }
    let what = format!(
        "{HELPER} is not there, which users other than root need: install the package fuse3"
    );
    io::Error::new(error.kind(), what)
}

/// Waits for the helper, and returns what it wrote to standard error, or its exit status.
fn finish(helper: &mut std::process::Child) -> io::Result<String> {
    let mut said = String::new();
    if let Some(mut errors) = helper.stderr.take() {
        errors.read_to_string(&mut said)?;
    }
    let status = helper.wait()?;
    let said = said.trim();
    Ok(if said.is_empty() { format!("it ended with {status}") } else { said.to_owned() })
}

/// Receives one message over `socket`. Returns how many bytes of `message` it filled, 0 at the end
/// of the socket, and the descriptor that came with them.
pub(crate) fn receive(
    socket: impl AsFd,
    message: &mut [u8],
) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(message)];
    let received =
        retry_on_intr(|| recvmsg(&socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC))?;
    let mut descriptors = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    Ok((received.bytes, descriptors.next()))
}

/// How a filesystem is unmounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmount {
    /// Only if no program uses it.
    Unused,
    /// Names disappear at once. The rest ends when no program uses it any more.
    Lazily,
    /// Without waiting for the serving process: unanswered requests fail.
    ByForce,
}

/// Unmounts what is mounted over `dir`.
///
/// # Errors
/// `EBUSY` when a program uses it, and others of the host.
pub fn unmount(dir: &Path, how: Unmount) -> Result<()> {
    let (flags, option) = match how {
        Unmount::Unused => (UnmountFlags::empty(), "-u"),
        Unmount::Lazily => (UnmountFlags::DETACH, "-uz"),
        // `fusermount3` cannot unmount by force.
        Unmount::ByForce => (UnmountFlags::FORCE, "-u"),
    };
    let what = || format!("unmounting {}", dir.display());
    match rustix::mount::unmount(dir, flags | UnmountFlags::NOFOLLOW) {
        Err(Errno::PERM) => {
            let args = [OsStr::new(option), OsStr::new("--"), dir.as_os_str()];
            let mut helper = Command::new(HELPER)
                .args(args)
                .stdin(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .map_err(|error| Error::io(what(), not_started(error)))?;
            let said = finish(&mut helper).map_err(|error| Error::io(what(), error))?;
            let is_done = helper.wait().is_ok_and(|status| status.success());
            if is_done { Ok(()) } else { Err(Error::io(what(), io::Error::other(said))) }
        }
        result => result.map_err(|errno| Error::io(what(), errno)),
    }
}
