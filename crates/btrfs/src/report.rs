//! Reports: problems that did not fail a call.

use std::fmt;
use std::sync::Arc;

use offshoot_btrfs_format::quota::QgroupId;
use offshoot_btrfs_format::{DeviceId, Generation, Key, Logical, Physical, TreeId};
use offshoot_vfs::FileId;
use tracing::warn;
use uuid::Uuid;

use crate::events::REPORT;

/// Called with every report, by the thread that found the problem. It must not call back into the
/// volume, because it might wait for the block that its caller is reading.
pub type Reporter = Arc<dyn Fn(&VolumeReport) + Send + Sync>;

/// Tells `report` to the reporter, if there is one, and as an event.
pub(crate) fn tell(reporter: Option<&Reporter>, report: &VolumeReport) {
    warn!(target: REPORT, "{report}");
    if let Some(reporter) = reporter {
        reporter(report);
    }
}

/// Items of a tree that cannot be read, or may be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LostItems {
    /// The tree.
    pub tree: TreeId,
    /// The first key.
    pub from: Key,
    /// The key behind the last one; `None` for the right edge of the tree.
    pub to: Option<Key>,
    /// How many blocks a search has found that were behind the lost one. With some, the items in
    /// them are read, and only others are missing, if any.
    pub found_blocks: usize,
}

impl fmt::Display for LostItems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "items of tree {} from {}", self.tree, self.from)?;
        match self.to {
            Some(to) => write!(f, " to before {to}")?,
            None => f.write_str(" on")?,
        }
        match self.found_blocks {
            0 => Ok(()),
            found => write!(
                f,
                "; {found} blocks of them were found, and others may be missing or older states"
            ),
        }
    }
}

