//! A stable number for everything that can go wrong.

use std::fmt;

/// Defines an enum of codes: each has a number that stays the same in all versions, and one
/// sentence about it.
#[macro_export]
macro_rules! stable_codes {
    ($(#[$about:meta])* $enum:ident:
     $($(#[doc = $doc:literal])+ $name:ident = $number:literal;)+) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        #[repr(u16)]
        pub enum $enum {
            $($(#[doc = $doc])+ $name = $number,)+
        }

        impl $enum {
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

            /// The number.
            #[must_use]
            pub fn number(self) -> u16 {
                self as u16
            }
        }
    };
}

stable_codes! {
    /// Which kind of error it is, by a number that stays the same in all versions.
    ///
    /// [`Error`](crate::Error) has four kinds: the call is wrong, a device failed, the volume
    /// needs what is not there, or what is stored contradicts itself. A code says more of the
    /// last two: which obstacle, and which damaged structure. For the first one
    /// [`Error::errno`](crate::Error::errno) does.
    ///
    /// ```
    /// use offshoot_vfs::{Code, Errno, Error, Structure};
    ///
    /// let error = Error::corrupt_at(Structure::Leaf, 30_457_856, "its checksum is wrong");
    /// assert_eq!(error.code(), Code::TreeBlock);
    /// assert_eq!(error.code().number(), 501);
    ///
    /// let error = Error::posix(Errno::NOENT, "/etc/fstab");
    /// assert_eq!((error.code(), error.errno()), (Code::Call, Errno::NOENT));
    /// ```
    Code:
    /// The call is wrong, or POSIX has it so: see `Error::errno`.
    Call = 1;
    /// A device or the host failed.
    Device = 2;
    /// Neither the disk nor a partition of it holds a volume.
    NoVolume = 101;
    /// The disk holds a filesystem of another format, such as ext4.
    OtherFormat = 102;
    /// The disk holds more than one volume, and none was chosen.
    SeveralVolumes = 103;
    /// The disk image has too many others inside of it.
    ImageNotRead = 104;
    /// The disk image is of a kind that is only read.
    ImageNotWritten = 105;
    /// The disk image stands over other files, which only the caller opens.
    ImageOverFiles = 106;
    /// The volume has a feature that we cannot read.
    UnknownFeature = 201;
    /// The volume is being converted by another program.
    UnfinishedConversion = 202;
    /// The pending log may be sound, and its replay lacks something or a device failed.
    LogNotReplayed = 203;
    /// A member is missing, and the volume was not to be opened without it.
    Incomplete = 204;
    /// Writing a zoned volume.
    ZonedWrite = 301;
    /// Writing a volume with a feature that writers have to keep and we do not.
    FeatureNotKept = 302;
    /// Writing a volume whose free-space tree is not valid.
    InvalidFreeSpaceTree = 303;
    /// Writing or scrubbing a volume with a RAID stripe tree.
    StripeTree = 304;
    /// Writing a volume that holds metadata only.
    MetadataDump = 305;
    /// Writing a seed.
    Seed = 306;
    /// Writing a volume that has no checksum tree.
    NoChecksumTree = 307;
    /// Writing RAID5 or RAID6.
    Parity = 308;
    /// Writing while a member is missing.
    MemberMissing = 309;
    /// Writing while a member is behind and others do not have all that is on it.
    MemberBehind = 310;
    /// Writing a volume with an unfinished balance or relocation.
    UnfinishedBalance = 311;
    /// Writing while a device is being replaced.
    UnfinishedReplace = 312;
    /// Writing a volume with quotas of a version that we do not know.
    QuotaVersion = 313;
    /// Writing a volume with quotas that limit a group.
    QuotaLimits = 314;
    /// Writing a volume of a format that is only read. No format is, since XFS is written.
    FormatOnlyRead = 315;
    /// Making a volume with a feature that we do not write.
    NewVolume = 401;
    /// Discarding on a host that cannot.
    Discard = 402;
    /// Moving more extents of a file at once than a transaction holds.
    MovedExtents = 403;
    /// Moving or replacing the place that stands in for a subvolume.
    SubvolumePlace = 404;
    /// A directory is deeper than a walk goes.
    TooDeep = 405;
    /// What the format of the volume does not have, such as a subvolume of XFS.
    NotInFormat = 406;
    /// Relocating what cannot be moved.
    Relocation = 407;
    /// Giving a device, or an image of a kind, another size.
    FixedSize = 408;
    /// Something else that is not supported, which the text names.
    Unsupported = 499;
    /// A block of a tree.
    TreeBlock = 501;
    /// The superblock.
    Superblock = 502;
    /// A chunk, or the tree of chunks.
    Chunk = 503;
    /// The item of a member.
    DeviceItem = 504;
    /// A range of a member.
    DeviceExtent = 505;
    /// A block group.
    BlockGroup = 506;
    /// A record of free space.
    FreeSpace = 507;
    /// An extent and its references.
    ExtentItem = 508;
    /// A record of the RAID stripe tree.
    RaidStripe = 509;
    /// The root of a tree or a subvolume.
    RootItem = 510;
    /// The reference between a subvolume and its parent.
    RootRef = 511;
    /// The inode of a file.
    Inode = 512;
    /// A name in the inode of a file.
    InodeRef = 513;
    /// A directory, or an entry of it.
    Directory = 514;
    /// An extended attribute.
    Xattr = 515;
    /// What says where the data of a file is.
    FileExtent = 516;
    /// The data of a file: its checksum is wrong.
    Data = 517;
    /// Compressed data that does not decompress.
    CompressedData = 518;
    /// The quotas.
    Quota = 519;
    /// The tree log that is pending after a crash.
    Log = 520;
    /// Changes in memory contradict what is stored.
    DelayedItems = 521;
    /// A header of an allocation group.
    AllocationGroup = 522;
    /// A record of free space, of inodes, of owners or of references in an allocation group.
    GroupRecord = 523;
    /// The target of a symbolic link.
    Symlink = 524;
    /// Another structure, which the error names.
    Corrupt = 599;
}

macro_rules! structures {
    ($($name:ident = $words:literal is $code:ident;)+) => {
        /// A structure that can be damaged. Several can have one [`Code`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum Structure {
            $(#[doc = concat!("\"", $words, "\" in messages.")] $name,)+
        }

        impl Structure {
            /// What messages call it.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $words,)+
                }
            }

            /// The code of an error about it.
            #[must_use]
            pub fn code(self) -> Code {
                match self {
                    $(Self::$name => Code::$code,)+
                }
            }
        }
    };
}

structures! {
    TreeBlock = "tree block" is TreeBlock;
    Leaf = "leaf" is TreeBlock;
    Node = "node" is TreeBlock;
    Item = "item" is TreeBlock;
    Tree = "tree" is TreeBlock;
    Superblock = "superblock" is Superblock;
    SystemChunkArray = "system chunk array" is Superblock;
    Chunk = "chunk" is Chunk;
    ChunkTree = "chunk tree" is Chunk;
    ChunkType = "chunk type" is Chunk;
    DeviceItem = "device item" is DeviceItem;
    DeviceStats = "device stats" is DeviceItem;
    DeviceReplace = "device replace" is Corrupt;
    DeviceExtent = "device extent" is DeviceExtent;
    BlockGroup = "block group" is BlockGroup;
    BlockGroupItem = "block group item" is BlockGroup;
    FreeSpaceTree = "free space tree" is FreeSpace;
    FreeSpaceInfo = "free space info" is FreeSpace;
    FreeSpaceHeader = "free space header" is FreeSpace;
    Extent = "extent" is ExtentItem;
    ExtentItem = "extent item" is ExtentItem;
    ExtentTree = "extent tree" is ExtentItem;
    InlineExtentRef = "inline extent ref" is ExtentItem;
    DataReference = "data reference" is ExtentItem;
    RaidStripe = "raid stripe" is RaidStripe;
    RootItem = "root item" is RootItem;
    RootTree = "root tree" is RootItem;
    RootRef = "root ref" is RootRef;
    RootBackref = "root backref" is RootRef;
    InodeItem = "inode item" is Inode;
    Mode = "mode" is Inode;
    File = "file" is Inode;
    InodeRef = "inode ref" is InodeRef;
    InodeExtref = "inode extref" is InodeRef;
    Name = "name" is InodeRef;
    Directory = "directory" is Directory;
    DirectoryEntry = "directory entry" is Directory;
    DirectoryItem = "directory item" is Directory;
    DirectoryIndex = "directory index" is Directory;
    XattrItem = "xattr item" is Xattr;
    FileExtent = "file extent" is FileExtent;
    DataRanges = "data ranges" is FileExtent;
    Data = "data" is Data;
    CompressedExtent = "compressed extent" is CompressedData;
    QuotaTree = "quota tree" is Quota;
    QuotaStatus = "quota status" is Quota;
    QuotaInfo = "quota info" is Quota;
    QuotaLimit = "quota limit" is Quota;
    QuotaGroupRelation = "quota group relation" is Quota;
    TreeLog = "tree log" is Log;
    DirectoryLogItem = "directory log item" is Log;
    TreeOfLogTrees = "tree of log trees" is Log;
    RootOfALogTree = "root of a log tree" is Log;
    DelayedItems = "delayed items" is DelayedItems;
    GroupFreeSpace = "AGF" is AllocationGroup;
    GroupInodes = "AGI" is AllocationGroup;
    GroupFreeList = "AGFL" is AllocationGroup;
    BtreeBlock = "btree block" is TreeBlock;
    FreeRecord = "free space record" is GroupRecord;
    InodeRecord = "inode record" is GroupRecord;
    ReverseRecord = "reverse mapping record" is GroupRecord;
    CountRecord = "reference count record" is GroupRecord;
    InodeCore = "inode" is Inode;
    ExtentRecord = "extent record" is FileExtent;
    DirectoryBlock = "directory block" is Directory;
    AttributeBlock = "attribute block" is Xattr;
    ParentPointer = "parent pointer" is InodeRef;
    SymlinkBlock = "symlink block" is Symlink;
    LogRecord = "log record" is Log;
    LogItem = "log item" is Log;
}

impl fmt::Display for Structure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
