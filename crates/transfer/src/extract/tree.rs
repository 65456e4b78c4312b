//! Extraction into a directory.
//!
//! One thread walks: it reads metadata ahead, makes the directories, and collects files into
//! batches. It announces each batch to the filesystem before it hands the batch to the workers.
//! There is one worker for every core. Workers make the files, fill them and finish them.
//!
//! ```text
//! walk --- batch: up to 64 files, 4 MiB ---> channel (bounded) ---> workers
//!     \--- part of a large file: 16 MiB --/
//! ```
//!
//! Memory is bounded by the channel: nothing but names and attributes waits in it, data goes
//! straight from the filesystem's buffers into the destination. Files with several names are made
//! by the walk itself, so that the next name of one can be linked to it when it comes.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::thread;

use crossbeam_channel::{Receiver, Sender};
use offshoot_vfs::walk::{WalkVisitor, WalkedFile, walk};
use offshoot_vfs::{Errno, Error, FileId, FileType, HeldFile};
use rustix::fs::{self, AtFlags};

use super::context::{ExtractTrouble, TransferContext};
use super::destination::Limits;
use super::directory::ExtractDirectoryRef;
use super::existing::{self, ExtractTarget, TargetKind};
use super::file::{self, BegunFile, FileJob};
use super::large::{LARGE_BYTES, LargeRef};
use super::links::{KnownLink, LinkName, LinkTable};
use super::marker;
use super::onto::Overwrite;
use super::problems::Unapplied;
use super::{BATCH_BYTES, workers};

/// What a worker is handed.
enum ExtractJob<'a> {
    Files(Vec<FileJob<'a>>),
    Part(LargeRef<'a>, Range<u64>),
}

/// The most batches that exist at once: in the channel, with workers, with the walk.
pub(crate) fn batches_in_flight() -> usize {
    workers() * 3 + 1
}

/// Extracts everything below `top`, which has become `directory`.
pub(crate) fn extract_below<'a>(
    context: &'a TransferContext<'a>,
    limits: Limits,
    top: FileId,
    directory: ExtractDirectoryRef<'a>,
) {
    with_workers(context, limits, |tree| {
        walk(context.fs, top, directory, limits.depth_max, tree);
    });
}

/// Extracts one file into `directory`.
pub(crate) fn extract_one<'a>(
    context: &'a TransferContext<'a>,
    limits: Limits,
    directory: &ExtractDirectoryRef<'a>,
    entry: &WalkedFile<'_>,
) {
    with_workers(context, limits, |tree| tree.visit(directory, entry));
}

fn with_workers<'a>(
    context: &'a TransferContext<'a>,
    limits: Limits,
    fill: impl FnOnce(&mut TreeExtractor<'a>),
) {
    thread::scope(|scope| {
        let (jobs, queue) = crossbeam_channel::bounded(workers() * 2);
        for _ in 0..workers() {
            let queue = queue.clone();
            scope.spawn(move || work(context, &queue));
        }
        drop(queue);
        let mut tree = TreeExtractor { context, limits, jobs, batch: Vec::new(), batch_bytes: 0 };
        fill(&mut tree);
        tree.send_batch();
    });
}

fn work<'a>(context: &'a TransferContext<'a>, queue: &Receiver<ExtractJob<'a>>) {
    for job in queue {
        match job {
            // When all must end, nothing is left that has less than its data.
            ExtractJob::Files(files) if context.problems.is_stopped() => {
                for file in files {
                    file.give_up(context);
                }
            }
            ExtractJob::Part(large, _) if context.problems.is_stopped() => large.give_up(),
            ExtractJob::Files(files) => files.into_iter().for_each(|file| file.run(context)),
            ExtractJob::Part(large, part) => large.copy(part),
        }
    }
}

/// The visitor that makes a tree.
struct TreeExtractor<'a> {
    context: &'a TransferContext<'a>,
    limits: Limits,
    jobs: Sender<ExtractJob<'a>>,
    batch: Vec<FileJob<'a>>,
    batch_bytes: u64,
}

impl<'a> WalkVisitor for TreeExtractor<'a> {
    type Directory = ExtractDirectoryRef<'a>;

