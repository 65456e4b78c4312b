//! How chunks, device extents and block groups must agree before a volume is written.
//!
//! Three trees store the same facts, and the superblock repeats the system chunks. A writer relies
//! on each: it allocates from block groups, writes where chunks point, and places new chunks where
//! no device extent is. If they disagreed, a write could overwrite live data.
//!
//! ```text
//!   chunk tree      | chunk 1: 4 MiB to 12 MiB, stripe on device 1 at 20 MiB |
//!   device tree     | device 1, 20 MiB: 8 MiB of chunk 1                     |   one for each stripe, none for anything else
//!   block groups    | 4 MiB, 8 MiB long, of the same type and profile        |   one for each chunk, none for anything else
//!   device items    | device 1, 16 GiB                                       |   no longer than the device itself
//!   superblock      | chunk 1 again, if it is a system chunk                 |   by which the chunk tree is found
//! ```
//!
//! The kernel refuses to mount a volume that breaks these rules.

use std::sync::Arc;

use offshoot_btrfs_format::chunk::{BlockGroupFlags, Chunk, DevExtent};
use offshoot_btrfs_format::space::BlockGroupItem;
use offshoot_btrfs_format::{DeviceId, ItemType, Key, Logical, TreeId};
use offshoot_vfs::{Error, Result, Structure};
use zerocopy::FromBytes;

use super::Engine;
use crate::space::StoredGroup;
use crate::storage::{MappedChunk, malformed};
use crate::transaction::system_chunks_of;
use crate::tree::{Cursor, TreeRoot};

/// The flags that a chunk and its block group must have in common.
const KIND: u64 = BlockGroupFlags::TYPES | BlockGroupFlags::PROFILES;

/// The start of a device extent or of a stripe, in the order of the device tree.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct DevicePlace {
    device: DeviceId,
    physical: u64,
}

impl DevicePlace {
    /// The place in words, for errors.
    fn describe(self, len: u64) -> String {
        format!("{len} bytes at byte {} of device {}", self.physical, self.device)
    }
}

fn wrong_extent(chunk: u64, problem: &str) -> Error {
    Error::corrupt_at(Structure::DeviceExtent, chunk, format!("{problem}; the volume can be read"))
}

fn wrong_chunk(chunk: &Chunk, problem: &str) -> Error {
    Error::corrupt_at(Structure::Chunk, chunk.start.0, format!("{problem}; the volume can be read"))
}

fn wrong_group(start: u64, problem: &str) -> Error {
    Error::corrupt_at(
        Structure::BlockGroupItem,
        start,
        format!("{problem}; the volume can be read"),
    )
}

impl Engine {
    /// Refuses a volume whose devices, chunks, device extents and block groups do not agree. The
    /// time it takes grows with their number, not with the data in them. Returns the block groups,
    /// by address.
    ///
    /// A volume of 100 TiB has 100,000 chunks, so nothing here copies them.
    ///
    /// # Errors
    /// [`Error::Corrupt`] with the device, or the address of the chunk or block group.
    pub(super) fn require_sound_chunks(&self, block_groups: TreeRoot) -> Result<Vec<StoredGroup>> {
        self.require_used_bytes()?;
        self.require_long_members()?;
        let chunks = self.storage.mapped_chunks();
        self.require_system_chunks(&chunks)?;
        self.require_device_extents(&chunks)?;
        if block_groups.id == TreeId::EXTENT {
            self.require_groups_among_extents(&chunks, block_groups)
        } else {
            self.require_groups(&chunks, block_groups)
        }
    }

    /// Requires that the superblock counts as used at least one block for each of the six trees
    /// that every volume has. The next commit would continue from that count.
    fn require_used_bytes(&self) -> Result<()> {
        let (used, node_size) =
            (self.superblock().item.bytes_used.get(), self.superblock().node_size);
        let least = 6 * u64::from(node_size);
        if used >= least {
            return Ok(());
        }
        let problem = format!("it counts {used} bytes as used, but its trees take {least} or more");
        Err(Error::corrupt(Structure::Superblock, problem))
    }

    /// Requires that each device is as long as its item says. A writer puts copies of the
    /// superblock, and new chunks, wherever the item says that the device has room.
    fn require_long_members(&self) -> Result<()> {
        for member in self.members() {
            let Some(device) = &member.device else { continue };
            let (size, expected) = (device.size_bytes(), member.total_bytes());
            if expected > size {
                let (id, name) = (member.id, member.name());
                let problem = format!(
                    "device {id} is to have {expected} bytes, but {name} has {size}: make it as \
                     long as it was; the volume can be read"
                );
                return Err(Error::corrupt(Structure::DeviceItem, problem));
            }
        }
        Ok(())
    }

