//! An explorer that finds nothing proves nothing: engines that are broken on purpose must be
//! caught.

use std::io;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use offshoot_btrfs_format::superblock::SUPERBLOCK_OFFSETS;
use offshoot_device::{BlockDevice, CrashPlan};
use offshoot_testkit::crash::explore::StateExplorer;
use offshoot_testkit::crash::generate::Generator;
use offshoot_testkit::crash::{
    MemberDevices, OpenedVolume, TestedEngine, Workload, WorkloadOp, WorkloadStep,
};
use offshoot_vfs::{
    Attr, Dedupe, DirEntry, EntryPlace, Fallocate, FileFlags, FileId, FilePosition, FileSystem,
    FileSystemMut, NewFile, NewNode, Parent, Rename, Result, SetAttr, StatFs, Timestamp, XattrMode,
};

use crate::engine::{ONE, OURS, volume};
use crate::plan;

/// A barrier, by its purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Barrier {
    /// Before a superblock: for the blocks that the superblock leads to.
    Before,
    /// After a superblock.
    Behind,
}

/// A device that leaves barriers of one kind out.
#[derive(Debug)]
struct LazyBarriers {
    below: Arc<dyn BlockDevice>,
    left_out: Barrier,
    /// Whether a primary superblock was written since the last barrier.
    is_behind: AtomicBool,
}

impl offshoot_device::Delegate for LazyBarriers {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.below
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        if offset == SUPERBLOCK_OFFSETS[0] {
            self.is_behind.store(true, Ordering::Relaxed);
        }
        self.inner().write_at(offset, buf)
    }

    fn flush(&self) -> io::Result<()> {
        let is_behind = self.is_behind.swap(false, Ordering::Relaxed);
        let barrier = if is_behind { Barrier::Behind } else { Barrier::Before };
        if barrier == self.left_out { Ok(()) } else { self.inner().flush() }
    }
}

/// Our engine without barriers of one kind.
struct WithoutBarriers(Barrier);

impl TestedEngine for WithoutBarriers {
    fn open(&self, devices: MemberDevices) -> Result<OpenedVolume> {
        OURS.open(devices)
    }

    fn open_writable(&self, devices: MemberDevices) -> Result<OpenedVolume> {
        let lazy = |below| {
            let is_behind = AtomicBool::new(false);
            Arc::new(LazyBarriers { below, left_out: self.0, is_behind }) as Arc<_>
        };
        OURS.open_writable(devices.into_iter().map(lazy).collect())
    }

    fn check(&self, devices: MemberDevices) -> Result<()> {
        OURS.check(devices)
    }
}

/// Our engine with an `fsync` that reports success and does nothing.
struct PretendedFsync;

impl TestedEngine for PretendedFsync {
    fn open(&self, devices: MemberDevices) -> Result<OpenedVolume> {
        OURS.open(devices)
    }

    fn open_writable(&self, devices: MemberDevices) -> Result<OpenedVolume> {
        let OpenedVolume { files, subvolumes, survived } = OURS.open_writable(devices)?;
        Ok(OpenedVolume { files: Box::new(WithoutFsync(files)), subvolumes, survived })
    }

    fn check(&self, devices: MemberDevices) -> Result<()> {
        OURS.check(devices)
    }
}

/// A filesystem that does nothing on `fsync`.
struct WithoutFsync(Box<dyn FileSystemMut>);

/// Methods that go to the filesystem below.
macro_rules! pass_on {
    ($(fn $name:ident($($argument:ident: $kind:ty),*) -> $outcome:ty;)*) => {$(
        fn $name(&self, $($argument: $kind),*) -> $outcome {
            self.0.$name($($argument),*)
        }
    )*};
}

impl FileSystem for WithoutFsync {
    pass_on! {
        fn root() -> FileId;
        fn statfs() -> Result<StatFs>;
        fn lookup(dir: FileId, name: &[u8]) -> Result<FileId>;
        fn parent(dir: FileId) -> Result<Option<Parent>>;
        fn attr(file: FileId) -> Result<Attr>;
        fn flags(file: FileId) -> Result<FileFlags>;
        fn read_dir(
            dir: FileId,
            after: u64,
            visit: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>
        ) -> Result<()>;
        fn read_link(file: FileId) -> Result<Vec<u8>>;
        fn xattr(file: FileId, name: &[u8]) -> Result<Vec<u8>>;
        fn xattrs(
            file: FileId,
            visit: &mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>
        ) -> Result<()>;
        fn read(file: FileId, offset: u64, buf: &mut [u8]) -> Result<usize>;
        fn read_data(
            file: FileId,
            range: Range<u64>,
            visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>
        ) -> Result<()>;
        fn next_data(file: FileId, offset: u64) -> Result<Option<Range<u64>>>;
        fn prefetch(files: &[FileId]) -> ();
    }
}

