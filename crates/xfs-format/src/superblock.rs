//! The superblock: the first sector of every allocation group.
//!
//! That of group 0 is the one that counts. The others are copies that only repair reads; the kernel
//! does not keep their counters, and `mkfs.xfs` leaves the root inode of most of them empty.
//! [`XfsSuperblockFields`] is the structure as the disk stores it; [`XfsSuperblock`] is a checked
//! one with typed values.

use offshoot_vfs::Structure;
use uuid::Uuid;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::features::{XfsFeatures2, XfsIncompat, XfsRoCompat};
use crate::geometry::XfsLayout;
use crate::ids::BASIC_BLOCK;
use crate::layout::{ensure, view};
use crate::record::CHUNK_INODES;
use crate::{FsBlock, Ino, Malformed, U16, U32, U64, XfsGeometry, csum};

/// The value of the `magicnum` field.
pub const MAGIC: [u8; 4] = *b"XFSB";

/// The place of the checksum.
pub const CRC: usize = 224;

/// The least blocks of a group.
pub const LEAST_AG_BLOCKS: u32 = 64;

/// The bytes of a group are at most these, as a power of two.
const AG_BYTES_LOG: u8 = 40;

/// The bytes of a log are at most these.
const MOST_LOG_BYTES: u64 = 2 << 30;

/// The bytes of a sector are at most these.
pub const MOST_SECTOR_BYTES: u64 = 32 << 10;

/// The bytes of a log stripe are at most these.
const MOST_LOG_STRIPE: u32 = 256 << 10;

/// The bits of a block number in an extent record.
const EXTENT_START_BITS: u8 = 52;

const STRUCTURE: Structure = Structure::Superblock;

/// A superblock as it is stored.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
#[expect(missing_docs, reason = "fields are named and explained by the book")]
pub struct XfsSuperblockFields {
    pub magicnum: [u8; 4],
    pub blocksize: U32,
    pub dblocks: U64,
    pub rblocks: U64,
    pub rextents: U64,
    pub uuid: [u8; 16],
    pub logstart: U64,
    pub rootino: U64,
    pub rbmino: U64,
    pub rsumino: U64,
    pub rextsize: U32,
    pub agblocks: U32,
    pub agcount: U32,
    pub rbmblocks: U32,
    pub logblocks: U32,
    pub versionnum: U16,
    pub sectsize: U16,
    pub inodesize: U16,
    pub inopblock: U16,
    pub fname: [u8; 12],
    pub blocklog: u8,
    pub sectlog: u8,
    pub inodelog: u8,
    pub inopblog: u8,
    pub agblklog: u8,
    pub rextslog: u8,
    pub inprogress: u8,
    pub imax_pct: u8,
    pub icount: U64,
    pub ifree: U64,
    pub fdblocks: U64,
    pub frextents: U64,
    pub uquotino: U64,
    pub gquotino: U64,
    pub qflags: U16,
    pub flags: u8,
    pub shared_vn: u8,
    pub inoalignmt: U32,
    pub unit: U32,
    pub width: U32,
    pub dirblklog: u8,
    pub logsectlog: u8,
    pub logsectsize: U16,
    pub logsunit: U32,
    pub features2: U32,
    pub bad_features2: U32,
    pub compat: U32,
    pub ro_compat: U32,
    pub incompat: U32,
    pub log_incompat: U32,
    pub crc: [u8; 4],
    pub spino_align: U32,
    pub pquotino: U64,
    pub lsn: U64,
    pub meta_uuid: [u8; 16],
    pub metadirino: U64,
    pub rgcount: U32,
    pub rgextents: U32,
    pub rgblklog: u8,
    pub pad: [u8; 7],
    pub rtstart: U64,
    pub rtreserved: U64,
}

/// A checked superblock: its checksum is right, and its sizes are consistent.
#[derive(Clone, Debug)]
pub struct XfsSuperblock {
    /// All fields as the disk stores them.
    pub fields: XfsSuperblockFields,
    /// The sizes and places that its structures share.
    pub geometry: XfsGeometry,
}

impl XfsSuperblockFields {
    /// The label, up to its first NUL.
    #[must_use]
    pub fn label(&self) -> &[u8] {
        self.fname.split(|&byte| byte == 0).next().unwrap_or_default()
    }

    /// Sets the label, and returns whether it fits and has no NUL.
    pub fn set_label(&mut self, label: &[u8]) -> bool {
        let fits = label.len() <= self.fname.len() && !label.contains(&0);
        if fits {
            self.fname = [0; 12];
            self.fname.iter_mut().zip(label).for_each(|(to, from)| *to = *from);
        }
        fits
    }

    /// The root directory, if the superblock names one.
    #[must_use]
    pub fn root(&self) -> Option<Ino> {
        let root = Ino(self.rootino.get());
        (root != Ino::NULL && root.0 != 0).then_some(root)
    }

