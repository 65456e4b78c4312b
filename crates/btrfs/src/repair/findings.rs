//! What of a check's findings a repair mends.

use std::collections::BTreeSet;

use offshoot_btrfs_format::TreeId;
use offshoot_vfs::{Errno, Error, Result, Structure};

use super::{files, subvolumes};
use crate::check::{BtrfsFinding, BtrfsFindingCode, BtrfsFindingPlace, CheckOutcome};

/// What belongs together in a repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RepairClass {
    /// Superblocks, their copies, counters and backup roots.
    Superblocks,
    /// The chunk tree, and the system chunks of the superblocks. It needs a scan.
    Chunks,
    /// Block groups, free space, and the ranges that chunks have of members.
    Space,
    /// The extent tree.
    Extents,
    /// Names, entries and counts of files.
    Files,
    /// The numbers of quota groups, and the items of quotas.
    Quotas,
    /// Links, entries and UUIDs of subvolumes, and the removal of deleted ones.
    Subvolumes,
    /// Extents of files that overlap or are damaged, and leaves with duplicate or overlapping
    /// items. Something is lost by that, so it is mended only if the caller chooses it.
    Overlaps,
}

impl RepairClass {
    /// All classes.
    pub const ALL: [Self; 8] = [
        Self::Superblocks,
        Self::Chunks,
        Self::Space,
        Self::Extents,
        Self::Files,
        Self::Quotas,
        Self::Subvolumes,
        Self::Overlaps,
    ];

    /// Its name, as it stands on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Superblocks => "superblocks",
            Self::Chunks => "chunks",
            Self::Space => "space",
            Self::Extents => "extents",
            Self::Files => "files",
            Self::Quotas => "quotas",
            Self::Subvolumes => "subvolumes",
            Self::Overlaps => "overlaps",
        }
    }

    /// The class that mends `finding`; `None` when none does.
    #[must_use]
    pub fn of(finding: &BtrfsFinding) -> Option<Self> {
        use BtrfsFindingCode as Code;
        match finding.code {
            Code::Superblock
            | Code::SuperblockCopy
            | Code::SuperblockCounter
            | Code::BackupRoot => Some(Self::Superblocks),
            Code::SystemChunk => Some(Self::Chunks),
            Code::DeviceExtent
            | Code::BlockGroup
            | Code::BlockGroupUsed
            | Code::LostSpace
            | Code::AllocatedSpace
            | Code::FreeSpaceInfo
            | Code::SpaceCache => Some(Self::Space),
            Code::MissingExtent
            | Code::UnusedExtent
            | Code::MissingReference
            | Code::ExtraReference
            | Code::ReferenceCount
            | Code::ExtentOverlap
            | Code::ExtentItem
            | Code::ExtraChecksum => Some(Self::Extents),
            Code::TreeBlock
            | Code::RefusedBlock
            | Code::RootItem
            | Code::SharedRoot
            | Code::MissingTree => match tree_of(&finding.place) {
                Some(TreeId::CHUNK) => Some(Self::Chunks),
                Some(TreeId::EXTENT) => Some(Self::Extents),
                Some(TreeId::BLOCK_GROUP | TreeId::FREE_SPACE | TreeId::DEV) => Some(Self::Space),
                tree if subvolumes::is_mended(finding, tree) => Some(Self::Subvolumes),
                _ => None,
            },
            Code::FileExtent => Some(Self::Overlaps),
            Code::QuotaGroup | Code::QuotaItem => Some(Self::Quotas),
            _ if subvolumes::is_mended(finding, None) => Some(Self::Subvolumes),
            _ if files::is_mended(finding) => Some(Self::Files),
            _ => None,
        }
    }

    /// Whether it loses nothing, so that it is part of a repair for which no class is chosen.
    #[must_use]
    pub fn is_safe(self) -> bool {
        self != Self::Overlaps
    }

    /// Whether its structures follow from others as a whole, so that they are right after a repair.
    fn is_derived(self) -> bool {
        !matches!(self, Self::Files | Self::Subvolumes | Self::Overlaps)
    }

    /// Whether its structures are made anew in each repair, because they have items of all blocks.
    fn is_always_made(self) -> bool {
        matches!(self, Self::Superblocks | Self::Chunks | Self::Space | Self::Extents)
    }
}

