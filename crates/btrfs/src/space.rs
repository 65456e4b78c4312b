//! Space: block groups, their free ranges, and how callers get space from them.
//!
//! A *block group* is the logical side of a chunk: a range of the logical space that holds data or
//! metadata. Its free ranges are loaded from the free-space tree or, without one, from the extent
//! tree. This happens when a caller reserves space and the block groups that are loaded have too
//! little.
//!
//! ```text
//!   allocate            delayed references run        commit done
//!      |                        |                         |
//!  free ----> taken ----> used (extent item) --+
//!    ^                                         | last reference gone
//!    +----------------- pinned <---------------+
//! ```
//!
//! 1. A range is free, taken, used or pinned: always exactly one of these.
//! 2. A pinned range was freed by a transaction that is not on disk yet. The blocks that the last
//!    commit points to stay untouched until the next commit is complete, because a crash leads back
//!    to the last commit.
//! 3. `used` of a block group is the sum of its extent items. So it changes when the delayed
//!    references run, not when space is taken.
//! 4. A free range that is being discarded cannot be taken until the discard is done (`discard`).
//! 5. Metadata is taken only from loaded block groups, and only by a caller that has reserved it:
//!    space is taken inside changes of trees, where no tree can be read. The replay of a log is the
//!    exception. It has the volume for itself and reserves nothing.
//! 6. Space is taken, and counted as free, only in block groups with the profile of a new chunk
//!    (`profile`). A tree block crosses no border of 64 KiB (`free_space`). Nothing lies in the
//!    lowest 64 KiB of the logical space (`Chunk::left_out_ranges`).

mod allocated;
mod block_group;
pub(crate) mod chunk_plan;
#[cfg(test)]
mod cost_tests;
mod discard;
mod drain;
#[cfg(test)]
mod foreign_tests;
mod free_space;
mod free_space_tree;
mod groups;
mod ledger;
#[cfg(test)]
mod line_tests;
mod load;
mod looked;
mod place;
pub(crate) mod profile;
mod reserve;
mod stats;
#[cfg(test)]
mod tests;
mod tickets;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use offshoot_btrfs_format::chunk::BlockGroupFlags;
use offshoot_btrfs_format::superblock::Superblock;
use offshoot_btrfs_format::{Logical, TreeId};
use offshoot_vfs::{Errno, Error, Result, Structure};
use parking_lot::{Mutex, RwLock};

use allocated::Allocated;
pub(crate) use block_group::{BlockGroup, StoredGroup};
use chunk_plan::MemberSpace;
pub(crate) use chunk_plan::RESERVED_BYTES;
use discard::Freed;
pub(crate) use discard::PIECE_BYTES;
pub(crate) use drain::KeptGroups;
use free_space::{Fit, least_rank};
pub(crate) use free_space_tree::edits_of_shortened;
use groups::{BlockGroups, GroupKind, GroupSums};
use ledger::Ledger;
pub(crate) use ledger::{HighWater, Kept, KeptAs, Promise, Reservation};
pub(crate) use reserve::{
    DELETION_ITEMS, MakesRoom, OPERATION_ITEMS, REMOVAL_ITEMS, Reserved, growth_bytes,
};
pub(crate) use stats::FlushTime;
pub use stats::{BUCKETS, FlushCount, FlushState, Histogram, KindStats, SpaceKind, SpaceStats};
pub(crate) use tickets::{Claim, Waiter};

use crate::counter::{NonNegativeCounter, WriteStop};
use crate::shared::Shared;
use crate::storage::Storage;
use crate::tree::{Blocks, TreeRoot};

/// A volume whose trees describe its free space.
pub(crate) trait Roots: Blocks {
    /// Its members and chunks.
    fn storage(&self) -> &Storage;

    /// The root of the tree `id`.
    ///
    /// # Errors
    /// `ENOENT` when there is no such tree.
    fn tree(&self, id: TreeId) -> Result<TreeRoot>;

    /// The superblock of the last commit.
    fn superblock(&self) -> &Superblock {
        self.storage().superblock()
    }
}

