//! Repairs volumes whose derived structures are damaged, and undoes repairs.
//!
//! What follows from other structures is not patched: it is made anew. The walk of the check finds
//! all references; they are what the extent tree must say. Block groups, free space, and the ranges
//! of the members follow from that and from the chunks.
//!
//! ```text
//! scan              only if asked for: superblocks and chunk tree from all tree blocks
//! accept            data of chosen files that gets other checksums
//! check             what is wrong, and what of it can be repaired
//! cut, leaves       what cannot be used of subvolumes that the user has named, and what is saved
//! overlaps          extents of files that overlap or are damaged, if the user has chosen that
//! files             names, entries and counts mended by copy on write
//! subvolumes        the same for links of subvolumes, their entries and UUIDs
//! walk              all references of all trees, with the mended files
//! survey            the items of extents; the places where nothing is
//! quotas            the numbers of groups, counted anew
//! plan              the new trees, laid out in free places
//! staged            written beside the devices, and checked there
//! written           blocks, barrier, superblocks, barrier
//! ```
//!
//! 1. Nothing that the old roots lead to is overwritten. The old superblocks are saved in the new
//!    root tree ([`saved`]). So a repair can be undone until something else writes to the volume.
//! 2. Nothing is written unless the check of the result finds only what was to stay.
//! 3. A repair stands on the check alone and not on an open volume, because the volume may not
//!    open. It writes whole trees and not single items, so it needs no transaction either.
//!
//! Memory is that of the check. Besides that, a repair has some 100 bytes for each new block and
//! for each extent of data of one block group.

mod accept;
mod cut;
mod editor;
mod extents;
mod files;
mod findings;
mod free_space;
mod leaves;
mod overlaps;
mod plan;
mod quotas;
mod roots;
mod saved;
mod scan;
mod shape;
mod spool;
mod staged;
mod subvolumes;
mod superblocks;
mod survey;
mod task;

use std::collections::BTreeSet;
use std::sync::Arc;

use offshoot_btrfs_format::chunk::Chunk;
use offshoot_btrfs_format::superblock::{
    CompatRo, Incompat, SUPER_FLAG_SEEDING, SUPERBLOCK_OFFSETS, Superblock, SuperblockItem,
};
use offshoot_btrfs_format::{Generation, TreeId};
use offshoot_device::BlockDevice;
use offshoot_vfs::{Code, Errno, Error, Result};

use crate::check::{self, CheckOptions, CheckOutcome, CheckWatch, CheckedVolume, ReachedVolume};
use accept::Acceptance;
use cut::TornSubvolumes;
use extents::ExtentForm;
use plan::{ItemMap, PlacedTrees, RepairPlan, RepairScope};
use quotas::{QuotaChanges, Recount};
use roots::RootStep;
use saved::{OldState, SavedState};
use staged::StagedDevice;
use survey::SpaceSurvey;
use task::{RepairTask, SavesOld};

use crate::tree::Blocks as _;

pub use accept::{AcceptedData, AcceptedRange, FileOfAcceptedData};
pub use cut::{CutOff, CutOffBlock, CutOffFile, SubvolumeName};
pub use findings::RepairClass;
pub use overlaps::{FileWithChanges, ItemChange, ItemChanges};
pub use scan::{FoundVolume, ScanOptions, ScanOutcome, find_volume};

/// The most rounds in which files are mended. A round is needed for each 10,000 findings.
const MOST_ROUNDS: usize = 64;

/// The `compat_ro` features that a repair maintains, or may leave as they are.
const KEPT: CompatRo = CompatRo::FREE_SPACE_TREE
    .union(CompatRo::FREE_SPACE_TREE_VALID)
    .union(CompatRo::VERITY)
    .union(CompatRo::BLOCK_GROUP_TREE);

