//! Whole trees, on all cores.
//!
//! ```text
//! walk --- batch: up to 32 files ---> channel (bounded) ---> workers: read, make, fill
//! ```

use std::sync::atomic::Ordering;
use std::thread;

use crossbeam_channel::{Receiver, Sender};
use offshoot_vfs::walk::{DEPTH_MAX, WalkVisitor, WalkedFile, walk};
use offshoot_vfs::{EntryPlace, Error, FileId, FileType, HeldFile, SafeName};

use super::directory::CopyDirectoryRef;
use super::original::{HostFile, Original, VolumeFile};
use super::{CopyNames, CopySource, CopyTrouble, IntoVolume, target};
use crate::extract::workers;

/// The most files that go to a worker at once.
const BATCH_FILES: usize = 32;

/// The most batches that exist at once: in the channel, with workers, with the walk.
pub(super) fn batches_in_flight() -> usize {
    workers() * 3 + 1
}

/// What the walk knows of a file.
pub(super) enum SeenFile<'a> {
    /// It is in the directory of the host, and of this type.
    Host(FileType),
    /// It is in this volume.
    Volume(VolumeFile<'a>),
}

/// A file to be copied.
pub(super) struct CopyJob<'a> {
    pub(super) directory: CopyDirectoryRef<'a>,
    pub(super) name: SafeName,
    pub(super) seen: SeenFile<'a>,
    /// That of a volume.
    pub(super) _held: Option<HeldFile<'a>>,
}

impl CopyJob<'_> {
    fn run(self, buf: &mut Vec<u8>) {
        let source = self.directory.source();
        match self.copy(buf) {
            Ok(()) => {
                source.tell(self.directory.file(), &self.name);
                source.into.count_file();
            }
            Err(trouble) => source.report(self.directory.file(), &self.name, &trouble),
        }
    }

    fn copy(&self, buf: &mut Vec<u8>) -> Result<(), CopyTrouble> {
        let source = self.directory.source();
        let (into, dir) = (source.into, self.directory.file());
        let from = || source.path_of(dir, &self.name);
        let to = || source.shown_of(dir, &self.name);
        let names = CopyNames { from: &from, to: &to };
        let place = EntryPlace { dir, name: &self.name };
        match self.seen {
            SeenFile::Host(file_type) => {
                let file = HostFile::found(self.directory.host_fd(), &self.name, file_type);
                target::put(into, &names, place, &file.map_err(CopyTrouble::Source)?, buf)
            }
            SeenFile::Volume(ref file) => target::put(into, &names, place, file, buf),
        }
    }
}

/// Gathers files, and hands them to the workers. Without workers it copies each file itself.
pub(super) struct Batches<'a> {
    jobs: Option<Sender<Vec<CopyJob<'a>>>>,
    batch: Vec<CopyJob<'a>>,
    batch_files: usize,
    /// What files are read into without workers.
    buf: Vec<u8>,
}

impl<'a> Batches<'a> {
    /// Takes one file.
    pub(super) fn push(&mut self, job: CopyJob<'a>) {
        if self.jobs.is_none() {
            return job.run(&mut self.buf);
        }
        self.batch.push(job);
        if self.batch.len() >= self.batch_files {
            self.send();
        }
    }

    fn send(&mut self) {
        let batch = std::mem::take(&mut self.batch);
        let Some(jobs) = self.jobs.as_ref().filter(|_| !batch.is_empty()) else { return };
        prefetch(&batch);
        // The workers outlive this sender; when they are gone, they have panicked, and the
        // scope passes that on.
        let _ = jobs.send(batch);
    }
}

