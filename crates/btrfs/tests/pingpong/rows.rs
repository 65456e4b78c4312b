//! The matrix: layouts, and mount options of the kernel for its rounds.

use offshoot_testkit::judges;

use crate::rounds::play;
use crate::volume::{Layout, Maker};

/// The number of rounds, when all of them are wanted.
fn sweep() -> Option<u64> {
    let rounds = std::env::var("OFFSHOOT_SWEEP").ok()?;
    Some(rounds.parse().expect("OFFSHOOT_SWEEP is a number of rounds"))
}

/// One test for each line: its name, who makes the volume in the sample (`sweep`: it is not in the
/// sample, `both`: either), number and MiB of the members, options of mkfs.
macro_rules! rows {
    ($($name:ident: $sample:tt, $devices:expr, $mib:expr, $options:expr;)*) => {
        $(
            #[test]
            fn $name() {
                let layout = Layout { devices: $devices, mib: $mib, options: $options };
                row(&layout, rows!(@makers $sample));
            }
        )*
    };
    (@makers sweep) => { &[] };
    (@makers both) => { &[Maker::Ours, Maker::Progs] };
    (@makers $one:ident) => { &[Maker::$one] };
}

fn row(layout: &Layout, sample: &[Maker]) {
    let Some(judges) = judges::require() else { return };
    let (makers, rounds) = match sweep() {
        Some(rounds) => (&[Maker::Ours, Maker::Progs][..], rounds),
        None => (sample, 2),
    };
    if makers.is_empty() {
        eprintln!("not in the sample: OFFSHOOT_SWEEP plays it");
    }
    for &maker in makers {
        play(&judges, layout, maker, rounds);
    }
}

rows! {
    defaults: both, 1, 512, "";
    node_4k: Ours, 1, 512, "-n 4096";
    node_8k_xxhash: sweep, 1, 512, "-n 8192 --csum xxhash";
    node_32k_sha256: Progs, 1, 512, "-n 32768 --csum sha256";
    node_64k_blake2: Ours, 1, 512, "-n 65536 --csum blake2";
    xxhash_bgt: sweep, 1, 512, "--csum xxhash -O block-group-tree";
    sha256: sweep, 1, 512, "--csum sha256";
    blake2: sweep, 1, 512, "--csum blake2";

    single: sweep, 1, 512, "-d single -m single";
    dup: sweep, 1, 512, "-d dup -m dup";
    single_over_3: sweep, 3, 256, "-d single -m single";
    raid0_of_3: Progs, 3, 256, "-d raid0 -m raid0";
    raid1_of_3: sweep, 3, 256, "-d raid1 -m raid1";
    raid1c3_of_4: Ours, 4, 256, "-d raid1c3 -m raid1c3 --csum xxhash";
    raid1c4_of_4: sweep, 4, 256, "-d raid1c4 -m raid1c4";
    raid10_of_4: Progs, 4, 256, "-d raid10 -m raid10 -n 4096";
    raid10_of_5_node_64k: sweep, 5, 256, "-d raid10 -m raid10 -n 65536";
    raid0_with_raid1_metadata: sweep, 2, 256, "-d raid0 -m raid1";

    mixed: both, 1, 256, "--mixed -d single -m single -n 4096";
    // `mkfs.btrfs` makes separate groups then, and the kernel mixed ones beside them.
    mixed_beside_others: Progs, 1, 256, "-d single -m single -O mixed-bg -n 4096";
    mixed_dup: sweep, 1, 256, "--mixed -d dup -m dup -n 4096";
    mixed_raid1: sweep, 2, 256, "--mixed -d raid1 -m raid1 -n 4096";
    mixed_old: sweep, 1, 256,
        "-d single -m single -n 4096 -O mixed-bg,^bgt,^free-space-tree,^no-holes,^skinny-metadata,^extref";

    block_group_tree: Progs, 1, 512, "-O block-group-tree";
    no_block_group_tree: sweep, 1, 512, "-O ^block-group-tree";
    no_free_space_tree: sweep, 1, 512, "-O ^block-group-tree,^free-space-tree";
    explicit_holes: Ours, 1, 512, "-O ^block-group-tree,^no-holes";
    explicit_holes_node_4k: sweep, 1, 512, "-n 4096 -O ^block-group-tree,^no-holes";
    old_references: sweep, 1, 512, "-O ^skinny-metadata";
    old_everything: Progs, 1, 512, "-O ^bgt,^free-space-tree,^no-holes,^skinny-metadata,^extref";
    old_everything_node_4k_raid1: sweep, 2, 256,
        "-n 4096 -d raid1 -m raid1 -O ^bgt,^free-space-tree,^no-holes,^skinny-metadata,^extref";
}
