//! Which extents of a file are shared, as `FIEMAP` of the kernel reports it.
//!
//! Data is shared in two ways. In the first, another file, or another place of the same file,
//! refers to the extent, and the extent has more than one reference. In the second, a snapshot
//! refers to a tree block on the path to the file extent. Then that block has more than one
//! reference, and the extent only one.
//!
//! ```text
//!   root of /home ──> node (1 reference) ──> leaf (2 references) ──> extent (1 reference): shared
//!   root of the snapshot ───────────────────┘
//! ```

use std::collections::HashMap;

use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::extent::{InlineRef, ParsedExtent};
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::{FileId, Result};

use super::{Filesystem, of};
use crate::inode::Rooms;
use crate::inode::placeholder_in;
use crate::storage::malformed;
use crate::tree::{Blocks, Cursor};

/// A range of a file that is in an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentUse {
    /// The bytes of the file in it.
    pub file_bytes: u64,
    /// Its logical address in the volume. For a compressed extent, the start of the extent.
    pub logical: u64,
    /// Whether it is shared.
    pub is_shared: bool,
}

/// A cache of the reference counts of tree blocks. Files are read one by one, and adjacent files
/// have the same blocks above them.
#[derive(Debug, Default)]
pub struct SharingCache {
    /// The number of references of the tree block at each address.
    blocks: HashMap<u64, u64>,
}

/// The most tree blocks in the cache, of 16 bytes each.
const BLOCKS_MAX: usize = 1 << 20;

impl Filesystem {
    /// Calls `visit` with the extents of `file`, by ascending offset. Holes and inline data have
    /// none.
    ///
    /// # Errors
    /// When a tree cannot be read.
    pub fn extents(
        &self,
        file: FileId,
        cache: &mut SharingCache,
        visit: &mut dyn FnMut(ExtentUse),
    ) -> Result<()> {
        if placeholder_in(file).is_some() {
            return Ok(());
        }
        extents(&self.volume, file, cache, visit).map_err(of(file))
    }
}

fn extents(
    volume: &Rooms,
    file: FileId,
    cache: &mut SharingCache,
    visit: &mut dyn FnMut(ExtentUse),
) -> Result<()> {
    let tree = volume.tree(TreeId(file.dev))?;
    let start = Key::new(file.ino, ItemType::EXTENT_DATA, 0);
    let mut cursor = Cursor::seek(volume, tree, start)?;
    // The leaf of the last item, and whether it is shared.
    let mut leaf = None;
    while let Some((key, data)) = cursor.item_of(file.ino, ItemType::EXTENT_DATA) {
        let extent = FileExtent::parse(data).map_err(malformed)?;
        let FileExtentBody::Extent { disk_bytenr, disk_num_bytes, offset, num_bytes, .. } =
            extent.body
        else {
            cursor.advance()?;
            continue;
        };
        let here = cursor.leaf();
        let is_leaf_shared = match leaf {
            Some((known, is_shared)) if Some(known) == here => is_shared,
            _ => {
                let is_shared = is_way_shared(volume, TreeId(file.dev), key, cache)?;
                leaf = here.map(|here| (here, is_shared));
                is_shared
            }
        };
        let is_shared = is_leaf_shared
            || references(volume, disk_bytenr, ItemType::EXTENT_ITEM, disk_num_bytes)? > 1;
        let inside = if extent.compression == Compression::None { offset } else { 0 };
        visit(ExtentUse {
            file_bytes: num_bytes,
            logical: disk_bytenr.0.saturating_add(inside),
            is_shared,
        });
        cursor.advance()?;
    }
    Ok(())
}

/// Whether a block on the path to `key` belongs to another tree too.
fn is_way_shared(volume: &Rooms, id: TreeId, key: Key, cache: &mut SharingCache) -> Result<bool> {
    let mut block = volume.block(&volume.tree(id)?.expected())?;
    loop {
        let logical = Logical(block.header().bytenr.get());
        let level = block.header().level;
        let count = if let Some(&count) = cache.blocks.get(&logical.0) {
            count
        } else {
            let count = block_references(volume, logical, level)?;
            if cache.blocks.len() < BLOCKS_MAX {
                cache.blocks.insert(logical.0, count);
            }
            count
        };
        if count > 1 {
            return Ok(true);
        }
        let Some(slot) = block.floor(key).filter(|_| !block.is_leaf()) else { return Ok(false) };
        block = volume.child(&block, slot, id)?;
    }
}

/// The number of references of a tree block, in either format of extent items.
fn block_references(volume: &Rooms, at: Logical, level: u8) -> Result<u64> {
    let skinny = references(volume, at, ItemType::METADATA_ITEM, level.into())?;
    if skinny > 0 {
        return Ok(skinny);
    }
    let node_size = u64::from(volume.superblock().node_size);
    references(volume, at, ItemType::EXTENT_ITEM, node_size)
}

/// The number of references to the extent whose item has this type and offset; 0 without an item.
/// The count stops at 2 or more.
fn references(volume: &Rooms, at: Logical, item_type: ItemType, offset: u64) -> Result<u64> {
    let key = Key::new(at.0, item_type, offset);
    let mut cursor = Cursor::seek(volume, volume.tree(TreeId::EXTENT)?, key)?;
    let mut count = 0;
    match cursor.item() {
        Some((found, data)) if found == key => {
            let extent = ParsedExtent::parse(item_type, data).map_err(malformed)?;
            for one in extent.inline_refs() {
                count += u64::from(!matches!(one.map_err(malformed)?, InlineRef::Owner(_)));
            }
        }
        _ => return Ok(0),
    }
    // References that do not fit into the item are items behind it. The count stops when it exceeds
    // 1.
    cursor.advance()?;
    while let Some((found, _)) = cursor.item().filter(|(found, _)| found.objectid == at.0) {
        let is_reference = matches!(
            found.item_type,
            ItemType::EXTENT_DATA_REF
                | ItemType::SHARED_DATA_REF
                | ItemType::TREE_BLOCK_REF
                | ItemType::SHARED_BLOCK_REF
        );
        count += u64::from(is_reference);
        if count > 1 {
            break;
        }
        cursor.advance()?;
    }
    Ok(count)
}
