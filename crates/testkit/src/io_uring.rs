//! FUSE over io_uring, which the kernel offers where its administrator has switched that on.
//!
//! The switch belongs to the whole machine, and several programs may want it at a time. So each has
//! a lock on a file that is the same for all, together with the others: who comes first writes down
//! what the switch was, and who is the last one puts it back. What is left there by a program that
//! was killed is forgotten: meanwhile somebody else may have turned the switch.

use std::fs::{self, File};
use std::io;

use offshoot_machine::{IO_URING_SWITCH as SWITCH, may_switch_io_uring_on};
use rustix::fs::{FlockOperation, flock};

/// Where it is written down.
const NOTE: &str = "/run/offshoot-enable-uring";

/// The lock of whoever comes or goes, one at a time.
const TURN: &str = "/run/offshoot-enable-uring.turn";

/// The switch is on while this is there.
#[derive(Debug)]
pub struct SwitchedOn {
    note: File,
}

/// Whether this host has it, or lets it be switched on.
///
/// # Errors
/// Why not.
pub fn can_be_had() -> Result<(), String> {
    may_switch_io_uring_on()?;
    let ring = ::io_uring::IoUring::new(1);
    ring.map(drop).map_err(|error| format!("this host lets nobody use io_uring: {error}"))
}

impl SwitchedOn {
    /// Switches it on.
    ///
    /// # Errors
    /// Those of the host, where the kernel cannot do it or nobody but root may say so.
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

/// Waits until nobody else comes or goes.
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
