//! Repairs that need a search of all devices: no superblock is sound, or the chunk tree, the system
//! chunks of the superblock or the root tree cannot be used.
//!
//! The scan makes a state that can be checked and repaired like any other, and stages it: it is the
//! last commit, with superblocks that lead to it and with a chunk tree. The ordinary repair goes on
//! from there, so all of its rules hold.
//!
//! ```text
//! search      all tree blocks of all devices                        search, features
//! find        members, chunks, the newest whole root                found
//! stage       superblocks of that commit, a chunk tree if needed    made, chunk_tree
//! repair      as always: derived trees anew, checked, written
//! ```
//!
//! What was in the places of superblocks is saved with the repair byte for byte ([`saved`]), and so
//! is the superblock that was found. Undoing the repair looks with that one whether the old trees
//! are whole, and then writes the bytes back.
//!
//! A volume that is only to be read is staged in the same way ([`find_volume`]), and nothing writes
//! what was staged. If no state fits together as a repair needs it, [`left`] takes what is there.
//!
//! [`saved`]: super::saved

mod agreed;
mod chunk_tree;
mod features;
mod found;
mod left;
mod made;
mod members;
mod roots;
mod search;
mod stored;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_btrfs_format::chunk::{BlockGroupFlags, Chunk, DevItem};
use offshoot_btrfs_format::csum::ChecksumType;
use offshoot_btrfs_format::encode::sealed_superblock;
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, SuperblockItem};
use offshoot_btrfs_format::{Generation, ItemType, Logical, Physical, TreeId};
use offshoot_device::BlockDevice;
use offshoot_vfs::{Code, Errno, Error, Result};
use uuid::Uuid;

use super::saved::OldState;
use super::staged::StagedDevice;
use super::{RepairOptions, stage_devices, superblocks};
use crate::check::{
    self, BtrfsFinding, BtrfsFindingCode, BtrfsFindingPlace, CheckOptions, CheckOutcome,
    CheckWatch, CheckedVolume, KeyRange,
};
use found::{FoundState, Scan};
use search::ScannedVolume;
use stored::StoredSuperblocks;

/// Options of a scan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanOptions {
    /// The volume, by the filesystem id that its blocks carry; `None` for the only one that is
    /// there.
    pub fsid: Option<Uuid>,
}

/// What a scan has found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScanOutcome {
    /// The filesystem id that the blocks of the volume carry.
    pub fsid: Uuid,
    /// The transaction that the volume is repaired to.
    pub generation: Generation,
    /// The newest transaction of which there is a tree block. If it is newer, it was not complete,
    /// or blocks of it are lost.
    pub newest: Generation,
    /// Whether the superblock was made from the trees, so that its label is lost.
    pub is_superblock_made: bool,
    /// How many chunks a new chunk tree has; `None` when the old one was whole.
    pub chunks: Option<usize>,
}

/// What a scan is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScanPurpose {
    /// The volume is written: nothing may be guessed.
    Repair,
    /// The volume is only read. What is wrong then does not fit its checksums.
    Read,
}

/// A volume that a scan has found, to be read.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FoundVolume {
    /// The devices, with the superblocks and the chunk tree that were found. These are in files
    /// without names, and the devices below are not written.
    pub devices: Vec<Arc<dyn BlockDevice>>,
    /// What was found.
    pub outcome: ScanOutcome,
    /// Whether the root is whole and the structures agree on all chunks, as a repair requires it.
    pub is_whole: bool,
}

/// A state that was found and staged.
pub(super) struct ScannedState {
    pub(super) outcome: ScanOutcome,
    /// The superblock of the state, with the item of one of the members.
    superblock: Box<SuperblockItem>,
    checksum: ChecksumType,
    /// What was at all places of superblocks, by the number of the member.
    old_bytes: BTreeMap<u64, Vec<u8>>,
    findings: Vec<BtrfsFinding>,
}

impl ScannedState {
    /// What a repair saves.
    pub(super) fn old_state(&self) -> OldState {
        let [primary, ..] = SUPERBLOCK_OFFSETS;
        let found = sealed_superblock(&self.superblock, Physical(primary), self.checksum);
        OldState { superblocks: self.old_bytes.clone(), found: Some(found.to_vec()) }
    }

