//! Power cuts and failing devices.
//!
//! | test | what is explored |
//! |---|---|
//! | `one_operation` | every workload of one operation |
//! | `two_operations` | a sample of those of two |

mod engine;
mod judge;
mod superblocks;

use std::sync::Arc;

use offshoot_btrfs_format::chunk::Profile;
use offshoot_device::{CrashPlan, MemoryDevice};
use offshoot_testkit::crash::explore::{Explorer, Judge};
use offshoot_testkit::crash::generate::Generator;
use offshoot_testkit::crash::{Workload, seed};
use offshoot_testkit::random::Random;

use engine::{Ours, volume};
use judge::Outside;

/// Workloads of two operations that CI explores.
const TWOS: usize = 150;

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
    for (members, profiles) in [
        (2, [Profile::Raid1, Profile::Raid1]),
        (2, [Profile::Raid1, Profile::Raid0]),
        (4, [Profile::Raid10, Profile::Raid10]),
        (3, [Profile::Raid1c3, Profile::Single]),
    ] {
        let workloads = some_twos(&generator, 8, seed ^ members as u64);
        explore(members, Some(profiles), plan(seed), 500, workloads);
    }
}
