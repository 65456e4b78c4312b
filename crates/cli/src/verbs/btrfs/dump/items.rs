//! Decodes every item type that the format crate knows.

use std::fmt::{self, Write as _};

use offshoot_btrfs_format::chunk::{BlockGroupFlags, Chunk, DevExtent, DevItem, RaidStride};
use offshoot_btrfs_format::dir::{dir_entries, file_type};
use offshoot_btrfs_format::extent::{
    EXTENT_FLAG_DATA, EXTENT_FLAG_FULL_BACKREF, EXTENT_FLAG_TREE_BLOCK, ExtentDataRef, InlineRef,
    ParsedExtent,
};
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::inode::{InodeItem, InodeName, inode_extrefs, inode_flags, inode_refs};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::root::{RootItem, RootRef};
use offshoot_btrfs_format::space::{
    BlockGroupItem, DevReplaceItem, DevStatsItem, DirLogItem, FreeSpaceHeader, FreeSpaceInfo,
    QgroupInfoItem, QgroupLimitItem, QgroupStatusItem,
};
use offshoot_btrfs_format::{ItemType, Key, Malformed, TreeId, U32, U64};
use offshoot_vfs::Structure;
use zerocopy::FromBytes;

use super::{chunks, superblock};
use crate::verbs::fields::Fields;

/// How many bytes of data are shown if there is no structure to decode.
const BYTES_SHOWN: usize = 32;

/// The origin of an item, which decides how it is decoded.
#[derive(Clone, Copy)]
pub(super) struct ItemOrigin {
    /// The tree that contains the item.
    pub(super) tree: TreeId,
    /// The sector size of the volume.
    pub(super) sector_size: u32,
}

/// A key in a form for users: a part that is the id of a tree is shown by the tree's name.
pub(super) struct ShownKey {
    /// The tree that contains the key.
    pub(super) tree: TreeId,
    /// The key.
    pub(super) key: Key,
}

impl fmt::Display for ShownKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Key { objectid, item_type, offset } = self.key;
        // Keys of roots and of references between them. In a log tree, the offset is the
        // subvolume's id.
        let holds_roots = matches!(self.tree, TreeId::ROOT | TreeId::TREE_LOG);
        match item_type {
            ItemType::ROOT_ITEM if holds_roots && TreeId(objectid) == TreeId::TREE_RELOC => {
                write!(f, "({} {item_type} {})", TreeId(objectid), TreeId(offset))
            }
            ItemType::ROOT_ITEM if holds_roots => {
                write!(f, "({} {item_type} {offset})", TreeId(objectid))
            }
            ItemType::ROOT_REF | ItemType::ROOT_BACKREF if holds_roots => {
                write!(f, "({} {item_type} {})", TreeId(objectid), TreeId(offset))
            }
            ItemType::TREE_BLOCK_REF => {
                write!(f, "({objectid} {item_type} {})", TreeId(offset))
            }
            _ => write!(f, "({objectid} {item_type} {offset})"),
        }
    }
}

