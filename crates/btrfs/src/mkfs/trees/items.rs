//! The items of each tree of a new volume.

use offshoot_btrfs_format::chunk::{Chunk, DevExtent, DevItem};
use offshoot_btrfs_format::dir::{DirItemEntry, file_type, name_hash};
use offshoot_btrfs_format::encode::{
    chunk_item, chunk_key, dir_entry, inode_ref, tree_block_extent, uuid_key,
};
use offshoot_btrfs_format::inode::{InodeItem, Timespec, inode_flags};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::space::{BlockGroupItem, DevStatsItem, FreeSpaceInfo};
use offshoot_btrfs_format::superblock::{CompatRo, Incompat};
use offshoot_btrfs_format::{Ino, ItemType, Key, TreeId, U64};
use zerocopy::{FromZeros, IntoBytes};

use super::{GENERATION, Layout, NewTree, NewTrees, TreeItems, VolumeSpec};

/// The mode of a directory that every user may read.
const DIRECTORY_MODE: u32 = 0o040_755;

/// The size that the kernel gives to the inode in a root item.
const ROOT_INODE_SIZE: u64 = 3;

/// The items of tree `id`; `trees` says where the blocks of all trees are.
pub(super) fn of(id: TreeId, spec: &VolumeSpec, layout: &Layout, trees: &NewTrees) -> TreeItems {
    match id {
        TreeId::CHUNK => chunk_tree(spec, layout),
        TreeId::ROOT => root_tree(spec, trees),
        TreeId::EXTENT => extent_tree(spec, layout, trees),
        TreeId::DEV => device_tree(spec, layout),
        TreeId::FS => directory(spec, Ino::ROOT_DIR.0, spec.root_owner),
        TreeId::DATA_RELOC => directory(spec, Ino::ROOT_DIR.0, (0, 0)),
        TreeId::UUID => uuid_tree(spec),
        TreeId::FREE_SPACE => free_space_tree(spec, layout, trees),
        TreeId::BLOCK_GROUP => block_groups(spec, layout, trees),
        _ => TreeItems::new(),
    }
}

/// The item of the device with `index`, which counts from 0. The chunk tree and the superblock of
/// the device have it.
pub(in crate::mkfs) fn device_item(spec: &VolumeSpec, layout: &Layout, index: usize) -> DevItem {
    let device = &layout.devices[index];
    DevItem {
        devid: device.id.0.into(),
        total_bytes: device.total_bytes.into(),
        bytes_used: device.bytes_used().into(),
        io_align: spec.sector_size.into(),
        io_width: spec.sector_size.into(),
        sector_size: spec.sector_size.into(),
        uuid: spec.device_uuids[index].into_bytes(),
        fsid: spec.fsid.into_bytes(),
        ..DevItem::new_zeroed()
    }
}

fn chunk_tree(spec: &VolumeSpec, layout: &Layout) -> TreeItems {
    let mut items = TreeItems::new();
    for (index, device) in layout.devices.iter().enumerate() {
        let key = Key::new(objectid::DEV_ITEMS, ItemType::DEV_ITEM, device.id.0);
        items.insert(key, device_item(spec, layout, index).as_bytes().to_vec());
    }
    for chunk in &layout.chunks {
        items.insert(chunk_key(chunk), chunk_item(chunk, spec.sector_size));
    }
    items
}

fn device_tree(spec: &VolumeSpec, layout: &Layout) -> TreeItems {
    let mut items = TreeItems::new();
    for device in &layout.devices {
        let key = Key::new(objectid::DEV_STATS, ItemType::PERSISTENT_ITEM, device.id.0);
        items.insert(key, DevStatsItem::new_zeroed().as_bytes().to_vec());
    }
    for chunk in &layout.chunks {
        for stripe in &chunk.stripes {
            let extent = DevExtent {
                chunk_tree: TreeId::CHUNK.0.into(),
                chunk_objectid: objectid::FIRST_CHUNK_TREE.into(),
                chunk_offset: chunk.start.0.into(),
                length: chunk.stripe_bytes().into(),
                chunk_tree_uuid: spec.chunk_tree_uuid.into_bytes(),
            };
            let key = Key::new(stripe.device.0, ItemType::DEV_EXTENT, stripe.physical.0);
            items.insert(key, extent.as_bytes().to_vec());
        }
    }
    items
}

/// The root items of all trees except the two that the superblock leads to, and the directory that
/// names the default subvolume.
fn root_tree(spec: &VolumeSpec, trees: &NewTrees) -> TreeItems {
    const DEFAULT: &[u8] = b"default";
    let dir = objectid::ROOT_TREE_DIR;
    let mut items = directory(spec, dir, (0, 0));
    for tree in &trees.all {
        if !matches!(tree.id, TreeId::ROOT | TreeId::CHUNK) {
            let key = Key::new(tree.id.0, ItemType::ROOT_ITEM, 0);
            items.insert(key, root_item(spec, tree).as_bytes().to_vec());
        }
    }
    let entry = DirItemEntry {
        location: Key::new(TreeId::FS.0, ItemType::ROOT_ITEM, u64::MAX),
        transid: GENERATION.0,
        file_type: file_type::DIR,
        name: DEFAULT,
        data: b"",
    };
    items.insert(Key::new(dir, ItemType::DIR_ITEM, name_hash(DEFAULT)), dir_entry(&entry));
    items.insert(Key::new(TreeId::FS.0, ItemType::INODE_REF, dir), inode_ref(0, DEFAULT));
    items
}

