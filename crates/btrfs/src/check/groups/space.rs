//! The space of block groups: extents in the order of their addresses, group by group.
//!
//! A group is compared with its item (used bytes), with the kind of its extents, and with the space
//! that is listed as free. Extents without an extent item take their space too, so that one lost
//! item is one finding.

use std::ops::Range;

use offshoot_btrfs_format::Logical;
use offshoot_btrfs_format::chunk::{BlockGroupFlags, Chunk};

use super::super::finding::{BtrfsFindingCode, BtrfsFindingPlace};
use super::super::volume::CheckedVolume;
use super::cache::SpaceCacheCheck;
use super::free_space::FreeSpaceCheck;
use super::items::GroupItem;
use super::references::UsedExtent;

/// A block group of a partition: its chunk, and what its item counts as used.
pub(super) struct CheckedGroup {
    pub(super) range: Range<u64>,
    pub(super) flags: BlockGroupFlags,
    /// `None` when it has no usable item.
    pub(super) used: Option<u64>,
}

impl CheckedGroup {
    pub(super) fn new(chunk: &Chunk, item: Option<GroupItem>) -> Self {
        Self {
            range: chunk.start.0..chunk.end().0,
            flags: chunk.flags,
            used: item.map(|item| item.used),
        }
    }
}

/// Where a volume keeps what is free.
pub(super) enum FreeSpaceRecord<'v> {
    /// In the free-space tree.
    Tree(Box<FreeSpaceCheck<'v>>),
    /// In space caches (version 1).
    Cache(SpaceCacheCheck<'v>),
}

impl FreeSpaceRecord<'_> {
    /// Begins a block group, with the ranges of it that are never allocated.
    fn begin(&mut self, group: Range<u64>, left_out: Vec<Range<u64>>) {
        match self {
            Self::Tree(check) => check.begin(group, left_out),
            Self::Cache(check) => check.begin(group, left_out),
        }
    }

    /// Compares a range that no extent of the group has. The ranges ascend.
    fn expect(&mut self, range: Range<u64>) {
        match self {
            Self::Tree(check) => check.expect(range),
            Self::Cache(check) => check.expect(range),
        }
    }

    /// Passes over a range of which it is not known what is free.
    fn skip(&mut self, range: Range<u64>) {
        match self {
            Self::Tree(check) => check.skip(range),
            Self::Cache(check) => check.skip(),
        }
    }

    /// Ends the group.
    fn finish(&mut self) {
        match self {
            Self::Tree(check) => check.finish(),
            Self::Cache(check) => check.finish(),
        }
    }
}

/// Sums over block groups.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SpaceTotals {
    /// The bytes of all extents.
    pub(super) used: u64,
    /// Whether some of it is not known or contradicts itself.
    pub(super) is_uncertain: bool,
}

/// Goes through block groups.
pub(super) struct SpaceCheck<'v> {
    volume: &'v CheckedVolume<'v>,
    groups: std::vec::IntoIter<CheckedGroup>,
    current: Option<CurrentGroup>,
    free: Option<FreeSpaceRecord<'v>>,
    /// The last extent so far by its end.
    last: Range<u64>,
    /// Extents outside of the groups since the last group: the first, and how many.
    outside: Option<(u64, u64)>,
    pub(super) totals: SpaceTotals,
}

struct CurrentGroup {
    group: CheckedGroup,
    left_out: Vec<Range<u64>>,
    /// The end of the extents so far.
    at: u64,
    used: u64,
    is_uncertain: bool,
}

impl<'v> SpaceCheck<'v> {
    pub(super) fn new(
        volume: &'v CheckedVolume<'v>,
        groups: Vec<CheckedGroup>,
        free: Option<FreeSpaceRecord<'v>>,
    ) -> Self {
        Self {
            volume,
            groups: groups.into_iter(),
            current: None,
            free,
            last: 0..0,
            outside: None,
            totals: SpaceTotals::default(),
        }
    }

    /// Adds an extent. Their starts ascend. `has_item` tells whether it has an extent item.
    pub(super) fn add(&mut self, start: u64, extent: UsedExtent, has_item: bool) {
        let range = start..start.saturating_add(extent.len);
        self.go_to(start);
        if range.start < self.last.end {
            let Range { start: before, end } = self.last;
            let problem = format!("it begins within the extent from {before} to {end}");
            self.report(BtrfsFindingCode::ExtentOverlap, start, problem);
            self.totals.is_uncertain = true;
            if let Some(current) = &mut self.current {
                current.is_uncertain = true;
            }
        }
        if range.end > self.last.end {
            self.last = range.clone();
        }
        self.totals.used = self.totals.used.saturating_add(extent.len);
        let Some(current) = &mut self.current else {
            self.totals.is_uncertain = true;
            if has_item {
                let (first, count) = self.outside.unwrap_or((start, 0));
                self.outside = Some((first, count + 1));
            }
            return;
        };
        current.used = current.used.saturating_add(extent.len);
        if current.at < range.start
            && let Some(free) = &mut self.free
        {
            free.expect(current.at..range.start);
        }
        current.at = current.at.max(range.end.min(current.group.range.end));
        if has_item {
            self.check_place(range, extent);
        }
    }

