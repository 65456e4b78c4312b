//! The features of a volume, and what keeps us from writing or reading it.

use std::fmt;

use crate::U32;
use crate::superblock::XfsSuperblockFields;

bitflags::bitflags! {
    /// The features in `versionnum`, above the number of the version.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct XfsVersionBits: u16 {
        /// Some inode has or had extended attributes.
        const ATTR = 0x10;
        /// Inodes count their links in 32 bits.
        const NLINK = 0x20;
        /// Quotas are or were on.
        const QUOTA = 0x40;
        /// Inode chunks are aligned to `inoalignmt` blocks.
        const ALIGN = 0x80;
        /// `unit` and `width` describe a stripe.
        const DALIGN = 0x100;
        /// Version 2 of the log.
        const LOGV2 = 0x400;
        /// The sectors may be larger than 512 bytes.
        const SECTOR = 0x800;
        /// Extents may be unwritten.
        const EXTFLG = 0x1000;
        /// Version 2 of directories.
        const DIRV2 = 0x2000;
        /// Names differ in more than the case of ASCII letters.
        const ASCIICI = 0x4000;
        /// `features2` counts.
        const MOREBITS = 0x8000;
    }

    /// The features in `features2`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct XfsFeatures2: u32 {
        /// The counters of the superblock are right only after an unmount.
        const LAZYSBCOUNT = 0x2;
        /// The attribute fork begins anywhere in an inode.
        const ATTR2 = 0x8;
        /// Project ids have 32 bits.
        const PROJID32 = 0x80;
        /// Version 5.
        const CRC = 0x100;
        /// Directory entries carry the type of their file; in V4 volumes only.
        const FTYPE = 0x200;
    }

    /// Features that a writer must know; a reader need not.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct XfsRoCompat: u32 {
        /// Groups have a tree of inode chunks that have a free inode.
        const FINOBT = 0x1;
        /// Groups have a tree of the owners of blocks.
        const RMAPBT = 0x2;
        /// Files may share blocks.
        const REFLINK = 0x4;
        /// AGIs count the blocks of the inode trees.
        const INOBTCNT = 0x8;
    }

    /// Features that a reader must know.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct XfsIncompat: u32 {
        /// Directory entries carry the type of their file.
        const FTYPE = 0x1;
        /// Chunks of inodes may be partly allocated.
        const SPINODES = 0x2;
        /// Blocks carry `meta_uuid`.
        const META_UUID = 0x4;
        /// Inodes may have times in nanoseconds.
        const BIGTIME = 0x8;
        /// `xfs_repair` must run before the volume is written.
        const NEEDSREPAIR = 0x10;
        /// Inodes may count more extents.
        const NREXT64 = 0x20;
        /// The log may carry exchanges of file ranges.
        const EXCHRANGE = 0x40;
        /// Attributes point to the parents of files.
        const PARENT = 0x80;
        /// Metadata inodes have a directory tree of their own.
        const METADIR = 0x100;
        /// The realtime device is zoned.
        const ZONED = 0x200;
        /// The zones have gaps between them.
        const ZONE_GAPS = 0x400;
    }

    /// Features that only concern a volume whose log is not clean.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct XfsLogIncompat: u32 {
        /// The log may carry intents to change attributes.
        const XATTRS = 0x1;
    }
}

/// What an obstacle keeps a program from, the least first. Each one includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum XfsHindrance {
    /// Writing the volume.
    Writing,
    /// Opening the volume when its log is not clean, because its replay would be wrong.
    Replay,
    /// Opening the volume.
    Reading,
}

macro_rules! obstacles {
    ($($(#[doc = $doc:literal])+
        $name:ident = $number:literal, $hindrance:ident, $text:literal;)+) => {
        /// Why we do not write or read a volume, by a number that stays the same.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u16)]
        pub enum XfsObstacleKind {
            $($(#[doc = $doc])+ $name = $number,)+
        }

        impl XfsObstacleKind {
            /// What it keeps a program from.
            #[must_use]
            pub fn hindrance(self) -> XfsHindrance {
                match self {
                    $(Self::$name => XfsHindrance::$hindrance,)+
                }
            }

            /// What the volume has.
            #[must_use]
            pub fn text(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)+
                }
            }
        }
    };
}

obstacles! {
    /// `inprogress` is set.
    Unfinished = 1, Reading, "mkfs or a copy of the volume did not finish";
    /// No root inode, as in copies of the superblock.
    NoRoot = 2, Reading, "no root inode";
    /// The ascii-ci feature.
    AsciiCase = 3, Reading, "names that ignore the case of letters";
    /// Version 1 of directories.
    OldDirectories = 4, Reading, "version 1 of directories";
    /// Unknown bits in `versionnum`.
    UnknownVersionBits = 5, Reading, "unknown version bits";
    /// Unknown bits in `features2` of a V4 volume.
    UnknownFeatures2 = 6, Reading, "unknown features2 bits";
    /// Unknown bits in `incompat`.
    UnknownIncompat = 7, Reading, "unknown incompatible features";
    /// The zoned features.
    Zoned = 8, Reading, "a zoned realtime device";
    /// Realtime groups.
    RealtimeGroups = 9, Reading, "realtime groups";
    /// `logstart` is 0.
    ExternalLog = 20, Replay, "a log on another device";
    /// Unknown bits in `log_incompat`.
    UnknownLogIncompat = 21, Replay, "unknown features in the log";
    /// No checksums.
    V4 = 30, Writing, "version 4 of the format";
    /// The needs-repair feature.
    NeedsRepair = 31, Writing, "a mark that xfs_repair has to run";
    /// Unknown bits in `ro_compat`.
    UnknownRoCompat = 32, Writing, "unknown features that a writer must know";
    /// A realtime device.
    Realtime = 33, Writing, "a realtime device";
    /// Quotas are on.
    Quotas = 34, Writing, "quotas";
    /// The metadir feature.
    Metadir = 35, Writing, "a directory tree of metadata";
    /// A V5 volume without features that all of them have.
    OldBasics = 36, Writing, "no lazy counters or attr2, which all V5 volumes have";
}

/// Why we do not write or read a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsObstacle {
    /// Which obstacle it is.
    pub kind: XfsObstacleKind,
    /// The unknown bits, if it is about unknown bits.
    pub bits: u32,
}

