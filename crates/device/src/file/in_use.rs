//! Finds out whether another program or the kernel uses an image or a block device, and names it.
//!
//! Each of four kinds of users has its own sign:
//!
//! | user | sign | named by |
//! |---|---|---|
//! | a process that locks it with `flock` | the lock is not granted | `/proc/locks` |
//! | QEMU and its tools | their locks ([`qemu_locks`]) | `/proc/PID/fdinfo` |
//! | a loop device over the image | its backing file is the same inode | `/sys/block/loop*` |
//! | a mount, a RAID, a mapper, swap over the block device | `O_EXCL` gives `EBUSY` | `/proc/self/mountinfo`, `holders` in `/sys` |
//!
//! A lock on a block device keeps the device manager and other programs away while a tool works on
//! it. Where the tool starts others for a part of the work, as `systemd-repart` and `udevadm lock`
//! do, the lock stays with the tool. So a program may say that for it the lock of a process that
//! started it is no sign of another user ([`ParentLocks`]). It must end before that process does,
//! which releases the lock. The lock must be exclusive, which is that of one user alone.
//!
//! The signs decide. The names only go into the message and may be missing: another namespace or
//! another user may hide them. A loop device whose backing file this namespace does not see cannot
//! be recognised.

use std::fs::{self, File, Metadata};
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock, major, minor};
use rustix::io::Errno;

use super::qemu_locks::{self, LockConflict, LockPurpose};

/// What the lock of a process that started this one, directly or not, means on a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ParentLocks {
    /// Another user, as any lock.
    Exclude,
    /// The same user.
    Share,
}

/// Until `file` is closed, makes this process its only writer ([`LockPurpose::Write`]), or excludes
/// all writers ([`LockPurpose::Rely`]).
///
/// # Errors
/// Of kind `ResourceBusy` when another program uses it in a way that `purpose` excludes.
pub(super) fn claim(file: &File, purpose: LockPurpose, parents: ParentLocks) -> io::Result<()> {
    let claimed = take(file, purpose, parents);
    if claimed.is_err() {
        release(file);
    }
    claimed
}

/// Releases all locks of `file`; without locks it does nothing. Closing alone is not enough: a
/// child that was forked a moment ago may still have its copy of the descriptor, and the locks with
/// it.
pub(super) fn release(file: &File) {
    let _ = flock(file, FlockOperation::Unlock);
    qemu_locks::release(file);
}

fn take(file: &File, purpose: LockPurpose, parents: ParentLocks) -> io::Result<()> {
    let metadata = file.metadata()?;
    let operation = match purpose {
        LockPurpose::Write => FlockOperation::NonBlockingLockExclusive,
        LockPurpose::Rely => FlockOperation::NonBlockingLockShared,
    };
    lock(file, &metadata, operation, parents)?;
    claim_from_qemu(file, purpose)?;
    if metadata.file_type().is_file()
        && let Some(device) = loop_device_over(&metadata, purpose)
    {
        return Err(busy(&format!("the kernel, through {device}")));
    }
    Ok(())
}

/// Takes the QEMU locks, which keep QEMU and programs that honour its locks from what `purpose`
/// excludes.
fn claim_from_qemu(file: &File, purpose: LockPurpose) -> io::Result<()> {
    let Some(conflict) = qemu_locks::take(file, purpose)? else { return Ok(()) };
    let holder = match conflict.process {
        Some(pid) => Some(process(&pid.to_string())),
        None => open_file_lock_holder(&place_of(&file.metadata()?)),
    };
    let holder = holder.unwrap_or_else(|| "another user of the file".to_owned());
    let does = match conflict {
        LockConflict { process: Some(_), .. } => "has locked it",
        LockConflict { is_writer: true, .. } => "writes it (it has locked it as QEMU does)",
        LockConflict { .. } => "reads it and allows no writer (it has locked it as QEMU does)",
    };
    Err(busy(&format!("{holder}, which {does}")))
}

/// The error for a block device that the kernel uses itself.
pub(super) fn of_block_device(path: &Path) -> io::Error {
    let user = fs::metadata(path)
        .ok()
        .and_then(|metadata| mount_of(metadata.rdev()).or_else(|| holder_of(metadata.rdev())));
    busy(&user.unwrap_or_else(|| "the kernel: mounted, or a part of a larger device".to_owned()))
}

fn busy(user: &str) -> io::Error {
    io::Error::new(io::ErrorKind::ResourceBusy, format!("in use by {user}"))
}

