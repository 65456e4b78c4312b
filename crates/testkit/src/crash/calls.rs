//! The operations of a workload as system calls on a mounted volume.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{
    FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown, lchown, symlink,
};
use std::path::{Path, PathBuf};

use offshoot_vfs::Fallocate;
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, IFlags, Mode, OFlags, RenameFlags, XattrFlags,
};
use rustix::io::Errno;

use super::workload::{
    COMPRESSION, DEVICE_MAJOR, PERMISSIONS, SharedRange, acl, acl_name, bytes, target,
};
use super::{WorkloadOp, WorkloadStep};
use crate::sharing;

/// Does operations below a directory.
#[derive(Debug)]
pub struct DirectoryCalls {
    root: PathBuf,
    /// Files that stay open.
    open: Vec<File>,
    /// The number of the next operation. What the operation makes carries it: as its owner, or in
    /// its contents.
    next: u32,
}

fn writable(path: &Path) -> File {
    File::options().read(true).write(true).open(path).expect("a file")
}

impl DirectoryCalls {
    /// Calls below the directory `root`, the first of which is operation 1.
    #[must_use]
    pub fn new(root: PathBuf) -> Self {
        Self { root, open: Vec::new(), next: 1 }
    }

    /// The same calls below another directory, which shows the same files now. Closes open files.
    #[must_use]
    pub fn moved_to(self, root: PathBuf) -> Self {
        Self { root, open: Vec::new(), next: self.next }
    }

    /// Does a step.
    pub fn step(&mut self, step: &WorkloadStep) {
        match step {
            WorkloadStep::Do(op) | WorkloadStep::Try(op) => self.run(op),
            WorkloadStep::Fsync(path) => {
                let path = self.root.join(path);
                File::open(path).and_then(|file| file.sync_all()).expect("an fsync");
            }
            WorkloadStep::Fdatasync(path) => {
                let path = self.root.join(path);
                File::open(path).and_then(|file| file.sync_data()).expect("an fdatasync");
            }
            WorkloadStep::Sync => {
                let root = File::open(&self.root).expect("a directory");
                rustix::fs::syncfs(root).expect("a sync");
            }
        }
    }

    /// Does an operation.
    pub fn run(&mut self, op: &WorkloadOp) {
        let number = self.next;
        self.next += 1;
        let root = self.root.clone();
        let at = |path: &str| root.join(path);
        let done = match op {
            WorkloadOp::Create(path) => {
                File::create_new(at(path)).and_then(|_| own(&at(path), number))
            }
            WorkloadOp::Mkdir(path) => {
                std::fs::create_dir(at(path)).and_then(|()| own(&at(path), number))
            }
            WorkloadOp::Symlink(path) => symlink(target(number, path), at(path))
                .and_then(|()| lchown(at(path), Some(number), None)),
            WorkloadOp::Link(old, new) => std::fs::hard_link(at(old), at(new)),
            WorkloadOp::Unlink(path) => std::fs::remove_file(at(path)),
            WorkloadOp::Rmdir(path) => std::fs::remove_dir(at(path)),
            WorkloadOp::Rename(from, to) => std::fs::rename(at(from), at(to)),
            WorkloadOp::Exchange(one, other) => {
                let exchange = RenameFlags::EXCHANGE;
                rustix::fs::renameat_with(CWD, at(one), CWD, at(other), exchange)
                    .map_err(Into::into)
            }
            WorkloadOp::Unnamed(path) => {
                let dir = at(path).parent().expect("a directory").to_owned();
                let flags = OFlags::TMPFILE | OFlags::RDWR;
                let file = rustix::fs::open(dir, flags, Mode::from(PERMISSIONS)).expect("a file");
                fchown(&file, Some(number), None).expect("an owner");
                let proc = format!("/proc/self/fd/{}", file.as_raw_fd());
                rustix::fs::linkat(CWD, proc, CWD, at(path), AtFlags::SYMLINK_FOLLOW)
                    .map_err(Into::into)
            }
            WorkloadOp::RenameNoReplace(from, to) => {
                let noreplace = RenameFlags::NOREPLACE;
                rustix::fs::renameat_with(CWD, at(from), CWD, at(to), noreplace).map_err(Into::into)
            }
            WorkloadOp::Fifo(path) => {
                special(&at(path), FileType::Fifo, 0).and_then(|()| own(&at(path), number))
            }
            WorkloadOp::Device(path) => {
                let device = rustix::fs::makedev(DEVICE_MAJOR, number);
                special(&at(path), FileType::CharacterDevice, device)
                    .and_then(|()| own(&at(path), number))
            }
            // An immutable file cannot be opened for writing.
            WorkloadOp::SetFlags(path, flags) => File::open(at(path)).and_then(|file| {
                let flags = IFlags::from_bits_retain(flags.bits());
                Ok(rustix::fs::ioctl_setflags(file, flags)?)
            }),
            WorkloadOp::Open(path) => {
                self.open.push(writable(&at(path)));
                Ok(())
            }
            WorkloadOp::Write { path, offset, len } => {
                writable(&at(path)).write_all_at(&bytes(number, *offset, *len), *offset)
            }
            WorkloadOp::WriteDirect { path, offset, len } => {
                write_direct(&at(path), &bytes(number, *offset, *len), *offset)
            }
            WorkloadOp::WriteSame(from, to) => {
                std::fs::read(at(from)).and_then(|data| writable(&at(to)).write_all_at(&data, 0))
            }
            WorkloadOp::Truncate(path, size) => writable(&at(path)).set_len(*size),
            WorkloadOp::Fallocate { path, what, offset, len } => {
                fallocate(&at(path), *what, *offset, *len)
            }
            WorkloadOp::Copy(from, to) => copy(&at(from), &at(to)),
            WorkloadOp::Clone(share) => clone(&root, share),
            WorkloadOp::Dedupe(share) => {
                dedupe(&root, share);
                Ok(())
            }
            WorkloadOp::SetXattr(path, name, len) => {
                set_xattr(&at(path), name.as_bytes(), &bytes(number, 0, *len))
            }
            WorkloadOp::SetAcl { path, is_default, permissions } => {
                set_xattr(&at(path), acl_name(*is_default), &acl(number, *permissions))
            }
            WorkloadOp::SetCompression(path, how) => {
                set_xattr(&at(path), COMPRESSION.as_bytes(), how.as_bytes())
            }
            WorkloadOp::RemoveXattr(path, name) => {
                rustix::fs::removexattr(at(path), name.as_str()).map_err(Into::into)
            }
            WorkloadOp::Chmod(path, mode) => {
                std::fs::set_permissions(at(path), PermissionsExt::from_mode(*mode))
            }
            WorkloadOp::Subvolume(_)
            | WorkloadOp::Snapshot { .. }
            | WorkloadOp::DeleteSubvolume(_)
            | WorkloadOp::DropDeleted
            | WorkloadOp::SetReadOnly(..)
            | WorkloadOp::SetDefault(_) => Err(std::io::ErrorKind::Unsupported.into()),
        };
        done.unwrap_or_else(|error| panic!("{op}: {error}"));
    }
}

