//! Options and devices that `mkfs` refuses, without writing anything.

use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, MkfsOptions, mkfs};
use offshoot_btrfs_format::chunk::Profile;
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE};
use offshoot_device::{
    BlockDevice, CrashDevice, CrashPlan, Fault, FaultDevice, MemoryDevice, RequestKind,
};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_vfs::{Errno, Error};

use crate::common::{TIME, judge, options, read_new, uuid};

const MIB: u64 = 1 << 20;

fn device(bytes: u64) -> Arc<dyn BlockDevice> {
    Arc::new(MemoryDevice::sparse(bytes))
}

fn defaults() -> MkfsOptions {
    MkfsOptions::new(uuid(1), TIME)
}

/// The error of making a volume over `count` devices.
#[track_caller]
fn refusal(count: usize, change: impl FnOnce(&mut MkfsOptions)) -> Error {
    let devices: Vec<_> = (0..count).map(|_| device(200 * MIB)).collect();
    let mut options = defaults();
    change(&mut options);
    let error = mkfs(&devices, &options).expect_err("a volume that cannot be");
    for device in devices {
        let mut bytes = vec![0; 2 << 20];
        device.read_at(0, &mut bytes).expect("the start of the device");
        assert!(bytes.iter().all(|&byte| byte == 0), "something was written: {error}");
    }
    error
}

#[track_caller]
fn assert_invalid(error: &Error, word: &str) {
    assert!(matches!(error, Error::Posix { errno: Errno::INVAL, .. }), "{error:?}");
    assert!(error.to_string().contains(word), "{error} does not name {word}");
}

#[test]
fn options_that_contradict_each_other() {
    assert_invalid(&refusal(0, |_| {}), "no device");
    assert_invalid(&refusal(1, |o| o.metadata = Some(Profile::Raid1)), "RAID1");
    assert_invalid(&refusal(2, |o| o.data = Some(Profile::Raid1c3)), "RAID1C3");
    assert_invalid(&refusal(3, |o| o.data = Some(Profile::Raid1c4)), "RAID1C4");
    assert_invalid(&refusal(1, |o| o.data = Some(Profile::Raid10)), "RAID10");
    assert_invalid(&refusal(1, |o| o.node_size = Some(2048)), "2048");
    assert_invalid(&refusal(1, |o| o.node_size = Some(131_072)), "131072");
    assert_invalid(&refusal(1, |o| o.node_size = Some(12_288)), "12288");
    assert_invalid(&refusal(1, |o| o.sector_size = 512), "512");
    assert_invalid(&refusal(1, |o| o.fsid = uuid(0)), "zeros");
    assert_invalid(&refusal(1, |o| o.label = "x".repeat(256)), "label");
    assert_invalid(&refusal(1, |o| o.label = "a\nb".to_owned()), "label");
    assert_invalid(&refusal(1, |o| o.time.nanos = 1_000_000_000), "nanoseconds");
    assert_invalid(&refusal(2, |o| o.device_uuids = vec![uuid(1)]), "device UUIDs");
    assert_invalid(&refusal(2, |o| o.device_uuids = vec![uuid(1); 2]), "unique");
    let mixed = |o: &mut MkfsOptions| o.features.apply("mixed-bg").expect("a feature");
    let error = refusal(1, |o| {
        mixed(o);
        o.node_size = Some(16384);
    });
    assert_invalid(&error, "16384");
    let error = refusal(1, |o| {
        mixed(o);
        o.data = Some(Profile::Single);
        o.metadata = Some(Profile::Dup);
    });
    assert_invalid(&error, "one profile");
}

#[test]
fn parity_is_not_written() {
    for profile in [Profile::Raid5, Profile::Raid6] {
        for error in
            [refusal(4, |o| o.data = Some(profile)), refusal(4, |o| o.metadata = Some(profile))]
        {
            assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
            assert!(error.to_string().contains(&profile.to_string()), "{error}");
        }
    }
}

#[test]
fn a_device_is_one_member() {
    let one = device(200 * MIB);
    let error = mkfs(&[one.clone(), one], &defaults()).expect_err("one device twice");
    assert_invalid(&error, "twice");
}

/// `mkfs` refuses to overwrite what other programs made, and overwrites it by force.
#[test]
fn a_used_device_needs_force() {
    let makers: [(&str, &[&str]); 6] = [
        ("btrfs", &["mkfs.btrfs", "-q"]),
        ("ext", &["mkfs.ext4", "-q"]),
        ("XFS", &["mkfs.xfs", "-q"]),
        ("FAT", &["mkfs.vfat"]),
        ("swap", &["mkswap"]),
        ("SquashFS", &["mksquashfs", "/etc/hostname"]),
    ];
    let Some(judges) = judges::require() else { return };
    for (name, words) in makers {
        let disks = Disks::create(&judges, 1, 400);
        let image = disks.images()[0].as_os_str();
        let made = offshoot_testkit::run::command(words[0]).args(&words[1..]).arg(image).output();
        // Only the tools of btrfs are sure to be there.
        if !made.is_ok_and(|output| output.status.success()) && name != "btrfs" {
            eprintln!("not judged: {} is not here", words[0]);
            continue;
        }
        let before = std::fs::read(image).expect("the image");
        let mut options = options();
        let error = mkfs(&disks.writable_devices(), &options).expect_err("a used device");
        assert!(matches!(error, Error::Posix { errno: Errno::EXIST, .. }), "{error:?}");
        assert!(error.to_string().contains(name), "{error} does not name {name}");
        assert!(before == std::fs::read(image).expect("the image"), "something was written");
        options.is_forced = true;
        mkfs(&disks.writable_devices(), &options).expect("mkfs by force");
        judge(&disks, &options, 2);
        let seen = offshoot_testkit::run::run("blkid", &["-p".as_ref(), image]);
        assert!(seen.contains("TYPE=\"btrfs\""), "blkid sees {seen}");
    }
}

