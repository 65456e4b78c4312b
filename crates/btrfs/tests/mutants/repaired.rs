//! Repairs of mutants: what can be mended is, no file is lost, and all of it can be undone.
//!
//! ```text
//!   mutant ── repair ── refused ──> nothing was written
//!                │
//!                └───── written ──> every path reads as before
//!                          │        nothing is left ──> btrfs check finds nothing
//!                         undo ───> our check finds what it found in the mutant
//! ```
//!
//! `OFFSHOOT_REPAIRED` is the number of mutants of each layout. `OFFSHOOT_MUTANT` repairs one
//! mutant of each layout alone, prints what was found in it before and after, and keeps its images
//! in the directory `OFFSHOOT_KEEP`.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_btrfs::{
    BtrfsFinding, BtrfsFindingCode, CheckOptions, ItemChanges, RepairClass, RepairOptions,
    RepairOutcome, ScanOptions, check_btrfs, repair_btrfs, undo_repair,
};
use offshoot_device::MemoryDevice;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::Random;

use crate::image::{Patched, SparseImage};
use crate::judge::CheckMode;
use crate::mutation::from_env;
use crate::view::SeenPath;
use crate::volumes::{LAYOUTS, SoundVolume};
use crate::{MutantMembers, SEED, devices, hash, show};

/// Mutants of each layout in a run without `OFFSHOOT_REPAIRED`.
const REPAIRED: u64 = 60;

fn watch(_: &offshoot_btrfs::CheckEvent) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Repairs a mutant, by a scan if there is need of one, with these classes.
fn repair(members: &MutantMembers, classes: &[RepairClass]) -> offshoot_vfs::Result<RepairOutcome> {
    let options = RepairOptions {
        scan: Some(ScanOptions::default()),
        classes: classes.to_vec(),
        ..RepairOptions::default()
    };
    repair_btrfs(&devices(members), &options, &watch)
}

/// What our check finds, in an order that does not depend on texts.
fn found(members: &MutantMembers) -> BTreeSet<String> {
    let outcome = check_btrfs(devices(members), &CheckOptions::default(), &watch);
    let outcome = outcome.expect("it was checked before");
    outcome.findings.iter().map(ToString::to_string).collect()
}

/// What happened to the mutants of a layout.
#[derive(Debug, Default)]
struct RepairCounts {
    mended: u64,
    in_part: u64,
    nothing_to_mend: u64,
    refused: BTreeMap<String, u64>,
}

/// Prints what the check found before and after a repair.
fn tell(outcome: &RepairOutcome) {
    for finding in &outcome.before.findings {
        println!("    before: {finding}");
    }
    for finding in outcome.after.iter().flat_map(|after| &after.findings) {
        println!("    after: {finding}");
    }
}

/// Keeps the images of a mutant, if one was asked for, in the directory `OFFSHOOT_KEEP`.
fn keep(sound: &mut SoundVolume, mutant: &MutantMembers, number: u64, moment: &str) {
    let dir = std::env::var_os("OFFSHOOT_KEEP").filter(|_| from_env("OFFSHOOT_MUTANT").is_some());
    if let Some(dir) = dir {
        let dir = std::path::Path::new(&dir).join(format!("{}-{number}", sound.name));
        sound.judge.keep(mutant, &dir.join(moment));
    }
}

