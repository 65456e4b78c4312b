//! The writer's end of the archive: segments in their order, and the window that bounds what
//! waits for it.

use std::io::{self, Write};
use std::sync::{Condvar, Mutex, PoisonError};

use crossbeam_channel::Receiver;
use offshoot_vfs::{Attr, Error};

use super::super::context::{ExtractTrouble, TransferContext};
use super::super::links::KnownLink;
use super::stream::PendingEntry;

/// What tar calls a record: an archive is a whole number of them.
const RECORD_BYTES: u64 = 10_240;

/// The memory that may be between the walk and the writer.
pub(in super::super) const WINDOW_BYTES: u64 = 48 << 20;

/// A piece of the archive, or what stands in its place.
pub(super) enum ArchiveSegment<'a> {
    /// Bytes of the archive.
    Bytes(Vec<u8>),
    /// A further name of a file; it goes out only if the file did.
    Link { attr: Attr, path: Vec<u8>, bytes: Vec<u8> },
    /// An entry that could not be read and is left out.
    LeftOut { path: Vec<u8>, attr: Attr, error: Error },
    /// Entries of a batch that grew too large, still to be rendered.
    Rest(Vec<PendingEntry<'a>>),
    /// A part of a file whose beginning was written already.
    Broken { path: Vec<u8>, error: Error },
}

impl ArchiveSegment<'_> {
    /// The memory that it holds.
    pub(super) fn held_bytes(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.capacity() as u64,
            Self::Link { path, bytes, .. } => (path.capacity() + bytes.capacity()) as u64,
            Self::LeftOut { path, .. } | Self::Broken { path, .. } => path.capacity() as u64,
            // Names, which were in what was taken for them.
            Self::Rest(_) => 0,
        }
    }
}

/// What the writer writes next.
pub(super) struct WriterOrder<'a> {
    /// What was taken out of the window for it.
    pub(super) window_bytes: u64,
    /// Where it comes from.
    pub(super) rendered: Receiver<Rendered<'a>>,
}

/// What an order is for.
pub(super) struct Rendered<'a> {
    /// The pieces.
    pub(super) segments: Vec<ArchiveSegment<'a>>,
    /// What they hold beyond what was taken out of the window for them; taken since.
    pub(super) excess_bytes: u64,
}

/// The writer's end.
pub(super) struct Writer<'a, W> {
    context: &'a TransferContext<'a>,
    out: W,
    written: u64,
}

impl<'a, W> Writer<'a, W> {
    /// A writer of an archive that begins with the first segment.
    pub(super) fn new(context: &'a TransferContext<'a>, out: W) -> Self {
        Self { context, out, written: 0 }
    }
}

impl<W: Write> Writer<'_, W> {
    /// Writes what an order is for.
    pub(super) fn write(&mut self, segments: Vec<ArchiveSegment<'_>>) -> io::Result<()> {
        segments.into_iter().try_for_each(|segment| self.segment(segment))
    }

    fn segment(&mut self, segment: ArchiveSegment<'_>) -> io::Result<()> {
        let context = self.context;
        let mut links = context.links.lock().unwrap_or_else(PoisonError::into_inner);
        match segment {
            ArchiveSegment::Bytes(bytes) => {
                drop(links);
                self.put(&bytes)
            }
            ArchiveSegment::Link { attr, path, bytes } => {
                let newest = links.newest(&attr)?;
                drop(links);
                if newest == Some(KnownLink::Unreadable) {
                    context.report(&context.shown(&path), &ExtractTrouble::OtherName);
                    return Ok(());
                }
                context.count_file();
                self.put(&bytes)
            }
            ArchiveSegment::LeftOut { path, attr, error } => {
                if attr.nlink > 1 {
                    links.mark_unreadable(&attr)?;
                }
                context.problems.unreadable(&context.shown(&path), &error);
                Ok(())
            }
            ArchiveSegment::Rest(entries) => {
                drop(links);
                let mut segments = entries.into_iter().flat_map(|entry| entry.render(context));
                segments.try_for_each(|segment| self.segment(segment))
            }
            ArchiveSegment::Broken { path, error } => {
                let path = context.shown(&path);
                context.problems.unreadable(&path, &error);
                context.problems.not_made(
                    &path,
                    &"the archive ends here, because the beginning of this file is in it; \
                      extracting to a directory goes on after such a file",
                );
                context.problems.stop();
                Ok(())
            }
        }
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Two empty blocks, and zeros to the end of the record.
    pub(super) fn finish(&mut self) -> io::Result<()> {
        let end = (self.written + 2 * 512).next_multiple_of(RECORD_BYTES);
        let zeros = vec![0; usize::try_from(end - self.written).map_err(io::Error::other)?];
        self.put(&zeros)?;
        self.out.flush()
    }
}

/// Bounds the memory between the walk and the writer.
#[derive(Default)]
pub(in super::super) struct WriterWindow {
    used: Mutex<u64>,
    changed: Condvar,
}

impl WriterWindow {
    /// Waits until `bytes` fit. What is larger than the window fits when it is empty.
    pub(super) fn take(&self, bytes: u64) {
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let mut used = self
            .changed
            .wait_while(used, |used| *used > 0 && *used + bytes > WINDOW_BYTES)
            .unwrap_or_else(PoisonError::into_inner);
        *used += bytes;
    }

    /// Takes `bytes` that are held already, without waiting: only what is still to come can wait.
    pub(super) fn exceed(&self, bytes: u64) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) += bytes;
    }

    pub(super) fn give_back(&self, bytes: u64) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) -= bytes;
        self.changed.notify_all();
    }

    /// What is out of it.
    #[cfg(test)]
    pub(in super::super) fn used(&self) -> u64 {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
