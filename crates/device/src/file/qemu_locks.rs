//! The locks with which QEMU and its tools protect an image from each other.
//!
//! They lock single bytes of the file; the contents of these bytes do not matter. Each permission
//! has two of them. The first says that the holder has the permission, the second that the holder
//! forbids it to every other program.
//!
//! | permission | the holder has it | the holder forbids it to others |
//! |---|---|---|
//! | read consistent bytes | 100 | 200 |
//! | write | 101 | 201 |
//! | change the size | 103 | 203 |
//!
//! Example: a virtual machine that writes its disk holds 100, 101, 103, 201 and 203. All locks are
//! shared, so that several programs can hold the same one. A program takes its own locks first, and
//! then looks for locks of other programs that contradict them: one that wants to write finds 201
//! locked and gives up.
//!
//! The locks belong to the open file description (`F_OFD_SETLK`), and end when it is closed.

use std::fs::File;
use std::io;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

const HAS: i64 = 100;
const FORBIDS: i64 = 200;

const READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// What the file is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LockPurpose {
    /// The holder writes it.
    Write,
    /// The holder reads it and relies on it staying the same.
    Rely,
}

/// A lock of another program that contradicts ours.
#[derive(Debug)]
pub(super) struct LockConflict {
    /// The process that holds it. The kernel names none for a lock of an open file description.
    pub(super) process: Option<i32>,
    /// The holder writes the file; otherwise it only forbids that.
    pub(super) is_writer: bool,
}

/// Takes the locks, which last until `file` is closed or [`release`] ends them. Returns the first
/// lock of another program that contradicts them.
///
/// # Errors
/// Those of the host. A host without such locks is no error: no program can hold one there.
pub(super) fn take(file: &File, purpose: LockPurpose) -> io::Result<Option<LockConflict>> {
    let has = match purpose {
        LockPurpose::Write => &[READ, WRITE, RESIZE][..],
        LockPurpose::Rely => &[READ],
    };
    let forbids = [WRITE, RESIZE];
    let own = has.iter().map(|bit| HAS + bit).chain(forbids.map(|bit| FORBIDS + bit));
    for byte in own {
        match fcntl(file, FcntlArg::F_OFD_SETLK(&lock(libc::F_RDLCK, byte, 1))) {
            Ok(_) => {}
            // Most likely another process has an exclusive lock on the whole file.
            Err(Errno::EAGAIN | Errno::EACCES) => {
                return Ok(Some(
                    conflict_at(file, byte)?
                        .unwrap_or(LockConflict { process: None, is_writer: true }),
                ));
            }
            Err(Errno::EINVAL | Errno::EOPNOTSUPP) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        }
    }
    for byte in forbids.map(|bit| HAS + bit) {
        if let Some(conflict) = conflict_at(file, byte)? {
            return Ok(Some(conflict));
        }
    }
    for byte in has.iter().map(|bit| FORBIDS + bit) {
        if let Some(conflict) = conflict_at(file, byte)? {
            return Ok(Some(LockConflict { is_writer: false, ..conflict }));
        }
    }
    Ok(None)
}

/// Releases all locks of `file`.
pub(super) fn release(file: &File) {
    // On an error the kernel releases them when the file is closed.
    let _ = fcntl(file, FcntlArg::F_OFD_SETLK(&lock(libc::F_UNLCK, HAS, 0)));
}

/// The lock of another open file description on this byte.
fn conflict_at(file: &File, byte: i64) -> io::Result<Option<LockConflict>> {
    let mut found = lock(libc::F_WRLCK, byte, 1);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut found))?;
    let is_found = found.l_type != kind(libc::F_UNLCK);
    let process = Some(found.l_pid).filter(|pid| *pid > 0);
    Ok(is_found.then_some(LockConflict { process, is_writer: true }))
}

/// A lock of `len` bytes, or to the end of the file if `len` is 0.
fn lock(of_kind: i32, start: i64, len: i64) -> libc::flock {
    let from_start = kind(libc::SEEK_SET);
    libc::flock {
        l_type: kind(of_kind),
        l_whence: from_start,
        l_start: start,
        l_len: len,
        l_pid: 0,
    }
}

/// The constants are small, but `libc` declares them with the type that another call needs.
fn kind(constant: i32) -> i16 {
    i16::try_from(constant).expect("a small constant")
}