/// All block groups of a volume.
pub(crate) struct Space {
    groups: Shared<RwLock<BlockGroups>>,
    /// The bytes of all extents: the superblock's `bytes_used`.
    bytes_used: NonNegativeCounter,
    /// Where the next search for data and for metadata begins: in the block group from which space
    /// was taken last. So space that is taken together lies together.
    last: [AtomicU64; 2],
    /// The ledgers of data, of metadata, and of system space. In a volume with mixed block groups,
    /// data counts as metadata, and only mixed block groups are allocated from. Such a volume may
    /// have other block groups too, which `mkfs.btrfs -O mixed-bg` makes and the kernel leaves
    /// alone.
    ledgers: [Ledger; 3],
    is_mixed: bool,
    /// The flags of new chunks for data, metadata and the chunk tree. Space is taken from block
    /// groups that have all of these flags. The flags never change, because the last block group
    /// with such flags is never removed.
    taken_from: [BlockGroupFlags; 3],
    node_size: u64,
    /// The highest level that the root of a tree has had.
    tallest: AtomicU8,
    /// How many reasons there are to assume that a tree shares blocks with a snapshot.
    sharing: NonNegativeCounter,
    /// The work of the commit of the running transaction.
    pub(crate) pending: Arc<CommitWork>,
    /// A priority caller found no room, and a commit would make some.
    pub(crate) is_short: AtomicBool,
    pub(crate) allocated: Allocated,
    /// Held by the thread that allocates or removes chunks, or discards space that belongs to no
    /// chunk. Taken after the gate.
    pub(crate) chunk_lock: Mutex<()>,
    /// The space of every member, once it is loaded. Changed by a thread that has the chunk lock.
    pub(crate) member_spaces: Mutex<Option<Vec<MemberSpace>>>,
    /// For members that become smaller, how many bytes of them new chunks may use.
    member_limits: Mutex<BTreeMap<usize, u64>>,
    /// How many threads are about to fill empty block groups.
    keeps_empty: NonNegativeCounter,
    /// Held by the thread that empties groups or changes the size of a member.
    pub(crate) resizing: parking_lot::Mutex<()>,
    outside: discard::Outside,
    /// The ranges to be discarded; `None` when the volume does not discard.
    freed: Mutex<Option<Freed>>,
    stats: stats::SpaceCounters,
    /// Stops all writing when the accounts turn out to be wrong.
    stop: Arc<WriteStop>,
}

/// The work of the commit of the running transaction. It is all done when the next transaction
/// begins.
#[derive(Debug)]
pub(crate) struct CommitWork {
    /// The size of the trees that references are written to, in bytes.
    pub(crate) tree_bytes: AtomicU64,
    /// The bytes of items that delayed references may add to these trees.
    pub(crate) reference_bytes: NonNegativeCounter,
    /// The number of trees whose root moved since its item was stored.
    pub(crate) roots: NonNegativeCounter,
}

impl CommitWork {
    /// No work yet.
    pub(crate) fn new(stop: &Arc<WriteStop>) -> Self {
        Self {
            tree_bytes: AtomicU64::new(0),
            reference_bytes: NonNegativeCounter::new(
                "what delayed references may add to trees",
                stop,
            ),
            roots: NonNegativeCounter::new("roots to be stored", stop),
        }
    }
}

/// The purpose of space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Data of files.
    Data,
    /// Tree blocks of all trees but the chunk tree.
    Metadata,
    /// Blocks of the chunk tree.
    System,
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Data => "data",
            Self::Metadata => "metadata",
            Self::System => "the chunk tree",
        })
    }
}

impl Purpose {
    /// All purposes, in the order in which they own a block group that serves several.
    const ALL: [Self; 3] = [Self::System, Self::Metadata, Self::Data];

    /// Where in free space an extent for this purpose may lie, the best place first.
    fn fits(self) -> &'static [Fit] {
        match self {
            Self::Data => &[Fit::Anywhere],
            Self::Metadata | Self::System => &[Fit::Aligned, Fit::InWindow],
        }
    }

    fn flag(self) -> u64 {
        match self {
            Self::Data => BlockGroupFlags::DATA,
            Self::Metadata => BlockGroupFlags::METADATA,
            Self::System => BlockGroupFlags::SYSTEM,
        }
    }
}

