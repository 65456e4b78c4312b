//! The layout of a new volume: sizes and places, and the superblock that records them.

use offshoot_device::BlockDevice;
use offshoot_vfs::{Errno, Error, Result};
use offshoot_xfs_format::btree::XfsTree;
use offshoot_xfs_format::features::{XfsFeatures2, XfsIncompat, XfsVersionBits};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::superblock::{MAGIC, XfsSuperblock, XfsSuperblockFields};
use offshoot_xfs_format::{AgBlock, AgNumber, FsBlock, Ino, XfsGeometry};
use zerocopy::FromZeros;

use super::invalid;
use super::least_log::least_log_blocks;
use super::options::{XfsMkfsOptions, XfsStripe};
use crate::buffer::malformed;
use crate::trans::MostTreeLevels;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// The least volume, group and log, as in `mkfs.xfs` since 5.19, in bytes.
const LEAST_VOLUME: u64 = 300 * MIB;
pub(super) const LEAST_GROUP: u64 = 16 * MIB;
const LEAST_LOG: u64 = 64 * MIB;

/// The largest log in bytes and in blocks.
const MOST_LOG: u64 = 2 * GIB - 10 * MIB;
const MOST_LOG_BLOCKS: u64 = 1 << 20;

/// A volume has this many blocks for each one of the log.
const BLOCKS_PER_LOG_BLOCK: u64 = 2048;

/// A log stripe that is too large for a log becomes this, in bytes.
const USUAL_LOG_STRIPE: u32 = 32 << 10;
const MOST_LOG_STRIPE: u64 = 256 << 10;

/// The sizes and places of a new volume.
#[derive(Debug)]
pub(super) struct NewXfsLayout {
    /// The superblock, without a root directory and with counters of zero.
    pub(super) fields: XfsSuperblockFields,
    pub(super) geometry: XfsGeometry,
    pub(super) levels: MostTreeLevels,
    /// Where the log begins. It lies in one group.
    pub(super) log: (AgNumber, AgBlock),
}

/// Numbers of blocks.
struct NewXfsSizes {
    /// Blocks of a group.
    group: u64,
    groups: u64,
    volume: u64,
    /// The stripe of the device; zeros without one.
    unit: u64,
    width: u64,
}

impl NewXfsLayout {
    /// The layout of a volume on `device`.
    pub(super) fn of(options: &XfsMkfsOptions, device: &dyn BlockDevice) -> Result<Self> {
        let device_sector = device.logical_sector_bytes().unwrap_or(512);
        let device_sector = u32::try_from(device_sector)
            .map_err(|_| invalid(format!("{}: sectors of {device_sector} bytes", device.name())))?;
        let sector = options.sector_size.unwrap_or(device_sector);
        options.verify(sector, device_sector)?;
        let block = u64::from(options.block_size);
        let sizes = NewXfsSizes::of(options, device.size_bytes() / block)?;
        let mut geometry = geometry(options, sector, &sizes)?;
        let levels = MostTreeLevels::of(&geometry);
        let log_unit = log_unit(options, sector, sizes.unit * block);
        let log = NewXfsLog { geometry: &geometry, sizes: &sizes, unit: log_unit / block };
        let log_blocks = log.blocks(options, &levels)?;
        let ag = AgNumber(geometry.ag_count / 2);
        // `mkfs.xfs` aligns the number, not the place. Units that are no powers of two then differ.
        let first = geometry.fs_block(ag, AgBlock(roots_end(&geometry)));
        geometry.log_start = FsBlock(first.0.next_multiple_of(log.alignment()));
        geometry.log_blocks = narrow(log_blocks)?;
        if !geometry.is_usable_extent(geometry.log_start, geometry.log_blocks) {
            let (log, group) = (geometry.log_blocks, geometry.ag_len(ag));
            return Err(invalid(format!(
                "an aligned log of {log} blocks in an allocation group of {group}"
            )));
        }
        let fields = fields(options, &geometry, &sizes, log_unit)?;
        // The parser proves what the rest of the engine relies on.
        let proved = XfsSuperblock::parse(&fields.encode()).map_err(malformed)?;
        let geometry = proved.geometry;
        let log = geometry.split(geometry.log_start).ok_or_else(too_large)?;
        Ok(Self { fields, geometry, levels, log })
    }

