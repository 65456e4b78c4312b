//! Chunks, stripes, profiles and devices.
//!
//! A chunk maps a range of the logical space to one stripe on each of several devices. Its profile
//! says how the range is spread over the stripes.

mod place;

use offshoot_vfs::Structure;
use std::fmt;

use uuid::Uuid;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::key::{DiskKey, objectid};
use crate::view::view;
use crate::{DeviceId, ItemType, Key, Logical, Malformed, Physical};
pub use place::{ChunkRun, LOWEST_ALLOCATED};

/// The unit in bytes in which striped profiles spread data over devices. The format has a field for
/// it, but only this value is in use.
pub const STRIPE_LEN: u64 = 65536;

/// A device, as the chunk tree and the superblock of the device itself store it. 98 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
#[expect(missing_docs, reason = "fields are named and explained by the format's documentation")]
pub struct DevItem {
    pub devid: U64,
    pub total_bytes: U64,
    pub bytes_used: U64,
    pub io_align: U32,
    pub io_width: U32,
    pub sector_size: U32,
    pub dev_type: U64,
    pub generation: U64,
    pub start_offset: U64,
    pub dev_group: U32,
    pub seek_speed: u8,
    pub bandwidth: u8,
    pub uuid: [u8; 16],
    pub fsid: [u8; 16],
}

impl DevItem {
    /// Views a device item.
    pub fn view(data: &[u8]) -> Result<&Self, Malformed> {
        Ok(view(Structure::DeviceItem, data)?.0)
    }

    /// The number of the device.
    #[must_use]
    pub fn id(&self) -> DeviceId {
        DeviceId(self.devid.get())
    }
}

/// The fixed part of a chunk item. 48 bytes; `num_stripes` stripes follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
#[expect(missing_docs, reason = "fields are named and explained by the format's documentation")]
pub struct ChunkItem {
    pub length: U64,
    pub owner: U64,
    pub stripe_len: U64,
    pub chunk_type: U64,
    pub io_align: U32,
    pub io_width: U32,
    pub sector_size: U32,
    pub num_stripes: U16,
    pub sub_stripes: U16,
}

/// A stripe of a chunk as it is stored. 32 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
#[expect(missing_docs, reason = "fields are named and explained by the format's documentation")]
pub struct StripeItem {
    pub devid: U64,
    pub offset: U64,
    pub dev_uuid: [u8; 16],
}

/// The place of one copy of data, as the RAID stripe tree stores it. 16 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
#[expect(missing_docs, reason = "fields are named and explained by the format's documentation")]
pub struct RaidStride {
    pub devid: U64,
    pub physical: U64,
}

impl RaidStride {
    /// Views the copies in a stripe extent: at least one, and no other bytes.
    pub fn view_all(data: &[u8]) -> Result<&[Self], Malformed> {
        let found = <[Self]>::ref_from_bytes(data).ok().filter(|strides| !strides.is_empty());
        found.ok_or_else(|| {
            let problem = format!("copies of 16 bytes expected, {} bytes found", data.len());
            Malformed::new(Structure::RaidStripe, problem)
        })
    }
}

/// What a block group holds (data, metadata, system) and its profile: the `type` of a chunk and the
/// `flags` of a block group.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockGroupFlags(pub u64);

#[expect(missing_docs, reason = "the names are the format's and say what the bits are")]
impl BlockGroupFlags {
    pub const DATA: u64 = 1 << 0;
    pub const SYSTEM: u64 = 1 << 1;
    pub const METADATA: u64 = 1 << 2;
    pub const RAID0: u64 = 1 << 3;
    pub const RAID1: u64 = 1 << 4;
    pub const DUP: u64 = 1 << 5;
    pub const RAID10: u64 = 1 << 6;
    pub const RAID5: u64 = 1 << 7;
    pub const RAID6: u64 = 1 << 8;
    pub const RAID1C3: u64 = 1 << 9;
    pub const RAID1C4: u64 = 1 << 10;

    /// The bits for what a block group holds.
    pub const TYPES: u64 = Self::DATA | Self::SYSTEM | Self::METADATA;
    /// The bits of the profiles; the single profile has none of them.
    pub const PROFILES: u64 = 0x7f8;

