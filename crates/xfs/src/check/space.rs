//! The owners of the blocks of a group: free space, owners, reverse map and reference counts agree.
//!
//! The mappings of files lie anywhere, so each pass over all inodes gathers those of a range of
//! groups, as many as [`SpaceGather::MOST_RUNS`] have room for. A pass begins with all groups that
//! are left. When there are too many mappings, it forgets those of the last group, which the next
//! pass gathers.

use offshoot_kit::sync::Mutex;
use offshoot_kit::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::record::{
    XfsFreeExtent, XfsOwner, XfsReverseFlags, XfsReverseMap, XfsSharedExtent,
};
use offshoot_xfs_format::{AgBlock, AgNumber};

use super::finding::XfsFindingCode as Code;
use super::group::GroupSpace;
use super::whole::VolumeCheck;

/// Blocks with an owner, as the reverse map has them. 24 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct OwnedRun {
    owner: u64,
    /// The flags, and the offset in the fork of the owner.
    offset: u64,
    start: u32,
    count: u32,
}

/// Blocks that several mappings share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SharedRun {
    start: u32,
    count: u32,
    references: u32,
}

impl OwnedRun {
    pub(super) fn of(owner: XfsOwner, start: u32, count: u32) -> Self {
        Self { owner: owner.number(), offset: 0, start, count }
    }

    /// A mapping of a file, or a block of its tree of extents.
    pub(super) fn of_file(ino: u64, offset: u64, start: u32, count: u32) -> Self {
        Self { owner: ino, offset, start, count }
    }

    fn end(&self) -> u32 {
        self.start.saturating_add(self.count)
    }

    fn flags(&self) -> XfsReverseFlags {
        XfsReverseFlags::from_bits_truncate(self.offset)
    }

    fn is_of_file(&self) -> bool {
        self.owner.cast_signed() >= 0 && !self.flags().contains(XfsReverseFlags::TREE_BLOCK)
    }

    /// Whether other files may share the blocks.
    fn may_share(&self) -> bool {
        self.is_of_file() && !self.flags().contains(XfsReverseFlags::ATTRIBUTES)
    }

    /// Adds the run that follows in the order of runs, if they are one.
    fn join(&mut self, next: &Self) -> bool {
        let offset = if self.is_of_file() {
            self.offset.saturating_add(self.count.into())
        } else {
            self.offset
        };
        let follows = next.owner == self.owner && next.offset == offset && next.start == self.end();
        let count = self.count.checked_add(next.count).filter(|_| follows);
        self.count = count.unwrap_or(self.count);
        count.is_some()
    }

    fn text(&self) -> String {
        let (start, count, offset) = (self.start, self.count, self.offset);
        let owner = match XfsOwner::from_number(self.owner) {
            Some(XfsOwner::File(ino)) => format!("inode {ino} at {offset:#x}"),
            Some(owner) => format!("{owner:?}"),
            None => format!("owner {}", self.owner.cast_signed()),
        };
        format!("{count} blocks from {start} of {owner}")
    }
}

impl From<&XfsReverseMap> for OwnedRun {
    fn from(record: &XfsReverseMap) -> Self {
        Self {
            owner: record.owner.get(),
            offset: record.offset.get(),
            start: record.start.get(),
            count: record.count.get(),
        }
    }
}

impl From<&XfsSharedExtent> for SharedRun {
    fn from(record: &XfsSharedExtent) -> Self {
        let (count, references) = (record.count.get(), record.references.get());
        Self { start: record.block().0, count, references }
    }
}

impl SharedRun {
    fn join(&mut self, next: &Self) -> bool {
        let end = self.start.saturating_add(self.count);
        let follows = next.start == end && next.references == self.references;
        self.count = self.count.saturating_add(if follows { next.count } else { 0 });
        follows
    }
}

/// Sorts runs, and joins those that are one.
fn normal<R: Ord + Copy>(mut runs: Vec<R>, join: fn(&mut R, &R) -> bool) -> Vec<R> {
    runs.sort_unstable();
    runs.dedup_by(|next, before| join(before, next));
    runs
}