impl FileSystemMut for WithoutFsync {
    pass_on! {
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
        fn fallocate(
            file: FileId,
            what: Fallocate,
            offset: u64,
            len: u64,
            at: Timestamp
        ) -> Result<()>;
        fn clone_range(from: FilePosition, to: FilePosition, len: u64, at: Timestamp) -> Result<()>;
        fn dedupe_range(from: FilePosition, to: FilePosition, len: u64) -> Result<Dedupe>;
        fn copy_range(from: FilePosition, to: FilePosition, len: u64, at: Timestamp) -> Result<u64>;
        fn set_xattr(
            file: FileId,
            name: &[u8],
            value: &[u8],
            mode: XattrMode,
            at: Timestamp
        ) -> Result<()>;
        fn remove_xattr(file: FileId, name: &[u8], at: Timestamp) -> Result<()>;
        fn open(file: FileId) -> Result<()>;
        fn release(file: FileId) -> Result<()>;
        fn sync() -> Result<()>;
    }

    fn fsync(&self, _: FileId) -> Result<()> {
        Ok(())
    }
}

/// What the explorer reports about this engine.
fn explored(engine: &dyn TestedEngine, workload: &Workload) -> std::result::Result<(), String> {
    // A cut may lose every write between two barriers that has another copy.
    let plan = CrashPlan { exhaustive_limit: 7, ..plan(7) };
    let explorer = StateExplorer { engine, image: volume(7, ONE), plan, judge: None };
    explorer.explore(workload).map(drop)
}

/// What the explorer reports about the first workload of one operation that ends with such a step.
fn caught(engine: &dyn TestedEngine, ends: fn(&WorkloadStep) -> bool) -> String {
    let generator = Generator::default();
    let mut all = (0..generator.ones()).map(|number| generator.one(number));
    let workload = all.find(|one| one.steps.last().is_some_and(ends)).expect("there is one");
    explored(engine, &workload).expect_err("it is broken")
}

fn is_fsync(step: &WorkloadStep) -> bool {
    matches!(step, WorkloadStep::Fsync(_))
}

fn is_sync(step: &WorkloadStep) -> bool {
    *step == WorkloadStep::Sync
}

#[test]
fn a_superblock_without_a_barrier_before_it_is_found() {
    for ends in [is_fsync, is_sync] {
        let problem = caught(&WithoutBarriers(Barrier::Before), ends);
        assert!(problem.contains("tree block"), "{problem}");
    }
}

#[test]
fn a_superblock_without_a_barrier_behind_it_is_found() {
    for ends in [is_fsync, is_sync] {
        let problem = caught(&WithoutBarriers(Barrier::Behind), ends);
        assert!(problem.contains("lost"), "{problem}");
    }
}

/// The fault is found whatever operation comes before the fsync, because only the fsync makes it
/// durable.
#[test]
fn an_fsync_that_does_nothing_is_found() {
    let generator = Generator::default();
    let (mut all, mut missed) = (0, Vec::new());
    let ones = (0..generator.ones()).step_by(7).map(|number| generator.one(number));
    // A deduplicated file holds the same bytes as before, and a synchronous file needs no fsync.
    let is_promised = |workload: &Workload| {
        !workload.has(|op| match op {
            WorkloadOp::Dedupe(_) => true,
            WorkloadOp::SetFlags(_, flags) => {
                flags.intersects(FileFlags::SYNC | FileFlags::DIRSYNC)
            }
            _ => false,
        })
    };
    for workload in ones.filter(Workload::ends_with_fsync).filter(is_promised) {
        all += 1;
        missed.extend(explored(&PretendedFsync, &workload).is_ok().then(|| workload.to_string()));
    }
    println!("{} of {all} were missed", missed.len());
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}
