//! The superblocks of a device as they are, and what of damaged ones is proved.
//!
//! A superblock is *sound* when it verifies. One whose chunk array alone is damaged can be proved:
//! its checksum is right, or it becomes right with the array that the chunk tree requires.

use offshoot_btrfs_format::Physical;
use offshoot_btrfs_format::chunk::Chunk;
use offshoot_btrfs_format::csum::ChecksumType;
use offshoot_btrfs_format::encode::{chunk_key, sealed_superblock};
use offshoot_btrfs_format::key::DiskKey;
use offshoot_btrfs_format::superblock::{
    MAGIC, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock, SuperblockItem,
};
use offshoot_device::BlockDevice;
use offshoot_vfs::{Error, Result};
use uuid::Uuid;
use zerocopy::IntoBytes;

/// The most system chunks of which all selections are tried.
const MOST_SELECTED: usize = 6;

/// A system chunk with its item.
type SystemChunk<'c> = (&'c Chunk, &'c [u8]);

/// The superblocks of a device.
#[derive(Debug)]
pub(super) struct StoredSuperblocks {
    /// The bytes at all places that the device has, one place behind the other.
    pub(super) bytes: Vec<u8>,
    /// The one that describes the volume: the primary if it is sound, or else the newest copy.
    pub(super) sound: Option<Superblock>,
    /// What is wrong with the others, by their offset.
    pub(super) problems: Vec<(u64, String)>,
}

impl StoredSuperblocks {
    /// Reads the superblocks of `device`.
    ///
    /// # Errors
    /// When the device cannot read one: then it could not be brought back.
    pub(super) fn read(device: &dyn BlockDevice) -> Result<Self> {
        Self::read_each(device, Err)
    }

    /// The same, to read the volume and not to write it: what cannot be read counts as damaged.
    pub(super) fn read_what_is_left(device: &dyn BlockDevice) -> Result<Self> {
        Self::read_each(device, |_| Ok(()))
    }

    fn read_each(device: &dyn BlockDevice, failed: impl Fn(Error) -> Result<()>) -> Result<Self> {
        let fits = |at: &u64| at.saturating_add(SUPERBLOCK_SIZE as u64) <= device.size_bytes();
        let (mut bytes, mut all, mut problems) = (Vec::new(), Vec::new(), Vec::new());
        for at in SUPERBLOCK_OFFSETS.into_iter().filter(fits) {
            let mut one = vec![0; SUPERBLOCK_SIZE];
            if let Err(error) = device.read_at(at, &mut one) {
                let what = format!("{}: reading the superblock at {at}", device.name());
                failed(Error::io(what, error))?;
                one.fill(0);
            }
            match Superblock::parse(&one, at) {
                Ok(superblock) => all.push((at, superblock)),
                Err(error) => problems.push((at, error.problem.into_owned())),
            }
            bytes.extend_from_slice(&one);
        }
        let rank = |(at, superblock): &(u64, Superblock)| {
            let is_primary = SUPERBLOCK_OFFSETS.first() == Some(at);
            (is_primary, superblock.generation, superblock.has_pending_log())
        };
        let sound = all.into_iter().max_by_key(rank).map(|(_, superblock)| superblock);
        Ok(Self { bytes, sound, problems })
    }

    /// The superblock whose chunk array alone is damaged, with an array of some of the chunks in
    /// `system`; `None` when none can be proved.
    pub(super) fn proved(&self, system: &[SystemChunk<'_>]) -> Option<Superblock> {
        let mut places = SUPERBLOCK_OFFSETS.into_iter().zip(self.bytes.chunks(SUPERBLOCK_SIZE));
        places.find_map(|(at, bytes)| proved(bytes, at, system))
    }

    /// The UUID of the device, by its own superblock.
    pub(super) fn device_uuid(&self) -> Option<Uuid> {
        Some(Uuid::from_bytes(self.sound.as_ref()?.item.dev_item.uuid))
    }
}

fn proved(bytes: &[u8], at: u64, system: &[SystemChunk<'_>]) -> Option<Superblock> {
    let item = SuperblockItem::view(bytes).ok()?;
    let checksum = ChecksumType::from_disk(item.csum_type.get())?;
    if item.magic != MAGIC || item.bytenr.get() != at {
        return None;
    }
    let stored = item.csum.get(..checksum.len())?;
    let is_right = |bytes: &[u8]| {
        bytes.get(item.csum.len()..).is_some_and(|rest| checksum.compute(rest).bytes() == stored)
    };
    if is_right(bytes) {
        let mut item = *item;
        fill_array(&mut item, system, false)?;
        return Superblock::parse(&sealed_superblock(&item, Physical(at), checksum)[..], at).ok();
    }
    let chosen = system.get(..system.len().min(MOST_SELECTED)).unwrap_or_default();
    for selection in 1u32..1 << chosen.len() {
        let some = (0..).zip(chosen).filter(|(bit, _)| selection >> bit & 1 != 0);
        let some: Vec<_> = some.map(|(_, chunk)| *chunk).collect();
        // A volume that removed a system chunk has the end of the longer array behind the array.
        for keeps_rest in [true, false] {
            let mut item = *item;
            fill_array(&mut item, &some, keeps_rest)?;
            if is_right(item.as_bytes()) {
                return Superblock::parse(item.as_bytes(), at).ok();
            }
        }
    }
    None
}

/// Puts chunks into the array of a superblock; `None` when they do not fit.
pub(super) fn fill_array(
    item: &mut SuperblockItem,
    system: &[SystemChunk<'_>],
    keeps_rest: bool,
) -> Option<()> {
    let mut array = Vec::new();
    for (chunk, data) in system {
        array.extend_from_slice(DiskKey::from(chunk_key(chunk)).as_bytes());
        array.extend_from_slice(data);
    }
    let (own, rest) = item.sys_chunk_array.split_at_mut_checked(array.len())?;
    own.copy_from_slice(&array);
    if !keeps_rest {
        rest.fill(0);
    }
    item.sys_chunk_array_size = u32::try_from(array.len()).ok()?.into();
    Some(())
}