    /// That of a volume which is there, and whose log is on its device.
    pub(super) fn of_volume(superblock: &XfsSuperblock) -> Result<Self> {
        let XfsSuperblock { fields, geometry } = superblock.clone();
        let log = geometry.split(geometry.log_start).ok_or_else(too_large)?;
        Ok(Self { fields, levels: MostTreeLevels::of(&geometry), geometry, log })
    }
}

impl NewXfsSizes {
    /// Divides `blocks` into groups.
    fn of(options: &XfsMkfsOptions, blocks: u64) -> Result<Self> {
        let block = u64::from(options.block_size);
        refuse_small(blocks, block)?;
        let (least, most) = (LEAST_GROUP / block, TIB / block - 1);
        let stripe = options.stripe.unwrap_or(XfsStripe { unit: 0, width: 0 });
        let (unit, width) = (u64::from(stripe.unit) / block, u64::from(stripe.width) / block);
        let mut group = match (options.group_size, options.group_count) {
            (Some(size), _) if size.is_multiple_of(block) => size / block,
            (Some(size), _) => {
                return Err(invalid(format!("groups of {size} bytes, with blocks of {block}")));
            }
            (None, Some(count)) => blocks.div_ceil(u64::from(count.max(1))),
            (None, None) => usual_group(blocks, block, unit > 0),
        };
        if group > blocks {
            return Err(invalid(format!("groups of {group} blocks in a volume of {blocks}")));
        }
        if unit > 0 {
            let up = group.next_multiple_of(unit);
            group = if up > most { group / unit * unit } else { up };
            // Else all groups would begin on one disk of the stripe.
            let is_free = options.group_size.is_none() && options.group_count.is_none();
            if is_free && group.is_multiple_of(width) && group < blocks && unit != width {
                group = if group - unit < least { group + unit } else { group - unit };
            }
        }
        if !(least..=most).contains(&group) {
            return Err(invalid(format!(
                "groups of {group} blocks; with blocks of {block} they have {least} to {most}"
            )));
        }
        // A short group at the end is left out.
        let rest = blocks % group;
        let volume = if rest < least { blocks - rest } else { blocks };
        refuse_small(volume, block)?;
        let groups = volume.div_ceil(group);
        if groups < 2 {
            return Err(invalid("one allocation group; two are the least, for two superblocks"));
        }
        Ok(Self { group, groups, volume, unit, width })
    }

    /// How many percent of the volume inodes may take.
    fn inode_percent(&self, block: u64) -> u8 {
        match self.volume * block {
            bytes if bytes < TIB => 25,
            bytes if bytes < 50 * TIB => 5,
            _ => 1,
        }
    }
}

fn refuse_small(blocks: u64, block: u64) -> Result<()> {
    if blocks >= LEAST_VOLUME / block {
        return Ok(());
    }
    let bytes = blocks * block;
    let what = format!("a volume of {bytes} bytes; XFS needs {LEAST_VOLUME}, which is 300 MiB");
    Err(Error::posix(Errno::NOSPC, what))
}

/// The blocks of a group: a quarter of the volume, less on a stripe, where more disks work at a
/// time; and at most a terabyte.
fn usual_group(blocks: u64, block: u64, is_striped: bool) -> u64 {
    let is_above = |bytes: u64| blocks > bytes / block;
    let groups = match is_striped {
        _ if blocks >= if is_striped { 32 } else { 4 } * TIB / block => {
            return TIB / block - 1;
        }
        false => 4,
        true if is_above(512 * GIB) => 32,
        true if is_above(8 * GIB) => 16,
        true => 8,
    };
    blocks.div_ceil(groups)
}

/// The bytes that each record of the log fills a multiple of; 0 for none.
fn log_unit(options: &XfsMkfsOptions, sector: u32, stripe_unit: u64) -> u64 {
    let block = u64::from(options.block_size);
    match options.log_stripe {
        Some(unit) => unit.into(),
        None if sector > 512 => block,
        None if stripe_unit > MOST_LOG_STRIPE => u64::from(USUAL_LOG_STRIPE) / block * block,
        None => stripe_unit,
    }
}

