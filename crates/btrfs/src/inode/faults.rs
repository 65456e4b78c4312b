//! Reads that fail in the middle of an operation. Afterwards the operation is done completely, or
//! not at all, or writing has ended.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;

use offshoot_btrfs_format::TreeId;
use offshoot_device::{BlockDevice, Fault, FaultDevice, RequestKind};
use offshoot_testkit::btrfs::checked::CheckedDevice;
use offshoot_vfs::{
    EntryPlace, Errno, FileId, FileSystem, FileSystemMut, NewFile, Result, SetAttr, Timestamp,
};

use crate::test_volumes::in_memory;
use crate::transaction::LiveVolume;
use crate::{BtrfsVolume, EngineOptions, Filesystem};

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };
const FILE: EntryPlace<'_> = EntryPlace { dir: FileId { dev: 5, ino: 256 }, name: b"file" };

/// How often the engine reads a block that never reads: it tries each of two copies twice.
const TRIES: u64 = 4;

/// Opens the volume for writing without a thread of its own and with the smallest cache.
fn open(device: Arc<dyn BlockDevice>) -> Filesystem {
    let options =
        EngineOptions { commit_interval: None, cache_bytes: 0, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(vec![device], &options).expect("it opens");
    volume.filesystem(TreeId::FS).expect("every volume has one")
}

/// The length of the file, its allocated bytes and its data; `None` when it does not exist.
type FileState = Option<(u64, u64, Vec<u8>)>;

fn state(fs: &Filesystem) -> FileState {
    let file = fs.lookup(FILE.dir, FILE.name).ok()?;
    let attr = fs.attr(file).expect("it has attributes");
    let mut data = vec![0; usize::try_from(attr.size).expect("it is small")];
    let mut at = 0;
    while at < data.len() {
        at += fs.read(file, at as u64, &mut data[at..]).expect("it reads");
    }
    Some((attr.size, attr.allocated_bytes, data))
}

/// Runs the operation once for each of its reads, and lets that read fail on all copies. `prepare`
/// fills the file.
fn try_every_read(
    prepare: impl Fn(&Filesystem, FileId),
    operation: impl Fn(&Filesystem, FileId) -> Result<()>,
) {
    let memory = in_memory(4096);
    let fs = open(memory.clone());
    let file = fs.create(FILE, &NEW).expect("there is room");
    prepare(&fs, file);
    fs.sync().expect("a commit");
    let before = state(&fs);
    drop(fs);
    let mut seen = HashSet::new();
    let mut run = |read: Option<u64>| {
        let below = Arc::new(CheckedDevice::over(memory.clone()));
        let device = Arc::new(FaultDevice::new(below.clone()));
        let fs = open(device.clone());
        // The first change of a subvolume reads more. It happens here, before the reads are
        // counted.
        fs.create(EntryPlace { name: b"other", ..FILE }, &NEW).expect("there is room");
        let first = device.count(RequestKind::Reads);
        for read in read.into_iter().flat_map(|read| read..read + TRIES) {
            device.strike(RequestKind::Reads, first + read, Fault::Error);
        }
        let outcome = operation(&fs, file);
        let reads = device.count(RequestKind::Reads) - first;
        let is_whole = fs.volume().live().and_then(LiveVolume::require_writing).is_ok();
        let is_written = fs.sync().is_ok();
        assert!(is_whole || !is_written, "a commit of what is half done");
        drop(fs);
        let state = state(&open(below.clone()));
        let mut hasher = DefaultHasher::new();
        below.hash_changes(&mut hasher);
        if !seen.insert(hasher.finish()) {
            below.leave_unchecked("it was as it is now before");
        }
        (reads, outcome, is_whole, is_written, state)
    };
    let (reads, outcome, .., after) = run(None);
    outcome.expect("nothing fails");
    assert_ne!(before, after);
    let mut broken = 0;
    for read in 0..reads {
        let (_, outcome, is_whole, is_written, now) = run(Some(read));
        assert!(is_whole || outcome.is_err(), "read {read}: who did it is told");
        let is_done = is_written && now == after;
        assert!(is_done || now == before, "read {read}: half of it was done, {outcome:?}");
        assert!(is_done || outcome.is_err() || !is_written, "read {read}: it was not done");
        broken += u64::from(!is_whole);
    }
    assert!(0 < broken && broken < reads, "{broken} of {reads} broke the volume off");
}

/// 400 extents of a sector, with a hole behind each.
fn scattered(fs: &Filesystem, file: FileId) {
    for extent in 0..400 {
        fs.write(file, extent * 8192, &[7; 4096], AT).expect("there is room");
    }
}

/// When the inode could not be read after the extents were removed, it still counted them.
#[test]
fn a_cut_is_done_or_not() {
    try_every_read(scattered, |fs, file| {
        fs.set_attr(file, &SetAttr { size: Some(370 * 8192), ..SetAttr::default() }, AT)
    });
}

/// The same for inline data.
#[test]
fn inline_data_is_replaced_or_not() {
    let prepare = |fs: &Filesystem, file| {
        fs.write(file, 0, &[7; 1000], AT).expect("there is room");
        for name in 0..100 {
            let name = format!("beside-{name}");
            let place = EntryPlace { name: name.as_bytes(), ..FILE };
            fs.create(place, &NEW).expect("there is room");
        }
    };
    try_every_read(prepare, |fs, file| {
        fs.write(file, 0, &[8; 1500], AT)?;
        super::write_back::sync_file(fs.volume(), file)
    });
}

/// The name is removed, or it stays with the file. When a later step of the removal failed, the
/// name was gone and `unlink` returned an error.
#[test]
fn a_file_is_gone_or_not() {
    try_every_read(scattered, |fs, _| {
        let gone = fs.unlink(FILE, AT);
        let found = fs.lookup(FILE.dir, FILE.name);
        let is_gone = found.is_err_and(|error| error.errno() == Errno::NOENT);
        let is_whole = fs.volume().live().and_then(LiveVolume::require_writing).is_ok();
        assert!(gone.is_ok() || !is_gone || !is_whole, "it is gone, and was it not? {gone:?}");
        gone
    });
}
