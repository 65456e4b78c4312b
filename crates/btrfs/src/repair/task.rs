//! What a repair has to do, and what it knows to be wrong.

use std::collections::{BTreeMap, BTreeSet};

use offshoot_btrfs_format::{Generation, TreeId};
use offshoot_vfs::Result;

use super::cut::CutOff;
use super::editor::TreeEdits;
use super::findings::RepairClass;
use super::overlaps::{ItemChanges, OverlapStep};
use super::plan::RepairScope;
use super::scan::ScannedState;
use super::subvolumes::SubvolumeEdits;
use super::{RepairOptions, RepairOutcome, files, findings, subvolumes};
use crate::check::{BtrfsFinding, BtrfsFindingCode, CheckOutcome, CheckedVolume};

/// Whether the old superblocks are saved.
#[derive(Clone, Copy)]
pub(super) enum SavesOld<'s> {
    /// Those on the devices, or what was at their places before a scan.
    Yes(Option<&'s ScannedState>),
    No,
}

/// What a repair has to do.
pub(super) struct RepairTask<'s> {
    pub(super) saves_old: SavesOld<'s>,
    pub(super) scope: RepairScope,
    /// The classes of what is repaired.
    pub(super) classes: Vec<RepairClass>,
    /// All that was found so far. What is not mended of it may be left.
    pub(super) known: CheckOutcome,
    /// What the last check found.
    findings: Vec<BtrfsFinding>,
    /// Whether there is more to mend than the last check lists.
    pub(super) are_more: bool,
    /// The changes of the checksum tree.
    checksums: TreeEdits,
    /// Whether subvolumes have new blocks.
    pub(super) are_files_edited: bool,
    /// What is cut off.
    pub(super) cut_off: Vec<CutOff>,
    /// Whether something of a subvolume may be given up, so that all that is safe is mended.
    gives_up: bool,
    pub(super) overlaps: OverlapStep,
    /// What has changed in items that overlap or are damaged.
    pub(super) changes: ItemChanges,
}

impl<'s> RepairTask<'s> {
    /// The task of a repair of what the check found.
    pub(super) fn of(
        outcome: &RepairOutcome,
        options: &RepairOptions,
        checksums: TreeEdits,
        saves_old: SavesOld<'s>,
    ) -> Self {
        let is_chosen = outcome.classes.contains(&RepairClass::Overlaps);
        let gives_up = is_chosen || !options.cut_off.is_empty();
        let drops_checksums = gives_up || findings::are_checksums_left(&outcome.before);
        let recounts_quotas = outcome.classes.contains(&RepairClass::Quotas);
        let task = Self::without_mends(outcome.before.clone());
        let mut task = Self {
            saves_old,
            scope: RepairScope { drops_checksums, recounts_quotas },
            checksums,
            are_files_edited: !options.cut_off.is_empty(),
            classes: outcome.classes.clone(),
            gives_up,
            overlaps: OverlapStep { is_chosen, ..OverlapStep::default() },
            ..task
        };
        task.findings.clone_from(&outcome.before.findings);
        task.are_more = outcome.before.are_more;
        task
    }

    /// The task of making the derived trees anew, without a way back.
    pub(super) fn without_mends(known: CheckOutcome) -> Self {
        Self {
            saves_old: SavesOld::No,
            scope: RepairScope::default(),
            classes: Vec::new(),
            known,
            findings: Vec::new(),
            are_more: false,
            cut_off: Vec::new(),
            gives_up: false,
            overlaps: OverlapStep::default(),
            changes: ItemChanges::default(),
            checksums: TreeEdits::new(),
            are_files_edited: false,
        }
    }

    /// Takes what a check found after a step of the repair. When something was given up, all of it
    /// is mended that is safe to mend.
    pub(super) fn learn(&mut self, found: CheckOutcome) {
        if self.gives_up {
            let mut classes = findings::found_classes(&found);
            classes.extend(self.classes.drain(..));
            self.classes.extend(classes);
        }
        self.known.findings.extend(found.findings.iter().cloned());
        self.known.are_more |= found.are_more;
        (self.findings, self.are_more) = (found.findings, found.are_more);
    }

    /// The edits that mend the files with findings of the last check, by tree; the first time those
    /// of checksums, too.
    ///
    /// # Errors
    /// When the caller has ended the repair.
    pub(super) fn file_edits(
        &mut self,
        volume: &CheckedVolume<'_>,
        generation: Generation,
    ) -> Result<BTreeMap<TreeId, TreeEdits>> {
        let mut edits = if self.classes.contains(&RepairClass::Files) || self.gives_up {
            files::edits(volume, &self.findings, generation, &mut self.overlaps)?
        } else {
            BTreeMap::new()
        };
        self.are_files_edited |= !edits.is_empty();
        let checksums = std::mem::take(&mut self.checksums);
        if !checksums.is_empty() {
            edits.insert(TreeId::CSUM, checksums);
        }
        Ok(edits)
    }

    /// The edits that mend the subvolumes.
    ///
    /// # Errors
    /// When the caller has ended the repair.
    pub(super) fn subvolume_edits(
        &mut self,
        volume: &CheckedVolume<'_>,
        generation: Generation,
    ) -> Result<SubvolumeEdits> {
        if !self.gives_up && !self.classes.contains(&RepairClass::Subvolumes) {
            return Ok(SubvolumeEdits::default());
        }
        let edits = subvolumes::edits(volume, generation, &self.findings, &self.bad_trees())?;
        self.are_files_edited |= !edits.is_empty();
        Ok(edits)
    }

    /// Whether a subvolume needs a root block of its own, which may be one that nothing leads to.
    pub(super) fn has_shared_roots(&self) -> bool {
        let is_shared = |one: &BtrfsFinding| one.code == BtrfsFindingCode::SharedRoot;
        self.classes.contains(&RepairClass::Subvolumes) && self.known.findings.iter().any(is_shared)
    }

    /// The trees that have a block that the kernel cannot use, and are made anew with the
    /// subvolumes.
    pub(super) fn bad_trees(&self) -> BTreeSet<TreeId> {
        if !self.classes.contains(&RepairClass::Subvolumes) {
            return BTreeSet::new();
        }
        let is_bad = |finding: &&BtrfsFinding| {
            [BtrfsFindingCode::TreeBlock, BtrfsFindingCode::RefusedBlock].contains(&finding.code)
        };
        let bad = self.known.findings.iter().filter(is_bad);
        let trees = bad.filter_map(|finding| findings::tree_of(&finding.place));
        trees.filter(|tree| subvolumes::MADE_ANEW.contains(tree)).collect()
    }
}
