//! What a verb that reads a damaged volume could not get, as a list for the user.
//!
//! The engine reports it while it reads, often several times for one file. The list is kept until
//! the end, when the paths of files can be looked up; at most [`MOST_KEPT`] entries of each kind.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use offshoot_btrfs::{LostItems, Reporter, VolumeReport};
use offshoot_vfs::{self as vfs, FileId};
use serde_json::{Value, json};

use crate::output::{Console, Escaped, json_name};

/// The most entries of a kind that are kept.
const MOST_KEPT: usize = 100_000;

/// How many entries of a kind are printed.
const PRINTED: usize = 50;

/// Finds the path of a file, without a leading slash.
pub(crate) type PathOf<'p> = &'p dyn Fn(FileId) -> vfs::Result<Vec<u8>>;

/// A range of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FileRange {
    file: FileId,
    offset: u64,
    len: u64,
    /// Why it cannot be read.
    reason: Option<String>,
}

#[derive(Default)]
struct LossLists {
    replaced: Vec<FileRange>,
    unverified: Vec<FileRange>,
    lost: Vec<(LostItems, String)>,
    /// Files whose inodes are lost.
    inferred: Vec<FileId>,
    /// How many entries are not kept.
    hidden: u64,
    /// Whether no data is verified, or some chunks may be missing.
    is_weakened: bool,
}

fn keep<T>(list: &mut Vec<T>, entry: T, hidden: &mut u64) {
    if list.len() < MOST_KEPT {
        list.push(entry);
    } else {
        *hidden += 1;
    }
}

/// What could not be got so far.
#[derive(Default)]
pub(crate) struct Losses {
    lists: Mutex<LossLists>,
}

impl Losses {
    fn lists(&self) -> MutexGuard<'_, LossLists> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The reporter that adds to this list, and prints what does not belong there.
    pub(crate) fn reporter(self: &Arc<Self>, console: &Arc<Console>) -> Reporter {
        let (losses, console) = (self.clone(), console.clone());
        Arc::new(move |report| losses.add(report, Some(&console)))
    }

    /// The reporter that adds to this list, and prints nothing.
    pub(crate) fn quiet_reporter(self: &Arc<Self>) -> Reporter {
        let losses = self.clone();
        Arc::new(move |report| losses.add(report, None))
    }

    fn add(&self, report: &VolumeReport, console: Option<&Arc<Console>>) {
        let mut lists = self.lists();
        let LossLists { replaced, unverified, lost, hidden, is_weakened, .. } = &mut *lists;
        match report {
            VolumeReport::ReplacedData { file, offset, len, problem } => {
                let reason = Some(problem.clone());
                let range = FileRange { file: *file, offset: *offset, len: *len, reason };
                keep(replaced, range, hidden);
            }
            VolumeReport::UnverifiedData { file, offset, len } => {
                let range = FileRange { file: *file, offset: *offset, len: *len, reason: None };
                keep(unverified, range, hidden);
            }
            VolumeReport::LostItems { items, problem, .. } => {
                keep(lost, (*items, problem.clone()), hidden);
            }
            other => {
                *is_weakened |= matches!(
                    other,
                    VolumeReport::NoChecksums { .. } | VolumeReport::SearchedChunks { .. }
                );
                drop(lists);
                if let Some(console) = console {
                    console.warning(other);
                }
            }
        }
    }

    /// Adds the files whose inodes are lost.
    pub(crate) fn add_inferred(&self, files: Vec<FileId>) {
        self.lists().inferred = files;
    }

    /// Forgets everything so far.
    pub(crate) fn forget(&self) {
        *self.lists() = LossLists::default();
    }

    /// Whether nothing was lost or replaced.
    pub(crate) fn is_empty(&self) -> bool {
        let lists = self.lists();
        let has_none = lists.replaced.is_empty() && lists.unverified.is_empty();
        has_none && lists.lost.is_empty() && !lists.is_weakened
    }

