//! Workloads: named operations and points of persistence, run on a volume whose power is cut.
//!
//! A workload means the same on every filesystem. Its operations are numbered, those of the set-up
//! first. The number makes what an operation brings unique: the time, the bytes that it writes, and
//! the owner of the file that it makes. So a test recognises a file by its owner, whatever its name
//! and whatever filesystem shows it.

use std::collections::BTreeSet;
use std::fmt;

use offshoot_vfs::acl::{ACCESS, DEFAULT};
use offshoot_vfs::{
    Code, EntryPlace, Errno, Error, Fallocate, FileFlags, FileId, FilePosition, FileSystem,
    FileSystemMut, FileType, NewFile, NewNode, Rename, Result, SetAttr, Timestamp, XattrMode,
};

use super::picture::SECTOR;
use super::script::FALLOCATE;
use crate::model::subvolumes::SubvolumeCalls;

/// One change. Paths are relative to the root, without a leading slash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkloadOp {
    /// Makes an empty file.
    Create(String),
    /// Makes a directory.
    Mkdir(String),
    /// Makes a symbolic link.
    Symlink(String),
    /// Makes a pipe.
    Fifo(String),
    /// Makes a character device; its minor number is the number of the operation.
    Device(String),
    /// Gives the first file a second name.
    Link(String, String),
    /// Removes a name.
    Unlink(String),
    /// Removes a directory.
    Rmdir(String),
    /// Moves the first to the second.
    Rename(String, String),
    /// Moves the first to the second, which must not exist.
    RenameNoReplace(String, String),
    /// Exchanges the two names.
    Exchange(String, String),
    /// Makes an empty file without a name, and then gives it one.
    Unnamed(String),
    /// Sets all flags of a file to these.
    SetFlags(String, FileFlags),
    /// Keeps a file open until the end.
    Open(String),
    /// Writes `len` bytes at `offset`.
    Write {
        /// The file.
        path: String,
        /// Where the bytes begin.
        offset: u64,
        /// How many bytes there are.
        len: usize,
    },
    /// Writes whole sectors directly, and leaves no data of the file in memory.
    WriteDirect {
        /// The file.
        path: String,
        /// Where the bytes begin.
        offset: u64,
        /// How many bytes there are.
        len: usize,
    },
    /// Writes the contents of the first file to the beginning of the second, without sharing.
    WriteSame(String, String),
    /// Sets the length of a file.
    Truncate(String, u64),
    /// Allocates, frees, zeros or moves `len` bytes at `offset`. A move does nothing in a file that
    /// ends with the range or before it.
    Fallocate {
        /// The file.
        path: String,
        /// Which of these the operation does.
        what: Fallocate,
        /// Where the bytes begin.
        offset: u64,
        /// How many bytes there are.
        len: u64,
    },
    /// Copies all of the first file to the beginning of the second, which shares as much as it can.
    /// Does nothing if both are one file.
    Copy(String, String),
    /// Clones a range of one file into another. Does nothing if the range cannot be shared.
    Clone(SharedRange),
    /// Makes two ranges share their space if they are equal. Does nothing if they cannot be shared.
    Dedupe(SharedRange),
    /// Sets the extended attribute of this name to a value of this many bytes.
    SetXattr(String, String, usize),
    /// Removes the extended attribute of this name.
    RemoveXattr(String, String),
    /// Sets the permissions.
    Chmod(String, u32),
    /// Sets the access control list of a file, or the default list for new files in a directory:
    /// these permissions, and an entry for one more user.
    SetAcl {
        /// The file.
        path: String,
        /// The list is the default list of a directory.
        is_default: bool,
        /// The permissions that it grants, as mode bits.
        permissions: u32,
    },
    /// Sets the compression property of a file.
    SetCompression(String, String),
    /// Makes an empty subvolume.
    Subvolume(String),
    /// Makes the second a snapshot of the first.
    Snapshot {
        /// The subvolume.
        source: String,
        /// The path of the snapshot.
        to: String,
        /// Whether the snapshot is read-only.
        is_read_only: bool,
    },
    /// Deletes a subvolume with all that is in it.
    DeleteSubvolume(String),
    /// Drops the contents of all deleted subvolumes, to the end.
    DropDeleted,
    /// Makes a subvolume read-only, or writable again.
    SetReadOnly(String, bool),
    /// Makes this subvolume the default one, which a mount without options shows.
    SetDefault(String),
}

