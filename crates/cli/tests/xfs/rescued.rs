//! `rescue`: logs that are brought to disk, and logs that are thrown away.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use offshoot_testkit::xfs::disk::{XfsDisk, XfsShutdown};
use offshoot_testkit::xfs::judges;
use offshoot_xfs_format::log::XfsLogRecord;
use offshoot_xfs_format::superblock::XfsSuperblock;
use serde_json::Value;

use super::{FewFiles, lines};

const NOTHING: &str = "the log is empty: nothing was changed\n";

/// A volume with the file `after` in its log, and files `0` to `39`.
fn with_log(few: &FewFiles) {
    let disk = &few.filled.disk;
    let mut mount = disk.mount("rw", &[]);
    for name in (0..40).map(|number| number.to_string()).chain(["after".to_owned()]) {
        let file = mount.path().join(name);
        fs::write(&file, "logged").expect("a file");
        File::open(file).and_then(|file| file.sync_all()).expect("an fsync");
    }
    disk.shut_down(&mut mount, XfsShutdown::LogWritten);
}

/// Where the log lies, in bytes.
fn log_of(few: &FewFiles) -> (File, u64, usize) {
    let file = File::options().read(true).write(true).open(few.dir().join("v.img"));
    let file = file.expect("an image");
    let mut sector = [0; 4096];
    file.read_exact_at(&mut sector, 0).expect("a superblock");
    let geometry = XfsSuperblock::parse(&sector).expect("a superblock").geometry;
    let start = geometry.place_of(geometry.log_start).expect("a log in the volume").bytes();
    (file, start, (geometry.log_blocks as usize) << geometry.block_log)
}

/// The kernel mounts the volume without a recovery, and goes on with it.
#[track_caller]
fn kernel_goes_on(few: &FewFiles) {
    let mount = few.filled.disk.mount("rw", &[]);
    assert_eq!(fs::read(mount.path().join("text")).expect("text"), b"what the kernel wrote\n");
    fs::write(mount.path().join("later"), vec![b'l'; 100_000]).expect("a file");
    drop(mount);
    let mount = few.filled.disk.mount("rw", &[]);
    assert_eq!(fs::read(mount.path().join("later")).expect("a file").len(), 100_000);
}

#[test]
fn replay_log_brings_the_log_to_disk() {
    let Some(judges) = judges::require() else { return };
    let few = FewFiles::new(&judges);
    assert_eq!(few.does("rescue replay-log v.img"), NOTHING);
    with_log(&few);
    let said = few.does("rescue replay-log v.img");
    assert!(said.starts_with("replayed: ") && said.contains(" transactions, "), "{said}");
    assert_eq!(few.does("rescue replay-log v.img"), NOTHING);
    few.filled.disk.assert_checks();
    assert_eq!(few.does("cat v.img:/after"), "logged");
    kernel_goes_on(&few);
    few.filled.disk.assert_checks();
}

#[test]
fn zero_log_throws_the_log_away() {
    let Some(judges) = judges::require() else { return };
    let few = FewFiles::new(&judges);
    let before = fs::read(few.filled.disk.image()).expect("an image");
    assert_eq!(few.does("rescue zero-log v.img"), NOTHING);
    assert!(fs::read(few.filled.disk.image()).expect("an image") == before, "it was changed");
    with_log(&few);
    let said = few.does("rescue zero-log v.img");
    assert!(said.starts_with("thrown away: ") && said.contains(" transactions, with "), "{said}");
    assert!(!said.contains("thrown away: 0 ") && !said.contains("could not be read"), "{said}");
    assert_eq!(few.does("rescue zero-log v.img"), NOTHING);
    // No block had reached its place, so the volume is what it was before.
    few.fails("cat v.img:/after", 1);
    few.filled.disk.assert_checks();
    kernel_goes_on(&few);
    few.filled.disk.assert_checks();
}

/// A log that is damaged, one that is gone, and metadata that is newer than the log.
#[test]
fn zero_log_makes_volumes_usable_whose_logs_are_damaged() {
    let Some(judges) = judges::require() else { return };
    for is_gone in [false, true] {
        let few = FewFiles::new(&judges);
        with_log(&few);
        if is_gone {
            // What was logged is at home then, and newer than a log without a record.
            let said = few.does("rescue replay-log v.img");
            assert!(said.starts_with("replayed: "), "{said}");
            let (file, start, len) = log_of(&few);
            file.write_all_at(&vec![0; len], start).expect("a write");
        } else {
            // A record far from the end: no crash does that.
            let (file, start, len) = log_of(&few);
            let mut ring = vec![0; len];
            file.read_exact_at(&mut ring, start).expect("a log");
            let records = ring.chunks(512).zip((start..).step_by(512));
            let records = records.filter_map(|(block, at)| {
                XfsLogRecord::parse(block).ok().map(|record| (record.lsn, at))
            });
            let mut records: Vec<_> = records.collect();
            records.sort_unstable();
            let (_, at) = records[records.len() - 20];
            file.write_all_at(&[0xa5; 64], at + 700).expect("a write");
        }
        assert!(few.filled.disk.try_mount("").is_err(), "the kernel mounts it: {is_gone}");
        let said = few.fails("ls v.img", 3);
        assert!(said.contains("offshoot rescue zero-log"), "{said}");
        let said = few.does("rescue zero-log v.img");
        assert!(said.contains("thrown away: what could not be read of the log ("), "{said}");
        assert_eq!(few.does("cat v.img:/text"), "what the kernel wrote\n");
        kernel_goes_on(&few);
        few.filled.disk.assert_checks();
        if is_gone {
            assert_eq!(few.does("cat v.img:/after"), "logged");
        }
    }
}

#[test]
fn rescue_writes_json() {
    let Some(judges) = judges::require() else { return };
    for verb in ["replay-log", "zero-log"] {
        let few = FewFiles::new(&judges);
        with_log(&few);
        let line = format!("rescue {verb} --json v.img");
        let parse = |text: String| serde_json::from_str::<Value>(&text).expect("it is JSON");
        let report = parse(few.does(&line));
        assert_eq!(report["pending"], true, "{report}");
        assert!(report["transactions"].as_u64() > Some(0), "{report}");
        assert!(report["items"].as_u64() > report["transactions"].as_u64(), "{report}");
        let report = parse(few.does(&line));
        assert_eq!((&report["pending"], &report["items"]), (&false.into(), &Value::Null));
    }
}

#[test]
fn rescue_refuses_what_is_not_written() {
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 320);
    disk.mkfs("-m crc=0");
    let before = fs::read(disk.image()).expect("an image");
    let line = format!("rescue zero-log {}", disk.image().display());
    let said = lines::fails(disk.image().parent().expect("a folder"), &line, 4);
    assert!(said.contains("zeroing the log of XFS with version 4 of the format"), "{said}");
    assert!(fs::read(disk.image()).expect("an image") == before, "it was changed");
}
