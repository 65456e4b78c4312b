//! Damages of extents, their references, block groups, free space and checksums: each is found at
//! its place, and nothing else is.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use offshoot_btrfs::{BtrfsFinding, BtrfsFindingCode, BtrfsFindingPlace, CheckOutcome};
use offshoot_btrfs_format::chunk::{BlockGroupFlags, ChunkItem};
use offshoot_btrfs_format::extent::{
    EXTENT_FLAG_DATA, EXTENT_FLAG_TREE_BLOCK, ExtentDataRef, ExtentItem,
};
use offshoot_btrfs_format::space::{BlockGroupItem, FreeSpaceHeader, FreeSpaceInfo};
use offshoot_btrfs_format::superblock::SuperblockItem;
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::run::run;
use zerocopy::{FromBytes, IntoBytes};

use crate::common::{DamagedVolume, ProgsVerdict, checked, progs_complaints, require_sound, show};

/// The contents of a file that a test finds in the image.
const MARKER: &[u8; 32] = b"the data that a test will damage";

const SECTOR: u64 = 4096;

/// A few files: one extent each, one that is cloned, one without checksums, one preallocated. Many
/// empty files make the tree of the subvolume larger.
fn files(root: &Path) {
    for number in 0..600 {
        File::create(root.join(format!("empty-{number:0100}"))).unwrap();
    }
    let marked = MARKER.repeat(2048);
    for (name, bytes) in [("marked", marked), ("first", vec![1; 40_000]), ("second", vec![2; 9000])]
    {
        std::fs::write(root.join(name), bytes).unwrap();
    }
    std::fs::create_dir(root.join("in-place")).unwrap();
    run("chattr", &["+C", root.join("in-place").to_str().unwrap()]);
    std::fs::write(root.join("in-place/file"), vec![3; 30_000]).unwrap();
    run("fallocate", &["-l", "200000", root.join("preallocated").to_str().unwrap()]);
    run("sync", &["-f", root.to_str().unwrap()]);
    let (from, to) = (root.join("first"), root.join("clone"));
    run("cp", &["--reflink=always", from.to_str().unwrap(), to.to_str().unwrap()]);
}

fn recipe() -> Recipe {
    Recipe::new().mib(256).fill(files)
}

/// A volume with such files, if the judges are here.
fn volume_of(recipe: &Recipe) -> Option<DamagedVolume> {
    Some(DamagedVolume::of(recipe.make(&judges::require()?)))
}

fn volume() -> Option<DamagedVolume> {
    volume_of(&recipe())
}

fn is_data(key: Key, data: &[u8]) -> bool {
    key.item_type == ItemType::EXTENT_ITEM && extent(data).flags.get() == EXTENT_FLAG_DATA
}

fn is_block(key: Key, data: &[u8]) -> bool {
    key.item_type == ItemType::METADATA_ITEM && extent(data).flags.get() == EXTENT_FLAG_TREE_BLOCK
}

fn extent(data: &[u8]) -> &ExtentItem {
    ExtentItem::ref_from_prefix(data).unwrap().0
}

fn extent_mut(data: &mut [u8]) -> &mut ExtentItem {
    ExtentItem::mut_from_prefix(data).unwrap().0
}

/// The first inline reference to data of an extent item.
fn data_ref_mut(data: &mut [u8]) -> &mut ExtentDataRef {
    let at = size_of::<ExtentItem>();
    assert_eq!(data[at], ItemType::EXTENT_DATA_REF.0);
    ExtentDataRef::mut_from_prefix(&mut data[at + 1..]).unwrap().0
}

fn is_group_of(flags: u64) -> impl Fn(Key, &[u8]) -> bool {
    move |key, data| {
        key.item_type == ItemType::BLOCK_GROUP_ITEM
            && BlockGroupItem::view(data).unwrap().flags.get() & flags != 0
    }
}

fn group_mut(data: &mut [u8]) -> &mut BlockGroupItem {
    BlockGroupItem::mut_from_prefix(data).unwrap().0
}

#[track_caller]
fn only(outcome: &CheckOutcome) -> &BtrfsFinding {
    assert_eq!(outcome.findings.len(), 1, "{}", show(outcome));
    &outcome.findings[0]
}

