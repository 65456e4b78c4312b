//! New volumes of every layout.

use offshoot_btrfs::MkfsOptions;
use offshoot_btrfs_format::chunk::Profile;
use offshoot_btrfs_format::csum::ChecksumType;
use offshoot_testkit::btrfs::judges;

use crate::common::{judge, make, options};

/// Makes one test of each line: its name, the sizes of the devices in MiB, and the options.
macro_rules! matrix {
    ($($name:ident: $mib:expr, $change:expr;)*) => {
        $(
            #[test]
            fn $name() {
                let Some(judges) = judges::require() else { return };
                let mut options = options();
                let change: fn(&mut MkfsOptions) = $change;
                change(&mut options);
                let disks = make(&judges, &$mib, &options).expect("mkfs");
                judge(&disks, &options, 20);
            }
        )*
    };
}

fn profiles(options: &mut MkfsOptions, data: Profile, metadata: Profile) {
    options.data = Some(data);
    options.metadata = Some(metadata);
}

fn features(options: &mut MkfsOptions, list: &str) {
    options.features.apply(list).expect("known features");
}

matrix! {
    defaults: [512], |_| {};
    label: [256], |o| o.label = "a label with spaces, and ä".to_owned();

    node_4k: [256], |o| o.node_size = Some(4096);
    node_8k: [256], |o| o.node_size = Some(8192);
    node_32k: [256], |o| o.node_size = Some(32768);
    node_64k: [512], |o| o.node_size = Some(65536);

    csum_xxhash: [256], |o| o.checksum = ChecksumType::Xxhash64;
    csum_sha256: [256], |o| o.checksum = ChecksumType::Sha256;
    csum_blake2: [256], |o| o.checksum = ChecksumType::Blake2b;

    single: [256], |o| profiles(o, Profile::Single, Profile::Single);
    dup: [256], |o| profiles(o, Profile::Dup, Profile::Dup);
    dup_over_2: [256; 2], |o| profiles(o, Profile::Dup, Profile::Dup);
    defaults_over_2: [256; 2], |_| {};
    defaults_over_5: [256; 5], |_| {};
    single_over_3: [256; 3], |o| profiles(o, Profile::Single, Profile::Single);
    raid0_of_1: [256], |o| profiles(o, Profile::Raid0, Profile::Raid0);
    raid0_of_2: [256; 2], |o| profiles(o, Profile::Raid0, Profile::Raid0);
    raid0_of_3: [256; 3], |o| profiles(o, Profile::Raid0, Profile::Raid0);
    raid0_of_3_node_64k: [256; 3], |o| {
        profiles(o, Profile::Raid0, Profile::Raid0);
        o.node_size = Some(65536);
    };
    raid1_of_3: [256; 3], |o| profiles(o, Profile::Raid1, Profile::Raid1);
    raid1c3_of_3: [256; 3], |o| profiles(o, Profile::Raid1c3, Profile::Raid1c3);
    raid1c3_of_4: [256; 4], |o| profiles(o, Profile::Raid1c3, Profile::Raid1c3);
    raid1c4_of_4: [256; 4], |o| profiles(o, Profile::Raid1c4, Profile::Raid1c4);
    raid10_of_2: [256; 2], |o| profiles(o, Profile::Raid10, Profile::Raid10);
    raid10_of_4: [256; 4], |o| profiles(o, Profile::Raid10, Profile::Raid10);
    raid10_of_5: [256; 5], |o| profiles(o, Profile::Raid10, Profile::Raid10);
    raid10_of_6_node_4k_sha256: [256; 6], |o| {
        profiles(o, Profile::Raid10, Profile::Raid10);
        o.node_size = Some(4096);
        o.checksum = ChecksumType::Sha256;
    };
    raid0_with_raid1c4_metadata: [256; 4], |o| profiles(o, Profile::Raid0, Profile::Raid1c4);

    mixed: [256], |o| features(o, "mixed-bg");
    mixed_dup: [256], |o| {
        features(o, "mixed-bg");
        o.data = Some(Profile::Dup);
    };
    mixed_raid1: [256; 2], |o| {
        features(o, "mixed-bg");
        o.metadata = Some(Profile::Raid1);
    };
    mixed_raid0_old: [256; 2], |o| {
        features(o, "mixed-bg,^bgt,^fst,^skinny-metadata,^no-holes,^extref");
        o.metadata = Some(Profile::Raid0);
    };

    no_block_group_tree: [256], |o| features(o, "^block-group-tree");
    no_free_space_tree: [256], |o| features(o, "^block-group-tree,^free-space-tree");
    old_references: [256], |o| features(o, "^skinny-metadata");
    old_references_node_4k: [256; 2], |o| {
        features(o, "^skinny-metadata,^block-group-tree");
        o.node_size = Some(4096);
    };
    explicit_holes: [256], |o| features(o, "^no-holes,^block-group-tree");
    old_everything: [256], |o| features(o, "^bgt,^fst,^skinny-metadata,^no-holes,^extref");
    old_everything_node_4k_raid1: [256; 2], |o| {
        features(o, "^bgt,^fst,^skinny-metadata,^no-holes,^extref");
        o.node_size = Some(4096);
    };
}
