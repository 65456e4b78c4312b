//! The threads of a mount over `/dev/fuse`.
//!
//! The test needs root and `/dev/fuse`, as the judges do.

use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use offshoot_fuse::{MountOptions, MountPoint, Mounter, ServeOptions, Server, Transport, Unmount};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::memory::{MemoryFilesystem, ROOT};
use offshoot_testkit::scratch_dir;
use offshoot_vfs::{Attr, DirEntry, FileId, FileSystem, Parent, ReadOnlyFiles, Result, StatFs};

/// A filesystem where the search for some names waits until it may go on.
struct StuckFilesystem {
    files: MemoryFilesystem,
    stuck: AtomicUsize,
    may_go_on: Mutex<bool>,
    goes_on: Condvar,
}

impl StuckFilesystem {
    fn go_on(&self) {
        *self.may_go_on.lock().unwrap() = true;
        self.goes_on.notify_all();
    }
}

impl FileSystem for StuckFilesystem {
    fn lookup(&self, dir: FileId, name: &[u8]) -> Result<FileId> {
        if name.starts_with(b"stuck") {
            self.stuck.fetch_add(1, Ordering::SeqCst);
            let may_go_on = self.may_go_on.lock().unwrap();
            drop(self.goes_on.wait_while(may_go_on, |may| !*may).unwrap());
        }
        self.files.lookup(dir, name)
    }

    fn root(&self) -> FileId {
        self.files.root()
    }

    fn statfs(&self) -> Result<StatFs> {
        self.files.statfs()
    }

    fn parent(&self, dir: FileId) -> Result<Option<Parent>> {
        self.files.parent(dir)
    }

    fn attr(&self, file: FileId) -> Result<Attr> {
        self.files.attr(file)
    }

    fn read_dir(
        &self,
        dir: FileId,
        after: u64,
        visit: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        self.files.read_dir(dir, after, visit)
    }

    fn read_link(&self, file: FileId) -> Result<Vec<u8>> {
        self.files.read_link(file)
    }

    fn xattr(&self, file: FileId, name: &[u8]) -> Result<Vec<u8>> {
        self.files.xattr(file, name)
    }

    fn xattrs(
        &self,
        file: FileId,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>,
    ) -> Result<()> {
        self.files.xattrs(file, visit)
    }

    fn read(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.files.read(file, offset, buf)
    }

    fn read_data(
        &self,
        file: FileId,
        range: Range<u64>,
        visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        self.files.read_data(file, range, visit)
    }

    fn next_data(&self, file: FileId, offset: u64) -> Result<Option<Range<u64>>> {
        self.files.next_data(file, offset)
    }

    fn prefetch(&self, files: &[FileId]) {
        self.files.prefetch(files);
    }
}

/// Calls that wait for long do not keep others from an answer, however many they are and even if
/// calls in quick succession kept the first threads busy before.
#[test]
fn stuck_calls_do_not_stop_others() {
    const STUCK: usize = 40;
    const TIME_TO_ANSWER: Duration = Duration::from_secs(60);

    if judges::require().is_none() {
        return;
    }
    let mut files = MemoryFilesystem::new();
    files.file(ROOT, b"file", 300, b"contents");
    let (may_go_on, goes_on) = (Mutex::new(false), Condvar::new());
    let stuck = StuckFilesystem { files, stuck: AtomicUsize::new(0), may_go_on, goes_on };
    let stuck = Arc::new(stuck);
    let dir = scratch_dir();
    let mount = Arc::new(MountPoint::new(dir.path(), MountOptions::new("stuck", "test")));
    let files = Box::new(ReadOnlyFiles::new(stuck.clone()));
    let server = Server::start(files, mount.clone(), ServeOptions::over(Transport::Device));
    let server = server.expect("it mounts");
    let serving = thread::spawn(move || server.wait());

    let missing = |name: String| {
        let path = dir.path().join(name);
        move || assert!(!path.exists())
    };
    let mut waiting = Vec::new();
    for first in (0..STUCK).step_by(4) {
        (0..500).for_each(|call| missing(format!("missing {first} {call}"))());
        waiting.extend((first..first + 4).map(|n| thread::spawn(missing(format!("stuck {n}")))));
    }
    let (answered, answer) = mpsc::channel();
    let path = dir.path().join("file");
    thread::spawn(move || answered.send(std::fs::read(path).ok()));
    let answer = answer.recv_timeout(TIME_TO_ANSWER);
    let are_stuck = (0..6000).any(|_| {
        thread::sleep(Duration::from_millis(10));
        stuck.stuck.load(Ordering::SeqCst) == STUCK
    });
    stuck.go_on();
    for thread in waiting {
        thread.join().expect("it is not there");
    }
    mount.unmount(Unmount::Lazily).expect("it unmounts");
    serving.join().expect("no panic").expect("it was served");
    assert_eq!(answer, Ok(Some(b"contents".to_vec())));
    assert!(are_stuck, "all calls reach the filesystem");
}
