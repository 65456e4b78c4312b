//! The locks by which QEMU and its tools keep each other from an image.
//!
//! They are locks of single bytes, which say nothing of what these bytes hold. For each permission
//! there are two: one says that the holder has it, one that nobody else may.
//!
//! | permission | has it | nobody else may |
//! |---|---|---|
//! | read what is consistent | 100 | 200 |
//! | write | 101 | 201 |
//! | change the size | 103 | 203 |
//!
//! Example: a virtual machine that writes its disk holds 100, 101, 103, 201 and 203. Every lock is
//! a shared one, so that several programs may hold the same. Each takes its own first, and then
//! looks whether anybody holds one that contradicts: who wants to write finds 201 taken and leaves.
//!
//! The locks belong to the open file (`F_OFD_SETLK`), and go when it is closed.

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
pub(super) enum Purpose {
    /// To be written.
    Write,
    /// To be read by who relies on that it stays as it is.
    Rely,
}

/// Another program has a lock that contradicts.
#[derive(Debug)]
pub(super) struct Conflict {
    /// Its process; the kernel does not know it of a lock that belongs to an open file.
    pub(super) process: Option<i32>,
    /// It writes the file; otherwise it only forbids that.
    pub(super) is_writer: bool,
}

/// Takes the locks, which are held until `file` is closed or they are [released](release).
///
/// # Errors
/// Those of the host, but for a host that knows no such locks: nobody holds any then.
pub(super) fn take(file: &File, purpose: Purpose) -> io::Result<Option<Conflict>> {
    let has = match purpose {
        Purpose::Write => &[READ, WRITE, RESIZE][..],
        Purpose::Rely => &[READ],
    };
    let forbids = [WRITE, RESIZE];
    let own = has.iter().map(|bit| HAS + bit).chain(forbids.map(|bit| FORBIDS + bit));
    for byte in own {
        match fcntl(file, FcntlArg::F_OFD_SETLK(&lock(libc::F_RDLCK, byte, 1))) {
            Ok(_) => {}
            // An exclusive lock over the whole file, most likely.
            Err(Errno::EAGAIN | Errno::EACCES) => {
                return Ok(Some(
                    conflict_at(file, byte)?.unwrap_or(Conflict { process: None, is_writer: true }),
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
            return Ok(Some(Conflict { is_writer: false, ..conflict }));
        }
    }
    Ok(None)
}

/// Gives all locks of `file` back.
pub(super) fn release(file: &File) {
    // They go with the file at the latest.
    let _ = fcntl(file, FcntlArg::F_OFD_SETLK(&lock(libc::F_UNLCK, HAS, 0)));
}

/// A lock of another open file at this byte.
fn conflict_at(file: &File, byte: i64) -> io::Result<Option<Conflict>> {
    let mut found = lock(libc::F_WRLCK, byte, 1);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut found))?;
    let is_found = found.l_type != kind(libc::F_UNLCK);
    let process = Some(found.l_pid).filter(|pid| *pid > 0);
    Ok(is_found.then_some(Conflict { process, is_writer: true }))
}

/// A lock of `len` bytes, or to the end for 0.
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

/// The constants are small, and `libc` gives them the type of another call.
fn kind(constant: i32) -> i16 {
    i16::try_from(constant).expect("a small constant")
}