/// A range of a file, and its destination in another file, or at another offset of the same one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedRange {
    /// The source file.
    pub from: String,
    /// Where the range begins, in bytes.
    pub offset: u64,
    /// How long the range is, in bytes.
    pub len: u64,
    /// The destination file.
    pub to: String,
    /// Where the range begins there, in bytes.
    pub to_offset: u64,
}

impl SharedRange {
    /// Whether files of these sizes in bytes can share the range. It must be inside the source, and
    /// consist of whole sectors, or else reach the end of the source and not end before the end of
    /// the destination. If `are_one` says that both are one file, the ranges must not overlap.
    #[must_use]
    pub fn can_be_cloned(&self, [from_size, to_size]: [u64; 2], are_one: bool) -> bool {
        let ends = [self.offset, self.to_offset].map(|offset| offset + self.len);
        let overlap = self.offset.abs_diff(self.to_offset) < self.len.next_multiple_of(SECTOR);
        ends[0] <= from_size
            && !(are_one && overlap)
            && (self.len.is_multiple_of(SECTOR) || ends[0] == from_size && ends[1] >= to_size)
    }

    /// The same for deduplication: both files must contain the whole range.
    #[must_use]
    pub fn can_be_deduped(&self, sizes: [u64; 2], are_one: bool) -> bool {
        self.to_offset + self.len <= sizes[1] && self.can_be_cloned(sizes, are_one)
    }
}

impl fmt::Display for SharedRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, offset, len, to, to_offset } = self;
        write!(f, "{from} {offset}+{len} {to} {to_offset}")
    }
}

/// One step of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkloadStep {
    /// A change.
    Do(WorkloadOp),
    /// A change that may be refused because there is no space, or because an earlier change that it
    /// needs was refused. A write of at most one MiB that begins at a multiple of one MiB is
    /// done completely or not at all.
    Try(WorkloadOp),
    /// Makes this file and its changes durable, or this directory and the names in it. The root is
    /// "".
    Fsync(String),
    /// The same without times.
    Fdatasync(String),
    /// Makes everything durable that was done so far.
    Sync,
}

/// Operations after which the power may be cut anywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// The name of the workload, with which a test can ask for it alone.
    pub name: String,
    /// The operations that are done and synced before the power may be cut.
    pub setup: Vec<WorkloadOp>,
    /// The operations after that.
    pub steps: Vec<WorkloadStep>,
}

