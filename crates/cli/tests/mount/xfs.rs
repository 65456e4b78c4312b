//! XFS volumes. The kernel's XFS shows the same volume.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::scratch_dir;
use offshoot_testkit::xfs::disk::RECOVERY;
use offshoot_testkit::xfs::fill::EVERYTHING_AT_LEAST;
use offshoot_testkit::xfs::judges::{self, XfsJudges};
use offshoot_testkit::xfs::matrix::XfsVolumeKind;
use offshoot_testkit::xfs::recipe::{FilledXfs, XfsRecipe};

use rustix::process::Signal;

use super::control::LiveCommands;
use super::handles::FileHandle;
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
    for name in ["scrub -r", "subvolume list"] {
        let output = verb(name);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(4) && said.contains("XFS"), "{name}: {said}");
    }
    mounted.unmount();
    assert!(fs::read(image).expect("an image") == before, "the image was changed");
}

/// What programs do through the mount is what the kernel shows, which has nothing to recover.
#[test]
fn a_mount_is_written() {
    let Some(judges) = require() else { return };
    let filled = one_file(&judges);
    let disk = &filled.disk;
    let mounted = ServedMount::new(disk.image(), "rw,inode64,noquota,logbufs=8,nouuid");
    let path = |name: &str| mounted.path().join(name);
    fs::create_dir_all(path("a/b")).expect("directories");
    fs::write(path("a/b/large"), vec![7; 3 << 20]).expect("a file");
    fs::copy(path("a/b/large"), path("copy")).expect("a copy");
    fs::rename(path("file"), path("a/moved")).expect("a move");
    fs::hard_link(path("a/moved"), path("name")).expect("a link");
    let large = File::options().write(true).open(path("a/b/large")).expect("a file");
    large.set_len(100_000).expect("a length");
    fs::remove_file(path("a/b/large")).expect("it goes");
    large.write_all_at(b"without a name", 5).expect("it is open");
    assert_eq!(fs::metadata(path("copy")).expect("a file").blksize(), 4096);
    // Verbs on the mount.
    does(&["trim".as_ref(), mounted.path().as_os_str()]);
    does(&[
        "property".as_ref(),
        "set".as_ref(),
        mounted.path().as_os_str(),
        "label".as_ref(),
        "live".as_ref(),
    ]);
    does(&["sync".as_ref(), mounted.path().as_os_str()]);
    let stats = offshoot(&["stats".as_ref(), mounted.path().as_os_str()]);
    assert!(String::from_utf8_lossy(&stats.stdout).contains("available"), "{stats:?}");
    drop(large);
    mounted.unmount();
    disk.assert_checks();
    let theirs = disk.mount("rw", &[]);
    let path = |name: &str| theirs.path().join(name);
    assert_eq!(fs::read(path("copy")).expect("a file"), vec![7; 3 << 20]);
    assert_eq!(fs::read_to_string(path("name")).expect("a file"), "contents");
    assert_eq!(fs::metadata(path("a/moved")).expect("a file").nlink(), 2);
    assert_eq!(fs::read_dir(path("a/b")).expect("a directory").count(), 0);
    assert_eq!(disk.xfs_db(&["label"]).trim(), "label = \"live\"");
    drop(theirs);
    // And back: what the kernel did is there.
    let mounted = ServedMount::new(disk.image(), "rw");
    assert_eq!(fs::read_to_string(mounted.path().join("name")).expect("a file"), "contents");
    fs::remove_dir_all(mounted.path().join("a")).expect("it goes");
    mounted.unmount();
    disk.assert_checks();
}

