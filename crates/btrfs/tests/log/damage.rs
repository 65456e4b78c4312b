//! Damaged logs: named in errors, left out when reading, and thrown away.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions};
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::{Error, FileSystem, FileSystemMut};

use crate::by_us::{new_file, open};
use crate::cut::{
    LogShape, PLAIN, SHAPES, at_commit, cut, logs, make, read_only, replay, shell, top,
};
use crate::mutation::{index, scramble};
use crate::stories::{place, write_and_fsync};

fn logged(judges: &Judges, shape: LogShape) -> Disks {
    cut(
        judges,
        shape,
        |path| {
            shell(
                path,
                "mkdir a b; echo 1 > a/x; echo old > kept; head -c 90000 /dev/urandom > d; setfattr -n user.a -v 1 d; for i in $(seq 60); do echo $i > b/file-$i; done",
            );
        },
        |path| {
            shell(
                path,
                "echo new > kept; sync kept; head -c 90000 /dev/urandom >> d; setfattr -x user.a d; sync d; rm b/file-1*; for i in $(seq 100 150); do echo $i > b/file-$i; done; sync b; echo 1 > b/z; ln b/z a/z; sync a",
            );
        },
    )
}

/// A member is lost in the power cut. Readers still see what was fsynced, whether the kernel or we
/// wrote the log. The volume is refused for writing.
#[test]
fn a_log_without_a_member() {
    let Some(judges) = judges::require() else { return };
    let compare = Compare::default().without(Aspect::TimesOfNames);
    let mirrors = LogShape { members: 2, mkfs: "-d raid1 -m raid1", mount: "" };
    let more = LogShape { members: 4, mkfs: "-n 4k -d raid10 -m raid1c3", mount: "" };
    for shape in [mirrors, more] {
        for is_ours in [false, true] {
            let cut = if is_ours { logged_by_us(&judges, shape) } else { logged(&judges, shape) };
            assert_eq!(logs(&cut), 1, "{shape:?}");
            let theirs = cut.copy(&judges);
            let mount = theirs.mount("rw,noatime");
            for lost in 0..shape.members {
                let present: Vec<_> = (0..shape.members).filter(|&one| one != lost).collect();
                let devices = || cut.some_devices(&present);
                let options = EngineOptions { is_degraded: true, ..EngineOptions::default() };
                let volume = BtrfsVolume::open(devices(), &options).expect("one may be missing");
                let outcome = compare.run(&top(&volume), mount.path());
                let what = format!("{shape:?}, ours: {is_ours}, without {lost}");
                assert!(outcome.differences.is_empty(), "{what}: {outcome}");
                outcome.assert_same(3);
                let refused = BtrfsVolume::open_writable(devices(), &options).err();
                let refused = refused.expect("a member would not have what is written");
                assert!(refused.to_string().contains("is missing"), "{what}: {refused}");
            }
        }
    }
}

/// As [`logged`], written by us.
fn logged_by_us(judges: &Judges, shape: LogShape) -> Disks {
    let disks = make(judges, shape);
    let volume = open(&disks, shape);
    let fs = top(&volume);
    write_and_fsync(&fs, "kept", &[1; 9000]);
    fs.sync().expect("a commit");
    write_and_fsync(&fs, "kept", &vec![2; 70000]);
    write_and_fsync(&fs, "new", &vec![3; 200_000]);
    fs.create(place(&fs, "empty"), &new_file()).expect("a file");
    fs.fsync(fs.root()).expect("an fsync");
    disks.copy(judges)
}

pub(crate) fn in_memory(disks: &Disks) -> Vec<Arc<MemoryDevice>> {
    disks.devices().into_iter().map(|below| Arc::new(MemoryDevice::over(below))).collect()
}

pub(crate) fn shared(members: &[Arc<MemoryDevice>]) -> Vec<Arc<dyn BlockDevice>> {
    members.iter().map(|member| Arc::new(member.snapshot()) as Arc<dyn BlockDevice>).collect()
}

/// A block of a log, and every place where the first member has it.
pub(crate) struct LogBlock {
    pub(crate) logical: u64,
    pub(crate) bytes: Vec<u8>,
    pub(crate) places: Vec<u64>,
}

pub(crate) fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

