//! Reservations: the log space that each kind of transaction takes at most. They are computed from
//! the geometry when a volume is opened, never per call, and equal those of the kernel
//! (`xfs_db -c logres`).

use offshoot_xfs_format::XfsGeometry;
use offshoot_xfs_format::geometry::XfsLayout;

use super::levels::MostTreeLevels;
use super::log_sizes::{HASH_BLOCKS, ReservationSizes};

/// The quotas that a transaction may change.
pub(crate) const QUOTAS: u64 = 768;

/// A path of 1024 bytes in a buffer.
const LINK_TARGET: u64 = 1024 + 128;

/// The blocks, and so the extents, of a target of 1,023 bytes: a block of 1 KiB has room for 968.
pub(crate) const MOST_TARGET_BLOCKS: u64 = 2;

/// The inodes that a change of names keeps locked: two directories, two files, and a whiteout.
const MOST_KEPT_INODES: u64 = 5;

/// What parent pointers add to a rename, and to any other change of a name: names and values in
/// intents.
const PARENT_OF_RENAME: u64 = 1192;
const PARENT_OF_CREATE: u64 = 308;

/// The longest intent to change an attribute: a value of 64 KiB, its name, and their headers.
const ATTRIBUTE_INTENT: u64 = (64 << 10) + 512;

/// A reservation, and how many of them the transactions of one operation take, which roll from one
/// to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct XfsLogReservation {
    pub(crate) bytes: u64,
    pub(crate) count: u64,
}

macro_rules! kinds {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// What a transaction is for. It decides how much log space it reserves.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum XfsTransactionKind {
            $($(#[doc = $doc])+ $name,)+
        }

        impl XfsTransactionKind {
            /// All kinds, in the order of their numbers.
            pub(crate) const ALL: &[Self] = &[$(Self::$name,)+];
        }
    };
}

kinds! {
    /// Blocks of a file are allocated or mapped.
    Write,
    /// Blocks of a file are unmapped and freed; intents are finished.
    Truncate,
    /// A name moves.
    Rename,
    /// A file gets one more name.
    Link,
    /// A name is removed.
    Remove,
    /// A symbolic link is made.
    Symlink,
    /// A file is made.
    Create,
    /// A directory is made.
    Mkdir,
    /// A file without a name is made.
    CreateUnnamed,
    /// An inode without names is freed.
    FreeInode,
    /// A file gets an attribute fork.
    AddAttributeFork,
    /// An attribute is set, without the blocks that it needs.
    SetAttribute,
    /// An attribute is removed.
    RemoveAttribute,
    /// All attributes of a file are removed.
    DropAttributes,
    /// The core of an inode changes.
    ChangeInode,
    /// Only times of an inode change.
    ChangeTimes,
    /// The superblock changes.
    Superblock,
    /// A list of unlinked inodes that cannot be walked is emptied.
    ClearUnlinked,
    /// One step of the change of an attribute: blocks of its tree are split or joined, and the
    /// space for them is taken.
    ChangeAttribute,
}

/// The reservations of all kinds.
#[derive(Clone, Debug)]
pub(crate) struct LogReservations {
    all: Vec<XfsLogReservation>,
    chains: Vec<XfsLogReservation>,
}

impl LogReservations {
    /// Those of a volume.
    pub(crate) fn of(geometry: &XfsGeometry) -> Self {
        let levels = MostTreeLevels::of(geometry);
        let sizes = ReservationSizes { geometry, levels: &levels, is_old: false };
        let kinds = XfsTransactionKind::ALL;
        Self {
            all: kinds.iter().map(|kind| sizes.reservation(*kind)).collect(),
            chains: kinds.iter().map(|kind| sizes.chain(*kind)).collect(),
        }
    }

    /// That of transactions of this kind.
    pub(crate) fn get(&self, kind: XfsTransactionKind) -> XfsLogReservation {
        self.all.get(kind as usize).copied().unwrap_or_default()
    }

    /// That of a transaction of this kind with deferred work in further steps, each of which has
    /// the log space of the largest.
    pub(crate) fn chain(&self, kind: XfsTransactionKind) -> XfsLogReservation {
        self.chains.get(kind as usize).copied().unwrap_or_default()
    }
}

