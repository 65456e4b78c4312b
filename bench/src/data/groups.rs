//! The groups of rows, and the work of each row.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use offshoot_testkit::loops::LoopMount;
use offshoot_testkit::random::Random;

use crate::Result;
use crate::content::{SECTOR, VersionedContent, verify};
use crate::formats::BenchFormat;
use crate::sides::{ComparedVolume, WriteWay, snapshot_name};

/// The groups of rows. The first three name the compression of their data.
pub(super) const GROUPS: [&str; 5] = ["plain", "zstd:3", "zstd:15", "direct", "snapshots"];

/// Those that XFS has.
pub(super) const XFS_GROUPS: [&str; 2] = ["plain", "direct"];

/// The size of a sequential request, in bytes.
const REQUEST: usize = 1 << 20;

/// The size of a small file in a subvolume, in bytes: it goes into the extent item.
const SMALL: usize = 1024;

/// The seed of the contents.
const SEED: u64 = 7;

/// The sizes and counts of all rows.
pub(super) struct GroupSizes {
    /// The bytes of a file.
    pub(super) bytes: u64,
    /// The bytes that are read and written in random order.
    pub(super) random_bytes: u64,
    pub(super) snapshots: u64,
    /// Files in the subvolume that the snapshots are of.
    pub(super) files: u64,
    /// Whether the judge and the kernel check the volume of ours.
    pub(super) is_proved: bool,
    pub(super) image: PathBuf,
}

/// The time of one side for a row.
pub(super) struct SideTime {
    pub(super) name: &'static str,
    pub(super) time: Duration,
}

/// Measures the time of `work`.
fn timed(name: &'static str, work: impl FnOnce() -> Result) -> Result<SideTime> {
    let started = Instant::now();
    work()?;
    Ok(SideTime { name, time: started.elapsed() })
}

impl GroupSizes {
    /// Runs all rows of a group on one side.
    pub(super) fn run<S: ComparedVolume>(&self, group: &str) -> Result<Vec<SideTime>> {
        match group {
            "direct" => self.direct::<S>(),
            "snapshots" => self.snapshots::<S>(),
            "plain" => self.data::<S>(None),
            method => self.data::<S>(Some(method)),
        }
    }

    /// Makes a new volume, about twice as large as the data that a group writes.
    fn make<S: ComparedVolume>(&self) -> Result {
        S::make(&self.image, 4 * self.bytes + (4 << 30))
    }

    fn data<S: ComparedVolume>(&self, compress: Option<&str>) -> Result<Vec<SideTime>> {
        let content = VersionedContent::new(SEED);
        let (image, bytes) = (&self.image, self.bytes);
        let open = || S::open_cold(image, compress);
        let half = bytes / 2 / REQUEST as u64 * REQUEST as u64;
        let mut rows = Vec::new();
        self.make::<S>()?;
        {
            let side = open()?;
            let file = side.create("one")?;
            rows.push(timed("write", || {
                write(&side, &file, 0, bytes, &content, WriteWay::Buffered)?;
                side.sync()
            })?);
        }
        {
            let side = open()?;
            let file = side.file("one")?;
            rows.push(timed("read", || read(&side, &file, 0, bytes))?);
        }
        {
            let side = open()?;
            let file = side.file("one")?;
            rows.push(timed("random read", || {
                let mut buf = vec![0; SECTOR];
                for offset in self.places(1) {
                    side.read(&file, offset, &mut buf)?;
                    verify(0, offset, &buf)?;
                }
                Ok(())
            })?);
        }
        {
            let side = open()?;
            let file = side.file("one")?;
            rows.push(timed("random write", || {
                let mut buf = vec![0; SECTOR];
                for offset in self.places(2) {
                    content.fill(0, offset, 2, &mut buf);
                    side.write(&file, offset, &buf, WriteWay::Buffered)?;
                }
                side.sync()
            })?);
        }
        {
            let side = open()?;
            let files = ["two", "three"].map(|name| side.create(name));
            rows.push(timed("write, 2 threads", || {
                both(&files, |number, file| {
                    write(&side, file, number, half, &content, WriteWay::Buffered)
                })?;
                side.sync()
            })?);
        }
        {
            let side = open()?;
            let files = ["two", "three"].map(|name| side.file(name));
            rows.push(timed("read, 2 threads", || {
                both(&files, |number, file| read(&side, file, number, half))
            })?);
        }
        let changed = self.places(2).collect();
        let none = BTreeSet::new();
        let files =
            [("one", 0, bytes, &changed), ("two", 1, half, &none), ("three", 2, half, &none)];
        self.prove::<S>(&content, &files)?;
        Ok(rows)
    }

    fn direct<S: ComparedVolume>(&self) -> Result<Vec<SideTime>> {
        let content = VersionedContent::new(SEED);
        let (image, bytes) = (&self.image, self.bytes);
        let mut rows = Vec::new();
        self.make::<S>()?;
        {
            let side = S::open_cold(image, None)?;
            let file = side.create("one")?;
            rows.push(timed("write direct", || {
                write(&side, &file, 0, bytes, &content, WriteWay::Direct)?;
                side.sync()
            })?);
        }
        {
            let side = S::open_cold(image, None)?;
            let (from, to) = (side.file("one")?, side.create("clone")?);
            rows.push(timed("clone", || {
                side.clone(&from, &to)?;
                side.sync()
            })?);
        }
        let none = BTreeSet::new();
        self.prove::<S>(&content, &[("one", 0, bytes, &none), ("clone", 0, bytes, &none)])?;
        Ok(rows)
    }

