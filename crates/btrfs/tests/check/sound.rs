//! Sound volumes of many kinds: nothing is found in them.

use std::collections::BTreeSet;
use std::path::Path;

use offshoot_btrfs::BtrfsFindingCode as Code;
use offshoot_testkit::btrfs::fill::handful;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::recipe::Recipe;

use crate::common::require_sound;

/// A volume that the kernel filled.
fn require_kernel_volume(recipe: &Recipe) {
    let Some(judges) = judges::require() else { return };
    let outcome = require_sound(&recipe.make(&judges));
    assert!(outcome.counts.tree_blocks > 20, "{:?}", outcome.counts);
}

macro_rules! kernel_volumes {
    ($($name:ident: $recipe:expr;)*) => {$(
        #[test]
        fn $name() {
            require_kernel_volume(&$recipe);
        }
    )*};
}

kernel_volumes! {
    default_volume: Recipe::new();
    small_nodes: Recipe::new().mkfs("-n 4096 -m single");
    mixed_groups: Recipe::new().mkfs("--mixed -n 4096 -s 4096");
    features_of_old_volumes:
        Recipe::new()
            .mkfs("-O ^no-holes,^extref,^free-space-tree,^skinny-metadata -n 4096")
            .fill(handful::fill);
    block_group_tree: Recipe::new().mkfs("-O block-group-tree");
    compressed: Recipe::new().mkfs("--csum blake2 -m dup -d dup").mount("compress-force=zstd");
    without_checksums: Recipe::new().mount("nodatasum").fill(handful::fill);
    quotas: Recipe::new().mkfs("-O quota");
    simple_quotas: Recipe::new().mkfs("-O squota");
    mirrored_members: Recipe::new().devices(2).mkfs("-d raid1 -m raid1");
    parity_members: Recipe::new().devices(4).mkfs("-d raid6 -m raid1c3");
    striped_members: Recipe::new().devices(4).mkfs("-d raid10 -m raid10");
}

#[test]
fn numbers_are_unique_and_documented() {
    let numbers: BTreeSet<u16> = Code::ALL.iter().map(|code| code.number()).collect();
    assert!(numbers.iter().copied().eq(Code::ALL.iter().map(|code| code.number())), "in order");
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/check.md");
    let page = std::fs::read_to_string(page).unwrap();
    let rows: Vec<&str> = page.lines().filter(|line| line.contains("` | 7")).collect();
    let row = |code: &Code| {
        let (name, severity) = (code.name(), code.severity().name());
        format!("| `{name}` | {} | {severity} | {} |", code.number(), code.meaning())
    };
    assert_eq!(rows, Code::ALL.iter().map(row).collect::<Vec<_>>(), "docs/check.md");
}
