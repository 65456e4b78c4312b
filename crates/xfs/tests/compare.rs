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

/// One test for each way to make a volume.
macro_rules! volumes {
    ($($name:ident: $mib:literal, $options:expr, $filling:expr;)+) => {
        $(#[test]
        fn $name() {
            if can_mount() {
                same($mib, &$options, $filling);
            }
        })+
    };
}

const NO_SHARING: Filling = Filling { has_reflink: false, ..SMALL };

/// Directories with two levels of nodes, and trees of extents with several.
const WIDE: Filling = Filling { names: 20_000, extents: 3000, has_reflink: true };

volumes! {
    defaults: 512, [], SMALL;
    blocks_of_1_kib: 512, ["-b", "size=1024"], WIDE;
    blocks_of_2_kib_and_large_inodes: 512, ["-b", "size=2048", "-i", "size=1024"], SMALL;
    blocks_of_16_kib: 512, ["-b", "size=16384", "-i", "size=2048"], SMALL;
    blocks_of_64_kib: 1024, ["-b", "size=65536"], SMALL;
    sectors_of_4_kib: 512, ["-s", "size=4096"], SMALL;
    directory_blocks_of_64_kib: 512, ["-n", "size=65536"], SMALL;
    directory_blocks_of_8_kib_in_blocks_of_1_kib: 512, ["-b", "size=1024", "-n", "size=8192"], WIDE;
    reverse_map: 512, ["-m", "rmapbt=1"], SMALL;
    features_of_2014: 512,
        ["-m", "reflink=0,bigtime=0,finobt=0,inobtcount=0", "-i", "sparse=0"], NO_SHARING;
    wide_counts_of_extents: 512, ["-i", "nrext64=1"], WIDE;
    many_groups: 768, ["-d", "agcount=40", "--unsupported"], SMALL;
}
