//! Looking up extents before writers are stopped.
//!
//! A commit runs the delayed references while writers are stopped. For each extent it needs the
//! item of the extent, and often leaves of other trees, which may be on the devices only. So before
//! it stops writers, it looks up the extents that have changes by then, on all cores, and reads
//! what running their references will read.
//!
//! Nothing is changed here, and no handle is held. An item of an extent changes only when
//! references run, and a thread that looks here has locked commits. So an item that was found here
//! is still the same when references begin to run. If this thread cannot read a block, the run
//! meets the same error in its place.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use foldhash::fast::RandomState;
use offshoot_btrfs_format::superblock::CompatRo;
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId, key::objectid};
use offshoot_vfs::Result;

use super::verify::{KnownExtent, look_up};
use crate::cores;
use crate::transaction::refs::{ExtentKind, ExtentToLookUp, PendingRefs};
use crate::transaction::{Base, LiveVolume};
use crate::tree::Cursor;

/// The most extents that are kept for a commit.
const MOST: usize = 65_536;

/// An extent with more inline owners is not kept, because it takes more memory than others.
const OWNERS: usize = 4;

/// The extents that a thread looks up at a time. They are neighbours, so threads rarely read the
/// same leaf.
const RUN: usize = 256;

/// The items of extents that were looked up, by address.
#[derive(Default)]
pub(in crate::transaction) struct PlannedReferences(HashMap<u64, PlannedExtent, RandomState>);

struct PlannedExtent {
    len: u64,
    kind: ExtentKind,
    known: KnownExtent,
}

impl PlannedReferences {
    /// Takes the item of the extent at `at`, if it was looked up as the extent of `pending`.
    pub(super) fn take(&mut self, at: Logical, pending: &PendingRefs) -> Option<KnownExtent> {
        let planned = self.0.remove(&at.0)?;
        let is_same = (planned.len, planned.kind) == (pending.len, pending.kind);
        (is_same && !pending.is_new).then_some(planned.known)
    }
}

impl Base {
    /// Looks up the extents that the running transaction changes. The caller has locked commits.
    pub(in crate::transaction) fn plan_references(&self, live: &LiveVolume) -> PlannedReferences {
        let mut planned = PlannedReferences::default();
        // The second round looks up the extents that other threads queued during the first one.
        if self.plan_more(live, &mut planned, MOST, true) {
            self.plan_more(live, &mut planned, MOST, false);
        }
        planned
    }

    /// Looks up extents that are not in `planned`, until it has `most`. Extents that are new are
    /// only looked up `with_new`. Returns false when there are so few that it looked up none.
    fn plan_more(
        &self,
        live: &LiveVolume,
        planned: &mut PlannedReferences,
        most: usize,
        with_new: bool,
    ) -> bool {
        let transaction = live.phases.read().running.clone();
        let is_wanted =
            |one: &ExtentToLookUp| (with_new || !one.is_new) && !planned.0.contains_key(&one.at.0);
        let wanted = transaction.refs.to_look_up(most - planned.0.len(), is_wanted);
        if wanted.len() < live.plans_from {
            return false;
        }
        let found = self.look_up_all(live, &wanted);
        live.stats.planned_references(found.len());
        planned.0.extend(found);
        true
    }

    fn look_up_all(
        &self,
        live: &LiveVolume,
        wanted: &[ExtentToLookUp],
    ) -> Vec<(u64, PlannedExtent)> {
        let next = AtomicUsize::new(0);
        let work = || {
            let mut found = Vec::new();
            loop {
                let from = next.fetch_add(RUN, Ordering::Relaxed).min(wanted.len());
                let run = &wanted[from..wanted.len().min(from + RUN)];
                if run.is_empty() {
                    return found;
                }
                let mut ahead = LookAhead::new(self, live);
                found.extend(run.iter().filter_map(|one| ahead.look_up(one)));
            }
        };
        let threads = cores::count().min(wanted.len().div_ceil(RUN));
        thread::scope(|scope| {
            // If a thread cannot be started, those that exist do all the work.
            let others: Vec<_> = (1..threads)
                .map_while(|_| {
                    let builder = thread::Builder::new().name("ahead".to_owned());
                    let work = || {
                        cores::use_all();
                        work()
                    };
                    builder.spawn_scoped(scope, work).ok()
                })
                .collect();
            let mut found = work();
            for other in others {
                match other.join() {
                    Ok(more) => found.extend(more),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            found
        })
    }
}

/// The trees that running references reads, each at the leaf that was read last.
struct LookAhead<'v> {
    base: &'v Base,
    live: &'v LiveVolume,
    extents: LeafReader<'v>,
    checksums: LeafReader<'v>,
    /// `None` in a volume without a free-space tree.
    free_space: Option<LeafReader<'v>>,
}

/// Reads leaves of a tree into the cache.
struct LeafReader<'v> {
    tree: TreeId,
    cursor: Option<Cursor<'v>>,
}

impl<'v> LeafReader<'v> {
    fn new(tree: TreeId) -> Self {
        Self { tree, cursor: None }
    }

    /// Reads the leaf where `key` belongs.
    fn read(&mut self, base: &'v Base, key: Key) -> Result<()> {
        if !self.cursor.as_ref().is_some_and(|cursor| cursor.is_in_leaf(key)) {
            self.cursor = Some(Cursor::seek_floor(base, base.tree(self.tree)?, key)?);
        }
        Ok(())
    }
}

impl<'v> LookAhead<'v> {
    fn new(base: &'v Base, live: &'v LiveVolume) -> Self {
        let has_free_space = base.superblock().compat_ro.has(CompatRo::FREE_SPACE_TREE);
        Self {
            base,
            live,
            extents: LeafReader::new(TreeId::EXTENT),
            checksums: LeafReader::new(TreeId::CSUM),
            free_space: has_free_space.then(|| LeafReader::new(TreeId::FREE_SPACE)),
        }
    }

    /// Reads what running the references of an extent reads. Returns the item of the extent, if it
    /// has one with few owners.
    fn look_up(&mut self, one: &ExtentToLookUp) -> Option<(u64, PlannedExtent)> {
        let &ExtentToLookUp { at, len, kind, is_new, net } = one;
        if is_new {
            self.read_around(at).ok()?;
            return None;
        }
        let known = look_up(self.base, at, len, kind).ok()?;
        if known.record.refs.checked_add_signed(net) == Some(0) {
            // The run meets an error again, and then it counts.
            let _ = self.read_what_frees(at, kind);
        }
        let is_small = known.record.inline.len() <= OWNERS;
        is_small.then_some((at.0, PlannedExtent { len, kind, known }))
    }

    /// Reads the leaves that get the new extent at `at`.
    fn read_around(&mut self, at: Logical) -> Result<()> {
        self.extents.read(self.base, Key::new(at.0, ItemType::METADATA_ITEM, 0))?;
        self.read_free_space(at)
    }

    /// Reads the leaf that has or gets the free space around `at`.
    fn read_free_space(&mut self, at: Logical) -> Result<()> {
        let free = Key::new(at.0, ItemType::FREE_SPACE_EXTENT, u64::MAX);
        self.free_space.as_mut().map_or(Ok(()), |tree| tree.read(self.base, free))
    }

    /// Reads what freeing the extent at `at` reads.
    fn read_what_frees(&mut self, at: Logical, kind: ExtentKind) -> Result<()> {
        self.live.space.load(self.base, &*self.live.space.group_of(at)?)?;
        self.read_free_space(at)?;
        if kind == ExtentKind::Data {
            let sums = Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, at.0);
            self.checksums.read(self.base, sums)?;
        }
        Ok(())
    }
}