impl fmt::Display for XfsObstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.text())?;
        if self.bits != 0 { write!(f, " ({:#x})", self.bits) } else { Ok(()) }
    }
}

impl XfsSuperblockFields {
    /// The number of the version.
    #[must_use]
    pub fn version(&self) -> u16 {
        self.versionnum.get() & 0xf
    }

    /// The features in `versionnum`.
    #[must_use]
    pub fn version_bits(&self) -> XfsVersionBits {
        XfsVersionBits::from_bits_retain(self.versionnum.get() & !0xf)
    }

    /// The features in `features2`. Old kernels wrote it to `bad_features2`, and current ones take
    /// both.
    #[must_use]
    pub fn features2(&self) -> XfsFeatures2 {
        let bits = self.features2.get() | self.bad_features2.get();
        let counts = self.version_bits().contains(XfsVersionBits::MOREBITS);
        XfsFeatures2::from_bits_retain(if counts { bits } else { 0 })
    }

    /// `word` of the features of V5; 0 in a V4 volume, where other things may stand there.
    fn of_v5(&self, word: U32) -> u32 {
        if self.version() == 5 { word.get() } else { 0 }
    }

    /// Features that a writer must know.
    #[must_use]
    pub fn ro_compat(&self) -> XfsRoCompat {
        XfsRoCompat::from_bits_retain(self.of_v5(self.ro_compat))
    }

    /// Features that a reader must know.
    #[must_use]
    pub fn incompat(&self) -> XfsIncompat {
        XfsIncompat::from_bits_retain(self.of_v5(self.incompat))
    }

    /// Features that concern the log.
    #[must_use]
    pub fn log_incompat(&self) -> XfsLogIncompat {
        XfsLogIncompat::from_bits_retain(self.of_v5(self.log_incompat))
    }

    /// The names of all features that we know, as the book spells them.
    pub fn feature_names(&self) -> impl Iterator<Item = &'static str> {
        let names = self.version_bits().iter_names().map(|(name, _)| name);
        let names = names.chain(self.features2().iter_names().map(|(name, _)| name));
        let names = names.chain(self.ro_compat().iter_names().map(|(name, _)| name));
        let names = names.chain(self.incompat().iter_names().map(|(name, _)| name));
        names.chain(self.log_incompat().iter_names().map(|(name, _)| name))
    }

    /// Everything that keeps us from writing or reading the volume.
    #[must_use]
    pub fn obstacles(&self) -> Vec<XfsObstacle> {
        use XfsObstacleKind as Kind;
        let (version, features2) = (self.version_bits(), self.features2());
        let (incompat, is_v4) = (self.incompat(), self.version() == 4);
        let basics = XfsFeatures2::LAZYSBCOUNT | XfsFeatures2::ATTR2 | XfsFeatures2::CRC;
        let is_metadir = incompat.contains(XfsIncompat::METADIR);
        let is_realtime = self.has_realtime();
        let conditions = [
            (Kind::Unfinished, self.inprogress != 0),
            (Kind::NoRoot, self.root().is_none()),
            (Kind::AsciiCase, version.contains(XfsVersionBits::ASCIICI)),
            (Kind::OldDirectories, !version.contains(XfsVersionBits::DIRV2)),
            (Kind::Zoned, incompat.intersects(XfsIncompat::ZONED | XfsIncompat::ZONE_GAPS)),
            (Kind::RealtimeGroups, is_metadir && is_realtime),
            (Kind::ExternalLog, self.logstart.get() == 0),
            (Kind::V4, is_v4),
            (Kind::NeedsRepair, incompat.contains(XfsIncompat::NEEDSREPAIR)),
            (Kind::Realtime, is_realtime),
            (Kind::Quotas, self.qflags.get() != 0),
            (Kind::Metadir, is_metadir),
            (Kind::OldBasics, !is_v4 && !features2.contains(basics)),
        ];
        let unknown2 = if is_v4 { (features2 - XfsFeatures2::all()).bits() } else { 0 };
        let unknown = [
            (Kind::UnknownVersionBits, u32::from((version - XfsVersionBits::all()).bits())),
            (Kind::UnknownFeatures2, unknown2),
            (Kind::UnknownIncompat, (incompat - XfsIncompat::all()).bits()),
            (Kind::UnknownLogIncompat, (self.log_incompat() - XfsLogIncompat::all()).bits()),
            (Kind::UnknownRoCompat, (self.ro_compat() - XfsRoCompat::all()).bits()),
        ];
        let conditions = conditions.into_iter().filter(|&(_, has)| has);
        conditions
            .map(|(kind, _)| XfsObstacle { kind, bits: 0 })
            .chain(
                unknown
                    .into_iter()
                    .filter(|&(_, bits)| bits != 0)
                    .map(|(kind, bits)| XfsObstacle { kind, bits }),
            )
            .collect()
    }

    /// Whether there is a realtime device.
    pub(crate) fn has_realtime(&self) -> bool {
        self.rblocks.get() != 0 || self.rextents.get() != 0
    }
}