/// Options of a repair.
#[derive(Clone, Debug, Default)]
pub struct RepairOptions {
    /// Memory and scratch files of the checks that belong to a repair.
    pub check: CheckOptions,
    /// What may be repaired. Empty for everything that is safe. With [`RepairClass::Overlaps`],
    /// everything that is safe is repaired as well.
    pub classes: Vec<RepairClass>,
    /// Files whose data is accepted as it is on the devices, by their paths from the top level of
    /// the volume: data that does not fit its checksum gets another checksum.
    pub accepted: Vec<Vec<u8>>,
    /// Whether all devices are searched when superblocks or the chunk tree cannot be used.
    pub scan: Option<ScanOptions>,
    /// Subvolumes of which blocks that cannot be used are cut off. With any of them, everything
    /// that is safe is repaired, whatever the classes say, and overlaps if they are among these.
    pub cut_off: Vec<SubvolumeName>,
    /// Whether the repair ends before anything is written to the devices.
    pub is_dry_run: bool,
}

/// What a repair has done, or would do.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RepairOutcome {
    /// What the search of the devices found; `None` when none was needed or asked for.
    pub scanned: Option<ScanOutcome>,
    /// What the check found before.
    pub before: CheckOutcome,
    /// What the check of the result finds; `None` when there is nothing to repair.
    pub after: Option<CheckOutcome>,
    /// The classes of what is repaired.
    pub classes: Vec<RepairClass>,
    /// The data that is accepted as it is.
    pub accepted: AcceptedData,
    /// The trees that are made anew.
    pub trees: Vec<TreeId>,
    /// How many tree blocks that takes.
    pub blocks: u64,
    /// What is cut off subvolumes.
    pub cut_off: Vec<CutOff>,
    /// What has changed in items that overlap or are damaged.
    pub overlaps: ItemChanges,
    /// Whether the devices were written.
    pub is_written: bool,
}

/// Repairs the volume on `devices`.
///
/// # Errors
/// [`Error::Unsupported`] for a volume that cannot be repaired; those of the paths of
/// [`RepairOptions::accepted`], and when data cannot be accepted; `ENOSPC` when there is too little
/// room for the new trees; [`Error::Corrupt`] when the result would not be sound; `EINTR` when
/// `watch` ended the repair. Nothing was written then.
pub fn repair_btrfs(
    devices: &[Arc<dyn BlockDevice>],
    options: &RepairOptions,
    watch: &CheckWatch<'_>,
) -> Result<RepairOutcome> {
    let staged = stage_devices(devices, options)?;
    let scanned = match options.scan {
        Some(scan) => scan::prepare(&staged, scan, options, watch)?,
        None => None,
    };
    let accepted = Acceptance::of(&superblocks::as_devices(&staged), options, watch)?;
    let mut before = check::check_btrfs(superblocks::as_devices(&staged), &options.check, watch)?;
    if let Some(scanned) = &scanned {
        scanned.add_findings(&mut before);
    }
    let mut chosen = options.classes.clone();
    chosen.retain(|class| options.cut_off.is_empty() || !class.is_safe());
    let classes = findings::classes(&before, &chosen, scanned.is_some())?;
    let mut outcome = RepairOutcome {
        scanned: scanned.as_ref().map(|scanned| scanned.outcome.clone()),
        before,
        after: None,
        classes,
        accepted: accepted.data.clone(),
        trees: Vec::new(),
        blocks: 0,
        cut_off: Vec::new(),
        overlaps: ItemChanges::default(),
        is_written: false,
    };
    if outcome.classes.is_empty() && accepted.edits.is_empty() && options.cut_off.is_empty() {
        return Ok(outcome);
    }
    let mut task =
        RepairTask::of(&outcome, options, accepted.edits.clone(), SavesOld::Yes(scanned.as_ref()));
    let placed = stage_trees(&staged, options, &mut task, watch)?;
    let volume = check::open(superblocks::as_devices(&staged), None, &options.check, watch)?;
    accepted.require_readable(&volume)?;
    drop(volume);
    let after = check::check_btrfs(superblocks::as_devices(&staged), &options.check, watch)?;
    findings::require_repaired(&task.known, &after, &task.classes)?;
    (outcome.classes, outcome.cut_off) = (task.classes, task.cut_off);
    outcome.overlaps = task.changes;
    outcome.trees = placed.trees.iter().map(|tree| tree.id).collect();
    outcome.blocks = placed.blocks();
    outcome.after = Some(after);
    if !options.is_dry_run {
        superblocks::write_through(&staged)?;
        outcome.is_written = true;
    }
    Ok(outcome)
}

