//! Numbers and items of quotas are made anew. The kernel shows the numbers that it had counted
//! itself, and counts no others when it rescans.

use offshoot_btrfs::{BtrfsFindingCode as Code, RepairClass};
use offshoot_btrfs_format::quota::{
    QgroupId, STATUS_INCONSISTENT, STATUS_ON, STATUS_RESCAN, STATUS_SIMPLE,
};
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::space::{QgroupInfoItem, QgroupStatusItem};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::run::command;
use zerocopy::FromBytes;

use crate::common::{DamagedVolume, checked, progs_complaints, show};
use crate::judged::{repair, undo};
use crate::quota_volumes::{
    CONTAINED, FULL, HIGHEST, SIMPLE, SUBVOLUME, full, made, shell, simple,
};

/// What the kernel says of all groups: before it counts, and after it has counted anew if it can.
/// The first line tells what it warns of.
fn groups_by_kernel(disks: &Disks, is_rescanned: bool) -> String {
    let mount = disks.mount("rw,noatime");
    let path = mount.path().to_str().expect("a plain path").to_owned();
    let btrfs = |args: &[&str]| command("btrfs").args(args).arg(&path).output().expect("it runs");
    if is_rescanned {
        let output = btrfs(&["quota", "rescan", "-w"]);
        assert!(output.status.success(), "{output:?}");
    }
    let output = btrfs(&["qgroup", "show", "--raw", "-pcre"]);
    assert!(output.status.success(), "{output:?}");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!("warnings: {}\n{}", text(&output.stderr), text(&output.stdout))
}

/// The status of quotas.
fn status(volume: &DamagedVolume) -> QgroupStatusItem {
    let leaves = DamagedVolume::of(volume.disks().copy(&judges::require().expect("judges")));
    let items = leaves.leaves(TreeId::QUOTA).into_iter().flatten();
    let mut items = items.filter(|(key, _)| key.item_type == ItemType::QGROUP_STATUS);
    let (_, data) = items.next_back().expect("a status");
    QgroupStatusItem::read_from_prefix(&data).expect("a whole one").0
}

/// Damage of quotas is mended, undone, mended again, and the kernel agrees.
fn require_counted(disks: Disks, damage: impl FnOnce(&DamagedVolume), codes: &[Code]) {
    let before = groups_by_kernel(&disks, false);
    let volume = DamagedVolume::of(disks);
    damage(&volume);
    let found = checked(volume.disks());
    for code in codes {
        assert!(found.findings.iter().any(|one| one.code == *code), "{code:?}: {}", show(&found));
    }
    let chosen: &[RepairClass] = if codes.is_empty() { &[RepairClass::Quotas] } else { &[] };
    let outcome = repair(volume.disks(), chosen).expect("it is mended");
    let after = outcome.after.expect("there was something to mend");
    assert!(after.findings.is_empty(), "{}", show(&after));
    undo(volume.disks()).expect("it is undone");
    let again: Vec<_> = checked(volume.disks()).findings;
    assert_eq!(again, found.findings, "what was wrong before");
    repair(volume.disks(), chosen).expect("it is mended again");
    assert_eq!(progs_complaints(volume.disks()), None);
    let status = status(&volume);
    assert!(
        status.has(STATUS_ON) && !status.has(STATUS_INCONSISTENT) && !status.has(STATUS_RESCAN)
    );
    assert_eq!(groups_by_kernel(volume.disks(), false), before, "as the kernel had counted");
    if !status.has(STATUS_SIMPLE) {
        assert_eq!(groups_by_kernel(volume.disks(), true), before, "as it counts anew");
    }
    assert_eq!(progs_complaints(volume.disks()), None, "after the kernel wrote");
}

/// Changes the numbers of some groups.
fn change_numbers(volume: &DamagedVolume) {
    for group in [SUBVOLUME, HIGHEST] {
        volume.edit(
            TreeId::QUOTA,
            |key, _| key == group.info_key(),
            |items, slot| {
                let (info, _) =
                    QgroupInfoItem::mut_from_prefix(&mut items[slot].1).expect("numbers");
                info.rfer += 8192;
                info.excl -= 4096;
            },
        );
    }
}

