//! Our volume holds as much as an equal volume of the kernel: preallocated space, large files and
//! small ones, up to the last byte.
//!
//! Preallocation writes items and no data, so it fills volumes of any size: the images are sparse.

use std::fs;
use std::io::{ErrorKind, Write as _};
use std::path::Path;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem, SubvolumeId};
use offshoot_btrfs_format::chunk::Chunk;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::run::try_run;
use offshoot_vfs::{EntryPlace, Fallocate, FileId, FileSystem, FileSystemMut};

use crate::shapes::{is_accepted, name};
use crate::worker::{AT, NEW};

const GIB_IN_MIB: u64 = 1 << 10;
const TIB_IN_MIB: u64 = 1 << 20;

/// The smallest piece that is preallocated, in bytes.
const LEAST_PIECE: u64 = 64 << 10;

/// We must fit at least this share of what the kernel fits, in percent.
const LEAST_PERCENT: u64 = 98;

/// How much is written to a large file at once.
const PIECE: usize = 1 << 20;

fn open(disks: &Disks) -> Filesystem {
    let opened = BtrfsVolume::open_writable(disks.writable_devices(), &EngineOptions::default());
    opened.expect("it opens").filesystem(SubvolumeId::FS).expect("every volume has one")
}

fn file(fs: &Filesystem, name: &str) -> FileId {
    fs.create(EntryPlace { dir: fs.root(), name: name.as_bytes() }, &NEW).expect("there is room")
}

/// How many bytes the chunks take on the members.
fn allocated(fs: &Filesystem) -> u64 {
    let bytes = |chunk: Chunk| chunk.stripes.len() as u64 * chunk.stripe_bytes();
    fs.volume().chunks().map(bytes).sum()
}

/// Preallocates for a file, and returns whether it was done. A refusal leaves the file as it was.
fn preallocate(fs: &Filesystem, file: FileId, at: u64, len: u64) -> bool {
    let what = Fallocate::Allocate { keeps_size: false };
    let is_done = is_accepted(fs.fallocate(file, what, at, len, AT));
    let attr = fs.attr(file).expect("it is there");
    let expected = if is_done { at + len } else { at };
    assert_eq!((attr.size, attr.allocated_bytes), (expected, expected), "{len} bytes at {at}");
    is_done
}

/// Takes pieces one behind the other, large ones first. Returns how many bytes they have.
fn take_all(all: u64, mut take: impl FnMut(u64, u64) -> bool) -> u64 {
    let (mut at, mut len) = (0, all / 2 / LEAST_PIECE * LEAST_PIECE);
    while len >= LEAST_PIECE {
        if take(at, len) {
            at += len;
        } else {
            len = len / 2 / LEAST_PIECE * LEAST_PIECE;
        }
    }
    at
}

/// Whether the kernel did it. The only error that it may give is a lack of space.
fn kernel_preallocates(file: &Path, at: u64, len: u64) -> bool {
    let [at, len] = [at.to_string(), len.to_string()];
    let path = file.to_str().expect("it is plain");
    match try_run("fallocate", &["-o", &at, "-l", &len, path]) {
        Ok(_) => true,
        Err(reason) if reason.contains("No space left") => false,
        Err(reason) => panic!("{reason}"),
    }
}

/// Two equal volumes of `mib` MiB: one for the kernel, one for us.
fn twins(judges: &Judges, mib: u64, mkfs: &[&str]) -> [Disks; 2] {
    let disks = Disks::create(judges, 1, mib);
    disks.mkfs(mkfs);
    let other = disks.copy(judges);
    [disks, other]
}

#[track_caller]
fn assert_nearly_as_much(what: &str, kernel: u64, ours: u64, least_percent: u64) {
    println!("{what}: the kernel takes {kernel}, we take {ours}");
    assert!(kernel > 0 && ours >= kernel * least_percent / 100, "{what}: {ours} of {kernel}");
}

/// A volume of `mib` MiB holds as much preallocated space as the kernel fits.
fn preallocation_fits(mib: u64, mkfs: &[&str]) {
    let Some(judges) = judges::require() else { return };
    let [theirs, ours] = twins(&judges, mib, mkfs);
    let mount = theirs.mount("rw,noatime");
    let path = mount.path().join("file");
    let kernel = take_all(mib << 20, |at, len| kernel_preallocates(&path, at, len));
    drop(mount);
    let fs = open(&ours);
    let file = file(&fs, "file");
    let taken = take_all(mib << 20, |at, len| preallocate(&fs, file, at, len));
    fs.sync().expect("a commit");
    drop(fs);
    assert_nearly_as_much(&format!("{mib} MiB {mkfs:?}"), kernel, taken, LEAST_PERCENT);
    ours.assert_checks();
}

