//! Changes that a log cannot describe, and other reasons why an fsync commits.

use crate::stats::EngineCounters;

/// Why an fsync commits instead of writing a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// The volume was opened with logs off.
    Off,
    /// A chunk was allocated. The last commit, which the log belongs to, does not know it.
    NewChunk,
    /// Subvolumes were created, deleted or moved.
    Subvolumes,
    /// A directory was moved.
    DirectoryMoved,
    /// Two files exchanged their names.
    Exchanged,
    /// A file moved, and a whiteout took its old name.
    Whiteout,
    /// A directory was removed that the last commit or the log may have.
    DirectoryRemoved,
    /// New data was cloned. A log may have it as preallocated in one file and written, with
    /// checksums, in another.
    Clones,
    /// A name was given to an inode that is not in the log.
    NameTaken,
    /// An inode has so many names, or a directory so many of one hash, that the replay of a log may
    /// count them wrong, or find no room for them.
    ManyNames,
    /// The volume needs a feature that is not in the superblock yet.
    NewFeature,
    /// Another file that must be logged too is being changed.
    Contended,
    /// No room is left for blocks of logs.
    NoRoom,
    /// There are more changes than can be noted.
    TooMuch,
    /// The log became large.
    LargeLog,
    /// So many entries were added to a directory that a commit is cheaper.
    Cheaper,
    /// A block could not be read, or an item is too large for a log.
    Failed,
    /// A member has failed, and after a crash it would look as new as the others.
    MemberFailed,
}

impl Obstacle {
    /// Counts an fsync that commits.
    pub(crate) fn count(self, stats: &EngineCounters) {
        match self {
            // With logs off, no caller expects one.
            Self::Off => {}
            Self::NewChunk => stats.committed_new_chunk(),
            Self::Subvolumes => stats.committed_subvolumes(),
            Self::DirectoryMoved => stats.committed_directory_moved(),
            Self::Exchanged => stats.committed_exchanged(),
            Self::Whiteout => stats.committed_whiteout(),
            Self::DirectoryRemoved => stats.committed_directory_removed(),
            Self::Clones => stats.committed_clones(),
            Self::NameTaken => stats.committed_name_taken(),
            Self::ManyNames => stats.committed_many_names(),
            Self::NewFeature => stats.committed_new_feature(),
            Self::Contended => stats.committed_contended(),
            Self::NoRoom => stats.committed_without_room(),
            Self::TooMuch => stats.committed_too_much(),
            Self::LargeLog => stats.committed_large_log(),
            Self::Cheaper => stats.committed_cheaper(),
            Self::Failed => stats.committed_failed(),
            Self::MemberFailed => stats.committed_failed_member(),
        }
    }
}
