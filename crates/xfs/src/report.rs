//! Reports: problems that did not fail a call.

use std::fmt;
use std::sync::Arc;

use tracing::warn;

/// The target of the `tracing` events about reports.
const REPORT: &str = "xfs::report";

/// The targets of all `tracing` events of this crate.
pub const XFS_EVENT_TARGETS: &[&str] = &[REPORT];

/// Called with every report, by the thread that found the problem. It must not call back into the
/// volume.
pub type XfsReporter = Arc<dyn Fn(&XfsReport) + Send + Sync>;

/// Tells `report` to the reporter, if there is one, and as an event.
pub(crate) fn tell(reporter: Option<&XfsReporter>, report: &XfsReport) {
    warn!(target: REPORT, "{report}");
    if let Some(reporter) = reporter {
        reporter(report);
    }
}

/// A problem that did not fail a call, or a fact that the user should know about the volume.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum XfsReport {
    /// The log is ignored, as the options say.
    LogIgnored,
    /// The volume says that `xfs_repair` has to run before the volume is changed.
    NeedsRepair,
    /// The device is shorter than the volume says.
    ShortDevice {
        /// The device.
        device: String,
        /// Its size in bytes.
        size_bytes: u64,
        /// The size in bytes that the volume records.
        expected_bytes: u64,
    },
    /// The superblock is damaged, and others that agree with each other are used in its place.
    SuperblockCopy {
        /// The group with the superblock that is used.
        group: u32,
        /// The damage of the first one.
        problem: String,
    },
}

impl fmt::Display for XfsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LogIgnored => f.write_str(
                "the log is ignored: changes that only the log holds are not shown, and structures \
                 may contradict each other",
            ),
            Self::NeedsRepair => f.write_str(
                "the volume says that it needs repair: run xfs_repair before it is written again",
            ),
            Self::ShortDevice { device, size_bytes, expected_bytes } => write!(
                f,
                "{device} has {size_bytes} bytes, but the volume was made on {expected_bytes}"
            ),
            Self::SuperblockCopy { group, problem } => write!(
                f,
                "the superblock is damaged ({problem}); that of group {group} is used, with which \
                 the others agree"
            ),
        }
    }
}
