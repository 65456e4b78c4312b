//! `subvolume` judged by `btrfs check` and the kernel.

use std::path::Path;

use offshoot_testkit::btrfs::disks::MountedMembers;
use offshoot_testkit::btrfs::{judges, progs};
use offshoot_testkit::run::run;
use offshoot_testkit::scratch_dir;

use super::{check, does, fails, volume};

/// The kernel's list: the path, whether it is read-only, and whether it is a snapshot.
fn listed(image: &Path) -> Vec<(String, bool, bool)> {
    let mount =
        MountedMembers::try_new(&[image.to_path_buf()], "ro,subvolid=5").expect("it mounts");
    let row = |one: progs::ListedSubvolume| (one.path, one.is_read_only, one.parent_uuid != "-");
    progs::subvolumes(mount.path()).into_iter().map(row).collect()
}

#[test]
fn subvolumes_come_and_go() {
    let dir = scratch_dir();
    let (dir, image) = (dir.path(), dir.path().join("v.img"));
    volume(dir, "v.img", 256);
    does(dir, "subvolume create v.img:/home v.img:/home/alice/");
    does(dir, "mkdir v.img:/snapshots v.img:/home/alice/dir");
    does(dir, "subvolume snapshot -r v.img:/home/alice v.img:/snapshots");
    does(dir, "subvolume snapshot v.img:/ v.img:/snapshots/all");
    does(dir, "mkdir v.img:/home/alice/dir/later");
    check(&image);
    if let Some(_judges) = judges::require() {
        let row = |path: &str, ro, snap| (path.to_owned(), ro, snap);
        let expected = [
            row("home", false, false),
            row("home/alice", false, false),
            row("snapshots/alice", true, true),
            row("snapshots/all", false, true),
        ];
        assert_eq!(listed(&image), expected);
    }
    assert_eq!(does(dir, "ls v.img:/snapshots/alice/dir"), "");
    assert_eq!(does(dir, "ls v.img:/snapshots/all"), "home\nsnapshots\n");
    assert_eq!(does(dir, "subvolume get v.img:/snapshots/alice"), "ro=true\n");
    assert!(fails(dir, "mkdir v.img:/snapshots/alice/x", 1).contains("Read-only"));
    does(dir, "subvolume set v.img:/snapshots/alice ro=false");
    assert_eq!(does(dir, "subvolume get --json v.img:/snapshots/alice"), "{\"ro\":false}\n");
    does(dir, "mkdir v.img:/snapshots/alice/x");

    let shown = does(dir, "subvolume show v.img:/home/alice");
    assert!(shown.starts_with("/home/alice\n"), "{shown}");
    assert!(shown.contains("Snapshot: /snapshots/alice\n"), "{shown}");
    let shown = does(dir, "subvolume show --json v.img:/home/alice");
    assert!(shown.contains("\"snapshots\":[\"snapshots/alice\"]"), "{shown}");

    does(dir, "subvolume set-default v.img:/home");
    assert_eq!(does(dir, "subvolume get-default v.img"), "256 /home\n");
    assert_eq!(does(dir, "ls v.img:/"), "alice\n");
    let said = fails(dir, "subvolume delete --subvolume 5 v.img:/home", 1);
    assert!(said.contains("default"), "{said}");
    does(dir, "subvolume set-default --subvolume 5 v.img:/");
    let said = fails(dir, "subvolume delete v.img:/home", 1);
    assert!(said.contains("holds other subvolumes"), "{said}");
    let said = fails(dir, "rm -r v.img:/home", 1);
    assert!(said.contains("subvolume delete"), "{said}");
    let said = fails(dir, "rm -r v.img:/snapshots", 1);
    assert!(said.contains("/snapshots/alice is a subvolume"), "{said}");
    assert!(fails(dir, "subvolume delete v.img:/snapshots", 1).contains("is no subvolume"));
    assert!(fails(dir, "subvolume snapshot v.img:/snapshots v.img:/x", 1).contains("no subvolume"));
    let said = fails(dir, "mv v.img:/snapshots v.img:/home/snapshots", 1);
    assert!(said.contains("copy and remove it"), "{said}");
    let said = fails(dir, "mv --exchange -T v.img:/snapshots v.img:/home/alice", 1);
    assert!(said.contains("only subvolumes themselves can be exchanged"), "{said}");
    does(dir, "mv v.img:/snapshots/alice v.img:/moved");
    does(dir, "subvolume delete v.img:/home/alice v.img:/home v.img:/moved");
    check(&image);
    // The place of a subvolume that a snapshot did not take is removed like a directory.
    does(dir, "rm -r v.img:/snapshots/all/home v.img:/snapshots/all/snapshots");
    does(dir, "subvolume delete v.img:/snapshots/all");
    assert_eq!(does(dir, "subvolume list --json v.img").matches("\"id\"").count(), 1);
    check(&image);
}

/// The optional columns of the list equal those of `btrfs subvolume list -puqR`.
#[test]
fn lists_have_the_columns_of_btrfs() {
    let dir = scratch_dir();
    let (dir, image) = (dir.path(), dir.path().join("v.img"));
    volume(dir, "v.img", 256);
    does(dir, "subvolume create v.img:/home v.img:/home/alice");
    does(dir, "subvolume snapshot -r v.img:/home/alice v.img:/sent");
    does(dir, "mkdir v.img:/in");
    let header = |line: &str| does(dir, line).lines().next().expect("a header").to_owned();
    assert!(!header("subvolume list v.img").contains("UUID"));
    let words: Vec<_> = ["-p", "-u", "-q", "-R", "-quR"]
        .map(|options| header(&format!("subvolume list {options} v.img")))
        .iter()
        .map(|header| {
            header
                .split("FLAGS")
                .nth(1)
                .expect("flags")
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
        })
        .collect();
    assert_eq!(
        words,
        [
            "PATH",
            "UUID PATH",
            "PARENT UUID PATH",
            "RECEIVED UUID PATH",
            "UUID PARENT UUID RECEIVED UUID PATH"
        ]
    );
    let Some(_judges) = judges::require() else { return };
    let theirs = {
        let mount = MountedMembers::try_new(&[image], "rw,noatime").expect("it mounts");
        let script = "btrfs send -q -f stream sent; btrfs receive -q -f stream in";
        run("sh", &["-c", &format!("set -e; cd '{}'; {script}", mount.path().display())]);
        run("sync", &["-f".as_ref(), mount.path().as_os_str()]);
        progs::subvolumes(mount.path())
    };
    assert!(theirs.iter().any(|one| one.received_uuid != "-"));
    let list = does(dir, "subvolume list -puqR v.img");
    let ours: Vec<String> = list
        .lines()
        .filter(|line| !line.trim_start().starts_with("5 "))
        .skip(1)
        .map(|line| {
            // The columns in between are the creation time and the flags.
            let words: Vec<_> = line.split_whitespace().collect();
            [&words[..3], &words[6..]].concat().join(" ")
        })
        .collect();
    let theirs: Vec<String> = theirs
        .iter()
        .map(|one| {
            let progs::ListedSubvolume {
                id,
                parent,
                generation,
                uuid,
                parent_uuid,
                received_uuid,
                path,
                ..
            } = one;
            format!("{id} {parent} {generation} {uuid} {parent_uuid} {received_uuid} /{path}")
        })
        .collect();
    assert_eq!(ours, theirs, "{list}");
}
