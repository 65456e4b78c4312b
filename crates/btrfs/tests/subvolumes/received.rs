//! Subvolumes that were received: what the kernel finds them by is kept.

use std::ffi::OsStr;

use offshoot_testkit::disks::Disks;
use offshoot_testkit::progs::{self, Progs};
use offshoot_testkit::run::run;
use offshoot_testkit::{fill, judges};
use offshoot_vfs::{FileSystem, FileSystemMut};

use crate::common::{AT, at, judge, open, place, subvolume_at, top};

fn btrfs(words: &[&dyn AsRef<OsStr>]) {
    let words: Vec<&OsStr> = words.iter().map(|word| (*word).as_ref()).collect();
    run("btrfs", &words);
}

/// How many subvolumes the UUID tree has by their own UUID, and by that of what they were received from.
fn uuids(disks: &Disks) -> [usize; 2] {
    let dump = Progs::of(disks).dump_tree("uuid");
    ["UUID_KEY_SUBVOL ", "UUID_KEY_RECEIVED_SUBVOL "].map(|kind| {
        let mut count = 0;
        let mut is_kind = false;
        for line in dump.lines() {
            if line.contains("item ") {
                is_kind = line.contains(kind);
            } else if is_kind && line.trim().starts_with("subvol_id") {
                count += 1;
            }
        }
        count
    })
}

#[test]
fn a_received_subvolume_and_its_snapshots() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 512);
    disks.mkfs(&[]);
    let mount = disks.mount("rw,noatime");
    let path = |name: &str| mount.path().join(name);
    fill::subvolumes::create(&path("source"));
    std::fs::write(path("source/file"), vec![1; 50_000]).expect("a file");
    fill::subvolumes::snapshot(&path("source"), &path("sent"), true);
    std::fs::create_dir(path("in")).expect("a directory");
    btrfs(&[&"send", &"-q", &"-f", &path("stream"), &path("sent")]);
    btrfs(&[&"receive", &"-q", &"-f", &path("stream"), &path("in")]);
    drop(mount);
    assert_eq!(uuids(&disks), [4, 1]);
    let volume = open(&disks);
    let fs = top(&volume);
    let received = subvolume_at(&fs, "in/sent");
    let info = volume.subvolume(received).expect("it is there");
    assert!(info.received_uuid.is_some() && info.sent.is_some() && info.received.is_some());
    for (name, is_read_only) in [("fixed", true), ("free", false)] {
        fs.snapshot(received, place(fs.root(), name), is_read_only, AT).expect("a snapshot");
    }
    fs.sync().expect("a commit");
    drop((fs, volume));
    judge(&disks, 8);
    assert_eq!(uuids(&disks), [6, 2]);
    let mount = disks.mount("rw,noatime");
    let all = progs::subvolumes(mount.path());
    let uuid = |path: &str| {
        let one = all.iter().find(|one| one.path == path).expect("it was made");
        one.received_uuid.clone()
    };
    assert_eq!(uuid("fixed"), uuid("in/sent"));
    assert_eq!(uuid("free"), "-");
    drop(mount);
    let volume = open(&disks);
    let fs = top(&volume);
    fs.delete_subvolume(place(fs.root(), "fixed"), AT).expect("it is there");
    fs.sync().expect("a commit");
    assert_eq!(uuids(&disks), [5, 1]);
    fs.delete_subvolume(place(at(&fs, "in"), "sent"), AT).expect("it is there");
    volume.drop_deleted().expect("everything reads");
    fs.sync().expect("a commit");
    drop((fs, volume));
    assert_eq!(uuids(&disks), [4, 0]);
    judge(&disks, 6);
}