fn root_item(spec: &VolumeSpec, tree: &NewTree) -> RootItem {
    let mut item = RootItem {
        generation: GENERATION.0.into(),
        generation_v2: GENERATION.0.into(),
        bytenr: tree.root_logical().0.into(),
        level: tree.root_level(),
        bytes_used: (tree.blocks.len() as u64 * u64::from(spec.node_size)).into(),
        refs: 1.into(),
        ..RootItem::new_zeroed()
    };
    // The root item of a tree with inodes has the template of an inode.
    if matches!(tree.id, TreeId::FS | TreeId::DATA_RELOC) {
        item.root_dirid = Ino::ROOT_DIR.0.into();
        item.inode = InodeItem {
            generation: 1.into(),
            size: ROOT_INODE_SIZE.into(),
            nbytes: u64::from(spec.node_size).into(),
            nlink: 1.into(),
            mode: DIRECTORY_MODE.into(),
            flags: inode_flags::ROOT_ITEM_INIT.into(),
            ..InodeItem::new_zeroed()
        };
    }
    if tree.id == TreeId::FS {
        item.uuid = spec.subvolume_uuid.into_bytes();
        item.ctransid = GENERATION.0.into();
        item.otransid = GENERATION.0.into();
        item.ctime = timespec(spec);
        item.otime = timespec(spec);
    }
    item
}

/// An empty directory that is the root directory of its tree.
fn directory(spec: &VolumeSpec, ino: u64, (uid, gid): (u32, u32)) -> TreeItems {
    let time = timespec(spec);
    let inode = InodeItem {
        generation: GENERATION.0.into(),
        transid: GENERATION.0.into(),
        nbytes: u64::from(spec.node_size).into(),
        nlink: 1.into(),
        mode: DIRECTORY_MODE.into(),
        uid: uid.into(),
        gid: gid.into(),
        atime: time,
        ctime: time,
        mtime: time,
        otime: time,
        ..InodeItem::new_zeroed()
    };
    TreeItems::from([
        (Key::new(ino, ItemType::INODE_ITEM, 0), inode.as_bytes().to_vec()),
        (Key::new(ino, ItemType::INODE_REF, ino), inode_ref(0, b"..")),
    ])
}

fn timespec(spec: &VolumeSpec) -> Timespec {
    Timespec { sec: spec.time.secs.cast_unsigned().into(), nsec: spec.time.nanos.into() }
}

fn uuid_tree(spec: &VolumeSpec) -> TreeItems {
    let key = uuid_key(spec.subvolume_uuid, ItemType::UUID_KEY_SUBVOL);
    TreeItems::from([(key, U64::new(TreeId::FS.0).as_bytes().to_vec())])
}

/// Every block has an extent item. Block groups are in this tree if they have no tree of their own.
fn extent_tree(spec: &VolumeSpec, layout: &Layout, trees: &NewTrees) -> TreeItems {
    let mut items = TreeItems::new();
    let skinny = spec.incompat.has(Incompat::SKINNY_METADATA);
    for tree in &trees.all {
        items.extend(tree.blocks.iter().map(|block| {
            let identity = tree.identity(block, spec);
            tree_block_extent(&identity, block.first_key, spec.node_size, skinny)
        }));
    }
    if !spec.compat_ro.has(CompatRo::BLOCK_GROUP_TREE) {
        items.extend(block_groups(spec, layout, trees));
    }
    items
}

fn block_groups(spec: &VolumeSpec, layout: &Layout, trees: &NewTrees) -> TreeItems {
    let item = |chunk: &Chunk| {
        let item = BlockGroupItem {
            used: trees.used_in(chunk, spec).into(),
            chunk_objectid: objectid::FIRST_CHUNK_TREE.into(),
            flags: chunk.flags.0.into(),
        };
        let key = Key::new(chunk.start.0, ItemType::BLOCK_GROUP_ITEM, chunk.length);
        (key, item.as_bytes().to_vec())
    };
    layout.chunks.iter().map(item).collect()
}

/// The gaps between blocks, by block group. There are a handful at most, far fewer than would need
/// bitmaps.
fn free_space_tree(spec: &VolumeSpec, layout: &Layout, trees: &NewTrees) -> TreeItems {
    let mut items = TreeItems::new();
    let node_size = u64::from(spec.node_size);
    let addresses = trees.addresses();
    for chunk in &layout.chunks {
        let (mut free_from, mut count) = (chunk.start.0, 0u32);
        let mut add = |from: u64, to: u64| {
            if from < to {
                let key = Key::new(from, ItemType::FREE_SPACE_EXTENT, to - from);
                items.insert(key, Vec::new());
                count += 1;
            }
        };
        for block in addresses.iter().filter(|at| (chunk.start..chunk.end()).contains(at)) {
            add(free_from, block.0);
            free_from = block.0 + node_size;
        }
        add(free_from, chunk.end().0);
        let info = FreeSpaceInfo { extent_count: count.into(), flags: 0.into() };
        let key = Key::new(chunk.start.0, ItemType::FREE_SPACE_INFO, chunk.length);
        items.insert(key, info.as_bytes().to_vec());
    }
    items
}
