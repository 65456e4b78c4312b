//! The fields of the structures that are patched, by their offset in the item.

use offshoot_btrfs_format::ItemType;

/// A number in an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ItemField {
    pub(crate) name: String,
    /// The offset of its first byte.
    pub(crate) at: usize,
    /// Its length in bytes. In a field of more than eight bytes, a patch flips single bits.
    pub(crate) width: usize,
}

/// The fields of a structure with these names and widths in bytes, from offset `at` on. A field `_`
/// is skipped.
fn layout(at: usize, fields: &[(&str, usize)]) -> Vec<ItemField> {
    let mut at = at;
    let mut all = Vec::new();
    for &(name, width) in fields {
        if name != "_" {
            all.push(ItemField { name: name.to_owned(), at, width });
        }
        at += width;
    }
    all
}

const CHUNK: [(&str, usize); 9] = [
    ("length", 8),
    ("owner", 8),
    ("stripe_len", 8),
    ("type", 8),
    ("io_align", 4),
    ("io_width", 4),
    ("sector_size", 4),
    ("num_stripes", 2),
    ("sub_stripes", 2),
];

const STRIPE: [(&str, usize); 3] = [("stripe devid", 8), ("stripe offset", 8), ("stripe uuid", 16)];

const INODE: [(&str, usize); 12] = [
    ("generation", 8),
    ("transid", 8),
    ("size", 8),
    ("nbytes", 8),
    ("block_group", 8),
    ("nlink", 4),
    ("uid", 4),
    ("gid", 4),
    ("mode", 4),
    ("rdev", 8),
    ("flags", 8),
    ("sequence", 8),
];

const ROOT: [(&str, usize); 15] = [
    ("generation", 8),
    ("root_dirid", 8),
    ("bytenr", 8),
    ("byte_limit", 8),
    ("bytes_used", 8),
    ("last_snapshot", 8),
    ("flags", 8),
    ("refs", 4),
    ("drop_progress", 17),
    ("drop_level", 1),
    ("level", 1),
    ("generation_v2", 8),
    ("uuid", 16),
    ("parent_uuid", 16),
    ("received_uuid", 16),
];

const ENTRY: [(&str, usize); 7] = [
    ("location objectid", 8),
    ("location type", 1),
    ("location offset", 8),
    ("transid", 8),
    ("data_len", 2),
    ("name_len", 2),
    ("type", 1),
];

const FILE_EXTENT: [(&str, usize); 10] = [
    ("generation", 8),
    ("ram_bytes", 8),
    ("compression", 1),
    ("encryption", 1),
    ("other_encoding", 2),
    ("type", 1),
    ("disk_bytenr", 8),
    ("disk_num_bytes", 8),
    ("offset", 8),
    ("num_bytes", 8),
];

const DEVICE: [(&str, usize); 14] = [
    ("devid", 8),
    ("total_bytes", 8),
    ("bytes_used", 8),
    ("io_align", 4),
    ("io_width", 4),
    ("sector_size", 4),
    ("type", 8),
    ("generation", 8),
    ("start_offset", 8),
    ("dev_group", 4),
    ("seek_speed", 1),
    ("bandwidth", 1),
    ("uuid", 16),
    ("fsid", 16),
];

const DATA_REF: [(&str, usize); 4] = [("root", 8), ("objectid", 8), ("offset", 8), ("count", 4)];

/// The fields of a superblock behind its checksum, its id and its own address. The gap between them
/// holds the array of system chunks, which has its own fields.
const SUPERBLOCK: [(&str, usize); 26] = [
    ("flags", 8),
    ("magic", 8),
    ("generation", 8),
    ("root", 8),
    ("chunk_root", 8),
    ("log_root", 8),
    ("log_root_transid", 8),
    ("total_bytes", 8),
    ("bytes_used", 8),
    ("root_dir_objectid", 8),
    ("num_devices", 8),
    ("sector_size", 4),
    ("node_size", 4),
    ("leaf_size", 4),
    ("stripe_size", 4),
    ("sys_chunk_array_size", 4),
    ("chunk_root_generation", 8),
    ("compat", 8),
    ("compat_ro", 8),
    ("incompat", 8),
    ("csum_type", 2),
    ("root_level", 1),
    ("chunk_root_level", 1),
    ("log_root_level", 1),
    ("_", 354),
    ("cache_generation", 8),
];

/// The offset of the first field of a superblock.
const SUPERBLOCK_AT: usize = 56;

/// The offset of the array of system chunks.
const SYSTEM_CHUNKS_AT: usize = 811;

