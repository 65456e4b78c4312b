//! The rounds of one volume.
//!
//! Both sides change the top level and two subvolumes in it: `live`, and `snapshot`, a snapshot of
//! `live` that the kernel makes anew in every round. Beside them are read-only snapshots, which
//! must not change.

use std::path::Path;

use offshoot_btrfs::Filesystem;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::Judges;
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::kernel_calls::KernelCalls;
use offshoot_testkit::model::Model;
use offshoot_testkit::model::actor::{Actor, names_of};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::run::run;
use offshoot_vfs::{FileSystem, FileSystemMut, Timestamp};

use crate::volume::{PingpongLayout, VolumeMaker, open, open_read_only, without_checksums};

/// Steps of each actor in a round.
const STEPS: u64 = 300;

/// Operations of the kernel in each area in a round.
const OPERATIONS: u64 = 150;

/// The areas where actors work. The number of the actor decides the names in its area. `snapshot`
/// has the names of `live`.
const AREAS: [(&str, u64); 4] = [(".", 0), (".", 1), ("live", 2), ("snapshot", 2)];

/// The kernel's mount options in its rounds.
const MOUNTS: [&str; 7] = [
    "compress=zstd",
    "",
    "compress-force=lzo",
    "nodatacow",
    "compress=zlib,max_inline=4095",
    "nodatasum,autodefrag",
    "max_inline=0",
];

/// Makes a volume, and changes it by turns with the kernel.
pub(crate) fn play(judges: &Judges, layout: &PingpongLayout, maker: VolumeMaker, rounds: u64) {
    eprintln!("{layout:?} made by {maker:?}");
    play_on(&layout.make(judges, maker), layout, maker, rounds);
}

/// Changes a new volume by turns with the kernel.
pub(crate) fn play_on(disks: &Disks, layout: &PingpongLayout, maker: VolumeMaker, rounds: u64) {
    let seed = seed_of_run();
    let mut model = Model::copy(&open_read_only(disks)).expect("a new volume is read");
    for round in 0..rounds {
        let seed = seed ^ (round << 40);
        ours(disks, &model, seed, round);
        disks.assert_checks();
        assert_shows(&open_read_only(disks), &model);
        let is_first_mount = round == 0 && maker == VolumeMaker::Progs;
        model = theirs(disks, &model, seed, round, &layout.expected(is_first_mount));
        disks.assert_checks();
        assert_shows(&open_read_only(disks), &model);
    }
    let mount = disks.mount_watched("ro,noatime", &layout.expected(false));
    let everything = Compare::default().without(Aspect::Holes);
    everything.run(&open_read_only(disks), mount.path()).assert_same(50);
}

/// Our part of a round.
fn ours(disks: &Disks, model: &Model, seed: u64, round: u64) {
    let at = Timestamp { secs: 1_900_000_000 + round.cast_signed(), nanos: 7 };
    let methods = [None, Some("zstd"), Some("lzo"), Some("zlib:1")];
    let method = methods[usize::try_from(seed % 4).expect("below 4")];
    let fs = open(disks, method);
    let name = method.and_then(|method| method.split(':').next());
    model.compress_with(name.unwrap_or("zlib"));
    let unsummed = &without_checksums(fs.volume());
    std::thread::scope(|scope| {
        for (index, (area, number)) in (0..).zip(AREAS) {
            let actor = Actor::new(&fs, model, number, seed.wrapping_add(index), at)
                .without_holes()
                .where_some_have_no_checksums(unsummed);
            let mut actor = match area {
                "." => actor,
                // The first round knows no subvolumes yet.
                _ if model.lookup(model.root(), area.as_bytes()).is_err() => continue,
                _ => actor.within(area.as_bytes()),
            };
            scope.spawn(move || actor.act(STEPS));
        }
    });
    assert_shows(&fs, model);
    fs.sync().expect("a commit");
}

/// Requires that the volume shows what the model holds.
pub(crate) fn assert_shows(fs: &Filesystem, model: &Model) {
    comparison().run_filesystems(fs, model).assert_same(1);
}

/// Requires that the kernel shows at `path` what the model holds.
pub(crate) fn assert_kernel_shows(path: &Path, model: &Model) {
    let host = HostFilesystem::new(path).expect("the mounted directory opens");
    comparison().run_filesystems(model, &host).assert_same(1);
}

/// The comparison of the rounds. It leaves out holes: if the kernel clones preallocated space into
/// a file, it reports all of the file as data. It leaves out the flag for compression: files that
/// `mkfs.btrfs` compressed have it without the property, and lose it where compressing saves
/// nothing; the model does neither.
fn comparison() -> Compare {
    Compare::default()
        .without(Aspect::Ids)
        .without(Aspect::Order)
        .without(Aspect::Allocation)
        .without(Aspect::Holes)
        .without(Aspect::CompressionFlags)
}

/// The kernel's part of a round: it must show what the model holds, and then it changes that.
/// Returns a model of what it shows at the end.
fn theirs(disks: &Disks, model: &Model, seed: u64, round: u64, expected: &[&'static str]) -> Model {
    let mut random = Random::new(seed ^ 0x6b65);
    let options = MOUNTS[usize::try_from(random.below(MOUNTS.len() as u64)).expect("small")];
    eprintln!("round {round}: the kernel mounts with `{options}`");
    let mount = disks.mount_watched(&format!("rw,noatime,{options}"), expected);
    let path = mount.path();
    assert_kernel_shows(path, model);
    subvolumes(path, round);
    for (area, number) in AREAS {
        let seed = random.number();
        KernelCalls::new(&path.join(area), names_of(number), seed).act(OPERATIONS);
    }
    drop(mount);
    // A new mount shows what is stored. In memory the kernel may have known of more data.
    let mount = disks.mount_watched("ro,noatime", expected);
    let host = HostFilesystem::new(mount.path()).expect("the mounted directory opens");
    let model = Model::copy(&host).expect("the kernel shows its own volume");
    drop(host);
    model
}

/// Makes `live`, and in every round a new writable and a new read-only snapshot of it. It does not
/// wait until the kernel has dropped what is deleted: sometimes that is left for us.
fn subvolumes(path: &Path, round: u64) {
    let run = |words: &[&str], paths: &[&str]| {
        let mut args: Vec<std::ffi::OsString> = vec!["subvolume".into()];
        args.extend(words.iter().map(Into::into));
        args.extend(paths.iter().map(|name| path.join(name).into()));
        run("btrfs", &args);
    };
    if round > 0 {
        run(&["delete", "-c"], &["snapshot"]);
    } else if !path.join("live").exists() {
        run(&["create"], &["live"]);
    }
    run(&["snapshot"], &["live", "snapshot"]);
    run(&["snapshot", "-r"], &["live", &format!("kept-{round}")]);
    if let Some(old) = round.checked_sub(2) {
        run(&["delete"], &[&format!("kept-{old}")]);
    }
}
