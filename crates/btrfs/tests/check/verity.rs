//! Damage to the items of fs-verity, which the tests make by hand: few kernels have it.

use offshoot_btrfs::BtrfsFindingCode as Code;
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::recipe::Recipe;

use crate::common::{DamagedVolume, EditedItems, ProgsVerdict};
use crate::inodes::{DamagedInodes, fill, inode_key, inode_of, insert};

/// The items of fs-verity of a file of 20,000 bytes: five blocks, so one block of digests.
fn verity_items(ino: u64) -> EditedItems {
    let mut descriptor = vec![0; 256];
    // Version 1, SHA-256, blocks of 4 KiB.
    descriptor[..3].copy_from_slice(&[1, 1, 12]);
    descriptor[8..16].copy_from_slice(&20_000u64.to_le_bytes());
    let mut header = vec![0; 25];
    header[..8].copy_from_slice(&256u64.to_le_bytes());
    let item = |item_type, offset, data| (Key::new(ino, item_type, offset), data);
    vec![
        item(ItemType::VERITY_DESC_ITEM, 0, header),
        item(ItemType::VERITY_DESC_ITEM, 1, descriptor),
        item(ItemType::VERITY_MERKLE_ITEM, 0, vec![0xaa; 2048]),
        item(ItemType::VERITY_MERKLE_ITEM, 2048, vec![0xbb; 2048]),
    ]
}

#[test]
fn items_of_verity() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mib(256).fill(fill).make(&judges);
    let judge = |change: &dyn Fn(&mut EditedItems, &mut InodeItem), is_sound: bool| {
        let damaged = DamagedInodes { volume: DamagedVolume::of(disks.copy(&judges)) };
        let ino = damaged.ino("file");
        damaged.edit(inode_key(ino), |items, slot| {
            let mut new = verity_items(ino);
            let inode = inode_of(items, slot);
            inode.flags = (inode.flags.get() | inode_flags::VERITY).into();
            change(&mut new, inode);
            insert(items, new);
        });
        let expected = [(Code::Verity, ino)];
        damaged.require_only(if is_sound { &[] } else { &expected }, ProgsVerdict::SeesNothing);
    };
    judge(&|_, _| {}, true);
    for missing in 0..4 {
        judge(
            &|items, _| {
                items.remove(missing);
            },
            false,
        );
    }
    judge(&|items, _| items.clear(), false);
    judge(&|items, _| items[1].1[9] ^= 1, false);
    judge(&|items, _| items[1].1.truncate(200), false);
    judge(&|items, _| items[3].0.offset += 1, false);
    judge(&|_, inode| inode.flags = 0.into(), false);
    // A crash while it was enabled.
    judge(
        &|items, inode| {
            inode.flags = 0.into();
            let orphan = 0u64.wrapping_sub(5);
            let ino = items[0].0.objectid;
            items.push((Key::new(orphan, ItemType::ORPHAN_ITEM, ino), Vec::new()));
            items.remove(1);
        },
        true,
    );
}