/// Tells the volume which files will be read next.
fn prefetch(batch: &[CopyJob<'_>]) {
    let mut fs = None;
    let with_data: Vec<FileId> = batch
        .iter()
        .filter_map(|job| match &job.seen {
            SeenFile::Volume(VolumeFile { fs: from, attr, .. })
                if attr.file_type == FileType::Regular && attr.size > 0 =>
            {
                fs = Some(*from);
                Some(attr.file)
            }
            _ => None,
        })
        .collect();
    if let Some(fs) = fs {
        fs.prefetch(&with_data);
    }
}

/// Calls `walk` with workers for what it finds, or without any for a copy that is reproducible:
/// workers make files in the order in which they come to it.
pub(super) fn with_workers<'a>(
    into: &'a IntoVolume<'a>,
    batch_files: usize,
    walk: impl FnOnce(&mut Batches<'a>),
) {
    let (batch, buf) = (Vec::new(), Vec::new());
    let batch_files = batch_files.min(BATCH_FILES);
    if into.manner.is_reproducible {
        return walk(&mut Batches { jobs: None, batch, batch_files, buf });
    }
    thread::scope(|scope| {
        let (jobs, queue) = crossbeam_channel::bounded(workers() * 2);
        for _ in 0..workers() {
            let queue: Receiver<Vec<CopyJob<'a>>> = queue.clone();
            scope.spawn(move || {
                let mut buf = Vec::new();
                for job in queue.iter().flatten() {
                    // When all must end, the rest is only let go.
                    if !into.problems.is_stopped() {
                        job.run(&mut buf);
                    }
                }
            });
        }
        drop(queue);
        let mut batches = Batches { jobs: Some(jobs), batch, batch_files, buf };
        walk(&mut batches);
        batches.send();
    });
}

/// Copies what is below the directory `original` of a volume, which has become `held`.
pub(super) fn copy_volume<'a>(
    source: &'a CopySource<'a>,
    original: &VolumeFile<'a>,
    held: HeldFile<'a>,
    is_new: bool,
) -> Result<(), CopyTrouble> {
    let VolumeFile { fs, attr, .. } = *original;
    target::dress_directory(source.into, held.file(), original)?;
    let top = CopyDirectoryRef::new(source, held, attr, is_new, None);
    with_workers(source.into, BATCH_FILES, |batches| {
        walk(fs, attr.file, top, DEPTH_MAX, &mut Copying { original, source, batches });
    });
    Ok(())
}

/// The visitor that copies.
struct Copying<'w, 'a> {
    /// The top.
    original: &'w VolumeFile<'a>,
    source: &'a CopySource<'a>,
    batches: &'w mut Batches<'a>,
}

impl<'a> WalkVisitor for Copying<'_, 'a> {
    type Directory = CopyDirectoryRef<'a>;

    fn enter(
        &mut self,
        parent: &CopyDirectoryRef<'a>,
        entry: &WalkedFile<'_>,
    ) -> Option<CopyDirectoryRef<'a>> {
        let manner = self.source.into.manner;
        if manner.leaves_out(entry.name, || entry.path.to_vec()) {
            return None;
        }
        let original = VolumeFile { attr: *entry.attr, ..*self.original };
        let made = enter(parent, entry.name, &original);
        if manner.is_one_filesystem && entry.attr.file.dev != entry.parent.dev {
            // Its place is there, and nothing in it.
            if let Some((held, is_new)) = made {
                drop(CopyDirectoryRef::new(self.source, held, *entry.attr, is_new, None));
            }
            return None;
        }
        made.map(|(held, is_new)| {
            CopyDirectoryRef::new(self.source, held, *entry.attr, is_new, None)
        })
    }

    fn visit(&mut self, parent: &CopyDirectoryRef<'a>, entry: &WalkedFile<'_>) {
        if self.source.into.manner.leaves_out(entry.name, || entry.path.to_vec()) {
            return;
        }
        let original = VolumeFile { attr: *entry.attr, ..*self.original };
        match HeldFile::new(original.fs, entry.attr.file) {
            Ok(held) => self.batches.push(CopyJob {
                directory: parent.clone(),
                name: entry.name.clone(),
                seen: SeenFile::Volume(original),
                _held: Some(held),
            }),
            Err(error) => self.failed(entry.path, &error),
        }
    }

    fn failed(&mut self, path: &[u8], error: &Error) {
        let path = [self.source.path, b"/", path].concat();
        self.source.into.problems.unreadable(&path, error);
    }

    fn is_stopped(&self) -> bool {
        self.source.into.problems.is_stopped()
    }
}

/// Makes the copy of a directory, with its extended attributes; reports what goes wrong.
pub(super) fn enter<'a>(
    parent: &CopyDirectoryRef<'a>,
    name: &SafeName,
    original: &dyn Original,
) -> Option<(HeldFile<'a>, bool)> {
    let into = parent.source().into;
    let made = target::make_directory(into, parent.file(), name, original.attr())
        .and_then(|made| target::dress_directory(into, made.0.file(), original).map(|()| made));
    match made {
        Ok(made) => {
            if made.1 {
                parent.source().tell(parent.file(), name);
            }
            into.counters.directories.fetch_add(1, Ordering::Relaxed);
            Some(made)
        }
        Err(trouble) => {
            parent.source().report(parent.file(), name, &trouble);
            None
        }
    }
}