/// Calls `differs` with each run that only one of two sorted lists has, and whether that is the
/// first one.
fn differences<R: Ord + Copy>(one: &[R], other: &[R], differs: &mut dyn FnMut(&R, bool)) {
    let (mut one, mut other) = (one.iter().peekable(), other.iter().peekable());
    loop {
        match (one.peek(), other.peek()) {
            (Some(a), Some(b)) if a == b => {
                one.next();
                other.next();
            }
            (Some(a), b) if b.is_none_or(|b| a < b) => {
                differs(a, true);
                one.next();
            }
            (_, Some(b)) => {
                differs(b, false);
                other.next();
            }
            (_, None) => return,
        }
    }
}

/// The mappings of files in a range of groups.
pub(super) struct SpaceGather {
    first: u32,
    /// The group behind the last one that is still gathered.
    end: AtomicU32,
    count: AtomicUsize,
    groups: Vec<Mutex<Vec<OwnedRun>>>,
    most_runs: usize,
}

impl SpaceGather {
    /// The mappings that are kept, unless one group alone has more: 256 MiB.
    pub(super) const MOST_RUNS: usize = (256 << 20) / size_of::<OwnedRun>();

    /// Gathers the groups from `first` on, before `end`.
    pub(super) fn new(first: u32, end: u32, most_runs: usize) -> Self {
        let groups = (first..end).map(|_| Mutex::default()).collect();
        Self { first, end: AtomicU32::new(end), count: AtomicUsize::new(0), groups, most_runs }
    }

    fn list(&self, ag: u32) -> Option<&Mutex<Vec<OwnedRun>>> {
        self.groups.get(usize::try_from(ag.checked_sub(self.first)?).ok()?)
    }

    /// Adds mappings of groups. Takes them out of `runs`.
    pub(super) fn add(&self, runs: &mut Vec<(AgNumber, OwnedRun)>) {
        for (ag, run) in runs.drain(..) {
            let Some(list) = self.list(ag.0) else { continue };
            let mut list = list.lock();
            // A group is forgotten under its lock.
            if ag.0 < self.end() {
                list.push(run);
                self.count.fetch_add(1, Ordering::Relaxed);
            }
        }
        while self.count.load(Ordering::Relaxed) > self.most_runs && self.forget_last() {}
    }

    /// Forgets the last group. `false` when only one is left.
    fn forget_last(&self) -> bool {
        let end = self.end();
        let ag = end.saturating_sub(1);
        let Some(list) = self.list(ag).filter(|_| ag > self.first) else { return false };
        let mut runs = list.lock();
        if self.end.compare_exchange(end, ag, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.count.fetch_sub(runs.len(), Ordering::Relaxed);
            *runs = Vec::new();
        }
        true
    }

    /// The group behind the last one that is gathered.
    pub(super) fn end(&self) -> u32 {
        self.end.load(Ordering::Relaxed)
    }

    /// Takes the mappings of a group.
    pub(super) fn take(&self, ag: AgNumber) -> Vec<OwnedRun> {
        self.list(ag.0).map(|list| std::mem::take(&mut *list.lock())).unwrap_or_default()
    }
}

/// How many owners of each kind the blocks from a place on have.
#[derive(Clone, Copy, Debug, Default)]
struct BlockUse {
    free: i32,
    alone: i32,
    sharing: i32,
}