    fn enter(
        &mut self,
        parent: &ExtractDirectoryRef<'a>,
        entry: &WalkedFile<'_>,
    ) -> Option<ExtractDirectoryRef<'a>> {
        if self.context.leaves_out(entry.name, entry.path) {
            return None;
        }
        let is_other = entry.attr.file.dev != entry.parent.dev;
        let stays = |overwrite: Overwrite<'_>| overwrite.manner.is_one_filesystem;
        // One that is there was not copied.
        let is_new = fs::statat(parent.fd(), &**entry.name, AtFlags::SYMLINK_NOFOLLOW).is_err();
        match parent.make(entry.name, &self.context.wanted(entry.attr)) {
            // The place of another subvolume is there, and nothing in it.
            Ok(_) if is_other && self.context.overwrite.is_some_and(stays) => None,
            Ok(directory) => {
                if is_new {
                    self.context.tell(entry.parent, entry.name);
                }
                self.context.counters.directories.fetch_add(1, Ordering::Relaxed);
                Some(directory)
            }
            Err(trouble) => {
                self.context.report(&self.context.shown(entry.path), &trouble);
                None
            }
        }
    }

    fn visit(&mut self, parent: &ExtractDirectoryRef<'a>, entry: &WalkedFile<'_>) {
        if self.context.leaves_out(entry.name, entry.path)
            || existing::is_kept(self.context, parent, entry)
        {
            return;
        }
        let attr = self.context.wanted(entry.attr);
        if let Err(trouble) = self.take(parent, &WalkedFile { attr: &attr, ..*entry }) {
            self.context.report(&self.context.shown(entry.path), &trouble);
        }
    }

    fn failed(&mut self, path: &[u8], error: &Error) {
        self.context.problems.unreadable(&self.context.shown(path), error);
    }

    fn is_stopped(&self) -> bool {
        self.context.problems.is_stopped()
    }
}

/// What became of a name of a file with several names.
enum Linked {
    /// It is there.
    Done,
    /// It is the first one: the file is made and is to be filled.
    First(ExtractTarget),
}

impl<'a> TreeExtractor<'a> {
    fn take(
        &mut self,
        parent: &ExtractDirectoryRef<'a>,
        entry: &WalkedFile<'_>,
    ) -> Result<(), ExtractTrouble> {
        let attr = *entry.attr;
        let held = HeldFile::new(self.context.fs, attr.file)?;
        let mut begun = BegunFile::Nothing;
        if self.is_there(parent, entry)? {
            begun = BegunFile::Whole;
        } else if attr.nlink > 1 {
            match self.link(parent, entry)? {
                Linked::Done => {
                    self.context.tell(parent.file(), entry.name);
                    self.context.count_file();
                    return Ok(());
                }
                Linked::First(target) => begun = BegunFile::Made(target),
            }
        }
        let name = entry.name.clone();
        let is_large = attr.file_type == FileType::Regular && attr.size >= LARGE_BYTES;
        if is_large && !matches!(begun, BegunFile::Whole) {
            let target = match begun {
                BegunFile::Made(target) => target,
                _ => file::create(self.context, parent, &name, &attr)?,
            };
            if target.kind == TargetKind::Stream {
                self.batch.push(FileJob {
                    directory: parent.clone(),
                    name,
                    _held: held,
                    attr,
                    begun: BegunFile::Made(target),
                });
                return Ok(());
            }
            // What was collected comes first, so that the order is that of the volume.
            self.send_batch();
            let large = LargeRef::new(self.context, parent.clone(), name, held, attr, target);
            large.for_each_part(|share, part| {
                !self.is_stopped() && self.jobs.send(ExtractJob::Part(share, part)).is_ok()
            });
            return Ok(());
        }
        if attr.file_type == FileType::Regular && !matches!(begun, BegunFile::Whole) {
            self.batch_bytes += attr.size;
        }
        self.batch.push(FileJob { directory: parent.clone(), name, _held: held, attr, begun });
        if self.batch.len() >= self.limits.batch_files || self.batch_bytes >= BATCH_BYTES {
            self.send_batch();
        }
        Ok(())
    }

