//! A judge that runs when a value is dropped can fail the test.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use offshoot_device::BlockDevice;
use offshoot_testkit::btrfs::checked::{CheckedDevice, ShownVolume};
use offshoot_testkit::btrfs::disks::{Disks, OLD_CACHE, UUID_TREE};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::scratch_dir;

/// The message of the panic when `dropped` is dropped, if there is one.
fn complaint<T>(dropped: T) -> Option<String> {
    let panic = catch_unwind(AssertUnwindSafe(|| drop(dropped))).err()?;
    Some(*panic.downcast::<String>().expect("a message"))
}

/// `mkfs.btrfs` leaves the UUID tree to the first mount. An engine that later neglects that tree
/// would cause the same message.
#[test]
fn a_mount_that_completes_something_is_told() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    // The kernel leaves messages out when all mounts of the machine make more than 100 within 5 s.
    let said = (0..6).find_map(|attempt| {
        std::thread::sleep(Duration::from_secs(attempt * 2));
        disks.mkfs(&[]);
        complaint(disks.mount_watched("rw,noatime", &[OLD_CACHE]))
    });
    let said = said.expect("a complaint");
    assert!(said.contains(UUID_TREE), "{said}");
    disks.mkfs_and_settle(&[]);
    assert_eq!(complaint(disks.mount_watched("rw,noatime", &[])), None);
}

/// Shows an empty directory, whatever is on the device.
fn show_nothing(_: &Arc<dyn BlockDevice>) -> ShownVolume {
    let files = HostFilesystem::new(scratch_dir().path()).expect("a directory");
    ShownVolume { files: Box::new(files), has_log: false, has_orphans: false }
}

#[test]
fn a_device_in_memory_without_a_volume_is_told() {
    if !judges::are_present() {
        return;
    }
    let device = || {
        let device = CheckedDevice::sparse(256 << 20, show_nothing);
        device.write_at(65536, &[7; 4096]).expect("memory is written");
        device
    };
    let said = complaint(device()).expect("a complaint");
    assert!(said.contains("btrfs check"), "{said}");
    let left = device();
    left.leave_unchecked("it has no volume");
    assert_eq!(complaint(left), None);
}

#[test]
fn what_the_reader_finds_is_told() {
    let device = CheckedDevice::sparse(1 << 20, |_| panic!("{}", "nothing reads"));
    assert_eq!(complaint(device).as_deref(), Some("nothing reads"));
}