#[test]
fn preallocation_fits_on_volumes_of_all_sizes() {
    for mib in [300, GIB_IN_MIB, 10 * GIB_IN_MIB, 100 * GIB_IN_MIB, TIB_IN_MIB] {
        preallocation_fits(mib, &[]);
    }
    preallocation_fits(300, &["--mixed"]);
    preallocation_fits(10 * GIB_IN_MIB, &["-d", "dup"]);
}

/// Regression: we refused more than one chunk holds on an empty volume: a flush cycle that
/// allocated one chunk counted as a cycle that helped no ticket.
#[test]
fn one_preallocation_takes_as_many_chunks_as_it_needs() {
    let Some(judges) = judges::require() else { return };
    for (mib, wanted) in [(1, 300), (10, 8 << 10), (100, 20 << 10), (100, 90 << 10)] {
        let disks = Disks::create(&judges, 1, mib * GIB_IN_MIB);
        disks.mkfs(&[]);
        let fs = open(&disks);
        let file = file(&fs, "file");
        assert!(preallocate(&fs, file, 0, wanted << 20), "{wanted} MiB on {mib} GiB");
        drop(fs);
        disks.assert_checks();
    }
}

/// A request that no number of chunks can satisfy is refused, and allocates none.
#[test]
fn what_can_never_fit_takes_no_chunk() {
    let Some(judges) = judges::require() else { return };
    for mkfs in [&[][..], &["--mixed"], &["-d", "dup"]] {
        let disks = Disks::create(&judges, 1, GIB_IN_MIB);
        disks.mkfs(mkfs);
        let fs = open(&disks);
        let file = file(&fs, "file");
        let before = allocated(&fs);
        for wanted in [GIB_IN_MIB, 2 * GIB_IN_MIB, TIB_IN_MIB] {
            assert!(!preallocate(&fs, file, 0, wanted << 20), "{wanted} MiB on a GiB");
        }
        assert_eq!(allocated(&fs), before, "{mkfs:?}");
        drop(fs);
        disks.assert_checks();
    }
}

/// Writes files of `len` bytes until the kernel refuses one. Returns how many bytes it accepted.
fn kernel_fills(dir: &Path, len: usize) -> u64 {
    let bytes = vec![7; PIECE.min(len)];
    let mut all = 0;
    for number in 0.. {
        let mut write = || -> std::io::Result<()> {
            let mut file = fs::File::create(dir.join(name(number)))?;
            for _ in 0..len.div_ceil(PIECE) {
                file.write_all(&bytes)?;
                all += bytes.len() as u64;
            }
            Ok(())
        };
        match write() {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::StorageFull => break,
            Err(error) => panic!("{error}"),
        }
    }
    all
}

/// The same on a volume of ours.
fn we_fill(fs: &Filesystem, len: usize) -> u64 {
    let bytes = vec![7; PIECE.min(len)];
    let mut all = 0;
    for number in 0.. {
        let name = name(number);
        let made = fs.create(EntryPlace { dir: fs.root(), name: name.as_bytes() }, &NEW);
        let Ok(file) = made else {
            assert!(!is_accepted(made), "there is no more room");
            break;
        };
        for piece in 0..len.div_ceil(PIECE) {
            if !is_accepted(fs.write(file, (piece * PIECE) as u64, &bytes, AT)) {
                return all;
            }
            all += bytes.len() as u64;
        }
    }
    all
}

/// A volume of 300 MiB holds as many files of `len` bytes as the kernel fits.
fn files_fit(len: usize, least_percent: u64) {
    let Some(judges) = judges::require() else { return };
    let [theirs, ours] = twins(&judges, 300, &[]);
    let mount = theirs.mount("rw,noatime");
    let kernel = kernel_fills(mount.path(), len);
    drop(mount);
    let fs = open(&ours);
    let taken = we_fill(&fs, len);
    fs.sync().expect("what was accepted can be stored");
    drop(fs);
    assert_nearly_as_much(&format!("files of {len} bytes"), kernel, taken, least_percent);
    ours.assert_checks();
}

#[test]
fn files_fit_on_a_small_volume() {
    for len in [1 << 30, 20_000] {
        files_fit(len, LEAST_PERCENT);
    }
}

/// Volumes of several TiB, and files for which the kernel takes minutes.
#[test]
#[ignore = "takes as long as one likes; cargo xtask campaign fits runs it"]
fn campaign() {
    files_fit(5000, LEAST_PERCENT);
    files_fit(1000, LEAST_PERCENT);
    preallocation_fits(crate::number("OFFSHOOT_TIB", 4) * TIB_IN_MIB, &[]);
}