/// The two files of a shared range, their lengths, and whether they are the same file.
fn ends(root: &Path, share: &SharedRange) -> ([PathBuf; 2], [u64; 2], bool) {
    let paths = [&share.from, &share.to].map(|path| root.join(path));
    let [from, to] = [0, 1].map(|at: usize| paths[at].metadata().expect("a file"));
    (paths, [from.len(), to.len()], from.ino() == to.ino())
}

fn clone(root: &Path, share: &SharedRange) -> std::io::Result<()> {
    let ([from, to], sizes, are_one) = ends(root, share);
    if !share.can_be_cloned(sizes, are_one) {
        return Ok(());
    }
    sharing::clone_range((&from, share.offset), (&to, share.to_offset), share.len)
        .map_err(std::io::Error::from_raw_os_error)
}

fn dedupe(root: &Path, share: &SharedRange) {
    let ([from, to], sizes, are_one) = ends(root, share);
    if share.can_be_deduped(sizes, are_one) {
        // Where the bytes differ, the kernel shares nothing.
        let _ = sharing::dedupe_range((&from, share.offset), (&to, share.to_offset), share.len);
    }
}

fn special(path: &Path, file_type: FileType, device: u64) -> std::io::Result<()> {
    Ok(rustix::fs::mknodat(CWD, path, file_type, Mode::from(PERMISSIONS), device)?)
}

fn set_xattr(path: &Path, name: &[u8], value: &[u8]) -> std::io::Result<()> {
    Ok(rustix::fs::setxattr(path, name, value, XattrFlags::empty())?)
}

/// Writes past the page cache, from page-aligned memory.
fn write_direct(path: &Path, data: &[u8], offset: u64) -> std::io::Result<()> {
    const PAGE: usize = 4096;
    let mut buffer = vec![0; data.len() + PAGE];
    let start = buffer.as_ptr().align_offset(PAGE);
    buffer[start..][..data.len()].copy_from_slice(data);
    let flags = i32::try_from(OFlags::DIRECT.bits()).expect("a flag");
    let file = File::options().write(true).custom_flags(flags).open(path)?;
    file.write_all_at(&buffer[start..][..data.len()], offset)
}

/// Sets an owner on a new file, by which the test recognises it.
fn own(path: &Path, number: u32) -> std::io::Result<()> {
    std::fs::set_permissions(path, PermissionsExt::from_mode(PERMISSIONS))?;
    lchown(path, Some(number), None)
}

fn fallocate(path: &Path, what: Fallocate, offset: u64, len: u64) -> std::io::Result<()> {
    let flags = match what {
        Fallocate::Allocate { keeps_size: false } => FallocateFlags::empty(),
        Fallocate::Allocate { keeps_size: true } => FallocateFlags::KEEP_SIZE,
        Fallocate::PunchHole => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        Fallocate::Zero { keeps_size: false } => FallocateFlags::ZERO_RANGE,
        Fallocate::Zero { keeps_size: true } => {
            FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE
        }
        Fallocate::Collapse | Fallocate::Insert => panic!("the kernel has neither here"),
    };
    Ok(rustix::fs::fallocate(writable(path), flags, offset, len)?)
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    let (from, to) = (writable(from), writable(to));
    let (mut left, mut at, mut behind) = (from.metadata()?.len(), 0, 0);
    while left > 0 {
        let len = usize::try_from(left).expect("a small file");
        match rustix::fs::copy_file_range(&from, Some(&mut at), &to, Some(&mut behind), len) {
            // Both paths lead to one file.
            Err(Errno::INVAL) => return Ok(()),
            done => left -= done? as u64,
        }
    }
    Ok(())
}
