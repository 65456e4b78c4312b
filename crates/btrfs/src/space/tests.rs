//! Space on volumes that `mkfs.btrfs` made: chunks that come when metadata is full, the end of all
//! space, and chunks that go when it is empty again. `btrfs check` and the kernel judge.
//!
//! Volumes are filled with extended attributes of the root directory, whose names have different hashes:
//! they differ in four bytes.

use offshoot_btrfs_format::{Key, TreeId};
use offshoot_testkit::disks::Disks;
use offshoot_testkit::judges;
use offshoot_vfs::{Errno, Error, Result};

use super::Purpose;
use super::reserve::Claim;
use crate::Volume;
use crate::test_volumes::{check, open, xattr};

fn item(number: u32, len: usize) -> (Key, Vec<u8>) {
    let digit = |place: u32| b'A' + u8::try_from(number / 32u32.pow(place) % 32).unwrap();
    let name = [b"user.n-", &[digit(3), digit(2), digit(1), digit(0)][..]].concat();
    xattr(&name, &vec![digit(0); len])
}

fn insert(volume: &Volume, number: u32, len: usize) -> Result<()> {
    let handle = volume.join_for(1, Claim::Work)?;
    let (key, data) = item(number, len);
    handle.change(TreeId::FS, |tree| tree.insert(key, &data))
}

fn remove(volume: &Volume, number: u32) {
    let handle = volume.join_to_remove().expect("removing works on a full volume");
    let (key, _) = item(number, 0);
    assert!(handle.change(TreeId::FS, |tree| tree.remove(key)).unwrap(), "{number}");
}

fn is_full(error: &Error) -> bool {
    matches!(error, Error::Posix { errno, .. } if *errno == Errno::NOSPC)
}

fn chunks(volume: &Volume) -> usize {
    volume.chunks().len()
}

/// Fills a volume until it is full, in commits, and empties it again.
fn fill_and_empty(count: usize, mib: u64, mkfs: &[&str], len: usize) {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, count, mib);
    disks.mkfs(mkfs);
    let volume = open(&disks);
    let before = chunks(&volume);
    let mut number = 0;
    let error = loop {
        match insert(&volume, number, len) {
            Ok(()) => number += 1,
            Err(error) => break error,
        }
        if number % 8000 == 0 {
            volume.commit().unwrap();
            check(&disks);
        }
    };
    assert!(is_full(&error), "{error}");
    volume.commit().unwrap();
    let most = chunks(&volume);
    eprintln!("{mkfs:?}: {number} items, {before} chunks, {most} when full");
    assert!(most > before, "chunks were allocated");
    drop(volume);
    check(&disks);

    let volume = open(&disks);
    for number in 0..number {
        remove(&volume, number);
    }
    volume.commit().unwrap();
    check(&disks);
    volume.commit().unwrap();
    check(&disks);
    let left = chunks(&volume);
    eprintln!("{left} chunks when empty");
    assert!(left < most, "chunks were removed");
    for number in 0..number / 2 {
        insert(&volume, number, len).expect("what was free before is free again");
    }
    volume.commit().unwrap();
    drop(volume);
    check(&disks);
    kernel_writes(&disks, 0);
    let volume = open(&disks);
    for number in 0..number / 2 {
        remove(&volume, number);
    }
    volume.commit().unwrap();
    drop(volume);
    check(&disks);
}

/// The kernel fills a file, and removes what it wrote in the round before.
fn kernel_writes(disks: &Disks, round: u8) {
    let kernel = disks.mount("rw,noatime");
    for file in 0..20u8 {
        let bytes = vec![round; 100_000];
        std::fs::write(kernel.path().join(format!("file-{round}-{file}")), bytes).unwrap();
        if round > 0 {
            let old = format!("file-{}-{file}", round - 1);
            let bytes = std::fs::read(kernel.path().join(&old)).unwrap();
            assert!(bytes.len() == 100_000 && bytes.iter().all(|&byte| byte == round - 1));
            std::fs::remove_file(kernel.path().join(&old)).unwrap();
        }
    }
    drop(kernel);
    check(disks);
}

#[test]
fn single() {
    fill_and_empty(1, 256, &["-m", "single"], 6000);
}

#[test]
fn dup_of_small_nodes_without_block_group_tree() {
    fill_and_empty(1, 256, &["-m", "dup", "-n", "4k", "-O", "^block-group-tree"], 1500);
}

#[test]
fn raid0_with_block_group_tree() {
    fill_and_empty(2, 200, &["-m", "raid0", "-O", "block-group-tree"], 6000);
}

#[test]
fn raid1_without_free_space_tree() {
    fill_and_empty(2, 256, &["-m", "raid1", "-O", "^free-space-tree,^block-group-tree"], 6000);
}

#[test]
fn raid1c3_of_large_nodes() {
    fill_and_empty(4, 300, &["-m", "raid1c3", "-n", "64k"], 9000);
}

#[test]
fn raid1c4() {
    fill_and_empty(4, 256, &["-m", "raid1c4"], 6000);
}

#[test]
fn raid10() {
    fill_and_empty(4, 200, &["-m", "raid10", "-d", "raid10"], 6000);
}

#[test]
fn mixed() {
    fill_and_empty(1, 100, &["--mixed"], 1500);
}

/// Three rounds of both sides on one volume, on which chunks come and go.
#[test]
fn ping_pong() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 2, 300);
    disks.mkfs(&["-m", "raid1", "-d", "raid0"]);
    for round in 0..3u8 {
        let volume = open(&disks);
        for number in 0..20_000 {
            insert(&volume, number, 3000).unwrap();
        }
        volume.commit().unwrap();
        drop(volume);
        check(&disks);
        kernel_writes(&disks, round);
        let volume = open(&disks);
        for number in 0..20_000 {
            remove(&volume, number);
        }
        volume.commit().unwrap();
        drop(volume);
        check(&disks);
    }
}

/// Data is reserved until there is none, from chunks that are allocated for it.
#[test]
fn data_is_reserved_until_it_is_full() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&[]);
    let volume = open(&disks);
    let mut all = Vec::new();
    let error = loop {
        match volume.reserve_data(5 << 20) {
            Ok(reservation) => all.push(reservation),
            Err(error) => break error,
        }
    };
    assert!(is_full(&error), "{error}");
    assert!(all.len() > 10, "{} reservations", all.len());
    let one = all.pop().unwrap();
    let (logical, len) = one.take(&volume, 1 << 20).unwrap();
    assert!(len > 0 && len <= 1 << 20);
    volume.live().unwrap().space.give_back(logical, len).unwrap();
    drop(one);
    drop(all);
    assert_eq!(volume.live().unwrap().space.ledger(Purpose::Data).reserved(), 0);
    volume.commit().unwrap();
    drop(volume);
    check(&disks);
    kernel_writes(&disks, 0);
}

/// Many threads at once run out of space, and nothing breaks.
#[test]
fn threads_run_out_of_space() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 160);
    disks.mkfs(&["-m", "single"]);
    let volume = open(&disks);
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let volume = &volume;
            scope.spawn(move || {
                let mut number = thread;
                while insert(volume, number, 3000)
                    .inspect_err(|e| assert!(is_full(e), "{e}"))
                    .is_ok()
                {
                    number += 4;
                }
                for number in (thread..number).step_by(4) {
                    remove(volume, number);
                }
            });
        }
    });
    volume.commit().unwrap();
    drop(volume);
    check(&disks);
    drop(disks.mount("rw,noatime"));
    check(&disks);
}