/// Changes one item of a volume, and requires the one finding at the address of its key.
#[track_caller]
fn require_at_address(
    volume: &DamagedVolume,
    tree: TreeId,
    is_wanted: impl Fn(Key, &[u8]) -> bool,
    change: impl FnOnce(&mut Key, &mut Vec<u8>),
    (code, progs): (BtrfsFindingCode, ProgsVerdict),
) {
    let mut address = 0;
    volume.edit(tree, is_wanted, |items, slot| {
        address = items[slot].0.objectid;
        let (key, data) = &mut items[slot];
        change(key, data);
    });
    let outcome = volume.require(code, progs);
    assert_eq!(only(&outcome).place, BtrfsFindingPlace::Logical(Logical(address)));
}

#[test]
fn missing_extent() {
    let Some(volume) = volume() else { return };
    let mut address = 0;
    volume.edit(TreeId::EXTENT, is_data, |items, slot| address = items.remove(slot).0.objectid);
    let outcome = volume.require(BtrfsFindingCode::MissingExtent, ProgsVerdict::Agrees);
    assert_eq!(only(&outcome).place, BtrfsFindingPlace::Logical(Logical(address)));
}

#[test]
fn missing_extent_of_a_tree_block() {
    let Some(volume) = volume() else { return };
    let mut address = 0;
    volume.edit(TreeId::EXTENT, is_block, |items, slot| address = items.remove(slot).0.objectid);
    let outcome = volume.require(BtrfsFindingCode::MissingExtent, ProgsVerdict::Agrees);
    assert_eq!(only(&outcome).place, BtrfsFindingPlace::Logical(Logical(address)));
}

/// An extent that nothing refers to. Its space counts as used everywhere, in a volume without a
/// free-space tree.
#[test]
fn unused_extent() {
    let recipe = recipe().mkfs("-O ^free-space-tree").mount("nospace_cache");
    let Some(volume) = volume_of(&recipe) else { return };
    let mut address = 0;
    volume.edit(TreeId::EXTENT, is_data, |items, _| {
        let at = items.iter().rposition(|(key, data)| is_data(*key, data)).unwrap();
        let (Key { objectid, item_type, offset }, mut data) = items[at].clone();
        address = objectid + offset;
        // The inode that it names does not exist.
        data_ref_mut(&mut data).objectid = 100_000.into();
        let next = items.get(at + 1).map_or(u64::MAX, |(key, _)| key.objectid);
        assert!(address < next, "there is room behind the last extent");
        items.insert(at + 1, (Key::new(address, item_type, SECTOR), data));
        let is_around = |key: Key| (key.objectid..key.objectid + key.offset).contains(&address);
        let group = items
            .iter_mut()
            .find(|(key, data)| is_group_of(BlockGroupFlags::DATA)(*key, data) && is_around(*key));
        let group = group_mut(&mut group.expect("the volume has one leaf").1);
        group.used = (group.used.get() + SECTOR).into();
    });
    volume.edit_superblocks(0, |bytes| {
        let item = SuperblockItem::mut_from_bytes(bytes).unwrap();
        item.bytes_used = (item.bytes_used.get() + SECTOR).into();
    });
    let outcome = volume.require(BtrfsFindingCode::UnusedExtent, ProgsVerdict::Agrees);
    assert_eq!(only(&outcome).place, BtrfsFindingPlace::Logical(Logical(address)));
}

/// The extent of two files names only one of them.
#[test]
fn missing_reference() {
    let Some(volume) = volume() else { return };
    let is_shared = |key, data: &[u8]| is_data(key, data) && extent(data).refs.get() == 2;
    require_at_address(
        &volume,
        TreeId::EXTENT,
        is_shared,
        |_, data| {
            extent_mut(data).refs = 1.into();
            data.truncate(data.len() - 1 - size_of::<ExtentDataRef>());
        },
        (BtrfsFindingCode::MissingReference, ProgsVerdict::Agrees),
    );
}

#[test]
fn extra_reference() {
    let Some(volume) = volume() else { return };
    require_at_address(
        &volume,
        TreeId::EXTENT,
        is_data,
        |_, data| {
            extent_mut(data).refs = (extent(data).refs.get() + 1).into();
            let data_ref = data_ref_mut(data);
            data_ref.count = (data_ref.count.get() + 1).into();
        },
        (BtrfsFindingCode::ExtraReference, ProgsVerdict::Agrees),
    );
}

