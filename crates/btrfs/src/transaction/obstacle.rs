//! What of a transaction no log can tell.

use crate::stats::Counters;

/// Why an fsync makes a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// The volume was opened to be without logs.
    Off,
    /// A chunk was allocated, which the last commit does not know.
    NewChunk,
    /// Subvolumes came, went or moved.
    Subvolumes,
    /// A directory was moved.
    DirectoryMoved,
    /// Two files exchanged their names.
    Exchanged,
    /// A directory was removed that the last commit or the log may know.
    DirectoryRemoved,
    /// New data was cloned. A log may have it as preallocated in one file and written, with
    /// checksums, in another.
    Clones,
    /// A name went to an inode that is not in the log.
    NameTaken,
    /// An inode has so many names, or a directory so many of one hash, that who replays a log may
    /// count them wrong, or find no room for them.
    ManyNames,
    /// The volume needs a feature that the superblock does not tell of yet.
    NewFeature,
    /// Another file that has to be logged, too, is being changed.
    Contended,
    /// No room is left for blocks of logs.
    NoRoom,
    /// More changed than is noted.
    TooMuch,
    /// The log became large.
    LargeLog,
    /// So many entries came to a directory that a commit is cheaper.
    Cheaper,
    /// Something could not be read, or an item is too large for a log.
    Failed,
    /// A member has failed, and a crash would find it as new as the others.
    MemberFailed,
}

impl Obstacle {
    /// Counts an fsync that makes a commit.
    pub(crate) fn count(self, stats: &Counters) {
        match self {
            // Who writes no logs does not ask for one.
            Self::Off => {}
            Self::NewChunk => stats.committed_new_chunk(),
            Self::Subvolumes => stats.committed_subvolumes(),
            Self::DirectoryMoved => stats.committed_directory_moved(),
            Self::Exchanged => stats.committed_exchanged(),
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