/// The tree that a place is in. The root item of a tree counts for that tree.
pub(super) fn tree_of(place: &BtrfsFindingPlace) -> Option<TreeId> {
    match place {
        BtrfsFindingPlace::Item { tree: TreeId::ROOT, key } => Some(TreeId(key.objectid)),
        BtrfsFindingPlace::Tree(tree)
        | BtrfsFindingPlace::Block { tree, .. }
        | BtrfsFindingPlace::Item { tree, .. } => Some(*tree),
        _ => None,
    }
}

/// The safe classes that mend what was found.
pub(super) fn found_classes(outcome: &CheckOutcome) -> BTreeSet<RepairClass> {
    let classes = outcome.findings.iter().filter_map(RepairClass::of);
    classes.filter(|class| class.is_safe()).collect()
}

/// Whether something was found that the class `overlaps` may mend.
fn may_overlap(outcome: &CheckOutcome) -> bool {
    outcome.findings.iter().any(|finding| match finding.code {
        BtrfsFindingCode::FileExtent => true,
        BtrfsFindingCode::TreeBlock => tree_of(&finding.place).is_some_and(TreeId::is_subvolume),
        _ => false,
    })
}

/// The classes of a repair: those that mend what was found, or those that the caller chose, which
/// are made anew even if nothing is wrong with them. Chunks are mended after a scan alone. With
/// overlaps, all that is safe is mended as well, because it follows from the files.
///
/// # Errors
/// `EINVAL` when something is wrong that belongs to a class that was not chosen. All structures of
/// these classes are made anew together, because each tree has items of the blocks of all.
pub(super) fn classes(
    outcome: &CheckOutcome,
    chosen: &[RepairClass],
    is_scanned: bool,
) -> Result<Vec<RepairClass>> {
    let mut found = found_classes(outcome);
    let is_any_chosen = !chosen.is_empty();
    let mut chosen: BTreeSet<_> = chosen.iter().copied().collect();
    if !is_scanned {
        found.remove(&RepairClass::Chunks);
        chosen.remove(&RepairClass::Chunks);
    }
    if !is_any_chosen {
        return Ok(found.into_iter().collect());
    }
    if chosen.contains(&RepairClass::Overlaps) {
        found.extend(chosen);
        if !may_overlap(outcome) {
            found.remove(&RepairClass::Overlaps);
        }
        return Ok(found.into_iter().collect());
    }
    let is_left_out = |class: &&RepairClass| class.is_always_made() && !chosen.contains(class);
    let left_out: Vec<_> = found.iter().filter(is_left_out).map(|class| class.name()).collect();
    if left_out.is_empty() {
        return Ok(chosen.into_iter().collect());
    }
    let what = format!(
        "repairing the chosen classes alone: {} needs a repair as well, and they are made anew \
         together",
        left_out.join(" and ")
    );
    Err(Error::posix(Errno::INVAL, what))
}

/// Whether there are checksums without data, or will be when extents that nothing refers to are
/// gone.
pub(super) fn are_checksums_left(outcome: &CheckOutcome) -> bool {
    use BtrfsFindingCode as Code;
    let codes = [Code::ExtraChecksum, Code::UnusedExtent, Code::ExtentOverlap, Code::ExtentItem];
    outcome.findings.iter().any(|finding| codes.contains(&finding.code))
}

/// Requires that a repair has mended all of its classes, and that nothing new is wrong.
///
/// # Errors
/// [`Error::Corrupt`] with the first finding that should not be there.
pub(super) fn require_repaired(
    before: &CheckOutcome,
    after: &CheckOutcome,
    classes: &[RepairClass],
) -> Result<()> {
    let known: BTreeSet<_> =
        before.findings.iter().map(|finding| (finding.code, finding.place)).collect();
    let is_allowed = |finding: &BtrfsFinding| {
        let class = RepairClass::of(finding);
        let is_sure = finding.code != BtrfsFindingCode::ExtraChecksum
            && class.is_some_and(RepairClass::is_derived);
        let is_mended = is_sure && class.is_some_and(|class| classes.contains(&class));
        !is_mended && (before.are_more || known.contains(&(finding.code, finding.place)))
    };
    match after.findings.iter().find(|finding| !is_allowed(finding)) {
        None => Ok(()),
        Some(finding) => {
            let what = format!(
                "the repaired volume would not be sound, so nothing was written; its check finds \
                 {finding}"
            );
            Err(Error::corrupt(Structure::Superblock, what))
        }
    }
}