#[test]
fn reference_count() {
    for is_wanted in [is_data, is_block] {
        let Some(volume) = volume() else { return };
        require_at_address(
            &volume,
            TreeId::EXTENT,
            is_wanted,
            |_, data| extent_mut(data).refs = (extent(data).refs.get() + 1).into(),
            (BtrfsFindingCode::ReferenceCount, ProgsVerdict::Agrees),
        );
    }
}

/// The last extent of a leaf reaches into the first one of the next leaf. Its item says so, too.
#[test]
fn overlapping_extents() {
    fn many(root: &Path) {
        for number in 0..300 {
            std::fs::write(root.join(format!("file-{number}")), [5; 8000]).unwrap();
        }
    }
    let recipe = Recipe::new().mib(256).mkfs("-n 4096 -m single").fill(many);
    let Some(volume) = volume_of(&recipe) else { return };
    let is_last = std::cell::Cell::new(0);
    // The first leaf has 30 extents or more, so its last item is that of data.
    volume.edit(TreeId::EXTENT, is_data, |items, _| {
        let (key, data) = items.last_mut().unwrap();
        assert!(is_data(*key, data), "an extent at the end of the leaf: {key}");
        key.offset += SECTOR;
        is_last.set(key.objectid);
    });
    let outcome = checked(volume.disks());
    let codes: Vec<_> = outcome.findings.iter().map(|finding| finding.code).collect();
    assert_eq!(codes, [BtrfsFindingCode::ExtentItem], "{}", show(&outcome));
    let place = BtrfsFindingPlace::Logical(Logical(is_last.get()));
    assert_eq!(only(&outcome).place, place);
    assert!(progs_complaints(volume.disks()).is_some());
}

/// A block group for data, and its chunk, say that they are for metadata.
#[test]
fn misplaced_extents() {
    let Some(volume) = volume() else { return };
    let flags = BlockGroupFlags::METADATA;
    volume.edit(TreeId::EXTENT, is_group_of(BlockGroupFlags::DATA), |items, slot| {
        group_mut(&mut items[slot].1).flags = flags.into();
    });
    let is_chunk = |key: Key, data: &[u8]| {
        key.item_type == ItemType::CHUNK_ITEM
            && ChunkItem::ref_from_prefix(data).unwrap().0.chunk_type.get() == BlockGroupFlags::DATA
    };
    volume.edit(TreeId::CHUNK, is_chunk, |items, slot| {
        let chunk = ChunkItem::mut_from_prefix(&mut items[slot].1).unwrap().0;
        chunk.chunk_type = flags.into();
    });
    volume.require(BtrfsFindingCode::ExtentPlace, ProgsVerdict::Agrees);
}

#[test]
fn generation_of_an_extent_item() {
    let Some(volume) = volume() else { return };
    require_at_address(
        &volume,
        TreeId::EXTENT,
        is_block,
        |_, data| extent_mut(data).generation = (extent(data).generation.get() - 1).into(),
        (BtrfsFindingCode::ExtentItem, ProgsVerdict::SeesNothing),
    );
}

#[test]
fn level_of_an_extent_item() {
    let Some(volume) = volume() else { return };
    let is_leaf = |key: Key, data: &[u8]| is_block(key, data) && key.offset == 0;
    require_at_address(
        &volume,
        TreeId::EXTENT,
        is_leaf,
        |key, _| key.offset = 1,
        (BtrfsFindingCode::ExtentItem, ProgsVerdict::Agrees),
    );
}

#[test]
fn length_of_an_extent_item() {
    let Some(volume) = volume() else { return };
    let is_long = |key: Key, data: &[u8]| is_data(key, data) && key.offset > SECTOR;
    require_at_address(
        &volume,
        TreeId::EXTENT,
        is_long,
        |key, _| key.offset -= SECTOR,
        (BtrfsFindingCode::ExtentItem, ProgsVerdict::Agrees),
    );
}

