//! A test leaves no disks behind, however it ends.

use offshoot_testkit::btrfs::disks::{Disks, MountedMembers};
use offshoot_testkit::btrfs::judges;

/// The loop device, the image and the mount point of a mount, as the machine knows them.
struct Traces {
    backing_file: String,
    image: String,
    mount_point: String,
}

impl Traces {
    fn of(disks: &Disks, mount: &MountedMembers) -> Self {
        let device = mount.devices()[0].trim_start_matches("/dev/").to_owned();
        Self {
            backing_file: format!("/sys/block/{device}/loop/backing_file"),
            image: disks.images()[0].display().to_string(),
            mount_point: mount.path().display().to_string(),
        }
    }

    #[track_caller]
    fn assert_present(&self) {
        let held = std::fs::read_to_string(&self.backing_file).expect("a loop device");
        assert!(held.starts_with(&self.image), "{held}");
        let mounts = std::fs::read_to_string("/proc/mounts").expect("a list of mounts");
        assert!(mounts.contains(&self.mount_point));
    }

    #[track_caller]
    fn assert_gone(&self) {
        let held = std::fs::read_to_string(&self.backing_file).unwrap_or_default();
        assert!(!held.starts_with(&self.image), "a loop device still holds {held}");
        let mounts = std::fs::read_to_string("/proc/mounts").expect("a list of mounts");
        assert!(!mounts.contains(&self.mount_point), "{} is mounted", self.mount_point);
        assert!(!std::path::Path::new(&self.image).exists(), "{} is there", self.image);
    }
}

fn made(judges: &judges::Judges) -> Disks {
    let disks = Disks::create(judges, 2, 128);
    disks.mkfs(&["-d", "raid1", "-m", "raid1"]);
    disks
}

/// A loop device is detached even if its image was removed first.
#[test]
fn a_mount_outlives_its_images() {
    let Some(judges) = judges::require() else { return };
    let disks = made(&judges);
    let mount = disks.mount("rw,noatime");
    let traces = Traces::of(&disks, &mount);
    traces.assert_present();
    drop(disks);
    drop(mount);
    traces.assert_gone();
}

/// A test that panics cleans up as a test that passes does.
#[test]
fn a_panic_undoes_everything() {
    let Some(judges) = judges::require() else { return };
    let disks = made(&judges);
    let mount = disks.mount("rw,noatime");
    let traces = Traces::of(&disks, &mount);
    traces.assert_present();
    let panicked = std::thread::spawn(move || {
        let (_disks, _mount) = (disks, mount);
        panic!("on purpose");
    });
    assert!(panicked.join().is_err());
    traces.assert_gone();
}