impl fmt::Display for WorkloadOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Create(path) => write!(f, "create {path}"),
            Self::Mkdir(path) => write!(f, "mkdir {path}"),
            Self::Symlink(path) => write!(f, "symlink {path}"),
            Self::Link(old, new) => write!(f, "link {old} {new}"),
            Self::Unlink(path) => write!(f, "unlink {path}"),
            Self::Rmdir(path) => write!(f, "rmdir {path}"),
            Self::Rename(from, to) => write!(f, "rename {from} {to}"),
            Self::Exchange(one, other) => write!(f, "exchange {one} {other}"),
            Self::RenameNoReplace(from, to) => write!(f, "rename-noreplace {from} {to}"),
            Self::Fifo(path) => write!(f, "fifo {path}"),
            Self::Device(path) => write!(f, "device {path}"),
            Self::SetFlags(path, flags) => write!(f, "flags {path} {flags}"),
            Self::Unnamed(path) => write!(f, "unnamed {path}"),
            Self::Open(path) => write!(f, "open {path}"),
            Self::Write { path, offset, len } => write!(f, "write {path} {offset}+{len}"),
            Self::WriteDirect { path, offset, len } => {
                write!(f, "write-direct {path} {offset}+{len}")
            }
            Self::WriteSame(from, to) => write!(f, "write-same {from} {to}"),
            Self::Truncate(path, size) => write!(f, "truncate {path} {size}"),
            Self::Fallocate { path, what, offset, len } => {
                let verb = FALLOCATE.iter().find(|(_, known)| known == what);
                let verb = verb.map_or("fallocate", |(verb, _)| verb);
                write!(f, "{verb} {path} {offset}+{len}")
            }
            Self::Copy(from, to) => write!(f, "copy {from} {to}"),
            Self::Clone(share) => write!(f, "clone {share}"),
            Self::Dedupe(share) => write!(f, "dedupe {share}"),
            Self::SetXattr(path, name, len) => write!(f, "setxattr {path} {name} {len}"),
            Self::RemoveXattr(path, name) => write!(f, "removexattr {path} {name}"),
            Self::Chmod(path, mode) => write!(f, "chmod {path} {mode:o}"),
            Self::SetAcl { path, is_default, permissions } => {
                let verb = if *is_default { "default-acl" } else { "acl" };
                write!(f, "{verb} {path} {permissions:o}")
            }
            Self::SetCompression(path, how) => write!(f, "compression {path} {how}"),
            Self::Subvolume(path) => write!(f, "subvolume {path}"),
            Self::Snapshot { source, to, is_read_only } => {
                let how = if *is_read_only { " read-only" } else { "" };
                write!(f, "snapshot {source} {to}{how}")
            }
            Self::DeleteSubvolume(path) => write!(f, "delete {path}"),
            Self::DropDeleted => f.write_str("drop-deleted"),
            Self::SetReadOnly(path, true) => write!(f, "read-only {path}"),
            Self::SetReadOnly(path, false) => write!(f, "writable {path}"),
            Self::SetDefault(path) => write!(f, "default /{path}"),
        }
    }
}

impl Workload {
    /// Whether the workload ends with an `fsync` that has something to write: a file that was only
    /// a source of copies is unchanged.
    #[must_use]
    pub fn ends_with_fsync(&self) -> bool {
        let Some(WorkloadStep::Fsync(synced) | WorkloadStep::Fdatasync(synced)) = self.steps.last()
        else {
            return false;
        };
        let is_source = |step: &WorkloadStep| match step {
            WorkloadStep::Do(WorkloadOp::Copy(from, _)) => from == synced,
            WorkloadStep::Do(WorkloadOp::Clone(share)) => {
                share.from == *synced && share.to != *synced
            }
            _ => false,
        };
        !self.steps.iter().any(is_source)
    }

    /// All operations of the workload, those of the set-up first.
    fn ops(&self) -> impl Iterator<Item = &WorkloadOp> {
        self.setup.iter().chain(self.steps.iter().filter_map(WorkloadStep::op))
    }

    /// Whether the workload may write data in place, which a cut may tear.
    #[must_use]
    pub fn writes_in_place(&self) -> bool {
        let is_flag = |op: &WorkloadOp| match op {
            WorkloadOp::SetFlags(_, flags) => flags.contains(FileFlags::NODATACOW),
            _ => false,
        };
        self.ops().any(is_flag)
    }

    /// The most files that may come to share one piece of data. Each share adds one, and each
    /// snapshot doubles the number, because a snapshot shares all data of its source: two shares
    /// and one snapshot give (1 + 2) * 2 = 6.
    #[must_use]
    pub fn most_sharers(&self) -> usize {
        let is_share = |op: &&WorkloadOp| {
            matches!(op, WorkloadOp::Copy(..) | WorkloadOp::Clone(_) | WorkloadOp::Dedupe(_))
        };
        let is_snapshot = |op: &&WorkloadOp| matches!(op, WorkloadOp::Snapshot { .. });
        (1 + self.ops().filter(is_share).count()) << self.ops().filter(is_snapshot).count()
    }

