//! Quotas: their numbers, and damage to them.

use std::path::Path;

use offshoot_btrfs::{BtrfsFindingCode, BtrfsFindingPlace};
use offshoot_btrfs_format::quota::{QgroupId, STATUS_INCONSISTENT, STATUS_RESCAN};
use offshoot_btrfs_format::space::{QgroupInfoItem, QgroupStatusItem};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::fill::handful;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::run::run;
use zerocopy::FromBytes;

use crate::common::{DamagedVolume, ProgsVerdict, require_sound, show};

/// Groups of three levels: 2/1 contains 1/1 and 1/2, which contain some subvolumes.
const FULL: &str = "
    btrfs quota enable .; btrfs quota rescan -w .
    for g in 1/1 1/2 2/1; do btrfs qgroup create $g .; done
    btrfs qgroup assign --no-rescan 1/1 2/1 .; btrfs qgroup assign --no-rescan 1/2 2/1 .
";

/// The same with simple quotas.
const SIMPLE: &str = "
    echo before > before; sync; btrfs quota enable --simple .
    for g in 1/1 1/2 2/1; do btrfs qgroup create $g .; done
    btrfs qgroup assign --no-rescan 1/1 2/1 .; btrfs qgroup assign --no-rescan 1/2 2/1 .
";

/// Subvolumes with shared extents and blocks, and one that was deleted.
const FILL: &str = "
    for v in a b c d; do
        btrfs subvolume create $v
        for i in $(seq 300); do echo $v $i > $v/$i; done
        head -c 3000000 /dev/urandom > $v/data
    done
    cp --reflink=always a/data b/shared
    for i in 1 2 3; do
        btrfs subvolume snapshot a s$i; head -c 500000 /dev/urandom > a/new-$i
        rm -f a/5$i; dd if=/dev/zero of=a/data bs=4096 count=10 seek=$i conv=notrunc status=none
    done
    btrfs subvolume delete -c d; btrfs subvolume delete -c s2
    btrfs subvolume sync .; sync
";

const ASSIGN: &str = "
    for p in 'a 1/1' 'b 1/1' 's1 1/2'; do
        set -- $p
        btrfs qgroup assign --no-rescan 0/$(btrfs inspect-internal rootid $1) $2 .
    done
    # Simple quotas have no rescan.
    btrfs quota rescan -w . || true; sync
";

fn shell(dir: &Path, script: &str) {
    run("sh", &["-ec", &format!("cd '{}'; {script}", dir.display())]);
}

fn made(judges: &Judges, mkfs: &[&str], script: &str) -> Disks {
    let disks = Disks::create(judges, 1, 512);
    disks.mkfs_and_settle(mkfs);
    let mount = disks.mount("rw,noatime");
    shell(mount.path(), script);
    mount.sync();
    drop(mount);
    disks
}

fn full(judges: &Judges, mkfs: &[&str]) -> Disks {
    made(judges, mkfs, &format!("{FULL}{FILL}{ASSIGN}"))
}

fn simple(judges: &Judges) -> Disks {
    made(judges, &["-n", "4k"], &format!("{SIMPLE}{FILL}{ASSIGN}"))
}

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

const SUBVOLUME: QgroupId = QgroupId(256);
const HIGHEST: QgroupId = QgroupId((2 << 48) + 1);

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

const CONTAINED: QgroupId = QgroupId((1 << 48) + 1);

damaged_items! {
    a_group_without_limits: SeesNothing, CONTAINED.limit_key(), CONTAINED.info_key();
    limits_without_a_group: SeesNothing, QgroupId(5).info_key(), QgroupId(5).limit_key();
    half_a_relation:
        SeesNothing, HIGHEST.relation_key(CONTAINED), CONTAINED.relation_key(HIGHEST);
}