/// Brings the volume on `devices` back to what it was before the last repair. Returns the number of
/// the transaction that is the newest one then.
///
/// # Errors
/// `ENOENT` when no repair is saved, `ESTALE` when the volume was written since or the old trees
/// are not whole any more. Nothing was written then.
pub fn undo_repair(
    devices: &[Arc<dyn BlockDevice>],
    options: &RepairOptions,
    watch: &CheckWatch<'_>,
) -> Result<Generation> {
    let staged = stage_devices(devices, options)?;
    let saved = {
        let volume = check::open(superblocks::as_devices(&staged), None, &options.check, watch)?;
        let saved = saved::find(&volume)?;
        require_unwritten(volume.superblock(), &saved)?;
        stage_saved(&volume, &saved)?;
        saved
    };
    let volume = check::open(superblocks::as_devices(&staged), None, &options.check, watch)?;
    let reached = ReachedVolume::of(&volume, &[])?;
    if reached.blocks() != saved.blocks {
        return Err(stale(&format!(
            "{} of the {} tree blocks of that state are left",
            reached.blocks(),
            saved.blocks
        )));
    }
    saved::stage_bytes(&volume, &saved)?;
    if !options.is_dry_run {
        superblocks::write_through(&staged)?;
    }
    Ok(volume.superblock().generation)
}

/// Keeps the last repair of the volume on `devices` for good: forgets what it was before.
///
/// # Errors
/// `ENOENT` when no repair is saved, and those of [`repair_btrfs`].
pub fn confirm_repair(
    devices: &[Arc<dyn BlockDevice>],
    options: &RepairOptions,
    watch: &CheckWatch<'_>,
) -> Result<()> {
    let before = check::check_btrfs(devices.to_vec(), &options.check, watch)?;
    let staged = stage_devices(devices, options)?;
    let volume = check::open(superblocks::as_devices(&staged), None, &options.check, watch)?;
    saved::find(&volume)?;
    drop(volume);
    let mut task = RepairTask::without_mends(before);
    let options = &RepairOptions { cut_off: Vec::new(), ..options.clone() };
    stage_trees(&staged, options, &mut task, watch)?;
    let after = check::check_btrfs(superblocks::as_devices(&staged), &options.check, watch)?;
    findings::require_repaired(&task.known, &after, &[])?;
    if !options.is_dry_run {
        superblocks::write_through(&staged)?;
    }
    Ok(())
}

fn stage_devices(
    devices: &[Arc<dyn BlockDevice>],
    options: &RepairOptions,
) -> Result<Vec<Arc<StagedDevice>>> {
    let scratch = options.check.scratch.clone().unwrap_or_else(std::env::temp_dir);
    let staged =
        |device: &Arc<dyn BlockDevice>| StagedDevice::over(device.clone(), &scratch).map(Arc::new);
    devices.iter().map(staged).collect()
}

/// What stays the same in all steps of a repair.
struct RepairBase {
    /// The superblock before the repair.
    old: Box<SuperblockItem>,
    /// The transaction of the repair.
    generation: Generation,
    chunk_tree_uuid: [u8; 16],
    chunks: Vec<Chunk>,
    /// The old superblocks, as items of the root tree.
    saved: ItemMap,
    scope: RepairScope,
}

impl RepairBase {
    /// What becomes of the quota tree.
    fn quotas(
        &self,
        volume: &CheckedVolume<'_>,
        survey: &SpaceSurvey,
        recount: Recount,
    ) -> Result<QuotaChanges> {
        if volume.tree(TreeId::QUOTA).is_none() {
            return Ok(QuotaChanges::default());
        }
        let reached = ReachedVolume::of(volume, &survey::bounds(&self.chunks))?;
        let old = Generation(self.old.generation.get());
        quotas::changes(&reached, survey, (old, self.generation), recount)
    }
}

