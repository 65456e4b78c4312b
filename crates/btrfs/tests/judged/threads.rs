//! Many threads on one volume, with a cache that is too small for them.

use offshoot_btrfs::{BtrfsVolume, EngineOptions};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::manifest::{differences, manifest};

use crate::common::{CollectedReports, default_filesystem};

#[test]
fn all_of_them_see_the_same() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mkfs("-n 4k").make(&judges);
    let mount = disks.mount("ro,noatime");
    let host = HostFilesystem::new(mount.path()).expect("the mount opens");
    let expected = manifest(&host).expect("the kernel reads its own volume");

    for cache_bytes in [0, 64 << 10, 64 << 20] {
        let reports = CollectedReports::default();
        let options = EngineOptions { cache_bytes, ..reports.options() };
        let volume = BtrfsVolume::open(disks.devices(), &options).expect("the volume opens");
        let fs = default_filesystem(&volume);
        std::thread::scope(|scope| {
            let readers: Vec<_> = (0..6).map(|_| scope.spawn(|| manifest(&fs))).collect();
            for reader in readers {
                let ours = reader.join().expect("no reader panics").expect("all is read");
                assert!(ours == expected, "{:#?}", differences(&ours, &expected));
            }
        });
        reports.assert_silent();
    }
}
