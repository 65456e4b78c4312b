//! Blocks of subvolumes that cannot be used, and are cut off.
//!
//! What is not in the lost blocks stays: each file whose inode is outside of their keys is there,
//! with its bytes, under its old path or in `lost+found`.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use offshoot_btrfs::{
    BtrfsFinding, BtrfsFindingCode as Code, BtrfsFindingPlace, CheckOutcome, CutOff, RepairOptions,
    RepairOutcome, SubvolumeName, repair_btrfs,
};
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::{BlockDevice, CrashDevice, CrashPlan};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::fill::subvolumes::{create, snapshot};
use offshoot_testkit::btrfs::fill::{handful, sync};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::run::run;
use offshoot_vfs::Errno;
use zerocopy::FromBytes;

use crate::common::{DamagedVolume, checked, progs_complaints, show};
use crate::cuts;
use crate::damage::header;
use crate::judged::{bytes, put_back, repair, repair_with, undo};
use crate::mutation::unpack;

/// Repairs the volume, and cuts off these subvolumes.
fn cut(disks: &Disks, ids: &[u64]) -> offshoot_vfs::Result<RepairOutcome> {
    let cut_off = ids.iter().map(|&id| SubvolumeName::Id(TreeId(id))).collect();
    repair_with(disks, &RepairOptions { cut_off, ..RepairOptions::default() })
}

/// The numbers of the trees of which a check has found blocks that cannot be used.
fn trees_with_lost_blocks(found: &CheckOutcome) -> Vec<u64> {
    let tree = |one: &BtrfsFinding| match one.place {
        BtrfsFindingPlace::Block { tree, .. } => Some(tree.0),
        _ => None,
    };
    found.findings.iter().filter_map(tree).collect()
}

/// The regular files below a directory, by inode: the path and the contents.
fn files_below(dir: &Path) -> BTreeMap<u64, (String, Vec<u8>)> {
    let (mut files, mut next) = (BTreeMap::new(), vec![dir.to_owned()]);
    let device = fs::metadata(dir).expect("it is there").dev();
    while let Some(dir_now) = next.pop() {
        for entry in fs::read_dir(&dir_now).expect("a directory is read") {
            let path = entry.expect("an entry").path();
            let meta = fs::symlink_metadata(&path).expect("an entry leads to something");
            if meta.is_dir() && meta.dev() == device {
                next.push(path);
            } else if meta.is_file() {
                let name = path.strip_prefix(dir).expect("below").display().to_string();
                files.insert(meta.ino(), (name, fs::read(&path).expect("a file is read")));
            }
        }
    }
    files
}

/// Spoils all copies of the block at an index of those that the volume had before the damage.
pub(crate) fn spoil(volume: &DamagedVolume, index: usize) {
    let block = &volume.target.blocks[index];
    for &(member, offset) in &block.places {
        volume.write(member, offset, &vec![0x5a; block.bytes.len()]);
    }
}

/// The blocks of a tree with a level that is wanted.
pub(crate) fn blocks_of(
    volume: &DamagedVolume,
    tree: u64,
    is_wanted: impl Fn(u8) -> bool,
) -> Vec<usize> {
    let is_it = |&index: &usize| {
        let header = header(&volume.target.blocks[index].bytes);
        header.owner() == TreeId(tree) && is_wanted(header.level)
    };
    (0..volume.target.blocks.len()).filter(is_it).collect()
}

/// Whether an inode has items in the ranges of lost keys.
fn is_lost(cut: &CutOff, ino: u64) -> bool {
    cut.blocks.iter().any(|block| {
        let last = block.behind.map_or(u64::MAX, |key| key.objectid);
        (block.first.objectid..=last).contains(&ino)
    })
}

/// Requires that both checks find nothing, and that each file of the top level that is outside of
/// the lost keys reads as before. Returns what is there now.
#[track_caller]
fn require_kept(
    disks: &Disks,
    outcome: &RepairOutcome,
    before: &BTreeMap<u64, (String, Vec<u8>)>,
) -> BTreeMap<u64, (String, Vec<u8>)> {
    let after = outcome.after.as_ref().expect("it was repaired");
    assert!(after.findings.is_empty(), "{}", show(after));
    assert!(checked(disks).findings.is_empty());
    assert_eq!(progs_complaints(disks), None);
    let [cut] = &outcome.cut_off[..] else { panic!("one subvolume: {:?}", outcome.cut_off) };
    let mount = disks.mount("rw,noatime");
    let now = files_below(mount.path());
    let mut kept = 0;
    for (ino, (path, bytes)) in before.iter().filter(|(ino, _)| !is_lost(cut, **ino)) {
        let (_, found) = now.get(ino).unwrap_or_else(|| panic!("{path} ({ino}) is gone"));
        assert!(found == bytes, "{path} reads otherwise");
        kept += 1;
    }
    println!("{kept} of {} files are kept, {} are there", before.len(), now.len());
    fs::write(mount.path().join("after the repair"), vec![7; 1 << 20]).expect("it is written");
    mount.sync();
    drop(mount);
    assert_eq!(progs_complaints(disks), None, "after the kernel wrote");
    now
}

