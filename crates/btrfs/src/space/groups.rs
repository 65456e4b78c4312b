//! All block groups of a volume, and what is known of them by kind.
//!
//! A *kind* is all block groups with the same flags. For each kind there are sums, and sets of the
//! groups that a caller may look for. So nothing that is done for a write, a commit or a chunk
//! walks all block groups.
//!
//! A change of a group that the sums or the sets depend on is noted in one place,
//! [`BlockGroup::change`], under the lock of the group. The lock of the kind is taken inside it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use offshoot_btrfs_format::Logical;
use offshoot_btrfs_format::chunk::BlockGroupFlags;
use parking_lot::Mutex;

use super::block_group::{BlockGroup, StoredGroup};
use super::free_space::ranked_from;
use super::looked::look;

/// What the sums and sets of a kind have of one block group. All is zero for a group that does not
/// belong to the volume, or no longer does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GroupFacts {
    pub(super) sums: GroupSums,
    /// The highest rank of its free ranges (`free_space`); 0 when nothing can be taken.
    pub(super) best_rank: u64,
    /// Its free ranges are not loaded, and may be.
    pub(super) may_load: bool,
    /// Nothing in it is used, and it is not being removed.
    pub(super) is_empty: bool,
    /// Its item has an old value of `used`.
    pub(super) is_changed: bool,
}

/// Sums over block groups, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GroupSums {
    /// The number of groups.
    pub(super) groups: u64,
    pub(super) len: u64,
    pub(super) used: u64,
    /// Taken and not used yet, or pinned.
    pub(super) between: u64,
    /// Neither used nor taken nor pinned. In a group that is not loaded this includes what can
    /// never be taken.
    pub(super) free: u64,
    /// The part of `free` in groups that are not loaded.
    pub(super) unknown: u64,
}

impl GroupSums {
    /// The bytes that are not in use.
    pub(super) fn unused(&self) -> u64 {
        self.len.saturating_sub(self.used).saturating_sub(self.between)
    }

    /// Replaces the share of one group. A damaged item may claim any number of bytes, so a sum may
    /// wrap. It is right again when that group is gone.
    fn replace(&mut self, before: &Self, after: &Self) {
        let replaced = |sum: u64, less: u64, more| sum.wrapping_sub(less).wrapping_add(more);
        *self = Self {
            groups: replaced(self.groups, before.groups, after.groups),
            len: replaced(self.len, before.len, after.len),
            used: replaced(self.used, before.used, after.used),
            between: replaced(self.between, before.between, after.between),
            free: replaced(self.free, before.free, after.free),
            unknown: replaced(self.unknown, before.unknown, after.unknown),
        };
    }
}

/// The block groups with the same flags.
#[derive(Debug)]
pub(super) struct GroupKind {
    pub(super) flags: BlockGroupFlags,
    index: Mutex<KindIndex>,
}

/// Sums over the groups of a kind, and sets of them by address.
#[derive(Debug, Default, PartialEq, Eq)]
struct KindIndex {
    sums: GroupSums,
    /// The groups that have something to take, by the highest rank of their free ranges.
    by_rank: BTreeSet<(u64, u64)>,
    may_load: BTreeSet<u64>,
    empty: BTreeSet<u64>,
    changed: BTreeSet<u64>,
}

impl KindIndex {
    fn note(&mut self, start: u64, before: &GroupFacts, after: &GroupFacts) {
        self.sums.replace(&before.sums, &after.sums);
        for (set, was_in, is_in) in [
            (&mut self.may_load, before.may_load, after.may_load),
            (&mut self.empty, before.is_empty, after.is_empty),
            (&mut self.changed, before.is_changed, after.is_changed),
        ] {
            if is_in && !was_in {
                set.insert(start);
            } else if was_in && !is_in {
                set.remove(&start);
            }
        }
        if before.best_rank != after.best_rank {
            self.by_rank.remove(&(before.best_rank, start));
            if after.best_rank > 0 {
                self.by_rank.insert((after.best_rank, start));
            }
        }
    }
}

impl GroupKind {
    /// A kind without groups.
    pub(super) fn new(flags: BlockGroupFlags) -> Self {
        Self { flags, index: Mutex::default() }
    }

    /// Notes a change of the group at `start`, whose lock the caller holds.
    pub(super) fn note(&self, start: Logical, before: &GroupFacts, after: &GroupFacts) {
        if before != after {
            self.index.lock().note(start.0, before, after);
        }
    }

    pub(super) fn sums(&self) -> GroupSums {
        self.index.lock().sums
    }

    /// Whether tree blocks alone are in groups of this kind.
    pub(super) fn has_blocks(&self) -> bool {
        !self.flags.has_data()
    }