    fn snapshots<S: ComparedVolume>(&self) -> Result<Vec<SideTime>> {
        const NAME: &str = "subvolume";
        self.make::<S>()?;
        let side = S::open_cold(&self.image, None)?;
        let source = side.make_subvolume(NAME, self.files, &[b'a'; SMALL])?;
        side.sync()?;
        let row = timed("snapshots", || {
            side.snapshots(&source, self.files, self.snapshots, &[b'b'; SMALL])?;
            side.sync()
        })?;
        drop(side);
        self.prove_snapshots::<S>(NAME)?;
        Ok(vec![row])
    }

    /// The offsets of random requests: sectors all over the file, none twice.
    fn places(&self, seed: u64) -> impl Iterator<Item = u64> + use<> {
        let (sectors, mut random) = (self.bytes / SECTOR as u64, Random::new(seed));
        let count = usize::try_from((self.random_bytes / SECTOR as u64).min(sectors / 2))
            .expect("far below the size of memory");
        let mut taken = BTreeSet::new();
        std::iter::from_fn(move || Some(random.below(sectors) * SECTOR as u64))
            .filter(move |&place| taken.insert(place))
            .take(count)
    }

    /// Lets the judge look at the volume of ours, and mounts it with the kernel.
    fn judge<S: ComparedVolume>(&self) -> Result<Option<LoopMount>> {
        if !self.is_proved || !S::IS_OURS {
            return Ok(None);
        }
        S::Format::check(&self.image)?;
        S::Format::mount(&self.image, "ro").map(Some)
    }

    /// Checks the contents of files. Each has a name, a number, a length, and the offsets that
    /// version 2 overwrote.
    fn prove<S: ComparedVolume>(
        &self,
        content: &VersionedContent,
        files: &[(&str, usize, u64, &BTreeSet<u64>)],
    ) -> Result {
        let Some(mount) = self.judge::<S>()? else { return Ok(()) };
        for &(name, number, len, changed) in files {
            let failed = |error: std::io::Error| format!("{name}: {error}");
            let file = File::open(mount.path().join(name)).map_err(failed)?;
            let (mut found, mut expected) = (vec![0; REQUEST], vec![0; REQUEST]);
            for offset in (0..len).step_by(REQUEST) {
                let end = offset + REQUEST as u64;
                content.fill(number, offset, 1, &mut expected);
                for &place in changed.range(offset..end) {
                    let at = usize::try_from(place - offset).expect("within a request");
                    content.fill(number, place, 2, &mut expected[at..at + SECTOR]);
                }
                file.read_exact_at(&mut found, offset).map_err(failed)?;
                if found != expected {
                    return Err(format!(
                        "{name} holds something else than was written at {offset}"
                    ));
                }
            }
            if file.metadata().map_err(failed)?.len() != len {
                return Err(format!("{name} is not {len} bytes long"));
            }
        }
        Ok(())
    }

    /// Checks that each snapshot has all data from before it, and none from after it.
    fn prove_snapshots<S: ComparedVolume>(&self, name: &str) -> Result {
        let Some(mount) = self.judge::<S>()? else { return Ok(()) };
        let all = (0..self.snapshots).map(|n| (snapshot_name(n), n + 1));
        for (name, written) in all.chain([(name.to_owned(), self.snapshots)]) {
            let last = written.saturating_sub(1);
            // It is enough to check the first file, the last one that was written, and the one
            // after that.
            for number in [0, last, written].into_iter().filter(|&number| number < self.files) {
                let path = mount.path().join(&name).join(format!("file{number}"));
                let found = std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
                let byte = if number < written { b'b' } else { b'a' };
                if found != [byte; SMALL] {
                    return Err(format!("{name}/file{number} is not of its moment"));
                }
            }
        }
        Ok(())
    }
}

fn write<S: ComparedVolume>(
    side: &S,
    file: &S::File,
    number: usize,
    bytes: u64,
    content: &VersionedContent,
    way: WriteWay,
) -> Result {
    // The kernel wants the memory of a direct request to start at a multiple of the sector size.
    let mut memory = vec![0; REQUEST + SECTOR];
    let shift = memory.as_ptr().align_offset(SECTOR);
    let buf = &mut memory[shift..][..REQUEST];
    for offset in (0..bytes).step_by(REQUEST) {
        content.fill(number, offset, 1, buf);
        side.write(file, offset, buf, way)?;
    }
    Ok(())
}

fn read<S: ComparedVolume>(side: &S, file: &S::File, number: usize, bytes: u64) -> Result {
    let mut buf = vec![0; REQUEST];
    for offset in (0..bytes).step_by(REQUEST) {
        side.read(file, offset, &mut buf)?;
        verify(number, offset, &buf)?;
    }
    Ok(())
}

/// Calls `work` for each of two files, in a thread of its own, with the numbers 1 and 2.
fn both<F: Sync>(files: &[Result<F>; 2], work: impl Fn(usize, &F) -> Result + Sync) -> Result {
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (1..)
            .zip(files)
            .map(|(number, file)| {
                scope.spawn(move || work(number, file.as_ref().map_err(Clone::clone)?))
            })
            .collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })
}