fn change_status(volume: &DamagedVolume, change: impl FnOnce(&mut QgroupStatusItem)) {
    let is_status = |key: Key, _: &[u8]| key.item_type == ItemType::QGROUP_STATUS;
    volume.edit(TreeId::QUOTA, is_status, |items, slot| {
        change(QgroupStatusItem::mut_from_prefix(&mut items[slot].1).expect("a status").0);
    });
}

#[test]
fn numbers_of_full_quotas_are_counted_anew() {
    let Some(judges) = judges::require() else { return };
    require_counted(full(&judges, &["-n", "4k"]), change_numbers, &[Code::QuotaGroup]);
}

#[test]
fn numbers_of_simple_quotas_are_counted_anew() {
    let Some(judges) = judges::require() else { return };
    require_counted(simple(&judges), change_numbers, &[Code::QuotaGroup]);
}

/// Numbers that the status says are wrong, or are of an earlier transaction, are counted when that
/// is asked for, and the status says then that they are right.
#[test]
fn numbers_that_are_said_to_be_wrong_are_counted_anew() {
    let Some(judges) = judges::require() else { return };
    let disks = full(&judges, &[]);
    for flags in [STATUS_INCONSISTENT, STATUS_RESCAN, 0] {
        let damage = |volume: &DamagedVolume| {
            change_numbers(volume);
            change_status(volume, |status| {
                status.flags = (STATUS_ON | flags).into();
                status.rescan = 300.into();
                if flags == 0 {
                    status.generation -= 1;
                }
            });
        };
        require_counted(disks.copy(&judges), damage, &[]);
    }
}

/// Repairs of other classes do not make the status say more than it said.
#[test]
fn other_repairs_leave_numbers_that_are_said_to_be_wrong() {
    let Some(judges) = judges::require() else { return };
    let volume = DamagedVolume::of(full(&judges, &[]));
    change_numbers(&volume);
    change_status(&volume, |status| status.generation -= 1);
    repair(volume.disks(), &[RepairClass::Extents]).expect("it is made anew");
    let shown = groups_by_kernel(volume.disks(), false);
    assert!(shown.contains("inconsistent"), "{shown}");
}

/// Of a subvolume and of a group, one of the two items is missing; a relation is missing in one
/// direction, and another one leads to a group that is not there.
fn remove_items(volume: &DamagedVolume) {
    let removed = [
        SUBVOLUME.info_key(),
        CONTAINED.limit_key(),
        QgroupId(5).info_key(),
        HIGHEST.relation_key(CONTAINED),
    ];
    let nowhere = QgroupId((3 << 48) + 9);
    for key in removed {
        volume.edit(
            TreeId::QUOTA,
            |one, _| one == key,
            |items, slot| {
                items.remove(slot);
                let stale = HIGHEST.relation_key(nowhere);
                if items.last().is_some_and(|(last, _)| *last < stale) && key.offset == 5 {
                    items.push((stale, Vec::new()));
                }
            },
        );
    }
}

#[test]
fn items_of_full_quotas_are_mended_from_each_other() {
    let Some(judges) = judges::require() else { return };
    require_counted(full(&judges, &[]), remove_items, &[Code::QuotaItem]);
}

#[test]
fn items_of_simple_quotas_are_mended_from_each_other() {
    let Some(judges) = judges::require() else { return };
    require_counted(simple(&judges), remove_items, &[Code::QuotaItem]);
}

/// Extents that are made anew without their owner count for no subvolume with simple quotas, and
/// the numbers say so.
#[test]
fn extents_without_an_owner_count_for_none() {
    let Some(judges) = judges::require() else { return };
    let volume = DamagedVolume::of(simple(&judges));
    let is_extent = |key: Key, _: &[u8]| key.item_type == ItemType::EXTENT_ITEM;
    volume.edit(TreeId::EXTENT, is_extent, |items, _| {
        items.retain(|(key, _)| key.item_type != ItemType::EXTENT_ITEM);
    });
    let outcome = repair(volume.disks(), &[]).expect("it is mended");
    let after = outcome.after.expect("there was something to mend");
    assert!(after.findings.is_empty(), "{}", show(&after));
    assert_eq!(progs_complaints(volume.disks()), None);
}