/// Decodes an item.
pub(super) fn decode(source: ItemOrigin, key: Key, data: &[u8]) -> Result<Fields, Malformed> {
    Ok(match key.item_type {
        ItemType::INODE_ITEM => inode(InodeItem::view(data)?),
        ItemType::INODE_REF => names(inode_refs(key.offset, data))?,
        ItemType::INODE_EXTREF => names(inode_extrefs(data))?,
        ItemType::XATTR_ITEM | ItemType::DIR_ITEM | ItemType::DIR_INDEX => entries(key, data)?,
        ItemType::EXTENT_DATA => file_extent(data)?,
        ItemType::ROOT_ITEM => root(&RootItem::parse(data)?),
        ItemType::ROOT_REF | ItemType::ROOT_BACKREF => {
            let reference = RootRef::parse(data)?;
            Fields::default()
                .with("dirid", reference.dirid)
                .with("sequence", reference.sequence)
                .name("name", reference.name)
        }
        ItemType::EXTENT_ITEM | ItemType::METADATA_ITEM => extent(key, data)?,
        ItemType::EXTENT_DATA_REF => data_ref(view(data)?),
        ItemType::SHARED_DATA_REF => Fields::default().with("count", *view::<U32>(data)?),
        ItemType::EXTENT_OWNER_REF => Fields::default().tree("root", *view::<U64>(data)?),
        ItemType::BLOCK_GROUP_ITEM => {
            let item = BlockGroupItem::view(data)?;
            let flags = BlockGroupFlags(item.flags.get());
            Fields::default()
                .with("used", item.used)
                .with("chunk_objectid", item.chunk_objectid)
                .with("flags", item.flags)
                .with("holds", flags.kind())
                .with("profile", flags.profile()?.to_string())
        }
        ItemType::FREE_SPACE_INFO => {
            let item = FreeSpaceInfo::view(data)?;
            Fields::default().with("extent_count", item.extent_count).with("flags", item.flags)
        }
        ItemType::FREE_SPACE_BITMAP => {
            let free: u32 = data.iter().map(|byte| byte.count_ones()).sum();
            Fields::default().with("free_sectors", free).with("bitmap", hex(data))
        }
        ItemType::DEV_EXTENT => dev_extent(view(data)?),
        ItemType::DEV_ITEM => superblock::device(DevItem::view(data)?),
        ItemType::CHUNK_ITEM => chunk(key, data, source.sector_size)?,
        ItemType::RAID_STRIPE => {
            let copies = RaidStride::view_all(data)?;
            let copies = copies.iter().map(|copy| format!("{}:{}", copy.devid, copy.physical));
            Fields::default().with("copies", copies.collect::<Vec<_>>())
        }
        ItemType::EXTENT_CSUM => Fields::default().with("csums", hex(data)),
        ItemType::QGROUP_STATUS | ItemType::QGROUP_INFO | ItemType::QGROUP_LIMIT => {
            quota(key.item_type, data)?
        }
        ItemType::PERSISTENT_ITEM if key.objectid == objectid::DEV_STATS => {
            dev_stats(DevStatsItem::view(data)?)
        }
        ItemType::DEV_REPLACE => dev_replace(DevReplaceItem::view(data)?),
        ItemType::DIR_LOG_INDEX | ItemType::DIR_LOG_ITEM => {
            Fields::default().with("end", DirLogItem::view(data)?.end)
        }
        ItemType::UUID_KEY_SUBVOL | ItemType::UUID_KEY_RECEIVED_SUBVOL => {
            let ids: Vec<u64> =
                data.as_chunks::<8>().0.iter().map(|id| u64::from_le_bytes(*id)).collect();
            Fields::default().uuid("uuid", uuid_of(key)).with("subvolumes", ids)
        }
        ItemType::UNTYPED
            if source.tree == TreeId::ROOT && key.objectid == objectid::FREE_SPACE =>
        {
            free_space_header(FreeSpaceHeader::view(data)?)
        }
        ItemType::STRING_ITEM => Fields::default().name("string", data),
        _ if data.is_empty() => Fields::default(),
        _ => Fields::default().with("bytes", hex(data)),
    })
}

fn view<T: FromBytes + zerocopy::KnownLayout + zerocopy::Immutable>(
    data: &[u8],
) -> Result<&T, Malformed> {
    let problem = || format!("{} bytes, but it needs {}", data.len(), size_of::<T>());
    T::ref_from_prefix(data)
        .map(|(item, _)| item)
        .map_err(|_| Malformed::new(Structure::Item, problem()))
}

/// The first bytes in hexadecimal, and how many follow.
fn hex(data: &[u8]) -> String {
    let mut text = String::new();
    for byte in &data[..data.len().min(BYTES_SHOWN)] {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    if data.len() > BYTES_SHOWN {
        let _ = write!(text, "...({} bytes)", data.len());
    }
    text
}

/// The UUID that a key of the UUID tree holds.
fn uuid_of(key: Key) -> [u8; 16] {
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&key.objectid.to_le_bytes());
    uuid[8..].copy_from_slice(&key.offset.to_le_bytes());
    uuid
}

fn inode(item: &InodeItem) -> Fields {
    let (major, minor) = item.device_number();
    Fields::default()
        .with("generation", item.generation)
        .with("transid", item.transid)
        .with("size", item.size)
        .with("nbytes", item.nbytes)
        .with("block_group", item.block_group)
        .with("nlink", item.nlink)
        .with("uid", item.uid)
        .with("gid", item.gid)
        .with("mode", format!("{:o}", item.mode))
        .with("rdev", format!("{major}:{minor}"))
        .with("flags", inode_flags::names(item.flags.get()))
        .with("sequence", item.sequence)
        .time("atime", &item.atime)
        .time("ctime", &item.ctime)
        .time("mtime", &item.mtime)
        .time("otime", &item.otime)
}

