//! Extents that overlap, and extents in places where none may be: each kind of wrong place is found
//! as that, and as nothing else. The references to the extents, and the counters of the space that
//! they take, are right, so only the place is wrong.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use offshoot_btrfs::{BtrfsFindingCode, BtrfsFindingPlace};
use offshoot_btrfs_format::chunk::{BlockGroupFlags, ChunkItem};
use offshoot_btrfs_format::extent::{EXTENT_FLAG_DATA, ExtentItem};
use offshoot_btrfs_format::file_extent::{FileExtentHead, FileExtentTail, extent_type};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::space::BlockGroupItem;
use offshoot_btrfs_format::superblock::SuperblockItem;
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::run::run;
use zerocopy::FromBytes;

use crate::common::{
    DamagedVolume, EditedItems, ProgsVerdict, checked, progs_complaints, show, view,
};
use crate::damage::header;

const SECTOR: u64 = 4096;

/// Files with one extent each, without checksums, and one of 80 MiB, so that data lies around the
/// superblock at 64 MiB.
fn files(root: &Path) {
    run("chattr", &["+C", root.to_str().expect("a plain path")]);
    for name in ["one", "two", "three"] {
        std::fs::write(root.join(name), vec![3; 30_000]).expect("it is written");
        run("sync", &["-f", root.to_str().expect("a plain path")]);
    }
    std::fs::write(root.join("large"), vec![8; 80 << 20]).expect("it is written");
    // More blocks.
    std::fs::create_dir(root.join("names")).expect("a directory");
    for number in 0..800 {
        File::create(root.join(format!("names/{number:0100}"))).expect("it is made");
    }
}

/// A volume that lists no free space, so that extents may take it.
fn volume() -> Option<DamagedVolume> {
    let recipe =
        Recipe::new().mib(256).mkfs("-m single -O ^free-space-tree").mount("nospace_cache");
    Some(DamagedVolume::of(recipe.fill(files).make(&judges::require()?)))
}

fn is_data(key: Key, data: &[u8]) -> bool {
    let flags = || ExtentItem::ref_from_prefix(data).expect("an extent").0.flags.get();
    key.item_type == ItemType::EXTENT_ITEM && flags() == EXTENT_FLAG_DATA
}

/// The extents of data that lie before all others of their files: start and length.
fn extents(volume: &DamagedVolume) -> Vec<(u64, u64)> {
    let items = volume.leaves(TreeId::EXTENT).into_iter().flatten();
    let data = items.filter(|(key, data)| is_data(*key, data));
    data.map(|(key, _)| (key.objectid, key.offset)).collect::<BTreeSet<_>>().into_iter().collect()
}

/// The chunks: start, length, place on the device and flags.
fn chunks(volume: &DamagedVolume) -> Vec<(u64, u64, u64, u64)> {
    let items = volume.leaves(TreeId::CHUNK).into_iter().flatten();
    let chunk = |(key, data): (Key, Vec<u8>)| {
        let (item, rest) = ChunkItem::read_from_prefix(&data).ok()?;
        let place = u64::from_le_bytes(rest.get(8..16)?.try_into().ok()?);
        let is_chunk = key.item_type == ItemType::CHUNK_ITEM;
        is_chunk.then_some((key.offset, item.length.get(), place, item.chunk_type.get()))
    };
    items.filter_map(chunk).collect()
}

fn tail_mut(data: &mut [u8]) -> Option<&mut FileExtentTail> {
    let (head, rest) = FileExtentHead::mut_from_prefix(data).ok()?;
    let is_regular = head.extent_type == extent_type::REG;
    is_regular.then(|| FileExtentTail::mut_from_prefix(rest).expect("a whole item").0)
}

/// Changes the items of files that lead to the extent at `start`.
fn edit_users(volume: &DamagedVolume, start: u64, change: impl Fn(&mut Vec<u8>)) {
    let leads = |data: &[u8]| {
        let mut data = data.to_vec();
        tail_mut(&mut data).is_some_and(|tail| tail.disk_bytenr.get() == start)
    };
    let is_user = |key: Key, data: &[u8]| key.item_type == ItemType::EXTENT_DATA && leads(data);
    volume.edit(TreeId::FS, is_user, |items, _| {
        items
            .iter_mut()
            .filter(|(key, data)| is_user(*key, data))
            .for_each(|(_, data)| change(data));
    });
}

