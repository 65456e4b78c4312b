//! Extraction as one tar stream.
//!
//! The archive is POSIX pax: whatever the old header cannot hold (long names, nanoseconds, extended
//! attributes, large numbers) is in an extended header before it, and holes are kept in the GNU
//! sparse format 1.0, which GNU tar and libarchive restore. Names are `./path`, as
//! `tar -C directory -c .` writes them. The same volume gives the same bytes, whatever the number
//! of threads.
//!
//! | part | what it does |
//! |---|---|
//! | [`header`] | the blocks in front of the data |
//! | [`acl`] | access control lists, which are in there as text, too |
//! | [`render`] | one entry as bytes |
//! | [`stream`] | all of them: read and rendered on all cores |
//! | [`writer`] | what comes of that, written in order |

mod acl;
mod header;
mod render;
mod stream;
mod writer;

use std::io::Write;

use offshoot_vfs::walk::WalkedFile;
use offshoot_vfs::{FileType, SafeName};

use super::context::TransferContext;
use super::problems::Problems;
use super::total::{Counted, while_counting};
use super::{ExtractOutcome, ExtractSource, finish, parent_path, workers};
use crate::{Result, Watcher};

#[cfg(test)]
pub(super) use writer::WINDOW_BYTES;
pub(super) use writer::WriterWindow;

/// Writes the source as a tar archive: what is in it when it is a directory, or else the one
/// file.
pub fn extract_tar<W: Write>(
    source: &ExtractSource<'_>,
    archive: W,
    watcher: &dyn Watcher,
) -> Result<ExtractOutcome> {
    extract_tar_with(source, archive, watcher, workers(), &WriterWindow::default())
}

/// The same with a number of workers, and a window that tells afterwards how much was held.
pub(super) fn extract_tar_with<W: Write>(
    source: &ExtractSource<'_>,
    archive: W,
    watcher: &dyn Watcher,
    workers: usize,
    window: &WriterWindow,
) -> Result<ExtractOutcome> {
    let attr = source.fs.attr(source.top)?;
    let problems = Problems::new(watcher);
    let progress = watcher.start_progress("archived");
    let is_directory = attr.file_type == FileType::Directory;
    let prefix = if is_directory { source.path } else { parent_path(source.path) };
    let name = source.path.get(prefix.len() + 1..).unwrap_or_default();
    let name = if is_directory { None } else { Some(SafeName::new(name)?) };
    let mut context = TransferContext::new(source.fs, source.top, prefix, &problems, &*progress);
    let counted = Counted::InVolume(source.fs, source.top);
    let written = while_counting(&[counted], context.progress, || {
        stream::write(&context, archive, workers, window, |stream| match &name {
            None => stream.directory(source.top, &attr),
            Some(name) => {
                stream.file(&WalkedFile { parent: source.top, name, path: name, attr: &attr });
            }
        })
    });
    watcher.stop_progress();
    let counters = std::mem::take(&mut context.counters);
    drop(context);
    written?;
    Ok(finish(counters, problems))
}
