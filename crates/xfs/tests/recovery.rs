//! Logs of volumes that were not unmounted: what we make of them, against what the kernel makes of
//! a copy.

mod logs;

use std::fs;
use std::ops::ControlFlow;
use std::os::unix::fs::{DirEntryExt, FileExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use offshoot_device::{BlockDevice, CrashDevice, CrashPlan, MemoryDevice};
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::run::run;
use offshoot_testkit::xfs::churn::{ChurnPlan, churn};
use offshoot_testkit::xfs::disk::{RECOVERY, XfsDisk, XfsShutdown};
use offshoot_testkit::xfs::fill::XfsFillShape;
use offshoot_testkit::xfs::judges::{self, XfsJudges};
use offshoot_testkit::xfs::matrix::{MATRIX, XfsVolumeKind};
use offshoot_vfs::{Code, FileSystem};
use offshoot_xfs::{XfsOptions, XfsPending, XfsRecovery, XfsReport, XfsVolume};
use offshoot_xfs_format::Lsn;
use offshoot_xfs_format::log::XfsLogRecord;

use logs::LogOnDisk;

/// A volume that was not unmounted.
struct CrashedVolume {
    disk: XfsDisk,
    kernel_says: Vec<&'static str>,
}

/// Options whose reports are collected.
fn collecting() -> (XfsOptions, Arc<Mutex<Vec<XfsReport>>>) {
    let reports = Arc::new(Mutex::new(Vec::new()));
    let told = reports.clone();
    let reporter: offshoot_xfs::XfsReporter =
        Arc::new(move |report: &XfsReport| told.lock().unwrap().push(report.clone()));
    (XfsOptions { reporter: Some(reporter), ..XfsOptions::default() }, reports)
}

impl CrashedVolume {
    /// A volume of a kind, changed, and shut down as by a crash.
    fn make(
        judges: &XfsJudges,
        kind: &'static XfsVolumeKind,
        how: XfsShutdown,
        change: impl FnOnce(&Path, &XfsFillShape),
    ) -> Self {
        let disk = XfsDisk::create(judges, kind.mib);
        disk.mkfs(kind.mkfs);
        if !kind.changes.is_empty() {
            disk.change_with_xfs_db(kind.changes);
        }
        let shape = XfsFillShape::of(&disk);
        let mut mount = disk.mount("rw,noatime", kind.kernel_says);
        change(mount.path(), &shape);
        disk.shut_down(&mut mount, how);
        drop(mount);
        Self { disk, kernel_says: kind.kernel_says.to_vec() }
    }

    fn copy(&self) -> Self {
        Self { disk: self.disk.copy(), kernel_says: self.kernel_says.clone() }
    }

    /// Compares our recovery in memory with the kernel's of a copy. Only files that our report names
    /// may differ. Returns what it says is left to do.
    fn judge_pending(&self) -> XfsPending {
        let by_kernel = self.disk.copy();
        drop(by_kernel.try_mount("rw,noatime").unwrap());
        let (options, reports) = collecting();
        let ours = XfsVolume::open(self.disk.device(), &options).unwrap();
        let pending = match &reports.lock().unwrap()[..] {
            [XfsReport::LogReplayed { pending, .. }] => pending.clone(),
            [] => XfsPending::default(),
            reports => panic!("{reports:?}"),
        };
        let mount = by_kernel.mount("ro,noatime", &self.kernel_says);
        let compare = Compare::default().without(Aspect::StoredAcls);
        let outcome = compare.run(&*ours, mount.path());
        let named: Vec<_> = fs::read_dir(mount.path())
            .unwrap()
            .map(|entry| entry.unwrap())
            .filter(|entry| pending.files.contains(&entry.ino()))
            .map(|entry| entry.file_name().into_string().unwrap().replace(' ', "\\x20"))
            .collect();
        for difference in &outcome.differences {
            let is_named = named.iter().any(|name| difference.starts_with(&format!("./{name}:")));
            assert!(is_named, "{difference}\n{pending}; {named:?}");
        }
        pending
    }

    /// Compares our recoveries, in memory and to disk, with the kernel's of a copy. Returns what
    /// ours to disk did, unless something is left to do.
    fn judge(&self, names_at_least: u64) -> Option<XfsRecovery> {
        let recovering = [&self.kernel_says[..], &[RECOVERY]].concat();
        let by_kernel = self.disk.copy();
        drop(by_kernel.mount("rw,noatime", &recovering));
        by_kernel.assert_checks();
        let (options, reports) = collecting();
        let ours = XfsVolume::open(self.disk.device(), &options).unwrap();
        let reports = std::mem::take(&mut *reports.lock().unwrap());
        let [XfsReport::LogReplayed { is_stored: false, ref pending }] = reports[..] else {
            panic!("{reports:?}")
        };
        let compare = Compare::default().without(Aspect::StoredAcls);
        {
            let mount = by_kernel.mount("ro,noatime", &self.kernel_says);
            compare.run(&*ours, mount.path()).assert_same(names_at_least);
        }
        let by_us = self.disk.copy();
        let device = by_us.writable_device();
        let recovered = XfsVolume::recover(&device, &XfsOptions::default());
        drop(device);
        if !pending.is_empty() {
            eprintln!("left to do: {pending}");
            let error = recovered.unwrap_err();
            assert_eq!(error.code(), Code::LogNotReplayed, "{error}");
            assert!(same_bytes(&self.disk, &by_us), "it was written");
            return None;
        }
        let recovered = recovered.unwrap().expect("the log is not empty");
        by_us.assert_checks();
        let (options, reports) = collecting();
        let ours = XfsVolume::open(by_us.device(), &options).unwrap();
        assert_eq!(*reports.lock().unwrap(), []);
        {
            let mount = by_kernel.mount("ro,noatime", &self.kernel_says);
            compare.run(&*ours, mount.path()).assert_same(names_at_least);
        }
        for counter in ["icount", "ifree", "fdblocks"] {
            let value = |disk: &XfsDisk| disk.field(&["sb 0"], counter);
            assert_eq!(value(&by_us), value(&by_kernel), "{counter}");
        }
        {
            let mount = by_us.mount("rw,noatime", &self.kernel_says);
            compare.run(&*ours, mount.path()).assert_same(names_at_least);
            fs::write(mount.path().join("after"), "the recovery").unwrap();
        }
        by_us.assert_checks();
        Some(recovered)
    }
}

fn same_bytes(one: &XfsDisk, other: &XfsDisk) -> bool {
    let status =
        std::process::Command::new("cmp").arg("-s").args([one.image(), other.image()]).status();
    status.unwrap().success()
}

/// Waits until the kernel has freed the inodes of removed files.
fn settle(root: &Path) {
    rustix::fs::statvfs(root).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
}

/// How many cases of a kind are tried: few, or those of a campaign.
fn rounds(few: u64) -> u64 {
    let given = std::env::var("OFFSHOOT_ROUNDS").ok();
    given.map_or(few, |rounds| few * rounds.parse::<u64>().expect("a number of rounds"))
}

#[test]
fn volumes_are_recovered_as_the_kernel_does() {
    let mut random = Random::new(seed_of_run());
    // Those that the kernel can mount and we can write.
    let kinds: Vec<_> = MATRIX
        .iter()
        .filter(|kind| kind.is_mounted && kind.mib < 4096 && kind.name != "metadir")
        .collect();
    let (mut stored, rounds) = (0, rounds(4));
    for round in 0..rounds {
        let Some(judges) = judges::require() else { return };
        let kind = kinds[usize::try_from(random.below(kinds.len() as u64)).unwrap()];
        // Clones leave extents that are staged, so half of the volumes do without.
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
        stored += u64::from(recovered.is_some());
    }
    assert!(stored * 4 >= rounds, "only {stored} of {rounds} were recovered to disk");
}

/// The log has been written around, and ends in the middle of everything.
#[test]
fn logs_that_wrapped_and_stopped_under_load() {
    let mut random = Random::new(seed_of_run());
    for _ in 0..rounds(2) {
        let Some(judges) = judges::require() else { return };
        let kind = XfsVolumeKind::named("stripes");
        let seed = random.number();
        let wait = Duration::from_millis(300 + random.below(1000));
        let disk = XfsDisk::create(&judges, kind.mib);
        disk.mkfs(kind.mkfs);
        // The kernel complains of much when it is shut down under load.
        let mut mount = disk.try_mount("rw,noatime").unwrap();
        // With each sync, the log advances by 256 KiB, and it has 64 MiB.
        let file = fs::File::create(mount.path().join("file")).unwrap();
        for number in 0..250 {
            file.set_len(number).unwrap();
            file.sync_all().unwrap();
        }
        drop(file);
        let threads: Vec<_> = (0..3)
            .map(|number| {
                let dir = mount.path().join(format!("thread {number}"));
                std::thread::spawn(move || {
                    let mut random = Random::new(seed + number);
                    let plan = ChurnPlan { has_clones: number == 0, has_removals: true };
                    for round in 0.. {
                        let below = dir.join(format!("round {round}"));
                        // It ends with the volume.
                        if fs::create_dir_all(&below).is_err() {
                            return;
                        }
                        churn(&below, plan, 20, &mut random);
                        let _ = fs::File::open(&below).and_then(|dir| dir.sync_all());
                    }
                })
            })
            .collect();
        std::thread::sleep(wait);
        disk.shut_down(&mut mount, XfsShutdown::LogLost);
        // Most of them panic, because the calls of a churn must not fail.
        for thread in threads {
            let _ = thread.join();
        }
        drop(mount);
        let crashed = CrashedVolume { disk, kernel_says: vec![] };
        let log = LogOnDisk::of(&crashed.disk);
        eprintln!("the log ends at {}", log.ends.head);
        assert!(log.ends.head.cycle() > 1, "{:?}", log.ends);
        eprintln!("{:?}", crashed.judge(10));
    }
}

/// A volume with a log of many records, each synced; nothing of it is at home yet.
fn many_records(judges: &XfsJudges, plan: ChurnPlan, random: &mut Random) -> CrashedVolume {
    let kind = XfsVolumeKind::named("today");
    CrashedVolume::make(judges, kind, XfsShutdown::LogWritten, |root, _| {
        for round in 0..30 {
            let dir = root.join(format!("round {round}"));
            fs::create_dir(&dir).unwrap();
            churn(&dir, plan, 8, random);
            fs::File::open(&dir).unwrap().sync_all().unwrap();
        }
        settle(root);
    })
}

/// With removals, most cuts leave unlinked inodes, which are not recovered to disk.
const REMOVING: ChurnPlan = ChurnPlan { has_clones: true, has_removals: true };
const ADDING: ChurnPlan = ChurnPlan { has_clones: false, has_removals: false };

/// The log ends anywhere, or lacks a record that was in flight.
#[test]
fn logs_that_are_cut_are_recovered_as_the_kernel_does() {
    let mut random = Random::new(seed_of_run());
    for plan in [ADDING, REMOVING] {
        let Some(judges) = judges::require() else { return };
        let crashed = many_records(&judges, plan, &mut random);
        let records = LogOnDisk::of(&crashed.disk).records();
        assert!(records.len() > 30, "only {} records", records.len());
        let (mut stored, cuts) = (0, rounds(3));
        for cut in 0..cuts {
            let copy = crashed.copy();
            cut_log(&LogOnDisk::of(&copy.disk), &records, cut, &mut random);
            stored += u32::from(copy.judge(1).is_some());
        }
        eprintln!("{stored} of {cuts} recovered to disk");
        assert!(stored > 0 || plan.has_removals);
    }
}

/// Loses blocks of the log: all from a record on, all from the middle of a record on, or those of
/// a record that was in flight with others.
fn cut_log(log: &LogOnDisk, records: &[XfsLogRecord], cut: u64, random: &mut Random) {
    let mut back = |most: u64| {
        let back = 1 + usize::try_from(random.below(most)).unwrap();
        let record = &records[records.len() - back];
        (record.lsn, record.block_count())
    };
    if cut % 3 == 2 {
        // Eight can be in flight.
        let (at, count) = back(6);
        return log.lose(at, count);
    }
    let (at, count) = back(28);
    let inside = if cut.is_multiple_of(3) { 0 } else { random.below(count.into()) };
    let at = log.ring.advance(at, u32::try_from(inside).unwrap());
    log.lose(at, log.ring.distance(at, log.ends.head).unwrap());
}

/// Flipped bytes in a log, with checksums that are right again: everything ends, without a panic.
#[test]
fn hostile_logs_end_with_an_error_or_a_volume() {
    let mut random = Random::new(seed_of_run());
    let Some(judges) = judges::require() else { return };
    let crashed = many_records(&judges, REMOVING, &mut random);
    let log = LogOnDisk::of(&crashed.disk);
    let records = log.records();
    drop(judges);
    let options = XfsOptions { replay_bytes: 64 << 20, ..XfsOptions::default() };
    let (mut opened, mut refused) = (0, 0);
    for _ in 0..rounds(300) {
        let device = Arc::new(MemoryDevice::over(crashed.disk.device()));
        let change = |at: Lsn, random: &mut Random| {
            let (mut record, mut blocks) = log.read(at);
            record.unpack(&mut blocks).unwrap();
            let headers = record.header_blocks() as usize * 512;
            let len = blocks.len() - headers;
            for _ in 0..=random.below(3) {
                // Most of the sense is at the start.
                let most = if random.below(2) == 0 { len.min(600) } else { len };
                let at = usize::try_from(random.below(most as u64)).unwrap();
                blocks[headers + at] = match random.below(3) {
                    0 => 0xff,
                    1 => blocks[headers + at] ^ 1 << random.below(8),
                    _ => u8::try_from(random.below(256)).unwrap(),
                };
            }
            if random.below(8) == 0 {
                record.ops = u32::try_from(random.below(1 << 16)).unwrap();
            }
            if random.below(8) > 0 {
                record.seal(log.ring, &mut blocks).unwrap();
            }
            for (block, index) in blocks.chunks(512).zip(0..) {
                let place = log.place(log.ring.advance(at, index));
                device.write_at(place, block).unwrap();
            }
        };
        for _ in 0..2 {
            let index = usize::try_from(random.below(records.len() as u64)).unwrap();
            change(records[index].lsn, &mut random);
        }
        let start = Instant::now();
        let device: Arc<dyn BlockDevice> = device;
        let ours = XfsVolume::open(device.clone(), &options);
        match &ours {
            Ok(ours) => {
                opened += 1;
                let _ = ours.read_dir(ours.root(), 0, &mut |_| ControlFlow::Continue(()));
                let _ = ours.statfs();
            }
            Err(_) => refused += 1,
        }
        let _ = XfsVolume::recover(&device, &options);
        assert!(start.elapsed() < Duration::from_secs(20), "it takes {:?}", start.elapsed());
    }
    eprintln!("{opened} opened, {refused} refused");
    assert!(opened > 10 && refused > 10);
}

/// Chains of intents that the end of the log cuts: files of many extents are cloned, exchanged and
/// removed, while another thread syncs.
#[test]
fn intents_that_have_no_end_are_named() {
    let mut random = Random::new(seed_of_run());
    let Some(judges) = judges::require() else { return };
    let kind = XfsVolumeKind::named("today");
    let crashed = CrashedVolume::make(&judges, kind, XfsShutdown::LogWritten, |root, _| {
        let original = root.join("original");
        let file = fs::File::create(&original).unwrap();
        for number in 0..1500 {
            file.write_all_at(&[7; 4096], number * 8192).unwrap();
        }
        file.sync_all().unwrap();
        let file = fs::File::open(&original).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let other = fs::File::create(root.join("synced")).unwrap();
                // A panic of the other thread does not stop this one.
                for number in 1..20_000 {
                    if done.load(Ordering::Relaxed) {
                        return;
                    }
                    other.set_len(number).unwrap();
                    other.sync_all().unwrap();
                }
            });
            for number in 0..3 {
                let clone = fs::File::create(root.join(format!("clone {number}"))).unwrap();
                rustix::fs::ioctl_ficlone(&clone, &file).unwrap();
                clone.set_len(4096 * number).unwrap();
            }
            let clone = fs::File::create(root.join("other")).unwrap();
            rustix::fs::ioctl_ficlone(&clone, &file).unwrap();
            done.store(true, Ordering::Relaxed);
        });
    });
    let log = LogOnDisk::of(&crashed.disk);
    let records = log.records();
    // We look for cuts that leave intents, and hold some of them against the kernel.
    let mut kinds = [0; 4];
    let (mut tried, mut judged) = (0, 0);
    while judged < rounds(2) && tried < 60 * rounds(2) {
        tried += 1;
        let record = &records[usize::try_from(random.below(records.len() as u64 - 1)).unwrap() + 1];
        let count = log.ring.distance(record.lsn, log.ends.head).unwrap();
        let device = Arc::new(MemoryDevice::over(crashed.disk.device()));
        for index in 0..count {
            device.write_at(log.place(log.ring.advance(record.lsn, index)), &[0; 512]).unwrap();
        }
        let (options, reports) = collecting();
        XfsVolume::open(device, &options).unwrap();
        let is_cut = |report: &XfsReport| match report {
            XfsReport::LogReplayed { pending, .. } => {
                pending.frees + pending.reference_counts + pending.mappings > 0
            }
            _ => false,
        };
        if !reports.lock().unwrap().iter().any(is_cut) {
            continue;
        }
        judged += 1;
        let copy = crashed.copy();
        LogOnDisk::of(&copy.disk).lose(record.lsn, count);
        let pending = copy.judge_pending();
        let found =
            [pending.frees, pending.reverse_mappings, pending.reference_counts, pending.mappings];
        kinds.iter_mut().zip(found).for_each(|(sum, count)| *sum += count);
    }
    eprintln!("{tried} cuts; frees, reverse mappings, counts, mappings: {kinds:?}");
    assert!(judged > 0, "no cut left intents");
}