/// Adds to what the block group with `address` counts as used, if there is one. The extent tree has
/// one leaf.
fn count_in(items: &mut EditedItems, address: u64, bytes: i64) {
    let has = |key: &Key| (key.objectid..key.objectid + key.offset).contains(&address);
    let is_it =
        |(key, _): &&mut (Key, Vec<u8>)| key.item_type == ItemType::BLOCK_GROUP_ITEM && has(key);
    let Some(group) = items.iter_mut().find(is_it) else { return };
    let group = BlockGroupItem::mut_from_prefix(&mut group.1).expect("a block group").0;
    group.used = group.used.get().wrapping_add_signed(bytes).into();
}

/// Makes the extent at `start` longer by `more` bytes, which its file does not use.
fn lengthen(volume: &DamagedVolume, start: u64, more: u64) {
    edit_users(volume, start, |data| {
        let tail = tail_mut(data).expect("it is regular");
        tail.disk_num_bytes += more;
        let (head, _) = FileExtentHead::mut_from_prefix(data).expect("a whole item");
        head.ram_bytes += more;
    });
    let more_bytes = i64::try_from(more).expect("less than a volume");
    let is_it = |key: Key, data: &[u8]| is_data(key, data) && key.objectid == start;
    volume.edit(TreeId::EXTENT, is_it, |items, slot| {
        items[slot].0.offset += more;
        count_in(items, start, more_bytes);
    });
    count_in_superblocks(volume, more_bytes);
}

fn count_in_superblocks(volume: &DamagedVolume, bytes: i64) {
    volume.edit_superblocks(0, |superblock| {
        let item = SuperblockItem::mut_from_bytes(superblock).expect("a superblock");
        item.bytes_used = item.bytes_used.get().wrapping_add_signed(bytes).into();
    });
}

/// Requires that our check finds `code` alone, at these addresses, with words of its text, and what
/// `btrfs check` says.
#[track_caller]
fn require_at(
    volume: &DamagedVolume,
    (code, progs): (BtrfsFindingCode, ProgsVerdict),
    addresses: &[u64],
    words: &str,
) {
    let outcome = checked(volume.disks());
    let found: BTreeSet<_> = outcome.findings.iter().map(|one| (one.code, one.place)).collect();
    let place = |address: &u64| (code, BtrfsFindingPlace::Logical(Logical(*address)));
    assert_eq!(found, addresses.iter().map(place).collect(), "{}", show(&outcome));
    assert!(outcome.findings.iter().all(|one| one.problem.contains(words)), "{}", show(&outcome));
    let said = progs_complaints(volume.disks());
    assert_eq!(said.is_some(), progs == ProgsVerdict::Agrees, "btrfs check: {said:?}");
}

#[test]
fn extents_that_overlap() {
    let Some(volume) = volume() else { return };
    let all = extents(&volume);
    let neighbours = all.windows(2).find(|two| two[0].0 + two[0].1 == two[1].0);
    let [(start, _), (next, _)] = *neighbours.expect("extents without a gap") else { return };
    lengthen(&volume, start, SECTOR);
    require_at(
        &volume,
        (BtrfsFindingCode::ExtentOverlap, ProgsVerdict::Agrees),
        &[next],
        "it begins within the extent",
    );
}