/// A tree that is about to share blocks with a snapshot. If it never does, dropping this lowers the
/// reserve again.
pub(crate) struct Sharing<'s> {
    reasons: &'s NonNegativeCounter,
}

impl Sharing<'_> {
    /// Notes that the tree shares blocks now, for good.
    pub(crate) fn begins(self) {
        std::mem::forget(self);
    }
}

impl Drop for Sharing<'_> {
    fn drop(&mut self) {
        self.reasons.sub(1);
    }
}

impl Space {
    /// The space of a volume with these block groups. `stop` is set when the accounts turn out to
    /// be wrong. With `discards`, freed ranges are noted.
    ///
    /// # Errors
    /// When a block group has an unknown profile.
    pub(crate) fn new(
        groups: Vec<StoredGroup>,
        storage: &Storage,
        discards: bool,
        stop: Arc<WriteStop>,
    ) -> Result<Self> {
        let kinds = groups.iter().map(|group| group.flags);
        let is_mixed = profile::has_mixed(kinds.clone());
        let members = storage.members().iter().filter(|member| !member.is_seed).count();
        let new_chunk = |purpose| profile::flags_of_new_chunk(purpose, kinds.clone(), members);
        let taken_from =
            [new_chunk(Purpose::Data)?, new_chunk(Purpose::Metadata)?, new_chunk(Purpose::System)?];
        let superblock = storage.superblock();
        let mut all = BlockGroups::default();
        for group in groups {
            all.add(group);
        }
        Ok(Self {
            groups: Shared::new("groups", RwLock::new(all)),
            bytes_used: NonNegativeCounter::starting_at(
                superblock.item.bytes_used.get(),
                "bytes used",
                &stop,
            ),
            last: Default::default(),
            ledgers: [Purpose::Data, Purpose::Metadata, Purpose::System]
                .map(|purpose| Ledger::new(purpose, &stop)),
            is_mixed,
            taken_from,
            node_size: u64::from(superblock.node_size),
            tallest: AtomicU8::new(0),
            sharing: NonNegativeCounter::new("trees that share blocks with snapshots", &stop),
            pending: Arc::new(CommitWork::new(&stop)),
            is_short: AtomicBool::new(false),
            allocated: Allocated::new(storage.members()),
            chunk_lock: Mutex::new(()),
            member_spaces: Mutex::new(None),
            member_limits: Mutex::default(),
            keeps_empty: NonNegativeCounter::new("reasons to keep empty block groups", &stop),
            resizing: parking_lot::Mutex::default(),
            outside: discard::Outside::default(),
            freed: Mutex::new(discards.then(Freed::default)),
            stats: stats::SpaceCounters::default(),
            stop,
        })
    }

    /// The size of a tree block, in bytes.
    pub(crate) fn node_size(&self) -> u64 {
        self.node_size
    }

    /// The most metadata that was reserved at one time, in bytes.
    pub(crate) fn metadata_reserved_peak(&self) -> u64 {
        self.ledger(Purpose::Metadata).peak()
    }

    /// Takes `len` bytes for `purpose` in one piece. The caller has reserved them.
    ///
    /// # Errors
    /// `ENOSPC` when no block group has `len` free bytes in one piece.
    pub(crate) fn take(&self, volume: &dyn Roots, purpose: Purpose, len: u64) -> Result<Logical> {
        loop {
            let taken = self.take_known(purpose, len);
            if let Some(logical) = taken.or_else(|| self.take_or_wait(purpose, len)) {
                return Ok(logical);
            }
            // Data is taken outside changes of trees, so the trees may be read here.
            if purpose != Purpose::Data || !self.load_one(volume, purpose)? {
                return Err(Error::posix(Errno::NOSPC, format!("{len} bytes for {purpose}")));
            }
        }
    }

