//! All kinds of volumes, after a shutdown, under load, and after they grew.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::run::run;
use offshoot_testkit::xfs::churn::{ChurnPlan, churn};
use offshoot_testkit::xfs::disk::{XfsDisk, XfsShutdown};
use offshoot_testkit::xfs::judges;
use offshoot_testkit::xfs::matrix::{MATRIX, XfsVolumeKind};
use offshoot_xfs::{XfsOptions, XfsVolume};

use crate::crashed::{ADDING, CrashedVolume, make_until, rounds, settle};
use crate::log_on_disk::LogOnDisk;

#[test]
fn volumes_are_recovered_as_the_kernel_does() {
    let mut random = Random::new(seed_of_run());
    // Those that the kernel can mount and we can write.
    let kinds: Vec<_> = MATRIX
        .iter()
        .filter(|kind| kind.is_mounted && kind.mib < 4096 && kind.name != "metadir")
        .collect();
    for round in 0..rounds(2) {
        let Some(judges) = judges::require() else { return };
        let kind = kinds[usize::try_from(random.below(kinds.len() as u64)).unwrap()];
        // Clones leave extents that are staged.
        let has_clones = round % 2 == 1;
        let crashed = CrashedVolume::make(&judges, kind, XfsShutdown::LogWritten, |root, shape| {
            let dir = root.join("churned");
            fs::create_dir(&dir).unwrap();
            let has_clones = has_clones && shape.has("REFLINK");
            let plan = ChurnPlan { has_clones, has_removals: true };
            churn(&dir, plan, 300, &mut random);
            settle(root);
        });
        let recovered = crashed.judge(20);
        eprintln!("{}: {recovered:?}", kind.name);
    }
}

/// The log has been written around, and ends in the middle of everything.
#[test]
fn logs_that_wrapped_and_stopped_under_load() {
    let mut random = Random::new(seed_of_run());
    for _ in 0..rounds(1) {
        let Some(judges) = judges::require() else { return };
        let kind = XfsVolumeKind::named("stripes");
        let seed = random.number();
        let removes = random.below(2) == 0;
        let wait = Duration::from_millis(300 + random.below(1000));
        let disk = XfsDisk::create(&judges, kind.mib);
        disk.mkfs(kind.mkfs);
        // The kernel complains of much when it is shut down under load.
        let mut mount = disk.try_mount("rw,noatime").unwrap();
        // With each sync, the log advances by 256 KiB, and it has 64 MiB: 256 syncs fill it.
        let file = fs::File::create(mount.path().join("file")).unwrap();
        for number in 0..260 {
            file.set_len(number).unwrap();
            file.sync_all().unwrap();
        }
        drop(file);
        // How many rounds of all threads are synced.
        let synced = Arc::new(AtomicU64::new(0));
        let threads: Vec<_> = (0..3)
            .map(|number| {
                let synced = synced.clone();
                let dir = mount.path().join(format!("thread {number}"));
                std::thread::spawn(move || {
                    let mut random = Random::new(seed + number);
                    let has_clones = removes && number == 0;
                    let plan = ChurnPlan { has_clones, has_removals: removes };
                    for round in 0.. {
                        let below = dir.join(format!("round {round}"));
                        // It ends with the volume.
                        if fs::create_dir_all(&below).is_err() {
                            return;
                        }
                        churn(&below, plan, 20, &mut random);
                        let done = fs::File::open(&below).and_then(|dir| dir.sync_all());
                        synced.fetch_add(u64::from(done.is_ok()), Ordering::Relaxed);
                    }
                })
            })
            .collect();
        let start = Instant::now();
        while synced.load(Ordering::Relaxed) < 3 {
            assert!(start.elapsed() < Duration::from_secs(60), "nothing is synced");
            std::thread::sleep(Duration::from_millis(10));
        }
        // Where the host can, copies are taken meanwhile.
        let copies: Vec<_> = (0..3)
            .filter_map(|_| {
                std::thread::sleep(wait / 3);
                disk.copy_at_once()
            })
            .collect();
        disk.shut_down(&mut mount, XfsShutdown::LogLost);
        // Most of them panic, because the calls of a churn must not fail.
        for thread in threads {
            let _ = thread.join();
        }
        drop(mount);
        eprintln!("{} copies were taken under load", copies.len());
        for disk in copies.into_iter().chain([disk]) {
            let crashed = CrashedVolume { disk, kernel_says: vec![] };
            let log = LogOnDisk::of(&crashed.disk);
            eprintln!("the log ends at {}", log.ends.head);
            assert!(log.ends.head.cycle() > 1, "{:?}", log.ends);
            eprintln!("{:?}", crashed.judge(10));
        }
    }
}

