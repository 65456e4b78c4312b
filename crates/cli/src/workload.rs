//! The workloads that measure the engine. They run on anything in which files can be made.
//!
//! ```text
//! fs-mark   thread 1:  d1/6560f3a1~~~~~~~~K3Q0..., ...   round after round: all threads begin a round
//!           thread N:  dN/6560f3a1~~~~~~~~Z81B..., ...   together, and it is over when the last one is done
//!
//! enospc    filler/0:  data, until 2 MiB of it are left
//!           worker 1:  d1/file_0, d1/file_1, ...         until there is no space, then all are removed,
//!           worker N:  dN/file_0, dN/file_1, ...         by each worker its own
//!
//! dir-fsync d1/file_1, d1/file_2, ...                    then fsync of d1 and a sync; every so many files are
//!                                                        removed, and then fsync of d1 again
//! ```
//!
//! *fs-mark* does what the program `fs_mark` does with `-S 0 -k -L ROUNDS -n FILES -s SIZE` and a
//! directory for each thread. Its names have 40 bytes: the time in hexadecimal seconds, padded with
//! `~` to 16 bytes, and 24 random letters and digits. Here the time is that of the start of the
//! run, not of each file, so all names follow from that time and the seed. *enospc* is the test
//! case of the patch set that brought tickets to the kernel. Its writes are all buffered, or every
//! second file is written directly. *dir-fsync* is the test case of the patch that made the
//! kernel's tree log copy many items at once.
//!
//! A file is *acknowledged* when all calls for it have succeeded. If a file cannot be written for
//! lack of space, the workload removes it again at once. So at the end exactly the acknowledged
//! files exist.
//!
//! This file depends on nothing else in the program: the benchmarks of the kernel, and the tests,
//! include it as it is.

use std::time::{Duration, Instant};

/// How much is written in one call, in bytes, as in `fs_mark`.
const WRITE_BYTES: usize = 16 << 10;

/// How much space the filler of *enospc* leaves for data, in bytes.
const DATA_LEFT_BYTES: u64 = 2 << 20;

/// How much the filler writes at a time, in bytes.
const FILLER_BYTES: usize = 1 << 20;

/// A filesystem in which a workload makes files.
pub(crate) trait Site: Sync {
    /// A directory.
    type Dir: Sync;
    /// An open file.
    type File;
    /// The error of a failed call.
    type Error: Send;

    /// Makes a directory below the root.
    fn make_dir(&self, name: &str) -> Result<Self::Dir, Self::Error>;
    /// Makes a file.
    fn create(&self, dir: &Self::Dir, name: &[u8]) -> Result<Self::File, Self::Error>;
    /// Writes to a file at `offset`.
    fn write(&self, file: &Self::File, offset: u64, data: &[u8]) -> Result<(), Self::Error>;
    /// Like `write`, but when it returns, no data of the file is only in memory.
    fn write_direct(&self, file: &Self::File, offset: u64, data: &[u8]) -> Result<(), Self::Error>;
    /// Removes a file.
    fn remove(&self, dir: &Self::Dir, name: &[u8]) -> Result<(), Self::Error>;
    /// Makes a directory and the names in it durable.
    fn fsync_dir(&self, dir: &Self::Dir) -> Result<(), Self::Error>;
    /// How many bytes of data can still be written.
    fn available_bytes(&self) -> Result<u64, Self::Error>;
    /// Makes everything durable.
    fn sync(&self) -> Result<(), Self::Error>;
    /// Whether the error means that there is no space.
    fn is_no_space(error: &Self::Error) -> bool;
}

/// The work of a phase of a workload, and how long it took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Round {
    /// How many files were made or removed.
    pub(crate) files: u64,
    /// The time from the start until the last thread was done.
    pub(crate) time: Duration,
}

/// The name of the directory of a thread or worker. The first one is 0.
pub(crate) fn dir_name(thread: u64) -> String {
    format!("d{}", thread + 1)
}

/// The names that one thread uses, in order.
pub(crate) struct WorkloadNames {
    random: u64,
    name: [u8; 40],
}

impl WorkloadNames {
    /// The names of a thread, in a run with this seed that began at this second.
    pub(crate) fn new(seed: u64, began_secs: u64, thread: u64) -> Self {
        let mut name = [b'~'; 40];
        let time = format!("{began_secs:x}");
        name[..time.len()].copy_from_slice(time.as_bytes());
        // The starts are far apart, so that no two threads use the same numbers.
        Self { random: seed ^ (thread + 1) << 48, name }
    }

    /// The next name.
    pub(crate) fn next(&mut self) -> &[u8; 40] {
        const LETTERS: &[u8; 36] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ";
        // A number of 64 bits gives twelve random digits to the base of 36.
        for half in self.name[16..].chunks_mut(12) {
            self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut number = self.random;
            number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            number ^= number >> 31;
            for letter in half {
                *letter = LETTERS[(number % 36) as usize];
                number /= 36;
            }
        }
        &self.name
    }
}