fn names<'a>(
    names: impl Iterator<Item = Result<InodeName<'a>, Malformed>>,
) -> Result<Fields, Malformed> {
    let mut list = Vec::new();
    for name in names {
        let name = name?;
        list.push(
            Fields::default()
                .with("parent", name.parent)
                .with("index", name.index)
                .name("name", name.name),
        );
    }
    Ok(Fields::default().with("names", list))
}

fn entries(key: Key, data: &[u8]) -> Result<Fields, Malformed> {
    let mut list = Vec::new();
    for entry in dir_entries(data) {
        let entry = entry?;
        let mut fields = Fields::default().name("name", entry.name);
        if key.item_type == ItemType::XATTR_ITEM {
            let shown = &entry.data[..entry.data.len().min(BYTES_SHOWN)];
            fields = fields.name("value", shown).with("value_len", entry.data.len() as u64);
        } else {
            fields = fields
                .with("location", entry.location.to_string())
                .with("type", file_type_name(entry.file_type));
        }
        list.push(fields.with("transid", entry.transid));
    }
    Ok(Fields::default().with("entries", list))
}

fn file_type_name(value: u8) -> String {
    match value & !file_type::ENCRYPTED {
        file_type::REG_FILE => "file".into(),
        file_type::DIR => "directory".into(),
        file_type::CHRDEV => "char_device".into(),
        file_type::BLKDEV => "block_device".into(),
        file_type::FIFO => "fifo".into(),
        file_type::SOCK => "socket".into(),
        file_type::SYMLINK => "symlink".into(),
        file_type::XATTR => "xattr".into(),
        other => format!("type {other}"),
    }
}

fn file_extent(data: &[u8]) -> Result<Fields, Malformed> {
    let extent = FileExtent::parse(data)?;
    let fields = Fields::default()
        .with("generation", extent.generation.0)
        .with("ram_bytes", extent.ram_bytes)
        .with("compression", extent.compression.name());
    Ok(match extent.body {
        FileExtentBody::Inline(bytes) => {
            fields.with("kind", "inline").with("inline_bytes", bytes.len() as u64)
        }
        FileExtentBody::Hole { num_bytes } => {
            fields.with("kind", "hole").with("num_bytes", num_bytes)
        }
        FileExtentBody::Extent {
            disk_bytenr,
            disk_num_bytes,
            offset,
            num_bytes,
            is_preallocated,
        } => fields
            .with("kind", if is_preallocated { "preallocated" } else { "regular" })
            .with("disk_bytenr", disk_bytenr.0)
            .with("disk_num_bytes", disk_num_bytes)
            .with("offset", offset)
            .with("num_bytes", num_bytes),
    })
}

fn root(item: &RootItem) -> Fields {
    Fields::default()
        .with("generation", item.generation)
        .with("root_dirid", item.root_dirid)
        .with("bytenr", item.bytenr)
        .with("byte_limit", item.byte_limit)
        .with("bytes_used", item.bytes_used)
        .with("last_snapshot", item.last_snapshot)
        .with("flags", item.flags)
        .with("refs", item.refs)
        .with("drop_progress", item.drop_progress.get().to_string())
        .with("drop_level", item.drop_level)
        .with("level", item.level)
        .with("generation_v2", item.generation_v2)
        .uuid("uuid", item.uuid)
        .uuid("parent_uuid", item.parent_uuid)
        .uuid("received_uuid", item.received_uuid)
        .with("ctransid", item.ctransid)
        .with("otransid", item.otransid)
        .with("stransid", item.stransid)
        .with("rtransid", item.rtransid)
        .time("ctime", &item.ctime)
        .time("otime", &item.otime)
        .time("stime", &item.stime)
        .time("rtime", &item.rtime)
}

