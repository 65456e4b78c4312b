//! Volumes without sound superblocks, or whose chunk tree is lost in part, that a scan mends.

use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_btrfs::{
    BtrfsFinding, BtrfsFindingCode as Code, BtrfsFindingPlace, RepairClass, RepairOptions,
    RepairOutcome, ScanOptions, repair_btrfs,
};
use offshoot_btrfs_format::block::{BlockHeader, NodePointer};
use offshoot_btrfs_format::edit::insert_pointers;
use offshoot_btrfs_format::superblock::{
    Incompat, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock,
};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::BlockDevice;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::fill::handful;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::random::Random;

use crate::common::{DamagedVolume, checked, progs_complaints};
use crate::damage::{DamageTarget, header};
use crate::damaged::spoil_blocks;
use crate::image::SparseImage;
use crate::judged::{
    bytes, put_back, repair, repair_with, require_repaired_with, shown_by_kernel, undo,
};
use crate::mutation::{index, pack, seed_of, unpack};

/// A repair that may scan.
pub(crate) fn scanning() -> RepairOptions {
    RepairOptions { scan: Some(ScanOptions::default()), ..RepairOptions::default() }
}

fn single() -> Recipe {
    small(Recipe::new().mkfs("-m single -d single -L labelled"))
}

fn dup() -> Recipe {
    small(Recipe::new().mkfs("-m dup -n 4096 --csum xxhash -L labelled"))
}

fn mirrored() -> Recipe {
    small(Recipe::new().devices(2).mkfs("-m raid1 -d raid1 -L labelled"))
}

fn small(recipe: Recipe) -> Recipe {
    recipe.mib(256).fill(handful::fill)
}

/// Damages a volume of each recipe, and requires that a scan mends it.
fn require_mended(
    recipes: &[Recipe],
    damage: &dyn Fn(&DamagedVolume),
    codes: &[Code],
    judge: &dyn Fn(&RepairOutcome),
) {
    let Some(judges) = judges::require() else { return };
    for recipe in recipes {
        let disks = recipe.make(&judges);
        let before = shown_by_kernel(&disks);
        let damaged = DamagedVolume::of(disks);
        damage(&damaged);
        let outcome = require_repaired_with(damaged.disks(), &scanning(), &before);
        for code in codes {
            let has = outcome.before.findings.iter().any(|one| one.code == *code);
            assert!(has, "{code:?} is found before: {:?}", outcome.before.findings);
        }
        judge(&outcome);
    }
}

/// Wipes the places of superblocks of a member.
fn wipe_superblocks(volume: &DamagedVolume, member: usize) {
    for at in &SUPERBLOCK_OFFSETS[..2] {
        volume.write(member, *at, &[0x5a; SUPERBLOCK_SIZE]);
    }
}

fn label(volume: &DamagedVolume) -> String {
    let bytes = std::fs::read(&volume.disks().images()[0]).expect("an image");
    let label = &bytes[65_536 + 299..65_536 + 299 + 256];
    String::from_utf8(label.split(|&byte| byte == 0).next().unwrap_or_default().to_vec())
        .expect("text")
}

/// A wiped primary superblock has a copy: the scan looks for nothing.
#[test]
fn a_wiped_primary_superblock_is_made_from_its_copy() {
    let damage = |volume: &DamagedVolume| volume.write(0, 65_536, &[0; SUPERBLOCK_SIZE]);
    let judge = |outcome: &RepairOutcome| assert_eq!(outcome.scanned, None);
    require_mended(&[single(), mirrored()], &damage, &[Code::Superblock], &judge);
}

/// All superblocks of all members are wiped.
#[test]
fn superblocks_are_made_from_the_trees() {
    let damage = |volume: &DamagedVolume| {
        (0..volume.disks().images().len()).for_each(|member| wipe_superblocks(volume, member));
    };
    let judge = |outcome: &RepairOutcome| {
        let scanned = outcome.scanned.as_ref().expect("it was scanned");
        assert!(scanned.is_superblock_made && scanned.chunks.is_none(), "{scanned:?}");
        assert_eq!(scanned.newest, scanned.generation);
    };
    require_mended(&[single(), dup(), mirrored()], &damage, &[Code::Superblock], &judge);
}

