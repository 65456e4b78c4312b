//! What a check finds: a code, a place and a text.

use std::collections::BTreeSet;
use std::fmt;

use offshoot_btrfs_format::{Key, Logical, TreeId};
use offshoot_vfs::{Error, stable_codes};
use parking_lot::Mutex;

stable_codes! {
    /// What is wrong, by a number that stays the same in all versions.
    ///
    /// From 701 on it is the volume as a whole, from 711 its members and chunks, from 721 its
    /// trees, from 731 allocated extents, from 741 free space, from 751 checksums and data, from
    /// 761 subvolumes, from 771 inodes, from 781 names, and from 791 quotas.
    BtrfsFindingCode:
    /// A device failed, so that a part of the volume was not checked.
    NotRead = 701;
    /// The primary superblock of a member is damaged or older than the newest one.
    Superblock = 702;
    /// A copy of the superblock is damaged or differs from the primary.
    SuperblockCopy = 703;
    /// A counter of the superblock differs from what there is.
    SuperblockCounter = 704;
    /// A backup root of the newest commit differs from the roots of that commit.
    BackupRoot = 705;
    /// The tree log cannot be read.
    TreeLog = 706;
    /// One copy of a tree block or of data is damaged, another one is good.
    BadCopy = 707;
    /// The item of a member contradicts its superblock or the ranges that chunks have of it.
    Member = 711;
    /// A member is not there or did not take part in the newest commit.
    MissingMember = 712;
    /// A chunk is damaged, overlaps another one, or is on an unknown member.
    Chunk = 713;
    /// A chunk has a stripe without a range of a member, or the reverse.
    DeviceExtent = 714;
    /// The chunks of the superblock are not the system chunks of the chunk tree.
    SystemChunk = 715;
    /// A chunk has no block group, a block group has no chunk, or the two differ.
    BlockGroup = 716;
    /// A block group counts other bytes as used than its extents have.
    BlockGroupUsed = 717;
    /// A tree block cannot be used: no copy of it verifies.
    TreeBlock = 721;
    /// A reader can use a tree block, and the kernel refuses it.
    RefusedBlock = 722;
    /// The item of a root contradicts its tree.
    RootItem = 723;
    /// A tree is not there that the volume must have.
    MissingTree = 724;
    /// The root block of a subvolume belongs to another tree as well.
    SharedRoot = 725;
    /// An extent is in use and has no extent item.
    MissingExtent = 731;
    /// An extent item counts references, and nothing refers to the extent.
    UnusedExtent = 732;
    /// Something refers to an extent, and the extent tree does not know this reference.
    MissingReference = 733;
    /// The extent tree knows a reference that nothing has.
    ExtraReference = 734;
    /// An extent item counts other references than it has.
    ReferenceCount = 735;
    /// Two extents overlap.
    ExtentOverlap = 736;
    /// An extent lies outside of the block groups, or in one of another kind.
    ExtentPlace = 737;
    /// The item of an extent contradicts the extent: its flags, level, generation or length.
    ExtentItem = 738;
    /// Space is free, and the volume does not list it as free.
    LostSpace = 741;
    /// Space is listed as free, and an extent has it.
    AllocatedSpace = 742;
    /// The items of free space of a block group contradict each other.
    FreeSpaceInfo = 743;
    /// The space cache (version 1) of a block group is damaged.
    SpaceCache = 744;
    /// Data of a file has no checksum.
    MissingChecksum = 751;
    /// There is a checksum where none belongs.
    ExtraChecksum = 752;
    /// Data differs from its checksum, or cannot be read.
    Data = 753;
    /// A subvolume and the one above it do not agree on its name.
    RootReference = 761;
    /// The directory entry of a subvolume is not what its reference says.
    SubvolumeEntry = 762;
    /// No subvolume leads to a subvolume that was not deleted.
    UnreachableSubvolume = 763;
    /// The tree of UUIDs and the subvolumes do not agree.
    UuidTree = 764;
    /// A deleted subvolume is not listed for removal, or its progress is impossible; or the
    /// removal of one has begun that was not deleted.
    DeletedSubvolume = 765;
    /// There are items of an inode, and the inode is not there.
    MissingInode = 771;
    /// An inode contradicts itself: its mode, flags or kinds of items.
    Inode = 772;
    /// An inode counts other links than it has names.
    LinkCount = 773;
    /// An inode without links is not listed for removal.
    Orphan = 774;
    /// An inode has another size than its contents.
    InodeSize = 775;
    /// An inode counts other bytes than its extents have.
    InodeBytes = 776;
    /// Extents of a file overlap or are damaged.
    FileExtent = 777;
    /// A range of a file has no extent, in a volume that records holes.
    FileHole = 778;
    /// A directory has an entry for a name that the inode does not have.
    EntryWithoutName = 781;
    /// An inode has a name that the directory has no entry for.
    NameWithoutEntry = 782;
    /// The two items of a directory entry, by hash and by index, do not agree.
    EntryItems = 783;
    /// An entry has another file type than its inode.
    EntryType = 784;
    /// A quota group counts other bytes than its subvolumes have.
    QuotaGroup = 791;
    /// An item of quotas belongs to no group, or a group to no subvolume.
    QuotaItem = 792;
    /// The items of fs-verity of a file contradict each other.
    Verity = 793;
}

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FindingSeverity {
    /// Nothing is lost, and nothing will be: a count or a spare copy is wrong.
    Minor,
    /// Everything can be read. Writing to the volume may destroy data.
    Unsafe,
    /// Files, names or data cannot be read, or not as they were written.
    Lost,
}