/// Cuts off and mends what `task` says, and makes the derived trees anew, all on staged devices.
fn stage_trees(
    staged: &[Arc<StagedDevice>],
    options: &RepairOptions,
    task: &mut RepairTask<'_>,
    watch: &CheckWatch<'_>,
) -> Result<PlacedTrees> {
    let mut volume = check::open(superblocks::as_devices(staged), None, &options.check, watch)?;
    let chunks: Vec<Chunk> = volume.storage.chunks().collect();
    require_repairable(&volume, &chunks)?;
    let chosen = cut::chosen(&volume, &options.cut_off)?;
    let mut given_up = chosen.clone();
    given_up.extend(task.bad_trees());
    let saves_all = task.overlaps.is_chosen;
    given_up.extend(if saves_all { cut::subvolumes(&volume) } else { Vec::new() });
    let LookedAt { mut survey, blocks, damaged } = look(&volume, &chunks, task.scope, &given_up)?;
    let generation = Generation(volume.superblock().generation.0 + 1);
    let saved = match task.saves_old {
        SavesOld::Yes(Some(scanned)) => saved::items(&scanned.old_state(), generation, blocks),
        SavesOld::Yes(None) => saved::items(&OldState::read(&volume)?, generation, blocks),
        SavesOld::No => ItemMap::new(),
    };
    let root = volume.block(&volume.chunk_tree().expected())?;
    let chunk_tree_uuid = root.header().chunk_tree_uuid;
    let old = volume.superblock().item.clone();
    let base = RepairBase { old, generation, chunk_tree_uuid, chunks, saved, scope: task.scope };
    let steps = StagedSteps { staged, options, base: &base, watch };
    let saved = damaged.into_iter().filter(|id| saves_all && id.is_subvolume()).collect();
    let torn = TornSubvolumes { chosen: &chosen, saved: &saved };
    let is_torn = !chosen.is_empty() || !saved.is_empty();
    if is_torn || task.has_shared_roots() {
        cut::keep_off_known(&volume, &base.chunks, &mut survey);
    }
    if is_torn {
        task.cut_off = cut::stage(&volume, &survey, &base, &torn, &mut task.overlaps)?;
        (volume, survey) = steps.next(&survey)?;
        cut::find_lost_files(&volume, &mut task.cut_off)?;
        task.learn(steps.check()?);
    }
    for _ in 0..MOST_ROUNDS {
        let edits = task.file_edits(&volume, generation)?;
        if edits.is_empty() {
            break;
        }
        let mut step = RootStep::new(&volume, &survey, &base);
        step.apply(edits)?;
        task.overlaps.log.take_lossy().into_iter().for_each(|id| step.forget_origin(id));
        step.finish()?;
        (volume, survey) = steps.next(&survey)?;
        if !task.are_more {
            break;
        }
        task.learn(steps.check()?);
    }
    let edits = task.subvolume_edits(&volume, generation)?;
    if !edits.is_empty() {
        let mut step = RootStep::new(&volume, &survey, &base);
        step.apply_to_subvolumes(edits)?;
        step.finish()?;
        (volume, survey) = steps.next(&survey)?;
    }
    task.changes = std::mem::take(&mut task.overlaps.log).into_changes(&volume);
    let is_recounted = task.scope.recounts_quotas || task.are_files_edited;
    let quotas = base.quotas(&volume, &survey, Recount::when(is_recounted))?;
    make_anew(&volume, &survey, &base, quotas)
}

/// The states that the steps of a repair stage.
struct StagedSteps<'s, 'c> {
    staged: &'s [Arc<StagedDevice>],
    options: &'s RepairOptions,
    base: &'s RepairBase,
    watch: &'c CheckWatch<'c>,
}