/// The log of a volume that is being laid out.
struct NewXfsLog<'a> {
    geometry: &'a XfsGeometry,
    sizes: &'a NewXfsSizes,
    /// The blocks that each record fills a multiple of; 0 for none.
    unit: u64,
}

impl NewXfsLog<'_> {
    /// The blocks that its start and its size are multiples of.
    fn alignment(&self) -> u64 {
        let unit = if self.unit > 0 { self.unit } else { self.sizes.unit };
        unit.max(1)
    }

    /// The blocks of the log.
    fn blocks(&self, options: &XfsMkfsOptions, levels: &MostTreeLevels) -> Result<u64> {
        let block = u64::from(options.block_size);
        let least = least_log_blocks(self.geometry, levels, self.unit * block);
        // A group keeps its headers, its roots, its first free list and some blocks to grow.
        let kept = u64::from(roots_end(self.geometry)) + 5;
        let most = (self.sizes.group - kept).min(MOST_LOG_BLOCKS).min(MOST_LOG / block);
        if least > most {
            let what = format!(
                "a log of at most {most} blocks fits in an allocation group, and the kernel needs \
                 {least}: larger groups have room for it"
            );
            return Err(Error::posix(Errno::NOSPC, what));
        }
        let blocks = match options.log_size {
            Some(size) if !size.is_multiple_of(block) => {
                return Err(invalid(format!("a log of {size} bytes, with blocks of {block}")));
            }
            Some(size) => size / block,
            None => {
                let usual = self.sizes.volume / BLOCKS_PER_LOG_BLOCK;
                usual.max(LEAST_LOG / block).max(least).min(most)
            }
        };
        let least = least.max(LEAST_LOG / block);
        if !(least..=most).contains(&blocks) {
            return Err(invalid(format!(
                "a log of {blocks} blocks; in this volume it has {least} to {most}"
            )));
        }
        let alignment = self.alignment();
        let aligned = blocks.next_multiple_of(alignment);
        if options.log_size.is_some() && aligned != blocks {
            return Err(invalid(format!(
                "a log of {blocks} blocks; on its stripe it is a multiple of {alignment}"
            )));
        }
        Ok(if aligned > most { aligned - alignment } else { aligned })
    }
}

/// The first block of a group behind its headers and the roots of its trees.
pub(super) fn roots_end(geometry: &XfsGeometry) -> u32 {
    roots_of(geometry).map(|(root, _)| root + 1).last().unwrap_or(0)
}

/// The trees of a group, with the blocks of their roots.
pub(super) fn roots_of(geometry: &XfsGeometry) -> impl Iterator<Item = (u32, XfsTree)> {
    let has = |flag| geometry.layout.contains(flag);
    let trees = [
        (XfsTree::FreeByBlock, true),
        (XfsTree::FreeBySize, true),
        (XfsTree::Inodes, true),
        (XfsTree::FreeInodes, has(XfsLayout::FREE_INODES)),
        (XfsTree::ReverseMap, has(XfsLayout::REVERSE_MAP)),
        (XfsTree::ReferenceCounts, has(XfsLayout::SHARED_BLOCKS)),
    ];
    let there = trees.into_iter().filter(|(_, is_there)| *is_there).map(|(tree, _)| tree);
    (geometry.header_blocks()..).zip(there)
}

/// The geometry, with a log that is not placed yet.
fn geometry(options: &XfsMkfsOptions, sector: u32, sizes: &NewXfsSizes) -> Result<XfsGeometry> {
    let log = |size: u32| -> Result<u8> { narrow(u64::from(size.ilog2())) };
    let group: u32 = narrow(sizes.group)?;
    let (ro_compat, incompat) = (options.features.ro_compat, options.features.incompat);
    let features = XfsSuperblockFields {
        versionnum: 5.into(),
        ro_compat: ro_compat.bits().into(),
        incompat: incompat.bits().into(),
        ..XfsSuperblockFields::new_zeroed()
    };
    let (block_log, inode_log) = (log(options.block_size)?, log(options.inode_size)?);
    Ok(XfsGeometry {
        layout: features.layout(),
        block_log,
        sector_log: log(sector)?,
        inode_log,
        // Chunks are aligned to them.
        cluster_blocks: XfsGeometry::cluster_blocks(inode_log, block_log, u32::MAX),
        dir_block_log: log(options.dir_block_size())? - block_log,
        ag_block_log: log(group.next_power_of_two())?,
        ag_blocks: group,
        ag_count: narrow(sizes.groups)?,
        blocks: sizes.volume,
        log_start: FsBlock(0),
        log_blocks: 0,
        uuid: options.uuid,
    })
}

