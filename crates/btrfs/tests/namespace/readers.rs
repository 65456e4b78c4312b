//! Reads beside writes, truncations and commits: a read returns what was written, or zeros for a
//! hole.
//!
//! Each file has a writer and a reader. The writer truncates the file, lets it grow, and writes at
//! unaligned offsets; it knows what the file must hold. The reader must find at any moment only
//! bytes that this file may have at that offset. Little may be buffered and commits are frequent,
//! so extents are replaced under the readers all the time.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;

use offshoot_btrfs::{BtrfsVolume, Compress, EngineOptions, Filesystem};
use offshoot_btrfs_format::TreeId;
use offshoot_device::BlockDevice;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::run::run;
use offshoot_testkit::threads::SetOnDrop;
use offshoot_vfs::{FileFlags, FileId, FileSystem, FileSystemMut, SetAttr};

use crate::common::{AT, NEW, at, check, in_memory, place};

const FILES: u8 = 4;

/// Writes and truncations begin below this offset.
const MOST_BYTES: u64 = 300_000;

#[test]
fn readers_beside_cuts() {
    let fs = open(vec![in_memory(4096, 300)]);
    write_and_read(&fs, fs.root());
}

#[test]
fn readers_beside_cuts_of_compressed_files() {
    let compress = Compress { method: "zstd".parse().expect("a method"), is_forced: true };
    let options = EngineOptions { compress: Some(compress), ..options() };
    let fs = open_with(vec![in_memory(4096, 300)], &options);
    write_and_read(&fs, fs.root());
}

#[test]
fn readers_beside_cuts_of_files_that_are_overwritten_in_place() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 300);
    disks.mkfs(&["-n", "4k"]);
    let mount = disks.mount("rw,noatime");
    let dir = mount.path().join("in-place");
    std::fs::create_dir(&dir).expect("a directory");
    run("chattr", &["+C".as_ref(), dir.as_os_str()]);
    drop(mount);
    let fs = open(disks.writable_devices());
    write_and_read(&fs, at(&fs, "in-place"));
    drop(fs);
    check(&disks);
}

fn options() -> EngineOptions {
    EngineOptions {
        dirty_bytes: 1 << 20,
        commit_interval: Some(Duration::from_millis(30)),
        ..EngineOptions::default()
    }
}

fn open(devices: Vec<Arc<dyn BlockDevice>>) -> Filesystem {
    open_with(devices, &options())
}

fn open_with(devices: Vec<Arc<dyn BlockDevice>>, options: &EngineOptions) -> Filesystem {
    let volume = BtrfsVolume::open_writable(devices, options).expect("it opens");
    volume.filesystem(TreeId::FS).expect("the top level")
}

