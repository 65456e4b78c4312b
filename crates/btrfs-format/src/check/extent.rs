//! Checks of extents, their references, and checksums of data.

use offshoot_vfs::Structure;
use std::cmp::Reverse;

use super::inode::is_free;
use super::item::{ItemChecked, ItemContext, ItemProblem, ensure};
use super::root::is_fs_tree;
use crate::block::LEVEL_COUNT;
use crate::dir::data_ref_hash;
use crate::extent::{
    EXTENT_FLAG_DATA, EXTENT_FLAG_FULL_BACKREF, EXTENT_FLAG_TREE_BLOCK, ExtentDataRef, InlineRef,
    ParsedExtent,
};
use crate::key::objectid;
use crate::superblock::Incompat;
use crate::view::view;
use crate::{ItemType, TreeId, U32};

pub(super) fn verify(item: &ItemContext<'_>) -> ItemChecked {
    item.aligned("address", item.key.objectid)?;
    let extent = ParsedExtent::parse(item.key.item_type, item.data)?;
    item.generation("generation", extent.item.generation.get())?;
    let flags = extent.item.flags.get();
    let is_block = match flags & (EXTENT_FLAG_DATA | EXTENT_FLAG_TREE_BLOCK) {
        EXTENT_FLAG_TREE_BLOCK => true,
        EXTENT_FLAG_DATA => false,
        _ => return Err(format!("flags {flags:#x} are neither data nor a tree block").into()),
    };
    if is_block {
        verify_block(item, &extent)?;
    } else {
        ensure!(
            item.key.item_type == ItemType::EXTENT_ITEM && flags & EXTENT_FLAG_FULL_BACKREF == 0,
            "flags {flags:#x} of a tree block in an extent of data"
        );
        ensure!(item.key.offset != 0, "an extent without length");
        item.aligned("length", item.key.offset)?;
    }
    ensure!(end(item.key, item).is_some(), "its length overflows the address space");
    let found = count_inline(item, &extent, is_block)?;
    ensure!(
        found <= extent.item.refs.get(),
        "{} references counted, but {found} are inline",
        extent.item.refs
    );
    verify_order(item)
}

fn verify_block(item: &ItemContext<'_>, extent: &ParsedExtent<'_>) -> ItemChecked {
    let level = if item.key.item_type == ItemType::METADATA_ITEM {
        ensure!(
            item.geometry.incompat.has(Incompat::SKINNY_METADATA),
            "in a volume without SKINNY_METADATA"
        );
        item.key.offset
    } else {
        ensure!(
            item.key.offset == u64::from(item.geometry.node_size),
            "the length of a node, {}, expected",
            item.geometry.node_size
        );
        extent.block.map_or(0, |block| u64::from(block.level))
    };
    ensure!(level < u64::from(LEVEL_COUNT), "level {level}, the highest is {}", LEVEL_COUNT - 1);
    Ok(())
}

/// One past the last address of the extent with this key.
fn end(key: crate::Key, item: &ItemContext<'_>) -> Option<u64> {
    let length = if key.item_type == ItemType::METADATA_ITEM {
        u64::from(item.geometry.node_size)
    } else {
        key.offset
    };
    key.objectid.checked_add(length)
}

/// Checks the inline references, and returns how many references they stand for.
fn count_inline(
    item: &ItemContext<'_>,
    extent: &ParsedExtent<'_>,
    is_block: bool,
) -> Result<u64, ItemProblem> {
    let mut total = 0u64;
    let mut before = None;
    for (index, inline) in extent.inline_refs().enumerate() {
        let inline = inline?;
        let order = Some(order(&inline));
        ensure!(before <= order || !item.geometry.is_strict, "out of order: {inline:?}");
        before = order;
        let for_block = matches!(inline, InlineRef::TreeBlock(_) | InlineRef::SharedBlock(_));
        ensure!(for_block == is_block, "a reference of the other kind: {inline:?}");
        let count = match inline {
            InlineRef::TreeBlock(_) => 1,
            InlineRef::SharedBlock(parent) => {
                item.aligned("parent", parent)?;
                1
            }
            InlineRef::ExtentData(data_ref) => {
                item.aligned("file offset", data_ref.offset.get())?;
                verify_data_ref(item, data_ref)?;
                data_ref.count.get()
            }
            InlineRef::SharedData { parent, count } => {
                item.aligned("parent", parent)?;
                count
            }
            // The owner is not a reference: it says for which subvolume simple quotas count the
            // extent. There is at most one, in front of the references.
            InlineRef::Owner(_) => {
                ensure!(index == 0, "an owner behind references: {inline:?}");
                continue;
            }
        };
        ensure!(count != 0, "a reference that is counted 0 times: {inline:?}");
        total = total.saturating_add(u64::from(count));
    }
    Ok(total)
}

