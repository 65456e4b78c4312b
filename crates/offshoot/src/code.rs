//! A stable number for everything that can go wrong.

use offshoot_btrfs::LogFailure;
use offshoot_vfs::Error;

/// What the messages of this crate begin with that name an obstacle.
pub(crate) mod obstacle {
    pub(crate) const NONE: &str = "no volume was found: ";
    pub(crate) const OTHER_FORMAT: &str = "another format: ";
    pub(crate) const SEVERAL: &str = "more than one volume was found: ";
    pub(crate) const IMAGE: &str = "the image ";
    pub(crate) const IMAGE_WRITTEN: &str = "writing the image ";
    pub(crate) const IMAGE_FILES: &str = "an image over other files: ";
}

/// How the engine ends the text about a device that holds no volume.
const NO_VOLUME: &str = ": no btrfs superblock; not a btrfs volume";

/// How it ends the text about a member that was not given.
const INCOMPLETE: &str = ") of the volume is missing";

/// How a text begins, and what else is in it.
type Text = (&'static str, &'static str);

macro_rules! codes {
    ($($(#[doc = $doc:literal])+ $name:ident = $number:literal, $how:ident $texts:expr;)+) => {
        /// Which kind of error it is, by a number that stays the same in all versions.
        ///
        /// [`Error`] has four kinds: the call is wrong, a device failed, the volume needs what is
        /// not there, or what is stored contradicts itself. A code says more of the last two: which
        /// obstacle, and which damaged structure. For the first one [`Error::errno`] does.
        ///
        /// ```
        /// use offshoot::{Code, Errno, Error};
        ///
        /// let error = Error::corrupt_at("tree block", 30_457_856, "its checksum is wrong");
        /// assert_eq!(Code::of(&error), Code::TreeBlock);
        /// assert_eq!(Code::of(&error).number(), 501);
        ///
        /// let error = Error::posix(Errno::NOENT, "/etc/fstab");
        /// assert_eq!((Code::of(&error), error.errno()), (Code::Call, Errno::NOENT));
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        #[repr(u16)]
        pub enum Code {
            $($(#[doc = $doc])+ $name = $number,)+
        }

        impl Code {
            /// All codes that there are, by their number.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// The name, as it stands in the documents.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)+
                }
            }

            /// One sentence about it.
            #[must_use]
            pub fn meaning(self) -> &'static str {
                match self {
                    $(Self::$name => concat!($($doc),+).trim_ascii(),)+
                }
            }

            fn texts(self) -> Texts {
                match self {
                    $(Self::$name => Texts::$how($texts),)+
                }
            }
        }
    };
}

/// The errors that have a code.
enum Texts {
    /// [`Error::Unsupported`], by its text.
    Obstacle(&'static [Text]),
    /// [`Error::Corrupt`], by its structures.
    Structure(&'static [&'static str]),
    /// Others, which [`Code::of`] tells apart.
    Other(()),
}

codes! {
    /// The call is wrong, or POSIX has it so: see `Error::errno`.
    Call = 1, Other ();
    /// A device or the host failed.
    Device = 2, Other ();
    /// Neither the disk nor a partition of it holds a volume.
    NoVolume = 101, Obstacle &[(obstacle::NONE, "")];
    /// The disk holds a filesystem of another format, such as XFS.
    OtherFormat = 102, Obstacle &[(obstacle::OTHER_FORMAT, "")];
    /// The disk holds more than one volume, and none was chosen.
    SeveralVolumes = 103, Obstacle &[(obstacle::SEVERAL, "")];
    /// The disk image has too many others inside of it.
    ImageNotRead = 104, Obstacle &[(obstacle::IMAGE, "")];
    /// The disk image is of a kind that is only read.
    ImageNotWritten = 105, Obstacle &[(obstacle::IMAGE_WRITTEN, "")];
    /// The disk image stands over other files, which only the caller opens.
    ImageOverFiles = 106, Obstacle &[(obstacle::IMAGE_FILES, "")];
    /// The volume has a feature that we cannot read.
    UnknownFeature = 201, Obstacle &[("the volume's feature ", "")];
    /// The volume is being converted by another program.
    UnfinishedConversion = 202, Obstacle &[
        ("a volume whose fsid is being changed", ""),
        ("a volume that is being converted", ""),
        ("a volume whose data checksums are", ""),
        ("a volume whose metadata checksums are", ""),
    ];
    /// The pending tree log may be sound, and something that its replay needs is missing.
    LogNotReplayed = 203, Obstacle &[("replaying a tree log", "")];
    /// A member is missing, and the volume was not to be opened without it.
    Incomplete = 204, Other ();
    /// Writing a zoned volume.
    ZonedWrite = 301, Obstacle &[("writing a zoned volume", ""), ("repairing a zoned volume", "")];
    /// Writing a volume with a feature that writers have to keep and we do not.
    FeatureNotKept = 302, Obstacle &[("writing a volume with the feature ", "")];
    /// Writing a volume whose free-space tree is not valid.
    InvalidFreeSpaceTree = 303, Obstacle &[("writing a volume whose free-space tree", "")];
    /// Writing or scrubbing a volume with a RAID stripe tree.
    StripeTree = 304, Obstacle &[
        ("writing a volume with a RAID stripe tree", ""),
        ("scrubbing a volume with a RAID stripe tree", ""),
    ];
    /// Writing a volume that holds metadata only.
    MetadataDump = 305, Obstacle &[("writing a volume that holds metadata only", "")];
    /// Writing a seed.
    Seed = 306, Obstacle &[("writing a seed", ""), ("writing while ", " belongs to a seed")];
    /// Writing a volume that has no checksum tree.
    NoChecksumTree = 307, Obstacle &[("writing a volume without a checksum tree", "")];
    /// Writing RAID5 or RAID6.
    Parity = 308, Obstacle &[
        ("writing a volume with RAID5", ""),
        ("writing a volume with RAID6", ""),
        ("writing RAID5", ""),
        ("writing RAID6", ""),
        ("writing to a chunk with parity", ""),
    ];
    /// Writing while a member is missing.
    MemberMissing = 309, Obstacle &[("writing while ", " is missing")];
    /// Writing while a member is behind and others do not have all that is on it.
    MemberBehind = 310, Obstacle &[("writing while ", " missed commits")];
    /// Writing a volume with an unfinished balance or relocation.
    UnfinishedBalance = 311, Obstacle &[
        ("writing a volume with an unfinished balance", ""),
        ("writing a volume with an unfinished relocation", ""),
    ];
    /// Writing while a device is being replaced.
    UnfinishedReplace = 312, Obstacle &[("writing while a device is being replaced", "")];
    /// Writing a volume with quotas of a version that we do not know.
    QuotaVersion = 313, Obstacle &[("writing a volume with quotas of version", "")];
    /// Writing a volume with quotas that limit a group.
    QuotaLimits = 314, Obstacle &[("writing a volume with quotas that limit", "")];
    /// Making a volume with a feature that we do not write.
    NewVolume = 401, Obstacle &[("making a volume with", "")];
    /// Discarding on a host that cannot.
    Discard = 402, Obstacle &[("discarding on ", "")];
    /// Moving more extents of a file at once than a transaction holds.
    MovedExtents = 403, Obstacle &[("moving more than ", "")];
    /// Moving or replacing the place that stands in for a subvolume.
    SubvolumePlace = 404, Obstacle &[("moving or replacing ", "")];
    /// A directory is deeper than a walk goes.
    TooDeep = 405, Obstacle &[("a directory more than ", "")];
    /// Something else that is not supported, which the text names.
    Unsupported = 499, Other ();
    /// A block of a tree.
    TreeBlock = 501, Structure &["tree block", "leaf", "node", "tree"];
    /// The superblock.
    Superblock = 502, Structure &["superblock", "system chunk array"];
    /// A chunk, or the tree of chunks.
    Chunk = 503, Structure &["chunk", "chunk tree", "chunk type"];
    /// The item of a member.
    DeviceItem = 504, Structure &["device item"];
    /// A range of a member.
    DeviceExtent = 505, Structure &["device extent"];
    /// A block group.
    BlockGroup = 506, Structure &["block group", "block group item"];
    /// A record of free space.
    FreeSpace = 507, Structure &["free space tree", "free space info"];
    /// An extent and its references.
    ExtentItem = 508, Structure &[
        "extent",
        "extent item",
        "extent tree",
        "inline extent ref",
        "data reference",
    ];
    /// A record of the RAID stripe tree.
    RaidStripe = 509, Structure &["raid stripe"];
    /// The root of a tree or a subvolume.
    RootItem = 510, Structure &["root item", "root tree"];
    /// The reference between a subvolume and its parent.
    RootRef = 511, Structure &["root ref", "root backref"];
    /// The inode of a file.
    Inode = 512, Structure &["inode item", "mode", "file"];
    /// A name in the inode of a file.
    InodeRef = 513, Structure &["inode ref", "inode extref", "name"];
    /// A directory, or an entry of it.
    Directory = 514, Structure &[
        "directory",
        "directory entry",
        "directory item",
        "directory index",
    ];
    /// An extended attribute.
    Xattr = 515, Structure &["xattr item"];
    /// What says where the data of a file is.
    FileExtent = 516, Structure &["file extent", "data ranges"];
    /// The data of a file: its checksum is wrong.
    Data = 517, Structure &["data"];
    /// Compressed data that does not decompress.
    CompressedData = 518, Structure &["compressed extent"];
    /// The quotas.
    Quota = 519, Structure &["quota tree", "quota status", "quota group relation"];
    /// The tree log that is pending after a crash.
    Log = 520, Structure &["tree log", "tree of log trees", "root of a log tree"];
    /// Changes in memory contradict what is stored.
    DelayedItems = 521, Structure &["delayed items"];
    /// Another structure, which the error names.
    Corrupt = 599, Other ();
}

impl Code {
    /// The code of an error.
    #[must_use]
    pub fn of(error: &Error) -> Self {
        match (error, LogFailure::of(error)) {
            (_, Some(LogFailure::Damaged)) => Self::Log,
            (Error::Posix { .. } | Error::Unsupported(_), Some(LogFailure::NotReplayed)) => {
                Self::LogNotReplayed
            }
            (Error::Posix { what, .. }, None) if what.ends_with(NO_VOLUME) => Self::NoVolume,
            (Error::Posix { what, .. }, None) if what.ends_with(INCOMPLETE) => Self::Incomplete,
            (Error::Posix { .. }, None) => Self::Call,
            (Error::Io { .. }, _) => Self::Device,
            (Error::Unsupported(text), None) => {
                let is_it =
                    |(front, inside): &Text| text.starts_with(front) && text.contains(inside);
                Self::with(|texts| matches!(texts, Texts::Obstacle(all) if all.iter().any(is_it)))
                    .unwrap_or(Self::Unsupported)
            }
            (Error::Corrupt(corrupt), _) => Self::of_structure(&corrupt.structure),
        }
    }

    fn of_structure(name: &str) -> Self {
        let of = |name: &str| {
            Self::with(|texts| matches!(texts, Texts::Structure(all) if all.contains(&name)))
        };
        // Where there are several, the name goes on: `superblock of /dev/sda at byte 65536`.
        let of_front = || name.split_once(" of ").and_then(|(front, _)| of(front));
        of(name).or_else(of_front).unwrap_or(Self::Corrupt)
    }

    fn with(is_it: impl Fn(Texts) -> bool) -> Option<Self> {
        Self::ALL.iter().copied().find(|code| is_it(code.texts()))
    }

    /// The number.
    #[must_use]
    pub fn number(self) -> u16 {
        self as u16
    }
}