/// Without a reverse map, the kernel exchanges whole forks of two files, and logs that the blocks
/// of their trees get other owners.
#[test]
fn files_that_exchanged_their_trees_have_them() {
    let Some(judges) = judges::require() else { return };
    let kind = XfsVolumeKind::named("first-v5");
    let disk = XfsDisk::create(&judges, kind.mib);
    disk.mkfs(kind.mkfs);
    let mount = disk.mount("rw,noatime", &[]);
    let files = ["one", "other"].map(|name| mount.path().join(name));
    for (path, byte) in files.iter().zip([1, 2]) {
        let file = fs::File::create(path).unwrap();
        for number in 0..3000 {
            file.write_all_at(&[byte; 4096], number * 8192).unwrap();
        }
        file.sync_all().unwrap();
    }
    drop(mount);
    let mut mount = disk.mount("rw,noatime", &[]);
    let [one, other] = ["one", "other"].map(|name| mount.path().join(name));
    disk.xfs_io(&one, &[&format!("swapext {}", other.display()), "fsync"]);
    disk.shut_down(&mut mount, XfsShutdown::LogWritten);
    drop(mount);
    // The kernel proves the checksum of such an inode before it has made it, and does not mount.
    XfsVolume::recover(&disk.writable_device(), &XfsOptions::default()).unwrap().unwrap();
    disk.assert_checks();
    let mount = disk.mount("rw,noatime", &[]);
    for (name, byte) in [("one", 2), ("other", 1)] {
        let content = fs::read(mount.path().join(name)).unwrap();
        assert!(content.chunks(8192).all(|chunk| chunk[..4096] == [byte; 4096]), "{name}");
    }
}

