//! Every kind of volume that the judges know, path by path; the check finds nothing in any. A run
//! takes about half of them.

use offshoot_testkit::compare::Aspect;
use offshoot_testkit::in_shares;
use offshoot_testkit::random::{is_in_run, seed_or};
use offshoot_testkit::xfs::judges;
use offshoot_testkit::xfs::matrix::{MATRIX, XfsVolumeKind};
use offshoot_testkit::xfs::recipe::XfsRecipe;
use offshoot_xfs::{XfsOptions, XfsVolume, check_xfs};

fn judge(kind: &'static XfsVolumeKind) {
    let Some(judges) = judges::require() else { return };
    if !is_in_run(kind.name) {
        return;
    }
    eprintln!("{}", kind.name);
    let filled = XfsRecipe::new(kind).seed(seed_or(0x0f5)).make(&judges);
    let ours = XfsVolume::open(filled.disk.device(), &XfsOptions::default()).unwrap();
    // We show access control lists as system calls have them, and under no other name.
    let outcome = filled.compare_without(&[Aspect::StoredAcls], &*ours);
    outcome.assert_same(kind.names_at_least);
    let checked = check_xfs(&filled.disk.device(), &XfsOptions::default()).unwrap();
    assert!(checked.findings.is_empty(), "{}: {:#?}", kind.name, checked.findings);
    let counted = |name| filled.disk.field(&["sb 0"], name);
    assert_eq!(checked.inodes, counted("icount") - counted("ifree"), "{}", kind.name);
}

in_shares!(MATRIX.iter(), judge);
