//! What leaves on the devices say of members and chunks, in all versions that are left.
//!
//! ```text
//! leaf of the chunk tree    DEV_ITEM: a member              CHUNK_ITEM: a chunk with its stripes
//! leaf of the device tree   DEV_EXTENT: a range of a member, and its chunk
//! block group item          length, kind and profile of a chunk
//! ```

use std::collections::{BTreeMap, BTreeSet};

use offshoot_btrfs_format::block::NodePointer;
use offshoot_btrfs_format::chunk::{
    BlockGroupFlags, Chunk, ChunkItem, DevExtent, DevItem, Profile, Stripe,
};
use offshoot_btrfs_format::encode::{chunk_item, chunk_key};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::space::BlockGroupItem;
use offshoot_btrfs_format::{DeviceId, Generation, ItemType, Key, Logical, Physical, TreeId};
use uuid::Uuid;
use zerocopy::{FromBytes, IntoBytes};

/// The most entries of a kind that are kept.
const MOST_KEPT: usize = 1 << 18;

/// The most versions of one member or one chunk that are kept: the newest ones.
const MOST_VERSIONS: usize = 8;

/// The versions of something, the newest first. Equal ones count once, by the newest.
pub(crate) type Versions<V> = Vec<(Generation, V)>;

/// A chunk, and its item as a leaf has it: programs fill fields differently that say nothing.
#[derive(Clone, Debug)]
pub(crate) struct DescribedChunk {
    pub(crate) chunk: Chunk,
    pub(crate) item: Vec<u8>,
}

impl DescribedChunk {
    /// The chunk that an item of the chunk tree describes.
    pub(crate) fn parse(key: Key, data: &[u8], sector_size: u32) -> Option<Self> {
        let (chunk, rest) = Chunk::parse_prefix(key, data, sector_size).ok()?;
        let item = data.get(..data.len() - rest.len())?.to_vec();
        Some(Self { chunk, item })
    }

    /// A chunk of which no leaf has an item; `None` when no chunk can be so.
    fn made(chunk: &Chunk, sector_size: u32) -> Option<Self> {
        Self::parse(chunk_key(chunk), &chunk_item(chunk, sector_size), sector_size)
    }
}

/// What leaves describe.
#[derive(Debug, Default)]
pub(crate) struct DescribedVersions {
    pub(crate) devices: BTreeMap<u64, Versions<DevItem>>,
    pub(crate) chunks: BTreeMap<Logical, Versions<DescribedChunk>>,
    /// By device and offset: the chunk and the length.
    extents: BTreeMap<(u64, u64), (Generation, (Logical, u64))>,
    /// By address: length and flags.
    groups: BTreeMap<Logical, (Generation, (u64, BlockGroupFlags))>,
    /// Where nodes of the chunk tree point to.
    pub(crate) pointed: BTreeSet<Logical>,
    /// The sector size in the newest chunk item.
    sector: Option<(Generation, u32)>,
}

impl DescribedVersions {
    /// Takes an item of a leaf of the tree `owner`. One that is malformed is passed over.
    pub(crate) fn take(&mut self, owner: TreeId, key: Key, data: &[u8], generation: Generation) {
        match (owner, key.item_type) {
            (TreeId::CHUNK, ItemType::DEV_ITEM) if key.objectid == objectid::DEV_ITEMS => {
                if let Ok(item) = DevItem::view(data)
                    && item.devid.get() == key.offset
                {
                    note(&mut self.devices, key.offset, generation, *item, |one, other| {
                        one.as_bytes() == other.as_bytes()
                    });
                }
            }
            (TreeId::CHUNK, ItemType::CHUNK_ITEM) => {
                let Ok((item, _)) = ChunkItem::ref_from_prefix(data) else { return };
                let sector = item.sector_size.get();
                let is_sector = sector.is_power_of_two() && sector >= 512;
                if is_sector && let Some(chunk) = DescribedChunk::parse(key, data, sector) {
                    if self.sector.is_none_or(|(known, _)| known <= generation) {
                        self.sector = Some((generation, sector));
                    }
                    let start = chunk.chunk.start;
                    note(&mut self.chunks, start, generation, chunk, |one, other| {
                        one.chunk == other.chunk
                    });
                }
            }
            (TreeId::DEV, ItemType::DEV_EXTENT) => {
                if let Ok((extent, _)) = DevExtent::ref_from_prefix(data) {
                    let chunk = Logical(extent.chunk_offset.get());
                    let range = (generation, (chunk, extent.length.get()));
                    newest(&mut self.extents, (key.objectid, key.offset), range);
                }
            }
            (TreeId::EXTENT | TreeId::BLOCK_GROUP, ItemType::BLOCK_GROUP_ITEM) => {
                if let Ok(item) = BlockGroupItem::view(data) {
                    let flags = BlockGroupFlags(item.flags.get());
                    let group = (generation, (key.offset, flags));
                    newest(&mut self.groups, Logical(key.objectid), group);
                }
            }
            _ => {}
        }
    }