impl FindingSeverity {
    /// Its name, as it stands in the documents.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Minor => "minor",
            Self::Unsafe => "unsafe",
            Self::Lost => "lost",
        }
    }
}

impl BtrfsFindingCode {
    /// How much it matters.
    #[must_use]
    pub fn severity(self) -> FindingSeverity {
        match self {
            Self::SuperblockCopy
            | Self::SuperblockCounter
            | Self::BackupRoot
            | Self::BadCopy
            | Self::MissingMember
            | Self::LostSpace
            | Self::SpaceCache
            | Self::ExtraChecksum
            | Self::UuidTree
            | Self::Orphan
            | Self::InodeBytes
            | Self::FileHole
            | Self::UnusedExtent
            | Self::QuotaGroup
            | Self::QuotaItem => FindingSeverity::Minor,
            Self::Superblock
            | Self::Member
            | Self::Chunk
            | Self::DeviceExtent
            | Self::SystemChunk
            | Self::BlockGroup
            | Self::BlockGroupUsed
            | Self::RefusedBlock
            | Self::SharedRoot
            | Self::MissingExtent
            | Self::MissingReference
            | Self::ExtraReference
            | Self::ReferenceCount
            | Self::ExtentOverlap
            | Self::ExtentPlace
            | Self::ExtentItem
            | Self::AllocatedSpace
            | Self::FreeSpaceInfo
            | Self::RootReference
            | Self::DeletedSubvolume
            | Self::LinkCount
            | Self::EntryItems
            | Self::EntryType => FindingSeverity::Unsafe,
            Self::NotRead
            | Self::TreeLog
            | Self::TreeBlock
            | Self::RootItem
            | Self::MissingTree
            | Self::MissingChecksum
            | Self::Data
            | Self::SubvolumeEntry
            | Self::UnreachableSubvolume
            | Self::MissingInode
            | Self::Inode
            | Self::InodeSize
            | Self::FileExtent
            | Self::EntryWithoutName
            | Self::NameWithoutEntry
            | Self::Verity => FindingSeverity::Lost,
        }
    }
}

/// Where something is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BtrfsFindingPlace {
    /// The volume as a whole.
    Volume,
    /// A member, by its number.
    Member(u64),
    /// An address of the logical space: a chunk, a block group, an extent.
    Logical(Logical),
    /// A tree.
    Tree(TreeId),
    /// A block of a tree.
    Block {
        /// The tree through which the check reached it.
        tree: TreeId,
        /// Its address.
        logical: Logical,
    },
    /// An item of a tree.
    Item {
        /// The tree.
        tree: TreeId,
        /// The key of the item.
        key: Key,
    },
    /// A file or directory.
    Inode {
        /// Its subvolume.
        subvolume: TreeId,
        /// Its inode number.
        ino: u64,
    },
}

