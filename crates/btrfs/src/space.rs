//! Space: block groups, what is free in them, and who gets it.
//!
//! A *block group* is a chunk seen from above: a range of the logical space that holds data or
//! metadata. What is free in it is loaded, from the free-space tree or, without one, from the
//! extent tree, when space is reserved and the block groups that are known have too little.
//!
//! ```text
//!   allocate            delayed references run        commit done
//!      |                        |                         |
//!  free ----> taken ----> used (extent item) --+
//!    ^                                         | last reference gone
//!    +----------------- pinned <---------------+
//! ```
//!
//! 1. A range is free, taken (or used), or pinned; never two of these.
//! 2. A pinned range was freed by a transaction that is not on disk yet. What the last commit
//!    points to stays untouched until the next one is complete: that is what a crash finds.
//! 3. `used` of a block group is what its extent items add up to, so it changes when the delayed
//!    references run, not when space is taken.
//!    A free range that is being discarded is taken when that is done (`discard`).
//! 4. Metadata is taken only where the free ranges are known, and only by who reserved it: taking
//!    happens inside changes of trees, where no tree can be read. Who replays a log is alone, and
//!    reserves nothing.
//! 5. Space is taken, and counted as free, where the profile is that of a new chunk (`profile`), a
//!    tree block where it crosses no border of 64 KiB (`free_space`), and nothing below the lowest
//!    64 KiB of the logical space (`Chunk::left_out_ranges`).

mod allocated;
mod block_group;
mod chunk_plan;
mod chunks;
mod discard;
#[cfg(test)]
mod foreign_tests;
mod free_space;
mod free_space_tree;
mod ledger;
#[cfg(test)]
mod line_tests;
mod load;
mod place;
mod profile;
mod reclaim;
mod reserve;
mod stats;
#[cfg(test)]
mod tests;
mod tickets;
mod usage;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use offshoot_btrfs_format::Logical;
use offshoot_btrfs_format::chunk::BlockGroupFlags;
use offshoot_vfs::{Errno, Error, Result};
use parking_lot::{Mutex, RwLock};

use allocated::Allocated;
pub(crate) use block_group::BlockGroup;
pub(crate) use chunk_plan::RESERVED_BYTES;
pub(crate) use chunks::system_chunks_of;
pub(crate) use discard::Freed;
use free_space::Fit;
use ledger::Ledger;
pub(crate) use ledger::{Promise, Reservation};
pub(crate) use reserve::{
    Claim, DELETION_ITEMS, OPERATION_ITEMS, REMOVAL_ITEMS, Reserved, growth_bytes,
};
pub use stats::{BUCKETS, FlushCount, FlushState, Histogram, KindStats, SpaceKind, SpaceStats};

use crate::counter::{Counter, Stop};
use crate::engine::Engine;

/// All block groups of a volume.
pub(crate) struct Space {
    groups: RwLock<BTreeMap<u64, Arc<BlockGroup>>>,
    /// What all extents take: the superblock's `bytes_used`.
    bytes_used: Counter,
    /// Where the next search for space begins: the block group that gave some last, for data
    /// and for metadata. Keeping to one clusters what is written together.
    last: [Mutex<u64>; 2],
    /// What is free and reserved of data, of metadata, and of system space. In a volume with mixed
    /// block groups data counts as metadata, and only these are allocated from: such a volume may
    /// have others too, which `mkfs.btrfs -O mixed-bg` makes and the kernel leaves alone.
    ledgers: [Ledger; 3],
    is_mixed: bool,
    /// The flags of new chunks for data, metadata and the chunk tree, which do not change: the last
    /// block group of a profile that is taken from stays. Space is taken from block groups that
    /// have all of them.
    taken_from: [BlockGroupFlags; 3],
    node_size: u64,
    /// The highest level that the root of a tree has had.
    tallest: AtomicU8,
    /// How many reasons there are why a tree may share blocks with a snapshot.
    sharing: Counter,
    /// What the commit of the running transaction has to do.
    pub(crate) pending: Arc<Pending>,
    /// Somebody who goes before others found no room, which a commit makes.
    is_short: AtomicBool,
    allocated: Allocated,
    /// Held by the one thread that makes or removes chunks, or discards what belongs to none. Taken
    /// after the gate.
    chunk_lock: Mutex<()>,
    outside: discard::Outside,
    stats: stats::Counters,
    /// Told when accounts turn out to be wrong.
    stop: Arc<Stop>,
}

