//! The directory that is extracted into, and the limits of the process.
//!
//! The destination is made by us or is an empty directory that is ours. For as long as the
//! extraction runs, nobody else can enter it (mode 0700), so what happens inside needs
//! no defence against others: files can be made with their final permissions before their owner
//! is right, and a name that was made stays what it is. It gets its own owner and mode last.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{self, CWD, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{self, Resource, Rlimit};

use crate::exit::{Failure, Result};

/// Descriptors that are left to everything else: devices, standard streams, the link table.
const DESCRIPTORS_KEPT: u64 = 64;

/// The deepest tree that is extracted, however many descriptors there are. The kernel's own
/// limit for a path is 4096 bytes, so 2048 levels.
const DEPTH_MAX: u64 = 8 * 1024;

/// An open destination.
pub(crate) struct Destination {
    /// The directory.
    pub(crate) fd: File,
    /// The permissions that it has if the volume has none for it.
    pub(crate) mode_before: u32,
    /// Owner and group that new files in it get; `None` when that could not be found out.
    pub(crate) owner_of_new: Option<(u32, u32)>,
}

impl Destination {
    /// Makes or takes over the directory `path`, and clears the umask of the process.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let fail = |errno: Errno| Failure::Host(path.display().to_string(), errno.into());
        let umask = process::umask(Mode::empty());
        let is_new = match fs::mkdirat(CWD, path, Mode::RWXU) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(errno) => return Err(fail(errno)),
        };
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let fd = fs::openat(CWD, path, flags, Mode::empty()).map_err(fail)?;
        let stat = fs::fstat(&fd).map_err(fail)?;
        let mut mode_before = 0o777 & !umask.bits();
        if !is_new {
            mode_before = stat.st_mode & 0o7777;
            if stat.st_uid != process::geteuid().as_raw() {
                fs::fchown(&fd, Some(process::geteuid()), None).map_err(fail)?;
            }
        }
        if stat.st_mode & 0o7777 != 0o700 {
            // Inherited set-group-id bits and default ACLs would change what is made inside.
            fs::fchmod(&fd, Mode::RWXU).map_err(fail)?;
        }
        match fs::fremovexattr(&fd, "system.posix_acl_default") {
            Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
            Err(errno) => return Err(fail(errno)),
        }
        let entries = Dir::read_from(&fd).map_err(fail)?;
        for entry in entries {
            let entry = entry.map_err(fail)?;
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                // It is as it was before, but for a default ACL, which it may not keep.
                fs::fchmod(&fd, Mode::from_raw_mode(mode_before)).map_err(fail)?;
                return Err(fail(Errno::NOTEMPTY));
            }
        }
        let owner_of_new = owner_of_new(&fd);
        Ok(Self { fd: fd.into(), mode_before, owner_of_new })
    }
}

/// Owner and group of files that we make in `directory`, found out with a file without a name.
fn owner_of_new(directory: impl rustix::fd::AsFd) -> Option<(u32, u32)> {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = fs::openat(directory, ".", flags, Mode::RUSR | Mode::WUSR).ok()?;
    let stat = fs::fstat(file).ok()?;
    (FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
        .then_some((stat.st_uid, stat.st_gid))
}

/// How the descriptors of the process are shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// How many directories may lie in each other.
    pub(crate) depth_max: usize,
    /// How many files a batch for a worker may hold. Each can keep two descriptors open: its own,
    /// and that of its directory.
    pub(crate) batch_files: usize,
}

impl Limits {
    /// Raises the limit of open files as far as it goes, and shares it out.
    pub(crate) fn raise(batches_in_flight: usize) -> io::Result<Self> {
        let limit = process::getrlimit(Resource::Nofile);
        if limit.current != limit.maximum {
            let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
            process::setrlimit(Resource::Nofile, raised)?;
        }
        Ok(Self::share(limit.maximum.unwrap_or(u64::MAX), batches_in_flight))
    }

    fn share(descriptors: u64, batches_in_flight: usize) -> Self {
        let ours = descriptors.saturating_sub(DESCRIPTORS_KEPT);
        let per_batch = ours / 4 / (batches_in_flight.max(1) as u64);
        #[expect(clippy::cast_possible_truncation, reason = "both are cut to small bounds")]
        Self {
            depth_max: (ours / 2).clamp(1, DEPTH_MAX) as usize,
            batch_files: per_batch.clamp(1, super::BATCH_FILES as u64) as usize,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_fit_the_descriptors() {
        assert_eq!(Limits::share(1 << 20, 8), Limits { depth_max: 8 * 1024, batch_files: 64 });
        let tight = Limits::share(1024, 8);
        assert!(tight.depth_max + tight.batch_files * 2 * 8 <= 1024, "{tight:?}");
        assert_eq!(Limits::share(10, 8), Limits { depth_max: 1, batch_files: 1 });
    }

    #[test]
    fn only_an_empty_directory_is_taken() {
        let temp = tempfile::tempdir().unwrap();
        let new = temp.path().join("new");
        Destination::open(&new).unwrap();
        Destination::open(&new).unwrap();
        std::fs::write(new.join("file"), "").unwrap();
        let Err(Failure::Host(_, error)) = Destination::open(&new) else { panic!("taken") };
        assert_eq!(error.kind(), io::ErrorKind::DirectoryNotEmpty);
        let Err(Failure::Host(_, error)) = Destination::open(&new.join("file")) else {
            panic!("taken")
        };
        assert_eq!(error.kind(), io::ErrorKind::NotADirectory);
    }
}
