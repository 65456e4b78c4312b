//! Random operations on several threads against the model.
//!
//! Each round opens the volume, lets the actors work, compares it with the model, and closes it.
//! `btrfs check` must find nothing. The kernel mounts the volume for writing, and must show what
//! the model holds. At the end of a round the kernel makes files, and in the next round we remove
//! them.

use std::path::Path;

use offshoot_btrfs::{EngineOptions, Filesystem, Mechanisms, SubvolumeId};
use offshoot_testkit::btrfs::disks::{Disks, OLD_CACHE};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::model::Model;
use offshoot_testkit::model::actor::Actor;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::{FileSystem, FileSystemMut, SetAttr, SetTime, Timestamp};

use crate::common::{AT, at, check, judge, open_read_only, open_with, place};
use crate::subvolume_calls::OurSubvolumes;

const THREADS: u64 = 4;
const STEPS: u64 = 1200;

pub(crate) fn compare(one: &dyn FileSystem, other: &dyn FileSystem) {
    let outcome = Compare::default()
        .without(Aspect::Ids)
        .without(Aspect::Order)
        .without(Aspect::Allocation)
        .run_filesystems(one, other);
    outcome.assert_same(20);
    assert!(outcome.bytes > 1 << 20, "hardly any data was compared: {outcome}");
}

fn compare_with_kernel(disks: &Disks, model: &Model) {
    let mount = disks.mount_watched("rw,noatime", &[OLD_CACHE]);
    let host = HostFilesystem::new(mount.path()).expect("the mounted directory opens");
    compare(model, &host);
}

/// The actors work at the same time, each on a thread of its own.
fn act(fs: &Filesystem, model: &Model, seed: u64, now: Timestamp) {
    let subvolumes = &OurSubvolumes::new(fs.clone());
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            scope.spawn(move || {
                let actor = Actor::new(fs, model, number, seed, now);
                actor.with_subvolumes(subvolumes).act(STEPS);
            });
        }
    });
}

/// Has the kernel make files between our rounds.
fn kernel_makes(path: &Path) {
    let dir = path.join("of-the-kernel");
    std::fs::create_dir(&dir).expect("a directory");
    let mut random = Random::new(1);
    for number in 0..200 {
        let len = usize::try_from(random.below(20_000)).expect("small");
        std::fs::write(dir.join(format!("file-{number}")), random.text(len)).expect("a file");
    }
    for number in 0..50 {
        let name = |what: &str| dir.join(format!("{what}-{number}"));
        std::fs::rename(name("file"), name("moved")).expect("a rename");
    }
}

fn remove_what_the_kernel_made(fs: &Filesystem) {
    let dir = at(fs, "of-the-kernel");
    for number in 0..200 {
        let what = if number < 50 { "moved" } else { "file" };
        fs.unlink(place(dir, &format!("{what}-{number}")), AT).expect("it is there");
    }
    fs.rmdir(place(fs.root(), "of-the-kernel"), AT).expect("it is empty");
}

fn rounds(mkfs: &[&str], options: &EngineOptions) {
    let Some(judges) = judges::require() else { return };
    let seed = seed_of_run();
    let disks = Disks::create(&judges, 1, 512);
    disks.mkfs_and_settle(mkfs);
    let open = || open_with(&disks, options).filesystem(SubvolumeId::FS).expect("it is there");
    let fs = open();
    let model = Model::new(&fs.attr(fs.root()).expect("the root has attributes"));
    drop(fs);
    for round in 0..2 {
        for opening in 0..2 {
            let now = Timestamp { secs: AT.secs + 10 * round + opening, nanos: 5 };
            let fs = open();
            if round > 0 && opening == 0 {
                remove_what_the_kernel_made(&fs);
                let times = SetAttr { mtime: Some(SetTime::To(now)), ..SetAttr::default() };
                fs.set_attr(fs.root(), &times, now).expect("the root can be changed");
                model.set_attr(model.root(), &times, now).expect("the root can be changed");
            }
            let random = u64::try_from(round * 2 + opening).expect("small") << 40;
            act(&fs, &model, seed ^ random, now);
            compare(&fs, &model);
            fs.sync().expect("a commit");
            drop(fs);
            check(&disks);
            compare(&open_read_only(&disks), &model);
            compare_with_kernel(&disks, &model);
        }
        judge(&disks, 20);
        kernel_makes(disks.mount_watched("rw,noatime", &[OLD_CACHE]).path());
        judge(&disks, 200);
    }
}

#[test]
fn defaults() {
    rounds(&[], &EngineOptions::default());
}

#[test]
fn small_nodes() {
    rounds(&["-n", "4k", "-O", "^no-holes"], &EngineOptions::default());
}

#[test]
fn old_features() {
    rounds(
        &["-O", "^skinny-metadata,^free-space-tree,^no-holes,^extref"],
        &EngineOptions::default(),
    );
}

/// Without delayed items: items of names and inodes go to the tree at once.
#[test]
fn without_delayed_items() {
    rounds(
        &[],
        &EngineOptions {
            mechanisms: Mechanisms::default().delayed_items(false),
            ..EngineOptions::default()
        },
    );
}

/// The limit is low, so that every thread that may flush does. Every item keeps its own
/// reservation.
#[test]
fn many_flushes() {
    let dirty_bytes = 1 << 20;
    rounds(
        &[],
        &EngineOptions {
            dirty_bytes,
            mechanisms: Mechanisms::default().reserve_by_item(true),
            ..EngineOptions::default()
        },
    );
}
