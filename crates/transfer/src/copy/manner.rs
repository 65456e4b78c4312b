//! How a copy goes about what it meets: what is left out, what is replaced, what is reported.

use std::sync::Arc;

use offshoot_vfs::Timestamp;
use offshoot_vfs::path::last_name;
use offshoot_vfs::wildcard::Pattern;

/// What becomes of a file that has the name of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// It is replaced.
    Replaced,
    /// It stays.
    Kept,
    /// It stays, unless it is older.
    KeptIfNew,
}

/// How a copy treats the files that it meets.
#[non_exhaustive]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub struct Manner {
    /// What becomes of a file that has the name of a copy.
    pub existing: Existing,
    /// A file of the destination that has other names is replaced and not written into. So a copy
    /// shares no file with names that are not copies.
    pub is_apart: bool,
    /// A link that leads to itself is replaced, too.
    pub is_forced: bool,
    /// Other filesystems of the host, and other subvolumes, are not entered.
    pub is_one_filesystem: bool,
    /// The same source is copied by the same calls each time: one thread copies the files of a
    /// directory in the order of their names, and what the host happens to have as holes makes no
    /// difference.
    pub is_reproducible: bool,
    /// Names that are left out, wherever they are.
    pub names: Vec<Pattern>,
    /// Paths below the source that are left out.
    pub paths: Vec<Pattern>,
    /// What the copy reports each file to.
    pub reporter: Option<Arc<dyn CopyReporter>>,
}

/// What a copy reports each file to. All threads of the copy call it.
pub trait CopyReporter: Send + Sync {
    /// The file at `from` was copied to `to`.
    fn copied(&self, from: &[u8], to: &[u8]);

    /// The copy removed the file that had its name `to` before.
    fn removed(&self, to: &[u8]);
}

impl Manner {
    /// Everything is copied and replaced, and nothing is reported.
    #[must_use]
    pub fn plain() -> Self {
        Self {
            existing: Existing::Replaced,
            is_apart: false,
            is_forced: false,
            is_one_filesystem: false,
            is_reproducible: false,
            names: Vec::new(),
            paths: Vec::new(),
            reporter: None,
        }
    }

    /// Whether the source with this path, as the caller wrote it, is left out by its name.
    #[must_use]
    pub fn leaves_out_source(&self, path: &[u8]) -> bool {
        last_name(path).is_some_and(|name| self.names.iter().any(|pattern| pattern.matches(name)))
    }

    /// Whether a file is left out: `path` gives its path below the source, without a `/` in front.
    pub(crate) fn leaves_out(&self, name: &[u8], path: impl FnOnce() -> Vec<u8>) -> bool {
        if self.names.iter().any(|pattern| pattern.matches(name)) {
            return true;
        }
        if self.paths.is_empty() {
            return false;
        }
        let path = path();
        self.paths.iter().any(|pattern| pattern.matches(&path))
    }

    /// Whether anything that is there may stay.
    pub(crate) fn may_keep(&self) -> bool {
        self.existing != Existing::Replaced
    }

    /// Whether all that is there stays.
    pub(crate) fn keeps_all(&self) -> bool {
        self.existing == Existing::Kept
    }

    /// Whether what is there stays, last modified at `old`, where the source was at `new`.
    #[must_use]
    pub fn keeps(&self, old: Timestamp, new: Timestamp) -> bool {
        match self.existing {
            Existing::Replaced => false,
            Existing::Kept => true,
            Existing::KeptIfNew => (old.secs, old.nanos) >= (new.secs, new.nanos),
        }
    }

    /// Reports that something was copied, if the caller asked for that.
    pub(crate) fn tell(&self, from: impl FnOnce() -> Vec<u8>, to: impl FnOnce() -> Vec<u8>) {
        if let Some(reporter) = &self.reporter {
            reporter.copied(&from(), &to());
        }
    }

    /// Reports that the file was removed that had the name of a copy, if the caller asked for that.
    pub(crate) fn tell_removed(&self, to: impl FnOnce() -> Vec<u8>) {
        if let Some(reporter) = &self.reporter {
            reporter.removed(&to());
        }
    }
}