    /// Checks that an extent is where it may be.
    fn check_place(&self, range: Range<u64>, extent: UsedExtent) {
        let Some(CurrentGroup { group, left_out, .. }) = &self.current else { return };
        let code = BtrfsFindingCode::ExtentPlace;
        if range.end > group.range.end {
            let end = group.range.end;
            let problem = format!("it ends at {}, and its block group at {end}", range.end);
            return self.report(code, range.start, problem);
        }
        let flags = group.flags;
        let (is_right, name) = match extent.is_of_chunk_tree {
            _ if extent.is_data => (flags.has_data(), "data"),
            Some(true) => (flags.0 & BlockGroupFlags::SYSTEM != 0, "a block of the chunk tree"),
            Some(false) => (flags.0 & BlockGroupFlags::METADATA != 0, "a tree block"),
            None => (flags.has_metadata(), "a tree block"),
        };
        if !is_right {
            let kind = flags.kind();
            self.report(code, range.start, format!("{name} in a block group for {kind}"));
        }
        let covered = left_out.iter().find(|out| out.start < range.end && out.end > range.start);
        if let Some(out) = covered {
            let problem = format!("superblocks have the bytes from {} to {}", out.start, out.end);
            self.report(code, range.start, problem);
        }
    }

    /// Adds a range of which it is not known what extents have.
    pub(super) fn add_unknown(&mut self, range: Range<u64>) {
        self.totals.is_uncertain = true;
        self.go_to(range.start);
        loop {
            if let Some(current) = &mut self.current {
                current.is_uncertain = true;
                let own = range.start.max(current.at)..range.end.min(current.group.range.end);
                if let Some(free) = self.free.as_mut().filter(|_| current.at < own.end) {
                    if current.at < own.start {
                        free.expect(current.at..own.start);
                    }
                    free.skip(own.clone());
                }
                current.at = current.at.max(own.end);
                if current.group.range.end > range.end {
                    return;
                }
            }
            self.finish_group();
            if self.groups.as_slice().first().is_none_or(|group| group.range.start >= range.end) {
                return;
            }
            self.begin_group();
        }
    }

    /// Ends all groups.
    pub(super) fn finish(&mut self) {
        self.go_to(u64::MAX);
        self.tell_outside();
        if let Some(FreeSpaceRecord::Tree(free)) = &mut self.free {
            free.finish_all(self.volume.storage.end_of_chunks());
        }
    }

    /// Makes the group with the address `at` the current one, and ends those before it.
    fn go_to(&mut self, at: u64) {
        loop {
            if let Some(current) = &self.current {
                if current.group.range.end > at {
                    return;
                }
                self.finish_group();
            }
            if self.groups.as_slice().first().is_none_or(|group| group.range.start > at) {
                return;
            }
            self.begin_group();
        }
    }

    fn begin_group(&mut self) {
        let Some(group) = self.groups.next() else { return };
        self.tell_outside();
        let left_out = self.volume.storage.left_out_ranges(Logical(group.range.start));
        if let Some(free) = &mut self.free {
            free.begin(group.range.clone(), left_out.clone());
        }
        let at = group.range.start;
        self.current = Some(CurrentGroup { group, left_out, at, used: 0, is_uncertain: false });
    }

    fn finish_group(&mut self) {
        let Some(current) = self.current.take() else { return };
        let CurrentGroup { group, at, used, is_uncertain, .. } = current;
        if let Some(free) = &mut self.free {
            if at < group.range.end {
                free.expect(at..group.range.end);
            }
            free.finish();
        }
        if let Some(counted) = group.used.filter(|&counted| counted != used && !is_uncertain) {
            let place = BtrfsFindingPlace::Logical(Logical(group.range.start));
            let (code, what) = (BtrfsFindingCode::BlockGroupUsed, "bytes used in the block group");
            self.volume.findings.differs(code, place, what, used, counted);
        }
    }

    fn tell_outside(&mut self) {
        if let Some((first, count)) = self.outside.take() {
            let problem = match count {
                1 => "it lies outside of the block groups".to_owned(),
                _ => format!("{count} extents from there on lie outside of the block groups"),
            };
            self.report(BtrfsFindingCode::ExtentPlace, first, problem);
        }
    }

    fn report(&self, code: BtrfsFindingCode, at: u64, problem: impl Into<String>) {
        self.volume.findings.add(code, BtrfsFindingPlace::Logical(Logical(at)), problem);
    }
}
