//! The matrix of volume layouts. Every run plays about half of those with a test, and the campaign
//! plays all.

use std::sync::atomic::{AtomicUsize, Ordering};

use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::is_in_run;

use crate::rounds::play;
use crate::volume::{PingpongLayout, VolumeMaker};

/// A line of the matrix.
struct MatrixRow {
    name: &'static str,
    layout: PingpongLayout,
}

/// Makes all rows, and a test of each line with a maker. A line has a name, the maker of the volume
/// in the test (`campaign`: no test, `both`: one after the other), the number and MiB of the
/// members, and the options of mkfs.
macro_rules! rows {
    ($($name:ident: $makers:tt, $devices:expr, $mib:expr, $options:expr;)*) => {
        const ROWS: &[MatrixRow] = &[
            $(MatrixRow {
                name: stringify!($name),
                layout: PingpongLayout { devices: $devices, mib: $mib, options: $options },
            }),*
        ];
        $(rows!(@test $name $makers);)*
    };
    (@test $name:ident campaign) => {};
    (@test $name:ident both) => { rows!(@test $name [VolumeMaker::Ours, VolumeMaker::Progs]); };
    (@test $name:ident $one:ident) => { rows!(@test $name [VolumeMaker::$one]); };
    (@test $name:ident $makers:expr) => {
        #[test]
        fn $name() {
            sample(stringify!($name), &$makers);
        }
    };
}

/// Plays two rounds of one row.
fn sample(name: &str, makers: &[VolumeMaker]) {
    let Some(judges) = judges::require() else { return };
    if !is_in_run(name) {
        return;
    }
    let row = ROWS.iter().find(|row| row.name == name).expect("a test is made of a row");
    for &maker in makers {
        play(&judges, &row.layout, maker, 2);
    }
}

/// Plays every row with both makers, one row on each core at a time.
#[test]
#[ignore = "takes some minutes; cargo xtask campaign pingpong runs it"]
fn campaign() {
    let rounds = std::env::var("OFFSHOOT_ROUNDS");
    let rounds = rounds.map_or(4, |text| text.parse().expect("a number of rounds"));
    let games: Vec<_> = ROWS
        .iter()
        .flat_map(|row| row.layout.makers().iter().map(move |&maker| (row, maker)))
        .collect();
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((row, maker)) = games.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let Some(judges) = judges::require() else { return };
                    println!("{} made by {maker:?}, {rounds} rounds", row.name);
                    play(&judges, &row.layout, *maker, rounds);
                }
            });
        }
    });
    println!("{} volumes, {rounds} rounds each", games.len());
}

rows! {
    defaults: both, 1, 512, "";
    node_4k: Ours, 1, 512, "-n 4096";
    node_8k_xxhash: campaign, 1, 512, "-n 8192 --csum xxhash";
    node_32k_sha256: Progs, 1, 512, "-n 32768 --csum sha256";
    node_64k_blake2: Ours, 1, 512, "-n 65536 --csum blake2";
    xxhash_bgt: campaign, 1, 512, "--csum xxhash -O block-group-tree";
    sha256: campaign, 1, 512, "--csum sha256";
    blake2: campaign, 1, 512, "--csum blake2";

    single: campaign, 1, 512, "-d single -m single";
    dup: campaign, 1, 512, "-d dup -m dup";
    single_over_3: campaign, 3, 256, "-d single -m single";
    raid0_of_3: Progs, 3, 256, "-d raid0 -m raid0";
    raid1_of_3: campaign, 3, 256, "-d raid1 -m raid1";
    raid1c3_of_4: Ours, 4, 256, "-d raid1c3 -m raid1c3 --csum xxhash";
    raid1c4_of_4: campaign, 4, 256, "-d raid1c4 -m raid1c4";
    raid10_of_4: Progs, 4, 256, "-d raid10 -m raid10 -n 4096";
    raid10_of_5_node_64k: campaign, 5, 256, "-d raid10 -m raid10 -n 65536";
    raid0_with_raid1_metadata: campaign, 2, 256, "-d raid0 -m raid1";

    mixed: both, 1, 256, "--mixed -d single -m single -n 4096";
    // With these options `mkfs.btrfs` makes separate groups, and the kernel makes mixed ones beside
    // them.
    mixed_beside_others: Progs, 1, 256, "-d single -m single -O mixed-bg -n 4096";
    mixed_dup: campaign, 1, 256, "--mixed -d dup -m dup -n 4096";
    mixed_raid1: campaign, 2, 256, "--mixed -d raid1 -m raid1 -n 4096";
    mixed_old: campaign, 1, 256,
        "-d single -m single -n 4096 -O mixed-bg,^bgt,^free-space-tree,^no-holes,^skinny-metadata,^extref";

    block_group_tree: Progs, 1, 512, "-O block-group-tree";
    no_block_group_tree: campaign, 1, 512, "-O ^block-group-tree";
    no_free_space_tree: campaign, 1, 512, "-O ^block-group-tree,^free-space-tree";
    explicit_holes: Ours, 1, 512, "-O ^block-group-tree,^no-holes";
    explicit_holes_node_4k: campaign, 1, 512, "-n 4096 -O ^block-group-tree,^no-holes";
    old_references: campaign, 1, 512, "-O ^skinny-metadata";

    quotas: Progs, 1, 512, "-O quota";
    quotas_node_4k_raid1: campaign, 2, 256, "-n 4096 -d raid1 -m raid1 -O quota";
    simple_quotas: Progs, 1, 512, "-O squota";
    // Without skinny metadata, `btrfs check` does not count tree blocks for simple quotas, and
    // complains about volumes of the kernel.
    simple_quotas_node_4k: Progs, 1, 512, "-n 4096 -O squota";
    simple_quotas_mixed: campaign, 1, 256, "--mixed -d single -m single -n 4096 -O squota";

    old_everything: Progs, 1, 512, "-O ^bgt,^free-space-tree,^no-holes,^skinny-metadata,^extref";
    old_everything_node_4k_raid1: campaign, 2, 256,
        "-n 4096 -d raid1 -m raid1 -O ^bgt,^free-space-tree,^no-holes,^skinny-metadata,^extref";
}