/// Moves extents to other addresses, by the old and the new one.
fn move_extents(volume: &DamagedVolume, moves: &[(u64, u64)]) {
    let new = |old: u64| moves.iter().find(|one| one.0 == old).map(|one| one.1);
    volume.edit(
        TreeId::FS,
        |key, _| key.item_type == ItemType::EXTENT_DATA,
        |items, _| {
            for (_, data) in items.iter_mut().filter(|one| one.0.item_type == ItemType::EXTENT_DATA)
            {
                let Some(tail) = tail_mut(data) else { continue };
                if let Some(new) = new(tail.disk_bytenr.get()) {
                    tail.disk_bytenr = new.into();
                }
            }
        },
    );
    volume.edit(TreeId::EXTENT, is_data, |items, _| {
        for &(old, new) in moves {
            let is_it = |one: &(Key, Vec<u8>)| is_data(one.0, &one.1) && one.0.objectid == old;
            let (key, data) = items.remove(items.iter().position(is_it).expect("in one leaf"));
            let at = items.partition_point(|(key, _)| key.objectid < new);
            items.insert(at, (Key { objectid: new, ..key }, data));
            let len = i64::try_from(key.offset).expect("less than a volume");
            count_in(items, old, -len);
            count_in(items, new, len);
        }
    });
}

#[test]
fn an_extent_beyond_its_block_group() {
    let Some(volume) = volume() else { return };
    let (start, len) = *extents(&volume).last().expect("there is data");
    let chunks = chunks(&volume);
    let chunk = chunks.iter().find(|chunk| (chunk.0..chunk.0 + chunk.1).contains(&start));
    let end = chunk.map(|chunk| chunk.0 + chunk.1).expect("a chunk has it");
    assert!(chunks.iter().all(|chunk| chunk.0 < end), "nothing is behind the last data");
    let moved = end - len + SECTOR;
    move_extents(&volume, &[(start, moved)]);
    require_at(
        &volume,
        (BtrfsFindingCode::ExtentPlace, ProgsVerdict::SeesNothing),
        &[moved],
        "and its block group at",
    );
}

#[test]
fn an_extent_over_a_superblock() {
    let Some(volume) = volume() else { return };
    let superblock = 64u64 << 20;
    let place = chunks(&volume).into_iter().find_map(|(start, len, place, flags)| {
        let is_data = flags & BlockGroupFlags::DATA != 0;
        let is_there = is_data && (place..place + len).contains(&superblock);
        is_there.then(|| start + superblock - place)
    });
    let place = place.expect("data lies around the superblock") / (64 << 10) * (64 << 10);
    let (start, _) = small_extents(&volume)[0];
    move_extents(&volume, &[(start, place + SECTOR)]);
    let words = "superblocks have the bytes";
    require_at(
        &volume,
        (BtrfsFindingCode::ExtentPlace, ProgsVerdict::SeesNothing),
        &[place + SECTOR],
        words,
    );
}

/// The extents of the small files.
fn small_extents(volume: &DamagedVolume) -> Vec<(u64, u64)> {
    extents(volume).into_iter().filter(|one| one.1 < 40_000).collect()
}

/// Changes all items of one type, which are in one leaf.
fn edit_each(
    volume: &DamagedVolume,
    tree: TreeId,
    item_type: ItemType,
    change: impl Fn(&mut [u8]),
) {
    volume.edit(
        tree,
        |key, _| key.item_type == item_type,
        |items, _| {
            let these = items.iter_mut().filter(|(key, _)| key.item_type == item_type);
            these.for_each(|(_, data)| change(data));
        },
    );
}

/// Says of the block groups with `flags` that they have others, in their chunks too.
fn change_kind(volume: &DamagedVolume, flags: u64, other: u64) {
    edit_each(volume, TreeId::EXTENT, ItemType::BLOCK_GROUP_ITEM, |data| {
        let group = view::<BlockGroupItem>(data);
        if group.flags.get() == flags {
            group.flags = other.into();
        }
    });
    edit_each(volume, TreeId::CHUNK, ItemType::CHUNK_ITEM, |data| {
        let chunk = view::<ChunkItem>(data);
        if chunk.chunk_type.get() == flags {
            chunk.chunk_type = other.into();
        }
    });
}

