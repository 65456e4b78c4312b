//! Power cuts in the middle of a repair, and of an undo.
//!
//! Whatever reached the devices, the volume is the damaged or the repaired one, and every file
//! reads as before. Only superblocks may say that a cut came: one may be torn, or a member a
//! generation behind.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_btrfs::{
    BtrfsFindingCode as Code, BtrfsVolume, CheckOptions, EngineOptions, RepairOptions, SubvolumeId,
    check_btrfs, repair_btrfs, undo_repair,
};
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE};
use offshoot_btrfs_format::{ItemType, TreeId};
use offshoot_device::{BlockDevice, CrashDevice, CrashPlan};
use offshoot_testkit::btrfs::fill::handful;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::manifest;

use crate::common::DamagedVolume;
use crate::damaged::spoil_blocks;
use crate::scanned::scanning;

pub(crate) fn watch(_: &offshoot_btrfs::CheckEvent) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Everything that the volume shows.
fn shown(devices: &[Arc<dyn BlockDevice>]) -> String {
    let volume = BtrfsVolume::open(devices.to_vec(), &EngineOptions::default()).expect("it opens");
    let fs = volume.filesystem(SubvolumeId::FS).expect("every volume has one");
    manifest::manifest(&fs).expect("it is read")
}

/// What our check finds, but for superblocks.
pub(crate) fn found(devices: &[Arc<dyn BlockDevice>]) -> BTreeSet<String> {
    let outcome = check_btrfs(devices.to_vec(), &CheckOptions::default(), &watch);
    let of_cuts = [Code::Superblock, Code::SuperblockCopy, Code::MissingMember];
    let findings = outcome.expect("it is checked").findings;
    let others = findings.iter().filter(|finding| !of_cuts.contains(&finding.code));
    others.map(ToString::to_string).collect()
}

fn require_old_or_new(recipe: &Recipe, seed: u64) {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedVolume::of(recipe.make(&judges));
    damaged.edit(
        TreeId::EXTENT,
        |key, _| key.item_type == ItemType::EXTENT_ITEM,
        |items, slot| {
            items.remove(slot);
        },
    );
    let base = damaged.disks().devices();
    let (files, wrong) = (shown(&base), found(&base));
    assert!(!wrong.is_empty(), "the damage is found");
    let crash: Vec<_> = CrashDevice::set(base).into_iter().map(Arc::new).collect();
    let devices: Vec<_> = crash.iter().map(|one| one.clone() as Arc<dyn BlockDevice>).collect();
    let options = RepairOptions::default();
    let outcome = repair_btrfs(&devices, &options, &watch).expect("it is repaired");
    assert!(outcome.is_written);
    crash[0].mark("repaired");
    println!("seed {seed}");
    let plan = CrashPlan { seed, samples_per_epoch: 12, exhaustive_limit: 4, tears: true };
    let expected = ExpectedStates { files, wrong };
    let repairing = crash[0].log();
    let (old, new) = expected.require(repairing.states(&plan), false);
    assert!(old > 10 && new > 0, "{old} old states and {new} new ones");
    undo_repair(&devices, &options, &watch).expect("it is undone");
    crash[0].mark("undone");
    let states = crash[0].log().states(&plan).filter(|state| {
        // Before the first mark it is the repair that was cut.
        state.as_ref().is_ok_and(|state| state.marks_before_earliest_cut() > 0)
    });
    let (old, new) = expected.require(states, true);
    assert!(old > 0 && new > 0, "{old} old states and {new} new ones");
}

/// What a volume must be behind a cut.
struct ExpectedStates {
    /// What it shows, always.
    files: String,
    /// What the check finds before the repair and after the undo.
    wrong: BTreeSet<String>,
}

impl ExpectedStates {
    /// Requires that each state is the old or the new one. `is_undone` says which of them is
    /// durable at the end. Returns how many were the old one and how many the new one.
    fn require(
        &self,
        states: impl Iterator<Item = std::io::Result<offshoot_device::CrashState>>,
        is_undone: bool,
    ) -> (u32, u32) {
        let last = if is_undone { "undone" } else { "repaired" };
        let (mut old, mut new) = (0, 0);
        for state in states {
            let state = state.expect("memory is read");
            let what = format!("state {}, {}", state.number, state.description);
            let is_last = state.marks_before_earliest_cut() == state.marks().len()
                && state.marks().last().is_some_and(|mark| **mark == *last);
            let devices: Vec<_> = state
                .devices
                .into_iter()
                .map(|one| Arc::new(one) as Arc<dyn BlockDevice>)
                .collect();
            let changed = manifest::differences(&shown(&devices), &self.files);
            assert_eq!(changed, Vec::<String>::new(), "{what}");
            let now = found(&devices);
            assert!(now.is_empty() || now == self.wrong, "{what}: {now:?}");
            assert!(!is_last || now.is_empty() != is_undone, "{what}: it was durable");
            *(if now.is_empty() { &mut new } else { &mut old }) += 1;
        }
        (old, new)
    }
}

