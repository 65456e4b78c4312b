//! Copies of ranges: what is a hole in the source is a hole in the target, and nothing but the
//! range changes.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem, SubvolumeId};
use offshoot_device::BlockDevice;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::{
    Fallocate, FileFlags, FileId, FilePosition, FileSystem, FileSystemMut, SetAttr, Timestamp,
};
use rustix::fs::{SeekFrom, seek};

use crate::common::{AT, NEW, at, check, in_memory, open_top, place};
use crate::layout::{SectorKind, sectors};

const SECTOR: usize = 4096;

/// A file with holes, and a model of it: its bytes, and for each sector whether it has data.
struct SparseFile {
    file: FileId,
    bytes: Vec<u8>,
    has_data: Vec<bool>,
}

fn open() -> Filesystem {
    let devices: Vec<Arc<dyn BlockDevice>> = vec![in_memory(4096, 300)];
    let volume = BtrfsVolume::open_writable(devices, &EngineOptions::default()).expect("it opens");
    volume.filesystem(SubvolumeId::FS).expect("the top level")
}

fn usize_below(random: &mut Random, bound: usize) -> usize {
    usize::try_from(random.below(bound as u64)).expect("small")
}

fn sparse(fs: &Filesystem, name: &str, random: &mut Random) -> SparseFile {
    let count = 1 + usize_below(random, 100);
    let file = fs.create(place(fs.root(), name), &NEW).expect("a file");
    let (mut bytes, mut has_data) = (vec![0; count * SECTOR], vec![false; count]);
    for _ in 0..random.below(8) {
        let start = usize_below(random, count);
        let end = count.min(start + 1 + usize_below(random, 10));
        let data = random.bytes((end - start) * SECTOR);
        fs.write(file, (start * SECTOR) as u64, &data, AT).expect("there is room");
        bytes[start * SECTOR..end * SECTOR].copy_from_slice(&data);
        has_data[start..end].fill(true);
    }
    let size = bytes.len() - usize_below(random, SECTOR);
    bytes.truncate(size);
    let set = SetAttr { size: Some(size as u64), ..SetAttr::default() };
    fs.set_attr(file, &set, AT).expect("it gets its length");
    if random.below(3) == 0 {
        let what = Fallocate::Allocate { keeps_size: true };
        fs.fallocate(file, what, 0, 100_000, AT).expect("there is room");
    }
    SparseFile { file, bytes, has_data }
}

/// The length of the hole around a sector, as far as it is in `range`, in bytes.
fn hole_around(file: &SparseFile, sector: usize, range: &Range<usize>) -> usize {
    let (before, behind) = file.has_data.split_at(sector);
    let start = before.iter().rposition(|&has_data| has_data).map_or(0, |at| at + 1);
    let len = behind.iter().position(|&has_data| has_data).unwrap_or(behind.len());
    let end = sector + len;
    (end * SECTOR).min(range.end).saturating_sub((start * SECTOR).max(range.start))
}

