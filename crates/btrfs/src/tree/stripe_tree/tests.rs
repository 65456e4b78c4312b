//! No tool here makes a volume with a stripe tree. So the test converts a volume that the kernel
//! filled, and must then read the same files.
//!
//! All data moves to places that no chunk describes, from the end of the devices downwards, and its
//! old places are overwritten. The stripe tree is one leaf.

use std::collections::HashMap;
use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use offshoot_btrfs_format::TreeId;
use offshoot_btrfs_format::edit::LeafFiller;
use offshoot_btrfs_format::encode::{BlockIdentity, new_block, seal_block};
use offshoot_btrfs_format::extent::EXTENT_FLAG_DATA;
use offshoot_btrfs_format::extent::ExtentItem;
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::superblock::Incompat;
use offshoot_testkit::btrfs::damage::{Features, flip, set_features};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::fill;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::compare::compare;
use offshoot_testkit::run::run;
use offshoot_vfs::FileSystem;
use parking_lot::Mutex;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::*;
use crate::{
    BtrfsFinding, BtrfsFindingCode, BtrfsVolume, CheckOptions, EngineOptions, VolumeReport,
    check_btrfs,
};

/// The most bytes that one item covers, so that extents have several items.
const MOST: u64 = 192 << 10;

/// The size of a device, in MiB.
const MIB: u64 = 512;

fn open(disks: &Disks, members: &[usize], options: &EngineOptions) -> Arc<BtrfsVolume> {
    BtrfsVolume::open(disks.some_devices(members), options).expect("the volume opens")
}

fn all(disks: &Disks) -> Vec<usize> {
    (0..disks.images().len()).collect()
}

/// The extents of data, by their address and length.
fn data_extents(volume: &BtrfsVolume) -> Vec<(Logical, u64)> {
    let mut extents = Vec::new();
    let root = volume.tree(TreeId::EXTENT).expect("every volume has one");
    let outcome = volume.for_each_item(root, Key::MIN, |key, data| {
        if key.item_type == ItemType::EXTENT_ITEM {
            let (item, _) = ExtentItem::ref_from_prefix(data).expect("it was verified");
            if item.flags.get() & EXTENT_FLAG_DATA != 0 {
                extents.push((Logical(key.objectid), key.offset));
            }
        }
        ControlFlow::Continue(())
    });
    outcome.expect("the tree is sound");
    extents
}

/// Moves all data that belongs in the stripe tree, and returns the items of the tree.
fn move_data(disks: &Disks) -> Vec<(Key, Vec<u8>)> {
    let volume = open(disks, &all(disks), &EngineOptions::default());
    let devices: HashMap<_, _> = volume
        .members()
        .iter()
        .zip(disks.images())
        .map(|(member, image)| {
            let file = File::options().read(true).write(true).open(image);
            (member.id, file.expect("an image opens"))
        })
        .collect();
    let mut free: HashMap<_, _> = devices.keys().map(|&id| (id, MIB << 20)).collect();
    let mut items = Vec::new();
    for (start, len) in data_extents(&volume) {
        let mut done = 0;
        while done < len {
            let logical = Logical(start.0 + done);
            let chunk = volume.chunks().find(|chunk| (chunk.start..chunk.end()).contains(&logical));
            let chunk = chunk.expect("a chunk");
            assert!(chunk.flags.is_in_stripe_tree(), "data of {}", chunk.profile);
            let run = chunk.run(logical, (len - done).min(MOST)).expect("no parity");
            let mut copies = Vec::new();
            for &(stripe, from) in &run.copies {
                let id = chunk.stripes[stripe].device;
                let to = free.get_mut(&id).expect("a member");
                *to -= run.len;
                let mut bytes = vec![0; usize::try_from(run.len).expect("it is short")];
                devices[&id].read_exact_at(&mut bytes, from.0).expect("it reads");
                devices[&id].write_all_at(&bytes, *to).expect("it is written");
                bytes.fill(0xee);
                devices[&id].write_all_at(&bytes, from.0).expect("it is written");
                copies.extend([id.0.to_le_bytes(), to.to_le_bytes()].concat());
            }
            items.push((Key::new(logical.0, ItemType::RAID_STRIPE, run.len), copies));
            done += run.len;
        }
    }
    let used = volume.chunks().flat_map(|chunk| {
        let len = chunk.stripe_bytes();
        chunk.stripes.into_iter().map(move |stripe| (stripe.device, stripe.physical.0 + len))
    });
    for (id, end) in used {
        assert!(end <= free[&id], "data went where a chunk is");
    }
    items
}

