//! `offshoot mkfs --format xfs`: what it makes, what it refuses, and how it ends.

use std::fs;
use std::path::Path;

use offshoot_testkit::scratch_dir;
use offshoot_testkit::xfs::disk::XfsDisk;
use offshoot_testkit::xfs::judges;

use super::lines::{self, does, fails};

const UUID: &str = "0ff50007-0000-4000-8000-00000000cccc";

/// The folder of the image of `disk`, which is `member0.img`.
fn dir_of(disk: &XfsDisk) -> &Path {
    disk.image().parent().expect("images are in a folder")
}

#[test]
fn what_is_made_is_sound_and_as_asked_for() {
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 512);
    let dir = dir_of(&disk);
    let text = does(
        dir,
        &format!(
            "mkfs member0.img --format xfs -U {UUID} -L 'a label' --block-size 1K --sector-size \
             1K --inode-size 512 --dir-block-size 8K --groups 3 --stripe-unit 64K --stripe-width \
             256K --log-size 66M --log-stripe 32K --inode-percent 10 -O ^rmapbt -O \
             ^inobtcount,^finobt --root-owner 1000:100"
        ),
    );
    assert_eq!(text, format!("made volume {UUID}, 512 MiB\n"));
    disk.assert_checks();
    for (name, value) in [
        ("blocksize", 1024),
        ("sectsize", 1024),
        ("inodesize", 512),
        ("dirblklog", 3),
        ("agcount", 3),
        ("unit", 64),
        ("width", 256),
        ("logblocks", 66 << 10),
        ("logsunit", 32 << 10),
        ("imax_pct", 10),
        ("features_ro_compat", 4),
        ("features_incompat", 0xeb),
    ] {
        assert_eq!(disk.field(&["sb 0"], name), value, "{name}");
    }
    let said = disk.xfs_db(&["uuid", "label"]);
    assert!(said.contains(UUID) && said.contains("\"a label\""), "{said}");
    assert_eq!(does(dir, "stat -c '%u %g %a %F' member0.img:/"), "1000 100 755 directory\n");
    let mount = disk.mount("rw", &[]);
    fs::write(mount.path().join("file"), "content").expect("a file");
    drop(mount);
    disk.assert_checks();
    assert_eq!(does(dir, "cat member0.img:/file"), "content");
}

#[test]
fn the_same_command_makes_the_same_bytes() {
    let dir = scratch_dir();
    for name in ["a.img", "b.img"] {
        let line = format!("mkfs {name} --format xfs --size 300M -U {UUID}");
        let output = lines::program(dir.path())
            .args(lines::words(&line))
            .env("SOURCE_DATE_EPOCH", "1700000000")
            .output()
            .expect("the program starts");
        assert!(output.status.success(), "{output:?}");
    }
    let [a, b] = ["a.img", "b.img"].map(|name| fs::read(dir.path().join(name)).expect("an image"));
    assert!(a == b, "the images differ");
    assert_eq!(does(dir.path(), "ls a.img"), "");
    assert_eq!(does(dir.path(), "stat -c %Y a.img:/"), "1700000000\n");
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let dir = scratch_dir();
    let dir = dir.path();
    for (words, reason) in [
        ("--format xfs --csum sha256", "--csum"),
        ("--format xfs -n 16k", "--nodesize"),
        ("--format xfs -m single", "--metadata"),
        ("--format xfs -d single", "--data"),
        ("--format xfs b.img", "one device"),
        ("--format xfs --block-size 512", "version 4"),
        ("--format xfs --groups 1", "two are the least"),
        ("--format xfs --groups 4 --group-size 1G", "--group-size"),
        ("--format xfs --stripe-unit 64K", "--stripe-width"),
        ("--format xfs -L 'thirteen byte'", "12 bytes"),
        ("--format xfs -O skinny-metadata", "skinny-metadata"),
        ("--format xfs -O inobtcount -O ^finobt", "inobtcount"),
        ("--format ext4", "ext4"),
        ("--block-size 4K", "--block-size"),
        ("--log-size 64M", "--log-size"),
        ("--inode-percent 5", "--inode-percent"),
    ] {
        let said = fails(dir, &format!("mkfs a.img --size 512M {words}"), 2);
        assert!(said.contains(reason), "{words}: {said}");
    }
    for (words, code, reason) in [
        ("--size 512M -O metadir", 4, "metadir"),
        ("--size 512M -O ^crc", 4, "version 4"),
        ("--size 200M", 1, "300 MiB"),
    ] {
        let said = fails(dir, &format!("mkfs a.img --format xfs {words}"), code);
        assert!(said.contains(reason), "{words}: {said}");
    }
    assert_eq!(fs::read_dir(dir).expect("a folder").count(), 0, "images were left");
}

#[test]
fn another_volume_is_overwritten_by_force_only() {
    let dir = scratch_dir();
    let dir = dir.path();
    does(dir, "mkfs a.img --size 300M");
    let said = fails(dir, "mkfs a.img --format xfs", 1);
    assert!(said.contains("btrfs") && said.contains("force"), "{said}");
    does(dir, "mkfs a.img --format xfs --force");
    let said = fails(dir, "mkfs a.img", 1);
    assert!(said.contains("XFS"), "{said}");
    does(dir, "mkfs a.img --force");
    // Only btrfs has subvolumes.
    does(dir, "subvolume list a.img");
}