/// Copies a random range, often at other places within sectors and between files of which one has
/// no checksums, so that nothing is shared.
fn copy_once(fs: &Filesystem, random: &mut Random) -> u64 {
    let from = sparse(fs, "from", random);
    let mut to = sparse(fs, "to", random);
    let other = fs.create(place(fs.root(), "nodatacow"), &NEW).expect("a file");
    fs.set_flags(other, FileFlags::NODATACOW, AT).expect("it is empty");
    let is_new = random.below(4) == 0;
    if is_new {
        to = SparseFile { file: other, bytes: Vec::new(), has_data: Vec::new() };
    }
    let place_in = |random: &mut Random, len: usize| {
        let at = usize_below(random, len + 1);
        if random.below(3) == 0 { at / SECTOR * SECTOR } else { at }
    };
    let source = place_in(random, from.bytes.len());
    let target = place_in(random, to.bytes.len() + 20_000);
    let wanted = usize_below(random, from.bytes.len() + 10_000);
    let len = wanted.min(from.bytes.len() - source);
    let position = |file, offset: usize| FilePosition { file, offset: offset as u64 };
    let copied =
        fs.copy_range(position(from.file, source), position(to.file, target), wanted as u64, AT);
    assert_eq!(copied.expect("it is copied"), len as u64);
    if len > 0 {
        to.bytes.resize(to.bytes.len().max(target + len), 0);
        to.bytes[target..target + len].copy_from_slice(&from.bytes[source..source + len]);
    }
    let what = format!("{len} bytes from {source} of {} to {target}", from.bytes.len());
    let assert_is = |when: &str| {
        let mut found = vec![1; to.bytes.len() + 1];
        assert_eq!(fs.read(to.file, 0, &mut found).expect("it reads"), to.bytes.len(), "{what}");
        assert!(found[..to.bytes.len()] == to.bytes, "{what}, {when}");
    };
    assert_is("buffered");
    fs.sync().expect("a commit");
    assert_is("stored");
    let kinds = sectors(fs, to.file);
    let mut holes = 0;
    for number in target.div_ceil(SECTOR)..(target + len) / SECTOR {
        let begin = number * SECTOR - target + source;
        let mut covers = begin / SECTOR..(begin + SECTOR).div_ceil(SECTOR);
        // A small hole becomes zeros where the target has data.
        let had_data = to.has_data.get(number).is_some_and(|&has_data| has_data);
        let may_be_data =
            had_data && hole_around(&from, begin / SECTOR, &(source..source + len)) < 65_536;
        if covers.all(|sector| !from.has_data[sector]) && !may_be_data {
            let kind = kinds.get(&(number as u64));
            assert!(kind != Some(&SectorKind::Data), "{what}: sector {number} has data");
            holes += 1;
        }
    }
    for name in ["from", "to", "nodatacow"] {
        fs.unlink(place(fs.root(), name), AT).expect("it goes");
    }
    holes
}

#[test]
fn holes_stay_holes() {
    let mut random = Random::new(seed_of_run());
    let fs = open();
    let holes: u64 = (0..200).map(|_| copy_once(&fs, &mut random)).sum();
    assert!(holes > 200, "{holes} sectors were holes");
}

/// A hole that takes a lifetime to read is copied at once.
#[test]
fn a_hole_of_an_exbibyte_is_copied() {
    const FAR: u64 = 1 << 60;
    let fs = open();
    let [from, to] =
        ["from", "to"].map(|name| fs.create(place(fs.root(), name), &NEW).expect("a file"));
    fs.write(from, FAR, b"far", AT).expect("there is room");
    fs.write(to, 5000, &vec![7; 20_000], AT).expect("there is room");
    let position = |file, offset| FilePosition { file, offset };
    let copied = fs.copy_range(position(from, 0), position(to, 1), FAR + 3, AT);
    assert_eq!(copied.expect("it is copied"), FAR + 3);
    let mut found = [1; 4];
    assert_eq!(fs.read(to, FAR + 1, &mut found).expect("it reads"), 3);
    assert_eq!(&found[..3], b"far");
    assert_eq!(fs.next_data(to, 0).expect("it is looked for").map(|data| data.start), Some(FAR));
}

/// Also a hole that is copied to a hole is written.
#[test]
fn every_copy_sets_the_times() {
    let fs = open();
    let [from, to] =
        ["from", "to"].map(|name| fs.create(place(fs.root(), name), &NEW).expect("a file"));
    let length = |file| {
        let set = SetAttr { size: Some(1 << 20), ..SetAttr::default() };
        fs.set_attr(file, &set, AT).expect("a hole");
    };
    length(from);
    length(to);
    let mut secs = AT.secs;
    for is_buffered in [false, true] {
        for (source, target) in [(0, 1), (0, 0), (9, 9)] {
            fs.sync().expect("a commit");
            if is_buffered {
                fs.write(to, 500_000, b"buffered", AT).expect("there is room");
            }
            secs += 1;
            let at = Timestamp { secs, nanos: 1 };
            let position = |file, offset| FilePosition { file, offset };
            let copied = fs.copy_range(position(from, source), position(to, target), 10_000, at);
            assert_eq!(copied.expect("it is copied"), 10_000);
            let times = || {
                let attr = fs.attr(to).expect("attributes");
                (attr.mtime, attr.ctime)
            };
            let what = format!("{source} to {target}, buffered: {is_buffered}");
            assert_eq!(times(), (at, at), "{what}");
            fs.sync().expect("a commit");
            assert_eq!(times(), (at, at), "{what}, stored");
        }
    }
}