    /// Adds what the scan has found wrong, which the check of the staged state does not see.
    pub(super) fn add_findings(&self, outcome: &mut CheckOutcome) {
        let ScanOutcome { is_superblock_made, chunks, .. } = self.outcome;
        // The scan has made counters zero that the repair computes, and backups name the old chunk
        // tree.
        let is_made = |one: &BtrfsFinding| match one.code {
            BtrfsFindingCode::SuperblockCounter => is_superblock_made,
            BtrfsFindingCode::BackupRoot => is_superblock_made || chunks.is_some(),
            _ => false,
        };
        outcome.findings.retain(|one| !is_made(one));
        outcome.findings.extend(self.findings.iter().cloned());
        outcome.findings.sort();
    }
}

/// Finds the state of the volume and stages it. `None` when superblocks, chunk tree and root tree
/// can be used as they are.
///
/// # Errors
/// When the devices hold no volume or several, a member is missing, or what was found does not fit
/// together. `EINTR` when `watch` ended the scan.
pub(super) fn prepare(
    staged: &[Arc<StagedDevice>],
    scan: ScanOptions,
    options: &RepairOptions,
    watch: &CheckWatch<'_>,
) -> Result<Option<ScannedState>> {
    let devices = superblocks::as_devices(staged);
    let stored = devices.iter().map(|device| StoredSuperblocks::read(&**device));
    let stored = stored.collect::<Result<Vec<_>>>()?;
    if can_be_used(&devices, &stored, options, watch)? {
        return Ok(None);
    }
    let volumes = volumes(&devices, &stored, scan, watch)?;
    let purpose = ScanPurpose::Repair;
    let scan = Scan { devices: &devices, stored: &stored, options, watch, purpose };
    let (volume, state) = choose(&volumes, &|volume| scan.find(volume))?;
    stage(staged, &stored, volume, state, purpose).map(Some)
}

/// Finds the volume on `devices` to read it, when one of them has no sound superblock. `None` when
/// all have one. Nothing is written to the devices.
///
/// The whole state that a repair would find is taken, if it is that of the newest commit or of the
/// one before. Otherwise it is the newest root that leads to the top level, and the chunks that the
/// newest leaves describe.
///
/// # Errors
/// When the devices hold no volume or several, a member is missing and the options forbid that, or
/// too little is left. `EINTR` when `watch` ended the scan.
pub fn find_volume(
    devices: &[Arc<dyn BlockDevice>],
    scan: ScanOptions,
    options: &CheckOptions,
    watch: &CheckWatch<'_>,
) -> Result<Option<FoundVolume>> {
    let stored = devices.iter().map(|device| StoredSuperblocks::read_what_is_left(&**device));
    let stored = stored.collect::<Result<Vec<_>>>()?;
    if stored.iter().all(|stored| stored.sound.is_some()) {
        return Ok(None);
    }
    let volumes = volumes(devices, &stored, scan, watch)?;
    let options = &RepairOptions { check: options.clone(), ..RepairOptions::default() };
    let purpose = ScanPurpose::Repair;
    let scan = Scan { devices, stored: &stored, options, watch, purpose };
    let reading = Scan { purpose: ScanPurpose::Read, ..scan };
    let (volume, state, is_whole) = match choose(&volumes, &|volume| scan.find(volume)) {
        Err(error) if error.errno() == Errno::INTR || error.code() == Code::SeveralVolumes => {
            return Err(error);
        }
        Err(_) => {
            let (volume, state) = choose(&volumes, &|volume| reading.find_what_is_left(volume))?;
            (volume, state, false)
        }
        Ok((volume, whole)) => match reading.find_what_is_newer(volume, &whole)? {
            Some(newer) => (volume, newer, false),
            None => (volume, whole, true),
        },
    };
    let staged = stage_devices(devices, options)?;
    let outcome = stage(&staged, &stored, volume, state, ScanPurpose::Read)?.outcome;
    Ok(Some(FoundVolume { devices: superblocks::as_devices(&staged), outcome, is_whole }))
}