    /// Takes a node of the chunk tree.
    pub(crate) fn take_node(&mut self, pointers: &[NodePointer]) {
        let room = MOST_KEPT.saturating_sub(self.pointed.len());
        self.pointed.extend(pointers.iter().take(room).map(NodePointer::logical));
    }

    /// The unit of data, in bytes, as the newest chunk item has it.
    pub(crate) fn sector_size(&self) -> Option<u32> {
        self.sector.map(|(_, sector)| sector)
    }

    /// The newest version of each member.
    pub(crate) fn newest_devices(&self) -> Vec<DevItem> {
        self.devices.values().filter_map(|all| all.first()).map(|(_, item)| *item).collect()
    }

    /// The generation of the oldest leaf that has the newest version of something.
    pub(crate) fn oldest_of_newest(&self) -> Generation {
        let devices = self.devices.values().filter_map(|all| all.first().map(|one| one.0));
        let chunks = self.chunks.values().filter_map(|all| all.first().map(|one| one.0));
        devices.chain(chunks).min().unwrap_or(Generation(u64::MAX))
    }

    /// Chunks with which a first look at the trees is possible: the newest version of each, and
    /// what ranges of members and block groups say together. One that overlaps a newer one was
    /// removed. `devices` are the members.
    pub(crate) fn first_chunks(
        &self,
        devices: &[DevItem],
        sector_size: u32,
    ) -> Vec<DescribedChunk> {
        let mut newest: Vec<_> = self.chunks.values().filter_map(|all| all.first()).collect();
        newest.sort_by_key(|(generation, _)| std::cmp::Reverse(*generation));
        let mut chunks: BTreeMap<Logical, DescribedChunk> = BTreeMap::new();
        let mut add = |new: DescribedChunk| {
            let (start, end) = (new.chunk.start, new.chunk.end());
            let before = chunks.range(..=start).next_back();
            let next = chunks.range(start..).next();
            let is_apart = before.is_none_or(|(_, before)| before.chunk.end() <= start)
                && next.is_none_or(|(next, _)| end <= *next);
            if is_apart {
                chunks.insert(start, new);
            }
        };
        for (_, chunk) in newest {
            add(chunk.clone());
        }
        let mut ranges: BTreeMap<Logical, Vec<(u64, u64, u64)>> = BTreeMap::new();
        for (&(device, physical), &(_, (chunk, len))) in &self.extents {
            ranges.entry(chunk).or_default().push((device, physical, len));
        }
        for (start, ranges) in ranges {
            if let Some((_, group)) = self.groups.get(&start)
                && let Some(chunk) = chunk_of_ranges(start, *group, &ranges, (devices, sector_size))
            {
                add(chunk);
            }
        }
        chunks.into_values().collect()
    }
}

/// The chunk that ranges of members and a block group describe together: each range has a whole
/// copy. `None` for profiles that spread data over stripes, whose order they do not say, and where
/// the two do not fit.
pub(crate) fn chunk_of_ranges(
    start: Logical,
    (length, flags): (u64, BlockGroupFlags),
    ranges: &[(u64, u64, u64)],
    (devices, sector_size): (&[DevItem], u32),
) -> Option<DescribedChunk> {
    let profile = flags.profile().ok()?;
    let is_copied = matches!(
        profile,
        Profile::Single | Profile::Dup | Profile::Raid1 | Profile::Raid1c3 | Profile::Raid1c4
    );
    let fits = ranges.len() == usize::from(profile.shape().copies)
        && ranges.iter().all(|(_, _, len)| *len == length);
    if !is_copied || !fits {
        return None;
    }
    let stripes = ranges.iter().map(|&(device, physical, _)| {
        let item = devices.iter().find(|item| item.devid.get() == device)?;
        Some(Stripe {
            device: DeviceId(device),
            physical: Physical(physical),
            device_uuid: Uuid::from_bytes(item.uuid),
        })
    });
    let stripes = stripes.collect::<Option<_>>()?;
    DescribedChunk::made(&Chunk { start, length, flags, profile, stripes }, sector_size)
}

fn newest<K: Ord, V>(
    known: &mut BTreeMap<K, (Generation, V)>,
    key: K,
    (generation, value): (Generation, V),
) {
    let is_older = known.get(&key).is_some_and(|(known, _)| *known >= generation);
    if !is_older && (known.len() < MOST_KEPT || known.contains_key(&key)) {
        known.insert(key, (generation, value));
    }
}

fn note<K: Ord, V>(
    known: &mut BTreeMap<K, Versions<V>>,
    key: K,
    generation: Generation,
    value: V,
    is_equal: impl Fn(&V, &V) -> bool,
) {
    if known.len() >= MOST_KEPT && !known.contains_key(&key) {
        return;
    }
    let versions = known.entry(key).or_default();
    if let Some((of, _)) = versions.iter_mut().find(|(_, version)| is_equal(version, &value)) {
        *of = generation.max(*of);
    } else {
        versions.push((generation, value));
    }
    versions.sort_by_key(|(generation, _)| std::cmp::Reverse(*generation));
    versions.truncate(MOST_VERSIONS);
}
