//! What a check finds: a code, a place and a text.

use std::collections::BTreeSet;
use std::fmt;

use offshoot_kit::sync::Mutex;
use offshoot_vfs::{Error, stable_codes};
use offshoot_xfs_format::{AgBlock, AgNumber, Ino};

stable_codes! {
    /// What is wrong, by a number that stays the same in all versions.
    ///
    /// From 601 on it is the volume as a whole, from 621 a group, from 641 the owners of blocks,
    /// from 661 an inode, and from 681 a directory or attributes.
    XfsFindingCode:
    /// A device failed, so that a part of the volume was not checked.
    NotRead = 601;
    /// The superblock of group 0 is damaged.
    Superblock = 602;
    /// The superblock of another group is damaged or belongs to another volume.
    SuperblockCopy = 603;
    /// A counter of the superblock differs from the sum over the groups.
    SuperblockCounter = 604;
    /// The log cannot be read or replayed. The check goes on without it.
    Log = 605;
    /// A block was changed by a record that the log does not have yet.
    FutureChange = 606;
    /// The AGF, the AGI or the AGFL of a group is damaged.
    GroupHeader = 621;
    /// A block of a tree is damaged.
    TreeBlock = 622;
    /// A tree contradicts itself: levels, keys of parents, neighbours, order.
    TreeShape = 623;
    /// The trees of free space, by block and by size, differ.
    FreeTrees = 624;
    /// A counter of the AGF differs from the trees.
    FreeCounter = 625;
    /// The free list holds a block twice or has ends that do not agree.
    FreeList = 626;
    /// A counter of the AGI differs from the trees.
    InodeCounter = 627;
    /// The tree of chunks with free inodes differs from the tree of all chunks.
    FreeInodes = 628;
    /// A list of unlinked inodes is wrong, or an unlinked inode is on none.
    Unlinked = 629;
    /// Blocks are free and have an owner.
    OwnedAndFree = 641;
    /// Blocks have two owners that do not share them.
    OwnedTwice = 642;
    /// Blocks have no owner and are not free.
    Lost = 643;
    /// The reverse map differs from the owners that were found.
    ReverseMap = 644;
    /// The reference counts differ from the mappings that were found.
    ReferenceCount = 645;
    /// An inode is damaged.
    Inode = 661;
    /// An inode is in use and its tree says that it is free, or the reverse.
    InodeState = 662;
    /// The extents of a fork are out of order, overlap, or lead out of the groups.
    Extents = 663;
    /// An inode counts other extents than it has.
    ExtentCount = 664;
    /// An inode counts other blocks than it has.
    BlockCount = 665;
    /// An inode counts other links than directories have names for it.
    LinkCount = 666;
    /// The target of a symbolic link is damaged.
    SymbolicLink = 667;
    /// A block of a directory is damaged or in a wrong place.
    DirectoryBlock = 681;
    /// The hashes of a directory do not lead to its entries, each exactly once.
    DirectoryHash = 682;
    /// A directory has another longest unused piece than its index of free space says.
    DirectorySpace = 683;
    /// An entry names an inode that is not in use.
    Entry = 684;
    /// An entry has another file type than its inode.
    EntryType = 685;
    /// The entry `..` of a directory does not name the directory that has it.
    DotDot = 686;
    /// The parent pointers of an inode are not the names that directories have for it.
    ParentPointer = 687;
    /// A leaf, a node or a value of attributes is damaged.
    Attribute = 688;
    /// A directory has two entries with one name.
    DuplicateName = 689;
    /// The header of a leaf of attributes contradicts the space that its names and values take.
    AttributeSpace = 690;
}

/// Where something is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum XfsFindingPlace {
    /// The volume as a whole.
    Volume,
    /// A group, by its number.
    Group(u32),
    /// A block of a group.
    Block {
        /// The group.
        group: u32,
        /// The block in it.
        block: u32,
    },
    /// A file, by its inode number.
    Inode(u64),
}

impl From<AgNumber> for XfsFindingPlace {
    fn from(ag: AgNumber) -> Self {
        Self::Group(ag.0)
    }
}

impl From<(AgNumber, AgBlock)> for XfsFindingPlace {
    fn from((ag, block): (AgNumber, AgBlock)) -> Self {
        Self::Block { group: ag.0, block: block.0 }
    }
}

impl From<Ino> for XfsFindingPlace {
    fn from(ino: Ino) -> Self {
        Self::Inode(ino.0)
    }
}

impl fmt::Display for XfsFindingPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Volume => f.write_str("volume"),
            Self::Group(group) => write!(f, "group {group}"),
            Self::Block { group, block } => write!(f, "group {group}, block {block}"),
            Self::Inode(ino) => write!(f, "inode {ino}"),
        }
    }
}

/// A thing that is wrong with a volume.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct XfsFinding {
    /// What is wrong.
    pub code: XfsFindingCode,
    /// Where.
    pub place: XfsFindingPlace,
    /// What was expected, and what was found.
    pub problem: String,
}

impl fmt::Display for XfsFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { code, place, problem } = self;
        write!(f, "{} {}: {place}: {problem}", code.number(), code.name())
    }
}

/// Findings without duplicates, in the order of codes and places. Further ones than `most` are only
/// known to be there.
#[derive(Debug, Default)]
pub(super) struct Findings(Mutex<FindingList>);

#[derive(Debug, Default)]
struct FindingList {
    kept: BTreeSet<XfsFinding>,
    are_more: bool,
}

/// The most findings that are kept.
const MOST_FINDINGS: usize = 10_000;

impl Findings {
    pub(super) fn add(
        &self,
        code: XfsFindingCode,
        place: impl Into<XfsFindingPlace>,
        problem: impl Into<String>,
    ) {
        let finding = XfsFinding { code, place: place.into(), problem: problem.into() };
        let mut list = self.0.lock();
        if list.kept.len() < MOST_FINDINGS {
            list.kept.insert(finding);
        } else if !list.kept.contains(&finding) {
            list.are_more = true;
        }
    }

    /// Adds an error of a read.
    pub(super) fn add_error(
        &self,
        code: XfsFindingCode,
        place: impl Into<XfsFindingPlace>,
        error: &Error,
    ) {
        let code = if matches!(error, Error::Io { .. }) { XfsFindingCode::NotRead } else { code };
        self.add(code, place, error.to_string());
    }

    /// All findings, and whether there are more.
    pub(super) fn into_list(self) -> (Vec<XfsFinding>, bool) {
        let FindingList { kept, are_more } = self.0.into_inner();
        (kept.into_iter().collect(), are_more)
    }
}