    /// Whether `is_of_kind` holds for an operation, in the set-up or later.
    #[must_use]
    pub fn has(&self, is_of_kind: impl Fn(&WorkloadOp) -> bool) -> bool {
        self.ops().any(is_of_kind)
    }

    /// Whether the workload makes or deletes subvolumes.
    #[must_use]
    pub fn has_subvolumes(&self) -> bool {
        let is_one = |op: &WorkloadOp| {
            matches!(
                op,
                WorkloadOp::Subvolume(_)
                    | WorkloadOp::Snapshot { .. }
                    | WorkloadOp::DeleteSubvolume(_)
            )
        };
        self.ops().any(is_one)
    }

    /// Whether `is_wanted` holds for some step and the path of some subvolume.
    #[must_use]
    pub fn has_step_on_subvolume(&self, is_wanted: impl Fn(&WorkloadOp, &str) -> bool) -> bool {
        let mut subvolumes = BTreeSet::new();
        let mut is_found = false;
        for (number, op) in self.ops().enumerate() {
            let is_step = number >= self.setup.len();
            is_found |= is_step && subvolumes.iter().any(|path: &String| is_wanted(op, path));
            match op {
                WorkloadOp::Subvolume(path) | WorkloadOp::Snapshot { to: path, .. } => {
                    subvolumes.insert(path.clone());
                }
                // After a move, the path may lead to another file.
                WorkloadOp::DeleteSubvolume(path)
                | WorkloadOp::Rename(path, _)
                | WorkloadOp::RenameNoReplace(path, _)
                | WorkloadOp::Exchange(path, _) => {
                    subvolumes.remove(path);
                }
                _ => {}
            }
        }
        is_found
    }
}

impl WorkloadOp {
    /// Whether the operation moves data within a file.
    pub(super) fn moves_data(&self) -> bool {
        let Self::Fallocate { what, .. } = self else { return false };
        matches!(what, Fallocate::Collapse | Fallocate::Insert)
    }
}

impl WorkloadStep {
    /// The operation, if the step is one.
    pub(super) fn op(&self) -> Option<&WorkloadOp> {
        match self {
            Self::Do(op) | Self::Try(op) => Some(op),
            Self::Fsync(_) | Self::Fdatasync(_) | Self::Sync => None,
        }
    }

    /// Whether the step is an operation, not a point of persistence.
    pub(super) fn is_change(&self) -> bool {
        matches!(self, Self::Do(_) | Self::Try(_))
    }

    /// Whether this step may be refused with this error.
    pub(super) fn may_be_refused(&self, error: &Error) -> bool {
        matches!(self, Self::Try(_)) && matches!(error.errno(), Errno::NOSPC | Errno::NOENT)
    }
}

impl fmt::Display for WorkloadStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Do(op) => op.fmt(f),
            Self::Try(op) => write!(f, "try {op}"),
            Self::Fsync(path) => write!(f, "fsync /{path}"),
            Self::Fdatasync(path) => write!(f, "fdatasync /{path}"),
            Self::Sync => f.write_str("sync"),
        }
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |f: &mut fmt::Formatter<'_>, parts: &[&dyn fmt::Display]| {
            parts.iter().enumerate().try_for_each(|(at, part)| {
                f.write_str(if at > 0 { "; " } else { "" })?;
                part.fmt(f)
            })
        };
        write!(f, "{} [", self.name)?;
        list(f, &self.setup.iter().map(|op| op as _).collect::<Vec<_>>())?;
        f.write_str("] ")?;
        list(f, &self.steps.iter().map(|step| step as _).collect::<Vec<_>>())
    }
}

