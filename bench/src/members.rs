//! What more members cost and give: fsync and reads over members that each take time.
//!
//! The members are memory. Each serves one request at a time: a write or a barrier takes the
//! latency, a read takes its bytes divided by the rate. So the figures show which requests wait for
//! each other, and not how fast the machine is. Each turn has new volumes.
//!
//! Before each fsync 1 MiB is appended to a file. The metadata of a volume with one member is DUP,
//! that of the others RAID1. Four readers read a file of their own from its
//! beginning to its end, and compare every byte. The ratios are to the volume with one member.

use std::io::{self, IoSlice, IoSliceMut};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem, MkfsOptions, SubvolumeId, mkfs};
use offshoot_btrfs_format::chunk::Profile;
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_vfs::{EntryPlace, FileId, FileSystem, FileSystemMut, NewFile, Timestamp};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::sides::said;
use crate::table::{median, shown, write_values};
use crate::{BenchOptions, Result};

/// The size of a member.
const MEMBER_BYTES: u64 = 16 << 30;

/// The readers, each of a file of its own.
const READERS: u64 = 4;

/// The length of one read.
const READ_BYTES: usize = 1 << 20;

/// What is appended before each fsync, in bytes: several stripes.
const APPENDED: usize = 1 << 20;

/// The volumes that an fsync runs on: the members, and the profile of the data.
const FSYNC_SHAPES: [(usize, Profile); 5] = [
    (1, Profile::Single),
    (2, Profile::Raid1),
    (2, Profile::Raid0),
    (4, Profile::Raid1),
    (4, Profile::Raid0),
];

/// The volumes that are read.
const READ_SHAPES: [(usize, Profile); 5] = [
    (1, Profile::Single),
    (2, Profile::Raid1),
    (2, Profile::Raid0),
    (4, Profile::Raid10),
    (4, Profile::Raid0),
];

/// The options of a run.
struct MembersJob {
    latency: Duration,
    bytes_per_second: u64,
    fsyncs: u64,
    file_bytes: usize,
    turns: usize,
    dir: Option<PathBuf>,
}

/// Runs the benchmark; `None` for options that it does not know.
pub(crate) fn benchmark(args: &[String]) -> Option<Result> {
    let valued = ["--latency-us", "--rate-mib", "--fsyncs", "--mib", "--turns"];
    let options = BenchOptions::parse(args, &valued, &[])?;
    let (rate, mib) = (options.number("--rate-mib", 200)?, options.number("--mib", 32)?);
    let job = MembersJob {
        latency: Duration::from_micros(options.number("--latency-us", 2000)?),
        bytes_per_second: u64::checked_mul(rate, 1 << 20)?,
        fsyncs: options.number("--fsyncs", 50)?,
        file_bytes: usize::checked_mul(mib, 1 << 20)?,
        turns: options.number("--turns", 3)?,
        dir: options.dir(),
    };
    let is_sane = rate > 0 && (1..=1024).contains(&mib) && job.fsyncs > 0 && job.turns > 0;
    is_sane.then(|| job.run())
}

/// A member that serves one request at a time, each in the time that it takes.
#[derive(Debug)]
struct TimedMember {
    memory: MemoryDevice,
    times: Arc<MemberTimes>,
    turn: Mutex<()>,
}

/// How long the requests of all members take. Both are zero at first.
#[derive(Debug, Default)]
struct MemberTimes {
    /// A write or a barrier, in nanoseconds.
    change: AtomicU64,
    /// A MiB that is read, in nanoseconds.
    read_mib: AtomicU64,
}

impl TimedMember {
    fn take(&self, nanos: u64) {
        if nanos > 0 {
            let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
            std::thread::sleep(Duration::from_nanos(nanos));
        }
    }

    fn change(&self) {
        self.take(self.times.change.load(Ordering::Relaxed));
    }
}

impl offshoot_device::Delegate for TimedMember {
    fn inner(&self) -> &dyn BlockDevice {
        &self.memory
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        BlockDevice::read_vectored_at(self, offset, &mut [IoSliceMut::new(buf)])
    }

    fn read_vectored_at(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        let bytes: u64 = bufs.iter().map(|buf| buf.len() as u64).sum();
        let read_mib = self.times.read_mib.load(Ordering::Relaxed);
        self.take((bytes * read_mib) >> 20);
        self.memory.read_vectored_at(offset, bufs)
    }

    /// A hint that fetches nothing: the members have no cache.
    fn prefetch(&self, _offset: u64, _len: u64) {}

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        BlockDevice::write_vectored_at(self, offset, &[IoSlice::new(buf)])
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        self.change();
        self.memory.write_vectored_at(offset, bufs)
    }

    fn flush(&self) -> io::Result<()> {
        self.change();
        self.memory.flush()
    }
}

/// A volume on timed members.
struct TimedVolume {
    devices: Vec<Arc<dyn BlockDevice>>,
    times: Arc<MemberTimes>,
}

impl TimedVolume {
    fn new(members: usize, data: Profile) -> Result<Self> {
        let times = Arc::<MemberTimes>::default();
        let member = |_| {
            let memory = MemoryDevice::sparse(MEMBER_BYTES);
            let (times, turn) = (times.clone(), Mutex::default());
            Arc::new(TimedMember { memory, times, turn }) as Arc<dyn BlockDevice>
        };
        let devices: Vec<_> = (0..members).map(member).collect();
        let mut options = MkfsOptions::new(Uuid::new_v4(), Timestamp::now());
        options.metadata = Some(if members == 1 { Profile::Dup } else { Profile::Raid1 });
        options.data = Some(data);
        mkfs(&devices, &options).map_err(said)?;
        Ok(Self { devices, times })
    }

