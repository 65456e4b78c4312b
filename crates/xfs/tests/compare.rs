//! Every path of a volume, as our engine and as the kernel show it.

mod made;

use made::{Filling, MadeXfs, can_mount, fill};
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::random::seed_of_run;

/// Fills a volume, and compares it with the mount of the kernel.
fn same(mib: u64, options: &[&str], filling: Filling) {
    let made = MadeXfs::new(mib, options);
    let mount = made.mount("rw");
    fill(mount.path(), seed_of_run(), filling);
    drop(mount);
    let ours = made.open();
    let mount = made.mount("ro");
    let compare = Compare::default().without(Aspect::Ids);
    let outcome = compare.run(&*ours, mount.path());
    assert!(outcome.differences.is_empty(), "{options:?}: {outcome}");
    outcome.assert_same(1000);
}

const SMALL: Filling = Filling { names: 3000, extents: 50, has_reflink: true };

#[test]
fn a_volume_as_mkfs_makes_it() {
    if can_mount() {
        same(512, &[], SMALL);
    }
}