/// The permissions of new files and directories.
pub const PERMISSIONS: u32 = 0o640;

/// The major number of new devices.
pub const DEVICE_MAJOR: u32 = 240;

/// Runs the operations of a workload on one filesystem.
pub struct Runner<'a> {
    fs: &'a dyn FileSystemMut,
    subvolumes: Option<&'a dyn SubvolumeCalls>,
    /// The number of the next operation.
    next: u32,
}

/// The time of the operation with this number.
fn time(number: u32) -> Timestamp {
    Timestamp { secs: 1_600_000_000 + i64::from(number), nanos: number }
}

/// The bytes that the operation with this number writes at `offset`, or gives to an extended
/// attribute.
#[must_use]
pub fn bytes(number: u32, offset: u64, len: usize) -> Vec<u8> {
    let start = offset + u64::from(number) * 53;
    (start..).take(len).map(|at| u8::try_from(at * 7 % 251).expect("below 251") + 1).collect()
}

/// The access control list that the operation with this number sets: it allows the user with that
/// number as much as the group.
#[must_use]
pub fn acl(number: u32, permissions: u32) -> Vec<u8> {
    /// For each entry (the owner, one user, the owning group, the mask and others): its tag, and
    /// the shift that selects its bits in the permissions (`linux/posix_acl.h`).
    const ENTRIES: [(u16, u32); 5] = [(1, 6), (2, 3), (4, 3), (16, 3), (32, 0)];
    let mut value = vec![2, 0, 0, 0];
    for (tag, shift) in ENTRIES {
        let bits = u16::try_from(permissions >> shift & 7).expect("three bits");
        let id = if tag == 2 { number } else { u32::MAX };
        value.extend([tag.to_le_bytes(), bits.to_le_bytes()].concat());
        value.extend(id.to_le_bytes());
    }
    value
}

/// The name of the extended attribute that stores an access control list.
#[must_use]
pub fn acl_name(is_default: bool) -> &'static [u8] {
    if is_default { DEFAULT } else { ACCESS }
}

/// The name of the extended attribute that stores the compression of a file.
pub const COMPRESSION: &str = "btrfs.compression";

/// The target of the symbolic link that the operation with this number makes.
#[must_use]
pub fn target(number: u32, path: &str) -> String {
    format!("the target of {path}, which is number {number}")
}

/// The file at a path; the root is "".
pub(super) fn find(fs: &(impl FileSystem + ?Sized), path: &str) -> Result<FileId> {
    let mut names = path.split('/').filter(|name| !name.is_empty());
    names.try_fold(fs.root(), |dir, name| fs.lookup(dir, name.as_bytes()))
}

/// The directory of a path, "" for the root, and the last name of the path.
pub(super) fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

impl<'a> Runner<'a> {
    /// A runner whose first operation has the number `first`: 1 on an empty volume.
    #[must_use]
    pub fn new(fs: &'a dyn FileSystemMut, first: u32) -> Self {
        Self { fs, subvolumes: None, next: first }
    }

    /// The runner does operations on subvolumes too, through `subvolumes`.
    #[must_use]
    pub fn with_subvolumes(self, subvolumes: &'a dyn SubvolumeCalls) -> Self {
        Self { subvolumes: Some(subvolumes), ..self }
    }

    /// The number of the next operation.
    pub(super) fn next(&self) -> u32 {
        self.next
    }

