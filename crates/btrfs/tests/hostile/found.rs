//! Damaged volumes that have also lost superblocks, found by a search of all devices and read.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use offshoot_btrfs::{CheckOptions, ScanOptions, find_volume};
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::random::Random;

use crate::damage::DamageTarget;
use crate::mutation::{from_env, index, seed_of};
use crate::survey::survey_around_damage;
use crate::{carried, devices, of, within_limits};

/// The cases of an ordinary run for each volume. `OFFSHOOT_SWEEP` is another number.
const CASES: u64 = 15;

fn sweep(name: &str, target: &DamageTarget) {
    let seed = seed_of(name);
    let mut random = Random::new(seed);
    let mut ends = BTreeMap::<&str, u64>::new();
    for number in 0..from_env("OFFSHOOT_SWEEP").unwrap_or(CASES) {
        let (mut members, allowed) = target.damaged(&mut random);
        let wiped = 1 + index(&mut random, members.len());
        for member in members.iter_mut().take(wiped) {
            SUPERBLOCK_OFFSETS[..2].iter().for_each(|at| member.write(*at, &[0; SUPERBLOCK_SIZE]));
        }
        let case = format!("{name} OFFSHOOT_SEED={seed} case {number} ({allowed:?})");
        let devices = devices(&members);
        let end = within_limits(&case, move || {
            let check = CheckOptions { is_degraded: true, ..CheckOptions::default() };
            let watch = |_: &_| ControlFlow::Continue(());
            match find_volume(&devices, ScanOptions::default(), &check, &watch) {
                Ok(Some(found)) => {
                    survey_around_damage(found.devices);
                    if found.is_whole { "whole" } else { "in part" }
                }
                Ok(None) => "not searched",
                Err(error) => {
                    let _ = error.to_string();
                    "not found"
                }
            }
        });
        *ends.entry(end).or_default() += 1;
    }
    println!("{name}: {ends:?}");
    // Damage so gross that nothing is found would prove nothing.
    let is_found = |end: &&str| ["whole", "in part"].contains(end);
    assert!(ends.keys().any(is_found), "{ends:?}");
    assert!(!ends.contains_key("not searched"), "{ends:?}");
}

#[test]
fn hostile_volumes_without_superblocks_are_read_within_limits() {
    let _turn = crate::turn();
    sweep("found", &carried());
    let Some(judges) = judges::require() else { return };
    for (mkfs, devices) in [("-m raid1 -d raid0", 2), ("-m raid5 -d raid5 -n 4096", 3)] {
        let disks = Recipe::new().devices(devices).mib(256).mkfs(mkfs).make(&judges);
        sweep(mkfs, &of(&disks));
    }
}
