//! Volumes that are open for writing, through the calls of the `vfs` traits.

mod bytes;
mod calls;
mod durable;
mod full;
mod model;
mod same;

use std::sync::Arc;

use offshoot_testkit::xfs::disk::XfsDisk;
use offshoot_testkit::xfs::judges::XfsJudges;
use offshoot_vfs::{EntryPlace, FileId, FileSystem, FileSystemMut, NewFile, Timestamp, Volume};
use offshoot_xfs::{XfsOptions, XfsVolume, check_xfs};

const AT: Timestamp = Timestamp { secs: 1_700_000_000, nanos: 5 };

/// A new volume.
fn made(judges: &XfsJudges, mib: u64, options: &str) -> XfsDisk {
    let disk = XfsDisk::create(judges, mib);
    disk.mkfs(options);
    disk
}

/// A volume that is open for writing.
struct WrittenXfs {
    volume: Arc<XfsVolume>,
    files: Box<dyn FileSystemMut>,
}

impl WrittenXfs {
    fn new(disk: &XfsDisk) -> Self {
        Self::with(disk, &XfsOptions::default())
    }

    fn with(disk: &XfsDisk, options: &XfsOptions) -> Self {
        Self::over(XfsVolume::open_writable(disk.writable_device(), options).unwrap())
    }

    fn over(volume: Arc<XfsVolume>) -> Self {
        let files = volume.clone().files(volume.root().dev).unwrap();
        Self { volume, files }
    }

    fn root(&self) -> FileId {
        self.files.root()
    }

    /// Makes a file with this content in the root.
    fn make(&self, name: &str, content: &[u8]) -> FileId {
        let file = self.files.create(self.place(name), &NEW).unwrap();
        self.files.write(file, 0, content, AT).unwrap();
        file
    }

    fn place<'a>(&self, name: &'a str) -> EntryPlace<'a> {
        EntryPlace { dir: self.root(), name: name.as_bytes() }
    }

    fn content(&self, file: FileId) -> Vec<u8> {
        content(&*self.files, file)
    }

    fn shut_down(self) {
        self.volume.shut_down().unwrap();
    }
}

const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };

/// All bytes of a file.
fn content(files: &dyn FileSystem, file: FileId) -> Vec<u8> {
    let mut found = vec![0; usize::try_from(files.attr(file).unwrap().size).unwrap()];
    assert_eq!(files.read(file, 0, &mut found).unwrap(), found.len());
    found
}

/// Neither our check nor `xfs_repair` finds anything.
#[track_caller]
fn assert_checks(disk: &XfsDisk) {
    let found = check_xfs(&disk.device(), &XfsOptions::default()).unwrap();
    assert!(found.findings.is_empty(), "{:#?}", found.findings);
    disk.assert_checks();
}
