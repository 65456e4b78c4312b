//! Owner, permissions, extended attributes and times of what was made.
//!
//! The order matters. A change of owner clears set-id bits and capabilities, so the owner comes
//! first. Extended attributes of users need a file that may be written, so they come before
//! the permissions, which touch no capabilities. Times come last, because all of these
//! may touch them. Set-id bits are not given to a file whose owner could not be
//! given: they would lend the rights of another user.
//!
//! Regular files and directories are reached through their descriptor. Everything else cannot
//! be opened without side effects and is reached through its directory and its name, never
//! following a symbolic link.

use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use offshoot_vfs::{Attr, Errno, Error, FileId, FileType, SafeName, Timestamp};
use rustix::fs::{self, AtFlags, CWD, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io;

use super::context::TransferContext;
use super::problems::Unapplied;

/// Set-user-id and set-group-id.
const SET_ID: u32 = 0o6000;

/// How a file that was made is reached.
#[derive(Clone, Copy)]
pub(crate) enum MadeHandle<'a> {
    /// It is open.
    Open(BorrowedFd<'a>),
    /// It is this name in this directory.
    Named(BorrowedFd<'a>, &'a SafeName),
}

/// A file that was made and gets its attributes.
pub(crate) struct MadeFile<'a> {
    /// The way to it.
    pub handle: MadeHandle<'a>,
    /// What it is to become.
    pub attr: &'a Attr,
    /// The permissions with which it was made, if they are sure.
    pub mode_now: Option<u32>,
    /// Its directory in the volume, for messages.
    pub parent: FileId,
    /// Its name there, for messages.
    pub name: &'a [u8],
}

impl MadeFile<'_> {
    /// Applies all attributes. What the host refuses is counted; what the volume cannot
    /// give is an error.
    pub(crate) fn apply(&self, context: &TransferContext<'_>) -> Result<(), Error> {
        let refused = |kind, errno| context.unapplied(kind, self.parent, self.name, errno);
        let mut mode = self.attr.permissions;
        if let Err(errno) = self.set_owner(context.owner_of_new) {
            refused(Unapplied::Owner, errno);
            if mode & SET_ID != 0 {
                refused(Unapplied::SetId, errno);
                mode &= !SET_ID;
            }
        }
        let mut xattrs = Ok(());
        if context.wants_xattrs() {
            xattrs = context.fs.xattrs(self.attr.file, &mut |name, value| {
                if let Err(errno) = self.set_xattr(name, value) {
                    refused(Unapplied::Xattr, errno);
                }
                ControlFlow::Continue(())
            });
        }
        if Some(mode) != self.mode_now
            && self.attr.file_type != FileType::Symlink
            && let Err(errno) = self.set_mode(mode)
        {
            refused(Unapplied::Mode, errno);
        }
        if let Err(errno) = self.set_times() {
            refused(Unapplied::Times, errno);
        }
        xattrs
    }

    fn set_owner(&self, owner_now: Option<(u32, u32)>) -> io::Result<()> {
        let (uid, gid) = (self.attr.uid, self.attr.gid);
        if owner_now == Some((uid, gid)) {
            return Ok(());
        }
        if uid == u32::MAX || gid == u32::MAX {
            // The system call reads this number as "leave it".
            return Err(Errno::INVAL);
        }
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
        self.change_owner(Some(uid), Some(gid)).inspect_err(|_| {
            // A user who cannot give files away can still belong to the group.
            let _ = self.change_owner(None, Some(gid));
        })
    }

    fn change_owner(&self, uid: Option<Uid>, gid: Option<Gid>) -> io::Result<()> {
        match self.handle {
            MadeHandle::Open(fd) => fs::fchown(fd, uid, gid),
            MadeHandle::Named(directory, name) => {
                fs::chownat(directory, &**name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)
            }
        }
    }

    pub(super) fn set_mode(&self, mode: u32) -> io::Result<()> {
        let mode = Mode::from_raw_mode(mode);
        match self.handle {
            MadeHandle::Open(fd) => fs::fchmod(fd, mode),
            MadeHandle::Named(directory, name) => with_own_path(directory, name, |path| {
                fs::chmodat(CWD, path, mode, AtFlags::empty())
            }),
        }
    }

    fn set_xattr(&self, name: &[u8], value: &[u8]) -> io::Result<()> {
        match self.handle {
            MadeHandle::Open(fd) => fs::fsetxattr(fd, name, value, XattrFlags::empty()),
            MadeHandle::Named(directory, file) => with_own_path(directory, file, |path| {
                fs::setxattr(path, name, value, XattrFlags::empty())
            }),
        }
    }

    fn set_times(&self) -> io::Result<()> {
        let times = Timestamps {
            last_access: timespec(self.attr.atime),
            last_modification: timespec(self.attr.mtime),
        };
        match self.handle {
            MadeHandle::Open(fd) => fs::futimens(fd, &times),
            MadeHandle::Named(directory, name) => {
                fs::utimensat(directory, &**name, &times, AtFlags::SYMLINK_NOFOLLOW)
            }
        }
    }
}

/// Calls with a path that leads to exactly this file, be it a symbolic link itself: the link
/// of an `O_PATH` descriptor in `/proc`, which jumps to the file and goes no further.
pub(super) fn with_own_path<T>(
    directory: BorrowedFd<'_>,
    name: &SafeName,
    call: impl FnOnce(&str) -> io::Result<T>,
) -> io::Result<T> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = fs::openat(directory, &**name, flags, Mode::empty())?;
    call(&format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()))
}

fn timespec(time: Timestamp) -> Timespec {
    Timespec { tv_sec: time.secs, tv_nsec: time.nanos.into() }
}
