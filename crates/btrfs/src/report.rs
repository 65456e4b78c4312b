//! What a caller is told beside results: things that went wrong and were survived.

use std::fmt;
use std::sync::Arc;

use offshoot_btrfs_format::quota::QgroupId;
use offshoot_btrfs_format::{DeviceId, Generation, Logical, Physical};
use offshoot_vfs::FileId;
use uuid::Uuid;

/// Called with every report, from whichever thread found it. It must not call back into
/// the volume: the block that is being read may be the one it would wait for.
pub type Reporter = Arc<dyn Fn(&Report) + Send + Sync>;

/// Something that was survived, or that the user should know of the volume.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Report {
    /// A copy was bad, and another way gave what was asked for.
    BadCopy {
        /// What was read: a tree block, or data.
        structure: &'static str,
        /// Its logical address.
        logical: Logical,
        /// The device and the offset of the copy, or what was rebuilt from.
        source: String,
        /// What was wrong with it.
        problem: String,
    },
    /// The primary superblock of a device is damaged, and a copy is used.
    SuperblockCopy {
        /// The device.
        device: String,
        /// Where the copy is, in bytes from its start.
        offset: u64,
        /// What is wrong with the primary.
        problem: String,
    },
    /// A copy of the superblock is damaged while the primary is good.
    BadSuperblockCopy {
        /// The device.
        device: String,
        /// Where the copy is, in bytes from its start.
        offset: u64,
        /// What is wrong with it.
        problem: String,
    },
    /// The pending tree log of a metadata dump cannot be replayed: what is shown is the last
    /// commit.
    LogNotReplayed {
        /// What went wrong.
        problem: String,
    },
    /// A volume that commits by itself could not do so. The next sync fails, too, unless the cause
    /// is gone.
    CommitFailed {
        /// What went wrong.
        problem: String,
    },
    /// Something failed that cannot be undone: nothing is written any more until the volume is
    /// opened again. It is said once, and of panics by themselves.
    ReadOnly {
        /// What went wrong.
        problem: String,
    },
    /// A file that has no name any more could not be removed. It goes when the volume is opened
    /// again.
    LeftBehind {
        /// The file.
        file: FileId,
        /// What went wrong.
        problem: String,
    },
    /// What a deleted subvolume holds could not be dropped. It is tried again when the volume is
    /// opened again.
    DropFailed {
        /// What went wrong.
        problem: String,
    },
    /// What a crash left of files without names could not be removed, in one subvolume. It is tried
    /// again when that is changed, or when the volume is opened again.
    SweepFailed {
        /// What went wrong.
        problem: String,
    },
    /// Trees do not agree on how much of a block group is in use: the volume is damaged. What may
    /// be in use there is not given out.
    WrongFreeSpace {
        /// Where the block group begins.
        group: Logical,
        /// What does not agree.
        problem: String,
    },
    /// What was freed could not be discarded, and is not any more until the volume is opened again.
    DiscardFailed {
        /// What went wrong.
        problem: String,
    },
    /// A commit was the first to leave the numbers of quota groups as they were, and marks them as
    /// inconsistent.
    QuotasNotKept,
    /// More went from a group of simple quotas than was counted for it: the numbers were wrong
    /// before, and are 0 now.
    WrongQuota {
        /// The group.
        group: QgroupId,
    },
    /// The tree log that is pending is ignored: what was fsynced after the last commit is not in
    /// what is read.
    LogIgnored,
    /// The tree log that was pending was replayed: what was fsynced after the last commit is there.
    LogReplayed {
        /// On the devices too: else in memory alone, and the log is still pending.
        is_stored: bool,
    },
    /// The volume holds metadata only (it was made by `btrfs-image`).
    MetadataOnly,
    /// A member is not there.
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
    /// A member that missed commits is left out: nothing is written to it.
    LeftOut {
        /// The device.
        device: String,
    },
    /// Something could not be written to a member, and others have it: nothing is written to this
    /// one until the volume is opened again. Then it is one that missed commits.
    MemberFailed {
        /// The device.
        device: String,
        /// What went wrong.
        problem: String,
    },
    /// A copy could not be written, and another one was. The member is written on, because nothing
    /// else has all that it has.
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
        /// What the volume says.
        expected_bytes: u64,
    },
    /// More members are missing than the profile of a chunk survives.
    LostChunk {
        /// Where the chunk begins.
        logical: Logical,
        /// Its length in bytes.
        length: u64,
        /// What it holds and its profile.
        kind: String,
    },
    /// The device belonged to an earlier state of the volume, or is a seed that it does not have.
    NotAMember {
        /// The device.
        device: String,
    },
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadCopy { structure, logical, source, problem } => write!(
                f,
                "bad copy of {structure} at logical address {logical} ({source}): {problem}; another one was used"
            ),
            Self::SuperblockCopy { device, offset, problem } => write!(
                f,
                "{device}: the primary superblock is damaged ({problem}); the copy at {offset} is used"
            ),
            Self::BadSuperblockCopy { device, offset, problem } => {
                write!(f, "{device}: the superblock copy at {offset} is damaged ({problem})")
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
                write!(f, "the block group at {group}: {problem}; see what btrfs check finds")
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
                write!(f, "the last commit of a metadata dump is shown, because its tree log cannot be replayed: {problem}")
            }
            Self::LogReplayed { is_stored: true } => f.write_str("the tree log was replayed"),
            Self::LogReplayed { is_stored: false } => {
                f.write_str("the tree log was replayed in memory: the devices stay as they are")
            }
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

/// Where a copy is, for [`Report::BadCopy`] and for errors.
pub(crate) fn place(device: &str, physical: Physical) -> String {
    format!("{device}, byte {physical}")
}
