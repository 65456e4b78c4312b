//! Other requests are served while calls wait in the filesystem.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::ops::{ControlFlow, Range};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use offshoot_fuse::{MountOptions, MountPoint, ServeOptions, Server, Transport, Unmount, unmount};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::io_uring::{self, SwitchedOn};
use offshoot_testkit::model::Model;
use offshoot_testkit::scratch_dir;
use offshoot_vfs::{
    Attr, Dedupe, DirEntry, EntryPlace, Fallocate, FileFlags, FileId, FilePosition, FileSystem,
    FileSystemMut, NewFile, NewNode, Parent, Rename, Result, SetAttr, StatFs, Timestamp, XattrMode,
};
use rustix::fs::{XattrFlags, fsetxattr};
use rustix::thread::{CpuSet, sched_setaffinity};

/// The number of calls that wait: one less than the least number of entries of a queue of io_uring.
const HELD: usize = 7;

/// `fsync` and `set_xattr` wait here.
#[derive(Default)]
struct FsyncDoor {
    /// How many calls have come, and whether the door is open.
    state: Mutex<(usize, bool)>,
    changed: Condvar,
}

impl FsyncDoor {
    fn pass(&self) {
        let mut state = self.state.lock().expect("no thread panicked");
        state.0 += 1;
        self.changed.notify_all();
        drop(self.changed.wait_while(state, |(_, is_open)| !*is_open).expect("no thread panicked"));
    }

    /// Waits until `count` calls have come, for at most 30 s. Returns whether they have.
    fn has(&self, count: usize) -> bool {
        let state = self.state.lock().expect("no thread panicked");
        let patience = Duration::from_secs(30);
        let waited = self.changed.wait_timeout_while(state, patience, |(held, _)| *held < count);
        !waited.expect("no thread panicked").1.timed_out()
    }

    fn open(&self) {
        self.state.lock().expect("no thread panicked").1 = true;
        self.changed.notify_all();
    }
}

/// The model, with an `fsync` and a `set_xattr` that wait.
struct HeldModel {
    model: Model,
    door: Arc<FsyncDoor>,
}