    /// Takes exactly this range of a block group. Returns false, and takes nothing, unless all of
    /// it is free.
    pub(crate) fn take_range(
        &self,
        volume: &dyn Roots,
        group: &BlockGroup,
        logical: Logical,
        len: u64,
    ) -> Result<bool> {
        self.load(volume, group)?;
        let taken = group.take_range(logical, len);
        if let (Some(less), Some(ledger)) = (taken, self.ledger_of(group)) {
            ledger.remove_free(less);
        }
        Ok(taken.is_some())
    }

    fn take_known(&self, purpose: Purpose, len: u64) -> Option<Logical> {
        let groups = self.groups.read();
        let fits = purpose.fits().iter();
        let taken = fits.copied().find_map(|fit| self.take_fitting(&groups, purpose, len, fit));
        taken.map(|range| Logical(range.start))
    }

    /// Takes `len` bytes in one piece: in the group from which space was taken last, or else in one
    /// that the index finds.
    fn take_fitting(
        &self,
        groups: &BlockGroups,
        purpose: Purpose,
        len: u64,
        fit: Fit,
    ) -> Option<Range<u64>> {
        let begin = self.last_of(purpose).load(Ordering::Relaxed);
        let take = |start| {
            let group = groups.at(start).filter(|group| self.may_take(purpose, group))?;
            Some(self.taken(purpose, group, group.take(len, fit)?))
        };
        let take_of = |kind: &GroupKind| {
            let has_blocks = kind.has_blocks();
            let (least, from) =
                (least_rank(has_blocks, len, fit), if has_blocks { begin } else { 0 });
            // Another thread may take the last place of the group that is found. Then the next one
            // is tried, wherever that is in the index by then.
            let mut tried = Vec::new();
            loop {
                let start = kind.with_rank(least, from, &tried)?;
                if let Some(taken) = take(start) {
                    return Some(taken);
                }
                tried.push(start);
            }
        };
        take(begin)
            .or_else(|| groups.kinds_with(self.flags_for(purpose).0).find_map(|k| take_of(k)))
    }

    /// Takes the longest piece of data that is known to be free, or as much of it as `most`, in
    /// whole `unit`s.
    fn take_longest(&self, most: u64, unit: u64) -> Option<Range<u64>> {
        let groups = self.groups.read();
        let mut before = None;
        loop {
            let kinds = groups.kinds_with(self.flags_for(Purpose::Data).0);
            let longest = kinds.filter_map(|kind| kind.highest_rank()).max();
            // Another thread may be faster. Then another piece is the longest.
            let longest @ (_, start) =
                longest.filter(|one| one.0 >= unit && before != Some(*one))?;
            before = Some(longest);
            if let Some(group) = groups.at(start)
                && let Some(taken) = group.take_longest(most, unit)
            {
                return Some(self.taken(Purpose::Data, group, taken));
            }
        }
    }

    /// Counts a range of `group` that was taken, and by how much the usable bytes decreased.
    fn taken(
        &self,
        purpose: Purpose,
        group: &BlockGroup,
        (range, less): (Range<u64>, u64),
    ) -> Range<u64> {
        let last = self.last_of(purpose);
        if last.load(Ordering::Relaxed) != group.start.0 {
            last.store(group.start.0, Ordering::Relaxed);
        }
        self.ledger(purpose).remove_free(less);
        range
    }

    fn last_of(&self, purpose: Purpose) -> &AtomicU64 {
        &self.last[usize::from(purpose == Purpose::Data)]
    }

    /// The block group that covers `logical`.
    pub(crate) fn group_of(&self, logical: Logical) -> Result<Arc<BlockGroup>> {
        self.groups.read().covering(logical).cloned().ok_or_else(|| {
            Error::corrupt_at(
                Structure::BlockGroupItem,
                logical.0,
                "no block group covers the address",
            )
        })
    }

    /// Frees a range that was taken and is not referred to, or that is no longer pinned.
    pub(crate) fn give_back(&self, logical: Logical, len: u64) -> Result<()> {
        let group = self.group_of(logical)?;
        self.counted(group.give_back(logical, len, |more| self.count_free(&group, more)))
    }

