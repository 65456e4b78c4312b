//! Moving everything while other threads read, write and make snapshots.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem, SubvolumeId};
use offshoot_btrfs_format::DeviceId;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::threads::SetOnDrop;
use offshoot_vfs::{
    DirEntry, EntryPlace, Errno, Fallocate, FileFlags, FileId, FileSystem, FileSystemMut, NewFile,
    Timestamp,
};

use crate::common::{MIB, assert_kernel_writes, open};

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };

/// The most files of a writer.
const MOST_FILES: usize = 50;

/// The most rounds, each with a snapshot that stays.
const MOST_ROUNDS: usize = 60;

/// How long rounds begin.
const LONG_ENOUGH: Duration = Duration::from_secs(6);

/// The files of a writer: what each holds.
type WrittenFiles = BTreeMap<FileId, Vec<u8>>;

/// A thread that makes, changes, clones, reads and removes files, until `ends`.
fn work(fs: &Filesystem, number: u64, seed: u64, ends: &AtomicBool) -> WrittenFiles {
    let mut random = Random::new(seed.wrapping_add(number));
    let name = format!("of-{number}");
    let dir = fs.mkdir(EntryPlace { dir: fs.root(), name: name.as_bytes() }, &NEW).expect("a dir");
    let (mut all, mut names) = (WrittenFiles::new(), BTreeMap::new());
    let mut made = 0;
    while !ends.load(Ordering::Relaxed) {
        let some = |all: &WrittenFiles, random: &mut Random| {
            let index = usize::try_from(random.below(all.len().max(1) as u64)).expect("small");
            all.keys().nth(index).copied()
        };
        // So that the volume does not become full.
        std::thread::sleep(Duration::from_millis(2));
        match (random.below(10), some(&all, &mut random)) {
            (0..=2, _) | (_, None) if all.len() < MOST_FILES => {
                let name = format!("{made}");
                made += 1;
                let place = EntryPlace { dir, name: name.as_bytes() };
                let file = fs.create(place, &NEW).expect("a file");
                if made % 4 == 0 {
                    // It is written in place.
                    fs.set_flags(file, FileFlags::NODATACOW, AT).expect("an empty file");
                }
                let len = 1 + random.below(if made % 5 == 0 { 600_000 } else { 9000 });
                let bytes = random.bytes(usize::try_from(len).expect("small"));
                fs.write(file, 0, &bytes, AT).expect("room");
                all.insert(file, bytes);
                names.insert(file, name);
            }
            (3..=4, Some(file)) => {
                let bytes = all.get_mut(&file).expect("it is there");
                let at = usize::try_from(random.below(bytes.len() as u64)).expect("small");
                let new = random.bytes((bytes.len() - at).min(20_000));
                fs.write(file, at as u64, &new, AT).expect("room");
                bytes[at..at + new.len()].copy_from_slice(&new);
            }
            (5, Some(file)) => fs.fsync(file).expect("it is stored"),
            (6, Some(file)) if all[&file].len() < 1 << 20 => {
                // Zeros are preallocated, and written in place later.
                let bytes = all.get_mut(&file).expect("it is there");
                let (at, len) = (bytes.len().next_multiple_of(4096), 40_000);
                let what = Fallocate::Allocate { keeps_size: false };
                fs.fallocate(file, what, at as u64, len as u64, AT).expect("room");
                bytes.resize(at + len, 0);
            }
            (0..=2, Some(file)) => {
                let name = &names[&file];
                fs.unlink(EntryPlace { dir, name: name.as_bytes() }, AT).expect("it goes");
                all.remove(&file);
            }
            (_, Some(file)) => assert_holds(fs, file, &all[&file]),
            (_, None) => {}
        }
    }
    all
}

#[track_caller]
fn assert_holds(fs: &Filesystem, file: FileId, expected: &[u8]) {
    let mut found = vec![0; expected.len() + 1];
    let len = fs.read(file, 0, &mut found).expect("it reads");
    assert!(len == expected.len() && found[..len] == *expected, "{file} has other bytes");
}

