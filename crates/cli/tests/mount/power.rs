//! Power cuts under a database on a mount. The test itself serves the mount, from a device that
//! records which states a power cut can leave.

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Reporter, VolumeReport};
use offshoot_btrfs_format::TreeId;
use offshoot_device::{BlockDevice, CrashDevice, CrashPlan, FileDevice};
use offshoot_fuse::{MountOptions, MountPoint, ServeOptions, Server, Unmount, unmount};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::Judges;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::scratch_dir;
use offshoot_vfs::{FileSystem, FileSystemMut, FileType, Result, SetAttr, Timestamp};

use super::work::Database;
use super::{require, volume};

/// The test looks at one state of so many.
const ONE_OF: u64 = 20;

/// The size of the volume, in MiB.
const VOLUME_MIB: u64 = 256;

/// A database commits `transactions` transactions. Every state that a power cut leaves has all
/// acknowledged transactions and a sound database, and `btrfs check` finds nothing in the volume.
pub(super) fn cut_under_a_database(judges: &Judges, transactions: u64) {
    let seed = seed_of_run();
    for journal in ["delete", "wal"] {
        let disks = volume(judges, VOLUME_MIB);
        let base = FileDevice::open(&disks.images()[0]).expect("an image");
        let device = Arc::new(CrashDevice::new(Arc::new(base)));
        serve_a_database(&device, journal, transactions);
        let plan = CrashPlan { exhaustive_limit: 2, samples_per_epoch: 4, seed, tears: true };
        let mut random = Random::new(seed);
        let mut looked_at = 0;
        for state in device.log().states(&plan) {
            let state = state.expect("memory reads");
            if random.below(ONE_OF) > 0 || state.marks().is_empty() {
                continue;
            }
            let promised = state.marks().last().expect("one").parse().expect("a number");
            let dir = scratch_dir();
            let name = format!("{journal}.db");
            let devices: Vec<_> = state.devices.into_iter().map(Arc::new).collect();
            let shared = devices.iter().map(|one| one.clone() as Arc<dyn BlockDevice>);
            copy_out(shared.collect(), dir.path())
                .unwrap_or_else(|error| panic!("{} (seed {seed}): {error}", state.description));
            let left = Disks::create(judges, 1, VOLUME_MIB);
            left.fill(&[&*devices[0] as &dyn BlockDevice]).expect("a copy of the state");
            left.assert_checks();
            Database { file: dir.path().join(name), promised }.assert_whole(seed);
            looked_at += 1;
        }
        println!("a database with the journal {journal}: whole in {looked_at} states");
        assert!(looked_at > 0, "no state was looked at");
    }
}

/// Mounts the volume on `device`, and lets a database work there. Marks each acknowledged
/// transaction in the log of the device.
fn serve_a_database(device: &Arc<CrashDevice>, journal: &str, transactions: u64) {
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(vec![device.clone()], &options).expect("it opens");
    let fs = volume.filesystem(TreeId::FS).expect("the top level");
    let dir = scratch_dir();
    let place = MountPoint::new(dir.path(), MountOptions::new("crash", "offshoot"));
    let server = Server::start(Box::new(fs), Arc::new(place), ServeOptions::default());
    let server = server.expect("a mount");
    let worked = catch_unwind(AssertUnwindSafe(|| {
        let mut database = Database::create(dir.path(), journal);
        device.mark("0");
        database.work(transactions, |number| device.mark(&number.to_string()));
        assert_eq!(database.promised, transactions);
    }));
    unmount(dir.path(), Unmount::Lazily).expect("its end");
    server.wait().expect("a good end");
    worked.expect("a database that works");
}

/// Copies the files out of a volume that a power cut left.
fn copy_out(devices: Vec<Arc<dyn BlockDevice>>, dir: &Path) -> Result<()> {
    let is_torn = Arc::new(AtomicBool::new(false));
    let seen = is_torn.clone();
    let reporter: Reporter = Arc::new(move |report| {
        if matches!(report, VolumeReport::SuperblockCopy { .. }) {
            seen.store(true, Ordering::Relaxed);
        }
    });
    let reporter = Some(reporter);
    let options = EngineOptions { commit_interval: None, reporter, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(devices, &options)?;
    let fs = volume.filesystem(TreeId::FS)?;
    if is_torn.load(Ordering::Relaxed) {
        // `btrfs check` does not look for a copy of a torn superblock. Our next commit writes the
        // torn one anew.
        fs.set_attr(fs.root(), &SetAttr::default(), Timestamp::default())?;
        fs.sync()?;
    }
    let mut files = Vec::new();
    fs.read_dir(fs.root(), 0, &mut |entry| {
        if entry.file_type == FileType::Regular {
            files.push((String::from_utf8_lossy(entry.name).into_owned(), entry.file));
        }
        ControlFlow::Continue(())
    })?;
    for (name, file) in files {
        let len = usize::try_from(fs.attr(file)?.size).expect("a small file");
        let mut bytes = vec![0; len];
        let mut at = 0;
        while at < len {
            at += match fs.read(file, at as u64, &mut bytes[at..])? {
                0 => break,
                read => read,
            };
        }
        // SQLite makes its shared-memory file anew after a crash.
        if !name.ends_with("-shm") {
            std::fs::write(dir.join(name), bytes).expect("a file");
        }
    }
    Ok(())
}

#[test]
fn a_database_survives_power_cuts() {
    let Some(judges) = require() else { return };
    cut_under_a_database(&judges, 12);
}
