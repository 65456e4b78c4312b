//! What the kernel says of chosen devices while a test runs.
//!
//! The kernel mounts what it finds dubious and complains in its log. The log belongs to
//! the whole machine, so only lines that name one of the devices count, and only those that were
//! written after [`KernelLog::start`].

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::OFlags;

/// A place in the kernel's log.
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

    /// Fails when a line since the start names one of `devices` and is a warning or worse, or
    /// says that the kernel completes what `mkfs` left undone.
    #[track_caller]
    pub fn assert_silent(self, devices: &[&str]) {
        self.assert_only(devices, &[]);
    }

    /// As [`assert_silent`](Self::assert_silent), but for lines that contain one of `expected`.
    #[track_caller]
    pub fn assert_only(mut self, devices: &[&str], expected: &[&str]) {
        let complaints: Vec<String> = self
            .lines()
            .into_iter()
            .filter(|line| complains(line, devices))
            .filter(|line| !expected.iter().any(|part| line.contains(part)))
            .collect();
        assert!(complaints.is_empty(), "the kernel complains:\n{}", complaints.join("\n"));
    }

    /// Fails when the kernel found something in itself that must not be, while it was in the function `within`. Such lines name no device: a function tells
    /// them from what others do meanwhile.
    #[track_caller]
    pub fn assert_no_warning(mut self, within: &str) {
        let warnings = warnings_within(&self.lines(), within);
        assert!(warnings.is_empty(), "the kernel warns:\n{}", warnings.join("\n"));
    }

    fn lines(&mut self) -> Vec<String> {
        let mut lines = Vec::new();
        let mut record = vec![0; 8192];
        loop {
            match self.0.read(&mut record) {
                Ok(len) => lines.push(String::from_utf8_lossy(&record[..len]).into_owned()),
                // Records that were overwritten before they were read.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return lines,
                Err(error) => panic!("the kernel's log: {error}"),
            }
        }
    }
}

/// `4,1234,5678,-;BTRFS warning (device loop3): ...`: the low three bits of the first
/// number are the level, 4 for a warning and less for worse.
fn complains(line: &str, devices: &[&str]) -> bool {
    let Some((head, text)) = line.split_once(';') else { return false };
    let level = head.split(',').next().and_then(|number| number.parse::<u32>().ok());
    let names = devices.iter().filter_map(|device| device.strip_prefix("/dev/"));
    let ours = names.into_iter().any(|name| {
        text.match_indices(name)
            .any(|(at, _)| !text[at + name.len()..].starts_with(|c: char| c.is_ascii_digit()))
    });
    let repairs = ["rebuilding", "creating free space tree", "checking UUID tree"];
    ours && (level.is_some_and(|level| level & 7 <= 4) || repairs.iter().any(|r| text.contains(r)))
}

/// The lines of warnings whose trace has the function `within`. Two that are written at a time may be taken for one.
fn warnings_within(lines: &[String], within: &str) -> Vec<String> {
    let is_warning = |line: &String| line.contains(";WARNING: ") || line.contains(";BUG: ");
    let function = format!("{within}+0x");
    let mut found = Vec::new();
    for (at, _) in lines.iter().enumerate().filter(|(_, line)| is_warning(line)) {
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
    }
}
