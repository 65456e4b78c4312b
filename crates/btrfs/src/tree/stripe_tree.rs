//! The RAID stripe tree: where data is, in a volume whose chunks alone do not say it.
//!
//! With this feature, a data chunk with several stripes says only on which devices its bytes are.
//! An item for each run of bytes says where they were written:
//!
//! ```text
//! key    (logical address, RAID_STRIPE, length)
//! item   a copy: device, byte      16 bytes each, one for every copy that the profile keeps
//! ```
//!
//! Tree blocks, and data in chunks of one stripe or with parity, are always where the chunk says.
//! So reading the stripe tree does not need the stripe tree.

#[cfg(test)]
mod tests;

use offshoot_btrfs_format::chunk::RaidStride;
use offshoot_btrfs_format::{DeviceId, ItemType, Key, Logical, Physical};
use offshoot_vfs::{Error, Result, Structure};

use super::{Blocks, Cursor, TreeRoot};
use crate::storage::{MappedChunk, MemberOffset, ReadSegment, ReadWay, malformed};

/// The segment of at most `len` bytes of data that begins at `logical`, as the stripe tree
/// describes it. `mapped` covers `logical`.
///
/// # Errors
/// When the tree has no item for the address, or names a device that the chunk is not on.
pub(crate) fn recorded_segment(
    blocks: &dyn Blocks,
    stripe_tree: TreeRoot,
    mapped: &MappedChunk,
    logical: Logical,
    len: u64,
) -> Result<ReadSegment> {
    let corrupt = |problem| Error::corrupt_at(Structure::RaidStripe, logical.0, problem);
    let last = Key::new(logical.0, ItemType::RAID_STRIPE, u64::MAX);
    let cursor = Cursor::seek_floor(blocks, stripe_tree, last)?;
    let covering = cursor.item().filter(|(key, _)| {
        let end = key.objectid.saturating_add(key.offset);
        key.item_type == ItemType::RAID_STRIPE && (key.objectid..end).contains(&logical.0)
    });
    let Some((key, data)) = covering else {
        return Err(corrupt("the stripe tree does not say where the data is".to_owned()));
    };
    let skip = logical.0 - key.objectid;
    let copies = RaidStride::view_all(data).map_err(malformed)?;
    let mut ways = Vec::with_capacity(copies.len());
    for copy in copies {
        let device = DeviceId(copy.devid.get());
        let stripes = &mapped.chunk.stripes;
        let stripe =
            stripes.iter().position(|stripe| stripe.device == device).ok_or_else(|| {
                corrupt(format!("a copy on device {device}, which the chunk is not on"))
            })?;
        let physical = Physical(copy.physical.get().saturating_add(skip));
        ways.extend(
            mapped.members[stripe].map(|member| ReadWay::Direct(MemberOffset { member, physical })),
        );
    }
    let end = (key.offset - skip).min(mapped.chunk.end().0 - logical.0);
    Ok(ReadSegment { len: len.min(end), ways, is_redundant: copies.len() > 1 })
}