    /// A group with a free range of the rank `least` or more, which is not in `tried`: the first
    /// one in the order of the index.
    pub(super) fn with_rank(&self, least: u64, from: u64, tried: &[u64]) -> Option<u64> {
        let index = self.index.lock();
        let mut found = ranked_from(&index.by_rank, least, from).map(|(_, start)| start);
        found.find(|start| !tried.contains(start))
    }

    /// The highest rank of a free range, and the group that has it.
    pub(super) fn highest_rank(&self) -> Option<(u64, u64)> {
        look();
        self.index.lock().by_rank.last().copied()
    }

    /// A group whose free ranges are not loaded.
    pub(super) fn to_load(&self) -> Option<u64> {
        self.index.lock().may_load.first().copied()
    }
}

/// All block groups of a volume.
#[derive(Debug, Default)]
pub(super) struct BlockGroups {
    by_start: BTreeMap<u64, Arc<BlockGroup>>,
    /// One for every value of the flags that groups have, or had.
    kinds: Vec<Arc<GroupKind>>,
}

impl BlockGroups {
    pub(super) fn add(&mut self, stored: StoredGroup) -> Arc<BlockGroup> {
        let kind = self.kinds.iter().find(|kind| kind.flags == stored.flags).cloned();
        let kind = kind.unwrap_or_else(|| {
            let new = Arc::new(GroupKind::new(stored.flags));
            self.kinds.push(new.clone());
            new
        });
        let group = Arc::new(BlockGroup::new(stored, kind));
        group.set_listed(true);
        self.by_start.insert(group.start.0, group.clone());
        group
    }

    pub(super) fn remove(&mut self, start: Logical) {
        if let Some(group) = self.by_start.remove(&start.0) {
            group.set_listed(false);
        }
    }

    /// Makes the group at `start` end at its limit, after `len` bytes.
    pub(super) fn shorten(&mut self, start: Logical, len: u64) {
        if let Some(group) = self.by_start.get(&start.0) {
            let short = Arc::new(group.shortened(len));
            short.set_listed(true);
            self.by_start.insert(start.0, short);
        }
    }

    /// The group that begins at `start`.
    pub(super) fn at(&self, start: u64) -> Option<&Arc<BlockGroup>> {
        self.by_start.get(&start)
    }

    /// The group that covers `logical`.
    pub(super) fn covering(&self, logical: Logical) -> Option<&Arc<BlockGroup>> {
        let (_, group) = self.by_start.range(..=logical.0).next_back()?;
        group.contains(logical).then_some(group)
    }

    /// The groups that overlap `range`, the last one first.
    pub(super) fn overlapping(&self, range: &Range<u64>) -> impl Iterator<Item = &Arc<BlockGroup>> {
        let start = range.start;
        let below = self.by_start.range(..range.end).rev().map(|(_, group)| group);
        below.take_while(move |group| group.end() > start).inspect(|_| look())
    }

    /// The kinds that have all of `flags`.
    pub(super) fn kinds_with(&self, flags: u64) -> impl Iterator<Item = &Arc<GroupKind>> {
        self.kinds.iter().filter(move |kind| kind.flags.0 & flags == flags)
    }

    /// How many groups have exactly these flags.
    pub(super) fn count_of(&self, flags: BlockGroupFlags) -> u64 {
        let kind = self.kinds.iter().find(|kind| kind.flags == flags);
        kind.map_or(0, |kind| kind.sums().groups)
    }

    /// The groups whose items have an old value of `used`, by address.
    pub(super) fn changed(&self) -> Vec<Arc<BlockGroup>> {
        self.listed(|index| &index.changed)
    }

    /// The groups in which nothing is used, by address.
    pub(super) fn empty(&self) -> Vec<Arc<BlockGroup>> {
        self.listed(|index| &index.empty)
    }

    fn listed(&self, set: impl Fn(&KindIndex) -> &BTreeSet<u64>) -> Vec<Arc<BlockGroup>> {
        let mut all: Vec<_> = Vec::new();
        for kind in &self.kinds {
            let index = kind.index.lock();
            let groups = set(&index).iter().filter_map(|start| self.at(*start));
            all.extend(groups.inspect(|_| look()).cloned());
        }
        all.sort_unstable_by_key(|group| group.start);
        all
    }

    /// Checks the sums and sets against a recount. No other thread may change a group meanwhile.
    #[cfg(test)]
    pub(super) fn recount(&self) {
        for kind in &self.kinds {
            let mut index = KindIndex::default();
            for group in self.by_start.values().filter(|group| group.flags == kind.flags) {
                index.note(group.start.0, &GroupFacts::default(), &group.facts());
            }
            assert_eq!(*kind.index.lock(), index, "{:?}", kind.flags);
        }
    }
}