/// Each block of the top level on its own: leaves, nodes, and the root.
#[track_caller]
fn require_each_block(mkfs: &'static str, every: usize) {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mib(256).mkfs(mkfs).fill(handful::fill).make(&judges);
    let before = files_below(disks.mount("ro,noatime").path());
    let damaged = DamagedVolume::of(disks);
    let disks = damaged.disks();
    let sound = bytes(disks);
    let all = blocks_of(&damaged, 5, |_| true);
    let nodes = blocks_of(&damaged, 5, |level| level > 0);
    let sample: Vec<_> = all.iter().step_by(every).chain(&nodes).copied().collect();
    println!(
        "{} blocks, {} of them nodes: {} are lost in turn",
        all.len(),
        nodes.len(),
        sample.len()
    );
    let mut cuts = 0;
    for index in sample {
        spoil(&damaged, index);
        let spoiled = bytes(disks);
        let found: Vec<_> = checked(disks).findings;
        if !found.iter().any(|one| one.code == Code::TreeBlock) {
            // An older block, that no tree leads to any more.
            put_back(disks, &sound);
            continue;
        }
        match repair(disks, &[]) {
            Ok(outcome) => assert!(outcome.after.is_none(), "nothing else is to be mended"),
            Err(refused) => assert!(refused.to_string().contains("--cut-off 5"), "{refused}"),
        }
        assert!(bytes(disks) == spoiled, "nothing was written");
        let outcome = cut(disks, &[5]).unwrap_or_else(|error| panic!("block {index}: {error}"));
        require_kept(disks, &outcome, &before);
        cuts += 1;
        put_back(disks, &sound);
    }
    assert!(cuts > 3, "{cuts} blocks were lost");
}

#[test]
fn each_block_of_small_nodes_can_be_lost() {
    require_each_block("-n 4096 -m single", 6);
}

#[test]
fn each_block_of_an_old_volume_can_be_lost() {
    require_each_block("-O ^no-holes,^extref,^free-space-tree,^skinny-metadata -n 4096", 9);
}

/// A subvolume with files, a subvolume in it, and snapshots of it.
fn fill_snapshots(root: &Path) {
    let at = |name: &str| root.join(name);
    create(&at("source"));
    fs::create_dir(at("source/dir")).expect("a directory");
    for number in 0..60 {
        let name = format!("source/dir/file-{number}");
        fs::write(at(&name), vec![number; 3000 + usize::from(number)]).expect("it is written");
    }
    create(&at("source/dir/nested"));
    fs::write(at("source/dir/nested/file"), b"in the nested subvolume").expect("it is written");
    sync(root);
    snapshot(&at("source"), &at("read-only"), true);
    snapshot(&at("source"), &at("changed"), false);
    fs::write(at("changed/dir/file-30"), b"changed").expect("it is written");
    fs::write(at("outside"), b"not in any of them").expect("it is written");
    sync(root);
}

fn with_snapshots(judges: &judges::Judges) -> DamagedVolume {
    DamagedVolume::of(Recipe::new().mib(256).mkfs("-n 4096").fill(fill_snapshots).make(judges))
}

/// The leaf of the source with an item that is wanted.
#[track_caller]
fn leaf_with(volume: &DamagedVolume, is_wanted: impl Fn(Key) -> bool) -> usize {
    let blocks = blocks_of(volume, 256, |level| level == 0);
    let has = |index: &usize| {
        unpack(&volume.target.blocks[*index].bytes).iter().any(|(key, _)| is_wanted(*key))
    };
    blocks.into_iter().rfind(has).expect("a leaf has such an item")
}