/// The features of volumes of many kinds follow from what is stored.
#[test]
fn features_are_found_without_superblocks() {
    let Some(judges) = judges::require() else { return };
    let features = |disks: &Disks| {
        let bytes = std::fs::read(&disks.images()[0]).expect("an image");
        let superblock = Superblock::parse(&bytes[65_536..][..SUPERBLOCK_SIZE], 65_536);
        let superblock = superblock.expect("a superblock");
        (superblock.incompat, superblock.compat_ro)
    };
    for recipe in [
        Recipe::new().mkfs("-O block-group-tree,quota --csum sha256"),
        Recipe::new().mkfs("-O squota --csum blake2"),
        Recipe::new().mkfs("-O ^no-holes,^free-space-tree").mount("compress=lzo"),
        Recipe::new().mkfs("--mixed -n 4096"),
        Recipe::new().devices(2).mkfs("-d raid0 -m raid1"),
        Recipe::new().devices(3).mkfs("-d raid1c3 -m raid1c3"),
    ] {
        let disks = small(recipe).make(&judges);
        let (incompat, compat_ro) = features(&disks);
        let before = shown_by_kernel(&disks);
        let damaged = DamagedVolume::of(disks);
        (0..damaged.disks().images().len()).for_each(|member| wipe_superblocks(&damaged, member));
        require_repaired_with(damaged.disks(), &scanning(), &before);
        let (found, found_ro) = features(damaged.disks());
        // Any volume may have this one.
        assert_eq!(found, incompat.union(Incompat::NO_HOLES));
        assert_eq!(found_ro, compat_ro);
    }
}

/// One member has lost all superblocks, and gets what the other one has.
#[test]
fn a_member_gets_the_superblocks_of_another_one() {
    let damage = |volume: &DamagedVolume| wipe_superblocks(volume, 1);
    let judge = |outcome: &RepairOutcome| {
        let scanned = outcome.scanned.as_ref().expect("it was scanned");
        assert!(!scanned.is_superblock_made, "{scanned:?}");
    };
    require_mended(&[mirrored()], &damage, &[Code::Superblock], &judge);
}

/// The system chunks of all superblocks are damaged, with and without a right checksum.
#[test]
fn system_chunks_of_superblocks_are_made_from_the_chunk_tree() {
    // The length and the first stripe of the first chunk.
    let change = |array: &mut [u8]| array[17 + 48 + 8..17 + 48 + 16].fill(0x31);
    let fitting = |volume: &DamagedVolume| {
        for member in 0..volume.disks().images().len() {
            volume.edit_superblocks(member, |bytes| change(&mut bytes[811..811 + 2048]));
        }
        assert_eq!(label(volume), "labelled");
    };
    let broken = |volume: &DamagedVolume| {
        for member in 0..volume.disks().images().len() {
            let image = std::fs::read(&volume.disks().images()[member]).expect("an image");
            for at in SUPERBLOCK_OFFSETS[..2].iter().map(|at| usize::try_from(*at).expect("small"))
            {
                let mut array = image[at + 811..at + 811 + 2048].to_vec();
                change(&mut array);
                volume.write(member, at as u64 + 811, &array);
            }
        }
    };
    let judge = |outcome: &RepairOutcome| {
        let scanned = outcome.scanned.as_ref().expect("it was scanned");
        assert!(!scanned.is_superblock_made && scanned.chunks.is_none(), "{scanned:?}");
    };
    require_mended(&[single(), dup(), mirrored()], &fitting, &[], &judge);
    require_mended(&[single(), dup(), mirrored()], &broken, &[Code::Superblock], &judge);
}

/// The only leaf of the chunk tree, which is its root, is lost in all copies.
#[test]
fn a_lost_chunk_tree_is_made_anew() {
    let damage = |volume: &DamagedVolume| {
        spoil_blocks(volume, |header| header.owner() == TreeId::CHUNK);
    };
    let judge = |outcome: &RepairOutcome| {
        let scanned = outcome.scanned.as_ref().expect("it was scanned");
        assert!(!scanned.is_superblock_made && scanned.chunks.is_some(), "{scanned:?}");
        assert!(outcome.classes.contains(&RepairClass::Chunks), "{:?}", outcome.classes);
    };
    require_mended(&[single(), dup(), mirrored()], &damage, &[Code::TreeBlock], &judge);
}

