//! What went wrong in an extraction, and what could not be applied.
//!
//! Two different things. A *problem* is a file that is not there as it should be: its
//! error is printed with its path when it occurs (the first [`PRINTED`] of them) and decides
//! the exit code. An attribute *not applied* is one that the caller may not give (no root),
//! or that the destination has no place for: these are counted by kind, shown once at the
//! end with the first example of each, and leave the exit code alone.

use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use offshoot_vfs::escape::{Escaped, json_name, message};
use offshoot_vfs::{self as vfs, Errno, Nameless, OsReason};
use serde::Serialize;

use crate::{Hint, Watcher, Worst};

/// How many problems are printed before they are only counted.
const PRINTED: u64 = 50;

/// The longest path that is shown whole, in bytes.
const PATH_SHOWN: usize = 4096;

/// The kinds of things that could not be applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unapplied {
    /// User and group.
    Owner,
    /// Set-user-id and set-group-id bits, which are dropped when the owner is another one.
    SetId,
    /// Permissions.
    Mode,
    /// Extended attributes, with ACLs and capabilities.
    Xattr,
    /// Access and modification time.
    Times,
    /// Character and block devices that could not be made.
    Device,
    /// Hard links that became files of their own.
    HardLink,
    /// Sockets, which a tar archive cannot hold.
    Socket,
    /// Symbolic links whose targets a metadata dump does not hold.
    LinkTarget,
    /// Access control lists of an archive whose text is none, or names users without numbers.
    TextList,
    /// Flags of files that the volume does not have.
    Flags,
}

/// Name for JSON, and words for people, in the order of [`Unapplied`].
const KINDS: [(&str, &str); 11] = [
    ("owner", "owner or group"),
    ("set_id", "set-id bits, because the owner is another one"),
    ("mode", "permissions"),
    ("xattr", "extended attributes"),
    ("times", "times"),
    ("device", "device nodes, left out"),
    ("hard_link", "hard links, made files of their own"),
    ("socket", "sockets, left out because tar has none"),
    ("link_target", "symbolic links, left out because a metadata dump holds no targets"),
    ("text_list", "access control lists that name users and not their numbers"),
    ("flags", "flags of files"),
];

/// One line of the summary.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Refusal {
    /// What could not be applied.
    pub kind: &'static str,
    /// How many times.
    pub count: u64,
    /// The first file, as a JSON name.
    pub first: String,
    /// Why, for the first file.
    pub reason: String,
}

#[derive(Default)]
struct ProblemCounts {
    errors: u64,
    /// Errors that one line of the summary tells.
    errors_elsewhere: u64,
    worst: Option<Worst>,
    unapplied: [Option<Refusal>; KINDS.len()],
    shown: [String; KINDS.len()],
}

/// Collects from all threads.
pub struct Problems<'a> {
    watcher: &'a dyn Watcher,
    state: Mutex<ProblemCounts>,
    is_stopped: AtomicBool,
}

impl<'a> Problems<'a> {
    /// Nothing went wrong yet.
    pub fn new(watcher: &'a dyn Watcher) -> Self {
        Self { watcher, state: Mutex::default(), is_stopped: AtomicBool::new(false) }
    }

    fn state(&self) -> MutexGuard<'_, ProblemCounts> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file at `path` could not be read.
    pub(crate) fn unreadable(&self, path: &[u8], error: &vfs::Error) {
        // Only a symbolic link is without data: each of them in a metadata dump, so it is said
        // once.
        if let vfs::Error::Posix { errno: Errno::NODATA, .. } = error {
            self.unapplied(Unapplied::LinkTarget, || path.to_vec(), Errno::NODATA);
            let mut state = self.state();
            state.errors_elsewhere += 1;
            state.worst = state.worst.max(Some(Worst::Failed));
            return;
        }
        self.problem(path, Worst::of(error), &Nameless(error));
    }

    /// The file at `path` is of a kind that the destination has none of.
    pub(crate) fn not_representable(&self, kind: Unapplied, path: &[u8], reason: &dyn Display) {
        self.unapplied(kind, || path.to_vec(), Errno::OPNOTSUPP);
        self.problem(path, Worst::Failed, reason);
    }

    /// The file at `path` could not be made, for a reason of the host.
    pub(crate) fn not_made(&self, path: &[u8], reason: &dyn Display) {
        self.problem(path, Worst::Failed, reason);
    }

    fn problem(&self, path: &[u8], worst: Worst, reason: &dyn Display) {
        let mut state = self.state();
        state.errors += 1;
        // The worst one decides: what the volume lacks is more than what the host refused.
        state.worst = state.worst.max(Some(worst));
        if state.errors <= PRINTED {
            self.watcher.error(&format_args!("{}: {reason}", ShownPath(path)));
        }
    }

    /// The words of the program for `hint`.
    pub(crate) fn words(&self, hint: Hint) -> &'static str {
        self.watcher.words(hint)
    }

    /// Something about the file at `path` that is no error.
    pub fn warning(&self, path: &[u8], text: &dyn Display) {
        self.watcher.warning(&format_args!("{}: {text}", ShownPath(path)));
    }

    /// An attribute of the file at `path` could not be applied.
    pub(crate) fn unapplied(&self, kind: Unapplied, path: impl FnOnce() -> Vec<u8>, errno: Errno) {
        let mut state = self.state();
        let slot = &mut state.unapplied[kind as usize];
        if let Some(count) = slot {
            count.count += 1;
            return;
        }
        let path = path();
        *slot = Some(Refusal {
            kind: KINDS[kind as usize].0,
            count: 1,
            first: json_name(&path),
            reason: OsReason(&errno).to_string(),
        });
        state.shown[kind as usize] = ShownPath(&path).to_string();
    }

    /// The extraction cannot go on: the destination is full, or gone.
    pub(crate) fn stop(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
    }

    /// Whether all threads should end.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed) || self.watcher.is_interrupted()
    }

    /// Prints what was only counted, and gives the counts and the outcome.
    pub(crate) fn finish(self) -> (Vec<Refusal>, u64, Option<Worst>) {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        if state.errors > PRINTED {
            let hidden = state.errors - PRINTED;
            self.watcher.error(&format_args!("and {hidden} more errors like these"));
        }
        if state.unapplied.iter().any(Option::is_some) {
            self.watcher.error(&"not everything could be applied:");
            for ((count, shown), (_, words)) in state.unapplied.iter().zip(&state.shown).zip(KINDS)
            {
                if let Some(count) = count {
                    self.watcher.detail(&format_args!(
                        "{}: {words} (the first: {shown}: {})",
                        count.count, count.reason
                    ));
                }
            }
        }
        let counts = state.unapplied.into_iter().flatten().collect();
        (counts, state.errors + state.errors_elsewhere, state.worst)
    }
}

/// A path as messages show it: escaped, and cut in front when it is absurdly long.
struct ShownPath<'a>(&'a [u8]);

impl Display for ShownPath<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let cut = self.0.len().saturating_sub(PATH_SHOWN);
        if cut > 0 {
            f.write_str("...")?;
        }
        f.write_str(&message(&Escaped(&self.0[cut..]).to_string()))
    }
}