/// A problem that did not fail a call, or a fact that the user should know about the volume.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum VolumeReport {
    /// A copy was bad, and another copy was used.
    BadCopy {
        /// The kind of structure: a tree block, or data.
        structure: &'static str,
        /// Its logical address.
        logical: Logical,
        /// The device and the offset of the copy, or the source of the rebuilt data.
        source: String,
        /// What was wrong with it.
        problem: String,
    },
    /// The primary superblock of a device is damaged, and a copy is used.
    SuperblockCopy {
        /// The device.
        device: String,
        /// The offset of the copy from the start of the device, in bytes.
        offset: u64,
        /// The damage of the primary.
        problem: String,
    },
    /// A copy of the superblock is damaged while the primary is good.
    BadSuperblockCopy {
        /// The device.
        device: String,
        /// The offset of the copy from the start of the device, in bytes.
        offset: u64,
        /// What is wrong with it.
        problem: String,
    },
    /// The pending tree log cannot be replayed, so the volume shows the last commit. A metadata
    /// dump or a damaged volume may lack what a replay needs.
    LogNotReplayed {
        /// What went wrong.
        problem: String,
    },
    /// The thread of the volume could not commit. The next sync fails too, unless the cause is
    /// gone.
    CommitFailed {
        /// What went wrong.
        problem: String,
    },
    /// A failure has ended all writing until the volume is opened again. It is reported once. A
    /// panic is reported separately.
    ReadOnly {
        /// What went wrong.
        problem: String,
    },
    /// A file without a name could not be removed. It is tried again when the volume is opened
    /// again.
    LeftBehind {
        /// The file.
        file: FileId,
        /// What went wrong.
        problem: String,
    },
    /// The blocks of a deleted subvolume could not be dropped. It is tried again when the volume is
    /// opened again.
    DropFailed {
        /// What went wrong.
        problem: String,
    },
    /// A file without a name that a crash left behind could not be removed. It is tried again when
    /// its subvolume is changed, or when the volume is opened again.
    SweepFailed {
        /// What went wrong.
        problem: String,
    },
    /// The trees disagree on how much of a block group is in use, so the volume is damaged. Space
    /// that may be in use is not allocated.
    WrongFreeSpace {
        /// Where the block group begins.
        group: Logical,
        /// The disagreement.
        problem: String,
    },
    /// Freed space could not be discarded. Nothing more is discarded until the volume is opened
    /// again.
    DiscardFailed {
        /// What went wrong.
        problem: String,
    },
    /// A commit was the first that did not update the numbers of quota groups. It marks them as
    /// inconsistent.
    QuotasNotKept,
    /// More was freed from a group of simple quotas than was counted for it. The numbers were wrong
    /// before, and are 0 now.
    WrongQuota {
        /// The group.
        group: QgroupId,
    },
    /// The pending tree log is ignored, so what was fsynced after the last commit is not shown.
    LogIgnored,
    /// The pending tree log was replayed, so what was fsynced after the last commit is shown.
    LogReplayed {
        /// Whether the result is on the devices. If not, it is only in memory, and the log is still
        /// pending.
        is_stored: bool,
    },
    /// The volume is read through another root of a tree than the superblock names.
    OtherRoot {
        /// The root tree, or the chunk tree.
        tree: TreeId,
        /// The commit that wrote the root.
        generation: Generation,
        /// The address of its block.
        logical: Logical,
    },
    /// A block of a tree cannot be read, and the reader has gone past it.
    LostItems {
        /// What was in it.
        items: LostItems,
        /// The address of the block.
        logical: Logical,
        /// What is wrong with it.
        problem: String,
    },
    /// Data that no copy gives was read as zeros.
    ReplacedData {
        /// The file.
        file: FileId,
        /// Where the zeros begin in it, in bytes.
        offset: u64,
        /// How many there are.
        len: u64,
        /// Why the data cannot be read.
        problem: String,
    },
    /// Data was taken as it is, because its checksums cannot be read.
    UnverifiedData {
        /// The file.
        file: FileId,
        /// Where the data begins in it, in bytes.
        offset: u64,
        /// How many bytes there are.
        len: u64,
    },
    /// The chunk tree cannot be read, so the chunks are those that a search has found.
    SearchedChunks {
        /// How many they are.
        count: usize,
    },
    /// The checksum tree cannot be read, so data is taken as it is read.
    NoChecksums {
        /// What is wrong with it.
        problem: String,
    },
    /// The volume holds metadata only (it was made by `btrfs-image`).
    MetadataOnly,
    /// A member is missing.
    MissingMember {
        /// Its number.
        id: DeviceId,
        /// Its UUID.
        uuid: Uuid,
    },
    /// A member missed commits.
    StaleMember {
        /// The device.
        device: String,
        /// The last commit that it took part in.
        generation: Generation,
        /// The last commit of the volume.
        newest: Generation,
    },
    /// A member that missed commits is left out, so nothing is written to it.
    LeftOut {
        /// The device.
        device: String,
    },
    /// A write to a member failed, and other members have the data. Nothing more is written to this
    /// member until the volume is opened again, when it counts as one that missed commits.
    MemberFailed {
        /// The device.
        device: String,
        /// What went wrong.
        problem: String,
    },
    /// A copy could not be written, but another one was. Writes to the member continue, because no
    /// other member has everything that is on it.
    BadWrite {
        /// The device.
        device: String,
        /// What went wrong.
        problem: String,
    },
    /// A member is shorter than the volume says.
    ShortMember {
        /// The device.
        device: String,
        /// Its size in bytes.
        size_bytes: u64,
        /// The size in bytes that the volume records.
        expected_bytes: u64,
    },
    /// More members are missing than the profile of a chunk survives.
    LostChunk {
        /// Where the chunk begins.
        logical: Logical,
        /// Its length in bytes.
        length: u64,
        /// Its contents and its profile.
        kind: String,
    },
    /// The device belonged to an earlier state of the volume, or is a seed that the volume does not
    /// have.
    NotAMember {
        /// The device.
        device: String,
    },
}

