//! Malformed leaves, extents that are damaged, and inodes that contradict themselves.

use std::fs;
use std::path::Path;

use offshoot_btrfs::{
    BtrfsFindingCode as Code, ItemChange, RepairClass, RepairOptions, RepairOutcome, SubvolumeName,
};
use offshoot_btrfs_format::block::{HEADER_SIZE, LeafItem};
use offshoot_btrfs_format::edit::ITEM_SIZE;
use offshoot_btrfs_format::file_extent::{FileExtentHead, FileExtentTail};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_testkit::btrfs::fill::sync;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::run::run;
use zerocopy::FromBytes;

use crate::common::{EditedItems, checked, progs_complaints, show};
use crate::cut_off::{receive, require_not_received};
use crate::damage::header;
use crate::judged::{bytes, repair, repair_with, undo};
use crate::overlaps::{OverlapVolume, fill, options, require_same, shown};

fn is_extent(key: &Key, ino: u64) -> bool {
    key.objectid == ino && key.item_type == ItemType::EXTENT_DATA
}

fn inode(items: &mut EditedItems, ino: u64) -> &mut InodeItem {
    let key = Key::new(ino, ItemType::INODE_ITEM, 0);
    let item = items.iter_mut().find(|(one, _)| *one == key).expect("an inode");
    InodeItem::mut_from_bytes(&mut item.1).expect("an inode")
}

/// The head and the tail of the first extent of a file.
fn extent(items: &mut EditedItems, ino: u64) -> (&mut FileExtentHead, &mut FileExtentTail) {
    let (_, data) = items.iter_mut().find(|(key, _)| is_extent(key, ino)).expect("an extent");
    let (head, rest) = FileExtentHead::mut_from_prefix(data).expect("an extent");
    (head, FileExtentTail::mut_from_bytes(rest).expect("an extent on disk"))
}

fn volume(judges: &Judges) -> OverlapVolume {
    OverlapVolume::new(judges, "", fill)
}

/// The changes of the file with this number.
fn changes(outcome: &RepairOutcome, ino: u64) -> Vec<ItemChange> {
    let files = outcome.overlaps.files.iter().filter(|file| file.ino == ino);
    files.flat_map(|file| file.changes.clone()).collect()
}

/// Extents that no data can be in are dropped, and the file has zeros there.
#[test]
fn extents_that_cannot_be_right_are_dropped() {
    let Some(judges) = judges::require() else { return };
    let made = OverlapVolume::new(&judges, "-O ^no-holes", fill);
    let (ino, len) = (made.target, made.before["target"].len());
    let damages: [fn(&mut FileExtentHead, &mut FileExtentTail); 4] = [
        |_, tail| tail.offset += 4096 * 3,
        |_, tail| tail.num_bytes += 77,
        |_, tail| tail.num_bytes = 0.into(),
        |head, _| head.compression = 9,
    ];
    for damage in damages {
        made.edit(ino, |items| {
            let (head, tail) = extent(items, ino);
            damage(head, tail);
        });
        let outcome = made.require("target", &vec![0; len]);
        let changes = changes(&outcome, ino);
        assert!(matches!(&changes[..], [ItemChange::Dropped { .. }]), "{changes:?}");
    }
}

/// Numbers that follow from the rest of the item are corrected, and nothing is lost.
#[test]
fn numbers_of_extents_are_corrected() {
    let Some(judges) = judges::require() else { return };
    let made = volume(&judges);
    let ino = made.target;
    let damages: [fn(&mut FileExtentHead); 2] =
        [|head| head.generation = (1 << 45).into(), |head| head.ram_bytes = 4096.into()];
    for damage in damages {
        made.edit(ino, |items| damage(extent(items, ino).0));
        let outcome = made.require("target", &made.before["target"]);
        let changes = changes(&outcome, ino);
        assert!(matches!(&changes[..], [ItemChange::Corrected { .. }]), "{changes:?}");
    }
}