#[test]
fn missing_block_group() {
    for (options, tree) in [("", TreeId::EXTENT), ("-O block-group-tree", TreeId::BLOCK_GROUP)] {
        let Some(volume) = volume_of(&recipe().mkfs(options)) else { return };
        let mut address = 0;
        volume.edit(tree, is_group_of(BlockGroupFlags::METADATA), |items, slot| {
            address = items.remove(slot).0.objectid;
        });
        let outcome = volume.require(BtrfsFindingCode::BlockGroup, ProgsVerdict::Agrees);
        assert_eq!(only(&outcome).place, BtrfsFindingPlace::Logical(Logical(address)));
    }
}

#[test]
fn block_group_without_a_chunk() {
    for (options, tree) in [("", TreeId::EXTENT), ("-O block-group-tree", TreeId::BLOCK_GROUP)] {
        let Some(volume) = volume_of(&recipe().mkfs(options)) else { return };
        let mut added = Key::MIN;
        volume.edit(tree, is_group_of(BlockGroupFlags::METADATA), |items, _| {
            let is_group = |(key, _): &&(Key, _)| key.item_type == ItemType::BLOCK_GROUP_ITEM;
            let (last, mut data) = items.iter().rev().find(is_group).unwrap().clone();
            group_mut(&mut data).used = 0.into();
            added = Key::new(last.objectid + (1 << 40), last.item_type, last.offset);
            items.push((added, data));
        });
        let outcome = volume.require(BtrfsFindingCode::BlockGroup, ProgsVerdict::SeesNothing);
        assert_eq!(only(&outcome).place, BtrfsFindingPlace::Item { tree, key: added });
    }
}

#[test]
fn type_of_a_block_group() {
    let Some(volume) = volume() else { return };
    require_at_address(
        &volume,
        TreeId::EXTENT,
        is_group_of(BlockGroupFlags::DUP),
        |_, data| {
            let group = group_mut(data);
            group.flags = (group.flags.get() & !BlockGroupFlags::DUP).into();
        },
        (BtrfsFindingCode::BlockGroup, ProgsVerdict::SeesNothing),
    );
}

#[test]
fn used_bytes_of_a_block_group() {
    let Some(volume) = volume() else { return };
    require_at_address(
        &volume,
        TreeId::EXTENT,
        is_group_of(BlockGroupFlags::DATA),
        |_, data| {
            let group = group_mut(data);
            group.used = (group.used.get() + SECTOR).into();
        },
        (BtrfsFindingCode::BlockGroupUsed, ProgsVerdict::Agrees),
    );
}

#[test]
fn used_bytes_of_the_superblock() {
    let Some(volume) = volume() else { return };
    volume.edit_superblocks(0, |bytes| {
        let item = SuperblockItem::mut_from_bytes(bytes).unwrap();
        item.bytes_used = (item.bytes_used.get() - SECTOR).into();
    });
    let outcome = volume.require(BtrfsFindingCode::SuperblockCounter, ProgsVerdict::Agrees);
    assert_eq!(only(&outcome).place, BtrfsFindingPlace::Volume);
}

fn is_long_range(key: Key, _: &[u8]) -> bool {
    key.item_type == ItemType::FREE_SPACE_EXTENT && key.objectid > 32 << 20 && key.offset > 1 << 20
}

#[test]
fn lost_space() {
    let Some(volume) = volume() else { return };
    let mut address = 0;
    volume.edit(TreeId::FREE_SPACE, is_long_range, |items, slot| {
        let key = &mut items[slot].0;
        key.offset -= SECTOR;
        address = key.objectid + key.offset;
    });
    let outcome = volume.require(BtrfsFindingCode::LostSpace, ProgsVerdict::Agrees);
    assert_eq!(only(&outcome).place, BtrfsFindingPlace::Logical(Logical(address)));
}

#[test]
fn allocated_space() {
    let Some(volume) = volume() else { return };
    let mut address = 0;
    volume.edit(TreeId::FREE_SPACE, is_long_range, |items, slot| {
        let key = &mut items[slot].0;
        key.objectid -= SECTOR;
        key.offset += SECTOR;
        address = key.objectid;
    });
    let outcome = volume.require(BtrfsFindingCode::AllocatedSpace, ProgsVerdict::Agrees);
    assert_eq!(only(&outcome).place, BtrfsFindingPlace::Logical(Logical(address)));
}

fn is_info_of_some(key: Key, data: &[u8]) -> bool {
    key.item_type == ItemType::FREE_SPACE_INFO
        && key.objectid > 16 << 20
        && FreeSpaceInfo::view(data).unwrap().extent_count.get() > 1
}

