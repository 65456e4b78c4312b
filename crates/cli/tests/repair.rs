//! `repair`: what it says and writes, and its exit codes.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::run::run;

fn offshoot(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_offshoot")).args(arguments).output().expect("it runs")
}

/// Runs the program, which must end with this exit code, and returns its output.
#[track_caller]
fn ends(code: i32, arguments: &[&str]) -> String {
    let output = offshoot(arguments);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).expect("text")
}

/// Spoils all blocks of a tree.
fn spoil(image: &Path, tree: u64) {
    let bytes = std::fs::read(image).expect("an image");
    let file = File::options().write(true).open(image).expect("an image");
    let fsid = &bytes[65_536 + 32..65_536 + 48];
    for at in (0..bytes.len()).step_by(4096) {
        let is_block =
            bytes[at + 32..at + 48] == *fsid && bytes[at + 88..at + 96] == tree.to_le_bytes();
        if is_block && at != 65_536 {
            file.write_all_at(b"damage", at as u64 + 300).expect("it is written");
        }
    }
}

/// A file that cannot be read is accepted as it is, and the program says what that changes.
#[test]
fn data_of_a_file_is_accepted() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&[]);
    let mount = disks.mount("rw,noatime");
    let at = |name: &str| mount.path().join(name).to_str().expect("a plain path").to_owned();
    std::fs::write(at("file"), "a line of a log\n".repeat(1000)).expect("a file");
    std::fs::write(at("sound"), vec![1; 9000]).expect("a file");
    run("sync", &["-f", &at("")]);
    run("cp", &["--reflink=always", &at("file"), &at("clone")]);
    drop(mount);
    let path = &disks.images()[0];
    let image = path.to_str().expect("a plain path");
    let bytes = std::fs::read(path).expect("an image");
    let place = bytes.windows(16).position(|found| found == b"a line of a log\n");
    let file = File::options().write(true).open(path).expect("an image");
    file.write_all_at(b"A", place.expect("it is there") as u64 + 8192).expect("it is written");
    ends(3, &["cat", &format!("{image}:/file")]);
    let arguments = ["repair", "--accept-data", "/file", "--accept-data", "/sound", image];
    let said = ends(0, &[&arguments[..], &["--dry-run"]].concat());
    for line in [
        "would be accepted: /file: 4096 bytes at 8192, address",
        "would be accepted as well, because it shares data: subvolume 5, inode",
        "(/clone)",
        "/sound: all data fits its checksums",
        "nothing was written",
    ] {
        assert!(said.contains(line), "{line:?} expected in {said}");
    }
    let said = ends(0, &[&arguments[..], &["--json"]].concat());
    assert!(
        said.contains(r#""accepted_in":[{"inode""#) && said.contains(r#""offset":8192"#),
        "{said}"
    );
    disks.assert_checks();
    ends(0, &["check", "--data", image]);
    for name in ["file", "clone"] {
        let said = ends(0, &["cat", &format!("{image}:/{name}")]);
        assert_eq!(said.find('A'), Some(8192));
    }
    ends(1, &["repair", "--accept-data", "/nothing", image]);
    ends(2, &["repair", "--undo", "--accept-data", "/file", image]);
}

/// A volume with one file, called `file`.
fn with_a_file(judges: &Judges) -> Disks {
    let disks = Disks::create(judges, 1, 256);
    disks.mkfs(&["-m", "single"]);
    std::fs::write(disks.mount("rw,noatime").path().join("file"), "contents").expect("a file");
    disks
}

