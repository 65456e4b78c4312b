//! Blocks that cannot be used of the checksum tree, the quota tree and the tree for data on its
//! way.

use offshoot_btrfs::{
    BtrfsFinding, BtrfsFindingCode as Code, BtrfsFindingPlace, RepairOptions, SubvolumeName,
};
use offshoot_btrfs_format::TreeId;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::fill::{self, handful};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::run::run;

use crate::common::{DamagedVolume, checked, progs_complaints, show};
use crate::cut_off::{blocks_of, spoil};
use crate::judged::{repair, repair_with, require_repaired, shown_by_kernel, undo};

fn cutting(tree: TreeId) -> RepairOptions {
    RepairOptions { cut_off: vec![SubvolumeName::Id(tree)], ..RepairOptions::default() }
}

/// A volume with small nodes, so that its checksum tree has several leaves.
fn with_many_checksums() -> Recipe {
    Recipe::new().mib(256).mkfs("-n 4096 -m dup -d single").fill(|dir| {
        handful::fill(dir);
        for number in 0..8 {
            let bytes = vec![number; 1 << 20];
            std::fs::write(dir.join(format!("large {number}")), bytes).expect("there is room");
        }
    })
}

/// The files whose data has no checksums.
fn without_checksums(findings: &[BtrfsFinding]) -> Vec<Vec<u8>> {
    for finding in findings {
        assert_eq!(finding.code, Code::MissingChecksum, "{finding}");
    }
    let mut paths: Vec<_> = findings.iter().filter_map(|finding| finding.path.clone()).collect();
    paths.sort();
    paths.dedup();
    paths
}

/// A leaf of checksums, or the whole tree, is cut off. The files without checksums are named, and
/// their data is accepted as it is.
#[test]
fn checksums_of_lost_blocks_are_given_up() {
    let Some(judges) = judges::require() else { return };
    for is_all in [false, true] {
        let disks = with_many_checksums().make(&judges);
        let before = shown_by_kernel(&disks);
        let volume = DamagedVolume::of(disks);
        let disks = volume.disks();
        let leaves = blocks_of(&volume, TreeId::CSUM.0, |level| level == 0);
        assert!(leaves.len() > 2, "{} leaves", leaves.len());
        let lost = if is_all { blocks_of(&volume, TreeId::CSUM.0, |_| true) } else { leaves };
        for &index in if is_all { &lost[..] } else { &lost[1..2] } {
            spoil(&volume, index);
        }
        let unchosen = repair(disks, &[]).expect("nothing is chosen");
        assert!(!unchosen.is_written);
        let outcome = repair_with(disks, &cutting(TreeId::CSUM)).expect("it is repaired");
        let [cut] = &outcome.cut_off[..] else { panic!("one tree: {:?}", outcome.cut_off) };
        assert_eq!((cut.subvolume, cut.is_emptied), (TreeId::CSUM, is_all));
        let rest = outcome.after.expect("it was repaired").findings;
        let paths = without_checksums(&rest);
        assert!(!paths.is_empty(), "some data has no checksum");
        undo(disks).expect("it is undone");
        repair_with(disks, &cutting(TreeId::CSUM)).expect("it is repaired again");
        let accepted = RepairOptions { accepted: paths, ..RepairOptions::default() };
        repair_with(disks, &accepted).expect("the data is accepted");
        let found = checked(disks);
        assert!(found.findings.is_empty(), "{}", show(&found));
        assert_eq!(progs_complaints(disks), None);
        assert_eq!(shown_by_kernel(disks), before);
    }
}

/// A volume with quotas and limits.
fn with_quotas(judges: &judges::Judges, mkfs: &'static str) -> Disks {
    let disks = Recipe::new().mib(256).mkfs(mkfs).make(judges);
    let mount = disks.mount("rw,noatime");
    run("btrfs", &["quota".as_ref(), "enable".as_ref(), mount.path().as_os_str()]);
    for number in 0..60 {
        let subvolume = mount.path().join(format!("subvolume {number}"));
        fill::subvolumes::create(&subvolume);
        std::fs::write(subvolume.join("file"), vec![7; 20_000]).expect("there is room");
    }
    mount.sync();
    run("btrfs", &["quota".as_ref(), "rescan".as_ref(), "-w".as_ref(), mount.path().as_os_str()]);
    drop(mount);
    disks
}

/// Leaves of the quota tree are cut off: its groups are made anew and counted. Without the first
/// leaf nothing says which quotas they were, and they are off.
#[test]
fn quota_groups_of_lost_blocks_are_made_anew() {
    let Some(judges) = judges::require() else { return };
    for is_first in [false, true] {
        let disks = with_quotas(&judges, "-n 4096 -m dup");
        let before = shown_by_kernel(&disks);
        let volume = DamagedVolume::of(disks);
        let disks = volume.disks();
        let leaves = blocks_of(&volume, TreeId::QUOTA.0, |level| level == 0);
        assert!(leaves.len() > 2, "{} leaves", leaves.len());
        let first = leaves.iter().copied().find(|&index| {
            let key = volume.target.blocks[index].bytes[101..118].to_vec();
            key[..8] == [0; 8] && key[8] == 240
        });
        let first = first.expect("the leaf with the status");
        let other = leaves.iter().copied().rfind(|&index| index != first);
        spoil(&volume, if is_first { first } else { other.expect("there are several") });
        let unchosen = repair(disks, &[]).expect("nothing is chosen");
        assert!(!unchosen.is_written);
        let outcome = repair_with(disks, &cutting(TreeId::QUOTA)).expect("it is repaired");
        let after = outcome.after.as_ref().expect("it was repaired");
        assert!(after.findings.is_empty(), "{}", show(after));
        assert_eq!(outcome.cut_off[0].is_emptied, is_first);
        assert_eq!(progs_complaints(disks), None);
        assert_eq!(shown_by_kernel(disks), before);
        let mount = disks.mount("rw,noatime");
        std::fs::write(mount.path().join("more"), vec![7; 100_000]).expect("there is room");
        drop(mount);
        assert!(checked(disks).findings.is_empty());
        assert_eq!(progs_complaints(disks), None, "after the kernel wrote");
    }
}

/// The tree for data on its way has nothing in it that would be lost.
#[test]
fn the_tree_for_relocated_data_is_made_anew() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mib(256).fill(handful::fill).make(&judges);
    let before = shown_by_kernel(&disks);
    let volume = DamagedVolume::of(disks);
    let tree = TreeId::DATA_RELOC;
    for index in blocks_of(&volume, tree.0, |_| true) {
        spoil(&volume, index);
    }
    let is_it = |one: &BtrfsFinding| match one.place {
        BtrfsFindingPlace::Block { tree: of, .. } => of == tree,
        _ => false,
    };
    assert!(checked(volume.disks()).findings.iter().any(is_it));
    require_repaired(volume.disks(), &[], &before);
    let mount = volume.disks().mount("rw,noatime");
    let balance = ["balance".as_ref(), "start".as_ref(), "--full-balance".as_ref()];
    run("btrfs", &[&balance[..], &[mount.path().as_os_str()]].concat());
    drop(mount);
    assert_eq!(progs_complaints(volume.disks()), None, "after a balance");
}