/// The log makes the volume larger: the groups behind its old end hold what comes later.
#[test]
fn a_volume_that_grows_in_the_log_is_recovered() {
    let Some(judges) = judges::require() else { return };
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
    let groups = |disk: &XfsDisk| disk.field(&["sb 0"], "agcount");
    let before = groups(&disk);
    let crashed = CrashedVolume { disk, kernel_says: vec![] };
    assert!(crashed.judge(24).is_some());
    XfsVolume::recover(&crashed.disk.writable_device(), &XfsOptions::default()).unwrap();
    eprintln!("{before} groups before, {} behind", groups(&crashed.disk));
    assert!(groups(&crashed.disk) > before);
}

/// A directory whose blocks have 16 KiB, in a volume whose free space is single blocks of 4 KiB. The
/// kernel recovers no such log: it proves the first extent of a block as a whole one.
#[test]
fn directory_blocks_of_several_extents_are_recovered() {
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 100);
    disk.mkfs("--unsupported -n size=16384 -m rmapbt=0,reflink=0 -i nrext64=0 -d agcount=1");
    let mount = disk.mount("rw,noatime", &[]);
    let (filler, dir) = (mount.path().join("filler"), mount.path().join("directory"));
    fs::create_dir(&filler).unwrap();
    fs::create_dir(&dir).unwrap();
    let mut count = 0_u64;
    while fs::write(filler.join(count.to_string()), [1; 4096]).is_ok() {
        count += 1;
        if count.is_multiple_of(500) {
            mount.sync();
        }
    }
    mount.sync();
    (0..count).step_by(2).for_each(|file| fs::remove_file(filler.join(file.to_string())).unwrap());
    mount.sync();
    drop(mount);
    // What is free in larger pieces is taken. A line is `from to extents blocks pct`.
    let table = disk.xfs_db(&["freesp"]);
    let lines = table.lines().map(|line| line.split_whitespace().map(str::parse::<u64>));
    let lines = lines.filter_map(|line| line.take(4).collect::<Result<Vec<_>, _>>().ok());
    let blocks: u64 = lines.filter(|line| line.len() == 4 && line[0] > 1).map(|line| line[3]).sum();
    let mount = disk.mount("rw,noatime", &[]);
    let file = fs::File::create(mount.path().join("rest")).unwrap();
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, blocks * 4096).unwrap();
    drop(file);
    drop(mount);
    let mut mount = disk.mount("rw,noatime", &[]);
    let dir = mount.path().join("directory");
    for number in 0..1500 {
        fs::File::create(dir.join(format!("a name with the number {number}"))).unwrap();
    }
    let ino = XfsDisk::ino(&dir);
    fs::File::open(&dir).unwrap().sync_all().unwrap();
    (0..900).for_each(|number| {
        fs::remove_file(dir.join(format!("a name with the number {number}"))).unwrap();
    });
    settle(mount.path());
    disk.shut_down(&mut mount, XfsShutdown::LogWritten);
    drop(mount);
    let options = XfsOptions::default();
    let ours = XfsVolume::open(disk.device(), &options).unwrap();
    assert_eq!(list(&*ours, "directory").len(), 600);
    let recovered = XfsVolume::recover(&disk.writable_device(), &options).unwrap();
    assert!(recovered.is_some());
    disk.assert_checks();
    let extents = disk.field(&[&format!("inode {ino}")], "core.nextents");
    assert!(extents > 12, "{extents} extents");
    let mount = disk.mount("rw,noatime", &[]);
    let compare = Compare::default().without(Aspect::StoredAcls);
    compare.run(&*ours, mount.path()).assert_same(8000);
}