/// The kernel and we take turns: it changes the volume and stops, and we recover it.
#[test]
fn the_kernel_goes_on_behind_our_recoveries() {
    let mut random = Random::new(seed_of_run());
    let Some(judges) = judges::require() else { return };
    let kind = XfsVolumeKind::named("today");
    let crashed = CrashedVolume::make(&judges, kind, XfsShutdown::LogWritten, |_, _| {});
    for turn in 0..5 {
        let options = XfsOptions::default();
        let recovered = XfsVolume::recover(&crashed.disk.writable_device(), &options).unwrap();
        eprintln!("{recovered:?}");
        crashed.disk.assert_checks();
        let mut mount = crashed.disk.mount("rw,noatime", &[]);
        let dir = mount.path().join(format!("turn {turn}"));
        fs::create_dir(&dir).unwrap();
        churn(&dir, ADDING, 40, &mut random);
        let how = if turn % 2 == 0 { XfsShutdown::LogWritten } else { XfsShutdown::LogLost };
        crashed.disk.shut_down(&mut mount, how);
        drop(mount);
        if turn % 2 == 0 {
            crashed.judge(10);
        }
    }
}

/// A transaction changes more blocks than may wait in memory: 700 directories with blocks of
/// 64 KiB.
#[test]
fn transactions_larger_than_the_memory_for_blocks_are_recovered() {
    let Some(judges) = judges::require() else { return };
    let kind = XfsVolumeKind::named("block-64k");
    // Every 30 seconds, the kernel commits what there is.
    make_until(|| {
        let crashed = CrashedVolume::make(&judges, kind, XfsShutdown::LogWritten, |root, _| {
            for number in 0..700 {
                let dir = root.join(format!("directory {number}"));
                fs::create_dir(&dir).unwrap();
                for file in 0..8 {
                    fs::File::create(dir.join(format!("{file}{}", "-".repeat(60)))).unwrap();
                }
            }
        });
        let recovered = crashed.judge(6300);
        let is_large = recovered.transactions < 4 && recovered.replayed > 6300;
        if is_large { Ok(()) } else { Err(format!("{recovered:?}")) }
    });
}

/// The log makes the volume larger: the groups behind its old end hold what comes later.
#[test]
fn a_volume_that_grows_in_the_log_is_recovered() {
    let Some(judges) = judges::require() else { return };
    let groups = |disk: &XfsDisk| disk.field(&["sb 0"], "agcount");
    let disk = make_until(|| {
        let disk = XfsDisk::create(&judges, 512);
        disk.mkfs("-d size=320m,agcount=4");
        let mut mount = disk.mount("rw,noatime", &[]);
        run("xfs_growfs", &[mount.path()]);
        for number in 0..12 {
            let dir = mount.path().join(format!("directory {number}"));
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("file"), "in one of the new groups").unwrap();
        }
        mount.sync();
        disk.shut_down(&mut mount, XfsShutdown::LogWritten);
        drop(mount);
        if groups(&disk) > 4 { Err("the superblock is at home".into()) } else { Ok(disk) }
    });
    let crashed = CrashedVolume { disk, kernel_says: vec![] };
    crashed.judge(24);
    XfsVolume::recover(&crashed.disk.writable_device(), &XfsOptions::default()).unwrap();
    assert!(groups(&crashed.disk) > 4);
}
