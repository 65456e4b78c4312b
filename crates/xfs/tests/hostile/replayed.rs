//! Logs that random bytes wrote. The fuzz target `xfs_replay` searches with the same body.

use offshoot_testkit::random::{Random, seed_of_run};

use crate::bodies;
use crate::within_limits;

#[test]
fn hostile_logs_with_right_checksums_are_replayed_or_refused() {
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    let _turn = crate::turn();
    let (mut opened, cases) = (0, 300);
    for number in 0..cases {
        let len = usize::try_from(random.below(90)).unwrap();
        let mut data = random.bytes(len);
        // Small numbers lead deeper.
        let zeros = random.below(4);
        data.iter_mut().filter(|_| random.below(4) < zeros).for_each(|byte| *byte %= 4);
        let case = format!("OFFSHOOT_SEED={seed} case {number}");
        opened += u32::from(within_limits(&case, move || bodies::replay(&data)).0);
    }
    eprintln!("{opened} of {cases} opened");
    assert!(opened > 10 && opened < cases, "{opened} of {cases} opened");
}
