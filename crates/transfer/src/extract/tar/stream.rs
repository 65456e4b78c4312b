//! The whole archive: entries are read and rendered on all cores, and written in order.
//!
//! ```text
//! walk --- jobs ----> workers: render into memory --- segments --\
//!     \--- orders ---------------------------------------------> writer
//! ```
//!
//! The walk sends each batch twice: as a job to the workers, and as an order, which says where in
//! the archive its segments go, to the writer. A [`WriterWindow`] bounds the memory between the two
//! ends. The walk takes the expected size of the rendered entries out of it, and the writer gives
//! it back. A worker takes what its entries need beyond that, so the walk waits for longer.
//!
//! A file of up to [`WHOLE_BYTES`] is rendered whole, and left out whole when it cannot be read.
//! A larger one goes out in parts. When a part of it cannot be read, what was written of
//! it cannot be taken back, and nothing may stand in for it: the archive ends there,
//! without the mark of its end, so that no reader takes it for complete.

use std::io::{self, Write};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::thread;

use crossbeam_channel::{Receiver, Sender, bounded};
use offshoot_vfs::path::climb;
use offshoot_vfs::walk::{WalkVisitor, WalkedFile, walk};
use offshoot_vfs::{Attr, Code, Error, FileId, FileType, HeldFile, Structure};

use super::super::BATCH_FILES;
use super::super::context::{ExtractTrouble, TransferContext};
use super::super::large::Parts;
use super::super::links::{KnownLink, LinkName};
use super::super::problems::Unapplied;
use super::render::{
    Regular, SparseMap, entry_path, map_line, out_of_order, pad_map, render, render_link,
};
use super::writer::{ArchiveSegment, Rendered, Writer, WriterOrder, WriterWindow};
use crate::TransferFailure;
use crate::xattrs::{XattrPair, held_xattrs, held_xattrs_within};

/// The largest file that is rendered whole.
const WHOLE_BYTES: u64 = 1 << 20;

/// The most of a larger file that a worker reads at once.
const PART_BYTES: u64 = 1 << 20;

/// The most data in a batch, but for its last entry.
const BATCH_BYTES: u64 = 1 << 20;

/// The most that the extended attributes of a file may take for a worker to render it. The few
/// files that have more are left to the writer, which holds one of them at a time.
const XATTRS_BYTES: usize = 64 << 10;

/// How much larger than expected a batch may become before the rest of it is left to the writer.
const EXCESS_BYTES: u64 = 1 << 20;

/// What an entry takes in memory besides its data and its path, and the padding of its data.
const ENTRY_BYTES: u64 = 2560;

/// The longest path in an archive. Programs that read archives stop far below it.
const PATH_MAX: usize = 64 * 1024;

/// The deepest tree in an archive; [`PATH_MAX`] allows no deeper one.
const DEPTH_MAX: usize = PATH_MAX / 2;

/// What a worker is handed.
enum TarJob<'a> {
    Batch { entries: Vec<PendingEntry<'a>>, window_bytes: u64, reply: Sender<Rendered<'a>> },
    Part { file: Arc<HeldFile<'a>>, range: Range<u64>, path: Vec<u8>, reply: Sender<Rendered<'a>> },
}

/// An entry that is to be rendered.
pub(super) struct PendingEntry<'a> {
    path: Vec<u8>,
    held: HeldFile<'a>,
    attr: Attr,
    /// The path of an earlier name of the file.
    link_to: Option<Vec<u8>>,
}