#[test]
fn a_repair_says_what_it_does_and_is_undone() {
    let Some(judges) = judges::require() else { return };
    let disks = with_a_file(&judges);
    let image = disks.images()[0].to_str().expect("a plain path");
    assert!(ends(0, &["repair", image]).contains("nothing is wrong"));
    ends(1, &["repair", "--undo", image]);
    spoil(&disks.images()[0], 2);
    let damaged = std::fs::read(image).expect("an image");
    ends(3, &["check", image]);
    let said = ends(0, &["repair", "--dry-run", image]);
    assert!(
        said.contains("mended: 721 TreeBlock") && said.contains("nothing was written"),
        "{said}"
    );
    assert!(std::fs::read(image).expect("an image") == damaged, "a dry run writes nothing");
    let said = ends(0, &["repair", "--json", image]);
    assert!(said.contains("\"written\":true") && said.contains("\"after\":[]"), "{said}");
    disks.assert_checks();
    assert_eq!(ends(0, &["cat", &format!("{image}:/file")]), "contents");
    let said = ends(0, &["repair", "--undo", image]);
    assert!(said.contains("is what it was after transaction"), "{said}");
    ends(3, &["check", image]);
    let said = ends(0, &["repair", image]);
    assert!(said.contains("made anew: EXTENT_TREE") && said.contains("--undo"), "{said}");
    assert!(ends(0, &["repair", "--confirm", image]).contains("cannot be undone"));
    ends(1, &["repair", "--undo", image]);
    ends(2, &["repair", "--undo", "--confirm", image]);
    ends(2, &["repair", "--class", "everything", image]);
    disks.assert_checks();
    assert_eq!(ends(0, &["cat", &format!("{image}:/file")]), "contents");
}

/// Wipes the places of superblocks.
fn wipe(image: &Path) {
    let file = File::options().write(true).open(image).expect("an image");
    for at in [64 << 10, 64 << 20] {
        file.write_all_at(&[0x5a; 4096], at).expect("it is written");
    }
}

#[test]
fn a_scan_makes_superblocks_and_is_undone() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 2, 256);
    disks.mkfs(&["-m", "raid1", "-d", "raid1", "-L", "labelled"]);
    let mount = disks.mount("rw,noatime");
    std::fs::write(mount.path().join("file"), "contents").expect("a file");
    drop(mount);
    let [one, other] = disks.images() else { panic!("two images") };
    let names = [one, other].map(|image| image.to_str().expect("a plain path"));
    let with = |arguments: &[&'static str]| {
        [&["repair"], arguments, &["--device", names[1], names[0]]].concat()
    };
    let said = ends(0, &with(&["--scan", "--json"]));
    assert!(said.contains("\"scanned\":null"), "nothing is wrong: {said}");
    disks.images().iter().for_each(|image| wipe(image));
    let wiped = disks.images().iter().map(|image| std::fs::read(image).expect("an image"));
    let wiped: Vec<_> = wiped.collect();
    let output = offshoot(&with(&[]));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("--scan"), "{said}");
    let said = ends(0, &with(&["--scan", "--dry-run"]));
    for expected in ["found: volume", "no sound superblock", "mended: 702", "nothing was written"] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    for (image, bytes) in disks.images().iter().zip(&wiped) {
        assert!(std::fs::read(image).expect("an image") == *bytes, "a dry run writes nothing");
    }
    let said = ends(0, &with(&["--scan", "--json"]));
    assert!(said.contains("\"superblock_made\":true") && said.contains("\"after\":[]"), "{said}");
    disks.assert_checks();
    ends(0, &with(&["--undo"]));
    for (image, bytes) in disks.images().iter().zip(&wiped) {
        let now = std::fs::read(image).expect("an image");
        for at in [64 << 10, 64 << 20] {
            assert!(now[at..at + 4096] == bytes[at..at + 4096], "byte {at} is as before");
        }
    }
    ends(0, &with(&["--scan"]));
    disks.assert_checks();
    let mount = disks.mount("ro");
    assert_eq!(std::fs::read(mount.path().join("file")).expect("it is there"), b"contents");
    drop(mount);
    ends(2, &with(&["--class", "chunks"]));
    ends(2, &with(&["--scan", "--undo"]));
    ends(2, &with(&["--fsid", "00000000-0000-0000-0000-000000000000"]));
}

/// Our own mkfs places the chunks of both members equally, so that either may be the first one.
#[test]
fn members_that_are_equal_are_told_apart_in_any_order() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 2, 256);
    let names = disks.images().iter().map(|image| image.to_str().expect("a plain path"));
    let names: Vec<_> = names.collect();
    ends(0, &["mkfs", "-f", "-m", "raid1", "-d", "raid1", names[0], names[1]]);
    let mount = disks.mount("rw,noatime");
    std::fs::write(mount.path().join("file"), vec![7; 1 << 20]).expect("a file");
    drop(mount);
    disks.images().iter().for_each(|image| wipe(image));
    let other = "00000000-0000-0000-0000-000000000001";
    let output = offshoot(&["repair", "--scan", "--fsid", other, "--device", names[0], names[1]]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains(other), "{said}");
    let said = ends(0, &["repair", "--scan", "--device", names[0], names[1]]);
    assert!(said.contains("found: volume"), "{said}");
    disks.assert_checks();
    let mount = disks.mount("ro");
    let file = std::fs::read(mount.path().join("file")).expect("it is there");
    assert!(file == vec![7; 1 << 20]);
}

