//! Judges that are asked when something is dropped can say no.

use std::panic::{AssertUnwindSafe, catch_unwind};

use offshoot_device::BlockDevice;
use offshoot_testkit::checked::CheckedDevice;
use offshoot_testkit::disks::{Disks, OLD_CACHE, UUID_TREE};
use offshoot_testkit::judges;

/// What is said when this is dropped, if somebody complains.
fn complaint<T>(dropped: T) -> Option<String> {
    let panic = catch_unwind(AssertUnwindSafe(|| drop(dropped))).err()?;
    Some(*panic.downcast::<String>().expect("a message"))
}

/// `mkfs.btrfs` leaves the UUID tree to the first mount. Who does not keep it later would be told so in the same words.
#[test]
fn a_mount_that_completes_something_is_told() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&[]);
    let said = complaint(disks.mount_watched("rw,noatime", &[OLD_CACHE])).expect("a complaint");
    assert!(said.contains(UUID_TREE), "{said}");
    disks.mkfs_and_settle(&[]);
    assert_eq!(complaint(disks.mount_watched("rw,noatime", &[])), None);
}

#[test]
fn a_device_in_memory_without_a_volume_is_told() {
    if !judges::are_present() {
        return;
    }
    let device = || {
        let device = CheckedDevice::sparse(256 << 20, |_| {});
        device.write_at(65536, &[7; 4096]).expect("memory is written");
        device
    };
    let said = complaint(device()).expect("a complaint");
    assert!(said.contains("btrfs check"), "{said}");
    let left = device();
    left.leave_unchecked("it has no volume");
    assert_eq!(complaint(left), None);
}

/// A volume of `mkfs.btrfs`, as it is and with one byte of it changed in what a device keeps above another.
#[test]
fn what_is_written_above_another_device_is_checked() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&["-m", "single"]);
    let image = disks.devices().remove(0);
    let below = std::sync::Arc::new(CheckedDevice::sparse(256 << 20, |_| {}));
    let mut bytes = vec![0; 1 << 20];
    for at in (0..256 << 20).step_by(1 << 20) {
        image.read_at(at, &mut bytes).expect("it reads");
        if bytes.iter().any(|&byte| byte != 0) {
            below.write_at(at, &bytes).expect("memory is written");
        }
    }
    let mut superblock = vec![0; 4096];
    below.read_at(65536, &mut superblock).expect("it reads");
    let above = CheckedDevice::over(below.clone());
    superblock[100] ^= 1;
    above.write_at(65536, &superblock).expect("memory is written");
    assert!(complaint(above).is_some(), "a byte of the superblock is wrong");
    assert_eq!(complaint(below), None);
}

#[test]
fn what_the_reader_finds_is_told() {
    let device = CheckedDevice::sparse(1 << 20, |_| panic!("{}", "nothing reads"));
    assert_eq!(complaint(device).as_deref(), Some("nothing reads"));
}
