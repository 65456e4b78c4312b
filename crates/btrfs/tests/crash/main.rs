//! Power cuts and failing devices.
//!
//! | test | what is explored |
//! |---|---|
//! | `one_operation` | every workload of one operation |
//! | `two_operations` | a sample of those of two |
//! | `several_members` | some of these on several members, which lose their caches one by one |
//! | `rounds` | many commits one after the other |
//! | `tides` | space that is allocated to chunks and given back |
//! | `faults` | an error, a short write, silent corruption at every request |
//! | `campaign` | as much as one asks for: `cargo xtask campaign crash` |
//! | `superblocks` | what the explorer found there |
//! | `sabotage` | that the explorer finds what is broken |

mod campaign;
mod engine;
mod judge;
mod sabotage;
mod superblocks;

use std::sync::Arc;

use offshoot_btrfs_format::chunk::Profile;
use offshoot_device::{CrashPlan, MemoryDevice};
use offshoot_testkit::crash::explore::{Explorer, Judge};
use offshoot_testkit::crash::faults::{Inflicted, Inflicter};
use offshoot_testkit::crash::generate::{Generator, long};
use offshoot_testkit::crash::{Workload, seed};
use offshoot_testkit::random::Random;

use engine::{Ours, volume};
use judge::Outside;

/// Workloads of two operations that CI explores.
const TWOS: usize = 150;

/// Sets of members, with the profiles of metadata and data.
const SETS: [(usize, [Profile; 2]); 4] = [
    (2, [Profile::Raid1, Profile::Raid1]),
    (2, [Profile::Raid1, Profile::Raid0]),
    (4, [Profile::Raid10, Profile::Raid10]),
    (3, [Profile::Raid1c3, Profile::Single]),
];

fn plan(seed: u64) -> CrashPlan {
    CrashPlan { exhaustive_limit: 4, samples_per_epoch: 8, seed, torn: true }
}

/// Explores on a volume of so many members, judges every so many states from outside, and prints the tally.
fn explore(
    members: usize,
    profiles: Option<[Profile; 2]>,
    plan: CrashPlan,
    judged_every: usize,
    workloads: impl Iterator<Item = Workload> + Send,
) {
    let started = std::time::Instant::now();
    let outside = Outside::new();
    let judge = |devices: &[Arc<MemoryDevice>]| match &outside {
        Some(outside) => outside.judge(devices),
        None => Ok(()),
    };
    let judge = outside.is_some().then_some((&judge as &Judge<'_>, judged_every));
    let image = volume(plan.seed, members, profiles);
    let explorer = Explorer { engine: &Ours, image, plan, judge };
    println!("{} in {} ms", explorer.explore_all(workloads), started.elapsed().as_millis());
}

/// Workloads of two operations that the seed chooses.
fn some_twos(generator: &Generator, count: usize, seed: u64) -> impl Iterator<Item = Workload> {
    let mut random = Random::new(seed);
    let all = generator.twos() as u64;
    (0..count).map(move |_| generator.two(usize::try_from(random.below(all)).expect("an index")))
}

#[test]
fn one_operation() {
    let (seed, generator) = (seed(), Generator::default());
    let all = (0..generator.ones()).map(|number| generator.one(number));
    explore(1, None, plan(seed), 2000, all);
}

#[test]
fn two_operations() {
    let (seed, generator) = (seed(), Generator::default());
    explore(1, None, plan(seed), 2000, some_twos(&generator, TWOS, seed));
}

#[test]
fn several_members() {
    let (seed, generator) = (seed(), Generator::default());
    for (members, profiles) in SETS {
        let workloads = some_twos(&generator, 12, seed ^ members as u64);
        explore(members, Some(profiles), plan(seed), 500, workloads);
    }
}

#[test]
fn rounds() {
    let plan = CrashPlan { samples_per_epoch: 12, ..plan(seed()) };
    explore(1, None, plan, 200, std::iter::once(long::rounds(12)));
}

#[test]
fn tides() {
    let plan = CrashPlan { exhaustive_limit: 2, samples_per_epoch: 4, ..plan(seed()) };
    explore(1, None, plan, 100, std::iter::once(long::tides(4, 5 << 20)));
}

#[test]
fn faults() {
    let (seed, generator) = (seed(), Generator::default());
    for (members, profiles, has_copies) in [
        (1, None, false),
        (1, Some([Profile::Dup, Profile::Dup]), true),
        (2, Some([Profile::Raid1, Profile::Raid1]), true),
    ] {
        let image = volume(seed, members, profiles);
        let inflicter = Inflicter { engine: &Ours, image, has_copies };
        let ones = (0..generator.ones()).step_by(60).map(|number| generator.one(number));
        let mut all = Inflicted::default();
        for workload in ones.chain(some_twos(&generator, 5, seed)).chain([long::rounds(3)]) {
            all += inflicter.inflict(&workload).unwrap_or_else(|e| panic!("{workload}: {e}"));
        }
        println!("{members} members: {all}");
    }
}
