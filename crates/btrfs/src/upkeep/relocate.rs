//! Emptying block groups.
//!
//! ```text
//!   drain     no thread takes space in the group any more
//!   empty     commit after commit moves what is in it (`transaction/relocate`)
//!   remove    the empty group, and its chunk, leave all trees
//! ```
//!
//! Each commit moves a bounded number of extents, at its end, while no other thread has a handle.
//! So callers wait for one such step at most, and read meanwhile. When anything fails before the
//! step has changed something, the space for the new places is given back, and the volume is as it
//! was. A group that was not emptied is used again.

use std::ops::Range;
use std::sync::Arc;

use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::{Code, Errno, Error, Result, Structure};
use tracing::debug;

use super::Keeper;
use super::chunks::{bitmap_leaves, try_grow};
use super::resize::alone;
use crate::data::{copy_extents, store_moved_sums};
use crate::events::RELOCATE;
use crate::inode::Rooms;
use crate::space::{BlockGroup, Claim, KeptGroups, Purpose, Reservation};
use crate::storage::malformed;
use crate::subvolume::drop::drop_deleted;
use crate::transaction::{
    CommitCause, PlannedRelocation, Relocation, RelocationLimits, TransactionHandle,
};
use crate::tree::Cursor;

/// The most blocks that a step writes, where there is room for so many.
const MOST_BLOCKS: u64 = 2048;

/// The least room with which a step begins.
const LEAST_STEP: RelocationLimits = RelocationLimits { blocks: 16, data_bytes: 0 };

/// The most bytes of data that a step moves.
const MOST_DATA: u64 = 64 << 20;

/// How often an emptied group may still be in use by threads under way.
const MOST_WAITS: u32 = 100;

/// How often the same extent may be the first one that moves.
const MOST_REPEATS: u32 = 3;

/// The outcome of a step.
enum RelocationStep {
    /// No extent is left.
    Empty,
    /// Some were moved, with so many bytes of data. The first one was at this address.
    Moved(u64, Logical),
    /// The next extent takes more room than the step had.
    NeedsRoom(RelocationLimits),
    /// The next extent of data finds no room in one piece.
    NoPlace,
    /// Blocks of deleted subvolumes must be dropped first.
    Deleted,
}

/// The room that a step has, until it is dropped.
struct StepRoom<'v> {
    limits: RelocationLimits,
    _metadata: Reservation<'v>,
    _data: Option<Reservation<'v>>,
}

/// Moves extents out of block groups.
pub(super) struct Relocator<'k, 'v> {
    pub(super) volume: &'v Rooms,
    pub(super) keeper: &'k Keeper,
    /// Whether chunks may be allocated for what moves.
    pub(super) may_grow: bool,
    _kept: KeptGroups<'v>,
}

/// As [`Engine::relocate`](crate::Engine::relocate).
pub(crate) fn relocate(volume: &Rooms, keeper: &Keeper, start: Logical) -> Result<()> {
    let _alone = alone(volume)?;
    let space = &volume.live()?.space;
    let missing = || Error::posix(Errno::NOENT, format!("a block group at {start}"));
    let group = space.group_of(start).ok().filter(|group| group.start == start);
    let group = group.ok_or_else(missing)?;
    Relocator::new(volume, keeper)?.relocate(&group)?;
    volume.sync()
}

impl<'k, 'v> Relocator<'k, 'v> {
    /// Prepares to relocate in `volume`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the volume has what cannot be moved. Only blocks of deleted
    /// subvolumes were dropped then.
    pub(super) fn new(volume: &'v Rooms, keeper: &'k Keeper) -> Result<Self> {
        drop_deleted(volume, &keeper.subvolumes)?;
        volume.sync()?;
        require_movable(volume)?;
        let kept = volume.live()?.space.keep_empty_groups();
        Ok(Self { volume, keeper, may_grow: true, _kept: kept })
    }

    /// Empties `group` and removes it. Space is taken from other groups and new chunks.
    ///
    /// # Errors
    /// `ENOSPC` when there is no other room; errors of reading what moves. The group is used again
    /// then.
    pub(super) fn relocate(&self, group: &Arc<BlockGroup>) -> Result<()> {
        debug!(target: RELOCATE, group = group.start.0, used = group.used_bytes(), "emptying");
        let outcome = self.drain(group).and_then(|()| {
            self.empty(group, &(group.start.0..group.end()), group.used_bytes())?;
            self.remove(group)
        });
        if outcome.is_err() && !group.is_retired() {
            self.volume.live()?.space.undrain(group);
        }
        outcome
    }