/// The chunk tree and all superblocks are lost.
#[test]
fn superblocks_and_chunk_tree_are_made_anew_together() {
    let damage = |volume: &DamagedVolume| {
        spoil_blocks(volume, |header| header.owner() == TreeId::CHUNK);
        (0..volume.disks().images().len()).for_each(|member| wipe_superblocks(volume, member));
    };
    let judge = |outcome: &RepairOutcome| {
        let scanned = outcome.scanned.as_ref().expect("it was scanned");
        // An older chunk tree is used if it is whole and nothing says otherwise.
        assert!(scanned.is_superblock_made, "{scanned:?}");
    };
    require_mended(&[single(), mirrored()], &damage, &[Code::Superblock], &judge);
}

/// Gives the chunk tree, which is one leaf, a root over two leaves. Returns the addresses of the
/// root and of the leaves.
fn split_chunk_tree(volume: &DamagedVolume) -> [u64; 3] {
    let blocks = &volume.target.blocks;
    let leaf = blocks.iter().find(|block| header(&block.bytes).owner() == TreeId::CHUNK);
    let leaf = leaf.expect("a chunk tree");
    let (size, old) = (leaf.bytes.len() as u64, header(&leaf.bytes).bytenr.get());
    // Places at the end of the first MiB behind the leaf are free.
    let addresses = [old + 32 * size, old + 33 * size, old + 34 * size];
    let items = unpack(&leaf.bytes);
    let (first, second) = items.split_at(items.len() / 2);
    let write = |address: u64, mut bytes: Vec<u8>| {
        bytes[48..56].copy_from_slice(&address.to_le_bytes());
        volume.target.fit_checksum(&mut bytes);
        for &(member, offset) in &leaf.places {
            volume.write(member, offset + (address - old), &bytes);
        }
    };
    write(addresses[1], pack(&leaf.bytes, first));
    write(addresses[2], pack(&leaf.bytes, second));
    let mut root = vec![0; leaf.bytes.len()];
    root[..101].copy_from_slice(&leaf.bytes[..101]);
    root[96..100].fill(0);
    root[100] = 1;
    let generation = header(&leaf.bytes).generation;
    let pointer = |items: &[(Key, Vec<u8>)], address: u64| NodePointer {
        key: items[0].0.into(),
        blockptr: address.into(),
        generation,
    };
    let pointers = [pointer(first, addresses[1]), pointer(second, addresses[2])];
    insert_pointers(&mut root, 0, &pointers);
    write(addresses[0], root);
    for member in 0..volume.disks().images().len() {
        volume.edit_superblocks(member, |bytes| {
            bytes[88..96].copy_from_slice(&addresses[0].to_le_bytes());
            // The level of the root.
            bytes[199] = 1;
        });
    }
    addresses
}

/// The blocks to which the superblocks lead now.
fn target_now(volume: &DamagedVolume) -> DamageTarget {
    let images = volume.disks().images().iter();
    let read = |path| Arc::new(SparseImage::read(path).expect("an image reads"));
    DamageTarget::new(images.map(|path| read(path)).collect(), false)
}

/// Of a chunk tree with two leaves, one of its three blocks is lost.
#[test]
fn a_chunk_tree_of_several_blocks_is_made_anew() {
    for lost in 0..3 {
        let damage = |volume: &DamagedVolume| {
            let addresses = split_chunk_tree(volume);
            let now = target_now(volume);
            let is_lost = |header: &BlockHeader| header.bytenr.get() == addresses[lost];
            let block = now.blocks.iter().find(|block| is_lost(header(&block.bytes)));
            for &(member, offset) in &block.expect("it is there").places {
                volume.write(member, offset, &vec![0x5a; 4096]);
            }
        };
        let judge = |outcome: &RepairOutcome| {
            let scanned = outcome.scanned.as_ref().expect("it was scanned");
            assert!(scanned.chunks.is_some(), "{scanned:?}");
        };
        let recipe = if lost == 1 { mirrored() } else { single() };
        require_mended(&[recipe], &damage, &[Code::TreeBlock], &judge);
    }
}

