//! Structures that follow from others are made anew.

use std::ffi::OsStr;
use std::path::Path;

use offshoot_btrfs::RepairClass;
use offshoot_testkit::btrfs::fill::handful;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::run::run;

use crate::judged::{repair, require_repaired, shown_by_kernel};

/// All derived trees of a sound volume are made anew.
fn require_made_anew(recipe: &Recipe) {
    let Some(judges) = judges::require() else { return };
    let disks = recipe.make(&judges);
    let before = shown_by_kernel(&disks);
    require_repaired(&disks, &RepairClass::ALL, &before);
}

macro_rules! volumes {
    ($($name:ident: $recipe:expr;)*) => {$(
        #[test]
        fn $name() {
            require_made_anew(&$recipe);
        }
    )*};
}

volumes! {
    default_volume: Recipe::new();
    small_nodes: Recipe::new().mkfs("-n 4096 -m single").fill(handful::fill);
    mixed_groups: Recipe::new().mkfs("--mixed -n 4096 -s 4096").fill(handful::fill);
    features_of_old_volumes:
        Recipe::new()
            .mkfs("-O ^no-holes,^extref,^free-space-tree,^skinny-metadata -n 4096")
            .fill(handful::fill);
    block_group_tree: Recipe::new().mkfs("-O block-group-tree").fill(handful::fill);
    quotas: Recipe::new().mkfs("-O quota").fill(handful::fill);
    simple_quotas: Recipe::new().mkfs("-O squota").fill(handful::fill);
    mirrored_members: Recipe::new().devices(2).mkfs("-d raid1 -m raid1").fill(handful::fill);
    striped_members: Recipe::new().devices(4).mkfs("-d raid10 -m raid10").fill(handful::fill);
    parity_of_data: Recipe::new().devices(3).mkfs("-d raid5 -m raid1").fill(handful::fill);
}

/// Makes files with new contents, or other contents for those that are there.
fn write_files(dir: &Path, turn: u8) {
    for number in (0..600).filter(|number| turn == 0 || number % 7 == usize::from(turn)) {
        let bytes = vec![turn; 3000 + number * 7];
        std::fs::write(dir.join(format!("file-{number}")), bytes).expect("it is written");
    }
}

/// Runs `btrfs subvolume`.
fn subvolume(words: &[&str], paths: &[&Path]) {
    let mut all: Vec<&OsStr> = vec!["subvolume".as_ref()];
    all.extend(words.iter().map(|word| OsStr::new(*word)));
    all.extend(paths.iter().map(|path| path.as_os_str()));
    run("btrfs", &all);
}

/// A subvolume with snapshots of it, all of which were changed since.
fn fill_snapshots(root: &Path) {
    let at = |name: &str| root.join(name);
    subvolume(&["create"], &[&at("source")]);
    write_files(&root.join("source"), 0);
    for (turn, name) in (1u8..).zip(["one", "two", "three"]) {
        subvolume(&["snapshot"], &[&at("source"), &at(name)]);
        write_files(&root.join("source"), turn);
        write_files(&root.join(name), turn + 3);
    }
    subvolume(&["delete", "--commit-each"], &[&at("two")]);
    subvolume(&["sync"], &[root]);
}

/// Blocks that snapshots share have references of the right kinds: the kernel goes on with them,
/// when it changes all sides and deletes some.
#[test]
fn the_kernel_goes_on_with_snapshots() {
    let Some(judges) = judges::require() else { return };
    let recipe = Recipe::new().mib(512).mkfs("-n 4096").fill(fill_snapshots);
    let disks = recipe.make(&judges);
    repair(&disks, &RepairClass::ALL).expect("it is made anew");
    disks.assert_checks();
    let mount = disks.mount("rw,noatime");
    for name in ["source", "one", "three"] {
        write_files(&mount.path().join(name), 2);
    }
    mount.sync();
    for name in ["one", "source"] {
        subvolume(&["delete", "--commit-each"], &[&mount.path().join(name)]);
    }
    subvolume(&["sync"], &[mount.path()]);
    write_files(&mount.path().join("three"), 5);
    drop(mount);
    disks.assert_checks();
}
