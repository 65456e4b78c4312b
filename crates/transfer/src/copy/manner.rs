//! How a copy goes about what it meets: what is left out, what is replaced, what is told.

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

/// See the top of this file.
pub struct Manner {
    /// What becomes of a file that has the name of a copy.
    pub existing: Existing,
    /// A file of the destination that has other names is replaced and not written into, so that
    /// what is copied has names of its own.
    pub is_apart: bool,
    /// A link that leads to itself is replaced, too.
    pub is_forced: bool,
    /// Other filesystems of the host, and other subvolumes, are not entered.
    pub is_one_filesystem: bool,
    /// Names that are left out, wherever they are.
    pub names: Vec<Pattern>,
    /// Paths below the source that are left out.
    pub paths: Vec<Pattern>,
    /// Who is told of each file.
    pub told: Option<Arc<dyn Told>>,
}

/// Who is told of each file that was copied, by several threads.
pub trait Told: Send + Sync {
    /// The file at `from` was copied to `to`.
    fn copied(&self, from: &[u8], to: &[u8]);

    /// What had the name of the copy `to` was removed for it.
    fn removed(&self, to: &[u8]);
}

impl Manner {
    /// Everything is copied and replaced, and nothing is told.
    #[must_use]
    pub fn plain() -> Self {
        Self {
            existing: Existing::Replaced,
            is_apart: false,
            is_forced: false,
            is_one_filesystem: false,
            names: Vec::new(),
            paths: Vec::new(),
            told: None,
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

    /// Tells that something was copied, if that is asked for.
    pub(crate) fn tell(&self, from: impl FnOnce() -> Vec<u8>, to: impl FnOnce() -> Vec<u8>) {
        if let Some(told) = &self.told {
            told.copied(&from(), &to());
        }
    }

    /// Tells that what had the name of a copy was removed for it, if that is asked for.
    pub(crate) fn tell_removed(&self, to: impl FnOnce() -> Vec<u8>) {
        if let Some(told) = &self.told {
            told.removed(&to());
        }
    }
}
