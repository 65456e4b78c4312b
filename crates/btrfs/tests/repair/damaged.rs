//! Damage of each class, and what a repair makes of it.

use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;

use offshoot_btrfs::{BtrfsFindingCode as Code, RepairClass, RepairOptions, repair_btrfs};
use offshoot_btrfs_format::block::BlockHeader;
use offshoot_btrfs_format::superblock::SuperblockItem;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_testkit::btrfs::fill::handful;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_vfs::Errno;

use crate::common::{DamagedVolume, EditedItems, checked, progs_complaints, show, view};
use crate::damage::header;
use crate::judged::{bytes, repair, require_repaired, shown_by_kernel, undo};

/// A volume that is damaged by `damage`, is mended with all classes that were found.
fn require_mended(recipe: &Recipe, damage: impl FnOnce(&DamagedVolume), codes: &[Code]) {
    require_mended_of(&recipe.mib_of_small(), damage, codes);
}

/// The same, of a recipe that says what is in the volume.
fn require_mended_of(recipe: &Recipe, damage: impl FnOnce(&DamagedVolume), codes: &[Code]) {
    let Some(judges) = judges::require() else { return };
    let disks = recipe.make(&judges);
    let before = shown_by_kernel(&disks);
    let damaged = DamagedVolume::of(disks);
    damage(&damaged);
    let found = checked(damaged.disks());
    for code in codes {
        assert!(found.findings.iter().any(|one| one.code == *code), "{code:?}: {}", show(&found));
    }
    require_repaired(damaged.disks(), &[], &before);
}

/// Recipes of small volumes.
trait SmallRecipe {
    fn mib_of_small(&self) -> Self;
}

impl SmallRecipe for Recipe {
    fn mib_of_small(&self) -> Self {
        self.clone().mib(256).fill(handful::fill)
    }
}

/// Writes garbage over all copies of the blocks that `is_wanted` takes.
pub(crate) fn spoil_blocks(volume: &DamagedVolume, is_wanted: impl Fn(&BlockHeader) -> bool) {
    let blocks = volume.target.blocks.iter();
    for block in blocks.filter(|block| is_wanted(header(&block.bytes))) {
        for &(member, offset) in &block.places {
            volume.write(member, offset, &vec![0x5a; block.bytes.len()]);
        }
    }
}

/// Removes the item at a slot.
fn remove(items: &mut EditedItems, slot: usize) {
    items.remove(slot);
}

fn is(item_type: ItemType) -> impl Fn(Key, &[u8]) -> bool {
    move |key, _| key.item_type == item_type
}

/// All blocks of the extent tree and of the free-space tree are lost.
#[test]
fn trees_without_any_block_are_made_anew() {
    let recipe = Recipe::new().mkfs("-n 4096 -m dup");
    let damage = |volume: &DamagedVolume| {
        spoil_blocks(volume, |header| {
            [TreeId::EXTENT, TreeId::FREE_SPACE, TreeId::DEV].contains(&header.owner())
        });
    };
    require_mended(&recipe, damage, &[Code::TreeBlock]);
}

/// An extent item is missing, another counts wrong, and ranges of a member are missing.
#[test]
fn single_items_are_mended_on_two_members() {
    let recipe = Recipe::new().devices(2).mkfs("-d raid1 -m raid1");
    let damage = |volume: &DamagedVolume| {
        volume.edit(TreeId::EXTENT, is(ItemType::EXTENT_ITEM), |items, slot| {
            items.remove(slot + 1);
            let block = items.iter_mut().find(|(key, _)| key.item_type == ItemType::METADATA_ITEM);
            block.expect("a tree block").1[0] += 3;
        });
        volume.edit(TreeId::DEV, is(ItemType::DEV_EXTENT), |items, slot| remove(items, slot + 1));
    };
    let codes = [Code::ReferenceCount, Code::DeviceExtent];
    require_mended(&recipe, damage, &codes);
}