/// The contents of files: the name, as far as it fits, and then always the same bytes.
pub(crate) struct WorkloadContent(Vec<u8>);

impl WorkloadContent {
    /// The contents of files of `size` bytes.
    pub(crate) fn new(size: usize) -> Self {
        Self((0..=250u8).cycle().take(size).collect())
    }

    /// The contents of the file called `name`. All names must have the same length.
    pub(crate) fn of(&mut self, name: &[u8]) -> &[u8] {
        let named = self.0.len().min(name.len());
        self.0[..named].copy_from_slice(&name[..named]);
        &self.0
    }
}

/// Makes many small files, and measures how many per second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FsMark {
    pub(crate) threads: u64,
    /// How many files each thread makes in a round.
    pub(crate) files: u64,
    pub(crate) rounds: u64,
    /// The size of each file, in bytes.
    pub(crate) size: usize,
    /// The seed of the names.
    pub(crate) seed: u64,
    /// The start of the run in seconds since 1970, which is part of the names.
    pub(crate) began_secs: u64,
    /// Each thread makes the files of each round in a new directory.
    pub(crate) has_new_dirs: bool,
}

/// The state of one thread of *fs-mark* between rounds.
struct FsMarkThread<D> {
    dir: D,
    names: WorkloadNames,
    content: WorkloadContent,
}

impl FsMark {
    /// The size in bytes of an image with ample room: for each file 16 KiB of metadata (eight times
    /// its items in half-full leaves) and twice its data, rounded up to whole GiB, and 1 GiB more.
    /// `None` if the files need 1 PiB or more.
    pub(crate) fn image_bytes(&self) -> Option<u64> {
        const METADATA_BYTES: u64 = 16 << 10;
        let each = METADATA_BYTES + 2 * (self.size as u64).next_multiple_of(4096);
        let files = self.threads.checked_mul(self.files)?.checked_mul(self.rounds)?;
        let bytes = files.checked_mul(each).filter(|&bytes| bytes < 1 << 50)?;
        Some((1 << 30) + bytes.next_multiple_of(1 << 30))
    }

    /// Makes the files, and then makes them durable. Returns all rounds, and how long the sync
    /// took.
    pub(crate) fn run<S: Site>(&self, site: &S) -> Result<(Vec<Round>, Duration), S::Error>
    where
        S::Dir: Send,
    {
        let maker = |thread| {
            let dir = site.make_dir(&dir_name(thread))?;
            let names = WorkloadNames::new(self.seed, self.began_secs, thread);
            Ok(FsMarkThread { dir, names, content: WorkloadContent::new(self.size) })
        };
        let mut makers = (0..self.threads).map(maker).collect::<Result<Vec<_>, S::Error>>()?;
        let mut rounds = Vec::new();
        for round in 1..=self.rounds {
            if self.has_new_dirs && round > 1 {
                for (thread, maker) in (0..).zip(&mut makers) {
                    maker.dir = site.make_dir(&format!("{}-{round}", dir_name(thread)))?;
                }
            }
            rounds.push(together(&mut makers, |maker| {
                for _ in 0..self.files {
                    let name = maker.names.next();
                    let file = site.create(&maker.dir, name)?;
                    write_all(site, &file, maker.content.of(name))?;
                }
                Ok(self.files)
            })?);
        }
        Ok((rounds, timed_sync(site)?))
    }
}

/// Makes files until there is no space.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Enospc {
    pub(crate) workers: u64,
    /// The size of each file, in bytes.
    pub(crate) size: usize,
    /// Every second file is written directly.
    pub(crate) is_half_direct: bool,
}

/// The state of one worker of *enospc*.
pub(crate) struct Worker<D> {
    dir: D,
    /// How many of its files are acknowledged.
    pub(crate) files: u64,
}

impl Enospc {
    /// The name of a worker's file with this number.
    pub(crate) fn name(number: u64) -> String {
        format!("file_{number}")
    }

    /// Fills the space for data, and makes that durable.
    pub(crate) fn prepare<S: Site>(site: &S) -> Result<(), S::Error> {
        let dir = site.make_dir("filler")?;
        let file = site.create(&dir, b"0")?;
        let data = vec![b'f'; FILLER_BYTES];
        let mut offset = 0;
        // The available space is exact only when no change is pending.
        loop {
            let available = site.available_bytes()?.saturating_sub(DATA_LEFT_BYTES);
            let end = offset + available / 4096 * 4096;
            if end == offset {
                return Ok(());
            }
            while offset < end {
                let len =
                    usize::try_from(end - offset).map_or(data.len(), |left| left.min(data.len()));
                match site.write(&file, offset, &data[..len]) {
                    Err(error) if S::is_no_space(&error) => return site.sync(),
                    written => written?,
                }
                offset += len as u64;
            }
            site.sync()?;
        }
    }