/// A dry run says what would be done and writes nothing, and without a scan nothing is done.
#[test]
fn a_scan_writes_nothing_that_was_not_asked_for() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedVolume::of(dup().make(&judges));
    spoil_blocks(&damaged, |header| header.owner() == TreeId::CHUNK);
    let disks = damaged.disks();
    let before = bytes(disks);
    let refused = repair(disks, &[]).map(|outcome| outcome.is_written);
    assert!(!matches!(refused, Ok(true)), "{refused:?}");
    let options = RepairOptions { is_dry_run: true, ..scanning() };
    let watch = |_: &offshoot_btrfs::CheckEvent| ControlFlow::Continue(());
    let outcome = repair_btrfs(&disks.devices(), &options, &watch).expect("it can be repaired");
    assert!(!outcome.is_written && outcome.after.is_some_and(|after| after.findings.is_empty()));
    wipe_superblocks(&damaged, 0);
    let wiped = bytes(disks);
    repair(disks, &[]).expect_err("there is no superblock");
    assert!(before != wiped && bytes(disks) == wiped, "nothing was written");
}

/// What does not fit together is refused by name: chunks of which ranges and block group say
/// different things, and a member that is missing.
#[test]
fn contradictions_are_refused() {
    let Some(judges) = judges::require() else { return };
    let watch = |_: &offshoot_btrfs::CheckEvent| ControlFlow::Continue(());
    let damaged = DamagedVolume::of(mirrored().make(&judges));
    spoil_blocks(&damaged, |header| header.owner() == TreeId::CHUNK);
    let is_group = |key: Key, _: &[u8]| key.item_type == ItemType::BLOCK_GROUP_ITEM;
    // The profile of the block group becomes another one than that of the ranges.
    damaged.edit(TreeId::EXTENT, is_group, |items, slot| items[slot].1[16] ^= 0x10);
    let before = bytes(damaged.disks());
    let refused = repair_btrfs(&damaged.disks().writable_devices(), &scanning(), &watch);
    let refused = refused.expect_err("ranges contradict their block group").to_string();
    assert!(refused.contains("chunk") && refused.contains("recover"), "{refused}");
    let one = &damaged.disks().writable_devices()[..1];
    let refused = repair_btrfs(one, &scanning(), &watch).expect_err("a member is missing");
    assert!(refused.to_string().contains("device 2"), "{refused}");
    assert!(bytes(damaged.disks()) == before, "nothing was written");
}

/// The newest root of the root tree is lost together with all superblocks: the commit before it is
/// found, and the newer blocks are named.
#[test]
fn without_the_newest_root_the_one_before_is_found() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedVolume::of(dup().make(&judges));
    let is_root = |header: &BlockHeader| header.owner() == TreeId::ROOT;
    let blocks = damaged.target.blocks.iter().map(|block| header(&block.bytes));
    let top = blocks.filter(|header| is_root(header)).map(|header| header.level).max();
    spoil_blocks(&damaged, |header| is_root(header) && Some(header.level) == top);
    wipe_superblocks(&damaged, 0);
    let watch = |_: &offshoot_btrfs::CheckEvent| ControlFlow::Continue(());
    let outcome = repair_btrfs(&damaged.disks().writable_devices(), &scanning(), &watch);
    let outcome = outcome.expect("the commit before is whole");
    let scanned = outcome.scanned.expect("it was scanned");
    assert!(scanned.newest > scanned.generation, "{scanned:?}");
    assert!(checked(damaged.disks()).findings.is_empty());
    assert_eq!(progs_complaints(damaged.disks()), None);
    drop(damaged.disks().mount("rw"));
}

/// The superblocks are sound and their root tree is lost: the commit before is whole. The label
/// stays, and the repair is undone.
#[test]
fn without_the_root_tree_of_a_sound_superblock_the_commit_before_is_found() {
    let Some(judges) = judges::require() else { return };
    let disks = dup().make(&judges);
    let mount = disks.mount("rw,noatime");
    std::fs::write(mount.path().join("of the last commit"), b"lost").expect("it is written");
    drop(mount);
    let damaged = DamagedVolume::of(disks);
    let disks = damaged.disks();
    spoil_blocks(&damaged, |header| header.owner() == TreeId::ROOT);
    assert!(!repair(disks, &[]).expect("nothing is asked for").is_written);
    let old = bytes(disks);
    let outcome = repair_with(disks, &scanning()).expect("the commit before is whole");
    let scanned = outcome.scanned.expect("it was scanned");
    assert!(scanned.newest > scanned.generation && !scanned.is_superblock_made, "{scanned:?}");
    let is_it = |one: &BtrfsFinding| one.place == BtrfsFindingPlace::Tree(TreeId::ROOT);
    assert!(outcome.before.findings.iter().any(is_it));
    assert!(checked(disks).findings.is_empty());
    assert_eq!((progs_complaints(disks), label(&damaged)), (None, "labelled".to_owned()));
    let repaired = bytes(disks);
    undo(disks).expect("it is undone");
    for at in [64 << 10, 64 << 20] {
        let place = at..at + SUPERBLOCK_SIZE;
        assert!(bytes(disks)[0][place.clone()] == old[0][place], "the superblock at {at}");
    }
    put_back(disks, &repaired);
    let mount = disks.mount("rw,noatime");
    std::fs::write(mount.path().join("after the repair"), vec![7; 3 << 20]).expect("it is written");
    drop(mount);
    assert_eq!(progs_complaints(disks), None, "after the kernel wrote");
}