/// Writes an archive of what `fill` puts into the stream.
pub(super) fn write<'a, W: Write>(
    context: &'a TransferContext<'a>,
    archive: W,
    workers: usize,
    window: &'a WriterWindow,
    fill: impl FnOnce(&mut TarBatcher<'a>) + Send,
) -> Result<(), TransferFailure> {
    let (jobs, work) = bounded(workers * 2);
    let (orders, queue) = bounded(workers * 4);
    thread::scope(|scope| {
        for _ in 0..workers {
            let work: Receiver<TarJob<'a>> = work.clone();
            scope.spawn(move || work.into_iter().for_each(|job| run(context, window, job)));
        }
        drop(work);
        scope.spawn(move || {
            let mut stream =
                TarBatcher { context, window, jobs, orders, batch: Vec::new(), batch_bytes: 0 };
            fill(&mut stream);
            stream.send_batch();
        });
        let mut writer = Writer::new(context, archive);
        let mut result = Ok(());
        for order in queue {
            let WriterOrder { mut window_bytes, rendered } = order;
            // After a failure the rest is only taken off the queue.
            if result.is_ok() && !context.problems.is_stopped() {
                if let Ok(rendered) = rendered.recv() {
                    window_bytes += rendered.excess_bytes;
                    result = writer.write(rendered.segments);
                } else {
                    // The worker is gone without an answer: it has panicked, which the scope
                    // passes on.
                    context.problems.stop();
                }
                if result.is_err() {
                    context.problems.stop();
                }
            }
            window.give_back(window_bytes);
        }
        if !context.problems.is_stopped() {
            result = writer.finish();
        }
        result.map_err(TransferFailure::Archive)
    })
}

fn run(context: &TransferContext<'_>, window: &WriterWindow, job: TarJob<'_>) {
    if context.problems.is_stopped() {
        return;
    }
    // A writer that is gone has failed, and says so itself.
    match job {
        TarJob::Batch { entries, window_bytes, reply } => {
            let xattrs = |file| held_xattrs_within(context.fs, file, XATTRS_BYTES);
            let segments = render_batch(context, entries, window_bytes, xattrs);
            let held_bytes: u64 = segments.iter().map(ArchiveSegment::held_bytes).sum();
            let excess_bytes = held_bytes.saturating_sub(window_bytes);
            window.exceed(excess_bytes);
            let _ = reply.send(Rendered { segments, excess_bytes });
        }
        TarJob::Part { file, range, path, reply } => {
            let segment = match read_part(context, file.file(), range) {
                Ok(bytes) => ArchiveSegment::Bytes(bytes),
                Err(error) => ArchiveSegment::Broken { path, error },
            };
            let _ = reply.send(Rendered { segments: vec![segment], excess_bytes: 0 });
        }
    }
}

/// Renders a batch. Extended attributes are not in what was taken from the window for it; when
/// they make it much larger than that, the rest is left to the writer, entry by entry.
fn render_batch<'a>(
    context: &TransferContext<'_>,
    entries: Vec<PendingEntry<'a>>,
    window_bytes: u64,
    xattrs: impl Fn(FileId) -> Result<Option<Vec<XattrPair>>, Error>,
) -> Vec<ArchiveSegment<'a>> {
    let mut segments = Vec::new();
    // All at once: a vector that grows is there twice while it does.
    let expected: u64 = entries.iter().map(PendingEntry::window_bytes).sum();
    let mut bytes = Vec::with_capacity(usize::try_from(expected).unwrap_or_default());
    let mut entries = entries.into_iter();
    while let Some(PendingEntry { path, held, attr, link_to }) = entries.next() {
        if bytes.len() as u64 > window_bytes.saturating_add(EXCESS_BYTES) {
            let rest = std::iter::once(PendingEntry { path, held, attr, link_to }).chain(entries);
            segments.push(ArchiveSegment::Bytes(bytes));
            segments.push(ArchiveSegment::Rest(rest.collect()));
            return segments;
        }
        if let Some(target) = link_to {
            segments.push(ArchiveSegment::Bytes(std::mem::take(&mut bytes)));
            let mut link = Vec::new();
            render_link(&path, &target, &attr, &mut link);
            segments.push(ArchiveSegment::Link { attr, path, bytes: link });
            continue;
        }
        let Some(xattrs) = xattrs(attr.file).transpose() else {
            segments.push(ArchiveSegment::Bytes(std::mem::take(&mut bytes)));
            segments.push(ArchiveSegment::Rest(vec![PendingEntry { path, held, attr, link_to }]));
            continue;
        };
        let rendered =
            xattrs.and_then(|xattrs| render(context.fs, &path, &attr, &xattrs, &mut bytes));
        match rendered {
            Ok(data_bytes) => {
                match attr.file_type {
                    FileType::Directory => {
                        context.counters.directories.fetch_add(1, Ordering::Relaxed);
                    }
                    _ => context.count_file(),
                }
                context.count_bytes(data_bytes);
            }
            Err(error) => {
                segments.push(ArchiveSegment::Bytes(std::mem::take(&mut bytes)));
                segments.push(ArchiveSegment::LeftOut { path, attr, error });
            }
        }
    }
    segments.push(ArchiveSegment::Bytes(bytes));
    segments
}