impl fmt::Display for BtrfsFindingPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Volume => f.write_str("volume"),
            Self::Member(id) => write!(f, "device {id}"),
            Self::Logical(logical) => write!(f, "address {logical}"),
            Self::Tree(tree) => write!(f, "tree {tree}"),
            Self::Block { tree, logical } => write!(f, "tree {tree}, block {logical}"),
            Self::Item { tree, key } => write!(f, "tree {tree}, item {key}"),
            Self::Inode { subvolume, ino } => write!(f, "subvolume {subvolume}, inode {ino}"),
        }
    }
}

/// A thing that is wrong with a volume.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BtrfsFinding {
    /// What is wrong.
    pub code: BtrfsFindingCode,
    /// Where.
    pub place: BtrfsFindingPlace,
    /// What was compared, or the whole problem when there are no two values.
    pub problem: String,
    /// What follows from the other structures; `None` when there are no two values.
    pub expected: Option<String>,
    /// What the structure says.
    pub found: Option<String>,
    /// The path of the file from the top level of the volume, where the place is an inode that has
    /// a name.
    pub path: Option<Vec<u8>>,
}

impl fmt::Display for BtrfsFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { code, place, problem, expected, found, path } = self;
        write!(f, "{} {}: {place}", code.number(), code.name())?;
        if let Some(path) = path {
            write!(f, " ({})", path.escape_ascii())?;
        }
        write!(f, ": {problem}")?;
        if let (Some(expected), Some(found)) = (expected, found) {
            write!(f, ": {expected} expected, {found} found")?;
        }
        Ok(())
    }
}

/// BtrfsFindings without duplicates, in the order of codes and places. Further ones than
/// [`MOST_FINDINGS`] are only known to be there.
#[derive(Debug, Default)]
pub(super) struct BtrfsFindings(Mutex<BtrfsFindingList>);

#[derive(Debug, Default)]
struct BtrfsFindingList {
    kept: BTreeSet<BtrfsFinding>,
    are_more: bool,
}

/// The most findings that are kept.
pub(super) const MOST_FINDINGS: usize = 10_000;

impl BtrfsFindings {
    /// Adds a problem.
    pub(super) fn add(
        &self,
        code: BtrfsFindingCode,
        place: BtrfsFindingPlace,
        problem: impl Into<String>,
    ) {
        self.keep(BtrfsFinding {
            code,
            place,
            problem: problem.into(),
            expected: None,
            found: None,
            path: None,
        });
    }

    /// Adds a difference of two values.
    pub(super) fn differs(
        &self,
        code: BtrfsFindingCode,
        place: BtrfsFindingPlace,
        what: impl Into<String>,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) {
        self.keep(BtrfsFinding {
            code,
            place,
            problem: what.into(),
            expected: Some(expected.to_string()),
            found: Some(found.to_string()),
            path: None,
        });
    }

    /// Adds an error of a read: `code`, or [`NotRead`](BtrfsFindingCode::NotRead) when a device
    /// failed.
    pub(super) fn add_error(
        &self,
        code: BtrfsFindingCode,
        place: BtrfsFindingPlace,
        error: &Error,
    ) {
        let code = if matches!(error, Error::Io { .. }) { BtrfsFindingCode::NotRead } else { code };
        self.add(code, place, error.to_string());
    }

    fn keep(&self, finding: BtrfsFinding) {
        let mut list = self.0.lock();
        if list.kept.len() < MOST_FINDINGS {
            list.kept.insert(finding);
        } else if !list.kept.contains(&finding) {
            list.are_more = true;
        }
    }

    /// Takes all findings, and whether there are more.
    pub(super) fn take_list(&self) -> (Vec<BtrfsFinding>, bool) {
        let BtrfsFindingList { kept, are_more } = std::mem::take(&mut *self.0.lock());
        (kept.into_iter().collect(), are_more)
    }
}