#[test]
fn count_of_free_ranges() {
    let Some(volume) = volume() else { return };
    require_at_address(
        &volume,
        TreeId::FREE_SPACE,
        is_info_of_some,
        |_, data| {
            let info = FreeSpaceInfo::mut_from_prefix(data).unwrap().0;
            info.extent_count = (info.extent_count.get() + 1).into();
        },
        (BtrfsFindingCode::FreeSpaceInfo, ProgsVerdict::Agrees),
    );
}

#[test]
fn missing_free_space_info() {
    let Some(volume) = volume() else { return };
    let mut address = 0;
    volume.edit(TreeId::FREE_SPACE, is_info_of_some, |items, slot| {
        address = items.remove(slot).0.objectid;
    });
    let outcome = volume.require(BtrfsFindingCode::FreeSpaceInfo, ProgsVerdict::Agrees);
    assert_eq!(only(&outcome).place, BtrfsFindingPlace::Logical(Logical(address)));
}

/// A free range in two items that touch each other.
#[test]
fn unmerged_free_space() {
    let Some(volume) = volume() else { return };
    let mut second = Key::MIN;
    volume.edit(TreeId::FREE_SPACE, is_long_range, |items, slot| {
        let key = &mut items[slot].0;
        second = Key::new(key.objectid + SECTOR, key.item_type, key.offset - SECTOR);
        key.offset = SECTOR;
        items.insert(slot + 1, (second, Vec::new()));
        let (_, info) = items[..slot]
            .iter_mut()
            .rfind(|(key, _)| key.item_type == ItemType::FREE_SPACE_INFO)
            .unwrap();
        let info = FreeSpaceInfo::mut_from_prefix(info).unwrap().0;
        info.extent_count = (info.extent_count.get() + 1).into();
    });
    let outcome = volume.require(BtrfsFindingCode::FreeSpaceInfo, ProgsVerdict::Agrees);
    let place = BtrfsFindingPlace::Item { tree: TreeId::FREE_SPACE, key: second };
    assert_eq!(only(&outcome).place, place);
}

/// Many small files, of which every second one is gone: so many free ranges that the kernel stores
/// them as bitmaps.
fn holes(root: &Path) {
    let name = |number| root.join(format!("file-{number}"));
    for number in 0..3000 {
        std::fs::write(name(number), vec![6; 4096]).unwrap();
    }
    run("sync", &["-f", root.to_str().unwrap()]);
    for number in (0..3000).step_by(2) {
        std::fs::remove_file(name(number)).unwrap();
    }
}

#[test]
fn lost_space_in_a_bitmap() {
    let recipe = recipe().fill(holes);
    let Some(judges) = judges::require() else { return };
    let disks = recipe.make(&judges);
    require_sound(&disks);
    let volume = DamagedVolume::of(disks);
    let mut address = 0;
    let is_bitmap = |key: Key, data: &[u8]| {
        key.item_type == ItemType::FREE_SPACE_BITMAP && data.contains(&0xff)
    };
    volume.edit(TreeId::FREE_SPACE, is_bitmap, |items, slot| {
        let (key, data) = &mut items[slot];
        // The last bit of the first run that ends with a byte: the count stays.
        let at = data.windows(2).position(|two| two[0] == 0xff && two[1] & 1 == 0);
        let at = at.expect("a run ends there");
        data[at] = 0x7f;
        address = key.objectid + (at as u64 * 8 + 7) * SECTOR;
    });
    let outcome = volume.require(BtrfsFindingCode::LostSpace, ProgsVerdict::Agrees);
    assert_eq!(only(&outcome).place, BtrfsFindingPlace::Logical(Logical(address)));
}