/// What a small change looks up does not grow with the file.
#[test]
fn what_follows_is_not_looked_up() {
    const EXTENTS: u64 = 5000;
    let fs = open();
    let [one, from, to] =
        ["one", "from", "to"].map(|name| fs.create(place(fs.root(), name), &NEW).expect("a file"));
    let position = |file, offset| FilePosition { file, offset };
    fs.write(one, 0, &[1; SECTOR], AT).expect("there is room");
    for number in 0..EXTENTS {
        let target = position(from, number * SECTOR as u64);
        fs.clone_range(position(one, 0), target, 0, AT).expect("it is cloned");
    }
    fs.clone_range(position(from, 0), position(to, 0), 0, AT).expect("it is cloned");
    let looked_up = |what: &str, change: &dyn Fn()| {
        let before = fs.volume().stats().pieces_looked_up;
        change();
        let count = fs.volume().stats().pieces_looked_up - before;
        assert!(count < 100, "{what}: {count} pieces");
    };
    looked_up("a copy", &|| {
        let copied = fs.copy_range(position(from, 1), position(to, 2), 10_000, AT);
        assert_eq!(copied.expect("it is copied"), 10_000);
    });
    looked_up("a copy of a hole", &|| {
        fs.fallocate(from, Fallocate::PunchHole, 40_960, 40_960, AT).expect("a hole");
        let copied = fs.copy_range(position(from, 40_961), position(to, 50_000), 40_000, AT);
        assert_eq!(copied.expect("it is copied"), 40_000);
    });
    looked_up("a hole", &|| {
        fs.fallocate(to, Fallocate::PunchHole, 100_001, 10_000, AT).expect("a hole");
    });
}

/// Punching takes a transaction for each hole.
#[test]
fn small_holes_become_zeros_over_data() {
    const HOLES: usize = 300;
    let fs = open();
    let [from, to] =
        ["from", "to"].map(|name| fs.create(place(fs.root(), name), &NEW).expect("a file"));
    let mut model = vec![7; 2 * HOLES * SECTOR];
    fs.write(to, 0, &model, AT).expect("there is room");
    for number in 0..HOLES {
        let start = 2 * number * SECTOR;
        fs.write(from, start as u64, &[9; SECTOR], AT).expect("there is room");
        model[start + 1..][..SECTOR].fill(9);
        model[start + 1 + SECTOR..].iter_mut().take(SECTOR).for_each(|byte| *byte = 0);
    }
    fs.sync().expect("a commit");
    let before = fs.volume().stats().delayed_queued;
    let [source, target] = [(from, 0), (to, 1)].map(|(file, offset)| FilePosition { file, offset });
    let len = (2 * HOLES - 1) as u64 * SECTOR as u64;
    assert_eq!(fs.copy_range(source, target, u64::MAX, AT).expect("it is copied"), len);
    let changes = fs.volume().stats().delayed_queued - before;
    assert!(changes < 10, "{changes} changes");
    model[1 + (2 * HOLES - 1) * SECTOR..].fill(7);
    let mut found = vec![1; model.len()];
    assert_eq!(fs.read(to, 0, &mut found).expect("it reads"), model.len());
    assert!(found == model);
}