/// A compressed file says that it has no checksums, and has them.
#[test]
fn compressed_data_has_checksums() {
    let Some(judges) = judges::require() else { return };
    let made = volume(&judges);
    let ino = made.ino("compressed");
    let unsummed = inode_flags::NODATASUM | inode_flags::NODATACOW;
    made.edit(ino, |items| inode(items, ino).flags |= unsummed);
    let outcome = made.require("compressed", &made.before["compressed"]);
    let changes = changes(&outcome, ino);
    assert!(matches!(&changes[..], [ItemChange::Corrected { .. }]), "{changes:?}");
}

/// A special file has no extents.
#[test]
fn extents_of_what_is_no_file_are_dropped() {
    let Some(judges) = judges::require() else { return };
    let made = OverlapVolume::new(&judges, "", |root| {
        run("mkfifo", &[root.join("fifo")]);
        fill(root);
    });
    let fifo = made.ino("fifo");
    let item = (Key::new(fifo, ItemType::EXTENT_DATA, 0), made.donors[0].slice(0, 4));
    made.edit(fifo, |items| {
        items.push(item);
        items.sort_by_key(|(key, _)| *key);
    });
    let outcome = made.require("target", &made.before["target"]);
    assert!(matches!(&changes(&outcome, fifo)[..], [ItemChange::Dropped { .. }]));
    // As much speaks for a file as for a fifo, if nothing leads to it.
    let target = made.target;
    made.edit(fifo, |_| {});
    made.edit(target, |items| {
        inode(items, target).mode = 0o010_644.into();
        inode(items, target).nlink = 0.into();
        items.retain(|(key, _)| *key != Key::new(target, ItemType::INODE_REF, 256));
        items.retain(|(_, data)| !data.ends_with(b"target"));
    });
    let outcome = repair_with(made.disks(), &options(false)).expect("the rest is mended");
    let after = outcome.after.expect("something was mended");
    let is_left = after.findings.iter().any(|one| one.code == Code::FileExtent);
    assert!(is_left && outcome.overlaps.files.is_empty(), "{}", show(&after));
}

/// Kinds of files follow from what leads to them and from their items, without any choice.
#[test]
fn kinds_of_files_are_mended() {
    let Some(judges) = judges::require() else { return };
    let made = OverlapVolume::new(&judges, "", |root| {
        std::os::unix::fs::symlink("target", root.join("symlink")).expect("a link");
        fill(root);
        fs::create_dir(root.join("directory")).expect("a directory");
        fs::write(root.join("directory/file"), b"contents").expect("a file");
        sync(root);
    });
    let (target, dir, link) = (made.target, made.ino("directory"), made.ino("symlink"));
    let require = |code: Code| {
        let found = checked(made.disks());
        assert!(found.findings.iter().any(|one| one.code == code), "{}", show(&found));
        let outcome = repair(made.disks(), &[]).expect("it is mended");
        let after = outcome.after.as_ref().expect("there was something to mend");
        assert!(after.findings.is_empty() && outcome.overlaps.files.is_empty(), "{}", show(after));
        assert_eq!(progs_complaints(made.disks()), None);
        require_same(&shown(made.disks()), &made.before);
        let mount = made.disks().mount("ro");
        let target = fs::read_link(mount.path().join("symlink")).expect("a link");
        assert_eq!(target, Path::new("target"));
        drop(mount);
        undo(made.disks()).expect("it is undone");
    };
    let restore = |ino: u64| made.edit(ino, |_| {});
    made.edit(target, |items| inode(items, target).mode = 0o644.into());
    require(Code::Inode);
    // Its extents and its entry say so.
    made.edit(target, |items| inode(items, target).mode = 0o010_644.into());
    require(Code::FileExtent);
    restore(target);
    made.edit(dir, |items| inode(items, dir).mode = 0o100_755.into());
    require(Code::Inode);
    restore(dir);
    made.edit(link, |items| inode(items, link).flags |= inode_flags::IMMUTABLE);
    require(Code::Inode);
    restore(link);
    made.edit(256, |items| inode(items, 256).mode = 0o100_755.into());
    require(Code::Inode);
    made.edit(256, |items| {
        let name = Key::new(256, ItemType::INODE_REF, 256);
        let (_, data) = items.iter_mut().find(|(key, _)| *key == name).expect("a name");
        *data.last_mut().expect("a name") = b'-';
    });
    require(Code::Inode);
}

