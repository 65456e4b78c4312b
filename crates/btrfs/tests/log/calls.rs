//! The operations of a workload as system calls on a mounted volume.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt, fchown, lchown, symlink};
use std::path::{Path, PathBuf};

use offshoot_testkit::crash::workload::{PERMISSIONS, bytes, target};
use offshoot_testkit::crash::{Op, Step};
use offshoot_vfs::Fallocate;
use rustix::fs::{AtFlags, CWD, FallocateFlags, IFlags, Mode, OFlags, RenameFlags, XattrFlags};
use rustix::io::Errno;

/// Does operations below a directory.
pub(crate) struct Calls {
    root: PathBuf,
    /// What is to stay open.
    open: Vec<File>,
    /// The number of the next operation, which makes what it brings its own.
    next: u32,
}

fn writable(path: &Path) -> File {
    File::options().read(true).write(true).open(path).expect("a file")
}

impl Calls {
    pub(crate) fn new(root: PathBuf) -> Self {
        Self { root, open: Vec::new(), next: 1 }
    }

    pub(crate) fn step(&mut self, step: &Step) {
        match step {
            Step::Do(op) | Step::Try(op) => self.run(op),
            Step::Fsync(path) => {
                let path = self.root.join(path);
                File::open(path).and_then(|file| file.sync_all()).expect("an fsync");
            }
            Step::Fdatasync(path) => {
                let path = self.root.join(path);
                File::open(path).and_then(|file| file.sync_data()).expect("an fdatasync");
            }
            Step::Sync => {
                let root = File::open(&self.root).expect("a directory");
                rustix::fs::syncfs(root).expect("a sync");
            }
        }
    }

    pub(crate) fn run(&mut self, op: &Op) {
        let number = self.next;
        self.next += 1;
        let root = self.root.clone();
        let at = |path: &str| root.join(path);
        let done = match op {
            Op::Create(path) => File::create_new(at(path)).and_then(|_| own(&at(path), number)),
            Op::Mkdir(path) => std::fs::create_dir(at(path)).and_then(|()| own(&at(path), number)),
            Op::Symlink(path) => symlink(target(number, path), at(path))
                .and_then(|()| lchown(at(path), Some(number), None)),
            Op::Link(old, new) => std::fs::hard_link(at(old), at(new)),
            Op::Unlink(path) => std::fs::remove_file(at(path)),
            Op::Rmdir(path) => std::fs::remove_dir(at(path)),
            Op::Rename(from, to) => std::fs::rename(at(from), at(to)),
            Op::Exchange(one, other) => {
                let exchange = RenameFlags::EXCHANGE;
                rustix::fs::renameat_with(CWD, at(one), CWD, at(other), exchange)
                    .map_err(Into::into)
            }
            Op::Unnamed(path) => {
                let dir = at(path).parent().expect("a directory").to_owned();
                let flags = OFlags::TMPFILE | OFlags::RDWR;
                let file = rustix::fs::open(dir, flags, Mode::from(PERMISSIONS)).expect("a file");
                fchown(&file, Some(number), None).expect("an owner");
                let proc = format!("/proc/self/fd/{}", file.as_raw_fd());
                rustix::fs::linkat(CWD, proc, CWD, at(path), AtFlags::SYMLINK_FOLLOW)
                    .map_err(Into::into)
            }
            Op::NoCow(path) => {
                rustix::fs::ioctl_setflags(writable(&at(path)), IFlags::NOCOW).map_err(Into::into)
            }
            Op::Open(path) => {
                self.open.push(writable(&at(path)));
                Ok(())
            }
            Op::Write { path, offset, len } => {
                writable(&at(path)).write_all_at(&bytes(number, *offset, *len), *offset)
            }
            Op::Truncate(path, size) => writable(&at(path)).set_len(*size),
            Op::Fallocate { path, what, offset, len } => fallocate(&at(path), *what, *offset, *len),
            Op::Copy(from, to) => copy(&at(from), &at(to)),
            Op::SetXattr(path, name, len) => {
                let value = bytes(number, 0, *len);
                rustix::fs::setxattr(at(path), name.as_str(), &value, XattrFlags::empty())
                    .map_err(Into::into)
            }
            Op::RemoveXattr(path, name) => {
                rustix::fs::removexattr(at(path), name.as_str()).map_err(Into::into)
            }
            Op::Chmod(path, mode) => {
                std::fs::set_permissions(at(path), PermissionsExt::from_mode(*mode))
            }
            Op::Subvolume(_) | Op::Snapshot { .. } | Op::DeleteSubvolume(_) | Op::DropDeleted => {
                Err(std::io::ErrorKind::Unsupported.into())
            }
        };
        done.unwrap_or_else(|error| panic!("{op}: {error}"));
    }
}

/// Gives what was made the owner by which it is known again.
fn own(path: &Path, number: u32) -> std::io::Result<()> {
    std::fs::set_permissions(path, PermissionsExt::from_mode(PERMISSIONS))?;
    lchown(path, Some(number), None)
}

fn fallocate(path: &Path, what: Fallocate, offset: u64, len: u64) -> std::io::Result<()> {
    let flags = match what {
        Fallocate::Allocate { keep_size: false } => FallocateFlags::empty(),
        Fallocate::Allocate { keep_size: true } => FallocateFlags::KEEP_SIZE,
        Fallocate::PunchHole => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        Fallocate::Zero { keep_size: false } => FallocateFlags::ZERO_RANGE,
        Fallocate::Zero { keep_size: true } => {
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
            // Both are one file.
            Err(Errno::INVAL) => return Ok(()),
            done => left -= done? as u64,
        }
    }
    Ok(())
}
