//! What the kernel logs about chosen devices while a test runs.
//!
//! The kernel mounts a dubious volume and complains in its log. The log belongs to the whole
//! machine, so a line that names a device counts only if it names a chosen one, and only if it was
//! written after [`KernelLog::start`]. A fault that the kernel finds in itself (a warning with a
//! trace, a bug) names no device, so it counts for every watcher.
//!
//! [`LoopMount::watched`](crate::loops::LoopMount::watched) watches from before a mount is made
//! until after it is gone.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::OFlags;

/// A place in the kernel's log.
#[derive(Debug)]
pub struct KernelLog(File);

impl KernelLog {
    /// The end of the log as it is now.
    #[must_use]
    pub fn start() -> Self {
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).expect("a flag of open");
        let mut log = File::options()
            .read(true)
            .custom_flags(flags)
            .open("/dev/kmsg")
            .expect("root reads the kernel's log");
        log.seek(SeekFrom::End(0)).expect("the log has an end");
        Self(log)
    }

    /// Fails if a line since the start names one of `devices`, is a warning or worse or says that
    /// the kernel completes what `mkfs` left undone or recovers an XFS log, and contains none of
    /// `expected`. Also fails if the kernel found a fault in itself, whatever caused it.
    #[track_caller]
    pub fn assert_only(mut self, devices: &[&str], expected: &[&str]) {
        let mut complaints = self.complaints(devices);
        complaints.retain(|line| !expected.iter().any(|part| line.contains(part)));
        assert!(complaints.is_empty(), "the kernel complains:\n{}", complaints.join("\n"));
    }

    /// Fails if the kernel found a fault in itself while it was in the function `within`. Such
    /// lines name no device, so the function tells our faults from those of other programs.
    #[track_caller]
    pub fn assert_no_warning(mut self, within: &str) {
        let warnings = warnings_within(&self.lines(), within);
        assert!(warnings.is_empty(), "the kernel warns:\n{}", warnings.join("\n"));
    }

    /// The complaints of the kernel since the start or the last call, by the rules of
    /// [`assert_only`](Self::assert_only).
    pub fn complaints(&mut self, devices: &[&str]) -> Vec<String> {
        let lines = self.lines();
        let of_devices = lines.iter().filter(|line| complains(line, devices)).cloned();
        of_devices.chain(warnings_within(&lines, "")).collect()
    }

    fn lines(&mut self) -> Vec<String> {
        let mut lines = Vec::new();
        let mut record = vec![0; 8192];
        loop {
            match self.0.read(&mut record) {
                Ok(len) => lines.push(String::from_utf8_lossy(&record[..len]).into_owned()),
                // The next read returns the oldest record that the kernel still has.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                    println!("some of the kernel's log was overwritten before it was read");
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return lines,
                Err(error) => panic!("the kernel's log: {error}"),
            }
        }
    }
}

/// A line is `4,1234,5678,-;BTRFS warning (device loop3): ...`. The low three bits of the first
/// number are the level: 4 is a warning, and smaller numbers are worse.
fn complains(line: &str, devices: &[&str]) -> bool {
    let Some((head, text)) = line.split_once(';') else { return false };
    let level = head.split(',').next().and_then(|number| number.parse::<u32>().ok());
    let names = devices.iter().filter_map(|device| device.strip_prefix("/dev/"));
    let ours = names.into_iter().any(|name| {
        text.match_indices(name)
            .any(|(at, _)| !text[at + name.len()..].starts_with(|c: char| c.is_ascii_digit()))
    });
    let repairs =
        ["rebuilding", "creating free space tree", "checking UUID tree", "Starting recovery"];
    ours && (level.is_some_and(|level| level & 7 <= 4) || repairs.iter().any(|r| text.contains(r)))
}

/// How a line begins in which the kernel reports a fault in itself.
const WARNINGS: [&str; 7] = [
    "WARNING: ",
    "BUG: ",
    "kernel BUG at ",
    "UBSAN: ",
    "Oops: ",
    "general protection fault",
    "INFO: possible ",
];