    /// The bytes of a sector with these fields, with their checksum, and zeros behind them.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut sector = vec![0; usize::from(self.sectsize.get()).max(size_of::<Self>())];
        sector[..size_of::<Self>()].copy_from_slice(self.as_bytes());
        if self.version() == 5 {
            csum::store(&mut sector, CRC);
        }
        sector
    }

    /// The layout that follows from the features.
    #[must_use]
    pub fn layout(&self) -> XfsLayout {
        let (ro_compat, incompat) = (self.ro_compat(), self.incompat());
        let has_types = incompat.contains(XfsIncompat::FTYPE)
            || self.version() == 4 && self.features2().contains(XfsFeatures2::FTYPE);
        let mut layout = XfsLayout::empty();
        layout.set(XfsLayout::CHECKSUMS, self.version() == 5);
        layout.set(XfsLayout::FILE_TYPES, has_types);
        layout.set(XfsLayout::SPARSE_INODES, incompat.contains(XfsIncompat::SPINODES));
        layout.set(XfsLayout::PARENTS, incompat.contains(XfsIncompat::PARENT));
        layout.set(XfsLayout::FREE_INODES, ro_compat.contains(XfsRoCompat::FINOBT));
        layout.set(XfsLayout::REVERSE_MAP, ro_compat.contains(XfsRoCompat::RMAPBT));
        layout.set(XfsLayout::SHARED_BLOCKS, ro_compat.contains(XfsRoCompat::REFLINK));
        layout.set(XfsLayout::REALTIME, self.has_realtime());
        layout.set(XfsLayout::BIG_TIMES, incompat.contains(XfsIncompat::BIGTIME));
        layout.set(XfsLayout::WIDE_COUNTS, incompat.contains(XfsIncompat::NREXT64));
        layout.set(XfsLayout::METADATA_TREE, incompat.contains(XfsIncompat::METADIR));
        layout
    }

    /// Proves the sizes of blocks, sectors, inodes and directory blocks.
    fn verify_units(&self) -> Result<(), Malformed> {
        let (block, sector, inode) = (self.blocklog, self.sectlog, self.inodelog);
        ensure!(
            STRUCTURE,
            (9..=16).contains(&block) && self.blocksize.get() == 1 << block,
            "blocks of {} bytes with a log of {block}",
            self.blocksize
        );
        ensure!(
            STRUCTURE,
            (9..=15).contains(&sector)
                && sector <= block
                && u32::from(self.sectsize.get()) == 1 << sector,
            "sectors of {} bytes with a log of {sector}",
            self.sectsize
        );
        let least = if self.version() == 5 { 9 } else { 8 };
        ensure!(
            STRUCTURE,
            (least..=11).contains(&inode)
                && inode < block
                && self.inodesize.get() == 1 << inode
                && self.inopblog == block - inode
                && self.inopblock.get() == 1 << self.inopblog,
            "inodes of {} bytes with a log of {inode}, {} a block with a log of {}",
            self.inodesize,
            self.inopblock,
            self.inopblog
        );
        let directory = block.checked_add(self.dirblklog);
        ensure!(
            STRUCTURE,
            directory.is_some_and(|log| log <= 16),
            "directory blocks with a log of {} blocks",
            self.dirblklog
        );
        Ok(())
    }

    /// Proves the sizes of the groups and of the volume.
    fn verify_groups(&self) -> Result<(), Malformed> {
        let (blocks, groups) = (self.agblocks.get(), self.agcount.get());
        let most = 1_u64 << (AG_BYTES_LOG - self.blocklog);
        ensure!(
            STRUCTURE,
            blocks >= LEAST_AG_BLOCKS && u64::from(blocks) <= most,
            "groups of {blocks} blocks"
        );
        let log = blocks.next_power_of_two().trailing_zeros();
        ensure!(
            STRUCTURE,
            u32::from(self.agblklog) == log,
            "groups of {blocks} blocks with a log of {}, not {log}",
            self.agblklog
        );
        let end = u64::from(groups) * u64::from(blocks);
        let least = u64::from(groups.saturating_sub(1)) * u64::from(blocks);
        let least = least + u64::from(LEAST_AG_BLOCKS);
        ensure!(
            STRUCTURE,
            groups > 0 && (least..=end).contains(&self.dblocks.get()),
            "{} blocks in {groups} groups of {blocks}",
            self.dblocks
        );
        // The offset of a byte has 63 bits, and an extent record has 52 for a block.
        ensure!(
            STRUCTURE,
            self.dblocks.get() <= u64::MAX >> 1 >> self.blocklog
                && u64::from(groups) <= 1 << (EXTENT_START_BITS - self.agblklog),
            "{} blocks are more than the format has numbers for",
            self.dblocks
        );
        Ok(())
    }

    /// Proves that chunks of inodes are aligned as a volume with sparse ones needs it: chunks to
    /// their own size, and their allocated parts to a divisor of it. For example, chunks of 64
    /// inodes of 512 bytes are aligned to 8 blocks of 4 KiB, and to 0 of 64 KiB.
    fn verify_inode_alignment(&self) -> Result<(), Malformed> {
        if self.version() != 5 {
            return Ok(());
        }
        let (chunk, part) = (self.inoalignmt.get(), self.spino_align.get());
        let is_right = if self.incompat().contains(XfsIncompat::SPINODES) {
            let size = (CHUNK_INODES * u32::from(self.inodesize.get())) >> self.blocklog;
            chunk == size && (part == 0 || part <= chunk && chunk.is_multiple_of(part))
        } else {
            part == 0
        };
        ensure!(
            STRUCTURE,
            is_right,
            "chunks of inodes aligned to {chunk} blocks, sparse ones to {part}"
        );
        Ok(())
    }

    /// The bytes that each record of the log fills a multiple of.
    #[must_use]
    pub fn log_unit(&self) -> usize {
        // A stripe of 1 stands for none.
        let sector = u32::from(self.logsectsize.get()).max(1 << BASIC_BLOCK.ilog2());
        self.logsunit.get().max(sector) as usize
    }

    /// Proves the place and the sizes of the log.
    fn verify_log(&self, geometry: &XfsGeometry) -> Result<(), Malformed> {
        let blocks = self.logblocks.get();
        let bytes = u64::from(blocks) << self.blocklog;
        let is_inside =
            geometry.log_start.0 == 0 || geometry.is_usable_extent(geometry.log_start, blocks);
        ensure!(
            STRUCTURE,
            blocks > 0 && bytes <= MOST_LOG_BYTES && is_inside,
            "a log of {blocks} blocks at {}",
            geometry.log_start
        );
        let (log, size) = (self.logsectlog, self.logsectsize.get());
        let is_unset = log == 0 && size == 0;
        ensure!(
            STRUCTURE,
            is_unset || (9..=15).contains(&log) && u32::from(size) == 1 << log,
            "log sectors of {size} bytes with a log of {log}"
        );
        let stripe = self.logsunit.get();
        ensure!(
            STRUCTURE,
            stripe <= 1 || stripe <= MOST_LOG_STRIPE && stripe.is_multiple_of(512),
            "a log stripe of {stripe} bytes"
        );
        Ok(())
    }
}

