//! How much an extraction will be, for the line on the terminal.
//!
//! It is counted by a walk of its own beside the extraction, which is a little ahead of it because it reads no data. Where nobody looks nothing is counted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use offshoot_vfs::{Error, FileType};

use super::Source;
use super::walk::{Entry, Visitor, walk};
use crate::output::Progress;

/// The depth to which it is counted.
const DEPTH_MAX: usize = 1024;

/// Does `work`, and meanwhile tells `progress` how much there is in `source`.
pub(super) fn while_counting<T>(
    source: &Source<'_>,
    progress: &Progress,
    work: impl FnOnce() -> T,
) -> T {
    if progress.is_hidden() {
        return work();
    }
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| count(source, progress, &is_over));
        let done = work();
        is_over.store(true, Ordering::Relaxed);
        done
    })
}

fn count(source: &Source<'_>, progress: &Progress, is_over: &AtomicBool) {
    // What cannot be read is told by the extraction.
    let Ok(attr) = source.fs.attr(source.top) else { return };
    let mut total = Total { bytes: 0, is_over };
    if attr.file_type == FileType::Directory {
        walk(source.fs, source.top, (), DEPTH_MAX, &mut total);
    } else {
        total.bytes = attr.allocated_bytes.min(attr.size);
    }
    if !is_over.load(Ordering::Relaxed) {
        progress.expect(total.bytes);
    }
}

struct Total<'a> {
    bytes: u64,
    is_over: &'a AtomicBool,
}

impl Visitor for Total<'_> {
    type Directory = ();

    fn enter(&mut self, (): &(), _: &Entry<'_>) -> Option<()> {
        Some(())
    }

    fn visit(&mut self, (): &(), entry: &Entry<'_>) {
        let attr = entry.attr;
        if attr.file_type == FileType::Regular {
            // A file with several names is written once: each name has its share.
            let bytes = attr.allocated_bytes.min(attr.size) / u64::from(attr.nlink.max(1));
            self.bytes = self.bytes.saturating_add(bytes);
        }
    }

    fn failed(&mut self, _: &[u8], _: &Error) {}

    fn is_stopped(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }
}
