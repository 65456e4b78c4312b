//! Checks and repairs of volumes that random programs damage.

use std::collections::BTreeMap;

use offshoot_testkit::random::Random;

use crate::bodies::{HostileEnd, check_and_repair};
use crate::mutation::{from_env, seed_of};
use crate::within_limits;

/// The programs of an ordinary run. `OFFSHOOT_SWEEP` is another number.
const CASES: u64 = 200;

#[test]
fn hostile_volumes_with_right_checksums_are_repaired_or_refused() {
    let _turn = crate::turn();
    let seed = seed_of("repaired");
    let mut random = Random::new(seed);
    let cases = from_env("OFFSHOOT_SWEEP").unwrap_or(CASES);
    let mut ends = BTreeMap::<String, u64>::new();
    for number in 0..cases {
        let len = 1 + 8 * (1 + random.below(6));
        let data = random.bytes(usize::try_from(len).expect("small"));
        let case = format!("OFFSHOOT_SEED={seed} case {number} ({data:02x?})");
        let end = within_limits(&case, move || check_and_repair(&data));
        *ends.entry(format!("{end:?}")).or_default() += 1;
    }
    println!("{ends:?}");
    for end in [HostileEnd::Refused, HostileEnd::Repaired, HostileEnd::NothingToMend] {
        let count = ends.get(&format!("{end:?}")).copied().unwrap_or_default();
        assert!(count >= cases / 100, "{end:?}: {ends:?}");
    }
}
