//! References: what the extent tree knows of an extent against what the trees have.

use std::collections::BTreeSet;

use offshoot_btrfs_format::extent::RefOwner;
use offshoot_btrfs_format::{Logical, TreeId};
use offshoot_vfs::Result;

use super::super::addresses::AddressSet;
use super::super::finding::{BtrfsFindingCode, BtrfsFindingPlace, BtrfsFindings};
use super::super::reference::{ReferenceRecord, ReferenceTarget};
use super::super::sort::SortedRecords;
use super::super::walk::{Walk, WalkedVolume};
use super::extents::{CheckedExtent, CheckedExtentItem, ListedReferences};

/// What the walk could not read: references from there cannot be missed.
pub(super) struct Doubt {
    /// Whether it is not known which blocks have full back references.
    marks: bool,
    /// Whether whole trees may be missing.
    all: bool,
    /// Whether subvolumes have bad blocks. They share blocks with each other.
    subvolumes: bool,
    damaged: BTreeSet<TreeId>,
}

impl Doubt {
    pub(super) fn of(walk: &Walk<'_, '_>, walked: &WalkedVolume) -> Self {
        let damaged = walked.damaged.clone();
        Self {
            marks: !walk.marks.is_whole,
            all: damaged.contains(&TreeId::ROOT),
            subvolumes: damaged.iter().any(|tree| tree.is_fs_like()),
            damaged,
        }
    }

    /// Whether `owner` may be in a block that could not be read.
    fn hides(&self, owner: RefOwner) -> bool {
        let of_tree = |tree: TreeId| {
            if tree.is_fs_like() { self.subvolumes } else { self.damaged.contains(&tree) }
        };
        self.all
            || match owner {
                RefOwner::Tree { root: tree } => of_tree(tree),
                RefOwner::File { root, .. } => of_tree(root),
                RefOwner::Block { .. } | RefOwner::Leaf { .. } => self.subvolumes,
            }
    }

    /// Whether files may use data that no record tells of.
    pub(super) fn hides_files(&self) -> bool {
        self.all || self.subvolumes
    }
}

/// What the trees have of an extent.
#[derive(Clone, Copy, Debug)]
pub(super) struct UsedExtent {
    pub(super) len: u64,
    pub(super) is_data: bool,
    /// Whether the chunk tree has it; `None` when nothing is known to have it.
    pub(super) is_of_chunk_tree: Option<bool>,
}

impl UsedExtent {
    /// What a reference says.
    fn of(record: &ReferenceRecord, node_size: u64) -> Self {
        let is_of_chunk_tree = Some(record.owner() == RefOwner::Tree { root: TreeId::CHUNK });
        match record.target() {
            ReferenceTarget::Block { .. } => {
                Self { len: node_size, is_data: false, is_of_chunk_tree }
            }
            ReferenceTarget::Data { len } => Self { len, is_data: true, is_of_chunk_tree },
        }
    }
}

/// Compares references.
pub(super) struct ReferenceCheck<'g> {
    pub(super) findings: &'g BtrfsFindings,
    pub(super) doubt: &'g Doubt,
    /// The tree blocks that the walk has used.
    pub(super) visited: &'g AddressSet,
    pub(super) records: SortedRecords<ReferenceRecord>,
    pub(super) node_size: u64,
}

