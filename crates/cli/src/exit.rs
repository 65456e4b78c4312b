//! How the program ends.
//!
//! Every verb returns a [`VerbFailure`] or nothing; [`report`] turns it into one line on
//! standard error and one of the five exit codes that the help documents. A reader of
//! standard output that goes away is not a failure: [`VerbFailure::is_broken_pipe`].

mod steps;

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::{fmt, io};

use offshoot_transfer::{self as transfer, Worst};
use offshoot_vfs::{self as vfs, Code, Errno, OsReason};

use crate::output::{Console, Escaped};

/// The exit codes. Their numbers are part of the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum ExitStatus {
    /// Everything that was asked for was done.
    Done = 0,
    /// Something failed: an operation, a device, the host.
    Failed = 1,
    /// The command line is wrong.
    Usage = 2,
    /// The volume contradicts itself.
    Corrupt = 3,
    /// The volume needs a feature that is not supported.
    Unsupported = 4,
}

impl ExitStatus {
    /// The name of the status in JSON.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Usage => "usage",
            Self::Corrupt => "corrupt",
            Self::Unsupported => "unsupported",
        }
    }

    /// The status that the exit code of another run stands for.
    pub(crate) fn of_code(code: i32) -> Self {
        let known = [Self::Done, Self::Usage, Self::Corrupt, Self::Unsupported];
        known.into_iter().find(|&status| status as i32 == code).unwrap_or(Self::Failed)
    }

    /// The status for an error of the volume.
    pub(crate) fn of(error: &vfs::Error) -> Self {
        Worst::of(error).into()
    }
}

/// Why a verb did not do everything that it was asked to do.
#[derive(Debug)]
pub(crate) enum VerbFailure {
    /// The command line makes no sense.
    Usage(String),
    /// Opening or reading the volume failed.
    Volume(vfs::Error),
    /// Something in this volume cannot be used.
    Inside(PathBuf, vfs::Error),
    /// The host failed outside the volume, during what the text names.
    Host(String, io::Error),
    /// The verb refuses, for the reason in the text: it would destroy something, or there is no
    /// volume that we know.
    Refused(String),
    /// Writing to standard output failed.
    Output(io::Error),
    /// The errors were printed where they occurred. Only the exit code is left to return.
    Reported(ExitStatus),
}

/// The result of a verb.
pub(crate) type Result<T = (), E = VerbFailure> = std::result::Result<T, E>;

impl VerbFailure {
    /// The exit code for this failure.
    pub(crate) fn status(&self) -> ExitStatus {
        match self {
            Self::Usage(_) => ExitStatus::Usage,
            Self::Volume(error) | Self::Inside(_, error) => ExitStatus::of(error),
            Self::Host(..) | Self::Refused(_) | Self::Output(_) => ExitStatus::Failed,
            Self::Reported(status) => *status,
        }
    }

    /// Whether the reader of standard output closed it early.
    pub(crate) fn is_broken_pipe(&self) -> bool {
        matches!(self, Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// Prints the failure unless it was printed before.
    pub(crate) fn print(&self, console: &Console) {
        match self {
            Self::Reported(_) => {}
            // These messages have several lines, such as the usage of clap or the partitions of a
            // disk.
            Self::Usage(text) | Self::Refused(text) => {
                let mut lines = text.lines().filter(|line| !line.is_empty());
                console.failure(self.status(), &lines.next().unwrap_or_default());
                lines.for_each(|line| console.detail(&line.trim_start()));
            }
            other => console.failure(self.status(), other),
        }
        if let Self::Volume(vfs::Error::Posix { errno: Errno::NODEV, .. }) = self {
            console.detail(&"name it with --device, or read without it with --degraded");
        }
        if let Self::Host(_, error) = self
            && error.raw_os_error() == Some(Errno::NOTCONN.raw_os_error())
        {
            console.detail(
                &"the program that served a mount there has ended: `offshoot unmount` takes it away",
            );
        }
        let (Self::Volume(error) | Self::Inside(_, error)) = self else { return };
        for step in steps::after(error) {
            console.step(step);
        }
        if !matches!(error.code(), Code::Log | Code::LogNotReplayed) {
            return;
        }
        console.detail(&"read what was there before it with --ignore-log");
        if error.code() == Code::Log {
            console.detail(
                &"throw it away, and what was fsynced with it, with `offshoot rescue zero-log`",
            );
        } else if let Self::Volume(_) = self {
            // What else a volume of XFS needs, its error says.
            console.detail(&"or have the kernel replay it: mount the volume once");
        }
    }
}

impl fmt::Display for VerbFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(message) | Self::Refused(message) => f.write_str(message),
            Self::Volume(error) => error.fmt(f),
            Self::Inside(volume, error) => InVolume(volume, error).fmt(f),
            Self::Host(what, error) => write!(f, "{what}: {}", OsReason(error)),
            Self::Output(error) => write!(f, "standard output: {}", OsReason(error)),
            Self::Reported(_) => Ok(()),
        }
    }
}

