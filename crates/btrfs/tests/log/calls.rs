//! The operations of a workload as system calls on a mounted volume.

use std::collections::BTreeSet;
use std::fs::{DirEntry as DirEntryOfHost, File};
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use offshoot_testkit::crash::{Op, Step};
use offshoot_vfs::{DirEntry, Fallocate, FileSystem};
use rustix::fs::{AtFlags, CWD, FallocateFlags, IFlags, Mode, OFlags, RenameFlags, XattrFlags};
use rustix::io::Errno;

/// Does operations below a directory.
pub(crate) struct Calls {
    root: PathBuf,
    /// What is to stay open.
    open: Vec<File>,
    /// The number of the next operation, which makes what it writes its own.
    next: u8,
    /// What was synced last.
    synced: String,
}

/// What an fsync promised: the path of a file, and what it held, or the names in a directory.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Promise {
    path: String,
    held: Held,
}

#[derive(Debug, PartialEq, Eq)]
enum Held {
    Bytes(Vec<u8>),
    Names(BTreeSet<Vec<u8>>),
}

impl Promise {
    /// The same path as `fs` shows it below the directory `root`.
    pub(crate) fn found_in(&self, fs: &dyn FileSystem, root: &str) -> Self {
        let names = [root].into_iter().chain(self.path.split('/')).filter(|name| !name.is_empty());
        let file = names.fold(fs.root(), |dir, name| {
            fs.lookup(dir, name.as_bytes()).unwrap_or_else(|e| panic!("{root}/{}: {e}", self.path))
        });
        let held = match &self.held {
            Held::Bytes(_) => {
                let size = usize::try_from(fs.attr(file).expect("a file").size).expect("small");
                let mut bytes = vec![0; size];
                fs.read(file, 0, &mut bytes).expect("data");
                Held::Bytes(bytes)
            }
            Held::Names(_) => {
                let mut names = BTreeSet::new();
                let visit = &mut |entry: DirEntry<'_>| {
                    names.insert(entry.name.to_vec());
                    ControlFlow::Continue(())
                };
                fs.read_dir(file, 0, visit).expect("names");
                Held::Names(names)
            }
        };
        Self { path: self.path.clone(), held }
    }
}

fn writable(path: &Path) -> File {
    File::options().read(true).write(true).open(path).expect("a file")
}

impl Calls {
    pub(crate) fn new(root: PathBuf) -> Self {
        Self { root, open: Vec::new(), next: 1, synced: String::new() }
    }

    /// What the last fsync promised, of which nothing has changed since.
    pub(crate) fn last_promise(&self) -> Promise {
        let path = self.at(&self.synced);
        let held = if path.is_dir() {
            let entries = std::fs::read_dir(path).expect("a directory");
            let name = |entry: std::io::Result<DirEntryOfHost>| {
                entry.expect("an entry").file_name().into_encoded_bytes()
            };
            Held::Names(entries.map(name).collect())
        } else {
            Held::Bytes(std::fs::read(path).expect("a file"))
        };
        Promise { path: self.synced.clone(), held }
    }

    pub(crate) fn step(&mut self, step: &Step) {
        match step {
            Step::Do(op) | Step::Try(op) => self.run(op),
            Step::Fsync(path) => {
                File::open(self.at(path)).and_then(|file| file.sync_all()).expect("an fsync");
                self.synced.clone_from(path);
            }
            Step::Sync => {
                let root = File::open(&self.root).expect("a directory");
                rustix::fs::syncfs(root).expect("a sync");
            }
        }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    pub(crate) fn run(&mut self, op: &Op) {
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        let root = self.root.clone();
        let at = |path: &str| root.join(path);
        let done = match op {
            Op::Create(path) => File::create_new(at(path)).map(drop),
            Op::Mkdir(path) => std::fs::create_dir(at(path)),
            Op::Symlink(path) => symlink(format!("target {number}"), at(path)),
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
                let file = rustix::fs::open(dir, flags, Mode::from(0o640)).expect("a file");
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
                let bytes: Vec<u8> =
                    (0..*len).map(|i| number.wrapping_add(i.to_le_bytes()[0] / 3) | 1).collect();
                writable(&at(path)).write_all_at(&bytes, *offset)
            }
            Op::Truncate(path, size) => writable(&at(path)).set_len(*size),
            Op::Fallocate { path, what, offset, len } => fallocate(&at(path), *what, *offset, *len),
            Op::Copy(from, to) => copy(&at(from), &at(to)),
            Op::SetXattr(path, name, len) => {
                let value = vec![number; *len];
                rustix::fs::setxattr(at(path), *name, &value, XattrFlags::empty())
                    .map_err(Into::into)
            }
            Op::RemoveXattr(path, name) => {
                rustix::fs::removexattr(at(path), *name).map_err(Into::into)
            }
            Op::Chmod(path, mode) => {
                std::fs::set_permissions(at(path), PermissionsExt::from_mode(*mode))
            }
        };
        done.unwrap_or_else(|error| panic!("{op}: {error}"));
    }
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
        // The kernel has neither for this filesystem.
        Fallocate::Collapse | Fallocate::Insert => return Ok(()),
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