/// What is below the top level of a mount, but for a subvolume.
fn others(dir: &Path, without: &[&str]) -> BTreeMap<String, Vec<u8>> {
    let names = ["source", "read-only", "changed", "source/dir/nested"];
    let kept = names.iter().filter(|name| !without.contains(name));
    let mut files = BTreeMap::new();
    for name in kept {
        for (path, bytes) in files_below(&dir.join(name)).into_values() {
            files.insert(format!("{name}/{path}"), bytes);
        }
    }
    files.insert("outside".into(), fs::read(dir.join("outside")).expect("it is read"));
    files
}

/// A leaf that the source shares with its snapshots: all of them are to be named.
#[test]
fn snapshots_that_share_a_lost_block_are_all_named() {
    let Some(judges) = judges::require() else { return };
    let volume = with_snapshots(&judges);
    let disks = volume.disks();
    let before = others(disks.mount("ro,noatime").path(), &["source", "read-only", "changed"]);
    let extents = |key: Key| key.item_type == ItemType::EXTENT_DATA && key.objectid < 290;
    spoil(&volume, leaf_with(&volume, extents));
    let damaged = bytes(disks);
    let found = checked(disks);
    let trees = trees_with_lost_blocks(&found);
    assert!(trees.len() > 1, "{}", show(&found));
    let refused = cut(disks, &trees[..1]).expect_err("others have the block, too");
    for tree in &trees {
        assert!(refused.to_string().contains(&format!("--cut-off {tree}")), "{refused}");
    }
    let refused = cut(disks, &[5]).expect_err("the top level is whole");
    assert!(!refused.to_string().is_empty());
    assert_eq!(cut(disks, &[999]).expect_err("it is not there").errno(), Errno::NOENT);
    assert!(bytes(disks) == damaged, "nothing was written");

    let paths = [&b"source"[..], b"/read-only", b"changed/"];
    let cut_off: Vec<_> = paths.iter().map(|path| SubvolumeName::Path(path.to_vec())).collect();
    let cut_off = cut_off.into_iter().take(trees.len()).collect();
    let options = RepairOptions { cut_off, is_dry_run: true, ..RepairOptions::default() };
    let dry = repair_with(disks, &options).expect("it can be repaired");
    assert!(!dry.is_written && bytes(disks) == damaged, "nothing was written");
    let outcome = repair_with(disks, &RepairOptions { is_dry_run: false, ..options })
        .expect("it is repaired");
    assert_eq!(outcome.cut_off.len(), trees.len());
    for cut in dry.cut_off.iter().chain(&outcome.cut_off) {
        assert!(cut.block_count == 1 && !cut.is_emptied, "{cut:?}");
        let torn = cut.files.iter().filter(|file| file.path.is_some()).count();
        assert!(torn > 0, "{cut:?}");
    }
    let after = outcome.after.expect("it was repaired");
    assert!(after.findings.is_empty(), "{}", show(&after));
    assert_eq!(progs_complaints(disks), None);
    let mount = disks.mount("rw,noatime");
    let now = others(mount.path(), &["source", "read-only", "changed"]);
    assert_eq!(before.keys().collect::<Vec<_>>(), now.keys().collect::<Vec<_>>());
    assert!(before == now, "another file reads otherwise");
    run("btrfs", &["subvolume", "delete", &mount.path().join("read-only").display().to_string()]);
    run("btrfs", &["subvolume", "sync", &mount.path().display().to_string()]);
    drop(mount);
    assert_eq!(progs_complaints(disks), None, "after a snapshot was deleted");
}

/// The entry of a nested subvolume is in the lost leaf, or in the lost root: the subvolume is found
/// again.
#[test]
fn a_subvolume_in_a_lost_directory_is_kept() {
    let Some(judges) = judges::require() else { return };
    let is_entry = |key: Key| key.item_type == ItemType::DIR_INDEX && key.offset > 60;
    for is_root_lost in [false, true] {
        let volume = with_snapshots(&judges);
        let disks = volume.disks();
        let index = if is_root_lost {
            blocks_of(&volume, 256, |level| level > 0).pop().expect("a root")
        } else {
            leaf_with(&volume, is_entry)
        };
        spoil(&volume, index);
        let outcome = cut(disks, &trees_with_lost_blocks(&checked(disks))).expect("it is repaired");
        assert_eq!(outcome.cut_off.iter().any(|cut| cut.is_emptied), is_root_lost);
        let after = outcome.after.expect("it was repaired");
        assert!(after.findings.is_empty(), "{}", show(&after));
        assert_eq!(progs_complaints(disks), None);
        let mount = disks.mount("rw,noatime");
        let all = run("find", &[&mount.path().display().to_string(), "-name", "file"]);
        let path = all.lines().find(|path| !path.is_empty()).expect("the nested subvolume is kept");
        assert_eq!(fs::read(path).expect("it is read"), b"in the nested subvolume");
        assert_eq!(path.contains("lost+found"), is_root_lost, "{path}");
    }
}

