//! XFS volumes. The kernel's XFS shows the same volume.

use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::scratch_dir;
use offshoot_testkit::xfs::fill::EVERYTHING_AT_LEAST;
use offshoot_testkit::xfs::judges::{self, XfsJudges};
use offshoot_testkit::xfs::matrix::XfsVolumeKind;
use offshoot_testkit::xfs::recipe::{FilledXfs, XfsRecipe};

use super::{ServedMount, can_mount, does, offshoot};

fn require() -> Option<XfsJudges> {
    judges::require().filter(|_| can_mount())
}

fn one_file(judges: &XfsJudges) -> FilledXfs {
    let fill = |root: &Path| fs::write(root.join("file"), "contents").expect("a file");
    XfsRecipe::new(XfsVolumeKind::named("usual")).fill(fill).make(judges)
}

/// One of everything, with the same inode numbers.
#[test]
fn both_mounts_show_the_same() {
    let Some(judges) = require() else { return };
    for kind in ["usual", "today"] {
        let filled = XfsRecipe::new(XfsVolumeKind::named(kind)).make(&judges);
        let theirs = filled.disk.mount("ro,noatime", &[]);
        let ours = ServedMount::new(filled.disk.image(), "ro");
        let shown = HostFilesystem::new(ours.path()).expect("the mount opens");
        let outcome = Compare::default().without(Aspect::StoredAcls).run(&shown, theirs.path());
        outcome.assert_same(EVERYTHING_AT_LEAST);
        drop(shown);
        ours.unmount();
    }
}

#[test]
fn a_mount_is_only_read() {
    let Some(judges) = require() else { return };
    let filled = one_file(&judges);
    let image = filled.disk.image();
    let before = fs::read(image).expect("an image");
    let mounted = ServedMount::new(image, "ro");
    let file = mounted.path().join("file");
    let kind = |result: std::io::Result<()>| result.map_err(|error| error.kind());
    let refused = Err(ErrorKind::ReadOnlyFilesystem);
    assert_eq!(kind(fs::write(&file, "x")), refused);
    assert_eq!(kind(fs::remove_file(&file)), refused);
    assert_eq!(kind(fs::create_dir(mounted.path().join("dir"))), refused);
    assert_eq!(kind(fs::rename(&file, mounted.path().join("other"))), refused);
    assert_eq!(fs::read_to_string(&file).ok().as_deref(), Some("contents"));
    // It was opened for reading, and stays so.
    let remount = ["mount", "-o", "remount,rw"].map(OsStr::new);
    let output = offshoot(&[&remount[..], &[mounted.path().as_os_str()]].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("mounted to be read only"), "{said}");
    // Verbs on the mount.
    let verb = |words: &str| {
        let words = words.split(' ').map(OsStr::new);
        offshoot(&words.chain([mounted.path().as_os_str()]).collect::<Vec<_>>())
    };
    let info = verb("info").stdout;
    let info = String::from_utf8_lossy(&info);
    assert!(info.contains("XFS, version 5"), "{info}");
    does(&["stat".as_ref(), "-c".as_ref(), "".as_ref(), file.as_os_str()]);
    does(&["sync".as_ref(), mounted.path().as_os_str()]);
    for name in ["scrub -r", "stats", "subvolume list", "property list"] {
        let output = verb(name);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(4) && said.contains("XFS"), "{name}: {said}");
    }
    mounted.unmount();
    assert!(fs::read(image).expect("an image") == before, "the image was changed");
}

#[test]
fn what_an_xfs_volume_has_not_is_refused() {
    let Some(judges) = require() else { return };
    let filled = one_file(&judges);
    let dir = scratch_dir();
    for (options, what) in [
        ("rw", "writing an XFS volume, which is only read so far: mount it with -o ro"),
        ("ro,subvol=home", "a subvolume on an XFS volume"),
        ("ro,subvolid=257", "a subvolume on an XFS volume"),
        ("ro,device=/dev/null", "a further device on an XFS volume"),
    ] {
        let words = ["mount".as_ref(), "-o".as_ref(), options.as_ref()];
        let places = [filled.disk.image().as_os_str(), dir.path().as_os_str()];
        let output = offshoot(&[&words[..], &places].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(4), "{options}: {said}");
        assert!(said.contains(what) && said.lines().count() == 1, "{options}: {said}");
        assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 0, "it is mounted");
    }
}