/// Takes the `flock`. After each write to a block device, the device manager of the host (udev)
/// locks the device for a moment to look at it, so we wait for up to a second.
fn lock(
    file: &File,
    metadata: &Metadata,
    operation: FlockOperation,
    parents: ParentLocks,
) -> io::Result<()> {
    const PATIENCE: u32 = 20;
    const STEP: Duration = Duration::from_millis(50);

    let attempts = if metadata.file_type().is_block_device() { PATIENCE } else { 0 };
    let may_share = attempts > 0 && parents == ParentLocks::Share;
    for attempt in 0.. {
        match flock(file, operation) {
            Ok(()) => break,
            Err(Errno::WOULDBLOCK) if may_share && is_locked_by_parents(metadata) => break,
            Err(Errno::WOULDBLOCK) if attempt < attempts => std::thread::sleep(STEP),
            Err(Errno::WOULDBLOCK) => {
                let holder = lock_holder(metadata);
                return Err(busy(&holder.unwrap_or_else(|| "another process".to_owned())));
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// The process that holds a lock on a file.
fn lock_holder(metadata: &Metadata) -> Option<String> {
    // The kernel may omit a line of `/proc/locks` while other locks come and go, so look again.
    const ATTEMPTS: usize = 3;

    let place = place_of(metadata);
    let first = |_| lock_holders_at(&place).into_iter().next();
    let LockHolder { pid, .. } = (0..ATTEMPTS).find_map(first)?;
    Some(process(&pid))
}

/// Whether a process that started this one, directly or not, is alone in having a lock on a file.
/// Only an exclusive lock says that: the host lists no lock of a process that this namespace does
/// not see.
fn is_locked_by_parents(metadata: &Metadata) -> bool {
    let parents = parents();
    let holders = lock_holders_at(&place_of(metadata));
    holders.iter().any(|holder| holder.is_exclusive && parents.contains(&holder.pid))
}

/// The process that started this one, the one that started that, and so on.
fn parents() -> Vec<String> {
    /// More than any process has.
    const GENERATIONS_MAX: usize = 1 << 10;

    let parent_of = |pid: &str| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
        Some(line.trim().to_owned()).filter(|pid| pid != "0")
    };
    let first = parent_of(&std::process::id().to_string());
    std::iter::successors(first, |pid| parent_of(pid)).take(GENERATIONS_MAX).collect()
}

/// The name of a file in the kernel's lists of locks, such as `fe:00:10493999`.
fn place_of(metadata: &Metadata) -> String {
    let (dev, inode) = (metadata.dev(), metadata.ino());
    format!("{:02x}:{:02x}:{inode}", major(dev), minor(dev))
}

/// The name of a process for a message.
fn process(pid: &str) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    match name.trim() {
        "" => format!("process {pid}"),
        name => format!("process {pid} ({name})"),
    }
}

/// A process that has a lock.
struct LockHolder {
    pid: String,
    is_exclusive: bool,
}

/// The processes that hold locks at `place`, from lines such as
/// `1: FLOCK  ADVISORY  WRITE 25030 fe:00:10493999 0 EOF`.
fn lock_holders_at(place: &str) -> Vec<LockHolder> {
    let Ok(locks) = File::open("/proc/locks") else { return Vec::new() };
    // Each read call is consistent in itself, so a large buffer asks for as many lines as possible
    // at once.
    let locks = BufReader::with_capacity(1 << 16, locks);
    let holder = |line: String| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let held = fields.get(1) == Some(&"FLOCK") && fields.get(5) == Some(&place);
        // A process that this namespace does not see may show as 0.
        let pid = fields.get(4).filter(|pid| held && **pid != "0")?;
        let is_exclusive = fields.get(3) == Some(&"WRITE");
        Some(LockHolder { pid: (*pid).to_owned(), is_exclusive })
    };
    locks.lines().map_while(Result::ok).filter_map(holder).collect()
}

/// Another process that has an open-file-description lock on the file `place`. `/proc/locks` names
/// no process for such a lock, but each process shows the locks of its own files:
/// `lock:  1: OFDLCK ADVISORY  READ -1 fe:00:10493999 100 101`.
fn open_file_lock_holder(place: &str) -> Option<String> {
    let has_lock = |pid: &str| {
        let files = fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter().flatten().flatten();
        let mut texts = files.filter_map(|file| fs::read_to_string(file.path()).ok());
        texts.any(|text| {
            let mut lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
            lines.any(|fields| fields.get(2) == Some(&"OFDLCK") && fields.get(6) == Some(&place))
        })
    };
    let own = std::process::id().to_string();
    let names = fs::read_dir("/proc").ok()?.flatten();
    let pids = names.filter_map(|name| name.file_name().into_string().ok());
    let mut pids = pids.filter(|pid| pid.bytes().all(|byte| byte.is_ascii_digit()));
    pids.find(|pid| *pid != own && has_lock(pid)).map(|pid| process(&pid))
}

/// The loop device whose backing file is the file of `metadata`.
fn loop_device_over(metadata: &Metadata, purpose: LockPurpose) -> Option<String> {
    // Without /sys no loop device can be found. Many sandboxes lack /sys, and no process in them
    // can attach a loop device.
    for entry in fs::read_dir("/sys/block").ok()?.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str().filter(|name| name.starts_with("loop")) else { continue };
        let Ok(backing) = fs::read_to_string(entry.path().join("loop/backing_file")) else {
            continue;
        };
        let same = fs::metadata(backing.trim_end_matches('\n')).is_ok_and(|backing| {
            (backing.dev(), backing.ino()) == (metadata.dev(), metadata.ino())
        });
        let is_read_only =
            || fs::read_to_string(entry.path().join("ro")).is_ok_and(|ro| ro.trim_end() == "1");
        if same && !(purpose == LockPurpose::Rely && is_read_only()) {
            return Some(format!("/dev/{name}"));
        }
    }
    None
}

/// Where a block device is mounted, if the mount table names the device.
fn mount_of(rdev: u64) -> Option<String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    mounts.lines().find_map(|line| {
        let (mount, source) = line.split_once(" - ")?;
        let source = fs::metadata(source.split(' ').nth(1)?).ok()?;
        let same = source.file_type().is_block_device() && source.rdev() == rdev;
        same.then(|| mount.split(' ').nth(4).map(|at| format!("the kernel: mounted at {at}")))?
    })
}

/// The device of the kernel (a mapper, a RAID) that a block device is a part of.
fn holder_of(rdev: u64) -> Option<String> {
    let holders = format!("/sys/dev/block/{}:{}/holders", major(rdev), minor(rdev));
    let holder = fs::read_dir(holders).ok()?.flatten().next()?;
    Some(format!("the kernel: part of /dev/{}", holder.file_name().to_string_lossy()))
}