/// A leaf that cannot be read is one finding: what it may have had is not missed elsewhere.
#[test]
fn what_cannot_be_read_is_not_missed() {
    fn many(root: &Path) {
        for number in 0..2500 {
            std::fs::write(root.join(format!("file-{number}")), vec![5; 8000]).unwrap();
        }
        run("sync", &["-f", root.to_str().unwrap()]);
        for number in (0..2500).step_by(3) {
            std::fs::remove_file(root.join(format!("file-{number}"))).unwrap();
        }
    }
    let Some(judges) = judges::require() else { return };
    let disks = recipe().mkfs("-n 4096 -m single").fill(many).make(&judges);
    for tree in [TreeId::FS, TreeId::EXTENT, TreeId::FREE_SPACE, TreeId::CSUM] {
        let volume = DamagedVolume::of(disks.copy(&judges));
        volume.break_leaf(tree);
        let outcome = checked(volume.disks());
        let is_block = |finding: &BtrfsFinding| finding.code == BtrfsFindingCode::TreeBlock;
        let is_one = !outcome.findings.is_empty() && outcome.findings.iter().all(is_block);
        assert!(is_one, "{tree}: {}", show(&outcome));
    }
}

/// A subvolume that is being removed when the volume is unmounted is sound in every state, if
/// `btrfs check` says so. The kernel sometimes gives up references to nodes that a snapshot shares
/// and records no progress: then both checks find these references, and nothing else.
#[test]
fn half_removed_subvolumes() {
    fn require_agreed(disks: &Disks) {
        let Some(complaints) = progs_complaints(disks) else {
            return drop(require_sound(disks));
        };
        let outcome = checked(disks);
        let is_reference =
            |finding: &BtrfsFinding| finding.code == BtrfsFindingCode::MissingReference;
        let are_references = outcome.findings.iter().all(is_reference);
        assert!(!outcome.findings.is_empty() && are_references, "{complaints}{}", show(&outcome));
        assert!(complaints.contains("has no backref item in extent tree"), "{complaints}");
    }
    fn crowd(root: &Path) {
        let subvolume = root.join("crowd");
        run("btrfs", &["subvolume", "create", subvolume.to_str().unwrap()]);
        for number in 0..20_000 {
            let path = subvolume.join(format!("a file with a long name {number:060}"));
            std::fs::write(path, number.to_string()).unwrap();
        }
        let copy = root.join("copy");
        let paths = [subvolume.to_str().unwrap(), copy.to_str().unwrap()];
        run("btrfs", &["subvolume", "snapshot", paths[0], paths[1]]);
        for number in (0..20_000).step_by(100) {
            let path = copy.join(format!("a file with a long name {number:060}"));
            std::fs::write(path, "changed").unwrap();
        }
        run("btrfs", &["subvolume", "delete", "-c", paths[0], paths[1]]);
    }
    let Some(judges) = judges::require() else { return };
    let disks = recipe().mkfs("-n 4096").fill(crowd).make(&judges);
    for _ in 0..4 {
        require_agreed(&disks);
        // The kernel goes on with the removal until this is unmounted.
        drop(disks.mount("noatime"));
    }
    require_agreed(&disks);
}

#[test]
fn space_cache() {
    // The kernel keeps caches of block groups of 100 MiB and more.
    let recipe = recipe().mib(2048).mkfs("-O ^free-space-tree").mount("space_cache=v1");
    let Some(judges) = judges::require() else { return };
    let disks = recipe.make(&judges);
    require_sound(&disks);
    let volume = DamagedVolume::of(disks);
    let mut address = 0;
    let is_cache = |key: Key, data: &[u8]| {
        key.item_type == ItemType::UNTYPED && data.len() == size_of::<FreeSpaceHeader>()
    };
    volume.edit(TreeId::ROOT, is_cache, |items, slot| {
        let (key, data) = &mut items[slot];
        address = key.offset;
        let header = FreeSpaceHeader::mut_from_bytes(data).unwrap();
        header.num_entries = (header.num_entries.get() + 1).into();
    });
    let outcome = volume.require(BtrfsFindingCode::SpaceCache, ProgsVerdict::SeesNothing);
    assert_eq!(only(&outcome).place, BtrfsFindingPlace::Logical(Logical(address)));
}

fn is_checksums(key: Key, data: &[u8]) -> bool {
    key.item_type == ItemType::EXTENT_CSUM && data.len() > 8
}

#[test]
fn missing_checksum() {
    let Some(volume) = volume() else { return };
    volume.edit(TreeId::CSUM, is_checksums, |items, slot| {
        let data = &mut items[slot].1;
        data.truncate(data.len() - 4);
    });
    let outcome = volume.require(BtrfsFindingCode::MissingChecksum, ProgsVerdict::Agrees);
    assert!(matches!(only(&outcome).place, BtrfsFindingPlace::Inode { .. }));
}