impl XfsSuperblock {
    /// Checks the superblock at the start of `bytes`, which hold at least its sector. Whether we
    /// support the features of the volume is for [`XfsSuperblockFields::obstacles`] to say.
    ///
    /// # Errors
    /// The first fault in it.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let fields = *view::<XfsSuperblockFields>(STRUCTURE, bytes)?;
        ensure!(STRUCTURE, fields.magicnum == MAGIC, "no XFS magic");
        let version = fields.version();
        ensure!(STRUCTURE, matches!(version, 4 | 5), "version {version}");
        fields.verify_units()?;
        if version == 5 {
            let sector = bytes.get(..usize::from(fields.sectsize.get()));
            let is_right = sector.is_some_and(|sector| csum::is_right(sector, CRC));
            ensure!(STRUCTURE, is_right, "its checksum is wrong");
        }
        fields.verify_groups()?;
        fields.verify_inode_alignment()?;
        let has_meta_uuid = fields.incompat().contains(XfsIncompat::META_UUID);
        let uuid = if has_meta_uuid { fields.meta_uuid } else { fields.uuid };
        let geometry = XfsGeometry {
            layout: fields.layout(),
            block_log: fields.blocklog,
            sector_log: fields.sectlog,
            inode_log: fields.inodelog,
            cluster_blocks: XfsGeometry::cluster_blocks(
                fields.inodelog,
                fields.blocklog,
                fields.inoalignmt.get(),
            ),
            dir_block_log: fields.dirblklog,
            ag_block_log: fields.agblklog,
            ag_blocks: fields.agblocks.get(),
            ag_count: fields.agcount.get(),
            blocks: fields.dblocks.get(),
            log_start: FsBlock(fields.logstart.get()),
            log_blocks: fields.logblocks.get(),
            uuid: Uuid::from_bytes(uuid),
        };
        fields.verify_log(&geometry)?;
        if let Some(root) = fields.root() {
            ensure!(STRUCTURE, geometry.locate(root).is_some(), "no place for root inode {root}");
        }
        ensure!(STRUCTURE, fields.imax_pct <= 100, "{} % for inodes", fields.imax_pct);
        Ok(Self { fields, geometry })
    }

    /// Checks the counters, which are right only when the log is clean.
    ///
    /// # Errors
    /// The counter that is too large.
    pub fn verify_counters(&self) -> Result<(), Malformed> {
        let (fields, blocks) = (&self.fields, self.geometry.blocks);
        let (inodes, free) = (fields.icount.get(), fields.ifree.get());
        ensure!(
            STRUCTURE,
            free <= inodes && inodes <= blocks << self.geometry.inodes_per_block_log(),
            "{inodes} inodes and {free} free ones in {blocks} blocks"
        );
        let free = fields.fdblocks.get();
        ensure!(STRUCTURE, free <= blocks, "{free} free blocks of {blocks}");
        Ok(())
    }
}