    /// Whether it holds tree blocks.
    #[must_use]
    pub fn has_metadata(self) -> bool {
        self.0 & (Self::METADATA | Self::SYSTEM) != 0
    }

    /// Whether it holds data.
    #[must_use]
    pub fn has_data(self) -> bool {
        self.0 & Self::DATA != 0
    }

    /// The profile of its bits.
    pub fn profile(self) -> Result<Profile, Malformed> {
        Ok(match self.0 & Self::PROFILES {
            0 => Profile::Single,
            Self::DUP => Profile::Dup,
            Self::RAID0 => Profile::Raid0,
            Self::RAID1 => Profile::Raid1,
            Self::RAID1C3 => Profile::Raid1c3,
            Self::RAID1C4 => Profile::Raid1c4,
            Self::RAID10 => Profile::Raid10,
            Self::RAID5 => Profile::Raid5,
            Self::RAID6 => Profile::Raid6,
            other => {
                return Err(Malformed::new(
                    Structure::ChunkType,
                    format!("profile bits {other:#x} are not one profile"),
                ));
            }
        })
    }

    /// Whether a volume with a RAID stripe tree stores in that tree where the bytes are. It does so
    /// only for data, with every profile that has several stripes and no parity.
    #[must_use]
    pub fn is_in_stripe_tree(self) -> bool {
        const PROFILES: u64 = BlockGroupFlags::DUP
            | BlockGroupFlags::RAID0
            | BlockGroupFlags::RAID1
            | BlockGroupFlags::RAID1C3
            | BlockGroupFlags::RAID1C4
            | BlockGroupFlags::RAID10;
        self.0 & Self::TYPES == Self::DATA && self.0 & PROFILES != 0
    }

    /// What it holds: `data`, `metadata`, `system` or `data+metadata`; `none` without any bit.
    #[must_use]
    pub fn kind(self) -> &'static str {
        match self.0 & Self::TYPES {
            Self::DATA => "data",
            Self::METADATA => "metadata",
            Self::SYSTEM => "system",
            0 => "none",
            _ => "data+metadata",
        }
    }
}

impl fmt::Debug for BlockGroupFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockGroupFlags({:#x})", self.0)
    }
}

/// The profile of a chunk: how it is spread over its stripes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the names are the field's; `Profile::shape` says what they mean")]
pub enum Profile {
    Single,
    Dup,
    Raid0,
    Raid1,
    Raid1c3,
    Raid1c4,
    Raid10,
    Raid5,
    Raid6,
}

/// The copies, parity and stripes of a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProfileShape {
    /// How many copies of every byte there are.
    pub copies: u16,
    /// How many parity stripes there are.
    pub parity: u16,
    /// The fewest stripes of a chunk, when no device is missing.
    pub min_stripes: u16,
    /// The most stripes of a chunk; `None` when only the 16-bit field of the format limits them.
    pub max_stripes: Option<u16>,
    /// How many members may be missing or damaged without loss of data.
    pub tolerated: u16,
}

impl Profile {
    /// The bit of this profile in [`BlockGroupFlags::PROFILES`]; 0 for single.
    #[must_use]
    pub fn bits(self) -> u64 {
        match self {
            Self::Single => 0,
            Self::Dup => BlockGroupFlags::DUP,
            Self::Raid0 => BlockGroupFlags::RAID0,
            Self::Raid1 => BlockGroupFlags::RAID1,
            Self::Raid1c3 => BlockGroupFlags::RAID1C3,
            Self::Raid1c4 => BlockGroupFlags::RAID1C4,
            Self::Raid10 => BlockGroupFlags::RAID10,
            Self::Raid5 => BlockGroupFlags::RAID5,
            Self::Raid6 => BlockGroupFlags::RAID6,
        }
    }