impl<'a> PendingEntry<'a> {
    /// Renders this entry alone.
    pub(super) fn render(self, context: &TransferContext<'_>) -> Vec<ArchiveSegment<'a>> {
        let xattrs = |file| held_xattrs(context.fs, file).map(Some);
        render_batch(context, vec![self], u64::MAX, xattrs)
    }

    /// What it takes from the window.
    fn window_bytes(&self) -> u64 {
        let has_data = self.attr.file_type == FileType::Regular && self.link_to.is_none();
        let data_bytes = if has_data { self.attr.size } else { 0 };
        let link_len = self.link_to.as_ref().map_or(0, Vec::len);
        // A path is in the header, in a record, and here.
        data_bytes + ENTRY_BYTES + 3 * (self.path.len() + link_len) as u64
    }
}

/// The bytes of a part. A hole in it is zeros.
fn read_part(
    context: &TransferContext<'_>,
    file: FileId,
    range: Range<u64>,
) -> Result<Vec<u8>, Error> {
    let len = usize::try_from(range.end - range.start).map_err(|_| out_of_order())?;
    let mut bytes = Vec::with_capacity(len);
    context.fs.read_data(file, range.clone(), &mut |offset, piece| {
        // Up to a piece there is a hole.
        let at = offset
            .checked_sub(range.start)
            .and_then(|at| usize::try_from(at).ok())
            .filter(|&at| at >= bytes.len() && at <= len && piece.len() <= len - at)
            .ok_or_else(out_of_order)?;
        bytes.resize(at, 0);
        bytes.extend_from_slice(piece);
        context.count_bytes(piece.len());
        Ok(())
    })?;
    bytes.resize(len, 0);
    Ok(bytes)
}

/// The walk's end: collects entries into batches.
pub(super) struct TarBatcher<'a> {
    context: &'a TransferContext<'a>,
    window: &'a WriterWindow,
    jobs: Sender<TarJob<'a>>,
    orders: Sender<WriterOrder<'a>>,
    batch: Vec<PendingEntry<'a>>,
    batch_bytes: u64,
}

impl WalkVisitor for TarBatcher<'_> {
    type Directory = ();

    fn enter(&mut self, (): &(), entry: &WalkedFile<'_>) -> Option<()> {
        self.take_one(entry).map_err(|trouble| self.report(entry.path, &trouble)).ok()
    }

    fn visit(&mut self, (): &(), entry: &WalkedFile<'_>) {
        if let Err(trouble) = self.take_one(entry) {
            self.report(entry.path, &trouble);
        }
    }

    fn failed(&mut self, path: &[u8], error: &Error) {
        self.context.problems.unreadable(&self.context.shown(path), error);
    }

    fn is_stopped(&self) -> bool {
        self.context.problems.is_stopped()
    }
}

impl<'a> TarBatcher<'a> {
    /// Puts a directory with everything below it into the archive.
    pub(super) fn directory(&mut self, top: FileId, attr: &Attr) {
        if let Err(error) = self.entry(Vec::new(), attr, None) {
            return self.failed(b"", &error);
        }
        walk(self.context.fs, top, (), DEPTH_MAX, self);
    }

    /// Puts the file into the archive that it is made of.
    pub(super) fn file(&mut self, entry: &WalkedFile<'_>) {
        if let Err(trouble) = self.take(entry) {
            self.report(entry.path, &trouble);
        }
    }

    fn report(&self, path: &[u8], trouble: &ExtractTrouble) {
        self.context.report(&self.context.shown(path), trouble);
    }

    /// Takes an entry of a directory, if it is the only one of its name.
    fn take_one(&mut self, entry: &WalkedFile<'_>) -> Result<(), ExtractTrouble> {
        self.require_one(entry)?;
        self.take(entry)
    }