    /// Requires that the superblock names exactly the system chunks of the chunk tree. A commit
    /// rebuilds that list from the chunk tree.
    fn require_system_chunks(&self, chunks: &[Arc<MappedChunk>]) -> Result<()> {
        let is_system = |chunk: &&Chunk| chunk.flags.0 & BlockGroupFlags::SYSTEM != 0;
        let mut stored = chunks.iter().map(|mapped| &mapped.chunk).filter(is_system);
        let superblock = self.superblock();
        let named = system_chunks_of(&superblock.item, superblock.sector_size)?;
        let mut named = named.iter();
        loop {
            match (stored.next(), named.next()) {
                (None, None) => return Ok(()),
                (Some(stored), Some(named)) if stored == named => {}
                (Some(chunk), _) | (None, Some(chunk)) => {
                    let problem = "the superblock and the chunk tree have different system chunks";
                    return Err(wrong_chunk(chunk, problem));
                }
            }
        }
    }

    /// Requires that each stripe has a device extent and each device extent a stripe, and that none
    /// overlap or end beyond their device.
    fn require_device_extents(&self, chunks: &[Arc<MappedChunk>]) -> Result<()> {
        let stripes = sorted_stripes(chunks)?;
        let mut stripes = stripes.iter().copied().peekable();
        let mut missing = Vec::new();
        let first = Key::new(0, ItemType::DEV_EXTENT, 0);
        let mut cursor = Cursor::seek(&self.rooms, self.tree(TreeId::DEV)?, first)?;
        let mut before: Option<(DevicePlace, u64)> = None;
        while let Some((key, data)) = cursor.item() {
            if key.item_type == ItemType::DEV_EXTENT {
                let (extent, _) = DevExtent::ref_from_prefix(data).map_err(|_| {
                    Error::corrupt(Structure::DeviceExtent, format!("{key}: it is cut"))
                })?;
                let place = DevicePlace { device: DeviceId(key.objectid), physical: key.offset };
                let len = extent.length.get();
                while let Some(stripe) = stripes.next_if(|stripe| stripe.0 < place) {
                    missing.push(stripe);
                }
                let chunk = stripes.next_if(|stripe| stripe.0 == place).map(|stripe| stripe.1);
                self.require_device_extent(place, extent, chunk)?;
                if let Some((other, end)) = before
                    .filter(|(other, end)| other.device == place.device && *end > place.physical)
                {
                    let (at, other) = (place.describe(len), other.physical);
                    let problem = format!(
                        "{at} overlap the device extent at byte {other}, which ends at {end}"
                    );
                    return Err(wrong_extent(extent.chunk_offset.get(), &problem));
                }
                before = Some((place, place.physical.saturating_add(len)));
            }
            cursor.advance()?;
        }
        missing.extend(stripes);
        match missing.iter().min_by_key(|(place, chunk)| (chunk.start, place.physical)) {
            None => Ok(()),
            Some((place, chunk)) => {
                let at = place.describe(chunk.stripe_bytes());
                Err(wrong_chunk(chunk, &format!("its stripe of {at} has no device extent")))
            }
        }
    }

    /// Requires that a device extent is a stripe of `chunk` and within its device.
    fn require_device_extent(
        &self,
        place: DevicePlace,
        extent: &DevExtent,
        chunk: Option<&Chunk>,
    ) -> Result<()> {
        let (owner, len) = (extent.chunk_offset.get(), extent.length.get());
        let wrong = |problem: String| Err(wrong_extent(owner, &problem));
        let at = place.describe(len);
        let Some(chunk) = chunk else { return wrong(format!("{at} are no stripe of any chunk")) };
        if chunk.start.0 != owner {
            return wrong(format!("{at} are a stripe of the chunk at {}", chunk.start));
        }
        if chunk.stripe_bytes() != len {
            let expected = chunk.stripe_bytes();
            return wrong(format!("{at} are a stripe of {expected} bytes"));
        }
        let member = self.members().iter().find(|member| member.id == place.device);
        let Some(member) = member else { return wrong(format!("{at}: there is no such device")) };
        let end = place.physical.saturating_add(len);
        if end > member.usable_bytes() {
            let (name, size) = (member.name(), member.usable_bytes());
            return wrong(format!("{at} end behind {name}, which has {size} bytes"));
        }
        Ok(())
    }