    /// The copies, parity and stripes of this profile.
    #[must_use]
    pub fn shape(self) -> ProfileShape {
        let (copies, parity, min_stripes, max_stripes, tolerated) = match self {
            Self::Single => (1, 0, 1, Some(1), 0),
            Self::Dup => (2, 0, 2, Some(2), 0),
            Self::Raid0 => (1, 0, 1, None, 0),
            Self::Raid1 => (2, 0, 2, Some(2), 1),
            Self::Raid1c3 => (3, 0, 3, Some(3), 2),
            Self::Raid1c4 => (4, 0, 4, Some(4), 3),
            Self::Raid10 => (2, 0, 2, None, 1),
            Self::Raid5 => (1, 1, 2, None, 1),
            // Q needs a different non-zero coefficient of GF(256) for each data stripe. There are
            // 255 of them; with the two parity stripes that makes 257.
            Self::Raid6 => (1, 2, 3, Some(257), 2),
        };
        ProfileShape { copies, parity, min_stripes, max_stripes, tolerated }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Single => "single",
            Self::Dup => "DUP",
            Self::Raid0 => "RAID0",
            Self::Raid1 => "RAID1",
            Self::Raid1c3 => "RAID1C3",
            Self::Raid1c4 => "RAID1C4",
            Self::Raid10 => "RAID10",
            Self::Raid5 => "RAID5",
            Self::Raid6 => "RAID6",
        })
    }
}

/// One stripe of a [`Chunk`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stripe {
    /// The device that holds it.
    pub device: DeviceId,
    /// Its first byte on that device.
    pub physical: Physical,
    /// The UUID of that device.
    pub device_uuid: Uuid,
}

/// A chunk whose fields are consistent.
///
/// 1. `start` and `length` are multiples of the sector size, `length` is not 0 and
///    their sum does not overflow.
/// 2. The profile is one of [`Profile`] and has a number of stripes that it allows.
/// 3. The length divides evenly over the stripes. Where data goes round the stripes in units, each
///    stripe is a whole number of units of [`STRIPE_LEN`].
/// 4. It ends below 2^63, and so does every stripe: no file or device is larger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Its first logical address.
    pub start: Logical,
    /// Its length in the logical space, in bytes.
    pub length: u64,
    /// What it holds, and the bit of its profile.
    pub flags: BlockGroupFlags,
    /// How it is spread over its stripes.
    pub profile: Profile,
    /// Its stripes, in the order of the format.
    pub stripes: Vec<Stripe>,
}

impl Chunk {
    /// Parses the chunk item with `key`. Returns the chunk, and the bytes behind it in `data`.
    ///
    /// # Errors
    /// When `key` is not that of a chunk, or an invariant of [`Chunk`] does not hold.
    pub fn parse_prefix(
        key: Key,
        data: &[u8],
        sector_size: u32,
    ) -> Result<(Self, &[u8]), Malformed> {
        let bad = |problem: String| Malformed::new(Structure::Chunk, format!("{key}: {problem}"));
        if key.objectid != objectid::FIRST_CHUNK_TREE || key.item_type != ItemType::CHUNK_ITEM {
            return Err(bad("not the key of a chunk".into()));
        }
        let (item, rest) = view::<ChunkItem>(Structure::Chunk, data)?;
        let count = item.num_stripes.get();
        let (stripes, rest) = <[StripeItem]>::ref_from_prefix_with_elems(rest, usize::from(count))
            .map_err(|_| bad(format!("{count} stripes do not fit in the item")))?;
        let flags = BlockGroupFlags(item.chunk_type.get());
        let chunk = Self {
            start: Logical(key.offset),
            length: item.length.get(),
            flags,
            profile: flags.profile().map_err(|e| bad(e.to_string()))?,
            stripes: stripes.iter().map(StripeItem::get).collect(),
        };
        if item.stripe_len.get() != STRIPE_LEN {
            return Err(bad(format!("stripe length {}, not {STRIPE_LEN}", item.stripe_len)));
        }
        if item.sector_size.get() != sector_size {
            return Err(bad(format!("sector size {}, not {sector_size}", item.sector_size)));
        }
        chunk.verify(item.sub_stripes.get(), sector_size).map_err(bad)?;
        Ok((chunk, rest))
    }

