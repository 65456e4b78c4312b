//! The kernel's part of a game by turns: random system calls on the files of an
//! [`Actor`](crate::model::actor::Actor).

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Error, Result};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, IFlags, OFlags, XattrFlags};
use rustix::io::Errno;

use crate::random::Random;
use crate::run::run;

/// A source of random system calls below a directory.
pub struct KernelCalls {
    root: PathBuf,
    is_xfs: bool,
    names: Vec<Vec<u8>>,
    random: Random,
}

impl KernelCalls {
    /// Calls on files with these names below a directory of btrfs.
    #[must_use]
    pub fn new(root: &Path, names: Vec<Vec<u8>>, seed: u64) -> Self {
        Self { root: root.to_owned(), is_xfs: false, names, random: Random::new(seed) }
    }

    /// The same for a directory of XFS. It moves ranges of files in place of what btrfs alone has.
    #[must_use]
    pub fn on_xfs(self) -> Self {
        Self { is_xfs: true, ..self }
    }

    /// Does `count` random operations. Some fail because of what they meet.
    ///
    /// # Panics
    /// When one fails for another reason, or most of them fail.
    pub fn act(&mut self, count: u64) {
        let mut done = 0;
        for _ in 0..count {
            match self.step() {
                Ok(()) => done += 1,
                Err(error) if may_fail(&error) => {}
                // Some volumes of XFS share no blocks.
                Err(error) if self.is_xfs && is_unsupported(&error) => {}
                Err(error) => panic!("the kernel in {}: {error}", self.root.display()),
            }
        }
        assert!(done > count / 4, "only {done} of {count} operations succeeded");
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    fn name(&mut self) -> Vec<u8> {
        let index = usize::try_from(self.random.below(self.names.len() as u64)).expect("small");
        self.names[index].clone()
    }

    fn path(&mut self) -> PathBuf {
        let mut dir = self.root.clone();
        for _ in 0..self.below(4) {
            let below = dir.join(OsStr::from_bytes(&self.name()));
            if below.symlink_metadata().is_ok_and(|found| found.is_dir()) {
                dir = below;
            }
        }
        dir.join(OsStr::from_bytes(&self.name()))
    }

    /// An existing regular file, or an error after a few attempts.
    fn regular(&mut self) -> Result<File> {
        for _ in 0..8 {
            let path = self.path();
            if path.symlink_metadata().is_ok_and(|found| found.is_file()) {
                return open(&path, false);
            }
        }
        Err(Errno::NOENT.into())
    }

    fn any_size(&mut self, bits: u64) -> u64 {
        let bits = self.below(bits + 1);
        self.below(1 << bits)
    }

    /// A range for an operation: unaligned, or of whole sectors.
    fn range(&mut self) -> (u64, u64) {
        match self.below(3) {
            0 => (self.any_size(18), 1 + self.any_size(15)),
            _ => (self.any_size(6) * 4096, (1 + self.any_size(5)) * 4096),
        }
    }

    fn data(&mut self) -> Vec<u8> {
        let bits = if self.below(6) == 0 { 19 } else { 14 };
        let len = usize::try_from(self.any_size(bits)).expect("small");
        match self.below(4) {
            0 => self.random.bytes(len),
            1 => vec![7; len],
            _ => self.random.text(len),
        }
    }

    fn step(&mut self) -> Result<()> {
        match self.below(100) {
            0..18 => self.make(),
            18..34 => self.write(),
            34..41 => Ok(self.regular()?.set_len(self.any_size(18))?),
            41..55 => self.allocate(),
            55..65 => self.clone_range(),
            65..70 => self.clone_whole(),
            70..84 => self.change_names(),
            84..90 => self.attributes(),
            90..95 if self.is_xfs => self.shift(),
            90..93 => self.make_without_cow(),
            93..95 => self.defragment(),
            95..97 => self.regular()?.sync_all(),
            _ => Ok(rustix::fs::syncfs(File::open(&self.root)?)?),
        }
    }

    fn make(&mut self) -> Result<()> {
        let path = self.path();
        if path.symlink_metadata().is_ok_and(|found| !found.is_file()) {
            return Err(Errno::EXIST.into());
        }
        let (file, data) = (open(&path, true)?, self.data());
        file.write_all_at(&data, 0)
    }

    fn write(&mut self) -> Result<()> {
        let (file, data) = (self.regular()?, self.data());
        let (offset, _) = self.range();
        file.write_all_at(&data, offset)
    }

    fn allocate(&mut self) -> Result<()> {
        let file = self.regular()?;
        let (offset, len) = self.range();
        let flags = match self.below(5) {
            0 => FallocateFlags::empty(),
            1 => FallocateFlags::KEEP_SIZE,
            2 => FallocateFlags::ZERO_RANGE,
            _ => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        };
        Ok(rustix::fs::fallocate(&file, flags, offset, len)?)
    }

    /// Takes a range out of a file, or makes room for one in it.
    fn shift(&mut self) -> Result<()> {
        let file = self.regular()?;
        let ((offset, len), is_out) = (self.range(), self.below(2) == 0);
        let flags =
            if is_out { FallocateFlags::COLLAPSE_RANGE } else { FallocateFlags::INSERT_RANGE };
        Ok(rustix::fs::fallocate(&file, flags, offset, len)?)
    }

    /// Shares whole sectors of a file with another offset of the same file or of another one.
    fn clone_range(&mut self) -> Result<()> {
        let (from, to) = (self.regular()?, self.regular()?);
        let ((mut offset, len), (mut at, _)) = (self.range(), self.range());
        let len = usize::try_from(len).expect("small");
        rustix::fs::copy_file_range(&from, Some(&mut offset), &to, Some(&mut at), len)?;
        Ok(())
    }

    fn clone_whole(&mut self) -> Result<()> {
        let (from, to) = (self.regular()?, self.regular()?);
        Ok(rustix::fs::ioctl_ficlone(&to, &from)?)
    }

    fn change_names(&mut self) -> Result<()> {
        let (one, other) = (self.path(), self.path());
        match self.below(14) {
            0..4 => std::fs::rename(one, other),
            4..6 => std::fs::hard_link(one, other),
            6..10 => std::fs::remove_file(one),
            10 => std::fs::remove_dir(one),
            11..13 => std::fs::create_dir(one),
            _ => std::os::unix::fs::symlink(&other, one),
        }
    }

    fn attributes(&mut self) -> Result<()> {
        let (file, name) = (self.regular()?, self.name());
        let name = [b"user.", &name[..]].concat();
        match self.below(4) {
            0 => Ok(rustix::fs::fremovexattr(&file, OsStr::from_bytes(&name))?),
            1 => {
                let mode = u32::try_from(self.below(0o1000)).expect("9 bits");
                file.set_permissions(PermissionsExt::from_mode(mode))
            }
            _ => {
                let len = usize::try_from(self.below(300)).expect("small");
                let value = self.random.bytes(len);
                let name = OsStr::from_bytes(&name);
                Ok(rustix::fs::fsetxattr(&file, name, &value, XattrFlags::empty())?)
            }
        }
    }

    /// A new file whose data is written in place and has no checksums.
    fn make_without_cow(&mut self) -> Result<()> {
        let path = self.path();
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW;
        let file = File::from(rustix::fs::open(&path, flags, 0o644.into())?);
        rustix::fs::ioctl_setflags(&file, IFlags::NOCOW)?;
        file.write_all_at(&self.data(), 0)
    }

    fn defragment(&mut self) -> Result<()> {
        let path = self.path();
        if !path.symlink_metadata()?.is_file() {
            return Err(Errno::ISDIR.into());
        }
        let how = ["-czstd", "-czlib", "-clzo"][usize::try_from(self.below(3)).expect("small")];
        // Without a limit the tool looks for pages everywhere in holes, which takes seconds for a
        // file of many gigabytes.
        let words = ["filesystem", "defragment", how, "-l", "64M"].map(str::as_ref);
        run("btrfs", &[&words[..], &[path.as_os_str()]].concat());
        Ok(())
    }
}

/// Opens the regular file at `path`, never what a link or a pipe leads to.
fn open(path: &Path, is_new: bool) -> Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).expect("flags of open");
    let mut options = File::options();
    options.read(true).write(true).create(is_new).truncate(false).custom_flags(flags).open(path)
}

fn is_unsupported(error: &Error) -> bool {
    error.raw_os_error() == Some(Errno::OPNOTSUPP.raw_os_error())
}

/// The errors of random calls: names that exist or not, and files of another type or with other
/// properties.
fn may_fail(error: &Error) -> bool {
    const MAY_FAIL: [Errno; 9] = [
        Errno::NOENT,
        Errno::EXIST,
        Errno::NOTEMPTY,
        Errno::NOTDIR,
        Errno::ISDIR,
        Errno::INVAL,
        Errno::NODATA,
        Errno::LOOP,
        Errno::PERM,
    ];
    error.raw_os_error().is_some_and(|code| MAY_FAIL.contains(&Errno::from_raw_os_error(code)))
}