fn write_and_read(fs: &Filesystem, dir: FileId) {
    let seed = seed_of_run();
    let reads = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for number in 0..FILES {
            let name = format!("file{number}");
            let file = fs.create(place(dir, &name), &NEW).expect("a file");
            let random = move |role| Random::new(seed ^ u64::from(number * 2 + role) << 56);
            let is_done = Arc::new(AtomicBool::new(false));
            let (written, reads) = (is_done.clone(), &reads);
            scope.spawn(move || {
                // Also when the writer fails: otherwise the reader would never end.
                let _end = SetOnDrop(&is_done);
                write(fs, file, number, random(0));
            });
            scope.spawn(move || {
                let mut random = random(1);
                while !written.load(Ordering::Relaxed) {
                    read(fs, file, number, &mut random);
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    let reads = reads.into_inner();
    assert!(reads > 100, "{reads} reads show little");
    fs.sync().expect("a commit");
}

/// The byte that a file has at an offset that was written: no other file has this byte anywhere.
fn byte(number: u8, offset: u64) -> u8 {
    (number + 1) * 50 + u8::try_from(offset / 1000 % 49).expect("below 49")
}

fn write(fs: &Filesystem, file: FileId, number: u8, mut random: Random) {
    let index = |n: u64| usize::try_from(n).expect("small");
    let mut model: Vec<u8> = Vec::new();
    for step in 0..3000 {
        match random.below(8) {
            0 | 1 => {
                let most = if random.below(3) == 0 { 3000 } else { MOST_BYTES };
                let size = random.below(most);
                let set = SetAttr { size: Some(size), ..SetAttr::default() };
                fs.set_attr(file, &set, AT).expect("it is cut or grows");
                model.resize(index(size), 0);
            }
            2 if step % 16 == 0 => fs.fsync(file).expect("a commit"),
            3 if step % 64 == 0 => fs.sync().expect("a commit"),
            _ => {
                let offset = random.below(MOST_BYTES);
                let most = [10, 3000, 9000, 100_000][index(random.below(4))];
                let end = offset + 1 + random.below(most);
                let data: Vec<_> = (offset..end).map(|at| byte(number, at)).collect();
                fs.write(file, offset, &data, AT).expect("there is room");
                model.resize(model.len().max(index(end)), 0);
                model[index(offset)..index(end)].copy_from_slice(&data);
            }
        }
        if step % 7 == 0 {
            let mut found = vec![9; model.len() + 5];
            let len = fs.read(file, 0, &mut found).expect("it reads");
            assert_eq!(len, model.len(), "file {number}, step {step}");
            assert!(found[..len] == model[..], "file {number}, step {step}");
        }
    }
}

fn read(fs: &Filesystem, file: FileId, number: u8, random: &mut Random) {
    let offset = random.below(MOST_BYTES);
    let len = usize::try_from(1 + random.below(MOST_BYTES)).expect("small");
    let mut found = vec![9; len];
    let len = fs.read(file, offset, &mut found).expect("it reads");
    for (at, &found) in (offset..).zip(&found[..len]) {
        assert!(found == 0 || found == byte(number, at), "file {number} has {found} at {at}");
    }
    fs.next_data(file, offset).expect("it is looked for");
}

/// The size of tree blocks in bytes: a longer read is a read of data.
const NODE_SIZE: u32 = 4096;

/// The most reads that are disturbed. A reader that would be put off for ever ends then.
const MOST_READS: u64 = 200;

/// A device that makes a commit whenever the reader reads a piece.
#[derive(Debug)]
struct CommittingDevice {
    below: Arc<dyn BlockDevice>,
    reader: Mutex<Option<ThreadId>>,
    volume: OnceLock<Weak<BtrfsVolume>>,
    /// How many pieces had been read while commits waited, when the last one was read.
    held: AtomicU64,
    reads: AtomicU64,
    commits: Mutex<Vec<JoinHandle<()>>>,
}

impl CommittingDevice {
    /// Has another thread change the volume and commit. Waits for that, unless the commit waits for
    /// this read.
    fn disturb(&self) {
        let volume = self.volume.get().and_then(Weak::upgrade).expect("it is open");
        let before = volume.stats();
        let committer = volume.clone();
        self.commits.lock().expect("no panic").push(std::thread::spawn(move || {
            let fs = committer.filesystem(TreeId::FS).expect("the top level");
            fs.set_attr(fs.root(), &SetAttr::default(), AT).expect("a change");
            fs.sync().expect("a commit");
        }));
        if self.held.swap(before.reads_held, Ordering::Relaxed) < before.reads_held {
            return;
        }
        while volume.stats().commits == before.commits {
            std::thread::yield_now();
        }
    }
}

impl offshoot_device::Delegate for CommittingDevice {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.below
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<()> {
        let is_reader = *self.reader.lock().expect("no panic") == Some(std::thread::current().id());
        let is_data = buf.len() > NODE_SIZE as usize;
        if is_reader && is_data && self.reads.fetch_add(1, Ordering::Relaxed) < MOST_READS {
            self.disturb();
        }
        self.inner().read_at(offset, buf)
    }
}

/// Regression: commits without a pause put off a reader without bound: we saw 54 tries for one
/// piece.
#[test]
fn a_reader_beside_a_busy_committer_is_put_off_a_few_times() {
    let busy = Arc::new(CommittingDevice {
        below: in_memory(NODE_SIZE, 300),
        reader: Mutex::default(),
        volume: OnceLock::new(),
        held: AtomicU64::new(0),
        reads: AtomicU64::new(0),
        commits: Mutex::default(),
    });
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(vec![busy.clone()], &options).expect("it opens");
    busy.volume.set(Arc::downgrade(&volume)).expect("it is set once");
    let fs = volume.filesystem(TreeId::FS).expect("the top level");
    let mut random = Random::new(seed_of_run());
    // Uncompressed data is read in pieces of 1 MiB, compressed data in extents of 128 KiB.
    for (name, data, pieces) in
        [("plain", random.bytes(4 << 20), 4), ("compressed", random.text(1 << 20), 8)]
    {
        let file = fs.create(place(fs.root(), name), &NEW).expect("a file");
        if name == "compressed" {
            fs.set_flags(file, FileFlags::COMPRESS, AT).expect("flags");
        }
        fs.write(file, 0, &data, AT).expect("there is room");
        fs.sync().expect("a commit");
        let before = volume.stats();
        busy.reads.store(0, Ordering::Relaxed);
        busy.held.store(before.reads_held, Ordering::Relaxed);
        *busy.reader.lock().expect("no panic") = Some(std::thread::current().id());
        let mut found = vec![0; data.len()];
        let read = fs.read(file, 0, &mut found).expect("it reads");
        *busy.reader.lock().expect("no panic") = None;
        for commit in busy.commits.lock().expect("no panic").drain(..) {
            commit.join().expect("it commits");
        }
        assert!(read == data.len() && found == data, "{name}: something else is read");
        let (reads, now) = (busy.reads.load(Ordering::Relaxed), volume.stats());
        let held = now.reads_held - before.reads_held;
        let put_off = now.reads_put_off - before.reads_put_off;
        assert!(reads <= 3 * pieces, "{name}: {reads} reads of {pieces} pieces");
        assert!((1..=pieces).contains(&held), "{name}: {held} of {pieces} were held");
        assert!(put_off <= 2 * pieces, "{name}: {put_off} times of {pieces} pieces");
    }
    drop((fs, volume));
}