/// The fields of a superblock.
pub(crate) fn of_superblock() -> Vec<ItemField> {
    let mut all = layout(SUPERBLOCK_AT, &SUPERBLOCK);
    all.extend(layout(201, &DEVICE));
    all.extend(layout(563, &[("uuid_tree_generation", 8)]));
    let key = [("system chunk objectid", 8), ("system chunk type", 1), ("system chunk at", 8)];
    all.extend(layout(SYSTEM_CHUNKS_AT, &key));
    all.extend(layout(SYSTEM_CHUNKS_AT + 17, &CHUNK));
    all.extend(layout(SYSTEM_CHUNKS_AT + 17 + 48, &STRIPE));
    all
}

/// The inline references of an extent item, from offset `at` on.
fn inline_references(data: &[u8], mut at: usize) -> Vec<ItemField> {
    let mut all = Vec::new();
    while let Some(&kind) = data.get(at) {
        all.extend(layout(at, &[("reference type", 1)]));
        let fields: &[(&str, usize)] = match ItemType(kind) {
            ItemType::TREE_BLOCK_REF => &[("reference root", 8)],
            ItemType::SHARED_BLOCK_REF => &[("reference parent", 8)],
            ItemType::EXTENT_DATA_REF => &DATA_REF,
            ItemType::SHARED_DATA_REF => &[("reference parent", 8), ("count", 4)],
            _ => break,
        };
        all.extend(layout(at + 1, fields));
        at += 1 + fields.iter().map(|field| field.1).sum::<usize>();
    }
    all
}

/// The fields of an item of this type, as far as these contents reach.
pub(crate) fn of_item(item_type: ItemType, data: &[u8]) -> Vec<ItemField> {
    let mut all = match item_type {
        ItemType::CHUNK_ITEM => {
            let mut all = layout(0, &CHUNK);
            for stripe in 0..data.len().saturating_sub(48) / 32 {
                all.extend(layout(48 + stripe * 32, &STRIPE));
            }
            all
        }
        ItemType::DEV_EXTENT => layout(
            0,
            &[
                ("chunk_tree", 8),
                ("chunk_objectid", 8),
                ("chunk_offset", 8),
                ("length", 8),
                ("chunk_tree_uuid", 16),
            ],
        ),
        ItemType::BLOCK_GROUP_ITEM => {
            layout(0, &[("used", 8), ("chunk_objectid", 8), ("flags", 8)])
        }
        ItemType::EXTENT_ITEM | ItemType::METADATA_ITEM => {
            const TREE_BLOCK: u8 = 2;
            let mut all = layout(0, &[("refs", 8), ("generation", 8), ("flags", 8)]);
            let is_block = data.get(16).is_some_and(|flags| flags & TREE_BLOCK != 0);
            let mut at = 24;
            if is_block && item_type == ItemType::EXTENT_ITEM {
                all.extend(layout(24, &[("first key", 17), ("level", 1)]));
                at += 18;
            }
            all.extend(inline_references(data, at));
            all
        }
        ItemType::EXTENT_DATA_REF => layout(0, &DATA_REF),
        ItemType::SHARED_DATA_REF => layout(0, &[("count", 4)]),
        ItemType::ROOT_ITEM => {
            let mut all = layout(0, &INODE);
            all.extend(layout(160, &ROOT));
            all
        }
        ItemType::ROOT_REF | ItemType::ROOT_BACKREF => {
            layout(0, &[("dirid", 8), ("sequence", 8), ("name_len", 2), ("name", 1)])
        }
        ItemType::INODE_ITEM => layout(0, &INODE),
        ItemType::INODE_REF => layout(0, &[("index", 8), ("name_len", 2), ("name", 1)]),
        ItemType::INODE_EXTREF => {
            layout(0, &[("parent", 8), ("index", 8), ("name_len", 2), ("name", 1)])
        }
        ItemType::DIR_ITEM | ItemType::DIR_INDEX | ItemType::XATTR_ITEM => {
            let mut all = layout(0, &ENTRY);
            all.extend(layout(30, &[("name", 1)]));
            all
        }
        ItemType::EXTENT_DATA => layout(0, &FILE_EXTENT),
        ItemType::FREE_SPACE_INFO => layout(0, &[("extent_count", 4), ("flags", 4)]),
        ItemType::DEV_ITEM => layout(0, &DEVICE),
        ItemType::UUID_KEY_SUBVOL | ItemType::UUID_KEY_RECEIVED_SUBVOL => {
            layout(0, &[("subvolume", 8)])
        }
        _ if data.is_empty() => Vec::new(),
        _ => layout(0, &[("bytes", data.len())]),
    };
    all.retain(|field| field.at + field.width <= data.len());
    all
}