/// Where the kernel looks for an inline reference: by ascending types, and of one type by
/// descending numbers.
fn order(inline: &InlineRef<'_>) -> (u8, Reverse<u64>) {
    let (item_type, number) = match *inline {
        InlineRef::Owner(root) => (ItemType::EXTENT_OWNER_REF, root),
        InlineRef::TreeBlock(root) => (ItemType::TREE_BLOCK_REF, root),
        InlineRef::SharedBlock(parent) => (ItemType::SHARED_BLOCK_REF, parent),
        InlineRef::ExtentData(of) => {
            let hash = data_ref_hash(TreeId(of.root.get()), of.objectid.get(), of.offset.get());
            (ItemType::EXTENT_DATA_REF, hash)
        }
        InlineRef::SharedData { parent, .. } => (ItemType::SHARED_DATA_REF, parent),
    };
    (item_type.0, Reverse(number))
}

/// Checks that the extent before this one in the leaf ends before it.
fn verify_order(item: &ItemContext<'_>) -> ItemChecked {
    let before = item.previous.filter(|(previous, _)| {
        matches!(previous.item_type, ItemType::EXTENT_ITEM | ItemType::METADATA_ITEM)
    });
    let Some(end) = before.and_then(|(previous, _)| end(previous, item)) else { return Ok(()) };
    ensure!(end <= item.key.objectid, "overlaps the extent before it, which ends at {end}");
    Ok(())
}

/// Checks a reference that has its own item.
pub(super) fn verify_ref(item: &ItemContext<'_>) -> ItemChecked {
    item.aligned("address", item.key.objectid)?;
    match item.key.item_type {
        ItemType::TREE_BLOCK_REF => item.size(0),
        ItemType::SHARED_BLOCK_REF => {
            item.size(0)?;
            item.aligned("parent", item.key.offset)
        }
        ItemType::SHARED_DATA_REF => {
            item.size(size_of::<U32>())?;
            item.aligned("parent", item.key.offset)
        }
        _ => {
            let size = size_of::<ExtentDataRef>();
            ensure!(
                !item.data.is_empty() && item.data.len().is_multiple_of(size),
                "references of {size} bytes expected, {} bytes found",
                item.data.len()
            );
            let mut refs = item.data.chunks_exact(size);
            refs.try_for_each(|one| verify_data_ref(item, view(Structure::DataReference, one)?.0))
        }
    }
}

/// Checks that the reference is of a file of a subvolume, of the root tree (a free-space cache) or
/// of the tree in which data is relocated.
fn verify_data_ref(item: &ItemContext<'_>, data_ref: &ExtentDataRef) -> ItemChecked {
    if !item.geometry.is_strict {
        return Ok(());
    }
    let (root, objectid) = (data_ref.root.get(), data_ref.objectid.get());
    let may_refer = is_fs_tree(root) || [TreeId::ROOT, TreeId::DATA_RELOC].contains(&TreeId(root));
    ensure!(may_refer, "a reference of the tree {}", TreeId(root));
    ensure!(is_free(objectid), "a reference of the inode {objectid}");
    ensure!(data_ref.count.get() != 0, "a reference that is counted 0 times");
    item.aligned("file offset", data_ref.offset.get())
}

/// Checks a run of checksums of data.
pub(super) fn verify_csums(item: &ItemContext<'_>) -> ItemChecked {
    ensure!(
        item.key.objectid == objectid::EXTENT_CSUM,
        "object id {} expected",
        objectid::EXTENT_CSUM.cast_signed()
    );
    item.aligned("address", item.key.offset)?;
    let len = item.geometry.checksum.len();
    ensure!(
        item.data.len().is_multiple_of(len),
        "checksums of {len} bytes expected, {} bytes found",
        item.data.len()
    );
    let covered = |data: &[u8]| (data.len() / len) as u64 * u64::from(item.geometry.sector_size);
    ensure!(
        item.key.offset.checked_add(covered(item.data)).is_some(),
        "it covers more than the address space"
    );
    // In a log, several fsyncs may log checksums of the same range, so they may overlap.
    if item.owner == TreeId::TREE_LOG {
        return Ok(());
    }
    let Some((previous, data)) = item.previous_alike() else { return Ok(()) };
    let end = previous.offset.saturating_add(covered(data));
    ensure!(end <= item.key.offset, "overlaps the checksums before it, which end at {end}");
    Ok(())
}