/// The volumes of which there are blocks on the devices: that of a sound superblock, or the one
/// that is asked for, or all.
fn volumes(
    devices: &[Arc<dyn BlockDevice>],
    stored: &[StoredSuperblocks],
    scan: ScanOptions,
    watch: &CheckWatch<'_>,
) -> Result<Vec<ScannedVolume>> {
    let known = stored.iter().find_map(|stored| stored.sound.as_ref());
    let known = known.map(|superblock| superblock.metadata_uuid);
    let fsid = scan.fsid.or(known);
    let volumes = search::search(devices, fsid, watch)?;
    if volumes.is_empty() {
        let of = fsid.map_or_else(|| "btrfs".to_owned(), |fsid| format!("volume {fsid}"));
        let what = format!(
            "no tree block of {of} is on the devices, and no superblock; nothing was written: \
             name the right device or partition, and all members with --device"
        );
        return Err(Error::posix(Errno::INVAL, what).with_code(Code::NoVolume));
    }
    Ok(volumes)
}

/// Whether superblocks, chunk tree and root tree can be used as they are.
fn can_be_used(
    devices: &[Arc<dyn BlockDevice>],
    stored: &[StoredSuperblocks],
    options: &RepairOptions,
    watch: &CheckWatch<'_>,
) -> Result<bool> {
    match check::open(devices.to_vec(), None, &options.check, watch) {
        Ok(volume) => Ok(has_whole_chunk_tree(&volume) && has_whole_root_tree(&volume)),
        Err(error) => {
            let sound = stored.iter().filter_map(|stored| stored.sound.as_ref());
            let needed = sound.map(|one| one.item.num_devices.get()).max().unwrap_or_default();
            let is_missing = needed > devices.len() as u64;
            let is_damage = matches!(error, Error::Corrupt(_))
                || matches!(error.code(), Code::NoVolume | Code::Incomplete);
            if is_damage && !is_missing { Ok(false) } else { Err(error) }
        }
    }
}

/// Whether every block of the root tree can be used.
fn has_whole_root_tree(volume: &CheckedVolume<'_>) -> bool {
    let walked =
        volume.each_item(volume.root_tree(), KeyRange::ALL, &mut |_, _| ControlFlow::Continue(()));
    walked.is_whole()
}

/// Whether the chunk tree is whole, and the superblock has its system chunks.
fn has_whole_chunk_tree(volume: &CheckedVolume<'_>) -> bool {
    let (mut system, sector) = (Vec::new(), volume.superblock().sector_size);
    let walked = volume.each_item(volume.chunk_tree(), KeyRange::ALL, &mut |key, data| {
        if key.item_type == ItemType::CHUNK_ITEM
            && let Ok((chunk, _)) = Chunk::parse_prefix(key, data, sector)
            && chunk.flags.0 & BlockGroupFlags::SYSTEM != 0
        {
            system.push(chunk);
        }
        ControlFlow::Continue(())
    });
    let mut array = volume.superblock().system_chunks.clone();
    array.sort_by_key(|chunk| chunk.start);
    walked.is_whole() && array == system
}

/// The one volume whose state `find` finds.
fn choose<'v>(
    volumes: &'v [ScannedVolume],
    find: &dyn Fn(&ScannedVolume) -> Result<FoundState>,
) -> Result<(&'v ScannedVolume, FoundState)> {
    let (mut found, mut first_error) = (Vec::new(), None);
    let mut newest: Vec<_> = volumes.iter().collect();
    newest.sort_by_key(|volume| std::cmp::Reverse(volume.newest));
    for volume in newest {
        match find(volume) {
            Ok(state) => found.push((volume, state)),
            Err(error) if error.errno() == Errno::INTR => return Err(error),
            Err(error) => _ = first_error.get_or_insert(error),
        }
    }
    let ids: Vec<_> = found.iter().map(|(volume, _)| volume.fsid.to_string()).collect();
    match (found.pop(), ids.len()) {
        (Some(state), 1) => Ok(state),
        (Some(_), _) => {
            let what = format!(
                "the devices hold the volumes {}; nothing was written: choose one with --fsid",
                ids.join(" and ")
            );
            Err(Error::posix(Errno::INVAL, what).with_code(Code::SeveralVolumes))
        }
        (None, _) => Err(first_error.unwrap_or_else(|| {
            Error::posix(Errno::INVAL, "no volume is on the devices").with_code(Code::NoVolume)
        })),
    }
}