/// Checksums of data that no file has, and an extent without references, are dropped.
#[test]
fn what_nothing_refers_to_is_dropped() {
    let damage = |volume: &DamagedVolume| {
        volume.edit(TreeId::CSUM, is(ItemType::EXTENT_CSUM), |items, _| {
            let last = items.last_mut().expect("there is one");
            last.1.extend([7; 40]);
        });
        volume.edit(TreeId::EXTENT, is(ItemType::BLOCK_GROUP_ITEM), |items, _| {
            let is_data = |(key, data): &(Key, Vec<u8>)| {
                key.item_type == ItemType::BLOCK_GROUP_ITEM && data[16] & 1 != 0
            };
            let group = items.iter().rposition(is_data).expect("a block group for data");
            let (start, len) = (items[group].0.objectid, items[group].0.offset);
            let free = start + len - (1 << 20);
            let place = items.partition_point(|(key, _)| key.objectid < free);
            let item = [1u64, 6, 1].map(u64::to_le_bytes).concat();
            let file = [5u64, 777, 0].map(u64::to_le_bytes).concat();
            let data = [&item[..], &[178], &file, &1u32.to_le_bytes()].concat();
            items.insert(place, (Key::new(free, ItemType::EXTENT_ITEM, 8192), data));
        });
    };
    let codes = [Code::ExtraChecksum, Code::UnusedExtent];
    require_mended(&Recipe::new().mkfs("-m single"), damage, &codes);
}

/// Counters of the superblocks are wrong, in all copies.
#[test]
fn counters_of_superblocks_are_mended() {
    let damage = |volume: &DamagedVolume| {
        for member in 0..2 {
            volume.edit_superblocks(member, |bytes| {
                // The bytes of all devices, and those that are used.
                bytes[113] = bytes[113].wrapping_add(16);
                bytes[121] = bytes[121].wrapping_add(16);
            });
        }
    };
    let recipe = Recipe::new().devices(2).mkfs("-d raid1 -m raid1");
    require_mended(&recipe, damage, &[Code::SuperblockCounter]);
}

/// A free range is not listed.
#[test]
fn free_space_is_listed_again() {
    let damage = |volume: &DamagedVolume| {
        // `mkfs.btrfs` leaves items of its first block groups in front.
        volume.edit(TreeId::FREE_SPACE, is(ItemType::FREE_SPACE_EXTENT), |items, _| {
            let is_free = |(key, _): &(Key, _)| key.item_type == ItemType::FREE_SPACE_EXTENT;
            let last = items.iter().rposition(is_free).expect("there is one");
            remove(items, last);
        });
    };
    require_mended(&Recipe::new(), damage, &[Code::FreeSpaceInfo]);
}

/// Counts of an inode, an entry that only one of its two items has, and a name without an entry.
#[test]
fn files_are_mended_from_each_other() {
    let fill = |root: &std::path::Path| {
        std::fs::create_dir(root.join("folder")).expect("a folder");
        for name in ["folder/one", "folder/two", "three"] {
            std::fs::write(root.join(name), vec![3; 10_000]).expect("it is written");
        }
    };
    let damage = |volume: &DamagedVolume| {
        volume.edit(TreeId::FS, is(ItemType::DIR_ITEM), |items, slot| {
            let regular = |(key, data): &(Key, Vec<u8>)| {
                key.item_type == ItemType::INODE_ITEM && data[53] & 0xf0 == 0x80
            };
            let (_, inode) = items.iter_mut().find(|one| regular(one)).expect("a file");
            inode[24] += 1;
            inode[40] += 1;
            remove(items, slot);
        });
    };
    let codes = [Code::LinkCount, Code::InodeBytes, Code::EntryItems];
    require_mended_of(&Recipe::new().mib(256).fill(fill), damage, &codes);
}

/// A file whose entry and name are both gone is found in `lost+found`.
#[test]
fn what_has_no_name_comes_to_lost_and_found() {
    let Some(judges) = judges::require() else { return };
    let fill = |root: &std::path::Path| {
        std::fs::write(root.join("only"), b"what was written").expect("it is written");
    };
    let disks = Recipe::new().mib(256).fill(fill).make(&judges);
    let damaged = DamagedVolume::of(disks);
    damaged.edit(TreeId::FS, is(ItemType::DIR_ITEM), |items, _| {
        items.retain(|(key, _)| {
            let is_entry = [ItemType::DIR_ITEM, ItemType::DIR_INDEX].contains(&key.item_type);
            let is_name = key.item_type == ItemType::INODE_REF && key.objectid != 256;
            !is_entry && !is_name
        });
    });
    let outcome = repair(damaged.disks(), &[]).expect("it is mended");
    let after = outcome.after.expect("there was something to mend");
    assert!(after.findings.is_empty(), "{}", show(&after));
    assert_eq!(progs_complaints(damaged.disks()), None);
    let mount = damaged.disks().mount("ro");
    let found = std::fs::read(mount.path().join("lost+found/257")).expect("it is there");
    assert_eq!(found, b"what was written");
}

