//! The directory that is extracted into, and how the descriptors of the process are shared out.
//!
//! The extraction makes the destination, or takes an empty directory of the caller. While it runs,
//! no other user can enter the directory (mode 0700). So nothing inside needs a defence against
//! other users: files can be made with their final permissions before their owner is right, and a
//! name that was made stays what it is. The destination gets its own owner and mode last. When the
//! volume gives it none, it gets back what it had.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{self, CWD, Dir, FileType, Gid, Mode, OFlags, Uid, XattrFlags};
use rustix::io::Errno;
use rustix::process;

use super::marker::{self, Mark};
use crate::host::Process;
use crate::{Result, TransferFailure};

/// Descriptors that are left to everything else: devices, standard streams, the link table.
const DESCRIPTORS_KEPT: u64 = 64;

/// The extended attribute that gives new files in a directory their ACL.
const DEFAULT_ACL: &str = "system.posix_acl_default";

/// The longest value of an extended attribute.
const ACL_MAX: usize = 64 << 10;

/// The deepest tree that is extracted, however many descriptors there are. The kernel's own
/// limit for a path is 4096 bytes, so 2048 levels.
const DEPTH_MAX: u64 = 8 * 1024;

/// An open destination. It is again what it was before when this goes, unless it was given to
/// the tree that becomes its contents.
pub(crate) struct HostDestination {
    /// The directory.
    pub(crate) fd: File,
    /// Owner and group that new files in it get; `None` when that could not be found out.
    pub(crate) owner_of_new: Option<(u32, u32)>,
    /// Something is in it, which an extraction of the same left half done.
    pub(crate) is_resumed: bool,
    /// What it was; `None` when that does not matter any more.
    before: Option<Before>,
}

/// What a directory was before it was locked.
struct Before {
    /// Owner and group, if they had to be changed.
    owner: Option<(u32, u32)>,
    mode: u32,
    default_acl: Option<Vec<u8>>,
}

impl HostDestination {
    /// Makes or takes over the directory `path`.
    ///
    /// It changes no directory that it refuses. When another user filled the directory just before
    /// it was locked, the change is taken back.
    ///
    /// One with this mark is taken although it is not empty: an extraction of the same was left
    /// half done there.
    pub(crate) fn open(path: &Path, mark: &Mark, process: Process) -> Result<Self> {
        let fail = |errno: Errno| TransferFailure::Host(path.display().to_string(), errno.into());
        let is_new = match fs::mkdirat(CWD, path, Mode::RWXU) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(errno) => return Err(fail(errno)),
        };
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let fd = fs::openat(CWD, path, flags, Mode::empty()).map_err(fail)?;
        let failed = |error| TransferFailure::Host(path.display().to_string(), error);
        let is_resumed = match marker::read(&fd).map_err(failed)? {
            Some(found) if mark.is(&found) => {
                let stat = fs::fstat(&fd).map_err(fail)?;
                if stat.st_uid != process::geteuid().as_raw() || stat.st_mode & 0o077 != 0 {
                    return Err(failed(marker::not_ours(path)));
                }
                true
            }
            Some(found) if found.is_empty() => {
                require_empty_but_for(&fd, path, marker::NAME)?;
                marker::remove(&fd).map_err(failed)?;
                false
            }
            Some(found) => return Err(failed(mark.refuse(&found, path))),
            None => false,
        };
        if !is_resumed {
            require_empty(&fd, path)?;
        }
        let mut before = Before::of(&fd).map_err(fail)?;
        if is_new {
            before.mode = 0o777 & !process.umask;
        }
        let fd = fd.into();
        let mut destination = Self { fd, owner_of_new: None, is_resumed, before: Some(before) };
        destination
            .lock()
            .map_err(|error| TransferFailure::Host(path.display().to_string(), error))?;
        // Only from now on no other user can put anything into it.
        if !is_resumed {
            require_empty(&destination.fd, path)?;
            marker::write(&destination.fd, mark).map_err(failed)?;
        }
        destination.owner_of_new = owner_of_new(&destination.fd);
        Ok(destination)
    }

    /// Keeps other users out, and takes off what would change the files that are made inside:
    /// a set-group-id bit, a default ACL.
    fn lock(&mut self) -> io::Result<()> {
        let Some(before) = &mut self.before else { return Ok(()) };
        let stat = fs::fstat(&self.fd)?;
        if stat.st_uid != process::geteuid().as_raw() {
            fs::fchown(&self.fd, Some(process::geteuid()), None)?;
            before.owner = Some((stat.st_uid, stat.st_gid));
        }
        if stat.st_mode & 0o7777 != 0o700 {
            fs::fchmod(&self.fd, Mode::RWXU)?;
        }
        if before.default_acl.is_some() {
            fs::fremovexattr(&self.fd, DEFAULT_ACL)?;
        }
        Ok(())
    }

    /// The directory, which will get the attributes of the one that is extracted into it.
    pub(crate) fn give_away(mut self) -> io::Result<File> {
        let fd = self.fd.try_clone()?;
        self.before = None;
        Ok(fd)
    }

    /// Makes the directory again what it was.
    pub(crate) fn restore(mut self) -> io::Result<()> {
        self.give_back()
    }

    /// The mark goes with that, unless it was found there: others can get in again.
    fn give_back(&mut self) -> io::Result<()> {
        let Some(before) = self.before.take() else { return Ok(()) };
        if !self.is_resumed {
            marker::remove(&self.fd).or_else(|error| match error.kind() {
                io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            })?;
        }
        Ok(before.restore(&self.fd)?)
    }
}