/// A copy of whole sectors changes the inode as often as a clone: the file does not grow before
/// anything is shared.
#[test]
fn an_aligned_copy_is_one_change() {
    let fs = open();
    let from = fs.create(place(fs.root(), "from"), &NEW).expect("a file");
    fs.write(from, 0, &vec![7; 100_000], AT).expect("there is room");
    let [copied, cloned] = ["copied", "cloned"].map(|name| {
        let to = fs.create(place(fs.root(), name), &NEW).expect("a file");
        fs.sync().expect("a commit");
        let before = fs.volume().stats().delayed_queued;
        let [from, to] =
            [(from, 0), (to, 1 << 20)].map(|(file, offset)| FilePosition { file, offset });
        if name == "copied" {
            assert_eq!(fs.copy_range(from, to, 100_000, AT).expect("it is copied"), 100_000);
        } else {
            fs.clone_range(from, to, 100_000, AT).expect("it is cloned");
        }
        fs.volume().stats().delayed_queued - before
    });
    assert_eq!(copied, cloned);
}

/// The ranges of data of a file, as the kernel shows them.
fn data_of(path: &Path) -> Vec<(u64, u64)> {
    let file = File::open(path).expect("it opens");
    let (mut all, mut at) = (Vec::new(), 0);
    while let Ok(start) = seek(&file, SeekFrom::Data(at)) {
        at = seek(&file, SeekFrom::Hole(start)).expect("every file ends with one");
        all.push((start, at));
    }
    all
}

/// The kernel copies the same ranges of the same files. Then both have the same bytes, and the same
/// holes.
#[test]
fn the_kernel_leaves_the_same_holes() {
    const FILES: u64 = 4;
    let Some(judges) = judges::require() else { return };
    let mut random = Random::new(seed_of_run());
    let name = |number: u64| format!("file{number}");
    let [theirs, ours] = [(); 2].map(|()| {
        let disks = Disks::create(&judges, 1, 256);
        disks.mkfs(&[]);
        let mut random = Random::new(5);
        let mount = disks.mount("rw,noatime");
        for number in 0..FILES {
            let file = File::create(mount.path().join(name(number))).expect("a file");
            file.set_len(100 * SECTOR as u64).expect("a hole");
            for _ in 0..5 {
                let sectors = 1 + usize_below(&mut random, 8);
                let data = random.bytes(sectors * SECTOR);
                let offset = random.below(90) * SECTOR as u64;
                file.write_all_at(&data, offset).expect("there is room");
            }
        }
        drop(mount);
        disks
    });
    let (mount, fs) = (theirs.mount("rw,noatime"), open_top(&ours));
    for _ in 0..60 {
        let sector = |random: &mut Random| random.below(100) * SECTOR as u64;
        let [from, to] = [(); 2].map(|()| random.below(FILES));
        let [source, target] = [(); 2].map(|()| sector(&mut random));
        let len = sector(&mut random).min(100 * SECTOR as u64 - source);
        if len == 0 || from == to && source.abs_diff(target) < len {
            continue;
        }
        let position = |number, offset| FilePosition { file: at(&fs, &name(number)), offset };
        let copied = fs.copy_range(position(from, source), position(to, target), len, AT);
        assert_eq!(copied.expect("it is copied"), len);
        let open = |number| {
            let path = mount.path().join(name(number));
            File::options().read(true).write(true).open(path).expect("it opens")
        };
        let (mut source, mut target) = (source, target);
        let mut left = usize::try_from(len).expect("small");
        while left > 0 {
            let (source, target) = (Some(&mut source), Some(&mut target));
            let done = rustix::fs::copy_file_range(open(from), source, open(to), target, left);
            left -= done.ok().filter(|&done| done > 0).expect("it copies");
        }
    }
    fs.sync().expect("a commit");
    drop((fs, mount));
    check(&ours);
    let [our_mount, their_mount] = [&ours, &theirs].map(|disks| disks.mount("ro,noatime"));
    for number in 0..FILES {
        let [our_path, their_path] =
            [&our_mount, &their_mount].map(|mount| mount.path().join(name(number)));
        let [our_bytes, their_bytes] =
            [&our_path, &their_path].map(|path| std::fs::read(path).expect("it reads"));
        assert!(our_bytes == their_bytes, "{}", name(number));
        assert_eq!(data_of(&our_path), data_of(&their_path), "{}", name(number));
    }
}