/// While everything moves again and again and the member gets other sizes, every thread reads what
/// it wrote. Snapshots keep what they had. Afterwards the volume is sound.
#[test]
fn callers_notice_nothing() {
    let Some(judges) = judges::require() else { return };
    let seed = seed_of_run();
    let disks = Disks::create(&judges, 1, 1200);
    disks.mkfs(&["-m", "dup", "-d", "single"]);
    let (begin, moved) = (Instant::now(), AtomicU64::new(0));
    let kept = Mutex::new(Vec::new());
    let written = {
        let fs = open(&disks);
        let ends = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..3)
                .map(|number| {
                    let (fs, ends) = (&fs, &ends);
                    scope.spawn(move || work(fs, number, seed, ends))
                })
                .collect();
            let stopped = SetOnDrop(&ends);
            for round in (0..MOST_ROUNDS).take_while(|_| begin.elapsed() < LONG_ENOUGH) {
                let volume = fs.volume();
                let name = format!("snapshot-{round}");
                let place = EntryPlace { dir: fs.root(), name: name.as_bytes() };
                let snapshot = fs.snapshot(SubvolumeId::FS, place, true, AT).expect("a snapshot");
                let dir = volume.filesystem(snapshot).expect("it is there");
                kept.lock().expect("no panic").push((snapshot, shown(&dir)));
                for chunk in volume.chunks().collect::<Vec<_>>() {
                    match volume.relocate(chunk.start) {
                        Ok(()) => drop(moved.fetch_add(1, Ordering::Relaxed)),
                        // The volume removed the group itself.
                        Err(error) => assert!(
                            error.to_string().contains("a block group at"),
                            "seed {seed}: {error}"
                        ),
                    }
                }
                let size = [700, 1200, 500][round % 3] * MIB;
                volume.resize(DeviceId(1), size).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            }
            drop(stopped);
            let written: Vec<_> =
                writers.into_iter().map(|one| one.join().expect("a writer")).collect();
            fs.sync().expect("it is stored");
            written
        })
    };
    assert!(moved.into_inner() > 10, "hardly anything moved");
    disks.assert_checks();
    let volume = BtrfsVolume::open(disks.devices(), &EngineOptions::default()).expect("it opens");
    let fs = volume.filesystem(SubvolumeId::FS).expect("every volume has one");
    for (file, expected) in written.iter().flatten() {
        assert_holds(&fs, *file, expected);
    }
    for (id, expected) in kept.into_inner().expect("no panic") {
        let found = shown(&volume.filesystem(id).expect("it is there"));
        assert_eq!(found, expected, "seed {seed}: snapshot {id}");
    }
    drop((fs, volume));
    assert_kernel_writes(&disks, 20);
}

/// Two threads resize one volume while a third one writes. One of the two is refused at a time, and
/// the volume stays sound.
#[test]
fn resizes_keep_apart() {
    let Some(judges) = judges::require() else { return };
    let seed = seed_of_run();
    let disks = Disks::create(&judges, 1, 1024);
    disks.mkfs(&["-m", "dup", "-d", "single"]);
    let (begin, refused) = (Instant::now(), AtomicU64::new(0));
    let (fs, ends) = (open(&disks), AtomicBool::new(false));
    let resizer = |sizes: [Option<u64>; 2]| {
        for size in sizes.into_iter().cycle().take_while(|_| begin.elapsed() < LONG_ENOUGH / 2) {
            let volume = fs.volume();
            let resized = match size {
                Some(mib) => volume.resize(DeviceId(1), mib * MIB),
                None => volume.resize_to_minimum(DeviceId(1), 200 * MIB),
            };
            match resized {
                Err(error) if error.errno() == Errno::BUSY => {
                    refused.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(1));
                }
                resized => drop(resized.unwrap_or_else(|e| panic!("seed {seed}: {e}"))),
            }
        }
    };
    let written = std::thread::scope(|scope| {
        let writer = scope.spawn(|| work(&fs, 0, seed, &ends));
        let stopped = SetOnDrop(&ends);
        let other = scope.spawn(|| resizer([Some(900), None]));
        resizer([None, Some(800)]);
        other.join().expect("a resizer");
        drop(stopped);
        writer.join().expect("a writer")
    });
    assert!(refused.into_inner() > 0, "they never met");
    for (file, expected) in &written {
        assert_holds(&fs, *file, expected);
    }
    fs.volume().shut_down().expect("it writes to the end");
    drop(fs);
    disks.assert_checks();
}

/// The entries of a directory.
fn entries(fs: &Filesystem, dir: FileId) -> Vec<(Vec<u8>, FileId)> {
    let mut all = Vec::new();
    let mut visit = |entry: DirEntry<'_>| {
        all.push((entry.name.to_vec(), entry.file));
        ControlFlow::Continue(())
    };
    fs.read_dir(dir, 0, &mut visit).expect("it reads");
    all
}

/// A sum over the contents of each file below the directories of a subvolume.
fn shown(fs: &Filesystem) -> BTreeMap<Vec<u8>, u64> {
    let mut all = BTreeMap::new();
    for (dir, id) in entries(fs, fs.root()).into_iter().filter(|(name, _)| name.starts_with(b"of-"))
    {
        for (name, file) in entries(fs, id) {
            let size = fs.attr(file).expect("attributes").size;
            let mut bytes = vec![0; usize::try_from(size).expect("small")];
            let len = fs.read(file, 0, &mut bytes).expect("it reads");
            let add = |sum: u64, byte: &u8| sum.wrapping_mul(31).wrapping_add(u64::from(*byte));
            let sum = bytes[..len].iter().fold(size, add);
            all.insert([&dir[..], b"/", &name].concat(), sum);
        }
    }
    all
}