    fn place<'p>(&self, path: &'p str) -> Result<EntryPlace<'p>> {
        let (dir, name) = split(path);
        Ok(EntryPlace { dir: find(self.fs, dir)?, name: name.as_bytes() })
    }

    /// Does these steps, up to the first that fails. Returns how many were refused that may be.
    pub fn run_steps(&mut self, steps: &[WorkloadStep]) -> Result<usize> {
        let mut refused = 0;
        for step in steps {
            match self.run_step(step) {
                Err(error) if step.may_be_refused(&error) => refused += 1,
                done => done?,
            }
        }
        Ok(refused)
    }

    /// Skips an operation. It uses up its number all the same.
    pub(super) fn skip(&mut self) {
        self.next += 1;
    }

    pub(super) fn run_step(&mut self, step: &WorkloadStep) -> Result<()> {
        match step {
            WorkloadStep::Do(op) | WorkloadStep::Try(op) => self.run(op),
            WorkloadStep::Fsync(path) => self.fs.fsync(find(self.fs, path)?),
            WorkloadStep::Fdatasync(path) => self.fs.fdatasync(find(self.fs, path)?),
            WorkloadStep::Sync => self.fs.sync(),
        }
    }

    pub(super) fn run(&mut self, op: &WorkloadOp) -> Result<()> {
        let (fs, number) = (self.fs, self.next);
        self.next += 1;
        let at = time(number);
        let new = NewFile { permissions: PERMISSIONS, uid: number, gid: 0, umask: None, at };
        let open = |path: &str| find(fs, path);
        let set_xattr = |path: &str, name: &[u8], value: &[u8]| {
            fs.set_xattr(open(path)?, name, value, XattrMode::Set, at)
        };
        let mknod = |path: &str, file_type, rdev| {
            fs.mknod(self.place(path)?, NewNode { file_type, rdev }, &new).map(drop)
        };
        match op {
            WorkloadOp::Create(path) => fs.create(self.place(path)?, &new).map(drop),
            WorkloadOp::Mkdir(path) => fs.mkdir(self.place(path)?, &new).map(drop),
            WorkloadOp::Symlink(path) => {
                fs.symlink(self.place(path)?, target(number, path).as_bytes(), &new).map(drop)
            }
            WorkloadOp::Link(old, new) => fs.link(open(old)?, self.place(new)?, at),
            WorkloadOp::Unlink(path) => fs.unlink(self.place(path)?, at),
            WorkloadOp::Rmdir(path) => fs.rmdir(self.place(path)?, at),
            WorkloadOp::Rename(from, to) => fs.rename(self.place(from)?, self.place(to)?, at),
            WorkloadOp::Exchange(one, other) => {
                fs.rename_with(self.place(one)?, self.place(other)?, Rename::Exchange, at)
            }
            WorkloadOp::Unnamed(path) => {
                let place = self.place(path)?;
                let file = fs.create_unnamed(place.dir, true, &new)?;
                fs.link(file, place, at).and(fs.release(file))
            }
            WorkloadOp::RenameNoReplace(from, to) => {
                fs.rename_with(self.place(from)?, self.place(to)?, Rename::NoReplace, at)
            }
            WorkloadOp::Fifo(path) => mknod(path, FileType::Fifo, (0, 0)),
            WorkloadOp::Device(path) => mknod(path, FileType::CharDevice, (DEVICE_MAJOR, number)),
            WorkloadOp::SetFlags(path, flags) => fs.set_flags(open(path)?, *flags, at),
            WorkloadOp::Open(path) => fs.open(open(path)?),
            WorkloadOp::Write { path, offset, len } => {
                fs.write(open(path)?, *offset, &bytes(number, *offset, *len), at)
            }
            WorkloadOp::WriteDirect { path, offset, len } => {
                fs.write_direct(open(path)?, *offset, &bytes(number, *offset, *len), at)
            }
            WorkloadOp::WriteSame(from, to) => self.write_same(from, to, at),
            WorkloadOp::Truncate(path, size) => {
                let set = SetAttr { size: Some(*size), ..SetAttr::default() };
                fs.set_attr(open(path)?, &set, at)
            }
            WorkloadOp::Fallocate { path, what, offset, len } => {
                let file = open(path)?;
                let moves = matches!(what, Fallocate::Collapse | Fallocate::Insert);
                if moves && fs.attr(file)?.size <= offset + len {
                    return Ok(());
                }
                fs.fallocate(file, *what, *offset, *len, at)
            }
            WorkloadOp::Copy(from, to) => self.copy(from, to, at),
            WorkloadOp::Clone(share) => match self.ends(share)? {
                ([from, to], true, _) => fs.clone_range(from, to, share.len, at),
                _ => Ok(()),
            },
            WorkloadOp::Dedupe(share) => match self.ends(share)? {
                ([from, to], _, true) => fs.dedupe_range(from, to, share.len).map(drop),
                _ => Ok(()),
            },
            WorkloadOp::SetXattr(path, name, len) => {
                set_xattr(path, name.as_bytes(), &bytes(number, 0, *len))
            }
            WorkloadOp::RemoveXattr(path, name) => {
                fs.remove_xattr(open(path)?, name.as_bytes(), at)
            }
            WorkloadOp::Chmod(path, mode) => {
                let set = SetAttr { permissions: Some(*mode), ..SetAttr::default() };
                fs.set_attr(open(path)?, &set, at)
            }
            WorkloadOp::SetAcl { path, is_default, permissions } => {
                set_xattr(path, acl_name(*is_default), &acl(number, *permissions))
            }
            WorkloadOp::SetCompression(path, how) => {
                set_xattr(path, COMPRESSION.as_bytes(), how.as_bytes())
            }
            WorkloadOp::Subvolume(path) => {
                self.subvolumes()?.create_subvolume(self.place(path)?, &new).map(drop)
            }
            WorkloadOp::Snapshot { source, to, is_read_only } => {
                let (source, to) = (open(source)?, self.place(to)?);
                self.subvolumes()?.snapshot(source, to, *is_read_only, at).map(drop)
            }
            WorkloadOp::DeleteSubvolume(path) => {
                self.subvolumes()?.delete_subvolume(self.place(path)?, at)
            }
            WorkloadOp::DropDeleted => self.subvolumes()?.drop_deleted(),
            WorkloadOp::SetReadOnly(path, is_read_only) => {
                self.subvolumes()?.set_read_only(open(path)?, *is_read_only)
            }
            WorkloadOp::SetDefault(path) => self.subvolumes()?.set_default(open(path)?),
        }
    }

    /// The source and the destination of a range, and whether the files are long enough to clone
    /// it, and to dedupe it.
    fn ends(&self, share: &SharedRange) -> Result<([FilePosition; 2], bool, bool)> {
        let from = FilePosition { file: find(self.fs, &share.from)?, offset: share.offset };
        let to = FilePosition { file: find(self.fs, &share.to)?, offset: share.to_offset };
        let sizes = [self.fs.attr(from.file)?.size, self.fs.attr(to.file)?.size];
        let are_one = from.file == to.file;
        let can_be_cloned = share.can_be_cloned(sizes, are_one);
        Ok(([from, to], can_be_cloned, share.can_be_deduped(sizes, are_one)))
    }

    fn copy(&self, from: &str, to: &str, at: Timestamp) -> Result<()> {
        let (from, to) = (find(self.fs, from)?, find(self.fs, to)?);
        if from == to {
            return Ok(());
        }
        let [start, end] = [from, to].map(|file| FilePosition { file, offset: 0 });
        self.fs.copy_range(start, end, self.fs.attr(from)?.size, at).map(drop)
    }

    fn write_same(&self, from: &str, to: &str, at: Timestamp) -> Result<()> {
        let (from, to) = (find(self.fs, from)?, find(self.fs, to)?);
        let len = usize::try_from(self.fs.attr(from)?.size).expect("files are small");
        let mut data = vec![0; len];
        self.fs.read(from, 0, &mut data)?;
        self.fs.write(to, 0, &data, at)
    }

    fn subvolumes(&self) -> Result<&'a dyn SubvolumeCalls> {
        self.subvolumes.ok_or_else(|| Error::unsupported(Code::Unsupported, "subvolumes"))
    }
}