/// What the commit of the running transaction has to do. A commit has done all of it when the next
/// transaction begins.
#[derive(Debug)]
pub(crate) struct Pending {
    /// What the trees take that references go to, in bytes.
    pub(crate) tree_bytes: AtomicU64,
    /// What delayed references may add to these trees, in bytes of items.
    pub(crate) reference_bytes: Counter,
    /// Trees whose root moved since its item was stored.
    pub(crate) roots: Counter,
}

impl Pending {
    /// Nothing is to be done yet.
    pub(crate) fn new(stop: &Arc<Stop>) -> Self {
        Self {
            tree_bytes: AtomicU64::new(0),
            reference_bytes: Counter::new("what delayed references may add to trees", stop),
            roots: Counter::new("roots to be stored", stop),
        }
    }
}

/// What space is for.
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
    /// All, in the order in which they own a block group that serves several.
    const ALL: [Self; 3] = [Self::System, Self::Metadata, Self::Data];

    /// Where in free space what is for this may lie, what is best first.
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

/// A tree that is to share blocks with a snapshot. When that comes to nothing, as much is kept back
/// as before.
pub(crate) struct Sharing<'s> {
    reasons: &'s Counter,
}

impl Sharing<'_> {
    /// The tree shares blocks now.
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
    /// The space of `volume` with these block groups. `stop` is told when its accounts turn out to
    /// be wrong.
    ///
    /// # Errors
    /// When a block group has a profile that there is not.
    pub(crate) fn new(groups: Vec<BlockGroup>, volume: &Engine, stop: Arc<Stop>) -> Result<Self> {
        let kinds = groups.iter().map(|group| group.flags);
        let is_mixed = profile::has_mixed(kinds.clone());
        let members = volume.members().iter().filter(|member| !member.is_seed).count();
        let new_chunk = |purpose| profile::flags_of_new_chunk(purpose, kinds.clone(), members);
        let taken_from =
            [new_chunk(Purpose::Data)?, new_chunk(Purpose::Metadata)?, new_chunk(Purpose::System)?];
        let superblock = volume.superblock();
        let groups = groups.into_iter().map(|group| (group.start.0, Arc::new(group)));
        Ok(Self {
            groups: RwLock::new(groups.collect()),
            bytes_used: Counter::starting_at(superblock.item.bytes_used.get(), "bytes used", &stop),
            last: Default::default(),
            ledgers: [Purpose::Data, Purpose::Metadata, Purpose::System]
                .map(|purpose| Ledger::new(purpose, &stop)),
            is_mixed,
            taken_from,
            node_size: u64::from(superblock.node_size),
            tallest: AtomicU8::new(0),
            sharing: Counter::new("trees that share blocks with snapshots", &stop),
            pending: Arc::new(Pending::new(&stop)),
            is_short: AtomicBool::new(false),
            allocated: Allocated::new(volume),
            chunk_lock: Mutex::new(()),
            outside: discard::Outside::default(),
            stats: stats::Counters::default(),
            stop,
        })
    }

    /// The size of a tree block, in bytes.
    pub(crate) fn node_size(&self) -> u64 {
        self.node_size
    }

    /// The most metadata that was reserved at a time, in bytes.
    pub(crate) fn metadata_reserved_peak(&self) -> u64 {
        self.ledger(Purpose::Metadata).peak()
    }

    /// Takes `len` bytes for `purpose`, in one piece, which the caller has reserved.
    ///
    /// # Errors
    /// `ENOSPC` when no block group has as much in one piece.
    pub(crate) fn take(&self, volume: &Engine, purpose: Purpose, len: u64) -> Result<Logical> {
        loop {
            let taken = self.take_known(purpose, len);
            if let Some(logical) = taken.or_else(|| self.take_or_wait(purpose, len)) {
                return Ok(logical);
            }
            // Data is taken outside of changes of trees, so the trees may be read here.
            if purpose != Purpose::Data || !self.load_one(volume, purpose)? {
                return Err(Error::posix(Errno::NOSPC, format!("{len} bytes for {purpose}")));
            }
        }
    }

    /// Takes exactly this range of a block group, if all of it is free; whether it is.
    pub(crate) fn take_range(
        &self,
        volume: &Engine,
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
        let last = &self.last[usize::from(purpose == Purpose::Data)];
        let begin = *last.lock();
        let all = self.groups.read();
        let groups = || {
            let groups = all.range(begin..).chain(all.range(..begin)).map(|(_, group)| group);
            groups.filter(|group| self.may_take(purpose, group))
        };
        let (group, (logical, less)) = purpose
            .fits()
            .iter()
            .find_map(|&fit| groups().find_map(|group| Some((group, group.take(len, fit)?))))?;
        *last.lock() = group.start.0;
        self.ledger(purpose).remove_free(less);
        Some(logical)
    }

    /// The block group that covers `logical`.
    pub(crate) fn group_of(&self, logical: Logical) -> Result<Arc<BlockGroup>> {
        let groups = self.groups.read();
        groups
            .range(..=logical.0)
            .next_back()
            .map(|(_, group)| group)
            .filter(|group| group.contains(logical))
            .cloned()
            .ok_or_else(|| {
                Error::corrupt_at(
                    "block group item",
                    logical.0,
                    "no block group covers the address",
                )
            })
    }

    /// Gives back a range that was taken and that nothing refers to, or that is not pinned any
    /// more.
    pub(crate) fn give_back(&self, logical: Logical, len: u64) -> Result<()> {
        let group = self.group_of(logical)?;
        self.counted(group.give_back(logical, len, |more| self.count_free(&group, more)))
    }

    /// Block groups whose items no longer say how much of them is used.
    pub(crate) fn changed_groups(&self) -> Vec<Arc<BlockGroup>> {
        self.groups.read().values().filter(|group| group.is_changed()).cloned().collect()
    }

    /// Counts an extent that came to be, or ceased to.
    pub(crate) fn count_used(&self, logical: Logical, len: u64, is_new: bool) -> Result<()> {
        self.counted(self.group_of(logical)?.count_used(len, is_new))?;
        if is_new {
            self.bytes_used.add(len);
        } else {
            self.bytes_used.sub(len);
        }
        Ok(())
    }

    /// Ends all writing when a count failed.
    fn counted<T>(&self, outcome: Result<T>) -> Result<T> {
        outcome.inspect_err(|error| self.stop.set(&error.to_string()))
    }

    /// The ledger of this kind of space.
    fn ledger(&self, purpose: Purpose) -> &Ledger {
        match purpose {
            Purpose::Data if !self.is_mixed => &self.ledgers[0],
            Purpose::Data | Purpose::Metadata => &self.ledgers[1],
            Purpose::System => &self.ledgers[2],
        }
    }

    /// Whether what is kept of metadata is kept of this kind of space.
    fn counts_as_metadata(&self, purpose: Purpose) -> bool {
        match purpose {
            Purpose::Data => self.is_mixed,
            Purpose::Metadata => true,
            Purpose::System => false,
        }
    }

    /// The block groups of the type for `purpose`, whatever their profile.
    fn groups_for(&self, purpose: Purpose) -> Vec<Arc<BlockGroup>> {
        let types = profile::types_for(purpose, self.is_mixed);
        self.groups.read().values().filter(|group| group.serves(types)).cloned().collect()
    }

    /// The flags of a new chunk for `purpose`.
    fn flags_for(&self, purpose: Purpose) -> BlockGroupFlags {
        self.taken_from[match purpose {
            Purpose::Data => 0,
            Purpose::Metadata => 1,
            Purpose::System => 2,
        }]
    }

    /// Whether space for `purpose` is taken from `group`: it has the type and the profile of a new
    /// chunk.
    fn may_take(&self, purpose: Purpose, group: &BlockGroup) -> bool {
        group.serves(self.flags_for(purpose).0)
    }

    /// Whether only the profile of `group` is why nothing is taken from it.
    fn is_of_other_profile(&self, group: &BlockGroup) -> bool {
        let has_type = |purpose| group.serves(profile::types_for(purpose, self.is_mixed));
        Purpose::ALL.into_iter().any(has_type) && self.ledger_of(group).is_none()
    }

    /// The ledger that counts what is free in `group`: none, where nothing is allocated from it.
    fn ledger_of(&self, group: &BlockGroup) -> Option<&Ledger> {
        let purpose = Purpose::ALL.into_iter().find(|&purpose| self.may_take(purpose, group))?;
        Some(self.ledger(purpose))
    }

    /// Finds out what is free in `group`, unless that is known.
    pub(crate) fn load(&self, volume: &Engine, group: &BlockGroup) -> Result<()> {
        group.load(volume, |free| self.count_free(group, free)).map(drop)
    }

    /// Counts so much more that can be taken of `group`.
    fn count_free(&self, group: &BlockGroup, bytes: u64) {
        if let Some(ledger) = self.ledger_of(group) {
            ledger.add_free(bytes);
        }
    }

    /// Finds out what is free in one more block group for `purpose`; whether there was one.
    fn load_one(&self, volume: &Engine, purpose: Purpose) -> Result<bool> {
        let unknown = {
            let groups = self.groups.read();
            let is_unknown = |g: &&Arc<BlockGroup>| {
                self.may_take(purpose, g) && !g.is_loaded() && !g.is_retired()
            };
            groups.values().find(is_unknown).cloned()
        };
        unknown.map(|group| self.load(volume, &group)).transpose().map(|found| found.is_some())
    }

    /// The bytes of all block groups that space for `purpose` is taken from, and what of them is
    /// free.
    fn totals(&self, purpose: Purpose) -> (u64, u64) {
        let groups = self.groups.read();
        let groups = groups.values().filter(|group| self.may_take(purpose, group));
        groups.fold((0, 0), |(all, free), group| (all + group.len, free + group.free_bytes()))
    }

    /// Whether there are no more block groups with the flags of `group`.
    fn is_last_of_its_kind(&self, group: &BlockGroup) -> bool {
        let groups = self.groups.read();
        groups.values().filter(|other| other.flags == group.flags).take(2).count() < 2
    }

    /// Adds a block group of a chunk that was allocated.
    fn add_group(&self, volume: &Engine, group: BlockGroup) -> Result<()> {
        let group = Arc::new(group);
        self.groups.write().insert(group.start.0, group.clone());
        self.load(volume, &group)
    }

    /// Forgets a block group that was retired.
    fn remove_group(&self, group: &BlockGroup) {
        self.groups.write().remove(&group.start.0);
    }

    /// Block groups that hold nothing.
    fn empty_groups(&self) -> Vec<Arc<BlockGroup>> {
        let groups = self.groups.read();
        let mut empty: Vec<_> = groups.values().filter(|g| g.is_empty()).cloned().collect();
        // The last ones first, so that the logical space stays dense.
        empty.reverse();
        empty
    }

    /// Lets nobody allocate from `group` any more, when it is empty, not the last of its kind, and
    /// `keep` bytes of the kind stay free without it; says whether that is so. One that nothing is
    /// taken from because of its profile may be the last.
    fn retire(&self, group: &BlockGroup, keep: u64) -> bool {
        let is_last = self.is_last_of_its_kind(group) && !self.is_of_other_profile(group);
        // What is for trees is needed at once; a data chunk is as easily allocated again.
        let keep = if group.flags.has_metadata() { keep } else { 0 };
        !is_last
            && match self.ledger_of(group) {
                Some(ledger) => ledger.withdraw(group.known_usable(), keep, || group.retire()),
                None => group.retire().is_some(),
            }
    }

    /// What of every member belongs to chunks, in bytes.
    pub(crate) fn allocated(&self) -> Vec<u64> {
        self.allocated.of_members()
    }

    /// Whether a chunk of metadata is a cheap way to more room: there is place for one, and most of
    /// the members belongs to none, and a GiB at least.
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

    /// Notes that a tree is to share blocks with a snapshot, until it does or that comes to
    /// nothing: more is kept back from then on, which has to be there before the snapshot is.
    pub(crate) fn expect_sharing(&self) -> Sharing<'_> {
        self.sharing.add(1);
        Sharing { reasons: &self.sharing }
    }

    /// Notes the level that the root of a tree has.
    pub(crate) fn note_level(&self, level: u8) {
        if level > self.tallest() {
            self.tallest.fetch_max(level, Ordering::Relaxed);
        }
    }

    /// What all extents take, in bytes.
    pub(crate) fn bytes_used(&self) -> u64 {
        self.bytes_used.get()
    }
}
