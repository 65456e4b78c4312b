//! The workloads that the engine is measured by, on anything that files can be made in.
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
//! *fs-mark* is what the program `fs_mark` does with `-S 0 -k -L ROUNDS -n FILES -s SIZE` and a
//! directory for each thread. Its names have 40 bytes: the time in hexadecimal seconds, filled up
//! with `~` to 16, and 24 random letters and digits. Here the time is that of the beginning and not
//! of each file, so that who knows it and the seed knows all names. *enospc* is the test case of
//! the patch set that brought tickets to the kernel: its files are all buffered, or every second
//! one is written directly. *dir-fsync* is that of the patch that brought copies of many items at
//! once to the kernel's tree log.
//!
//! A file that was made is *acknowledged* when all calls for it succeeded. One that could not be
//! written for want of space is removed again at once, so that what is there at the end are the
//! acknowledged files and no other.
//!
//! This file knows nothing of the program around it: the benchmarks beside the kernel, and the
//! tests, include it as it is.

use std::time::{Duration, Instant};

/// How much is written in one call, as `fs_mark` does it.
const WRITE_BYTES: usize = 16 << 10;

/// What the filler of *enospc* leaves for data.
const DATA_LEFT_BYTES: u64 = 2 << 20;

/// How much the filler writes at a time.
const FILLER_BYTES: usize = 1 << 20;

/// Where files are made.
pub(crate) trait Site: Sync {
    /// A directory.
    type Dir: Sync;
    /// A file that is open.
    type File;
    /// Why something failed.
    type Error: Send;

    /// Makes a directory below the root.
    fn make_dir(&self, name: &str) -> Result<Self::Dir, Self::Error>;
    /// Makes a file.
    fn create(&self, dir: &Self::Dir, name: &[u8]) -> Result<Self::File, Self::Error>;
    /// Writes to a file at `offset`.
    fn write(&self, file: &Self::File, offset: u64, data: &[u8]) -> Result<(), Self::Error>;
    /// As `write`, and leaves nothing of the file in memory only.
    fn write_direct(&self, file: &Self::File, offset: u64, data: &[u8]) -> Result<(), Self::Error>;
    /// Removes a file.
    fn remove(&self, dir: &Self::Dir, name: &[u8]) -> Result<(), Self::Error>;
    /// Makes a directory and the names in it durable.
    fn fsync_dir(&self, dir: &Self::Dir) -> Result<(), Self::Error>;
    /// The bytes of data that may still be written.
    fn available_bytes(&self) -> Result<u64, Self::Error>;
    /// Makes everything durable.
    fn sync(&self) -> Result<(), Self::Error>;
    /// Whether there is no space.
    fn is_no_space(error: &Self::Error) -> bool;
}

/// What a stretch of a workload did, and how long that took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Round {
    /// Files that were made, or removed.
    pub(crate) files: u64,
    /// From its beginning until the last thread was done.
    pub(crate) time: Duration,
}

/// The name of the directory of a thread or worker, of which 0 is the first.
pub(crate) fn dir_name(thread: u64) -> String {
    format!("d{}", thread + 1)
}

/// The names that one thread gives, one after the other.
pub(crate) struct Names {
    random: u64,
    name: [u8; 40],
}

impl Names {
    /// Those of a thread in a run with this seed that began at this second.
    pub(crate) fn new(seed: u64, began_secs: u64, thread: u64) -> Self {
        let mut name = [b'~'; 40];
        let time = format!("{began_secs:x}");
        name[..time.len()].copy_from_slice(time.as_bytes());
        // Far apart, so that no two threads have a stretch in common.
        Self { random: seed ^ (thread + 1) << 48, name }
    }