/// Methods that only call those of the model.
macro_rules! as_the_model {
    ($(fn $name:ident($($arg:ident: $kind:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $($arg: $kind),*) -> $result {
            self.model.$name($($arg),*)
        })*
    };
}

impl FileSystem for HeldModel {
    as_the_model! {
        fn root() -> FileId;
        fn statfs() -> Result<StatFs>;
        fn lookup(dir: FileId, name: &[u8]) -> Result<FileId>;
        fn parent(dir: FileId) -> Result<Option<Parent>>;
        fn attr(file: FileId) -> Result<Attr>;
        fn read_dir(dir: FileId, after: u64, visit: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>) -> Result<()>;
        fn read_link(file: FileId) -> Result<Vec<u8>>;
        fn xattr(file: FileId, name: &[u8]) -> Result<Vec<u8>>;
        fn xattrs(file: FileId, visit: &mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>) -> Result<()>;
        fn read(file: FileId, offset: u64, buf: &mut [u8]) -> Result<usize>;
        fn read_data(file: FileId, range: Range<u64>, visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>) -> Result<()>;
        fn next_data(file: FileId, offset: u64) -> Result<Option<Range<u64>>>;
        fn prefetch(files: &[FileId]) -> ();
    }
}

impl FileSystemMut for HeldModel {
    as_the_model! {
        fn mknod(place: EntryPlace<'_>, node: NewNode, new: &NewFile) -> Result<FileId>;
        fn mkdir(place: EntryPlace<'_>, new: &NewFile) -> Result<FileId>;
        fn symlink(place: EntryPlace<'_>, target: &[u8], new: &NewFile) -> Result<FileId>;
        fn create_unnamed(dir: FileId, is_linkable: bool, new: &NewFile) -> Result<FileId>;
        fn link(file: FileId, place: EntryPlace<'_>, at: Timestamp) -> Result<()>;
        fn unlink(place: EntryPlace<'_>, at: Timestamp) -> Result<()>;
        fn rmdir(place: EntryPlace<'_>, at: Timestamp) -> Result<()>;
        fn rename_with(
            from: EntryPlace<'_>,
            to: EntryPlace<'_>,
            how: Rename,
            at: Timestamp
        ) -> Result<()>;
        fn set_attr(file: FileId, set: &SetAttr, at: Timestamp) -> Result<()>;
        fn set_flags(file: FileId, flags: FileFlags, at: Timestamp) -> Result<()>;
        fn write(file: FileId, offset: u64, data: &[u8], at: Timestamp) -> Result<()>;
        fn write_direct(file: FileId, offset: u64, data: &[u8], at: Timestamp) -> Result<()>;
        fn fallocate(file: FileId, what: Fallocate, offset: u64, len: u64, at: Timestamp) -> Result<()>;
        fn clone_range(from: FilePosition, to: FilePosition, len: u64, at: Timestamp) -> Result<()>;
        fn dedupe_range(from: FilePosition, to: FilePosition, len: u64) -> Result<Dedupe>;
        fn copy_range(from: FilePosition, to: FilePosition, len: u64, at: Timestamp) -> Result<u64>;
        fn remove_xattr(file: FileId, name: &[u8], at: Timestamp) -> Result<()>;
        fn open(file: FileId) -> Result<()>;
        fn release(file: FileId) -> Result<()>;
        fn sync() -> Result<()>;
    }

    fn set_xattr(
        &self,
        file: FileId,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
        at: Timestamp,
    ) -> Result<()> {
        self.door.pass();
        self.model.set_xattr(file, name, value, mode, at)
    }

    fn fsync(&self, file: FileId) -> Result<()> {
        self.door.pass();
        self.model.fsync(file)
    }
}

/// Binds this thread to one CPU, so that its calls come to one queue.
fn stay() {
    let mut cpus = CpuSet::new();
    cpus.set(0);
    sched_setaffinity(None, &cpus).expect("there is a first CPU");
}

/// Lets `HELD` times `call` wait on a mount, and makes another request meanwhile.
fn others_are_served(transport: Transport, call: fn(&File) -> io::Result<()>) {
    let dir = scratch_dir();
    let door = Arc::new(FsyncDoor::default());
    let fs = HeldModel { model: Model::made_at(Timestamp::now()), door: door.clone() };
    let place = MountPoint::new(dir.path(), MountOptions::new("held", "held"));
    let options = ServeOptions::over(transport);
    let server = Server::start(Box::new(fs), Arc::new(place), options).expect("a mount");
    assert_eq!(server.transport(), transport);
    let serving = thread::spawn(move || server.wait());
    let files: Vec<_> = (0..HELD)
        .map(|number| File::create(dir.path().join(number.to_string())).expect("a file"))
        .collect();
    let waiting: Vec<_> = files
        .into_iter()
        .map(|file| {
            thread::spawn(move || {
                stay();
                call(&file)
            })
        })
        .collect();
    let have_come = door.has(HELD);
    let (sender, answers) = channel();
    let name = dir.path().join("nothing");
    let asking = thread::spawn(move || {
        stay();
        sender.send(fs::metadata(name)).expect("it is waited for");
    });
    let answer = answers.recv_timeout(Duration::from_secs(30));
    door.open();
    let stored = waiting.into_iter().all(|call| call.join().is_ok_and(|result| result.is_ok()));
    // The asking thread fails if its answer came too late.
    let _ = asking.join();
    unmount(dir.path(), Unmount::Unused).expect("no program uses the mount");
    serving.join().expect("no panic").expect("a good end");
    assert!(have_come, "not all calls came to the filesystem");
    assert!(stored, "not all calls that waited went well");
    let error = answer.expect("an answer while others wait").expect_err("it is not there");
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

#[test]
fn over_the_device_others_are_served_while_calls_wait() {
    let Some(_judges) = judges::require() else { return };
    others_are_served(Transport::Device, File::sync_all);
}

/// The server expects no wait in this call, so it starts no thread before the call.
#[test]
fn over_the_device_others_are_served_while_short_calls_wait() {
    let Some(_judges) = judges::require() else { return };
    others_are_served(Transport::Device, |file| {
        Ok(fsetxattr(file, "user.held", b"value", XattrFlags::empty())?)
    });
}

/// An entry that was registered while the others were busy once got none of the waiting requests.
#[test]
fn over_io_uring_others_are_served_while_calls_wait() {
    let Some(_judges) = judges::require() else { return };
    if let Err(reason) = io_uring::can_be_had() {
        judges::skip(&reason);
        return;
    }
    let _switched = SwitchedOn::new().expect("the switch can be turned");
    others_are_served(Transport::IoUring, File::sync_all);
}