/// Changes the bytes of the leaf with the inode of a file, with a right checksum.
fn edit_bytes(made: &OverlapVolume, ino: u64, change: impl FnOnce(&mut [u8], usize)) {
    let key = Key::new(ino, ItemType::INODE_ITEM, 0);
    let slot_of = |bytes: &[u8]| {
        let items = offshoot_btrfs_format::block::items(bytes).expect("a leaf");
        items.iter().position(|item| item.key.get() == key)
    };
    let found = made.volume.target.blocks.iter().find_map(|block| {
        let is_leaf = header(&block.bytes).level == 0 && header(&block.bytes).owner().0 == 5;
        let slot = is_leaf.then(|| slot_of(&block.bytes)).flatten()?;
        Some((block, slot))
    });
    let (block, slot) = found.expect("a leaf has it");
    let mut bytes = block.bytes.clone();
    change(&mut bytes, slot);
    made.volume.target.fit_checksum(&mut bytes);
    for &(member, offset) in &block.places {
        made.volume.write(member, offset, &bytes);
    }
}

fn leaf_item(bytes: &mut [u8], slot: usize) -> &mut LeafItem {
    let at = HEADER_SIZE + slot * ITEM_SIZE;
    LeafItem::mut_from_bytes(&mut bytes[at..at + ITEM_SIZE]).expect("an item")
}

/// One wrong number in the header of an item: nothing of it or of the others is lost.
#[test]
fn items_with_a_wrong_place_are_found() {
    let Some(judges) = judges::require() else { return };
    let made = volume(&judges);
    let ino = made.ino("small");
    let damages: [fn(&mut LeafItem); 4] = [
        |item| item.offset += 160,
        |item| item.offset -= 7,
        |item| item.size += 40,
        |item| item.size = 3.into(),
    ];
    for damage in damages {
        edit_bytes(&made, ino, |bytes, slot| damage(leaf_item(bytes, slot)));
        let outcome = made.require("small", b"in the item itself");
        assert!(outcome.overlaps.files.is_empty(), "{:?}", outcome.overlaps);
    }
}

/// Items with one key, and an item whose key is out of order.
#[test]
fn duplicate_items_and_items_out_of_order() {
    let Some(judges) = judges::require() else { return };
    let made = volume(&judges);
    let ino = made.ino("small");
    made.edit(ino, |items| {
        let slot = items.iter().position(|(key, _)| key.objectid == ino).expect("an inode");
        let mut older = items[slot].clone();
        let inode = InodeItem::mut_from_bytes(&mut older.1).expect("an inode");
        (inode.transid, inode.size) = (2.into(), 5.into());
        items.insert(slot, older);
        let name = items[slot + 2].clone();
        items.insert(slot + 3, name);
    });
    let outcome = made.require("small", b"in the item itself");
    let dropped = changes(&outcome, ino);
    let all_dropped = dropped.iter().all(|one| matches!(one, ItemChange::Dropped { .. }));
    assert!(all_dropped && dropped.len() == 2, "{dropped:?}");
    // The inode is made anew from its other items then.
    edit_bytes(&made, ino, |bytes, slot| {
        let item = leaf_item(bytes, slot);
        item.key = Key::new(ino + 5000, ItemType::INODE_ITEM, 0).into();
    });
    let outcome = made.require("small", b"in the item itself");
    assert!(matches!(&changes(&outcome, ino + 5000)[..], [ItemChange::Dropped { .. }]));
}

/// Flags and bits of a mode that do not exist.
#[test]
fn inodes_lose_what_means_nothing() {
    let Some(judges) = judges::require() else { return };
    let made = volume(&judges);
    let ino = made.ino("small");
    let damages: [fn(&mut InodeItem); 3] = [
        |inode| inode.flags |= 1 << 20,
        |inode| inode.mode |= 1 << 17,
        |inode| inode.mode = 0o050_644.into(),
    ];
    for damage in damages {
        made.edit(ino, |items| damage(inode(items, ino)));
        let outcome = made.require("small", b"in the item itself");
        let changes = changes(&outcome, ino);
        assert!(matches!(&changes[..], [ItemChange::Corrected { .. }]), "{changes:?}");
    }
}

