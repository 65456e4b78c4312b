//! `offshoot recover` from devices that have lost all superblocks, and more.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use offshoot_testkit::btrfs::damage::SUPERBLOCKS;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::random::{Random, seed_of_run};
use serde_json::Value;

use crate::{
    FilesByPath, Got, Judged, contents, fill, fill_and_remove, pick, recover, recover_from, wipe,
};

/// Wipes all places of superblocks of all members.
fn wipe_superblocks(disks: &Disks) {
    for image in disks.images() {
        let len = image.metadata().expect("an image").len();
        for at in SUPERBLOCKS.into_iter().filter(|at| at + 4096 <= len) {
            wipe(image, at, 4096);
        }
    }
}

/// A volume over so many devices, and what the kernel shows in it.
fn filled(judges: &Judges, devices: usize, mkfs: &'static str) -> (Disks, FilesByPath) {
    let recipe = Recipe::new().devices(devices).mib(300).mkfs(mkfs).fill(fill);
    let disks = recipe.make(judges);
    let truth = contents(disks.mount("ro,noatime").path());
    (disks, truth)
}

fn bytes(disks: &Disks) -> Vec<Vec<u8>> {
    disks.images().iter().map(|image| std::fs::read(image).expect("an image")).collect()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn report(got: &Got) -> Value {
    serde_json::from_slice(&got.output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {:?}", got.output))
}

fn offshoot(arguments: &[&str], place: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_offshoot"));
    command.args(arguments).arg(place).output().expect("it runs")
}

/// Volumes of several profiles without superblocks, and also without the newest chunk tree: all
/// files of all subvolumes and snapshots are there, as the kernel showed them, and nothing was
/// written.
#[test]
fn without_any_superblock_everything_is_there() {
    let Some(judges) = judges::require() else { return };
    for (mkfs, devices) in [
        ("-m single -d single -L labelled", 1),
        ("-m dup -d dup --csum xxhash", 1),
        ("-m raid1 -d raid1", 2),
        ("-m raid1 -d raid0", 2),
        ("-m raid0 -d raid0 --csum sha256", 2),
    ] {
        let volume = Judged::make(&judges, mkfs, devices);
        for lost in [&[][..], &volume.blocks["chunk"]] {
            let damaged = volume.without(&judges, lost);
            wipe_superblocks(&damaged);
            let before = bytes(&damaged);
            let mut images = damaged.images().to_vec();
            images.reverse();
            let found = recover_from(&images, &[]);
            let what = format!("{mkfs}, {lost:?}: {:?}", found.output);
            assert!(found.files == volume.truth, "{what}");
            assert_eq!(found.output.status.code(), Some(0), "{what}");
            assert_eq!(report(&found)["scanned"]["superblock_made"], true, "{what}");
            assert!(said(&found.output).contains("no sound superblock"), "{what}");
            assert!(bytes(&damaged) == before, "{what}: something was written");
        }
    }
}

/// A chunk tree on chunks with parity has no place to be made anew. The one that is there is read,
/// and that this is not proved is said.
#[test]
fn without_any_superblock_chunks_with_parity_are_read() {
    let Some(judges) = judges::require() else { return };
    let (disks, truth) = filled(&judges, 3, "-m raid5 -d raid6");
    wipe_superblocks(&disks);
    let mut images = disks.images().to_vec();
    images.rotate_left(1);
    let found = recover_from(&images, &[]);
    assert!(found.files == truth, "{:?}", found.output);
    assert_eq!(found.output.status.code(), Some(3), "{:?}", found.output);
    assert!(said(&found.output).contains("not whole"), "{:?}", found.output);
}

/// One member of a striped volume has lost its superblocks.
#[test]
fn without_the_superblocks_of_one_member_everything_is_there() {
    let Some(judges) = judges::require() else { return };
    let (disks, truth) = filled(&judges, 2, "-m raid0 -d raid0");
    SUPERBLOCKS[..2].iter().for_each(|at| wipe(&disks.images()[1], *at, 4096));
    let found = recover(&disks, &[]);
    assert!(found.files == truth, "{:?}", found.output);
    assert_eq!(report(&found)["scanned"]["superblock_made"], false);
    assert_eq!(found.output.status.code(), Some(0), "{:?}", found.output);
}

/// Nothing tells the number of a member, because it has data alone: it gets the one that is left,
/// and data is right. That this is a guess is said.
#[test]
fn a_member_without_tree_blocks_gets_the_number_that_is_left() {
    let Some(judges) = judges::require() else { return };
    let (disks, truth) = filled(&judges, 2, "-m single -d raid0");
    wipe_superblocks(&disks);
    let mut images = disks.images().to_vec();
    for _ in 0..2 {
        images.reverse();
        let found = recover_from(&images, &[]);
        assert!(found.files == truth, "{:?}", found.output);
        assert_eq!(found.output.status.code(), Some(3), "{:?}", found.output);
        assert!(said(&found.output).contains("not whole"), "{:?}", found.output);
    }
}

/// A member is missing as well: that is said, and with `--degraded` its mirror is enough.
#[test]
fn without_superblocks_and_a_member_the_mirror_is_read() {
    let Some(judges) = judges::require() else { return };
    let (disks, truth) = filled(&judges, 2, "-m raid1 -d raid1");
    wipe_superblocks(&disks);
    for image in disks.images() {
        let one = std::slice::from_ref(image);
        let refused = recover_from(one, &[]);
        assert_eq!(refused.output.status.code(), Some(1), "{:?}", refused.output);
        let why = said(&refused.output);
        assert!(why.contains("is missing") && why.contains("--degraded"), "{why}");
        let found = recover_from(one, &["--degraded"]);
        assert!(found.files == truth, "{:?}", found.output);
    }
}

/// Besides the superblocks, random blocks of trees are lost: what is there is right, or told.
#[test]
fn without_superblocks_and_random_blocks_the_rest_is_there() {
    let Some(judges) = judges::require() else { return };
    let mut random = Random::new(seed_of_run());
    for (mkfs, devices) in [("", 1), ("-m raid1 -d raid0", 2)] {
        let volume = Judged::make(&judges, mkfs, devices);
        for round in 0..5 {
            let mut blocks = Vec::new();
            for _ in 0..=random.below(4) {
                let trees = ["fs", "fs", "256", "csum", "extent", "root", "dev", "chunk"];
                let tree = *pick(&mut random, &trees);
                blocks.push(*pick(&mut random, &volume.blocks[tree]));
            }
            let damaged = volume.without(&judges, &blocks);
            wipe_superblocks(&damaged);
            let count = volume.judge(&format!("{mkfs} {round}: {blocks:?}"), &damaged);
            if count == 0 {
                let found = recover(&damaged, &[]);
                panic!("{mkfs} {round}: {blocks:?}: {:?} {:?}", found.files.keys(), found.output);
            }
        }
    }
}

/// Older roots are listed and read, and deleted files come back, as with superblocks.
#[test]
fn without_superblocks_older_roots_are_read() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mib(300).fill(fill_and_remove).make(&judges);
    let image = &disks.images()[0];
    let roots = |image: &Path| -> Vec<Value> {
        let output = offshoot(&["recover", "--list-roots", "--json"], image);
        assert!(output.status.success(), "{output:?}");
        let lines = String::from_utf8_lossy(&output.stdout).into_owned();
        lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    let deleted = recover(&disks, &["--deleted"]);
    let before = roots(image);
    wipe_superblocks(&disks);
    let after = roots(image);
    let of = |roots: &[Value], name: &str| -> Vec<u64> {
        let readable = roots.iter().filter(|root| root["readable"] == true);
        readable.map(|root| root[name].as_u64().expect("a number")).collect()
    };
    let generations = |roots: &[Value]| {
        let mut all = of(roots, "generation");
        all.dedup();
        all
    };
    assert_eq!(generations(&before), generations(&after), "{after:?}");
    let used = |roots: &[Value]| {
        let used = roots.iter().find(|root| root["used"] == true).expect("one is used");
        used["address"].clone()
    };
    assert_eq!(used(&before), used(&after), "{after:?}");
    let again = recover(&disks, &["--deleted"]);
    assert!(!again.files.is_empty() && again.files == deleted.files, "{:?}", again.output);
    // The last root in which the note was there.
    let note = Path::new("note.txt");
    let of_path = |path: &&PathBuf| path.ends_with(note);
    let shown = deleted.files.keys().find(of_path).and_then(|path| path.iter().next());
    let generation = shown.and_then(|name| name.to_str()).expect("the note was deleted");
    let generation = generation.strip_prefix("generation-").expect("a generation");
    let number: u64 = generation.parse().expect("a number");
    let address = after.iter().find(|root| root["generation"] == number);
    let address = address.expect("a root")["address"].to_string();
    for choice in [["--generation", generation], ["--root", &address]] {
        let older = recover(&disks, &choice);
        assert_eq!(older.files.get(note).map(Vec::as_slice), Some(&b"a note"[..]), "{choice:?}");
    }
}

/// Two volumes are found, one behind the other. One of them is chosen.
#[test]
fn one_of_several_volumes_is_chosen() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mib(300).fill(fill).make(&judges);
    let truth = contents(disks.mount("ro,noatime").path());
    let first = std::fs::read(&disks.images()[0]).expect("an image");
    let fsid = |image: &[u8]| {
        let bytes: [u8; 16] = image[65_536 + 32..65_536 + 48].try_into().expect("16 bytes");
        uuid::Uuid::from_bytes(bytes).to_string()
    };
    let old = fsid(&first);
    // A later volume, whose blocks are elsewhere for the most part.
    disks.mkfs(&["-m", "single", "-d", "single", "-K"]);
    let new = fsid(&std::fs::read(&disks.images()[0]).expect("an image"));
    wipe_superblocks(&disks);
    let unclear = recover(&disks, &[]);
    if unclear.output.status.code() == Some(1) {
        let why = said(&unclear.output);
        assert!(why.contains(&old) && why.contains(&new) && why.contains("--fsid"), "{why}");
    }
    let found = recover(&disks, &["--fsid", &old]);
    assert!(matches!(found.output.status.code(), Some(0 | 3)), "{:?}", found.output);
    assert!(found.files.len() * 10 > truth.len() * 9, "{:?}", found.output);
    let empty = recover(&disks, &["--fsid", &new]);
    assert!(empty.files.is_empty() && empty.output.status.success(), "{:?}", empty.output);
}

/// Where there is no btrfs volume, the error says so and what to do.
#[test]
fn without_a_volume_the_error_says_what_to_do() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let image = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).expect("an image");
        path
    };
    let zeros = image("zeros", &vec![0; 8 << 20]);
    let noise = image("noise", &Random::new(seed_of_run()).bytes(8 << 20));
    let made = |name: &str, program: &str, mib: usize| {
        let path = image(name, &[]);
        let file = std::fs::File::options().write(true).open(&path).expect("an image");
        file.set_len((mib << 20) as u64).expect("it grows");
        let output = Command::new(program).arg("-q").arg(&path).output().expect("it runs");
        assert!(output.status.success(), "{output:?}");
        path
    };
    let (ext4, xfs) = (made("ext4", "mkfs.ext4", 16), made("xfs", "mkfs.xfs", 320));
    let with = |path: &Path, options: &[&str]| {
        let found = recover_from(&[path.to_path_buf()], options);
        assert!(found.files.is_empty(), "{:?}", found.output);
        (found.output.status.code(), said(&found.output))
    };
    for (path, options) in [(&zeros, &[][..]), (&noise, &[]), (&ext4, &["--offset", "0"])] {
        for options in [options, &[options, &["--list-roots"]].concat()] {
            let (code, why) = with(path, options);
            assert_eq!(code, Some(1), "{why}");
            let is_clear = why.contains("no tree block of btrfs") && why.contains("--device");
            assert!(is_clear && !why.contains("--scan"), "{why}");
        }
    }
    for (path, name) in [(&ext4, "ext4"), (&xfs, "XFS")] {
        let (code, why) = with(path, &[]);
        assert!(code != Some(0) && why.contains(name), "{why}");
    }
    // What has no superblock is told how to go on.
    for verb in ["check", "info", "repair"] {
        let output = offshoot(&[verb], &zeros);
        let why = said(&output);
        assert_eq!(output.status.code(), Some(1), "{why}");
        assert!(why.contains("`offshoot recover`") && why.contains("repair --scan"), "{why}");
    }
}