impl ReferenceCheck<'_> {
    /// The address of the next extent that the trees have.
    pub(super) fn next_address(&self) -> Option<u64> {
        self.records.peek().map(|record| record.logical().0)
    }

    /// What the trees have of the next extent.
    pub(super) fn next_extent(&self) -> Option<UsedExtent> {
        self.records.peek().map(|record| UsedExtent::of(record, self.node_size))
    }

    /// Takes the records of the next extent, which has no extent item. Returns it.
    ///
    /// # Errors
    /// When a file of records cannot be read.
    pub(super) fn take_missing(&mut self) -> Result<Option<UsedExtent>> {
        let Some(record) = self.records.next()? else { return Ok(None) };
        let place = BtrfsFindingPlace::Logical(record.logical());
        let problem = format!("no extent item, and a reference from {}", record.owner());
        self.findings.add(BtrfsFindingCode::MissingExtent, place, problem);
        self.skip(record.logical())?;
        Ok(Some(UsedExtent::of(&record, self.node_size)))
    }

    /// Takes the other records of an extent.
    ///
    /// # Errors
    /// As [`take_missing`](Self::take_missing).
    pub(super) fn skip(&mut self, logical: Logical) -> Result<()> {
        while self.records.peek().is_some_and(|record| record.logical() == logical) {
            self.records.next()?;
        }
        Ok(())
    }

    /// Compares the extent `item` with the records of it, and takes these.
    ///
    /// # Errors
    /// As [`take_missing`](Self::take_missing).
    pub(super) fn compare(
        &mut self,
        extent: &CheckedExtent,
        item: &CheckedExtentItem,
        known: &mut ListedReferences,
    ) -> Result<()> {
        let logical = Logical(extent.start);
        let place = BtrfsFindingPlace::Logical(logical);
        if extent.is_whole && item.refs != extent.listed {
            let what = "references that its item counts";
            self.findings.differs(
                BtrfsFindingCode::ReferenceCount,
                place,
                what,
                extent.listed,
                item.refs,
            );
        }
        let first = self.records.peek().filter(|record| record.logical() == logical).copied();
        let Some(first) = first else { return self.unused(extent, known) };
        let is_block = matches!(first.target(), ReferenceTarget::Block { .. });
        if is_block != item.is_block {
            let name = |is_block| if is_block { "a tree block" } else { "data" };
            let (expected, found) = (name(is_block), name(item.is_block));
            self.item_differs(place, "the kind of extent of its item", expected, found);
            return self.skip(logical);
        }
        let mut known = known.sorted()?;
        let (mut listed, mut found) = (known.next()?, self.next_owner(logical, item)?);
        loop {
            let is_listed_first = match (listed, found) {
                (Some((one, _)), Some((other, _))) if one == other => {
                    // Further references of the extent tree from the same owner add up.
                    let (mut count, next) = (listed.map_or(0, |(_, count)| count), known.next()?);
                    listed = next;
                    while let Some((_, more)) = listed.filter(|(owner, _)| *owner == one) {
                        count = count.saturating_add(more);
                        listed = known.next()?;
                    }
                    self.compare_counts(place, one, count, found.map_or(0, |(_, count)| count));
                    found = self.next_owner(logical, item)?;
                    continue;
                }
                (Some((one, _)), Some((other, _))) => one < other,
                (Some(_), None) => true,
                (None, Some(_)) => false,
                (None, None) => return Ok(()),
            };
            if is_listed_first {
                if let Some((owner, count)) = listed {
                    self.compare_counts(place, owner, count, 0);
                }
                listed = known.next()?;
            } else {
                if let Some((owner, count)) = found.filter(|_| extent.is_whole) {
                    self.compare_counts(place, owner, 0, count);
                }
                found = self.next_owner(logical, item)?;
            }
        }
    }

    /// Reports an extent without any record.
    fn unused(&self, extent: &CheckedExtent, known: &mut ListedReferences) -> Result<()> {
        let mut known = known.sorted()?;
        let mut owners = 0u64;
        let mut last = None;
        while let Some((owner, _)) = known.next()? {
            if self.doubt.hides(owner) {
                return Ok(());
            }
            owners += 1;
            last = Some(owner);
        }
        if !extent.is_whole || owners == 0 && self.doubt.hides_files() {
            return Ok(());
        }
        let problem = match last {
            Some(owner) if owners == 1 => format!("nothing refers to it, not even {owner}"),
            Some(_) => format!("nothing refers to it, and its item names {owners} references"),
            None => "nothing refers to it, and its item names no reference".to_owned(),
        };
        let place = BtrfsFindingPlace::Logical(Logical(extent.start));
        self.findings.add(BtrfsFindingCode::UnusedExtent, place, problem);
        Ok(())
    }

    /// Takes the records of the next owner of the extent at `logical`, and compares what they say
    /// of the extent with `item`. Returns the owner, and how many records there are.
    fn next_owner(
        &mut self,
        logical: Logical,
        item: &CheckedExtentItem,
    ) -> Result<Option<(RefOwner, u64)>> {
        let mut owner: Option<(RefOwner, u64)> = None;
        while let Some(&record) = self.records.peek() {
            let own = record.owner();
            if record.logical() != logical || owner.is_some_and(|(owner, _)| owner != own) {
                break;
            }
            if owner.is_none() {
                self.check_flags(logical, own, item);
            }
            self.compare_target(logical, record.target(), item);
            owner = Some((own, owner.map_or(0, |(_, count)| count) + 1));
            self.records.next()?;
        }
        Ok(owner)
    }

    /// Reports flags of an extent item that its first owner rules out. Only blocks of subvolumes
    /// are shared, so only they have full back references.
    fn check_flags(&self, logical: Logical, owner: RefOwner, item: &CheckedExtentItem) {
        let place = BtrfsFindingPlace::Logical(logical);
        if item.unknown_flags != 0 {
            let problem = format!("unknown flags {:#x} in its item", item.unknown_flags);
            self.findings.add(BtrfsFindingCode::ExtentItem, place, problem);
        }
        if let RefOwner::Tree { root: tree } = owner
            && item.has_full_references
            && !tree.is_fs_like()
        {
            let problem = format!("full back references of a block of {tree}");
            self.findings.add(BtrfsFindingCode::ExtentItem, place, problem);
        }
    }

    fn compare_target(&self, logical: Logical, target: ReferenceTarget, item: &CheckedExtentItem) {
        let place = BtrfsFindingPlace::Logical(logical);
        match target {
            // A pointer that contradicts its block is a finding already.
            ReferenceTarget::Block { .. } if !self.visited.contains(logical) => {}
            ReferenceTarget::Block { level, generation } => {
                if u64::from(level) != item.level {
                    self.item_differs(place, "the level in its item", level, item.level);
                }
                if generation != item.generation {
                    let what = "the generation in its item";
                    self.item_differs(place, what, generation, item.generation);
                }
            }
            ReferenceTarget::Data { len } => {
                if len != item.len {
                    self.item_differs(place, "the length in its item", len, item.len);
                }
            }
        }
    }

    fn item_differs(
        &self,
        place: BtrfsFindingPlace,
        what: &str,
        expected: impl std::fmt::Display,
        found: impl std::fmt::Display,
    ) {
        self.findings.differs(BtrfsFindingCode::ExtentItem, place, what, expected, found);
    }

    /// Compares how often an owner refers to an extent with how often the extent tree knows it.
    fn compare_counts(&self, place: BtrfsFindingPlace, owner: RefOwner, listed: u64, found: u64) {
        if listed == found || self.doubt.marks {
            return;
        }
        let code = if listed < found {
            BtrfsFindingCode::MissingReference
        } else if self.doubt.hides(owner) {
            return;
        } else {
            BtrfsFindingCode::ExtraReference
        };
        let what = format!("references from {owner} that the extent tree knows");
        self.findings.differs(code, place, what, found, listed);
    }
}