/// The superblock, without a root directory and with counters of zero.
fn fields(
    options: &XfsMkfsOptions,
    geometry: &XfsGeometry,
    sizes: &NewXfsSizes,
    log_unit: u64,
) -> Result<XfsSuperblockFields> {
    let (block, inode) = (geometry.block_size() as u64, geometry.inode_size() as u64);
    let sector = u16::try_from(geometry.sector_size()).map_err(|_| too_large())?;
    let has_large_sectors = sector > 512;
    let incompat = options.features.incompat;
    let mut version = XfsVersionBits::NLINK
        | XfsVersionBits::ALIGN
        | XfsVersionBits::LOGV2
        | XfsVersionBits::EXTFLG
        | XfsVersionBits::DIRV2
        | XfsVersionBits::MOREBITS;
    version.set(XfsVersionBits::DALIGN, sizes.unit > 0);
    version.set(XfsVersionBits::SECTOR, has_large_sectors);
    version.set(XfsVersionBits::ATTR, incompat.contains(XfsIncompat::PARENT));
    let features2 = XfsFeatures2::LAZYSBCOUNT
        | XfsFeatures2::ATTR2
        | XfsFeatures2::PROJID32
        | XfsFeatures2::CRC;
    // Inodes are read and written in clusters of 32.
    let cluster = (32 * inode) >> geometry.block_log;
    let (chunk, sparse) = if incompat.contains(XfsIncompat::SPINODES) {
        ((64 * inode) >> geometry.block_log, cluster)
    } else {
        (cluster, 0)
    };
    let log_sector = if has_large_sectors { (geometry.sector_log, sector) } else { (0, 0) };
    let mut fields = XfsSuperblockFields {
        magicnum: MAGIC,
        blocksize: narrow::<u32>(block)?.into(),
        dblocks: geometry.blocks.into(),
        uuid: options.uuid.into_bytes(),
        logstart: geometry.log_start.0.into(),
        rootino: Ino::NULL.0.into(),
        rbmino: Ino::NULL.0.into(),
        rsumino: Ino::NULL.0.into(),
        rextsize: narrow::<u32>((4096 / block).max(1))?.into(),
        agblocks: geometry.ag_blocks.into(),
        agcount: geometry.ag_count.into(),
        logblocks: geometry.log_blocks.into(),
        versionnum: (version.bits() | 5).into(),
        sectsize: sector.into(),
        inodesize: narrow::<u16>(inode)?.into(),
        inopblock: narrow::<u16>(block / inode)?.into(),
        blocklog: geometry.block_log,
        sectlog: geometry.sector_log,
        inodelog: geometry.inode_log,
        inopblog: geometry.inodes_per_block_log(),
        agblklog: geometry.ag_block_log,
        imax_pct: options.inode_percent.unwrap_or(sizes.inode_percent(block)),
        inoalignmt: narrow::<u32>(chunk)?.into(),
        unit: narrow::<u32>(sizes.unit)?.into(),
        width: narrow::<u32>(sizes.width)?.into(),
        dirblklog: geometry.dir_block_log,
        logsectlog: log_sector.0,
        logsectsize: log_sector.1.into(),
        // A log without a stripe has one of a byte.
        logsunit: narrow::<u32>(log_unit.max(1))?.into(),
        features2: features2.bits().into(),
        bad_features2: features2.bits().into(),
        ro_compat: options.features.ro_compat.bits().into(),
        incompat: incompat.bits().into(),
        spino_align: narrow::<u32>(sparse)?.into(),
        ..XfsSuperblockFields::new_zeroed()
    };
    if !fields.set_label(options.label.as_bytes()) {
        return Err(invalid("a label that does not fit"));
    }
    Ok(fields)
}

/// A number in the field of the format for it.
fn narrow<T: TryFrom<u64>>(number: u64) -> Result<T> {
    T::try_from(number).map_err(|_| too_large())
}

fn too_large() -> Error {
    invalid("a volume with larger numbers than the format has room for")
}
