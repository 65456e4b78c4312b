//! Finds and continues a serving process that is stopped, by `SIGSTOP` or from its terminal.
//!
//! Over io_uring, the kernel assigns a request to a thread before that thread takes it, and ending
//! the mount does not take the request back (Linux 6.18). So the program that made the request
//! waits until the thread continues, and so does a forced unmount. Over `/dev/fuse`, a request
//! waits in the kernel until a thread takes it.
//!
//! Since Linux 6.11, which is older than FUSE over io_uring, `/proc/PID/fdinfo` names the
//! connection of a descriptor: the device number of the mount.

use std::fs;
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};

use super::table::Mounted;
use crate::exit::{Result, VerbFailure};

/// Continues all stopped processes that serve `mounted`. Returns their ids.
///
/// # Errors
/// When this user may not signal one of them.
pub(super) fn resume_servers(mounted: &Mounted) -> Result<Vec<Pid>> {
    let failed = |error| VerbFailure::Host("/proc".to_owned(), error);
    let Some(connection) = mounted.connection() else { return Ok(Vec::new()) };
    let mut resumed = Vec::new();
    for process in fs::read_dir("/proc").map_err(failed)? {
        let process = process.map_err(failed)?;
        let name = process.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw)
        else {
            continue;
        };
        if is_stopped(&process.path()) && serves(&process.path(), connection) {
            let told = kill_process(pid, Signal::CONT);
            let what = || format!("process {pid}, which serves the mount and is stopped");
            told.map_err(|errno| VerbFailure::Host(what(), errno.into()))?;
            resumed.push(pid);
        }
    }
    Ok(resumed)
}

/// Whether a process is stopped. A process that has ended counts as not stopped.
fn is_stopped(process: &Path) -> bool {
    let status = fs::read_to_string(process.join("status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:\tT"))
}

/// Whether a process has a descriptor of this connection. Descriptors that this user may not see do
/// not count.
fn serves(process: &Path, connection: u32) -> bool {
    let wanted = format!("fuse_connection:\t{connection}");
    let descriptors = fs::read_dir(process.join("fdinfo")).into_iter().flatten().flatten();
    let mut infos = descriptors.filter_map(|entry| fs::read_to_string(entry.path()).ok());
    infos.any(|info| info.lines().any(|line| line == wanted))
}
