//! Received subvolumes: the UUIDs by which the kernel finds them are kept.

use std::ffi::OsStr;

use offshoot_btrfs::SubvolumeId;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::progs::{self, Progs};
use offshoot_testkit::btrfs::{fill, judges};
use offshoot_testkit::run::{run, try_run};
use offshoot_vfs::{FileSystem, FileSystemMut};

use crate::common::{AT, at, judge, open, place, subvolume_at, top};

fn btrfs(words: &[&dyn AsRef<OsStr>]) {
    let words: Vec<&OsStr> = words.iter().map(|word| (*word).as_ref()).collect();
    run("btrfs", &words);
}

/// How many subvolumes the UUID tree has by their own UUID, and by their received UUID.
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

/// The origin of a subvolume, as its root item says it, and its flags.
fn origin(disks: &Disks, id: SubvolumeId) -> [String; 4] {
    let dump = Progs::of(disks).dump_tree("root");
    let (_, item) = dump.split_once(&format!("key ({} ROOT_ITEM ", id.0)).expect("it is there");
    let item = item.split("\titem ").next().expect("there is a first part");
    let words: Vec<_> = item.split_whitespace().collect();
    ["flags", "received_uuid", "stransid", "stime"].map(|name| {
        let at = words.iter().position(|&word| word == name).expect("a root item has it");
        words[at + 1].to_owned()
    })
}

/// Regression: a received subvolume that was made writable by force kept its received UUID. So
/// `receive` could take the changed subvolume as a base.
#[test]
fn one_that_may_be_changed_again_was_not_received() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 512);
    disks.mkfs(&[]);
    let mount = disks.mount("rw,noatime");
    let path = |name: &str| mount.path().join(name);
    fill::subvolumes::create(&path("source"));
    for (name, byte) in [("first", 1), ("second", 2)] {
        std::fs::write(path("source/file"), vec![byte; 50_000]).expect("a file");
        fill::subvolumes::snapshot(&path("source"), &path(name), true);
    }
    btrfs(&[&"send", &"-q", &"-f", &path("full"), &path("first")]);
    btrfs(&[&"send", &"-q", &"-f", &path("more"), &"-p", &path("first"), &path("second")]);
    btrfs(&[&"subvolume", &"delete", &path("source"), &path("first"), &path("second")]);
    for dir in ["ours", "theirs"] {
        std::fs::create_dir(path(dir)).expect("a directory");
        btrfs(&[&"receive", &"-q", &"-f", &path("full"), &path(dir)]);
    }
    // Receiving on top of one of them works as long as there is one.
    std::fs::create_dir(path("top")).expect("a directory");
    btrfs(&[&"receive", &"-q", &"-f", &path("more"), &path("top")]);
    drop(mount);
    assert_eq!(uuids(&disks), [4, 3]);

    let volume = open(&disks);
    let fs = top(&volume);
    let (id, other) = (subvolume_at(&fs, "ours/first"), subvolume_at(&fs, "theirs/first"));
    let before = volume.subvolume(id).expect("it is there");
    assert!(before.is_read_only && before.received_uuid.is_some() && before.received.is_some());
    volume.set_read_only(id, false, AT).expect("it is there");
    fs.sync().expect("a commit");
    let after = volume.subvolume(id).expect("it is there");
    assert!(!after.is_read_only && after.received_uuid.is_none() && after.sent.is_none());
    assert_eq!(after.received.map(|(_, at)| at), Some(AT));
    assert!(after.received.map(|one| one.0) > before.received.map(|one| one.0));
    assert_eq!(after.uuid, before.uuid);
    drop((fs, volume));
    judge(&disks, 6);
    assert_eq!(uuids(&disks), [4, 2]);

    // The kernel does the same to the other one.
    let mount = disks.mount("rw,noatime");
    let path = |name: &str| mount.path().join(name);
    btrfs(&[&"property", &"set", &"-f", &path("theirs/first"), &"ro", &"false"]);
    std::fs::create_dir(path("none")).expect("a directory");
    let (more, none) = (path("more"), path("none"));
    let on_top = ["receive".as_ref(), "-f".as_ref(), more.as_os_str(), none.as_os_str()];
    let refused = try_run("btrfs", &on_top).expect_err("nothing is left to receive it on");
    assert!(refused.contains("parent subvol"), "{refused}");
    drop(mount);
    assert_eq!(uuids(&disks), [4, 1]);
    assert_eq!(origin(&disks, id), origin(&disks, other));
    assert_eq!(origin(&disks, id)[0], "0x0(none)");
    disks.assert_checks();
}