#[test]
fn lost_blocks_are_cut_off_where_that_is_chosen() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&["-m", "single"]);
    let mount = disks.mount("rw,noatime");
    let lost = mount.path().join("lost");
    run("btrfs", &["subvolume", "create", &lost.display().to_string()]);
    std::fs::write(lost.join("file"), "is lost").expect("a file");
    std::fs::write(mount.path().join("file"), "contents").expect("a file");
    drop(mount);
    let image = disks.images()[0].to_str().expect("a plain path");
    ends(1, &["repair", "--cut-off", "/lost", image]);
    spoil(&disks.images()[0], 256);
    let said = ends(3, &["repair", image]);
    assert!(said.contains("--cut-off 256 then gives up"), "{said}");
    ends(1, &["repair", "--cut-off", "/other", image]);
    ends(2, &["repair", "--cut-off", "/lost", "--undo", image]);
    let said = ends(0, &["repair", "--dry-run", "--cut-off", "/lost", image]);
    let expected = "would be cut off: 1 block of the subvolume 256 (/lost), which would become";
    assert!(said.contains(expected) && said.contains("of level 0: from"), "{said}");
    ends(3, &["check", image]);
    let said = ends(0, &["repair", "--json", "--cut-off", "256", image]);
    assert!(said.contains("\"emptied\":true") && said.contains("\"lost_blocks\":1"), "{said}");
    disks.assert_checks();
    assert_eq!(ends(0, &["cat", &format!("{image}:/file")]), "contents");
    assert_eq!(ends(0, &["ls", &format!("{image}:/lost")]), "");
    ends(0, &["repair", "--undo", image]);
    ends(3, &["check", image]);
}

/// The name of an item is in a leaf twice: the kernel and our readers refuse the leaf.
#[test]
fn what_is_intact_of_a_leaf_is_kept_where_that_is_chosen() {
    let Some(judges) = judges::require() else { return };
    let disks = with_a_file(&judges);
    let path = &disks.images()[0];
    let image = path.to_str().expect("a plain path");
    let bytes = std::fs::read(path).expect("an image");
    let fsid = &bytes[65_536 + 32..65_536 + 48];
    let file = File::options().write(true).open(path).expect("an image");
    for at in (0..bytes.len()).step_by(4096) {
        let is_leaf = bytes[at + 32..at + 48] == *fsid
            && bytes[at + 88..at + 96] == 5u64.to_le_bytes()
            && bytes[at + 100] == 0
            && at != 65_536;
        if is_leaf {
            let mut leaf = bytes[at..at + 16_384].to_vec();
            // The second item gets the key of the first one.
            leaf.copy_within(101..101 + 17, 101 + 25);
            let sum = crc32c(&leaf[32..]);
            leaf[..4].copy_from_slice(&sum.to_le_bytes());
            file.write_all_at(&leaf, at as u64).expect("it is written");
        }
    }
    let said = ends(3, &["repair", image]);
    assert!(said.contains("--dry-run --class overlaps"), "{said}");
    ends(2, &["repair", "--class", "files", "--cut-off", "5", image]);
    let said = ends(0, &["repair", "--dry-run", "--class", "overlaps", image]);
    assert!(said.contains("would be dropped: /: (256 INODE_ITEM 0)"), "{said}");
    let said = ends(0, &["repair", "--json", "--class", "overlaps", image]);
    assert!(said.contains(r#""what":"dropped""#) && said.contains(r#""overlaps_more":false"#));
    disks.assert_checks();
    assert_eq!(ends(0, &["cat", &format!("{image}:/file")]), "contents");
    ends(0, &["repair", "--undo", image]);
    ends(3, &["check", image]);
}

/// The checksum of tree blocks, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |sum: u32| if sum & 1 == 1 { (sum >> 1) ^ 0x82f6_3b78 } else { sum >> 1 };
    let add = |sum: u32, byte: &u8| (0..8).fold(sum ^ u32::from(*byte), |sum, _| step(sum));
    !bytes.iter().fold(u32::MAX, add)
}
