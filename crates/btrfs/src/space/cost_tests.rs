//! The cost of a write, a commit and a chunk does not grow with the number of block groups.

use std::sync::Arc;
use std::time::Instant;

use offshoot_btrfs_format::TreeId;
use offshoot_device::BlockDevice;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::{EntryPlace, FileId, FileSystem, FileSystemMut, NewFile, Timestamp};

use super::Purpose;
use super::chunk_plan::MemberSpace;
use super::looked::looked_at;
use crate::test_volumes::{bare_of, in_memory_of};
use crate::{BtrfsVolume, EngineOptions, Filesystem};

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };
const GIB: u64 = 1 << 30;

fn open(device: Arc<dyn BlockDevice>) -> Filesystem {
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(vec![device], &options).expect("it opens");
    volume.filesystem(TreeId::FS).expect("every volume has one")
}

fn create(fs: &Filesystem, name: &str) -> FileId {
    let place = EntryPlace { dir: fs.root(), name: name.as_bytes() };
    fs.create(place, &NEW).expect("there is room")
}

/// How many groups, ranges and holes are looked at: for a chunk, to write ten files and to commit
/// them, and for `statfs`. The volume has so many block groups that are full.
fn looked_with_groups(groups: u64) -> [u64; 4] {
    let fs = open(bare_of(16384, (groups + 100) * GIB + 100 * GIB));
    let volume = fs.volume();
    let space = &volume.live().expect("it is writable").space;
    let grow = || {
        looked_at(|| {
            let has_grown = crate::upkeep::try_grow(volume, Purpose::Data, || true);
            assert!(has_grown.expect("no device fails"), "there is place");
            let claim = volume.reserve_data(GIB).expect("a free group").keep();
            space.take_data(&volume.base, &claim, GIB).expect("it was reserved");
        })
    };
    let begun = Instant::now();
    for _ in 0..groups {
        grow();
    }
    let grown = begun.elapsed();
    let (of_chunk, ()) = grow();
    // The first ones load the groups of metadata.
    let write = |from: u64| {
        for number in from..from + 10 {
            let file = create(&fs, &format!("file-{number}"));
            fs.write(file, 0, &vec![7; 100_000], AT).expect("there is room");
        }
    };
    write(0);
    fs.sync().expect("a commit");
    let begun = Instant::now();
    let (of_write, ()) = looked_at(|| write(10));
    let written = begun.elapsed();
    let begun = Instant::now();
    let (of_commit, ()) = looked_at(|| fs.sync().expect("a commit"));
    let committed = begun.elapsed();
    let (of_statfs, _) = looked_at(|| fs.statfs().expect("it is known"));
    println!(
        "{groups} groups: looked at {of_chunk}, {of_write}, {of_commit}, {of_statfs}; {grown:?} to \
         make them, {written:?} to write, {committed:?} to commit"
    );
    space.groups.read().recount();
    [of_chunk, of_write, of_commit, of_statfs]
}

/// Once each of these looked at all block groups.
#[test]
fn the_cost_does_not_grow_with_the_block_groups() {
    let few = looked_with_groups(10);
    for groups in [1_000, 10_000] {
        let many = looked_with_groups(groups);
        for (few, many) in few.into_iter().zip(many) {
            assert!(many <= few + 8, "{many} with {groups} groups, {few} with 10");
        }
    }
}

/// The sums and sets of block groups, and the holes of members, are those of a recount.
fn recount(fs: &Filesystem) {
    let volume = fs.volume();
    let space = &volume.live().expect("it is writable").space;
    space.groups.read().recount();
    let handle = volume.join().expect("there is room");
    let _chunks = space.chunk_lock.lock();
    let kept = volume.with_member_spaces(|all| all.to_vec()).expect("it reads");
    let loaded = volume.load_member_spaces().expect("it reads");
    drop(handle);
    assert_eq!(kept.len(), loaded.len());
    for (kept, loaded) in kept.iter().zip(&loaded) {
        let of = |member: &MemberSpace| (member.holes(), member.allocated_bytes);
        assert_eq!(of(kept), of(loaded));
    }
}

/// Chunks are allocated and removed, and files are made, written and removed, with commits in
/// between.
#[test]
fn what_is_kept_of_groups_is_what_a_recount_finds() {
    let seed = seed_of_run();
    println!("seed {seed}");
    let mut random = Random::new(seed);
    let fs = open(in_memory_of(16384, 4 * GIB));
    let mut files = Vec::new();
    for step in 0..400 {
        match random.below(8) {
            0..=3 => {
                let name = format!("file-{step}");
                let file = create(&fs, &name);
                let len = usize::try_from(1 + random.below(1 << 20)).expect("small");
                fs.write(file, 0, &vec![7; len], AT).expect("there is room");
                files.push(name);
            }
            4 | 5 if !files.is_empty() => {
                let some = random.below(files.len() as u64);
                let name = files.swap_remove(usize::try_from(some).expect("small"));
                let place = EntryPlace { dir: fs.root(), name: name.as_bytes() };
                fs.unlink(place, AT).expect("removing always works");
            }
            6 => {
                let has_grown = crate::upkeep::try_grow(fs.volume(), Purpose::Data, || true);
                has_grown.expect("no device fails");
            }
            _ => fs.sync().expect("a commit"),
        }
        if step % 10 == 0 {
            recount(&fs);
        }
    }
    fs.sync().expect("a commit");
    recount(&fs);
    let space = &fs.volume().live().expect("it is writable").space;
    assert!(space.groups.read().changed().is_empty(), "the commit stored all");
}
