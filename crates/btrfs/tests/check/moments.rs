//! Volumes as the kernel leaves them in the middle of its work: nothing is found in them.
//!
//! The kernel spreads long works over several commits: it removes a large file, a subvolume, or
//! moves a block group. Copies of the images at any moment are what a crash would leave.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::fill::{crowd, subvolumes, sync};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::kernel_calls::KernelCalls;
use offshoot_testkit::random::Random;
use offshoot_testkit::run::command;
use offshoot_testkit::threads::SetOnDrop;

use crate::common::{checked, progs_complaints, require_sound, show};
use crate::mutation::{from_env, seed_of};

/// Copies that are taken of a volume in a run without `OFFSHOOT_CHECKED`.
const COPIES: u64 = 8;

/// Files that take the kernel long to remove or to move.
fn fill(root: &Path) {
    for name in ["one", "two", "three"] {
        let path = root.join(name);
        subvolumes::create(&path);
        crowd(&path, 1500);
        pieces(&path.join("pieces"), 1500);
        subvolumes::snapshot(&path, &root.join(format!("{name}-shared")), false);
    }
    sync(root);
}

/// A file of many extents.
fn pieces(path: &Path, count: u64) {
    let file = File::create(path).expect("a file");
    for piece in 0..count {
        file.write_all_at(&[b'p'; 4096], piece * 8192).expect("a piece");
    }
    file.sync_all().expect("it is stored");
}

fn shorten(path: &Path) {
    let file = File::options().write(true).open(path).expect("it opens");
    file.set_len(1 << 22).expect("it is cut");
}

fn btrfs(words: &[&str], path: &Path) {
    let output = command("btrfs").args(words).arg(path).output().expect("btrfs runs");
    assert!(output.status.success(), "btrfs {words:?}: {output:?}");
}

/// Works of many commits, over and over.
fn work(root: &Path, is_over: &AtomicBool) {
    for round in 0.. {
        let name = ["one", "two", "three"][round % 3];
        let (path, again) = (root.join(name), root.join(format!("{name}-{round}")));
        let steps: [&dyn Fn(); 6] = [
            &|| subvolumes::snapshot(&path, &again, false),
            &|| btrfs(&["balance", "start", "--full-balance"], root),
            &|| shorten(&path.join("pieces")),
            &|| std::fs::remove_file(path.join("pieces")).unwrap(),
            &|| pieces(&path.join("pieces"), 1000),
            &|| btrfs(&["subvolume", "delete"], &again),
        ];
        for step in steps {
            if is_over.load(Ordering::Relaxed) {
                return;
            }
            step();
        }
    }
}

/// Where the host does not share blocks of files there is only the volume after it was unmounted:
/// `OFFSHOOT_TEST_DIR` can name a directory where it does.
#[test]
fn volumes_in_the_middle_of_long_works() {
    let Some(judges) = judges::require() else { return };
    let recipe = Recipe::new().mkfs("-n 4096 -m single").fill(fill);
    let disks = recipe.make(&judges);
    let mount = disks.mount("rw,noatime,commit=1");
    let (root, is_over) = (mount.path(), AtomicBool::new(false));
    let copies: Vec<Disks> = std::thread::scope(|scope| {
        let _end = SetOnDrop(&is_over);
        scope.spawn(|| work(root, &is_over));
        let count = from_env("OFFSHOOT_CHECKED").unwrap_or(COPIES);
        let copy = |_| {
            std::thread::sleep(Duration::from_millis(211));
            disks.copy_at_once(&judges)
        };
        (0..count).filter_map(copy).collect()
    });
    drop(mount);
    eprintln!("{} copies were taken in the middle of works", copies.len());
    for (number, copy) in copies.iter().enumerate() {
        let (outcome, theirs) = (checked(copy), progs_complaints(copy));
        assert!(outcome.findings.is_empty(), "copy {number}: {}, {theirs:?}", show(&outcome));
    }
    require_sound(&disks);
}

/// Random calls of the kernel, with snapshots meanwhile.
fn require_churned(options: &str, mount_options: &str) {
    let Some(judges) = judges::require() else { return };
    let seed = seed_of("churned volumes");
    let mut random = Random::new(seed);
    let disks = Disks::create(&judges, 1, 512);
    disks.mkfs(&options.split_whitespace().collect::<Vec<_>>());
    let mount = disks.mount(&format!("rw,noatime,{mount_options}"));
    let area = mount.path().join("area");
    subvolumes::create(&area);
    for round in 0..4 {
        let names = (0..40).map(|number| format!("name-{number}").into_bytes()).collect();
        KernelCalls::new(&area, names, random.number()).act(400);
        subvolumes::snapshot(&area, &mount.path().join(format!("round-{round}")), round % 2 == 0);
    }
    mount.sync();
    drop(mount);
    let outcome = require_sound(&disks);
    assert!(outcome.counts.inodes > 50, "{:?}", outcome.counts);
}

#[test]
fn volumes_after_random_calls() {
    require_churned("-n 4096", "compress=lzo");
}

#[test]
fn old_volumes_after_random_calls() {
    require_churned("-n 4096 -O ^no-holes,^extref,^free-space-tree", "nodatacow");
}
