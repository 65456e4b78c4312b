//! Random operations on several threads against the model.
//!
//! Each round opens the volume, lets the actors work, compares it with the model, and ends it. Our
//! check and `xfs_repair` find nothing. Our reader and the kernel show what the model holds.

use offshoot_testkit::compare::Aspect;
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::model::actor::Actor;
use offshoot_testkit::model::{Model, ModelManners};
use offshoot_testkit::random::seed_of_run;
use offshoot_testkit::xfs::{MISSING_FLAGS, comparison, judges};

use super::*;

/// What a run does.
struct Rounds {
    mib: u64,
    mkfs: &'static str,
    threads: u64,
    steps: u64,
    has_sharing: bool,
    /// With parent pointers, files that exchange names get another change time, and else they keep
    /// theirs, as the model has it.
    has_parents: bool,
}

const USUAL: Rounds =
    Rounds { mib: 512, mkfs: "", threads: 1, steps: 2500, has_sharing: true, has_parents: false };

fn compare(one: &dyn FileSystem, other: &dyn FileSystem, knows_times: bool) {
    let all = comparison().without(Aspect::StoredAcls);
    let all = if knows_times { all } else { all.without(Aspect::StoredTimes) };
    all.run_filesystems(one, other).assert_same(20);
}

impl Rounds {
    fn run(&self) {
        let Some(judges) = judges::require() else { return };
        let seed = seed_of_run();
        let disk = made(&judges, self.mib, self.mkfs);
        let opened = WrittenXfs::new(&disk);
        let root = opened.files.attr(opened.root()).unwrap();
        let model = Model::new(&root).with_manners(ModelManners::Xfs);
        drop(opened);
        for round in 0..2 {
            let opened = WrittenXfs::new(&disk);
            let now = Timestamp { secs: AT.secs + 10 * round, nanos: 5 };
            let seed = seed ^ u64::try_from(round).unwrap() << 40;
            self.act(&*opened.files, &model, seed, now);
            compare(&*opened.files, &model, !self.has_parents);
            opened.shut_down();
            assert_checks(&disk);
            let reader = XfsVolume::open(disk.device(), &XfsOptions::default()).unwrap();
            compare(&*reader, &model, !self.has_parents);
            let mount = disk.mount("ro,noatime", &[]);
            let host = HostFilesystem::new(mount.path()).unwrap();
            compare(&model, &host, !self.has_parents);
        }
    }

    /// The actors work at the same time, each on a thread of its own.
    fn act(&self, files: &dyn FileSystemMut, model: &Model, seed: u64, now: Timestamp) {
        std::thread::scope(|scope| {
            for number in 0..self.threads {
                scope.spawn(move || {
                    let actor = Actor::new(files, model, number, seed, now);
                    let actor = actor.without_flags(MISSING_FLAGS);
                    let mut actor = if self.has_sharing { actor } else { actor.without_sharing() };
                    actor.act(self.steps);
                });
            }
        });
    }
}

#[test]
fn a_volume_does_what_the_model_does() {
    USUAL.run();
}

#[test]
fn threads_do_what_the_model_does() {
    Rounds { threads: 4, steps: 700, ..USUAL }.run();
}

#[test]
fn a_volume_with_parent_pointers_does_what_the_model_does() {
    let mkfs = "-n parent=1 -m rmapbt=0 -i size=1024";
    Rounds { mkfs, threads: 2, steps: 1000, has_parents: true, ..USUAL }.run();
}

#[test]
fn a_volume_without_shared_blocks_does_what_the_model_does() {
    let mkfs = "-m reflink=0,rmapbt=0,bigtime=1 -s size=4096 -d agcount=7 -i nrext64=0";
    Rounds { mkfs, threads: 2, steps: 1000, has_sharing: false, ..USUAL }.run();
}