    /// Keeps all threads from taking space in `group`.
    fn drain(&self, group: &Arc<BlockGroup>) -> Result<()> {
        let (volume, space) = (self.volume, &self.volume.live()?.space);
        {
            let _handle = volume.enter()?;
            space.load(&volume.base, group)?;
        }
        let purpose = space.purpose_of(group);
        loop {
            let keep = match purpose {
                Purpose::Metadata => {
                    space.commit_cost() + space.cost(space.chunk_items()) + group.used_bytes()
                }
                Purpose::Data | Purpose::System => group.used_bytes(),
            };
            let is_last = space.is_last_to_take(purpose, group);
            if !is_last && space.drain(group, keep) {
                return Ok(());
            }
            if !self.make_room(purpose)? {
                return Err(no_room(purpose));
            }
        }
    }

    /// Loads or allocates one more group. Returns whether there was one.
    fn make_room(&self, purpose: Purpose) -> Result<bool> {
        let (volume, space) = (self.volume, &self.volume.live()?.space);
        let is_loaded = {
            let _handle = volume.enter()?;
            space.load_one(&volume.base, purpose)?
        };
        Ok(is_loaded || self.grow(purpose)?)
    }

    /// Allocates a chunk, if that is allowed and there is a place. Returns whether it did.
    fn grow(&self, purpose: Purpose) -> Result<bool> {
        Ok(self.may_grow && try_grow(self.volume, purpose, || true)?)
    }

    /// Moves all extents in `range` of `group`, where no space is taken any more. They have `bytes`
    /// bytes.
    pub(super) fn empty(
        &self,
        group: &Arc<BlockGroup>,
        range: &Range<u64>,
        bytes: u64,
    ) -> Result<()> {
        // Blocks of the running transaction may be in the group. They do not move.
        self.volume.sync()?;
        let mut left = if group.flags.has_data() { bytes } else { 0 };
        let (mut least, mut waits) = (LEAST_STEP, 0);
        let (mut first, mut repeats) = (Logical(0), 0);
        loop {
            let room = self.room(least, left)?;
            match self.step(range, &room)? {
                RelocationStep::Moved(bytes, at) => {
                    (left, least) = (left.saturating_sub(bytes), LEAST_STEP);
                    repeats = if at == first { repeats + 1 } else { 0 };
                    first = at;
                    if repeats >= MOST_REPEATS {
                        let problem = "it stays where it is, however often it is moved";
                        return Err(Error::corrupt_at(Structure::ExtentTree, at.0, problem));
                    }
                }
                RelocationStep::NeedsRoom(needed) => {
                    least.blocks = least.blocks.max(needed.blocks);
                    least.data_bytes = least.data_bytes.max(needed.data_bytes);
                }
                RelocationStep::NoPlace => {
                    drop(room);
                    if !self.grow(Purpose::Data)? {
                        return Err(no_room(Purpose::Data));
                    }
                }
                RelocationStep::Deleted => {
                    drop(room);
                    drop_deleted(self.volume, &self.keeper.subvolumes)?;
                }
                RelocationStep::Empty => {
                    drop(room);
                    // What was moved is pinned until a commit is complete. Threads under way may
                    // have taken space before the group was drained.
                    self.volume.sync()?;
                    if !group.is_in_use() || *range != (group.start.0..group.end()) {
                        return Ok(());
                    }
                    waits += 1;
                    if waits > MOST_WAITS {
                        let what = format!("the block group at {}", group.start);
                        return Err(Error::posix(Errno::BUSY, what));
                    }
                    std::thread::yield_now();
                }
            }
        }
    }