fn extent(key: Key, data: &[u8]) -> Result<Fields, Malformed> {
    let extent = ParsedExtent::parse(key.item_type, data)?;
    let flags = extent.item.flags.get();
    let flag_names: Vec<&str> = [
        (EXTENT_FLAG_DATA, "DATA"),
        (EXTENT_FLAG_TREE_BLOCK, "TREE_BLOCK"),
        (EXTENT_FLAG_FULL_BACKREF, "FULL_BACKREF"),
    ]
    .into_iter()
    .filter_map(|(bit, name)| (flags & bit != 0).then_some(name))
    .collect();
    let mut fields = Fields::default()
        .with("refs", extent.item.refs)
        .with("generation", extent.item.generation)
        .with("flags", flag_names);
    if let Some(block) = extent.block {
        fields = fields.with("first_key", block.key.get().to_string()).with("level", block.level);
    }
    let mut list = Vec::new();
    for reference in extent.inline_refs() {
        let kind = |name| Fields::default().with("kind", name);
        list.push(match reference? {
            InlineRef::TreeBlock(root) => kind("tree_block").tree("root", root),
            InlineRef::SharedBlock(parent) => kind("shared_block").with("parent", parent),
            InlineRef::ExtentData(item) => {
                let mut fields = kind("data");
                fields.0.extend(data_ref(item).0);
                fields
            }
            InlineRef::SharedData { parent, count } => {
                kind("shared_data").with("parent", parent).with("count", count)
            }
            InlineRef::Owner(root) => kind("owner").tree("root", root),
        });
    }
    Ok(fields.with("inline_refs", list))
}

fn data_ref(item: &ExtentDataRef) -> Fields {
    Fields::default()
        .tree("root", item.root)
        .with("objectid", item.objectid)
        .with("offset", item.offset)
        .with("count", item.count)
}

fn dev_extent(item: &DevExtent) -> Fields {
    Fields::default()
        .tree("chunk_tree", item.chunk_tree)
        .with("chunk_objectid", item.chunk_objectid)
        .with("chunk_offset", item.chunk_offset)
        .with("length", item.length)
        .uuid("chunk_tree_uuid", item.chunk_tree_uuid)
}

fn chunk(key: Key, data: &[u8], sector_size: u32) -> Result<Fields, Malformed> {
    Ok(chunks::fields(&Chunk::parse_prefix(key, data, sector_size)?.0))
}

fn quota(item_type: ItemType, data: &[u8]) -> Result<Fields, Malformed> {
    Ok(match item_type {
        ItemType::QGROUP_STATUS => {
            let item = QgroupStatusItem::view(data)?;
            Fields::default()
                .with("version", item.version)
                .with("generation", item.generation)
                .with("flags", item.flags)
                .with("rescan", item.rescan)
        }
        ItemType::QGROUP_INFO => {
            let item = QgroupInfoItem::view(data)?;
            Fields::default()
                .with("generation", item.generation)
                .with("rfer", item.rfer)
                .with("rfer_cmpr", item.rfer_cmpr)
                .with("excl", item.excl)
                .with("excl_cmpr", item.excl_cmpr)
        }
        _ => {
            let item = QgroupLimitItem::view(data)?;
            Fields::default()
                .with("flags", item.flags)
                .with("max_rfer", item.max_rfer)
                .with("max_excl", item.max_excl)
                .with("rsv_rfer", item.rsv_rfer)
                .with("rsv_excl", item.rsv_excl)
        }
    })
}

fn dev_stats(item: &DevStatsItem) -> Fields {
    Fields::default()
        .with("write_errs", item.write_errs)
        .with("read_errs", item.read_errs)
        .with("flush_errs", item.flush_errs)
        .with("corruption_errs", item.corruption_errs)
        .with("generation_errs", item.generation_errs)
}

fn dev_replace(item: &DevReplaceItem) -> Fields {
    Fields::default()
        .with("src_devid", item.src_devid)
        .with("cursor_left", item.cursor_left)
        .with("cursor_right", item.cursor_right)
        .with("cont_reading_from_srcdev_mode", item.cont_reading_from_srcdev_mode)
        .with("replace_state", item.replace_state)
        .with("time_started", item.time_started)
        .with("time_stopped", item.time_stopped)
        .with("num_write_errors", item.num_write_errors)
        .with("num_uncorrectable_read_errors", item.num_uncorrectable_read_errors)
}

fn free_space_header(item: &FreeSpaceHeader) -> Fields {
    Fields::default()
        .with("location", item.location.get().to_string())
        .with("generation", item.generation)
        .with("num_entries", item.num_entries)
        .with("num_bitmaps", item.num_bitmaps)
}