    /// The workers, each with an empty directory.
    pub(crate) fn workers<S: Site>(self, site: &S) -> Result<Vec<Worker<S::Dir>>, S::Error> {
        let worker = |worker| Ok(Worker { dir: site.make_dir(&dir_name(worker))?, files: 0 });
        (0..self.workers).map(worker).collect()
    }

    /// Makes files until each worker has got the error that there is no space.
    pub(crate) fn fill<S: Site>(
        self,
        site: &S,
        workers: &mut [Worker<S::Dir>],
    ) -> Result<Round, S::Error>
    where
        S::Dir: Send,
    {
        together(workers, |worker| {
            while self.make_one(site, worker)? {
                worker.files += 1;
            }
            Ok(worker.files)
        })
    }

    /// Makes the next file. Returns `false` if there is no space.
    fn make_one<S: Site>(self, site: &S, worker: &Worker<S::Dir>) -> Result<bool, S::Error> {
        let name = Self::name(worker.files);
        let file = match site.create(&worker.dir, name.as_bytes()) {
            Err(error) if S::is_no_space(&error) => return Ok(false),
            created => created?,
        };
        let mut content = WorkloadContent::new(self.size);
        let data = content.of(name.as_bytes());
        let written = if self.is_half_direct && worker.files % 2 == 1 {
            site.write_direct(&file, 0, data)
        } else {
            write_all(site, &file, data)
        };
        match written {
            Err(error) if S::is_no_space(&error) => {
                site.remove(&worker.dir, name.as_bytes())?;
                Ok(false)
            }
            written => written.map(|()| true),
        }
    }

    /// Removes the files of the workers.
    pub(crate) fn remove<S: Site>(
        site: &S,
        workers: &mut [Worker<S::Dir>],
    ) -> Result<Round, S::Error>
    where
        S::Dir: Send,
    {
        together(workers, |worker| {
            for number in 0..worker.files {
                site.remove(&worker.dir, Self::name(number).as_bytes())?;
            }
            Ok(worker.files)
        })
    }
}

/// Makes a large directory and syncs it by itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirFsync {
    /// How many empty files are made.
    pub(crate) files: u64,
    /// How many of them are removed.
    pub(crate) deletes: u64,
}

impl DirFsync {
    /// The names of its phases, in order.
    pub(crate) const PHASES: [&'static str; 5] = ["add", "fsync 1", "sync 1", "remove", "fsync 2"];

    /// The name of a file. The first one is 1.
    pub(crate) fn name(number: u64) -> String {
        format!("file_{number}")
    }

    /// Whether the file with this number is removed.
    pub(crate) fn removes(self, number: u64) -> bool {
        let every = self.files.checked_div(self.deletes);
        every.is_some_and(|every| (number - 1).is_multiple_of(every.max(1)))
    }

    /// Runs all phases. Returns how long each took, and how long the sync at the end took.
    pub(crate) fn run<S: Site>(self, site: &S) -> Result<(Vec<Round>, Duration), S::Error> {
        let dir = site.make_dir(&dir_name(0))?;
        let timed = |work: &dyn Fn() -> Result<u64, S::Error>| {
            let started = Instant::now();
            work().map(|files| Round { files, time: started.elapsed() })
        };
        let fsync = || site.fsync_dir(&dir).map(|()| 0);
        let add = || {
            for number in 1..=self.files {
                site.create(&dir, Self::name(number).as_bytes())?;
            }
            Ok(self.files)
        };
        let remove = || {
            let mut removed = 0;
            for number in (1..=self.files).filter(|&number| self.removes(number)) {
                site.remove(&dir, Self::name(number).as_bytes())?;
                removed += 1;
            }
            Ok(removed)
        };
        let sync = || site.sync().map(|()| 0);
        let phases: [&dyn Fn() -> Result<u64, S::Error>; 5] =
            [&add, &fsync, &sync, &remove, &fsync];
        let rounds = phases.into_iter().map(timed).collect::<Result<_, _>>()?;
        Ok((rounds, timed_sync(site)?))
    }
}

/// Makes everything durable. Returns how long that took.
pub(crate) fn timed_sync<S: Site>(site: &S) -> Result<Duration, S::Error> {
    let started = Instant::now();
    site.sync()?;
    Ok(started.elapsed())
}

fn write_all<S: Site>(site: &S, file: &S::File, data: &[u8]) -> Result<(), S::Error> {
    for (number, piece) in data.chunks(WRITE_BYTES).enumerate() {
        site.write(file, (number * WRITE_BYTES) as u64, piece)?;
    }
    Ok(())
}

/// Works on each of `parts` in a thread of its own. `work` returns how many files it did.
fn together<P: Send, E: Send>(
    parts: &mut [P],
    work: impl Fn(&mut P) -> Result<u64, E> + Sync,
) -> Result<Round, E> {
    let started = Instant::now();
    let files = std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> =
            parts.iter_mut().map(|part| scope.spawn(move || work(part))).collect();
        let done = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        done.sum::<Result<u64, E>>()
    })?;
    Ok(Round { files, time: started.elapsed() })
}
