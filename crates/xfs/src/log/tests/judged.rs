//! Logs of ours that the kernel recovers, and those of the kernel that we go on with.

use std::fs;
use std::sync::Arc;
use std::thread;

use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::disk::{RECOVERY, XfsDisk};
use offshoot_testkit::xfs::judges::{self, XfsJudges};
use offshoot_xfs_format::FsBlock;

use super::blocks::{TestBlock, TestVolume, assert_whole, change};
use crate::log::XfsLogOptions;

/// The blocks of the file with this inode number.
fn blocks_of_file(disk: &XfsDisk, ino: u64) -> Vec<u64> {
    let shown = disk.xfs_db(&[&format!("inode {ino}"), "bmap"]);
    // data offset 0 startblock 24 (0/24) count 256 flag 0
    let extents = shown.lines().filter(|line| line.contains("startblock")).map(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        let number = |name| {
            let at = words.iter().position(|word| *word == name).unwrap();
            words[at + 1].parse::<u64>().unwrap()
        };
        (number("startblock"), number("count"))
    });
    extents.flat_map(|(start, count)| start..start + count).collect()
}

/// A volume, and the blocks of a file in it.
fn make(judges: &XfsJudges, mkfs: &str) -> (XfsDisk, Vec<u64>) {
    let disk = XfsDisk::create(judges, 160);
    disk.mkfs(mkfs);
    let ino = {
        let mount = disk.mount("rw,noatime", &[]);
        let path = mount.path().join("blocks");
        fs::write(&path, Random::new(1).bytes(250 * 4096)).unwrap();
        mount.sync();
        XfsDisk::ino(&path)
    };
    let places = blocks_of_file(&disk, ino);
    assert_eq!(places.len(), 250);
    (disk, places)
}

fn judge(mkfs: &str, record_bytes: u32, rounds: u64) {
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    let Some(judges) = judges::require() else { return };
    let (disk, places) = make(&judges, mkfs);
    let mut blocks: Vec<Arc<TestBlock>> = Vec::new();
    for round in 0..rounds {
        let volume = TestVolume::on(disk.writable_device());
        let place = |&block: &u64| volume.geometry().place_of(FsBlock(block)).unwrap();
        // After each round all of it is at home, and the sequences of the log begin anew.
        blocks = places.iter().map(|block| TestBlock::new(&volume, place(block))).collect();
        let options = XfsLogOptions {
            record_bytes: Some(record_bytes),
            context_bytes: Some(300 << 10),
            ..XfsLogOptions::default()
        };
        let log = volume.start(&options);
        let is_clean = round % 3 == 2;
        thread::scope(|scope| {
            for number in 0..2 {
                let (log, blocks) = (&log, &blocks);
                let mut random = Random::new(random.number().wrapping_add(number));
                scope.spawn(move || {
                    for _ in 0..1500 {
                        let sequence = change(log, blocks, &mut random).unwrap();
                        if random.below(100) == 0 {
                            log.force(sequence).unwrap();
                        }
                    }
                });
            }
        });
        log.force_all().unwrap();
        let mut forced = log.durable().0;
        if is_clean {
            log.unmount().unwrap();
        } else {
            // Some of this is durable, or none.
            for _ in 0..random.below(300) {
                change(&log, &blocks, &mut random).unwrap();
            }
            drop(log);
        }
        eprintln!("round {round}, clean: {is_clean}, {:?}", volume.ends().head);
        drop(volume);
        let expected: &[_] = if is_clean { &[] } else { &[RECOVERY] };
        let mount = disk.mount("rw,noatime", expected);
        fs::write(mount.path().join(format!("after {round}")), "the recovery").unwrap();
        drop(mount);
        disk.assert_checks();
        forced = assert_whole(&blocks, &*disk.device(), forced);
        assert!(forced > 0);
    }
    assert_eq!(blocks.len(), 250);
}

#[test]
fn the_kernel_recovers_logs_of_small_records() {
    judge("--unsupported", 32 << 10, 4);
}

#[test]
fn the_kernel_recovers_logs_of_large_records() {
    judge("--unsupported", 256 << 10, 3);
}

#[test]
fn the_kernel_recovers_logs_on_large_sectors() {
    judge("--unsupported -s size=4096", 32 << 10, 3);
}

#[test]
fn the_kernel_recovers_logs_with_a_stripe() {
    judge("--unsupported -l su=256k", 256 << 10, 3);
}

/// A checkpoint without items only tells the tail. The kernel refused it when it had the header of
/// a transaction.
#[test]
fn the_kernel_recovers_a_log_that_ends_without_items() {
    let Some(judges) = judges::require() else { return };
    let (disk, places) = make(&judges, "--unsupported");
    let volume = TestVolume::on(disk.writable_device());
    let place = |&block: &u64| volume.geometry().place_of(FsBlock(block)).unwrap();
    let blocks: Vec<_> = places.iter().map(|block| TestBlock::new(&volume, place(block))).collect();
    let log = volume.start(&XfsLogOptions::default());
    let mut random = Random::new(2);
    for _ in 0..100 {
        change(&log, &blocks, &mut random).unwrap();
    }
    log.quiesce().unwrap();
    assert_ne!(log.statistics().empty_checkpoints, 0);
    let forced = log.durable().0;
    drop(log);
    drop(volume);
    drop(disk.mount("rw,noatime", &[RECOVERY]));
    disk.assert_checks();
    assert_whole(&blocks, &*disk.device(), forced);
}