/// The root directory has lost its name `..`, which does not make it a file without links.
#[test]
fn a_root_directory_gets_its_name_back() {
    let damage = |volume: &DamagedVolume| {
        let is_name = |key: Key, _: &[u8]| key == Key::new(256, ItemType::INODE_REF, 256);
        volume.edit(TreeId::FS, is_name, remove);
    };
    require_mended(&Recipe::new(), damage, &[Code::LinkCount]);
}

/// The target of a symbolic link says how long it is.
#[test]
fn a_symbolic_link_gets_the_size_of_its_target() {
    let fill = |root: &std::path::Path| {
        std::os::unix::fs::symlink("a target", root.join("link")).expect("a link");
    };
    let damage = |volume: &DamagedVolume| {
        let is_link = |key: Key, data: &[u8]| {
            key.item_type == ItemType::INODE_ITEM && data[53] & 0xf0 == 0xa0
        };
        volume.edit(TreeId::FS, is_link, |items, slot| items[slot].1[16] += 3);
    };
    require_mended_of(&Recipe::new().mib(256).fill(fill), damage, &[Code::InodeSize]);
}

/// A link is cut off by its size, and its bytes say so too: the target may be that of another link.
/// It stays as it reads and is named. Where the bytes agree with the target, it is whole again.
#[test]
fn a_link_that_its_size_cuts_off() {
    let Some(judges) = judges::require() else { return };
    let fill = |root: &std::path::Path| {
        std::os::unix::fs::symlink("a target", root.join("link")).expect("a link");
    };
    let is_link =
        |key: Key, data: &[u8]| key.item_type == ItemType::INODE_ITEM && data[53] & 0xf0 == 0xa0;
    for (bytes_lost, target, left) in
        [(0, "a target", &[][..]), (4, "a ta", &[Code::InodeSize, Code::InodeBytes])]
    {
        let disks = Recipe::new().mib(256).fill(fill).make(&judges);
        let damaged = DamagedVolume::of(disks);
        damaged.edit(TreeId::FS, is_link, |items, slot| {
            items[slot].1[16] -= 4;
            items[slot].1[24] -= bytes_lost;
        });
        // Something else that is mended meanwhile.
        damaged.edit_superblocks(0, |bytes| view::<SuperblockItem>(bytes).bytes_used += 4096);
        let outcome = repair(damaged.disks(), &[]).expect("it is mended");
        let after = outcome.after.expect("there was something to repair");
        let codes: Vec<_> = after.findings.iter().map(|one| one.code).collect();
        assert_eq!(codes, left, "{}", show(&after));
        let mount = damaged.disks().mount("ro");
        let read = std::fs::read_link(mount.path().join("link")).expect("a link");
        assert_eq!(read.to_str(), Some(target));
    }
}

/// A volume that records holes has lost the extent of one.
#[test]
fn a_hole_is_recorded_again() {
    let fill = |root: &std::path::Path| {
        let file = std::fs::File::create(root.join("sparse")).expect("a file");
        file.write_all_at(&[5; 9000], 1 << 20).expect("it is written");
    };
    let damage = |volume: &DamagedVolume| {
        let is_hole = |key: Key, data: &[u8]| {
            key.item_type == ItemType::EXTENT_DATA && data[20] == 1 && data[21..29] == [0; 8]
        };
        volume.edit(TreeId::FS, is_hole, remove);
    };
    let recipe = Recipe::new().mib(256).mkfs("-O ^no-holes").fill(fill);
    require_mended_of(&recipe, damage, &[Code::FileHole]);
}

