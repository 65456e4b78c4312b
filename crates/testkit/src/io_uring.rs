//! FUSE over io_uring, on kernels whose administrator can switch it on.
//!
//! The switch belongs to the whole machine, and several programs may need it at the same time. So
//! each program holds a shared lock on one common file, the note. The first program writes into the
//! note that it turned the switch on; the last program turns the switch off again. If a program is
//! killed, the next first program overwrites its note, because the switch may have been turned by
//! another program in the meantime.

use std::fs::{self, File};
use std::io;

use offshoot_machine::{IO_URING_SWITCH as SWITCH, may_switch_io_uring_on};
use rustix::fs::{FlockOperation, flock};

/// The note: it holds `N` if the switch was off before.
const NOTE: &str = "/run/offshoot-enable-uring";

/// The lock of the program that is just taking or leaving the switch, one at a time.
const TURN: &str = "/run/offshoot-enable-uring.turn";

/// Keeps the switch on.
#[derive(Debug)]
pub struct SwitchedOn {
    note: File,
}

/// Checks that this host has FUSE over io_uring switched on, or lets us switch it on.
///
/// # Errors
/// The reason why not.
pub fn can_be_had() -> Result<(), String> {
    may_switch_io_uring_on()?;
    let ring = ::io_uring::IoUring::new(1);
    ring.map(drop).map_err(|error| format!("this host lets no program use io_uring: {error}"))
}

impl SwitchedOn {
    /// Switches FUSE over io_uring on.
    ///
    /// # Errors
    /// Those of the host, if the kernel does not support it or if only root may turn the switch.
    pub fn new() -> io::Result<Self> {
        let _turn = turn()?;
        let note = open(NOTE)?;
        let is_first = flock(&note, FlockOperation::NonBlockingLockExclusive).is_ok();
        if !is_on()? {
            fs::write(NOTE, "N")?;
            fs::write(SWITCH, "Y")?;
        } else if is_first {
            fs::write(NOTE, "")?;
        }
        flock(&note, FlockOperation::LockShared)?;
        Ok(Self { note })
    }
}

/// Waits until no other program is taking or leaving the switch.
fn turn() -> io::Result<File> {
    let turn = open(TURN)?;
    flock(&turn, FlockOperation::LockExclusive)?;
    Ok(turn)
}

fn open(path: &str) -> io::Result<File> {
    File::options().create(true).truncate(false).write(true).open(path)
}

fn is_on() -> io::Result<bool> {
    fs::read_to_string(SWITCH).map(|text| text.trim() == "Y")
}

impl Drop for SwitchedOn {
    fn drop(&mut self) {
        let Ok(_turn) = turn() else { return };
        let is_last = flock(&self.note, FlockOperation::NonBlockingLockExclusive).is_ok();
        if is_last && fs::read_to_string(NOTE).is_ok_and(|text| text == "N") {
            let _ = fs::write(SWITCH, "N").and_then(|()| fs::write(NOTE, ""));
        }
    }
}