    /// The next name.
    pub(crate) fn next(&mut self) -> &[u8; 40] {
        const LETTERS: &[u8; 36] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ";
        // A number of 64 bits has twelve digits to the base of 36, and some to spare.
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

/// What files hold: the name, as much of it as there is room for, and then always the same bytes.
pub(crate) struct Content(Vec<u8>);

impl Content {
    /// That of files of `size` bytes.
    pub(crate) fn new(size: usize) -> Self {
        Self((0..=250u8).cycle().take(size).collect())
    }

    /// That of the file called `name`, as long as all other names.
    pub(crate) fn of(&mut self, name: &[u8]) -> &[u8] {
        let named = self.0.len().min(name.len());
        self.0[..named].copy_from_slice(&name[..named]);
        &self.0
    }
}

/// Many small files, and how many a second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FsMark {
    pub(crate) threads: u64,
    /// Files that each thread makes in a round.
    pub(crate) files: u64,
    pub(crate) rounds: u64,
    /// The bytes that each file holds.
    pub(crate) size: usize,
    /// What the names follow from, together with the next one.
    pub(crate) seed: u64,
    /// The second that is in the names.
    pub(crate) began_secs: u64,
}

/// What one thread of *fs-mark* goes on with in the next round.
struct Maker<D> {
    dir: D,
    names: Names,
    content: Content,
}

impl FsMark {
    /// The size of an image on which there is much room beside what is made: every file with its
    /// items in leaves that are half full, all of that eight times, and its data twice. `None` when
    /// that is more than 1 PiB.
    pub(crate) fn image_bytes(&self) -> Option<u64> {
        const METADATA_BYTES: u64 = 16 << 10;
        let each = METADATA_BYTES + 2 * (self.size as u64).next_multiple_of(4096);
        let files = self.threads.checked_mul(self.files)?.checked_mul(self.rounds)?;
        let bytes = files.checked_mul(each).filter(|&bytes| bytes < 1 << 50)?;
        Some((1 << 30) + bytes.next_multiple_of(1 << 30))
    }

    /// Makes the files, and then makes them durable: all rounds, and how long the last thing took.
    pub(crate) fn run<S: Site>(&self, site: &S) -> Result<(Vec<Round>, Duration), S::Error>
    where
        S::Dir: Send,
    {
        let maker = |thread| {
            let dir = site.make_dir(&dir_name(thread))?;
            let names = Names::new(self.seed, self.began_secs, thread);
            Ok(Maker { dir, names, content: Content::new(self.size) })
        };
        let mut makers = (0..self.threads).map(maker).collect::<Result<Vec<_>, S::Error>>()?;
        let mut rounds = Vec::new();
        for _ in 0..self.rounds {
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

/// Files until there is no space.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Enospc {
    pub(crate) workers: u64,
    /// The bytes that each file holds.
    pub(crate) size: usize,
    /// Every second file is written directly.
    pub(crate) half_direct: bool,
}

/// What one worker of *enospc* has made.
pub(crate) struct Worker<D> {
    dir: D,
    /// How many files it was told are there.
    pub(crate) files: u64,
}

impl Enospc {
    /// The name of a worker's file.
    pub(crate) fn name(number: u64) -> String {
        format!("file_{number}")
    }

    /// Takes the space for data, and makes it durable.
    pub(crate) fn prepare<S: Site>(site: &S) -> Result<(), S::Error> {
        let dir = site.make_dir("filler")?;
        let file = site.create(&dir, b"0")?;
        let data = vec![b'f'; FILLER_BYTES];
        let mut offset = 0;
        // What is available is exact only when nothing is under way.
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

    /// The workers, with nothing made yet but their directories.
    pub(crate) fn workers<S: Site>(self, site: &S) -> Result<Vec<Worker<S::Dir>>, S::Error> {
        let worker = |worker| Ok(Worker { dir: site.make_dir(&dir_name(worker))?, files: 0 });
        (0..self.workers).map(worker).collect()
    }

    /// Makes files until each worker was told that there is no space.
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

    /// Makes the next file, unless there is no space.
    fn make_one<S: Site>(self, site: &S, worker: &Worker<S::Dir>) -> Result<bool, S::Error> {
        let name = Self::name(worker.files);
        let file = match site.create(&worker.dir, name.as_bytes()) {
            Err(error) if S::is_no_space(&error) => return Ok(false),
            created => created?,
        };
        let mut content = Content::new(self.size);
        let data = content.of(name.as_bytes());
        let written = if self.half_direct && worker.files % 2 == 1 {
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

    /// Removes what the workers made.
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

/// A large directory that is synced by itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirFsync {
    /// Empty files that are made.
    pub(crate) files: u64,
    /// How many of them are removed then.
    pub(crate) deletes: u64,
}

impl DirFsync {
    /// What it does, one after the other.
    pub(crate) const PHASES: [&'static str; 5] = ["add", "fsync 1", "sync 1", "remove", "fsync 2"];

    /// The name of a file, of which 1 is the first.
    pub(crate) fn name(number: u64) -> String {
        format!("file_{number}")
    }

    /// Whether a file is removed.
    pub(crate) fn removes(self, number: u64) -> bool {
        let every = self.files.checked_div(self.deletes);
        every.is_some_and(|every| (number - 1).is_multiple_of(every.max(1)))
    }

    /// Does all of it: how long each phase took, and the sync at the end.
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

/// Makes everything durable, and says how long that took.
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

/// Has each of `parts` worked on by a thread of its own, which says how many files it did.
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