/// A message about something in a volume: `disk.img:/etc/fstab: no such file`.
pub(crate) struct InVolume<'a>(pub(crate) &'a Path, pub(crate) &'a dyn fmt::Display);

impl fmt::Display for InVolume<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (volume, text) = (Escaped(self.0.as_os_str().as_bytes()), self.1.to_string());
        // A message begins with a path, or says what is wrong with the volume as a whole.
        let gap = if text.starts_with('/') { "" } else { " " };
        write!(f, "{volume}:{gap}{text}")
    }
}

/// Prints why a run of the program failed, if it did. Returns its status.
pub(crate) fn report(result: Result, console: &Console) -> ExitStatus {
    let status = match result {
        Ok(()) => ExitStatus::Done,
        Err(failure) if failure.is_broken_pipe() => ExitStatus::Done,
        Err(failure) => {
            failure.print(console);
            failure.status()
        }
    };
    console.finish();
    status
}

/// Shows what the user can do next after errors about single files, of which `worst` is the worst.
pub(crate) fn show_steps(worst: Option<Worst>, console: &Console) {
    if worst == Some(Worst::Corrupt) {
        for step in steps::AFTER_FILES {
            console.step(step);
        }
    }
}

/// The result of a verb that has printed its errors about single files; `worst` is the worst of
/// them.
pub(crate) fn reported(worst: Option<Worst>) -> Result {
    worst.map_or(Ok(()), |worst| Err(VerbFailure::Reported(worst.into())))
}

impl From<Worst> for ExitStatus {
    fn from(worst: Worst) -> Self {
        match worst {
            Worst::Failed => Self::Failed,
            Worst::Corrupt => Self::Corrupt,
            Worst::Unsupported => Self::Unsupported,
        }
    }
}

impl From<transfer::TransferFailure> for VerbFailure {
    fn from(failure: transfer::TransferFailure) -> Self {
        match failure {
            transfer::TransferFailure::Volume(error) => Self::Volume(error),
            transfer::TransferFailure::Host(what, error) => Self::Host(what, error),
            has_mark @ transfer::TransferFailure::HasMark(_) => Self::Refused(format!(
                "{has_mark}; write an archive (--tar FILE), or copy it (offshoot cp -a)"
            )),
            source @ transfer::TransferFailure::Source(..) => Self::Refused(source.to_string()),
            transfer::TransferFailure::Interrupted => Self::Refused("interrupted".to_owned()),
            transfer::TransferFailure::Archive(error) => {
                Self::Host(transfer::TransferFailure::WRITING_ARCHIVE.to_owned(), error)
            }
        }
    }
}

impl From<vfs::Error> for VerbFailure {
    fn from(error: vfs::Error) -> Self {
        Self::Volume(error)
    }
}

/// Plain I/O errors in verbs come only from `write!` to standard output. An error of a file of the
/// host names the file in a [`VerbFailure::Host`].
impl From<io::Error> for VerbFailure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

impl From<serde_json::Error> for VerbFailure {
    fn from(error: serde_json::Error) -> Self {
        Self::Output(error.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A transfer takes the greatest [`Worst`], and the program the greatest [`ExitStatus`].
    #[test]
    fn what_is_worse_for_a_transfer_ends_the_program_with_more() {
        let ascending = [Worst::Failed, Worst::Corrupt, Worst::Unsupported];
        assert!(ascending.is_sorted_by(|one, next| one < next));
        assert!(ascending.map(ExitStatus::from).is_sorted_by(|one, next| one < next));
    }
}