    fn take(&mut self, entry: &WalkedFile<'_>) -> Result<(), ExtractTrouble> {
        let attr = *entry.attr;
        if entry.path.len() > PATH_MAX {
            let what = format!("a path of more than {PATH_MAX} bytes in a tar archive");
            return Err(Error::unsupported(Code::Unsupported, what).into());
        }
        if attr.file_type == FileType::Socket {
            let path = self.context.shown(entry.path);
            let reason = "a socket, which a tar archive cannot hold";
            self.context.problems.not_representable(Unapplied::Socket, &path, &reason);
            return Ok(());
        }
        let mut link_to = None;
        if attr.nlink > 1 && attr.file_type != FileType::Directory {
            link_to = self.earlier_name(entry)?;
        }
        let path = entry.path.to_vec();
        if link_to.is_none() && attr.file_type == FileType::Regular && attr.size > WHOLE_BYTES {
            return self.large(path, &attr).map_err(|error| {
                if attr.nlink > 1 {
                    self.mark_unreadable(&attr);
                }
                error.into()
            });
        }
        Ok(self.entry(path, &attr, link_to)?)
    }

    /// Puts an entry into the archive. The walk holds its file.
    fn entry(&mut self, path: Vec<u8>, attr: &Attr, link_to: Option<Vec<u8>>) -> Result<(), Error> {
        let held = HeldFile::new(self.context.fs, attr.file)?;
        self.push(PendingEntry { path, held, attr: *attr, link_to });
        Ok(())
    }

    /// Refuses a name that leads to another file as well. With a symbolic link and another file of
    /// one name, a program that unpacks the archive would write to places outside.
    fn require_one(&self, entry: &WalkedFile<'_>) -> Result<(), Error> {
        let found = self.context.fs.lookup(entry.parent, entry.name)?;
        if found == entry.attr.file {
            return Ok(());
        }
        Err(Error::corrupt(Structure::Directory, "the name leads to two files"))
    }

    /// The path of the name under which a file with several names is in the archive already.
    fn earlier_name(&self, entry: &WalkedFile<'_>) -> Result<Option<Vec<u8>>, ExtractTrouble> {
        let fail = |error: io::Error| ExtractTrouble::from_io("the table of hard links", &error);
        let mut links = self.context.links.lock().unwrap_or_else(PoisonError::into_inner);
        match links.newest(entry.attr).map_err(fail)? {
            None => {
                let name = LinkName { parent: entry.parent, name: entry.name.clone() };
                links.add(entry.attr, &name).map_err(fail)?;
                Ok(None)
            }
            Some(KnownLink::Unreadable) => Err(ExtractTrouble::OtherName),
            Some(KnownLink::Name(name)) => {
                let parent = climb(self.context.fs, self.context.top, name.parent, PATH_MAX)?;
                Ok(parent.map(|parent| match &parent[..] {
                    [] => name.name.to_vec(),
                    parent => [parent, b"/", &name.name].concat(),
                }))
            }
        }
    }

    fn push(&mut self, entry: PendingEntry<'a>) {
        self.batch_bytes += entry.window_bytes();
        self.batch.push(entry);
        if self.batch.len() >= BATCH_FILES || self.batch_bytes >= BATCH_BYTES {
            self.send_batch();
        }
    }

    fn send_batch(&mut self) {
        let entries = std::mem::take(&mut self.batch);
        let bytes = std::mem::take(&mut self.batch_bytes);
        if entries.is_empty() {
            return;
        }
        let with_data: Vec<FileId> = entries
            .iter()
            .filter(|entry| {
                entry.attr.file_type == FileType::Regular
                    && entry.attr.size > 0
                    && entry.link_to.is_none()
            })
            .map(|entry| entry.attr.file)
            .collect();
        if !with_data.is_empty() {
            self.context.fs.prefetch(&with_data);
        }
        self.send(bytes, |reply| Some(TarJob::Batch { entries, window_bytes: bytes, reply }));
    }