/// The blocks of all logs, the roots first.
pub(crate) fn log_blocks(disks: &Disks, node_size: usize) -> Vec<LogBlock> {
    let image = std::fs::read(&disks.images()[0]).expect("an image");
    let volume = at_commit(disks.devices());
    let generation = volume.superblock().generation.0 + 1;
    let mut next = vec![volume.superblock().item.log_root.get()];
    next.extend(volume.log_trees().expect("logs").iter().map(|log| log.root.logical.0));
    let mut blocks = Vec::new();
    while let Some(logical) = next.pop() {
        let is_it = |at: &usize| {
            let block = &image[*at..*at + node_size];
            number(block, 48) == logical
                && number(block, 80) == generation
                && number(block, 88) == (-6i64).cast_unsigned()
        };
        let places: Vec<_> = (0..image.len() - node_size).step_by(4096).filter(is_it).collect();
        let bytes = image[places[0]..places[0] + node_size].to_vec();
        if bytes[100] > 0 {
            let count = u32::from_le_bytes(bytes[96..100].try_into().expect("4 bytes")) as usize;
            next.extend((0..count).map(|slot| number(&bytes, 101 + 33 * slot + 17)));
        }
        let places = places.into_iter().map(|at| at as u64).collect();
        blocks.push(LogBlock { logical, bytes, places });
    }
    blocks
}

/// The error names the log. There are two ways on: a reader ignores the log and sees the last
/// commit, or `zero_log` throws the log away, as in the next test. A writer may not ignore it.
#[test]
fn a_damaged_log_is_an_error_with_two_ways_on() {
    let Some(judges) = judges::require() else { return };
    let cut = logged(&judges, PLAIN);
    assert_eq!(logs(&cut), 1);
    for LogBlock { logical, places, .. } in log_blocks(&cut, 16384) {
        let members = in_memory(&cut);
        for place in places {
            members[0].write_at(place + 200, b"damage").expect("memory");
        }
        for open in [BtrfsVolume::open, BtrfsVolume::open_writable] {
            let error = open(shared(&members), &EngineOptions::default()).err();
            assert!(matches!(error, Some(Error::Corrupt(_))), "block {logical}: {error:?}");
        }
        let fs = top(&at_commit(shared(&members)));
        let kept = fs.lookup(fs.root(), b"kept").expect("it was committed");
        let mut bytes = [0; 8];
        let len = fs.read(kept, 0, &mut bytes).expect("it was committed");
        assert_eq!(&bytes[..len], b"old\n");
        let ignored = EngineOptions { is_log_ignored: true, ..EngineOptions::default() };
        let refused = BtrfsVolume::open_writable(shared(&members), &ignored).err();
        assert!(matches!(refused, Some(Error::Posix { .. })), "{refused:?}");
    }
}

#[test]
fn a_log_that_is_thrown_away() {
    let Some(judges) = judges::require() else { return };
    let cut = logged(&judges, SHAPES[4]);
    let options = EngineOptions { is_log_ignored: true, ..EngineOptions::default() };
    let volume = BtrfsVolume::open(cut.writable_devices(), &options).expect("it opens");
    let lost = volume.zero_log().expect("superblocks are written").expect("there is a log");
    assert!(lost.problem.is_none() && lost.inodes.len() == 1, "{lost:?}");
    assert!(lost.inodes[0].1 > 2, "{lost:?}");
    drop(volume);
    assert_eq!(logs(&cut), 0);
    cut.assert_checks();
    let fs = read_only(cut.devices());
    assert!(fs.lookup(fs.root(), b"kept").is_ok());
    let mount = cut.mount("rw,noatime");
    assert_eq!(std::fs::read(mount.path().join("kept")).expect("a file"), b"old\n");
    drop(mount);
    let volume = BtrfsVolume::open(cut.writable_devices(), &options).expect("it opens");
    assert!(volume.zero_log().expect("nothing to do").is_none());
}

/// Readers replay a log although the volume has limits that keep us from writing it.
#[test]
fn a_log_of_a_volume_with_limits() {
    let Some(judges) = judges::require() else { return };
    let quotas = "btrfs quota enable .; btrfs qgroup limit 1G .; echo 1 > x; echo 1 > y";
    let before = |path: &Path| shell(path, quotas);
    let cut = cut(&judges, PLAIN, before, |path| shell(path, "echo 22 > x; rm y; sync x; sync ."));
    assert_eq!(logs(&cut), 1);
    let refused =
        BtrfsVolume::open_writable(cut.writable_devices(), &EngineOptions::default()).err();
    assert!(matches!(refused, Some(Error::Unsupported { .. })), "{refused:?}");
    let in_memory = read_only(cut.devices());
    let mount = cut.mount("rw,noatime");
    let compare = Compare::default().without(Aspect::TimesOfNames);
    compare.run(&in_memory, mount.path()).assert_same(2);
}