/// A process that is killed leaves a volume that the kernel recovers, with what was fsynced.
#[test]
fn a_killed_mount_is_recovered_by_the_kernel_and_by_the_next_mount() {
    let Some(judges) = require() else { return };
    let filled = one_file(&judges);
    let disk = &filled.disk;
    for is_ours in [false, true] {
        let mounted = ServedMount::new(disk.image(), "rw");
        let name = format!("synced-{is_ours}");
        let file = File::create(mounted.path().join(&name)).expect("a file");
        file.write_all_at(b"synced", 0).and_then(|()| file.sync_all()).expect("an fsync");
        fs::write(mounted.path().join("not-synced"), "x").expect("a file");
        mounted.signal(Signal::KILL);
        drop((file, mounted));
        if is_ours {
            let mounted = ServedMount::new(disk.image(), "rw");
            assert_eq!(fs::read(mounted.path().join(&name)).expect("a file"), b"synced");
            mounted.unmount();
        } else {
            let theirs = disk.mount("rw", &[RECOVERY]);
            assert_eq!(fs::read(theirs.path().join(&name)).expect("a file"), b"synced");
        }
        disk.assert_checks();
    }
}

/// Handles of a file whose number another file got are stale, also in one mount.
#[test]
fn handles_and_nodes_of_numbers_that_are_given_again_are_stale() {
    let Some(judges) = require() else { return };
    let filled = one_file(&judges);
    let mounted = ServedMount::new(filled.disk.image(), "rw");
    let path = mounted.path().join("file");
    let number = fs::metadata(&path).expect("a file").ino();
    let handle = FileHandle::of(&path);
    fs::remove_file(&path).expect("it goes");
    let mut again = None;
    for round in 0..200 {
        // The kernel forgets the node of the removed file a moment later.
        let path = mounted.path().join(format!("new-{round}"));
        fs::write(&path, "new").expect("a file");
        if fs::metadata(&path).expect("a file").ino() == number {
            again = Some(path);
            break;
        }
    }
    let again = again.expect("the number is given again");
    assert!(handle.open(mounted.path()).is_err_and(|error| error.raw_os_error() == Some(116)));
    assert_eq!(fs::read_to_string(again).expect("a file"), "new");
    mounted.unmount();
    filled.disk.assert_checks();
}

#[test]
fn what_an_xfs_volume_has_not_is_refused() {
    let Some(judges) = require() else { return };
    let filled = one_file(&judges);
    let dir = scratch_dir();
    for (options, what) in [
        ("rw,subvol=home", "the mount option subvol=home on an XFS volume"),
        ("ro,subvolid=257", "the mount option subvolid=257 on an XFS volume"),
        ("ro,device=/dev/null", "the mount option device=/dev/null on an XFS volume"),
        ("rw,compress=zstd", "the mount option compress=zstd on an XFS volume"),
        ("rw,discard", "the mount option discard on an XFS volume"),
        ("rw,uquota", "not supported: the mount option uquota"),
        ("rw,wsync", "not supported: the mount option wsync"),
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

/// `stats` on a mount has what the engine did; an image is opened for reading, and did nothing.
#[test]
fn stats_show_what_the_engine_of_xfs_did() {
    let Some(judges) = require() else { return };
    let filled = one_file(&judges);
    let mounted = ServedMount::new(filled.disk.image(), "rw");
    for name in ["a", "b"] {
        fs::write(mounted.path().join(name), "new").expect("a file");
    }
    let shown = mounted.does("sync @") + &mounted.does("stats @");
    assert!(shown.contains("what the engine did since it was mounted"), "{shown}");
    assert!(shown.contains("log_checkpoints"), "{shown}");
    let json: serde_json::Value =
        serde_json::from_str(&mounted.does("stats --json @")).expect("JSON");
    assert!(json["used"].as_u64().is_some_and(|used| used > 0), "{json}");
    let checkpoints = json["statistics"]["log_checkpoints"].as_u64();
    assert!(checkpoints.is_some_and(|count| count > 0), "{json}");
    mounted.unmount();
    let words = ["stats".as_ref(), "--locks".as_ref(), filled.disk.image().as_os_str()];
    let output = offshoot(&words);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(4) && said.contains("--locks"), "{said}");
}