#[test]
fn checksum_of_no_extent() {
    let Some(volume) = volume() else { return };
    // In the block group for the chunk tree.
    let address = 25 << 20;
    volume.edit(TreeId::CSUM, is_checksums, |items, _| {
        let key = Key::new(items[0].0.objectid, ItemType::EXTENT_CSUM, address);
        let at = items.partition_point(|(other, _)| *other < key);
        items.insert(at, (key, vec![7; 8]));
    });
    let outcome = volume.require(BtrfsFindingCode::ExtraChecksum, ProgsVerdict::Agrees);
    let finding = only(&outcome);
    assert_eq!(finding.place, BtrfsFindingPlace::Logical(Logical(address)));
    assert!(finding.problem.contains("8192 bytes"), "{finding}");
}

/// Data of a file that has none gets a checksum.
#[test]
fn checksum_of_data_without_checksums() {
    let Some(volume) = volume() else { return };
    let mut address = None;
    let name_of = |items: &[(Key, Vec<u8>)]| {
        // The extent of 32 KiB is that of the file without checksums.
        let is_it = |(key, data): &&(Key, Vec<u8>)| is_data(*key, data) && key.offset == 32_768;
        items.iter().find(is_it).map(|(key, _)| key.objectid)
    };
    volume.edit(TreeId::EXTENT, is_data, |items, _| address = name_of(items));
    let address = address.expect("the file has its extent");
    volume.edit(TreeId::CSUM, is_checksums, |items, _| {
        let key = Key::new(items[0].0.objectid, ItemType::EXTENT_CSUM, address + SECTOR);
        let at = items.partition_point(|(other, _)| *other < key);
        items.insert(at, (key, vec![7; 4]));
    });
    let outcome = volume.require(BtrfsFindingCode::ExtraChecksum, ProgsVerdict::Agrees);
    assert!(matches!(only(&outcome).place, BtrfsFindingPlace::Inode { .. }));
}

/// Two sectors of a file are overwritten on the device.
#[test]
fn damaged_data() {
    let Some(volume) = volume() else { return };
    let image = File::open(&volume.disks().images()[0]).unwrap();
    let len = image.metadata().unwrap().len();
    let mut sector = vec![0; 4096];
    let offset = (0..len / SECTOR).map(|number| number * SECTOR).find(|&at| {
        image.read_exact_at(&mut sector, at).unwrap();
        sector.starts_with(MARKER)
    });
    let offset = offset.expect("the data is in the image") + 2 * SECTOR;
    volume.write(0, offset + 4000, [9u8; 200].as_bytes());
    let outcome = volume.require(BtrfsFindingCode::Data, ProgsVerdict::Agrees);
    let finding = only(&outcome);
    assert!(matches!(finding.place, BtrfsFindingPlace::Inode { .. }), "{finding}");
    assert!(finding.problem.starts_with("8192 bytes at "), "{finding}");
    assert!(outcome.counts.data_bytes >= 65_536 + 40_960, "{:?}", outcome.counts);
}

/// A bad copy of data that has a good one is found, whichever of the two it is, and so is data
/// without a good copy.
#[test]
fn damaged_copies_of_data() {
    let recipe = recipe().devices(2).mkfs("-d raid1 -m raid1");
    let Some(judges) = judges::require() else { return };
    let sound = recipe.make(&judges);
    for (members, sector) in [(&[0][..], 2), (&[1], 5), (&[0, 1], 7)] {
        let volume = DamagedVolume::of(sound.copy(&judges));
        for &member in members {
            let image = std::fs::read(&volume.disks().images()[member]).unwrap();
            let first = image.chunks(4096).position(|page| page.starts_with(MARKER)).unwrap();
            let offset = (first as u64 + sector) * SECTOR + 100;
            volume.write(member, offset, [member.to_le_bytes()[0] + 1; 5000].as_slice());
        }
        let outcome = checked(volume.disks());
        let finding = only(&outcome);
        let code =
            if members.len() > 1 { BtrfsFindingCode::Data } else { BtrfsFindingCode::BadCopy };
        assert_eq!(finding.code, code, "{finding}");
        assert!(finding.problem.starts_with("8192 bytes "), "{finding}");
        assert!(progs_complaints(volume.disks()).is_some());
    }
}