/// Converts `disks` to a volume with a stripe tree, without the items that `keep` refuses.
fn convert(disks: &Disks, mut items: Vec<(Key, Vec<u8>)>, keep: impl Fn(usize) -> bool) {
    let mut index = 0..;
    items.retain(|_| keep(index.next().expect("there is no end")));
    let volume = crate::test_volumes::open(disks);
    let superblock = volume.superblock();
    let node_size = superblock.node_size;
    // The last block of a metadata chunk is free: the allocator begins at the other end.
    let chunk = volume.chunks().find(|chunk| chunk.flags.kind() == "metadata").expect("a chunk");
    let logical = Logical(chunk.end().0 - u64::from(node_size));
    let identity = BlockIdentity {
        metadata_uuid: superblock.metadata_uuid,
        chunk_tree_uuid: volume.storage.chunk_tree_uuid(),
        logical,
        generation: superblock.generation,
        owner: TreeId::RAID_STRIPE,
        level: 0,
    };
    let mut leaf = new_block(node_size, &identity);
    let mut filler = LeafFiller::new(&mut leaf);
    for (key, copies) in &items {
        filler.push(*key, copies);
    }
    filler.finish();
    seal_block(&mut leaf, superblock.checksum);
    for (member, physical, part) in volume.storage.write_places(logical, leaf.len() as u64).unwrap()
    {
        let part = usize::try_from(part.start).unwrap()..usize::try_from(part.end).unwrap();
        let device = volume.members()[member].device.as_ref().expect("all are there");
        device.write_at(physical.0, &leaf[part]).expect("it is written");
    }
    let mut item = RootItem::new_zeroed();
    (item.bytenr, item.refs) = (logical.0.into(), 1.into());
    item.generation = superblock.generation.0.into();
    item.generation_v2 = item.generation;
    let key = Key::new(TreeId::RAID_STRIPE.0, ItemType::ROOT_ITEM, 0);
    volume.join().unwrap().change(TreeId::ROOT, |tree| tree.insert(key, item.as_bytes())).unwrap();
    volume.commit().unwrap();
    drop(volume);
    for image in disks.images() {
        set_features(image, Features::Incompatible, Incompat::RAID_STRIPE_TREE.0);
    }
}

fn top(volume: &Arc<BtrfsVolume>) -> crate::Filesystem {
    volume.filesystem(TreeId::FS).expect("every volume has one")
}

/// The engine reads what the kernel read before the conversion, also without each of the sets of
/// members in `lost`.
#[track_caller]
fn shows_the_same(devices: usize, mkfs: &'static str, lost: &[&[usize]]) {
    let Some(judges) = judges::require() else { return };
    let recipe = Recipe::new().devices(devices).mib(MIB).mkfs(mkfs);
    let disks =
        recipe.fill(|root| fill::data::plain_files(&fill::directory(root, "data"))).make(&judges);
    let before = disks.copy(&judges);
    let items = move_data(&disks);
    println!("{mkfs}: {} items", items.len());
    convert(&disks, items, |_| true);
    let mount = before.mount("ro,noatime");
    for gone in [&[][..]].iter().chain(lost) {
        let present: Vec<_> = all(&disks).into_iter().filter(|m| !gone.contains(m)).collect();
        let options = EngineOptions { is_degraded: !gone.is_empty(), ..EngineOptions::default() };
        let volume = open(&disks, &present, &options);
        compare(&top(&volume), mount.path()).assert_same(30);
    }
    // The check finds all data that has checksums, too.
    let options = CheckOptions { verifies_data: true, ..CheckOptions::default() };
    let checked = check_btrfs(disks.devices(), &options, &|_| ControlFlow::Continue(()));
    let outcome = checked.expect("it is checked");
    let is_of_data = |finding: &&BtrfsFinding| finding.code == BtrfsFindingCode::Data;
    assert_eq!(outcome.findings.iter().find(is_of_data), None);
    assert!(outcome.counts.data_bytes > 1 << 20, "{:?}", outcome.counts);
    let refused =
        BtrfsVolume::open_writable(disks.writable_devices(), &EngineOptions::default()).err();
    let said = refused.map(|error| error.to_string()).unwrap_or_default();
    assert!(said.contains("RAID stripe tree"), "{said}");
}

#[test]
fn dup() {
    shows_the_same(1, "-d dup -n 64k", &[]);
}

#[test]
fn raid0() {
    shows_the_same(3, "-d raid0 -m raid1c3 -n 64k", &[]);
}

#[test]
fn raid1() {
    shows_the_same(2, "-d raid1 -m raid1 -n 64k", &[&[0], &[1]]);
}

#[test]
fn raid1c3() {
    shows_the_same(3, "-d raid1c3 -m raid1c3 -n 64k", &[&[0, 1], &[1, 2]]);
}

#[test]
fn raid10() {
    shows_the_same(4, "-d raid10 -m raid1c4 -n 64k", &[&[0], &[3]]);
}

