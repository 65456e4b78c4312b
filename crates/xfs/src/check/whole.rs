//! What all parts of a check share, and the checks of the volume as a whole.

use offshoot_kit::sync::atomic::{AtomicU64, Ordering};
use offshoot_xfs_format::features::XfsFeatures2;
use offshoot_xfs_format::identity::XfsIdentity;
use offshoot_xfs_format::superblock::XfsSuperblock;
use offshoot_xfs_format::{AgBlock, AgNumber, Lsn, XfsGeometry};

use super::finding::{Findings, XfsFindingCode, XfsFindingPlace};
use super::group::GroupCounts;
use crate::buffer::{XfsBuffer, XfsBuffers};

/// A volume that is checked.
pub(super) struct VolumeCheck<'a> {
    pub(super) buffers: &'a XfsBuffers,
    pub(super) superblock: &'a XfsSuperblock,
    /// Where the log ends; none when it cannot be read.
    pub(super) head: Option<Lsn>,
    /// The newest change of what was read.
    pub(super) newest: AtomicU64,
    pub(super) findings: &'a Findings,
    /// The groups that are checked.
    pub(super) group_count: u32,
}

impl<'a> VolumeCheck<'a> {
    pub(super) fn geometry(&self) -> &'a XfsGeometry {
        self.buffers.geometry()
    }

    /// The groups that are checked.
    pub(super) fn groups(&self) -> impl Iterator<Item = AgNumber> + use<> {
        (0..self.group_count).map(AgNumber)
    }

    /// Whether these are all groups.
    pub(super) fn has_all_groups(&self) -> bool {
        self.group_count == self.geometry().ag_count
    }

    /// Notes the last change of a buffer, and a finding if no record of the log can have made it.
    pub(super) fn note_lsn(&self, buffer: &XfsBuffer) {
        if let Some(identity) = XfsIdentity::of_magic(self.geometry(), buffer.bytes()) {
            let at = self.geometry().at(buffer.place());
            let place = at.map_or(XfsFindingPlace::Volume, XfsFindingPlace::from);
            self.note_lsn_of(identity.lsn_of(buffer.bytes()), place);
        }
    }

    pub(super) fn note_lsn_of(&self, lsn: Option<Lsn>, place: impl Into<XfsFindingPlace>) {
        let Some(lsn) = lsn.filter(|&lsn| lsn != Lsn::NONE) else { return };
        self.newest.fetch_max(lsn.0, Ordering::Relaxed);
        if let Some(head) = self.head.filter(|&head| lsn > head) {
            let problem = format!("changed at {lsn}, but the log ends at {head}");
            self.findings.add(XfsFindingCode::FutureChange, place, problem);
        }
    }

    /// Checks the superblocks of the groups behind the first one.
    pub(super) fn check_superblocks(&self) {
        let geometry = self.geometry();
        let mut sector = vec![0; geometry.sector_size()];
        for ag in self.groups().skip(1) {
            let at = geometry.place(ag, AgBlock(0)).bytes();
            if let Err(error) = self.buffers.read_into(at, &mut sector) {
                self.findings.add_error(XfsFindingCode::SuperblockCopy, ag, &error);
                continue;
            }
            let problem = match XfsSuperblock::parse(&sector) {
                Err(problem) => problem.problem.into_owned(),
                Ok(copy) if copy.geometry != *geometry => {
                    "it is that of another volume, or of another size".to_owned()
                }
                Ok(copy) => {
                    let identity = XfsIdentity::of_magic(geometry, &sector);
                    let lsn = identity.map(|_| Lsn(copy.fields.lsn.get()));
                    self.note_lsn_of(lsn, ag);
                    continue;
                }
            };
            self.findings.add(XfsFindingCode::SuperblockCopy, ag, problem);
        }
        let has_lsn = geometry.has_checksums();
        self.note_lsn_of(
            has_lsn.then(|| Lsn(self.superblock.fields.lsn.get())),
            XfsFindingPlace::Volume,
        );
    }

    /// Compares the counters of the superblock with the sums over the groups.
    pub(super) fn check_counters(&self, counts: &GroupCounts) {
        let fields = &self.superblock.fields;
        let counters = [
            ("inodes", fields.icount.get(), counts.inodes),
            ("free inodes", fields.ifree.get(), counts.free_inodes),
            ("free blocks", fields.fdblocks.get(), counts.free_blocks),
        ];
        for (what, counted, found) in counters {
            if counted != found {
                let problem = format!("{counted} {what} are counted, but there are {found}");
                let code = XfsFindingCode::SuperblockCounter;
                self.findings.add(code, XfsFindingPlace::Volume, problem);
            }
        }
    }

    /// Whether groups count the blocks of their trees of free space. Old volumes do not.
    pub(super) fn counts_free_trees(&self) -> bool {
        self.superblock.fields.features2().contains(XfsFeatures2::LAZYSBCOUNT)
    }
}
