//! How many bytes an extraction or a copy will be, for its [`TransferProgress`].
//!
//! A thread beside the work walks the sources. It is ahead of the work, because it reads no data.
//! A hidden progress gets no such thread.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use offshoot_vfs::walk::{WalkVisitor, WalkedFile, walk};
use offshoot_vfs::{Error, FileId, FileSystemMut, FileType};

use crate::TransferProgress;

/// The depth to which a tree of a volume is counted.
const DEPTH_MAX: usize = 1024;

/// The most directories of the host that wait to be counted. With more there is no total.
const WAITING_MAX: usize = 1 << 16;

/// A source that is counted.
pub enum Counted<'a> {
    /// A file or directory of a volume.
    InVolume(&'a dyn FileSystemMut, FileId),
    /// One of the host.
    OnHost(&'a Path),
}

/// Does `work`, and meanwhile tells `progress` how much there is in `sources`.
pub fn while_counting<T>(
    sources: &[Counted<'_>],
    progress: &dyn TransferProgress,
    work: impl FnOnce() -> T,
) -> T {
    if progress.is_hidden() || sources.is_empty() {
        return work();
    }
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut total = TotalBytes { bytes: 0, is_over: &is_over };
            if sources.iter().all(|source| total.add(source)) && !total.is_stopped() {
                progress.expect(total.bytes);
            }
        });
        let done = work();
        is_over.store(true, Ordering::Relaxed);
        done
    })
}

struct TotalBytes<'a> {
    bytes: u64,
    is_over: &'a AtomicBool,
}

impl TotalBytes<'_> {
    /// Adds a source, unless it cannot be counted.
    fn add(&mut self, source: &Counted<'_>) -> bool {
        match *source {
            Counted::InVolume(fs, top) => match fs.attr(top) {
                Ok(attr) if attr.file_type == FileType::Directory => {
                    walk(fs, top, (), DEPTH_MAX, self);
                    true
                }
                Ok(attr) => {
                    self.add_file(attr.size, attr.allocated_bytes, 1);
                    true
                }
                // The work says why.
                Err(_) => false,
            },
            Counted::OnHost(path) => self.add_host(path),
        }
    }

    fn add_host(&mut self, top: &Path) -> bool {
        let mut waiting: Vec<PathBuf> = Vec::new();
        match top.metadata() {
            Ok(metadata) if metadata.is_dir() => waiting.push(top.to_path_buf()),
            Ok(metadata) => self.add_file(metadata.len(), metadata.blocks().saturating_mul(512), 1),
            Err(_) => return false,
        }
        while let Some(directory) = waiting.pop() {
            // What cannot be read is left out, as the work leaves it out.
            for entry in directory.read_dir().into_iter().flatten().flatten() {
                if self.is_stopped() || waiting.len() >= WAITING_MAX {
                    return false;
                }
                // It does not follow links.
                let Ok(metadata) = entry.metadata() else { continue };
                if metadata.is_dir() {
                    waiting.push(entry.path());
                } else if metadata.is_file() {
                    let stored = metadata.blocks().saturating_mul(512);
                    self.add_file(metadata.len(), stored, metadata.nlink());
                }
            }
        }
        true
    }

    /// A file with several names is written once: each name has its share.
    fn add_file(&mut self, size: u64, stored: u64, names: u64) {
        self.bytes = self.bytes.saturating_add(stored.min(size) / names.max(1));
    }
}

impl WalkVisitor for TotalBytes<'_> {
    type Directory = ();

    fn enter(&mut self, (): &(), _: &WalkedFile<'_>) -> Option<()> {
        Some(())
    }

    fn visit(&mut self, (): &(), entry: &WalkedFile<'_>) {
        let attr = entry.attr;
        if attr.file_type == FileType::Regular {
            self.add_file(attr.size, attr.allocated_bytes, attr.nlink.into());
        }
    }

    fn failed(&mut self, _: &[u8], _: &Error) {}

    fn is_stopped(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use offshoot_testkit::memory::{MemoryFilesystem, ROOT, id};
    use offshoot_vfs::{FileSystem, ReadOnlyFiles};

    use super::*;

    #[test]
    fn all_names_of_a_file_are_one_file() {
        let host = tempfile::tempdir().unwrap();
        let path = |name: &str| host.path().join(name);
        std::fs::create_dir(path("dir")).unwrap();
        std::fs::write(path("dir/file"), vec![1; 4096]).unwrap();
        std::fs::hard_link(path("dir/file"), path("link")).unwrap();
        std::os::unix::fs::symlink("dir", path("round")).unwrap();
        let is_over = AtomicBool::new(false);
        let mut total = TotalBytes { bytes: 0, is_over: &is_over };
        assert!(total.add(&Counted::OnHost(host.path())));
        assert_eq!(total.bytes, 4096);
        assert!(!total.add(&Counted::OnHost(&path("none"))));
        let mut fs = MemoryFilesystem::new();
        fs.add(ROOT, b"dir", 300, FileType::Directory);
        fs.file(300, b"file", 301, b"some data");
        let stored = fs.attr(id(301)).unwrap();
        let mut total = TotalBytes { bytes: 0, is_over: &is_over };
        assert!(total.add(&Counted::InVolume(&ReadOnlyFiles::new(&fs), id(ROOT))));
        assert_eq!(total.bytes, stored.allocated_bytes.min(9) / u64::from(stored.nlink));
        is_over.store(true, Ordering::Relaxed);
        assert!(!total.add(&Counted::OnHost(host.path())));
    }
}