    /// Reserves room for a step: for `least`, and for more where there is room. `left` bytes of
    /// data are to be moved.
    fn room(&self, least: RelocationLimits, left: u64) -> Result<StepRoom<'v>> {
        let space = &self.volume.live()?.space;
        let data_bytes = left.min(MOST_DATA).max(least.data_bytes);
        let data = match data_bytes {
            0 => None,
            _ if self.may_grow => Some(self.volume.reserve_data(data_bytes)?),
            _ => Some(space.try_reserve_data(data_bytes).ok_or_else(|| no_room(Purpose::Data))?),
        };
        let mut blocks = MOST_BLOCKS.max(least.blocks);
        loop {
            let bytes = space.cost_of_moving(blocks);
            if let Some(metadata) = space.try_reserve_for(Claim::LastResort, bytes) {
                let limits = RelocationLimits { blocks, data_bytes };
                return Ok(StepRoom { limits, _metadata: metadata, _data: data });
            }
            if blocks > least.blocks {
                blocks = (blocks / 2).max(least.blocks);
            } else if !self.make_room(Purpose::Metadata)? {
                return Err(no_room(Purpose::Metadata));
            }
        }
    }

    /// Moves the first extents in `range`, at the end of a commit.
    fn step(&self, range: &Range<u64>, room: &StepRoom<'v>) -> Result<RelocationStep> {
        let mut outcome = Ok(RelocationStep::Empty);
        let last = |handle: &TransactionHandle<'v>| {
            if self.keeper.subvolumes.has_deleted() {
                outcome = Ok(RelocationStep::Deleted);
                return Ok(());
            }
            let planned = match Relocation::plan(handle, range, room.limits) {
                Ok(PlannedRelocation::Moves(moves)) => moves,
                Ok(PlannedRelocation::Empty) => return Ok(()),
                Ok(PlannedRelocation::NeedsRoom(needed)) => {
                    outcome = Ok(RelocationStep::NeedsRoom(needed));
                    return Ok(());
                }
                Err(error) => {
                    outcome = Err(error);
                    return Ok(());
                }
            };
            outcome = move_all(handle, planned)?;
            Ok(())
        };
        self.keeper.commit_with(self.volume, CommitCause::Space, Box::new(last))?;
        outcome
    }

    /// Removes `group`, which is empty.
    pub(super) fn remove(&self, group: &Arc<BlockGroup>) -> Result<()> {
        let (volume, space) = (self.volume, &self.volume.live()?.space);
        let items = space.chunk_items() + bitmap_leaves(volume, group);
        let handle = volume.join_for(items, Claim::LastResort)?;
        let _chunks = space.chunk_lock.lock();
        if group.is_retired() {
            // A commit has removed it.
            return Ok(());
        }
        if !handle.has_system_space()? {
            return Err(no_room(Purpose::System));
        }
        if !space.retire(group, 0) {
            return Err(Error::posix(Errno::BUSY, format!("the block group at {}", group.start)));
        }
        debug!(target: RELOCATE, group = group.start.0, "removed");
        handle.remove_group(group)
    }
}

/// Moves what was planned. The outer error is one after which the volume is half changed; it ends
/// all writing.
fn move_all(
    handle: &TransactionHandle<'_>,
    mut moves: Relocation<'_, '_>,
) -> Result<Result<RelocationStep>> {
    if let Err(error) = moves.place() {
        let is_no_space = error.errno() == Errno::NOSPC;
        return Ok(if is_no_space { Ok(RelocationStep::NoPlace) } else { Err(error) });
    }
    let data = moves.data_moves();
    let first = moves.first();
    let copied = moves.write_blocks().and_then(|()| copy_extents(handle.volume(), &data));
    let sums = match copied {
        Ok(sums) => sums,
        Err(error) => {
            moves.give_up()?;
            return Ok(Err(error));
        }
    };
    debug!(target: RELOCATE, extents = moves.extents(), blocks = moves.cost(), "moving");
    store_moved_sums(handle, &sums)?;
    moves.apply()?;
    Ok(Ok(RelocationStep::Moved(data.iter().map(|one| one.len).sum(), first)))
}

fn no_room(purpose: Purpose) -> Error {
    Error::posix(Errno::NOSPC, format!("other room for {purpose}"))
}

/// Refuses a volume with what cannot be moved.
fn require_movable(volume: &Rooms) -> Result<()> {
    let refuse = |what: &str| {
        Err(Error::unsupported(Code::Relocation, format!("relocating in a volume with {what}")))
    };
    if volume.members().iter().any(|member| member.device.is_none()) {
        // When it is back, a copy on it could be taken for a block that moved to the place of that:
        // both are of one generation.
        return refuse("a member that is missing");
    }
    let root = volume.tree(TreeId::ROOT)?;
    let cache = Key::new(objectid::FREE_SPACE, ItemType(0), 0);
    if Cursor::seek(volume, root, cache)?.item_of(objectid::FREE_SPACE, ItemType(0)).is_some() {
        return refuse(
            "a free space cache of version 1 (remove it with `btrfs check --clear-space-cache v1`)",
        );
    }
    let mut cursor = Cursor::seek(volume, root, Key::MIN)?;
    while let Some((key, data)) = cursor.item() {
        if key.item_type == ItemType::ROOT_ITEM {
            let item = RootItem::parse(data).map_err(malformed)?;
            if item.refs.get() == 0 && item.drop_progress.get() != Key::new(0, ItemType(0), 0) {
                return refuse("a subvolume that could not be dropped");
            }
        }
        cursor.advance()?;
    }
    let Ok(relocated) = volume.tree(TreeId::DATA_RELOC) else { return Ok(()) };
    let mut cursor = Cursor::seek(volume, relocated, Key::MIN)?;
    while let Some((key, data)) = cursor.item() {
        if key.item_type == ItemType::EXTENT_DATA {
            let extent = FileExtent::parse(data).map_err(malformed)?;
            if matches!(extent.body, FileExtentBody::Extent { .. }) {
                return refuse("an unfinished relocation (mount it once with the kernel)");
            }
        }
        cursor.advance()?;
    }
    Ok(())
}