    /// Requires one block group for each chunk, in the block group tree.
    fn require_groups(
        &self,
        chunks: &[Arc<MappedChunk>],
        root: TreeRoot,
    ) -> Result<Vec<StoredGroup>> {
        let mut groups = Vec::with_capacity(chunks.len());
        let mut chunks = chunks.iter().map(|mapped| &mapped.chunk).peekable();
        let mut cursor = Cursor::seek(&self.rooms, root, Key::MIN)?;
        while let Some((key, data)) = cursor.item() {
            if key.item_type == ItemType::BLOCK_GROUP_ITEM {
                if let Some(chunk) = chunks.next_if(|chunk| chunk.start.0 < key.objectid) {
                    return Err(wrong_chunk(chunk, "it has no block group"));
                }
                let chunk = chunks.next_if(|chunk| chunk.start.0 == key.objectid);
                groups.push(require_group(key, data, chunk)?);
            }
            cursor.advance()?;
        }
        match chunks.next() {
            None => Ok(groups),
            Some(chunk) => Err(wrong_chunk(chunk, "it has no block group")),
        }
    }

    /// Requires one block group for each chunk, in the extent tree. It seeks to the start of each
    /// chunk and to the gaps between chunks, and does not scan the extents inside a chunk.
    fn require_groups_among_extents(
        &self,
        chunks: &[Arc<MappedChunk>],
        root: TreeRoot,
    ) -> Result<Vec<StoredGroup>> {
        let (mut groups, mut behind) = (Vec::with_capacity(chunks.len()), 0);
        for chunk in chunks.iter().map(|mapped| &mapped.chunk) {
            self.require_no_group(root, Logical(behind), chunk.start)?;
            let first = Key::new(chunk.start.0, ItemType::BLOCK_GROUP_ITEM, 0);
            let mut cursor = Cursor::seek(&self.rooms, root, first)?;
            let mut found = 0;
            while let Some((key, data)) = cursor.item_of(chunk.start.0, ItemType::BLOCK_GROUP_ITEM)
            {
                groups.push(require_group(key, data, Some(chunk).filter(|_| found == 0))?);
                found += 1;
                cursor.advance()?;
            }
            if found == 0 {
                return Err(wrong_chunk(chunk, "it has no block group"));
            }
            behind = chunk.end().0;
        }
        self.require_no_group(root, Logical(behind), Logical(u64::MAX))?;
        Ok(groups)
    }

    /// Requires that no block group begins in a range that belongs to no chunk.
    fn require_no_group(&self, root: TreeRoot, from: Logical, to: Logical) -> Result<()> {
        let mut cursor = Cursor::seek(&self.rooms, root, Key::new(from.0, ItemType(0), 0))?;
        while let Some((key, data)) = cursor.item().filter(|(key, _)| key.objectid < to.0) {
            if key.item_type == ItemType::BLOCK_GROUP_ITEM {
                require_group(key, data, None)?;
            }
            cursor.advance()?;
        }
        Ok(())
    }
}

/// The stripes of all chunks, by their place. No two may begin at the same one.
fn sorted_stripes(chunks: &[Arc<MappedChunk>]) -> Result<Vec<(DevicePlace, &Chunk)>> {
    let mut all = Vec::with_capacity(chunks.iter().map(|mapped| mapped.chunk.stripes.len()).sum());
    for chunk in chunks.iter().map(|mapped| &mapped.chunk) {
        all.extend(chunk.stripes.iter().map(|stripe| {
            (DevicePlace { device: stripe.device, physical: stripe.physical.0 }, chunk)
        }));
    }
    all.sort_by_key(|stripe| stripe.0);
    for pair in all.windows(2) {
        if let [(place, other), (next, chunk)] = pair
            && place == next
        {
            let at = place.describe(chunk.stripe_bytes());
            let problem =
                format!("its stripe of {at} overlaps one of the chunk at {}", other.start);
            return Err(wrong_chunk(chunk, &problem));
        }
    }
    Ok(all)
}

/// Requires that a block group matches `chunk`, and counts no more bytes as used than it has.
fn require_group(key: Key, data: &[u8], chunk: Option<&Chunk>) -> Result<StoredGroup> {
    let (start, len) = (key.objectid, key.offset);
    let item = BlockGroupItem::view(data).map_err(malformed)?;
    let Some(chunk) = chunk.filter(|chunk| chunk.start.0 == start && chunk.length == len) else {
        return Err(wrong_group(start, &format!("its {len} bytes are those of no chunk")));
    };
    let (flags, expected) = (item.flags.get() & KIND, chunk.flags.0 & KIND);
    if flags != expected {
        let problem = format!("its flags are {flags:#x}, those of its chunk {expected:#x}");
        return Err(wrong_group(start, &problem));
    }
    let used = item.used.get();
    if used > len {
        let problem = format!("it counts {used} bytes as used, and has {len}");
        return Err(wrong_group(start, &problem));
    }
    let flags = BlockGroupFlags(item.flags.get());
    Ok(StoredGroup { start: chunk.start, len, flags, used })
}