/// Two roots of one transaction that are both whole are refused.
#[test]
fn two_whole_roots_are_refused() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedVolume::of(single().make(&judges));
    let is_root = |header: &BlockHeader| header.owner() == TreeId::ROOT;
    let roots = damaged.target.blocks.iter().filter(|block| is_root(header(&block.bytes)));
    let root = roots.max_by_key(|block| header(&block.bytes).level).expect("a root");
    // Without the extent tree nothing says which of two is a root.
    spoil_blocks(&damaged, |header| header.owner() == TreeId::EXTENT);
    let (place, size) = (header(&root.bytes).bytenr.get(), root.bytes.len() as u64);
    let mut other = root.bytes.clone();
    other[48..56].copy_from_slice(&(place + 64 * size).to_le_bytes());
    damaged.target.fit_checksum(&mut other);
    for &(member, offset) in &root.places {
        damaged.write(member, offset + 64 * size, &other);
    }
    wipe_superblocks(&damaged, 0);
    let before = bytes(damaged.disks());
    let watch = |_: &offshoot_btrfs::CheckEvent| ControlFlow::Continue(());
    let refused = repair_btrfs(&damaged.disks().writable_devices(), &scanning(), &watch);
    let refused = refused.expect_err("nothing says which one it is").to_string();
    assert!(refused.contains("whole roots at") && refused.contains("recover"), "{refused}");
    assert!(bytes(damaged.disks()) == before, "nothing was written");
}

/// A volume is found on devices that held another one before, whose blocks are still there, and
/// whose members are given in another order.
#[test]
fn a_volume_is_found_behind_an_older_one() {
    let Some(judges) = judges::require() else { return };
    let disks = mirrored().make(&judges);
    disks.mkfs(&["-m", "raid1", "-d", "raid1", "-n", "4096"]);
    let mount = disks.mount("rw,noatime");
    handful::fill(mount.path());
    drop(mount);
    let before = shown_by_kernel(&disks);
    let damaged = DamagedVolume::of(disks);
    (0..2).for_each(|member| wipe_superblocks(&damaged, member));
    let watch = |_: &offshoot_btrfs::CheckEvent| ControlFlow::Continue(());
    let mut devices = damaged.disks().writable_devices();
    devices.reverse();
    let outcome = repair_btrfs(&devices, &scanning(), &watch).expect("the newer volume is whole");
    assert!(outcome.is_written && outcome.after.is_some_and(|after| after.findings.is_empty()));
    assert_eq!(progs_complaints(damaged.disks()), None);
    assert_eq!(shown_by_kernel(damaged.disks()), before);
}

/// Whatever else is damaged, a scan ends with a sound volume or an error.
#[test]
fn a_scan_of_random_damage_ends_well() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedVolume::of(mirrored().make(&judges));
    let mut random = Random::new(seed_of("a scan of random damage"));
    let watch = |_: &offshoot_btrfs::CheckEvent| ControlFlow::Continue(());
    let options = RepairOptions { is_dry_run: true, ..scanning() };
    let mut repaired = 0;
    for _ in 0..60 {
        let (mut members, _) = damaged.target.damaged(&mut random);
        for member in members.iter_mut().take(1 + index(&mut random, 2)) {
            SUPERBLOCK_OFFSETS[..2].iter().for_each(|at| member.write(*at, &[0; SUPERBLOCK_SIZE]));
        }
        let devices: Vec<_> =
            members.into_iter().map(|one| Arc::new(one) as Arc<dyn BlockDevice>).collect();
        if let Ok(outcome) = repair_btrfs(&devices, &options, &watch) {
            assert!(outcome.scanned.is_some() && outcome.after.is_some());
            repaired += 1;
        }
    }
    assert!(repaired > 0, "some of the damage is mended");
}