/// The leaf is shared with snapshots, which are all mended.
#[test]
fn snapshots_share_extents_that_overlap() {
    let Some(judges) = judges::require() else { return };
    let made = OverlapVolume::new(&judges, "", |root| {
        fill(root);
        for name in ["snapshot-1", "snapshot-2"] {
            let path = root.join(name).display().to_string();
            run("btrfs", &["subvolume", "snapshot", "-r", &root.display().to_string(), &path]);
        }
        sync(root);
    });
    let ino = made.target;
    let key = Key::new(ino, ItemType::EXTENT_DATA, 0);
    let leaves = made.volume.leaves(TreeId::FS);
    let (_, whole) = leaves.iter().flatten().find(|(one, _)| *one == key).expect("an extent");
    made.replace(ino, &[(0, whole.clone()), (4, made.donors[1].slice(0, 3))]);
    let outcome = repair_with(made.disks(), &options(false)).expect("it is mended");
    let after = outcome.after.as_ref().expect("there was something to mend");
    assert!(after.findings.is_empty(), "{}", show(after));
    assert_eq!(progs_complaints(made.disks()), None);
    let mut expected = made.before["target"].clone();
    let newer = &made.before["plain-1"][..3 * 4096];
    expected[4 * 4096..7 * 4096].copy_from_slice(newer);
    let mut all = made.before.clone();
    let names = ["target", "snapshot-1/target", "snapshot-2/target"];
    for name in names {
        all.insert(name.into(), expected.clone()).expect("it was there");
    }
    require_same(&shown(made.disks()), &all);
    let paths = outcome.overlaps.files.iter().filter_map(|file| file.path.clone());
    assert_eq!(paths.collect::<Vec<_>>(), names.map(|name| format!("/{name}").into_bytes()));
    // The kernel writes to all of it.
    let mount = made.disks().mount("rw,noatime");
    fs::write(mount.path().join("target"), vec![7; 1 << 20]).expect("it is written");
    run("btrfs", &["subvolume", "delete", &mount.path().join("snapshot-1").display().to_string()]);
    drop(mount);
    assert_eq!(progs_complaints(made.disks()), None, "after the kernel wrote");
}

/// A snapshot that was received and has lost something does not count as received any more. An
/// extent without length overlaps nothing, so this is no malformed leaf.
#[test]
fn a_received_subvolume_that_loses_an_extent_forgets_that() {
    let Some(judges) = judges::require() else { return };
    let made = OverlapVolume::new(&judges, "", |root| {
        fill(root);
        let path = root.join("snapshot").display().to_string();
        run("btrfs", &["subvolume", "snapshot", "-r", &root.display().to_string(), &path]);
        sync(root);
    });
    receive(&made.volume, 256);
    let ino = made.target;
    made.edit(ino, |items| extent(items, ino).1.num_bytes = 0.into());
    let outcome = repair_with(made.disks(), &options(false)).expect("it is mended");
    let after = outcome.after.expect("there was something to mend");
    assert!(after.findings.is_empty(), "{}", show(&after));
    assert_eq!(progs_complaints(made.disks()), None);
    require_not_received(made.disks(), "snapshot");
}

/// The class alone makes nothing anew where nothing overlaps.
#[test]
fn nothing_is_written_where_nothing_overlaps() {
    let Some(judges) = judges::require() else { return };
    let made = volume(&judges);
    let before = bytes(made.disks());
    let outcome = repair_with(made.disks(), &options(false)).expect("it is checked");
    assert!(outcome.after.is_none() && outcome.classes.is_empty(), "{:?}", outcome.classes);
    assert!(bytes(made.disks()) == before, "nothing was written");
}

/// A file whose extents are in several leaves.
fn fill_pieces(root: &Path) {
    fill(root);
    let file = fs::File::create(root.join("pieces")).expect("a file");
    for piece in 0..300u64 {
        let at = piece * 8192;
        std::os::unix::fs::FileExt::write_all_at(&file, &[b'p'; 4096], at).expect("a piece");
    }
    sync(root);
}

