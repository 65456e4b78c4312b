//! Taking a tree out of a volume: into a directory, or as a tar stream.
//!
//! | part | what it does |
//! |---|---|
//! | [`destination`], [`marker`] | the directory that is filled, going on where it is half done, what one may keep open |
//! | [`total`] | how much it will be |
//! | [`tree`], [`mod@file`], [`large`], [`directory`] | making things in it, on all cores |
//! | [`attributes`] | owner, mode, extended attributes, times |
//! | [`links`] | hard links, in a table on disk |
//! | [`tar`] | the archive |
//! | [`onto`], [`existing`] | copying to where something may be already |
//! | [`problems`] | errors as they come, one summary at the end |
//!
//! Three promises. Nothing is written outside of the destination: every call works on a
//! descriptor of a directory that we made in it, with one [`SafeName`], and never follows a
//! symbolic link. What cannot be read is not there afterwards: no file is left with
//! less than its data. And memory does not grow with the volume.

mod attributes;
mod context;
mod destination;
mod directory;
mod existing;
mod file;
mod large;
mod links;
mod marker;
mod onto;
mod problems;
mod tar;
#[cfg(test)]
pub(crate) mod tests;
mod total;
mod tree;

use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use offshoot_vfs::walk::WalkedFile;
use offshoot_vfs::{Errno, FileId, FileSystemMut, FileType, SafeName, Timestamp};
use serde::Serialize;

use crate::copy::{Manner, Preserve};
use crate::host::Process;
use crate::{Hint, Result, TransferFailure, Watcher, Worst};
use context::TransferContext;
use destination::HostDestination;
pub(crate) use destination::Limits;
use directory::ExtractDirectoryRef;
use onto::Overwrite;

pub use self::tar::extract_tar;
pub use context::TransferCounters;
pub use links::LinkTable;
pub(crate) use links::{KnownLink, LinkName};
pub use marker::Mark;
pub(crate) use marker::NAME as MARK_NAME;
pub use onto::{Onto, Refuse};
pub(crate) use problems::Unapplied;
pub use problems::{Problems, Refusal};
pub use total::{Counted, while_counting};

/// The most files that go to a worker at once.
const BATCH_FILES: usize = 64;

/// The most data that goes to a worker at once, but for a single larger file.
const BATCH_BYTES: u64 = 4 << 20;

/// How many workers there are: one for every core, within reason.
pub(crate) fn workers() -> usize {
    static WORKERS: OnceLock<usize> = OnceLock::new();
    *WORKERS.get_or_init(|| std::thread::available_parallelism().map_or(2, usize::from).min(32))
}

/// The source of an extraction.
pub struct ExtractSource<'a> {
    /// The volume.
    pub fs: &'a dyn FileSystemMut,
    /// The file or directory in it.
    pub top: FileId,
    /// Its path there, for messages, without a `/` at its end.
    pub path: &'a [u8],
}

/// What an extraction did.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct ExtractOutcome {
    /// Directories that were made, the top included.
    pub directories: u64,
    /// Names of other files that were made.
    pub files: u64,
    /// Bytes of data, holes left out.
    pub bytes: u64,
    /// Files that could not be extracted.
    pub errors: u64,
    /// What could not be applied, by kind.
    pub not_applied: Vec<Refusal>,
    /// The worst of the errors; `None` when there was none.
    #[serde(skip)]
    pub worst: Option<Worst>,
}