    /// The block groups that overlap `range`.
    pub(crate) fn groups_in(&self, range: &Range<u64>) -> Vec<Arc<BlockGroup>> {
        self.groups.read().overlapping(range).cloned().collect()
    }

    /// Block groups whose items have an old value of `used`.
    pub(crate) fn changed_groups(&self) -> Vec<Arc<BlockGroup>> {
        self.groups.read().changed()
    }

    /// Counts an extent that was added or removed.
    pub(crate) fn count_used(&self, logical: Logical, len: u64, is_new: bool) -> Result<()> {
        self.counted(self.group_of(logical)?.count_used(len, is_new))?;
        if is_new {
            self.bytes_used.add(len);
        } else {
            self.bytes_used.sub(len);
        }
        Ok(())
    }

    /// Stops all writing when `outcome` is an error.
    pub(crate) fn counted<T>(&self, outcome: Result<T>) -> Result<T> {
        outcome.inspect_err(|error| self.stop.set(&error.to_string()))
    }

    /// The ledger of this kind of space.
    pub(crate) fn ledger(&self, purpose: Purpose) -> &Ledger {
        match purpose {
            Purpose::Data if !self.is_mixed => &self.ledgers[0],
            Purpose::Data | Purpose::Metadata => &self.ledgers[1],
            Purpose::System => &self.ledgers[2],
        }
    }

    /// Whether the reserve that is kept of metadata is kept of this kind of space.
    pub(crate) fn counts_as_metadata(&self, purpose: Purpose) -> bool {
        match purpose {
            Purpose::Data => self.is_mixed,
            Purpose::Metadata => true,
            Purpose::System => false,
        }
    }

    /// The sums over the block groups of the type for `purpose`, of any profile: for each kind its
    /// flags and its sums.
    fn sums_of_type(&self, purpose: Purpose) -> Vec<(BlockGroupFlags, GroupSums)> {
        let groups = self.groups.read();
        let kinds = groups.kinds_with(profile::types_for(purpose, self.is_mixed));
        kinds.map(|kind| (kind.flags, kind.sums())).collect()
    }

    /// The flags of a new chunk for `purpose`.
    pub(crate) fn flags_for(&self, purpose: Purpose) -> BlockGroupFlags {
        self.taken_from[match purpose {
            Purpose::Data => 0,
            Purpose::Metadata => 1,
            Purpose::System => 2,
        }]
    }

    /// Whether space for `purpose` is taken from `group`: it has the type and the profile of a new
    /// chunk.
    fn may_take(&self, purpose: Purpose, group: &BlockGroup) -> bool {
        group.serves(self.flags_for(purpose).0) && !group.is_draining()
    }

    /// Whether nothing is taken from `group` only because of its profile.
    fn is_of_other_profile(&self, group: &BlockGroup) -> bool {
        let has_type = |purpose| group.serves(profile::types_for(purpose, self.is_mixed));
        let has_profile = |purpose| group.serves(self.flags_for(purpose).0);
        Purpose::ALL.into_iter().any(has_type) && !Purpose::ALL.into_iter().any(has_profile)
    }

    /// The ledger that counts the free space of `group`; `None` when nothing is allocated from it.
    fn ledger_of(&self, group: &BlockGroup) -> Option<&Ledger> {
        let purpose = Purpose::ALL.into_iter().find(|&purpose| self.may_take(purpose, group))?;
        Some(self.ledger(purpose))
    }

    /// Loads the free ranges of `group`, unless they are loaded.
    pub(crate) fn load(&self, volume: &dyn Roots, group: &BlockGroup) -> Result<()> {
        group.load(volume, |free| self.count_free(group, free)).map(drop)
    }

    /// Counts `bytes` more of `group` that can be taken.
    fn count_free(&self, group: &BlockGroup, bytes: u64) {
        if let Some(ledger) = self.ledger_of(group) {
            ledger.add_free(bytes);
        }
    }