/// An extent reaches into the next leaf, where the kernel sees it too; and one that is cut there
/// has its rest behind the first extents of that leaf.
#[test]
fn extents_that_overlap_in_two_leaves() {
    let Some(judges) = judges::require() else { return };
    let made = OverlapVolume::new(&judges, "-n 4096", fill_pieces);
    let ino = made.ino("pieces");
    let leaves = made.volume.leaves(TreeId::FS);
    let mut lasts = leaves.iter().filter_map(|leaf| leaf.last());
    let (last, _) = lasts.find(|(key, _)| is_extent(key, ino)).expect("a leaf that ends with one");
    let block = last.offset / 4096;
    let before = &made.before["pieces"];
    let put = |expected: &mut Vec<u8>, at: u64, from: &str, count: u64| {
        let at = usize::try_from(at * 4096).expect("in memory");
        let bytes = &made.before[from][..usize::try_from(count * 4096).expect("in memory")];
        expected[at..at + bytes.len()].copy_from_slice(bytes);
    };
    // It is the older one: only its holes between the newer pieces show it.
    made.volume.edit(
        TreeId::FS,
        |key, _| key == *last,
        |items, slot| items[slot].1 = made.donors[0].slice(0, 8),
    );
    let mut expected = before.clone();
    put(&mut expected, block, "plain-0", 8);
    for newer in [block + 2, block + 4, block + 6] {
        let at = usize::try_from(newer * 4096).expect("in memory");
        expected[at..at + 4096].copy_from_slice(&before[at..at + 4096]);
    }
    let found = checked(made.disks());
    assert!(found.findings.iter().any(|one| one.code == Code::FileExtent), "{}", show(&found));
    made.require("pieces", &expected);
    // The last two of the leaf: the older one goes on behind the newer one, in the next leaf.
    made.volume.edit(
        TreeId::FS,
        |key, _| key == *last,
        |items, slot| {
            items[slot - 1].1 = made.donors[1].slice(0, 16);
            items[slot].1 = made.donors[7].slice(0, 7);
        },
    );
    let mut expected = before.clone();
    put(&mut expected, block - 2, "plain-1", 16);
    put(&mut expected, block, "plain-2", 7);
    for newer in (block + 2..block + 14).step_by(2) {
        let at = usize::try_from(newer * 4096).expect("in memory");
        expected[at..at + 4096].copy_from_slice(&before[at..at + 4096]);
    }
    made.require("pieces", &expected);
}

/// With `--cut-off` the intact items of a malformed leaf are saved as well, and a block with a
/// wrong checksum is lost all the same.
#[test]
fn what_is_intact_is_not_cut_off() {
    let Some(judges) = judges::require() else { return };
    let made = volume(&judges);
    let ino = made.ino("small");
    edit_bytes(&made, ino, |bytes, slot| leaf_item(bytes, slot).size += 40);
    let cut_off = vec![SubvolumeName::Id(TreeId::FS)];
    let cut = RepairOptions { cut_off, ..RepairOptions::default() };
    let outcome = repair_with(made.disks(), &cut).expect("it is mended");
    assert!(outcome.cut_off.is_empty() && outcome.after.expect("it is").findings.is_empty());
    require_same(&shown(made.disks()), &made.before);
    undo(made.disks()).expect("it is undone");
    // Another leaf is lost: the class alone is refused then.
    let lost = |bytes: &[u8]| {
        let items = offshoot_btrfs_format::block::items(bytes).expect("a leaf");
        items.iter().all(|item| item.key.objectid != ino && item.key.objectid != 256)
    };
    let block = made.volume.target.blocks.iter().find(|block| {
        let header = header(&block.bytes);
        header.level == 0 && header.owner() == TreeId::FS && lost(&block.bytes)
    });
    for &(member, offset) in &block.expect("another leaf").places {
        made.volume.write(member, offset, &[0x5a; 4096]);
    }
    let refused = repair_with(made.disks(), &options(false)).expect_err("a block is lost");
    assert!(refused.to_string().contains("--cut-off 5"), "{refused}");
    let both = RepairOptions { classes: vec![RepairClass::Overlaps], ..cut };
    let outcome = repair_with(made.disks(), &both).expect("it is mended");
    assert_eq!(outcome.cut_off.len(), 1);
    assert!(outcome.after.expect("it is").findings.is_empty());
    assert_eq!(progs_complaints(made.disks()), None);
    assert_eq!(shown(made.disks())["small"], b"in the item itself");
}