/// Stages what was found.
fn stage(
    staged: &[Arc<StagedDevice>],
    stored: &[StoredSuperblocks],
    volume: &ScannedVolume,
    state: FoundState,
    purpose: ScanPurpose,
) -> Result<ScannedState> {
    let FoundState { items, order, superblock, chunk_root, oldest, is_made } = state;
    let generation = Generation(superblock.generation.get());
    let devices = (staged, &order[..]);
    let new_root = if let Some(root) = chunk_root {
        root
    } else {
        let lead_to = (!is_made).then_some(&*superblock);
        chunk_tree::stage(&items, volume, devices, (generation, oldest), lead_to, purpose)?
    };
    let mut item = made::with_chunk_tree(&superblock, &items, new_root)?;
    made::stage(&item, devices, volume.checksum)?;
    if let Some(own) = order.first() {
        item.dev_item = *own;
    }
    let mut findings = problems(stored, &order, is_made);
    if let Some(finding) = wrong_array(stored, &items.system()) {
        findings.push(finding);
    }
    if chunk_root.is_none() {
        let logical = Logical(superblock.chunk_root.get());
        let place = if is_made {
            BtrfsFindingPlace::Tree(TreeId::CHUNK)
        } else {
            BtrfsFindingPlace::Block { tree: TreeId::CHUNK, logical }
        };
        let problem = "the chunk tree has lost blocks";
        findings.push(finding(BtrfsFindingCode::TreeBlock, place, problem.into()));
    }
    let known = stored.iter().filter_map(|stored| stored.sound.as_ref());
    let known = known.map(|known| known.generation).max();
    if !is_made && let Some(lost) = known.filter(|known| *known > generation) {
        let problem = format!(
            "the root tree of transaction {lost} has lost blocks, and that of transaction \
             {generation} is whole"
        );
        let place = BtrfsFindingPlace::Tree(TreeId::ROOT);
        findings.push(finding(BtrfsFindingCode::TreeBlock, place, problem));
    }
    let outcome = ScanOutcome {
        fsid: volume.fsid,
        generation,
        newest: volume.newest.max(generation),
        is_superblock_made: is_made,
        chunks: chunk_root.is_none().then_some(items.chunks.len()),
    };
    let old_bytes = order.iter().zip(stored);
    let old_bytes = old_bytes.map(|(own, stored)| (own.devid.get(), stored.bytes.clone()));
    let old_bytes = old_bytes.collect();
    let checksum = volume.checksum;
    Ok(ScannedState { outcome, superblock: item, checksum, old_bytes, findings })
}

fn finding(code: BtrfsFindingCode, place: BtrfsFindingPlace, problem: String) -> BtrfsFinding {
    BtrfsFinding { code, place, problem, expected: None, found: None, path: None }
}

/// What is wrong with the superblocks of the members.
fn problems(stored: &[StoredSuperblocks], order: &[DevItem], is_made: bool) -> Vec<BtrfsFinding> {
    let mut findings = Vec::new();
    for (own, stored) in order.iter().zip(stored) {
        let place = BtrfsFindingPlace::Member(own.devid.get());
        for (at, problem) in &stored.problems {
            if at.saturating_add(SUPERBLOCK_SIZE as u64) > own.total_bytes.get() {
                continue;
            }
            let is_primary = SUPERBLOCK_OFFSETS.first() == Some(at);
            let (code, what) = if is_primary {
                (BtrfsFindingCode::Superblock, "the primary superblock")
            } else {
                (BtrfsFindingCode::SuperblockCopy, "the copy of the superblock")
            };
            let made = if is_made { "; no superblock of the volume is sound" } else { "" };
            findings.push(finding(code, place, format!("{what} at byte {at}: {problem}{made}")));
        }
    }
    findings
}

/// The finding that sound superblocks have other system chunks than the chunk tree.
fn wrong_array(stored: &[StoredSuperblocks], system: &[&Chunk]) -> Option<BtrfsFinding> {
    let is_wrong = |stored: &StoredSuperblocks| {
        stored.sound.as_ref().is_some_and(|sound| {
            let mut array: Vec<_> = sound.system_chunks.iter().collect();
            array.sort_by_key(|chunk| chunk.start);
            array != system
        })
    };
    let problem = "the superblock and the chunk tree have different system chunks";
    let (code, place) = (BtrfsFindingCode::SystemChunk, BtrfsFindingPlace::Volume);
    stored.iter().any(is_wrong).then(|| finding(code, place, problem.into()))
}