    /// Loads the free ranges of one more block group for `purpose`. Returns whether there was one.
    pub(crate) fn load_one(&self, volume: &dyn Roots, purpose: Purpose) -> Result<bool> {
        let unknown = {
            let groups = self.groups.read();
            let mut kinds = groups.kinds_with(self.flags_for(purpose).0);
            kinds.find_map(|kind| groups.at(kind.to_load()?).cloned())
        };
        unknown.map(|group| self.load(volume, &group)).transpose().map(|found| found.is_some())
    }

    /// The bytes of all block groups from which space for `purpose` is taken, and how many of them
    /// are free.
    pub(crate) fn totals(&self, purpose: Purpose) -> (u64, u64) {
        let groups = self.groups.read();
        let sums = groups.kinds_with(self.flags_for(purpose).0).map(|kind| kind.sums());
        sums.fold((0, 0), |(all, free), sums| (all + sums.len, free + sums.free))
    }

    /// Whether `group` is the only block group with its flags.
    fn is_last_of_its_kind(&self, group: &BlockGroup) -> bool {
        self.groups.read().count_of(group.flags) < 2
    }

    /// Adds the block group of a chunk that was allocated.
    pub(crate) fn add_group(&self, volume: &dyn Roots, group: StoredGroup) -> Result<()> {
        let group = self.groups.write().add(group);
        self.load(volume, &group)
    }

    /// Removes a retired block group.
    pub(crate) fn remove_group(&self, group: &BlockGroup) {
        self.groups.write().remove(group.start);
    }

    /// The empty block groups.
    pub(crate) fn empty_groups(&self) -> Vec<Arc<BlockGroup>> {
        let mut empty = self.groups.read().empty();
        // The last ones come first, so that the logical space stays dense.
        empty.reverse();
        empty
    }

    /// Retires `group`, so that nothing is allocated from it, when three conditions hold: it is
    /// empty, it is not the last of its kind, and `keep` bytes of metadata remain free without it.
    /// A group from which nothing is taken because of its profile may be the last one. Returns
    /// whether the group is retired.
    pub(crate) fn retire(&self, group: &BlockGroup, keep: u64) -> bool {
        let is_last = self.is_last_of_its_kind(group) && !self.is_of_other_profile(group);
        // Trees need their space at once. A data chunk is easily allocated again.
        let keep = if group.flags.has_metadata() { keep } else { 0 };
        !is_last
            && match self.ledger_of(group) {
                Some(ledger) => ledger.withdraw(group.known_usable(), keep, || group.retire()),
                None => group.retire().is_some(),
            }
    }

    /// How many bytes of every member belong to chunks.
    pub(crate) fn allocated(&self) -> Vec<u64> {
        self.allocated.of_members()
    }

    /// Whether allocating a chunk of metadata is a cheap way to more room: there is a place for
    /// one, and more than half of all members, and at least 1 GiB, belongs to no chunk.
    pub(crate) fn is_roomy(&self) -> bool {
        self.ledger(Purpose::Metadata).next_chunk() > 0
    }

    fn is_mixed(&self) -> bool {
        self.is_mixed
    }

    fn tallest(&self) -> u8 {
        self.tallest.load(Ordering::Relaxed)
    }

    /// Whether a tree may share blocks with a snapshot.
    fn may_share(&self) -> bool {
        self.sharing.get() > 0
    }

    /// Notes that a tree may share blocks with a snapshot.
    pub(crate) fn note_sharing(&self) {
        self.expect_sharing().begins();
    }

    /// Notes that a tree is about to share blocks with a snapshot, until it does or the value is
    /// dropped. From now on a larger reserve is kept, which must exist before the snapshot does.
    pub(crate) fn expect_sharing(&self) -> Sharing<'_> {
        self.sharing.add(1);
        Sharing { reasons: &self.sharing }
    }

    /// Notes the level of the root of a tree.
    pub(crate) fn note_level(&self, level: u8) {
        if level > self.tallest() {
            self.tallest.fetch_max(level, Ordering::Relaxed);
        }
    }

    /// The bytes of all extents.
    pub(crate) fn bytes_used(&self) -> u64 {
        self.bytes_used.get()
    }
}
