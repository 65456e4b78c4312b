//! What the items of an inode say, as far as they were seen.

use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::dir::{dir_entries, file_type};
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::inode::{InodeItem, inode_extrefs, inode_refs};
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_vfs::FileType;

use super::judge::InodeRules;
use super::names::{entry_hash, name_hash};
use super::verity::VerityItems;

/// What the items of an inode say, from some of them to all of them.
#[derive(Clone, Debug)]
pub(super) struct CheckedInode {
    pub(super) ino: u64,
    /// Whether some of its items may be in a part of the tree that cannot be read.
    pub(super) is_cut: bool,
    pub(super) item: Option<InodeFacts>,
    /// Whether there are items that only belong to an inode.
    pub(super) has_other_items: bool,
    /// Whether it is a name of itself, other than `..` of a root directory.
    pub(super) has_wrong_root_name: bool,
    /// How many names it has, `..` of a root directory included.
    pub(super) names: u64,
    /// The sum of the hashes of its names.
    name_sum: u128,
    pub(super) entries: EntryItems,
    pub(super) extents: ExtentItems,
    pub(super) verity: Option<Box<VerityItems>>,
}

/// What is kept of an inode item.
#[derive(Clone, Copy, Debug)]
pub(super) struct InodeFacts {
    pub(super) size: u64,
    /// The field `nbytes`.
    pub(super) bytes: u64,
    pub(super) links: u32,
    pub(super) mode: u32,
    pub(super) flags: u64,
}

/// The directory entries of an inode.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EntryItems {
    /// Whether there are any, by hash or by index.
    pub(super) are_there: bool,
    /// The lengths of the names of all entries by index, in bytes.
    pub(super) name_bytes: u64,
    /// The hashes of the entries by index less those of the entries by hash.
    pub(super) difference: u128,
}

impl InodeFacts {
    fn of(item: &InodeItem) -> Self {
        Self {
            size: item.size.get(),
            bytes: item.nbytes.get(),
            links: item.nlink.get(),
            mode: item.mode.get(),
            flags: item.flags.get(),
        }
    }

    /// The type in its mode; `None` when that names no type.
    pub(super) fn file_type(&self) -> Option<FileType> {
        FileType::from_mode(self.mode)
    }
}

impl CheckedInode {
    /// An inode without items.
    pub(super) fn new(ino: u64) -> Self {
        Self {
            ino,
            is_cut: false,
            item: None,
            has_other_items: false,
            has_wrong_root_name: false,
            names: 0,
            name_sum: 0,
            entries: EntryItems::default(),
            extents: ExtentItems::default(),
            verity: None,
        }
    }

    /// Adds an item. Returns the sum of the hashes of the names that it gives to other inodes, each
    /// times its file type.
    pub(super) fn add(&mut self, rules: InodeRules, key: Key, data: &[u8]) -> u128 {
        match key.item_type {
            ItemType::INODE_ITEM => self.item = InodeItem::view(data).ok().map(InodeFacts::of),
            ItemType::INODE_REF => {
                for name in inode_refs(key.offset, data).flatten() {
                    self.add_name(name.parent, name.index, name.name);
                }
            }
            ItemType::INODE_EXTREF => {
                for name in inode_extrefs(data).flatten() {
                    self.add_name(name.parent, name.index, name.name);
                }
            }
            ItemType::DIR_ITEM => self.add_hashed_entries(data),
            ItemType::DIR_INDEX => return self.add_indexed_entry(key, data),
            ItemType::EXTENT_DATA => {
                self.has_other_items = true;
                self.extents.add(rules, key.offset, data);
            }
            ItemType::XATTR_ITEM => self.has_other_items = true,
            ItemType::VERITY_DESC_ITEM | ItemType::VERITY_MERKLE_ITEM => {
                self.has_other_items = true;
                self.verity.get_or_insert_default().add(key, data);
            }
            _ => {}
        }
        0
    }

    fn add_name(&mut self, parent: u64, index: u64, name: &[u8]) {
        self.has_other_items = true;
        self.names += 1;
        // The name `..` of a root directory has no entry.
        if parent == self.ino {
            self.has_wrong_root_name |= index != 0 || name != b"..";
        } else {
            let hash = name_hash(parent, index, self.ino, name);
            self.name_sum = self.name_sum.wrapping_add(hash);
        }
    }

    fn add_hashed_entries(&mut self, data: &[u8]) {
        self.has_other_items = true;
        self.entries.are_there = true;
        for entry in dir_entries(data).flatten() {
            let hash = entry_hash(entry.location, entry.file_type, entry.name);
            self.entries.difference = self.entries.difference.wrapping_sub(hash);
        }
    }

    fn add_indexed_entry(&mut self, key: Key, data: &[u8]) -> u128 {
        self.has_other_items = true;
        self.entries.are_there = true;
        let mut names = 0u128;
        for entry in dir_entries(data).flatten() {
            let hash = entry_hash(entry.location, entry.file_type, entry.name);
            self.entries.difference = self.entries.difference.wrapping_add(hash);
            self.entries.name_bytes += entry.name.len() as u64;
            if entry.location.item_type == ItemType::INODE_ITEM {
                let child = entry.location.objectid;
                let hash = name_hash(self.ino, key.offset, child, entry.name);
                let weight = u128::from(entry.file_type & !file_type::ENCRYPTED);
                names = names.wrapping_add(hash.wrapping_mul(weight));
            }
        }
        names
    }