    /// Sends an order, and the job that fulfils it unless `make` did so itself.
    fn send(&self, bytes: u64, make: impl FnOnce(Sender<Rendered<'a>>) -> Option<TarJob<'a>>) {
        self.window.take(bytes);
        let (reply, rendered) = bounded(1);
        let job = make(reply);
        // A writer that no longer receives has failed, and that stops the walk, too.
        let _ = self.orders.send(WriterOrder { window_bytes: bytes, rendered });
        if let Some(job) = job {
            let _ = self.jobs.send(job);
        }
    }

    fn send_bytes(&self, bytes: Vec<u8>) {
        self.send(bytes.len() as u64, |reply| {
            let segments = vec![ArchiveSegment::Bytes(bytes)];
            let _ = reply.send(Rendered { segments, excess_bytes: 0 });
            None
        });
    }

    fn mark_unreadable(&self, attr: &Attr) {
        let mut links = self.context.links.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = links.mark_unreadable(attr) {
            let trouble = ExtractTrouble::from_io("the table of hard links", &error);
            self.report(b"", &trouble);
        }
    }

    /// Puts a file into the archive that is not rendered whole. An error from here leaves it
    /// out; one that comes after the first byte ends the archive.
    fn large(&mut self, path: Vec<u8>, attr: &Attr) -> Result<(), Error> {
        self.send_batch();
        let fs = self.context.fs;
        let xattrs = held_xattrs(fs, attr.file)?;
        let mut map = SparseMap::default();
        let mut ranges = Parts::new(attr.size, u64::MAX);
        while let Some(range) = ranges.next(|at| fs.next_data(attr.file, at))? {
            map.count(&range);
        }
        let archived_path = entry_path(&path, FileType::Regular);
        let regular = Regular { path: &archived_path, attr, xattrs: &xattrs };
        match self.send_large(&path, &regular, map) {
            Ok(()) => {
                self.context.count_file();
            }
            Err(error) => self.send(0, |reply| {
                let segments = vec![ArchiveSegment::Broken { path, error }];
                let _ = reply.send(Rendered { segments, excess_bytes: 0 });
                None
            }),
        }
        Ok(())
    }

    fn send_large(
        &self,
        path: &[u8],
        regular: &Regular<'_>,
        mut map: SparseMap,
    ) -> Result<(), Error> {
        let attr = regular.attr;
        let next_data = |at| self.context.fs.next_data(attr.file, at);
        let mut front = Vec::new();
        if map.is_dense(attr.size) {
            regular.write(&mut front);
            self.send_bytes(front);
            // The few zeros that a part may hold come with it.
            let everything = |at: u64| Ok((at < attr.size).then_some(at..attr.size));
            self.send_parts(attr, path, everything)?;
            self.send_padding(attr.size);
        } else {
            map.count_end(attr.size);
            regular.write_sparse(&mut front, &map);
            self.send_bytes(front);
            self.send_map(attr, &map, next_data)?;
            self.send_parts(attr, path, next_data)?;
            self.send_padding(map.data_bytes);
        }
        Ok(())
    }

    fn send_map(
        &self,
        attr: &Attr,
        map: &SparseMap,
        next_data: impl Fn(u64) -> Result<Option<Range<u64>>, Error>,
    ) -> Result<(), Error> {
        let mut text = map.first_line();
        let mut ranges = Parts::new(attr.size, u64::MAX);
        while let Some(range) = ranges.next(&next_data)? {
            map_line(&mut text, &range);
            if text.len() >= 1 << 20 {
                let rest = text.split_off(text.len() / 512 * 512);
                self.send_bytes(std::mem::replace(&mut text, rest));
            }
        }
        map.last_line(&mut text, attr.size);
        pad_map(&mut text);
        self.send_bytes(text);
        Ok(())
    }

    fn send_parts(
        &self,
        attr: &Attr,
        path: &[u8],
        next_data: impl Fn(u64) -> Result<Option<Range<u64>>, Error>,
    ) -> Result<(), Error> {
        let mut parts = Parts::new(attr.size, PART_BYTES);
        let held = Arc::new(HeldFile::new(self.context.fs, attr.file)?);
        while !self.context.problems.is_stopped()
            && let Some(range) = parts.next(&next_data)?
        {
            self.send(range.end - range.start, |reply| {
                Some(TarJob::Part { file: held.clone(), range, path: path.to_vec(), reply })
            });
        }
        Ok(())
    }

    fn send_padding(&self, len: u64) {
        let mut padding = Vec::new();
        super::header::pad(&mut padding, len);
        self.send_bytes(padding);
    }
}