impl<'c> StagedSteps<'_, 'c> {
    /// The state behind the last step, and where places are free in it and were in the states
    /// before, whose last one is `before`.
    fn next(&self, before: &SpaceSurvey) -> Result<(CheckedVolume<'c>, SpaceSurvey)> {
        let devices = superblocks::as_devices(self.staged);
        let next = check::open(devices, None, &self.options.check, self.watch)?;
        let looked = look(&next, &self.base.chunks, self.base.scope, &BTreeSet::new())?;
        let mut survey = looked.survey;
        survey.keep_off(before);
        Ok((next, survey))
    }

    /// The check of the state behind the last step.
    fn check(&self) -> Result<CheckOutcome> {
        let devices = superblocks::as_devices(self.staged);
        check::check_btrfs(devices, &self.options.check, self.watch)
    }
}

/// What a walk through all trees has found.
struct LookedAt {
    survey: SpaceSurvey,
    /// How many blocks the trees have.
    blocks: u64,
    /// The trees with blocks that cannot be used.
    damaged: BTreeSet<TreeId>,
}

/// Walks through all trees. Those in `given_up` may have blocks that cannot be used.
fn look(
    volume: &CheckedVolume<'_>,
    chunks: &[Chunk],
    scope: RepairScope,
    given_up: &BTreeSet<TreeId>,
) -> Result<LookedAt> {
    let replaced: BTreeSet<_> = plan::replaced(volume, chunks, scope)?.into_iter().collect();
    let reached = ReachedVolume::of(volume, &survey::bounds(chunks))?;
    require_whole(volume, &reached, &replaced, given_up)?;
    let survey = survey::survey(volume, &reached, chunks, &replaced, form_of(volume))?;
    Ok(LookedAt { survey, blocks: reached.blocks(), damaged: reached.damaged().clone() })
}

fn form_of(volume: &CheckedVolume<'_>) -> ExtentForm {
    let superblock = volume.superblock();
    let is_skinny = superblock.incompat.has(Incompat::SKINNY_METADATA);
    ExtentForm { node_size: superblock.node_size, is_skinny }
}

/// Makes the derived trees anew, and the superblocks that lead to them.
fn make_anew(
    volume: &CheckedVolume<'_>,
    survey: &SpaceSurvey,
    base: &RepairBase,
    quotas: QuotaChanges,
) -> Result<PlacedTrees> {
    let plan = RepairPlan {
        volume,
        survey,
        chunks: base.chunks.clone(),
        form: form_of(volume),
        old: &base.old,
        generation: base.generation,
        chunk_tree_uuid: base.chunk_tree_uuid,
        ids: plan::replaced(volume, &base.chunks, base.scope)?,
        saved: base.saved.clone(),
        quotas,
    };
    let placed = plan.lay_out()?;
    plan.load(&placed, &mut |logical, bytes| superblocks::write_block(volume, logical, bytes))?;
    let devices: Vec<_> = plan::device_items(volume)?.into_iter().map(|(_, item)| item).collect();
    let item = superblocks::new_superblock(&plan, &placed, &devices);
    for member in volume.storage.members() {
        let mut item = item.clone();
        item.dev_item = member.item;
        item.dev_item.bytes_used = plan.bytes_of_member(member.id.0).into();
        superblocks::stage(volume, member, &item, None)?;
    }
    Ok(placed)
}

/// Writes the superblocks of the saved state to staged devices.
fn stage_saved(volume: &CheckedVolume<'_>, saved: &SavedState) -> Result<()> {
    let parse = |bytes: &[u8]| Superblock::parse(bytes, SUPERBLOCK_OFFSETS[0]).ok();
    let all = saved.superblocks.values().filter_map(|bytes| parse(bytes));
    let newest = match &saved.found {
        Some(found) => parse(found),
        None => all.max_by_key(|superblock| superblock.generation),
    };
    let newest = newest.ok_or_else(|| stale("none of the saved superblocks verifies"))?;
    for member in volume.storage.members() {
        let Some(bytes) = saved.superblocks.get(&member.id.0) else {
            return Err(stale(&format!("there is no saved superblock of {}", member.name())));
        };
        let mut item = newest.item.clone();
        // One superblock was found for all members, and their bytes may be anything.
        let own = if saved.found.is_some() { None } else { parse(bytes) };
        item.dev_item = own.map_or(member.item, |own| own.item.dev_item);
        let primary = Some(&bytes[..]).filter(|_| saved.found.is_none());
        superblocks::stage(volume, member, &item, primary)?;
    }
    Ok(())
}

