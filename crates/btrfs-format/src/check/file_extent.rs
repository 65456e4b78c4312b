//! Checks of file extents.
//!
//! The sums that a reader computes with these numbers stay inside of the file (`offset` of the key
//! and length), of the extent (`offset` and `num_bytes`), and of the logical space (`disk_bytenr`
//! and `disk_num_bytes`).

use super::item::{ItemChecked, ItemContext, ensure};
use crate::compress::Compression;
use crate::file_extent::{
    FileExtent, FileExtentBody, FileExtentHead, FileExtentTail, MAX_COMPRESSED_EXTENT,
};
use crate::view::view;
use offshoot_vfs::Structure;

pub(super) fn verify(item: &ItemContext<'_>) -> ItemChecked {
    item.aligned("file offset", item.key.offset)?;
    let extent = FileExtent::parse(item.data)?;
    match extent.body {
        FileExtentBody::Inline(data) => verify_inline(item, &extent, data)?,
        FileExtentBody::Hole { .. } | FileExtentBody::Extent { .. } => {
            item.size(size_of::<FileExtentHead>() + size_of::<FileExtentTail>())?;
            verify_regular(item, &extent)?;
        }
    }
    verify_order(item)
}

/// Where nothing is compressed, `ram_bytes` repeats the length of the data, but old kernels forgot
/// it when they truncated a file. The length of the data is what a reader takes; the kernel of
/// today refuses the leaf.
fn verify_inline(item: &ItemContext<'_>, extent: &FileExtent<'_>, data: &[u8]) -> ItemChecked {
    ensure!(item.key.offset == 0, "an inline extent that is not at the start of the file");
    ensure!(
        extent.ram_bytes <= MAX_COMPRESSED_EXTENT,
        "inline data of {} bytes when it is decompressed",
        extent.ram_bytes
    );
    let is_plain = extent.compression == Compression::None;
    ensure!(
        !is_plain || !item.geometry.is_strict || extent.ram_bytes == data.len() as u64,
        "inline data of {} bytes, {} expected",
        data.len(),
        extent.ram_bytes
    );
    Ok(())
}

fn verify_regular(item: &ItemContext<'_>, extent: &FileExtent<'_>) -> ItemChecked {
    item.aligned("ram_bytes", extent.ram_bytes)?;
    let num_bytes = match extent.body {
        FileExtentBody::Inline(_) => return Ok(()),
        FileExtentBody::Hole { num_bytes } => {
            if item.geometry.is_strict {
                // No reader looks at these of a hole.
                let (_, tail) = view::<FileExtentHead>(Structure::FileExtent, item.data)?;
                let tail = view::<FileExtentTail>(Structure::FileExtent, tail)?.0;
                item.aligned("disk_num_bytes", tail.disk_num_bytes.get())?;
                item.aligned("offset", tail.offset.get())?;
            }
            num_bytes
        }
        FileExtentBody::Extent { num_bytes, is_preallocated, .. } => {
            verify_extent(item, extent, is_preallocated)?;
            num_bytes
        }
    };
    item.aligned("num_bytes", num_bytes)?;
    ensure!(
        item.key.offset.checked_add(num_bytes).is_some(),
        "{num_bytes} bytes overflow the file"
    );
    Ok(())
}

fn verify_extent(
    item: &ItemContext<'_>,
    extent: &FileExtent<'_>,
    is_preallocated: bool,
) -> ItemChecked {
    let FileExtentBody::Extent { disk_bytenr, disk_num_bytes, offset, num_bytes, .. } = extent.body
    else {
        return Ok(());
    };
    item.aligned("disk_bytenr", disk_bytenr.0)?;
    item.aligned("disk_num_bytes", disk_num_bytes)?;
    item.aligned("offset", offset)?;
    ensure!(disk_num_bytes != 0, "an extent without length on disk");
    ensure!(
        disk_bytenr.0.checked_add(disk_num_bytes).is_some(),
        "{disk_num_bytes} bytes at {disk_bytenr} overflow the address space"
    );
    // Without compression, `ram_bytes` should repeat `disk_num_bytes`. In some volumes it does not,
    // and no reader uses it.
    let whole = match extent.compression {
        Compression::None => disk_num_bytes,
        _ => extent.ram_bytes,
    };
    ensure!(
        offset.checked_add(num_bytes).is_some_and(|end| end <= whole),
        "{num_bytes} bytes from {offset} on do not lie in an extent of {whole}"
    );
    if extent.compression != Compression::None && !is_preallocated {
        ensure!(
            extent.ram_bytes <= MAX_COMPRESSED_EXTENT && disk_num_bytes <= MAX_COMPRESSED_EXTENT,
            "a compressed extent of {} bytes, {disk_num_bytes} on disk; at most \
             {MAX_COMPRESSED_EXTENT} expected",
            extent.ram_bytes
        );
    }
    Ok(())
}

/// Checks that the previous extent of the file ends before this one begins.
fn verify_order(item: &ItemContext<'_>) -> ItemChecked {
    let Some((previous, data)) = item.previous_alike() else { return Ok(()) };
    let previous_extent = FileExtent::parse(data)?;
    let length = match previous_extent.body {
        FileExtentBody::Inline(data) => {
            let is_plain = previous_extent.compression == Compression::None;
            let len = if is_plain { data.len() as u64 } else { previous_extent.ram_bytes };
            len.next_multiple_of(u64::from(item.geometry.sector_size))
        }
        FileExtentBody::Hole { num_bytes } | FileExtentBody::Extent { num_bytes, .. } => num_bytes,
    };
    let end = previous.offset.saturating_add(length);
    ensure!(end <= item.key.offset, "overlaps the extent before it, which ends at {end}");
    Ok(())
}