impl Drop for HostDestination {
    fn drop(&mut self) {
        // Only has something to do on the way out with an error, which is the one to tell.
        let _ = self.give_back();
    }
}

impl Before {
    fn of(directory: impl AsFd) -> rustix::io::Result<Self> {
        let mode = fs::fstat(&directory)?.st_mode & 0o7777;
        let mut value = vec![0; ACL_MAX];
        let default_acl = match fs::fgetxattr(&directory, DEFAULT_ACL, &mut value) {
            Ok(len) => {
                value.truncate(len);
                Some(value)
            }
            Err(Errno::NODATA | Errno::OPNOTSUPP) => None,
            Err(errno) => return Err(errno),
        };
        Ok(Self { owner: None, mode, default_acl })
    }

    fn restore(&self, directory: impl AsFd) -> rustix::io::Result<()> {
        if let Some(acl) = &self.default_acl {
            fs::fsetxattr(&directory, DEFAULT_ACL, acl, XattrFlags::empty())?;
        }
        fs::fchmod(&directory, Mode::from_raw_mode(self.mode))?;
        // Last, because the directory is ours only until then.
        if let Some((uid, gid)) = self.owner {
            fs::fchown(&directory, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
        }
        Ok(())
    }
}

fn require_empty(directory: impl AsFd, path: &Path) -> Result<()> {
    require_empty_but_for(directory, path, "")
}

fn require_empty_but_for(directory: impl AsFd, path: &Path, known: &str) -> Result<()> {
    let fail = |error| TransferFailure::Host(path.display().to_string(), error);
    for entry in Dir::read_from(directory).map_err(|errno| fail(errno.into()))? {
        let entry = entry.map_err(|errno| fail(errno.into()))?;
        match entry.file_name().to_bytes() {
            b"." | b".." => {}
            name if name == known.as_bytes() => {}
            // What every new ext4 has at its top.
            b"lost+found" => {
                let hint = "it holds lost+found, as the top of a filesystem does; \
                            name a new directory in it";
                return Err(fail(io::Error::new(io::ErrorKind::DirectoryNotEmpty, hint)));
            }
            _ => return Err(fail(Errno::NOTEMPTY.into())),
        }
    }
    Ok(())
}

/// Owner and group of files that we make in `directory`, found out with a file without a name.
fn owner_of_new(directory: impl AsFd) -> Option<(u32, u32)> {
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
    /// Shares `descriptors` out.
    pub(crate) fn share(descriptors: u64, batches_in_flight: usize) -> Self {
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

    fn mark(place: &str, state: &str) -> Mark {
        Mark { place: place.into(), state: state.into() }
    }

    fn open(path: &Path, mark: &Mark) -> Result<HostDestination> {
        HostDestination::open(path, mark, Process::prepare().expect("the host lets us"))
    }

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
        open(&new, &mark("a volume", "now")).unwrap().give_away().unwrap();
        // It is half done until the mark goes.
        assert!(open(&new, &mark("a volume", "now")).unwrap().is_resumed);
        let Err(other) = open(&new, &mark("a vol", "now")) else { panic!("taken") };
        assert!(other.to_string().contains("another place was left half done"), "{other}");
        let Err(later) = open(&new, &mark("a volume", "then")) else { panic!("taken") };
        assert!(later.to_string().contains("the volume was changed, or"), "{later}");
        // Nothing was made yet when this was killed.
        std::fs::write(new.join(marker::NAME), "").unwrap();
        assert!(!open(&new, &mark("a volume", "now")).unwrap().is_resumed);
        open(&new, &mark("a volume", "now")).unwrap().give_away().unwrap();
        std::fs::remove_file(new.join(marker::NAME)).unwrap();
        assert!(!open(&new, &mark("a volume", "now")).unwrap().is_resumed);
        // What others could get at in the meantime is not gone on with.
        open(&new, &mark("a volume", "now")).unwrap().give_away().unwrap();
        std::fs::set_permissions(&new, std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
        let Err(others) = open(&new, &mark("a volume", "now")) else { panic!("taken") };
        assert!(others.to_string().contains("others can write there"), "{others}");
        std::fs::remove_file(new.join(marker::NAME)).unwrap();
        std::fs::write(new.join("file"), "").unwrap();
        let Err(TransferFailure::Host(_, error)) = open(&new, &mark("a volume", "now")) else {
            panic!("taken")
        };
        assert_eq!(error.kind(), io::ErrorKind::DirectoryNotEmpty);
        let Err(TransferFailure::Host(_, error)) =
            open(&new.join("file"), &mark("a volume", "now"))
        else {
            panic!("taken")
        };
        assert_eq!(error.kind(), io::ErrorKind::NotADirectory);
    }

    /// Everything that a refused or borrowed directory must have again afterwards.
    fn state(path: &Path) -> (u32, u32, u32, Option<Vec<u8>>) {
        use std::os::unix::fs::MetadataExt;
        let stat = path.metadata().unwrap();
        let mut acl = vec![0; 1024];
        let acl = fs::getxattr(path, DEFAULT_ACL, &mut acl).ok().map(|len| acl[..len].to_vec());
        (stat.uid(), stat.gid(), stat.mode(), acl)
    }

    /// A directory with an owner (if we may), a mode and a default ACL (if the host has them).
    fn foreign_directory(path: &Path) -> (u32, u32, u32, Option<Vec<u8>>) {
        std::fs::create_dir(path).unwrap();
        let entry = |tag: u16, permissions: u16| {
            [&tag.to_le_bytes()[..], &permissions.to_le_bytes(), &[0xff; 4]].concat()
        };
        let acl = [2_u32.to_le_bytes().to_vec(), entry(1, 7), entry(4, 5), entry(32, 0)].concat();
        let _ = fs::setxattr(path, DEFAULT_ACL, &acl, fs::XattrFlags::empty());
        if process::geteuid().is_root() {
            std::os::unix::fs::chown(path, Some(1234), Some(5678)).unwrap();
        }
        fs::chmod(path, Mode::from_raw_mode(0o2750)).unwrap();
        state(path)
    }

    /// The owner and the ACL were changed before it was found that the directory is not empty.
    #[test]
    fn a_refused_directory_is_as_it_was() {
        use std::os::unix::fs::MetadataExt;
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("full");
        let before = foreign_directory(&path);
        std::fs::write(path.join("file"), "").unwrap();
        let changed = |path: &Path| path.metadata().map(|stat| (stat.ctime(), stat.ctime_nsec()));
        let changed_before = changed(&path).unwrap();
        assert!(open(&path, &mark("a volume", "now")).is_err());
        assert_eq!(state(&path), before);
        assert_eq!(changed(&path).unwrap(), changed_before);
    }

    #[test]
    fn a_borrowed_directory_is_given_back() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("empty");
        let before = foreign_directory(&path);
        for is_dropped in [true, false] {
            let destination = open(&path, &mark("a volume", "now")).unwrap();
            assert_eq!((state(&path).2, state(&path).3), (0o40700, None));
            if is_dropped {
                drop(destination);
            } else {
                destination.restore().unwrap();
            }
            assert_eq!(state(&path), before);
        }
    }

    #[test]
    fn the_top_of_a_new_filesystem_is_refused_with_advice() {
        let temp = tempfile::tempdir().unwrap();
        std::fs::create_dir(temp.path().join("lost+found")).unwrap();
        let Err(failure) = open(temp.path(), &mark("a volume", "now")) else { panic!("taken") };
        assert!(failure.to_string().ends_with("name a new directory in it"), "{failure}");
    }
}
