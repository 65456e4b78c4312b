//! Hostile volumes of XFS: every verb that reads, and what brings a log to disk or throws it away.

use std::fs::OpenOptions;
use std::path::Path;

use offshoot_testkit::random::Random;
use offshoot_testkit::run::run as run_program;
use offshoot_testkit::scratch_dir;
use offshoot_testkit::xfs::judges;

use crate::mutation::{from_env, seed_of};
use crate::xfs_damage::XfsDamageTarget;
use crate::xfs_filled::{self, HostileXfs};
use crate::{RunPlace, run};

/// How many damages to each volume an ordinary run tries, and a campaign.
const CASES: u64 = 5;
const CAMPAIGN_CASES: u64 = 1000;

/// The volumes.
const VOLUMES: [HostileXfs; 2] = [HostileXfs::Clean("v4-block-512"), HostileXfs::Dirty("today-1k")];

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

/// Verbs that write to standard output.
fn verbs(image: &str, ino: u64) -> Vec<Vec<String>> {
    [
        format!("info {image}"),
        format!("info --json {image}"),
        format!("ls -lR {image}"),
        format!("ls -R --json {image}:/node"),
        format!("stat {image}:/tree"),
        format!("stat --json {image}:/node-of-attributes"),
        format!("cat {image}:/data {image}:/tree"),
        format!("find {image}"),
        format!("du {image}"),
        format!("df {image}"),
        format!("getfattr -d {image}:/leaf-of-attributes"),
        format!("extract --tar - {image}"),
        format!("check {image}"),
        format!("check --json --ignore-log {image}"),
        format!("dump super {image}"),
        format!("dump groups --json {image}"),
        format!("dump inode {image} {ino}"),
        format!("dump log {image}"),
        format!("dump tree {image} free-by-block"),
        format!("dump tree --json {image} inodes"),
    ]
    .map(|line| words(&line))
    .into()
}

/// Brings the log of a copy to disk, and throws away what is left of it.
fn change(place: &RunPlace, image: &Path, case: &str) {
    let dir = scratch_dir();
    let copy = dir.path().join("copy.img");
    run_program("cp", &["--sparse=always".as_ref(), image.as_os_str(), copy.as_os_str()]);
    let copy = copy.to_str().expect("a temporary path is text");
    for verb in ["rescue replay-log", "check", "rescue zero-log", "check"] {
        run(&place.here(), &words(&format!("{verb} {copy}")), case);
    }
}

/// Runs every verb. Returns how many fail.
fn every_verb(place: &RunPlace, image: &str, ino: u64, case: &str) -> usize {
    let verbs = verbs(image, ino).into_iter().map(|args| run(&place.here(), &args, case));
    let below = ["leaf", "node-of-attributes"].map(|name| format!("{image}:/{name}"));
    let extractions =
        [format!("extract --json {}", below[0]), format!("cp -r --json {}", below[1])]
            .map(|line| place.extract(words(&line), case));
    verbs.chain(extractions).filter(|outcome| !outcome.status.success()).count()
}

fn sweep(volume: HostileXfs, cases: u64) {
    let Some(judges) = judges::require() else { return };
    let disk = xfs_filled::make(&judges, volume);
    let target = XfsDamageTarget::of(disk.image());
    let seed = seed_of(volume.name());
    let cases = from_env("OFFSHOOT_SWEEP").unwrap_or(cases);
    let (place, mut random) = (RunPlace::new(), Random::new(seed));
    let image = disk.image().to_str().expect("a temporary path is text");
    let ino = disk.field(&["sb 0"], "rootino") + 3;
    let failed = every_verb(&place, image, ino, "the sound volume");
    assert_eq!(failed, 0, "the sound volume");
    let file = OpenOptions::new().write(true).open(image).expect("an image");
    let mut failed = 0;
    for number in 0..cases {
        let (damaged, kind) = target.damaged(&mut random);
        let case = format!("{volume:?}: OFFSHOOT_SEED={seed} case {number} ({kind})");
        damaged.apply(&file).expect("the image is written");
        failed += every_verb(&place, image, ino, &case);
        if number % 4 == 0 {
            change(&place, disk.image(), &case);
        }
        damaged.undo(&file).expect("the image is written");
    }
    println!("{volume:?}: {failed} verbs failed on {cases} damaged volumes");
    // A few damages may all lie where no verb looks.
    assert!(failed > 0 || cases < 100);
}

#[test]
fn every_verb_on_hostile_volumes_of_xfs() {
    for volume in VOLUMES {
        sweep(volume, CASES);
    }
}

pub(crate) fn campaign() {
    for volume in VOLUMES {
        sweep(volume, CAMPAIGN_CASES);
    }
}
