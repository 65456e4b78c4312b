//! The items of the free-space tree, from what is in use.
//!
//! A block group with few free ranges has an item for each. With many, it has bitmaps, one bit for
//! each sector.

use std::ops::Range;

use offshoot_btrfs_format::chunk::Chunk;
use offshoot_btrfs_format::edit::ITEM_SIZE;
use offshoot_btrfs_format::space::{
    FREE_SPACE_BITMAP_SIZE, FREE_SPACE_USING_BITMAPS, FreeSpaceInfo,
};
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_vfs::Result;
use zerocopy::IntoBytes;

/// The bytes that a bitmap covers.
fn bitmap_bytes(sector: u64) -> u64 {
    u64::from(FREE_SPACE_BITMAP_SIZE) * 8 * sector
}

/// The most free ranges that are items of their own: so many that bitmaps take less.
fn most_ranges(chunk: &Chunk, sector: u64) -> u64 {
    let bitmaps = chunk.length.div_ceil(bitmap_bytes(sector));
    let bytes = bitmaps * (ITEM_SIZE as u64 + u64::from(FREE_SPACE_BITMAP_SIZE));
    bytes / ITEM_SIZE as u64
}

/// Calls `visit` with the items of the block group of `chunk`, whose free ranges are `free`, in
/// order.
///
/// # Errors
/// Those of `visit`.
pub(super) fn items(
    chunk: &Chunk,
    free: &[Range<u64>],
    sector: u64,
    visit: &mut dyn FnMut(Key, &[u8]) -> Result<()>,
) -> Result<()> {
    let has_bitmaps = free.len() as u64 > most_ranges(chunk, sector);
    let info = FreeSpaceInfo {
        extent_count: u32::try_from(free.len()).unwrap_or(u32::MAX).into(),
        flags: if has_bitmaps { FREE_SPACE_USING_BITMAPS } else { 0 }.into(),
    };
    visit(Key::new(chunk.start.0, ItemType::FREE_SPACE_INFO, chunk.length), info.as_bytes())?;
    if has_bitmaps {
        return bitmaps(chunk, free, sector, visit);
    }
    free.iter().try_for_each(|range| {
        visit(Key::new(range.start, ItemType::FREE_SPACE_EXTENT, range.end - range.start), &[])
    })
}

fn bitmaps(
    chunk: &Chunk,
    free: &[Range<u64>],
    sector: u64,
    visit: &mut dyn FnMut(Key, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut rest = free.iter().cloned().peekable();
    let (mut start, group_end) = (chunk.start.0, chunk.end().0);
    while start < group_end {
        let end = group_end.min(start + bitmap_bytes(sector));
        let bits = (end - start) / sector;
        let mut bitmap = vec![0u8; usize::try_from(bits.div_ceil(8)).unwrap_or(usize::MAX)];
        while let Some(range) = rest.peek_mut().filter(|range| range.start < end) {
            let to = range.end.min(end);
            for bit in (range.start - start) / sector..(to - start) / sector {
                if let Some(byte) = usize::try_from(bit / 8).ok().and_then(|at| bitmap.get_mut(at))
                {
                    *byte |= 1 << (bit % 8);
                }
            }
            if range.end <= end {
                rest.next();
            } else {
                range.start = end;
                break;
            }
        }
        visit(Key::new(start, ItemType::FREE_SPACE_BITMAP, end - start), &bitmap)?;
        start = end;
    }
    Ok(())
}