/// A replay in memory has a limit of memory, and the error names it.
#[test]
fn more_than_there_is_memory_for() {
    let Some(judges) = judges::require() else { return };
    let cut = logged(&judges, PLAIN);
    let options = EngineOptions { replay_bytes: 64 << 10, ..EngineOptions::default() };
    let error = BtrfsVolume::open(cut.devices(), &options).err().expect("too little");
    assert!(error.to_string().contains("more than 65536 bytes"), "{error}");
    replay(cut.writable_devices());
    assert_eq!(logs(&cut), 0);
}

/// All tree blocks, among them blocks of former logs.
fn all_blocks(disks: &Disks, node_size: usize) -> Vec<LogBlock> {
    let image = std::fs::read(&disks.images()[0]).expect("an image");
    let fsid = *at_commit(disks.devices()).superblock().metadata_uuid.as_bytes();
    let mut blocks = BTreeMap::<u64, LogBlock>::new();
    for at in (0..image.len() - node_size).step_by(4096) {
        let bytes = &image[at..at + node_size];
        if bytes[32..48] == fsid && number(bytes, 64) != u64::from_le_bytes(*b"_BHRfS_M") {
            let logical = number(bytes, 48);
            let new = || LogBlock { logical, bytes: bytes.to_vec(), places: Vec::new() };
            blocks.entry(logical).or_insert_with(new).places.push(at as u64);
        }
    }
    blocks.into_values().collect()
}

/// Blocks with false contents and right checksums, mostly in logs. The result is an error or a
/// volume that opens again, and never a panic or an endless loop.
#[test]
fn hostile_logs() {
    let Some(judges) = judges::require() else { return };
    let mut random = Random::new(seed_of_run());
    let cases: u64 = std::env::var("OFFSHOOT_SWEEP").map_or(300, |n| n.parse().expect("a number"));
    let (mut opened, mut refused) = (0, 0);
    for (shape, node_size) in [(PLAIN, 16384), (SHAPES[2], 4096)] {
        let cut = logged(&judges, shape);
        let checksum = at_commit(cut.devices()).superblock().checksum;
        let (of_logs, all) = (log_blocks(&cut, node_size), all_blocks(&cut, node_size));
        for case in 0..cases / 2 {
            let blocks = if case % 3 == 0 { &all } else { &of_logs };
            let members = in_memory(&cut);
            let LogBlock { bytes, places, .. } = &blocks[index(&mut random, blocks.len())];
            let mut bytes = bytes.clone();
            lie(&mut random, &mut bytes);
            offshoot_btrfs_format::encode::seal_block(&mut bytes, checksum);
            for &place in places {
                members[0].write_at(place, &bytes).expect("memory");
            }
            match BtrfsVolume::open(shared(&members), &EngineOptions::default()) {
                Err(_) => refused += 1,
                Ok(volume) => {
                    opened += 1;
                    let fs = top(&volume);
                    let _ = fs.read_dir(fs.root(), 0, &mut |_| std::ops::ControlFlow::Continue(()));
                }
            }
        }
    }
    println!("{opened} opened, {refused} refused");
    assert!(opened > 0 && refused > 0, "{opened} opened, {refused} refused");
}

/// Changes a number in a key or an item, or some bytes.
fn lie(random: &mut Random, bytes: &mut [u8]) {
    let items = u32::from_le_bytes(bytes[96..100].try_into().expect("4 bytes")) as usize;
    if random.below(3) == 0 || items == 0 || bytes[100] > 0 {
        return scramble(random, bytes.get_mut(101..).expect("a block"));
    }
    let header = 101 + 25 * index(random, items);
    let field = |bytes: &[u8], at: usize| {
        u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes")) as usize
    };
    let (offset, size) = (field(bytes, header + 17), field(bytes, header + 21));
    if random.below(3) == 0 || size == 0 {
        return scramble(random, &mut bytes[header..header + 17]);
    }
    scramble(random, &mut bytes[101 + offset..101 + offset + size]);
}
