//! The smallest volumes, the largest, and devices of different sizes.

use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, MkfsOptions, mkfs};
use offshoot_btrfs_format::chunk::Profile;
use offshoot_btrfs_format::superblock::SUPERBLOCK_OFFSETS;
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_vfs::{Errno, Error};

use crate::common::{assert_reads, judge, make, options, read_new};

const MIB: u64 = 1 << 20;

/// The smallest size in MiB, from the error of making a volume on 1 MiB.
fn least_mib(devices: usize, options: &MkfsOptions) -> u64 {
    let devices = memory(&vec![MIB; devices]);
    let error = mkfs(&devices, options).expect_err("a volume on 1 MiB");
    assert!(matches!(error, Error::Posix { errno: Errno::NOSPC, .. }), "{error}");
    let text = error.to_string();
    let bytes = text.split(' ').find_map(|word| word.parse::<u64>().ok());
    bytes.unwrap_or_else(|| panic!("no size in: {text}")) / MIB
}

fn memory(sizes: &[u64]) -> Vec<Arc<dyn BlockDevice>> {
    let device = |&size: &u64| Arc::new(MemoryDevice::sparse(size)) as Arc<dyn BlockDevice>;
    sizes.iter().map(device).collect()
}

/// The size that the refusal names is enough, and one MiB less is not. The kernel can write to a
/// volume of that size.
#[track_caller]
fn judge_smallest(devices: usize, change: fn(&mut MkfsOptions)) {
    let Some(judges) = judges::require() else { return };
    let mut options = options();
    change(&mut options);
    let mib = least_mib(devices, &options);
    make(&judges, &vec![mib - 1; devices], &options).expect_err("smaller than the least");
    let disks = make(&judges, &vec![mib; devices], &options).expect("the least size is enough");
    judge(&disks, &options, 1);
}

#[test]
fn smallest() {
    judge_smallest(1, |_| {});
}

#[test]
fn smallest_single() {
    judge_smallest(1, |options| options.metadata = Some(Profile::Single));
}

#[test]
fn smallest_node_4k() {
    judge_smallest(1, |options| options.node_size = Some(4096));
}

#[test]
fn smallest_node_64k() {
    judge_smallest(1, |options| options.node_size = Some(65536));
}

#[test]
fn smallest_raid1() {
    judge_smallest(2, |_| {});
}

#[test]
fn smallest_raid10() {
    judge_smallest(4, |options| {
        options.metadata = Some(Profile::Raid10);
        options.data = Some(Profile::Raid10);
    });
}

#[test]
fn smallest_mixed() {
    judge_smallest(1, |options| options.features.apply("mixed-bg").expect("a feature"));
}

#[test]
fn smallest_mixed_dup() {
    judge_smallest(1, |options| {
        options.features.apply("mixed-bg").expect("a feature");
        options.metadata = Some(Profile::Dup);
    });
}

/// Sizes that are not whole sectors or MiB; one ends within a superblock copy, and one ends right
/// behind it.
#[test]
fn odd_sizes() {
    let Some(judges) = judges::require() else { return };
    for bytes in [
        89 * MIB + 4095,
        131 * MIB + 513,
        SUPERBLOCK_OFFSETS[1] + 4095,
        SUPERBLOCK_OFFSETS[1] + 4096,
    ] {
        let mut options = options();
        if bytes < 80 * MIB {
            options.metadata = Some(Profile::Single);
        }
        let disks = Disks::create(&judges, 1, 1);
        std::fs::OpenOptions::new()
            .write(true)
            .open(&disks.images()[0])
            .and_then(|file| file.set_len(bytes))
            .expect("an image of an odd size");
        mkfs(&disks.writable_devices(), &options).expect("mkfs");
        judge(&disks, &options, 1);
    }
}

/// 16 TiB, with all three superblocks.
#[test]
fn enormous() {
    let Some(judges) = judges::require() else { return };
    let options = options();
    let disks = make(&judges, &[16 << 20], &options).expect("mkfs");
    let device = &disks.devices()[0];
    for place in SUPERBLOCK_OFFSETS {
        let mut magic = [0; 8];
        device.read_at(place + 64, &mut magic).expect("a superblock");
        assert_eq!(&magic, b"_BHRfS_M", "no superblock at {place}");
    }
    judge(&disks, &options, 20);
}

/// The second copy of metadata begins at a superblock: before it are 1 MiB, twice 8 MiB of system
/// chunks, and 47 MiB of metadata. The metadata is a tenth of the volume in two copies.
#[test]
fn metadata_begins_at_a_superblock() {
    let Some(judges) = judges::require() else { return };
    for node_size in [4096, 16384] {
        let mut options = options();
        options.node_size = Some(node_size);
        let disks = make(&judges, &[940], &options).expect("mkfs");
        let volume =
            BtrfsVolume::open(disks.devices(), &EngineOptions::default()).expect("it opens");
        let metadata = volume.chunks().nth(1).expect("a metadata chunk");
        assert_eq!(metadata.stripes[1].physical.0, SUPERBLOCK_OFFSETS[1], "{metadata:?}");
        judge(&disks, &options, 1);
    }
}

/// Chunks go to the devices with the most free space, whatever their order.
#[test]
fn devices_of_different_sizes() {
    let Some(judges) = judges::require() else { return };
    for (profile, mib) in [
        (Profile::Raid1, [100, 1000, 200, 500]),
        (Profile::Raid0, [16, 300, 200, 100]),
        (Profile::Raid10, [10, 300, 200, 100]),
        (Profile::Single, [2, 1, 300, 40]),
    ] {
        let mut options = options();
        options.metadata = Some(profile);
        options.data = Some(profile);
        let disks = make(&judges, &mib, &options).expect("mkfs");
        judge(&disks, &options, 10);
    }
}

/// Trees of several leaves: 24 devices and the smallest nodes.
#[test]
fn many_devices() {
    let Some(judges) = judges::require() else { return };
    for profile in [Profile::Raid0, Profile::Raid10] {
        let mut options = options();
        options.node_size = Some(4096);
        options.data = Some(profile);
        options.metadata = Some(profile);
        let disks = make(&judges, &[64; 24], &options).expect("mkfs");
        judge(&disks, &options, 10);
    }
}

/// More devices than a system chunk can have stripes, and a chunk tree of three levels.
#[test]
fn thousands_of_devices() {
    for (count, profile) in [(130, Profile::Raid0), (130, Profile::Raid10), (4000, Profile::Raid1)]
    {
        let mut options = options();
        options.node_size = Some(4096);
        options.data = Some(profile);
        options.metadata = Some(profile);
        let devices = memory(&vec![64 * MIB; count]);
        mkfs(&devices, &options).expect("mkfs");
        let volume =
            BtrfsVolume::open(devices, &EngineOptions::default()).expect("the volume opens");
        assert_eq!(volume.members().len(), count);
        read_new(&volume, &options);
    }
}

/// The kernel here cannot mount sectors larger than a page. `btrfs check` reads them.
#[test]
fn large_sectors() {
    let Some(judges) = judges::require() else { return };
    for sector_size in [8192, 16384, 65536] {
        let mut options = options();
        options.sector_size = sector_size;
        let disks = make(&judges, &[512], &options).expect("mkfs");
        assert_reads(&disks, &options);
        disks.assert_checks();
    }
}
