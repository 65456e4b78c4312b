//! The options for a new volume.

use std::ops::RangeInclusive;

use offshoot_vfs::{Error, Result, Timestamp};
use offshoot_xfs_format::features::XfsIncompat;
use offshoot_xfs_format::inode::XfsTime;
use uuid::Uuid;

use super::features::XfsMkfsFeatures;
use super::invalid;

/// The longest label, in bytes.
const LABEL_LEN: usize = 12;

/// The least block size of a volume with checksums.
const LEAST_BLOCK: u32 = 1024;

/// The least size of a directory block, where blocks are not larger.
const LEAST_DIR_BLOCK: u32 = 4096;

/// The largest log stripe, in bytes.
const MOST_LOG_STRIPE: u32 = 256 << 10;

/// The stripe of the device, in bytes. The volume records it, and places its log and its first
/// inodes by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsStripe {
    /// What one disk holds of a stripe.
    pub unit: u32,
    /// The data of a whole stripe.
    pub width: u32,
}

/// Options for a new volume. [`XfsMkfsOptions::new`] gives the defaults of `mkfs.xfs` since 6.18.
#[derive(Clone, Debug)]
pub struct XfsMkfsOptions {
    /// The id of the volume. Two volumes on one machine must not share it.
    pub uuid: Uuid,
    /// When the root directory was made.
    pub time: Timestamp,
    /// User and group of the root directory.
    pub root_owner: (u32, u32),
    /// Derives, together with `uuid`, the generations of inodes.
    pub seed: u64,
    /// The label: at most 12 bytes, without NUL and line break.
    pub label: String,
    /// The block size in bytes, from 1 KiB to 64 KiB.
    pub block_size: u32,
    /// The sector size in bytes; `None` for that of the device, or 512 where it does not say.
    pub sector_size: Option<u32>,
    /// The size of an inode in bytes, 512 to 2048, and at most half a block.
    pub inode_size: u32,
    /// The size of a directory block in bytes; `None` for a block, and at least 4 KiB.
    pub dir_block_size: Option<u32>,
    /// How many allocation groups the volume gets, about: as many as groups of equal size need.
    pub group_count: Option<u32>,
    /// The size of an allocation group in bytes, in place of their number.
    pub group_size: Option<u64>,
    /// The stripe of the device.
    pub stripe: Option<XfsStripe>,
    /// The size of the log in bytes.
    pub log_size: Option<u64>,
    /// The bytes that each record of the log fills a multiple of; `None` for the stripe unit, or
    /// for none.
    pub log_stripe: Option<u32>,
    /// How many percent of the volume inodes may take.
    pub inode_percent: Option<u8>,
    /// The features.
    pub features: XfsMkfsFeatures,
    /// Overwrite what is on the device.
    pub is_forced: bool,
}

impl XfsMkfsOptions {
    /// The defaults for a volume with this id that is made at this time.
    #[must_use]
    pub fn new(uuid: Uuid, time: Timestamp) -> Self {
        Self {
            uuid,
            time,
            root_owner: (0, 0),
            seed: 0,
            label: String::new(),
            block_size: 4096,
            sector_size: None,
            inode_size: 512,
            dir_block_size: None,
            group_count: None,
            group_size: None,
            stripe: None,
            log_size: None,
            log_stripe: None,
            inode_percent: None,
            features: XfsMkfsFeatures::default(),
            is_forced: false,
        }
    }

    /// The directory block size.
    pub(super) fn dir_block_size(&self) -> u32 {
        self.dir_block_size.unwrap_or(self.block_size.max(LEAST_DIR_BLOCK))
    }

    /// The time of the root directory, as the inodes of the volume store it.
    pub(super) fn xfs_time(&self) -> XfsTime {
        XfsTime { seconds: self.time.secs, nanoseconds: self.time.nanos }
    }

    /// Whether times are stored in nanoseconds since 1901.
    pub(super) fn has_big_times(&self) -> bool {
        self.features.incompat.contains(XfsIncompat::BIGTIME)
    }

    /// Checks the options against each other and against the sectors of the device. Sizes that
    /// depend on that of the device are checked when they are computed.
    pub(super) fn verify(&self, sector: u32, device_sector: u32) -> Result<()> {
        self.features.verify()?;
        self.verify_identity()?;
        let block = self.block_size;
        if block == 512 {
            return Err(invalid(
                "a block size of 512; volumes with checksums have at least 1024, and those of \
                 version 4, which have none, are not made",
            ));
        }
        power_of_two("block", block, LEAST_BLOCK..=64 << 10)?;
        power_of_two("sector", sector, 512..=block.min(32 << 10))?;
        if sector < device_sector {
            return Err(invalid(format!(
                "a sector size of {sector}; the sectors of the device have {device_sector}"
            )));
        }
        power_of_two("inode", self.inode_size, 512..=(block / 2).min(2048))?;
        let least = block.max(LEAST_DIR_BLOCK);
        power_of_two("directory block", self.dir_block_size(), least..=64 << 10)?;
        if let Some(XfsStripe { unit, width }) = self.stripe
            && (unit == 0
                || !unit.is_multiple_of(block)
                || !width.is_multiple_of(unit)
                || width == 0)
        {
            return Err(invalid(format!(
                "a stripe of units of {unit} and a width of {width}; the unit is a multiple of the \
                 block size, {block}, and the width one of the unit"
            )));
        }
        if let Some(unit) = self.log_stripe
            && (unit == 0 || !unit.is_multiple_of(block) || unit > MOST_LOG_STRIPE)
        {
            return Err(invalid(format!(
                "a log stripe of {unit}; it is a multiple of the block size, {block}, and at most \
                 {MOST_LOG_STRIPE}"
            )));
        }
        if let Some(percent) = self.inode_percent
            && !(1..=100).contains(&percent)
        {
            return Err(invalid(format!("{percent} % for inodes; it is 1 to 100")));
        }
        if self.group_count.is_some() && self.group_size.is_some() {
            return Err(invalid("both a number and a size of allocation groups; one is enough"));
        }
        Ok(())
    }

    fn verify_identity(&self) -> Result<()> {
        if self.uuid.is_nil() {
            return Err(invalid("a filesystem id of all zeros"));
        }
        if self.label.len() > LABEL_LEN || self.label.contains(['\0', '\n']) {
            return Err(invalid(format!(
                "the label {:?}; on XFS it has at most {LABEL_LEN} bytes and neither NUL nor line \
                 break",
                self.label
            )));
        }
        let (time, is_wide) = (self.xfs_time(), self.has_big_times());
        if XfsTime::from_disk(time.to_disk(is_wide), is_wide) != time {
            let end = if is_wide { "from 1901 to 2486" } else { "without bigtime to 2038" };
            return Err(invalid(format!("the time {}; XFS has times {end}", self.time.decimal())));
        }
        Ok(())
    }
}

/// Checks a size that is a power of two in `range`.
fn power_of_two(what: &str, size: u32, range: RangeInclusive<u32>) -> Result<(), Error> {
    if size.is_power_of_two() && range.contains(&size) {
        return Ok(());
    }
    let (least, most) = range.into_inner();
    Err(invalid(format!("a {what} size of {size}; it is a power of two from {least} to {most}")))
}