    /// Opens it with empty caches.
    fn open(&self) -> Result<Filesystem> {
        let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
        let volume = BtrfsVolume::open_writable(self.devices.clone(), &options);
        volume.and_then(|volume| volume.filesystem(SubvolumeId::FS)).map_err(said)
    }
}

fn create(fs: &Filesystem, name: &str) -> Result<FileId> {
    let at = Timestamp::now();
    let new = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at };
    fs.create(EntryPlace { dir: fs.root(), name: name.as_bytes() }, &new).map_err(said)
}

/// The byte at `at` of the file of a reader.
fn byte(reader: u64, at: usize) -> u8 {
    let sector = u8::try_from(at / 4096 % 251).expect("below 251");
    sector ^ u8::try_from(reader).expect("few") ^ u8::try_from(at % 7).expect("below 7")
}

impl MembersJob {
    fn run(&self) -> Result {
        let mut all = Vec::new();
        println!(
            "{} KiB appended and synced, {} times; a request takes {} us; medians of {} turns",
            APPENDED >> 10,
            self.fsyncs,
            self.latency.as_micros(),
            self.turns
        );
        self.table(&FSYNC_SHAPES, "fsync ms", &mut all, Self::fsyncs)?;
        println!(
            "{READERS} readers of {} MiB each; a member reads {} MiB/s",
            self.file_bytes >> 20,
            self.bytes_per_second >> 20
        );
        self.table(&READ_SHAPES, "MiB/s", &mut all, Self::reads)?;
        self.dir.as_ref().map_or(Ok(()), |dir| write_values(&dir.join("members.json"), all))
    }

    /// Runs `measure` for each shape in turns, and prints the medians.
    fn table(
        &self,
        shapes: &[(usize, Profile)],
        what: &str,
        all: &mut Vec<Value>,
        measure: fn(&Self, usize, Profile) -> Result<f64>,
    ) -> Result {
        let mut figures = vec![Vec::new(); shapes.len()];
        for _ in 0..self.turns {
            for ((members, data), figures) in shapes.iter().zip(&mut figures) {
                let figure = measure(self, *members, *data)?;
                figures.push(figure);
                let profile = data.to_string();
                let run = json!({ "members": members, "data": profile, what: figure });
                all.push(run);
            }
        }
        let medians: Vec<_> = figures.into_iter().map(|one| median(one.into_iter())).collect();
        println!("{:>7} {:>8} {what:>9} {:>8}", "members", "data", "x one");
        for ((members, data), figure) in shapes.iter().zip(&medians) {
            let (ratio, data) = (shown(figure / medians[0], 2), data.to_string());
            println!("{members:>7} {data:>8} {:>9} {ratio:>8}", shown(*figure, 2));
        }
        Ok(())
    }

    /// The mean time of an fsync, in milliseconds.
    fn fsyncs(&self, members: usize, profile: Profile) -> Result<f64> {
        let volume = TimedVolume::new(members, profile)?;
        let fs = volume.open()?;
        let file = create(&fs, "file")?;
        fs.sync().map_err(said)?;
        let nanos = u64::try_from(self.latency.as_nanos()).unwrap_or(u64::MAX);
        volume.times.change.store(nanos, Ordering::Relaxed);
        let data = vec![7; APPENDED];
        let started = Instant::now();
        for number in 0..self.fsyncs {
            fs.write(file, number * APPENDED as u64, &data, Timestamp::now()).map_err(said)?;
            fs.fsync(file).map_err(said)?;
        }
        let seconds = started.elapsed().as_secs_f64();
        volume.times.change.store(0, Ordering::Relaxed);
        let fsyncs = f64::from(u32::try_from(self.fsyncs).unwrap_or(u32::MAX));
        Ok(seconds * 1e3 / fsyncs)
    }

    /// The MiB per second of all readers together.
    fn reads(&self, members: usize, data: Profile) -> Result<f64> {
        let volume = TimedVolume::new(members, data)?;
        let fs = volume.open()?;
        for reader in 0..READERS {
            let file = create(&fs, &format!("file{reader}"))?;
            let bytes: Vec<u8> = (0..self.file_bytes).map(|at| byte(reader, at)).collect();
            fs.write(file, 0, &bytes, Timestamp::now()).map_err(said)?;
        }
        fs.sync().map_err(said)?;
        drop(fs);
        let fs = volume.open()?;
        volume
            .times
            .read_mib
            .store((1 << 20) * 1_000_000_000 / self.bytes_per_second, Ordering::Relaxed);
        let started = Instant::now();
        std::thread::scope(|scope| {
            let fs = &fs;
            let readers: Vec<_> =
                (0..READERS).map(|reader| scope.spawn(move || self.read(fs, reader))).collect();
            let ends = readers.into_iter().map(|reader| {
                reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            ends.collect::<Result<Vec<()>>>()
        })?;
        let seconds = started.elapsed().as_secs_f64();
        let mib = f64::from(u32::try_from(self.file_bytes >> 20).unwrap_or(u32::MAX));
        Ok(mib * f64::from(u32::try_from(READERS).expect("few")) / seconds)
    }

    /// Reads the file of a reader, and compares it.
    fn read(&self, fs: &Filesystem, reader: u64) -> Result {
        let file = fs.lookup(fs.root(), format!("file{reader}").as_bytes()).map_err(said)?;
        let mut buf = vec![0; READ_BYTES];
        for offset in (0..self.file_bytes).step_by(READ_BYTES) {
            let read = fs.read(file, offset as u64, &mut buf).map_err(said)?;
            let is_same = |(at, found): (usize, &u8)| *found == byte(reader, offset + at);
            if read != READ_BYTES || !buf.iter().enumerate().all(is_same) {
                return Err(format!("file{reader} has other bytes from {offset} on"));
            }
        }
        Ok(())
    }
}