/// Repairs one mutant with these classes. Returns what went wrong.
fn repair_one(
    sound: &mut SoundVolume,
    mutant: &MutantMembers,
    number: u64,
    classes: &[RepairClass],
    counts: &mut RepairCounts,
) -> Result<(), String> {
    let (before, bytes) = (show(mutant).ok(), hash(mutant));
    let is_told = from_env("OFFSHOOT_MUTANT").is_some();
    let outcome = match repair(mutant, classes) {
        Ok(outcome) => {
            if is_told {
                tell(&outcome);
            }
            outcome
        }
        Err(error) => {
            *counts.refused.entry(format!("{:?}", error.code())).or_default() += 1;
            return if hash(mutant) == bytes {
                Ok(())
            } else {
                Err(format!("it was refused, and something was written: {error}"))
            };
        }
    };
    keep(sound, mutant, number, "after");
    let Some(after) = &outcome.after else {
        counts.nothing_to_mend += 1;
        let is_mendable =
            |one: &BtrfsFinding| RepairClass::of(one).is_some_and(RepairClass::is_safe);
        assert!(!outcome.before.findings.iter().any(is_mendable));
        return Ok(());
    };
    if let Some(before) = before {
        let now = show(mutant).map_err(|error| format!("it does not open any more: {error}"))?;
        // What was dropped was named. An inode that contradicted itself may be of another kind now.
        let is_all_kept = outcome.overlaps == ItemChanges::default();
        let is_kind_sure = |path: &[u8]| {
            let path = [b"/", path].concat();
            let is_it = |one: &BtrfsFinding| {
                one.code == BtrfsFindingCode::Inode && one.path.as_ref() == Some(&path)
            };
            !outcome.before.findings.iter().any(is_it)
        };
        // A link that was cut off by its size reads as a whole now.
        let is_completed = |path: &[u8], reads: &SeenPath| {
            let absolute = [b"/", path].concat();
            let is_it = |one: &BtrfsFinding| {
                one.code == BtrfsFindingCode::InodeSize && one.path.as_ref() == Some(&absolute)
            };
            outcome.before.findings.iter().any(is_it)
                && now.get(path).is_some_and(|now| now.completes(reads))
        };
        let readable = before
            .iter()
            .filter(|(path, reads)| reads.contents.is_ok() && is_all_kept && is_kind_sure(path));
        for (path, reads) in readable {
            // A wrong entry may have shown a file, which is then found by its own name.
            let is_kept = now.get(path).is_some_and(|now| now.reads_as(reads))
                || now.values().any(|now| now.reads_as(reads))
                || is_completed(path, reads);
            if !is_kept {
                return Err(format!("{} reads otherwise", path.escape_ascii()));
            }
        }
    }
    if after.findings.is_empty() {
        counts.mended += 1;
        let theirs = sound.judge.check(mutant, CheckMode::Original);
        if !theirs.is_empty() {
            return Err(format!("btrfs check finds {:?} after the repair", theirs.kinds()));
        }
    } else {
        counts.in_part += 1;
    }
    let mended: BTreeSet<_> = outcome.before.findings.iter().map(ToString::to_string).collect();
    undo_repair(&devices(mutant), &RepairOptions::default(), &watch)
        .map_err(|error| format!("it is not undone: {error}"))?;
    if outcome.scanned.is_some() {
        // The mutant cannot be checked without a scan.
        return Ok(());
    }
    let again = found(mutant);
    let without_copies = |all: &BTreeSet<String>| -> BTreeSet<String> {
        // The copies of superblocks become those of the primary one.
        all.iter().filter(|one| !one.contains("SuperblockCopy")).cloned().collect()
    };
    if without_copies(&again) != without_copies(&mended) {
        return Err(format!("after the undo the check finds {again:?}, and before {mended:?}"));
    }
    Ok(())
}

fn repair_layout(
    sound: &mut SoundVolume,
    numbers: std::ops::Range<u64>,
    classes: &[RepairClass],
) -> Vec<String> {
    let mut counts = RepairCounts::default();
    let mut failed = Vec::new();
    let over =
        |image: &Arc<SparseImage>| Arc::new(MemoryDevice::over(Arc::new(Patched::new(image))));
    for number in numbers {
        let mut random = Random::new(Random::new(SEED ^ 1).number() ^ number ^ sound.number);
        let patch = std::iter::repeat_with(|| sound.structures.draw(&sound.target, &mut random));
        let patch = patch.flatten().next().expect("some patch can be done");
        let images = sound.images.clone();
        let mutant: MutantMembers = images.iter().map(over).collect();
        patch.apply(&sound.target, &mutant);
        if from_env("OFFSHOOT_MUTANT").is_some() {
            println!("{} mutant {number}: {}", sound.name, patch.what);
        }
        keep(sound, &mutant, number, "before");
        if let Err(problem) = repair_one(sound, &mutant, number, classes, &mut counts) {
            failed.push(format!("{} mutant {number}: {}: {problem}", sound.name, patch.what));
        }
    }
    println!("{}: {counts:?}, failed: {}", sound.name, failed.len());
    failed
}

/// Repairs mutants of all layouts, `most` of each in a run without `OFFSHOOT_REPAIRED`.
#[track_caller]
fn require_repairs(classes: &[RepairClass], most: u64) {
    let Some(judges) = judges::require() else { return };
    let numbers = match from_env("OFFSHOOT_MUTANT") {
        Some(number) => number..number + 1,
        None => 0..from_env("OFFSHOOT_REPAIRED").unwrap_or(most),
    };
    let all = LAYOUTS
        .iter()
        .flat_map(|layout| repair_layout(&mut layout.carried(&judges), numbers.clone(), classes));
    let failed: Vec<_> = all.collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn what_follows_from_others_is_mended_and_nothing_is_lost() {
    require_repairs(&[], REPAIRED);
}

/// What is intact of malformed leaves is kept, and the result is sound or refused.
#[test]
fn what_overlaps_is_mended() {
    require_repairs(&[RepairClass::Overlaps], REPAIRED / 3);
}