    fn verify(&self, sub_stripes: u16, sector_size: u32) -> Result<(), String> {
        let Self { start, length, flags, profile, .. } = self;
        let unit = u64::from(sector_size);
        if *length == 0 || length % unit != 0 || start.0 % unit != 0 {
            return Err(format!("start {start} or length {length} is not in whole sectors"));
        }
        if !ends_within(start.0, *length) {
            return Err(format!("length {length} overflows the address space"));
        }
        if flags.0 & !(BlockGroupFlags::TYPES | BlockGroupFlags::PROFILES) != 0 {
            return Err(format!("unknown type bits in {:#x}", flags.0));
        }
        if flags.kind() == "none" {
            return Err("holds neither data nor metadata".into());
        }
        let shape = profile.shape();
        let count = u16::try_from(self.stripes.len()).expect("counted by a u16");
        if count < shape.min_stripes || shape.max_stripes.is_some_and(|max| count > max) {
            return Err(format!("{profile} with {count} stripes"));
        }
        if *profile == Profile::Raid10 && (sub_stripes != 2 || count % 2 != 0) {
            return Err(format!("RAID10 with {count} stripes in groups of {sub_stripes}"));
        }
        let stripe_bytes = self.stripe_bytes();
        if stripe_bytes * self.data_stripes() != *length {
            return Err(format!("length {length} does not divide over {count} stripes"));
        }
        let is_striped =
            matches!(profile, Profile::Raid0 | Profile::Raid10 | Profile::Raid5 | Profile::Raid6);
        if is_striped && !stripe_bytes.is_multiple_of(STRIPE_LEN) {
            return Err(format!("{stripe_bytes} bytes on each of {count} stripes"));
        }
        match self.stripes.iter().find(|s| !ends_within(s.physical.0, stripe_bytes)) {
            Some(s) => Err(format!("a stripe at {} overflows device {}", s.physical, s.device)),
            None => Ok(()),
        }
    }

    /// The number of stripes that hold different data: the length is spread over them. Example:
    /// RAID6 with 6 stripes has 4, and RAID10 with 6 stripes has 3.
    #[must_use]
    pub fn data_stripes(&self) -> u64 {
        let shape = self.profile.shape();
        ((self.stripes.len() as u64).saturating_sub(u64::from(shape.parity))
            / u64::from(shape.copies))
        .max(1)
    }

    /// The bytes that each stripe occupies on its device.
    #[must_use]
    pub fn stripe_bytes(&self) -> u64 {
        self.length / self.data_stripes()
    }

    /// The first logical address behind it.
    #[must_use]
    pub fn end(&self) -> Logical {
        Logical(self.start.0 + self.length)
    }
}

/// Whether a range of `length` bytes from `start` on ends below 2^63, where a file may end.
fn ends_within(start: u64, length: u64) -> bool {
    start.checked_add(length).is_some_and(|end| end <= i64::MAX.cast_unsigned())
}

impl StripeItem {
    /// The stripe with typed fields.
    #[must_use]
    pub fn get(&self) -> Stripe {
        Stripe {
            device: DeviceId(self.devid.get()),
            physical: Physical(self.offset.get()),
            device_uuid: Uuid::from_bytes(self.dev_uuid),
        }
    }
}

/// A range of a device that belongs to a chunk, as the device tree stores it. 48 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
#[expect(missing_docs, reason = "fields are named and explained by the format's documentation")]
pub struct DevExtent {
    pub chunk_tree: U64,
    pub chunk_objectid: U64,
    pub chunk_offset: U64,
    pub length: U64,
    pub chunk_tree_uuid: [u8; 16],
}

/// Parses the `sys_chunk_array` of a superblock: a key, its chunk item, the next key, and so on.
///
/// # Errors
/// When an entry is not a whole, well-formed system chunk.
pub fn parse_system_chunks(mut array: &[u8], sector_size: u32) -> Result<Vec<Chunk>, Malformed> {
    let mut chunks = Vec::new();
    while !array.is_empty() {
        let (key, rest) = view::<DiskKey>(Structure::SystemChunkArray, array)?;
        let (chunk, rest) = Chunk::parse_prefix(key.get(), rest, sector_size)?;
        if chunk.flags.0 & BlockGroupFlags::SYSTEM == 0 {
            return Err(Malformed::new(
                Structure::SystemChunkArray,
                format!("the chunk at {} is not a system chunk", chunk.start),
            ));
        }
        chunks.push(chunk);
        array = rest;
    }
    Ok(chunks)
}
