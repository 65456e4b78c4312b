//! Every kind of volume that the judges know, path by path.

use offshoot_testkit::compare::Aspect;
use offshoot_testkit::random::seed_or;
use offshoot_testkit::xfs::judges;
use offshoot_testkit::xfs::matrix::MATRIX;
use offshoot_testkit::xfs::recipe::XfsRecipe;
use offshoot_xfs::{XfsOptions, XfsVolume};

/// How many tests share the kinds of volumes.
const SHARES: usize = 4;

fn share(number: usize) {
    for kind in MATRIX.iter().skip(number).step_by(SHARES) {
        let Some(judges) = judges::require() else { return };
        eprintln!("{}", kind.name);
        let filled = XfsRecipe::new(kind).seed(seed_or(0x0f5)).make(&judges);
        let ours = XfsVolume::open(filled.disk.device(), &XfsOptions::default()).unwrap();
        // We show access control lists as system calls have them, and under no other name.
        let outcome = filled.compare_without(&[Aspect::StoredAcls], &*ours);
        outcome.assert_same(kind.names_at_least);
    }
}

#[test]
fn the_first_share_of_volumes() {
    share(0);
}

#[test]
fn the_second_share_of_volumes() {
    share(1);
}

#[test]
fn the_third_share_of_volumes() {
    share(2);
}

#[test]
fn the_fourth_share_of_volumes() {
    share(3);
}