#[test]
fn a_cut_leaves_the_old_or_the_new_state() {
    require_old_or_new(&Recipe::new().mib(256).fill(handful::fill), 5);
}

#[test]
fn a_cut_leaves_one_state_on_all_members() {
    let recipe = Recipe::new().mib(256).devices(2).mkfs("-d raid1 -m raid1 -n 4096");
    require_old_or_new(&recipe.fill(handful::fill), 6);
}

/// A repair that scans, cut at any moment: what is there then is the repaired volume, or a scan
/// makes it.
#[test]
fn a_cut_of_a_repair_that_scans_leaves_what_a_scan_mends() {
    let Some(judges) = judges::require() else { return };
    let recipe = Recipe::new().mib(256).devices(2).mkfs("-d raid1 -m raid1 -n 4096");
    let disks = recipe.fill(handful::fill).make(&judges);
    let files = shown(&disks.devices());
    let damaged = DamagedVolume::of(disks);
    spoil_blocks(&damaged, |header| header.owner() == TreeId::CHUNK);
    for member in 0..2 {
        for at in &SUPERBLOCK_OFFSETS[..2] {
            damaged.write(member, *at, &[0x5a; SUPERBLOCK_SIZE]);
        }
    }
    let crash = CrashDevice::set(damaged.disks().devices());
    let crash: Vec<_> = crash.into_iter().map(Arc::new).collect();
    let devices: Vec<_> = crash.iter().map(|one| one.clone() as Arc<dyn BlockDevice>).collect();
    assert!(repair_btrfs(&devices, &scanning(), &watch).expect("it is repaired").is_written);
    crash[0].mark("repaired");
    let plan = CrashPlan { seed: 7, samples_per_epoch: 5, exhaustive_limit: 2, tears: true };
    let (again, repaired) = require_scanned(crash[0].log().states(&plan), &files, false);
    assert!(again > 3 && repaired > 0, "{again} states were mended again, {repaired} were sound");
    undo_repair(&devices, &RepairOptions::default(), &watch).expect("it is undone");
    crash[0].mark("undone");
    let states = crash[0]
        .log()
        .states(&plan)
        .filter(|state| state.as_ref().is_ok_and(|state| state.marks_before_earliest_cut() > 0));
    let (again, repaired) = require_scanned(states, &files, true);
    assert!(again > 0 && repaired > 0, "{again} states were mended again, {repaired} were sound");
}

/// Requires that a repair that may scan makes each state the sound volume. `is_undone` says whether
/// the durable state at the end needs a scan. Returns how many states needed one, and how many did
/// not.
fn require_scanned(
    states: impl Iterator<Item = std::io::Result<offshoot_device::CrashState>>,
    files: &str,
    is_undone: bool,
) -> (u32, u32) {
    let last = if is_undone { "undone" } else { "repaired" };
    let (mut again, mut repaired) = (0, 0);
    for state in states {
        let state = state.expect("memory is read");
        let what = format!("state {}, {}", state.number, state.description);
        let is_last = state.marks_before_earliest_cut() == state.marks().len()
            && state.marks().last().is_some_and(|mark| **mark == *last);
        let devices: Vec<_> =
            state.devices.into_iter().map(|one| Arc::new(one) as Arc<dyn BlockDevice>).collect();
        let outcome = repair_btrfs(&devices, &scanning(), &watch);
        let outcome = outcome.unwrap_or_else(|error| panic!("{what}: {error}"));
        let needs_scan = outcome.scanned.is_some();
        assert!(!is_last || needs_scan == is_undone, "{what}: it was durable");
        *(if needs_scan { &mut again } else { &mut repaired }) += 1;
        let changed = manifest::differences(&shown(&devices), files);
        assert_eq!(changed, Vec::<String>::new(), "{what}");
        assert_eq!(found(&devices), BTreeSet::new(), "{what}");
    }
    (again, repaired)
}