/// A signature behind the last whole MiB counts, and is removed.
#[test]
fn the_end_of_a_device_is_looked_at() {
    let device = device(200 * MIB + 700);
    device.write_at(200 * MIB, b"EFI PART").expect("a write");
    let mut options = defaults();
    let error = mkfs(std::slice::from_ref(&device), &options).expect_err("a partition table");
    assert!(error.to_string().contains("partition table"), "{error}");
    options.is_forced = true;
    mkfs(std::slice::from_ref(&device), &options).expect("mkfs by force");
    let mut found = [1; 8];
    device.read_at(200 * MIB, &mut found).expect("a read");
    assert_eq!(found, [0; 8]);
}

/// `mkfs` does not write zeros over zeros, which would allocate a sparse image.
#[test]
fn a_sparse_image_stays_sparse() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("image");
    let image = offshoot_device::FileDevice::create(&path, 1 << 30).expect("an image");
    mkfs(&[Arc::new(image)], &defaults()).expect("mkfs");
    let bytes = std::fs::metadata(&path).expect("the image").blocks() * 512;
    assert!(bytes <= MIB, "{bytes} bytes for an empty volume");
}

/// Every request fails once. `mkfs` reports the error, and the devices hold no volume or a complete
/// one.
#[test]
fn errors_of_a_device_are_reported() {
    for (requests, word, least) in [
        (RequestKind::Reads, "reading", 20),
        (RequestKind::Writes, "writing", 8),
        (RequestKind::Flushes, "flush", 3),
    ] {
        for number in 0.. {
            let devices = [device(200 * MIB), device(200 * MIB)];
            let faulty = Arc::new(FaultDevice::new(devices[0].clone()));
            faulty.strike(requests, number, Fault::Error);
            let result = mkfs(&[faulty, devices[1].clone()], &defaults());
            let opened = BtrfsVolume::open(devices.to_vec(), &EngineOptions::default());
            if let Ok(volume) = &opened {
                read_new(volume, &defaults());
            }
            match result {
                Ok(_) => {
                    opened.expect("the volume opens");
                    assert!(number >= least, "only {number} requests");
                    break;
                }
                Err(error) => {
                    assert!(matches!(error, Error::Io { .. }), "{error:?}");
                    assert!(error.to_string().contains(word), "{error}");
                }
            }
        }
    }
}

/// A power cut while a new volume replaces an old one leaves the old one, the new one, or none. A
/// volume that opens is complete.
#[test]
fn a_power_cut_leaves_one_volume_or_none() {
    let base = device(200 * MIB);
    let old = MkfsOptions { label: "old".to_owned(), ..defaults() };
    mkfs(std::slice::from_ref(&base), &old).expect("mkfs");
    let crash = Arc::new(CrashDevice::new(base));
    let device: Arc<dyn BlockDevice> = crash.clone();
    let new = MkfsOptions { fsid: uuid(2), is_forced: true, ..defaults() };
    mkfs(&[device], &new).expect("mkfs by force");
    let (mut none, mut olds, mut news) = (0, 0, 0);
    for state in crash.log().states(&CrashPlan::default()) {
        let state = state.expect("the base is in memory");
        let devices = state.devices.into_iter().map(|device| Arc::new(device) as Arc<_>).collect();
        match BtrfsVolume::open(devices, &EngineOptions::default()) {
            Err(_) => none += 1,
            Ok(volume) if volume.superblock().fsid == old.fsid => {
                read_new(&volume, &old);
                olds += 1;
            }
            Ok(volume) => {
                read_new(&volume, &new);
                news += 1;
            }
        }
    }
    println!("{none} states without a volume, {olds} with the old one, {news} with the new one");
    assert!(none > 0 && olds > 0 && news > 0);
}

/// A smaller volume that replaces a larger one leaves no old superblock.
#[test]
fn old_superblocks_go() {
    let device = device(300 << 30);
    let mut options = defaults();
    mkfs(std::slice::from_ref(&device), &options).expect("mkfs");
    options.is_forced = true;
    options.fsid = uuid(2);
    mkfs(std::slice::from_ref(&device), &options).expect("mkfs by force");
    for place in SUPERBLOCK_OFFSETS {
        let mut bytes = [0; SUPERBLOCK_SIZE];
        device.read_at(place, &mut bytes).expect("a superblock");
        assert_eq!(bytes[32..48], *uuid(2).as_bytes(), "an old superblock at {place}");
    }
}