    /// Prints what was lost, with the paths of files.
    pub(crate) fn print(&self, paths: PathOf<'_>, console: &Console) {
        let lists = self.lists();
        let path = |range: &FileRange| path_of(paths, range.file);
        print_all(console, &lists.lost, "parts of trees could not be read", |(items, reason)| {
            format!("{items}: {reason}")
        });
        let replaced = joined(&lists.replaced);
        print_all(console, &replaced, "parts of files are zeros", |range| {
            let (offset, len) = (range.offset, range.len);
            let reason = range.reason.as_deref().unwrap_or_default();
            format!("{}: {len} bytes at {offset}: {reason}", Escaped(&path(range)))
        });
        let unverified = joined(&lists.unverified);
        print_all(console, &unverified, "parts of files are not verified", |range| {
            let (offset, len) = (range.offset, range.len);
            format!("{}: {len} bytes at {offset}", Escaped(&path(range)))
        });
        print_all(
            console,
            &lists.inferred,
            "files have lost owner, mode, times and size",
            |file| Escaped(&path_of(paths, *file)).to_string(),
        );
        if lists.hidden > 0 {
            console.detail(&format_args!("and {} more that are not listed", lists.hidden));
        }
    }

    /// The same for a program.
    pub(crate) fn json(&self, paths: PathOf<'_>) -> Value {
        let lists = self.lists();
        let range = |range: &FileRange| {
            let FileRange { file, offset, len, reason } = range;
            let path = json_name(&path_of(paths, *file));
            let FileId { dev, ino } = *file;
            json!({
                "path": path, "subvolume": dev, "inode": ino, "offset": offset, "length": len,
                "reason": reason,
            })
        };
        let lost = |(items, reason): &(LostItems, String)| {
            let to = items.to.map(|key| key.to_string());
            json!({
                "tree": items.tree.0, "from": items.from.to_string(), "to": to,
                "found_blocks": items.found_blocks, "reason": reason,
            })
        };
        let inferred = |file: &FileId| {
            let path = json_name(&path_of(paths, *file));
            json!({ "path": path, "subvolume": file.dev, "inode": file.ino })
        };
        json!({
            "replaced": joined(&lists.replaced).iter().map(range).collect::<Vec<_>>(),
            "unverified": joined(&lists.unverified).iter().map(range).collect::<Vec<_>>(),
            "lost": lists.lost.iter().map(lost).collect::<Vec<_>>(),
            "inferred": lists.inferred.iter().map(inferred).collect::<Vec<_>>(),
            "not_listed": lists.hidden,
        })
    }
}

/// The path of a file, or what identifies it.
fn path_of(paths: PathOf<'_>, file: FileId) -> Vec<u8> {
    let path = paths(file).map(|path| [b"/", &path[..]].concat());
    path.unwrap_or_else(|_| file.to_string().into_bytes())
}

/// The ranges in order, each once, with adjacent ones joined.
fn joined(ranges: &[FileRange]) -> Vec<FileRange> {
    let mut sorted = ranges.to_vec();
    sorted.sort_by_key(|range| (range.file, range.offset));
    let mut joined: Vec<FileRange> = Vec::new();
    for range in sorted {
        let end = range.offset.saturating_add(range.len);
        match joined.last_mut() {
            Some(last)
                if last.file == range.file
                    && range.offset <= last.offset.saturating_add(last.len) =>
            {
                last.len = last.len.max(end.saturating_sub(last.offset));
            }
            _ => joined.push(range),
        }
    }
    joined
}

fn print_all<T>(console: &Console, list: &[T], what: &str, line: impl Fn(&T) -> String) {
    if list.is_empty() {
        return;
    }
    console.error(&format_args!("{what}: {}", list.len()));
    for one in list.iter().take(PRINTED) {
        console.detail(&line(one));
    }
    if list.len() > PRINTED {
        console.detail(&format_args!("and {} more; --json lists all", list.len() - PRINTED));
    }
}
