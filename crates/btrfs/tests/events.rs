//! The `tracing` events of the engine, as a program that embeds it gets them with a subscriber of
//! its own.

use std::sync::{Arc, Mutex};

use offshoot_btrfs::{BtrfsVolume, EVENT_TARGETS, EngineOptions, MkfsOptions, SubvolumeId, mkfs};
use offshoot_device::{BlockDevice, Fault, FaultDevice, MemoryDevice};
use offshoot_vfs::{EntryPlace, FileSystem, FileSystemMut, NewFile, Timestamp};
use tracing_subscriber::fmt::MakeWriter;
use uuid::Uuid;

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };

/// The lines that a subscriber wrote.
#[derive(Clone, Default)]
struct EventLines(Arc<Mutex<Vec<String>>>);

impl std::io::Write for EventLines {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").push(String::from_utf8_lossy(line).into_owned());
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for EventLines {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

impl EventLines {
    /// Requires that lines with these texts come one after the other, maybe with others between.
    #[track_caller]
    fn have_in_order(&self, texts: &[&str]) {
        let lines = self.0.lock().expect("no panic");
        let mut left = lines.iter();
        for text in texts {
            assert!(left.any(|line| line.contains(text)), "{text:?} is not next in {lines:#?}");
        }
    }
}

/// Calls `work` with all events of this thread going to lines.
fn recorded(work: impl FnOnce()) -> EventLines {
    let lines = EventLines::default();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .without_time()
        .with_writer(lines.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, work);
    lines
}

#[test]
fn a_commit_and_an_fsync_tell_their_phases_in_order() {
    let memory = Arc::new(MemoryDevice::sparse(1 << 30));
    let faulty = Arc::new(FaultDevice::new(memory.clone()));
    let device: Arc<dyn BlockDevice> = faulty.clone();
    mkfs(std::slice::from_ref(&device), &MkfsOptions::new(Uuid::from_u128(7), AT))
        .expect("a volume");
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let lines = recorded(|| {
        let volume = BtrfsVolume::open_writable(vec![device], &options).expect("it opens");
        let fs = volume.filesystem(SubvolumeId::FS).expect("its files");
        let place = |name: &'static [u8]| EntryPlace { dir: fs.root(), name };
        let file = fs.create(place(b"file"), &NEW).expect("a file");
        fs.write(file, 0, &vec![7; 100_000], AT).expect("data");
        fs.sync().expect("a commit");
        fs.write(file, 0, b"new", AT).expect("data");
        fs.fsync(file).expect("a log");
        fs.mkdir(place(b"dir"), &NEW).expect("a directory");
        fs.sync().expect("a commit");
        fs.rename(place(b"dir"), place(b"moved"), AT).expect("it moves");
        fs.write(file, 0, b"newer", AT).expect("data");
        fs.fsync(file).expect("a commit");
        faulty.add(0..memory.size_bytes(), Fault::Error);
        fs.mkdir(place(b"lost"), &NEW).expect("a directory");
        fs.sync().expect_err("the device fails");
    });
    lines.have_in_order(&[
        " INFO btrfs::open: opened ",
        "DEBUG btrfs::reclaim: waiting for space ",
        "DEBUG btrfs::reclaim: making room ",
        "DEBUG btrfs::reclaim: a flush state begins ",
        "DEBUG btrfs::reclaim: the wait for space has ended ",
        "DEBUG btrfs::writeback: write-back begins why=\"of all files\" buffered=102400",
        "TRACE btrfs::writeback: storing a run ",
        "DEBUG btrfs::writeback: write-back has ended buffered=0 ",
        "DEBUG btrfs::commit: waiting until no other thread commits",
        "DEBUG btrfs::commit: a commit begins generation=2 cause=Asked",
        "DEBUG btrfs::commit: waiting until all operations under way have ended",
        "DEBUG btrfs::commit: no operation is under way",
        "DEBUG btrfs::commit: operations go on ",
        "DEBUG btrfs::commit: writing tree blocks generation=2 blocks=",
        "DEBUG btrfs::device: waiting for the barrier ",
        "DEBUG btrfs::device: writing superblocks generation=2",
        "DEBUG btrfs::device: the barrier is done ",
        "DEBUG btrfs::commit: freeing what it gave up generation=2 bytes=",
        " INFO btrfs::commit: committed generation=2 cause=Asked us=",
        "DEBUG btrfs::log: fsync subvolume=5 ",
        "DEBUG btrfs::log: writing the log transaction=3 batch=1 blocks=",
        "DEBUG btrfs::log: the log is on the devices batch=1 us=",
        "DEBUG btrfs::log: fsync is done without a commit ",
        " INFO btrfs::commit: committed generation=3 cause=Asked us=",
        " INFO btrfs::log: fsync makes a commit inode=257 reason=DirectoryMoved",
        " INFO btrfs::commit: committed generation=4 cause=Fsync us=",
        " WARN btrfs::report: ",
        " INFO btrfs::open: closing ",
    ]);
    let lines = lines.0.lock().expect("no panic");
    let is_known = |line: &String| {
        let target = line.split_whitespace().nth(1).and_then(|word| word.strip_suffix(':'));
        target.is_some_and(|target| EVENT_TARGETS.contains(&target))
    };
    assert!(lines.iter().all(is_known), "{lines:#?}");
}