/// The names in a directory of the root.
fn list(fs: &dyn FileSystem, name: &str) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    let dir = fs.lookup(fs.root(), name.as_bytes()).unwrap();
    fs.read_dir(dir, 0, &mut |entry| {
        names.push(entry.name.to_vec());
        ControlFlow::Continue(())
    })
    .unwrap();
    names
}

/// A recovery to disk is cut at any of its writes, with any of the pending ones missing. It begins
/// again, and gives the same volume.
#[test]
fn a_recovery_that_is_cut_can_be_done_again() {
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    let Some(judges) = judges::require() else { return };
    let crashed = many_records(&judges, ADDING, &mut random);
    let whole = crashed.disk.copy();
    let options = XfsOptions::default();
    XfsVolume::recover(&whole.writable_device(), &options).unwrap().unwrap();
    let device = Arc::new(CrashDevice::new(crashed.disk.device()));
    let cut: Arc<dyn BlockDevice> = device.clone();
    XfsVolume::recover(&cut, &options).unwrap().unwrap();
    let (log, writes) = (device.log(), device.log().entries().len());
    let judge = XfsVolume::open(whole.device(), &options).unwrap();
    let compare = Compare::default();
    let (mut again, mut done) = (0, 0);
    let plan = CrashPlan { exhaustive_limit: 4, samples_per_epoch: 10, seed, tears: true };
    for (state, number) in log.states(&plan).map(Result::unwrap).zip(0..) {
        // The prefixes of all writes are many.
        if number % 53 != 0 && number < 2 * writes - 30 {
            continue;
        }
        let described = state.description.clone();
        let [memory] = <[_; 1]>::try_from(state.devices).unwrap();
        let device: Arc<dyn BlockDevice> = Arc::new(memory);
        let recovered = XfsVolume::recover(&device, &options)
            .unwrap_or_else(|error| panic!("{described}: {error}"));
        if recovered.is_some() {
            again += 1;
        } else {
            done += 1;
        }
        let ours = XfsVolume::open(device.clone(), &options).unwrap();
        let outcome = compare.run_filesystems(&*ours, &*judge);
        assert!(outcome.differences.is_empty(), "{described}: {outcome}");
    }
    eprintln!("{writes} writes; {again} recovered again, {done} were done");
    assert!(again > 10 && done > 0);
    // The kernel does not mend torn blocks.
    let plan = CrashPlan { tears: false, ..plan };
    let states: Vec<_> = log.states(&plan).map(Result::unwrap).collect();
    for _ in 0..4 {
        let state = &states[usize::try_from(random.below(states.len() as u64)).unwrap()];
        let disk = crashed.disk.copy();
        let device = disk.writable_device();
        state.devices[0].visit_changes(&mut |at, bytes| device.write_at(at, bytes)).unwrap();
        drop(device);
        drop(disk.mount("rw,noatime", &[RECOVERY]));
        disk.assert_checks();
        let mount = disk.mount("ro,noatime", &[]);
        let outcome = compare.clone().without(Aspect::StoredAcls).run(&*judge, mount.path());
        assert!(outcome.differences.is_empty(), "{}: {outcome}", state.description);
    }
}