    /// Whether the extraction that this one goes on with has written all data of the file.
    fn is_there(
        &self,
        parent: &ExtractDirectoryRef<'a>,
        entry: &WalkedFile<'_>,
    ) -> Result<bool, ExtractTrouble> {
        let context = self.context;
        if !context.overwrite.is_some_and(|overwrite| overwrite.is_resumed) {
            return Ok(false);
        }
        let found = fs::statat(parent.fd(), &**entry.name, AtFlags::SYMLINK_NOFOLLOW);
        if !found.is_ok_and(|stat| marker::is_whole(&stat, entry.attr)) {
            return Ok(false);
        }
        if entry.attr.nlink > 1 {
            let fail =
                |error: std::io::Error| ExtractTrouble::from_io("the table of hard links", &error);
            let mut links = context.links.lock().unwrap_or_else(PoisonError::into_inner);
            if links.newest(entry.attr).map_err(fail)?.is_some() {
                // It may be a file of its own: it becomes a name of the first one.
                return Ok(false);
            }
            add(&mut links, entry).map_err(fail)?;
        }
        Ok(true)
    }

    fn send_batch(&mut self) {
        let files = std::mem::take(&mut self.batch);
        self.batch_bytes = 0;
        let with_data: Vec<FileId> = files
            .iter()
            .filter(|job| job.attr.file_type == FileType::Regular && job.attr.size > 0)
            .filter(|job| !matches!(job.begun, BegunFile::Whole))
            .map(|job| job.attr.file)
            .collect();
        if !with_data.is_empty() {
            self.context.fs.prefetch(&with_data);
        }
        if !files.is_empty() {
            // The workers outlive this sender; when they are gone, they have panicked, and
            // the scope passes that on.
            let _ = self.jobs.send(ExtractJob::Files(files));
        }
    }

    /// Makes one name of a file that has several.
    fn link(
        &self,
        parent: &ExtractDirectoryRef<'a>,
        entry: &WalkedFile<'_>,
    ) -> Result<Linked, ExtractTrouble> {
        let fail =
            |error: std::io::Error| ExtractTrouble::from_io("the table of hard links", &error);
        let context = self.context;
        // Held until the name is in the table, so that a worker that cannot read the file
        // finds all of its names.
        let mut links = context.links.lock().unwrap_or_else(PoisonError::into_inner);
        match links.newest(entry.attr).map_err(fail)? {
            None => {}
            Some(KnownLink::Unreadable) => return Err(ExtractTrouble::OtherName),
            Some(KnownLink::Name(name)) => match link_to(context, &name, parent, entry)? {
                Ok(()) => {
                    add(&mut links, entry).map_err(fail)?;
                    return Ok(Linked::Done);
                }
                Err(errno @ Errno::EXIST) => {
                    return Err(ExtractTrouble::Host("cannot make the hard link", errno));
                }
                // The destination has no more links for it, or none at all.
                Err(errno) => {
                    context.unapplied(Unapplied::HardLink, parent.file(), entry.name, errno);
                }
            },
        }
        let linked = if entry.attr.file_type == FileType::Regular {
            Linked::First(file::create(context, parent, entry.name, entry.attr)?)
        } else {
            file::make_special(context, parent, entry.name, entry.attr)?;
            Linked::Done
        };
        add(&mut links, entry).map_err(fail)?;
        Ok(linked)
    }
}

fn add(links: &mut LinkTable, entry: &WalkedFile<'_>) -> std::io::Result<()> {
    links.add(entry.attr, &LinkName { parent: entry.parent, name: entry.name.clone() })
}

fn link_to(
    context: &TransferContext<'_>,
    old: &LinkName,
    parent: &ExtractDirectoryRef<'_>,
    entry: &WalkedFile<'_>,
) -> Result<rustix::io::Result<()>, ExtractTrouble> {
    let link = |from: BorrowedFd<'_>| {
        fs::linkat(from, &*old.name, parent.fd(), &**entry.name, AtFlags::empty())
    };
    parent.make_named(entry.name, || {
        if old.parent == parent.file() {
            link(parent.fd())
        } else {
            context.with_directory(old.parent, link)
        }
    })
}