    /// The sum of the hashes of its names, each times its file type.
    pub(super) fn weighted_names(&self) -> u128 {
        let file_type = self.item.and_then(|item| item.file_type());
        let weight = u128::from(file_type.map_or(file_type::UNKNOWN, file_type::of));
        self.name_sum.wrapping_mul(weight)
    }

    /// Adds the items of the same inode in the part that follows.
    pub(super) fn append(&mut self, right: &Self) {
        self.is_cut |= right.is_cut;
        self.item = self.item.or(right.item);
        self.has_other_items |= right.has_other_items;
        self.has_wrong_root_name |= right.has_wrong_root_name;
        self.names += right.names;
        self.name_sum = self.name_sum.wrapping_add(right.name_sum);
        self.entries.append(right.entries);
        self.extents.append(&right.extents);
        if let Some(verity) = &right.verity {
            self.verity.get_or_insert_default().append(verity);
        }
    }
}

impl EntryItems {
    fn append(&mut self, right: Self) {
        self.are_there |= right.are_there;
        self.name_bytes += right.name_bytes;
        self.difference = self.difference.wrapping_add(right.difference);
    }
}

/// The extents of an inode.
#[derive(Clone, Debug, Default)]
pub(super) struct ExtentItems {
    /// Where in the file they begin and end, in bytes; `None` while there are none.
    range: Option<(u64, u64)>,
    /// The bytes that they take, as `nbytes` counts them.
    pub(super) bytes: u64,
    /// The first range between them that has no extent begins here.
    gap: Option<u64>,
    /// The first of them that begins in front of the end of the one before it.
    pub(super) overlap: Option<u64>,
    /// The first of them that is damaged.
    pub(super) damaged: Option<u64>,
    /// Whether some are compressed.
    pub(super) are_compressed: bool,
    pub(super) inline: Option<InlineExtentSize>,
}

/// What is kept of data in an item.
#[derive(Clone, Copy, Debug)]
pub(super) struct InlineExtentSize {
    /// Its length in bytes, after decompression.
    pub(super) len: u64,
    /// Whether it ends with a zero byte.
    pub(super) ends_with_zero: bool,
}

impl ExtentItems {
    fn add(&mut self, rules: InodeRules, offset: u64, data: &[u8]) {
        let Ok(extent) = FileExtent::parse(data) else {
            self.damaged.get_or_insert(offset);
            return;
        };
        let len = match extent.body {
            FileExtentBody::Inline(bytes) => {
                let is_plain = extent.compression == Compression::None;
                let len = if is_plain { bytes.len() as u64 } else { extent.ram_bytes };
                let ends_with_zero = is_plain && bytes.last() == Some(&0);
                self.inline.get_or_insert(InlineExtentSize { len, ends_with_zero });
                self.bytes = self.bytes.wrapping_add(len);
                rules.whole_sectors(len)
            }
            FileExtentBody::Hole { num_bytes } => num_bytes,
            FileExtentBody::Extent { num_bytes, .. } => {
                self.bytes = self.bytes.wrapping_add(num_bytes);
                num_bytes
            }
        };
        self.are_compressed |= extent.compression != Compression::None;
        if len == 0 || extent.generation > rules.newest || !fits(rules, &extent) {
            self.damaged.get_or_insert(offset);
        }
        self.extend(offset, offset.saturating_add(len));
    }

    /// Adds a range that begins behind the beginning of all others.
    fn extend(&mut self, start: u64, end: u64) {
        let Some((_, last)) = &mut self.range else {
            self.range = Some((start, end));
            return;
        };
        if start < *last {
            self.overlap.get_or_insert(start);
        } else if start > *last {
            self.gap.get_or_insert(*last);
        }
        *last = end.max(*last);
    }

    fn append(&mut self, right: &Self) {
        if let Some((start, end)) = right.range {
            self.extend(start, end);
        }
        self.bytes = self.bytes.wrapping_add(right.bytes);
        self.gap = self.gap.or(right.gap);
        self.overlap = self.overlap.or(right.overlap);
        self.damaged = self.damaged.or(right.damaged);
        self.are_compressed |= right.are_compressed;
        self.inline = self.inline.or(right.inline);
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.range.is_none() && self.damaged.is_none()
    }

    /// Where the first range without an extent begins, in bytes.
    pub(super) fn first_hole(&self) -> u64 {
        match self.range {
            Some((0, end)) => self.gap.unwrap_or(end),
            _ => 0,
        }
    }
}

/// Whether the numbers of an extent that readers do not use are right, too: its range lies in what
/// it has before compression, and nothing that was allocated in advance is compressed. Only what
/// fits into a sector is in an item itself.
fn fits(rules: InodeRules, extent: &FileExtent<'_>) -> bool {
    match extent.body {
        FileExtentBody::Inline(_) => extent.ram_bytes <= rules.sector_size,
        FileExtentBody::Hole { num_bytes } => num_bytes <= extent.ram_bytes,
        FileExtentBody::Extent { offset, num_bytes, is_preallocated, .. } => {
            let is_inside =
                offset.checked_add(num_bytes).is_some_and(|end| end <= extent.ram_bytes);
            is_inside && !(is_preallocated && extent.compression != Compression::None)
        }
    }
}
