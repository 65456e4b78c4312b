//! What `btrfs check` rejects, our check rejects.
//!
//! Both look at the same mutants, before anything is written to them. Ours may find more: it
//! compares what `btrfs check` does not look at. `OFFSHOOT_CHECKED` is the number of mutants of
//! each layout.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_btrfs::{CheckOptions, check_btrfs};
use offshoot_device::MemoryDevice;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::Random;

use crate::image::Patched;
use crate::judge::CheckMode;
use crate::mutation::from_env;
use crate::volumes::{LAYOUTS, SoundVolume};
use crate::{MutantMembers, SEED, devices};

/// Mutants of each layout in a run without `OFFSHOOT_CHECKED`.
const CHECKED: u64 = 60;

/// What our check says: the codes of its findings, or the error that ended it.
fn ours(members: &MutantMembers) -> BTreeMap<String, String> {
    let watch = |_: &_| ControlFlow::Continue(());
    match check_btrfs(devices(members), &CheckOptions::default(), &watch) {
        Ok(outcome) => {
            let said = |finding: &offshoot_btrfs::BtrfsFinding| {
                (finding.code.name().to_owned(), finding.to_string())
            };
            outcome.findings.iter().map(said).collect()
        }
        Err(error) => [("error".to_owned(), error.to_string())].into(),
    }
}

/// How many mutants the two judges agree about.
#[derive(Debug, Default)]
struct Agreement {
    both: u64,
    neither: u64,
    only_ours: BTreeMap<String, u64>,
}

fn compare(sound: &mut SoundVolume, numbers: std::ops::Range<u64>) -> Vec<String> {
    let mut agreement = Agreement::default();
    let mut missed = Vec::new();
    let over = |image| Arc::new(MemoryDevice::over(Arc::new(Patched::new(image))));
    let whole: MutantMembers = sound.images.iter().map(over).collect();
    let found = ours(&whole);
    assert!(found.is_empty(), "{}: the sound volume: {found:?}", sound.name);
    for number in numbers {
        let mut random = Random::new(Random::new(SEED).number() ^ number ^ sound.number);
        let patch = std::iter::repeat_with(|| sound.structures.draw(&sound.target, &mut random));
        let patch = patch.flatten().next().expect("some patch can be done");
        let mutant: MutantMembers = sound.images.iter().map(over).collect();
        patch.apply(&sound.target, &mutant);
        let found = ours(&mutant);
        let theirs = sound.judge.check(&mutant, CheckMode::Original);
        match (found.is_empty(), theirs.is_empty()) {
            (true, true) => agreement.neither += 1,
            (true, false) => {
                let kinds = theirs.kinds();
                missed.push(format!("{} mutant {number}: {}: {kinds:?}", sound.name, patch.what));
            }
            (false, false) => agreement.both += 1,
            (false, true) => {
                if from_env("OFFSHOOT_CHECKED").is_some() {
                    println!("mutant {number}: {}: only ours: {found:?}", patch.what);
                }
                let codes = found.into_keys().collect::<Vec<_>>().join("+");
                *agreement.only_ours.entry(codes).or_default() += 1;
            }
        }
    }
    println!("{}: {agreement:?}, missed: {}", sound.name, missed.len());
    missed
}

#[test]
fn what_btrfs_check_rejects_ours_rejects() {
    let Some(judges) = judges::require() else { return };
    let numbers = 0..from_env("OFFSHOOT_CHECKED").unwrap_or(CHECKED);
    let all =
        LAYOUTS.iter().flat_map(|layout| compare(&mut layout.carried(&judges), numbers.clone()));
    let missed: Vec<_> = all.collect();
    assert!(missed.is_empty(), "only btrfs check finds these:\n{}", missed.join("\n"));
}