/// Makes a subvolume one that was received.
pub(crate) fn receive(volume: &DamagedVolume, id: u64) {
    volume.edit(
        TreeId::ROOT,
        |key, _| key.item_type == ItemType::ROOT_ITEM && key.objectid == id,
        |items, slot| {
            let item = RootItem::mut_from_prefix(&mut items[slot].1).expect("a root item").0;
            item.received_uuid = [7; 16];
        },
    );
}

/// Requires that the kernel shows a subvolume as one that was not received.
#[track_caller]
pub(crate) fn require_not_received(disks: &Disks, name: &str) {
    let mount = disks.mount("ro,noatime");
    let path = mount.path().join(name).display().to_string();
    let shown = run("btrfs", &["subvolume", "show", &path]);
    let received = shown.lines().find(|line| line.contains("Received UUID"));
    assert!(received.is_some_and(|line| line.trim_end().ends_with('-')), "{shown}");
}

/// A subvolume that was received and lost something does not count as received any more.
#[test]
fn a_received_subvolume_forgets_where_it_came_from() {
    let Some(judges) = judges::require() else { return };
    let volume = with_snapshots(&judges);
    let disks = volume.disks();
    receive(&volume, 256);
    spoil(&volume, blocks_of(&volume, 256, |level| level > 0).pop().expect("a root"));
    let outcome = cut(disks, &[256]).expect("it is repaired");
    let after = outcome.after.expect("it was repaired");
    assert!(after.findings.is_empty(), "{}", show(&after));
    require_not_received(disks, "source");
}

/// Undoing brings the damaged volume back.
#[test]
fn what_was_cut_off_can_be_undone() {
    let Some(judges) = judges::require() else { return };
    let volume = with_snapshots(&judges);
    let disks = volume.disks();
    spoil(&volume, blocks_of(&volume, 256, |level| level > 0).pop().expect("a root"));
    let found = |disks: &Disks| -> Vec<_> {
        checked(disks).findings.iter().map(ToString::to_string).collect()
    };
    let before = found(disks);
    cut(disks, &[256]).expect("it is repaired");
    assert!(found(disks).is_empty());
    undo(disks).expect("it is undone");
    assert_eq!(found(disks), before);
    cut(disks, &[256]).expect("it is repaired again");
    assert!(found(disks).is_empty());
}

/// A power cut in the middle leaves the damaged volume or the repaired one.
#[test]
fn a_power_cut_leaves_the_damaged_or_the_repaired_volume() {
    let Some(judges) = judges::require() else { return };
    let volume = with_snapshots(&judges);
    spoil(&volume, blocks_of(&volume, 256, |level| level > 0).pop().expect("a root"));
    let base = volume.disks().devices();
    let wrong = cuts::found(&base);
    let crash: Vec<_> = CrashDevice::set(base).into_iter().map(Arc::new).collect();
    let devices: Vec<_> = crash.iter().map(|one| one.clone() as Arc<dyn BlockDevice>).collect();
    let cut_off = vec![SubvolumeName::Id(TreeId(256))];
    let options = RepairOptions { cut_off, ..RepairOptions::default() };
    assert!(repair_btrfs(&devices, &options, &cuts::watch).expect("it is repaired").is_written);
    let seed = 11;
    println!("seed {seed}");
    let plan = CrashPlan { seed, samples_per_epoch: 12, exhaustive_limit: 4, tears: true };
    let (mut old, mut new) = (0, 0);
    for state in crash[0].log().states(&plan) {
        let state = state.expect("memory is read");
        let what = format!("state {}, {}", state.number, state.description);
        let devices: Vec<_> =
            state.devices.into_iter().map(|one| Arc::new(one) as Arc<dyn BlockDevice>).collect();
        let now = cuts::found(&devices);
        assert!(now.is_empty() || now == wrong, "{what}: {now:?}");
        *(if now.is_empty() { &mut new } else { &mut old }) += 1;
    }
    assert!(old > 10 && new > 0, "{old} old states and {new} new ones");
}