impl VolumeReport {
    /// Writes what is reported of a volume that is read around damage.
    fn fmt_rescue(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherRoot { tree, generation, logical } => write!(
                f,
                "the {tree} is read from the root of generation {generation} at {logical}, \
                 not from that of the superblock"
            ),
            Self::LostItems { items, logical, problem } => {
                write!(f, "the block at {logical} cannot be read ({problem}), with {items}")
            }
            Self::ReplacedData { file, offset, len, problem } => write!(
                f,
                "{len} bytes at {offset} of {file} cannot be read, and are zeros: {problem}"
            ),
            Self::UnverifiedData { file, offset, len } => write!(
                f,
                "{len} bytes at {offset} of {file} are as they were read: their checksums cannot be"
            ),
            Self::SearchedChunks { count } => write!(
                f,
                "the chunk tree cannot be read: a search has found {count} chunks, and others may \
                 be missing"
            ),
            Self::NoChecksums { problem } => write!(
                f,
                "data is taken as it is read, because the checksum tree cannot be used: {problem}"
            ),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for VolumeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadCopy { structure, logical, source, problem } => write!(
                f,
                "bad copy of {structure} at logical address {logical} ({source}): {problem}; \
                 another one was used, and a scrub repairs it"
            ),
            Self::SuperblockCopy { device, offset, problem } => write!(
                f,
                "{device}: the primary superblock is damaged ({problem}); the copy at {offset} is \
                 used, and a scrub repairs the primary"
            ),
            Self::BadSuperblockCopy { device, offset, problem } => {
                write!(
                    f,
                    "{device}: the superblock copy at {offset} is damaged ({problem}); a scrub \
                     repairs it"
                )
            }
            Self::CommitFailed { problem } => write!(f, "committing: {problem}"),
            Self::ReadOnly { problem } => write!(
                f,
                "{problem}: from now on the volume is only read, and what was not stored is lost; when the cause is gone, open it again"
            ),
            Self::LeftBehind { file, problem } => {
                write!(f, "{file} has no name any more and could not be removed: {problem}")
            }
            Self::DropFailed { problem } => {
                write!(f, "dropping what a deleted subvolume holds: {problem}")
            }
            Self::SweepFailed { problem } => {
                write!(f, "removing what a crash left of files without names: {problem}")
            }
            Self::WrongFreeSpace { group, problem } => {
                write!(f, "the block group at {group}: {problem}; see what a check finds")
            }
            Self::DiscardFailed { problem } => {
                write!(f, "discarding what was freed, which ends here: {problem}")
            }
            Self::QuotasNotKept => f.write_str(
                "the numbers of quotas are not kept up with what is written: they are marked as inconsistent, and `btrfs quota rescan` where the kernel mounts the volume puts them right",
            ),
            Self::WrongQuota { group } => write!(
                f,
                "the numbers of quota group {group} do not fit what the volume holds; \
                 `btrfs quota disable` where the kernel mounts the volume throws them away"
            ),
            Self::LogIgnored => f.write_str(
                "the pending tree log is ignored: what was fsynced after the last commit is not shown",
            ),
            Self::LogNotReplayed { problem } => {
                write!(
                    f,
                    "the last commit is shown, because the tree log cannot be replayed: \
                     {problem}"
                )
            }
            Self::LogReplayed { is_stored: true } => f.write_str("the tree log was replayed"),
            Self::LogReplayed { is_stored: false } => {
                f.write_str("the tree log was replayed in memory: the devices stay as they are")
            }
            Self::OtherRoot { .. }
            | Self::LostItems { .. }
            | Self::ReplacedData { .. }
            | Self::UnverifiedData { .. }
            | Self::SearchedChunks { .. }
            | Self::NoChecksums { .. } => self.fmt_rescue(f),
            Self::MetadataOnly => {
                f.write_str("the volume was made by btrfs-image and holds no data of files")
            }
            Self::MissingMember { id, uuid } => write!(f, "device {id} ({uuid}) is missing"),
            Self::StaleMember { device, generation, newest } => write!(
                f,
                "{device} missed commits: it is at generation {generation}, the volume at {newest}"
            ),
            Self::LeftOut { device } => write!(
                f,
                "nothing is written to {device}, which missed commits; to bring it up to date, scrub the volume while nothing else uses it"
            ),
            Self::MemberFailed { device, problem } => write!(
                f,
                "{device} has failed ({problem}): from now on only the other devices are written; when the cause is gone, scrub the volume while nothing else uses it"
            ),
            Self::BadWrite { device, problem } => write!(
                f,
                "{device}: a copy could not be written ({problem}); another one was, and a scrub writes it anew"
            ),
            Self::ShortMember { device, size_bytes, expected_bytes } => write!(
                f,
                "{device} has {size_bytes} bytes, but the volume was made on {expected_bytes}"
            ),
            Self::LostChunk { logical, length, kind } => write!(
                f,
                "too many devices are missing for the {kind} chunk at {logical} ({length} bytes): what it holds cannot all be read"
            ),
            Self::NotAMember { device } => {
                write!(f, "{device} is not a member of the volume as it is now, and is not used")
            }
        }
    }
}

/// The place of a copy, for [`VolumeReport::BadCopy`] and for errors.
pub(crate) fn place(device: &str, physical: Physical) -> String {
    format!("{device}, byte {physical}")
}
