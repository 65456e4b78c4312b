//! Quotas: their numbers, and damage to them.

use offshoot_btrfs::{BtrfsFindingCode, BtrfsFindingPlace};
use offshoot_btrfs_format::quota::{QgroupId, STATUS_INCONSISTENT, STATUS_RESCAN};
use offshoot_btrfs_format::space::{QgroupInfoItem, QgroupStatusItem};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::fill::handful;
use offshoot_testkit::btrfs::judges;
use zerocopy::FromBytes;

use crate::common::{DamagedVolume, ProgsVerdict, require_sound, show};
use crate::quota_volumes::{CONTAINED, FULL, HIGHEST, SUBVOLUME, full, made, simple};

#[test]
fn sound_full_quotas() {
    let Some(judges) = judges::require() else { return };
    for mkfs in [&["-n", "4k"][..], &["-n", "16k", "-O", "^skinny-metadata"]] {
        let disks = full(&judges, mkfs);
        require_sound(&disks);
        let mount = disks.mount("rw,noatime");
        handful::fill(mount.path());
        drop(mount);
        require_sound(&disks);
    }
}

#[test]
fn sound_simple_quotas() {
    let Some(judges) = judges::require() else { return };
    require_sound(&simple(&judges));
}

/// Changes the numbers of a group in a volume.
fn change_numbers(volume: &DamagedVolume, group: QgroupId) {
    let wanted = |key: Key, _: &[u8]| key == group.info_key();
    volume.edit(TreeId::QUOTA, wanted, |items, slot| {
        let (info, _) = QgroupInfoItem::mut_from_prefix(&mut items[slot].1).expect("whole numbers");
        info.rfer += 4096;
        info.excl += 4096;
    });
}

fn require_wrong_numbers(disks: Disks, group: QgroupId) {
    let volume = DamagedVolume::of(disks);
    change_numbers(&volume, group);
    let outcome = volume.require(BtrfsFindingCode::QuotaGroup, ProgsVerdict::Agrees);
    let place = BtrfsFindingPlace::Item { tree: TreeId::QUOTA, key: group.info_key() };
    let found: Vec<_> = outcome.findings.iter().map(|finding| finding.place).collect();
    assert_eq!(found, [place, place], "{}", show(&outcome));
}

#[test]
fn wrong_numbers_of_full_quotas() {
    let Some(judges) = judges::require() else { return };
    for group in [SUBVOLUME, HIGHEST] {
        require_wrong_numbers(full(&judges, &[]), group);
    }
}

#[test]
fn wrong_numbers_of_simple_quotas() {
    let Some(judges) = judges::require() else { return };
    for group in [SUBVOLUME, HIGHEST] {
        require_wrong_numbers(simple(&judges), group);
    }
}

/// Numbers that the kernel knows to be wrong are none of a check's business.
#[test]
fn numbers_that_are_said_to_be_wrong() {
    let Some(judges) = judges::require() else { return };
    let volume = DamagedVolume::of(full(&judges, &[]));
    change_numbers(&volume, SUBVOLUME);
    for flag in [STATUS_INCONSISTENT, STATUS_RESCAN] {
        let is_status = |key: Key, _: &[u8]| key.item_type == ItemType::QGROUP_STATUS;
        volume.edit(TreeId::QUOTA, is_status, |items, slot| {
            let status = QgroupStatusItem::mut_from_prefix(&mut items[slot].1).expect("a status").0;
            status.flags = (1 | flag).into();
        });
        let outcome = crate::common::checked(volume.disks());
        assert!(outcome.findings.is_empty(), "{}", show(&outcome));
    }
}

macro_rules! damaged_items {
    ($($name:ident: $progs:ident, $removed:expr, $place:expr;)*) => {$(
        #[test]
        fn $name() {
            let Some(judges) = judges::require() else { return };
            let volume = DamagedVolume::of(made(&judges, &[], FULL));
            let removed: Key = $removed;
            volume.edit(TreeId::QUOTA, |key, _| key == removed, |items, slot| {
                items.remove(slot);
            });
            let outcome = volume.require(BtrfsFindingCode::QuotaItem, ProgsVerdict::$progs);
            let found: Vec<_> = outcome.findings.iter().map(|finding| finding.place).collect();
            assert_eq!(found, [BtrfsFindingPlace::Item { tree: TreeId::QUOTA, key: $place }]);
        }
    )*};
}

damaged_items! {
    a_group_without_limits: SeesNothing, CONTAINED.limit_key(), CONTAINED.info_key();
    limits_without_a_group: SeesNothing, QgroupId(5).info_key(), QgroupId(5).limit_key();
    half_a_relation:
        SeesNothing, HIGHEST.relation_key(CONTAINED), CONTAINED.relation_key(HIGHEST);
}