#[test]
fn tree_blocks_in_a_block_group_for_data() {
    let Some(volume) = volume() else { return };
    let is_there = |bytes: &[u8]| header(bytes).owner() != TreeId::CHUNK;
    let blocks = volume.target.blocks.iter().filter(|block| is_there(&block.bytes));
    let blocks: Vec<_> = blocks.map(|block| header(&block.bytes).bytenr.get()).collect();
    change_kind(&volume, BlockGroupFlags::METADATA, BlockGroupFlags::DATA);
    let words = "a tree block in a block group for data";
    require_at(&volume, (BtrfsFindingCode::ExtentPlace, ProgsVerdict::Agrees), &blocks, words);
}

#[test]
fn data_in_a_block_group_for_tree_blocks() {
    let Some(volume) = volume() else { return };
    let data: Vec<_> = extents(&volume).into_iter().map(|(start, _)| start).collect();
    change_kind(&volume, BlockGroupFlags::DATA, BlockGroupFlags::METADATA);
    let words = "data in a block group for metadata";
    require_at(&volume, (BtrfsFindingCode::ExtentPlace, ProgsVerdict::Agrees), &data, words);
}

/// The chunk of the chunk tree says that it is for metadata. The superblock has it as a system
/// chunk, which is a finding of its own: a volume without this does not open.
#[test]
fn the_chunk_tree_in_a_block_group_for_metadata() {
    let Some(volume) = volume() else { return };
    let blocks =
        volume.target.blocks.iter().filter(|block| header(&block.bytes).owner() == TreeId::CHUNK);
    let blocks: BTreeSet<_> = blocks.map(|block| header(&block.bytes).bytenr.get()).collect();
    change_kind(&volume, BlockGroupFlags::SYSTEM, BlockGroupFlags::METADATA);
    let outcome = checked(volume.disks());
    let (places, others): (Vec<_>, Vec<_>) =
        outcome.findings.iter().partition(|one| one.code == BtrfsFindingCode::ExtentPlace);
    let words = "a block of the chunk tree in a block group for metadata";
    assert!(places.iter().all(|one| one.problem == words), "{}", show(&outcome));
    let found: Vec<_> = places.iter().map(|one| one.place).collect();
    let place = |address: &u64| BtrfsFindingPlace::Logical(Logical(*address));
    assert_eq!(found, blocks.iter().map(place).collect::<Vec<_>>(), "{}", show(&outcome));
    let is_system = |code| code == BtrfsFindingCode::SystemChunk;
    assert!(others.iter().all(|one| is_system(one.code)), "{}", show(&outcome));
    assert!(progs_complaints(volume.disks()).is_some());
}

/// Extents behind all chunks. Several of them are one finding.
#[test]
fn extents_outside_of_the_block_groups() {
    for (count, words) in [(1, "it lies outside"), (2, "2 extents from there on lie outside")] {
        let Some(volume) = volume() else { return };
        let end = chunks(&volume).iter().map(|chunk| chunk.0 + chunk.1).max().expect("a chunk");
        let first = end + (8 << 20);
        let places = (first..).step_by(1 << 20);
        let small = small_extents(&volume);
        let moves: Vec<_> = small.iter().map(|one| one.0).zip(places).take(count).collect();
        move_extents(&volume, &moves);
        require_at(&volume, (BtrfsFindingCode::ExtentPlace, ProgsVerdict::Agrees), &[first], words);
    }
}

/// Files without checksums are what these tests change.
#[test]
fn the_files_have_no_checksums() {
    let Some(volume) = volume() else { return };
    let items = volume.leaves(TreeId::FS).into_iter().flatten();
    let mut inodes = items.filter(|(key, _)| key.item_type == ItemType::INODE_ITEM);
    let flags = |data: &[u8]| InodeItem::view(data).expect("an inode").flags.get();
    assert!(
        inodes.any(|(key, data)| {
            key.objectid > 256 && flags(&data) & inode_flags::NODATASUM != 0
        })
    );
    let image = File::open(&volume.disks().images()[0]).expect("an image");
    let mut magic = [0; 8];
    image.read_exact_at(&mut magic, (64 << 20) + 64).expect("it reads");
    assert_eq!(&magic, b"_BHRfS_M", "a superblock lies at 64 MiB");
}