/// Extracts a source into the directory `path`. A source that is a directory becomes `path` itself,
/// with its attributes. Any other file goes into `path`.
pub fn extract(
    source: &ExtractSource<'_>,
    path: &Path,
    mark: &Mark,
    at: Timestamp,
    process: Process,
    watcher: &dyn Watcher,
) -> Result<ExtractOutcome> {
    let limits = Limits::share(process.descriptors, tree::batches_in_flight());
    let attr = source.fs.attr(source.top)?;
    let is_directory = attr.file_type == FileType::Directory;
    let prefix = if is_directory { source.path } else { parent_path(source.path) };
    let own_name = source.path.get(prefix.len() + 1..).unwrap_or_default();
    let has_mark = if is_directory {
        match source.fs.lookup(source.top, marker::NAME.as_bytes()) {
            Ok(_) => true,
            Err(error) if error.errno() == Errno::NOENT => false,
            Err(error) => return Err(error.into()),
        }
    } else {
        own_name == marker::NAME.as_bytes()
    };
    if has_mark {
        return Err(TransferFailure::HasMark(prefix.to_vec()));
    }
    let destination = HostDestination::open(path, mark, process)?;
    let fail = |error| TransferFailure::Host(path.display().to_string(), error);
    let problems = Problems::new(watcher);
    let (everything, manner) = (Preserve::all_but(&[], process.umask, at), Manner::plain());
    let progress = watcher.start_progress("extracted");
    let counted = Counted::InVolume(source.fs, source.top);
    let mut context = TransferContext::new(source.fs, source.top, prefix, &problems, &*progress);
    context.destination = destination.fd.try_clone().map_err(fail)?.into();
    // In a directory that has its group already, new files may get another one.
    context.owner_of_new = destination.owner_of_new.filter(|_| !destination.is_resumed);
    if destination.is_resumed {
        watcher.note(&format_args!("{}: going on where it was left half done", path.display()));
        context.overwrite = Some(Overwrite {
            preserve: &everything,
            manner: &manner,
            devices: &[],
            is_named: false,
            is_resumed: true,
            parent: path,
            refuse: None,
        });
    }
    if is_directory {
        let fd = destination.give_away().map_err(fail)?;
        let top = ExtractDirectoryRef::top(&context, fd, source.top, Some(attr));
        let fill = || tree::extract_below(&context, limits, source.top, top.clone());
        while_counting(&[counted], context.progress, fill);
        // Before the directory gets its attributes, which are those of the volume.
        unmark(&context).map_err(fail)?;
        context.counters.directories.fetch_add(1, Ordering::Relaxed);
    } else {
        let fd = destination.fd.try_clone().map_err(fail)?;
        let top = ExtractDirectoryRef::top(&context, fd, source.top, None);
        let name = SafeName::new(own_name)?;
        let entry = WalkedFile { parent: source.top, name: &name, path: &name, attr: &attr };
        let fill = || tree::extract_one(&context, limits, &top, &entry);
        while_counting(&[counted], context.progress, fill);
        // One file is made anew, and the directory is not for its owner alone from here on.
        marker::remove(&destination.fd)
            .map_err(|error| TransferFailure::Host(path.display().to_string(), error))?;
        drop(top);
        destination.restore().map_err(fail)?;
    }
    watcher.stop_progress();
    if problems.is_stopped() && !watcher.is_interrupted() {
        let path = path.display();
        let how = watcher.words(Hint::Resumable);
        watcher.note(&format_args!("{path} is half done; {how}"));
    }
    let counters = std::mem::take(&mut context.counters);
    drop(context);
    Ok(finish(counters, problems))
}

/// Takes the mark away, when nothing was left out because all had to end.
fn unmark(context: &TransferContext<'_>) -> std::io::Result<()> {
    match context.destination.get() {
        Some(directory) if !context.problems.is_stopped() => marker::remove(directory),
        _ => Ok(()),
    }
}

/// The path of the directory that holds `path`, without a `/` at its end.
fn parent_path(path: &[u8]) -> &[u8] {
    &path[..path.iter().rposition(|&byte| byte == b'/').unwrap_or(0)]
}

/// What was done, once nothing more comes.
pub fn finish(counters: TransferCounters, problems: Problems<'_>) -> ExtractOutcome {
    let (not_applied, errors, worst) = problems.finish();
    ExtractOutcome {
        directories: counters.directories.into_inner(),
        files: counters.files.into_inner(),
        bytes: counters.bytes.into_inner(),
        errors,
        not_applied,
        worst,
    }
}
