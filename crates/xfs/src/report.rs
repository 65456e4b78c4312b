//! Reports: problems that did not fail a call.

use std::fmt;
use std::sync::Arc;

use tracing::warn;

/// The target of the `tracing` events about reports.
const REPORT: &str = "xfs::report";

/// The files that the text of a report names.
const SHOWN_FILES: usize = 10;

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
    /// The volume was not unmounted, and its log is replayed.
    LogReplayed {
        /// Whether the volume on the device was changed. If not, the replay is in memory only.
        is_stored: bool,
        /// What is left to do. The kernel does it when it mounts the volume.
        pending: XfsPending,
    },
    /// What the log leaves to do is not done, for this reason. The volume is shown without it.
    NotCompleted {
        /// The reason.
        problem: String,
    },
    /// The log has parts of a block that is not of the type that the log says. They are written as
    /// they are, without a checksum, as the kernel does.
    UnknownBlock {
        /// Where the block lies, in bytes of the device.
        at: u64,
        /// The record in the log, as cycle and block.
        lsn: String,
    },
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
    /// Nothing is written any more, for this reason. What is durable stays readable.
    WritingStopped {
        /// The reason.
        cause: String,
    },
    /// An inode that no directory has could not be freed. It is tried again, at the latest when the
    /// volume is opened for writing.
    NotFreed {
        /// Its number.
        ino: u64,
        /// The reason.
        problem: String,
    },
    /// Lists of unlinked inodes were damaged, and were emptied. Their inodes are lost until a
    /// repair finds them.
    UnlinkedListsLost {
        /// How many lists.
        lists: u64,
    },
    /// The superblock is damaged, and others that agree with each other are used in its place.
    SuperblockCopy {
        /// The group with the superblock that is used.
        group: u32,
        /// The damage of the first one.
        problem: String,
    },
}

/// What a replayed log leaves to do: changes that later transactions would have made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct XfsPending {
    /// Intents to free extents. The space is not free yet.
    pub frees: u64,
    /// Intents to change reverse mappings.
    pub reverse_mappings: u64,
    /// Intents to change reference counts.
    pub reference_counts: u64,
    /// Intents to change mappings of files.
    pub mappings: u64,
    /// Intents to change attributes of files.
    pub attributes: u64,
    /// Intents to exchange the contents of two files.
    pub exchanges: u64,
    /// Lists of inodes that no directory has, and whose space is not free yet.
    pub unlinked_lists: u64,
    /// Groups with a damaged or unreadable header or tree, so that their lists and extents are not
    /// known.
    pub damaged_groups: u64,
    /// Extents that are staged for copy on write and belong to no file. Their space is not free
    /// yet.
    pub staged_extents: u64,
    /// The inode numbers of the first thousand files whose contents or attributes are wrong until
    /// intents to change mappings, attributes and contents are done.
    pub files: Vec<u64>,
}

impl XfsPending {
    /// Whether there is nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for XfsPending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("nothing");
        }
        let kinds = [
            (self.frees, "intents to free extents"),
            (self.reverse_mappings, "intents to change reverse mappings"),
            (self.reference_counts, "intents to change reference counts"),
            (self.mappings, "intents to change mappings of files"),
            (self.attributes, "intents to change attributes"),
            (self.exchanges, "intents to exchange contents"),
            (self.unlinked_lists, "lists of unlinked inodes"),
            (self.damaged_groups, "damaged groups"),
            (self.staged_extents, "extents staged for copy on write"),
        ];
        let mut between = "";
        for (count, kind) in kinds.into_iter().filter(|(count, _)| *count > 0) {
            write!(f, "{between}{kind}: {count}")?;
            between = ", ";
        }
        if !self.files.is_empty() {
            let files: Vec<_> = self.files.iter().take(SHOWN_FILES).map(u64::to_string).collect();
            let more = if self.files.len() > SHOWN_FILES { ", ..." } else { "" };
            write!(f, "; wrong until then: inodes {}{more}", files.join(", "))?;
        }
        Ok(())
    }
}

impl fmt::Display for XfsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LogIgnored => f.write_str(
                "the log is ignored: changes that only the log holds are not shown, and structures \
                 may contradict each other",
            ),
            Self::LogReplayed { is_stored, pending } => {
                let place = if *is_stored { "to the device" } else { "in memory" };
                write!(f, "the volume was not unmounted; its log is replayed {place}")?;
                if pending.is_empty() { Ok(()) } else { write!(f, "; left to do: {pending}") }
            }
            Self::NotCompleted { problem } => {
                write!(f, "what the log leaves to do is not done: {problem}")
            }
            Self::UnknownBlock { at, lsn } => write!(
                f,
                "the log at {lsn} changes the block at byte {at}, which is not of the type that \
                 the log says; it is written without a checksum"
            ),
            Self::NeedsRepair => f.write_str(
                "the volume says that it needs repair: run xfs_repair before it is written again",
            ),
            Self::ShortDevice { device, size_bytes, expected_bytes } => write!(
                f,
                "{device} has {size_bytes} bytes, but the volume was made on {expected_bytes}"
            ),
            Self::WritingStopped { cause } => {
                write!(f, "nothing is written any more: {cause}; open the volume again to write it")
            }
            Self::NotFreed { ino, problem } => write!(
                f,
                "inode {ino} has no name and could not be freed: {problem}; it is tried again, at \
                 the latest when the volume is opened for writing"
            ),
            Self::UnlinkedListsLost { lists } => write!(
                f,
                "damaged lists of unlinked inodes were emptied: {lists}; xfs_repair finds what \
                 they held"
            ),
            Self::SuperblockCopy { group, problem } => write!(
                f,
                "the superblock is damaged ({problem}); that of group {group} is used, with which \
                 the others agree"
            ),
        }
    }
}