/// A file without its inode item is made anew: it keeps its name and its data.
#[test]
fn an_inode_is_made_anew_from_its_other_items() {
    let Some(judges) = judges::require() else { return };
    let fill = |root: &std::path::Path| {
        std::fs::write(root.join("large"), vec![9; 50_000]).expect("it is written");
        std::fs::create_dir(root.join("folder")).expect("a folder");
        std::fs::write(root.join("folder/small"), b"what was written").expect("it is written");
    };
    let damaged = DamagedVolume::of(Recipe::new().mib(256).fill(fill).make(&judges));
    damaged.edit(TreeId::FS, is(ItemType::DIR_ITEM), |items, _| {
        items.retain(|(key, _)| key.item_type != ItemType::INODE_ITEM || key.objectid == 256);
    });
    let found = checked(damaged.disks());
    assert!(found.findings.iter().any(|one| one.code == Code::MissingInode), "{}", show(&found));
    let outcome = repair(damaged.disks(), &[]).expect("it is mended");
    let after = outcome.after.expect("there was something to mend");
    assert!(after.findings.is_empty(), "{}", show(&after));
    assert_eq!(progs_complaints(damaged.disks()), None);
    let mount = damaged.disks().mount("ro");
    let read = |name: &str| std::fs::read(mount.path().join(name)).expect("it is there");
    let large = read("large");
    assert!(large.len() >= 50_000 && large[..50_000].iter().all(|&byte| byte == 9));
    assert_eq!(read("folder/small"), b"what was written");
}

/// A dry run, and a repair that is refused, write nothing.
#[test]
fn nothing_is_written_that_was_not_asked_for() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mib_of_small().mkfs("-n 4096").make(&judges);
    let damaged = DamagedVolume::of(disks);
    damaged.edit(TreeId::EXTENT, is(ItemType::EXTENT_ITEM), remove);
    let disks = damaged.disks();
    let before = bytes(disks);
    let options = RepairOptions { is_dry_run: true, ..RepairOptions::default() };
    let watch = |_: &offshoot_btrfs::CheckEvent| ControlFlow::Continue(());
    let outcome = repair_btrfs(&disks.devices(), &options, &watch).expect("it can be repaired");
    assert!(!outcome.is_written && outcome.after.is_some_and(|after| after.findings.is_empty()));
    let refused = repair(disks, &[RepairClass::Space]).expect_err("extents are wrong as well");
    assert!(refused.to_string().contains("extents"), "{refused}");
    let watch = |_: &offshoot_btrfs::CheckEvent| ControlFlow::Break(());
    let refused = repair_btrfs(&disks.writable_devices(), &RepairOptions::default(), &watch);
    assert_eq!(refused.expect_err("it was ended").errno(), Errno::INTR);
    assert_eq!(undo(disks).expect_err("there was no repair").errno(), Errno::NOENT);
    assert!(bytes(disks) == before, "nothing was written");
}

/// A block of a subvolume is lost: what is below it is not known, so nothing is written.
#[test]
fn a_lost_block_of_files_refuses_the_repair() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mib_of_small().mkfs("-n 4096 -m single").make(&judges);
    let damaged = DamagedVolume::of(disks);
    damaged.edit(TreeId::EXTENT, is(ItemType::EXTENT_ITEM), remove);
    let is_node = |header: &BlockHeader| header.owner() == TreeId::FS && header.level == 0;
    spoil_blocks(&damaged, is_node);
    let before = bytes(damaged.disks());
    let refused = repair(damaged.disks(), &[]).expect_err("what is lost would count as free");
    assert!(refused.to_string().contains("extract"), "{refused}");
    assert!(bytes(damaged.disks()) == before, "nothing was written");
}

/// A confirmed repair leaves no trace, and cannot be undone.
#[test]
fn a_confirmed_repair_is_kept() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mib_of_small().make(&judges);
    repair(&disks, &RepairClass::ALL).expect("it is made anew");
    let options = RepairOptions::default();
    let watch = |_: &offshoot_btrfs::CheckEvent| ControlFlow::Continue(());
    offshoot_btrfs::confirm_repair(&disks.writable_devices(), &options, &watch)
        .expect("it is kept");
    assert_eq!(undo(&disks).expect_err("it was confirmed").errno(), Errno::NOENT);
    assert_eq!(progs_complaints(&disks), None);
    assert!(checked(&disks).findings.is_empty());
}
