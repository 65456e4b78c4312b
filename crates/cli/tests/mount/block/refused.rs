//! What is not mounted with the type `fuseblk`, and mounts that fail halfway.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use offshoot_testkit::btrfs::disks::{AttachedImages, Disks};
use offshoot_testkit::run::run;
use offshoot_testkit::scratch_dir;
use rustix::process::Signal;

use super::super::{offshoot, require};
use super::{BlockVolume, bytes_of, kind_of};

/// Mounts with these words in front of the directory, which must fail and leave no mount. Returns
/// the messages.
#[track_caller]
fn refused(words: &[&OsStr]) -> String {
    let dir = scratch_dir();
    let output = offshoot(&[&["mount".as_ref()], words, &[dir.path().as_os_str()]].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{words:?}: {said}");
    assert_eq!(kind_of(dir.path()), None, "{words:?}");
    said
}

#[track_caller]
fn is_named(said: &str, why: &str) {
    let named = "not supported: the mount option fuseblk: ";
    assert!(said.contains(named) && said.contains(why), "{said}");
}

/// An image file, a part of a device, what is only read, and members that are not all held.
#[test]
fn what_the_kernel_cannot_hold_is_refused_by_name() {
    let Some(judges) = require() else { return };
    let volume = BlockVolume::new(&judges);
    let image = super::volume(&judges, 128);
    let [o, options, ro] = ["-o", "fuseblk", "fuseblk,ro"].map(OsStr::new);
    let (device, file) = (volume.device().as_os_str(), image.images()[0].as_os_str());
    is_named(&refused(&[o, options, file]), "is no whole block device");
    let offset = ["--offset", "0"].map(OsStr::new);
    is_named(&refused(&[&[o, options], &offset[..], &[device]].concat()), "is no whole block");
    is_named(&refused(&[o, ro, device]), "is mounted to be read only");
    drop((volume, image));

    let disks = Disks::create(&judges, 2, 256);
    disks.mkfs(&["-d", "raid1", "-m", "raid1"]);
    let attached = AttachedImages::new(&disks.images()[..1]);
    let mixed = format!("fuseblk,device={}", disks.images()[1].display());
    let said = refused(&[o, mixed.as_ref(), attached.devices()[0].as_ref()]);
    is_named(&said, "is no whole block device");
    drop(attached);
    disks.assert_checks();
}

/// Where the kernel refuses `fuseblk`, the mount fails, and nothing is written: a pending log
/// stays.
#[test]
fn without_the_right_nothing_is_written() {
    let Some(judges) = require() else { return };
    let volume = BlockVolume::new(&judges);
    volume.leave_a_log();
    let before = bytes_of(volume.device());
    let dir = scratch_dir();
    let script =
        r#"! "$0" mount -o fuseblk "$1" "$2" 2>"$3" && ! grep -q -F " $2 " /proc/self/mountinfo"#;
    let program = env!("CARGO_BIN_EXE_offshoot").as_ref();
    let words = ["--map-root-user", "--mount", "sh", "-e", "-c", script].map(AsRef::as_ref);
    let errors = volume.dir.path().join("errors");
    let named = [program, volume.device().as_os_str(), dir.path().as_os_str(), errors.as_os_str()];
    run("unshare", &[&words[..], &named].concat());
    let said = fs::read_to_string(errors).expect("it is there");
    assert!(said.contains("mounting /dev/loop") && said.contains("not permitted"), "{said}");
    volume.wait_until_free();
    assert!(bytes_of(volume.device()) == before, "it was written");
    let mounted = volume.mount("rw");
    let read = fs::read_to_string(mounted.path().join("logged"));
    assert_eq!(read.ok().as_deref(), Some("data"));
    drop(mounted);
    volume.wait_until_free();
    volume.assert_checks();
}

/// A volume that can be read and not written is unmounted again, and the error says why. Programs
/// that used the mount meanwhile get an error.
#[test]
fn a_failing_open_unmounts() {
    let Some(judges) = require() else { return };
    let volume = BlockVolume::new(&judges);
    let device = volume.device().as_os_str();
    let [o, other] = ["-o", "fuseblk,subvol=/,subvolid=256"].map(OsStr::new);
    let said = refused(&[o, other, device]);
    assert!(said.contains("has the number 5, and subvolid=256 another"), "{said}");
    volume.wait_until_free();

    run("btrfstune", &["-S".as_ref(), "1".as_ref(), device]);
    let before = bytes_of(volume.device());
    let said = refused(&[o, "fuseblk".as_ref(), device]);
    assert!(said.contains("not supported: writing a seed"), "{said}");
    volume.wait_until_free();
    assert!(bytes_of(volume.device()) == before, "it was written");
    run("btrfstune", &["-f".as_ref(), "-S".as_ref(), "0".as_ref(), device]);
    volume.assert_checks();
}

/// A device that another program holds is not mounted, whoever it is.
#[test]
fn a_device_in_use_is_refused() {
    let Some(judges) = require() else { return };
    let volume = BlockVolume::new(&judges);
    let words = ["-o", "fuseblk"].map(OsStr::new);
    let held = offshoot_device::hold_block_device(volume.device()).expect("it is free");
    let said = refused(&[&words[..], &[volume.device().as_os_str()]].concat());
    assert!(said.contains("in use by"), "{said}");
    drop(held);
    volume.assert_checks();
}

impl BlockVolume {
    /// Leaves a pending log in the volume, with the file `logged`.
    fn leave_a_log(&self) {
        let mounted = self.mount("rw,commit=0");
        let file = mounted.path().join("logged");
        fs::write(&file, "data").expect("a file");
        fs::File::open(&file).and_then(|file| file.sync_all()).expect("it is stored");
        mounted.signal(Signal::KILL);
        self.wait_until_free();
        assert!(has_log(self.device()), "the fsync made a commit");
    }
}

fn has_log(device: &Path) -> bool {
    let shown =
        run("btrfs", &["inspect-internal".as_ref(), "dump-super".as_ref(), device.as_os_str()]);
    let line = shown.lines().find(|line| line.starts_with("log_root\t"));
    line.is_some_and(|line| !line.ends_with("\t0"))
}
