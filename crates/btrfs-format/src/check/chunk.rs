//! Checks of chunks and devices.

use super::item::{ItemChecked, ItemContext, ensure};
use crate::chunk::{BlockGroupFlags, Chunk, DevExtent, DevItem};
use crate::key::objectid;
use crate::superblock::Incompat;
use crate::view::view;
use offshoot_vfs::Structure;

pub(super) fn verify(item: &ItemContext<'_>) -> ItemChecked {
    let (chunk, rest) = Chunk::parse_prefix(item.key, item.data, item.geometry.sector_size)?;
    ensure!(rest.is_empty(), "{} bytes after the stripes", rest.len());
    verify_types(item, chunk.flags)
}

/// Checks the type bits of a chunk or block group: data, metadata, system, or mixed.
pub(super) fn verify_types(item: &ItemContext<'_>, flags: BlockGroupFlags) -> ItemChecked {
    const MIXED: u64 = BlockGroupFlags::DATA | BlockGroupFlags::METADATA;
    let types = flags.0 & BlockGroupFlags::TYPES;
    let known = matches!(
        types,
        BlockGroupFlags::DATA | BlockGroupFlags::METADATA | BlockGroupFlags::SYSTEM
    );
    let mixed = types == MIXED && item.geometry.incompat.has(Incompat::MIXED_GROUPS);
    ensure!(known || mixed, "type bits {types:#x} are none of a block group");
    Ok(())
}

pub(super) fn verify_device(item: &ItemContext<'_>) -> ItemChecked {
    ensure!(item.key.objectid == objectid::DEV_ITEMS, "object id {} expected", objectid::DEV_ITEMS);
    item.size(size_of::<DevItem>())?;
    let device = DevItem::view(item.data)?;
    ensure!(
        device.devid.get() == item.key.offset,
        "device {} expected, {} found",
        item.key.offset,
        device.devid
    );
    Ok(())
}

pub(super) fn verify_device_extent(item: &ItemContext<'_>) -> ItemChecked {
    item.size(size_of::<DevExtent>())?;
    let (extent, _) = view::<DevExtent>(Structure::DeviceExtent, item.data)?;
    let length = extent.length.get();
    item.aligned("start", item.key.offset)?;
    item.aligned("length", length)?;
    item.aligned("chunk", extent.chunk_offset.get())?;
    ensure!(
        length != 0 && item.key.offset.checked_add(length).is_some(),
        "a length of {length} bytes"
    );
    let Some((previous, data)) = item.previous_alike() else { return Ok(()) };
    let (before, _) = view::<DevExtent>(Structure::DeviceExtent, data)?;
    let end = previous.offset.saturating_add(before.length.get());
    ensure!(end <= item.key.offset, "overlaps the extent before it, which ends at {end}");
    Ok(())
}