impl ReservationSizes<'_> {
    /// The reservation for a kind of transactions.
    pub(crate) fn reservation(&self, kind: XfsTransactionKind) -> XfsLogReservation {
        use XfsTransactionKind as Kind;
        let bytes = match kind {
            Kind::Write => QUOTAS + self.write(),
            Kind::Truncate => QUOTAS + self.truncate(),
            Kind::Rename => QUOTAS + self.rename() + self.of_parents(PARENT_OF_RENAME),
            Kind::Link => QUOTAS + self.link() + self.of_parents(PARENT_OF_CREATE),
            Kind::Remove => QUOTAS + self.remove() + self.of_parents(PARENT_OF_CREATE),
            Kind::Symlink => QUOTAS + self.create() + LINK_TARGET,
            Kind::Create | Kind::Mkdir => QUOTAS + self.create(),
            Kind::CreateUnnamed => {
                QUOTAS + self.make_chunk() + self.free_chunk_tree() + self.enter_unlinked()
            }
            Kind::FreeInode => QUOTAS + self.free_inode(),
            Kind::AddAttributeFork => QUOTAS + self.add_attribute_fork(),
            Kind::SetAttribute => {
                QUOTAS + self.inodes(1) + self.sectors(1) + self.blocks(HASH_BLOCKS)
            }
            Kind::RemoveAttribute => QUOTAS + self.remove_attribute(),
            Kind::DropAttributes => self.drop_attributes(),
            Kind::ChangeInode => QUOTAS + self.inodes(1) + self.sectors(1),
            Kind::ChangeTimes => self.inodes(1),
            Kind::Superblock | Kind::ClearUnlinked => self.sectors(1),
            Kind::ChangeAttribute => QUOTAS + self.change_attribute(),
        };
        XfsLogReservation { bytes, count: self.count(kind) }
    }

    /// How many transactions one operation takes.
    fn count(&self, kind: XfsTransactionKind) -> u64 {
        use XfsTransactionKind as Kind;
        // Each change of a parent pointer is one more step, with one for its intents.
        let with_parents = |plain, more| {
            if self.has(XfsLayout::PARENTS) { plain + more } else { plain }
        };
        match kind {
            Kind::Write | Kind::Truncate => self.data_steps(),
            Kind::Rename | Kind::Link | Kind::Remove | Kind::Create => with_parents(2, 3),
            Kind::Symlink | Kind::Mkdir => with_parents(3, 3),
            Kind::CreateUnnamed | Kind::FreeInode | Kind::AddAttributeFork => 2,
            Kind::SetAttribute | Kind::RemoveAttribute => 3,
            Kind::DropAttributes
            | Kind::ChangeInode
            | Kind::ChangeTimes
            | Kind::Superblock
            | Kind::ClearUnlinked
            | Kind::ChangeAttribute => 1,
        }
    }

    /// The kernel's reservation, with what the kernel does not count: lists of unlinked inodes that
    /// a rename changes, targets of links that are made without a name, which may lie in two
    /// pieces, and inodes that stay locked, and are logged in each step.
    fn chain(&self, kind: XfsTransactionKind) -> XfsLogReservation {
        use XfsTransactionKind as Kind;
        let XfsLogReservation { bytes, count } = self.reservation(kind);
        let more = match kind {
            Kind::Rename => self.enter_unlinked() + self.leave_unlinked(),
            Kind::CreateUnnamed | Kind::Symlink => {
                MOST_TARGET_BLOCKS * (LINK_TARGET + self.sectors(2) + self.space_trees(1))
            }
            _ => 0,
        };
        let of_frees = self.reservation(Kind::Truncate).bytes;
        let of_parents = self.of_parents(self.reservation(Kind::ChangeAttribute).bytes);
        let step = of_frees.max(of_parents) + self.inodes(MOST_KEPT_INODES);
        XfsLogReservation { bytes: (bytes + more).max(step), count }
    }

    fn of_parents(&self, bytes: u64) -> u64 {
        if self.has(XfsLayout::PARENTS) { bytes } else { 0 }
    }

    fn rename(&self) -> u64 {
        (self.inodes(5) + 2 * self.directory()).max(self.sectors(7) + self.space_trees(3))
    }

    fn link(&self) -> u64 {
        let names = self.inodes(2) + self.directory();
        self.leave_unlinked() + names.max(self.sectors(3) + self.space_trees(1))
    }

    fn remove(&self) -> u64 {
        let names = self.inodes(2) + self.directory();
        self.enter_unlinked() + names.max(self.sectors(4) + self.space_trees(2))
    }

    fn create(&self) -> u64 {
        let parent = self.of_parents(PARENT_OF_CREATE);
        self.use_inode().max(self.make_chunk()) + self.free_chunk_tree() + parent
    }

    /// What changes when an inode becomes the first of a list of unlinked ones.
    fn enter_unlinked(&self) -> u64 {
        self.sectors(1) + self.cluster()
    }

    /// What changes when an inode leaves a list: the one before it changes too.
    fn leave_unlinked(&self) -> u64 {
        self.sectors(1) + 2 * self.cluster()
    }

    /// What changes when an inode is freed, and its chunk with it. The blocks of the chunk are
    /// cancelled, which takes a header for each.
    fn free_inode(&self) -> u64 {
        let headers = self.blocks(self.chunk_blocks())
            - self.chunk_blocks() * self.geometry.block_size() as u64;
        let chunk = self.sectors(2) + headers + self.space_trees(1);
        let trees = self.chunk_tree() + self.free_chunk_tree();
        self.inodes(1) + self.sectors(1) + self.leave_unlinked() + chunk + trees
    }

    fn add_attribute_fork(&self) -> u64 {
        let blocks = self.directory_block() + self.blocks(self.levels.data);
        self.inodes(1) + self.sectors(2) + blocks + self.space_trees(1)
    }

    fn remove_attribute(&self) -> u64 {
        (self.inodes(1) + self.blocks(HASH_BLOCKS + self.levels.attributes))
            .max(self.sectors(5) + self.space_trees(2))
    }

    /// On each level of the tree a block, the one that is split off or joined, and a neighbour that
    /// links to it. A leaf may become three. A change that has an intent says it again in each
    /// step. The extents that an earlier step freed need no more.
    fn change_attribute(&self) -> u64 {
        let blocks = 3 * HASH_BLOCKS + 2 + 2 * self.levels.attributes;
        let changes = self.inodes(1) + self.blocks(blocks) + self.sectors(9) + self.space_trees(4);
        changes + ATTRIBUTE_INTENT
    }

    fn drop_attributes(&self) -> u64 {
        (self.inodes(1) + self.blocks(self.levels.attributes))
            .max(self.sectors(9) + self.space_trees(4))
    }
}