/// A volume with two mirrors and one file. The stripe tree lacks the item at `gap`.
fn mirrored(judges: &Judges, fill: fn(&Path), gap: Option<usize>) -> (Disks, Vec<(Key, Vec<u8>)>) {
    let recipe = Recipe::new().devices(2).mib(MIB).mkfs("-d raid1 -m raid1 -n 64k");
    let disks = recipe.fill(fill).make(judges);
    let items = move_data(&disks);
    convert(&disks, items.clone(), |index| Some(index) != gap);
    (disks, items)
}

fn read(volume: &Arc<BtrfsVolume>, buf: &mut [u8]) -> Result<usize> {
    let fs = top(volume);
    let file = fs.lookup(fs.root(), b"file").expect("it is there");
    fs.read(file, 0, buf)
}

/// Data that the stripe tree does not describe must be an error. The engine must not return the
/// bytes at the place in the chunk: no checksum would show that they are wrong.
#[test]
fn what_it_does_not_say_is_an_error() {
    let Some(judges) = judges::require() else { return };
    let without_sums = |root: &Path| {
        let path = root.join("file");
        fill::write(&path, b"");
        run("chattr", &["+C".as_ref(), path.as_os_str()]);
        fill::write(&path, &vec![b'd'; 1 << 20]);
    };
    let (disks, items) = mirrored(&judges, without_sums, Some(1));
    assert!(items.len() > 2, "the gap is in the middle");
    let volume = open(&disks, &[0, 1], &EngineOptions::default());
    let mut bytes = vec![0; 1 << 20];
    let error = read(&volume, &mut bytes).expect_err("a part of it is nowhere");
    assert!(matches!(error, Error::Corrupt(_)), "{error:?}");
    assert!(error.to_string().contains("stripe tree does not say"), "{error}");
    let before_gap = usize::try_from(items[0].0.offset).expect("it is short");
    assert_eq!(read(&volume, &mut bytes[..before_gap]).expect("it is told of"), before_gap);
    assert!(bytes[..before_gap].iter().all(|&byte| byte == b'd'));
}

/// Regression: a place near the end of the address space overflowed when the devices were told of
/// the read.
#[test]
fn a_place_behind_everything_is_an_error() {
    let Some(judges) = judges::require() else { return };
    let fill = |root: &Path| fill::write(&root.join("file"), &vec![b'd'; 1 << 20]);
    let recipe = Recipe::new().devices(2).mib(MIB).mkfs("-d raid1 -m raid1 -n 64k");
    let disks = recipe.fill(fill).make(&judges);
    let mut items = move_data(&disks);
    for (_, copies) in &mut items {
        for copy in copies.chunks_mut(16) {
            copy[8..].copy_from_slice(&(u64::MAX - 4095).to_le_bytes());
        }
    }
    convert(&disks, items, |_| true);
    let volume = open(&disks, &[0, 1], &EngineOptions::default());
    read(&volume, &mut vec![0; 1 << 20]).expect_err("it is on no device");
}

#[test]
fn a_bad_copy_is_read_around() {
    let Some(judges) = judges::require() else { return };
    let fill = |root: &Path| fill::write(&root.join("file"), &vec![b'd'; 1 << 20]);
    let (disks, items) = mirrored(&judges, fill, None);
    for (key, copies) in &items {
        // A sector of the first copy, in the second half of the item.
        let at = u64::from_le_bytes(copies[8..16].try_into().expect("eight bytes"));
        flip(&disks.images()[0], at + key.offset / 2, 1);
    }
    let bad = Arc::new(Mutex::new(0));
    let counter = bad.clone();
    let count = move |report: &VolumeReport| {
        assert!(matches!(report, VolumeReport::BadCopy { structure: "data", .. }), "{report}");
        *counter.lock() += 1;
    };
    let options = EngineOptions { reporter: Some(Arc::new(count)), ..EngineOptions::default() };
    let volume = open(&disks, &[0, 1], &options);
    let mut bytes = vec![0; 1 << 20];
    assert_eq!(read(&volume, &mut bytes).expect("the other copy is right"), bytes.len());
    assert!(bytes.iter().all(|&byte| byte == b'd'));
    assert_eq!(*bad.lock(), items.len());
}

/// A volume with the feature but without the tree is damaged: the engine would look for its data in
/// the wrong places.
#[test]
fn the_feature_without_the_tree_is_refused() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mib(MIB).fill(|_| {}).make(&judges);
    set_features(&disks.images()[0], Features::Incompatible, Incompat::RAID_STRIPE_TREE.0);
    let error = BtrfsVolume::open(disks.devices(), &EngineOptions::default()).err();
    assert!(matches!(error, Some(Error::Corrupt(_))), "{error:?}");
}