/// Whether the kernel begins a warning with this line. Lines that a program put into the log do not
/// count.
fn begins_warning(line: &str) -> bool {
    let Some((head, text)) = line.split_once(';') else { return false };
    let number = head.split(',').next().and_then(|number| number.parse::<u32>().ok());
    number.is_some_and(|number| number >> 3 == 0) && WARNINGS.iter().any(|w| text.starts_with(w))
}

/// The lines of warnings whose trace contains the function `within`, or of all warnings if `within`
/// is empty. Two warnings that are logged at the same time may be taken for one.
fn warnings_within(lines: &[String], within: &str) -> Vec<String> {
    let function = if within.is_empty() { String::new() } else { format!("{within}+0x") };
    let mut found = Vec::new();
    for (at, _) in lines.iter().enumerate().filter(|(_, line)| begins_warning(line)) {
        let rest = &lines[at..];
        let end = rest.iter().position(|line| line.contains("---[ end trace"));
        let warning = &rest[..end.unwrap_or(rest.len())];
        if warning.iter().any(|line| line.contains(&function)) {
            found.extend_from_slice(warning);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_are_told_from_the_rest() {
        let warning = "4,100,200,-;BTRFS warning (device loop3): csum failed";
        assert!(complains(warning, &["/dev/loop3"]));
        assert!(!complains(warning, &["/dev/loop30", "/dev/loop1"]));
        assert!(!complains(&warning.replace("loop3", "loop31"), &["/dev/loop3"]));
        assert!(!complains("6,100,200,-;BTRFS info (device loop3): ok", &["/dev/loop3"]));
        let repair = "6,100,200,-;BTRFS info (device loop3): checking UUID tree";
        assert!(complains(repair, &["/dev/loop3"]));
        assert!(complains("27,1,2,-;BTRFS error (device loop3 state E): no", &["/dev/loop3"]));
        let xfs = "5,1,2,-;XFS (loop3): Mounting V5 Filesystem";
        assert!(!complains(xfs, &["/dev/loop3"]));
        let recovery = "5,1,2,-;XFS (loop3): Starting recovery (logdev: internal)";
        assert!(complains(recovery, &["/dev/loop3"]) && !complains(recovery, &["/dev/loop1"]));
        assert!(complains("1,1,2,-;XFS (loop3): Metadata corruption", &["/dev/loop3"]));
    }

    /// Without this, a warning of the kernel that names no device would go unnoticed.
    #[test]
    fn warnings_are_told_from_the_rest() {
        let bug = "1,7,200,-;kernel BUG at fs/btrfs/extent-tree.c:1234!";
        assert!(begins_warning(bug) && begins_warning("4,1,2,-;WARNING: fs/btrfs/inode.c:1 at x"));
        assert!(!begins_warning("12,1,2,-;WARNING: of a program"));
        assert!(!begins_warning("5,1,2,-;RETBleed: WARNING: Spectre v2"));
        assert!(!begins_warning("4,1,2,-;BTRFS warning (device loop3): csum failed"));
    }

    #[test]
    fn warnings_are_told_by_their_trace() {
        let warning = |function: &str| {
            [
                "4,1,200,-;WARNING: CPU: 1 PID: 7 at fs/inode.c:407 inc_nlink+0x2c/0x40".to_owned(),
                "4,2,200,-;Call Trace:".to_owned(),
                format!("4,3,200,-; {function}+0x1f7/0x5b0 [btrfs]"),
                "4,4,200,-;---[ end trace 0000000000000000 ]---".to_owned(),
            ]
        };
        let lines = [warning("btrfs_commit_transaction"), warning("btrfs_recover_log_trees")];
        assert_eq!(warnings_within(&lines.concat(), "btrfs_recover_log_trees"), lines[1][..3]);
        assert!(warnings_within(&lines.concat(), "xfs_log_mount").is_empty());
        assert_eq!(
            warnings_within(&lines.concat(), "").len(),
            6,
            "both count for a test that watches"
        );
    }
}