/// A leaf that snapshots share is mended in each of them, and then each has its own. The numbers
/// say so.
#[test]
fn mended_files_count_for_their_subvolumes() {
    let Some(judges) = judges::require() else { return };
    let fill = "btrfs subvolume create a; for i in $(seq 300); do echo $i > a/$i; done; sync
        btrfs subvolume snapshot a b; sync";
    for quotas in [FULL, SIMPLE] {
        let disks = made(&judges, &["-n", "4k"], &format!("{quotas}{fill}"));
        let before = groups_by_kernel(&disks, false);
        let volume = DamagedVolume::of(disks);
        let is_entry = |key: Key, _: &[u8]| key.item_type == ItemType::DIR_INDEX;
        volume.edit(TreeId(SUBVOLUME.0), is_entry, |items, slot| {
            let first = items[slot.max(1)].0;
            items.retain(|(key, _)| key.item_type != ItemType::DIR_INDEX || *key < first);
        });
        let outcome = repair(volume.disks(), &[]).expect("it is mended");
        let (found, classes) = (show(&outcome.before), &outcome.classes);
        assert!(classes.contains(&RepairClass::Files), "{classes:?}: {found}");
        let after = outcome.after.expect("there was something to mend");
        assert!(after.findings.is_empty(), "{}", show(&after));
        assert_eq!(progs_complaints(volume.disks()), None);
        assert_ne!(groups_by_kernel(volume.disks(), false), before);
    }
}

/// Numbers of full quotas are not known while a deleted subvolume is dropped: the status says so,
/// and the kernel counts them when it has dropped the subvolume.
#[test]
fn numbers_of_a_volume_that_drops_a_subvolume() {
    let Some(judges) = judges::require() else { return };
    // How far the kernel comes depends on the machine. Both states are sound.
    let seen = (0..4).find(|_| drop_half_way(&judges));
    println!("the volume that was dropped half-way: {seen:?}");
}

/// Returns whether the subvolume was dropped half-way.
fn drop_half_way(judges: &Judges) -> bool {
    let fill = "btrfs subvolume create a; i=0
        while [ $i -lt 12000 ]; do : > a/a-file-with-a-long-name-that-takes-some-room-$i
            i=$((i + 1)); done
        btrfs subvolume snapshot a b; for i in $(seq 1 60 12000); do
            echo changed > b/a-file-with-a-long-name-that-takes-some-room-$i; done
        sync; btrfs subvolume delete -c a";
    let disks = made(judges, &["-n", "4k"], &format!("{FULL}{fill}"));
    let volume = DamagedVolume::of(disks);
    let is_dropped = |(key, data): &(Key, Vec<u8>)| {
        key.item_type == ItemType::ROOT_ITEM
            && RootItem::parse(data).is_ok_and(|item| item.drop_progress.get() != Key::MIN)
    };
    let is_half_dropped = volume.leaves(TreeId::ROOT).iter().flatten().any(is_dropped);
    let outcome = repair(volume.disks(), &[RepairClass::Quotas]).expect("it is made anew");
    let after = outcome.after.expect("it was asked for");
    assert!(after.findings.is_empty(), "{}", show(&after));
    assert_eq!(status(&volume).has(STATUS_INCONSISTENT), is_half_dropped);
    assert_eq!(progs_complaints(volume.disks()), None);
    let mount = volume.disks().mount("rw,noatime");
    shell(mount.path(), "btrfs subvolume sync .; btrfs quota rescan -w .; sync");
    drop(mount);
    assert_eq!(progs_complaints(volume.disks()), None);
    assert!(checked(volume.disks()).findings.is_empty());
    is_half_dropped
}
