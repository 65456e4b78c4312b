//! The kernel's scrub of a copy has the same counters.

use std::collections::BTreeSet;
use std::path::Path;

use offshoot_btrfs::ScrubOutcome;
use offshoot_testkit::btrfs::damage::{SUPERBLOCKS, flip};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::progs::{MirrorPlace, Progs};
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::btrfs::{fill, judges};
use offshoot_testkit::random::{Random, seed_of_run};

use crate::{kernel_scrub, scrub, scrubs_clean, stored};

/// The inode number of the first file that a volume gets.
const VICTIM_INO: u64 = 257;

/// A file that the test damages, the victim, and files of all other kinds.
fn with_victim(root: &Path) {
    fill::write(&root.join("victim"), &Random::new(0xbad).bytes(3_000_000));
    fill::sync(root);
    fill::everything(root);
}

/// Places to damage: sectors of data, and tree blocks. Each keeps one good copy.
fn targets(disks: &Disks, node: u64, copies: u32, random: &mut Random) -> Vec<(MirrorPlace, u64)> {
    let progs = Progs::of(disks);
    let mut targets = Vec::new();
    let spare =
        |random: &mut Random| 1 + u32::try_from(random.below(u64::from(copies))).expect("few");
    let mut extents = progs.extents("5", VICTIM_INO);
    extents.dedup();
    for extent in extents {
        for at in (0..extent.disk_bytes).step_by(256 << 10) {
            let kept = spare(random);
            let at = extent.logical + (at + random.below(64) * 4096).min(extent.disk_bytes - 4096);
            let bad = progs.places(at, 4096).into_iter().filter(|place| place.mirror != kept);
            targets.extend(bad.map(|place| (place, 4096)));
        }
    }
    for tree in ["5", "2", "7", "1", "3"] {
        let blocks = progs.blocks(tree);
        for at in blocks.iter().step_by(blocks.len().div_ceil(3)) {
            let kept = spare(random);
            let bad = progs.places(*at, node).into_iter().filter(|place| place.mirror != kept);
            targets.extend(bad.map(|place| (place, node)));
        }
    }
    targets
}

/// Requires that our counters equal those of the kernel's scrub, and that all damage is repaired
/// then.
#[track_caller]
fn counts_what_the_kernel_counts(devices: usize, mkfs: &'static str, node: u64, copies: u32) {
    let Some(judges) = judges::require() else { return };
    let seed = seed_of_run();
    println!("{mkfs}: seed {seed}");
    let mut random = Random::new(seed);
    let mount = if mkfs.contains("-d single") { "" } else { "compress=zstd" };
    let recipe = Recipe::new().devices(devices).mkfs(mkfs).mount(mount).fill(with_victim);
    let ours = recipe.make(&judges);
    assert_eq!(node, ours_node(&ours));
    let sound = scrubs_clean(&ours);
    assert!(sound.data_extents_scrubbed > 0 && sound.no_csum > 0, "{sound:?}");
    same(&sound.named(), &ours);
    let targets = targets(&ours, node, copies, &mut random);
    let mut damaged = BTreeSet::new();
    for (place, len) in &targets {
        // Flipping the same bit twice would undo the damage.
        let offset = place.physical + random.below(*len);
        if damaged.insert((place.member, offset)) {
            flip(&ours.images()[place.member], offset, 0x40);
        }
    }
    let last = ours.images().len() - 1;
    flip(&ours.images()[last], SUPERBLOCKS[1] + 700, 1);
    let volume = stored(ours.devices(), false);
    let (found, findings) = scrub(&volume, true).expect("it is scrubbed");
    drop(volume);
    println!("{found:?}");
    assert!(found.csum_errors > 0 && found.verify_errors > 0, "{found:?}");
    assert_eq!((found.super_errors, found.uncorrectable_errors), (1, 0), "{found:?}");
    assert!(findings.iter().all(|one| one.outcome == ScrubOutcome::NotWritten));
    same(&found.named(), &ours);
    let volume = stored(ours.writable_devices(), false);
    let (repaired, findings) = scrub(&volume, false).expect("it is scrubbed");
    drop(volume);
    assert!(findings.iter().all(|one| one.outcome == ScrubOutcome::Corrected), "{findings:?}");
    assert_eq!(repaired.left_errors, 0, "{repaired:?}");
    assert_eq!(repaired.corrected_errors + 1, found.left_errors, "{repaired:?}");
    assert_eq!(scrubs_clean(&ours), sound);
    same(&sound.named(), &ours);
    ours.assert_checks();
}

fn ours_node(disks: &Disks) -> u64 {
    u64::from(stored(disks.devices(), false).superblock().node_size)
}

/// Requires that the kernel's scrub has the same counters, except for the errors that it would have
/// corrected.
#[track_caller]
fn same(ours: &[(&'static str, u64)], disks: &Disks) {
    let theirs = kernel_scrub(disks.mount("ro,noatime").path());
    let compared = ours.iter().filter(|(name, _)| theirs.contains_key(*name));
    let compared: Vec<_> = compared.filter(|(name, _)| *name != "corrected_errors").collect();
    assert!(compared.len() >= 10, "{theirs:?}");
    for (name, number) in compared {
        assert_eq!(theirs.get(*name), Some(number), "{name}: {ours:?}, and the kernel {theirs:?}");
    }
}

#[test]
fn dup() {
    counts_what_the_kernel_counts(1, "-m dup -d dup", 16_384, 2);
}

#[test]
fn dup_with_small_nodes() {
    counts_what_the_kernel_counts(1, "-m dup -d dup -n 4k --csum xxhash -O ^no-holes", 4096, 2);
}

#[test]
fn raid1() {
    counts_what_the_kernel_counts(2, "-m raid1 -d raid1 --csum sha256", 16_384, 2);
}

#[test]
fn raid10() {
    counts_what_the_kernel_counts(4, "-m raid10 -d raid10 -n 64k --csum blake2", 65_536, 2);
}

#[test]
fn raid1c3() {
    counts_what_the_kernel_counts(3, "-m raid1c3 -d raid1c3 -n 32k", 32_768, 3);
}

#[test]
fn raid1c4() {
    counts_what_the_kernel_counts(4, "-m raid1c4 -d raid1c4", 16_384, 4);
}

#[test]
fn mixed() {
    counts_what_the_kernel_counts(1, "--mixed -m dup -d dup -n 4k", 4096, 2);
}