impl VolumeCheck<'_> {
    /// Compares free space with the owners of all blocks of a group. `mappings` are those of files.
    /// What needs all owners is compared only if all of them are known.
    pub(super) fn check_space(
        &self,
        ag: AgNumber,
        space: GroupSpace,
        mappings: Vec<OwnedRun>,
        are_all_known: bool,
    ) {
        let GroupSpace { free, mut owned, reverse, shared, is_whole } = space;
        let are_all_known = are_all_known && is_whole;
        owned.extend(mappings);
        let found = self.check_uses(ag, &free, &owned, are_all_known);
        if !are_all_known {
            return;
        }
        if let Some(shared) = shared {
            let shared = normal(shared, SharedRun::join);
            differences(&found, &shared, &mut |run, is_found| {
                let SharedRun { start, count, references } = run;
                let which = if is_found { "mappings were found" } else { "are counted" };
                let problem = format!("of {count} blocks from {start}, {references} {which}");
                self.findings.add(Code::ReferenceCount, (ag, AgBlock(*start)), problem);
            });
        }
        if let Some(reverse) = reverse {
            let owned = normal(owned, OwnedRun::join);
            let reverse = normal(reverse, OwnedRun::join);
            differences(&owned, &reverse, &mut |run, is_found| {
                let which = if is_found { "the map does not have" } else { "only the map has" };
                let problem = format!("{which} {}", run.text());
                self.findings.add(Code::ReverseMap, (ag, AgBlock(run.start)), problem);
            });
        }
    }

    /// Checks that each block has one use. Returns the shared ones.
    fn check_uses(
        &self,
        ag: AgNumber,
        free: &[XfsFreeExtent],
        owned: &[OwnedRun],
        are_all_known: bool,
    ) -> Vec<SharedRun> {
        let can_share = self.geometry().layout.contains(XfsLayout::SHARED_BLOCKS);
        let one = BlockUse { free: 1, ..BlockUse::default() };
        let free = free.iter().map(|extent| {
            let start = extent.start.get();
            (start, start.saturating_add(extent.count.get()), one)
        });
        let owned = owned.iter().map(|run| {
            let sharing = i32::from(can_share && run.may_share());
            (run.start, run.end(), BlockUse { free: 0, alone: 1 - sharing, sharing })
        });
        let mut changes: Vec<(u32, BlockUse)> = Vec::new();
        for (start, end, uses) in free.chain(owned) {
            let BlockUse { free, alone, sharing } = uses;
            changes.push((start, uses));
            changes.push((end, BlockUse { free: -free, alone: -alone, sharing: -sharing }));
        }
        changes.push((self.geometry().ag_len(ag), BlockUse::default()));
        changes.sort_unstable_by_key(|(block, _)| *block);
        let mut shared = Vec::new();
        let (mut at, mut now) = (0, BlockUse::default());
        let mut last: Option<(Code, u32, u32)> = None;
        for (block, change) in changes {
            if block > at {
                if now.sharing > 1 && now.alone == 0 && now.free == 0 {
                    let references = now.sharing.unsigned_abs();
                    shared.push(SharedRun { start: at, count: block - at, references });
                }
                let code = fault_of(now).filter(|code| are_all_known || *code != Code::Lost);
                if let Some(code) = code {
                    match &mut last {
                        Some((same, _, end)) if *same == code && *end == at => *end = block,
                        _ => {
                            self.tell_use(ag, last);
                            last = Some((code, at, block));
                        }
                    }
                }
                at = block;
            }
            now.free += change.free;
            now.alone += change.alone;
            now.sharing += change.sharing;
        }
        self.tell_use(ag, last);
        normal(shared, SharedRun::join)
    }

    fn tell_use(&self, ag: AgNumber, fault: Option<(Code, u32, u32)>) {
        if let Some((code, start, end)) = fault {
            let problem = format!("{} blocks", end - start);
            self.findings.add(code, (ag, AgBlock(start)), problem);
        }
    }
}

/// What is wrong with blocks of this use.
fn fault_of(uses: BlockUse) -> Option<Code> {
    let BlockUse { free, alone, sharing } = uses;
    match (free, alone, sharing) {
        (1.., 1.., _) | (1.., _, 1..) => Some(Code::OwnedAndFree),
        (_, 2.., _) | (_, 1.., 1..) | (2.., ..) => Some(Code::OwnedTwice),
        (0, 0, 0) => Some(Code::Lost),
        _ => None,
    }
}