/// Refuses to undo a repair when the volume was written since.
fn require_unwritten(superblock: &Superblock, saved: &SavedState) -> Result<()> {
    if superblock.generation != saved.generation {
        return Err(stale(&format!(
            "transaction {} was the repair, and transaction {} is the newest one",
            saved.generation, superblock.generation
        )));
    }
    if superblock.has_pending_log() {
        return Err(stale("an fsync wrote to the volume since the repair"));
    }
    Ok(())
}

fn stale(why: &str) -> Error {
    Error::posix(Errno::STALE, format!("the repair cannot be undone: {why}; nothing was written"))
}

/// Refuses volumes that a repair does not write.
fn require_repairable(volume: &CheckedVolume<'_>, chunks: &[Chunk]) -> Result<()> {
    let refuse = |code, what: String| Err(Error::unsupported(code, format!("repairing {what}")));
    let superblock = volume.superblock();
    if superblock.incompat.has(Incompat::ZONED) {
        return refuse(Code::ZonedWrite, "a zoned volume".into());
    }
    let unknown = superblock.compat_ro.without(KEPT).names();
    if !unknown.is_empty() {
        return refuse(
            Code::FeatureNotKept,
            format!("a volume with the feature {}", unknown.join(", ")),
        );
    }
    let flags = superblock.item.flags.get();
    if flags & SUPER_FLAG_SEEDING != 0 || volume.storage.members().iter().any(|one| one.is_seed) {
        return refuse(Code::Seed, "a seed, or a volume that grew from one".into());
    }
    if superblock.is_metadata_only() {
        return refuse(Code::MetadataDump, "a volume that holds metadata only".into());
    }
    if superblock.has_pending_log() {
        let what = "a volume with a pending log: mount it to replay the log, or throw the log \
                    away with offshoot rescue zero-log";
        return refuse(Code::LogNotReplayed, what.into());
    }
    if volume.tree(TreeId::TREE_RELOC).is_some() {
        let what = "a volume with an unfinished balance: mount it with skip_balance and cancel \
                    the balance";
        return refuse(Code::UnfinishedBalance, what.into());
    }
    for member in volume.storage.members() {
        if member.device.is_none() {
            return refuse(Code::MemberMissing, format!("a volume without {}", member.name()));
        }
        if member.is_stale() {
            let what = format!("a volume while {} missed commits: scrub it first", member.name());
            return refuse(Code::MemberBehind, what);
        }
    }
    if chunks.is_empty() {
        return Err(Error::corrupt(offshoot_vfs::Structure::ChunkTree, "it has no chunk"));
    }
    Ok(())
}

/// Refuses when a tree has a block that cannot be used and that other structures follow from: what
/// is below it would count as free. That is given up for the trees in `given_up`.
fn require_whole(
    volume: &CheckedVolume<'_>,
    reached: &ReachedVolume<'_, '_>,
    replaced: &BTreeSet<TreeId>,
    given_up: &BTreeSet<TreeId>,
) -> Result<()> {
    const MADE_ANEW: [TreeId; 4] =
        [TreeId::EXTENT, TreeId::BLOCK_GROUP, TreeId::FREE_SPACE, TreeId::DEV];
    let is_source = |tree: &TreeId| !(MADE_ANEW.contains(tree) && replaced.contains(tree));
    let damaged = reached.damaged().iter().copied().filter(is_source).collect();
    cut::require_chosen(volume, &damaged, given_up)
}
